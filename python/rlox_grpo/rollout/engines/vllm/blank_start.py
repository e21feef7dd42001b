"""Start vLLM without weights, with the buffers that its model made.

vLLM's load format ``dummy`` draws random values for everything that a checkpoint could have, also for buffers that the
model computes and that no checkpoint has, such as the mean and the deviation of pixels (``visual.input_norm`` of
Qwen3-VL). No later transfer of weights corrects them, and log-probs of prompts with pictures are then off by 10 nats.
"""

from __future__ import annotations

from typing import Any

LOAD_FORMAT = "rlox_grpo_blank"


def register_loader() -> str:
    """Register the loader with vLLM, and return the name of its load format."""
    from vllm.model_executor.model_loader import register_model_loader
    from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader

    class BlankLoader(DummyModelLoader):  # type: ignore[misc]  # vLLM has no types where it is not installed
        """vLLM's loader of random weights, which leaves buffers as they are."""

        def load_weights(self, model: Any, model_config: Any) -> None:
            buffers = {name: buffer.clone() for name, buffer in model.named_buffers() if not buffer.is_meta}
            super().load_weights(model, model_config)
            for name, buffer in model.named_buffers():
                if name in buffers:
                    buffer.data.copy_(buffers[name])

    register_model_loader(LOAD_FORMAT)(BlankLoader)
    return LOAD_FORMAT
