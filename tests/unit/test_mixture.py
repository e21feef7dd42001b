"""Mixtures of sources: exact shares, rewards and metrics of each source, an exact resume, and clear errors."""

from __future__ import annotations

import asyncio
import gc
import itertools
import time
from collections import Counter
from dataclasses import replace

import datasets
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fake_judge import fake_judge
from rlox_grpo import GRPO, TrainSource
from rlox_grpo.config.schema import GRPOConfig
from rlox_grpo.errors import CheckpointError, ConfigError
from rlox_grpo.prompts.mixture import Interleaving, Slot, count_draws, to_integers
from rlox_grpo.rewards import ExactAnswer, Judge
from rlox_grpo.rewards.by_source import Scorer
from rlox_grpo.rewards.calls import RewardError
from rlox_grpo.rollout.serialize import decode_scored_group, encode_scored_group
from rlox_grpo.run.files import read_jsonl
from rlox_grpo.run.inputs import PromptReader
from rlox_grpo.run.metrics import source_metrics
from rlox_grpo.run.plan import Progress
from rlox_grpo.run.report import write_report
from rlox_grpo.trainer.train_data import DataReader
from rlox_grpo.types import Completion, Prompt, RolloutGroup
from toy import TARGET, ToyLM, options, share_of_target, stop_after


def math_rows(count=10):
    return [{"prompt": [row % 12, 3], "number": row} for row in range(count)]


def code_rows(count=7):
    return [{"prompt": [row % 12, 5, 5], "tests": row} for row in range(count)]


class Seen:
    """A reward that notes the source, and the columns, of the groups that it scored."""

    def __init__(self):
        self.sources, self.rows = [], []

    def __call__(self, completions, source, number=None, tests=None):
        self.sources += source[::8]
        columns = zip(number or itertools.repeat(None), tests or itertools.repeat(None), source, strict=False)
        self.rows += list(columns)[::8]
        return [float((completion == TARGET).float().mean()) for completion in completions]


def first_is_target(completions):
    return [float(completion[0] == TARGET) for completion in completions]


def trainer_of(reward, seed=0, **changes):
    return GRPO(ToyLM(seed), reward, **options(**{"max_steps": 5, **changes}))


def weights(trainer):
    return torch.cat([parameter.detach().flatten() for parameter in trainer.model.parameters()])


# The order of the draws


@given(st.lists(st.integers(1, 40), min_size=1, max_size=8), st.integers(0, 200))
def test_every_run_of_draws_from_the_start_has_the_shares_within_one(shares, start):
    order, total = Interleaving(shares), sum(shares)
    counts, bound = np.zeros(len(shares)), 1 - 1 / (2 * len(shares) - 2) if len(shares) > 1 else 0.0
    drawn = []
    for draws in range(1, 2 * total + 1):
        drawn.append(next(order))
        counts[drawn[-1]] += 1
        assert np.abs(counts - np.array(shares) * draws / total).max() <= bound + 1e-9
    assert drawn[:total] == drawn[total:]  # a period; so each run of so many draws has exactly the shares
    later = Interleaving(shares, start)
    assert [next(later) for _ in range(total)] == [drawn[(start + index) % total] for index in range(total)]
    assert sum(Interleaving(shares, start).counts) == start


def test_the_source_that_lags_most_would_lag_by_more_than_one():
    """Why the order is not that: the weights of the module's docstring, of which Tijdeman's order is 0.94 off."""
    shares = [3, 1, 3, 2, 2, 1, 46, 46, 1]
    total, counts, worst = sum(shares), np.zeros(9), 0.0
    for draws in range(1, total + 1):
        lags = np.array(shares) * draws / total - counts
        counts[int(lags.argmax())] += 1
        worst = max(worst, np.abs(np.array(shares) * draws / total - counts).max())
    assert worst > 1.1


