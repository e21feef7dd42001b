"""Presets of the libraries, and what they call CISPO."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from rlox_grpo.config.presets.preset import OURS, Defect, Preset, cited

_TRL_RUN: Mapping[str, Any] = {
    "group_size": 8,
    "max_new_tokens": 512,
    "temperature": 1.0,
    "top_p": 1.0,
    "mask_truncated": False,
    "updates_per_batch": 1,
    "learning_rate": 1e-6,
}
_TRL_ARGUMENTS: Mapping[str, Any] = {
    "lr_schedule": "linear",
    "warmup_steps": 0,
    "min_lr_ratio": 0.0,
    "weight_decay": 0.0,
    "adam_beta1": 0.9,
    "adam_beta2": 0.999,
    "max_grad_norm": 1.0,
}
_VERL_RUN: Mapping[str, Any] = {
    "prompts_per_step": 1024,
    "group_size": 5,
    "mini_batches": 4,
    "max_new_tokens": 1024,
    "learning_rate": 1e-6,
}
_VERL_DEFAULTS: Mapping[str, Any] = {
    "clip_low": 0.2,
    "clip_high": 0.2,
    "updates_per_batch": 1,
    "temperature": 1.0,
    "top_p": 1.0,
    "lr_schedule": "constant",
    "warmup_steps": 0,
    "min_lr_ratio": 0.0,
    "weight_decay": 0.01,
    "adam_beta1": 0.9,
    "adam_beta2": 0.999,
    "max_grad_norm": 1.0,
}
_ONE_PROMPT = "8 completions a device, one device, no accumulation"

LIBRARIES: Mapping[str, Preset] = MappingProxyType(
    {
        "rlox": Preset(
            source="rlox 1.2.0, rlox/algorithms/grpo.py",
            summary="A times the sum of a completion's log-probs, KL of weight 0.1 from the sums; any plain module.",
            reward="yours, a function of token tensors",
            choices=cited(
                (
                    "compute_batch_group_advantages: zeros where sd < 1e-8",
                    {"baseline": "mean", "reward_scaling": "group", "ddof": 0, "std_epsilon": 0.0},
                ),
                (
                    "GRPO.train_step",
                    {
                        "policy_loss": "reinforce",
                        "loss_aggregation": "sequence_sum",
                        "zero_variance": "keep",
                        "kl_in": "loss",
                        "kl_bias_correction": False,
                        "mask_truncated": False,
                        "updates_per_batch": 1,
                        "mini_batches": 1,
                    },
                ),
                ("verl's k1+: its value, with the slope of a divergence", {"kl_estimator": "k1+"}),
                (
                    "GRPO.__init__",
                    {
                        "reference": "frozen",
                        "group_size": 4,
                        "kl_coef": 0.1,
                        "learning_rate": 1e-4,
                        "max_new_tokens": 8,
                        "weight_decay": 0.0,
                        "adam_beta1": 0.9,
                        "adam_beta2": 0.999,
                        "max_grad_norm": 1.0,
                    },
                ),
                ("GRPO.train: every prompt in every step, to this many", {"prompts_per_step": 1024}),
                (OURS, {"temperature": 1.0, "top_p": 1.0, "prompt_template": None}),
                (
                    "GRPO.__init__: a plain Adam",
                    {"lr_schedule": "constant", "warmup_steps": 0, "min_lr_ratio": 0.0},
                ),
            ),
            published=cited(("GRPO.train_step: kl_diff", {"kl_estimator": "k1"})),
            defects=(
                Defect(
                    "Its penalty is k1 in the loss, whose slope is that of the log-probs alone and has expectation 0; "
                    "here it has the slope of k2.",
                    True,
                ),
                Defect(
                    "It sums over prompt and padding too. Over a prompt the policy term cancels, as advantages add up "
                    "to 0 in a group; the penalty does not. Here both are of the completion, whose log-probs are all "
                    "that a forward gives.",
                    False,
                ),
                Defect(
                    "The KL that it logs is weighted by probability; here it is the estimator's own. No loss sees it.",
                    False,
                ),
            ),
        ),
        "trl": Preset(
            source="TRL 1.16.0, trl/trainer/grpo_config.py and grpo_trainer.py",
            summary="Its defaults: token mean over the whole batch, no KL, constant groups kept in the denominator.",
            reward="yours",
            choices=cited(
                (
                    "GRPOTrainer._generate_and_score_completions",
                    {"baseline": "mean", "ddof": 1, "std_epsilon": 1e-4, "zero_variance": "keep"},
                ),
                (
                    "GRPOTrainer._compute_loss, loss_type dapo",
                    {"policy_loss": "clip", "loss_aggregation": "token_mean"},
                ),
                (
                    "GRPOConfig",
                    {
                        "reward_scaling": "group",
                        "clip_low": 0.2,
                        "clip_high": 0.2,
                        "delta": None,
                        "kl_coef": 0.0,
                        "kl_bias_correction": True,
                        **_TRL_RUN,
                    },
                ),
                ("it has none", {"dual_clip": None}),
                ("GRPOTrainer.__init__: none when beta is 0", {"reference": "auto"}),
                (_ONE_PROMPT, {"prompts_per_step": 1, "mini_batches": 1}),
                ("transformers.TrainingArguments", _TRL_ARGUMENTS),
                ("prompts are the data set's", {"prompt_template": None}),
            ),
        ),
        "cispo_trl": Preset(
            source="TRL 1.16.0, loss_type cispo",
            summary="What TRL calls CISPO: the weight is at most epsilon_high itself, 5.",
            reward="yours",
            choices=cited(
                (
                    "GRPOTrainer._generate_and_score_completions",
                    {"baseline": "mean", "ddof": 1, "std_epsilon": 1e-4, "zero_variance": "keep"},
                ),
                ("GRPOTrainer._compute_loss", {"policy_loss": "cispo_cap", "loss_aggregation": "token_mean"}),
                ("GRPOConfig's advice for epsilon_high", {"clip_high": 5.0}),
                ("GRPOConfig", {"reward_scaling": "group", "kl_coef": 0.0, "kl_bias_correction": True, **_TRL_RUN}),
                ("GRPOTrainer.__init__: none when beta is 0", {"reference": "auto"}),
                (OURS, {"prompts_per_step": 16, "mini_batches": 4}),
                ("transformers.TrainingArguments", _TRL_ARGUMENTS),
                ("prompts are the data set's", {"prompt_template": None}),
            ),
        ),
        "verl": Preset(
            source="verl 0.9.1, examples/grpo_trainer, Qwen2-7B on GSM8K",
            summary="Token mean, dual clip, k3 of weight 0.001 in the loss, four mini-batches of 256 prompts.",
            reward='published("verl_gsm8k")',
            choices=cited(
                (
                    "compute_grpo_outcome_advantage",
                    {
                        "baseline": "mean",
                        "reward_scaling": "group",
                        "ddof": 1,
                        "std_epsilon": 1e-6,
                        "zero_variance": "keep",
                    },
                ),
                ("compute_policy_loss_vanilla", {"policy_loss": "clip", "delta": None, "mask_truncated": False}),
                (
                    "actor.yaml, optim/fsdp.yaml and rollout.yaml",
                    {"dual_clip": 3.0, "loss_aggregation": "token_mean", **_VERL_DEFAULTS},
                ),
                (
                    "the example's overrides",
                    {
                        "kl_in": "loss",
                        "kl_coef": 0.001,
                        "kl_estimator": "k3",
                        **_VERL_RUN,
                    },
                ),
                ("kl_penalty", {"kl_bias_correction": False}),
                ("ref.yaml: weights as loaded", {"reference": "frozen"}),
                ("examples/data_preprocess/gsm8k.py", {"prompt_template": "verl_gsm8k"}),
            ),
            published=cited(
                ("kl_penalty_forward: low_var_kl", {"kl_estimator": "k3_clamped"}),
                ("optim/fsdp.yaml, for all of model.parameters()", {"decay_vectors": True}),
            ),
            defects=(
                Defect("Its k3 stops at 10, where a token that has drifted far is no longer pulled back.", True),
                Defect("Its weight decay is on every parameter, norms and biases too.", True),
                Defect(
                    "A group of one keeps its reward as advantage, and float32 means leave a residue where all "
                    "rewards are equal; here both are 0. Groups are of five, and the kernel's statistics are float64.",
                    False,
                ),
            ),
        ),
        "cispo_verl": Preset(
            source="verl 0.9.1, loss_mode cispo",
            summary="What verl calls CISPO: the weight is clipped on both sides, at 1 ± 0.2 by its defaults.",
            reward="yours",
            choices=cited(
                (
                    "compute_grpo_outcome_advantage",
                    {
                        "baseline": "mean",
                        "reward_scaling": "group",
                        "ddof": 1,
                        "std_epsilon": 1e-6,
                        "zero_variance": "keep",
                    },
                ),
                ("compute_policy_loss_cispo", {"policy_loss": "cispo_clip", "mask_truncated": False}),
                (
                    "actor.yaml, optim/fsdp.yaml and rollout.yaml",
                    {"loss_aggregation": "token_mean", "kl_coef": 0.0, "reference": "auto", **_VERL_DEFAULTS},
                ),
                ("the example's overrides", _VERL_RUN),
                (OURS, {"prompt_template": None}),
            ),
        ),
        "cispo_open_instruct": Preset(
            source="allenai/open-instruct, loss_fn cispo, August 2026",
            summary="What open-instruct calls CISPO: the weight is at most 1 + clip_higher, 1.272; no scaling.",
            reward="yours",
            choices=cited(
                (
                    "data_loader.py: advantage_normalization_type centered, filter_zero_std_samples",
                    {"baseline": "mean", "reward_scaling": "none", "zero_variance": "drop"},
                ),
                (
                    "grpo_utils.py: GRPOLossType.cispo, clip_higher",
                    {
                        "policy_loss": "cispo_upper",
                        "clip_high": 0.272,
                        "loss_aggregation": "token_mean",
                        "kl_coef": 0.0,
                        "reference": "auto",
                    },
                ),
                (
                    OURS,
                    {
                        "mask_truncated": False,
                        "prompts_per_step": 16,
                        "group_size": 8,
                        "updates_per_batch": 1,
                        "mini_batches": 4,
                        "max_new_tokens": 512,
                        "temperature": 1.0,
                        "top_p": 1.0,
                        "learning_rate": 1e-6,
                        "lr_schedule": "constant",
                        "warmup_steps": 0,
                        "min_lr_ratio": 0.0,
                        "weight_decay": 0.0,
                        "adam_beta1": 0.9,
                        "adam_beta2": 0.999,
                        "max_grad_norm": 1.0,
                        "prompt_template": None,
                    },
                ),
            ),
        ),
    }
)
