"""The memory estimate of mixtures of experts, against the bytes that a forward pass saves and peft's adapters."""

import warnings

import pytest
import torch
from test_forward import grouped

from experts import FAMILIES, tiny_experts
from rlox_grpo.config.schema import GRPOConfig
from rlox_grpo.model.forward import make_forward
from rlox_grpo.model.memory import UpdateLayout, _count_saved_bytes, estimate_update, measure_shape

SIZES = {"hidden_size": 128, "intermediate_size": 192, "num_attention_heads": 8, "max_position_embeddings": 256}
LARGER = {
    "qwen3_moe": {"moe_intermediate_size": 48, "num_experts": 16, "num_experts_per_tok": 4, "head_dim": 16},
    "mixtral": {},
    "olmoe": {},
    "qwen2_moe": {"moe_intermediate_size": 48, "shared_expert_intermediate_size": 96},
}


def count_saved(model, dtype):
    """Bytes that a packed forward pass of 672 tokens saves for its backward pass, without the weights."""
    forward, batch = make_forward(model, autocast_dtype=dtype), grouped([40] * 2, [[75] * 4] * 2)
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    saved = {}

    def keep(tensor):
        saved[tensor.untyped_storage().data_ptr()] = tensor  # the tensor too, so that its address is not used again
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        forward(batch)
    return sum(tensor.untyped_storage().nbytes() for at, tensor in saved.items() if at not in weights)


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("family", LARGER)
def test_saved_activations_are_those_of_the_active_experts(family, dtype):
    sizes = {**SIZES, **LARGER[family]}
    models = [tiny_experts(family, num_hidden_layers=layers, **sizes) for layers in (1, 2)]
    one, two = (count_saved(model, dtype) for model in models)
    config = GRPOConfig.create(dtype="float32" if dtype is None else "bfloat16")
    estimate = 672 * _count_saved_bytes(measure_shape(models[0]), config, in_bfloat16=False)
    # the tolerance of tests/cuda_sim/test_memory.py; the estimate leaves out the norms of queries and keys
    assert estimate == pytest.approx(two - one, rel=0.15)


@pytest.mark.parametrize("family", FAMILIES)
def test_weights_gradients_and_moments_count_every_expert(family):
    model = tiny_experts(family)
    shape, parameters = measure_shape(model), sum(parameter.numel() for parameter in model.parameters())
    memory = estimate_update(shape, GRPOConfig.create(dtype="float32"), UpdateLayout(tokens=64, predicted=64))
    assert (memory.weights, memory.gradients, memory.moments) == (4 * parameters, 4 * parameters, 8 * parameters)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("targets", ["all-linear", ("q_proj", "o_proj")])
def test_an_adapter_is_counted_with_its_stacked_experts(family, targets):
    peft = pytest.importorskip("peft", reason="pip install 'rlox-grpo[lora]'")
    if family == "deepseek_v3" and targets != "all-linear":
        targets = ("o_proj",)
    wanted = targets if isinstance(targets, str) else list(targets)
    settings = peft.LoraConfig(r=3, target_modules=wanted, task_type="CAUSAL_LM")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # peft's, of a rank that it does apply
        adapted = peft.get_peft_model(tiny_experts(family), settings)
    trained = sum(parameter.numel() for parameter in adapted.parameters() if parameter.requires_grad)
    assert 3 * measure_shape(tiny_experts(family), targets).adapted_width == trained
