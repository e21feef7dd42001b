"""Token counts, peak memory and episodes in the metrics and in the report, during a run as well."""

import html
import re

import pytest

from rlox_grpo import GRPO
from rlox_grpo.run.files import read_jsonl
from rlox_grpo.run.report import write_report
from rlox_grpo.run.report.curves import curves
from rlox_grpo.run.report.read import Run
from rlox_grpo.run.usage import add_laps
from toy import PROMPTS, ToyLM, options, share_of_target


def run_of(metrics, evaluations=()):
    return Run("run", {}, dict(metrics), dict(evaluations), [], {}, {})


def trainer_of(folder, **changes):
    return GRPO(ToyLM(), share_of_target, **options(output_dir=folder, checkpoint_steps=0, **changes))


def test_tokens_are_counted_over_the_whole_run_and_a_resume(tmp_path):
    trainer_of(tmp_path, max_steps=2).train(PROMPTS)
    metrics = trainer_of(tmp_path, max_steps=5, resume_changes=("max_steps",)).train(PROMPTS)
    rows = read_jsonl(tmp_path / "metrics.jsonl")
    assert [row["tokens/prompt"] for row in rows] == [3 * 4 * step for step in range(1, 6)]
    sampled = [round(row["completions/mean_length"] * 4 * 8) for row in rows]
    assert [row["tokens/completion"] for row in rows] == [sum(sampled[:step]) for step in range(1, 6)]
    assert metrics["tokens/completion"] == sum(sampled)


def test_a_wait_for_the_slowest_rank_is_time_of_its_stage_and_of_no_other():
    fast = [("weight_sync", 0.0, 1.0), ("rollout", 1.0, 2.0), ("rewards", 2.0, 11.0), ("weight_sync", 12.0, 12.5)]
    slow = [("weight_sync", 0.0, 1.0), ("rollout", 1.0, 10.0), ("rewards", 10.0, 11.0), ("weight_sync", 12.0, 13.0)]
    # The fast rank waits 8 s in its rewards for the rollout of the other, and 0.5 s after its last stage.
    seconds = add_laps([[*fast, ("step", 0.0, 14.0)], [*slow, ("step", 0.0, 14.0)]])
    assert seconds == {"weight_sync": 2.0, "rollout": 9.0, "rewards": 1.0, "step": 14.0}
    assert add_laps([fast]) == {"weight_sync": 1.5, "rollout": 1.0, "rewards": 9.0}


def test_peak_memory_is_measured(tmp_path):
    trainer_of(tmp_path, max_steps=2).train(PROMPTS)
    first, last = (row["perf/host_memory_gib_max"] for row in read_jsonl(tmp_path / "metrics.jsonl"))
    assert 0.05 < first <= last < 200  # GiB: torch alone takes a tenth of one


def test_a_report_written_during_the_run_shows_the_steps_so_far(tmp_path):
    pages = []

    class Watcher:
        def on_step(self, step, metrics):
            page = write_report(tmp_path, refresh_s=5).read_text(encoding="utf-8")
            pages.append(re.search(r"All metrics of step (\d+)", page)[1])
            assert '<meta http-equiv="refresh" content="5">' in page

    GRPO(
        ToyLM(), share_of_target, callbacks=[Watcher()], **options(output_dir=tmp_path, max_steps=3)
    ).train(PROMPTS)  # fmt: skip
    assert pages == ["1", "2", "3"]
    assert 'http-equiv="refresh"' not in (tmp_path / "report.html").read_text(encoding="utf-8")


METRICS = {
    "reward/mean": 0.5, "rewards/exact/mean": 0.5, "rewards/exact/undecided": 0.1, "rewards/exact/time_s": 0.1,
    "completions/mean_length": 9.0, "completions/clipped_ratio": 0.1, "rollout/frac_reward_zero_std": 0.5,
    "policy/kl": 0.01, "policy/entropy": 1.0, "policy/clip_fraction": 0.1, "update/grad_norm": 1.0,
    "update/learning_rate": 1e-6, "perf/tokens_per_s": 10.0, "perf/padding_share": 0.1, "perf/mfu": 0.3,
    "perf/gpu_memory_gib_max": 12.0, "perf/host_memory_gib_max": 3.0, "tokens/completion": 10.0,
    "episode/turns_mean": 2.0, "episode/stop/environment": 0.9, "episode/stop/max_turns": 0.1, "time/rollout_s": 1.0,
    "time/step_s": 2.0,
}  # fmt: skip


@pytest.fixture(scope="module")
def page():
    measured = {"accuracy": 0.5, "rewards/exact": 0.5, "mean_reward": 0.5}
    return curves([run_of({1: METRICS, 2: METRICS}, {1: measured, 2: measured})])


def test_every_usual_chart_says_what_is_healthy(page):
    captions = re.findall(r"<figcaption.*?</figcaption>", page.partition("<details><summary><h3>")[0], re.DOTALL)
    assert len(captions) == 22
    for caption in captions:
        assert "healthy: " in html.unescape(caption).lower(), caption


def test_memory_tokens_and_episodes_have_charts(page):
    for title in ("Peak memory", "Tokens so far", "Turns of an episode", "Ends of episodes"):
        assert title in page
    assert "max turns" in page
    assert " more</h3>" not in page  # nothing is left for the charts of other metrics
