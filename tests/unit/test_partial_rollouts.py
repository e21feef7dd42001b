"""Partial rollouts: which episodes a step trains, the versions that sampled them, and what a checkpoint keeps."""

from __future__ import annotations

import asyncio
import copy
import json
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch

from rlox_grpo import GRPO, GRPOConfig
from rlox_grpo.cli import main
from rlox_grpo.environments import Outcome
from rlox_grpo.errors import ConfigError, EpisodeError
from rlox_grpo.groups import check_turns, number_turns
from rlox_grpo.prompts.load import load_rows
from rlox_grpo.rollout.async_generation import BackgroundEngine
from rlox_grpo.rollout.engines.hf.engine import HFEngine
from rlox_grpo.rollout.engines.turns import SampledTurn, TurnRequest
from rlox_grpo.rollout.episodes.run import EpisodeRunner
from rlox_grpo.rollout.partial_rollouts import PartialRollouts
from rlox_grpo.trainer.step import TrainStep
from rlox_grpo.types import Prompt, RolloutGroup, Sampling
from rlox_grpo.update.mini_batches import MiniBatcher

LENGTHS = (3, 1, 2, 1, 1, 1)
SAMPLING = Sampling(max_new_tokens=4)


@pytest.fixture(scope="module")
def model(make_tiny_model: Any, tokenizer: Any) -> Any:
    return make_tiny_model("qwen2", vocab_size=len(tokenizer), max_position_embeddings=1024)


class StubEngine:
    """Replies with one token by the episode and the turn; counts what it sampled."""

    takes_weights, exact, max_length = True, True, None

    def __init__(self, tokenizer: Any) -> None:
        self.policy_version = 0
        self.end_ids = (tokenizer.eos_token_id,)
        self.sampled: list[tuple[tuple[int, int], int]] = []

    @contextmanager
    def open_turns(self, sampling: Sampling, seed: int, max_episodes: int) -> Iterator[StubSession]:
        session = StubSession(self)
        yield session
        assert not len(session)


class StubSession:
    def __init__(self, engine: StubEngine) -> None:
        self.prefilled_tokens, self._engine = 0, engine
        self._waiting: list[TurnRequest] = []

    def submit(self, request: TurnRequest) -> None:
        self._waiting.append(request)

    def __len__(self) -> int:
        return len(self._waiting)

    def step(self) -> list[tuple[TurnRequest, SampledTurn]]:
        request = self._waiting.pop(0)
        self._engine.sampled.append((request.episode, request.turn))
        self.prefilled_tokens += len(request.token_ids)
        ids = np.array([65 + request.turn, *self._engine.end_ids], np.int64)
        return [(request, SampledTurn(ids, np.full(2, -1.0 - self._engine.policy_version, np.float32), True))]

    def drop(self, request: TurnRequest) -> None:
        self._waiting = [one for one in self._waiting if one is not request]

    def forget(self, episode: tuple[int, int]) -> None:
        self._waiting = [one for one in self._waiting if one.episode != episode]


async def talk(row: Any, chat: Any) -> Outcome:
    """As many turns as the row says; each message follows from the last reply and from the episode's seed."""
    message = f"begin {chat.seed % 7}"
    for turn in range(row["length"]):
        reply = await chat.turn(message)
        message = f"{turn} {len(reply.token_ids)} {chat.seed % 5}"
    return Outcome(float(row["length"]), metrics={"seed": chat.seed % 100})


def talk_sync(row: Any, chat: Any) -> float:
    for turn in range(row["length"]):
        chat.turn(f"turn {turn}")
    return float(row["length"])


class Steps:
    def reset(self, length: int) -> str:
        self.left = length
        return "begin"

    def step(self, reply: Any) -> tuple[str, float, bool]:
        self.left -= 1
        return f"{self.left} left", 1.0, not self.left


def make_runner(tokenizer: Any, environment: Any = talk, turns: int = 1, **options: Any) -> EpisodeRunner:
    config = GRPOConfig.create(partial_rollout_turns=turns, zero_variance="keep", **options)
    return EpisodeRunner(environment, (), config.split().episodes, tokenizer)


