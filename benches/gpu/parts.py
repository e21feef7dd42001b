"""One part of the bring-up, in a process of its own: ``python benches/gpu/parts.py PART RESULT.json [--simulated]``.

A part returns rows of figures, and what failed of them. It measures on the CUDA device; with ``--simulated`` the same
code runs at small sizes on the simulated device of tests/cuda_sim, and its times mean nothing.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import os
import platform
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
GIB = 2**30
SIMULATED_FIGURES = ROOT / "benches/results/cuda_counts.json"
Report = dict[str, Any]
"""``rows``: list of dicts, a table; ``failed``: list of sentences; ``skipped``: why nothing was measured; ``text``."""


@dataclass(frozen=True)
class Place:
    """Where a part measures, and at which size; ``gpu`` is the simulated device, or None."""

    device: str
    gpu: Any = None

    @property
    def small(self) -> bool:
        return self.gpu is not None or self.device == "cpu"

    def size(self, small: int, full: int) -> int:
        return small if self.small else full

    def wait(self) -> None:
        import torch

        if self.device == "cuda":
            torch.cuda.synchronize()

    def seconds(self, function: Callable[[], Any], repeats: int = 3) -> float:
        """Median time of ``function`` after one call that is not counted."""
        taken = []
        for _ in range(1 + (1 if self.small else repeats)):
            self.wait()
            start = time.perf_counter()
            function()
            self.wait()
            taken.append(time.perf_counter() - start)
        return statistics.median(taken[1:])

    def forget_peak(self) -> None:
        import torch

        if self.gpu is not None:
            self.gpu.forget()
        elif self.device == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()

    def peak_gib(self) -> float:
        import torch

        if self.gpu is not None:
            return float(self.gpu.peak) / GIB
        return torch.cuda.max_memory_allocated() / GIB if self.device == "cuda" else 0.0


def report_environment(place: Place) -> Report:
    """Versions, the device and its memory, and what torch would choose."""
    import torch

    def version(name: str) -> str:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            return "not installed"

    names = ("rlox-grpo", "torch", "transformers", "peft", "trl", "vllm", "deepspeed", "triton", "numpy", "pytest")
    rows = [{"what": "Python", "value": f"{platform.python_version()} on {platform.machine()}"}]
    rows += [{"what": name, "value": version(name)} for name in names]
    rows += [{"what": "CUDA of torch", "value": str(torch.version.cuda)}]
    if place.device != "cuda" or not torch.cuda.is_available():
        failed = [] if place.device == "cpu" else ["torch sees no CUDA device: torch.cuda.is_available() is False"]
        return {"rows": rows, "failed": failed}
    for index in range(torch.cuda.device_count()):
        device = torch.cuda.get_device_properties(index)
        capability = f"sm_{device.major}{device.minor}"
        rows.append({"what": f"device {index}", "value": f"{device.name}, {capability}"})
        rows.append({"what": f"memory of device {index}", "value": f"{device.total_memory / GIB:.1f} GiB"})
    free, _ = torch.cuda.mem_get_info()
    rows += [
        {"what": "free memory", "value": f"{free / GIB:.1f} GiB"},
        {"what": "driver", "value": _ask_driver()},
        {"what": "bfloat16", "value": str(torch.cuda.is_bf16_supported())},
        {"what": "flash attention in torch", "value": str(torch.backends.cuda.is_flash_attention_available())},
    ]
    capability_of_torch = torch.cuda.get_arch_list()
    rows.append({"what": "architectures of this torch", "value": " ".join(capability_of_torch)})
    return {"rows": rows}


def _ask_driver() -> str:
    command = ["nvidia-smi", "--query-gpu=driver_version,power.limit", "--format=csv,noheader"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError) as error:
        return f"nvidia-smi: {error}"


def check_kernel(place: Place, name: str) -> Report:
    """Values and gradients of one attention kernel against the formula, and its time at a size of training."""
    import torch

    from rlox_grpo.model import decoding_attention, tree_attention

    training, decoding = getattr(tree_attention, name), getattr(decoding_attention, name)
    dtypes = [torch.bfloat16, torch.float16] if name == "FLASH" else [torch.bfloat16, torch.float32]
    heads = [(4, 2, 16)] if place.small else [(14, 2, 64), (28, 4, 128), (16, 16, 64)]
    rows, failed = [], []
    for dtype in dtypes:
        for query_heads, key_heads, width in heads:
            q = torch.zeros(4, query_heads, width, device=place.device, dtype=dtype)
            k = torch.zeros(4, key_heads, width, device=place.device, dtype=dtype)
            kind = f"{str(dtype).removeprefix('torch.')}, {query_heads}/{key_heads} heads of {width}"
            checks = {
                "training": lambda q=q, k=k: tree_attention.computes_right(training, q, k, False),
                "training, window": lambda q=q, k=k: tree_attention.computes_right(training, q, k, True),
                "decoding": lambda q=q, k=k: decoding_attention.computes_right(decoding, q, k),
            }
            for what, check in checks.items():
                right = check()
                rows.append({"what": what, "for": kind, "agrees": right, "ms": ""})
                if not right:
                    failed.append(f"{what}, {kind}: does not agree with the formula, or cannot run")
    if not failed:
        rows.append(_time_tree(place, training, dtypes[0]))
    return {"rows": rows, "failed": failed}


def _time_tree(place: Place, kernel: Any, dtype: Any) -> dict[str, Any]:
    """Forward and backward over 16 completions of one prompt, the heads of Qwen2.5-0.5B."""
    import numpy as np
    import torch

    from rlox_grpo.model.tree_attention import Forest, TreeAttention

    prompt = new = place.size(8, 1024)
    rows, heads, width = place.size(2, 16), (14, 2, 2), 64
    parents = np.arange(-1, prompt + rows * new - 1)
    starts = prompt + np.arange(rows) * new
    parents[starts] = prompt - 1
    forest = Forest(parents, np.concatenate([[0], starts, [len(parents)]]))
    tensors = [
        torch.randn(len(parents), count, width, device=place.device).to(dtype).requires_grad_() for count in heads
    ]
    calls = forest.plan(torch.device(place.device))

    def run() -> None:
        TreeAttention.apply(*tensors, calls, kernel, width**-0.5).sum().backward()

    took = place.seconds(run) * 1e3
    name = f"{rows} x ({prompt} + {new}) tokens, {str(dtype).removeprefix('torch.')}"
    return {"what": "forward and backward of a layer", "for": name, "agrees": "", "ms": round(took, 2)}


def run_marked_tests(place: Place) -> Report:
    """The tests marked ``gpu``, but for those of vLLM."""
    if importlib.util.find_spec("pytest") is None:
        return {"skipped": "pytest is not installed"}
    options = ["tests/gpu", "--ignore-glob", "*_vllm*"]
    if importlib.util.find_spec("xdist") is not None and not place.small:
        options += ["-n", "4", "-p", "no:benchmark"]  # pytest-benchmark warns beside pytest-xdist, which is an error
    if place.small:
        options += ["-k", "agrees and 14 and float32 or update and 24 and None"]
    report, _ = _run_pytest("pytest -m gpu tests/gpu", options)
    return report


def _run_pytest(name: str, options: Sequence[str]) -> tuple[Report, str]:
    """The report of the tests marked ``gpu`` that ``options`` choose, and their output."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "gpu", *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    lines = done.stdout.strip().splitlines() or done.stderr.strip().splitlines()
    failed = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
    if done.returncode and not failed:
        failed = lines[-3:]
    return {"rows": [{"what": name, "result": lines[-1] if lines else ""}], "failed": failed}, done.stdout


