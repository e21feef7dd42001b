"""Mixtures of experts: several families of transformers train exactly as their rows alone, are saved and loaded."""

import pytest
import torch
from safetensors.torch import load_file
from test_forward import grouped, row_by_row
from transformers import AutoModelForCausalLM

from experts import FAMILIES, VOCABULARY, tiny_experts
from rlox_grpo import GRPO
from rlox_grpo.model.forward import make_forward
from rlox_grpo.rollout.engines.weight_sync import collect_weights

PROMPTS = torch.arange(24).reshape(8, 3) % VOCABULARY
# A token in ten ends a completion: lengths are ragged.
ENDS = {"eos_token_id": [3, 4, 5, 6]}


def share_of_even(completions, prompts):
    """Share of even tokens, with a bonus for length, so that rewards differ in every group."""
    return [float((ids % 2 == 0).float().mean()) + 0.01 * len(ids) for ids in completions]


def make_trainer(family="qwen3_moe", *, model=None, **changes):
    options = {"group_size": 4, "prompts_per_step": 2, "learning_rate": 1e-2, "max_new_tokens": 6, "max_steps": 2}
    policy = tiny_experts(family, **ENDS) if model is None else model
    return GRPO(policy, share_of_even, **{**options, "log_to": (), **changes})


def logits(model):
    with torch.no_grad():
        return model.eval()(torch.arange(12)[None] * 3 % VOCABULARY).logits


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_rows_equal_rows_alone_in_every_gradient(family):
    model = tiny_experts(family)
    forward = make_forward(model, temperature=0.8)
    assert forward.shares_prompts
    batch = grouped([5, 9, 1], [[4, 1, 7], [3, 3, 3, 3], [2, 6, 1, 4, 4]], letters=2)
    log_probs, expected = forward(batch)[0], row_by_row(model, batch, 0.8)
    # float32 with another batch shape and order of sums: 1e-5 of log-probs of up to 9
    torch.testing.assert_close(log_probs, expected, rtol=1e-5, atol=1e-5)
    weights = torch.linspace(-1, 1, log_probs.numel()).view_as(log_probs)
    trained = dict(model.named_parameters())
    packed = torch.autograd.grad((log_probs * weights).sum(), list(trained.values()))
    alone = torch.autograd.grad((expected * weights).sum(), list(trained.values()))
    for name, left, right in zip(trained, packed, alone, strict=True):
        assert float((left - right).abs().max()) <= 1e-5 * float(right.abs().max()), name


@pytest.mark.parametrize("family", FAMILIES)
def test_every_weight_is_trained_and_saved_in_the_names_of_the_family(family, tmp_path):
    trainer = make_trainer(family, kl_coef=0.1)
    before = {name: parameter.detach().clone() for name, parameter in trainer.model.named_parameters()}
    metrics = trainer.train(PROMPTS)
    # the built-in engine decodes token by token and the trainer packs rows: the same log-probs up to rounding
    assert metrics["mismatch/gap_mean"] < 1e-5
    assert not [name for name, parameter in trainer.model.named_parameters() if torch.equal(parameter, before[name])]
    trainer.save(tmp_path)
    # The file has a matrix for each expert under the names of the published checkpoints.
    names = {name for file in tmp_path.glob("*.safetensors") for name in load_file(file)}
    expert = {"mixtral": "block_sparse_moe.experts.0.w1.weight", "granitemoe": "input_linear.weight"}
    assert [name for name in names if name.endswith(expert.get(family, "mlp.experts.0.gate_proj.weight"))]
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    # equal weights; the loaded model has the attention and products of transformers instead of the packed ones
    torch.testing.assert_close(logits(loaded), logits(trainer.model), rtol=1e-5, atol=1e-5)


def test_recomputed_activations_train_the_same_weights():
    plain, recomputed = make_trainer(), make_trainer(gradient_checkpointing=True)
    for trainer in (plain, recomputed):
        trainer.train(PROMPTS)
    for left, right in zip(plain.model.parameters(), recomputed.model.parameters(), strict=True):
        assert torch.equal(left, right)


def test_bfloat16_trains_float32_weights():
    trainer = make_trainer(dtype="bfloat16")
    metrics = trainer.train(PROMPTS)
    # one token in thirty has another expert in the two roundings; bfloat16 has 8 bits
    assert 1e-5 < metrics["mismatch/gap_mean"] < 0.1
    assert all(parameter.dtype == torch.float32 for parameter in trainer.model.parameters())
    assert all(torch.isfinite(parameter).all() for parameter in trainer.model.parameters())


def list_adapted(model):
    names = (name for name, _ in model.named_parameters() if "lora_A" in name and "layers.1." in name)
    return sorted({name.partition("layers.1.")[2].partition(".lora_A")[0] for name in names})


