"""The learning study of benches/learning.py: its statistics by hand, and a small study that is continued."""

from __future__ import annotations

import json
import math
import os
import sys
from pathlib import Path

import pytest

BENCHES = Path(__file__).parents[2] / "benches"


@pytest.fixture
def study(monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path, str(BENCHES)])
    import learning

    return learning


@pytest.fixture
def statistics(monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path, str(BENCHES)])
    import paired_statistics

    return paired_statistics


def test_student_t_has_the_tables_quantiles(statistics):
    for freedom, quantile in {1: 12.7062, 2: 4.3027, 7: 2.3646, 30: 2.0423}.items():
        assert statistics.t_tail(quantile, freedom) == pytest.approx(0.025, abs=3e-6)
        assert statistics.t_quantile(0.025, freedom) == pytest.approx(quantile, abs=1e-4)


def test_a_paired_p_value_by_hand(statistics):
    # Mean 2, deviation 1, so t = 2 √3 with 2 degrees of freedom, where P(T > t) = 1/2 − t / (2 √(2 + t²)).
    assert statistics.paired_p_value([1, 2, 3]) == pytest.approx(1 - math.sqrt(12 / 14), abs=1e-6)
    assert statistics.paired_p_value([-1, -2, -3]) == statistics.paired_p_value([1, 2, 3])
    assert math.isnan(statistics.paired_p_value([1]))
    assert [statistics.paired_p_value([value] * 3) for value in (0.0, 0.5)] == [1.0, 0.0]


def test_holm_by_hand(statistics):
    # Sorted 0.01, 0.03, 0.04 times 3, 2 and 1, and none below the one before it.
    assert statistics.holm([0.01, 0.04, math.nan, 0.03]) == pytest.approx([0.03, 0.06, math.nan, 0.06], nan_ok=True)
    assert statistics.holm([0.6, 0.9]) == [1.0, 1.0]


def test_the_interval_is_as_wide_as_students(statistics):
    """1 to 8: deviation √6, so Student's half width is 2.3646 · √(6/8) = 2.05; that of plain percentiles is 1.59."""
    low, high = statistics.bootstrap_interval(list(range(1, 9)))
    assert low == pytest.approx(4.5 - 2.05, abs=0.08)
    assert high == pytest.approx(4.5 + 2.05, abs=0.08)
    assert statistics.bootstrap_interval([0.1] * 4) == pytest.approx((0.1, 0.1))
    assert all(math.isnan(bound) for bound in statistics.bootstrap_interval([1, 2]))


def test_a_study_is_continued_and_compared(study, tmp_path, capsys):
    small = ["--out", str(tmp_path), "--scale", "0.02", "--samples", "1", "--warm-start-steps", "2"]
    study.main([*small, "--cells", "guess_the_number/default/0"])
    first = tmp_path / "cells" / "guess_the_number.default.0.json"
    written = first.read_text()
    os.utime(first, (1, 1))
    study.main([*small, "--cells", "guess_the_number/group_double/0", "guess_the_number/default/0"])
    assert first.stat().st_mtime == 1  # a finished cell is not run again
    base = json.loads(written)
    wide = json.loads((tmp_path / "cells" / "guess_the_number.group_double.0.json").read_text())
    assert (base["options"]["group_size"], base["options"]["prompts_per_step"]) == (16, 15)
    assert (wide["options"]["group_size"], wide["options"]["prompts_per_step"]) == (32, 8)
    # 60 · 240 · 0.02 = 288 completions, in steps of 240 and of 256: both need two.
    assert (base["completions"], wide["completions"]) == (480, 512)
    assert len(base["curves"]["reward/mean"]) == 2
    comparison = json.loads((tmp_path / "results.json").read_text())["comparisons"][1]
    assert comparison["difference"] == pytest.approx(wide["accuracy"] - base["accuracy"])
    assert "| group_double | 1 |" in (tmp_path / "table.md").read_text()

    with pytest.raises(SystemExit, match="of 2 sizes, which cannot be compared"):
        study.main(["--out", str(tmp_path), "--scale", "0.01", "--cells", "guess_the_number/rloo/0", *small[4:]])
    with pytest.raises(SystemExit, match=r"matches no TASK/VARIANT/SEED; tasks: countdown,"):
        study.main([*small, "--cells", "chess/*"])


