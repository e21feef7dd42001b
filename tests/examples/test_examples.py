"""Every example learns: ``make test-examples``.

What is measured: mean reward and accuracy on held-out problems, before the first step and after the last, by the same
random draws. A policy that was not trained therefore scores the same twice, but for tokens whose draw lies on an edge;
and were the draws independent, 150 problems of two completions, whose scores are at most 1 apart where they are right
or wrong, would put four standard errors of the difference at 4 · 0.5 · sqrt(2 / 150) = 0.23 in the worst case, that of
completions of a problem being alike. ``MARGINS`` are in units of each reward and are passed by rises far above what
the paired draws leave to chance.
"""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from rlox_grpo.config.run_file import read_run_file

pytestmark = pytest.mark.examples

EXAMPLES = Path(__file__).parents[2] / "examples"

MARGINS = {
    "nano_aha": 0.1,
    "countdown_vllm_deepspeed": 0.15,
    "grpo_zero": 0.1,
    "simple_grpo": 0.3,
    "lm_book": 0.3,
    "rlox": 0.5,
    "verl": 0.1,
    "rl_from_scratch": 0.3,
    "r1_blog": 0.1,
}
"""Least rise of the held-out reward; it spans 2, 1.1, 1.1, 4.25, 2.8, 1, 1, 3 and 1.1."""

OTHERS = {
    *("countdown_calculator", "frozen_lake", "guess_the_number", "list_functions", "look_up", "look_up_agent"),
    *("real_model", "count_shapes", "zoom_in", "distil", "edit_files"),
}
"""Examples without a run file, which have tests of their own in tests/e2e and tests/real or none."""

SHARED = {"learner", "small_vlm"}
"""Modules that examples import."""

ON_RAY = {"countdown_ray"}
"""Not run here: it needs the extra ray, and four places on a cluster. Its run file is read."""

BY_EXTRAS = {"nano_aha", "countdown_vllm_deepspeed"}
WITHOUT_EXTRAS = ("--engine=hf", "--updater=torch")


def run(system, out, *words):
    command = [sys.executable, str(EXAMPLES / f"{system}.py"), "--out", str(out), "--log_to=[]", *words]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "default"}
    ended = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=1800, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    found = re.search(
        r"held-out reward (-?[\d.]+) -> (-?[\d.]+), accuracy ([\d.]+) -> ([\d.]+) in \d+ s\n$", ended.stdout
    )
    assert found, ended.stdout
    return tuple(float(number) for number in found.groups())


def missing_extras():
    """Options of ``BY_EXTRAS`` where vLLM and DeepSpeed are not installed; `make test-examples` installs them."""
    both = all(importlib.util.find_spec(name) for name in ("vllm", "deepspeed"))
    return () if both else WITHOUT_EXTRAS


def test_there_is_a_margin_for_every_script_and_a_run_file_beside_it():
    scripts = {path.stem for path in EXAMPLES.glob("*.py")} - SHARED - OTHERS
    assert scripts == set(MARGINS) | ON_RAY
    assert all((EXAMPLES / f"{system}.toml").exists() for system in scripts)


def test_the_run_file_on_ray_names_two_trainers_and_two_engines():
    origin, config = read_run_file(EXAMPLES / "countdown_ray.toml", {})
    assert (origin.launcher, origin.layout.trainers, origin.layout.engines) == ("ray", 2, 2)
    assert config.engine == "vllm_server"


@pytest.mark.parametrize("system", MARGINS)
def test_it_learns(system, tmp_path):
    before, after, accuracy_before, accuracy_after = run(
        system, tmp_path, *(missing_extras() if system in BY_EXTRAS else ())
    )
    assert after > before + MARGINS[system]
    assert accuracy_after > accuracy_before


@pytest.mark.parametrize("system", ["rlox", "verl"])
def test_an_untrained_run_stays_below_every_margin(system, tmp_path):
    before, after, _, _ = run(system, tmp_path, "--learning_rate=1e-12", "--steps", "4")
    assert abs(after - before) < 0.01 < min(MARGINS.values()) / 5
