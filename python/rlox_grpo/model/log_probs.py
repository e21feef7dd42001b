"""Log-probs of sampled tokens from hidden states, in tiles, without logits of shape ``[batch, time, vocab]``.

The forward pass saves one number per token, the log normaliser, and logits up to a fixed budget. The backward pass
computes the other logits again, tile by tile. The memory for logits therefore does not grow with the batch or the
vocabulary. Full logits are a known cause of running out of memory (trl#3678, open-r1#615). The softmax of a row over
several tiles is the online softmax (arXiv:1805.02867). On a CPU a tile stays in the cache: log-sum-exp costs 0.5 ns a
logit over tiles and 2.8 ns over whole rows of 32,768, and the forward pass takes a third of the time.

With a sampling mask, the columns of a tile are the ids from which any of its tokens was drawn (:mod:`.tile_columns`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rlox_grpo.model.tile_columns import EXCLUDED, Columns, exclude_ids, list_columns, slice_tokens, sort_by_size
from rlox_grpo.types import OutputHead, SamplingMask, TokenDistributions

CPU_TILE = (512, 4096)
"""Tokens and vocabulary rows of a tile on a CPU. Measured on two cores with 32,768 rows of 256: tiles from 512 x
1,024 to 512 x 8,192 are equally fast within 10 %, tiles of 128 tokens are 10 % slower, and whole rows are half as
fast."""

CPU_STORED_BYTES = 128 * 2**20
"""Bytes of logits that forward keeps for backward on a CPU. Computing logits again is a quarter of the output layer's
work: if all logits are stored, the layer takes 0.77 (hidden size 896) to 0.86 (256) of the time, on one thread."""

GPU_TILE_BYTES = (64 * 2**20, 2**30)
"""Minimum and maximum size of a tile's float32 logits on a GPU, in bytes; between these, 1/64 of the device's memory.
The size does not depend on free memory, so that the results do not depend on it either. Tiles hold whole rows, because
a kernel launch costs more than the memory traffic that smaller tiles save."""


def multiply_in_float32(hidden: Tensor, weight: Tensor, out: Tensor | None = None) -> Tensor:
    """Return ``hidden [M, H] @ weightᵀ [H, V]`` of operands of 16 bits in float32, without rounding to 16 bits.

    On a GPU the product's kernel writes its float32 sums. A CPU has no such kernel, and multiplies copies in float32.
    """
    if hidden.is_cuda:
        return torch.mm(hidden, weight.t(), out_dtype=torch.float32, out=out)
    return torch.mm(hidden.float(), weight.float().t(), out=out)


def tile_shape(vocabulary: int, device: torch.device) -> tuple[int, int]:
    """Return the numbers of tokens and vocabulary rows for which logits exist at a time on ``device``."""
    if device.type == "cpu":
        return CPU_TILE[0], min(CPU_TILE[1], vocabulary)
    least, most = GPU_TILE_BYTES
    total = torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else 64 * least
    return max(1, min(max(total // 64, least), most) // (4 * vocabulary)), vocabulary


def token_log_probs(
    hidden: Tensor,
    token_ids: Tensor,
    head: OutputHead,
    *,
    temperature: float = 1.0,
    with_entropy: bool = True,
    entropy_gradient: bool = False,
    tile: tuple[int, int] | None = None,
    stored_bytes: int | None = None,
    sampling_mask: SamplingMask[Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the log-probs of ``token_ids`` under softmax(logits / temperature), and the entropy of that distribution.

    Args:
        hidden: ``[M, H]`` final hidden states, each of the position before its token.
        token_ids: ``int64 [M]``.
        head: the output layer; its weight and bias get gradients if they require them.
        temperature: positive.
        with_entropy: whether to compute entropies; they are zeros otherwise.
        entropy_gradient: whether gradients flow through the entropies too, for an entropy bonus.
        tile: tokens and vocabulary rows for which logits exist at a time; by :func:`tile_shape` when None.
        stored_bytes: memory for logits of the first tokens, which the backward pass does not compute again; None:
            :data:`CPU_STORED_BYTES` on a CPU and 0 elsewhere.
        sampling_mask: the ids over which the distribution of each token is normalised, sizes ``int64 [M]``, with the
            token's own id; None: all ids.

    Returns:
        ``float32 [M]`` log-probs with gradient (float64 for float64 ``hidden``), and their distributions' entropies
        in nats, without gradient unless asked for.

    Raises:
        ValueError: shapes that do not fit, a temperature that is not positive, a tile below 1, a token id outside the
            head's rows, or a gradient of entropies that are left out.
    """
    if hidden.dim() != 2 or token_ids.shape != hidden.shape[:1] or hidden.shape[1] != head.weight.shape[1]:
        raise ValueError(
            f"hidden {tuple(hidden.shape)}, token_ids {tuple(token_ids.shape)} and head.weight "
            f"{tuple(head.weight.shape)}: expected [M, H], [M] and [V, H]"
        )
    if not temperature > 0:
        raise ValueError(f"temperature is {temperature}, expected above 0")
    if entropy_gradient and not with_entropy:
        raise ValueError("entropy_gradient is True and with_entropy is False: there is no entropy to differentiate")
    if tile is not None and min(tile) < 1:
        raise ValueError(f"tile is {tile}: expected at least one token and one row of the vocabulary")
    vocabulary = head.weight.shape[0]
    refuse_unknown_ids(token_ids, vocabulary)
    tile = tile_shape(vocabulary, hidden.device) if tile is None else tile
    stored_tokens = count_stored_tokens(hidden, head, stored_bytes)
    settings = TileSettings.from_head(
        head,
        temperature,
        tile,
        with_entropy=with_entropy,
        entropy_gradient=entropy_gradient,
        stored_tokens=stored_tokens,
    )
    order = None
    if sampling_mask is not None:
        order, sampling_mask = sort_by_size(sampling_mask)
        hidden, token_ids = hidden[order], token_ids[order]
    outputs: tuple[Tensor, Tensor] = _TiledLogProbs.apply(  # type: ignore[no-untyped-call]
        hidden, head.weight, head.bias, token_ids, settings, sampling_mask
    )
    if order is None:
        return outputs
    position = order.argsort()  # int64 [M], where each token was
    return outputs[0][position], outputs[1][position]


