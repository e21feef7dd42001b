"""`from_openrlhf` against OpenRLHF's own executor: the wheel's module ``openrlhf.utils.agent``, on the same tokens.

OpenRLHF cannot be imported without a GPU (flash-attn), so the package around this module is left out.
"""

from __future__ import annotations

import asyncio
import importlib.util
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import lake
from rlox_grpo.environments import from_openrlhf
from rlox_grpo.errors import ConfigError


@pytest.fixture(scope="module")
def agents() -> Any:
    """``openrlhf.utils.agent`` of the installed wheel."""
    (folder,) = importlib.util.find_spec("openrlhf").submodule_search_locations
    spec = ModuleSpec("openrlhf.utils", None, is_package=True)
    spec.submodule_search_locations = [str(Path(folder) / "utils")]
    before = set(sys.modules)
    sys.modules["openrlhf.utils"] = importlib.util.module_from_spec(spec)
    yield importlib.import_module("openrlhf.utils.agent")
    for name in {name for name in sys.modules if name.startswith("openrlhf")} - before:
        del sys.modules[name]


@pytest.fixture(scope="module")
def walk(agents: Any) -> Any:
    class AgentInstance(agents.AgentInstanceBase):
        """The game of tests/lake.py; the label is the seed."""

        def __init__(self) -> None:
            self.steps = 0

        async def reset(self, states: Any, **given: Any) -> Any:
            self.lake = lake.Lake(int(states["label"]))
            return {"observation": f"{states['observation']} {self.lake.place}"}

        async def step(self, states: Any, **given: Any) -> Any:
            self.steps += 1
            way = lake.read_way(states["action_text"].removesuffix("<eos>"))
            reward = self.lake.reward if way == 4 else 0.0
            return {
                "rewards": torch.tensor(reward, dtype=torch.float64),
                "scores": torch.tensor(reward),
                "environment_feedback": "" if way == 4 else self.lake.move(way),
                "done": way == 4,
                "extra_logs": {"steps": torch.tensor(self.steps), "note": "text"},
            }

    return AgentInstance


def test_the_game_trains_to_the_same_weights(
    walk: Any, expected: Any, model: Any, tokenizer: Any, tmp_path: Any
) -> None:
    rows = [{"prompt": row["start"], "label": row["seed"]} for row in lake.ROWS]
    episodes, weights = lake.train(from_openrlhf(walk), model, tokenizer, tmp_path, rows)
    assert episodes == expected[0]
    assert all(one.equal(other) for one, other in zip(weights, expected[1], strict=True))


def test_the_guides_lines_train(walk: Any, run_guide: Any, monkeypatch: Any) -> None:
    monkeypatch.setitem(sys.modules, "my_agent", SimpleNamespace(AgentInstance=walk))
    episodes = run_guide("other_environments.md", "OpenRLHF")
    assert {episode["stop_reason"] for episode in episodes} <= {"completed", "max_turns"}
    assert len(episodes) == 2


def test_openrlhfs_executor_plays_the_same_episode(agents: Any, walk: Any, tokenizer: Any, play: Any) -> None:
    """Its own loop and ours, on the same replies: observations, rewards and logs."""
    replies = [lake.CALLS[1], lake.CALLS[2], lake.CALLS[2], "stop"]
    source = iter(replies)

    class Engine:
        async def generate(self, tokens: Any, params: Any, multi_modal_data: Any = None) -> Any:
            text = next(source)
            ids = tokenizer(text, add_special_tokens=False)["input_ids"]
            return SimpleNamespace(
                outputs=[SimpleNamespace(token_ids=ids, text=text, finish_reason="stop", logprobs=None)]
            )

    executor = agents.MultiTurnAgentExecutor(walk)
    params = SimpleNamespace(max_tokens=8, logprobs=None)
    theirs = asyncio.run(executor.execute("Go.", 3, params, 500, tokenizer, Engine()))
    ours, shown = play(from_openrlhf(walk), replies, {"prompt": "Go.", "label": 3})
    assert ours.reward == theirs["reward"]
    assert ours.metrics == {"steps": float(theirs["extra_logs"]["steps"])}
    spans = [0, *(edge for span in theirs["action_ranges"] for edge in span)]
    seen = [tokenizer.decode(theirs["observation_tokens"][a:b]) for a, b in zip(spans[::2], spans[1::2], strict=False)]
    assert shown == seen


@pytest.mark.parametrize(
    ("told", "error", "message"),
    [
        ({}, TypeError, "step returned dict {}: expected rewards, environment_feedback and done"),
        (
            {"rewards": 1.0, "environment_feedback": None, "done": False},
            TypeError,
            "environment_feedback NoneType None",
        ),
        ({"rewards": "x", "environment_feedback": "", "done": True}, TypeError, "the reward str 'x'"),
        (
            {"rewards": 1.0, "environment_feedback": "", "done": True, "environment_images": [1]},
            ValueError,
            "images are not supported",
        ),
        (
            {
                "rewards": 1.0,
                "environment_feedback": "",
                "done": True,
                "sampling_params": SimpleNamespace(max_tokens=2),
            },
            ValueError,
            "step returned sampling_params",
        ),
    ],
)
def test_what_an_agent_does_wrong_is_named(told: Any, error: Any, message: str, walk: Any, play: Any) -> None:
    class Wrong(walk):  # type: ignore[misc]
        async def step(self, states: Any, **given: Any) -> Any:
            return told

    with pytest.raises(error, match=message):
        play(from_openrlhf(Wrong), ["x"], {"prompt": "Go.", "label": 3})


def test_what_cannot_be_adapted_is_refused(walk: Any, play: Any) -> None:
    with pytest.raises(ConfigError, match="dict has no async method reset"):
        from_openrlhf(dict)
    with pytest.raises(ConfigError, match="from_openrlhf got str 'x'"):
        from_openrlhf("x")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="the column 'prompt' is list"):
        play(from_openrlhf(walk), ["x"], {"prompt": [], "label": 3})
    _, shown = play(from_openrlhf(walk, encode=str.upper), ["stop"], {"prompt": "Go.", "label": 3})
    assert shown == ["GO. 0"]
