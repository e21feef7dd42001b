"""Models that vLLM's CPU kernels take (heads of 32), and what the trainer's own arithmetic says of them."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from rlox_grpo.rollout.engines.canary import Canary, choose_tokens
from rlox_grpo.rollout.engines.weight_sync import collect_weights
from rlox_grpo.types import Prompt, Sampling

VOCAB = 259  # the byte tokenizer's
END = 1


SIZES = {"vocab_size": VOCAB, "hidden_size": 128, "intermediate_size": 96, "max_position_embeddings": 512}
"""For ``make_tiny_model("qwen2", **SIZES)``: sharp enough that weights matter."""


SERVED = {**SIZES, "intermediate_size": 512, "tie_word_embeddings": True}
"""Of the demo's half a million parameters; on the CPU vLLM samples from an output layer of its own."""


ON_GPU = {
    **SIZES,
    **{"hidden_size": 256, "initializer_range": 0.2, "eos_token_id": END, "pad_token_id": None},
}
"""For ``make_tiny_model("qwen2", **ON_GPU)``: heads of 64, which vLLM's kernels for GPUs take."""


VLLM_MODULES = (
    "vllm.entrypoints.llm",
    "vllm.v1.worker.cpu_worker",
    "vllm.v1.worker.cpu_model_runner",
    "vllm.model_executor.models.qwen2",
)
"""What a rank with vLLM imports, for ``warm.run(..., loaded=VLLM_MODULES)``."""


CHATML = (
    "{% for message in messages %}{{ message.role[0] }}{{ message.content }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}a{% endif %}"
)
"""A chat template without tokens of its own."""


def prompt(length: int, index: int = 0) -> Prompt:
    """``length`` bytes that depend on the index alone."""
    return Prompt(np.random.default_rng([7, index]).integers(3, VOCAB, length), index=index)


def greedy(model, prompt: Prompt, count: int) -> list[int]:
    """What the trainer's own forward would say next, without a cache, up to the end token."""
    ids = torch.from_numpy(prompt.token_ids)[None]
    for _ in range(count):
        ids = torch.cat([ids, model(ids).logits[:, -1:].argmax(-1)], dim=1)
        if ids[0, -1] == END:
            break
    return ids[0, len(prompt.token_ids) :].tolist()


@torch.no_grad()
def log_probs(model, prompt: Prompt, token_ids, temperature: float = 1.0, limit: int | None = None) -> np.ndarray:
    """Log-probs of a completion's tokens by the trainer's own forward, over the ids below ``limit``."""
    ids = torch.from_numpy(np.concatenate([prompt.token_ids, token_ids]))[None]
    logits = model(ids).logits[0, len(prompt.token_ids) - 1 : -1, :limit] / temperature
    chosen = torch.from_numpy(np.asarray(token_ids))[:, None]
    return torch.log_softmax(logits, dim=-1).gather(1, chosen)[:, 0].numpy()


def largest_gap(model, groups, **changes) -> float:
    """Largest difference of the reported log-probs of all completions from the trainer's, :func:`log_probs`."""
    return max(
        float(np.abs(completion.log_probs - log_probs(model, group.prompt, completion.token_ids, **changes)).max())
        for group in groups
        for completion in group.completions
    )


def sample_gap(engine, model, sampling: Sampling, group_size: int = 8, **changes) -> float:
    """:func:`largest_gap` of completions that the engine samples for two prompts."""
    groups = engine.generate([prompt(20), prompt(9, index=1)], group_size, sampling, seed=3)
    return largest_gap(model, groups, **changes)


def load_checked(engine, model, version: int) -> float:
    """Give ``engine`` the model's weights with a canary prompt; its ``mismatch/canary_gap_max``."""
    ids = choose_tokens(VOCAB, engine.max_length)
    expected = log_probs(model, Prompt(np.array(ids[:1]), 0), ids[1:])
    engine.expect_log_probs(Canary(ids, expected, "float32"))
    engine.load_weights(collect_weights(model), version)
    return engine.take_metrics()["mismatch/canary_gap_max"]


@torch.no_grad()
def shake(model, seed: int, scale: float = 0.05) -> None:
    """Move every weight, as an update would, only further."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.add_(torch.randn(parameter.shape, generator=generator) * scale)


PROMPTS = [f"{index}:" for index in range(8)]


def share_of_low_bytes(completion_ids, **columns):
    """Share of a completion's tokens in the lower half of the vocabulary; a random model has about a half."""
    return [float(np.mean(np.asarray(ids) < 131)) for ids in completion_ids]


def training(**changes) -> dict[str, Any]:
    """Options of a run that takes a second a step."""
    return {
        "engine_max_length": 64,
        "group_size": 8,
        "prompts_per_step": 8,
        "learning_rate": 3e-3,
        "max_new_tokens": 12,
        "log_to": (),
        **changes,
    }
