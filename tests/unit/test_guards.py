"""Each guard on a history that it is for, on the same history with a rising reward, and on runs where all is well."""

import html
import json
import logging

import pytest
from synthetic_run import write_run

from rlox_grpo import GRPO
from rlox_grpo.run import guards
from rlox_grpo.run.files import read_jsonl
from rlox_grpo.run.guards import GUARDS, History, Watch
from toy import PROMPTS, ToyLM, options

STEPS = 60


def run(rewards=(0.3, 0.3), **ends):
    """60 steps in which each metric goes from its first value to its second in a straight line, then stays for ten."""
    ends = {"reward/mean": rewards, "reward/std": (0.4, 0.4), **ends}
    steps = []
    for step in range(STEPS):
        share = min(1.0, step / (STEPS - 10))
        steps.append({name.replace("__", "/"): a + share * (b - a) for name, (a, b) in ends.items()})
    return steps


def history_of(steps):
    return History(steps[: guards.FIRST], steps[-(guards.RECENT + guards.LAST) :])


def jump(name, before, after):
    """The metric jumps in the last five steps."""
    return [{**step, name: after if place >= STEPS - 5 else before} for place, step in enumerate(run())]


def fallen(before, after):
    """The reward rises from 0.3, and falls in the last five steps."""
    return [
        {**step, "reward/mean": after} if place >= STEPS - 5 else step for place, step in enumerate(run((0.3, before)))
    ]


HOLLOW = {
    "rewards__tag_format__mean": (0.1, 0.99),
    "rewards__tag_format__std": (0.3, 0.1),
    "rewards__countdown__mean": (0.02, 0.02),
    "rewards__countdown__std": (0.14, 0.14),
}
FALLEN = {"rewards__countdown__mean": (0.4, 0.1), "rewards__countdown__std": (0.5, 0.3)}
JUDGED = {
    "rewards__judge__mean": (0.3, 0.8),
    "rewards__judge__cached": (0.0, 0.0),
    "eval__rewards__judge": (0.9, 0.1),
    "eval__rewards__math": (0.6, 0.4),
}
CASES = {
    "constant_rewards": (run(rollout__frac_reward_zero_std=(1.0, 0.97)), "97% of the groups"),
    "growing_teacher_kl": (run(teacher__kl=(0.5, 1.0)), "teacher/kl has grown from 0.5"),
    "reward_collapse": (fallen(0.7, 0.02), "to 0.02, below its 0.3"),
    "short_completions": (run(completions__mean_length=(300, 40)), "fallen from 2"),
    "long_completions": (run(completions__mean_length=(100, 400)), "to 400 tokens"),
    "truncated_completions": (run(completions__clipped_ratio=(0.1, 0.8)), "80% of the completions are truncated"),
    "repetition": (run(completions__repeated_share=(0.1, 0.8)), "80% of the 4-grams"),
    "kl_runaway": (jump("policy/kl", 0.05, 0.9), "from 0.05 to 0.9 nats"),
    "entropy_collapse": (run(policy__entropy=(1.0, 0.01)), "entropy has fallen"),
    "entropy_explosion": (run(policy__entropy=(1.0, 5.0)), "entropy has grown"),
    "template_collapse": (run(mutual_information__reply=(2.0, 0.1)), "from 1.8 to 0.1 nats"),
    "hollow_format": (run(**HOLLOW), "tag_format is almost at its maximum and countdown stays at 0.02"),
    "reward_without_answers": (run((0.3, 0.9), **FALLEN), "countdown has fallen from 0.37 to 0.1"),
    "judge_drift": (run(**JUDGED), "the score of judge has risen, and eval/rewards/math has fallen from 0.6 to 0.4"),
    "log_prob_gap": (run(mismatch__gap_mean=(0.002, 0.1)), "by 0.1 per token"),
    "lost_adapter_change": (run(weights__adapter_change_kept=(0.01, 0.4)), "40% of the change that LoRA has made"),
    "gradient_spikes": (jump("update/grad_norm", 0.5, 30.0), "from 0.5 to 30"),
}


