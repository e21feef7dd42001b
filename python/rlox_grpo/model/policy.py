"""The policy model as it was loaded, and copies of it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from torch import Tensor, nn

from rlox_grpo.distributed.ranks import Ranks
from rlox_grpo.distributed.shards import gather_shards, local_shard
from rlox_grpo.model.blank import StoredWeights, copy_blank, find_device, give_storage, run_blank
from rlox_grpo.model.sharding import Shards, copy_tensors, shard_parameters
from rlox_grpo.prompts.media import NO_PROCESSOR
from rlox_grpo.prompts.pictures import PictureReader

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, eq=False)
class Policy:
    """The policy model and its tokenizer.

    Attributes:
        model: the model, with float32 weights, with an adapter over frozen weights, or in bfloat16 with
            ``offload_optimizer``.
        tokenizer: None if prompts and completions are token ids.
        eos_token_ids: ids that end a completion.
        vocabulary: number of ids that can be sampled; larger ids are padding of the embedding. None: all ids.
        recomputes: whether the backward pass recomputes activations.
        masters: float32 master weights in host memory by parameter name, for weights that ``model`` has in bfloat16.
        shards: the shards of ``model``, if it was loaded in shards.
        stored: the files with the weights of ``model``, if DeepSpeed loads them when it shards the model (ZeRO 3).
        reader: reads the pictures of prompts with the model's processor; None: the model is trained on text.
        no_pictures: why there is no reader.
        dtype: the precision of computation.
    """

    model: nn.Module
    tokenizer: PreTrainedTokenizerBase | None
    eos_token_ids: tuple[int, ...]
    vocabulary: int | None
    recomputes: bool = False
    masters: Mapping[str, Tensor] = field(default_factory=dict)
    shards: Shards | None = None
    stored: StoredWeights | None = None
    reader: PictureReader | None = None
    no_pictures: str = NO_PROCESSOR
    dtype: Literal["float32", "bfloat16"] = "float32"

    @property
    def processor(self) -> Any:
        """The processor of a vision-language model; None for a model that is trained on text."""
        return None if self.reader is None else self.reader.processor

    def copy_whole(self) -> nn.Module:
        """Copy the model without sharding the copy; a collective if the model is sharded."""
        if self.shards is None and self.stored is None:
            return copy.deepcopy(self.model)
        whole = self._copy_blank()
        # Each rank gets the whole copy. Its parameters are gathered one by one, or read from the files.
        self._fill(whole, gather_shards)
        return whole

    def copy_in_shards(self, cast: Callable[[nn.Module], object], ranks: Ranks) -> Shards:
        """Make a frozen, sharded copy of a model that is sharded or not loaded yet; no weights are sent.

        Args:
            cast: called with the copy while it is blank; may change the dtype of its parameters.
            ranks: all ranks of the run.
        """
        frozen = self._copy_blank().eval().requires_grad_(False)
        cast(frozen)
        # Like the policy, the copy is sharded while it is blank. Each rank then fills its shards from its own rows of
        # the policy or the files.
        copied = shard_parameters(frozen, ranks)
        self._fill(frozen, local_shard)
        return copied

    def _copy_blank(self) -> nn.Module:
        return copy_blank(self.model if self.shards is None else self.shards.blank)

    def _fill(self, blank: nn.Module, read: Callable[[Tensor], Tensor]) -> None:
        """Give a copy storage and weights: those of the files, or those of the shards as ``read`` returns them."""
        give_storage(blank, find_device(self.model))
        if self.stored is not None:
            self.stored.fill(blank)
        else:
            copy_tensors(self.model, blank, read)

    def get_runner(self) -> Callable[[Callable[[], Any]], Any] | None:
        """Return the function in which ``make_forward`` tests a sharded or unloaded model; None for other models."""
        if self.stored is not None:
            # The model has no weights until DeepSpeed shards it, so it is tested with random weights.
            return lambda choose: run_blank(self.model, choose, (None, False))
        return None if self.shards is None else self.shards.run
