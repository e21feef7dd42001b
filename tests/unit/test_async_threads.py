"""What the thread of generation shares with the trainer's: each test forces the order of events that hurt."""

import copy
import threading

import pytest
from transformers import PreTrainedTokenizerFast

from rlox_grpo import GRPO
from rlox_grpo.errors import EpisodeError
from rlox_grpo.rollout.episodes.run import EpisodeRunner

ROWS = [{"word": "a"}]
OPTIONS = {"group_size": 2, "prompts_per_step": 1, "max_new_tokens": 3, "max_turns": 1, "log_to": ()}


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
        for pending in trainer.sampler.ahead:
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


@pytest.mark.parametrize("async_steps", [0, 1, 2])
def test_a_rollout_that_failed_is_sampled_again_by_the_next_train(async_steps, model, tokenizer):
    """The same rows, draws and weights as in a run whose tool never failed."""
    outages = {2}  # the row whose batch fails, once

    def run(outages):
        seen = []

        async def asks(row, chat):
            if row["number"] in outages:
                raise ConnectionError("the search server is down")
            seen.append((row["number"], chat.seed))
            return float(len((await chat.turn("a")).token_ids) % 2)

        rows = [{"number": number} for number in range(4)]
        trainer = GRPO(
            copy.deepcopy(model), environment=asks, tokenizer=tokenizer, async_steps=async_steps, max_steps=4,
            learning_rate=1e-3, **OPTIONS,
        )  # fmt: skip
        if outages:
            with pytest.raises(EpisodeError, match="search server"):
                trainer.train(rows)
            outages.clear()
        metrics = trainer.train(rows)
        assert trainer.step == 4
        return sorted(seen), metrics["steps_trained"]

    failed, trained = run(set(outages))
    whole, _ = run(set())
    assert failed == whole
    assert 1 <= trained <= 4


def test_weights_that_an_engine_could_not_take_are_pushed_again(model, tokenizer):
    """The first load fails in the engine's thread; the batch behind it fails with it, and the next call trains."""

    async def asks(row, chat):
        return float(len((await chat.turn("a")).token_ids) % 2)

    trainer = GRPO(copy.deepcopy(model), environment=asks, tokenizer=tokenizer, async_steps=1, max_steps=2, **OPTIONS)
    engine = trainer.engine._engine
    load, fails = engine.load_weights, [True]

    def loads(weights, version):
        if fails.pop():
            raise ConnectionError("no server")
        fails.append(False)
        load(weights, version)

    engine.load_weights = loads
    with pytest.raises(RuntimeError, match="new weights"):
        trainer.train(ROWS)
    fails.append(False)
    assert trainer.train(ROWS)["steps_trained"] == 2