def test_every_guard_has_a_case():
    assert list(CASES) == [guard.__name__ for guard in GUARDS]


@pytest.mark.parametrize(("every", "warns"), [(10, True), (15, True), (30, False)])
def test_the_mutual_information_may_be_measured_in_some_steps_only(every, warns):
    steps = [{**step, "mutual_information/reply": 2.0 if place < 10 else 0.1} for place, step in enumerate(run())]
    for place, step in enumerate(steps):
        if place % every:
            del step["mutual_information/reply"]
    assert (guards.template_collapse(history_of(steps)) is not None) == warns


@pytest.mark.parametrize(("values", "warns"), [([0.6, 0.5, 0.5], True), ([0.6, 0.4, 0.6], False), ([0.6, 0.4], False)])
def test_the_drift_from_a_judge_shows_in_two_evaluations(values, warns):
    """Of a set with a name, of which only some steps have an evaluation."""
    steps = [{name: value for name, value in step.items() if not name.startswith("eval/")} for step in run(**JUDGED)]
    for place, value in zip((0, 30, 59), values, strict=False):
        steps[place]["eval/hard/rewards/math"] = value
    assert (guards.judge_drift(history_of(steps)) is not None) == warns


@pytest.mark.parametrize("name", list(CASES))
def test_a_guard_warns_of_its_own_trouble_and_of_no_other(name):
    steps, said = CASES[name]
    found = {guard.__name__: guard(history_of(steps)) for guard in GUARDS}
    assert said in found.pop(name)
    assert not any(found.values())


NEAR = {
    "reward_collapse, to above the start": fallen(0.9, 0.38),  # 0.35 at the start, 0.71 before the fall
    "reward_collapse, by less than half a deviation": fallen(0.4, 0.22),
    "constant_rewards": run(rollout__frac_reward_zero_std=(1.0, 0.93)),
    "constant_rewards, with a teacher": run(rollout__frac_reward_zero_std=(1.0, 1.0), teacher__kl=(0.5, 0.4)),
    "growing_teacher_kl": run(teacher__kl=(0.5, 0.7)),
    "entropy_collapse, towards a teacher": run(policy__entropy=(2.0, 0.01), teacher__kl=(3.0, 0.1)),
    "entropy_explosion, towards a teacher": run(policy__entropy=(1.0, 4.0), teacher__kl=(3.0, 0.1)),
    "short_completions, towards a teacher": run(completions__mean_length=(300.0, 50.0), teacher__kl=(3.0, 0.1)),
    "long_completions, towards a teacher": run(completions__mean_length=(50.0, 300.0), teacher__kl=(3.0, 0.1)),
    "short_completions": run(completions__mean_length=(300, 130)),
    "long_completions": run(completions__mean_length=(100, 240)),
    "truncated_completions": run(completions__clipped_ratio=(0.1, 0.45)),
    "repetition": run(completions__repeated_share=(0.1, 0.45)),
    "kl_runaway": jump("policy/kl", 0.05, 0.28),
    "kl_runaway, high all along": jump("policy/kl", 0.4, 0.9),
    "entropy_collapse": run(policy__entropy=(1.0, 0.07)),
    "entropy_explosion": run(policy__entropy=(1.0, 2.4)),
    "log_prob_gap": run(mismatch__gap_mean=(0.002, 0.018)),
    "log_prob_gap, high all along": run(mismatch__gap_mean=(0.1, 0.2)),
    "lost_adapter_change": run(weights__adapter_change_kept=(0.01, 0.55)),
    "gradient_spikes": jump("update/grad_norm", 0.5, 4.5),
    "reward_without_answers": run((0.3, 0.9), **{**FALLEN, "rewards__countdown__mean": (0.4, 0.3)}),
    "judge_drift, by less": run(**{**JUDGED, "eval__rewards__math": (0.6, 0.56)}),
    "judge_drift, of another reward": run(**{name: ends for name, ends in JUDGED.items() if "cached" not in name}),
    "judge_drift, flat": run(**{**JUDGED, "rewards__judge__mean": (0.3, 0.34)}),
    "repetition, of the task": run(completions__repeated_share=(0.6, 0.7)),
}