def test_weights_are_the_numbers_that_were_written():
    assert to_integers([0.1, 0.2, 0.7]) == [1, 2, 7]
    assert to_integers([1.0, 1e-3]) == [1000, 1]
    assert to_integers([4.0, 2.0]) == [2, 1]
    assert count_draws({"a": 2.0, "b": 1.0}, 4, {"a": 5}) == {"a": 8, "b": 1}


def test_indices_are_unique_and_name_their_row():
    slots = [Slot(name, position, 2) for position, name in enumerate(("math", "code"))]
    labelled = [slot.label(Prompt(np.array([1]), row)) for slot in slots for row in range(3)]
    assert [prompt.index for prompt in labelled] == [0, 2, 4, 1, 3, 5]
    assert labelled[4].name == "prompts['code'][1]"
    assert slots[1].select_rows([0, 1, 5]) == [0, 2]


# Shares in a run


def test_each_source_has_its_share_of_the_prompts():
    reward = Seen()
    sources = {"math": math_rows(), "code": TrainSource(code_rows(), weight=2.0)}
    trainer_of(reward, prompts_per_step=6).train(sources)
    assert Counter(reward.sources) == {"math": 10, "code": 20}
    for name, column, count in (("math", 0, 10), ("code", 1, 7)):
        seen = [row[column] for row in reward.rows if row[2] == name]
        assert sorted(seen[:count]) == list(range(count))  # one pass over the rows of the source, then the next
        assert seen[:count] != list(range(count))
    assert [row for row in reward.rows if row[2] == "math" and row[1] is not None] == []  # other columns are None


def test_a_quota_is_the_number_of_prompts_of_every_step():
    reward = Seen()
    sources = {"math": TrainSource(math_rows(), quota=1), "code": TrainSource(code_rows(2), quota=3)}
    metrics = trainer_of(reward, max_steps=4).train(sources)
    for step in range(4):
        assert Counter(reward.sources[4 * step : 4 * step + 4]) == {"math": 1, "code": 3}
    assert (metrics["source/math/prompts"], metrics["source/code/prompts"]) == (1, 3)


def test_the_order_of_a_source_does_not_depend_on_the_others():
    alone, beside = Seen(), Seen()
    trainer_of(alone, prompts_per_step=2).train({"math": math_rows()})
    trainer_of(beside, prompts_per_step=4).train({"code": code_rows(), "math": math_rows()})
    assert [row for row in beside.rows if row[2] == "math"] == alone.rows


def test_a_pass_is_as_many_prompts_as_there_are_rows_in_whole_steps():
    reward = Seen()
    metrics = trainer_of(reward, max_steps=None).train({"math": math_rows(), "code": code_rows()}, n_epochs=2)
    assert metrics["steps_trained"] == 10  # 17 rows, 5 steps of 4
    assert len(reward.sources) == 40


def test_a_step_is_full_where_sources_have_few_rows():
    reward = Seen()
    trainer_of(reward, max_steps=1).train({"math": math_rows(1), "code": code_rows(1)})
    assert Counter(reward.sources) == {"math": 2, "code": 2}


# Rewards of a source


def groups_of(*sources, answer="7"):
    """A group of two completions, right and wrong, of a prompt of each source."""
    prompts = [
        replace(Prompt(np.array([1]), row, "p", "p", {"answer": answer}), data_source=name, row=row)
        for row, name in enumerate(sources)
    ]
    log_probs = np.zeros(1, np.float32)
    texts = (answer, "no")
    return [
        RolloutGroup(
            prompt, tuple(Completion(np.array([row]), log_probs, "stop", text) for row, text in enumerate(texts))
        )
        for prompt in prompts
    ]


def ones(completions):
    return [1.0] * len(completions)


def nothing_but_the_second(completions):
    return [None, *[0.5] * (len(completions) - 1)]


