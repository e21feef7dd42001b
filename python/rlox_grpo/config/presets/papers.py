"""Presets of papers, and the default preset of this library."""

from __future__ import annotations

from collections.abc import Mapping

from rlox_grpo.config.presets.preset import (
    ADAM,
    GROUP_MEAN,
    K3_IN_LOSS,
    NO_CLIP_FORMS,
    NO_KL,
    ONE_UPDATE,
    OURS,
    PLAIN_SAMPLING,
    PPO_CLIP,
    VERL_DEFAULTS,
    Defect,
    Preset,
    Sections,
)

_DEFAULT = "default of this library"
_GRPO: Sections = {
    "arXiv:2402.03300, section 4.1.2": {**GROUP_MEAN, "ddof": 1, "loss_aggregation": "sequence_mean"},
    "arXiv:2402.03300, eq. 3": {"policy_loss": "clip", **ONE_UPDATE},
    "arXiv:1707.06347, section 6.1": PPO_CLIP,
    "TRL 1.16": {"std_epsilon": 1e-4, "learning_rate": 1e-6, "max_grad_norm": 1.0, **NO_KL},
    "DAPO, arXiv:2503.14476, section 3.2": {"zero_variance": "drop"},
    _DEFAULT: NO_CLIP_FORMS,
}
_STUDY = "docs/concepts/learning_study.md: four times the prompts in groups of 4 instead of 16"

_AUTHORS = "PRIME-RL/Entropy-Mechanism-of-RL, recipe/dapo"
_ENTROPY: Sections = {
    "7b_clip_cov.sh and 7b_kl_cov.sh": {
        **GROUP_MEAN,
        "loss_aggregation": "token_mean",
        "prompts_per_step": 256,
        "group_size": 8,
        "mini_batches": 8,
        "max_new_tokens": 8192,
        **PLAIN_SAMPLING,
        "learning_rate": 5e-7,
        "lr_schedule": "constant",
        "weight_decay": 0.0,
        "max_grad_norm": 1.0,
        **NO_KL,
    },
    "both: enable_filter_groups, without the refill": {"zero_variance": "drop"},
    "the defaults of verl, which they run on": {
        "ddof": 1,
        "std_epsilon": 1e-6,
        "updates_per_batch": 1,
        "warmup_steps": 0,
        **ADAM,
        "mask_truncated": False,
    },
}
_GLOBAL = Defect(
    "A difference: the source selects tokens, at least one, in each micro-batch; here in each optimizer step."
)

