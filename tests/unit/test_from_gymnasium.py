"""`from_gymnasium` against the installed Gymnasium: its toy-text environments, hooks, and what goes wrong."""

from __future__ import annotations

import re
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rlox_grpo.environments
from rlox_grpo.cli import main
from rlox_grpo.cli.values import import_environment
from rlox_grpo.config.records import EpisodeConfig
from rlox_grpo.config.run_file import read_run_file
from rlox_grpo.environments import Outcome, from_gymnasium
from rlox_grpo.environments.foreign import join_prompt, read_reward
from rlox_grpo.environments.gymnasium import read_action, show_observation
from rlox_grpo.errors import ConfigError, EpisodeError
from rlox_grpo.rollout.episodes.play import play_episode

gymnasium = pytest.importorskip("gymnasium")
spaces = gymnasium.spaces

LAKE = ("left", "down", "right", "up")
TAXI = max(name for name in gymnasium.registry if name.startswith("Taxi-v"))


def play(environment: Any, replies: Any, row: Any = None, **options: Any) -> tuple[Outcome, list[str]]:
    """The outcome, and the messages that the policy was shown."""
    said: list[str] = []
    source = iter(replies)
    outcome = play_episode(
        environment, row or {}, lambda: next(source), said.append, config=EpisodeConfig.create(**options)
    )
    return outcome, [line.removeprefix("user: ") for line in said if line.startswith("user: ")]


@pytest.mark.parametrize(
    ("name", "replies", "first", "reward", "reason"),
    [
        # FrozenLake: down, down, right, right, down, right over firm ice to the goal.
        ("FrozenLake-v1", ["1", "1", "2", "2", "1", "2"], "0", 1.0, "completed"),
        # CliffWalking: up, 11 times right, down; each step costs 1.
        ("CliffWalking-v1", ["0"] + ["1"] * 11 + ["2"], "36", -13.0, "completed"),
        # Taxi: 3 steps south, -1 each, until the environment's own limit.
        (TAXI, ["0"] * 3, None, -3.0, "truncated"),
        # Blackjack: stick.
        ("Blackjack-v1", ["0"], None, None, "completed"),
    ],
)
def test_toy_text_environments_play(name: str, replies: Any, first: Any, reward: Any, reason: str) -> None:
    options: dict[str, Any] = {"FrozenLake-v1": {"is_slippery": False}, TAXI: {"max_episode_steps": 3}}.get(name, {})
    environment = from_gymnasium(name, **options)
    assert environment.__name__ == name
    outcome, shown = play(environment, replies, {"seed": 4}, max_turns=20)
    assert outcome.stop_reason == reason
    assert outcome.turn_rewards is not None
    assert len(outcome.turn_rewards) == len(replies)
    assert outcome.metrics == {"steps": len(replies)}
    twin = gymnasium.make(name, disable_env_checker=True, **options)
    observation, _ = twin.reset(seed=4)
    assert shown[0] == ", ".join(map(str, np.atleast_1d(observation)))
    if first is not None:
        assert shown[0] == first
    if reward is not None:
        assert outcome.reward == reward
    twin.close()


def test_actions_by_name_and_a_prompt() -> None:
    environment = from_gymnasium("FrozenLake-v1", actions=LAKE, is_slippery=False)
    replies = ["Not left, I go DOWN.", "down", "right", "right", "down", "Right"]
    outcome, shown = play(environment, replies, {"prompt": "Cross the lake."})
    assert outcome.reward == 1.0
    assert shown[0] == "Cross the lake.\n\n0"
    assert shown[1:] == ["4", "8", "9", "10", "14"]


def test_an_action_that_cannot_be_read_is_answered_or_ends_the_episode() -> None:
    environment = from_gymnasium("FrozenLake-v1", actions=LAKE, is_slippery=False)
    replies = ["upwards", "down", "down", "right", "right", "down", "right"]
    outcome, shown = play(environment, replies)
    assert shown[1] == "error: the reply names no action: expected one of left, down, right, up"
    assert (outcome.reward, outcome.turn_rewards) == (1.0, (0.0,) * 6 + (1.0,))
    assert outcome.metrics == {"steps": 6.0}
    outcome, shown = play(environment, replies, on_parse_error="end", limit_reward=-5.0)
    assert (outcome.reward, outcome.stop_reason, len(shown)) == (-5.0, "parse_error", 1)


