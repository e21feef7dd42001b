"""Warm start: train a small model of the Llama architecture from scratch on worked examples, on the CPU."""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from rich.progress import track
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from rlox_grpo.run.notebook import is_notebook

DrawExamples: TypeAlias = Callable[[np.random.Generator, int], Sequence[tuple[str, str]]]
"""``draw(rng, count)`` returns ``count`` pairs of prompt and completion."""


def warm_start(
    folder: Path,
    tokenizer: PreTrainedTokenizerFast,
    draw: DrawExamples,
    *,
    seed: int,
    steps: int,
    rows: int,
    learning_rate: float,
    positions: int = 128,
) -> Path:
    """Train a new model on worked examples and save it to ``folder``; do nothing if ``folder`` exists.

    Args:
        folder: Where the Hugging Face checkpoint is saved, in one move once it is complete.
        tokenizer: Tokenizer of the model, with a token for each number.
        draw: Returns the examples of a step.
        seed: Seed of the initial weights and of the examples.
        steps: Supervised steps; the learning rate decays to a twentieth along a cosine.
        rows: Examples per step.
        learning_rate: Peak learning rate of AdamW.
        positions: Largest length of a prompt and its completion, in tokens.
    """
    if folder.exists():
        return folder
    torch.manual_seed(seed)
    model: Any = make_model(tokenizer, positions)
    teach(model, tokenizer, draw, seed=seed, steps=steps, rows=rows, learning_rate=learning_rate)
    partial = folder.with_name(f".{folder.name}.part")
    shutil.rmtree(partial, ignore_errors=True)
    model.save_pretrained(partial)
    tokenizer.save_pretrained(partial)
    os.replace(partial, folder)
    return folder


def make_model(tokenizer: PreTrainedTokenizerFast, positions: int = 128) -> nn.Module:
    """Build a Llama model of half a million parameters whose first embeddings encode the numbers' values.

    The model's weights and layers are those of a Qwen2 model. Llama's attention has one more bias, after its output,
    which is zero and not trained here. The model is not of the type ``qwen2`` because ``AutoTokenizer`` builds Qwen2's
    own tokenizer next to that, which splits the demo's words.

    Each number's embedding starts as sines and cosines of the number and of its logarithm, at several periods. The
    model then learns the examples' arithmetic in a quarter of the steps that random embeddings need.
    """
    words = tokenizer.get_vocab()
    shape: dict[str, Any] = {
        "vocab_size": len(words),
        "hidden_size": 128,
        "intermediate_size": 512,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": positions,
        "initializer_range": 0.05,
        "tie_word_embeddings": True,
        "pad_token_id": tokenizer.pad_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "bos_token_id": None,
    }
    first: Any = Qwen2ForCausalLM(Qwen2Config(**shape))  # type: ignore[no-untyped-call]
    model: Any = LlamaForCausalLM(LlamaConfig(**shape, attention_bias=True))  # type: ignore[no-untyped-call]
    model.load_state_dict(first.state_dict(), strict=False)
    for layer in model.model.layers:
        layer.self_attn.o_proj.bias.requires_grad_(False)
    # Initialise the embeddings of number words with sines and cosines; see the docstring.
    rows = {index: int(word) for word, index in words.items() if word.strip().isdecimal()}
    numbers = torch.tensor(list(rows.values()), dtype=torch.float32)[:, None]
    periods = torch.tensor([2.0, 3, 4, 5, 6, 7, 9, 10, 13, 20, 33, 50, 100, 200])
    log_periods = torch.tensor([0.5, 1.0, 2, 4, 8, 16])
    angles = 2 * math.pi * torch.cat([numbers / periods, torch.log1p(numbers) / log_periods], dim=1)
    features = torch.cat([angles.sin(), angles.cos()], dim=1)  # [numbers, 40]
    with torch.no_grad():
        model.get_input_embeddings().weight[list(rows), : features.shape[1]] = 0.05 * features
    trained: nn.Module = model
    return trained


def teach(
    model: nn.Module,
    tokenizer: PreTrainedTokenizerFast,
    draw: DrawExamples,
    *,
    seed: int,
    steps: int,
    rows: int,
    learning_rate: float,
) -> None:
    """Take supervised steps on worked examples, with the loss on the completions only."""
    rng = np.random.default_rng([seed, 2])
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=learning_rate, betas=(0.9, 0.98), weight_decay=0.01, fused=True
    )
    model.train()
    for step in track(range(steps), description="warm start on worked examples", disable=is_notebook()):
        ids, labels = _make_examples(draw(rng, rows), tokenizer)
        decay = 0.05 + 0.95 * (1 + math.cos(math.pi * step / steps)) / 2
        for group in optimizer.param_groups:
            group["lr"] = learning_rate * min(1.0, (step + 1) / 30) * decay
        loss = nn.functional.cross_entropy(model(ids).logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    model.eval()


def _make_examples(
    pairs: Sequence[tuple[str, str]], tokenizer: PreTrainedTokenizerFast
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return token ids ``int64 [rows, longest]``, and labels of the same shape that are −100 on prompts and padding."""
    asked = tokenizer([prompt for prompt, _ in pairs])["input_ids"]
    answered = tokenizer([completion for _, completion in pairs])["input_ids"]
    width = max(len(a) + len(b) for a, b in zip(asked, answered, strict=True)) + 1
    ids = torch.full((len(pairs), width), tokenizer.pad_token_id)
    labels = torch.full_like(ids, -100)
    for row, (prompt, completion) in enumerate(zip(asked, answered, strict=True)):
        whole = torch.tensor([*prompt, *completion, tokenizer.eos_token_id])
        ids[row, : len(whole)] = whole
        labels[row, len(prompt) : len(whole)] = whole[len(prompt) :]
    return ids, labels