@pytest.mark.parametrize("name", list(NEAR))
def test_what_is_near_trouble_is_not_yet_trouble(name):
    assert not any(guard(history_of(NEAR[name])) for guard in GUARDS)


def levels(**values):
    """A history in which each metric has one value in the first steps, one before the last steps, and one in those."""
    values = {"reward__mean": (0.25, 0.25, 0.25), "reward__std": (0.5, 0.5, 0.5), **values}
    first, before, now = (
        {name.replace("__", "/"): at[when] for name, at in values.items() if at[when] is not None} for when in range(3)
    )
    return History([first] * guards.FIRST, [before] * guards.RECENT + [now] * guards.LAST)


SHORT = {"completions__mean_length": (300, 300, 50)}
FORMAT = {"rewards__format__mean": (0.5, 1.0, 1.0), "rewards__format__std": (0.1, 0.1, 0.1)}
ANSWER = {"rewards__right__std": (0.5, 0.5, 0.5)}


def hollow(answer, **changes):
    return {**FORMAT, **ANSWER, "rewards__right__mean": answer, **changes}


def exploited(answer, spread=0.5):
    spread = {"rewards__right__std": (spread, 0.25, 0.25)}
    return {"reward__mean": (0.25, 0.5, 0.5), "rewards__right__mean": (0.5, 0.5, answer), **spread}


