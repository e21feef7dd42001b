"""Peak device memory of one update with pictures, beside the estimate: tower trained, recomputed, frozen."""

from __future__ import annotations

import gc
from pathlib import Path

import numpy as np
import pytest
import torch
from simulated import SimulatedCuda, swapping_parameters, to_cuda

from rlox_grpo import GRPOConfig
from rlox_grpo.batch.build import build_batch, group_prompt
from rlox_grpo.loss import grpo_loss
from rlox_grpo.model.float32_head import choose_float32_logits
from rlox_grpo.model.forward import make_forward
from rlox_grpo.model.load import checkpoint_activations
from rlox_grpo.model.memory import UpdateLayout, estimate_update, measure_shape
from rlox_grpo.model.processor import freeze_vision
from rlox_grpo.prompts.pictures import PictureReader
from rlox_grpo.types import Prompt
from rlox_grpo.update.torch_updater import TorchUpdater
from tiny_vlms import draw_picture, make_tiny_vlm
from updates import Stepping

MIB = 2**20
SCALE = 8
"""A tower of width 128, whose activations for the 3,072 patches of two pictures outweigh the rest."""


def _measure_update(family, *, checkpointing, freeze, dtype):
    model, processor = make_tiny_vlm(family, SCALE)
    settings = model.config
    # The proportions of real models, so that activations are those of layers and not of details between them.
    settings.vision_config.intermediate_size, settings.text_config.intermediate_size = 512, 768
    settings.vision_config.depth = 4
    if family == "qwen2_5_vl":
        settings.vision_config.fullatt_block_indexes = [1, 3]
    model = type(model)(settings)
    mark = processor.tokenizer.convert_tokens_to_ids("<|image_pad|>")
    processor.image_processor.size = {"shortest_edge": 16 * 16, "longest_edge": 512 * 512}
    config = GRPOConfig.create(dtype=dtype, freeze_vision=freeze)
    shape = measure_shape(model)
    with SimulatedCuda() as gpu, swapping_parameters():
        to_cuda(model)
        if freeze:
            freeze_vision(model)
        if checkpointing:
            checkpoint_activations(model)
            model.train()
        reader = PictureReader(processor, processor.tokenizer, image_token_id=mark, excluded_ids=(mark,))
        autocast = torch.bfloat16 if dtype == "bfloat16" else None
        head = choose_float32_logits(config, model)
        forward = make_forward(model, autocast_dtype=autocast, reader=reader, fp32_lm_head=head)
        updater = Stepping(TorchUpdater(model, forward), grpo_loss)
        for parameter in updater._named.values():
            parameter.grad = torch.zeros_like(parameter)
        updater._optimizer.step()
        updater._free_gradients()
        pictures = tuple(reader.read(np.asarray(draw_picture(k, 384, 256)), Path(), "a picture") for k in range(2))
        groups = [
            group_prompt(
                Prompt(np.array([20, 21, *picture.token_ids, 22], np.int64), index, pictures=(picture,)),
                [np.arange(20, 84)] * 2,
            )
            for index, picture in enumerate(pictures)
        ]
        batch = build_batch(groups, np.ones(4, np.float32), device="cuda")
        tokens = sum(len(group.group.prompt.token_ids) + 2 * 63 for group in groups)
        shown = sum(picture.num_features for picture in pictures)
        layout = UpdateLayout(tokens, 4 * 64, checkpointing=checkpointing, accumulates=False, picture_tokens=shown)
        gc.collect()
        held = gpu.live
        gpu.reset_peak()
        updater.step([batch], 1e-6)
        return gpu.peak, held, estimate_update(shape, config, layout)


@pytest.mark.parametrize(
    ("family", "dtype", "checkpointing", "freeze"),
    [
        pytest.param("qwen3_vl", "bfloat16", False, False, id="trained"),
        pytest.param("qwen2_5_vl", "bfloat16", False, False, id="trained, with gates", marks=pytest.mark.thorough),
        pytest.param("qwen3_vl", "float32", True, False, id="recomputed, float32", marks=pytest.mark.thorough),
        pytest.param("qwen3_vl", "bfloat16", False, True, id="frozen", marks=pytest.mark.thorough),
    ],
)
def test_the_peak_with_pictures_is_near_the_estimate(family, dtype, checkpointing, freeze):
    peak, held, estimate = _measure_update(family, checkpointing=checkpointing, freeze=freeze, dtype=dtype)
    print(f"held {held / MIB:.1f} MiB, peak {peak / MIB:.1f}, estimated {estimate.peak / MIB:.1f}")
    assert held == pytest.approx(estimate.held, rel=0.02)
    assert peak == pytest.approx(estimate.peak, rel=0.15)
