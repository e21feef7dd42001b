"""Worker extension of ``rlox-grpo serve``: load new weights from a file, all of them or none."""

from __future__ import annotations

import logging
import os
import traceback
from collections.abc import Iterator
from typing import Any

from torch import Tensor

from rlox_grpo.rollout.engines.weight_sync import WeightMismatchError, build_manifest, check_weights, find_tied_layers

logger = logging.getLogger(__name__)

HALF_LOADED = 86
"""Exit status of a worker whose reload failed half-way: its weights are a mixture, and must answer nothing."""


class WeightReceiver:
    """Methods of a vLLM worker (``--worker-extension-cls``), called by name over ``/collective_rpc``."""

    model_config: Any
    scheduler_config: Any

    def rlox_manifest(self) -> dict[str, list[int]]:
        """Names and shapes of the checkpoint that this worker's model takes."""
        return {name: list(shape) for name, shape in self._rlox_expected().items()}

    def rlox_rows(self) -> int:
        """Completions that the server decodes at once; more of them wait in its queue."""
        return int(self.scheduler_config.max_num_seqs)

    def rlox_dtype(self) -> str:
        """The arithmetic of this worker's model, such as ``"bfloat16"``."""
        return str(self.model_config.quantization or str(self.model_config.dtype).removeprefix("torch."))

    def rlox_load(self, path: str) -> dict[str, Any]:
        """Replace every weight by those of the safetensors file at ``path``.

        The file is read and checked first: one that is missing or not of this model is answered with
        ``{"refused": why}``, and nothing has changed. A failure after that ends the process, as vLLM cannot be brought
        back from it; the launcher then starts it again.
        """
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        try:
            weights = load_file(path)
            check_weights(list(weights.items()), self._rlox_expected())
            weights |= {layer: weights[embeddings] for layer, embeddings in self._rlox_tied_layers.items()}
        except (OSError, SafetensorError, WeightMismatchError) as error:
            return {"refused": f"{path}: {error}"}
        loaded = False
        try:
            self._rlox_reload(iter(weights.items()))
            loaded = True
        finally:
            if not loaded:
                traceback.print_exc()
                logger.critical("the reload from %s failed half-way: this server ends", path)
                os._exit(HALF_LOADED)
        return {"loaded": len(weights)}

    def _rlox_reload(self, weights: Iterator[tuple[str, Tensor]]) -> None:
        self.reload_weights(weights_iterator=weights)  # type: ignore[attr-defined]  # the worker's

    def _rlox_expected(self) -> dict[str, tuple[int, ...]]:
        from transformers import AutoConfig

        if not hasattr(self, "_rlox_manifest"):
            config = AutoConfig.from_pretrained(self.model_config.model)
            self._rlox_manifest = build_manifest(config)
            # Where the launcher gave vLLM an output layer of its own, it takes the embeddings' weights.
            is_tied = getattr(self.model_config.hf_config, "tie_word_embeddings", False)
            self._rlox_tied_layers = {} if is_tied else find_tied_layers(config)
        return self._rlox_manifest
