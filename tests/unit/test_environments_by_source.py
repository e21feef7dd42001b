"""Several environments in a run: the source of a row chooses one, with limits, rewards and metrics by source."""

from __future__ import annotations

import asyncio
import copy
import functools
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import chatml
from rlox_grpo import GRPO, TrainSource
from rlox_grpo.config.schema import GRPOConfig
from rlox_grpo.environments import Outcome
from rlox_grpo.errors import CheckpointError, ConfigError
from rlox_grpo.prompts.load import load_rows
from rlox_grpo.rewards.calls import RewardError
from rlox_grpo.rollout.engines.hf.engine import HFEngine
from rlox_grpo.rollout.episodes.run import EpisodeRunner
from rlox_grpo.types import Sampling

TEMPLATE = "{% if tools %}<|im_start|>tools\n{{ tools | length }}<|im_end|>\n{% endif %}" + chatml.CHATML


def look_up(word: str) -> str:
    """Look a word up.

    Args:
        word: The word.
    """
    return word


async def game(row: Any, chat: Any) -> Outcome:
    reply = await chat.turn(f"{row['secret']}?", tools=[look_up])
    reply = await chat.turn("again")
    return Outcome(float(len(reply.token_ids) % 2), metrics={"turns": 2})


async def question(row: Any, chat: Any) -> float | None:
    await chat.turn(row["text"])
    return None


ENVIRONMENTS = {"game": game, "questions": question}


async def by_source(row: Any, chat: Any) -> Any:
    return await ENVIRONMENTS[row["source"]](row, chat)


def first_is_even(completion_ids: Any, **_: Any) -> list[float]:
    return [float(ids[0] % 2 == 0) for ids in completion_ids]


@pytest.fixture(scope="module")
def tokenizer(byte_tokenizer: Any) -> Any:
    return chatml.make_tokenizer(byte_tokenizer, TEMPLATE)


@pytest.fixture(scope="module")
def model(make_tiny_model: Any, tokenizer: Any) -> Any:
    return make_tiny_model("qwen2", vocab_size=len(tokenizer), max_position_embeddings=1024)


def make_prompts() -> dict[str, Any]:
    games = [{"secret": number} for number in range(4)]
    questions = [{"text": f"q{number}"} for number in range(4)]
    return {"game": games, "questions": TrainSource(questions, rewards=first_is_even)}


def make_trainer(model: Any, tokenizer: Any, environment: Any = by_source, **options: Any) -> GRPO:
    return GRPO(
        copy.deepcopy(model), environment=environment, tokenizer=tokenizer, group_size=2, max_new_tokens=5,
        zero_variance="keep", learning_rate=1e-2, log_to=(), **{"prompts_per_step": 4, **options},
    )  # fmt: skip


def test_rows_of_each_source_have_their_environment_rewards_and_metrics(model: Any, tokenizer: Any) -> None:
    trainer = make_trainer(model, tokenizer, max_steps=2)
    metrics = trainer.train(make_prompts())
    groups = trainer._step.last_rollout[0]
    assert [group.group.prompt.data_source for group in groups] == ["game", "questions"] * 2
    for group in groups:
        is_game = group.group.prompt.data_source == "game"
        asked = tokenizer.decode(group.group.prompt.token_ids)
        assert asked.startswith("<|im_start|>tools\n1" if is_game else "<|im_start|>user\nq")
        scored = "by_source" if is_game else "first_is_even"
        assert {name for name, values in group.components.items() if not np.isnan(values).all()} == {scored}
        np.testing.assert_array_equal(group.rewards, group.components[scored])
    for name in ENVIRONMENTS:
        rewards = [group.rewards for group in groups if group.group.prompt.data_source == name]
        assert metrics[f"source/{name}/reward"] == pytest.approx(np.concatenate(rewards).mean())
        assert metrics[f"source/{name}/prompts"] == 2
    assert metrics["episode/turns_mean"] == 1.5
    assert metrics["environment/turns"] == 2, "the mean over the episodes that returned it"


