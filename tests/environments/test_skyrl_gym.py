"""`from_skyrl_gym` against the installed skyrl-gym."""

from __future__ import annotations

from typing import Any

import pytest
from skyrl_gym.envs.base_text_env import BaseTextEnv, BaseTextEnvStepOutput

import lake
from rlox_grpo.environments import from_skyrl_gym
from rlox_grpo.errors import ConfigError


class Walk(BaseTextEnv):
    """The game of tests/lake.py."""

    def __init__(self, env_config: Any = None, extras: Any = None) -> None:
        super().__init__()
        self.lake = lake.Lake(extras["seed"])

    def init(self, prompt: Any) -> Any:
        (message,) = prompt
        return [{"role": "user", "content": f"{message['content']} {self.lake.place}"}], {}

    def step(self, action: str) -> BaseTextEnvStepOutput:
        if (way := lake.read_way(action)) < 4:
            seen = [{"role": "user", "content": self.lake.move(way)}]
            return BaseTextEnvStepOutput(observations=seen, reward=0.0, done=False, metadata={})
        return BaseTextEnvStepOutput(observations=[], reward=self.lake.reward, done=True, metadata={})

    def get_metrics(self) -> Any:
        return {"place": self.lake.place, "note": "text"}


def test_the_game_trains_to_the_same_weights(expected: Any, model: Any, tokenizer: Any, tmp_path: Any) -> None:
    rows = [{**row, "prompt": row["start"]} for row in lake.ROWS]
    episodes, weights = lake.train(from_skyrl_gym(Walk), model, tokenizer, tmp_path, rows)
    assert episodes == expected[0]
    assert all(one.equal(other) for one, other in zip(weights, expected[1], strict=True))


def test_the_guides_lines_train(run_guide: Any) -> None:
    episodes = run_guide("other_environments.md", "SkyRL-gym")
    assert [episode["stop_reason"] for episode in episodes] == ["completed"] * 2


def test_registered_environments(play: Any) -> None:
    row = {"prompt": "2 + 3?", "reward_spec": {"method": "rule", "ground_truth": "5"}}
    environment = from_skyrl_gym("gsm8k")
    assert environment.__name__ == "gsm8k"
    outcome, shown = play(environment, ["#### 5"], row)
    assert (outcome.reward, shown) == (1.0, ["2 + 3?"])
    assert play(environment, ["#### 6"], row)[0].reward < 1.0
    turns, shown = play(from_skyrl_gym("gsm8k_multi_turn"), ["#### 6", "#### 5"], {**row, "max_turns": 2})
    assert len(turns.turn_rewards) == len(shown) == 2
    with pytest.raises(AssertionError, match="reward_spec field is required"):
        play(environment, ["x"], {"prompt": "2 + 3?"})


def test_an_episode(play: Any) -> None:
    outcome, shown = play(from_skyrl_gym(Walk), [lake.CALLS[1], "stop"], {"prompt": "Go.", "seed": 3})
    assert shown[0] == "Go. 0"
    assert outcome.turn_rewards == (0.0, outcome.reward)
    assert list(outcome.metrics) == ["place"]
    with pytest.raises(ValueError, match="no column 'prompt', which Walk needs"):
        play(from_skyrl_gym(Walk), ["x"], {"seed": 3})


@pytest.mark.parametrize(
    ("told", "error", "message"),
    [
        ((0, 1), TypeError, "step returned tuple .*: expected observations, reward and done"),
        ({"observations": [], "reward": 0.0, "done": False}, ValueError, "neither an observation nor done"),
        ({"observations": ["x"], "reward": 0.0, "done": False}, TypeError, "step returned list .*: expected a text"),
        ({"observations": [], "reward": None, "done": True}, TypeError, "the reward NoneType None"),
        (
            {"observations": [], "reward": 0.0, "done": True, "postprocessed_action": "y"},
            ValueError,
            "would replace sampled tokens",
        ),
    ],
)
def test_what_an_environment_does_wrong_is_named(told: Any, error: Any, message: str, play: Any) -> None:
    class Wrong(Walk):
        def step(self, action: str) -> Any:
            return told

    with pytest.raises(error, match=message):
        play(from_skyrl_gym(Wrong), ["x"], {"prompt": "Go.", "seed": 3})


def test_what_cannot_be_adapted_is_refused() -> None:
    with pytest.raises(ConfigError, match="no environment 'chess'; it has aime, gsm8k"):
        from_skyrl_gym("chess")
    with pytest.raises(ConfigError, match="from_skyrl_gym got int 3"):
        from_skyrl_gym(3)  # type: ignore[arg-type]