EDGES = [  # on each side of each threshold
    ("constant_rewards", {"rollout__frac_reward_zero_std": (0.5, 0.91, 0.96)}, True),
    ("constant_rewards", {"rollout__frac_reward_zero_std": (0.5, 0.89, 0.96)}, False),
    ("constant_rewards", {"rollout__frac_reward_zero_std": (0.5, 0.91, 0.94)}, False),
    ("constant_rewards", {"rollout__frac_reward_zero_std": (0.5, None, 0.96)}, False),
    ("reward_collapse", {"reward__mean": (0.5, 0.625, 0.375)}, True),
    ("reward_collapse", {"reward__mean": (0.5, 0.625, 0.376)}, False),
    ("reward_collapse", {"reward__mean": (0.5, 0.75, 0.49)}, True),
    ("reward_collapse", {"reward__mean": (0.5, 0.75, 0.5)}, False),
    ("reward_collapse", {"reward__mean": (0.5, 0.625, 0.375), "reward__std": (0.0, 0.5, 0.5)}, False),
    ("short_completions", {"completions__mean_length": (300, 300, 100)}, True),
    ("short_completions", {"completions__mean_length": (300, 300, 101)}, False),
    ("long_completions", {"completions__mean_length": (100, 100, 250)}, True),
    ("long_completions", {"completions__mean_length": (100, 100, 249)}, False),
    ("truncated_completions", {"completions__clipped_ratio": (0.25, 0.25, 0.5)}, True),
    ("truncated_completions", {"completions__clipped_ratio": (0.25, 0.25, 0.49)}, False),
    ("truncated_completions", {"completions__clipped_ratio": (None, None, 1.0)}, True),
    ("truncated_completions", {"completions__clipped_ratio": (1.0, 1.0, 0.9)}, True),
    ("truncated_completions", {"completions__clipped_ratio": (1.0, 1.0, 1.0)}, False),
    ("repetition", {"completions__repeated_share": (0.25, 0.25, 0.5)}, True),
    ("repetition", {"completions__repeated_share": (0.25, 0.25, 0.49)}, False),
    ("repetition", {"completions__repeated_share": (0.5, 0.5, 0.75)}, True),
    ("repetition", {"completions__repeated_share": (0.5, 0.5, 0.74)}, False),
    ("repetition", {"completions__repeated_share": (None, None, 0.5)}, True),
    ("kl_runaway", {"policy__kl": (0.0, 0.0, 0.31)}, True),
    ("kl_runaway", {"policy__kl": (0.0, 0.0, 0.29)}, False),
    ("kl_runaway", {"policy__kl": (0.0, 0.5, 1.5)}, True),
    ("kl_runaway", {"policy__kl": (0.0, 0.5, 1.49)}, False),
    ("entropy_collapse", {"policy__entropy": (20, 20, 1.0)}, True),
    ("entropy_collapse", {"policy__entropy": (20, 20, 1.01)}, False),
    ("entropy_explosion", {"policy__entropy": (1.0, 1.0, 2.5)}, True),
    ("entropy_explosion", {"policy__entropy": (1.0, 1.0, 2.49)}, False),
    ("template_collapse", {"mutual_information__reply": (1.0, 1.0, 0.25)}, True),
    ("template_collapse", {"mutual_information__reply": (1.0, 1.0, 0.26)}, False),
    ("template_collapse", {"mutual_information__reply": (0.21, 0.2, 0.0)}, True),
    ("template_collapse", {"mutual_information__reply": (0.19, 0.2, 0.0)}, False),
    ("log_prob_gap", {"mismatch__gap_mean": (0.0, 0.0, 0.021)}, True),
    ("log_prob_gap", {"mismatch__gap_mean": (0.0, 0.0, 0.019)}, False),
    ("log_prob_gap", {"mismatch__gap_mean": (0.5, 0.5, 1.5)}, True),
    ("log_prob_gap", {"mismatch__gap_mean": (0.5, 0.5, 1.49)}, False),
    ("gradient_spikes", {"update__grad_norm": (0.5, 0.5, 5.0)}, True),
    ("gradient_spikes", {"update__grad_norm": (0.5, 0.5, 4.9)}, False),
    # The reward has risen: by a tenth of its first deviation, and it has not fallen by a tenth since.
    ("short_completions", {**SHORT, "reward__mean": (0.25, 0.25, 0.29), "reward__std": (0.5, 0.1, 0.1)}, True),
    ("short_completions", {**SHORT, "reward__mean": (0.25, 0.25, 0.31), "reward__std": (0.5, 5.0, 5.0)}, False),
    ("short_completions", {**SHORT, "reward__mean": (0.25, 0.5, 0.44)}, True),
    ("short_completions", {**SHORT, "reward__mean": (0.25, 0.5, 0.46)}, False),
    ("short_completions", {**SHORT, "reward__mean": (0.25, 0.25, 0.26), "reward__std": (None, 5.0, 5.0)}, False),
    # A format at its maximum: with little spread, and not from the start while answers are right.
    ("hollow_format", hollow((0.25, 0.25, 0.25)), True),
    ("hollow_format", hollow((0.25, 0.25, 0.25), rewards__format__std=(0.1, 0.1, 0.21)), False),
    ("hollow_format", hollow((0.25, 0.25, 0.25), rewards__format__std=(0.1, 0.1, 0.19)), True),
    ("hollow_format", hollow((0.25, 0.25, 0.25), rewards__format__mean=(0.81, 1.0, 1.0)), False),
    ("hollow_format", hollow((0.25, 0.25, 0.25), rewards__format__mean=(0.79, 1.0, 1.0)), True),
    ("hollow_format", hollow((0.25, 0.25, 0.25), rewards__format__mean=(None, 1.0, 1.0)), True),
    ("hollow_format", hollow((0.09, 0.09, 0.09), rewards__format__mean=(1.0, 1.0, 1.0)), True),
    ("hollow_format", hollow((0.11, 0.11, 0.11), rewards__format__mean=(1.0, 1.0, 1.0)), False),
    # Answers that rise: by a tenth of their deviation or a hundredth above the start and the steps before.
    ("hollow_format", hollow((0.25, 0.25, 0.29)), True),
    ("hollow_format", hollow((0.25, 0.25, 0.31)), False),
    ("hollow_format", hollow((0.25, 0.375, 0.4)), True),
    ("hollow_format", hollow((0.375, 0.25, 0.4)), True),
    ("hollow_format", hollow((0.25, 0.25, 0.255), rewards__right__std=(0.5, 0.5, 0.0)), True),
    ("hollow_format", hollow((0.25, 0.25, 0.265), rewards__right__std=(0.5, 0.5, 0.0)), False),
    ("hollow_format", hollow((0.49, 0.49, 0.49)), True),
    ("hollow_format", hollow((0.5, 0.5, 0.5)), False),
    ("hollow_format", hollow((0.75, 0.75, 0.75), rewards__format__mean=(1.0, 2.0, 2.0)), True),
    (
        "hollow_format",
        hollow((0.3, 0.3, 0.3), rewards__format__mean=(0.25, 0.5, 0.5), rewards__format__std=[0] * 3),
        True,
    ),
    # The answers: not a reward for the format or for the length.
    ("hollow_format", {**FORMAT, "rewards__overlong__mean": (0.25, 0.25, 0.25)}, False),
    ("hollow_format", {**FORMAT, "rewards__repetition__mean": (0.25, 0.25, 0.25)}, False),
    ("hollow_format", {**FORMAT, "rewards__reasoning_length__mean": (0.25, 0.25, 0.25)}, False),
    ("reward_without_answers", exploited(0.34), True),
    ("reward_without_answers", exploited(0.36), False),
    ("reward_without_answers", exploited(0.44, 0.0), True),
    ("reward_without_answers", exploited(0.46, 0.0), False),
    ("reward_without_answers", {**exploited(0.34), "reward__mean": (0.25, 0.25, 0.25)}, False),
]


