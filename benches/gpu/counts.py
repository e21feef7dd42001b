"""Kernels, host syncs, attention kernels and peak memory of an update and of a generated token, without a GPU.

The library's own code runs on the simulated device of tests/cuda_sim. Prints a Markdown table of this tree and, if one
is named, of another to compare with, which may have the modules at the places of :data:`FORMER_MODULES`:

    python benches/gpu/counts.py [--base REF_OR_FOLDER] [--only TEXT] [--json FILE]
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib
import inspect
import json
import os
import shutil
import subprocess
import sys
import tempfile
import warnings
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
GIB = 2**30
FORMER_MODULES = {
    "rlox_grpo.model.forward": "rlox_grpo.forward",
    "rlox_grpo.model.load": "rlox_grpo.loading",
    "rlox_grpo.rollout.engines.hf.engine": "rlox_grpo.engines.hf_engine",
}


class Update(NamedTuple):
    """A model and the options of its update; ``cudnn_off`` as importing vLLM leaves cuDNN's attention."""

    model: str
    lora_rank: int = 0
    checkpointing: bool = False
    offload: bool = False
    cudnn_off: bool = False


UPDATES = {
    "0.5B": Update("0.5B"),
    "0.5B, after vLLM is imported": Update("0.5B", cudnn_off=True),
    "0.5B, checkpointing": Update("0.5B", checkpointing=True),
    "7B LoRA 32, checkpointing": Update("7B", 32, checkpointing=True),
    "7B, checkpointing": Update("7B", checkpointing=True),
    "7B, checkpointing, offload_optimizer": Update("7B", checkpointing=True, offload=True),
}
# name: options of the sampled model; as many layers as 0.5B and narrow, as only kernels are counted
DECODES = {
    "a token of 24 layers": {"num_hidden_layers": 24},
    "a token of 24 layers, LoRA 32": {"num_hidden_layers": 24, "lora_rank": 32},
}
ROWS, PROMPT, NEW = 16, 1024, 1024


def measure(only: str) -> dict[str, Any]:
    """The rows of the table whose name has ``only``, of the library that this process imports. Runs under the shim."""
    warnings.simplefilter("ignore")
    rows: dict[str, Any] = {}
    for kind, cases, function in (("update", UPDATES, measure_update), ("token", DECODES, measure_token)):
        for name in cases:
            if only not in f"{kind}: {name}":
                continue
            try:
                rows[f"{kind}: {name}"] = function(name)
            except Exception as error:  # noqa: BLE001 - an older tree may lack what a row needs
                rows[f"{kind}: {name}"] = {"error": f"{type(error).__name__}: {error}"}
    return rows


def load(name: str) -> Any:
    """The library's module ``name``, or what it was called before."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError:
        return importlib.import_module(FORMER_MODULES[name])


def set_cudnn_as_the_trainer_does(off: bool) -> None:
    """torch's default, or what the measured library's trainer makes of it; ``off`` in any case."""
    import torch

    torch.backends.cuda.enable_cudnn_sdp(not off)
    prepare = getattr(load("rlox_grpo.model.load"), "_move_to_gpu", None)
    if prepare is not None:
        prepare(torch.nn.Module())


def measure_update(name: str) -> dict[str, Any]:
    """The second update of a model without data: one prompt of 1,024 tokens, 16 completions of 1,024 tokens."""
    import torch
    from simulated import SimulatedCuda, swapping_parameters
    from sizes import (
        MODELS,
        add_lora,
        checkpoint_activations,
        host_without_data,
        make_batch,
        make_model,
        store_frozen_in_bfloat16,
    )

    from rlox_grpo.loss import grpo_loss
    from rlox_grpo.trainer.step import take_optimizer_step
    from rlox_grpo.update.torch_updater import TorchUpdater

    case = UPDATES[name]
    options = {"offload": True} if case.offload else {}
    if missing := options.keys() - inspect.signature(TorchUpdater).parameters.keys():
        return {"error": f"this tree has no {', '.join(missing)}"}
    set_cudnn_as_the_trainer_does(case.cudnn_off)
    host = host_without_data() if case.offload else contextlib.nullcontext()
    with SimulatedCuda(values=False) as gpu, swapping_parameters(), host:
        with torch.device("meta"):
            model = make_model(case.model)
        gpu.adopt(model)
        model = add_lora(model, case.lora_rank) if case.lora_rank else model
        if case.checkpointing:
            checkpoint_activations(model)
        make_forward = load("rlox_grpo.model.forward").make_forward
        forward = make_forward(model, autocast_dtype=torch.bfloat16)
        updater = TorchUpdater(model, forward, **options)
        if not case.offload:
            store_frozen_in_bfloat16(model)
        batch = make_batch(ROWS, PROMPT, NEW, MODELS[case.model]["vocab_size"], "cuda")
        take_optimizer_step(updater, grpo_loss, [batch], 1e-6)
        gc.collect()
        held = gpu.live
        gpu.forget()
        take_optimizer_step(updater, grpo_loss, [batch], 1e-6)
        return {**_counts(gpu), "held_gib": held / GIB, "peak_gib": gpu.peak / GIB}


def measure_token(name: str) -> dict[str, Any]:
    """A token of every row, after prefill: 2 prompts x 4 completions in bfloat16, in the mean over 8 tokens."""
    import torch
    from simulated import SimulatedCuda, swapping_parameters, to_cuda
    from sizes import add_lora, make_model, make_prompts, store_frozen_in_bfloat16

    from rlox_grpo.types import Sampling

    set_cudnn_as_the_trainer_does(off=False)
    options = dict(DECODES[name])
    lora_rank = options.pop("lora_rank", 0)
    with SimulatedCuda(nothing_seen_is_nan=False) as gpu, swapping_parameters():
        model = to_cuda(make_model("tiny", **options))
        model = add_lora(model, lora_rank) if lora_rank else model
        engine = load("rlox_grpo.rollout.engines.hf.engine").HFEngine(
            model, eos_token_ids=[], autocast_dtype=torch.bfloat16
        )
        store_frozen_in_bfloat16(model)
        found = []
        for tokens in (1, 9):
            gpu.forget()
            engine.generate(make_prompts(2, 24, 1024), 4, Sampling(tokens), 0)
            found.append(_counts(gpu))
        first, all_tokens = found
        each = {what: (all_tokens[what] - first[what]) / 8 for what in ("kernels", "syncs")}
        decoding = [kind for kind in all_tokens["attention"] if kind not in first["attention"]]
        return {**all_tokens, **each, "attention": decoding or all_tokens["attention"]}


def _counts(gpu: Any) -> dict[str, Any]:
    kinds = sorted({_kind(name) for name in gpu.attention if "backward" not in name})
    if any("_softmax" in name for name in gpu.operators) and not kinds:
        kinds = ["math"]
    return {
        "kernels": gpu.kernels_total,
        "syncs": sum(gpu.syncs.values()),
        "attention": kinds,
        "where_syncs": dict(gpu.syncs.most_common(12)),
    }


def _kind(name: str) -> str:
    words = name.split(" ", 1)[1].split(" q=")[0]
    return words.replace(" causal", "")


def table(rows: dict[str, Any], base: dict[str, Any] | None, base_name: str) -> str:
    """Markdown; with ``base``, each figure stands beside the other tree's."""
    columns = ("kernels", "host syncs", "attention kernels", "peak GiB")
    lines = [f"| | {' | '.join(columns)} |", "| --- | ---: | ---: | --- | ---: |"]
    for name, row in rows.items():
        for label, figures in ((name, row), *(((f"{name}, {base_name}", base[name]),) if base else ())):
            if "error" in figures:
                lines.append(f"| {label} | {figures['error'].splitlines()[0][:120]} | | | |")
                continue
            peak = f"{figures['peak_gib']:.1f}" if "peak_gib" in figures else ""
            attention = ", ".join(figures["attention"])
            lines.append(f"| {label} | {figures['kernels']:,.0f} | {figures['syncs']:.1f} | {attention} | {peak} |")
    return "\n".join(lines)