def refuse_unknown_ids(token_ids: Tensor, vocabulary: int) -> None:
    """Raise ValueError for an id outside the head's rows: it is in no tile, and its logit would stay 0."""
    if token_ids.numel():
        low, high = (int(bound) for bound in torch.aminmax(token_ids))
        if low < 0 or high >= vocabulary:
            raise ValueError(f"token_ids hold {low if low < 0 else high}, outside the head's {vocabulary} rows")


def count_stored_tokens(hidden: Tensor, head: OutputHead, stored_bytes: int | None) -> int:
    """Return the number of tokens whose logits ``[V]`` fit into ``stored_bytes``; 0 without a backward pass.

    Args:
        hidden: ``[M, H]``.
        head: the output layer.
        stored_bytes: None: :data:`CPU_STORED_BYTES` on a CPU and 0 elsewhere.
    """
    if not torch.is_grad_enabled() or not (hidden.requires_grad or head.weight.requires_grad):
        return 0
    if stored_bytes is None:
        stored_bytes = CPU_STORED_BYTES if hidden.device.type == "cpu" else 0
    return stored_bytes // (head.weight.shape[0] * (8 if hidden.dtype == torch.float64 else 4))


@torch.no_grad()
def score_norms(
    distributions: TokenDistributions,
    token_ids: Tensor,
    *,
    temperature: float = 1.0,
    tile: tuple[int, int] | None = None,
    sampling_mask: SamplingMask[Tensor] | None = None,
) -> Tensor:
    """Return 1 − 2 p[y] + Σ p² of p = softmax(logits / temperature) for each token y: ``float32 [M]``, 0 to 2.

    The value is the squared norm of the score, the gradient onehot(y) − p of log p[y] with respect to the logits.
    The norm approximates the squared norm of the token's gradient (OTB, arXiv:2602.07078).

    Args:
        distributions: distributions of M tokens; logits if there is no head.
        token_ids: ``int64 [M]``.
        temperature: positive.
        tile: tokens and vocabulary rows for which logits exist at a time; by :func:`tile_shape` when None.
        sampling_mask: see :func:`token_log_probs`.
    """
    hidden, head = distributions.hidden, distributions.head
    if head is None:
        probs = torch.softmax(exclude_ids(hidden.float(), sampling_mask) / temperature, dim=-1)
        return 1 - 2 * probs.gather(-1, token_ids[:, None]).squeeze(-1) + probs.square().sum(dim=-1)
    tile = tile_shape(head.weight.shape[0], hidden.device) if tile is None else tile
    settings = TileSettings.from_head(head, temperature, tile)
    order = None
    if sampling_mask is not None:
        order, sampling_mask = sort_by_size(sampling_mask)
        hidden, token_ids = hidden[order], token_ids[order]
    tiles = Tiles(hidden, head.weight, head.bias, settings, sampling_mask)
    norms = torch.empty(hidden.shape[0], dtype=torch.float32, device=hidden.device)
    for rows in tiles.token_slices():
        ids = token_ids[rows]
        top = torch.full((len(ids),), -torch.inf, dtype=torch.float64, device=hidden.device)  # largest logit so far
        mass, squares = torch.zeros_like(top), torch.zeros_like(top)  # Σ exp(logit − top), Σ exp(2 (logit − top))
        taken = torch.zeros_like(top)
        for columns in tiles.columns(rows):
            logits = tiles.logits(rows, columns).double()
            column, inside = columns.find(ids)
            taken = torch.where(inside, logits.gather(1, column).squeeze(1), taken)
            higher = torch.maximum(top, logits.amax(dim=-1))
            fall, weights = (top - higher).exp(), (logits - higher[:, None]).exp()
            # The squares have exp(2 (logit - top)), so a new top rescales them by fall².
            mass, squares = fall * mass + weights.sum(dim=-1), fall**2 * squares + weights.square().sum(dim=-1)
            top = higher
        norms[rows] = (1 - 2 * (taken - top).exp() / mass + squares / mass.square()).float()
    return norms if order is None else norms[order.argsort()]


