"""Canary prompt: compare log-probs of a few fixed tokens between engine and trainer after each transfer of weights.

An engine that silently ignores new weights keeps sampling from an old policy. Names, shapes and digests prove only what
was sent. Only the engine's log-probs show which weights it uses.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np

from rlox_grpo.errors import EngineError
from rlox_grpo.types import Float32Array, Picture, UInt8Array

LENGTH = 17
"""Tokens of the canary prompt. The first one has no log-prob."""

TOLERANCES: Mapping[str, float] = MappingProxyType({"float32": 0.01, "bfloat16": 0.25})
"""Largest mean difference of the log-probs, in nats, by the coarser arithmetic of trainer and engine. For any other
arithmetic, the tolerance is that of bfloat16."""

CANARY_GAP = "mismatch/canary_gap_max"
"""Metric: the largest mean difference of all engines."""

STALE_SHARE = 0.1
"""An engine whose log-probs stay bit-identical is stale if the trainer's log-probs have changed by more than this
share of the tolerance."""


@dataclass(frozen=True, eq=False)
class Canary:
    """A fixed prompt with the trainer's log-probs under the weights that are transferred.

    Attributes:
        token_ids: the T token ids of the prompt.
        log_probs: ``float32`` of all tokens but the first, or with pictures of the tokens after them, at temperature 1
            over every id of the output layer.
        dtype: the dtype in which the trainer computes.
        tolerance: tolerance set by the user, in nats; None: the value of :data:`TOLERANCES`.
    """

    token_ids: Sequence[int]
    log_probs: Float32Array
    dtype: str
    tolerance: float | None = None
    pictures: tuple[Picture, ...] = ()
    """At the beginning of ``token_ids``; without one, an engine with an old vision tower would not be noticed."""


def choose_tokens(vocabulary: int, max_length: int | None = None, excluded: Collection[int] = ()) -> list[int]:
    """Return the canary prompt: :data:`LENGTH` ids evenly spread over ``vocabulary``, the same in every run.

    With a small ``max_length`` (tokens of a prompt and its completion in the engine) there are fewer ids. A prompt of
    one token has no log-prob to compare. The ids ``excluded`` are not among them.
    """
    count = LENGTH if max_length is None else min(LENGTH, max_length - 1)
    left_out = sorted(set(excluded).intersection(range(vocabulary)))
    chosen = [(2 * index + 1) * (vocabulary - len(left_out)) // (2 * count) for index in range(count)]
    for token in left_out:
        chosen = [index + (index >= token) for index in chosen]
    return chosen


def draw_canary() -> UInt8Array:
    """Return the picture of the canary prompt, ``uint8 [64, 64, 3]``: a grid of colours, the same in every run."""
    side = np.arange(64)
    red, green = np.meshgrid(side * 4, side // 8 * 32, indexing="ij")
    blue = (red + 3 * green) % 256
    return np.stack([red, green, blue], axis=-1).astype(np.uint8)


class CanaryCheck:
    """Compares the answers of one engine, transfer by transfer.

    Attributes:
        gap: Mean absolute difference of the last answer in nats; None before the first answer.
    """

    def __init__(self) -> None:
        self.gap: float | None = None
        self._answer: Float32Array | None = None
        self._first_expected: Float32Array | None = None  # the trainer's, when the engine first gave ``_answer``

    def compare(self, canary: Canary, answer: Sequence[float], version: int, *, source: str, dtype: str) -> None:
        """Compare the engine's log-probs after the transfer of ``version``.

        Args:
            canary: the prompt and the trainer's log-probs.
            answer: the engine's log-probs, ``[T − 1]``.
            version: version of the transferred weights.
            source: the engine's name, for the error.
            dtype: the dtype in which the engine computes.

        Raises:
            EngineError: the log-probs differ by more than the tolerance, are not finite, or have not changed although
                the trainer's have.
        """
        answered = np.asarray(answer, np.float32)
        begin = f"{source}, weights of version {version}: "
        if answered.shape != canary.log_probs.shape or not np.isfinite(answered).all():
            raise EngineError(f"{begin}log-probs of {len(canary.log_probs)} fixed tokens are {answered.tolist()[:4]}…")
        tolerance = find_tolerance(canary.dtype, dtype) if canary.tolerance is None else canary.tolerance
        gaps = np.abs(answered.astype(np.float64) - canary.log_probs)
        self.gap = float(gaps.mean()) if len(gaps) else 0.0
        if self.gap > tolerance:
            raise EngineError(
                f"{begin}its log-probs of {len(gaps)} fixed tokens differ from the trainer's by {self.gap:.3g} nats on "
                f"average, {gaps.max():.3g} at most (check_weights_tolerance {tolerance:g} for {canary.dtype} in the "
                f"trainer and {dtype} in the engine): it does not compute with the weights that it was given, or in "
                f"much coarser arithmetic. {_ADVICE}"
            )
        if self._answer is None or self._first_expected is None or not np.array_equal(answered, self._answer):
            self._answer, self._first_expected = answered, canary.log_probs
            return
        moves = np.abs(canary.log_probs - self._first_expected)
        moved = float(moves.mean()) if len(moves) else 0.0
        if moved > STALE_SHARE * tolerance:
            raise EngineError(
                f"{begin}its log-probs of {len(gaps)} fixed tokens are the same to the bit as those of an earlier "
                f"version, and the trainer's have changed by {moved:.3g} nats on average since: the engine did not "
                f"take the new weights. {_ADVICE}"
            )


_ADVICE = "Set the same dtype on both sides; if the difference is expected, raise check_weights_tolerance"


def find_tolerance(*dtypes: str) -> float:
    """Return the tolerance of the coarsest of ``dtypes``, in nats."""
    return max(TOLERANCES.get(dtype, TOLERANCES["bfloat16"]) for dtype in dtypes)
