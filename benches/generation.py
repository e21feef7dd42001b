"""Time the embedded engine beside transformers' `generate` and `generate_batch`, at mixed completion lengths.

Prints a Markdown table: tokens kept a second (up to each row's end token), median of the repeats, and our ratio.

    python benches/generation.py [--threads 1] [--repeats 3] [--prompts 8] [--group-size 8] [--max-new-tokens 128]
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import time
from collections.abc import Callable

import numpy as np
import torch
import transformers
from transformers import ContinuousBatchingConfig, GenerationConfig, Qwen2Config, Qwen2ForCausalLM

from rlox_grpo.rollout.engines.hf.engine import HFEngine
from rlox_grpo.types import Prompt, Sampling

END = 1


def make_model(mean_length: float) -> Qwen2ForCausalLM:
    """A random model whose end token has about one chance in `mean_length` at each step: geometric lengths."""
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=8192, hidden_size=256, intermediate_size=688, num_hidden_layers=4, num_attention_heads=8,
        num_key_value_heads=4, max_position_embeddings=2048, pad_token_id=0, bos_token_id=None, eos_token_id=END,
    )  # fmt: skip
    model = Qwen2ForCausalLM(config).eval()
    head = torch.nn.Linear(256, 8192, bias=True)
    head.weight.data.copy_(model.lm_head.weight.data)
    head.bias.data.zero_()
    head.bias.data[END] = np.log(8192 / mean_length)
    model.lm_head = head
    return model


def kept(rows: list[list[int]]) -> list[int]:
    """Tokens of each row up to its first end token."""
    return [row.index(END) + 1 if END in row else len(row) for row in rows]


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--threads", type=int, default=1)
    arguments.add_argument("--repeats", type=int, default=3)
    arguments.add_argument("--prompts", type=int, default=8)
    arguments.add_argument("--group-size", type=int, default=8)
    arguments.add_argument("--max-new-tokens", type=int, default=128)
    arguments.add_argument("--mean-length", type=float, default=48)
    options = arguments.parse_args()
    torch.set_num_threads(options.threads)
    model = make_model(options.mean_length)
    theirs = make_model(options.mean_length)  # our engine sets the attention of the model that it is given
    rng = np.random.default_rng(0)
    prompts = [
        Prompt(rng.integers(2, 8192, length), index)
        for index, length in enumerate(rng.integers(64, 201, options.prompts))
    ]
    rows = options.prompts * options.group_size
    sampling = Sampling(options.max_new_tokens)

    def ours(max_rows: int, seed: int) -> list[int]:
        engine = HFEngine(model, max_rows=max_rows)
        groups = engine.generate(prompts, options.group_size, sampling, seed)
        return [len(completion.token_ids) for group in groups for completion in group.completions]

    def generate(seed: int) -> list[int]:
        torch.manual_seed(seed)
        width = max(len(prompt.token_ids) for prompt in prompts)
        ids = torch.zeros(len(prompts), width, dtype=torch.long)
        for row, prompt in enumerate(prompts):
            ids[row, width - len(prompt.token_ids) :] = torch.from_numpy(prompt.token_ids)
        out = theirs.generate(
            ids, attention_mask=ids != 0, do_sample=True, top_k=0, num_return_sequences=options.group_size,
            max_new_tokens=options.max_new_tokens, return_dict_in_generate=True, output_logits=False,
        )  # fmt: skip
        return kept(out.sequences[:, width:].tolist())

    def generate_batch(seed: int) -> list[int]:
        torch.manual_seed(seed)
        config = GenerationConfig(
            do_sample=True, top_k=0, max_new_tokens=options.max_new_tokens, eos_token_id=END, pad_token_id=0,
            num_return_sequences=options.group_size,
        )  # fmt: skip
        results = theirs.generate_batch(
            [prompt.token_ids.tolist() for prompt in prompts],
            generation_config=config,
            continuous_batching_config=ContinuousBatchingConfig(num_blocks=256, page_size=32, max_batch_tokens=512),
            progress_bar=False,
        )
        return kept([result.generated_tokens for result in results.values()])

    runs: list[tuple[str, Callable[[int], list[int]]]] = [
        (f"rlox_grpo, max_rows={rows}", lambda seed: ours(rows, seed)),
        (f"rlox_grpo, max_rows={rows // 4}", lambda seed: ours(rows // 4, seed)),
        ("transformers generate", generate),
        ("transformers generate_batch", generate_batch),
    ]
    print(
        f"{platform.machine()}, {os.cpu_count()} cores, {options.threads} threads, torch {torch.__version__}, "
        f"transformers {transformers.__version__}; {options.prompts} prompts of 64-200 tokens x {options.group_size}, "
        f"at most {options.max_new_tokens} new, fp32\n"
    )
    print(
        "| | tokens kept | mean / max length | seconds (min-max) | tokens/s | rlox_grpo is |\n|---|---|---|---|---|---|"
    )
    baseline = 0.0
    for name, run in runs:
        seconds, lengths = [], []
        try:
            run(99)
            for seed in range(options.repeats):
                start = time.perf_counter()
                lengths += run(seed)
                seconds.append(time.perf_counter() - start)
        except Exception as error:  # noqa: BLE001 - a peer that cannot run here is a line of the table
            print(f"| {name} | {type(error).__name__}: {error} | | | | |")
            continue
        rate = sum(lengths) / sum(seconds)
        baseline = baseline or rate
        print(
            f"| {name} | {sum(lengths)} | {np.mean(lengths):.0f} / {max(lengths)} | {statistics.median(seconds):.2f} "
            f"({min(seconds):.2f}-{max(seconds):.2f}) | {rate:.0f} | {baseline / rate:.2f}x |"
        )


if __name__ == "__main__":
    main()