@torch.no_grad()
def is_most_likely(
    distributions: TokenDistributions, token_ids: Tensor, *, tile: tuple[int, int] | None = None
) -> Tensor:
    """Return whether each token has the largest logit of its distribution, even in a tie: ``bool [M]``.

    Args:
        distributions: the distributions of M tokens; logits where there is no head.
        token_ids: ``int64 [M]``.
        tile: tokens and vocabulary rows for which logits exist at a time; by :func:`tile_shape` when None.
    """
    hidden, head = distributions.hidden, distributions.head
    if head is None:
        return hidden.gather(-1, token_ids[:, None]).squeeze(-1) >= hidden.amax(dim=-1)
    tile = tile_shape(head.weight.shape[0], hidden.device) if tile is None else tile
    tiles = Tiles(hidden, head.weight, head.bias, TileSettings.from_head(head, 1.0, tile))
    is_top = torch.empty(hidden.shape[0], dtype=torch.bool, device=hidden.device)
    for rows in tiles.token_slices():
        top = torch.full((len(token_ids[rows]),), -torch.inf, dtype=tiles.dtype, device=hidden.device)
        taken = top.clone()  # the logit of the token, once its tile was seen
        for columns in tiles.columns(rows):
            logits = tiles.logits(rows, columns)
            column, inside = columns.find(token_ids[rows])
            taken = torch.where(inside, logits.gather(1, column).squeeze(1), taken)
            top = torch.maximum(top, logits.amax(dim=-1))
        is_top[rows] = taken >= top
    return is_top


@dataclass(frozen=True)
class TileSettings:
    """Scaling of the logits, the wanted outputs, the sizes of a tile, and the precision of the product."""

    scale: float
    softcap: float | None
    temperature: float
    with_entropy: bool
    entropy_gradient: bool
    tile_tokens: int
    tile_rows: int
    stored_tokens: int = 0
    in_float32: bool = False

    @classmethod
    def from_head(
        cls,
        head: OutputHead,
        temperature: float,
        tile: tuple[int, int],
        *,
        with_entropy: bool = False,
        entropy_gradient: bool = False,
        stored_tokens: int = 0,
    ) -> TileSettings:
        """Return the settings for the logits of ``head``, in tiles of so many tokens and vocabulary rows."""
        outputs = with_entropy, entropy_gradient
        return cls(head.scale, head.softcap, temperature, *outputs, *tile, stored_tokens, head.in_float32)

    @property
    def factor(self) -> float:
        """The factor by which a logit is multiplied after the softcap; without a softcap, its whole factor."""
        return 1 / self.temperature if self.softcap is not None else self.scale / self.temperature