def test_the_rewards_of_a_source_do_not_apply_to_other_rows():
    exact = ExactAnswer()
    scorer = Scorer([ones], by_source={"math": [exact, ones], "code": [nothing_but_the_second]})
    scored = scorer.score(groups_of("math", "code", "chat", "math"))
    assert [group.group.prompt.data_source for group in scored] == ["math", "code", "chat", "math"]
    nan = float("nan")
    names = ["ones", "exact_answer", "nothing_but_the_second"]
    expected = [
        [[1, 1], [1, 0], [nan, nan]],
        [[nan, nan], [nan, nan], [nan, 0.5]],
        [[1, 1], [nan, nan], [nan, nan]],
        [[1, 1], [1, 0], [nan, nan]],
    ]
    for group, components in zip(scored, expected, strict=True):
        assert list(group.components) == names
        np.testing.assert_array_equal(np.stack(list(group.components.values())), components)
    np.testing.assert_array_equal([group.rewards for group in scored], [[2, 1], [nan, 0.5], [1, 1], [2, 1]])
    # The first function of the source judges, also where it does not apply to a sample: never another's.
    assert [group.judged_by for group in scored] == ["exact_answer", "nothing_but_the_second", "ones", "exact_answer"]
    np.testing.assert_array_equal(scored[1].first_rewards, [nan, 0.5])
    assert "exact_answer" not in scored[1].statuses


def test_a_function_is_called_once_for_all_rows_that_it_scores():
    calls = []

    def count(completions, source):
        calls.append(list(source))
        return [1.0] * len(completions)

    groups = [
        replace(group, prompt=replace(group.prompt, columns={"source": group.prompt.data_source}))
        for group in groups_of("math", "code", "chat")
    ]
    Scorer([count], by_source={"code": [ones]}).score(groups)
    assert calls == [["math", "math", "chat", "chat"]]


def test_async_functions_of_several_sources_wait_together():
    """Each returns only after the other was called."""
    called = []

    async def meet(name):
        called.append(name)
        while len(called) < 2:
            await asyncio.sleep(0.001)

    async def first(completions):
        await asyncio.wait_for(meet("first"), 60)
        return [0.25] * len(completions)

    async def second(completions):
        await asyncio.wait_for(meet("second"), 60)
        return [0.5] * len(completions)

    scored = Scorer([ones], by_source={"math": [first], "code": [second]}).score(groups_of("math", "chat", "code"))
    np.testing.assert_array_equal([group.rewards for group in scored], [[0.25, 0.25], [1, 1], [0.5, 0.5]])
    assert all(group.seconds[group.judged_by] > 0 for group in scored)


def test_an_error_of_a_source_leaves_no_call_of_another_behind():
    """Python warns of a coroutine that is never awaited, and a warning is an error here."""

    async def waits(completions):
        return [0.5] * len(completions)

    def fails(completions):
        raise ArithmeticError("broken")

    with pytest.raises(RewardError, match="fails raised ArithmeticError: broken"):
        Scorer([ones], by_source={"math": [waits], "code": [fails]}).score(groups_of("math", "code"))
    gc.collect()


def test_equal_judges_of_two_sources_are_one_with_its_limit():
    def answer(data, _):
        time.sleep(0.02)
        return '{"score": 0.5}'

    with fake_judge(answer) as server:
        sources = {name: [Judge(server.url, "m", "r", max_concurrent=2)] for name in ("math", "code")}
        scorer = Scorer([ones], by_source={**sources, "chat": sources["math"]})
        scored = scorer.score(groups_of("math", "code", "chat", "math"))
        assert list(scored[0].components) == ["ones", "judge"]
        assert len(server.questions) == len({*server.questions}) == 2  # the rows of all sources have the same texts
        scorer.score([group for answer in "abcd" for group in groups_of("math", "chat", answer=answer)])
        assert 1 < server.most_at_a_time <= 2


