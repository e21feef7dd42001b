"""Count coloured shapes in pictures: a vision-language model from scratch, on one thread of a CPU in some minutes.

A picture has 3 × 3 cells, some with a square, a disc or a triangle. The prompt ``red?`` asks for the number of red
shapes; the model lists the cells, then the number: ``r.gbyr..r=3``. It first learns the form from examples, then GRPO
trains it on the number alone, the vision tower too.

    pip install 'rlox-grpo[vision]'
    python examples/count_shapes.py
"""

from __future__ import annotations

import argparse
import time

import numpy as np
import torch
from PIL import Image, ImageDraw

from rlox_grpo import GRPO
from small_vlm import make_small_vlm

COLOURS = {"red": (220, 40, 40), "green": (40, 180, 60), "blue": (50, 80, 220), "yellow": (230, 210, 40)}
SIDE, CELL = 3, 8
TEMPLATE = (
    "{% for m in messages %}<|start|>{% for p in m['content'] if m['content'] is not string %}"
    "{{ '<image>' if p['type'] == 'image' else p['text'] }}{% endfor %}"
    "{% if m['content'] is string %}{{ m['content'] }}{% endif %}<end_of_utterance>{% endfor %}"
)


def draw(rng: np.random.Generator) -> tuple[Image.Image, list[str | None]]:
    """A picture of 24 × 24 pixels, and the colour of each cell."""
    image = Image.new("RGB", (CELL * SIDE, CELL * SIDE), tuple(int(v) for v in rng.integers(0, 60, 3)))
    pen, cells = ImageDraw.Draw(image), []
    for cell in range(SIDE * SIDE):
        if rng.random() < 0.25:
            cells.append(None)
            continue
        name = list(COLOURS)[rng.integers(len(COLOURS))]
        size = int(rng.integers(4, CELL))
        row, column = divmod(cell, SIDE)
        x, y = (CELL * at + int(rng.integers(0, CELL - size + 1)) for at in (column, row))
        box = (x, y, x + size - 1, y + size - 1)
        colour = tuple(int(np.clip(v + rng.integers(-35, 36), 0, 255)) for v in COLOURS[name])
        shape = rng.integers(3)
        if shape == 0:
            pen.rectangle(box, fill=colour)
        elif shape == 1:
            pen.ellipse(box, fill=colour)
        else:
            pen.polygon([(box[0], box[3]), (box[2], box[3]), ((box[0] + box[2]) // 2, box[1])], fill=colour)
        cells.append(name)
    return image, cells


def make_rows(count: int, seed: int) -> list[dict[str, object]]:
    """Rows with a picture, the number asked for, and the transcript of the example."""
    rng, rows = np.random.default_rng(seed), []
    for _ in range(count):
        image, cells = draw(rng)
        colour = list(COLOURS)[rng.integers(len(COLOURS))]
        seen, number = "".join("." if cell is None else cell[0] for cell in cells), cells.count(colour)
        rows.append({"prompt": f"{colour}?", "images": [image], "count": number, "transcript": f"{seen}={number}"})
    return rows


def right_count(completions, count):
    """1 for the right number after the last '=', 0.1 for another number."""
    scores = []
    for completion, right in zip(completions, count, strict=True):
        _, sign, number = completion[0]["content"].rpartition("=")
        scores.append(1.0 if sign and number == str(right) else 0.1 if sign and number.isdigit() else 0.0)
    return scores


def learn_the_form(model, processor, rows, steps: int) -> None:
    """Train on transcripts: cross entropy of their characters."""
    batches = []
    for start in range(0, len(rows), 64):
        some = rows[start : start + 64]
        texts = [f"<|start|><image>{row['prompt']}<end_of_utterance>" for row in some]
        replies = [f"{row['transcript']}<end_of_utterance>" for row in some]
        inputs = processor(
            text=[text + reply for text, reply in zip(texts, replies, strict=True)],
            images=[row["images"] for row in some],
            padding=True,
            padding_side="right",
            return_tensors="pt",
        )
        lengths = inputs["attention_mask"].sum(1, keepdim=True)
        columns = torch.arange(inputs["input_ids"].shape[1])
        begin = lengths - torch.tensor([[len(processor.tokenizer(reply)["input_ids"])] for reply in replies])
        labels = inputs["input_ids"].masked_fill((columns < begin) | (columns >= lengths), -100)
        batches.append({**inputs, "labels": labels})
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.0)
    rng = np.random.default_rng(2)
    model.train()
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = 3e-3 * min(1, (step + 1) / 30)
        model(**batches[rng.integers(len(batches))]).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


def main() -> None:
    """Train and print the accuracy on held-out pictures before and after GRPO."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--warm-steps", type=int, default=700)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--pictures", type=int, default=6144)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    begin = time.monotonic()
    rows, held_out = make_rows(arguments.pictures, arguments.seed), make_rows(256, 10_000 + arguments.seed)
    model, processor = make_small_vlm(TEMPLATE, side=CELL * SIDE, patch=4, image_tokens=9)
    learn_the_form(model, processor, rows, arguments.warm_steps)
    print(f"warm start: {time.monotonic() - begin:.0f} s", flush=True)
    trainer = GRPO(
        model,
        right_count,
        processor=processor,
        group_size=8,
        prompts_per_step=16,
        max_new_tokens=14,
        learning_rate=5e-4,
        max_grad_norm=0.5,
        lr_schedule="cosine",
        max_steps=arguments.steps,
        seed=arguments.seed,
        log_to=(),
    )
    before = trainer.evaluate(held_out)["accuracy"]
    print(f"accuracy on held-out pictures before GRPO: {before:.2f}", flush=True)
    trainer.train(rows)
    after = trainer.evaluate(held_out)["accuracy"]
    others = [
        {**row, "images": other["images"]} for row, other in zip(held_out, held_out[1:] + held_out[:1], strict=True)
    ]
    print(f"with the picture of another row: {trainer.evaluate(others)['accuracy']:.2f}")
    print(f"accuracy on held-out pictures {before:.2f} -> {after:.2f} in {time.monotonic() - begin:.0f} s")


if __name__ == "__main__":
    main()
