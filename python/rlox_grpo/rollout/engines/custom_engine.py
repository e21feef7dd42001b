"""Check what a custom engine returns. Engines of this library are not checked, because tests cover them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from rlox_grpo.config.records.option import is_custom
from rlox_grpo.errors import EngineError
from rlox_grpo.groups import flag_sampled, list_rows
from rlox_grpo.rollout.engines.turns import SampledTurn, TurnRequest
from rlox_grpo.types import Completion, RolloutGroup, SamplingMask

TurnCheck: TypeAlias = Callable[[Any, TurnRequest, SampledTurn], None]
"""``check(engine, request, turn)`` raises EngineError for a reply that cannot be trained on."""

ROUNDING = 1e-3
"""How far a log-prob may lie above 0: the rounding of an engine that computes in half precision."""


def check_groups(engine: Any, groups: Sequence[RolloutGroup], max_new_tokens: int, vocabulary: int | None) -> None:
    """Check groups of single replies.

    Args:
        engine: the engine that returned the groups.
        groups: one group of the right size for each prompt.
        max_new_tokens: maximum number of tokens of a completion.
        vocabulary: number of token ids; None: unknown, so that ids are only checked to be at least 0.

    Raises:
        EngineError: ids, log-probs, masks, finish reasons or policy versions that cannot be trained on. The message
            names the engine, the prompt, the completion, the token and its value.
    """
    name = f"engine {type(engine).__name__}"
    descriptions: list[str] = []
    rows: list[tuple[NDArray[Any], NDArray[Any]]] = []
    for group in groups:
        prompt_name = group.prompt.name
        if group.policy_version != engine.policy_version:
            raise EngineError(
                f"{name}: the group of {prompt_name} has policy_version {group.policy_version}, and the engine has "
                f"{engine.policy_version}: return RolloutGroup(prompt, completions, self.policy_version)"
            )
        for number, completion in enumerate(group.completions):
            where = f"{name}, completion {number} of {prompt_name}"
            _check_form(where, completion, max_new_tokens)
            _check_mask(where, completion)
            descriptions.append(where)
            rows.append((completion.token_ids, completion.log_probs))
    _check_tokens(descriptions, rows, vocabulary)


def choose_turn_check(engine: Any, vocabulary: int | None) -> TurnCheck | None:
    """Return the check of each reply of an episode if ``engine``, the option, is a custom engine; otherwise None.

    ``vocabulary`` is the number of token ids; None: unknown.
    """
    return partial(_check_turn, vocabulary) if is_custom(engine) else None


def _check_turn(vocabulary: int | None, engine: Any, request: TurnRequest, turn: SampledTurn) -> None:
    """Check one reply of an episode, as :func:`check_groups` checks completions.

    Raises:
        EngineError: see :func:`check_groups`; ``request.episode`` says of which prompt and completion the reply is.
    """
    prompt, number = request.episode
    name = f"engine {type(engine).__name__}"
    where = f"{name}, turn {request.turn} of completion {number} of prompt {prompt} of the step"
    if not isinstance(turn, SampledTurn):
        raise EngineError(f"{where} is {type(turn).__name__}, expected a SampledTurn")
    _check_arrays(where, turn.token_ids, turn.log_probs, request.max_new_tokens)
    _check_mask(where, turn)
    _check_tokens([where], [(turn.token_ids, turn.log_probs)], vocabulary)


def refuse_missing_masks(engine: Any, groups: Sequence[RolloutGroup]) -> None:
    """Raise EngineError if a row with sampled tokens has no sampling mask, from an engine that was asked for them."""
    for group in groups:
        for number, completion in enumerate(group.completions):
            if any(row.sampling_mask is None and flag_sampled(row).any() for row in list_rows(completion)):
                raise EngineError(
                    f"engine {type(engine).__name__}, completion {number} of {group.prompt.name}: sampling_mask is "
                    "None, and the engine has returns_sampling_mask = True: return a SamplingMask where "
                    "sampling.return_sampling_mask is True"
                )


def refuse_missing_experts(engine: Any, groups: Sequence[RolloutGroup]) -> None:
    """Raise EngineError if a completion has no experts, from an engine that was asked for them."""
    for group in groups:
        for number, completion in enumerate(group.completions):
            where = f"engine {type(engine).__name__}, completion {number} of {group.prompt.name}: experts"
            experts, tokens = completion.experts, len(group.prompt.token_ids) + len(completion.token_ids)
            if not isinstance(experts, np.ndarray) or experts.dtype != np.int16 or experts.ndim != 3:
                raise EngineError(
                    f"{where} is {type(experts).__name__}, and the engine has returns_experts = True: return int16 "
                    "[P + T, layers, k] where sampling.return_experts is True"
                )
            if len(experts) != tokens:
                raise EngineError(f"{where} has {len(experts)} tokens, expected {tokens}, prompt and completion")


def check_version(engine: Any, version: int) -> None:
    """Raise EngineError unless the engine's version is that of the weights that it has just loaded."""
    if engine.policy_version != version:
        raise EngineError(
            f"engine {type(engine).__name__} has policy_version {engine.policy_version} after "
            f"load_weights(…, version={version}): set self.policy_version = version there"
        )


