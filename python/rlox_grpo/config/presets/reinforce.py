"""Presets of the REINFORCE family: RLOO, REINFORCE++ and P3O."""

from __future__ import annotations

from collections.abc import Mapping

from rlox_grpo.config.presets.preset import (
    GROUP_MEAN,
    NO_KL,
    ONE_UPDATE,
    OURS,
    PLAIN_SAMPLING,
    PPO_CLIP,
    TRL_OPTIMIZER,
    Defect,
    Preset,
)

_FEYNRL = "FeynRL, examples/rar_science/qwen2.5-1.5b-instruct/train_p3o.yaml"
_VERL = {"ddof": 1, "std_epsilon": 1e-8, "loss_aggregation": "token_mean", "dual_clip": 3.0}

REINFORCE: Mapping[str, Preset] = {
    "rloo": Preset(
        source="Back to Basics, arXiv:2402.14740",
        summary="REINFORCE on whole sequences, leave-one-out baseline, KL in the reward.",
        sections={
            "eq. 8": {"baseline": "leave_one_out", "reward_scaling": "none"},
            "REINFORCE on whole sequences": {"policy_loss": "reinforce", "loss_aggregation": "sequence_sum"},
            "reward minus β log(π/π_ref)": {"kl_in": "reward", "kl_estimator": "k1", "reference": "frozen"},
            "TRL 1.16, RLOOConfig": {
                "kl_coef": 0.05,
                "group_size": 2,
                "max_new_tokens": 512,
                **PLAIN_SAMPLING,
                "learning_rate": 1e-6,
                **TRL_OPTIMIZER,
                "mask_truncated": False,
                **ONE_UPDATE,
            },
        },
    ),
    "reinforce_pp": Preset(
        source="REINFORCE++, arXiv:2501.03262",
        summary="No groups: rewards minus KL, normalised over the batch, with PPO's clipped loss.",
        sections={
            "section 3": {
                "baseline": "batch",
                "reward_scaling": "batch",
                "policy_loss": "clip",
                **PPO_CLIP,
                "kl_in": "reward",
                "kl_estimator": "k1",
                "reference": "frozen",
                "group_size": 1,
            },
            "verl 0.9.1, reinforce_plus_plus": _VERL,
            OURS: {"kl_coef": 0.001, "delta": None, "prompts_per_step": 128, "mini_batches": 4},
        },
        defects=(
            Defect(
                "A difference from the paper: the paper gives each token the KL from there to the end and "
                "normalises over tokens. Here each completion has one advantage, which includes its whole KL and "
                "is normalised over completions."
            ),
        ),
    ),
    "reinforce_pp_baseline": Preset(
        source="REINFORCE++, arXiv:2501.03262, variant for reasoning",
        summary="Rewards minus the group mean, divided by the batch's standard deviation; k2 penalty in the loss.",
        sections={
            "section 3, REINFORCE++-Baseline": {
                "baseline": "mean",
                "reward_scaling": "whiten",
                "policy_loss": "clip",
                **PPO_CLIP,
                "kl_in": "loss",
                "kl_estimator": "k2",
                "kl_bias_correction": False,
                "reference": "frozen",
            },
            "verl 0.9.1, reinforce_plus_plus_baseline": _VERL,
            OURS: {"kl_coef": 0.001, "delta": None, "mini_batches": 4},
        },
    ),
    "p3o": Preset(
        source=f"Trust the Batch, arXiv:2605.12380, and {_FEYNRL}",
        summary="The effective sample size of a step's ratios caps their weights and sets a penalty against the "
        "sampler's policy; no other bound.",
        sections={
            "arXiv:2605.12380; FeynRL, algs/P3O/p3o.py": {"policy_loss": "p3o", "bypass_old_log_probs": True},
            "FeynRL, rollouts/base.py": {**GROUP_MEAN, "ddof": 1, "std_epsilon": 1e-8, "zero_variance": "keep"},
            "FeynRL, configs/load.py": {"min_lr_ratio": 0.1},
            "train_p3o.yaml": {
                "loss_aggregation": "token_mean",
                **NO_KL,
                "prompts_per_step": 128,
                "group_size": 8,
                **ONE_UPDATE,
                "temperature": 0.7,
                "top_p": 0.8,
                "max_new_tokens": 4096,
                "learning_rate": 1e-6,
                "lr_schedule": "cosine",
                "weight_decay": 0.01,
                "adam_beta1": 0.9,
                "adam_beta2": 0.95,
                "max_grad_norm": 1.0,
            },
            "train_p3o.yaml: a tenth of 50 epochs of one step": {"warmup_steps": 5},
        },
        defects=(
            Defect(
                "A difference: the source takes the sample size of each micro-batch over all ranks; here that of the "
                "whole optimizer step, so that it does not depend on the micro-batches."
            ),
            Defect("A difference: the script also sets top_k to 20, which the preset does not."),
        ),
    ),
}
