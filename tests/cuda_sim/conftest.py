"""A simulated CUDA device for each test; see ``simulated.py``. Runs only under ``run.py``, which preloads the shim."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

if "RLOX_GRPO_CUDA_SIM" not in os.environ:
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture
def gpu():
    """The device, entered; parameters of modules can be moved to it."""
    from simulated import SimulatedCuda, swapping_parameters

    with SimulatedCuda() as device, swapping_parameters():
        yield device