def test_reward_weights_are_those_of_the_environment_and_the_functions_of_the_run(model: Any, tokenizer: Any) -> None:
    trainer = make_trainer(model, tokenizer, max_steps=1, reward_weights=[0.5])
    trainer.train(make_prompts())
    assert trainer._step.scorer.weigh_sources() == {"questions": [0.5, 1.0]}
    trainer = make_trainer(model, tokenizer, False, max_steps=1, reward_weights=[0.1], reward_fn=first_is_even)
    games = [{"secret": number} for number in range(4)]
    plain = [{"prompt": f"q{number}"} for number in range(4)]
    trainer.train({
        "game": TrainSource(games, environment=game),
        "own": TrainSource(games, environment=game, rewards=first_is_even),
        "plain": plain,
    })  # fmt: skip
    assert trainer._step.scorer.weigh_sources() == {"game": [1.0, 0.1], "own": [1.0, 1.0]}


def play(model: Any, tokenizer: Any, environment: Any, **options: Any) -> Any:
    runner = EpisodeRunner(environment, (), GRPOConfig.create(**options).split().episodes, tokenizer)
    engine = HFEngine(model, tokenizer, eos_token_ids=[tokenizer.eos_token_id], max_rows=8)
    rows = load_rows([{"source": source} for source in ("slow", "slow", "quick", "quick", "quick", "quick")])
    prompts = [replace(prompt, data_source=prompt.columns["source"]) for prompt in rows]
    return runner(engine, prompts, [2] * 6, Sampling(max_new_tokens=3), 7)


def test_a_slow_environment_does_not_hold_the_others(model: Any, tokenizer: Any) -> None:
    """With two episodes at a time, two slow ones would leave no room; one of them does."""
    live: dict[str, set[Any]] = {"slow": set(), "quick": set()}
    most = {"slow": 0, "quick": 0}
    ended: list[str] = []

    async def environment(row: Any, chat: Any) -> float:
        source = row["source"]
        live[source].add(chat)
        most[source] = max(most[source], len(live[source]))
        await chat.turn("a")
        for _ in range(500):
            if source == "quick" or ended.count("quick") == 8:
                break
            await asyncio.sleep(0.01)
        live[source].remove(chat)
        ended.append(source)
        return 1.0

    groups = play(model, tokenizer, environment, max_live_episodes=2, max_live_by_source={"slow": 1})
    assert ended == ["quick"] * 8 + ["slow"] * 4
    assert most == {"slow": 1, "quick": 2} or most == {"slow": 1, "quick": 1}

    async def quickly(row: Any, chat: Any) -> float:
        await chat.turn("a")
        return 1.0

    def list_ids(groups: Any) -> list[list[int]]:
        return [completion.token_ids.tolist() for group in groups for completion in group.completions]

    assert list_ids(groups) == list_ids(play(model, tokenizer, quickly)), "the samples do not depend on the limits"


def train_whole_and_resumed(make: Callable[..., Any], prompts: Callable[[], Any], folder: Path) -> list[dict[str, Any]]:
    """The weights after three steps, and those of a copy of the run that goes on after its first."""

    def train(run: str) -> dict[str, Any]:
        trainer = make(max_steps=3, output_dir=folder / run, checkpoint_steps=1, keep_checkpoints=9)
        trainer.train(prompts())
        return {key: value.detach().clone() for key, value in trainer.model.state_dict().items()}

    whole = train("whole")
    shutil.copytree(folder / "whole", folder / "resumed")
    for later in (2, 3):
        shutil.rmtree(folder / "resumed" / "checkpoints" / f"step_{later:06d}")
    return [whole, train("resumed")]


@pytest.mark.parametrize(
    "options", [{}, {"partial_rollout_turns": 1, "max_live_by_source": {"game": 1}}], ids=["whole", "partial"]
)
def test_a_resumed_run_ends_with_the_same_weights(model: Any, tokenizer: Any, tmp_path: Path, options: Any) -> None:
    make = functools.partial(make_trainer, model, tokenizer, **options)
    whole, resumed = train_whole_and_resumed(make, make_prompts, tmp_path)
    assert all(bool((whole[key] == resumed[key]).all()) for key in whole)
    assert any(not bool((whole[key] == value).all()) for key, value in model.state_dict().items())


