"""Several evaluation sets in training and in evaluate, each with its settings."""

from __future__ import annotations

import copy
import json
import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rlox_grpo import GRPO, EvalSet, TrainSource
from rlox_grpo.environments import Outcome
from rlox_grpo.errors import ConfigError
from rlox_grpo.rewards import ExactAnswer
from rlox_grpo.run.console import LatestMetrics
from toy import PROMPTS, TARGET, ToyLM, options, stop_after

CHAT_TEMPLATE = (
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def right_or_wrong(completions: Any, prompts: Any) -> list[float]:
    return [float((completion == TARGET).any()) for completion in completions]


def never_right(completions: Any, prompts: Any) -> list[float]:
    return [0.0 for _ in completions]


def make_trainer(folder: Path | None = None, **changes: Any) -> GRPO:
    folders = {} if folder is None else {"output_dir": folder}
    return GRPO(ToyLM(), right_or_wrong, **options(**folders, **changes))


def read_evaluations(folder: Path) -> list[dict[str, float]]:
    """The evaluations of a run, without the times that they took."""
    lines = [json.loads(line) for line in (folder / "evaluations.jsonl").read_text().splitlines()]
    return [{name: value for name, value in line.items() if not name.endswith("time_s")} for line in lines]


def test_each_set_is_evaluated_with_its_settings(tmp_path: Path) -> None:
    sets = {
        "often": EvalSet(PROMPTS[:3], samples=2, every=2),
        "seldom": EvalSet(PROMPTS[:2], temperature=0, rewards=never_right, max_new_tokens=1),
    }
    metrics = make_trainer(tmp_path, max_steps=5).train(PROMPTS, eval_prompts=sets)
    lines = read_evaluations(tmp_path)
    assert [line["step"] for line in lines] == [0, 2, 4, 5]
    assert ["seldom/accuracy" in line for line in lines] == [True, False, False, True]
    assert all("often/pass@2" in line and "often/pass@4" not in line for line in lines)
    assert lines[-1]["seldom/accuracy"] == lines[-1]["seldom/rewards/never_right"] == 0.0
    assert lines[-1]["seldom/mean_length"] == 1.0
    assert metrics["eval/often/accuracy"] == lines[-1]["often/accuracy"]
    assert "eval/accuracy" not in metrics
    names = {path.name for path in (tmp_path / "completions").iterdir() if path.name.startswith("eval")}
    assert names == {
        *(f"eval_often_step_{step:06d}.jsonl" for step in (0, 2, 4, 5)),
        *(f"eval_seldom_step_{step:06d}.jsonl" for step in (0, 5)),
    }
    report = (tmp_path / "report.html").read_text()
    assert "Held-out accuracy, often" in report
    assert "accuracy low" not in report  # limits are bands, and no lines of a chart
    assert "accuracy vs best" not in report


def test_the_console_shows_the_accuracy_of_each_set() -> None:
    latest = LatestMetrics()
    latest.take(3, {"eval/math/accuracy": 0.25, "eval/code/accuracy": 0.5, "eval/rewards/accuracy": 1.0})
    assert latest.numbers() == ["math 25.0%", "code 50.0%"]


def for_another_set(completions: Any, prompts: Any) -> list[None]:
    return [None for _ in completions]


def test_a_mean_over_nothing_is_not_logged(tmp_path: Path) -> None:
    sets = {"toy": EvalSet(PROMPTS[:2], rewards=[never_right, for_another_set])}
    trainer = make_trainer(tmp_path, max_steps=1)
    metrics = trainer.train(PROMPTS, eval_prompts=sets)
    assert metrics["eval/toy/rewards/never_right"] == 0.0
    assert "eval/toy/rewards/for_another_set" not in metrics
    assert math.isnan(trainer.evaluate(sets)["toy/rewards/for_another_set"])


def test_one_set_has_the_metrics_of_rows() -> None:
    trainer = make_trainer()
    assert trainer.evaluate(EvalSet(PROMPTS[:2])) == trainer.evaluate(PROMPTS[:2])
    named = trainer.evaluate({"toy": PROMPTS[:2], "greedy": EvalSet(PROMPTS[:2], temperature=0)})
    assert named["toy/accuracy"] == trainer.evaluate(PROMPTS[:2])["accuracy"]
    assert named["greedy/mean_reward"] == trainer.evaluate(PROMPTS[:2], greedy=True)["mean_reward"]
    assert trainer.evaluate(EvalSet(PROMPTS[:2], samples=3)).keys() >= {"pass@3"}
    with pytest.raises(TypeError, match="prompts is None: expected held-out prompts"):
        trainer.evaluate(None)
    several = trainer.evaluate({"toy": PROMPTS[:2], "greedy": EvalSet(PROMPTS[:2], temperature=0)}, samples=2)
    assert "toy/pass@2" in several
    assert "greedy/pass@2" not in several  # greedy completions are equal


def test_a_resumed_run_compares_with_its_first_evaluation(tmp_path: Path) -> None:
    sets = {"toy": EvalSet(PROMPTS[:4], every=2)}
    make_trainer(tmp_path / "whole", max_steps=8).train(PROMPTS, eval_prompts=sets)
    first = make_trainer(tmp_path / "cut", max_steps=8)
    stop_after(first, 4)
    first.train(PROMPTS, eval_prompts=sets)
    make_trainer(tmp_path / "cut", max_steps=8).train(PROMPTS, eval_prompts=sets)
    lines = read_evaluations(tmp_path / "whole")
    assert read_evaluations(tmp_path / "cut") == lines
    assert "toy/accuracy_vs_start" not in lines[0]
    for line in lines[1:]:
        change = line["toy/accuracy"] - lines[0]["toy/accuracy"]
        assert line["toy/accuracy_vs_start"] == pytest.approx(change)
        assert line["toy/accuracy_vs_start_low"] <= change <= line["toy/accuracy_vs_start_high"]


@pytest.mark.parametrize(
    "settings",
    [
        {"prompts": [{"prompt": [1, 2], "answer": "4"}]},
        {"rewards": [ExactAnswer(tag="answer")]},
        {"rewards": [ExactAnswer(), never_right]},
        {"samples": 3},
        {"stop": ("x",)},
    ],
    ids=["prompts", "tag", "rewards", "samples", "stop"],
)
def test_another_answer_or_setting_is_another_set(byte_tokenizer: Any, make_tiny_model: Any, settings: Any) -> None:
    model = make_tiny_model("qwen2", vocab_size=259, eos_token_id=1)
    trainer = GRPO(model, ExactAnswer(), tokenizer=byte_tokenizer, **options())

    def digest(prompts: Any = ({"prompt": [1, 2], "answer": "3"},), **settings: Any) -> str:
        return trainer._held_out.load(EvalSet([*prompts], **settings))[""].digest

    assert digest() == digest(rewards=[ExactAnswer()]) != digest(**settings)


class Counting:
    """A reward function that counts its calls, and that no dict can have as a key."""

    def __init__(self, score: float) -> None:
        self.score, self.calls = score, 0

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Counting) and self.score == other.score

    __hash__ = None  # type: ignore[assignment]

    def __call__(self, completions: Any) -> list[float]:
        self.calls += 1
        return [self.score for _ in completions]