class _TiledLogProbs(torch.autograd.Function):
    """d log p[y] / d logits = onehot(y) − p, d H / d logits = −p (log p + H): backward needs logits, tile by tile."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        token_ids: Tensor,
        settings: TileSettings,
        mask: SamplingMask[Tensor] | None,
    ) -> tuple[Tensor, Tensor]:
        tiles = Tiles(hidden, weight, bias, settings, mask)
        log_probs = torch.empty(hidden.shape[0], dtype=tiles.dtype, device=hidden.device)
        # Two tensors [M]. With the stored logits, they are all that backward needs besides its inputs.
        log_normalisers, entropy = torch.empty_like(log_probs), torch.zeros_like(log_probs)
        scratch = tiles.buffer()
        stored = StoredLogits(tiles.allocate_logits())
        # Example of the online sums: logits 1 and 3 in tiles of one. After the first, top is 1, mass 1 and moment 0.
        # The second raises top to 3, so fall is -2: mass = e⁻² · 1 + 1 = 1.135, moment = e⁻² · (0 - 2 · 1) + 0 =
        # -0.271. So log Z = 3 + ln 1.135 = 3.127 and H = ln 1.135 + 0.271 / 1.135 = 0.365, as for probabilities 0.119
        # and 0.881.
        for rows in tiles.token_slices():
            count = len(log_probs[rows])
            top = log_probs.new_full((count,), -torch.inf)  # the largest logit so far
            mass = torch.zeros(count, dtype=torch.float64, device=hidden.device)  # Σ exp(logit − top)
            moment = torch.zeros_like(mass)  # Σ exp(logit − top) · (logit − top)
            taken = torch.zeros_like(top)
            for columns in tiles.columns(rows):
                # Logits [m, v] in the tile's buffer, where `shifted` replaces them. `probs` has a buffer of its own.
                logits = tiles.logits(rows, columns)
                if (copy := stored.next_tile(count, len(columns))) is not None:
                    copy.copy_(logits)
                column, inside = columns.find(token_ids[rows])
                taken = torch.where(inside, logits.gather(1, column).squeeze(1), taken)
                # A larger logit in this tile becomes the new top: the sums so far are rescaled by exp(fall).
                higher = torch.maximum(top, logits.amax(dim=-1))
                fall = (top - higher).double()  # −inf at first, when there is no mass to move
                if settings.with_entropy:
                    moment = fall.exp() * (moment + torch.where(mass > 0, fall * mass, 0))
                shifted = logits.sub_(higher[:, None])
                probs = columns.exp_(shifted, out=scratch[: shifted.numel()].view_as(shifted))
                mass = fall.exp() * mass + probs.sum(dim=-1)
                if settings.with_entropy:
                    moment += probs.mul_(shifted).sum(dim=-1)
                top = higher
            log_normaliser = top.double() + mass.log()
            log_normalisers[rows] = log_normaliser.to(tiles.dtype)
            log_probs[rows] = (taken.double() - log_normaliser).to(tiles.dtype)
            if settings.with_entropy:  # H = log Z − Σ p · logit, both relative to the top
                entropy[rows] = (mass.log() - moment / mass).to(tiles.dtype)
        ctx.save_for_backward(hidden, weight, bias, token_ids, log_normalisers, entropy, stored.flat)
        ctx.settings, ctx.mask = settings, mask
        if not settings.entropy_gradient:
            ctx.mark_non_differentiable(entropy)
        return log_probs, entropy

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        grad_log_probs, grad_entropy = grad_outputs
        hidden, weight, bias, token_ids, log_normalisers, entropy, flat = ctx.saved_tensors
        settings: TileSettings = ctx.settings
        tiles = Tiles(hidden, weight, bias, settings, ctx.mask)
        gradients = TileGradients(tiles, (hidden, weight, bias), ctx.needs_input_grad[:3])
        scratch, stored = tiles.buffer() if settings.entropy_gradient else None, StoredLogits(flat)
        for rows in tiles.token_slices():
            # [m, 1]: d loss / d log p, times the factor of a logit over the output layer's product.
            grad = grad_log_probs[rows, None] * settings.factor
            for columns in tiles.columns(rows):
                logits = stored.next_tile(len(grad), len(columns))
                logits = tiles.logits(rows, columns) if logits is None else logits
                # The slope is computed before the logits become log-probs in the same buffer.
                slope = None if settings.softcap is None else tiles.softcap_slope(logits)
                column, inside = columns.find(token_ids[rows])
                # The result goes into the tile's buffer, so that stored logits are not changed.
                log_p = torch.sub(logits, log_normalisers[rows, None], out=tiles.room(logits))
                if scratch is None:
                    # This is -p · grad. The term grad is added at the token itself below, for onehot(y) - p.
                    grad_logits = columns.exp_(log_p, out=log_p).mul_(-grad)
                else:
                    # -p · (grad + grad_entropy · (log p + H)): the gradients of log-prob and entropy in one product.
                    p_slope = torch.add(log_p, entropy[rows, None], out=scratch[: log_p.numel()].view_as(log_p))
                    p_slope.mul_(grad_entropy[rows, None] * settings.factor).add_(grad)
                    grad_logits = columns.exp_(log_p, out=log_p).mul_(p_slope).neg_()
                grad_logits.scatter_add_(1, column, torch.where(inside[:, None], grad, 0))
                gradients.add(rows, columns, grad_logits if slope is None else grad_logits.mul_(slope))
        return (*gradients.sums(), None, None, None)


class Tiles:
    """Logits of one tile at a time, in one buffer that the next tile overwrites."""

    def __init__(
        self,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        settings: TileSettings,
        mask: SamplingMask[Tensor] | None = None,
    ) -> None:
        self._list_columns, self._mask = list_columns(weight.shape[0], settings.tile_rows, mask), mask
        self.weight = weight.to(hidden.dtype)
        self.dtype = torch.float64 if hidden.dtype == torch.float64 else torch.float32
        self._hidden, self._settings = hidden, settings
        self._bias = None if bias is None else bias.to(self.dtype)
        self._logits = self.buffer()
        # torch.mm writes in the dtype of its operands: for hidden states of 16 bits the product has a buffer of its
        # own, of which the logits are a copy in float32. None: the product is written into the logits' buffer.
        is_rounded = hidden.dtype != self.dtype and not settings.in_float32
        self._rounded = self.buffer(hidden.dtype) if is_rounded else None

    def buffer(self, dtype: torch.dtype | None = None) -> Tensor:
        """Allocate a buffer for one tile."""
        settings = self._settings
        tokens = min(settings.tile_tokens, self._hidden.shape[0])
        size = tokens * min(settings.tile_rows, self.weight.shape[0])
        return torch.empty(size, dtype=dtype or self.dtype, device=self._hidden.device)

    def room(self, logits: Tensor) -> Tensor:
        """Return the tile's buffer in the shape of ``logits``, which may be a view of the buffer."""
        return self._logits[: logits.numel()].view(logits.shape)

    def allocate_logits(self) -> Tensor:
        """Allocate a flat buffer for :class:`StoredLogits`, for all tokens or the whole tiles that fit the budget."""
        tokens, step = self._hidden.shape[0], self._settings.tile_tokens
        stored = tokens if self._settings.stored_tokens >= tokens else self._settings.stored_tokens // step * step
        return torch.empty(stored * self.weight.shape[0], dtype=self.dtype, device=self._hidden.device)

    def token_slices(self) -> list[slice]:
        """Return slices over the rows of ``hidden``, one for each tile."""
        return slice_tokens(self._hidden.shape[0], self._settings.tile_tokens, self._mask)

    def columns(self, rows: slice) -> Sequence[Columns]:
        """Return the columns of the tiles of the tokens ``rows``: rows of ``weight``."""
        return self._list_columns(rows)

    def logits(self, rows: slice, columns: Columns) -> Tensor:
        """``[m, v]`` logits over the temperature, in float32 or better; :data:`EXCLUDED` outside the sampling mask."""
        hidden, weight, settings = self._hidden[rows], self.weight[columns.index], self._settings
        shape = (hidden.shape[0], weight.shape[0])
        size = shape[0] * shape[1]
        logits = self._logits[:size].view(shape)
        if self._rounded is not None:
            logits.copy_(torch.mm(hidden, weight.t(), out=self._rounded[:size].view(shape)))
        elif hidden.dtype == logits.dtype:
            torch.mm(hidden, weight.t(), out=logits)
        else:
            multiply_in_float32(hidden, weight, out=logits)
        if self._bias is not None:
            logits.add_(self._bias[columns.index])
        if settings.softcap is not None:
            # softcap · tanh(scale · x / softcap), as in Gemma 2; the temperature divides after it.
            logits.mul_(settings.scale / settings.softcap).tanh_().mul_(settings.softcap)
        if settings.factor != 1.0:
            logits.mul_(settings.factor)
        if columns.mark_excluded is not None:
            logits.masked_fill_(columns.mark_excluded(), EXCLUDED)
        return logits

    def softcap_slope(self, logits: Tensor) -> Tensor:
        """The derivative of ``logits``, from :meth:`logits`, by hidden @ weightᵀ, over :attr:`TileSettings.factor`."""
        softcap = self._settings.softcap
        assert softcap is not None
        return (1 - (logits * (self._settings.temperature / softcap)).square_()).mul_(self._settings.scale)