def test_functions_of_a_source_have_their_own_weights():
    """The weights of the run are those of its own functions, although a source uses an equal one."""
    half = ExactAnswer(weight=0.5)
    scorer = Scorer([ones], [3.0], {"math": [half, ones], "code": [ExactAnswer(weight=0.5), ExactAnswer(tag="a")]})
    assert scorer.list_all() == [ones, half, ones, ExactAnswer(tag="a")]  # equal rules are one
    assert scorer.list_weights() == [3.0, 0.5, 1.0, 1.0]
    assert scorer.weigh_sources() == {"math": [0.5, 1.0], "code": [0.5, 1.0]}
    math, chat = scorer.score(groups_of("math", "chat"))
    assert list(math.components) == ["ones", "exact_answer", "ones_2", "exact_answer_2"]
    np.testing.assert_array_equal(math.rewards, [1.5, 1.0])
    np.testing.assert_array_equal(chat.rewards, [3.0, 3.0])
    assert np.isnan(math.components["ones"]).all()
    assert np.isnan(chat.components["ones_2"]).all()


def test_equal_judges_with_two_weights_are_one_object():
    judges = [Judge("http://127.0.0.1:1", "m", "r") for _ in range(2)]
    scorer = Scorer(judges[:1], [0.1], {"math": judges[1:]})
    assert scorer.list_weights() == [0.1, 1.0]
    assert all(function is judges[0] for function in scorer.list_all())


def test_a_run_weighs_the_functions_of_a_source_by_their_own_weights():
    trainer = trainer_of(share_of_target, reward_weights=[0.25], max_steps=1)
    metrics = trainer.train({"math": math_rows(), "code": TrainSource(code_rows(), rewards=share_of_target)})
    for name, weight, component in (("math", 0.25, "share_of_target"), ("code", 1.0, "share_of_target_2")):
        reward = metrics[f"rewards/{component}/mean"]
        assert metrics[f"source/{name}/reward"] == pytest.approx(weight * reward, abs=1e-6)
        assert reward > 0


def test_a_function_twice_in_a_source_counts_twice():
    (scored,) = Scorer([ones], by_source={"math": [ones, ones]}).score(groups_of("math"))
    assert list(scored.components) == ["ones", "ones_2"]
    np.testing.assert_array_equal(scored.rewards, [2, 2])


def test_a_group_sent_to_other_ranks_keeps_what_judges_it():
    (scored,) = Scorer([ones], by_source={"math": [ExactAnswer()]}).score(groups_of("math"))
    again = decode_scored_group(encode_scored_group(scored), scored.group.prompt)
    assert again.judged_by == "exact_answer"
    np.testing.assert_array_equal(again.first_rewards, [1, 0])


def test_metrics_of_each_source():
    """Of math one of two completions is right in each prompt; of code the first has no score, and 0.5 is not right."""
    scorer = Scorer([ones], by_source={"math": [ExactAnswer()], "code": [nothing_but_the_second]})
    metrics = source_metrics(scorer.score(groups_of("math", "code", "math")))
    assert metrics == {
        "source/math/prompts": 2.0,
        "source/math/reward": 0.5,
        "source/math/accuracy": 0.5,
        "source/math/pass_rate": 1.0,
        "source/math/mean_length": 1.0,
        "source/math/zero_variance_share": 0.0,
        "source/code/prompts": 1.0,
        "source/code/reward": 0.5,
        "source/code/accuracy": 0.0,
        "source/code/pass_rate": 0.0,
        "source/code/mean_length": 1.0,
        "source/code/zero_variance_share": 1.0,
    }
    assert (
        source_metrics(
            Scorer([ones]).score([replace(g, prompt=replace(g.prompt, data_source=None)) for g in groups_of("a")])
        )
        == {}
    )


@pytest.mark.parametrize(
    "changes",
    [{}, {"reward_aggregation": "normalize_then_sum"}, {"advantage_fn": lambda groups: [g.rewards for g in groups]}],
)
def test_a_run_trains_on_the_rewards_of_each_source(changes):
    sources = {"math": math_rows(), "code": TrainSource(code_rows(), rewards=[first_is_target, share_of_target])}
    trainer = trainer_of(share_of_target, max_steps=40, **changes)
    first = trainer_of(share_of_target, max_steps=1, **changes).train(sources)
    metrics = trainer.train(sources)
    assert metrics["source/code/accuracy"] > first["source/code/accuracy"] + 0.3
    assert metrics["source/math/reward"] > first["source/math/reward"] + 0.3
    assert set(metrics) >= {"rewards/share_of_target/mean", "rewards/first_is_target/mean"}
    groups, advantages = trainer.last_rollout
    assert np.isfinite(advantages).all()
    assert {g.judged_by for g in groups} == {"share_of_target", "first_is_target"}