@contextlib.contextmanager
def checkout(base: str) -> Iterator[Path]:
    """The tree of ``base``, a folder or a git reference, with the extension built in it."""
    if Path(base).is_dir():
        yield Path(base).resolve()
        return
    with tempfile.TemporaryDirectory(prefix="rlox_base_") as name:
        tree = Path(name) / "tree"
        subprocess.run(["git", "worktree", "add", "--quiet", "--detach", str(tree), base], cwd=ROOT, check=True)
        try:
            _build_extension(tree, base)
            yield tree
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", str(tree)], cwd=ROOT, check=True)


def _build_extension(tree: Path, base: str) -> None:
    """This tree's extension where the Rust sources are the same; else built by maturin."""
    package = tree / "python/rlox_grpo"
    sources = ["--", "rust", "Cargo.toml", "Cargo.lock"]
    same = subprocess.run(["git", "diff", "--quiet", base, *sources], cwd=ROOT, check=False).returncode == 0
    if same:
        for built in (ROOT / "python/rlox_grpo").glob("_native*.so"):
            shutil.copy2(built, package)
        return
    target = ROOT / "target/base"
    command = [sys.executable, "-m", "maturin", "build", "--release", "--locked", "--compatibility", "linux"]
    subprocess.run([*command, "--target-dir", str(target), "--out", str(tree / "dist")], cwd=tree, check=True)
    [wheel] = (tree / "dist").glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        [extension] = [name for name in archive.namelist() if name.startswith("rlox_grpo/_native.")]
        archive.extract(extension, package.parent)


def run_on(tree: Path, shim: dict[str, str], only: str) -> dict[str, Any]:
    """The table's rows of the library in ``tree``, by a process of its own."""
    path = os.pathsep.join([str(tree / "python"), str(HERE), str(ROOT / "tests/cuda_sim")])
    command = [sys.executable, str(Path(__file__).resolve()), "--measure", "--only", only]
    environment = {**shim, "PYTHONPATH": path}
    done = subprocess.run(command, env=environment, check=False, capture_output=True, text=True, cwd=tree)
    if done.returncode:
        raise SystemExit(done.stderr)
    rows: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return rows


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--base", help="git reference or folder of a tree to compare with")
    arguments.add_argument("--json", type=Path, help="also write the figures here")
    arguments.add_argument("--only", default="", help="only rows whose name has this, such as update or token")
    arguments.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)
    options = arguments.parse_args()
    if options.measure:
        print(json.dumps(measure(options.only)))
        return
    sys.path.insert(0, str(ROOT / "tests/cuda_sim"))
    from run import shimmed

    with shimmed() as (environment, reason):
        if reason:
            print(f"skipped, as {reason}")
            return
        rows, base = run_on(ROOT, environment, options.only), None
        if options.base:
            with checkout(options.base) as tree:
                base = run_on(tree, environment, options.only)
    if options.json:
        options.json.write_text(json.dumps({"this tree": rows, **({options.base: base} if base else {})}, indent=1))
    print(f"{ROWS} completions of {NEW:,} tokens, prompt {PROMPT:,}; simulated device, bfloat16 arithmetic\n")
    print(table(rows, base, options.base or ""))


if __name__ == "__main__":
    main()
