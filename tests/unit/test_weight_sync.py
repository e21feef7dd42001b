"""Which weights leave the trainer, under which names, and which are refused."""

from __future__ import annotations

import weakref

import pytest
import torch

from rlox_grpo.model.untie import untie_adapted_layers
from rlox_grpo.rollout.engines.weight_sync import (
    WeightMismatchError,
    build_manifest,
    check_weights,
    collect_weights,
    digest_weights,
)


def shapes(weights):
    return {name: tuple(tensor.shape) for name, tensor in weights}


@pytest.mark.parametrize(
    "architecture", ["qwen2", "qwen3", "llama", "mistral", "gemma2", "gemma3_text", "phi3", "gpt2"]
)
@pytest.mark.parametrize("tied", [True, False])
def test_the_names_are_those_of_a_checkpoint(make_tiny_model, tmp_path, architecture, tied):
    from safetensors import safe_open

    model = make_tiny_model(architecture, tie_word_embeddings=tied)
    model.save_pretrained(tmp_path)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        saved = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118  # no mapping
    assert shapes(collect_weights(model)) == saved
    assert build_manifest(model.config) == saved
    assert ("lm_head.weight" in saved) is not tied


def test_weights_carry_no_gradient_and_no_copy(make_tiny_model):
    model = make_tiny_model("qwen2")
    for name, tensor in collect_weights(model):
        assert not tensor.requires_grad
        assert tensor.data_ptr() == model.get_parameter(name).data_ptr()


def test_adapters_are_merged_under_the_base_models_names(make_tiny_model):
    import peft

    model = make_tiny_model("qwen2")
    before = {name: tensor.clone() for name, tensor in collect_weights(model)}
    config = peft.LoraConfig(r=2, lora_alpha=6, target_modules=["q_proj", "down_proj", "embed_tokens"])
    torch.manual_seed(0)
    adapted = peft.get_peft_model(model, config)
    assert all(torch.equal(tensor, before[name]) for name, tensor in collect_weights(adapted))  # B is zero at first
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                parameter.normal_()
    merged = dict(collect_weights(adapted))
    assert shapes(merged.items()) == shapes(before.items())
    layer = adapted.base_model.model.model.layers[1].self_attn.q_proj
    name = "model.layers.1.self_attn.q_proj.weight"
    # ΔW = (alpha / r) B A
    expected = before[name] + 3 * layer.lora_B["default"].weight @ layer.lora_A["default"].weight
    torch.testing.assert_close(merged[name], expected.detach(), rtol=1e-5, atol=1e-5)
    changed = {name for name in before if not torch.equal(merged[name], before[name])}
    assert changed == {
        "model.embed_tokens.weight",
        *(f"model.layers.{i}.{part}.weight" for i in (0, 1) for part in ("self_attn.q_proj", "mlp.down_proj")),
    }
    ids = torch.arange(12)[None]
    with torch.no_grad():
        with_adapter = adapted(ids).logits
        model = make_tiny_model("qwen2")
        model.load_state_dict(merged)
        torch.testing.assert_close(model(ids).logits, with_adapter, rtol=1e-3, atol=1e-3)
    with adapted.disable_adapter():  # as the reference's forward does, while an engine's thread reads
        assert all(torch.equal(tensor, merged[name]) for name, tensor in collect_weights(adapted))


def test_whole_parameters_stand_in_for_a_models_shards(make_tiny_model):
    import peft

    model = make_tiny_model("qwen2")
    whole = [(name, parameter.detach() + 1) for name, parameter in model.named_parameters()]
    given = dict(collect_weights(model, whole))
    assert all(torch.equal(given[name], tensor) for name, tensor in whole)
    assert shapes(given.items()) == build_manifest(model.config)
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))
    expected = {name: tensor.clone() for name, tensor in collect_weights(adapted)}
    whole = [(name, parameter.detach().clone()) for name, parameter in adapted.named_parameters()]
    with torch.no_grad():
        for parameter in adapted.parameters():
            parameter.zero_()  # what a rank of ZeRO-3 could not use either
    given = dict(collect_weights(adapted, whole))
    assert all(torch.equal(given[name], tensor) for name, tensor in expected.items())


def test_gathered_parameters_of_an_adapted_model_are_held_a_layer_at_a_time(make_tiny_model):
    import peft

    model = make_tiny_model("qwen2", num_hidden_layers=4)
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False))
    expected = {name: tensor.clone() for name, tensor in collect_weights(adapted)}
    made, gathered, most = [], [], 0

    def gather():
        for name, parameter in adapted.named_parameters():
            tensor = parameter.detach().clone()
            made.append(weakref.ref(tensor))
            gathered.append(name)
            yield name, tensor
            del tensor

    for name, tensor in collect_weights(adapted, gather()):
        assert torch.equal(tensor, expected.pop(name))
        most = max(most, sum(reference() is not None for reference in made))
    assert not expected
    assert gathered == [name for name, _ in adapted.named_parameters()]
    assert most <= 5  # weight, bias, A, B, and the one that comes next


