"""Look closer with a tool that returns a picture: a vision-language model from scratch, on one thread of a CPU.

A picture of 64 × 64 pixels has four quarters, of which one is red, and each has a fine pattern. The model sees a copy
of 32 × 32 pixels, in which all patterns are averaged away, and has to name the pattern of the red quarter: it finds the
quarter in the small copy, calls ``zoom(quarter)``, which shows one quarter in full size, and says what it sees.

The model first learns the form from examples that often zoom into another quarter and name the pattern there. GRPO then
teaches it where to look, from the answer alone.

    pip install 'rlox-grpo[vision]'
    python examples/zoom_in.py
"""

from __future__ import annotations

import argparse
import time
from functools import cache
from typing import Any

import numpy as np
import torch
from PIL import Image

from rlox_grpo import GRPO
from small_vlm import make_small_vlm

RED, OTHERS = (195, 65, 65), ((65, 170, 75), (70, 80, 190), (120, 120, 120))
# Brightness of 2 × 2 pixels. The mean is 0, so a copy of half the size does not show it.
PATTERNS = {
    "h": ((1, 1), (-1, -1)),
    "v": ((1, -1), (1, -1)),
    "c": ((1, -1), (-1, 1)),
    "n": ((0, 0), (0, 0)),
}
RED_SHARE = 0.5  # of the examples of the warm start; the others look anywhere
SIDE = 32  # pixels of what the model sees, and of a quarter
CALL = '{"name": "zoom", "arguments": {"quarter": '
TEMPLATE = (
    "{% for m in messages %}{% if m['role'] != 'assistant' %}<|start|>{% endif %}"
    "{% if m['content'] is string %}{{ m['content'] }}{% else %}{% for p in m['content'] %}"
    "{{ '<image>' if p['type'] == 'image' else p['text'] }}{% endfor %}{% endif %}"
    "{% for call in m.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}"
    "<end_of_utterance>{% endfor %}"
)


