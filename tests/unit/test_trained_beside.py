"""Parameters that are trained beside a PEFT adapter: biases, and layers that a user has unfrozen."""

import peft
import pytest
import torch

from ranked import PROMPTS, options, share_of_even, tiny_policy
from rlox_grpo import GRPO
from rlox_grpo.batch.build import build_batch, group_tokens


def adapt(**settings):
    torch.manual_seed(0)
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM", **settings)
    return peft.get_peft_model(tiny_policy(), config)


@pytest.mark.parametrize("bias", ["all", "lora_only", "none"])
def test_the_reference_stays_where_biases_are_trained(bias):
    """The model without its adapter has the biases of the policy, so it would be no fixed reference."""
    model = adapt(bias=bias)
    begun = {name: value.clone() for name, value in model.named_parameters()}
    trainer = GRPO(model, share_of_even, **options(None, max_steps=2, learning_rate=0.05))
    group = group_tokens(PROMPTS[0].numpy(), [PROMPTS[1].numpy()])
    batch = build_batch([group], torch.zeros(1).numpy())
    before = trainer.reference(batch)
    trainer.train(PROMPTS)
    assert any("bias" in name and not begun[name].equal(value) for name, value in model.named_parameters()) is (
        bias != "none"
    )
    assert trainer.reference(batch).equal(before)
    assert (trainer.reference.fingerprint is None) is (bias == "none")  # no second copy where none is needed


def test_adapter_off_is_refused_where_biases_are_trained():
    with pytest.raises(ValueError, match=r"reference='adapter_off' and .*q_proj.*bias is trained beside the adapter"):
        GRPO(adapt(bias="all"), share_of_even, **options(None, reference="adapter_off"))


def test_adapter_off_is_for_an_adapter_that_is_passed_too():
    trainer = GRPO(adapt(), share_of_even, **options(None, reference="adapter_off", kl_coef=0.0))
    assert trainer.reference is not None
    with pytest.raises(ValueError, match="reference='adapter_off' and the model has no adapter: set lora_rank or pass"):
        GRPO(tiny_policy(), share_of_even, **options(None, reference="adapter_off"))


def test_what_a_saved_adapter_would_not_contain_is_refused():
    model = adapt()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(parameter.requires_grad or "norm" in name)
    expected = r"layers.0.input_layernorm.weight and 4 more parameters are trained beside the adapter"
    with pytest.raises(ValueError, match=expected):
        GRPO(model, share_of_even, **options(None))
    for settings in ({"bias": "all"}, {"modules_to_save": ["norm", "lm_head"]}, {"trainable_token_indices": [3]}):
        GRPO(adapt(**settings), share_of_even, **options(None))


@pytest.mark.parametrize("settings", [{"bias": "all"}, {"modules_to_save": ["embed_tokens"]}], ids=str)
def test_float32_parameters_beside_frozen_bfloat16_layers_are_trained(settings):
    """Their sums with bfloat16 need autocast, also where the model is only tried at the start."""
    trainer = GRPO(adapt(**settings), share_of_even, **options(None, dtype="bfloat16", max_steps=1))
    dtypes = {parameter.dtype for parameter in trainer.model.parameters()}
    assert dtypes == {torch.float32, torch.bfloat16}
    trainer.train(PROMPTS)