def pay(score: float) -> Any:
    def paid(completions: Any) -> list[float]:
        return [score for _ in completions]

    return paid


def pay_by_default(score: float) -> Any:
    def paid(completions: Any, score: float = score) -> list[float]:
        return [score for _ in completions]

    return paid


@pytest.mark.parametrize("make", [pay, pay_by_default, Counting, lambda score: Counting(score).__call__])
def test_a_reward_that_holds_another_value_is_another_set_on_all_ranks(make: Any) -> None:
    trainer = GRPO(ToyLM(), right_or_wrong, **options(max_steps=1))
    first, again, other = (trainer._held_out.load(EvalSet(PROMPTS[:2], rewards=make(k)))[""] for k in (0.0, 0.0, 1.0))
    assert first.digest == again.digest != other.digest
    assert first.code_digest == again.code_digest == other.code_digest  # a rank may have its own value
    ranks = SimpleNamespace(gather=lambda digests: [{"s": first.digest}, digests])
    replace(trainer._held_out, ranks=ranks).share_digests({"s": other})  # type: ignore[arg-type]
    assert other.digest == first.digest


def test_a_reward_that_counts_its_calls_continues_its_comparisons() -> None:
    reward = Counting(0.5)
    trainer = GRPO(ToyLM(), right_or_wrong, **options(max_steps=2))
    sets = {"counted": EvalSet(PROMPTS[:2], rewards=reward)}
    assert "eval/counted/accuracy_vs_start" in trainer.train(PROMPTS, eval_prompts=sets)
    before = trainer._held_out.load(sets)["counted"].digest
    reward.calls += 1
    assert trainer._held_out.load(sets)["counted"].digest == before


def test_another_environment_of_training_is_another_set(byte_tokenizer: Any, make_tiny_model: Any) -> None:
    async def one_turn(row: Any, chat: Any) -> Outcome:
        await chat.turn(row["letters"])
        return Outcome(1.0)

    async def two_turns(row: Any, chat: Any) -> Outcome:
        await chat.turn(row["letters"])
        await chat.turn("again")
        return Outcome(1.0)

    tokenizer = copy.deepcopy(byte_tokenizer)
    tokenizer.chat_template = CHAT_TEMPLATE
    model = make_tiny_model("qwen2", vocab_size=259, eos_token_id=1)

    def digest(environment: Any = one_turn, **changes: Any) -> str:
        trainer = GRPO(model, environment=environment, tokenizer=tokenizer, **options(**changes))
        return trainer._held_out.load([{"letters": "a"}])[""].digest

    usual = digest()
    assert usual == digest(turn_timeout=1000.0, eval_samples=4)
    for others in ({"environment": two_turns}, {"max_turns": 3}, {"system_prompt": "sys"}, {"eval_samples": 2}):
        assert usual != digest(**others)