def test_a_digest_sees_every_bit_and_every_place(make_tiny_model):
    weights = [("a", torch.arange(6.0).view(2, 3)), ("b", torch.ones(4, dtype=torch.bfloat16))]
    digest = digest_weights(weights)
    assert len(digest) == 16
    assert digest_weights([(name, tensor.clone()) for name, tensor in weights]) == digest
    changed = torch.arange(6.0).view(2, 3)
    changed[1, 2] = torch.nextafter(changed[1, 2], torch.tensor(9.0))
    swapped = torch.tensor([[1.0, 0.0, 2.0], [3.0, 4.0, 5.0]])
    others = [
        [("a", changed), weights[1]],
        [("a", swapped), weights[1]],
        [("a", weights[0][1].view(3, 2)), weights[1]],
        [("c", weights[0][1]), weights[1]],
        [weights[0], ("b", torch.ones(4, dtype=torch.float16))],
        [("a", -weights[0][1]), weights[1]],
        weights[:1],
    ]
    assert len({digest, *map(digest_weights, others)}) == len(others) + 1
    big = torch.zeros(2**24 + 3)
    assert digest_weights([("a", big)]) != digest_weights([("a", big.index_fill(0, torch.tensor([2**24 + 1]), 1.0))])


@pytest.mark.parametrize("more", [{"use_dora": True}, {"lora_bias": True}, {"alora_invocation_tokens": [1]}])
def test_an_adapter_with_more_than_two_matrices_is_refused(make_tiny_model, more):
    """A bias of B, for example, would not be in the merged weights."""
    import peft

    config = peft.LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM", **more)
    with pytest.raises(ValueError, match=r"q_proj.*only plain LoRA adapters can be merged"):
        list(collect_weights(peft.get_peft_model(make_tiny_model("qwen2"), config)))


def test_a_mismatch_names_the_first_few():
    expected = dict.fromkeys("abcdefgh", (2, 3))
    right = [(name, torch.zeros(2, 3, dtype=torch.bfloat16)) for name in expected]
    check_weights(right, expected)
    with pytest.raises(WeightMismatchError, match=r"none was handed over: missing: c, d, e, f and 2 more$"):
        check_weights(right[:2], expected)
    with pytest.raises(WeightMismatchError, match=r"unknown: z; of another shape: a \(3, 2\) instead of \(2, 3\)$"):
        check_weights([("a", torch.zeros(3, 2)), *right[1:], ("z", torch.zeros(1))], expected)
    # What ZeRO-3 leaves of a parameter outside of a gather.
    with pytest.raises(WeightMismatchError, match=r"b \(0,\) instead of"):
        check_weights([right[0], ("b", torch.zeros(0)), *right[2:]], expected)


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`")
@pytest.mark.parametrize("target", ["lm_head", "embed_tokens"])
def test_an_adapter_on_one_of_two_tied_layers_is_refused(make_tiny_model, target):
    """The merged weights of the two differ, and a tied model has room for one of them."""
    import peft

    adapted = peft.get_peft_model(
        make_tiny_model("qwen2", tie_word_embeddings=True), peft.LoraConfig(r=2, target_modules=[target])
    )
    with pytest.raises(ValueError, match=r"is tied to another layer, and an adapter is on one of them"):
        list(collect_weights(adapted))


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`")
@pytest.mark.parametrize("targets", [["lm_head"], ["embed_tokens"], ["q_proj", "lm_head", "embed_tokens"]])
@pytest.mark.parametrize("gathers", [False, True])
def test_untied_layers_carry_their_own_merged_weights(make_tiny_model, targets, gathers):
    import peft

    model, ids = make_tiny_model("qwen2", tie_word_embeddings=True), torch.arange(12)[None]
    settings = peft.LoraConfig(r=2, target_modules=targets, init_lora_weights=False)
    adapted = peft.get_peft_model(model, settings).eval()
    with torch.no_grad():
        wanted = adapted(ids).logits
        untie_adapted_layers(adapted)
        assert torch.equal(adapted(ids).logits, wanted)
        whole = adapted.named_parameters() if gathers else None
        merged = dict(collect_weights(adapted, whole))
        assert shapes(merged.items()) == build_manifest(model.config)  # of a model with two matrices
        loaded = make_tiny_model("qwen2", tie_word_embeddings=False).eval()
        loaded.load_state_dict(merged)
        # float32: the merged product has another order of additions; a lost adapter is above 0.1
        torch.testing.assert_close(loaded(ids).logits, wanted, rtol=1e-4, atol=1e-4)
        with adapted.disable_adapter():
            tied = make_tiny_model("qwen2", tie_word_embeddings=True).eval()
            assert torch.equal(adapted(ids).logits, tied(ids).logits)


def test_layers_that_are_trained_whole_are_refused(make_tiny_model):
    """Their names are peft's, and a checkpoint with them would load a new output layer."""
    import peft

    model = make_tiny_model("qwen2", tie_word_embeddings=False)
    settings = peft.LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["lm_head"])
    with pytest.raises(ValueError, match=r"lm_head is trained whole .*: only plain LoRA adapters"):
        list(collect_weights(peft.get_peft_model(model, settings)))
    tokens = peft.LoraConfig(r=2, target_modules=["q_proj"], trainable_token_indices=[3])
    with pytest.raises(ValueError, match="only plain LoRA adapters"):
        list(collect_weights(peft.get_peft_model(make_tiny_model("qwen2", tie_word_embeddings=False), tokens)))
