"""Losses and gradients beside TRL 1.16's own ``_compute_loss``, called on doubles of a model's outputs, in float64."""

from __future__ import annotations

import re
from collections import defaultdict
from pathlib import Path
from types import MethodType, SimpleNamespace
from typing import Any

import pytest
import torch

from rlox_grpo.advantages import component_advantages, group_advantages
from rlox_grpo.loss import grpo_loss
from rlox_grpo.types import Batch, PolicyWeights, StepTotals, TokenLogProbs

pytest.importorskip("trl", reason="TRL 1.16 needs Python 3.11")

from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

ROWS, TOKENS, MAX_LENGTH = 6, 7, 11
# Sums of 30 numbers of size 1 in float64; TRL's quantile of entropies is float32, which moves no token here.
EXACT = {"rtol": 1e-12, "atol": 1e-12}
SINGLE = {"rtol": 1e-6, "atol": 1e-7}  # TRL's temperatures of sapo are float32


def tensors(seed: int = 0) -> dict[str, torch.Tensor]:
    """Ratios from 0.4 to 3 and advantages of both signs, so that every clip is reached; ragged rows."""
    generator = torch.Generator().manual_seed(seed)

    def normal() -> torch.Tensor:
        return torch.randn(ROWS, TOKENS, generator=generator, dtype=torch.float64)

    old = -torch.rand(ROWS, TOKENS, generator=generator, dtype=torch.float64) * 3
    lengths = torch.tensor([7, 1, 4, 6, 3, 5])
    return {
        "log_probs": old + 0.5 * normal(),
        "old": old,
        "ref": old + 0.4 * normal(),
        "entropy": normal().abs() + 0.1,
        "advantages": torch.tensor([1.2, -0.7, 0.3, -1.9, 0.8, -0.1], dtype=torch.float64),
        "mask": torch.arange(TOKENS) < lengths[:, None],
    }


def trls(given: dict[str, torch.Tensor], **options: Any) -> tuple[torch.Tensor, ...]:
    """The loss of TRL's trainer and its gradients by log-probs and entropies, one process, one micro-batch."""
    args = SimpleNamespace(
        delta=options.pop("delta", None),
        use_bias_correction_kl=options.pop("use_bias_correction_kl", False),
        steps_per_generation=1,
        sapo_temperature_pos=1.0,
        sapo_temperature_neg=1.05,
        vespo_k_pos=2.0,
        vespo_lambda_pos=3.0,
        vespo_k_neg=3.0,
        vespo_lambda_neg=2.0,
    )
    accelerator = SimpleNamespace(
        num_processes=1,
        sync_gradients=True,
        gather=lambda tensor: tensor,
        reduce=lambda tensor, reduction: tensor,
        pad_across_processes=lambda tensor, dim, pad_index: tensor,
    )
    log_probs, entropy = given["log_probs"].clone().requires_grad_(), given["entropy"].clone().requires_grad_()
    settings = {
        "loss_type": "grpo",
        "importance_sampling_level": "token",
        "epsilon_low": 0.2,
        "epsilon_high": 0.28,
        "beta": 0.0,
        "top_entropy_quantile": 1.0,
        "entropy_coef": 0.0,
        **options,
    }
    trainer = SimpleNamespace(
        **settings,
        args=args,
        accelerator=accelerator,
        model=SimpleNamespace(training=True),
        current_gradient_accumulation_steps=1,
        max_completion_length=MAX_LENGTH,
        use_vllm=False,
        vllm_importance_sampling_correction=False,
        off_policy_mask_threshold=None,
        aux_loss_enabled=False,
        use_adaptive_entropy=False,
        _entropy_bonus_enabled=settings["entropy_coef"] != 0,
        _metrics={"train": defaultdict(list)},
        _get_per_token_logps_and_entropies=lambda *_, **__: (log_probs, entropy, None),
        get_gamma_weights=GRPOTrainer.get_gamma_weights,
    )
    trainer.get_high_entropy_mask = MethodType(GRPOTrainer.get_high_entropy_mask, trainer)
    mask = given["mask"].long()
    prompts = torch.zeros(ROWS, 1, dtype=torch.int64)
    inputs = {
        "prompt_ids": prompts,
        "prompt_mask": prompts + 1,
        "completion_ids": torch.zeros_like(mask),
        "completion_mask": mask,
        "advantages": given["advantages"],
        "old_per_token_logps": given.get("old"),
        "ref_per_token_logps": given["ref"],
        "num_items_in_batch": mask.sum(),
    }
    loss = GRPOTrainer._compute_loss(trainer, None, inputs)
    return loss.detach(), *torch.autograd.grad(loss, [log_probs, entropy], allow_unused=True)


