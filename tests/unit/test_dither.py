"""Dithered weights: the same function in bfloat16, in which small updates are seen."""

import copy
import shutil

import pytest
import torch

from rlox_grpo import GRPO
from rlox_grpo.errors import CheckpointError, ConfigError
from rlox_grpo.model import dither
from rlox_grpo.model.blank import give_storage, make_blank
from rlox_grpo.model.dither import dither_weights, draw_weights, make_dither


def draw(values, name="weight", start=0, everything=True):
    drawn = torch.as_tensor(values).clone()
    draw_weights(drawn, name, start, everything=everything)
    return drawn


def test_a_weight_is_drawn_from_the_numbers_that_round_to_it():
    """Uniformly: 1 has bfloat16 neighbours at 1 - 1/256 and 1 + 1/128, so it is the rounding of 511/512 to 257/256."""
    for value, low, high in ((1.5, 1.5 - 2**-8, 1.5 + 2**-8), (-3.0, -3 - 2**-7, -3 + 2**-7)):
        drawn = draw(torch.full((20_000,), value))
        assert (drawn.bfloat16().float() == value).all()
        assert low <= drawn.min() < low + 0.01 * (high - low)
        assert high - 0.01 * (high - low) < drawn.max() <= high
        assert abs(drawn.mean() - value) < 0.02 * (high - low)
    at_a_power = draw(torch.full((20_000,), 1.0))
    assert (at_a_power.bfloat16().float() == 1).all()
    assert 511 / 512 <= at_a_power.min() < 0.9982
    assert 1.0038 < at_a_power.max() <= 257 / 256
    extremes = torch.tensor([0.0, -0.0, 1e-40, 3.38e38, -3.38e38, float(torch.finfo(torch.bfloat16).max), 2.0**-126])
    for name in map(str, range(20)):
        assert torch.equal(draw(extremes, name).bfloat16(), extremes.bfloat16())
        assert torch.isfinite(draw(extremes, name)).all()


def test_weights_off_the_grid_of_bfloat16_are_unchanged():
    """They are anywhere within their rounding already: dither of dithered weights changes nothing."""
    values = torch.linspace(0.1, 0.2, 300)
    assert torch.equal(draw(values, everything=False), values)
    drawn = draw(values.bfloat16().float(), everything=False)
    assert not torch.equal(drawn, values.bfloat16().float())
    assert torch.equal(draw(drawn, everything=False), drawn)


def test_a_part_of_a_weight_has_the_draws_of_the_whole(monkeypatch):
    monkeypatch.setattr(dither, "_CHUNK", 64)
    values = torch.linspace(0.1, 0.2, 300)
    whole = draw(values)
    assert len(set((whole - values.bfloat16().float()).tolist())) > 250
    for start, stop in ((0, 300), (0, 10), (60, 70), (64, 128), (200, 300), (299, 300), (7, 7)):
        assert torch.equal(draw(values[start:stop], start=start), whole[start:stop])
    assert not torch.equal(draw(values, name="other"), whole)


def test_weights_that_are_read_from_files_are_drawn_as_those_of_a_whole_model(make_tiny_model, tmp_path):
    """As each rank reads its rows (FSDP2) or its flat shard (ZeRO 3); weights of a checkpoint are read unchanged."""
    model = make_tiny_model("qwen2").bfloat16().float()
    model.save_pretrained(tmp_path / "model")
    blank, stored = make_blank(str(tmp_path / "model"))
    first = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    stored.change, names = make_dither(blank)
    dither_weights(model)
    name = "model.layers.0.mlp.up_proj.weight"
    assert name in names
    whole = dict(model.named_parameters())
    assert not torch.equal(whole[name], first[name])
    give_storage(blank, torch.device("cpu"))
    stored.fill(blank)
    assert all(torch.equal(weight, whole[key]) for key, weight in blank.named_parameters())
    rows, flat = torch.empty_like(whole[name][5:9]), whole[name].detach().flatten()
    stored.read_into(name, rows, 5)
    assert torch.equal(rows, whole[name][5:9])
    assert torch.equal(stored.read_range(name, 13, 101), flat[13:101])
    model.save_pretrained(tmp_path / "checkpoint")
    stored.take(tmp_path / "checkpoint/model.safetensors")
    assert torch.equal(stored.read_range(name, 13, 101), flat[13:101])


@pytest.mark.parametrize("tied", [True, False])
def test_the_function_in_bfloat16_is_unchanged_and_sees_small_updates(make_tiny_model, tied):
    model = make_tiny_model("qwen2", tie_word_embeddings=tied)
    for weight in model.parameters():
        weight.data = weight.data.bfloat16().float()
    ids = torch.arange(1, 9)[None]

    def logits():
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            return model(ids).logits

    def move():
        """Half of a thousandth of each weight: an eighth to a quarter of a spacing."""
        first = {name: weight.detach().clone() for name, weight in model.named_parameters()}
        before = logits()
        with torch.no_grad():
            for name, weight in model.named_parameters():
                if "proj" in name:
                    weight *= 1 + 2**-11
        moved = logits()
        with torch.no_grad():
            for name, weight in model.named_parameters():
                weight.copy_(first[name])
        return float((moved - before).abs().sum())

    assert move() == 0
    transposed = model.model.layers[0].mlp.up_proj.weight
    transposed.data = transposed.data.T.contiguous().T
    before, embedding = logits(), model.get_input_embeddings().weight.clone()
    assert dither_weights(model) == sum(w.numel() for n, w in model.named_parameters() if "proj" in n and w.dim() == 2)
    assert torch.equal(logits(), before)
    assert torch.equal(model.get_input_embeddings().weight, embedding)
    assert move() > 0