def test_hooks() -> None:
    def encode(field: int, env: Any) -> str:
        return f"row {field // 4}, column {field % 4} of {env.unwrapped.desc.shape}"

    def decode(text: str, env: Any) -> int:
        if text not in "ldru":
            raise ValueError(f"expected l, d, r or u, not {text}")
        return "ldru".index(text)

    environment = from_gymnasium("FrozenLake-v1", encode=encode, decode=decode, is_slippery=False)
    outcome, shown = play(environment, ["d", "x", "d", "r", "r", "d", "r"])
    assert outcome.reward == 1.0
    assert shown[:3] == [
        "row 0, column 0 of (4, 4)",
        "row 1, column 0 of (4, 4)",
        "error: expected l, d, r or u, not x",
    ]
    wrong = from_gymnasium("FrozenLake-v1", decode=lambda text, env: 4)
    assert play(wrong, ["d"], on_parse_error="end")[0].stop_reason == "parse_error"
    with pytest.raises(TypeError, match="encode returned int 0: expected a text"):
        play(from_gymnasium("FrozenLake-v1", encode=lambda field, env: field), ["0"])


def test_the_seed_is_the_rows_or_the_episodes() -> None:
    environment = from_gymnasium(TAXI, max_episode_steps=1)
    firsts = {play(environment, ["0"], {"seed": seed})[1][0] for seed in (1, 1, 2, 3)}
    assert len(firsts) == 3
    assert play(environment, ["0"])[1] == play(environment, ["0"], {"seed": 0})[1]  # chat.seed is 0 here


class Bare(gymnasium.Env):
    """Returns what it is told to."""

    observation_space = spaces.Discrete(9)
    action_space = spaces.Discrete(2)

    def __init__(self, reset: Any = (0, {}), step: Any = (1, 1.0, True, False, {})) -> None:
        self.found = {"reset": reset, "step": step}

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        return self._give("reset")

    def step(self, action: Any) -> Any:
        return self._give("step")

    def _give(self, name: str) -> Any:
        found = self.found[name]
        if isinstance(found, Exception):
            raise found
        return found