def play(
    pool: PartialRollouts,
    engine: Any,
    prompts: list[Prompt],
    *,
    size: int = 2,
    per_step: int = 2,
    steps: range = range(3),
    between: Any = None,
) -> list[list[RolloutGroup]]:
    """The groups that each step trains; ``between(step)`` runs before each."""
    found = []
    for step in steps:
        engine.policy_version = step
        if between is not None:
            between(step)
        batch = pool.next_batch(
            step, lambda at: prompts[at * per_step : (at + 1) * per_step], engine, SAMPLING, lambda _: size
        )
        assert pool.next_batch(step, lambda _: [], engine, SAMPLING, lambda _: size) is batch
        groups = batch.groups.result()
        assert [prompt.index for prompt in batch.prompts] == [group.prompt.index for group in groups]
        check_turns([completion for group in groups for completion in group.completions])
        found.append(groups)
        pool.done()
    return found


def rows(lengths: Any = LENGTHS) -> list[Prompt]:
    return load_rows([{"length": length} for length in lengths])


def describe(groups: list[RolloutGroup]) -> list[tuple[Any, ...]]:
    return [
        (
            group.prompt.index,
            group.policy_version,
            [(one.token_ids.tolist(), one.log_probs.tolist(), one.turns, one.versions) for one in group.completions],
        )
        for group in groups
    ]


@pytest.mark.parametrize("environment", [talk, talk_sync, Steps])
def test_the_groups_and_versions_of_each_step_by_hand(tokenizer: Any, environment: Any) -> None:
    """One reply a round, two groups a step, episodes of 3, 1, 2, 1, 1 and 1 replies.

    Step 0 draws 0 to 3: 1 and 3 end. Step 1 draws 4 and 5: 2, 4 and 5 end, and it trains the first two. Step 2 trains
    the rest: 0, which had a reply in each step, and 5, which had ended in step 1.
    """
    engine = StubEngine(tokenizer)
    pool = PartialRollouts(make_runner(tokenizer, environment), seed=3)
    carried = []

    def note(step: int) -> None:
        carried.append(pool.metrics(step - 1))

    found = play(pool, engine, rows(), between=note)
    assert [[group.prompt.index for group in groups] for groups in found] == [[1, 3], [2, 4], [0, 5]]
    assert [[group.policy_version for group in groups] for groups in found] == [[0, 0], [0, 1], [0, 1]]
    versions = [[group.completions[0].versions for group in groups] for groups in found]
    assert versions == [[(0,), (0,)], [(0, 1), (1,)], [(0, 1, 2), (1,)]]
    assert sorted(engine.sampled) == sorted(
        ((draw, one), turn) for draw, length in enumerate(LENGTHS) for one in range(2) for turn in range(length)
    )
    assert [(one["rollout/carried_episodes"], one["rollout/carried_staleness_max"]) for one in carried] == [
        (0, 0),
        (4, 0),  # both episodes of 0 and of 2, begun in step 0
        (2, 1),  # those of 0
    ]
    assert pool.metrics(2) == {"rollout/carried_episodes": 0, "rollout/carried_staleness_max": 0}


def test_log_probs_are_those_of_the_version_that_sampled_the_turn(tokenizer: Any, model: Any) -> None:
    engine = HFEngine(model, tokenizer, eos_token_ids=[tokenizer.eos_token_id], max_rows=8)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    noise = torch.Generator().manual_seed(1)
    weights = []
    for _ in range(3):
        weights.append(
            {name: value + 0.2 * torch.randn(value.shape, generator=noise) for name, value in before.items()}
        )

    def load(step: int) -> None:
        model.load_state_dict(weights[step])
        engine.load_weights((), version=step)

    try:
        pool = PartialRollouts(make_runner(tokenizer), seed=3)
        *_, (whole, _) = play(pool, engine, rows(), between=load)
        assert [one.versions for one in whole.completions] == [(0, 1, 2)] * 2
        for one in whole.completions:
            ids = np.concatenate([whole.prompt.token_ids, one.token_ids])
            computed = []
            for state in weights:
                model.load_state_dict(state)
                with torch.no_grad():
                    logits = model(torch.from_numpy(ids)[None]).logits[0, :, : engine.vocab_limit].float()
                chosen = torch.log_softmax(logits, -1)[:-1].gather(1, torch.from_numpy(ids[1:, None]))[:, 0].numpy()
                computed.append(chosen[len(whole.prompt.token_ids) - 1 :])
            ends = [*one.turns[1:], len(one.token_ids)]
            for version, (start, end) in enumerate(zip(one.turns, ends, strict=True)):
                own = np.flatnonzero(one.sampled[start:end]) + start
                np.testing.assert_allclose(one.log_probs[own], computed[version][own], atol=1e-5)
                other = computed[(version + 1) % 3][own]
                assert np.abs(one.log_probs[own] - other).max() > 1e-2
    finally:
        model.load_state_dict(before)