@pytest.mark.parametrize(("name", "values", "warns"), EDGES)
def test_thresholds(name, values, warns):
    assert (getattr(guards, name)(levels(**values)) is not None) == warns


METRICS = sorted({name for _, values, _ in EDGES for name in values})


@pytest.mark.parametrize("missing", METRICS)
@pytest.mark.parametrize("when", [0, 1, 2])
def test_a_metric_may_be_missing_in_any_steps(missing, when):
    """That is no error, and what is not there in the last steps is nothing to warn of, but for a reward that rises."""
    for name, values, _ in EDGES:
        if missing in values:
            at = [None if place == when else value for place, value in enumerate(values[missing])]
            said = getattr(guards, name)(levels(**{**values, missing: at}))
            assert said is None or when < 2 or missing.endswith("__std") or "completions__mean_length" in values


def test_a_resumed_watch_forgets_the_warnings_of_later_steps(tmp_path):
    (tmp_path / "metrics.jsonl").write_text("")
    for step in (5, 9):
        guards.write_warnings(tmp_path, step, {"kl_runaway": "the message"})
    guards.resume_watch(tmp_path, 6)
    assert [row["step"] for row in read_jsonl(tmp_path / "warnings.jsonl")] == [5]


@pytest.mark.parametrize(
    "name", ["short_completions", "long_completions", "entropy_collapse", "entropy_explosion", "gradient_spikes"]
)
def test_what_comes_with_a_rising_reward_is_learning(name):
    steps = [{**step, "reward/mean": 0.1 + 0.01 * place} for place, step in enumerate(CASES[name][0])]
    assert getattr(guards, name)(history_of(steps)) is None


@pytest.mark.parametrize("after", [0.0, 0.05])
def test_a_collapse_is_found_within_ten_steps(after):
    """The reward rises from 0.24 to 0.55 in 40 steps, and falls at once or over five steps."""
    rising = [0.24 + 0.31 * step / 40 for step in range(40)]
    for fall in ([after] * 10, [0.55 + (after - 0.55) * step / 5 for step in range(1, 6)] + [after] * 5):
        steps = [{"reward/mean": reward, "reward/std": 0.43} for reward in rising + fall]
        said = [guards.reward_collapse(history_of(steps[:count])) for count in range(1, len(steps) + 1)]
        first = next(count for count, message in enumerate(said) if message)
        assert 40 <= first < 50