def test_each_source_may_have_a_moving_average_of_its_own():
    trainer = trainer_of(share_of_target, baseline="moving", reward_scaling="none", baseline_key="source", max_steps=3)
    trainer.train({"math": math_rows(), "code": TrainSource(code_rows(), rewards=[ones])})
    averages = trainer._step.moving_baselines.state_dict()
    assert set(averages["keys"]) == {"math", "code"}


def test_a_later_call_without_sources_has_the_rewards_of_the_run_alone():
    trainer = trainer_of(share_of_target, max_steps=1)
    trainer.train({"code": TrainSource(code_rows(), rewards=first_is_target)})
    metrics = trainer.train(math_rows())
    assert "rewards/first_is_target/mean" not in metrics
    assert not [name for name in metrics if name.startswith("source/")]


def test_pass_rates_are_those_of_the_first_reward_of_the_source():
    """The rule of math never applies to code, whose prompts are always right by their own."""
    trainer = trainer_of(share_of_target, curriculum="pass_rate", max_steps=4)
    trainer.train({"math": math_rows(2), "code": TrainSource(code_rows(2), rewards=[ones])})
    rates = trainer.sampler.pass_rates
    assert [rates.rate(index) for index in (1, 3)] == [1.0, 1.0]  # code has the odd indices
    assert all(rates.rate(index) < 1 for index in (0, 2))


# The same run again


def make_rows():
    return {
        "math": math_rows(),
        "code": TrainSource(code_rows(), weight=2.0, rewards=[share_of_target, first_is_target]),
    }


def read_endlessly():
    for number in itertools.count():
        yield {"prompt": [number % 12, 5], "tests": number}


def make_streams():
    stream = datasets.Dataset.from_list(math_rows(9)).to_iterable_dataset()
    return {"math": stream, "code": TrainSource(read_endlessly(), weight=2.0), "rows": code_rows(3)}


RESUMED = {
    "rows": (make_rows, {}),
    "streams": (make_streams, {}),
    "quotas": (lambda: {"a": TrainSource(math_rows(), quota=3), "b": TrainSource(code_rows(), quota=1)}, {}),
    "ahead": (make_rows, {"async_steps": 1}),
    "curriculum": (
        lambda: {"math": math_rows(), "code": TrainSource(code_rows(), rewards=[ones])},
        {"curriculum": "pass_rate", "curriculum_floor": 0.1},
    ),
    "refill": (
        lambda: {"math": math_rows(), "code": TrainSource(code_rows(), rewards=[first_is_target])},
        {"zero_variance": "refill", "group_size": 2},
    ),
}


@pytest.mark.parametrize(("make", "changes"), RESUMED.values(), ids=RESUMED)
def test_a_resumed_run_goes_on_exactly(tmp_path, make, changes):
    settings = {"max_steps": 9, **changes}
    whole = trainer_of(Seen(), **settings)
    whole.train(make())
    first, again = (trainer_of(Seen(), seed, output_dir=tmp_path, **settings) for seed in (0, 5))
    stop_after(first, 4)
    first.train(make())
    assert again.train(make())["resumed_from_step"] == 4
    assert torch.equal(weights(whole), weights(again))
    assert whole.progress.draws == again.progress.draws
    assert whole.progress.skipped == again.progress.skipped
    assert bool(whole.progress.skipped) == ("curriculum" in changes)


