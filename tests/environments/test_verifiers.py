"""`from_verifiers` against the installed verifiers."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest

import lake
from rlox_grpo import GRPO
from rlox_grpo.environments import from_verifiers
from rlox_grpo.errors import ConfigError, EpisodeError

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]

AGENT = {"harness": {"id": "verifiers_lake"}, "runtime": {"type": "subprocess"}}


@pytest.fixture(scope="module", autouse=True)
def path() -> Any:
    """verifiers imports tasksets by their names."""
    folder = str(Path(__file__).parent)
    sys.path.append(folder)
    yield
    sys.path.remove(folder)


@pytest.fixture(scope="module")
def environment() -> Any:
    return from_verifiers("verifiers_lake", agent=AGENT)


def test_the_game_trains_to_the_same_weights(
    environment: Any, expected: Any, model: Any, tokenizer: Any, tmp_path: Any
) -> None:
    rows = environment.make_rows()
    assert rows == [{"task": 0}, {"task": 1}, {"task": 2}]
    episodes, weights = lake.train(environment, model, tokenizer, tmp_path, rows[:2])
    assert episodes == expected[0]
    assert all(one.equal(other) for one, other in zip(weights, expected[1], strict=True))
    assert not [name for name in os.environ if name.startswith("RLOX_GRPO_API_KEY")]


def test_the_guides_lines_train(run_guide: Any) -> None:
    """With a harness of the tests: the guide's needs a network at its first start."""
    given = f'"verifiers_lake", tasks=2, agent={AGENT!r}'
    episodes = run_guide("other_environments.md", "verifiers", {'"my_taskset", tasks=500': given})
    assert {episode["stop_reason"] for episode in episodes} <= {"completed", "max_turns"}
    assert len(episodes) == 4


def evaluate(environment: Any, model: Any, tokenizer: Any, row: Any, **options: Any) -> Any:
    given = {"max_new_tokens": 1, "eval_samples": 2, "limit_reward": 0.25, "max_turns": 5, **options}
    return GRPO(model, environment=environment, tokenizer=tokenizer, **given).evaluate([row])


def test_metrics_limits_and_failures(environment: Any, model: Any, tokenizer: Any) -> None:
    metrics = evaluate(environment, model, tokenizer, {"task": 1}, max_turns=60, eval_samples=4)
    assert metrics["episode/stop/completed"] == 1.0
    assert metrics["environment/half"] == 0.5
    assert metrics["environment/seed"] == 11.0
    assert metrics["mean_reward"] == pytest.approx(metrics["environment/place"])
    metrics = evaluate(environment, model, tokenizer, {"task": 0}, max_turns=1, seed=1)
    assert metrics["episode/stop/max_turns"] == 1.0
    with pytest.raises(EpisodeError, match=r"environment verifiers_lake failed at prompts\[0\].*the ice broke"):
        evaluate(environment, model, tokenizer, {"task": 2})
    metrics = evaluate(environment, model, tokenizer, {"task": 2}, on_environment_error="end", failure_reward=-1.0)
    assert metrics["episode/stop/environment_error"] == 1.0
    with pytest.raises(EpisodeError, match="the column 'task' is int 9: expected a number from 0 to 2"):
        evaluate(environment, model, tokenizer, {"task": 9})


@pytest.mark.parametrize(
    ("taskset", "options", "message"),
    [
        ("no_such_taskset", {}, "verifiers cannot load 'no_such_taskset': ModuleNotFoundError"),
        ("verifiers_lake", {"agent": {"harness": {"id": "nobody"}}}, "harness 'nobody' not found"),
        ("verifiers_lake", {"agent": {"runtime": {"type": "moon"}}}, "ValidationError"),
        ("verifiers_lake", {"tasks": 0}, "the taskset 'verifiers_lake' has no tasks"),
    ],
)
def test_what_cannot_be_adapted_is_refused(taskset: str, options: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        from_verifiers(taskset, **options)
