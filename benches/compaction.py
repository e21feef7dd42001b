"""Look-ups in a table that is longer than the context: summaries that are trained, masked, or not written at all.

    python benches/compaction.py [--out runs/compaction] [--seeds 5] [--steps 30] [--table]

The policy is asked for the value of a key, then reads a table of 30 lines in 10 messages, about 400 tokens; the model
takes 256. A scripted player whose summaries are right half of the time is the warm start. Three arms start from it:

- ``trained``: ``compact_at_tokens=190``; the summaries have the advantage of their episode, as by default;
- ``masked``: the same, but the advantage of a summary is 0, by an ``advantage_fn``;
- ``none``: no compaction; the environment asks for the value before the context is full.

The figure is the accuracy on held-out tables, sampled, before and after training, with 95 % intervals over the seeds
and paired differences to ``trained``. Finished cells of ``results.jsonl`` in the folder are not trained again.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Regex, decoders, pre_tokenizers
from transformers.utils.logging import disable_progress_bar

sys.path.insert(0, str(Path(__file__).parent))
from paired_statistics import bootstrap_interval
from rlox_grpo import GRPO
from rlox_grpo.config.eval_set import EvalSet
from rlox_grpo.demo.closed_vocabulary import EOS, PAD, ROLES, TURNS_TEMPLATE, make_word_tokenizer
from rlox_grpo.demo.episodes import Conversation, write_example
from rlox_grpo.demo.warm_start import warm_start
from rlox_grpo.rollout.episodes.compaction import HEADING
from rlox_grpo.run.files import append_line, json_line, read_jsonl

ARMS = ("trained", "masked", "none")
KEYS = [f" k{index}" for index in range(36)]
VALUES = [f" {letter}" for letter in "abcdefgh"]
PARTS, LINES, CONTEXT = 10, 3, 256
FILLER, FIND, NEXT, REQUEST, QUESTION, UNSEEN = " dust", " find", " next", " summary", " value", " nothing"
RIGHT_SUMMARY = 0.5
SETTINGS: dict[str, Any] = {
    "group_size": 8,
    "prompts_per_step": 8,
    "max_turns": PARTS + 1,
    "max_new_tokens": 8,
    "max_live_episodes": 64,
    "learning_rate": 3e-4,
    "dtype": "float32",
    "log_to": [],
    "guards": False,
}


def make_row(rng: np.random.Generator) -> dict[str, Any]:
    """Return a row with the parts of a table, the key asked for, and its value."""
    keys = rng.permutation(KEYS)[: PARTS * LINES].tolist()
    values = rng.choice(VALUES, size=len(keys)).tolist()
    lines = [f"{key}{value}{FILLER * 9}" for key, value in zip(keys, values, strict=True)]
    parts = ["".join(lines[start : start + LINES]) for start in range(0, len(lines), LINES)]
    asked = int(rng.integers(len(keys)))
    return {"key": keys[asked], "parts": parts, "value": values[asked]}


async def look_up(row: dict[str, Any], chat: Any) -> float:
    """Show the table part by part, and pay 1 for the right value."""
    message = FIND + row["key"]
    for part in row["parts"]:
        await chat.turn(message + part)
        message = ""
        if chat.remaining_tokens < 60:  # without compaction, the next part and the question would not fit
            break
    reply = await chat.turn(QUESTION)
    return float(reply.text == row["value"])


def draw_example(rng: np.random.Generator, most_filler: int) -> Conversation:
    """Return a conversation of the scripted player up to some reply, with less filler in each part of the table."""
    row = make_row(rng)
    first = int(rng.integers(PARTS))
    last = min(PARTS, first + int(rng.integers(1, 5)))
    whole = row["parts"][0].count(FILLER)
    shown = [part.replace(FILLER, "", whole - int(rng.integers(most_filler + 1))) for part in row["parts"]]
    written = [row["key"] + row["value"] in part for part in shown]
    known = row["value"] if any(written[:first]) else UNSEEN
    messages: list[dict[str, Any]] = []
    start = FIND + row["key"]
    if first:  # after a compaction
        messages = [
            {"role": "user", "content": f"{HEADING}\n\n{FIND}{row['key']}{known}"},
            {"role": "assistant", "content": NEXT},
        ]
        start = ""
    for index in range(first, last):
        messages += [
            {"role": "user", "content": start + shown[index]},
            {"role": "assistant", "content": NEXT},
        ]
        start = ""
    is_known = any(written[:last])
    kind = rng.integers(4)
    if kind == 0:
        return messages[:-1], NEXT
    if kind == 1:
        told = row["value"] if is_known else str(rng.choice(VALUES))
        return [*messages, {"role": "user", "content": QUESTION}], told
    key, value = row["key"], row["value"] if is_known else UNSEEN
    if rng.random() >= RIGHT_SUMMARY:
        if rng.random() < 0.5:
            key = str(rng.choice(KEYS))
        else:
            value = str(rng.choice([*VALUES, UNSEEN]))
    return [*messages, {"role": "user", "content": REQUEST}], FIND + key + value


def build() -> Any:
    """Return a tokenizer in which any sequence of ids is encoded as it was decoded: words begin with a blank."""
    words = [PAD, EOS, *ROLES, HEADING, "\n\n", FILLER, FIND, NEXT, REQUEST, QUESTION, UNSEEN, *VALUES, *KEYS]
    splitter = pre_tokenizers.Split(Regex(rf"<[a-z]+>|{HEADING}|\n\n| [a-z0-9]+"), "isolated")
    return make_word_tokenizer(words, splitter, decoder=decoders.Fuse(), chat_template=TURNS_TEMPLATE)


def make_warm_start(folder: Path, seed: int, steps: int) -> Path:
    tokenizer = build()

    def draw(rng: np.random.Generator, count: int) -> list[tuple[str, str]]:
        # A batch is padded to its longest example: four batches in five are short.
        most_filler = 28 if rng.random() < 0.2 else 7
        return [write_example(tokenizer, *draw_example(rng, most_filler - 1)) for _ in range(count)]

    return warm_start(folder, tokenizer, draw, seed=seed, steps=steps, rows=48, learning_rate=3e-3, positions=CONTEXT)


def mask_summaries(groups: Sequence[Any]) -> list[Any]:
    """Advantages of turns, normalised in the group as by default, and 0 for summaries: the last turn of each piece.

    The rows of an episode are its pieces in order, the last of which ends with the answer.
    """
    from rlox_grpo.groups import count_turns, list_rows

    advantages = []
    for group in groups:
        rewards = group.rewards.astype(np.float64)
        scaled = (rewards - rewards.mean()) / (rewards.std(ddof=1) + 1e-6)
        completions = group.group.completions
        table = np.full((len(completions), max(map(count_turns, completions))), np.nan)
        for line, completion, value in zip(table, completions, scaled, strict=True):
            turns = [len(row.turns) for row in list_rows(completion)]
            line[: sum(turns)] = value
            compactions = len(completion.episode.compactions)
            ends = np.cumsum(turns)[find_pieces(completion)[:compactions]] - 1
            line[ends] = 0.0
        advantages.append(table)
    return advantages


def find_pieces(completion: Any) -> list[int]:
    """Return the indices of the rows of an episode whose last turn is a summary, in no special order."""
    from rlox_grpo.groups import list_rows

    rows = list_rows(completion)
    return [index for index, row in enumerate(rows) if decode(row).startswith(FIND)]


def decode(row: Any) -> str:
    """Return the text of the last reply of a row."""
    return str(TOKENIZER.decode(row.token_ids[row.turns[-1] :], skip_special_tokens=True))


TOKENIZER = build()


def train(arm: str, seed: int, folder: Path, steps: int, warm_steps: int) -> dict[str, Any]:
    """Train one arm from the warm start of a seed; return the figures at its end."""
    rng = np.random.default_rng([seed, 5])
    rows, held_out = [make_row(rng) for _ in range(2000)], [make_row(rng) for _ in range(128)]
    options: dict[str, Any] = {} if arm == "none" else {"compact_at_tokens": 190, "compact_prompt": REQUEST}
    if arm == "masked":
        options["advantage_fn"] = mask_summaries
    trainer = GRPO(
        make_warm_start(folder / f"warm_start_{seed}", seed, warm_steps),
        environment=look_up,
        max_steps=steps,
        seed=seed,
        **SETTINGS,
        **options,
    )
    asked = EvalSet(held_out, samples=2)
    before = trainer.evaluate(asked)["accuracy"]
    metrics = trainer.train(rows)
    after = trainer.evaluate(asked)["accuracy"]
    compactions = metrics.get("episode/compactions", 0.0)
    return {
        "arm": arm,
        "seed": seed,
        "steps": steps,
        "warm_steps": warm_steps,
        "before": before,
        "after": after,
        "compactions": compactions,
    }


def print_table(cells: list[dict[str, Any]]) -> None:
    """Print a line for each arm; differences are to ``trained``, over the seeds that both arms have."""
    print("| summaries | seeds | before | after (95 %) | difference to trained (95 %) | compactions of an episode |")
    print("| --- | ---: | ---: | ---: | ---: | ---: |")
    base = {cell["seed"]: cell["after"] for cell in cells if cell["arm"] == "trained"}
    for arm in ARMS:
        own = [cell for cell in cells if cell["arm"] == arm]
        if not own:
            continue
        after = [cell["after"] for cell in own]
        low, high = bootstrap_interval(after)
        against = ""
        if arm != "trained":
            differences = [cell["after"] - base[cell["seed"]] for cell in own if cell["seed"] in base]
            left, right = bootstrap_interval(differences)
            against = f"{statistics.mean(differences):+.3f} ({left:+.3f} to {right:+.3f})"
        print(
            f"| {arm} | {len(own)} | {statistics.mean(cell['before'] for cell in own):.3f} | "
            f"{statistics.mean(after):.3f} ({low:.3f} to {high:.3f}) | {against} | "
            f"{statistics.mean(cell['compactions'] for cell in own):.2f} |"
        )


def main() -> None:
    """Train the missing cells, seed by seed, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/compaction"))
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--warm-steps", type=int, default=400)
    parser.add_argument("--table", action="store_true", help="print the table of the finished cells alone")
    options = parser.parse_args()
    torch.set_num_threads(1)
    disable_progress_bar()  # type: ignore[no-untyped-call]
    options.out.mkdir(parents=True, exist_ok=True)
    results = options.out / "results.jsonl"
    cells: list[dict[str, Any]] = read_jsonl(results) if results.exists() else []
    asked = {"steps": options.steps, "warm_steps": options.warm_steps}
    cells = [cell for cell in cells if {name: cell[name] for name in asked} == asked]
    for seed in range(0 if options.table else options.seeds):
        for arm in ARMS:
            if any((cell["arm"], cell["seed"]) == (arm, seed) for cell in cells):
                continue
            cells.append(train(arm, seed, options.out, options.steps, options.warm_steps))
            append_line(results, json_line(cells[-1]))
            print(cells[-1], flush=True)
    print_table(cells)


if __name__ == "__main__":
    main()