@pytest.mark.parametrize(
    ("told", "error", "message"),
    [
        ({"reset": 0}, TypeError, r"reset returned int 0: expected the pair"),
        ({"reset": OSError("gone")}, OSError, "gone"),
        ({"reset": ("here", {})}, ValueError, "invalid literal"),
        ({"step": (0, 1.0, False, {})}, TypeError, r"step returned tuple .*: expected observation, reward, terminated"),
        ({"step": (0, "much", True, False, {})}, TypeError, "step returned the reward str 'much': expected a number"),
        ({"step": (0, float("nan"), True, False, {})}, ValueError, "the reward nan: expected a finite number"),
        ({"step": ZeroDivisionError("no")}, ZeroDivisionError, "no"),
    ],
)
def test_what_an_environment_does_wrong_is_named(told: Any, error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        play(from_gymnasium(Bare, **told), ["1"])


class Box(Bare):
    observation_space = spaces.Dict({"view": spaces.Box(0, 1, (2, 2))})


class Steering(Bare):
    action_space = spaces.Box(-1, 1, (2,))


@pytest.mark.parametrize(
    ("environment", "options", "message"),
    [
        ("CartPole-v1", {}, r"observations of CartPole-v1 are of Box.*no text form: give encode="),
        (Box, {}, r"observations of Box are of Dict.*no text form"),
        (Steering, {}, r"actions of Steering are of Box.*give decode="),
        ("Nowhere-v1", {}, "'Nowhere-v1' cannot be made: NameNotFound"),
        ("FrozenLake-v1", {"is_slipery": False}, "cannot be made: TypeError"),
        ("FrozenLake-v1", {"actions": ("left", "right")}, r"actions has 2 names, .* Discrete\(4\)"),
        ("FrozenLake-v1", {"actions": ("up", "Up", "left", "right")}, "two actions have the same name"),
        ("FrozenLake-v1", {"actions": LAKE, "decode": lambda text, env: 0}, "actions= is ignored with decode="),
        ("FrozenLake-v1", {"decode": "int"}, "decode is str 'int': expected a function of the reply's text"),
        (lambda: 3, {}, "made int 3: expected a gymnasium.Env"),
        (Bare(), {}, "give its id or a function that makes it"),
        (5, {}, "from_gymnasium got int 5"),
    ],
)
def test_what_cannot_be_adapted_is_refused_before_training(environment: Any, options: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        from_gymnasium(environment, **options)


class Hanging(Bare):
    def step(self, action: Any) -> Any:
        time.sleep(600)


class Raising(Bare):
    def step(self, action: Any) -> Any:
        raise RuntimeError("no way")


def test_an_environment_that_hangs_or_raises_ends_its_episode(byte_tokenizer: Any, make_tiny_model: Any) -> None:
    import lake
    from rlox_grpo import GRPO

    tokenizer = lake.make_tokenizer(byte_tokenizer)
    model = lake.make_model(make_tiny_model, tokenizer)

    def evaluate(make: Any, **options: Any) -> Any:
        environment = from_gymnasium(make, decode=lambda text, env: 1)
        trainer = GRPO(
            model, environment=environment, tokenizer=tokenizer, max_new_tokens=2, eval_samples=2, failure_reward=-1.0,
            **options,
        )  # fmt: skip
        return trainer.evaluate([{"seed": 1}])

    metrics = evaluate(Hanging, turn_timeout=1.0, episode_workers=2)
    assert metrics["episode/stop/timeout"] == 1.0
    metrics = evaluate(lambda: Bare(step=(1, 2)), on_environment_error="end")
    assert metrics["episode/stop/environment_error"] == 1.0
    message = r"environment Raising failed at prompts\[0\], episode [01], turn 1: .*no way"
    with pytest.raises(EpisodeError, match=message):
        evaluate(Raising)


def test_observations_as_text() -> None:
    space = spaces.Dict({"a": spaces.Text(5), "b": spaces.Tuple([spaces.Discrete(3), spaces.MultiDiscrete([2, 3])])})
    assert show_observation(space, {"a": "hi", "b": (np.int64(2), np.array([1, 0]))}) == "a: hi\nb: 2, 1, 0"
    with pytest.raises(TypeError, match="the observation is int 3, not of Text"):
        show_observation(spaces.Text(5), 3)


@pytest.mark.parametrize(
    ("text", "action"),
    [("2", 2), ("I take 0 and then 3.", 3), ("action=1", 1), ("-1", None), ("4", None), ("", None), ("2x", None),
     ("9" * 5000, None), ("v1.3", None), ("二", None)],
)  # fmt: skip
def test_numbers_as_actions(text: str, action: int | None) -> None:
    if action is None:
        with pytest.raises(ValueError, match="expected a number from 0 to 3"):
            read_action(text, spaces.Discrete(4))
    else:
        assert read_action(text, spaces.Discrete(4)) == action


def test_other_actions() -> None:
    assert read_action("-1", spaces.Discrete(3, start=-1)) == -1
    assert read_action("pick up", spaces.Discrete(2), ("up", "pick up")) == 1
    assert read_action("b", spaces.Discrete(2, start=5), ("a", "b")) == 6
    assert read_action("hello", spaces.Text(9)) == "hello"
    with pytest.raises(ValueError, match="expected a text of 1 to 9"):
        read_action("", spaces.Text(9))


def test_prompts_and_rewards_of_other_packages() -> None:
    assert join_prompt(None, "x") == "x"
    messages = [{"role": "system", "content": "s"}]
    assert join_prompt(messages, "x") == [*messages, {"role": "user", "content": "x"}]
    assert join_prompt("p", [{"role": "user", "content": "x"}])[0] == {"role": "user", "content": "p"}
    with pytest.raises(TypeError, match="the column 'prompt' is int 3"):
        join_prompt(3, "x")
    assert read_reward(np.float32(0.5), "step") == 0.5
    assert read_reward(np.array([2]), "step") == 2.0
    assert read_reward(True, "step") == 1.0


def test_the_command_line_plays_by_id(tmp_path: Any, capsys: Any) -> None:
    script = tmp_path / "replies.txt"
    script.write_text("down\ndown\nright\nright\ndown\nright\n")
    table = "{is_slippery = false, actions = ['left', 'down', 'right', 'up']}"
    words = ["play", "gymnasium:FrozenLake-v1", "--script", str(script), "--environment-args", table]
    assert main(words) == 0
    assert "reward       1\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "table", "message"),
    [
        ("gymnasium:", "{}", "environment is 'gymnasium:': expected a name after the colon"),
        ("gymnasium:Nowhere-v1", "{}", "cannot be made: NameNotFound"),
        ("gymnasium:CartPole-v1", "{}", "give encode="),
        ("gymnasium:FrozenLake-v1", "{slip = 1}", "cannot be made: TypeError"),
        ("gymnasium:FrozenLake-v1", "{environment = 1}", "with environment_args {'environment': 1}: from_gymnasium()"),
        ("lake:walk", "{a = 1}", "environment_args is ignored: environment is 'lake:walk', not one of gymnasium:"),
        ("gymnasium:FrozenLake-v1", "slip", "--environment-args 'slip' is not a TOML table"),
        ("gymnasium:FrozenLake-v1", "3", "--environment-args '3' is not a TOML table"),
    ],
)
def test_mistakes_on_the_command_line(name: str, table: str, message: str, capsys: Any) -> None:
    assert main(["play", name, "--environment-args", table]) == 2
    assert message in capsys.readouterr().err


def test_a_run_file_names_an_environment_by_id(tmp_path: Any) -> None:
    path = tmp_path / "run.toml"
    head = 'model = "m"\ntrain_data = "rows.jsonl"\n'
    path.write_text(head + 'environment = "gymnasium:FrozenLake-v1"\n[environment_args]\nis_slippery = false\n')
    origin, _ = read_run_file(path, {})
    environment, _ = import_environment(origin.environment, (), (), origin.environment_args)
    assert environment == from_gymnasium("FrozenLake-v1", is_slippery=False)
    path.write_text(head + '[[rewards]]\nname = "exact"\n[environment_args]\nis_slippery = false\n')
    origin, _ = read_run_file(path, {})
    with pytest.raises(ConfigError, match="environment_args is ignored: environment is not set"):
        import_environment(origin.environment, (), (), origin.environment_args)


@pytest.mark.parametrize(
    ("function", "module", "extra", "argument"),
    [
        ("from_gymnasium", "gymnasium", "gymnasium", "FrozenLake-v1"),
        ("from_openenv", "openenv.core.generic_client", "openenv", "http://127.0.0.1:9"),
        ("from_skyrl_gym", "skyrl_gym", "skyrl-gym", "gsm8k"),
        ("from_verifiers", "verifiers.v1", "verifiers", "gsm8k"),
    ],
)
def test_without_its_package_an_adapter_names_the_extra(
    function: str, module: str, extra: str, argument: str, monkeypatch: Any
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ImportError, match=rf"{function} needs {extra}: pip install {extra} \(the extra '{extra}'"):
        getattr(rlox_grpo.environments, function)(argument)


def test_the_guides_name_the_versions_that_the_lock_file_pins() -> None:
    root = Path(__file__).parents[2]
    lock, guides = (root / "uv.lock").read_text(), root / "docs/guides"
    named = re.findall(r"`from_(\w+)`\]\(\S+ \| [^|]+ \| ([\d.]+) \|", (guides / "other_environments.md").read_text())
    named += re.findall(r"\[(smolagents)\]\S+ \(tested with ([\d.]+)\)", (guides / "openai_agents.md").read_text())
    assert len(named) == 6
    for package, version in named:
        assert f'name = "{package.replace("_", "-")}"\nversion = "{version}"\n' in lock, package