def test_a_reply_names_who_is_asked_for_and_nobody_else(study):
    text = "Ma'moon shuns tea. Richie damns tea. Anne-Marie adores Richie. \nWho shuns tea? Reply only with a name."
    replies = {"Ma'moon": 1, "It is Ma'moon.": 1, "Richie": 0, "Ma'moon or Richie": 0, "Anne": 0, "": 0, text: 0}
    scores = study.TASKS["pretrained_names"].trainer()["reward_fn"][0](
        [*replies][:-2] + [[{"role": "assistant", "content": reply}] for reply in [*replies][-2:]],
        question=[text] * len(replies),
        answer=["Ma'moon"] * len(replies),
    )
    assert scores == [*replies.values()]


def test_a_cell_that_another_process_runs_is_left_to_it(study, tmp_path):
    with study.locked(tmp_path / "cells" / "countdown.default.0.lock"):
        study.run_cells([("countdown", "default", 0)], tmp_path, study.Sizes())  # would take a minute
    assert not list(tmp_path.rglob("*.json"))


@pytest.mark.parametrize(
    ("name", "variants"),
    [("countdown", {"trl": 8, "trl_same_choices": 16}), ("word_problems", {})],
)
def test_trl_trains_a_cell_of_the_study(study, tmp_path, name, variants):
    """Each variant with the size of its groups. The tasks differ in their prompts alone."""
    pytest.importorskip("trl", reason="needs TRL, and so Python 3.11")
    from safetensors.torch import load_file
    from transformers import AutoTokenizer

    from rlox_grpo.prompts.load import load_prompts

    task = study.TASKS[name]
    policy, rows, _ = task.prepare(tmp_path / "warm", 0, 1)
    template = task.trainer().get("prompt_template")
    written = study.learning_trl.prepare(policy, rows, template)
    tokenizer = AutoTokenizer.from_pretrained(policy)
    ours = [prompt.token_ids.tolist() for prompt in load_prompts(rows, tokenizer, template)]
    assert [tokenizer(row["prompt"])["input_ids"] for row in written] == ours
    assert [{**row, "prompt": None} for row in written] == [{**row, "prompt": None} for row in rows]
    settings = {"group_size": 16, "prompts_per_step": 1, "max_new_tokens": 4, "learning_rate": 1e-3}
    reward_fn = task.trainer()["reward_fn"]
    for variant, group in variants.items():
        out = tmp_path / variant
        arguments, curves = study.learning_trl.train(policy, written, reward_fn, variant, settings, 2, 0, out)
        assert arguments["num_generations"] == group
        assert (arguments["per_device_train_batch_size"], arguments["learning_rate"]) == (16, 1e-3)
        assert arguments["reward_weights"] == [rule.weight for rule in reward_fn]
        assert len(curves["reward/mean"]) == 2
        before, after = (load_file(folder / "model.safetensors") for folder in (policy, out))
        assert before.keys() == after.keys()


def test_trl_gets_no_prompts_that_it_would_tokenise_otherwise(study, tmp_path):
    """A tokenizer that puts a token before each text puts it before a rendered chat too, unlike this library."""
    pytest.importorskip("trl", reason="needs TRL, and so Python 3.11")
    from tokenizers.processors import TemplateProcessing

    task = study.TASKS["word_problems"]
    policy, rows, _ = task.prepare(tmp_path / "warm", 0, 1)
    tokenizer = study.learning_trl.AutoTokenizer.from_pretrained(policy)
    ends = [("<eos>", tokenizer.eos_token_id)]
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="<eos> $A", special_tokens=ends)
    tokenizer.save_pretrained(policy)
    with pytest.raises(ValueError, match=r"rows\[0\]: TRL would tokenise the prompt to other ids"):
        study.learning_trl.prepare(policy, rows, "verl_gsm8k")