def compare_steps(place: Place) -> Report:
    """One update against a naive loop: the same log-probs and gradients, and both times; TRL's step where it is."""
    import torch
    from sizes import MODELS, make_batch

    from rlox_grpo.loss import grpo_loss
    from rlox_grpo.model.forward import make_forward
    from rlox_grpo.trainer.step import take_optimizer_step
    from rlox_grpo.update.torch_updater import TorchUpdater

    name = "tiny" if place.small else "0.5B"
    rows, prompt, new = place.size(4, 8), place.size(16, 512), place.size(8, 256)
    batch = make_batch(rows, prompt, new, MODELS[name]["vocab_size"], place.device)
    table, failed = [], []
    text = f"{name}: {rows} completions of {new} tokens, prompt {prompt}"
    for dtype, tolerance in ((None, 1e-3), (torch.bfloat16, 0.1)):
        model = _build(place, name)
        forward = make_forward(model, autocast_dtype=dtype)
        norms, log_probs, seconds = {}, {}, {}
        for who, compute in (
            ("rlox_grpo", lambda forward=forward: forward(batch)[0]),
            ("naive loop", lambda model=model, dtype=dtype: _naive_log_probs(model, batch, dtype, place.device)),
        ):
            model.zero_grad()
            log_probs[who] = compute()
            (log_probs[who] * batch.advantages[:, None]).mean().backward()
            gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
            norms[who] = float(torch.nn.utils.get_total_norm(gradients))
        model.zero_grad(set_to_none=True)
        updater = TorchUpdater(model, forward)
        seconds["rlox_grpo"] = place.seconds(
            lambda updater=updater: take_optimizer_step(updater, grpo_loss, [batch], 1e-6)
        )
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=place.gpu is None)

        def naive_step(model: Any = model, dtype: Any = dtype, optimizer: Any = optimizer) -> None:
            own = _naive_log_probs(model, batch, dtype, place.device)
            loss = -((own - own.detach()).exp() * batch.advantages[:, None]).mean()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()

        seconds["naive loop"] = place.seconds(naive_step)
        gap = float((log_probs["rlox_grpo"] - log_probs["naive loop"]).abs().max())
        kind = "float32" if dtype is None else "bfloat16"
        for who in seconds:
            table.append(
                {
                    "what": who,
                    "arithmetic": kind,
                    "gradient norm": f"{norms[who]:.6g}",
                    "largest gap of log-probs": f"{gap:.2g}",
                    "seconds": round(seconds[who], 4),
                }
            )
        if norms["rlox_grpo"] != norms["rlox_grpo"] or abs(norms["rlox_grpo"] / norms["naive loop"] - 1) > tolerance:
            failed.append(
                f"{kind}: gradient norm {norms['rlox_grpo']:.6g}, of the naive loop {norms['naive loop']:.6g}"
            )
    if importlib.util.find_spec("trl") is None:
        text += "; TRL is not installed"
    elif place.gpu is not None:
        text += "; TRL does not run on the simulated device"
    else:
        table.append(_time_trl(place, name, rows, prompt, new))
    return {"rows": table, "failed": failed, "text": text}