def next_batch(given: dict[str, torch.Tensor], policy_mask: torch.Tensor | None = None) -> Batch:
    mask = given["mask"]
    ids = torch.zeros(ROWS, TOKENS + 1, dtype=torch.int64)
    return Batch(
        input_ids=ids,
        prompt_lengths=torch.ones(ROWS, dtype=torch.int64),
        completion_ids=ids[:, 1:],
        completion_mask=mask,
        loss_mask=mask,
        advantages=given["advantages"],
        row_index=torch.arange(ROWS),
        prompt_index=torch.arange(ROWS),
        totals=StepTotals(num_loss_tokens=float(mask.sum()), num_sequences=float(ROWS)),
        log_probs=TokenLogProbs(old=given.get("old"), ref=given["ref"]),
        policy=PolicyWeights(mask=policy_mask),
    )


def ours(
    given: dict[str, torch.Tensor], policy_mask: torch.Tensor | None = None, **options: Any
) -> tuple[torch.Tensor, ...]:
    log_probs, entropy = given["log_probs"].clone().requires_grad_(), given["entropy"].clone().requires_grad_()
    settings = {"clip_high": 0.28, "max_length": MAX_LENGTH, **options}
    loss = grpo_loss(log_probs, next_batch(given, policy_mask), entropy=entropy, **settings).loss
    return loss.detach(), *torch.autograd.grad(loss, [log_probs, entropy], allow_unused=True)


def assert_same(found: tuple[Any, ...], expected: tuple[Any, ...], loss_type: str = "") -> None:
    for one, other in zip(found, expected, strict=True):
        if other is None or not other.any():
            assert one is None or not one.any()
        else:
            torch.testing.assert_close(one, other, **(SINGLE if loss_type == "sapo" else EXACT))


SEQUENCE = {"importance_sampling_level": "sequence"}
LOSS_TYPES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "grpo": ({"loss_type": "grpo"}, {"loss_aggregation": "sequence_mean"}),
    "bnpo": ({"loss_type": "bnpo"}, {"loss_aggregation": "token_mean"}),
    "dapo": ({"loss_type": "dapo"}, {"loss_aggregation": "token_mean"}),
    "dr_grpo": ({"loss_type": "dr_grpo"}, {"loss_aggregation": "fixed_length"}),
    "cispo": (
        {"loss_type": "cispo", "epsilon_high": 1.5},
        {"policy_loss": "cispo_cap", "clip_high": 1.5, "loss_aggregation": "token_mean"},
    ),
    "sapo": ({"loss_type": "sapo"}, {"policy_loss": "sapo", "loss_aggregation": "sequence_mean"}),
    "luspo": ({"loss_type": "luspo", **SEQUENCE}, {"policy_loss": "gspo", "loss_aggregation": "sequence_sum"}),
    "vespo": ({"loss_type": "vespo"}, {"policy_loss": "vespo", "loss_aggregation": "token_mean"}),
    "gspo": ({"loss_type": "grpo", **SEQUENCE}, {"policy_loss": "gspo"}),
    "gspo by tokens": ({"loss_type": "dapo", **SEQUENCE}, {"policy_loss": "gspo", "loss_aggregation": "token_mean"}),
}
PENALTIES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "no penalty": ({}, {}),
    "penalty": ({"beta": 0.3}, {"kl_coef": 0.3}),
    "corrected penalty": (
        {"beta": 0.3, "use_bias_correction_kl": True},
        {"kl_coef": 0.3, "kl_bias_correction": True},
    ),
}


@pytest.mark.parametrize("penalty", PENALTIES)
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_loss_and_gradient_of_each_loss_type(loss_type: str, penalty: str) -> None:
    theirs, mine = LOSS_TYPES[loss_type]
    their_penalty, my_penalty = PENALTIES[penalty]
    given = tensors()
    assert_same(ours(given, **mine, **my_penalty), trls(given, **theirs, **their_penalty), loss_type)