def test_a_limit_of_no_source_is_named(model: Any, tokenizer: Any) -> None:
    trainer = make_trainer(model, tokenizer, max_live_by_source={"games": 2})
    with pytest.raises(ConfigError, match=r"names 'games'; the sources of the prompts are 'game', 'questions'"):
        trainer.train(make_prompts())
    with pytest.raises(ConfigError, match="they are no mixture"):
        trainer.train([{"source": "game", "secret": 1}])
    with pytest.raises(ConfigError, match="max_live_by_source has 0 for 'game'"):
        GRPOConfig.create(max_live_by_source={"game": 0})


class Doubling:
    """Pays for a reply of two tokens or more, and for a second one."""

    def reset(self, start: int) -> str:
        self.turns = 0
        return f"{start}"

    def step(self, reply: Any) -> tuple[str, float, bool]:
        self.turns += 1
        return "more", float(len(reply.token_ids) > 1), self.turns == 2


def make_mixed_prompts(**settings: Any) -> dict[str, TrainSource]:
    doubling = [{"start": number} for number in range(4)]
    return {
        "game": TrainSource([{"secret": number} for number in range(4)], environment=game),
        "doubling": TrainSource(doubling, environment=Doubling, rewards=first_is_even, **settings),
        "plain": TrainSource([{"prompt": f"q{number}"} for number in range(4)], rewards=first_is_even),
    }


def make_mixed_trainer(model: Any, tokenizer: Any, **options: Any) -> GRPO:
    return make_trainer(model, tokenizer, False, **{"prompts_per_step": 6, "max_steps": 2, **options})


def test_a_source_has_an_environment_of_its_own(model: Any, tokenizer: Any) -> None:
    trainer = make_mixed_trainer(model, tokenizer)
    metrics = trainer.train(make_mixed_prompts(weight=2.0) | {"game": make_mixed_prompts()["game"]})
    turns = {"game": 2, "doubling": 2, "plain": 1}
    scored = {"game": {"game"}, "doubling": {"Doubling", "first_is_even"}, "plain": {"first_is_even"}}
    groups = trainer._step.last_rollout[0]
    for group in groups:
        source = str(group.group.prompt.data_source)
        for completion in group.group.completions:
            assert completion.episode is not None
            assert len(completion.turns) == turns[source]
        assert {name for name, values in group.components.items() if not np.isnan(values).all()} == scored[source]
        np.testing.assert_allclose(group.rewards, sum(group.components[name] for name in scored[source]))
        asked = tokenizer.decode(group.group.prompt.token_ids)
        assert asked.startswith("<|im_start|>tools\n1" if source == "game" else "<|im_start|>user\n")
    assert metrics["source/doubling/prompts"] == 3
    assert metrics["rewards/Doubling/mean"] == pytest.approx(
        np.mean([group.components["Doubling"] for group in groups if group.group.prompt.data_source == "doubling"])
    )
    assert metrics["environment/turns"] == 2


def test_a_single_reply_is_the_reply_of_a_run_without_environments(model: Any, tokenizer: Any) -> None:
    rows = [{"prompt": [{"role": "user", "content": f"q{number}"}]} for number in range(4)]
    groups = []
    for environment in (None, False):
        trainer = GRPO(
            copy.deepcopy(model), first_is_even, environment=environment, tokenizer=tokenizer, group_size=2,
            prompts_per_step=4, max_new_tokens=5, max_steps=1, zero_variance="keep", log_to=(),
        )  # fmt: skip
        trainer.train(rows)
        groups.append(trainer._step.last_rollout[0])
    for alone, played in zip(*groups, strict=True):
        np.testing.assert_array_equal(alone.group.prompt.token_ids, played.group.prompt.token_ids)
        for one, other in zip(alone.group.completions, played.group.completions, strict=True):
            assert one.token_ids.tolist() == other.token_ids.tolist()
        assert all(completion.episode is not None for completion in played.group.completions)


def test_two_environments_with_one_name_are_told_apart(model: Any, tokenizer: Any) -> None:
    def make(reward: float) -> Any:
        async def play(row: Any, chat: Any) -> float:
            await chat.turn("a")
            return reward

        return play

    trainer = make_trainer(model, tokenizer, False, max_steps=1)
    one, two = make(1.0), make(2.0)
    rows = [{"number": number} for number in range(2)]
    sources = {"a": one, "b": two, "c": two}
    metrics = trainer.train({name: TrainSource(rows, environment=source) for name, source in sources.items()})
    assert metrics["rewards/play/mean"] == 1
    assert metrics["rewards/play_2/mean"] == 2
    assert "rewards/play_3/mean" not in metrics