def _naive_log_probs(model: Any, batch: Any, dtype: Any, device: str) -> Any:
    """Full logits of padded rows, as the small published scripts compute them; all completions have one length."""
    import torch

    with torch.autocast(device, dtype or torch.bfloat16, enabled=dtype is not None):
        logits = model(input_ids=batch.input_ids, use_cache=False).logits
    new = batch.completion_ids.shape[1]
    own = logits[:, -new - 1 : -1].float().log_softmax(-1)
    return own.gather(-1, batch.completion_ids[..., None])[..., 0]


def _time_trl(place: Place, name: str, rows: int, prompt: int, new: int) -> dict[str, Any]:
    """A whole step of TRL's GRPOTrainer, generation included, on a model of the same size."""
    import tempfile

    from datasets import Dataset
    from sizes import MODELS, make_model
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    sys.path.insert(0, str(ROOT / "benches"))
    from step_systems import make_tokenizer, text_of

    vocabulary = MODELS[name]["vocab_size"]
    taken: list[float] = []

    class Clock(TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            place.wait()
            taken.append(-time.perf_counter())

        def on_step_end(self, *_: Any, **__: Any) -> None:
            place.wait()
            taken[-1] += time.perf_counter()

    with tempfile.TemporaryDirectory() as folder:
        trainer = GRPOTrainer(
            make_model(name),
            reward_funcs=lambda completion_ids, **_: [float(sum(t % 2 == 0 for t in row)) for row in completion_ids],
            args=GRPOConfig(
                output_dir=folder,
                per_device_train_batch_size=rows,
                num_generations=rows,
                max_completion_length=new,
                max_steps=3,
                bf16=place.device == "cuda",
                use_cpu=place.device != "cuda",
                gradient_checkpointing=False,
                report_to="none",
                save_strategy="no",
                disable_tqdm=True,
            ),
            train_dataset=Dataset.from_dict({"prompt": [text_of(range(2, prompt + 2))] * 16}),
            processing_class=make_tokenizer(vocabulary),
            callbacks=[Clock()],
        )
        trainer.train()
    own = {
        "arithmetic": "bfloat16" if place.device == "cuda" else "float32",
        "gradient norm": "",
        "largest gap of log-probs": "",
    }
    return {"what": "TRL, a whole step with generation", **own, "seconds": round(statistics.median(taken[1:]), 4)}


def measure_memory(place: Place) -> Report:
    """Peak memory of one update, beside the simulated figures of `make cuda-counts`."""
    import gc

    import torch
    from sizes import MODELS, add_lora, checkpoint_activations, make_batch, store_frozen_in_bfloat16

    from rlox_grpo.loss import grpo_loss
    from rlox_grpo.model.forward import make_forward
    from rlox_grpo.trainer.step import take_optimizer_step
    from rlox_grpo.update.torch_updater import TorchUpdater

    cases = [("tiny", 0, True, "tiny")] if place.small else []
    if not place.small:
        from counts import UPDATES

        # A 7B model in full takes minutes a step with its optimizer on the host, and more than most GPUs without.
        measured = {name: case for name, case in UPDATES.items() if not case.cudnn_off}
        cases = [
            (case.model, case.lora_rank, case.checkpointing, name)
            for name, case in measured.items()
            if case.lora_rank or case.model != "7B"
        ]
    simulated = {}
    if SIMULATED_FIGURES.exists():
        simulated = json.loads(SIMULATED_FIGURES.read_text())["this tree"]
    table, failed = [], []
    for size, lora_rank, checkpointing, name in cases:
        expected = simulated.get(f"update: {name}", {}).get("peak_gib")
        gc.collect()
        place.forget_peak()
        row = {"what": name, "simulated GiB": "" if expected is None else f"{expected:.1f}"}
        try:
            model = _build(place, size)
            model = add_lora(model, lora_rank) if lora_rank else model
            if checkpointing:
                checkpoint_activations(model)
            updater = TorchUpdater(model, make_forward(model, autocast_dtype=torch.bfloat16))
            store_frozen_in_bfloat16(model)
            tokens = place.size(16, 1024)
            batch = make_batch(place.size(2, 16), tokens, tokens, MODELS[size]["vocab_size"], place.device)
            take_optimizer_step(updater, grpo_loss, [batch], 1e-6)
            place.forget_peak()
            took = place.seconds(
                lambda updater=updater, batch=batch: take_optimizer_step(updater, grpo_loss, [batch], 1e-6), 1
            )
            peak = place.peak_gib()
            table.append({**row, "measured GiB": f"{peak:.1f}", "seconds of an update": round(took, 3)})
            if expected is not None and peak > 1.1 * expected:
                failed.append(f"{name}: the peak is {peak:.1f} GiB, simulated {expected:.1f}")
        except torch.OutOfMemoryError as error:
            table.append({**row, "measured GiB": "out of memory", "seconds of an update": ""})
            failed.append(f"{name}: {str(error).splitlines()[0]}")
        model = updater = batch = None  # the next case wants the memory
    return {"rows": table, "failed": failed}


def measure_generation(place: Place) -> Report:
    """Tokens a second of the embedded engine in bfloat16."""
    import torch
    from sizes import MODELS, make_prompts

    from rlox_grpo.rollout.engines.hf.engine import HFEngine
    from rlox_grpo.types import Sampling

    name = "tiny" if place.small else "0.5B"
    model = _build(place, name)
    engines = {
        graphs: HFEngine(model, eos_token_ids=[], autocast_dtype=torch.bfloat16, cuda_graphs=graphs)
        for graphs in (True, False)
    }
    engine, table = engines[True], []
    sizes = ((1, 4, True),) if place.small else ((1, 16, True), (8, 16, True), (16, 16, True), (8, 16, False))
    for prompts, group_size, graphs in sizes:
        engine, new = engines[graphs], place.size(4, 256)
        asked = make_prompts(prompts, place.size(12, 512), MODELS[name]["vocab_size"])
        place.forget_peak()
        took = place.seconds(
            lambda engine=engine, asked=asked, n=group_size, new=new: engine.generate(asked, n, Sampling(new), 0), 1
        )
        rows = prompts * group_size
        table.append(
            {
                "rows": rows,
                "CUDA graphs": engine.uses_graphs,
                "new tokens": new,
                "tokens/s": round(rows * new / took, 1),
                "ms a step": round(took / new * 1e3, 2),
                "peak GiB": round(place.peak_gib(), 2),
            }
        )
    text = f"{name}, bfloat16, prompts of up to {place.size(12, 512)} tokens; "
    text += "slots without padding" if engine.uses_slots else "padded rows and the model's own attention"
    failed = [] if engine.uses_slots or place.device == "cpu" else ["no kernel for decoding: see the log"]
    return {"rows": table, "failed": failed, "text": text}


def run_vllm_tests(place: Place) -> Report:
    """The tests of vLLM on a GPU."""
    if refusal := _refuse_vllm(place):
        return {"skipped": refusal}
    files = sorted(map(str, ROOT.glob("tests/gpu/test_*_vllm*.py")))
    report, output = _run_pytest("pytest of vLLM", ["--tb", "short", "--durations", "8", *files])
    return {**report, **({"log": output[-12000:]} if report["failed"] else {})}


def _refuse_vllm(place: Place) -> str:
    """Why nothing of vLLM runs here; empty if it does."""
    if importlib.util.find_spec("vllm") is None:
        return "vllm is not installed"
    return "vLLM's kernels need a GPU" if place.small else ""


def measure_vllm(place: Place) -> Report:
    """Tokens a second of vLLM in this process, its syncs, and the gap to the trainer's log-probs, in bfloat16."""
    if refusal := _refuse_vllm(place):
        return {"skipped": refusal}
    import numpy as np
    import torch
    from sizes import MODELS, make_prompts

    from rlox_grpo.rollout.engines.vllm.engine import VLLMEngine
    from rlox_grpo.rollout.engines.weight_sync import collect_weights
    from rlox_grpo.types import Sampling

    model = _build(place, "0.5B")
    vocabulary, new = MODELS["0.5B"]["vocab_size"], 256
    start = time.perf_counter()
    engine = VLLMEngine(model, eos_token_ids=[], dtype="bfloat16", max_length=1024, return_masks=True, sleep=False)
    engine.load_weights(collect_weights(model), 0)
    started = time.perf_counter() - start
    sync = place.seconds(lambda: engine.load_weights(collect_weights(model), 1), 2)
    (group,) = engine.generate(make_prompts(1, 512, vocabulary), 1, Sampling(64), 0)
    (completion,) = group.completions
    ids = torch.from_numpy(np.concatenate([group.prompt.token_ids, completion.token_ids]))[None].cuda()
    with torch.no_grad(), torch.autocast("cuda", torch.bfloat16):
        scores = torch.log_softmax(model(ids).logits[0, -65:-1].float(), -1)
    expected = scores.gather(-1, ids[0, -64:, None])[:, 0].cpu().numpy()
    gap = float(np.abs(completion.log_probs - expected).mean())
    text = "0.5B, bfloat16, prompts of up to 512 tokens, 256 new tokens; "
    text += f"start {started:.1f} s, sync {sync:.3f} s, mean gap of log-probs {gap:.2g}"
    print(text, flush=True)  # stays where the time ends
    table = []
    for what, filters in (("vLLM", {}), ("vLLM with sampling masks", {"top_p": 0.95, "return_sampling_mask": True})):
        for prompts in (1, 8, 16):
            asked, sampling = make_prompts(prompts, 512, vocabulary), Sampling(new, **filters)
            took = place.seconds(lambda asked=asked, sampling=sampling: engine.generate(asked, 16, sampling, 0), 1)
            table.append(
                {
                    "what": what,
                    "rows": prompts * 16,
                    "tokens/s": round(prompts * 16 * new / took, 1),
                    "ms a step": round(took / new * 1e3, 2),
                }
            )
            print(table[-1], flush=True)
    engine.close()
    return {"rows": table, "text": text}


def profile_update_and_token(place: Place) -> Report:
    """Where the time of an update and of 16 generated tokens goes, by torch's profiler."""
    import torch
    from sizes import MODELS, make_batch, make_prompts
    from torch.profiler import ProfilerActivity, profile

    from rlox_grpo.loss import grpo_loss
    from rlox_grpo.model.forward import make_forward
    from rlox_grpo.rollout.engines.hf.engine import HFEngine
    from rlox_grpo.trainer.step import take_optimizer_step
    from rlox_grpo.types import Sampling
    from rlox_grpo.update.torch_updater import TorchUpdater

    name = "tiny" if place.small else "0.5B"
    model, vocabulary = _build(place, name), MODELS[name]["vocab_size"]
    engine = HFEngine(model, eos_token_ids=[], autocast_dtype=torch.bfloat16)
    updater = TorchUpdater(model, make_forward(model, autocast_dtype=torch.bfloat16))
    batch = make_batch(place.size(2, 8), place.size(8, 512), place.size(8, 256), vocabulary, place.device)
    prompts = make_prompts(1, place.size(8, 512), vocabulary)
    work = {
        "update": lambda: take_optimizer_step(updater, grpo_loss, [batch], 1e-6),
        "16 tokens": lambda: engine.generate(prompts, place.size(2, 16), Sampling(place.size(2, 16)), 0),
    }
    on_gpu = place.device == "cuda" and place.gpu is None
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    table = []
    for what, function in work.items():
        function()
        with profile(activities=activities) as profiler:
            function()
            place.wait()
        events = profiler.key_averages()
        attribute = "self_device_time_total" if on_gpu else "self_cpu_time_total"
        total = sum(getattr(event, attribute) for event in events) or 1.0
        for event in sorted(events, key=lambda event: -getattr(event, attribute))[:12]:
            own = getattr(event, attribute)
            table.append(
                {
                    "what": what,
                    "kernel or operator": event.key[:80].replace("|", "/"),
                    "calls": event.count,
                    "ms": round(own / 1e3, 3),
                    "share": f"{own / total:.1%}",
                }
            )
    return {"rows": table, "text": f"{name}, bfloat16; time on the {'device' if on_gpu else 'host'}"}


def _build(place: Place, name: str) -> Any:
    """A random model on the device."""
    import torch
    from sizes import make_model

    if place.gpu is not None or place.device == "cpu":
        return make_model(name).to(place.device)
    with torch.device(place.device):
        return make_model(name)


PARTS: dict[str, Callable[[Place], Report]] = {
    "environment": report_environment,
    "flash attention": lambda place: check_kernel(place, "FLASH"),
    "memory-efficient attention": lambda place: check_kernel(place, "EFFICIENT"),
    "tests marked gpu": run_marked_tests,
    "update against a naive loop": compare_steps,
    "peak memory": measure_memory,
    "generation": measure_generation,
    "profile": profile_update_and_token,
    "tests of vLLM": run_vllm_tests,
    "vLLM": measure_vllm,
}


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("part", choices=PARTS)
    arguments.add_argument("result", type=Path)
    arguments.add_argument("--simulated", action="store_true")
    arguments.add_argument("--cpu", action="store_true", help="small sizes on the CPU, to try this script")
    options = arguments.parse_args()
    warnings.simplefilter("ignore")
    import torch

    with ExitStack() as stack:
        gpu = None
        # The tests enter the simulated device themselves.
        if options.simulated and options.part != "tests marked gpu":
            sys.path.insert(0, str(ROOT / "tests/cuda_sim"))
            from simulated import SimulatedCuda, swapping_parameters

            gpu = stack.enter_context(SimulatedCuda())
            stack.enter_context(swapping_parameters())
        if not options.cpu:
            torch.backends.cuda.enable_cudnn_sdp(False)  # as the trainer does
        place = Place("cpu" if options.cpu else "cuda", gpu if not options.simulated else gpu or object())
        report = PARTS[options.part](place)
    options.result.write_text(json.dumps(report, default=str))
    sys.stdout.flush()
    os._exit(0)  # a simulated tensor may not outlive its device


if __name__ == "__main__":
    main()