@pytest.mark.parametrize("make", [make_rows, make_streams])
def test_a_run_resumes_after_an_error_in_a_step(tmp_path, make):
    whole, calls = trainer_of(Seen(), max_steps=9), itertools.count(1)
    whole.train(make())

    def fail_once(completions, source):
        if next(calls) == 5:
            raise OSError("judge unreachable")
        return Seen()(completions, source)

    settings = {"output_dir": tmp_path, "max_steps": 9}
    with pytest.raises(RewardError, match="judge unreachable"):
        trainer_of(fail_once, **settings).train(make())
    again = trainer_of(fail_once, seed=5, **settings)
    assert again.train(make())["resumed_from_step"] == 4
    assert torch.equal(weights(whole), weights(again))


OTHER = {
    "weight": (
        {"code": TrainSource(code_rows(), weight=3.0)},
        r"shares of the sources: math 1, code 2 there, math 1, code 3 h",
    ),
    "name": ({"code": None, "tests": TrainSource(code_rows(), weight=2.0)}, "columns: not those of the run"),
    "rows": ({"code": TrainSource(code_rows(8), weight=2.0)}, "prompts: not those of the run"),
    "rewards": (
        {"code": TrainSource(code_rows(), weight=2.0, rewards=[ones])},
        r"reward functions: .* 'code: ones'\] here",
    ),
}


@pytest.mark.parametrize(("changed", "message"), OTHER.values(), ids=OTHER)
def test_another_mixture_is_not_resumed(tmp_path, changed, message):
    sources = {"math": math_rows(), "code": TrainSource(code_rows(), weight=2.0)}
    trainer_of(share_of_target, output_dir=tmp_path, max_steps=1).train(sources)
    others = {name: source for name, source in {**sources, **changed}.items() if source is not None}
    with pytest.raises(CheckpointError, match=message):
        trainer_of(share_of_target, output_dir=tmp_path, max_steps=1).train(others)


def test_sources_in_another_order_are_another_mixture(tmp_path):
    sources = {"math": math_rows(), "code": code_rows()}
    trainer_of(share_of_target, output_dir=tmp_path, max_steps=1).train(sources)
    with pytest.raises(CheckpointError, match="shares of the sources: math 1, code 1 there, code 1, math 1 here"):
        trainer_of(share_of_target, output_dir=tmp_path, max_steps=1).train(dict(reversed(sources.items())))


def test_equal_shares_are_the_same_mixture(tmp_path):
    def quotas(count):
        return {"math": TrainSource(math_rows(), quota=count), "code": TrainSource(code_rows(), quota=count)}

    trainer_of(share_of_target, output_dir=tmp_path, max_steps=1).train(quotas(2))
    half = {"math": TrainSource(math_rows(), weight=0.5), "code": TrainSource(code_rows(), weight=0.5)}
    assert trainer_of(share_of_target, output_dir=tmp_path, max_steps=1).train(half)["resumed_from_step"] == 1


# With the curriculum and with refills


def test_the_curriculum_keeps_the_shares():
    """The prompts of code are always right, so that nine of ten are skipped; their number stays."""
    reward = Seen()
    trainer = trainer_of(reward, curriculum="pass_rate", curriculum_floor=0.1, max_steps=10)
    metrics = trainer.train({"math": math_rows(), "code": TrainSource(code_rows(), rewards=[ones])})
    assert reward.sources == ["math"] * 20
    assert metrics["source/code/prompts"] == 2
    assert trainer.progress.draws == 40
    assert trainer.progress.skipped["code"] > 20


def test_refills_are_drawn_by_the_shares_and_what_is_trained_is_not():
    """Of code nothing can be trained: what is sampled has the shares of the sources, what is trained is all math."""
    trainer = trainer_of(share_of_target, zero_variance="refill", max_refills=3, max_steps=1)
    metrics = trainer.train({"math": math_rows(), "code": TrainSource(code_rows(), rewards=[ones])})
    sampled = [metrics[f"source/{name}/prompts"] for name in ("math", "code")]
    assert sum(sampled) == metrics["rollout/groups"] > 4
    assert abs(sampled[0] - sampled[1]) <= 1
    assert metrics["source/code/zero_variance_share"] == 1
    assert {group.group.prompt.data_source for group in trainer.last_rollout[0]} == {"math"}