@pytest.mark.parametrize(
    "options", [{}, {"partial_rollout_turns": 1}, pytest.param({"turn_timeout": 60.0}, marks=pytest.mark.thorough)]
)
def test_a_resumed_run_with_environments_of_sources_ends_with_the_same_weights(
    model: Any, tokenizer: Any, tmp_path: Path, options: Any
) -> None:
    make = functools.partial(make_mixed_trainer, model, tokenizer, **options)
    whole, resumed = train_whole_and_resumed(make, make_mixed_prompts, tmp_path)
    assert all(bool((whole[key] == resumed[key]).all()) for key in whole)
    other = make_mixed_trainer(model, tokenizer, max_steps=4, output_dir=tmp_path / "resumed", **options)
    with pytest.raises(CheckpointError, match="doubling: game"):
        other.train({**make_mixed_prompts(), "doubling": TrainSource([{"secret": 1}] * 4, environment=game)})


def test_a_source_whose_environment_cannot_be_used_is_named(model: Any, tokenizer: Any) -> None:
    prompts = make_mixed_prompts()
    plain = GRPO(copy.deepcopy(model), first_is_even, tokenizer=tokenizer, group_size=2, max_steps=1, log_to=())
    with pytest.raises(ConfigError, match=r"prompts\['game'\] has an environment, and GRPO was created without one"):
        plain.train(prompts)
    trainer = make_mixed_trainer(model, tokenizer)
    with pytest.raises(ConfigError, match=r"prompts\['game'\]: environment is int"):
        trainer.train({"game": TrainSource([{"secret": 1}], environment=3)})
    with pytest.raises(ValueError, match=r"prompts\['plain'\]: prompts\[0\] has no column 'prompt', which reply needs"):
        trainer.train({**prompts, "plain": TrainSource([{"text": "a"}], rewards=first_is_even)})
    with pytest.raises(ValueError, match=r"prompts\['doubling'\].* has no column 'start', which Doubling needs"):
        trainer.train({**prompts, "doubling": TrainSource([{"text": "a"}], environment=Doubling)})
    with pytest.raises(ConfigError, match=r"prompts\['plain'\]: its environment scores no episode"):
        trainer.train({**prompts, "plain": TrainSource([{"prompt": "a"}], environment=False)})
    with pytest.raises(ConfigError, match="environment is True"):
        TrainSource([{"prompt": "a"}], environment=True)
    with pytest.raises(ConfigError, match="environment is True"):
        make_trainer(model, tokenizer, True)


def test_a_source_whose_environment_is_down_does_not_stop_the_others(
    model: Any, tokenizer: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """The first step has a service that fails in all its episodes, the second has it back."""
    down: list[bool] = [True]

    async def service(row: Any, chat: Any) -> float:
        reply = await chat.turn("a")
        if down[0]:
            raise ConnectionError("the service is down")
        return float(len(reply.token_ids))

    class Restart:
        def on_step(self, step: int, metrics: Any) -> None:
            down[0] = False
            counts.append({name: value for name, value in metrics.items() if name.startswith("environments/service")})
            rewards.append(metrics.get("rewards/service/mean"))

    counts: list[dict[str, float]] = []
    rewards: list[float | None] = []
    sources = {
        "service": TrainSource([{"number": number} for number in range(4)], environment=service),
        "plain": make_mixed_prompts()["plain"],
    }
    options = {"on_environment_error": "end", "callbacks": [Restart()], "max_steps": 2}
    make_trainer(model, tokenizer, False, **options).train(sources)
    assert counts == [
        {"environments/service/episodes": 4, "environments/service/environment_error": 4},
        {"environments/service/episodes": 4},
    ]
    assert rewards[0] is None
    assert rewards[1] is not None
    assert "all episodes of a source failed, and are not trained on: service: 4 episodes" in caplog.text
    down[0] = True
    with pytest.raises(RewardError, match="the service is down"):
        make_trainer(model, tokenizer, False, **options).train({"service": sources["service"]})
