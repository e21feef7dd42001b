"""`from_openenv` against a server of the installed openenv."""

from __future__ import annotations

from typing import Any

import pytest

import lake
from rlox_grpo.environments import from_openenv
from rlox_grpo.errors import ConfigError


def test_the_game_trains_to_the_same_weights(
    server: str, expected: Any, model: Any, tokenizer: Any, tmp_path: Any
) -> None:
    """8 episodes beside each other, of which 3 hold one of the server's 3 sessions."""
    environment = from_openenv(server, sessions=3)
    rows = lake.add_options(lake.ROWS)
    episodes, weights = lake.train(environment, model, tokenizer, tmp_path, rows, turn_timeout=60.0)
    assert episodes == expected[0]
    assert all(one.equal(other) for one, other in zip(weights, expected[1], strict=True))


def test_the_guides_lines_train(server: str, run_guide: Any) -> None:
    episodes = run_guide(
        "other_environments.md", "OpenEnv", {"http://127.0.0.1:8000": server, "sessions=8": "sessions=3"}
    )
    assert {episode["stop_reason"] for episode in episodes} <= {"completed", "max_turns"}
    assert len(episodes) == 4


def test_an_episode(server: str, play: Any) -> None:
    environment = from_openenv(server)
    assert environment.__name__ == "Say"
    row = {"prompt": "Walk.", "seed": 3, "reset_options": {"start": "at"}}
    outcome, shown = play(environment, [lake.CALLS[0], "stop"], row)
    assert shown[0] == "Walk.\n\nat 0"
    assert (outcome.turn_rewards[0], outcome.metrics, outcome.stop_reason) == (0.0, {"steps": 2.0}, "completed")
    with pytest.raises(RuntimeError, match="the ice broke"):
        play(environment, ["raise"])


def encode(observation: Any) -> str:
    return f"{observation['row']}/{observation['column']}"


def decode(text: str) -> Any:
    way, _, speed = text.partition(" ")
    if not speed:
        raise ValueError("expected a way and a speed")
    return {"way": way, "speed": int(speed)}


def test_hooks_and_actions_that_cannot_be_read(server: str, play: Any) -> None:
    environment = from_openenv(f"{server}/wide", encode=encode, decode=decode)
    outcome, shown = play(environment, ["1", "left 1", "2 1", "3 2"])
    assert shown == [
        "0/0",
        "error: expected a way and a speed",
        "error: the environment does not take this action",
        "2/1",
    ]
    assert outcome.turn_rewards == (0.0, 0.0, 1.0, 1.0)
    assert play(environment, ["1"], on_parse_error="end")[0].stop_reason == "parse_error"
    with pytest.raises(TypeError, match="decode returned int 3: expected the fields"):
        play(from_openenv(f"{server}/wide", encode=encode, decode=lambda text: 3), ["1"])
    with pytest.raises(TypeError, match="encode returned NoneType None: expected a text"):
        play(from_openenv(f"{server}/wide", encode=lambda seen: None, decode=decode), ["1"])


def test_a_server_that_is_slow_or_full(server: str, play: Any, model: Any, tokenizer: Any) -> None:
    with pytest.raises(RuntimeError, match=r"did not answer within 0\.5 s"):
        play(from_openenv(f"{server}/slow", timeout=0.5), ["slow"])
    from rlox_grpo import GRPO

    def evaluate(environment: Any, **options: Any) -> Any:
        trainer = GRPO(
            model, environment=environment, tokenizer=tokenizer, max_new_tokens=1, failure_reward=-1.0, **options
        )
        return trainer.evaluate([{"seed": 1}])

    slow = from_openenv(f"{server}/slow", decode=lambda text: {"text": "slow"})
    assert evaluate(slow, turn_timeout=1.0, eval_samples=2)["episode/stop/timeout"] == 1.0
    full = evaluate(from_openenv(server), on_environment_error="end", eval_samples=6, max_turns=40)
    assert 0 < full["episode/stop/environment_error"] < 1


@pytest.mark.parametrize(
    ("path", "options", "message"),
    [
        ("/wide", {"decode": decode}, "observations of .* have the fields row, column, not one text: give encode="),
        ("/wide", {"encode": encode}, "actions of .* have the fields way, speed, not one required text"),
        ("/nothing", {}, "does not answer: HTTPStatusError"),
        ("", {"sessions": 0}, "sessions is 0"),
        ("", {"encode": "text"}, "encode is str 'text': expected a function of an observation"),
    ],
)
def test_what_cannot_be_adapted_is_refused(server: str, path: str, options: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        from_openenv(server + path, **options)


def test_no_server() -> None:
    with pytest.raises(ConfigError, match=r"127\.0\.0\.1:9 does not answer: ConnectError.*Start it before training"):
        from_openenv("http://127.0.0.1:9")
    with pytest.raises(ConfigError, match="from_openenv got str 'localhost': expected a URL"):
        from_openenv("localhost")