class StoredLogits:
    """Logits that forward keeps for backward: those of the first tiles, one after the other, in a flat buffer.

    Forward and backward ask for the same tiles in the same order. After the first tile that does not fit, no tile is
    stored.
    """

    def __init__(self, flat: Tensor) -> None:
        self.flat, self._end = flat, 0

    def next_tile(self, tokens: int, columns: int) -> Tensor | None:
        """Return the next tile's memory, ``[tokens, columns]``; None: it does not fit."""
        start, self._end = self._end, self._end + tokens * columns
        return None if self._end > len(self.flat) else self.flat[start : self._end].view(tokens, columns)


class TileGradients:
    """Gradients of the head's operands, added up over tiles in float32 (float64 for float64)."""

    def __init__(
        self, tiles: Tiles, operands: tuple[Tensor, Tensor, Tensor | None], wanted: tuple[bool, bool, bool]
    ) -> None:
        self._tiles, self._operands = tiles, operands
        self._hidden, self._weight, self._bias = (
            torch.zeros_like(operand, dtype=tiles.dtype) if operand is not None and want else None
            for operand, want in zip(operands, wanted, strict=True)
        )

    def add(self, rows: slice, columns: Columns, grad_logits: Tensor) -> None:
        """Add ``d loss / d (hidden @ weightᵀ + bias)`` of one tile."""
        hidden = self._operands[0]
        # [m, v]. The products run in the dtype of the operands; their sums over tiles are float32 or better.
        factor = grad_logits.to(hidden.dtype)
        if self._hidden is not None:
            _add_product(self._hidden[rows], factor, self._tiles.weight[columns.index])
        if self._weight is not None:
            if isinstance(columns.index, slice):
                _add_product(self._weight[columns.index], factor.t(), hidden[rows])
            else:
                self._weight.index_add_(0, columns.index, (factor.t() @ hidden[rows]).to(self._weight.dtype))
        if self._bias is not None:
            self._bias[columns.index] += grad_logits.sum(dim=0)

    def sums(self) -> tuple[Tensor | None, ...]:
        """Return the gradients of hidden, weight and bias, each in its operand's dtype; None if not wanted."""
        return tuple(
            None if total is None or operand is None else total.to(operand.dtype)
            for total, operand in zip((self._hidden, self._weight, self._bias), self._operands, strict=True)
        )


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Compute ``total += left @ right``, with the product in the operands' own dtype."""
    if total.dtype == left.dtype:
        total.addmm_(left, right)
    else:
        total.add_(left @ right)
