"""State of the rows being sampled: their tokens, log-probs and which are finished."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Generic, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rlox_grpo.rollout.engines.stop_strings import StopStrings
from rlox_grpo.types import Completion, FinishReason, Int16Array, Int32Array, Int64Array, Sampling, SamplingMask

BoolArray = NDArray[np.bool_]
Key = TypeVar("Key")


class NonFiniteLogitsError(FloatingPointError):
    """A logit is NaN or +inf, or every logit is -inf."""


@dataclass(frozen=True)
class RowId:
    """A completion, by the index of its prompt in the call and its own index in the group."""

    prompt: int
    completion: int


@dataclass(frozen=True, eq=False)
class Row:
    """What a row needs to be sampled.

    Attributes:
        name: how errors name the tokens of the row, such as ``prompts[3], completion token``.
        uniforms: ``float64 [T]``; number t decides token t, so the row has at most T tokens.
        stop: strings that end the completion.
    """

    name: str
    uniforms: NDArray[np.float64]
    stop: tuple[str, ...]


class LiveRows(Generic[Key]):
    """The rows being decoded: row r of every tensor is live row r, without gaps.

    :meth:`retire` returns the moves that close the gaps of finished rows; the key-value cache repeats them. Each step
    is a few tensor operations over all rows, and one transfer of a small array to the host.

    Example: of rows A B C D, B finishes. D moves to the index of B: ``to`` is [1] and ``source`` is [3]; A D C are
    live.

    Attributes:
        max_rows: number of rows that it can hold.
        keys: the live rows' keys.
        sampling: the sampling parameters.
        vocab_limit: number of the ids that may be sampled, from 0; None: all.
        dropped: keys of live rows that leave at the next :meth:`retire` without a result.
        finished: completions by key, without their texts.
    """

    def __init__(
        self,
        max_rows: int,
        sampling: Sampling,
        describe: Callable[[Key], Row],
        *,
        end_ids: Tensor,
        make_stop_strings: Callable[[tuple[str, ...]], StopStrings],
        vocab_limit: int | None,
        excluded_ids: Sequence[int] = (),
    ) -> None:
        """Begin without rows; rows of more than ``sampling.max_new_tokens`` tokens enlarge the tensors."""
        self.sampling, self.vocab_limit = sampling, vocab_limit
        self._excluded = torch.tensor(excluded_ids, dtype=torch.long, device=end_ids.device)
        self._describe, self._end_ids = describe, end_ids
        self._make_stop_strings, self._stop_strings = make_stop_strings, dict[tuple[str, ...], StopStrings]()
        self.max_rows, self.device = max_rows, end_ids.device
        shape = (max_rows, sampling.max_new_tokens)
        # [max_rows, T] each: column t of a row is its token t, the log-prob of that token, and the number that decides
        # it.
        self._token_ids = torch.zeros(shape, dtype=torch.long, device=self.device)
        self._log_probs = torch.zeros(shape, dtype=torch.float32, device=self.device)
        self._uniforms = torch.zeros(shape, dtype=torch.float64, device=self.device)
        # int64 [max_rows]: the number of tokens so far, and its maximum.
        self._lengths = torch.zeros(max_rows, dtype=torch.long, device=self.device)
        self._most = torch.zeros(max_rows, dtype=torch.long, device=self.device)
        self._rows: list[Row] = []
        # For each live row, the ids from which its tokens were drawn, int32 [size] for each token; on the host.
        self._drawn_from: list[list[Int32Array]] = []
        # For each live row, the experts of its prompt and then of each token that has run, int16 [tokens, layers, k].
        self._experts: list[list[Int16Array]] = []
        self._stops: list[tuple[str, ...]] = []  # of the live rows, each once
        # These are on the host, because the loop of the decoder branches on them.
        self._stopped: BoolArray = np.zeros(max_rows, dtype=bool)
        self._full: BoolArray = np.zeros(max_rows, dtype=bool)
        self.keys: list[Key] = []
        self.dropped: set[Key] = set()
        self.finished: dict[Key, Completion] = {}

    def __len__(self) -> int:
        return len(self.keys)

    def add(self, keys: list[Key]) -> int:
        """Append live rows without tokens, for :meth:`append` to add to. Return the index of the first row."""
        first, new = len(self), [self._describe(key) for key in keys]
        lengths = [len(row.uniforms) for row in new]
        if (missing := max(lengths) - self._uniforms.shape[1]) > 0:
            self._token_ids, self._log_probs, self._uniforms = (
                torch.nn.functional.pad(tensor, (0, missing))
                for tensor in (self._token_ids, self._log_probs, self._uniforms)
            )
        # Padding is never used, because a row ends at its own number of uniforms.
        uniforms = np.zeros((len(new), max(lengths)))
        for index, row in enumerate(new):
            uniforms[index, : lengths[index]] = row.uniforms
        rows = slice(first, first + len(new))
        self._uniforms[rows, : max(lengths)] = torch.from_numpy(uniforms).to(self.device)
        self._most[rows] = torch.tensor(lengths, device=self.device)
        self._lengths[rows] = 0
        self.keys += keys
        self._rows += new
        self._drawn_from += [[] for _ in new]
        self._experts += [[] for _ in new]
        self._find_stops()
        return first

    def next_uniforms(self, first: int = 0) -> Tensor:
        """Return the numbers that decide the next token of the rows from ``first`` on, ``float64 [rows]`` in [0, 1)."""
        rows = slice(first, len(self))
        return self._uniforms[rows].gather(1, self._lengths[rows, None]).squeeze(1)

    def append(
        self, token_ids: Tensor, log_probs: Tensor, mask: SamplingMask[Tensor] | None = None, *, first: int = 0
    ) -> None:
        """Append the next token of the live rows from ``first`` on, and find the rows that have finished.

        Args:
            token_ids, log_probs: ``int64 [rows]`` and ``float32 [rows]``, as sampled.
            mask: the ids from which they were drawn, or None.
            first: index of the first of these rows; the others are all rows after it.

        Raises:
            NonFiniteLogitsError: a log-prob is NaN; the message names the row and the token.
        """
        rows = slice(first, len(self))
        step = self._lengths[rows, None]  # [rows, 1]
        self._token_ids[rows].scatter_(1, step, token_ids[:, None])
        self._log_probs[rows].scatter_(1, step, log_probs[:, None])
        self._lengths[rows] += 1
        # bool [rows] each, stacked so that the step has one transfer to the host.
        flags = [torch.isin(token_ids, self._end_ids), self._lengths[rows] == self._most[rows], log_probs.isnan()]
        flags += [self._stop_strings[stop].candidates(token_ids) for stop in self._stops]
        stopped, full, invalid, *candidates = torch.stack(flags).cpu().numpy()
        if invalid.any():
            row = first + int(invalid.argmax())
            raise NonFiniteLogitsError(
                f"the model's logits are not finite at {self._rows[row].name} {int(self._lengths[row]) - 1}: "
                "its weights or activations have overflowed; lower learning_rate or max_grad_norm"
            )
        if mask is not None:
            ids, ends = mask.token_ids.cpu().numpy(), mask.sizes.cumsum(0).cpu().tolist()
            for row, (start, stop) in enumerate(pairwise([0, *ends]), first):
                self._drawn_from[row].append(ids[start:stop])
        # Stop strings are searched in the text of a row. The last token excludes most rows, so that only a few are
        # decoded.
        for stop, may_end in zip(self._stops, candidates, strict=True):
            ending = [index for index in may_end.nonzero()[0] if self._rows[first + index].stop == stop]
            if ending:
                tails = self.read_tokens(first + np.array(ending))
                stopped[ending] |= self._stop_strings[stop].ended(tails)
        self._stopped[rows], self._full[rows] = stopped, full

    def note_experts(self, experts: Sequence[Int16Array], *, first: int = 0) -> None:
        """Append the experts of the tokens that have just run, ``[tokens, layers, k]``, of live rows ``first`` on."""
        for row, chosen in enumerate(experts, first):
            self._experts[row].append(chosen)

    def limit(self, logits: Tensor) -> Tensor:
        """Return the logits ``[rows, V]`` of the ids that may be sampled; those of excluded ids are −inf."""
        logits = logits[:, : self.vocab_limit]
        return logits.index_fill(1, self._excluded, -torch.inf) if len(self._excluded) else logits

    def last_tokens(self) -> Tensor:
        """Return the newest token of each live row, ``int64 [rows, 1]``."""
        return self._token_ids[: len(self)].gather(1, self._lengths[: len(self), None] - 1)

    def read_tokens(self, rows: Int64Array) -> list[Int64Array]:
        """Return the sampled tokens of some live rows."""
        index = torch.from_numpy(rows).to(self.device)
        lengths, token_ids = self._lengths[index].cpu().numpy(), self._token_ids[index].cpu().numpy()
        return [line[:length] for line, length in zip(token_ids, lengths, strict=True)]

    def list_finished(self) -> Int64Array:
        """Return the indices of the rows that have finished and were not dropped."""
        ended = self._stopped[: len(self)] | self._full[: len(self)]
        return (ended & ~self._mark_dropped()).nonzero()[0]

    def retire(self) -> tuple[Int64Array, Int64Array] | None:
        """Move finished rows to ``finished``, and the last live rows to the indices that become free.

        Returns:
            ``to`` and ``source``: row ``source[i]`` now has the index ``to[i]``. None if no row leaves.
        """
        done = self._stopped[: len(self)] | self._full[: len(self)] | self._mark_dropped()
        if not done.any():
            return None
        self._harvest(self.list_finished())
        self.dropped.clear()
        # The gaps among the first `remaining` rows are as many as the live rows after them.
        remaining = len(self) - int(done.sum())
        to = done[:remaining].nonzero()[0]
        source = remaining + (~done[remaining:]).nonzero()[0]
        device_to, device_source = torch.from_numpy(to).to(self.device), torch.from_numpy(source).to(self.device)
        for tensor in (self._token_ids, self._log_probs, self._uniforms, self._lengths, self._most):
            tensor[device_to] = tensor[device_source]
        for row, from_row in zip(to, source, strict=True):
            self.keys[row], self._rows[row] = self.keys[from_row], self._rows[from_row]
            self._drawn_from[row], self._experts[row] = self._drawn_from[from_row], self._experts[from_row]
        del self.keys[remaining:], self._rows[remaining:], self._drawn_from[remaining:], self._experts[remaining:]
        self._find_stops()
        # The remaining rows have neither stopped nor reached their maximum length.
        self._stopped[:remaining] = self._full[:remaining] = False
        return to, source

    def _find_stops(self) -> None:
        """Store the stop strings of the live rows. This is called when rows come or go, not at every token."""
        self._stops = [stop for stop in dict.fromkeys(row.stop for row in self._rows) if stop]
        for stop in self._stops:
            if stop not in self._stop_strings:
                self._stop_strings[stop] = self._make_stop_strings(stop)

    def _mark_dropped(self) -> BoolArray:
        if not self.dropped:  # the usual case, at every step
            return np.zeros(len(self), dtype=bool)
        return np.array([key in self.dropped for key in self.keys], dtype=bool)

    def _harvest(self, rows: Int64Array) -> None:
        if not len(rows):
            return
        index = torch.from_numpy(rows).to(self.device)
        lengths = self._lengths[index].cpu().numpy()
        longest = int(lengths.max())
        token_ids = self._token_ids[index, :longest].cpu().numpy()
        log_probs = self._log_probs[index, :longest].cpu().numpy()
        for line, (row, length) in enumerate(zip(rows, lengths, strict=True)):
            reason: FinishReason = "stop" if self._stopped[row] else "length"
            self.finished[self.keys[row]] = Completion(
                token_ids[line, :length].copy(),
                log_probs[line, :length].copy(),
                reason,
                sampling_mask=_join_ids(self._drawn_from[row]),
                experts=_join_experts(self._experts[row]),
            )


def _join_ids(drawn_from: list[Int32Array]) -> SamplingMask[Int32Array] | None:
    """The sampling mask of a row, from the ids of each token; None if none were listed."""
    if not drawn_from:
        return None
    return SamplingMask(np.array([len(ids) for ids in drawn_from], np.int32), np.concatenate(drawn_from))


def _join_experts(experts: list[Int16Array]) -> Int16Array | None:
    """The experts of a row's tokens, ``[P + T, layers, k]``, −1 for the last token; None if none were noted."""
    if not experts:
        return None
    return np.concatenate([*experts, np.full_like(experts[0][:1], -1)])
