"""Several evaluation sets in training and in evaluate, each with its settings."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rlox_grpo import GRPO, EvalSet
from rlox_grpo.errors import ConfigError
from toy import PROMPTS, TARGET, ToyLM, options


def right_or_wrong(completions: Any, prompts: Any) -> list[float]:
    return [float((completion == TARGET).any()) for completion in completions]


def never_right(completions: Any, prompts: Any) -> list[float]:
    return [0.0 for _ in completions]


def make_trainer(folder: Path | None = None, **changes: Any) -> GRPO:
    folders = {} if folder is None else {"output_dir": folder}
    return GRPO(ToyLM(), right_or_wrong, **options(**folders, **changes))


def read_evaluations(folder: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (folder / "evaluations.jsonl").read_text().splitlines()]


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
    assert "often" in report


def test_one_set_has_the_metrics_of_rows() -> None:
    trainer = make_trainer()
    assert trainer.evaluate(EvalSet(PROMPTS[:2])) == trainer.evaluate(PROMPTS[:2])
    named = trainer.evaluate({"toy": PROMPTS[:2], "greedy": EvalSet(PROMPTS[:2], temperature=0)})
    assert named["toy/accuracy"] == trainer.evaluate(PROMPTS[:2])["accuracy"]
    assert named["greedy/mean_reward"] == trainer.evaluate(PROMPTS[:2], greedy=True)["mean_reward"]
    assert trainer.evaluate(EvalSet(PROMPTS[:2], samples=3)).keys() >= {"pass@3"}


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
        ({"samples": 0}, "samples: input should be greater than or equal to 1, got 0"),
        ({"temperature": 0, "samples": 4}, "temperature=0 with samples=4: greedy decoding gives the same completion"),
    ],
)
def test_a_wrong_setting_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        EvalSet(PROMPTS, **settings)
    assert message in str(error.value)