@cache
def draw(patterns: str, red: int, seed: int) -> np.ndarray:
    """``uint8 [2, 32, 2, 32, 3]``: halves by rows and by columns; a quarter has ``patterns[2 * row + column]``."""
    rng, picture = np.random.default_rng(seed), np.zeros((2, SIDE, 2, SIDE, 3))
    for quarter, pattern in enumerate(patterns):
        row, column = divmod(quarter, 2)
        shade = np.array(RED if quarter == red else OTHERS[rng.integers(3)]) + rng.integers(-15, 16, 3)
        fine = 45 * np.tile(PATTERNS[pattern], (SIDE // 2, SIDE // 2))[..., None]
        picture[row, :, column] = shade + fine
    return picture.astype(np.uint8)


def shrink(picture: np.ndarray) -> Image.Image:
    """The copy of half the size: the mean of each 2 × 2 pixels."""
    return Image.fromarray(picture.reshape(SIDE, 2, SIDE, 2, 3).mean((1, 3)).astype(np.uint8))


def make_rows(count: int, seed: int) -> list[dict[str, Any]]:
    """Rows with the small copy, what the tool needs to draw the whole picture, and the answer."""
    rng, rows = np.random.default_rng(seed), []
    for index in range(count):
        patterns, red = "".join(rng.choice(list(PATTERNS), 4)), int(rng.integers(4))
        whole = {"patterns": patterns, "red": red, "seed": seed * 100_000 + index}
        rows.append({"prompt": "red?", "images": [shrink(draw(**whole))], "whole": whole, "answer": patterns[red]})
    return rows


def cut(whole: dict[str, Any], quarter: int) -> Image.Image:
    """A quarter of the picture in full size."""
    row, column = divmod(quarter, 2)
    return Image.fromarray(np.ascontiguousarray(draw(**whole)[row, :, column]))


async def look_closer(row: dict[str, Any], chat: Any) -> float:
    """1 for the pattern of the red quarter. The policy may zoom once."""

    async def zoom(quarter: int) -> Image.Image:
        """Show a quarter of the picture in full size.

        Args:
            quarter: 0 to 3, row by row.
        """
        return cut(row["whole"], quarter % 4)

    reply = await chat.turn(row["prompt"], tools=[zoom])
    if reply.tool_calls:
        reply = await chat.turn(await chat.call_tools(reply))
    return float(reply.content == row["answer"])


def make_model() -> tuple[Any, Any]:
    """The model and its processor. A picture is a token for each quarter and 2 marks, and a call is 6 tokens."""
    words = ["<tool_call>", "</tool_call>", CALL, "}}"]
    model, processor = make_small_vlm(TEMPLATE, side=SIDE, patch=8, image_tokens=4, words=words)
    with torch.no_grad():  # at the usual size, 0.02, the model learns late which token is red, and where it is
        embeddings = model.model.vision_model.embeddings
        embeddings.position_embedding.weight.mul_(20)
        embeddings.patch_embedding.weight.mul_(5)
    return model, processor


def learn_the_form(model: Any, processor: Any, rows: list[dict[str, Any]], steps: int) -> None:
    """Train on episodes that name the pattern of the quarter they show: cross entropy of what the model says.

    Half of them look at the red quarter and the others anywhere, so 5 of 8 show the red one.
    """
    texts, images = [], []
    for row in rows:
        for quarter, pattern in enumerate(row["whole"]["patterns"]):
            call, end = f"<tool_call>{CALL}{quarter}}}}}</tool_call>", "<end_of_utterance>"
            texts.append(f"<|start|><image>red?{end}{call}{end}<|start|><image>{end}{pattern}{end}")
            images.append([row["images"][0], cut(row["whole"], quarter)])
    inputs = processor(text=texts, images=images, return_tensors="pt")  # the texts have equal lengths
    # A message of the user or of a tool is from <|start|> to the next end; the rest is what the model says.
    started, ended = (inputs["input_ids"] == 1).cumsum(1), (inputs["input_ids"] == 2).cumsum(1)
    is_shown = ended - (inputs["input_ids"] == 2).long() < 2 * started - 1
    inputs["labels"] = inputs["input_ids"].masked_fill(is_shown, -100)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.0)
    rng, red = np.random.default_rng(2), np.array([row["whole"]["red"] for row in rows])
    model.train()
    for step in range(steps):
        drawn = rng.integers(len(rows), size=32)
        quarters = np.where(rng.random(32) < RED_SHARE, red[drawn], rng.integers(4, size=32))
        for group in optimizer.param_groups:
            group["lr"] = 3e-3 * min(1, (step + 1) / 30)
        model(**{name: tensor[4 * drawn + quarters] for name, tensor in inputs.items()}).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


def main() -> None:
    """Train and print the share of right answers on held-out pictures before and after GRPO."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--warm-steps", type=int, default=120)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--pictures", type=int, default=256)
    parser.add_argument("--held-out", type=int, default=128)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    rows, held_out = make_rows(arguments.pictures, arguments.seed), make_rows(arguments.held_out, 1000 + arguments.seed)
    model, processor = make_model()
    learn_the_form(model, processor, rows, arguments.warm_steps)
    print(f"warm start: {time.process_time():.0f} s of processor time", flush=True)
    trainer = GRPO(
        model,
        environment=look_closer,
        processor=processor,
        group_size=8,
        prompts_per_step=8,
        max_turns=2,
        max_new_tokens=8,
        learning_rate=5e-4,
        max_grad_norm=0.5,
        max_steps=arguments.steps,
        seed=arguments.seed,
        log_to=(),
    )
    before = trainer.evaluate(held_out)["mean_reward"]
    print(f"right answers on held-out pictures before GRPO: {before:.2f}", flush=True)
    trainer.train(rows)
    after = trainer.evaluate(held_out)["mean_reward"]
    # The tool shows the picture of another row, whose red quarter has any pattern.
    others = [{**row, "whole": held_out[index - 1]["whole"]} for index, row in enumerate(held_out)]
    print(f"if zoom shows another picture: {trainer.evaluate(others)['mean_reward']:.2f} (chance: 0.25)")
    seconds = time.process_time()
    print(f"right answers on held-out pictures {before:.2f} -> {after:.2f}, {seconds:.0f} s of processor time")


if __name__ == "__main__":
    main()