def test_hollow_format_is_not_said_of_answers_that_come():
    for answers in ((0.02, 0.3), (0.9, 0.9)):  # rising, or as good as they get
        steps = run(**{**HOLLOW, "rewards__countdown__mean": answers})
        assert guards.hollow_format(history_of(steps)) is None
    assert guards.hollow_format(history_of(run(**HOLLOW)[:30])) is None  # too early to say


def test_a_warm_start_that_knows_the_format_is_given_time():
    warm = {**HOLLOW, "rewards__tag_format__mean": (0.99, 0.99)}
    assert guards.hollow_format(history_of(run(**{**warm, "rewards__countdown__mean": (0.45, 0.44)}))) is None
    assert guards.hollow_format(history_of(run(**warm))) is not None  # two answers in a hundred


def test_a_model_without_an_end_token_is_not_blamed():
    assert guards.truncated_completions(history_of(run(completions__clipped_ratio=(1.0, 1.0)))) is None


def test_gaps_and_missing_metrics_are_nothing_to_warn_of():
    for steps in ([{}] * STEPS, [{"policy/kl": float("nan")}] * STEPS, [{"policy/entropy": float("inf")}] * STEPS):
        assert not any(guard(history_of(steps)) for guard in GUARDS)


# --- no false alarm ---


def test_a_run_that_learns_is_left_alone(tmp_path):
    lines = (write_run(tmp_path / "run") / "metrics.jsonl").read_text().splitlines()
    watch, names = Watch(), {"policy/kl", "policy/entropy", "completions/mean_length", "rewards/countdown/mean"}
    rows = [json.loads(line) for line in lines]
    assert names <= rows[-1].keys()
    assert len(rows) == 120
    for row in rows:
        assert watch.step({name: value for name, value in row.items() if isinstance(value, float)}) == {}


# --- once each, and off by choice ---


def hopeless(completions, prompts):
    return [0.3] * len(completions)


@pytest.mark.parametrize("on", [True, False])
def test_a_run_warns_once_of_rewards_that_never_differ(on, caplog):
    with caplog.at_level(logging.WARNING, logger="rlox_grpo.run.guards"):
        GRPO(ToyLM(), hopeless, **options(max_steps=30, guards=on)).train(PROMPTS)
    assert len(caplog.messages) == int(on)
    assert all(message.startswith("constant_rewards: in 100% of the groups") for message in caplog.messages)


def test_the_first_steps_are_not_judged():
    watch, cut = Watch(), {"completions/clipped_ratio": 0.8}
    said = [[*watch.step(cut)] for _ in range(40)]
    assert said == [["truncated_completions"] if place == 14 else [] for place in range(40)]


def test_constant_rewards_since_the_start_are_reported_after_five_steps():
    watch = Watch()
    said = [[*watch.step({"rollout/frac_reward_zero_std": 1.0})] for _ in range(40)]
    assert said == [["constant_rewards"] if place == 4 else [] for place in range(40)]
    watch = Watch()
    assert not any(watch.step({"rollout/frac_reward_zero_std": 0.9 if place == 2 else 1.0}) for place in range(14))


MIXED = {"source__math__prompts": (2, 2), "source__code__prompts": (2, 2)}


def test_groups_of_a_single_source_may_be_constant():
    shares = {"rollout__frac_reward_zero_std": (0.5, 0.5), "source__math__zero_variance_share": (0.1, 0.1)}
    steps = run(**MIXED, **shares, source__code__zero_variance_share=(1.0, 0.97))
    assert "in 97% of the groups of the source code all" in guards.constant_rewards(history_of(steps))
    steps = run(**MIXED, **shares, source__code__zero_variance_share=(0.5, 0.9))
    assert guards.constant_rewards(history_of(steps)) is None


