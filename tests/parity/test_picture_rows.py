"""Prompts with pictures: the packed row, padded rows and the engine against each row forwarded whole with its pixels.

The reference passes ``pixel_values`` to the model's own forward, once for each row, as other trainers do. Weights are
float64; the norms of the models compute in float32, whose rounding is left.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from rlox_grpo.batch.build import build_batch, group_prompt
from rlox_grpo.model import forward as forward_module
from rlox_grpo.model.forward import make_forward
from rlox_grpo.model.vision import Vision
from rlox_grpo.prompts.load import load_prompts
from rlox_grpo.prompts.pictures import PictureReader
from rlox_grpo.rollout.engines.hf.engine import HFEngine
from rlox_grpo.types import Batch, Prompt, Sampling
from tiny_vlms import FAMILIES, draw_picture, make_tiny_vlm

pytestmark = pytest.mark.usefixtures("one_thread")
CLOSE = 2e-6  # float32 rounding in the models' norms, relative to the largest entry; measured 2e-7
EXCLUDED = {"qwen3_vl": (5, 6), "qwen2_5_vl": (5, 6), "idefics3": (3,), "internvl": (5,), "gemma3": (7,)}


def make_reader(family: str, processor: Any) -> PictureReader:
    ids = EXCLUDED[family]
    return PictureReader(processor, processor.tokenizer, image_token_id=ids[0], excluded_ids=ids)


def make(family: str) -> tuple[Any, Any, PictureReader, list[Prompt]]:
    """A model in float64, and prompts with one, no and two pictures; the first and the last share a picture."""
    model, processor = make_tiny_vlm(family)
    reader = make_reader(family, processor)
    wide, square = draw_picture(0, 48, 32), draw_picture(1)
    rows = [
        {"prompt": "how many?", "images": [wide]},
        {"prompt": "nothing"},
        {"prompt": "<image> or <image>?", "images": [square, wide]},
    ]
    return model.double(), processor, reader, load_prompts(rows, processor.tokenizer, reader=reader)


def lay_out(prompts: list[Prompt], *, seed: int = 0) -> Batch:
    """Three completions for each prompt; the first two of a prompt share a prefix."""
    rng = np.random.default_rng(seed)
    groups = []
    for prompt in prompts:
        completions = [rng.integers(20, 90, length) for length in (4, 6, 3)]
        completions[1][:2] = completions[0][:2]
        groups.append(group_prompt(prompt, completions))
    return build_batch(groups, np.zeros(3 * len(prompts)))


def run_whole(model: Any, prompts: list[Prompt], batch: Batch, excluded: tuple[int, ...]) -> Tensor:
    """Log-probs of the completion tokens, ``[M]``; each row alone, with the pixels of its own pictures."""
    flat = []
    for index in range(len(batch.input_ids)):
        prompt, length = prompts[int(batch.prompt_index[index])], int(batch.attention_mask[index].sum())
        ids = batch.input_ids[index : index + 1, :length]
        tensors = [picture.read() for picture in prompt.pictures]
        inputs = {name: torch.cat([each[name] for each in tensors]) for name in (tensors[0] if tensors else ())}
        if "image_grid_thw" in inputs:
            inputs["mm_token_type_ids"] = (ids == excluded[0]).int()
        if type(model).__name__.startswith("Gemma3"):
            inputs["token_type_ids"] = (ids == excluded[0]).int()
        logits = model(input_ids=ids, use_cache=False, **inputs).logits[0]
        logits = logits.index_fill(-1, torch.tensor(excluded), -torch.inf)
        log_probs = torch.log_softmax(logits, -1)
        start, tokens = int(batch.prompt_lengths[index]), ids[0]
        rows = torch.arange(start - 1, length - 1)
        flat.append(log_probs[rows].gather(1, tokens[start:, None])[:, 0])
        # A later call with input_ids alone must not read what this one left.
        model.base_model.rope_deltas = None
    return torch.cat(flat)


def take_gradients(model: Any, log_probs: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    weights = torch.randn(len(log_probs), dtype=log_probs.dtype, generator=torch.Generator().manual_seed(3))
    (log_probs * weights).sum().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def compare(model: Any, batch: Batch, forward: Any, expected: Tensor, gradients: dict[str, Tensor]) -> None:
    log_probs = forward(batch)[0][batch.loss_mask]
    torch.testing.assert_close(log_probs, expected, atol=CLOSE, rtol=0)
    actual = take_gradients(model, log_probs)
    for name, gradient in gradients.items():
        other = actual.get(name, torch.zeros_like(gradient))
        largest = max(1.0, float(gradient.abs().max()))
        torch.testing.assert_close(
            other, gradient, atol=CLOSE * largest, rtol=0, msg=lambda text, n=name: f"{n}: {text}"
        )


@pytest.mark.parametrize("family", [*FAMILIES, "gemma3"])
def test_packed_and_padded_rows_equal_rows_forwarded_whole(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Log-probs, and the gradients of every parameter, those of the vision tower too."""
    model, _, reader, prompts = make(family)
    batch = lay_out(prompts)
    expected = run_whole(model, prompts, batch, reader.excluded_ids)
    gradients = take_gradients(model, expected)
    tower = [name for name in gradients if "visual" in name or "vision" in name]
    assert tower
    assert max(float(gradients[name].abs().max()) for name in tower) > 1e-3
    padded = make_forward(model, reader=reader, share_prompts=False)
    compare(model, batch, padded, expected.detach(), gradients)
    packed = make_forward(model, reader=reader)
    assert packed.shares_prompts is (family != "gemma3")
    if packed.shares_prompts:
        monkeypatch.setattr(forward_module, "is_worth_packing", lambda tree, batch: True)
        compare(model, batch, packed, expected.detach(), gradients)


