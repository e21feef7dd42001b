"""Which attention kernels an update and a generated token take on each GPU architecture, as a line of JSON for each.

``python tests/cuda_sim/architectures.py``, under the shim. Each architecture is a fork of one process that has imported
everything: torch reads a device's properties once in a process.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from pathlib import Path
from unittest import mock

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).resolve().parents[2] / "benches/gpu")]

# ruff: noqa: E402
import torch
from simulated import SimulatedCuda, swapping_parameters, to_cuda
from sizes import make_batch, make_model, make_prompts

from rlox_grpo.loss import grpo_loss
from rlox_grpo.model import load
from rlox_grpo.model.forward import make_forward
from rlox_grpo.rollout.engines.hf.engine import HFEngine
from rlox_grpo.trainer.step import take_optimizer_step
from rlox_grpo.types import Sampling
from rlox_grpo.update.torch_updater import TorchUpdater

ARCHITECTURES = (75, 80, 89, 90, 100, 120)


def take_kernels(gpu: SimulatedCuda) -> list[str]:
    """The attention kernels since the last call; torch's math kernel is a softmax over scores that exist."""
    names = {name.split(" ", 1)[1].split(" q=")[0] for name in gpu.attention}
    names |= {"math" for name in gpu.operators if "softmax" in name}
    gpu.forget()
    return sorted(names)


def measure() -> dict[str, object]:
    found: dict[str, object] = {"capability": list(torch.cuda.get_device_capability())}
    with SimulatedCuda(nothing_seen_is_nan=False) as gpu, swapping_parameters():
        load._move_to_gpu(torch.nn.Module())  # switches cuDNN's attention off, as a run does
        for name, dtype in (("bfloat16", torch.bfloat16), ("float32", None)):
            model = to_cuda(make_model("tiny"))
            forward = make_forward(model, autocast_dtype=dtype)
            updater, batch = TorchUpdater(model, forward), make_batch(4, 24, 6, 1024, "cuda")
            assert forward.shares_prompts
            for rows, worth in (("packed", 2.0), ("padded", 0.0)):
                gpu.forget()  # what the trials cost
                with mock.patch("rlox_grpo.model.forward.WORTH_PACKING", worth):
                    take_optimizer_step(updater, grpo_loss, [batch], 1e-3)
                found[f"{rows} update, {name}"] = take_kernels(gpu)
            engine = HFEngine(model, eos_token_ids=[], autocast_dtype=dtype)
            gpu.forget()
            engine.generate(make_prompts(2, 12, 1024), 2, Sampling(4), 0)
            found[f"generation, {name}"] = take_kernels(gpu)
    return found


def main() -> None:
    assert not torch.cuda.is_initialized()
    for architecture in ARCHITECTURES:
        if os.fork() == 0:
            status = 1
            try:
                os.environ["FAKE_CUDA_SM"] = str(architecture)
                print(json.dumps({"architecture": architecture, **measure()}), flush=True)
                status = 0
            except BaseException:  # noqa: BLE001
                traceback.print_exc()
                sys.stderr.flush()
            os._exit(status)
        os.wait()


if __name__ == "__main__":
    main()
