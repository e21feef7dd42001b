"""A chat model from scratch in the ChatML form, and its episodes: what the tests of episodes share."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

FORGETS = CHATML.replace(
    "{{ message.content }}",
    "{{ '~' if message.role == 'assistant' and not loop.last }}{{ message.content }}",
)
"""Marks each earlier reply: a template that rewrites history whatever the policy says."""


def make_tokenizer(byte_tokenizer: Any, template: str = CHATML) -> Any:
    """A copy of ``byte_tokenizer`` whose messages end with ``<|im_end|>``."""
    tokenizer = copy.deepcopy(byte_tokenizer)
    tokenizer.add_special_tokens({"eos_token": "<|im_end|>"})
    tokenizer.chat_template = template
    return tokenizer


def pay(text: str) -> float:
    """A reward that differs between most replies."""
    return float(sum(text.encode()) % 11)


async def take_three_turns(row: Any, chat: Any) -> float:
    """An environment; the last reply is paid."""
    reply = await chat.turn(f"{row['secret']} one")
    reply = await chat.turn("two")
    reply = await chat.turn("three")
    return pay(reply.text)


def play_rows(
    environment: Any, model: Any, tokenizer: Any, rows: Any, *, completions: int = 2, **options: Any
) -> list[Any]:
    """Completions of an episode for each row, with replies of at most 5 tokens."""
    from rlox_grpo import GRPOConfig
    from rlox_grpo.prompts.load import load_rows
    from rlox_grpo.rollout.engines.hf.engine import HFEngine
    from rlox_grpo.rollout.episodes.run import EpisodeRunner
    from rlox_grpo.types import Sampling

    runner = EpisodeRunner(environment, (), GRPOConfig.create(**options).split().episodes, tokenizer)
    engine = HFEngine(model, tokenizer, eos_token_ids=[tokenizer.eos_token_id], max_rows=4)
    groups = runner(engine, load_rows(rows), [completions] * len(rows), Sampling(max_new_tokens=5), 7)
    return [completion for group in groups for completion in group.completions]


def count_trained_tokens(trainer: Any, scored: Any, num_sequences: int) -> int:
    """Loss tokens of the trainer's batches, each of which has the log-prob that the sampler gave it."""
    tokens = 0
    step = trainer._step
    for part in step.batcher.make_mini_batches(*step.compute_advantages(scored, 0, 1), 0):
        for batch in part:
            log_probs, _ = step.fixed_tensors.forward(batch)
            mask = batch.loss_mask
            np.testing.assert_allclose(log_probs[mask].detach(), batch.log_probs.sampling[mask], atol=2e-5)
            tokens += int(mask.sum())
            assert batch.totals.num_sequences == num_sequences
    return tokens
