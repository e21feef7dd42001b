"""Give adapted layers whose weight is tied to another layer a weight of their own."""

from __future__ import annotations

import logging
from collections import Counter
from typing import Any

from torch import nn

logger = logging.getLogger(__name__)


def untie_config(config: Any) -> None:
    """Mark a transformers config, in place, as that of a model with a separate output layer."""
    for settings in (config.get_text_config(decoder=True), config):
        settings.tie_word_embeddings = False


def untie_adapted_layers(model: nn.Module) -> None:
    """Separate, in place, each adapted layer of a PEFT ``model`` from the layers that share its weight.

    An adapter on one of two tied layers trains the matrices W + ΔW and W. A tied model stores only one matrix, so the
    merged weights, which engines and checkpoints get, would compute another function. The separation does not change
    the logits, but the frozen weight is stored twice.
    """
    base: Any = model.get_base_model()  # type: ignore[operator]
    uses = Counter(id(weight) for module in base.modules() for weight in module.parameters(recurse=False))
    adapted = ((name, layer.base_layer) for name, layer in base.named_modules() if hasattr(layer, "base_layer"))
    tied = {name: layer for name, layer in adapted if uses[id(getattr(layer, "weight", None))] > 1}
    if not tied:
        return
    for layer in tied.values():
        weight = layer.weight
        # The adapted layer gets the copy; the other layer keeps its weight.
        layer.weight = nn.Parameter(weight.detach().clone(), requires_grad=weight.requires_grad)
    if hasattr(base, "get_output_embeddings") and hasattr(base, "config"):
        output, embeddings = base.get_output_embeddings(), base.get_input_embeddings()
        if output is not None and embeddings is not None and output.weight is not embeddings.weight:
            untie_config(base.config)
            if hasattr(base, "all_tied_weights_keys"):  # transformers 5 keeps what it found at the model's start
                base.all_tied_weights_keys = base.get_expanded_tied_weights_keys(all_submodels=True)
    logger.warning(
        "the adapter is on %s, whose weight the model ties to another layer: each layer now has a weight of its own, "
        "and a merged checkpoint has both (tie_word_embeddings=false)",
        " and ".join(tied),
    )
