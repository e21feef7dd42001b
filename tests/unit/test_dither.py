"""Dithered weights: the same function in bfloat16, in which small updates are seen."""

import copy

import pytest
import torch

from rlox_grpo import GRPO
from rlox_grpo.errors import ConfigError
from rlox_grpo.model.dither import _draw, dither_weights


def test_a_weight_is_drawn_from_the_numbers_that_round_to_it():
    """Uniformly: 1 has bfloat16 neighbours at 1 - 1/256 and 1 + 1/128, so it is the rounding of 511/512 to 257/256."""
    generator = torch.Generator().manual_seed(0)
    for value, low, high in ((1.5, 1.5 - 2**-8, 1.5 + 2**-8), (-3.0, -3 - 2**-7, -3 + 2**-7)):
        drawn = _draw(torch.full((20_000,), value), generator)
        assert (drawn.bfloat16().float() == value).all()
        assert low <= drawn.min() < low + 0.01 * (high - low)
        assert high - 0.01 * (high - low) < drawn.max() <= high
        assert abs(drawn.mean() - value) < 0.02 * (high - low)
    at_a_power = _draw(torch.full((20_000,), 1.0), generator)
    assert (at_a_power.bfloat16().float() == 1).all()
    assert at_a_power.min() >= 511 / 512
    extremes = torch.tensor([0.0, 1e-40, 3.38e38, -3.38e38, float(torch.finfo(torch.bfloat16).max)])
    assert torch.equal(_draw(extremes, generator).bfloat16(), extremes.bfloat16())
    assert torch.isfinite(_draw(extremes, generator)).all()


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
    before, embedding = logits(), model.get_input_embeddings().weight.clone()
    assert dither_weights(model, 0) == sum(
        w.numel() for n, w in model.named_parameters() if "proj" in n and w.dim() == 2
    )
    assert torch.equal(logits(), before)
    assert torch.equal(model.get_input_embeddings().weight, embedding)
    assert move() > 0


def test_the_draws_follow_the_seed(make_tiny_model):
    def draw(seed):
        torch.manual_seed(0)
        model = make_tiny_model("qwen2")
        dither_weights(model, seed)
        return torch.cat([weight.flatten() for weight in model.parameters()])

    assert torch.equal(draw(1), draw(1))
    assert not torch.equal(draw(1), draw(2))


def test_a_run_begins_with_the_same_policy(make_tiny_model):
    """Its first completions and log-probs are those of the run without dither; its weights are others."""
    model = make_tiny_model("qwen2")
    for weight in model.parameters():
        weight.data = weight.data.bfloat16().float()

    def train(**changes):
        torch.manual_seed(0)
        options = {"group_size": 4, "prompts_per_step": 2, "max_new_tokens": 6, "max_steps": 1, "log_to": ()}
        trainer = GRPO(copy.deepcopy(model), share_of_odd, dtype="bfloat16", learning_rate=1e-5, **options, **changes)
        trainer.train(torch.arange(1, 9).view(2, 4))
        groups = [each.group for each in trainer.last_rollout[0]]
        sampled = [(list(c.token_ids), list(c.log_probs)) for group in groups for c in group.completions]
        return sampled, torch.cat([weight.detach().flatten() for weight in trainer.model.parameters()])

    plain, weights = train()
    dithered, drawn = train(dither_weights=True)
    assert dithered == plain
    assert not torch.equal(drawn, weights)


def share_of_odd(completions):
    return [float((completion % 2).float().mean()) for completion in completions]


@pytest.mark.parametrize(
    "more",
    [{"dtype": "float32"}, {"dtype": "bfloat16", "lora_rank": 2}, {"shard_parameters": True}],
)
def test_what_dither_would_not_change_is_an_error(make_tiny_model, more):
    with pytest.raises(ConfigError, match="dither_weights"):
        GRPO(make_tiny_model("qwen2"), share_of_odd, dither_weights=True, log_to=(), **more)


def test_a_resumed_run_is_equal_to_the_bit(make_tiny_model, tmp_path):
    model = make_tiny_model("qwen2")

    def train(folder, steps):
        options = {"group_size": 4, "prompts_per_step": 2, "max_new_tokens": 6, "log_to": (), "kl_coef": 0.1}
        trainer = GRPO(
            copy.deepcopy(model),
            share_of_odd,
            **{"dtype": "bfloat16", "learning_rate": 1e-4, "dither_weights": True, "zero_variance": "keep", **options},
            **{"output_dir": str(tmp_path / folder), "max_steps": steps, "checkpoint_steps": 1},
        )
        trainer.train(torch.arange(1, 9).view(2, 4))
        return torch.cat([weight.detach().flatten() for weight in trainer.model.parameters()])

    whole = train("whole", 3)
    train("parts", 1)
    assert torch.equal(train("parts", 3), whole)
