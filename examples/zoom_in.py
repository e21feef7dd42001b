"""Look closer with a tool that returns a picture: a vision-language model from scratch, on one thread of a CPU.

A picture of 64 × 64 pixels has four quarters of different colours, each with a fine pattern. The model sees a copy of
32 × 32 pixels, in which the patterns are averaged away, and the question ``red?``: which pattern does the red quarter
have? It has to find the quarter in the coarse picture, call ``zoom(part)``, which returns that quarter in full size,
and name the pattern. It first learns the form from examples, then GRPO trains it on the answer alone.

    pip install 'rlox-grpo[vision]'
    python examples/zoom_in.py
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import numpy as np
import torch
import transformers
from PIL import Image
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

from rlox_grpo import GRPO

COLOURS = {"red": (190, 60, 60), "green": (60, 160, 70), "blue": (70, 80, 190), "yellow": (180, 170, 60)}
# Brightness of 2 × 2 pixels; the mean is 0, so a picture of half the size does not show it.
PATTERNS = {
    "h": [[1, 1], [-1, -1]],
    "v": [[1, -1], [1, -1]],
    "c": [[1, -1], [-1, 1]],
    "n": [[0, 0], [0, 0]],
}
SIDE = 32  # pixels of what the model sees, and of a quarter
CALL = '{"name": "zoom", "arguments": {"part": '
TEMPLATE = (
    "{% for m in messages %}{% if m['role'] != 'assistant' %}<|start|>{% endif %}"
    "{% if m['content'] is string %}{{ m['content'] }}{% else %}{% for p in m['content'] %}"
    "{{ '<image>' if p['type'] == 'image' else p['text'] }}{% endfor %}{% endif %}"
    "{% for call in m.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}"
    "<end_of_utterance>{% endfor %}"
)


def draw(parts: list[tuple[str, str]], seed: int) -> np.ndarray:
    """``uint8 [64, 64, 3]``: the quarters ``parts``, a colour and a pattern each, row by row."""
    rng, picture = np.random.default_rng(seed), np.zeros((2 * SIDE, 2 * SIDE, 3))
    for part, (colour, pattern) in enumerate(parts):
        row, column = divmod(part, 2)
        fine = 45.0 * np.tile(PATTERNS[pattern], (SIDE // 2, SIDE // 2))[..., None]
        shade = np.array(COLOURS[colour]) + rng.integers(-25, 26, 3)
        picture[row * SIDE : (row + 1) * SIDE, column * SIDE : (column + 1) * SIDE] = shade + fine
    return np.clip(picture, 0, 255).astype(np.uint8)


def cut(parts: list[tuple[str, str]], seed: int, part: int) -> Image.Image:
    """A quarter of the picture in full size."""
    row, column = divmod(part, 2)
    return Image.fromarray(
        draw(parts, seed)[row * SIDE : (row + 1) * SIDE, column * SIDE : (column + 1) * SIDE].copy()
    )


def make_rows(count: int, seed: int) -> list[dict[str, Any]]:
    """Rows with the coarse picture, what the tool needs to draw the whole one, and the answer."""
    rng, rows = np.random.default_rng(seed), []
    for index in range(count):
        parts = [(str(colour), str(rng.choice(list(PATTERNS)))) for colour in rng.permutation(list(COLOURS))]
        part, drawn = int(rng.integers(4)), seed * 100_000 + index
        fine = draw(parts, drawn).reshape(SIDE, 2, SIDE, 2, 3)
        coarse = Image.fromarray(fine.mean((1, 3)).astype(np.uint8))
        colour, pattern = parts[part]
        rows.append({"prompt": f"{colour}?", "images": [coarse], "parts": parts, "drawn": drawn, "answer": pattern})
    return rows


async def look_closer(row: dict[str, Any], chat: Any) -> float:
    """1 for the pattern of the quarter; the policy may zoom once."""

    def zoom(part: int) -> Image.Image:
        """Show a quarter of the picture in full size.

        Args:
            part: 0 to 3, row by row.
        """
        return cut(row["parts"], row["drawn"], int(part) % 4)

    reply = await chat.turn(row["prompt"], tools=[zoom])
    if reply.tool_calls or reply.parse_error:
        reply = await chat.turn(await chat.call_tools(reply))
    return float(reply.content == row["answer"])


def make_model() -> tuple[transformers.PreTrainedModel, transformers.ProcessorMixin]:
    """An Idefics3 of 0.2 M parameters; a picture is a token for each quarter and 2 marks, a call is 5 tokens."""
    special = ["<pad>", "<|start|>", "<end_of_utterance>", "<image>", "<fake_token_around_image>", "<global-img>"]
    words = [*special, "<tool_call>", "</tool_call>", CALL, "}}", *map(chr, range(32, 127))]
    inner = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="<pad>"))
    inner.pre_tokenizer, inner.decoder = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated"), decoders.Fuse()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=inner,
        eos_token="<end_of_utterance>",
        pad_token="<pad>",
        unk_token="<pad>",
        additional_special_tokens=["<|start|>", *special[3:]],
    )
    tokenizer.add_tokens(["<tool_call>", "</tool_call>", CALL, "}}"])
    tokenizer.chat_template = TEMPLATE
    sizes = {"intermediate_size": 192, "num_hidden_layers": 2, "num_attention_heads": 4}
    text = {"model_type": "llama", "vocab_size": len(tokenizer), "hidden_size": 64, "num_key_value_heads": 2}
    ids = {"eos_token_id": 2, "pad_token_id": 0, "bos_token_id": None}
    vision = {"image_size": SIDE, "patch_size": 4, "hidden_size": 48, **sizes}
    config = transformers.Idefics3Config(
        text_config={**text, **sizes, **ids}, vision_config=vision, scale_factor=4, image_token_id=3, pad_token_id=0
    )
    edge = {"longest_edge": SIDE}
    images = transformers.Idefics3ImageProcessor(size=edge, max_image_size=edge, do_image_splitting=False)
    processor = transformers.Idefics3Processor(images, tokenizer, image_seq_len=4, chat_template=TEMPLATE)
    torch.manual_seed(0)
    model = transformers.Idefics3ForConditionalGeneration(config)
    model.generation_config.eos_token_id = 2
    return model, processor


def learn_the_form(model, processor, rows, steps: int) -> None:
    """Train on transcripts of a call and an answer: cross entropy of what the model says."""
    batches = []
    for start in range(0, len(rows), 64):
        texts, images = [], []
        for row in rows[start : start + 64]:
            part = next(index for index, (colour, _) in enumerate(row["parts"]) if row["prompt"] == f"{colour}?")
            call = f"<tool_call>{CALL}{part}}}}}</tool_call><end_of_utterance>"
            texts.append(f"<|start|><image>{row['prompt']}<end_of_utterance>{call}<|start|><image><end_of_utterance>")
            texts[-1] += f"{row['answer']}<end_of_utterance>"
            images.append([row["images"][0], cut(row["parts"], row["drawn"], part)])
        inputs = processor(text=texts, images=images, padding=True, padding_side="right", return_tensors="pt")
        ids = inputs["input_ids"]
        # A message of the user or a tool is from <|start|> to the next end; the rest is the model's.
        started, ended = (ids == 1).cumsum(1), (ids == 2).cumsum(1)
        is_shown = (started > 0) & (ended - (ids == 2).long() < 2 * started - 1)
        labels = ids.masked_fill(is_shown | (ids == 0), -100)
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
    """Train and print the share of right answers on held-out pictures before and after GRPO."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--warm-steps", type=int, default=200)
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--pictures", type=int, default=1024)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    begin = time.process_time()
    rows, held_out = make_rows(arguments.pictures, arguments.seed), make_rows(256, 10_000 + arguments.seed)
    model, processor = make_model()
    learn_the_form(model, processor, rows, arguments.warm_steps)
    print(f"warm start: {time.process_time() - begin:.0f} s", flush=True)
    trainer = GRPO(
        model,
        environment=look_closer,
        processor=processor,
        group_size=8,
        prompts_per_step=16,
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
    print(f"right answers on held-out pictures {before:.2f} -> {after:.2f} in {time.process_time() - begin:.0f} s of CPU")


if __name__ == "__main__":
    main()