@pytest.mark.parametrize("family", [*FAMILIES, "gemma3"])
def test_completions_with_pictures_equal_rows_forwarded_whole(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two completions of a prompt have equal ids and different pictures, as of a tool; their picture is not trained."""
    model, _, reader, prompts = make(family)
    pictures = [reader.read(draw_picture(seed), Path(), "picture") for seed in (2, 3)]
    assert np.array_equal(pictures[0].token_ids, pictures[1].token_ids)
    ids = np.concatenate([[30, 31, 32], pictures[0].token_ids, [33, 34, 35]])
    batch = build_batch([group_prompt(prompts[0], [ids, ids]), group_prompt(prompts[1], [ids, ids[:3]])], np.zeros(4))
    shown = [prompts[0].pictures] * 2 + [()] * 2
    later = [(pictures[0],), (pictures[1],), (pictures[1],), ()]
    both = tuple(first + second for first, second in zip(shown, later, strict=True))
    loss_mask = batch.loss_mask.clone()
    loss_mask[:, 3:-3] = False
    batch = replace(batch, pictures=both, loss_mask=loss_mask)
    rows = [replace(prompts[0], pictures=several) for several in both]
    alone = replace(batch, prompt_index=torch.arange(4))
    expected = run_whole(model, rows, alone, reader.excluded_ids)[loss_mask[batch.completion_mask]]
    gradients = take_gradients(model, expected)
    monkeypatch.setattr(forward_module, "is_worth_packing", lambda tree, batch: True)
    compare(model, batch, make_forward(model, reader=reader), expected.detach(), gradients)
    swapped = replace(batch, pictures=(both[1], both[0], *both[2:]))
    moved = make_forward(model, reader=reader)(swapped)[0][loss_mask]
    assert (moved - expected).abs().max() > 100 * CLOSE


@pytest.mark.parametrize("family", FAMILIES)
def test_the_engine_reports_the_trainers_log_probs(family: str) -> None:
    """With shared prefixes and without, for prompts of one, no and two pictures in one prefill; in float32."""
    model, processor, reader, prompts = make(family)
    model.float()
    forward = make_forward(model, reader=reader)
    for shared in (True, False):
        engine = HFEngine(model, processor.tokenizer, reader=reader, eos_token_ids=[2])
        assert engine.shares_prefixes
        engine.shares_prefixes = shared
        groups = engine.generate(prompts, 4, Sampling(8), seed=1)
        scored = [group_prompt(g.prompt, [c.token_ids for c in g.completions]) for g in groups]
        batch = build_batch(scored, np.zeros(12))
        with torch.no_grad():
            log_probs = forward(batch)[0][batch.loss_mask]
        sampled = np.concatenate([c.log_probs for group in groups for c in group.completions])
        np.testing.assert_allclose(sampled, log_probs.numpy(), atol=2e-5, rtol=0)  # float32 in two orders


def test_negative_controls(monkeypatch: pytest.MonkeyPatch) -> None:
    """What goes wrong without an error elsewhere moves log-probs by far more than the tolerance above.

    Positions of text, no delta after the prompt, and two pictures swapped.
    """
    model, _, reader, prompts = make("qwen3_vl")
    batch = lay_out(prompts)
    mask = batch.loss_mask
    monkeypatch.setattr(forward_module, "is_worth_packing", lambda tree, batch: True)
    forwards = [make_forward(model, reader=reader, share_prompts=shares) for shares in (True, False)]
    with torch.no_grad():
        expected = run_whole(model, prompts, batch, reader.excluded_ids)
        locate = Vision.locate

        def measure(changed: Batch = batch) -> list[float]:
            return [float((forward(changed)[0][mask] - expected).abs().max()) for forward in forwards]

        assert max(measure()) < CLOSE
        monkeypatch.setattr(Vision, "locate", lambda self, row: (np.arange(len(row[0]))[None].repeat(3, 0), 0))
        assert min(measure()) > 1e-2
        monkeypatch.setattr(Vision, "locate", lambda self, row: (locate(self, row)[0], 0))
        assert min(measure()) > 1e-2
        monkeypatch.setattr(Vision, "locate", locate)
    swapped = tuple(tuple(reversed(pictures)) for pictures in batch.pictures)
    with torch.no_grad():
        assert min(measure(replace(batch, pictures=swapped))) > 1e-2


def test_micro_batches_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """All groups at once, single groups and halves of groups have the same gradients, with the tower's."""
    model, _, reader, prompts = make("qwen2_5_vl")
    forward = make_forward(model, reader=reader)
    rng = np.random.default_rng(0)
    completions = [[rng.integers(20, 90, 4) for _ in range(4)] for _ in prompts]

    def add_gradients(pieces: list[tuple[int, slice]]) -> dict[str, Tensor]:
        model.zero_grad()
        for index, rows in pieces:
            chosen = completions[index][rows]
            batch = build_batch([group_prompt(prompts[index], chosen)], np.zeros(len(chosen)))
            weights = torch.arange(len(batch.loss_mask))[:, None] + 1.0 + (rows.start or 0)
            (forward(batch)[0] * weights).sum().backward()
        return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}

    whole = add_gradients([(index, slice(0, 4)) for index in range(3)])
    halves = add_gradients([(index, slice(start, start + 2)) for index in range(3) for start in (0, 2)])
    for name, gradient in whole.items():
        largest = max(1.0, float(gradient.abs().max()))
        torch.testing.assert_close(halves[name], gradient, atol=CLOSE * largest, rtol=0)
