"""What of a LoRA's change is left in the merged weights that an engine gets."""

from __future__ import annotations

import sys

import numpy as np
import pytest
import torch

import ranked
import stub_vllm
from rlox_grpo import GRPO
from rlox_grpo.errors import EngineError
from rlox_grpo.rollout.engines.adapter_changes import CHANGE_SHARE, UNCHANGED, AdapterChanges
from rlox_grpo.rollout.engines.vllm import engine as vllm_engine
from rlox_grpo.rollout.engines.weight_sync import WeightStream

SCALE = 3.0


@pytest.fixture
def adapted(make_tiny_model):
    """A model with adapters of scale 3 on two kinds of layers; ``B`` is zero."""
    import peft

    config = peft.LoraConfig(r=2, lora_alpha=2 * SCALE, target_modules=["q_proj", "embed_tokens"])
    torch.manual_seed(0)
    return peft.get_peft_model(make_tiny_model("qwen2"), config)


def set_adapters(model, size, of="lora_"):
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if of in name and "lora_" in name:
                parameter.normal_().mul_(size)


def read(model, dtype=torch.float32):
    for name, parameter in model.named_parameters():
        if "lora_" not in name:
            parameter.data = parameter.data.to(dtype)
    changes = AdapterChanges()
    stream = WeightStream(model, changes=changes)
    before = len(list(stream))
    assert before == len(list(stream))  # read twice, as an engine does; counted once
    return changes.metrics()


def test_float32_keeps_all_of_a_change(adapted):
    set_adapters(adapted, 0.1)
    metrics = read(adapted)
    assert metrics[CHANGE_SHARE] == pytest.approx(1, abs=1e-3)
    assert metrics[UNCHANGED] == 0


def test_a_change_of_zero_is_no_change(adapted):
    assert read(adapted) == {}


def test_the_share_that_arrives_is_that_of_the_merged_weights():
    """Two adapters of one matrix; half of the change is below the resolution of bfloat16 at 1.0."""
    weight = torch.ones(4, 6, dtype=torch.bfloat16)
    one, other = torch.zeros(4, 6), torch.zeros(4, 6)
    one[:2], other[2:] = 0.5, 1e-4
    merged = weight.clone()
    for update in (one, other):
        merged += 2.0 * update.to(merged.dtype)
    changes = AdapterChanges()
    changes.add("matrix", weight, merged, [(one, 2.0), (other, 2.0)])
    changes.add("other", weight, weight.clone(), [(other, 2.0)])
    changes.finish()
    large, small = 12 * 1.0**2, 12 * 2e-4**2
    assert changes.metrics() == {CHANGE_SHARE: pytest.approx(large / (large + 2 * small)), UNCHANGED: 0.5}


def test_bfloat16_loses_most_of_a_young_adapter():
    """The numbers of docs/guides/lora.md: weights of 0.02, rank 16, B after AdamW steps of 1e-5 and 1e-3 in sum."""
    torch.manual_seed(0)
    weight, a = (torch.randn(256, 256) * 0.02).bfloat16(), (torch.rand(16, 256) * 2 - 1) / 16
    kept = {}
    for steps in (1e-5, 1e-3):
        update = torch.sign(torch.randn(256, 16)) * steps @ a
        merged = weight + 2.0 * update.to(weight.dtype)
        changes = AdapterChanges()
        changes.add("matrix", weight, merged, [(update, 2.0)])
        changes.finish()
        kept[steps] = changes.metrics()[CHANGE_SHARE]
    assert kept[1e-5] < 0.2
    assert kept[1e-3] > 0.9


def test_an_adapter_of_which_nothing_is_left_is_refused(adapted):
    set_adapters(adapted, 1e-9, of="q_proj")  # the embedding of the padding is zero, and takes any change
    with pytest.raises(EngineError) as told:
        read(adapted, torch.bfloat16)
    for words in ("changes 2 matrices by up to ", "equals its base in bfloat16", "Nothing was handed over"):
        assert words in str(told.value)
    assert len(list(WeightStream(adapted))) > 0  # unchecked


@pytest.mark.parametrize("async_steps", [0, 2])
def test_a_run_reports_what_arrives(monkeypatch, async_steps):
    monkeypatch.setitem(sys.modules, "vllm", stub_vllm.make_module())
    monkeypatch.setattr(vllm_engine, "check_vllm_version", lambda: None)
    options = {"engine": "vllm", "max_steps": 3, "kl_coef": 0.0, "lora_rank": 2, "async_steps": async_steps}
    trainer = GRPO(ranked.tiny_policy(), ranked.share_of_even, **ranked.options(None, **options))
    found = []
    monkeypatch.setattr(trainer, "train_step", lambda *draws: found.append(step(*draws)) or found[-1])
    step = trainer._step.take
    trainer.train(ranked.PROMPTS)
    trainer.engine.close()
    assert CHANGE_SHARE not in found[0]  # B is zero
    kept = [metrics[CHANGE_SHARE] for metrics in found if CHANGE_SHARE in metrics]
    np.testing.assert_allclose(kept, 1, atol=1e-3)
    assert async_steps or len(kept) == 2
