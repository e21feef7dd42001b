"""The interface of a reference policy, local or on a server."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from rlox_grpo.distributed.shards import gather_shards
from rlox_grpo.model.forward import refuse_distributions
from rlox_grpo.types import Batch, TokenDistributions

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def _refuse_state(state: Mapping[str, Tensor]) -> None:
    if state:
        raise ValueError(f"the reference keeps no state of its own, and was given {sorted(state)[:3]}")


@dataclass(frozen=True, eq=False)
class Reference:
    """Batch → the reference's log-probs ``[N, T]``, no gradient.

    Attributes:
        distributions: batch → distributions of the tokens under ``loss_mask``, no gradient. The head is not a copy, so
            it must be used before the reference changes.
        fingerprint: digest of frozen weights, which must be the same in a resumed run. None if the weights are not
            frozen.
        in_use: context manager around the forward passes of a step. The context manager moves an offloaded model to the
            device.
        after_step: called on every rank with the number of steps and a function that returns the policy's weights by
            name, gathered. The function is called only if the reference takes over the weights.
        state_dict: returns the weights that a checkpoint needs, because they cannot be derived from the initial model.
        load_state_dict: loads the result of ``state_dict``.
        takes_mask: whether its log-probs are normalised over the ids of the batch's sampling mask, if there is one.
        max_positions: maximum number of tokens of a prompt and its completion; None: no limit, or a server's own.
        held_bytes: bytes of weights of its own on the device between two steps.
    """

    compute: Callable[[Batch], Tensor]
    fingerprint: str | None
    distributions: Callable[[Batch], TokenDistributions] = refuse_distributions
    in_use: Callable[[], Any] = nullcontext
    after_step: Callable[[int, Callable[[], Iterable[tuple[str, Tensor]]]], None] = lambda step, weights: None
    state_dict: Callable[[], dict[str, Tensor]] = dict
    load_state_dict: Callable[[Mapping[str, Tensor]], None] = field(default=_refuse_state)
    takes_mask: bool = True
    max_positions: int | None = None
    held_bytes: int = 0

    def __call__(self, batch: Batch) -> Tensor:
        """Run the reference over ``batch``."""
        return self.compute(batch)


_SUMMED = 2**24
"""Values of a weight that are summed at a time."""


def fingerprint_model(model: nn.Module, masters: Mapping[str, Tensor] | None = None) -> str:
    """Return a digest of each parameter's values, equal for equal weights on any device.

    A model in shards is gathered a parameter at a time, by all ranks. ``masters`` are used in place of the parameters
    of the same names, which the model holds rounded.
    """
    return fingerprint_weights(
        (name, gather_shards((masters or {}).get(name, parameter).detach()))
        for name, parameter in model.named_parameters()
    )


def fingerprint_base(model: nn.Module) -> str | None:
    """Return a digest of the frozen weights beside an adapter; None without an adapter or without frozen weights.

    The digest is of the values in bfloat16, so that it does not depend on the precision that the weights are stored in.
    Packed 4-bit weights are left out.
    """
    if not hasattr(model, "peft_config"):
        return None
    frozen = {
        name: parameter.detach()
        for name, parameter in model.named_parameters()
        if not parameter.requires_grad and parameter.is_floating_point()
    }
    return fingerprint_rounded(frozen.items()) if frozen else None


def fingerprint_rounded(weights: Iterable[tuple[str, Tensor]]) -> str:
    """Return a digest of weights by name, of their values in bfloat16."""
    pieces = ((name, piece) for name, weight in weights for piece in torch.split(weight.reshape(-1), _SUMMED))
    return fingerprint_weights((name, piece.to(torch.bfloat16)) for name, piece in pieces)


def fingerprint_weights(weights: Iterable[tuple[str, Tensor]]) -> str:
    """Return the digest of :func:`fingerprint_model` for weights by name.

    The digest contains, for each parameter, the sum of the bits of its float32 values and the sum of their magnitudes.
    A sum of integers does not depend on the order of its terms, in which devices differ.
    """
    digest = hashlib.sha256()
    for name, weight in weights:
        sums = [0, 0]
        for values in torch.split(weight.reshape(-1), _SUMMED):  # so that bfloat16 weights get no copy in float32
            # int32 or int64, as wide as the values; without the sign bit, those of their magnitudes.
            bits = values.view(torch.int64) if values.dtype == torch.float64 else values.float().view(torch.int32)
            for index, numbers in enumerate((bits, bits & torch.iinfo(bits.dtype).max)):
                sums[index] += int(numbers.sum(dtype=torch.int64))
        digest.update(f"{name}{tuple(weight.shape)}{sums}".encode())
    return digest.hexdigest()[:16]


def fingerprint_tokens(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return a digest of the tokens and their ids, equal for tokenizers whose ids stand for the same tokens."""
    pairs = sorted((index, token) for token, index in tokenizer.get_vocab().items())
    return hashlib.sha256(json.dumps(pairs).encode()).hexdigest()[:16]
