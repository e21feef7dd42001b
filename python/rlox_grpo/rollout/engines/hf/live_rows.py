"""State of the rows being sampled: their tokens, log-probs and which are finished."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rlox_grpo.rollout.engines.sampling import draw_row_uniforms, sample_tokens
from rlox_grpo.rollout.engines.stop_strings import StopStrings
from rlox_grpo.types import Completion, FinishReason, Int64Array, Sampling

BoolArray = NDArray[np.bool_]


class NonFiniteLogitsError(FloatingPointError):
    """A logit is NaN or +inf, or every logit is -inf."""


@dataclass(frozen=True)
class RowId:
    """A row by its prompt's position in the call and its place in the group."""

    prompt: int
    completion: int


class LiveRows:
    """The rows being decoded: row r of every tensor is live row r, without gaps.

    :meth:`retire` returns the moves that close the gaps of finished rows; the key-value cache repeats them. Each step
    is a few tensor operations over all rows, and one transfer of a small array to the host.

    Example: of rows A B C D, B finishes. D moves to its place: ``to`` is [1] and ``source`` is [3]; A D C are live.
    """

    def __init__(
        self,
        max_rows: int,
        sampling: Sampling,
        seed: int,
        *,
        end_ids: Tensor,
        stop_strings: StopStrings | None,
        vocab_limit: int | None,
        device: torch.device,
        first_prompt: int = 0,
    ) -> None:
        self._sampling = sampling
        self._seed = seed
        self._first_prompt = first_prompt
        self._end_ids = end_ids
        self._stop_strings = stop_strings
        self._vocab_limit = vocab_limit
        shape = (max_rows, sampling.max_new_tokens)
        self._token_ids = torch.zeros(shape, dtype=torch.long, device=device)
        self._log_probs = torch.zeros(shape, dtype=torch.float32, device=device)
        self._uniforms = torch.zeros(shape, dtype=torch.float64, device=device)
        self._lengths = torch.zeros(max_rows, dtype=torch.long, device=device)
        self._ids: list[RowId] = []
        self._stopped: BoolArray = np.zeros(max_rows, dtype=bool)
        self._full: BoolArray = np.zeros(max_rows, dtype=bool)
        self.finished: dict[RowId, Completion] = {}

    def __len__(self) -> int:
        return len(self._ids)

    @property
    def device(self) -> torch.device:
        """Where tokens are drawn."""
        return self._token_ids.device

    def add(self, ids: list[RowId], logits: Tensor) -> None:
        """Append live rows and draw their first tokens from ``logits [len(ids), V]``."""
        first, length = len(self), self._sampling.max_new_tokens
        rows = slice(first, first + len(ids))
        uniforms = np.stack(
            [draw_row_uniforms(self._seed, self._first_prompt + id.prompt, id.completion, length) for id in ids]
        )
        self._uniforms[rows] = torch.from_numpy(uniforms).to(self.device)
        self._lengths[rows] = 0
        self._ids += ids
        self.draw(logits, first)

    def draw(self, logits: Tensor, first: int = 0) -> None:
        """Draw the next token of live rows ``first`` on from ``logits [rows, V]``.

        Raises:
            NonFiniteLogitsError: Names the prompt and the completion token.
        """
        rows = slice(first, len(self))
        step = self._lengths[rows, None]  # [rows, 1]
        uniforms = self._uniforms[rows].gather(1, step).squeeze(1)
        token_ids, log_probs = sample_tokens(logits[:, : self._vocab_limit], uniforms, self._sampling)
        self._token_ids[rows].scatter_(1, step, token_ids[:, None])
        self._log_probs[rows].scatter_(1, step, log_probs[:, None])
        self._lengths[rows] += 1
        flags = [
            torch.isin(token_ids, self._end_ids),
            self._lengths[rows] == self._sampling.max_new_tokens,
            log_probs.isnan(),
        ]
        if self._stop_strings is not None:
            flags.append(self._stop_strings.candidates(token_ids))
        stopped, full, invalid, *candidates = torch.stack(flags).cpu().numpy()
        if invalid.any():
            self._refuse(first + int(invalid.argmax()))
        if self._stop_strings is not None:
            stopped |= self._spelled(first, candidates[0])
        self._stopped[rows], self._full[rows] = stopped, full

    def last_tokens(self) -> Tensor:
        """Newest token of each live row, ``int64 [rows, 1]``."""
        return self._token_ids[: len(self)].gather(1, self._lengths[: len(self), None] - 1)

    def retire(self) -> tuple[Int64Array, Int64Array] | None:
        """Move finished rows to ``finished`` and the last live rows into their places.

        Returns:
            ``to`` and ``source``: row ``source[i]`` now stands at ``to[i]``. None when no row finished.
        """
        live = len(self)
        done = self._stopped[:live] | self._full[:live]
        if not done.any():
            return None
        self._harvest(done.nonzero()[0])
        remaining = live - int(done.sum())
        to = done[:remaining].nonzero()[0]
        source = remaining + (~done[remaining:]).nonzero()[0]
        device_to, device_source = torch.from_numpy(to).to(self.device), torch.from_numpy(source).to(self.device)
        for tensor in (self._token_ids, self._log_probs, self._uniforms, self._lengths):
            tensor[device_to] = tensor[device_source]
        for row, from_row in zip(to, source, strict=True):
            self._ids[row] = self._ids[from_row]
        del self._ids[remaining:]
        # The remaining rows have neither stopped nor reached their maximum length.
        self._stopped[:remaining] = self._full[:remaining] = False
        return to, source

    def _harvest(self, rows: Int64Array) -> None:
        index = torch.from_numpy(rows).to(self.device)
        lengths = self._lengths[index].cpu().numpy()
        longest = int(lengths.max())
        token_ids = self._token_ids[index, :longest].cpu().numpy()
        log_probs = self._log_probs[index, :longest].cpu().numpy()
        for line, (row, length) in enumerate(zip(rows, lengths, strict=True)):
            reason: FinishReason = "stop" if self._stopped[row] else "length"
            self.finished[self._ids[row]] = Completion(
                token_ids[line, :length].copy(), log_probs[line, :length].copy(), reason
            )

    def _spelled(self, first: int, candidates: BoolArray) -> BoolArray:
        spelled = np.zeros(len(candidates), dtype=bool)
        rows = candidates.nonzero()[0]
        if self._stop_strings is not None and len(rows):
            index = torch.from_numpy(first + rows).to(self.device)
            lengths, token_ids = self._lengths[index].cpu().numpy(), self._token_ids[index].cpu().numpy()
            spelled[rows] = self._stop_strings.ended(
                [line[:length] for line, length in zip(token_ids, lengths, strict=True)]
            )
        return spelled

    def _refuse(self, row: int) -> None:
        step = int(self._lengths[row]) - 1
        raise NonFiniteLogitsError(
            f"the model's logits are not finite at prompts[{self._ids[row].prompt}], completion token {step}: "
            "its weights or activations have overflowed; lower learning_rate or max_grad_norm"
        )
