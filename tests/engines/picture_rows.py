"""Prompts and episodes with pictures for tiny models, and the distance of an engine's log-probs from the trainer's."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from rlox_grpo.model.vision import Vision, find_language_model
from rlox_grpo.rollout.engines.canary import Canary, choose_tokens, draw_canary
from rlox_grpo.types import Prompt
from tiny_vlms import draw_picture

SCALE = 4  # heads of 32, which vLLM's CPU kernels take


def make_prompt(reader, index, *sizes):
    """A prompt with a picture of noise for each size."""
    noise = [np.asarray(draw_picture(10 * index + at, *size)) for at, size in enumerate(sizes)]
    pictures = tuple(reader.read(picture, Path(), f"picture {index}") for picture in noise)
    entries = [{"type": "image"}] * len(sizes) + [{"type": "text", "text": "how many?"}]
    text = reader.render([{"role": "user", "content": entries}], add_generation_prompt=True)
    ids = np.array(reader.processor.tokenizer(text, add_special_tokens=False)["input_ids"], np.int64)
    return Prompt(reader.expand(ids, pictures, f"prompt {index}"), index, pictures=pictures)


def make_prompts(reader):
    """One picture, two of different sizes, none, and a picture that another prompt has too."""
    prompts = [make_prompt(reader, 0, (32, 32)), make_prompt(reader, 1, (48, 32), (32, 32)), make_prompt(reader, 2)]
    shared = Prompt(prompts[0].token_ids, 3, pictures=prompts[0].pictures)
    return [*prompts, shared]


@torch.no_grad()
def measure_gap(model, reader, groups):
    """The largest difference of the completions' log-probs from those of each row forwarded alone, with its pixels."""
    gaps = []
    for group in groups:
        prompt, start = group.prompt, len(group.prompt.token_ids)
        for completion in group.completions:
            ids = torch.tensor(np.concatenate([prompt.token_ids, completion.token_ids]))[None]
            inputs = {}
            if prompt.pictures:
                pixels = [picture.read() for picture in prompt.pictures]
                inputs = {name: torch.cat([tensors[name] for tensors in pixels]) for name in pixels[0]}
                marks = (ids == reader.image_token_id).int()
                vision = Vision(model, reader)
                names = {"mm_token_type_ids": vision.has_axes, "token_type_ids": vision.attends_both_ways}
                inputs |= {name: marks for name, is_taken in names.items() if is_taken}
            logits = model(input_ids=ids, **inputs).logits[0, start - 1 : -1]
            logits[:, list(reader.excluded_ids)] = -torch.inf
            expected = torch.log_softmax(logits, -1).gather(1, torch.tensor(completion.token_ids)[:, None])[:, 0]
            gaps.append(np.abs(expected.numpy() - completion.log_probs).max())
    return max(gaps)


@torch.no_grad()
def shake_tower(model, scale=0.1):
    """Move the weights of the vision tower and its projection alone."""
    generator = torch.Generator().manual_seed(5)
    inner = {id(parameter) for parameter in find_language_model(model).parameters()}
    inner |= {id(model.get_output_embeddings().weight)}
    for parameter in model.parameters():
        if id(parameter) not in inner:
            parameter.add_(torch.randn(parameter.shape, generator=generator) * scale)


def make_canary(model, reader):
    """The prompt that checks the weights, with a picture, and the log-probs of ``model``."""
    picture = reader.read(draw_canary(), Path(), "a picture")
    tail = choose_tokens(102, excluded={*reader.excluded_ids, reader.placeholder_id})
    row = torch.tensor([[*picture.token_ids.tolist(), *tail]])
    with torch.no_grad():
        marks = (row == reader.image_token_id).int()
        logits = model(input_ids=row, mm_token_type_ids=marks, **picture.read()).logits[0]
    values = torch.log_softmax(logits[:-1], -1).gather(1, row[0, 1:, None])[:, 0]
    return Canary(row[0].tolist(), values[-len(tail) :].numpy(), "float32", None, (picture,))


async def look_again(row, chat):
    """A picture in the second turn, and text in the third."""
    await chat.turn(row["prompt"])
    later = {"type": "image", "image": draw_picture(row["later"], 48, 32)}
    await chat.turn([{"role": "user", "content": [{"type": "text", "text": "now"}, later]}])
    reply = await chat.turn("and?")
    return float(sum(reply.text.encode()) % 11)


def share_of_letters(completions):
    texts = [completion[0]["content"] for completion in completions]
    return [sum(map(str.isalpha, text)) / (len(text) + 1) + 0.01 * len(text) for text in texts]