def test_a_run_begins_with_the_same_policy(make_tiny_model):
    """Its first completions and log-probs are those of the run without dither; its weights are others."""
    model = make_tiny_model("qwen2")
    for weight in model.parameters():
        weight.data = weight.data.bfloat16().float()

    def train(**changes):
        torch.manual_seed(0)
        options = {"group_size": 4, "prompts_per_step": 2, "max_new_tokens": 6, "max_steps": 1, "log_to": ()}
        options = {"dtype": "bfloat16", "learning_rate": 1e-5, **options, **changes}
        trainer = GRPO(copy.deepcopy(model), share_of_odd, **options)
        trainer.train(torch.arange(1, 9).view(2, 4))
        groups = [each.group for each in trainer.last_rollout[0]]
        sampled = [(list(c.token_ids), list(c.log_probs)) for group in groups for c in group.completions]
        return sampled, torch.cat([weight.detach().flatten() for weight in trainer.model.parameters()])

    plain, weights = train(dither_weights=False)
    dithered, drawn = train()
    assert dithered == plain
    assert not torch.equal(drawn, weights)
    assert torch.equal(train(dither_weights=True)[1], drawn)
    assert torch.equal(train(dtype="float32")[1], train(dtype="float32", dither_weights=False)[1])


def share_of_odd(completions):
    return [float((completion % 2).float().mean()) for completion in completions]


def test_a_model_without_linear_layers_that_are_trained_is_an_error(make_tiny_model):
    model = make_tiny_model("gpt2")
    GRPO(model, share_of_odd, dtype="bfloat16", log_to=())
    with pytest.raises(ConfigError, match="dither_weights=True, and GPT2LMHeadModel has no linear layers"):
        GRPO(model, share_of_odd, dtype="bfloat16", dither_weights=True, log_to=())


@pytest.mark.parametrize(
    "more",
    [{"dtype": "float32"}, {"dtype": "bfloat16", "lora_rank": 2}, {}],
)
def test_what_dither_would_not_change_is_an_error(make_tiny_model, more):
    with pytest.raises(ConfigError, match="dither_weights"):
        GRPO(make_tiny_model("qwen2"), share_of_odd, dither_weights=True, log_to=(), **more)


def test_an_adapter_is_not_drawn(make_tiny_model):
    peft = pytest.importorskip("peft")

    def make():
        torch.manual_seed(0)
        return peft.get_peft_model(make_tiny_model("qwen2"), peft.LoraConfig(target_modules=["q_proj"]))

    before = [weight.clone() for weight in make().parameters() if weight.requires_grad]
    trainer = GRPO(make(), share_of_odd, dtype="bfloat16", log_to=())
    after = [weight for weight in trainer.model.parameters() if weight.requires_grad]
    assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))
    with pytest.raises(ConfigError, match="the model has an adapter"):
        GRPO(make(), share_of_odd, dtype="bfloat16", dither_weights=True, log_to=())


def test_a_resumed_run_is_equal_to_the_bit(make_tiny_model, tmp_path):
    model = make_tiny_model("qwen2").bfloat16().float()

    def train(folder, steps, **changes):
        options = {"group_size": 4, "prompts_per_step": 2, "max_new_tokens": 6, "log_to": (), "kl_coef": 0.1}
        options |= {"dtype": "bfloat16", "learning_rate": 1e-4, "dither_weights": True, "zero_variance": "keep"}
        options |= {"output_dir": str(tmp_path / folder), "max_steps": steps, "checkpoint_steps": 1, **changes}
        trainer = GRPO(copy.deepcopy(model), share_of_odd, **options)
        trainer.train(torch.arange(1, 9).view(2, 4))
        return torch.cat([weight.detach().flatten() for weight in trainer.model.parameters()])

    whole = train("whole", 3)
    train("parts", 1)
    assert torch.equal(train("parts", 3), whole)
    # Its reference has dithered weights, and with another precision the weights of the model.
    for changes in ({"dither_weights": False}, {"dither_weights": "auto", "dtype": "float32"}):
        names = [*changes, "fp32_lm_head"]
        with pytest.raises(CheckpointError, match=r"frozen reference: not those of the run.*resume_changes=\["):
            train("parts", 4, **changes)
        train("parts", 4, **changes, resume_changes=names)
        shutil.rmtree(tmp_path / "parts/checkpoints/step_000004")
