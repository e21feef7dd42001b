"""Presets of other libraries, among them their variants of CISPO."""

from __future__ import annotations

from collections.abc import Mapping

from rlox_grpo.config.presets.preset import (
    ADAM,
    CONSTANT_LR,
    GROUP_MEAN,
    NO_KL,
    ONE_UPDATE,
    OURS,
    PLAIN_SAMPLING,
    PPO_CLIP,
    TRL_OPTIMIZER,
    VERL_DEFAULTS,
    Defect,
    Preset,
    Sections,
)

_TRL: Sections = {
    "GRPOTrainer._generate_and_score_completions": {
        "baseline": "mean",
        "ddof": 1,
        "std_epsilon": 1e-4,
        "zero_variance": "keep",
    },
    "GRPOConfig": {
        "reward_scaling": "group",
        "kl_coef": 0.0,
        "kl_bias_correction": True,
        "group_size": 8,
        "max_new_tokens": 512,
        **PLAIN_SAMPLING,
        "mask_truncated": False,
        "updates_per_batch": 1,
        "learning_rate": 1e-6,
    },
    "GRPOTrainer.__init__: no reference when beta is 0": {"reference": "auto"},
    "transformers.TrainingArguments": TRL_OPTIMIZER,
    "prompts come from the data set": {"prompt_template": None},
}
_VERL: Sections = {
    "compute_grpo_outcome_advantage": {**GROUP_MEAN, "ddof": 1, "std_epsilon": 1e-6, "zero_variance": "keep"},
    "actor.yaml, optim/fsdp.yaml and rollout.yaml": {
        **PPO_CLIP,
        "updates_per_batch": 1,
        **VERL_DEFAULTS,
        "max_grad_norm": 1.0,
    },
    "the example's overrides": {
        "prompts_per_step": 1024,
        "group_size": 5,
        "mini_batches": 4,
        "max_new_tokens": 1024,
        "learning_rate": 1e-6,
    },
}

LIBRARIES: Mapping[str, Preset] = {
    "rlox": Preset(
        source="rlox 1.2.0, rlox/algorithms/grpo.py",
        summary="A times the sum of a completion's log-probs, KL with weight 0.1 from these sums; any module.",
        reward="your own function of token tensors",
        sections={
            "compute_batch_group_advantages: zero if sd < 1e-8": {**GROUP_MEAN, "ddof": 0, "std_epsilon": 0.0},
            "GRPO.train_step": {
                "policy_loss": "reinforce",
                "loss_aggregation": "sequence_sum",
                "zero_variance": "keep",
                "kl_in": "loss",
                "kl_bias_correction": False,
                "mask_truncated": False,
                **ONE_UPDATE,
            },
            "verl's k1+: the same value, with the gradient of a divergence": {"kl_estimator": "k1+"},
            "GRPO.__init__": {
                "reference": "frozen",
                "group_size": 4,
                "kl_coef": 0.1,
                "learning_rate": 1e-4,
                "max_new_tokens": 8,
                "weight_decay": 0.0,
                **ADAM,
                "max_grad_norm": 1.0,
            },
            "GRPO.train: every prompt in every step, up to this many": {"prompts_per_step": 1024},
            "GRPO.__init__: a plain Adam": CONSTANT_LR,
        },
        changes={"GRPO.train_step: kl_diff": {"kl_estimator": "k1"}},
        defects=(
            Defect(
                "The penalty is k1 in the loss. Its gradient is that of the log-probs only and has expectation 0. "
                "Here it has the gradient of k2.",
                reproduced=True,
            ),
            Defect(
                "Sums include prompt and padding. On a prompt the policy term cancels, because the advantages of a "
                "group sum to 0, but the penalty does not. Here both use only the completion, because the forward "
                "pass returns only its log-probs."
            ),
            Defect("The logged KL is weighted by probability. Here it is the estimator's. The loss does not use it."),
        ),
    ),
    "trl": Preset(
        source="TRL 1.16.0, trl/trainer/grpo_config.py and grpo_trainer.py",
        summary="TRL's defaults: token mean over the batch, no KL, zero-variance groups count in the denominator.",
        sections={
            **_TRL,
            "GRPOTrainer._compute_loss, loss_type dapo": {"policy_loss": "clip", "loss_aggregation": "token_mean"},
            "GRPOConfig: epsilon and delta": {**PPO_CLIP, "delta": None},
            "TRL has no dual clip": {"dual_clip": None},
            "8 completions per device, one device, no accumulation": {"prompts_per_step": 1, "mini_batches": 1},
        },
    ),
    "cispo_trl": Preset(
        source="TRL 1.16.0, loss_type cispo",
        summary="CISPO in TRL: the weight is at most epsilon_high, 5.",
        sections={
            **_TRL,
            "GRPOTrainer._compute_loss": {"policy_loss": "cispo_cap", "loss_aggregation": "token_mean"},
            "value for epsilon_high recommended in GRPOConfig": {"clip_high": 5.0},
            OURS: {"mini_batches": 4},
        },
    ),
    "verl": Preset(
        source="verl 0.9.1, examples/grpo_trainer, Qwen2-7B on GSM8K",
        summary="Token mean, dual clip, k3 with weight 0.001 in the loss, four mini-batches of 256 prompts.",
        reward='published("verl_gsm8k")',
        sections={
            **_VERL,
            "compute_policy_loss_vanilla": {"policy_loss": "clip", "delta": None, "mask_truncated": False},
            "actor.yaml: clip_ratio_c": {"dual_clip": 3.0},
            "the example's overrides for the KL": {"kl_in": "loss", "kl_coef": 0.001, "kl_estimator": "k3"},
            "kl_penalty": {"kl_bias_correction": False},
            "ref.yaml: the loaded weights": {"reference": "frozen"},
            "examples/data_preprocess/gsm8k.py": {"prompt_template": "verl_gsm8k"},
        },
        changes={
            "kl_penalty_forward: low_var_kl": {"kl_estimator": "k3_clamped"},
            "optim/fsdp.yaml, for all of model.parameters()": {"decay_vectors": True},
        },
        defects=(
            Defect("k3 is clamped at 10. Above that the penalty of a token has no gradient.", reproduced=True),
            Defect("Weight decay applies to every parameter, including norms and biases.", reproduced=True),
            Defect(
                "A group of one keeps its reward as its advantage, and float32 means leave a residue if all "
                "rewards are equal. Here both are 0: groups have five completions, and statistics are float64."
            ),
        ),
    ),
    "cispo_verl": Preset(
        source="verl 0.9.1, loss_mode cispo",
        summary="CISPO in verl: the weight is clipped on both sides, by default at 1 ± 0.2.",
        sections={
            **_VERL,
            "compute_policy_loss_cispo": {"policy_loss": "cispo_clip", "mask_truncated": False},
            "actor.yaml: use_kl_loss": NO_KL,
        },
    ),
    "cispo_open_instruct": Preset(
        source="allenai/open-instruct, loss_fn cispo, August 2026",
        summary="CISPO in open-instruct: the weight is at most 1 + clip_higher, 1.272; no reward scaling.",
        sections={
            "data_loader.py: advantage_normalization_type centered, filter_zero_std_samples": {
                "baseline": "mean",
                "reward_scaling": "none",
                "zero_variance": "drop",
            },
            "grpo_utils.py: GRPOLossType.cispo, clip_higher": {
                "policy_loss": "cispo_upper",
                "clip_high": 0.272,
                "loss_aggregation": "token_mean",
                **NO_KL,
            },
            OURS: {"mini_batches": 4},
        },
    ),
}
