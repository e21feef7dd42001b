"""vLLM worker extension of ``rlox-grpo serve``: load new weights from a file, all or none."""

from __future__ import annotations

import logging
import os
import traceback
from collections.abc import Iterator
from typing import Any

from torch import Tensor

from rlox_grpo.rollout.engines.vllm.experts import make_converter, repack_experts, use_checkpoint_names
from rlox_grpo.rollout.engines.weight_file import opened_weights
from rlox_grpo.rollout.engines.weight_sync import WeightMismatchError, add_tied_layers, build_manifest, find_tied_layers

logger = logging.getLogger(__name__)

HALF_LOADED = 86
"""Exit status of a worker whose reload failed midway: its weights are a mixture, so it must not answer."""


class WeightReceiver:
    """Methods of a vLLM worker (``--worker-extension-cls``), called by name over ``/collective_rpc``."""

    model_config: Any
    scheduler_config: Any

    def rlox_manifest(self) -> dict[str, list[int]]:
        """Return names and shapes of the checkpoint that this worker's model loads."""
        return {name: list(shape) for name, shape in self._rlox_expected().items()}

    def rlox_rows(self) -> int:
        """Return the number of completions that the server decodes at a time."""
        return int(self.scheduler_config.max_num_seqs)

    def rlox_dtype(self) -> str:
        """Return the dtype in which this worker's model computes, such as ``"bfloat16"``."""
        return str(self.model_config.quantization or str(self.model_config.dtype).removeprefix("torch."))

    def rlox_load(self, path: str) -> dict[str, Any]:
        """Replace every weight by those of the safetensors file at ``path``, or at ``ray:PATH`` on rank 0's node.

        Names, shapes and types are checked first; if they do not fit this model, the answer is ``{"refused": why}`` and
        nothing changes. Then one tensor is read at a time. A later failure ends the process, because vLLM cannot
        recover from it; the launcher restarts it.
        """
        from safetensors import SafetensorError

        try:
            with opened_weights(path, self._rlox_expected()) as weights:
                return {"loaded": self._rlox_reload_all(path, weights)}
        except (OSError, SafetensorError, WeightMismatchError) as error:
            return {"refused": f"{path}: {error}"}

    def _rlox_reload_all(self, path: str, weights: Iterator[tuple[str, Tensor]]) -> int:
        """Replace every weight; end the process if that fails."""
        count = 0

        def read() -> Iterator[tuple[str, Tensor]]:
            nonlocal count
            for weight in use_checkpoint_names(add_tied_layers(weights, self._rlox_tied_layers), self._rlox_experts):
                yield weight
                count += 1

        try:
            self.reload_weights(weights_iterator=read())  # type: ignore[attr-defined]  # the worker's
            if self._rlox_experts is not None:
                repack_experts(self.get_model())  # type: ignore[attr-defined]  # the worker's
        except BaseException:  # noqa: BLE001  the process ends
            traceback.print_exc()
            logger.critical("the reload from %s failed half-way: this server ends", path)
            os._exit(HALF_LOADED)
        return count

    def _rlox_expected(self) -> dict[str, tuple[int, ...]]:
        from transformers import AutoConfig

        if not hasattr(self, "_rlox_manifest"):
            config = AutoConfig.from_pretrained(self.model_config.model)
            self._rlox_manifest = build_manifest(config)
            self._rlox_experts = make_converter(config)
            # If the launcher gave vLLM a separate output layer, this layer gets the weights of the embeddings.
            is_tied = getattr(self.model_config.hf_config, "tie_word_embeddings", False)
            self._rlox_tied_layers = {} if is_tied else find_tied_layers(config)
        return self._rlox_manifest
