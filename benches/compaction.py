"""Compaction: trained summaries beside summaries without an advantage, and beside no compaction.

    python benches/compaction.py --out runs/compaction [--seeds 0,1,2,3,4]

A table of 36 rows (432 tokens) comes in nine messages. A model with a context of 256 tokens reads it, and repeats one
row at the end. Each message names the key of that row. A row has one token for its key and its value, and eleven more.
With compaction, the policy writes two summaries of at most two tokens, so it must note the row of the key, and copy it
into the second summary.

- ``trained``: the tokens of a summary have the advantage of the episode, as they do in this library.
- ``masked``: the tokens of summaries have an advantage of 0; all other tokens are trained.
- ``none``: no compaction. The environment asks when the next message would not fit, after four of nine messages.

The warm start answers from its context, but its summaries are bad on purpose: the scripted player notes the row of the
key in 50 % of the summaries before which this row was read, and the newest row in all others. All runs begin with the
same warm start, and a seed is that of the tables and the samples. Finished cells are not trained again.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn.functional import cross_entropy
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

sys.path.insert(0, str(Path(__file__).parent))
from paired_statistics import bootstrap_interval
from rlox_grpo import GRPO
from rlox_grpo.demo.closed_vocabulary import TURNS_TEMPLATE, build_tokenizer
from rlox_grpo.environments import Outcome
from rlox_grpo.rollout.episodes.compaction import HEADING
from rlox_grpo.run.files import append_line, json_line, read_jsonl
from rlox_grpo.types import ScoredGroup

RESULTS = Path(__file__).parent / "results" / "compaction"
ARMS = ("trained", "masked", "none")
CONTEXT, KEYS, VALUES, CHUNK_ROWS, ROW_TOKENS = 256, 36, 4, 4, 12
NUM_CHUNKS = KEYS // CHUNK_ROWS
MESSAGE_TOKENS = CHUNK_ROWS * ROW_TOKENS + 5
"""A message with rows: the rows, the key, and ``<user>``, ``<assistant>``, ``next`` and ``<eos>``."""

WORDS = ("amber", "birch", "cedar", "delta", "ember", "flint", "grove", "heron", "inlet", "jade", "kelp", "larch")
REQUEST, NEXT, ANSWER = "summary", "next", "answer"
GOOD_SUMMARIES = 0.5
COMPACTION: dict[str, Any] = {"compact_at_tokens": CONTEXT - 16, "compact_prompt": REQUEST}
SETTINGS: dict[str, Any] = {
    "group_size": 8,
    "prompts_per_step": 16,
    "max_steps": 50,
    "max_new_tokens": 2,
    "max_turns": NUM_CHUNKS + 1,
    "learning_rate": 1e-3,
    "lr_schedule": "linear",
    "weight_decay": 0.0,
    "log_to": (),
    "guards": False,
}
NUM_TRAIN, NUM_HELD_OUT, EVAL_SAMPLES = 400, 64, 4
WARM_STEPS, WARM_RATE, WARM_TOKENS, WARM_SEED = 600, 3e-3, 5000, 0


def build() -> PreTrainedTokenizerFast:
    """Return a tokenizer in which a key with its value, a key that is asked for, and a heading are one token each."""
    rows = [f"k{key:02}={value}" for key in range(KEYS) for value in range(VALUES)]
    asked = [f"k{key:02}?" for key in range(KEYS)]
    # Every word is a phrase, so that the tokenizer can encode whatever the policy writes in a summary.
    words = [f"{blank}{word}" for word in (*WORDS, "0") for blank in ("", " ")]
    phrases = [*rows, *asked, f"{HEADING}\n\n", HEADING, "\n", REQUEST, NEXT, ANSWER, *words]
    return build_tokenizer([], 0, chat_template=TURNS_TEMPLATE, phrases=phrases)


def write_rows(rng: np.random.Generator, rows: Sequence[str], length: int = ROW_TOKENS) -> str:
    """Return the rows, each with words up to ``length`` tokens, of which the last is a line break."""
    words = rng.choice(WORDS, size=(len(rows), length - 2))
    return "".join(f"{row} {' '.join(others)}\n" for row, others in zip(rows, words, strict=True))


def draw_table(rng: np.random.Generator) -> list[str]:
    """Return the first tokens of all rows: each key once, with a random value."""
    return [f"k{key:02}={rng.integers(VALUES)}" for key in rng.permutation(KEYS)]


def make_rows(rng: np.random.Generator, count: int) -> list[dict[str, Any]]:
    """Return tables in messages, and the row that is asked for."""
    rows = []
    for _ in range(count):
        table = draw_table(rng)
        chunks = [write_rows(rng, table[start : start + CHUNK_ROWS]) for start in range(0, KEYS, CHUNK_ROWS)]
        rows.append({"chunks": chunks, "answer": table[int(rng.integers(KEYS))]})
    return rows


async def read_table(row: Mapping[str, Any], chat: Any) -> Outcome:
    """Show the table and ask for a row: at the end, or when the context has no room for the next message."""
    question = f"{row['answer'][:3]}?"
    for index, chunk in enumerate(row["chunks"]):
        if index and not row["compacts"] and chat.remaining_tokens < MESSAGE_TOKENS + 5:
            break
        await chat.turn(chunk + question)
    reply = await chat.turn(ANSWER)
    notes = list_notes(chat.messages, row["answer"])
    metrics = {"noted": statistics.mean(notes)} if notes else {}
    return Outcome(float(reply.text == row["answer"]), metrics=metrics)


def list_notes(messages: Sequence[Mapping[str, Any]], answer: str) -> list[bool]:
    """For each summary after the row was read, return whether the summary has the row."""
    notes, is_read = [], False
    for message, reply in pairwise(messages):
        if message["role"] == "user":
            is_read |= answer in message["content"]
            if is_read and message["content"] == REQUEST:
                notes.append(answer in reply["content"])
    return notes


def compute_advantages(groups: Sequence[ScoredGroup], *, masks: bool) -> list[np.ndarray]:
    """Return standardised rewards ``[G]``, or ``[G, K]`` by turn with 0 for summaries."""
    advantages = []
    for group in groups:
        scaled = (group.rewards - group.rewards.mean()) / (group.rewards.std(ddof=1) + 1e-4)
        advantages.append(mask_summaries(group.group.completions, scaled) if masks else scaled)
    return advantages


def mask_summaries(completions: Sequence[Any], advantages: np.ndarray) -> np.ndarray:
    """Return the advantages of turns ``[G, K]``, NaN after the last: 0 for the summary at the end of each branch."""
    rows = []
    for completion, advantage in zip(completions, advantages, strict=True):
        turns = [advantage] * len(completion.turns)
        for branch in completion.branches:
            turns += [advantage] * (len(branch.turns) - 1) + [0.0]
        rows.append(turns)
    longest = max(map(len, rows))
    return np.array([row + [math.nan] * (longest - len(row)) for row in rows], dtype=np.float32)


def draw_drill(rng: np.random.Generator, num_rows: int, length: int) -> list[dict[str, str]]:
    """Return a short table and twelve questions about its rows, from which the model learns to look up."""
    table = draw_table(rng)[:num_rows]
    messages = []
    for index, answer in enumerate(rng.choice(table, 12)):
        rows = "" if index else write_rows(rng, table, length)
        messages += _exchange(f"{rows}{answer[:3]}?", str(answer))
    return messages


def draw_conversation(rng: np.random.Generator, num_chunks: int) -> list[dict[str, str]]:
    """Return a conversation as the policy sees it, from the beginning or after a compaction.

    It ends with the scripted player's summary, or with the answer: the row if it is in the conversation, and a random
    value if it is not.
    """
    table = draw_table(rng)
    noted, shown = table[-1], table[: num_chunks * CHUNK_ROWS]
    begins = rng.random() < 0.5
    visible = shown if begins else [noted, *shown]
    # In a fifth of the conversations the row is not there.
    answer = str(rng.choice(visible)) if rng.random() < 0.8 else table[-2]
    question = f"{answer[:3]}?"
    messages = [] if begins else _exchange(f"{HEADING}\n\n{noted}", NEXT)
    for start in range(0, len(shown), CHUNK_ROWS):
        messages += _exchange(write_rows(rng, shown[start : start + CHUNK_ROWS]) + question, NEXT)
    if rng.random() < 0.5:
        return messages + _exchange(ANSWER, answer)
    is_good = answer in visible and rng.random() < GOOD_SUMMARIES
    return messages + _exchange(REQUEST, answer if is_good else shown[-1])


def _exchange(message: str, reply: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": message}, {"role": "assistant", "content": reply}]


def make_model(tokenizer: PreTrainedTokenizerFast, seed: int) -> Any:
    """Return a Llama model of two layers of width 64 with random weights.

    The embedding of a row begins as the sum of its key's and of its value's, and the slow rotations let a layer compare
    tokens that are far apart.
    """
    torch.manual_seed(seed)
    shape: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    heads: dict[str, Any] = {"num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": CONTEXT}
    ends: dict[str, Any] = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id}
    config = LlamaConfig(
        vocab_size=len(tokenizer), **shape, **heads, **ends, bos_token_id=None, tie_word_embeddings=True,
        initializer_range=0.1, attention_bias=True, rope_parameters={"rope_theta": 1e5, "rope_type": "default"},
    )  # fmt: skip
    model: Any = LlamaForCausalLM(config)  # type: ignore[no-untyped-call]
    words, weight = tokenizer.get_vocab(), model.get_input_embeddings().weight
    values = 0.1 * torch.randn(VALUES, weight.shape[1])
    with torch.no_grad():
        for key in range(KEYS):
            for value in range(VALUES):
                weight[words[f"k{key:02}={value}"]] = weight[words[f"k{key:02}?"]] + values[value]
    return model


def warm_start(file: Path, tokenizer: PreTrainedTokenizerFast, seed: int, steps: int) -> Any:
    """Return the model after supervised steps, with the loss on replies; read it from ``file`` if it is there."""
    model = make_model(tokenizer, seed)
    if file.exists():
        model.load_state_dict(torch.load(file, weights_only=True))
        return model.eval()
    rng = np.random.default_rng([seed, 2])
    optimizer = torch.optim.AdamW(model.parameters(), lr=WARM_RATE, betas=(0.9, 0.98), weight_decay=0.01, fused=True)
    for step in range(steps):
        share = step / steps
        decay = 0.05 + 0.95 * (1 + math.cos(math.pi * share)) / 2
        optimizer.param_groups[0]["lr"] = WARM_RATE * min(1.0, (step + 1) / 30) * decay
        ids, labels = draw_batch(rng, tokenizer, share)
        hidden, is_label = model.model(ids)[0], labels[:, 1:] != -100
        loss = cross_entropy(model.lm_head(hidden[:, :-1][is_label]), labels[:, 1:][is_label])
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    torch.save(model.state_dict(), file)
    return model.eval()


def draw_batch(
    rng: np.random.Generator, tokenizer: PreTrainedTokenizerFast, share: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return token ids ``int64 [N, T]``, and labels that are −100 outside replies.

    The first fifth of the steps, by ``share``, has short drills only, because the look-up is learned from them first.
    """
    if share < 0.2 or rng.random() < 0.3:
        num_rows, length = (8, 3) if share < 0.2 else ((8, 3), (16, 6), (12, 12))[int(rng.integers(3))]
        count = WARM_TOKENS // (num_rows * length + 60)
        chats = [draw_drill(rng, num_rows, length) for _ in range(count)]
    else:
        num_chunks = int(rng.choice((1, 2, 4)))
        chats = [draw_conversation(rng, num_chunks) for _ in range(WARM_TOKENS // (num_chunks * MESSAGE_TOKENS + 10))]
    shown: Any = chats
    encoded = tokenizer(tokenizer.apply_chat_template(shown, tokenize=False), padding=True, padding_side="right")
    ids = torch.tensor(encoded["input_ids"])
    begins = ids == tokenizer.convert_tokens_to_ids("<assistant>")
    ends = ids == tokenizer.eos_token_id
    is_reply = (begins.cumsum(1) - ends.cumsum(1) - begins.long() > 0) | ends
    return ids, ids.masked_fill(~is_reply, -100)


def train(arm: str, seed: int, folder: Path, changes: Mapping[str, Any], warm_steps: int) -> dict[str, Any]:
    """Train one cell, and return its accuracy before and after, and the share of summaries with the row."""
    tokenizer = build()
    model = warm_start(folder / f"warm_start_{warm_steps}.pt", tokenizer, WARM_SEED, warm_steps)
    rng = np.random.default_rng([seed, 1])
    compacts = arm != "none"
    rows, held_out = (
        [{**row, "compacts": compacts} for row in make_rows(rng, count)] for count in (NUM_TRAIN, NUM_HELD_OUT)
    )

    def advantages(groups: Sequence[ScoredGroup]) -> list[np.ndarray]:
        return compute_advantages(groups, masks=arm == "masked")

    options = {**SETTINGS, **(COMPACTION if compacts else {}), "seed": seed, **changes}
    trainer = GRPO(model, environment=read_table, tokenizer=tokenizer, advantage_fn=advantages, **options)
    before = trainer.evaluate(held_out, samples=EVAL_SAMPLES)
    start = time.process_time()
    trainer.train(rows)
    seconds = time.process_time() - start
    after = trainer.evaluate(held_out, samples=EVAL_SAMPLES)
    greedy = trainer.evaluate(held_out, greedy=True)
    cell = {"arm": arm, "seed": seed, "steps": trainer.step, "seconds": seconds, "greedy": greedy["accuracy"]}
    for name, metrics in (("before", before), ("after", after)):
        cell[name] = metrics["accuracy"]
        cell[f"noted_{name}"] = next((value for key, value in metrics.items() if key.endswith("noted")), None)
    return cell


def summarize(cells: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return a row for each arm: means over its seeds, intervals of 95 %, and differences from ``trained``."""
    ends = {(cell["arm"], cell["seed"]): cell["after"] for cell in cells}
    summary = []
    for arm in ARMS:
        mine = [cell for cell in cells if cell["arm"] == arm]
        if not mine:
            continue
        gaps = [cell["after"] - ends["trained", cell["seed"]] for cell in mine if ("trained", cell["seed"]) in ends]
        after = [cell["after"] for cell in mine]
        row: dict[str, Any] = {"arm": arm, "seeds": len(mine), "interval": bootstrap_interval(after)}
        for name in ("before", "after", "greedy", "seconds"):
            row[name] = statistics.mean(cell[name] for cell in mine)
        for name in ("noted_before", "noted_after"):
            row[name] = statistics.mean(cell[name] for cell in mine) if arm != "none" else None
        row["gains"] = bootstrap_interval([cell["after"] - cell["before"] for cell in mine])
        row["difference"] = statistics.mean(gaps) if gaps and arm != "trained" else None
        row["difference_interval"] = bootstrap_interval(gaps) if arm != "trained" else None
        summary.append(row)
    return summary


def make_table(summary: Sequence[Mapping[str, Any]]) -> str:
    """Return a Markdown table: a row for each arm."""
    lines = [
        "| arm | seeds | accuracy before | after (95 %) | gain (95 %) | difference from `trained` (95 %) "
        "| summaries with the row, before | after | greedy | processor s |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for row in summary:
        gain = _show_change(row["after"] - row["before"], row["gains"])
        gap = "" if row["difference"] is None else _show_change(row["difference"], row["difference_interval"])
        notes = ["" if row[name] is None else f"{row[name]:.2f}" for name in ("noted_before", "noted_after")]
        low, high = row["interval"]
        lines.append(
            f"| `{row['arm']}` | {row['seeds']} | {row['before']:.3f} | {row['after']:.3f} ({low:.3f} to {high:.3f}) "
            f"| {gain} | {gap} | {notes[0]} | {notes[1]} | {row['greedy']:.3f} | {row['seconds']:.0f} |"
        )
    return "\n".join(lines)


def _show_change(value: float, interval: tuple[float, float]) -> str:
    return "{:+.3f} ({:+.3f} to {:+.3f})".format(value, *interval)


def main(argv: Sequence[str] | None = None) -> None:
    """Train what is not there yet, write the results and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/compaction"))
    parser.add_argument("--seeds", default="0,1,2,3,4", help="comma-separated (default: %(default)s)")
    parser.add_argument("--arms", default=",".join(ARMS), help="comma-separated (default: %(default)s)")
    parser.add_argument("--warm-steps", type=int, default=WARM_STEPS, help="for a try; writes no results")
    parser.add_argument("--set", nargs="*", default=[], metavar="OPTION=JSON", help="for a try; writes no results")
    options = parser.parse_args(argv)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    torch.set_num_threads(1)
    options.out.mkdir(parents=True, exist_ok=True)
    changes = {name: json.loads(value) for name, value in (change.split("=", 1) for change in options.set)}
    is_try = bool(changes) or options.warm_steps != WARM_STEPS
    record = options.out / ("tries.jsonl" if is_try else "results.jsonl")
    cells = list(read_jsonl(record)) if record.exists() and not is_try else []
    for seed in map(int, options.seeds.split(",")):
        for arm in options.arms.split(","):
            if any((cell["arm"], cell["seed"]) == (arm, seed) for cell in cells):
                continue
            cell = train(arm, seed, options.out, changes, options.warm_steps)
            append_line(record, json_line({**cell, **({"set": changes} if changes else {})}))
            cells.append(cell)
            print(json.dumps(cell), flush=True)
    summary = summarize(cells)
    table = make_table(summary)
    if not is_try and all(row["seeds"] > 2 for row in summary):  # fewer have no interval
        machine = f"{platform.machine()}, 1 thread, torch {torch.__version__}"
        written = {"machine": machine, "settings": SETTINGS, "compaction": COMPACTION, "cells": cells}
        RESULTS.with_suffix(".json").write_text(json.dumps({**written, "summary": summary}, indent=1) + "\n")
        RESULTS.with_suffix(".md").write_text(f"`python benches/compaction.py`: {machine}.\n\n{table}\n")
    print(table)


if __name__ == "__main__":
    main()
