"""Sample replies turn by turn: rows join when they are ready, and keep their keys and values between turns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers.cache_utils import DynamicCache

from rlox_grpo.model.vision import Vision
from rlox_grpo.rollout.engines.calls import Limits
from rlox_grpo.rollout.engines.hf.cache_argument import run_with_cache, takes
from rlox_grpo.rollout.engines.hf.decoding import PREFILL_TOKENS, prefill, select_last_logits
from rlox_grpo.rollout.engines.hf.kv_cache import PrefilledPrompts, RowCache, gather_columns
from rlox_grpo.rollout.engines.hf.live_rows import LiveRows
from rlox_grpo.rollout.engines.sampling import sample_tokens
from rlox_grpo.rollout.engines.turns import SampledTurn, TurnRequest, read_turn
from rlox_grpo.types import Int64Array

# Waiting replies start together, once they are this share of the live replies or have waited this many steps. A
# prefill for each single reply would delay all live replies.
_START_FRACTION, _START_STEPS = 1 / 8, 4


@dataclass(frozen=True, eq=False)
class _TurnCache:
    """Keys and values of an episode's tokens ``ids`` between its turns, ``[heads, n, head_dim]`` for each layer.

    ``digests`` are those of the pictures among the tokens, and ``delta`` is the position of the next token minus n.
    """

    ids: Int64Array
    keys: list[Tensor]
    values: list[Tensor]
    digests: tuple[str, ...] = ()
    delta: int = 0


class TurnDecoder:
    """Samples the replies of many episodes together; see :class:`rlox_grpo.rollout.engines.turns.TurnSession`.

    With a key-value cache, the keys and values of a reply are stored when it ends, and the next turn runs only the
    later tokens through the model, unless these have a new picture: then the whole conversation runs again. Without a
    cache, the model runs the whole sequence again for each token.

    Attributes:
        prefilled_tokens: Tokens in prefills so far, without padding.
    """

    def __init__(
        self,
        model: nn.Module,
        rows: LiveRows[TurnRequest],
        limits: Limits,
        *,
        autocast: Callable[[], AbstractContextManager[Any]],
        window: float | None,
        vision: Vision | None = None,
    ) -> None:
        """Begin without requests.

        Args:
            model: the policy's model, in evaluation mode.
            rows: the state of the rows, without any row yet.
            limits: the limits of each request.
            autocast: makes the context of a forward.
            window: tokens that every layer attends to; None: decode without a cache.
            vision: what pictures need; None: requests with pictures are refused.
        """
        self.prefilled_tokens = 0
        self._model, self._rows, self._limits, self._autocast, self._window = model, rows, limits, autocast, window
        self._vision = vision
        self._cache = None if window is None else RowCache(rows.max_rows, rows.device)
        self._waiting: list[TurnRequest] = []
        self._waited = 0
        self._caches: dict[tuple[int, int, int], _TurnCache] = {}

    def __len__(self) -> int:
        """Number of unfinished replies, including waiting ones."""
        return len(self._waiting) + len(self._rows)

    def submit(self, request: TurnRequest) -> None:
        """Add a request.

        Raises:
            ValueError: the request does not fit the model, or its ids of pictures are not those of its pictures.
        """
        self._limits.check_turn(request, takes_pictures=self._vision is not None)
        if self._vision is not None:
            self._vision.check_pictures(request.token_ids, request.pictures)
        self._waiting.append(request)

    def drop(self, request: TurnRequest) -> None:
        """Stop an unfinished reply; do nothing if it has finished."""
        self._waiting = [waiting for waiting in self._waiting if waiting is not request]
        self._rows.dropped.update(live for live in self._rows.keys if live is request)

    def forget(self, episode: tuple[int, int]) -> None:
        """Free the keys and values of an episode that has ended, and drop its unfinished replies."""
        for key in [key for key in self._caches if key[:2] == episode]:
            del self._caches[key]
        self._waiting = [request for request in self._waiting if request.episode != episode]
        self._rows.dropped.update(live for live in self._rows.keys if live.episode == episode)

    def step(self) -> list[tuple[TurnRequest, SampledTurn]]:
        """Start waiting replies, or sample a token for every live reply; return the replies that have finished.

        Raises:
            NonFiniteLogitsError: the model's logits are not finite; the message names the prompt and the token.
        """
        with torch.no_grad(), self._autocast():
            free = self._rows.max_rows - len(self._rows)
            enough = len(self._waiting) >= len(self._rows) * _START_FRACTION or self._waited >= _START_STEPS
            if self._waiting and free and enough:
                self._start(free)
            elif len(self._rows):
                self._waited += bool(self._waiting)
                self._sample(self._decode(), 0)
        return self._retire()

    def _start(self, free: int) -> None:
        """Prefill one batch of waiting replies and draw their first tokens."""
        self._waited = 0
        # A prefill either continues stored keys and values or starts without any. The oldest waiting reply decides
        # which.
        caches = {request: self._find_cache(request) for request in self._waiting[:free]}
        continues = caches[self._waiting[0]] is not None
        batch = self._choose([request for request, old in caches.items() if (old is not None) == continues])
        chosen = set(batch)
        self._waiting = [request for request in self._waiting if request not in chosen]
        if self._cache is None:
            self.prefilled_tokens += sum(len(request.token_ids) for request in batch)
            # Without a cache nothing is stored: each token runs the whole sequence.
            logits = self._run_whole([request.token_ids for request in batch])
        elif continues:
            olds = [old for request in batch if (old := caches[request]) is not None]
            # From here on the row has its own copy, which is stored again when the reply ends.
            for request in batch:
                self._caches.pop(request.key, None)
                if request.replaces is not None:
                    self._caches.pop((*request.episode, request.replaces), None)
            logits = self._add(self._continue(batch, olds), np.arange(len(batch)))
        else:
            # Requests with the same tokens and pictures, such as the first turns of a group, share one prefill.
            distinct: dict[tuple[bytes, tuple[str, ...]], int] = {}
            contexts = [(request.token_ids.tobytes(), request.digests) for request in batch]
            which = [distinct.setdefault(context, len(distinct)) for context in contexts]
            first = [batch[which.index(index)] for index in range(len(distinct))]
            prompts, pictures = [request.token_ids for request in first], [request.pictures for request in first]
            self.prefilled_tokens += sum(map(len, prompts))
            prefilled = prefill(self._model, prompts, self._rows.device, vision=self._vision, pictures=pictures)
            logits = self._add(prefilled, np.array(which))
        self._sample(logits, self._rows.add(batch))

    def _sample(self, logits: Tensor, first: int) -> None:
        """Sample the next token of live rows ``first`` on from ``logits [rows, V]``, and pass them on as they come."""
        rows = self._rows
        tokens = sample_tokens(rows.limit(logits), rows.next_uniforms(first), rows.sampling)
        rows.append(*tokens, first=first)
        self._tell(first)

    def _choose(self, requests: list[TurnRequest]) -> list[TurnRequest]:
        """Return the first requests whose padded prefill has at most ``PREFILL_TOKENS`` tokens, at least one."""
        longest = 0
        for count, request in enumerate(requests):
            longest = max(longest, len(request.token_ids))
            if count and longest * (count + 1) > PREFILL_TOKENS:
                return requests[:count]
        return requests

    def _find_cache(self, request: TurnRequest) -> _TurnCache | None:
        cache = self._caches.get(request.key)
        if cache is None and request.replaces is not None:
            cache = _cut(self._caches.get((*request.episode, request.replaces)), request)
        # Equal ids of other pictures have other keys and values, and a new picture needs a prefill of its own.
        if cache is None or cache.digests != request.digests:
            return None
        if not np.array_equal(request.token_ids[: len(cache.ids)], cache.ids):
            return None
        # New tokens are padded: distances between columns then differ from distances between tokens, which a sliding
        # window needs.
        assert self._window is not None
        return cache if len(request.token_ids) + request.max_new_tokens <= self._window else None

    def _add(self, prefilled: PrefilledPrompts, which: Int64Array) -> Tensor:
        assert self._cache is not None
        self._cache.add_rows(prefilled, which)
        return prefilled.logits[torch.from_numpy(which).to(self._rows.device)]

    def _continue(self, batch: Sequence[TurnRequest], olds: Sequence[_TurnCache]) -> PrefilledPrompts:
        """Run the tokens after those whose keys and values are stored.

        Example: rows with 3 and 2 kept tokens get 1 and 2 new tokens. Both parts are padded on the left, and
        ``columns`` joins the two parts of each row::

            kept  new           columns   result
            a a a | _ A         0 1 2 4   a a a A
            _ b b | B B         1 2 3 4   b b B B
        """
        # int64 [rows] each: the number of stored tokens, and of new tokens.
        past = np.array([len(old.ids) for old in olds])
        news = [request.token_ids[count:] for request, count in zip(batch, past, strict=True)]
        added = np.array([len(new) for new in news])
        deltas = np.array([old.delta for old in olds])
        self.prefilled_tokens += int(added.sum())
        before, behind = int(past.max()), int(added.max())
        cache, rows = DynamicCache(), len(batch)
        for layer in range(len(olds[0].keys)):
            cache.update(
                self._pad([old.keys[layer] for old in olds], before),
                self._pad([old.values[layer] for old in olds], before),
                layer,
            )
        input_ids = np.zeros((rows, behind), dtype=np.int64)
        for row, new in enumerate(news):
            input_ids[row, behind - len(new) :] = new
        # Index of each new token among the new tokens of its row, negative on padding; in the example -1 0 | 0 1. The
        # mask over both parts is 1 1 1 0 1 | 0 1 1 1 1.
        column = np.arange(behind) - (behind - added)[:, None]
        mask = np.concatenate([np.arange(before) >= (before - past)[:, None], column >= 0], axis=1)
        options: dict[str, Any] = {"logits_to_keep": 1} if takes(self._model, "logits_to_keep") else {}
        output = run_with_cache(
            self._model,
            cache=cache,
            input_ids=torch.from_numpy(input_ids).to(self._rows.device),
            position_ids=torch.from_numpy(np.maximum(column, 0) + (past + deltas)[:, None]).to(self._rows.device),
            attention_mask=torch.from_numpy(mask).to(self._rows.device),
            **options,
        )
        lengths = past + added
        # The columns under the mask are right-aligned, so that padding between the two parts of a row moves to the
        # front.
        columns = np.zeros((rows, int(lengths.max())), dtype=np.int64)
        for row in range(rows):
            columns[row, columns.shape[1] - lengths[row] :] = mask[row].nonzero()[0]
        index = torch.from_numpy(columns).to(self._rows.device)
        layers: list[Any] = cache.layers
        return PrefilledPrompts(
            keys=[gather_columns(layer.keys, index) for layer in layers],
            values=[gather_columns(layer.values, index) for layer in layers],
            logits=output.logits[:, -1].clone(),
            lengths=lengths,
            deltas=deltas,
        )

    def _pad(self, tensors: Sequence[Tensor], width: int) -> Tensor:
        """``[heads, n, head_dim]`` each, to ``[rows, heads, width, head_dim]``, padded on the left."""
        heads, _, size = tensors[0].shape
        padded = tensors[0].new_zeros(len(tensors), heads, width, size)
        for row, tensor in enumerate(tensors):
            padded[row, :, width - tensor.shape[1] :] = tensor
        return padded

    def _decode(self) -> Tensor:
        """Logits of the next token of every live row, ``[rows, V]``."""
        if self._cache is None:
            replies = self._rows.read_tokens(np.arange(len(self._rows)))
            pairs = zip(self._rows.keys, replies, strict=True)
            return self._run_whole([np.concatenate([request.token_ids, reply]) for request, reply in pairs])
        self._cache.make_room()
        newest = self._rows.last_tokens()
        output = run_with_cache(self._model, input_ids=newest, **self._cache.model_options())
        self._cache.advance()
        logits: Tensor = output.logits[:, -1]
        return logits

    def _run_whole(self, sequences: Sequence[Int64Array]) -> Tensor:
        """Logits of the token after each of ``sequences``, in batches of equal length."""
        logits: list[Tensor | None] = [None] * len(sequences)
        for length in sorted(set(map(len, sequences))):
            indices = [index for index, sequence in enumerate(sequences) if len(sequence) == length]
            # Rows of equal length need neither padding nor a mask, which a plain module may not support.
            batch = torch.from_numpy(np.stack([sequences[index] for index in indices])).to(self._rows.device)
            for index, line in zip(indices, select_last_logits(self._model(batch)), strict=True):
                logits[index] = line
        return torch.stack([line for line in logits if line is not None])

    def _tell(self, first: int) -> None:
        """Call ``on_tokens`` with the newest token, for each row from ``first`` on that has this callback."""
        watched = [row for row, request in enumerate(self._rows.keys) if row >= first and request.on_tokens]
        if not watched:
            return
        newest = self._rows.last_tokens()[:, 0].tolist()
        for row in watched:
            request = self._rows.keys[row]
            if request.on_tokens is not None and request not in self._rows.dropped:
                request.on_tokens([newest[row]])

    def _retire(self) -> list[tuple[TurnRequest, SampledTurn]]:
        """Remove the rows that are done, store their keys and values, and move the last rows into the gaps."""
        cache, ended = self._cache, self._rows.list_finished().tolist()
        read = (
            {}
            if cache is None
            else {self._rows.keys[row]: (*cache.read_row(row), cache.read_delta(row)) for row in ended}
        )
        moved = self._rows.retire()
        if cache is not None and moved is not None:
            cache.move_rows(*moved, remaining=len(self._rows))
        finished, self._rows.finished = self._rows.finished, {}
        turns = []
        for request, reply in finished.items():
            if cache is not None:
                # The model has not run the newest token yet, so the next turn starts with this token.
                keys, values, delta = read[request]
                ids = np.concatenate([request.token_ids, reply.token_ids[:-1]])
                self._caches[request.key] = _TurnCache(ids, keys, values, request.digests, delta)
            turns.append((request, read_turn(reply)))
        return turns


def _cut(cache: _TurnCache | None, request: TurnRequest) -> _TurnCache | None:
    """Cut ``cache`` to its common prefix with ``request.token_ids`` without their last token; None if nothing remains.

    With pictures it is None too: the prefix may end within a picture, or hold the equal ids of another one.
    """
    if cache is None or cache.digests or request.pictures:
        return None
    token_ids = request.token_ids
    shorter = min(len(cache.ids), len(token_ids) - 1)
    # Keys and values depend only on the tokens before them, so those of a common prefix are still valid.
    differs = np.flatnonzero(cache.ids[:shorter] != token_ids[:shorter])
    same = int(differs[0]) if len(differs) else shorter
    if not same:
        return None
    return _TurnCache(
        cache.ids[:same], [layer[:, :same] for layer in cache.keys], [layer[:, :same] for layer in cache.values]
    )