def test_answers_of_a_source_are_compared_with_its_own_reward():
    """The total rises by code, and the answers of math fall: nothing is exploited. The first reward is that of math."""
    falling = {**MIXED, **FALLEN, "source__math__accuracy": (0.4, 0.1), "source__code__accuracy": (0.1, 0.9)}
    steps = run((0.3, 0.9), **falling, source__math__reward=(0.4, 0.2), source__code__reward=(0.1, 0.9))
    assert guards.reward_without_answers(history_of(steps)) is None
    steps = run((0.3, 0.9), **falling, source__math__reward=(0.4, 0.9), source__code__reward=(0.1, 0.9))
    said = guards.reward_without_answers(history_of(steps))
    assert "the accuracy of the source math has fallen from 0.37 to 0.1" in said


def test_a_format_is_hollow_if_the_answers_of_no_source_come():
    answers = {"source__math__accuracy": (0.02, 0.02), "source__code__accuracy": (0.02, 0.6)}
    assert guards.hollow_format(history_of(run(**HOLLOW, **MIXED, **answers))) is None
    answers["source__code__accuracy"] = (0.0, 0.0)
    said = guards.hollow_format(history_of(run(**HOLLOW, **MIXED, **answers)))
    assert "tag_format is almost at its maximum and the accuracy of the source math stays at 0.02" in said


# --- kept: in the metrics and in warnings.jsonl ---


def test_a_warning_is_in_the_metrics_of_its_step_and_in_a_file(tmp_path):
    GRPO(ToyLM(), hopeless, **options(max_steps=7, output_dir=tmp_path)).train(PROMPTS)
    rows = read_jsonl(tmp_path / "metrics.jsonl")
    assert [row["step"] for row in rows if row.get("guard/constant_rewards") == 1.0] == [5]
    (warning,) = read_jsonl(tmp_path / "warnings.jsonl")
    assert (warning["step"], warning["guard"]) == (5, "constant_rewards")
    assert "teach nothing" in warning["message"]
    assert warning["message"].split("teach")[0] in html.unescape((tmp_path / "report.html").read_text())


def test_a_step_without_an_update_has_its_learning_rate(tmp_path):
    settings = options(max_steps=3, output_dir=tmp_path, lr_schedule="linear", learning_rate=0.3)
    GRPO(ToyLM(), hopeless, **settings).train(PROMPTS)
    rows = read_jsonl(tmp_path / "metrics.jsonl")
    assert all("update/grad_norm" not in row for row in rows)
    rates = [row["update/learning_rate"] for row in rows]
    assert rates[0] > rates[1] > rates[2] > 0


@pytest.mark.parametrize("stop", [3, 6])
def test_a_resumed_run_warns_as_the_whole_run_does(tmp_path, stop):
    for steps in (stop, 8):
        GRPO(ToyLM(), hopeless, **options(max_steps=steps, output_dir=tmp_path)).train(PROMPTS)
    fired = [row["step"] for row in read_jsonl(tmp_path / "metrics.jsonl") if "guard/constant_rewards" in row]
    assert fired == [row["step"] for row in read_jsonl(tmp_path / "warnings.jsonl")] == [5]


def test_a_collapse_within_the_first_steps_is_repetition() -> None:
    """A pretrained model at learning_rate=1e-2: broken in step 3, from then on one text without an end.

    The mean of the first steps counts the collapse, and advice to raise max_new_tokens would be wrong.
    """
    shares, truncated = [0.0, 0.25, 0.92, 0.88, *[0.92] * 11], [0.75, 1.0, *[1.0] * 13]
    steps = [
        {"reward/mean": 0.4, "completions/repeated_share": share, "completions/clipped_ratio": cut}
        for share, cut in zip(shares, truncated, strict=True)
    ]
    watch = Watch()
    triggered = [watch.step(step) for step in steps]
    assert [[*step] for step in triggered] == [[]] * 14 + [["repetition"]]
    assert "lower learning_rate" in triggered[-1]["repetition"]