@pytest.mark.parametrize("limit", [None, 1, 0])
def test_stale_replies_leave_the_loss_and_its_denominators(
    tokenizer: Any, model: Any, monkeypatch: Any, tmp_path: Any, limit: int | None
) -> None:
    """The prompts of length 3 and 2 are trained in the step of their last reply, with replies of the steps before."""
    seen: list[Any] = []
    build = MiniBatcher.make_mini_batches

    def keep(batcher: MiniBatcher, scored: Any, advantages: Any, step: int, hinted: Any = None) -> Any:
        seen.append((step, [one for group in scored for one in group.group.completions]))
        parts = build(batcher, scored, advantages, step, hinted)
        seen[-1] += (parts,)
        return parts

    monkeypatch.setattr(MiniBatcher, "make_mini_batches", keep)
    trainer = GRPO(
        copy.deepcopy(model), environment=talk, tokenizer=tokenizer, group_size=2, prompts_per_step=2, max_steps=3,
        max_new_tokens=4, max_turns=4, partial_rollout_turns=1, drop_stale=limit, zero_variance="keep", log_to=(),
        output_dir=tmp_path,
    )  # fmt: skip
    trainer.train([{"length": length} for length in LENGTHS])
    metrics = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    ages = set()
    for (step, completions, parts), logged in zip(seen, metrics, strict=True):
        kept = []
        for one in completions:
            age = step - np.asarray(one.versions)[number_turns(one)]
            ages |= {*age.tolist()}
            kept.append(one.sampled & (age <= (9 if limit is None else limit)))
        tokens, sequences = sum(map(np.count_nonzero, kept)), sum(own.any() for own in kept)
        for batch in (batch for part in parts for batch in part):
            assert (batch.totals.num_loss_tokens, batch.totals.num_sequences) == (tokens, sequences)
            for mask, row in zip(batch.loss_mask, batch.row_index.tolist(), strict=True):
                assert np.flatnonzero(mask.numpy()).tolist() == np.flatnonzero(kept[row]).tolist()
        share = 1 - tokens / sum(np.count_nonzero(one.sampled) for one in completions)
        assert logged.get("rollout/dropped_stale_share") == (None if limit is None else pytest.approx(share))
    assert ages == {0, 1, 2}


def test_values_of_states_are_those_of_whole_episodes(tokenizer: Any, model: Any, monkeypatch: Any) -> None:
    """turn_credit="gae" with episodes of three, one and two turns, one turn a step: each turn is paid 1."""
    seen: list[tuple[Any, Any]] = []
    credit = TrainStep.compute_advantages

    def keep(step: TrainStep, scored: Any, *given: Any) -> Any:
        penalised, advantages = credit(step, scored, *given)
        seen.append((scored, advantages))
        return penalised, advantages

    monkeypatch.setattr(TrainStep, "compute_advantages", keep)
    trainer = GRPO(
        copy.deepcopy(model), environment=Steps, tokenizer=tokenizer, group_size=2, prompts_per_step=2, max_steps=3,
        max_new_tokens=4, max_turns=4, partial_rollout_turns=1, turn_credit="gae", reward_scaling="none",
        zero_variance="keep", log_to=(),
    )  # fmt: skip
    trainer.train([{"length": length} for length in LENGTHS])
    lengths = set()
    for scored, advantages in seen:
        rows = [(group, one) for group in scored for one in group.group.completions]
        assert len(advantages) == len(rows)
        for own, (group, one) in zip(advantages, rows, strict=True):
            lengths.add((len(one.turns), len(set(one.versions))))
            assert np.isfinite(own).sum() == len(one.turns)
            # Both episodes of a group pass through the same states with the same rewards.
            assert (own[: len(one.turns)] == 0).all()
            assert group.rewards.tolist() == [len(one.turns)] * 2
    assert lengths == {(3, 3), (2, 2), (1, 1)}