def test_the_migration_page_names_these_options() -> None:
    page = (Path(__file__).resolve().parents[2] / "docs/migration/from_trl.md").read_text(encoding="utf-8")
    section = page.partition("\n### loss_type: ")[2].partition("\n### ")[0]
    defaults = {"policy_loss": "clip", "loss_aggregation": "sequence_mean"}
    rows = re.findall(r"^\| (`.*?) \| `(\w+)`.* \| `(\w+)` \|$", section, re.MULTILINE)
    named = {loss_type: tuple(choices) for cell, *choices in rows[1:] for loss_type in re.findall(r"`(\w+)`", cell)}
    for loss_type, choices in named.items():
        assert choices == tuple({**defaults, **LOSS_TYPES[loss_type][1]}[name] for name in defaults), loss_type
    assert set(named) == {theirs["loss_type"] for theirs, _ in LOSS_TYPES.values()}


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_one_update_per_batch(loss_type: str) -> None:
    """Without old log-probs both take the current ones: every ratio is 1, with its gradient."""
    theirs, mine = LOSS_TYPES[loss_type]
    given = tensors()
    del given["old"]
    assert_same(ours(given, **mine), trls(given, **theirs), loss_type)


def test_two_sided_clipping() -> None:
    given = tensors()
    found = ours(given, delta=1.4)
    assert_same(found, trls(given, delta=1.4))
    assert found[0] != ours(given)[0]


def test_entropy_bonus() -> None:
    given = tensors()
    assert_same(ours(given, entropy_coef=0.2), trls(given, entropy_coef=0.2))


def test_policy_mask_of_the_uncertain_tokens() -> None:
    from rlox_grpo.loss.entropy import top_entropy_masks

    given = tensors()
    (policy_mask,) = top_entropy_masks([given["entropy"]], [given["mask"]], share=0.3)
    found = ours(given, policy_mask, kl_coef=0.3)
    assert_same(found, trls(given, top_entropy_quantile=0.3, beta=0.3))
    assert int(policy_mask.sum()) == 8  # of 26: quantile 0.7 lies between the 18th and the 19th
    assert found[0] != ours(given, kl_coef=0.3)[0]


# --- reward scalings: a real trainer's step, with rewards put in where it calls its reward functions ---


@pytest.mark.parametrize("how", ["group", "batch", "none", "normalize_then_sum"])
def test_reward_scalings(how: str, make_tiny_model: Any, byte_tokenizer: Any, tmp_path: Any) -> None:
    generator = torch.Generator().manual_seed(1)
    rewards = torch.randn(8, 2, generator=generator)
    rewards[1, 0] = torch.nan  # a function that said None
    rewards[6] = torch.nan  # all of them did
    weights = [1.0, 0.3]

    class Told(GRPOTrainer):
        def _calculate_rewards(self, *_: Any) -> Any:
            return rewards

        def _generate_and_score_completions(self, inputs: Any) -> Any:
            made = super()._generate_and_score_completions(inputs)
            self.advantages = made["advantages"].clone()
            return made

    summed = how != "normalize_then_sum"
    trainer = Told(
        model=make_tiny_model("qwen2", vocab_size=259, eos_token_id=1),
        processing_class=byte_tokenizer,
        reward_funcs=[lambda completions, **_: None, lambda completions, **_: None],
        args=GRPOConfig(
            output_dir=str(tmp_path),
            max_steps=1,
            num_generations=4,
            per_device_train_batch_size=8,
            max_completion_length=4,
            report_to="none",
            save_strategy="no",
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            disable_tqdm=True,
            reward_weights=weights,
            scale_rewards=how if summed else "group",
            multi_objective_aggregation="sum_then_normalize" if summed else how,
        ),
        train_dataset=Dataset.from_list([{"prompt": "a"}, {"prompt": "b"}]),
    )
    trainer.train()
    if summed:
        total = (rewards.double() * torch.tensor(weights).double()).nansum(1)
        total[6] = torch.nan
        found = group_advantages(total, 4, scaling=how)
    else:
        found = component_advantages(rewards.T.numpy(), weights, 4)
    # TRL sums in float32.
    torch.testing.assert_close(torch.from_numpy(found).float(), trainer.advantages, rtol=1e-5, atol=1e-5)
    assert trainer.advantages.abs().max() > 0.5