ATTENTION = ["self_attn.k_proj", "self_attn.o_proj", "self_attn.q_proj", "self_attn.v_proj"]
# peft wraps the stacked experts twice, once for each matrix.
EXPERTS = ["mlp.experts", "mlp.experts.base_layer", "mlp.gate"]


@pytest.mark.parametrize(
    ("family", "adapted"),
    [
        ("qwen3_moe", EXPERTS + ATTENTION),
        ("mixtral", EXPERTS + ATTENTION),
        ("olmoe", EXPERTS + ATTENTION),
        ("glm4_moe", EXPERTS + ATTENTION),
        ("granitemoe", ATTENTION),
        (
            "qwen2_moe",
            [
                *("mlp.shared_expert.down_proj", "mlp.shared_expert.gate_proj", "mlp.shared_expert.up_proj"),
                *("mlp.shared_expert_gate", *ATTENTION),
            ],
        ),
    ],
)
def test_lora_adapts_and_merges(family, adapted, tmp_path):
    pytest.importorskip("peft", reason="pip install 'rlox-grpo[lora]'")
    trainer = make_trainer(family, lora_rank=2, kl_coef=0.1)
    assert list_adapted(trainer.model) == adapted
    assert trainer.train(PROMPTS)["mismatch/gap_mean"] < 1e-5
    trainer.save(tmp_path / "merged", merged=True)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert (logits(merged) - logits(tiny_experts(family, **ENDS))).abs().max() > 0.1
    # The merge rounds W + B·A once; the adapter adds it in each forward pass.
    torch.testing.assert_close(logits(merged), logits(trainer.model), rtol=1e-4, atol=1e-4)


def test_an_adapter_on_experts_reaches_an_engine_with_weights_of_its_own():
    pytest.importorskip("peft", reason="pip install 'rlox-grpo[lora]'")
    trainer = make_trainer(lora_rank=2, async_steps=1)
    trainer.train(PROMPTS)
    weights = dict(collect_weights(trainer.model))
    assert weights.keys() == tiny_experts("qwen3_moe").state_dict().keys()
    copy = tiny_experts("qwen3_moe", **ENDS)
    copy.load_state_dict(weights)
    torch.testing.assert_close(logits(copy), logits(trainer.model), rtol=1e-4, atol=1e-4)


MLP = ("gate_proj", "up_proj", "down_proj")
SHARED = ["mlp.shared_experts.down_proj", "mlp.shared_experts.gate_proj", "mlp.shared_experts.up_proj"]
STACKED = ["mlp.experts.down_proj", "mlp.experts.gate_up_proj"]
DENSE = ["mlp.down_proj", "mlp.gate_proj", "mlp.up_proj"]


@pytest.mark.parametrize(
    ("family", "targets", "left_out", "missing"),
    [
        ("qwen3_moe", "all-linear", [], []),
        ("qwen3_moe", MLP, [], []),
        ("qwen3_moe", ("q_proj", "v_proj"), [], []),
        ("mixtral", ("q_proj", *MLP), STACKED, ["down_proj", "gate_proj", "up_proj"]),
        ("qwen2_moe", "all-linear", STACKED, []),
        ("qwen2_moe", MLP, STACKED, []),
        ("granitemoe", "all-linear", [f"block_sparse_{name}".replace("mlp", "moe") for name in STACKED], []),
        ("glm4_moe", "all-linear", [*DENSE, *SHARED], []),
        ("deepseek_v3", MLP, [*DENSE, *SHARED], []),
        ("deepseek_v3", ("q_proj", "v_proj"), [], ["v_proj"]),
        ("deepseek_v3", ".*q_proj", [], []),  # an expression names what it means
    ],
)
def test_an_adapter_that_leaves_named_layers_out_says_so(family, targets, left_out, missing, caplog):
    pytest.importorskip("peft", reason="pip install 'rlox-grpo[lora]'")
    make_trainer(family, lora_rank=2, lora_target_modules=targets)
    lines = [record.getMessage() for record in caplog.records if "lora_target_modules" in record.getMessage()]
    parts = [f"leaves out {', '.join(sorted(left_out))}"] * bool(left_out)
    parts += [f"has no layer for {', '.join(missing)}"] * bool(missing)
    assert [line.partition("; the adapter has ")[0] for line in lines] == (
        [f"lora_target_modules={targets!r} {' and '.join(parts)}"] if parts else []
    )


def test_lora_on_attention_alone():
    pytest.importorskip("peft", reason="pip install 'rlox-grpo[lora]'")
    trainer = make_trainer(lora_rank=2, lora_target_modules=("q_proj", "k_proj", "v_proj", "o_proj"))
    assert list_adapted(trainer.model) == ATTENTION