# What a run writes


def test_a_run_writes_the_source_of_each_completion_and_shows_each_source(tmp_path):
    trainer = trainer_of(share_of_target, output_dir=tmp_path, max_steps=2, log_completions=100)
    trainer.train({"math": math_rows(), "code": TrainSource(code_rows(), rewards=[first_is_target])})
    rows = read_jsonl(tmp_path / "completions" / "step_000001.jsonl")
    assert Counter(row["source"] for row in rows) == {"math": 16, "code": 16}
    assert all((row["rewards"]["first_is_target"] is None) == (row["source"] == "math") for row in rows)
    page = write_report(tmp_path).read_text(encoding="utf-8")
    assert "Reward of each source" in page
    assert "Accuracy of each source" in page


# Streams


def test_a_stream_that_ends_stops_the_run_and_names_its_source(tmp_path):
    trainer = trainer_of(Seen(), output_dir=tmp_path, max_steps=9)
    with pytest.raises(ValueError, match=r"prompts\['code'\]: the stream of prompts ended after 7 rows"):
        trainer.train({"math": math_rows(), "code": itertools.islice(read_endlessly(), 7)})
    assert (tmp_path / "checkpoints" / "step_000003").is_dir()


def test_a_second_call_goes_on_in_the_same_generator():
    reward, stream = Seen(), read_endlessly()
    trainer = trainer_of(reward, max_steps=2)
    for _ in range(2):
        trainer.train({"math": math_rows(), "code": stream})
    assert [row[1] for row in reward.rows if row[2] == "code"] == list(range(8))


def test_a_source_reads_the_generator_of_an_earlier_call_as_its_own():
    """After four draws of the generator alone, nine tenths of a mixture are at the same draw."""
    stream, progress = read_endlessly(), Progress()
    reader = DataReader(PromptReader(GRPOConfig(max_steps=9), None, [first_is_target], None, None), list)
    alone = reader.open(stream, progress).begin(progress, (), 0, lambda index: 1.0)
    progress.draws = len(alone.take(4))
    mixed = reader.open({"code": TrainSource(stream, weight=9), "math": math_rows()}, progress)
    (prompt,) = mixed.begin(progress, (), 0, lambda index: 1.0).take(1)
    assert prompt.data_source == "code"


# Prompts of a source


def test_settings_of_a_source(tokenizer):

    tokenizer.chat_template = "{% for message in messages %}{{ message.role }}:{{ message.content }};{% endfor %}"
    reader = PromptReader(GRPOConfig(system_prompt="Think."), tokenizer, [ones], None, None)
    data = DataReader(reader, list).open(
        {
            "math": TrainSource(
                [{"problem": "1+1?", "source": "web"}], prompt_column="problem", columns={"from": "source"}
            ),
            "code": TrainSource([{"prompt": "Sort."}], system_prompt="Write Python."),
        },
        Progress(),
    )
    math, code = data.prompts
    assert (math.text, math.columns) == ("system:Think.;user:1+1?;", {"from": "web", "source": "math"})
    assert (code.text, code.columns) == ("system:Write Python.;user:Sort.;", {"source": "code"})


# Errors


def measured_only(completions):
    return [0.0 for _ in completions]


measured_only.weight = 0.0


def sources_with(**settings):
    return lambda: {"math": math_rows(), "code": TrainSource(code_rows(), **settings)}