def test_a_set_may_have_an_environment_and_a_system_prompt(make_tiny_model: Any, byte_tokenizer: Any) -> None:
    async def two_turns(row: Any, chat: Any) -> Outcome:
        await chat.turn(row["letters"])
        await chat.turn("again")
        return Outcome(1.0)

    def zero(completions: Any, **_: Any) -> list[float]:
        return [0.0 for _ in completions]

    tokenizer = copy.deepcopy(byte_tokenizer)
    tokenizer.chat_template = CHAT_TEMPLATE
    model = make_tiny_model("qwen2", vocab_size=259, eos_token_id=1)
    trainer = GRPO(model, zero, tokenizer=tokenizer, group_size=2, prompts_per_step=2, max_new_tokens=3, log_to=())
    plain = EvalSet(["a", "bc"], system_prompt="sys", samples=1)
    (prompt, _) = trainer._held_out.load(plain)[""].prompts
    assert prompt.text == "<system>sys<user>a<assistant>"
    metrics = trainer.evaluate({"plain": plain, "turns": EvalSet([{"letters": "a"}], environment=two_turns)})
    assert (metrics["plain/accuracy"], metrics["turns/accuracy"]) == (0.0, 1.0)
    assert metrics["turns/rewards/two_turns"] == 1.0
    assert any(name.startswith("turns/episode/") for name in metrics)
    assert not any(name.startswith("plain/episode/") for name in metrics)


def test_a_set_may_be_without_the_environment_of_training(make_tiny_model: Any, byte_tokenizer: Any) -> None:
    async def two_turns(row: Any, chat: Any) -> Outcome:
        await chat.turn(row["letters"])
        await chat.turn("again")
        return Outcome(1.0)

    def lengths(completion_ids: Any, **_: Any) -> list[float]:
        return [float(len(ids)) for ids in completion_ids]

    tokenizer = copy.deepcopy(byte_tokenizer)
    tokenizer.chat_template = CHAT_TEMPLATE
    model = make_tiny_model("qwen2", vocab_size=259, eos_token_id=1)
    sizes = {"group_size": 2, "prompts_per_step": 2, "max_new_tokens": 3, "max_steps": 1, "log_to": ()}
    trainer = GRPO(model, lengths, environment=two_turns, tokenizer=tokenizer, **sizes)
    sets = {"turns": EvalSet([{"letters": "a"}]), "replies": EvalSet(["a", "bc"], environment=False, samples=1)}
    (prompt, _) = trainer._held_out.load(sets)["replies"].prompts
    assert prompt.token_ids.tolist() == tokenizer("a")["input_ids"]
    metrics = trainer.train([{"letters": "b"}], eval_prompts=sets)
    assert metrics["eval/turns/rewards/two_turns"] == 1.0
    assert any(name.startswith("eval/turns/episode/") for name in metrics)
    assert not any(name.startswith(("eval/replies/episode/", "eval/replies/rewards/two_turns")) for name in metrics)
    assert 1 <= metrics["eval/replies/mean_reward"] == metrics["eval/replies/rewards/lengths"] <= 3


def test_a_run_without_rewards_evaluates_sets_that_have_their_own() -> None:
    sets = {"own": EvalSet(PROMPTS[:2], rewards=right_or_wrong)}
    trainer = GRPO(ToyLM(), **options(max_steps=1))
    assert "own/accuracy" in trainer.evaluate(sets)
    mixture = {"some": TrainSource(PROMPTS[:4], rewards=right_or_wrong)}
    metrics = trainer.train(mixture, eval_prompts=sets)
    assert {"rewards/right_or_wrong/mean", "eval/own/accuracy"} <= metrics.keys()
    with pytest.raises(ValueError, match=r"prompts\['plain'\]: reward_fn is empty"):
        trainer.evaluate({**sets, "plain": PROMPTS})
    with pytest.raises(ValueError, match="reward_fn is empty"):
        GRPO(ToyLM(), **options(max_steps=1)).train({**mixture, "more": PROMPTS})


@pytest.mark.parametrize(
    ("sets", "error", "message"),
    [
        ({}, ConfigError, "eval_prompts has no set"),
        ({"a/b": PROMPTS}, ConfigError, "eval_prompts: 'a/b' is not the name of a set"),
        ({"rewards": PROMPTS}, ConfigError, "eval_prompts: 'rewards' is not the name of a set"),
        ({"math": [], "code": PROMPTS}, ValueError, r"eval_prompts\['math'\]: "),
        ({"math": EvalSet(PROMPTS, rewards=3)}, TypeError, r"eval_prompts\['math'\]: "),
    ],
)
def test_a_set_that_cannot_be_used_is_named(sets: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make_trainer(max_steps=1).train(PROMPTS, eval_prompts=sets)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"temprature": 1.0}, "unknown option 'temprature': did you mean 'temperature'?"),
        ({"environment": True}, "environment is True, expected an environment, or False for single replies"),
        ({"samples": 0}, "samples: input should be greater than or equal to 1, got 0"),
        ({"stop": [""]}, "stop is ('',), expected no empty string"),
        ({"temperature": 0, "samples": 4}, "temperature=0 with samples=4: greedy decoding gives the same completion"),
    ],
)
def test_a_wrong_setting_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        EvalSet(PROMPTS, **settings)
    assert message in str(error.value)