@pytest.mark.parametrize("options", [{}, {"max_live_episodes": 3}, {"partial": 2}])
def test_random_lengths_are_trained_once_in_bounded_staleness(tokenizer: Any, options: dict[str, Any]) -> None:
    draws = random.Random(5)
    turns = options.get("partial", 1)
    most = {name: value for name, value in options.items() if name != "partial"}
    for per_step, longest in ((1, 4), (3, 6), (4, 8)):
        lengths = [draws.randint(1, longest) for _ in range(5 * per_step)]
        pool = PartialRollouts(make_runner(tokenizer, turns=turns, **most), seed=3)
        found = play(pool, StubEngine(tokenizer), rows(lengths), per_step=per_step, steps=range(5))
        assert [len(groups) for groups in found] == [per_step] * 5
        assert sorted(group.prompt.index for groups in found for group in groups) == list(range(5 * per_step))
        for step, groups in enumerate(found):
            for group in groups:
                for one in group.completions:
                    assert len(one.turns) == lengths[group.prompt.index]
                    assert [*one.versions] == sorted(one.versions)
                if not most:
                    assert step - group.policy_version <= -(-longest // turns)


def test_a_pool_that_was_saved_between_any_two_steps_goes_on_as_one_that_was_not(tokenizer: Any) -> None:
    lengths = [4, 1, 3, 1, 2, 1, 4, 1, 1, 2]
    steps = len(lengths) // 2
    whole = play(
        PartialRollouts(make_runner(tokenizer), seed=3), StubEngine(tokenizer), rows(lengths), steps=range(steps)
    )
    pool, found = PartialRollouts(make_runner(tokenizer), seed=3), []
    for step in range(steps):
        found += play(pool, StubEngine(tokenizer), rows(lengths), steps=range(step, step + 1))
        state = json.loads(json.dumps(pool.state()))
        pool = PartialRollouts(make_runner(tokenizer), seed=3)
        pool.restore(state, rows(lengths))
        assert json.loads(json.dumps(pool.state())) == state
    assert [describe(groups) for groups in found] == [describe(groups) for groups in whole]


def test_an_environment_that_answers_otherwise_gets_new_replies_from_there(tokenizer: Any, caplog: Any) -> None:
    """What was sampled behind other tokens is not trained; what stands before them is kept."""
    played = 0

    async def drift(row: Any, chat: Any) -> float:
        nonlocal played
        played += 1
        await chat.turn("begin")
        for _ in range(row["length"] - 1):
            await chat.turn(f"again {played}")
        return 1.0

    engine = StubEngine(tokenizer)
    pool = PartialRollouts(make_runner(tokenizer, drift, turns=2), seed=3)
    ((short,), (group,)) = play(pool, engine, rows([3, 1]), size=1, per_step=1, steps=range(2))
    assert "an environment is not deterministic" in caplog.text
    assert [short.prompt.index, group.prompt.index] == [1, 0]
    assert group.completions[0].versions == (0, 1, 1)  # the second had been sampled in step 0
    for one in group.completions:
        own = [float(one.log_probs[start]) for start in one.turns]
        assert own == [-1.0 - version for version in one.versions]


def make_failing() -> tuple[Any, list[str]]:
    """An environment that raises in rows of length 2, until the list is empty."""
    broken = ["no network"]

    async def fail(row: Any, chat: Any) -> float:
        for _ in range(row["length"]):
            await chat.turn("go on")
        if broken and row["length"] == 2:
            raise RuntimeError(*broken)
        return 1.0

    return fail, broken


def test_an_environment_that_raises_names_its_row_and_the_step_can_be_tried_again(tokenizer: Any) -> None:
    fail, broken = make_failing()
    engine, prompts = StubEngine(tokenizer), rows((1, 2, 3))
    pool = PartialRollouts(make_runner(tokenizer, fail), seed=3)
    (first,) = play(pool, engine, prompts, per_step=1, steps=range(1))
    assert first[0].prompt.index == 0
    with pytest.raises(EpisodeError, match=r"prompts\[1\], episode 0, turn 2: RuntimeError: no network"):
        play(pool, engine, prompts, per_step=1, steps=range(1, 2))
    broken.clear()
    later = play(pool, engine, prompts, per_step=1, steps=range(1, 3))
    assert [group.prompt.index for groups in later for group in groups] == [1, 2]
    assert len(engine.sampled) == len(set(engine.sampled)) == 2 * 6


def test_batches_ahead_of_one_that_failed_are_played_after_it(tokenizer: Any) -> None:
    """Prompts are drawn once each, also where the run goes on from what was saved after the failure."""
    (fail, broken), drawn = make_failing(), []
    prompts, engine = rows((1, 2, 3, 1)), BackgroundEngine(StubEngine(tokenizer))
    pool = PartialRollouts(make_runner(tokenizer, fail), seed=3, ahead=2)

    def draw(step: int) -> list[Prompt]:
        drawn.append(step)
        return prompts[step : step + 1]

    def take(pool: PartialRollouts, step: int) -> list[int]:
        return [prompt.index for prompt in pool.next_batch(step, draw, engine, SAMPLING, lambda _: 2).prompts]

    assert take(pool, 0) == [0]
    pool.done()
    with pytest.raises(EpisodeError, match=r"prompts\[1\], episode 0, turn 2: RuntimeError: no network"):
        take(pool, 1)
    broken.clear()
    later = PartialRollouts(make_runner(tokenizer, fail), seed=3, ahead=2)
    later.restore(json.loads(json.dumps(pool.state())), prompts)
    for one in (pool, later):
        found = []
        for step in (1, 2, 3):
            found += take(one, step)
            one.done()
        assert found == [1, 3, 2]
        assert one.next_batch(4, draw, engine, SAMPLING, lambda _: 2).prompts == []
    engine._thread.shutdown()
    assert drawn[:4] == [0, 1, 2, 3]
    assert not any(prompts[step : step + 1] for step in drawn[4:])


def test_a_round_does_not_wait_for_an_agent_that_swallows_its_stop(tokenizer: Any) -> None:
    async def stubborn(row: Any, chat: Any) -> float:
        for _ in range(row["length"]):
            try:
                await chat.turn("go on")
            except asyncio.CancelledError:
                continue
        return 1.0

    pool = PartialRollouts(make_runner(tokenizer, stubborn), seed=3)
    found = play(pool, StubEngine(tokenizer), rows())
    assert [[group.prompt.index for group in groups] for groups in found] == [[1, 3], [2, 4], [0, 5]]
    assert [len(one.turns) for one in found[2][0].completions] == [3, 3]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"partial_rollout_turns": 8}, "partial_rollout_turns=8 with max_turns=8: every episode ends in the step"),
        ({"partial_rollout_turns": 1, "zero_variance": "refill"}, "partial_rollout_turns=1 does not: choose one"),
    ],
)
def test_options_that_exclude_each_other(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        GRPOConfig.create(**{"zero_variance": "keep", **options})


def test_partial_rollouts_need_an_environment(model: Any, tokenizer: Any) -> None:
    with pytest.raises(ConfigError, match="partial_rollout_turns=1 is read only with"):
        GRPO(model, lambda completions: [0.0] * len(completions), tokenizer=tokenizer, partial_rollout_turns=1)


@pytest.mark.parametrize("command", [["eval", "model", "--data", "rows.jsonl"], ["play", "module:environment"]])
def test_commands_that_play_whole_episodes_refuse_the_option(command: list[str], capsys: Any) -> None:
    assert main([*command, "--partial_rollout_turns", "2"]) == 2
    error = f"--partial_rollout_turns is an option of training: {command[0]} does not read it"
    assert error in capsys.readouterr().err


class FailingLoad(StubEngine):
    """Does not take the weights of version 1."""

    def load_weights(self, weights: Any, version: int) -> None:
        if version == 1:
            raise RuntimeError("no room for the weights")
        self.policy_version = version

    def close(self) -> None:
        pass


def test_a_batch_that_was_sampled_after_a_failed_one_is_not_lost(tokenizer: Any) -> None:
    """The weights of step 1 fail, and with them the batch of step 2; the batch of step 3 is sampled."""
    prompts = load_rows([{"length": 1}] * 10)
    pool, engine = PartialRollouts(make_runner(tokenizer), 0, ahead=1), BackgroundEngine(FailingLoad(tokenizer))

    def take(step: int) -> list[int]:
        draw = lambda at: prompts[at * 2 : (at + 1) * 2]  # noqa: E731
        batch = pool.next_batch(step, draw, engine, SAMPLING, lambda _: 1)
        pool.done()
        return [prompt.index for prompt in batch.prompts]

    trained = []
    for step in range(2):
        engine.load_weights((), step)
        trained += take(step)
    engine.load_weights((), 2)
    with pytest.raises(RuntimeError, match="could not take new weights"):
        take(2)
    for step in range(2, 5):
        trained += take(step)
    engine.close()
    assert sorted(trained) == list(range(10))
