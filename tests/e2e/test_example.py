"""The quickest of the examples; ``make test-examples`` runs all of them."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "rlox.py"


@pytest.mark.slow
@pytest.mark.parametrize(("learning_rate", "least", "most"), [("5e-3", 0.6, 1.0), ("1e-12", 0.0, 0.15)])
def test_a_plain_module_learns_to_count_on(tmp_path, learning_rate, least, most):
    """Chance is 1 / 16; the example reaches 0.85, and a run that learns nothing stays at chance."""
    command = [sys.executable, str(EXAMPLE), "--out", str(tmp_path), "--log_to=[]", f"--learning_rate={learning_rate}"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    found = re.search(r"held-out reward (0\.\d+) -> ([01]\.\d+), accuracy", ended.stdout)
    assert found, ended.stdout
    assert float(found[1]) < 0.15
    assert least <= float(found[2]) <= most