WRONG = {
    "negative": (sources_with(weight=-1.0), ConfigError, "weight: input should be greater than 0, got -1.0"),
    "zero": (sources_with(weight=0), ConfigError, "weight: input should be greater than 0, got 0"),
    "nan": (sources_with(weight=float("nan")), ConfigError, "weight: .*finite number, got nan"),
    "infinite": (sources_with(weight=float("inf")), ConfigError, "weight: .*got inf"),
    "both": (sources_with(weight=1.0, quota=2), ConfigError, "weight=1 and quota=2: give one of them"),
    "quota 0": (sources_with(quota=0), ConfigError, "quota: input should be greater than or equal to 1, got 0"),
    "one quota": (
        sources_with(quota=3),
        ConfigError,
        "source 'code' has quota=3 and source 'math' has none: give all sources quotas",
    ),
    "sum": (
        lambda: {"math": TrainSource(math_rows(), quota=1), "code": TrainSource(code_rows(), quota=2)},
        ConfigError,
        r"the quotas 1 \(math\) \+ 2 \(code\) sum to 3, and prompts_per_step=4: change one of them",
    ),
    "setting": (sources_with(wieght=2), ConfigError, "unknown option 'wieght'.*weight"),
    "no source": (dict, ConfigError, "prompts has no source: give at least one, as"),
    "empty name": (lambda: {"": math_rows()}, ConfigError, "prompts: '' is not the name of a source"),
    "slash": (lambda: {"a/b": math_rows()}, ConfigError, "prompts: 'a/b' is not the name of a source: write letters"),
    "number": (lambda: {3: math_rows()}, ConfigError, "prompts: 3 is not the name of a source"),
    "no name": (lambda: TrainSource(math_rows()), ConfigError, "prompts is a TrainSource without a name: give it one"),
    "empty": (lambda: {"math": math_rows(), "code": []}, ValueError, r"prompts\['code'\]: prompts is empty: there is"),
    "row": (lambda: {"math": [{"prompt": []}]}, ValueError, r"prompts\['math'\]: prompts\[0\] is empty"),
    "no rows": (lambda: {"math": 3}, TypeError, r"prompts\['math'\]: prompts is int: expected a list of rows"),
    "no file": (
        lambda: {"math": "none.jsonl"},
        FileNotFoundError,
        r"prompts\['math'\]: .* 'none.jsonl' does not exist",
    ),
    "column": (
        lambda: {"math": [{"prompt": [1], "source": "web"}]},
        ValueError,
        r"prompts\['math'\]: prompts\[0\] has a column 'source', 'web', which in a mixture holds the name of the "
        "source: rename it, by columns={'row_source': 'source'} of its TrainSource, or drop it",
    ),
    "reward": (
        sources_with(rewards="exact"),
        ConfigError,
        r"prompts\['code'\]: reward_fn\[0\] is 'exact', the name of",
    ),
    "no reward": (sources_with(rewards=[]), ConfigError, r"prompts\['code'\]: rewards is empty: leave it out for the"),
    "weights": (
        sources_with(rewards=measured_only),
        ConfigError,
        r"prompts\['code'\]: the weight of every reward function is 0, .* none of its completions is trained",
    ),
    "columns of a rule": (
        sources_with(rewards=ExactAnswer()),
        ValueError,
        r"prompts\['code'\]: the prompts do not fit the reward exact_answer: .*'answer' is missing",
    ),
    "stream": (
        lambda: {"math": math_rows(), "code": read_endlessly()},
        ConfigError,
        r"prompts\['code'\]: prompts is a generator, whose length is not known: set max_steps",
    ),
}


@pytest.mark.parametrize(("make", "kind", "message"), WRONG.values(), ids=WRONG)
def test_errors_name_the_source_and_the_value(make, kind, message):
    with pytest.raises(kind, match=message):
        trainer_of(share_of_target, max_steps=None).train(make())


def test_a_row_may_name_its_source():
    reward = Seen()
    trainer_of(reward, max_steps=1).train({"math": [{**row, "source": "math"} for row in math_rows()]})
    assert set(reward.sources) == {"math"}


def test_prompts_of_a_mixture_have_one_form(tokenizer, make_tiny_model):
    trainer = GRPO(make_tiny_model("llama", vocab_size=260), ones, tokenizer=tokenizer, **options())
    with pytest.raises(ValueError, match=r"prompts\['code'\]\[0\] is token ids and prompts\['math'\]\[0\] text"):
        trainer.train({"math": ["a"], "code": [[1, 2]]})