def _check_form(where: str, completion: Any, max_new_tokens: int) -> None:
    if not isinstance(completion, Completion):
        raise EngineError(f"{where} is {type(completion).__name__}, expected a Completion")
    _check_arrays(where, completion.token_ids, completion.log_probs, max_new_tokens)
    if completion.finish_reason not in ("stop", "length"):
        raise EngineError(f"{where}: finish_reason is {completion.finish_reason!r}, expected 'stop' or 'length'")
    if completion.sampled is not None:
        _check_array(f"{where}: sampled", completion.sampled, "bool", len(completion.token_ids))


def _check_arrays(where: str, token_ids: Any, log_probs: Any, max_new_tokens: int) -> None:
    _check_array(f"{where}: token_ids", token_ids, "int64", None)
    _check_array(f"{where}: log_probs", log_probs, "float32", len(token_ids))
    if len(token_ids) > max_new_tokens:
        raise EngineError(f"{where} has {len(token_ids)} tokens, above max_new_tokens={max_new_tokens}")


def _check_mask(where: str, reply: Completion | SampledTurn) -> None:
    """Check the arrays of a sampling mask, if there is one.

    Whether the mask contains the sampled ids is checked later.
    """
    if (mask := reply.sampling_mask) is None:
        return
    if not isinstance(mask, SamplingMask):
        raise EngineError(f"{where}: sampling_mask is {type(mask).__name__}, expected a SamplingMask")
    _check_array(f"{where}: sampling_mask.sizes", mask.sizes, "int32", len(reply.token_ids))
    if (mask.sizes < 0).any():
        raise EngineError(f"{where}: sampling_mask.sizes has {mask.sizes.min()}, expected numbers of at least 0")
    _check_array(f"{where}: sampling_mask.token_ids", mask.token_ids, "int32", int(mask.sizes.sum(dtype=np.int64)))


def _check_array(what: str, array: Any, dtype: str, length: int | None) -> None:
    """Check an array ``[T]``; ``length`` is T, or None for any length."""
    is_array = isinstance(array, np.ndarray)
    if is_array and array.dtype == dtype and array.ndim == 1 and length in (None, len(array)):
        return
    got = f"an array of dtype {array.dtype} and shape {array.shape}" if is_array else type(array).__name__
    shape = "with a number for each token" if length is None else f"of shape ({length},)"
    raise EngineError(f"{what} is {got}, expected an array of dtype {dtype} {shape}")


def _check_tokens(
    descriptions: Sequence[str], rows: Sequence[tuple[NDArray[Any], NDArray[Any]]], vocabulary: int | None
) -> None:
    """Check all ids and log-probs at once. The completion and the token at fault are looked up only for an error.

    Args:
        descriptions: names of the rows, for errors.
        rows: ``token_ids [T_i]`` and ``log_probs [T_i]``.
        vocabulary: see :func:`check_groups`.
    """
    if not rows:
        return
    ids = np.concatenate([row[0] for row in rows])  # int64 [all tokens]
    log_probs = np.concatenate([row[1] for row in rows])  # float32 [all tokens]
    bound = np.iinfo(np.int64).max if vocabulary is None else vocabulary - 1
    expected = "an id of at least 0" if vocabulary is None else f"an id from 0 to {bound}"
    for what, values, right, wanted in (
        ("token", ids, (ids >= 0) & (ids <= bound), expected),
        # NaN fails this comparison too.
        (
            "the log-prob of token",
            log_probs,
            (log_probs <= ROUNDING) & np.isfinite(log_probs),
            "a finite number of at most 0",
        ),
    ):
        if not right.all():
            at = int(right.argmin())
            starts = np.cumsum([0, *(len(ids) for ids, _ in rows)])
            row = int(np.searchsorted(starts, at, side="right")) - 1
            raise EngineError(f"{descriptions[row]}: {what} {at - starts[row]} is {values[at]}, expected {wanted}")