PAPERS: Mapping[str, Preset] = {
    "grpo": Preset(
        source="DeepSeekMath, arXiv:2402.03300, eq. 3, outcome supervision",
        summary="The default of this library: the paper's objective without the KL term. Zero-variance groups "
        "are dropped.",
        sections=_GRPO,
        unstated=_DEFAULT,
    ),
    "recommended": Preset(
        source="docs/concepts/learning_study.md",
        summary="What learned most in this library's study: the default with 4 completions for each prompt and "
        "more prompts in a step.",
        sections={**_GRPO, _STUDY: {"prompts_per_step": 32, "group_size": 4}},
        unstated=_DEFAULT,
    ),
    "deepseekmath": Preset(
        source="DeepSeekMath, arXiv:2402.03300",
        summary="The paper's run: 64 completions per question, k3 penalty with weight 0.04, one update per batch.",
        reward="your own reward model, as in the paper",
        sections={
            "section 4.1.2": {**GROUP_MEAN, "loss_aggregation": "sequence_mean"},
            "eq. 3": {"policy_loss": "clip"},
            "eq. 4": {"kl_estimator": "k3", "kl_in": "loss"},
            "section 4.2": {
                "kl_coef": 0.04,
                "reference": "frozen",
                "group_size": 64,
                "prompts_per_step": 16,
                "max_new_tokens": 1024,
                "learning_rate": 1e-6,
                **ONE_UPDATE,
            },
            OURS: {
                "prompt_template": "boxed",
                "ddof": 1,
                "std_epsilon": 1e-4,
                **PPO_CLIP,
                **NO_CLIP_FORMS,
                "kl_bias_correction": False,
            },
        },
    ),
    "dapo": Preset(
        source="DAPO, arXiv:2503.14476",
        summary="Clip-higher, token mean, zero-variance groups dropped, no KL, 16 mini-batches per batch.",
        reward='(*published("verl_math_dapo"), Overlong(20480, 4096))',
        sections={
            "eq. 9": GROUP_MEAN,
            "eq. 8": {"policy_loss": "clip", "loss_aggregation": "token_mean"},
            "section 3.2, without the refill": {"zero_variance": "drop"},
            "section 2.3": NO_KL,
            "section 4.1": {
                "clip_low": 0.2,
                "clip_high": 0.28,
                "prompts_per_step": 512,
                "group_size": 16,
                "updates_per_batch": 1,
                "mini_batches": 16,
                "max_new_tokens": 20_480,
                "learning_rate": 1e-6,
                "lr_schedule": "constant",
                "warmup_steps": 20,
            },
            "section 3.4: truncated completions get a lower reward instead": {"mask_truncated": False},
            "verl, recipe/dapo": {
                "ddof": 1,
                "std_epsilon": 1e-6,
                "dual_clip": 10.0,
                "delta": None,
                **PLAIN_SAMPLING,
                "weight_decay": 0.1,
                **ADAM,
                "max_grad_norm": 1.0,
                "prompt_template": "verl_dapo",
            },
        },
    ),
    "dr_grpo": Preset(
        source="Understanding R1-Zero-Like Training, arXiv:2503.20783",
        summary="No division by the standard deviation and none by the length, because both bias the gradient.",
        reward="MathAnswer()",
        sections={
            "section 3.2": {
                "baseline": "mean",
                "reward_scaling": "none",
                "policy_loss": "clip",
                "loss_aggregation": "fixed_length",
                **NO_KL,
            },
            "sail-sg/understand-r1-zero, README.md and examples/": {
                "group_size": 8,
                "max_new_tokens": 3000,
                "learning_rate": 1e-6,
                "lr_schedule": "constant",
                **PLAIN_SAMPLING,
            },
            "examples/qwen2.5-math-7b.sh: --prompt_template qwen_math": {"prompt_template": "boxed"},
            OURS: {**PPO_CLIP, **NO_CLIP_FORMS},
        },
    ),
    "gspo": Preset(
        source="Group Sequence Policy Optimization, arXiv:2507.18071",
        summary="Sequence-level ratio, clipped within a few ten-thousandths; four mini-batches per batch.",
        sections={
            "eq. 6": GROUP_MEAN,
            "eq. 5 and 7": {"policy_loss": "gspo", "loss_aggregation": "sequence_mean"},
            "section 5.1": {"clip_low": 3e-4, "clip_high": 4e-4, "mini_batches": 4, "updates_per_batch": 1},
            "eq. 5, which has no KL term": NO_KL,
            OURS: {"ddof": 1, "std_epsilon": 1e-4, "delta": None},
        },
    ),
    "cispo": Preset(
        source="MiniMax-M1, arXiv:2506.13585, section 3.1",
        summary="CISPO as in its paper: the importance weight is clipped, and every token keeps its gradient. "
        "cispo_trl, cispo_verl and cispo_open_instruct are other variants of that name.",
        sections={
            "section 3.1": {**GROUP_MEAN, "policy_loss": "cispo_clip", "loss_aggregation": "token_mean"},
            "section 3.1: no lower bound": {"clip_low": 1.0},
            "ScaleRL, arXiv:2510.13786: a cap of 5": {"clip_high": 4.0},
            "section 3.1, which has no KL term": NO_KL,
            OURS: {"ddof": 1, "std_epsilon": 1e-4, "mini_batches": 4},
        },
    ),
    "sapo": Preset(
        source="Soft Adaptive Policy Optimization, arXiv:2511.20347",
        summary="A smooth gate instead of clipping, steeper for negative advantages than for positive ones.",
        sections={
            "section 3": {**GROUP_MEAN, "policy_loss": "sapo", "loss_aggregation": "sequence_mean", **NO_KL},
            "the defaults of TRL 1.16 and verl 0.9.1": {"sapo_temperatures": (1.0, 1.05)},
            OURS: {"mini_batches": 4, "ddof": 1, "std_epsilon": 1e-4},
        },
    ),
    "maxrl": Preset(
        source="MaxRL, arXiv:2602.02710, and tajwarfahim/maxrl, run_qwen3_training.sh",
        summary="Rewards minus the group mean, divided by the group mean: hard prompts weigh more than under GRPO.",
        reward="your own, 0 or 1",
        sections={
            "Algorithm 1": {"baseline": "mean", "reward_scaling": "mean"},
            "compute_maxrl_outcome_advantage": {"std_epsilon": 1e-6, "zero_variance": "keep"},
            "run_qwen3_training.sh": {
                **PPO_CLIP,
                "prompts_per_step": 256,
                "group_size": 16,
                **ONE_UPDATE,
                "max_new_tokens": 4096,
                "learning_rate": 1e-6,
                "max_grad_norm": 0.3,
                **NO_KL,
            },
            "the defaults of verl, which it runs on": {"policy_loss": "clip", "dual_clip": 3.0, **VERL_DEFAULTS},
            OURS: {"delta": None},
        },
    ),
    "wapo": Preset(
        source="WAPO, arXiv:2606.16154, and layer6ai-labs/wapo, configs/vf-rl/numina_lean_math.toml",
        summary="Only completions above their group's mean are learned from; reward minus mean, no other scaling.",
        sections={
            "trainer.py, loss_type wapo: adv=r-mean, pos seqs only, token IR upper-clip": {
                "baseline": "mean",
                "reward_scaling": "none",
                "negative_advantages": "zero",
                "policy_loss": "clip",
                "loss_aggregation": "fixed_length",
                "zero_variance": "keep",
            },
            "trainer.py: the ratio is against the sampler": {"bypass_old_log_probs": True},
            "numina_lean_math.toml": {
                "clip_high": 9.0,
                "prompts_per_step": 32,
                "group_size": 8,
                "mini_batches": 4,
                "updates_per_batch": 1,
                "max_new_tokens": 4096,
                "learning_rate": 1e-5,
                "lr_schedule": "constant",
                "warmup_steps": 10,
                "max_grad_norm": 1.0,
            },
            "the defaults of config.py": {
                **PLAIN_SAMPLING,
                "weight_decay": 0.0,
                **ADAM,
                "mask_truncated": False,
                **NO_KL,
            },
        },
        defects=(
            Defect(
                "A difference: the source divides by the longest sequence, prompt included (max_seq_len, 8192); "
                "fixed_length divides by max_new_tokens."
            ),
        ),
    ),
    "echo": Preset(
        source="ECHO, arXiv:2605.24517",
        summary="GRPO, and a cross-entropy that trains the policy to predict the observations of its episodes.",
        reward="your own, 0 or 1",
        sections={
            "eq. 1 and 3, section 3.3": {"environment_loss_coef": 0.05},
            "eq. 2": {"policy_loss": "clip"},
            "section 1: failed completions are trained on too": {"zero_variance": "keep"},
            "section 4, RL recipe": {
                **GROUP_MEAN,
                "loss_aggregation": "sequence_mean",
                "prompts_per_step": 16,
                "group_size": 16,
                "learning_rate": 1e-6,
                "max_grad_norm": 0.2,
                "temperature": 0.8,
                **NO_KL,
            },
            "section 4, harness: tokens of a turn": {"max_new_tokens": 2048},
            OURS: {**PPO_CLIP, **NO_CLIP_FORMS, "ddof": 1, "std_epsilon": 1e-4},
        },
        defects=(
            Defect(
                "A difference: the source does not predict the warnings of its harness; here the tokens of every "
                "message between two replies count, and those of the chat template around it."
            ),
        ),
    ),
    "clip_cov": Preset(
        source=f"arXiv:2505.22617, and {_AUTHORS}/7b_clip_cov.sh",
        summary="Some of the tokens that lower the entropy most have no policy term; a wide clip.",
        sections={
            "7b_clip_cov.sh": {
                "policy_loss": "clip_cov",
                "clip_low": 1.0,
                "clip_high": 1.0,
                "covariance_share": 2e-4,
                "covariance_bounds": (1.0, 5.0),
            },
            **_ENTROPY,
        },
        defects=(_GLOBAL,),
    ),
    "kl_cov": Preset(
        source=f"arXiv:2505.22617, and {_AUTHORS}/7b_kl_cov.sh",
        summary="The tokens that lower the entropy most are held near the old policy; no clip.",
        sections={
            "7b_kl_cov.sh": {"policy_loss": "kl_cov", "covariance_share": 2e-3, "covariance_kl_coef": 1.0},
            **_ENTROPY,
        },
        defects=(_GLOBAL,),
    ),
    "gagpo": Preset(
        source="GAGPO, arXiv:2605.13217, and verl-agent, examples/gigpo_trainer/run_alfworld.sh",
        summary="Advantages of turns by GAE, with the mean return of each state in the group as its value; one ratio "
        "for each turn. It needs an environment.",
        reward="the environment's",
        sections={
            "arXiv:2605.13217": {
                **GROUP_MEAN,
                "turn_credit": "gae",
                "turn_state": "observation",
                "policy_loss": "gspo_turn",
            },
            "run_alfworld.sh": {
                "turn_discount": 0.95,
                "prompts_per_step": 16,
                "group_size": 8,
                "max_new_tokens": 512,
                "learning_rate": 1e-6,
                "kl_coef": 0.01,
                **K3_IN_LOSS,
                "reference": "frozen",
            },
            "PPO, arXiv:1707.06347, table 3: the paper's λ is not known": {"turn_lambda": 0.95},
            "the defaults of verl, on which verl-agent runs": {
                "ddof": 1,
                "std_epsilon": 1e-6,
                **PPO_CLIP,
                "delta": None,
                **VERL_DEFAULTS,
                "max_grad_norm": 1.0,
            },
        },
        defects=(
            Defect(
                "A difference: the source compares the text of observations; here the token ids are compared, and the "
                "state of a first turn is the prompt."
            ),
            Defect(
                "A difference: the script splits a batch by turns into several optimizer steps; here a batch is one."
            ),
        ),
    ),
}
