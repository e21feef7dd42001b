"""What the thread of generation shares with the trainer's: each test forces the order of events that hurt."""

import copy
import threading

import pytest
from transformers import PreTrainedTokenizerFast

import chatml
from rlox_grpo import GRPO
from rlox_grpo.rollout.episodes.run import EpisodeRunner

ROWS = [{"word": "a"}]
OPTIONS = {"group_size": 2, "prompts_per_step": 1, "max_new_tokens": 3, "max_turns": 1, "log_to": ()}


@pytest.fixture(scope="module")
def tokenizer(byte_tokenizer):
    return chatml.make_tokenizer(byte_tokenizer)


@pytest.fixture(scope="module")
def model(make_tiny_model, tokenizer):
    return make_tiny_model("qwen2", vocab_size=len(tokenizer), max_position_embeddings=512)


def test_prefilled_tokens_are_those_of_the_steps_own_batch(model, tokenizer, monkeypatch):
    """The rewards of a step wait until the next step's batch has been sampled."""
    prefilled, calls = [], 0

    async def grows(row, chat):
        nonlocal calls
        calls += 1
        await chat.turn("a" * 10 * ((calls + 1) // 2))  # each batch of two episodes has longer prompts
        return 0.5 * (calls % 2)

    def waits(completions):
        for pending in trainer.sampler.ahead._queue:
            pending.groups.result()
        return [0.0] * len(completions)

    play = EpisodeRunner.__call__

    def noted(self, engine, *args):
        groups = play(self, engine, *args)
        if threading.current_thread().name.startswith("rlox_grpo generation"):
            prefilled.append(self.prefilled_tokens)
        return groups

    monkeypatch.setattr(EpisodeRunner, "__call__", noted)
    found = []
    trainer = GRPO(
        copy.deepcopy(model), waits, environment=grows, tokenizer=tokenizer, async_steps=1, max_steps=3, **OPTIONS
    )
    trainer.callbacks = type(trainer.callbacks)([Steps(found)])
    trainer.train(ROWS)
    assert len(set(prefilled)) == 3
    assert found == prefilled


class Steps:
    """Notes a metric of each step."""

    def __init__(self, found):
        self.found = found

    def on_step(self, step, metrics):
        self.found.append(metrics["perf/prefilled_tokens"])


def test_a_reward_functions_truncation_does_not_reach_the_episodes_prompts(model, tokenizer, monkeypatch):
    """A call with ``truncation=True`` in another thread falls between two steps of the engine's call."""
    set_state = PreTrainedTokenizerFast.set_truncation_and_padding

    def interrupted(self, **options):
        set_state(self, **options)
        if threading.current_thread().name.startswith("rlox_grpo generation"):
            tokenizer.backend_tokenizer.enable_truncation(max_length=3)  # what tokenizer(…, truncation=True) does

    async def asks(row, chat):
        await chat.turn("hello")
        return 1.0

    trainer = GRPO(copy.deepcopy(model), environment=asks, tokenizer=tokenizer, async_steps=1, max_steps=1, **OPTIONS)
    monkeypatch.setattr(PreTrainedTokenizerFast, "set_truncation_and_padding", interrupted)
    try:
        trainer.train(ROWS)
    finally:
        tokenizer.backend_tokenizer.no_truncation()
    (scored,) = trainer.last_rollout[0]
    assert scored.group.prompt.text == "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
