"""Tests that need a CUDA device: a real one, or the simulated one under tests/cuda_sim/run.py."""

from __future__ import annotations

import os
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "engines"))  # the byte model of the tests of vLLM


@pytest.fixture(scope="session")
def needs_vllm():
    """vLLM and a real CUDA device: its kernels do not run on the simulated one."""
    import torch

    if "RLOX_GRPO_CUDA_SIM" in os.environ or not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    pytest.importorskip("vllm")


@pytest.fixture
def device():
    """``cuda``; on the simulated device the test runs inside of it."""
    import torch

    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    with ExitStack() as stack:
        if "RLOX_GRPO_CUDA_SIM" in os.environ:
            sys.path.insert(0, str(Path(__file__).parents[1] / "cuda_sim"))
            from simulated import SimulatedCuda, swapping_parameters

            stack.enter_context(SimulatedCuda())
            stack.enter_context(swapping_parameters())
        yield torch.device("cuda", torch.cuda.current_device())
