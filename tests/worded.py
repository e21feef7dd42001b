"""A model of words, always the same: the tokenizer of Countdown's demo and a random Qwen2 of one layer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def make(hidden_size: int) -> tuple[Any, Any]:
    """The model and its tokenizer."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    from rlox_grpo.demo.closed_vocabulary import build_countdown_tokenizer

    tokenizer = build_countdown_tokenizer(20)
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=hidden_size,
        intermediate_size=hidden_size,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=64,
        bos_token_id=None,
    )
    return Qwen2ForCausalLM(config), tokenizer


def save(folder: Path, chat_template: str | None = None) -> None:
    """Write a checkpoint of both."""
    model, tokenizer = make(16)
    if chat_template is not None:
        tokenizer.chat_template = chat_template
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def save_rows(path: Path) -> None:
    """Write eight problems of Countdown in the words of the model, with the columns of its reward."""
    rows = [{"prompt": f"3 , {n} : {n + 3}", "nums": [3, n], "target": n + 3} for n in range(1, 9)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
