"""Sample replies turn by turn: rows join when they are ready, and keep their keys and values between turns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers.cache_utils import DynamicCache

from rlox_grpo.model.blank import find_device
from rlox_grpo.rollout.engines.calls import Limits
from rlox_grpo.rollout.engines.hf.decoding import prefill, select_last_logits, takes
from rlox_grpo.rollout.engines.hf.kv_cache import PrefilledPrompts, RowCache, gather_columns
from rlox_grpo.rollout.engines.hf.live_rows import NonFiniteLogitsError
from rlox_grpo.rollout.engines.sampling import draw_row_uniforms, sample_tokens
from rlox_grpo.rollout.engines.stop_strings import StopStrings
from rlox_grpo.rollout.engines.turns import SampledTurn, TurnRequest
from rlox_grpo.types import Int64Array, Sampling

# Padded tokens of one prefill forward: bounds its activations.
_PREFILL_TOKENS = 16384
# Waiting replies start together, once they are this share of the live replies or have waited this many steps: a
# prefill for each single reply would delay all live ones.
_START_FRACTION, _START_STEPS = 1 / 8, 4

Episode = tuple[int, int]
Branch = tuple[int, int, int]


@dataclass(frozen=True, eq=False)
class _Kept:
    """Keys and values of an episode between its turns, ``[heads, n, head_dim]`` for each layer, of tokens ``ids``."""

    ids: Int64Array
    keys: list[Tensor]
    values: list[Tensor]


@dataclass(eq=False)
class _Row:
    """An unfinished reply."""

    request: TurnRequest
    uniforms: NDArray[np.float64]
    stop: tuple[str, ...]
    ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    stopped: bool = False
    dropped: bool = False

    @property
    def is_done(self) -> bool:
        return self.dropped or self.stopped or len(self.ids) == self.request.max_new_tokens

    def sequence(self) -> Int64Array:
        """The tokens of the conversation and of the reply so far."""
        return np.concatenate([self.request.token_ids, np.array(self.ids, dtype=np.int64)])


class TurnDecoder:
    """Samples the replies of many episodes together; see :class:`rlox_grpo.rollout.engines.turns.TurnSession`.

    With a key-value cache, the keys and values of a reply are kept when it ends, and the next turn runs only the later
    tokens through the model. Without a cache, the model runs the whole sequence again for each token.

    Attributes:
        prefilled_tokens: Tokens in prefills so far, without padding.
    """

    def __init__(
        self,
        model: nn.Module,
        sampling: Sampling,
        seed: int,
        limits: Limits,
        *,
        end_ids: Sequence[int],
        make_stop_strings: Callable[[tuple[str, ...]], StopStrings],
        vocab_limit: int | None,
        max_rows: int,
        autocast: Callable[[], AbstractContextManager[Any]],
        window: float | None,
    ) -> None:
        """Begin without requests; ``window``: tokens that every layer attends to, None to decode without a cache."""
        self.prefilled_tokens = 0
        self._model, self._sampling, self._seed = model, sampling, seed
        self._limits, self._end_ids, self._vocab_limit = limits, frozenset(end_ids), vocab_limit
        self._make_stop_strings, self._stops = make_stop_strings, dict[tuple[str, ...], StopStrings]()
        self._max_rows, self._device, self._autocast = max_rows, find_device(model), autocast
        self._window = window
        self._cache = None if window is None else RowCache(max_rows, self._device)
        self._waiting: list[TurnRequest] = []
        self._waited = 0
        self._rows: list[_Row] = []  # row r of the cache
        self._kept: dict[Branch, _Kept] = {}

    def __len__(self) -> int:
        """Number of unfinished replies, waiting ones included."""
        return len(self._waiting) + len(self._rows)

    def submit(self, request: TurnRequest) -> None:
        """Add a request. Raises ValueError where it does not fit the model."""
        self._limits.check_turn(request)
        self._waiting.append(request)

    def drop(self, request: TurnRequest) -> None:
        """Stop an unfinished reply; do nothing if it has finished."""
        self._waiting = [waiting for waiting in self._waiting if waiting is not request]
        for row in self._rows:
            row.dropped = row.dropped or row.request is request

    def forget(self, episode: Episode) -> None:
        """Free the keys and values of an episode that has ended, and drop its unfinished replies."""
        for key in [key for key in self._kept if key[:2] == episode]:
            del self._kept[key]
        self._waiting = [request for request in self._waiting if request.episode != episode]
        for row in self._rows:
            row.dropped = row.dropped or row.request.episode == episode

    def step(self) -> list[tuple[TurnRequest, SampledTurn]]:
        """Start waiting replies, or sample a token for every live reply; return the replies that have finished.

        Raises:
            NonFiniteLogitsError: the model's logits are not finite; names the prompt and the token.
        """
        with torch.no_grad(), self._autocast():
            free = self._max_rows - len(self._rows)
            enough = len(self._waiting) >= len(self._rows) * _START_FRACTION or self._waited >= _START_STEPS
            if self._waiting and free and enough:
                self._start(free)
            elif self._rows:
                self._waited += bool(self._waiting)
                self._draw(self._decode(), 0)
        return self._retire()

    def _start(self, free: int) -> None:
        """Prefill one batch of waiting replies and draw their first tokens."""
        self._waited = 0
        first = len(self._rows)
        # A prefill either continues kept keys and values or starts without; the oldest waiting reply decides which.
        kept = [self._find_kept(request) for request in self._waiting[:free]]
        continues = kept[0] is not None
        batch = self._choose([request for request, old in zip(self._waiting, kept, strict=False)
                              if (old is not None) == continues])  # fmt: skip
        chosen = {id(request) for request in batch}
        self._waiting = [request for request in self._waiting if id(request) not in chosen]
        for request in batch:
            stop = (*self._sampling.stop, *request.stop)
            if stop and stop not in self._stops:
                self._stops[stop] = self._make_stop_strings(stop)
            prompt, completion = request.episode
            uniforms = draw_row_uniforms(self._seed, prompt, completion, request.max_new_tokens, request.draw)
            self._rows.append(_Row(request, uniforms, stop))
        if self._cache is None:
            self.prefilled_tokens += sum(len(request.token_ids) for request in batch)
            logits = self._run_whole(self._rows[first:])
        elif continues:
            olds = [old for request in batch if (old := self._find_kept(request)) is not None]
            # The row has its own copy from here on, and is stored again when the reply ends.
            for request in batch:
                self._kept.pop(request.key, None)
                if request.replaces is not None:
                    self._kept.pop((*request.episode, request.replaces), None)
            logits = self._add(self._continue(batch, olds), np.arange(len(batch)))
        else:
            distinct: dict[bytes, int] = {}
            which = [distinct.setdefault(request.token_ids.tobytes(), len(distinct)) for request in batch]
            prompts = [batch[which.index(place)].token_ids for place in range(len(distinct))]
            self.prefilled_tokens += sum(map(len, prompts))
            logits = self._add(prefill(self._model, prompts, self._device), np.array(which))
        self._draw(logits, first)

    def _choose(self, requests: list[TurnRequest]) -> list[TurnRequest]:
        """Return the first requests whose padded prefill has at most ``_PREFILL_TOKENS`` tokens, at least one."""
        longest = 0
        for count, request in enumerate(requests):
            longest = max(longest, len(request.token_ids))
            if count and longest * (count + 1) > _PREFILL_TOKENS:
                return requests[:count]
        return requests

    def _find_kept(self, request: TurnRequest) -> _Kept | None:
        kept = self._kept.get(request.key)
        if kept is None and request.replaces is not None:
            kept = _cut(self._kept.get((*request.episode, request.replaces)), request.token_ids)
        if kept is None or not np.array_equal(request.token_ids[: len(kept.ids)], kept.ids):
            return None
        # New tokens are padded: distances between columns then differ from distances between tokens, which a sliding
        # window needs.
        assert self._window is not None
        return kept if len(request.token_ids) + request.max_new_tokens <= self._window else None

    def _add(self, prefilled: PrefilledPrompts, which: Int64Array) -> Tensor:
        assert self._cache is not None
        self._cache.add_rows(prefilled, which)
        return prefilled.logits[torch.from_numpy(which).to(self._device)]

    def _continue(self, batch: Sequence[TurnRequest], olds: Sequence[_Kept]) -> PrefilledPrompts:
        """Run the tokens after those whose keys and values are kept.

        Example: rows with 3 and 2 kept tokens get 1 and 2 new tokens. Both parts are padded on the left, and
        ``columns`` joins the two parts of each row::

            kept  new           columns   result
            a a a | _ A         0 1 2 4   a a a A
            _ b b | B B         1 2 3 4   b b B B
        """
        past = np.array([len(old.ids) for old in olds])
        news = [request.token_ids[count:] for request, count in zip(batch, past, strict=True)]
        added = np.array([len(new) for new in news])
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
        place = np.arange(behind) - (behind - added)[:, None]
        mask = np.concatenate([np.arange(before) >= (before - past)[:, None], place >= 0], axis=1)
        options: dict[str, Any] = {"logits_to_keep": 1} if takes(self._model, "logits_to_keep") else {}
        output = self._model(
            input_ids=torch.from_numpy(input_ids).to(self._device),
            position_ids=torch.from_numpy(np.maximum(place, 0) + past[:, None]).to(self._device),
            attention_mask=torch.from_numpy(mask).to(self._device),
            past_key_values=cache,
            use_cache=True,
            **options,
        )
        lengths = past + added
        columns = np.zeros((rows, int(lengths.max())), dtype=np.int64)
        for row in range(rows):
            columns[row, columns.shape[1] - lengths[row] :] = mask[row].nonzero()[0]
        index = torch.from_numpy(columns).to(self._device)
        layers: list[Any] = cache.layers
        return PrefilledPrompts(
            keys=[gather_columns(layer.keys, index) for layer in layers],
            values=[gather_columns(layer.values, index) for layer in layers],
            logits=output.logits[:, -1].clone(),
            lengths=lengths,
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
            return self._run_whole(self._rows)
        self._cache.make_room()
        newest = torch.tensor([[row.ids[-1]] for row in self._rows], device=self._device)
        output = self._model(input_ids=newest, use_cache=True, **self._cache.model_options())
        self._cache.advance()
        logits: Tensor = output.logits[:, -1]
        return logits

    def _run_whole(self, rows: Sequence[_Row]) -> Tensor:
        """Logits of the next token of ``rows``, from their whole sequences, in batches of equal length."""
        sequences = [row.sequence() for row in rows]
        found: list[Tensor | None] = [None] * len(rows)
        for length in sorted(set(map(len, sequences))):
            places = [place for place, sequence in enumerate(sequences) if len(sequence) == length]
            output = self._model(torch.from_numpy(np.stack([sequences[place] for place in places])).to(self._device))
            for place, line in zip(places, select_last_logits(output), strict=True):
                found[place] = line
        return torch.stack([line for line in found if line is not None])

    def _draw(self, logits: Tensor, first: int) -> None:
        rows = self._rows[first:]
        uniforms = torch.tensor([row.uniforms[len(row.ids)] for row in rows], dtype=torch.float64, device=self._device)
        token_ids, log_probs = sample_tokens(logits[:, : self._vocab_limit], uniforms, self._sampling)
        ended = self._find_stop_candidates(token_ids, rows)
        for row, token, log_prob in zip(rows, token_ids.tolist(), log_probs.tolist(), strict=True):
            if log_prob != log_prob:  # NaN
                raise NonFiniteLogitsError(
                    f"the model's logits are not finite at prompts[{row.request.episode[0]}], turn {row.request.turn}, "
                    f"token {len(row.ids)}: its weights or activations have overflowed; "
                    "lower learning_rate or max_grad_norm"
                )
            row.ids.append(token)
            row.log_probs.append(log_prob)
            row.stopped = row.stopped or token in self._end_ids
            if row.request.on_tokens is not None and not row.dropped:
                row.request.on_tokens([token])
        for row in ended:
            tail = np.array(row.ids, dtype=np.int64)
            row.stopped = row.stopped or self._stops[row.stop].ended([tail])[0]

    def _find_stop_candidates(self, token_ids: Tensor, rows: Sequence[_Row]) -> list[_Row]:
        """Rows whose new token may complete a stop string."""
        tables = {stop: self._stops[stop].candidates(token_ids).cpu() for stop in {row.stop for row in rows} if stop}
        return [row for place, row in enumerate(rows) if row.stop and bool(tables[row.stop][place])]

    def _retire(self) -> list[tuple[TurnRequest, SampledTurn]]:
        """Remove the rows that are done, keep their keys and values, and move the last rows into the gaps."""
        done = np.array([row.is_done for row in self._rows], dtype=bool)
        if not done.any():
            return []
        finished = []
        for place in done.nonzero()[0]:
            row = self._rows[place]
            if row.dropped:
                continue
            if self._cache is not None:
                # The model has not run the newest token yet: the next turn starts with it.
                self._kept[row.request.key] = _Kept(row.sequence()[:-1], *self._cache.read_row(int(place)))
            turn = SampledTurn(
                np.array(row.ids, dtype=np.int64), np.array(row.log_probs, dtype=np.float32), row.stopped
            )
            finished.append((row.request, turn))
        remaining = len(done) - int(done.sum())
        to = done[:remaining].nonzero()[0]
        source = remaining + (~done[remaining:]).nonzero()[0]
        for there, here in zip(to, source, strict=True):
            self._rows[there] = self._rows[here]
        del self._rows[remaining:]
        if self._cache is not None:
            self._cache.move_rows(to, source, remaining)
        return finished


def _cut(kept: _Kept | None, token_ids: Int64Array) -> _Kept | None:
    """Cut ``kept`` to its common prefix with ``token_ids`` without their last token; None if nothing remains."""
    if kept is None:
        return None
    shorter = min(len(kept.ids), len(token_ids) - 1)
    differs = np.flatnonzero(kept.ids[:shorter] != token_ids[:shorter])
    same = int(differs[0]) if len(differs) else shorter
    if not same:
        return None
    return _Kept(kept.ids[:same], [one[:, :same] for one in kept.keys], [one[:, :same] for one in kept.values])
