"""A toy policy and rewards that train in a second: what the end-to-end tests share."""

from __future__ import annotations

import torch
from torch import nn

VOCABULARY = 12
TARGET = 7
PROMPTS = torch.arange(24).reshape(8, 3) % VOCABULARY


class ToyLM(nn.Module):
    """A causal model of one hidden layer over a running mean: ``forward(input_ids [B, T]) -> logits [B, T, V]``."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embedding = nn.Embedding(VOCABULARY, 16)
        self.hidden = nn.Linear(16, 32)
        self.head = nn.Linear(32, VOCABULARY)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        steps = torch.arange(1, input_ids.shape[1] + 1, device=input_ids.device)[:, None]
        mean = self.embedding(input_ids).cumsum(dim=1) / steps
        return self.head(torch.tanh(self.hidden(mean)))


class Logits(nn.Module):
    """A transformers model as a plain module, whose logits are computed whole."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, input_ids):
        return self.model(input_ids=input_ids, use_cache=False).logits


def even_share(completions, prompts):
    """Share of the sampled tokens that are even."""
    return [float((completion % 2 == 0).float().mean()) for completion in completions]


def share_of_target(completions, prompts):
    """Share of the sampled tokens that are ``TARGET``."""
    return [float((completion == TARGET).float().mean()) for completion in completions]


def near_half(completions, prompts):
    """1 if half of the sampled tokens are ``TARGET``, less on both sides: in a run it rises and falls."""
    return [1.0 - abs(share - 0.5) for share in share_of_target(completions, prompts)]


KEEP_BEST = {"keep_best": "eval/toy/mean_reward", "eval_steps": 1}
"""Options of a run with the evaluation set ``toy``."""


def options(**changes):
    """Trainer options of a run of seconds."""
    saved = {"checkpoint_steps": 4} if "output_dir" in changes else {}
    return {
        "group_size": 8,
        "prompts_per_step": 4,
        "learning_rate": 0.02,
        "max_new_tokens": 6,
        "max_steps": 12,
        **saved,
        "log_to": (),
        **changes,
    }


def stop_after(trainer, steps):
    """Let the trainer stop by itself after its step ``steps``."""
    take_step = trainer.train_step

    def train_step(*given):
        metrics = take_step(*given)
        if trainer.step == steps:
            trainer.stop()
        return metrics

    trainer.train_step = train_step
