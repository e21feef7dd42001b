"""The quickest of the examples; ``make test-examples`` runs all of them."""

import re
import runpy
import sys
from pathlib import Path

import pytest

import warm
from rlox_grpo.demo import run as demo

EXAMPLE = Path(__file__).parents[2] / "examples" / "rlox.py"


def held_out_rewards(output):
    """Before the first step and after the last, as the example prints them."""
    found = re.search(r"held-out reward (0\.\d+) -> ([01]\.\d+), accuracy", output)
    assert found, output
    return float(found[1]), float(found[2])


@pytest.mark.thorough  # test_readme.py has another plain module learn
@pytest.mark.slow
def test_a_plain_module_learns_to_count_on(tmp_path):
    """Chance is 1 / 16; the example reaches 0.85."""
    ended = warm.run(0, EXAMPLE, "--out", str(tmp_path), "--log_to=[]")
    assert ended.returncode == 0, ended.stderr
    before, after = held_out_rewards(ended.stderr)
    assert before < 0.15
    assert 0.6 <= after <= 1.0


@pytest.mark.slow
def test_a_run_without_a_learning_rate_stays_at_chance(tmp_path, monkeypatch, capsys):
    """In this process, and of few steps: the weights are the same after any number of them."""
    words = ["--out", str(tmp_path), "--log_to=[]", "--learning_rate=1e-12", "--steps=4"]
    monkeypatch.setattr(sys, "argv", [str(EXAMPLE), *words])
    monkeypatch.syspath_prepend(EXAMPLE.parent)  # Python does so for a script
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    monkeypatch.delitem(sys.modules, "learner", raising=False)
    before, after = held_out_rewards(capsys.readouterr().out)
    assert before < 0.15
    assert 0.0 <= after <= 0.15


@pytest.mark.slow
def test_the_demo_teaches_its_warm_start(tmp_path, monkeypatch, capsys):
    """A few steps of everything, in this process; the teacher of a finished run is used again."""
    monkeypatch.setattr(demo, "NUM_HELD_OUT", 8)
    monkeypatch.setattr(demo, "WARM_START_ROWS", 16)
    monkeypatch.setitem(demo.SETTINGS, "prompts_per_step", 8)
    distil = EXAMPLE.with_name("distil.py")
    words = [str(distil), "--out", str(tmp_path), "--teacher-steps=2", "--warm-start-steps=20", "--steps=1"]
    monkeypatch.setattr(sys, "argv", words)
    runpy.run_path(str(distil), run_name="__main__")
    said = capsys.readouterr().out
    assert re.search(r"held-out accuracy [01]\.\d+ -> [01]\.\d+ after 128 completions of distillation\n", said), said
    trained = (tmp_path / "teacher" / "final" / "model.safetensors").stat().st_mtime_ns
    runpy.run_path(str(distil), run_name="__main__")
    assert (tmp_path / "teacher" / "final" / "model.safetensors").stat().st_mtime_ns == trained
