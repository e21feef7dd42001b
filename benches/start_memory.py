"""Host memory of a start with ``shard_parameters``: a model from files, on several ranks of this machine's CPU.

    uv run --no-sync python benches/start_memory.py [1b | small] [--ranks 2] [--kl] [--gather-dtype bfloat16]
        [--whole] [--zero3]

Prints a JSON line for each rank. ``peak`` is the most that a rank has allocated at once from the call that loads the
model until the first step could begin, less what it held before (libraries, process group). ``limit`` is 1.3 times
what a rank must hold: its shards of the policy, with ``--kl`` those of the reference, and the largest unit that is
gathered at once. ``--whole`` gives every rank the whole model, as if it were passed as an object. ``--zero3`` ends
when DeepSpeed's engine has started, which holds 20 bytes for each parameter of a rank's part.

glibc counts the blocks of 64 KiB and more, the weights among them. Resident memory is no measure: it has the pages of
the model's files that the kernel keeps mapped, which differ from one kernel to the next.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

SIZES = {  # 1.03e9 parameters (blocks of Qwen2.5-1.5B); 8.5e7 in many small layers
    "1b": {"vocab_size": 32_000, "hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 21},
    "small": {"vocab_size": 4_000, "hidden_size": 480, "intermediate_size": 2048, "num_hidden_layers": 24},
}


def write_model(size: str, folder: Path) -> None:
    """Save a Llama of this size in bfloat16, with random weights and a tokenizer."""
    import torch
    from tokenizers import Tokenizer, models
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    config = LlamaConfig(
        **SIZES[size], num_attention_heads=12, num_key_value_heads=2, tie_word_embeddings=True, dtype=torch.bfloat16
    )
    torch.set_default_dtype(torch.bfloat16)
    LlamaForCausalLM(config).save_pretrained(folder, max_shard_size="500MB")
    words = {str(index): index for index in range(config.vocab_size)}
    PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="0"))).save_pretrained(folder)


def map_large_blocks() -> None:
    """Tell glibc to map blocks of 64 KiB and more each on its own (``M_MMAP_THRESHOLD``): those it counts."""
    ctypes.CDLL(None).mallopt(-3, 2**16)


class _Mallinfo2(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    ]


def mapped_bytes() -> int:
    """Bytes of the mapped blocks now."""
    mallinfo2 = ctypes.CDLL(None).mallinfo2
    mallinfo2.restype = _Mallinfo2
    return int(mallinfo2().hblkhd)


def most_mapped_bytes() -> int:
    """The most bytes of mapped blocks so far, which glibc prints to the standard error and returns nowhere."""
    kept = os.dup(2)
    with tempfile.TemporaryFile() as file:
        os.dup2(file.fileno(), 2)
        try:
            ctypes.CDLL(None).malloc_stats()
        finally:
            os.dup2(kept, 2)
            os.close(kept)
        file.seek(0)
        found = re.search(rb"max mmap bytes\s*=\s*(\d+)", file.read())
    assert found is not None
    return int(found[1])


def measure(folder: Path, *, kl: bool, gather_dtype: str, whole: bool, zero3: bool) -> None:
    """Load and shard on this rank, and print what it took."""
    import torch
    import torch.distributed.fsdp
    import torch.distributed.tensor
    import transformers
    from transformers.models.llama import modeling_llama  # noqa: F401

    from rlox_grpo import GRPOConfig
    from rlox_grpo.distributed.ranks import join_ranks
    from rlox_grpo.model.load import load_policy
    from rlox_grpo.trainer.build import build_update

    map_large_blocks()
    torch.set_num_threads(1)
    options = {"dtype": "bfloat16", "gather_dtype": gather_dtype} if gather_dtype != "float32" else {"dtype": "float32"}
    sharding = {"updater": "deepspeed", "zero_stage": 3} if zero3 else {"shard_parameters": True}
    config = GRPOConfig.create(**sharding, kl_coef=0.05 if kl else 0.0, **options)
    if zero3:
        from rlox_grpo.update import deepspeed_updater

        deepspeed_updater._import_deepspeed()
    ranks = join_ranks()
    before = mapped_bytes()
    model = str(folder)
    if whole:
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    policy = load_policy(model, None, config, ranks=ranks)
    if policy.shards is None and policy.stored is None:
        ranks.broadcast(policy.model, policy.masters)
    _, reference_policy, _, updater = build_update(config.split(), policy, None, None, None, ranks)
    blocks = [sum(4 * p.numel() for p in block.parameters()) for block in policy.model.model.layers]
    parameters = sum(p.numel() for p in policy.model.parameters())
    if zero3:  # the buffer for gradients, of 2 GB, takes no memory before they are written: not counted
        updater._settings["zero_optimization"]["reduce_bucket_size"] = 2**20
    updater.start()
    peak = most_mapped_bytes() - before
    unit = max(blocks[0], 4 * parameters - sum(blocks))
    reference = 0
    if kl:
        assert reference_policy is not None
        reference = (2 if config.dtype == "bfloat16" else 4) * parameters // ranks.size
    print(
        json.dumps(
            {
                "bench": "start_memory",
                "parameters": parameters,
                "ranks": ranks.size,
                "rank": ranks.rank,
                "whole": whole,
                "zero3": zero3,
                "dtype": config.dtype,
                "before": before,
                "shard": 4 * parameters // ranks.size,
                "reference": reference,
                "unit": unit,
                "peak": peak,
                "limit": int(1.3 * (4 * parameters // ranks.size + reference + unit)),
            }
        ),
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("size", nargs="?", choices=list(SIZES), default="1b")
    parser.add_argument("--kl", action="store_true", help="with a frozen reference")
    parser.add_argument("--gather-dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--whole", action="store_true", help="load the whole model on each rank")
    parser.add_argument("--ranks", type=int, default=2, help="number of ranks (default: %(default)s)")
    parser.add_argument("--zero3", action="store_true", help="DeepSpeed's ZeRO 3, which has buffers of its own")
    parser.add_argument("--folder", type=Path, help="a folder that has the model already")
    arguments = parser.parse_args()
    how = {name: getattr(arguments, name) for name in ("kl", "gather_dtype", "whole", "zero3")}
    if "RANK" in os.environ:
        measure(arguments.folder, **how)
        return
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.folder or Path(temporary)
        if not (folder / "config.json").exists():
            # In a process of its own: its memory is given back.
            code = f"from start_memory import *; write_model({arguments.size!r}, Path({str(folder)!r}))"
            subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parent)
        torchrun = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc_per_node",
            str(arguments.ranks),
        ]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        subprocess.run([*torchrun, *sys.argv, "--folder", str(folder)], check=True, env=environment)


if __name__ == "__main__":
    main()
