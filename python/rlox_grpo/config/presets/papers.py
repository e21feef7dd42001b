"""Presets of papers, and the default preset of this library."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from rlox_grpo.config.presets.preset import OURS, Choice, Defect, Preset, cited

_ADAM = {"adam_beta1": 0.9, "adam_beta2": 0.999}
_PLAIN_SAMPLING = {"temperature": 1.0, "top_p": 1.0}
_MEAN_OF_GROUP = {"baseline": "mean", "reward_scaling": "group"}
_NO_KL = {"kl_coef": 0.0, "reference": "auto"}
_ONE_UPDATE = {"updates_per_batch": 1, "mini_batches": 1}
_CONSTANT_LR = {"lr_schedule": "constant", "warmup_steps": 0, "min_lr_ratio": 0.0}

_GRPO = cited(
    ("arXiv:2402.03300, section 4.1.2", {**_MEAN_OF_GROUP, "ddof": 1, "loss_aggregation": "sequence_mean"}),
    ("arXiv:2402.03300, eq. 3", {"policy_loss": "clip", "updates_per_batch": 1, "mini_batches": 1}),
    ("arXiv:1707.06347, section 6.1", {"clip_low": 0.2, "clip_high": 0.2}),
    ("TRL 1.16", {"std_epsilon": 1e-4, "learning_rate": 1e-6, "max_grad_norm": 1.0, **_NO_KL}),
    ("DAPO, arXiv:2503.14476, section 3.2", {"zero_variance": "drop"}),
    (
        "default of this library",
        {
            "dual_clip": None,
            "delta": None,
            "mask_truncated": False,
            "prompts_per_step": 16,
            "group_size": 8,
            "max_new_tokens": 512,
            **_PLAIN_SAMPLING,
            **_CONSTANT_LR,
            "weight_decay": 0.0,
            **_ADAM,
            "prompt_template": None,
        },
    ),
)
_STUDY = "docs/concepts/learning_study.md: four times the prompts in groups of 4 instead of 16"

PAPERS: Mapping[str, Preset] = MappingProxyType(
    {
        "grpo": Preset(
            source="DeepSeekMath, arXiv:2402.03300, eq. 3, outcome supervision",
            summary="The default of this library: the paper's objective without the KL term. Zero-variance groups "
            "are dropped.",
            reward="your own",
            choices=_GRPO,
        ),
        "recommended": Preset(
            source="docs/concepts/learning_study.md",
            summary="What learned most in this library's study: the default with 4 completions for each prompt and "
            "more prompts in a step.",
            reward="your own",
            choices=MappingProxyType(
                {**_GRPO, "group_size": Choice(4, _STUDY), "prompts_per_step": Choice(32, _STUDY)}
            ),
        ),
        "deepseekmath": Preset(
            source="DeepSeekMath, arXiv:2402.03300",
            summary="The paper's run: 64 completions per question, k3 penalty with weight 0.04, one update per batch.",
            reward="your own reward model, as in the paper",
            choices=cited(
                ("section 4.1.2", {**_MEAN_OF_GROUP, "loss_aggregation": "sequence_mean"}),
                ("eq. 3", {"policy_loss": "clip"}),
                ("eq. 4", {"kl_estimator": "k3", "kl_in": "loss"}),
                (
                    "section 4.2",
                    {
                        "kl_coef": 0.04,
                        "reference": "frozen",
                        "group_size": 64,
                        "prompts_per_step": 16,
                        "max_new_tokens": 1024,
                        "learning_rate": 1e-6,
                        "updates_per_batch": 1,
                        "mini_batches": 1,
                    },
                ),
                (
                    OURS,
                    {
                        "prompt_template": "boxed",
                        "ddof": 1,
                        "std_epsilon": 1e-4,
                        "zero_variance": "keep",
                        "clip_low": 0.2,
                        "clip_high": 0.2,
                        "dual_clip": None,
                        "delta": None,
                        "mask_truncated": False,
                        "kl_bias_correction": False,
                        **_PLAIN_SAMPLING,
                        **_CONSTANT_LR,
                        "weight_decay": 0.0,
                        **_ADAM,
                        "max_grad_norm": 1.0,
                    },
                ),
            ),
        ),
        "dapo": Preset(
            source="DAPO, arXiv:2503.14476",
            summary="Clip-higher, token mean, zero-variance groups dropped, no KL, 16 mini-batches per batch.",
            reward='(*published("verl_math_dapo"), Overlong(20480, 4096))',
            choices=cited(
                ("eq. 9", _MEAN_OF_GROUP),
                ("eq. 8", {"policy_loss": "clip", "loss_aggregation": "token_mean"}),
                ("section 3.2, without the refill", {"zero_variance": "drop"}),
                ("section 2.3", {"kl_coef": 0.0, "reference": "auto"}),
                (
                    "section 4.1",
                    {
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
                ),
                ("section 3.4: truncated completions get a lower reward instead", {"mask_truncated": False}),
                (
                    "verl, recipe/dapo",
                    {
                        "ddof": 1,
                        "std_epsilon": 1e-6,
                        "dual_clip": 10.0,
                        "delta": None,
                        **_PLAIN_SAMPLING,
                        "weight_decay": 0.1,
                        **_ADAM,
                        "max_grad_norm": 1.0,
                        "prompt_template": "verl_dapo",
                    },
                ),
                (OURS, {"min_lr_ratio": 0.0}),
            ),
        ),
        "dr_grpo": Preset(
            source="Understanding R1-Zero-Like Training, arXiv:2503.20783",
            summary="No division by the standard deviation and none by the length, because both bias the gradient.",
            reward="MathAnswer()",
            choices=cited(
                (
                    "section 3.2",
                    {
                        "baseline": "mean",
                        "reward_scaling": "none",
                        "policy_loss": "clip",
                        "loss_aggregation": "fixed_length",
                        "kl_coef": 0.0,
                        "reference": "auto",
                    },
                ),
                (
                    "sail-sg/understand-r1-zero, README.md and examples/",
                    {
                        "group_size": 8,
                        "max_new_tokens": 3000,
                        "learning_rate": 1e-6,
                        "lr_schedule": "constant",
                        **_PLAIN_SAMPLING,
                    },
                ),
                ("examples/qwen2.5-math-7b.sh: --prompt_template qwen_math", {"prompt_template": "boxed"}),
                (
                    OURS,
                    {
                        "zero_variance": "keep",
                        "clip_low": 0.2,
                        "clip_high": 0.2,
                        "dual_clip": None,
                        "delta": None,
                        "mask_truncated": False,
                        "prompts_per_step": 16,
                        **_ONE_UPDATE,
                        "warmup_steps": 0,
                        "min_lr_ratio": 0.0,
                        "weight_decay": 0.0,
                        **_ADAM,
                        "max_grad_norm": 1.0,
                    },
                ),
            ),
        ),
        "gspo": Preset(
            source="Group Sequence Policy Optimization, arXiv:2507.18071",
            summary="Sequence-level ratio, clipped within a few ten-thousandths; four mini-batches per batch.",
            reward="your own",
            choices=cited(
                ("eq. 6", _MEAN_OF_GROUP),
                ("eq. 5 and 7", {"policy_loss": "gspo", "loss_aggregation": "sequence_mean"}),
                (
                    "section 5.1",
                    {"clip_low": 3e-4, "clip_high": 4e-4, "mini_batches": 4, "updates_per_batch": 1},
                ),
                ("eq. 5, which has no KL term", {"kl_coef": 0.0, "reference": "auto"}),
                (
                    OURS,
                    {
                        "ddof": 1,
                        "std_epsilon": 1e-4,
                        "zero_variance": "keep",
                        "delta": None,
                        "mask_truncated": False,
                        "prompts_per_step": 16,
                        "group_size": 8,
                        "max_new_tokens": 512,
                        **_PLAIN_SAMPLING,
                        "learning_rate": 1e-6,
                        **_CONSTANT_LR,
                        "weight_decay": 0.0,
                        **_ADAM,
                        "max_grad_norm": 1.0,
                        "prompt_template": None,
                    },
                ),
            ),
        ),
        "cispo": Preset(
            source="MiniMax-M1, arXiv:2506.13585, section 3.1",
            summary="CISPO as in its paper: the importance weight is clipped, and every token keeps its gradient. "
            "cispo_trl, cispo_verl and cispo_open_instruct are other variants of that name.",
            reward="your own",
            choices=cited(
                ("section 3.1", {**_MEAN_OF_GROUP, "policy_loss": "cispo_clip", "loss_aggregation": "token_mean"}),
                ("section 3.1: no lower bound", {"clip_low": 1.0}),
                ("ScaleRL, arXiv:2510.13786: a cap of 5", {"clip_high": 4.0}),
                ("section 3.1, which has no KL term", {"kl_coef": 0.0, "reference": "auto"}),
                (
                    OURS,
                    {
                        "ddof": 1,
                        "std_epsilon": 1e-4,
                        "zero_variance": "keep",
                        "mask_truncated": False,
                        "prompts_per_step": 16,
                        "group_size": 8,
                        "updates_per_batch": 1,
                        "mini_batches": 4,
                        "max_new_tokens": 512,
                        **_PLAIN_SAMPLING,
                        "learning_rate": 1e-6,
                        **_CONSTANT_LR,
                        "weight_decay": 0.0,
                        **_ADAM,
                        "max_grad_norm": 1.0,
                        "prompt_template": None,
                    },
                ),
            ),
        ),
        "sapo": Preset(
            source="Soft Adaptive Policy Optimization, arXiv:2511.20347",
            summary="A smooth gate instead of clipping, steeper for negative advantages than for positive ones.",
            reward="your own",
            choices=cited(
                (
                    "section 3",
                    {
                        **_MEAN_OF_GROUP,
                        "policy_loss": "sapo",
                        "loss_aggregation": "sequence_mean",
                        "kl_coef": 0.0,
                        "reference": "auto",
                    },
                ),
                ("the defaults of TRL 1.16 and verl 0.9.1", {"sapo_temperatures": (1.0, 1.05)}),
                (
                    OURS,
                    {
                        "mini_batches": 4,
                        "updates_per_batch": 1,
                        "ddof": 1,
                        "std_epsilon": 1e-4,
                        "zero_variance": "keep",
                        "mask_truncated": False,
                        "prompts_per_step": 16,
                        "group_size": 8,
                        "max_new_tokens": 512,
                        **_PLAIN_SAMPLING,
                        "learning_rate": 1e-6,
                        **_CONSTANT_LR,
                        "weight_decay": 0.0,
                        **_ADAM,
                        "max_grad_norm": 1.0,
                        "prompt_template": None,
                    },
                ),
            ),
        ),
        "maxrl": Preset(
            source="MaxRL, arXiv:2602.02710, and tajwarfahim/maxrl, run_qwen3_training.sh",
            summary="Rewards minus the group mean, divided by the group mean: hard prompts weigh more than under GRPO.",
            reward="your own, 0 or 1",
            choices=cited(
                ("Algorithm 1", {"baseline": "mean", "reward_scaling": "mean"}),
                ("compute_maxrl_outcome_advantage", {"std_epsilon": 1e-6, "zero_variance": "keep"}),
                (
                    "run_qwen3_training.sh",
                    {
                        "clip_low": 0.2,
                        "clip_high": 0.2,
                        "prompts_per_step": 256,
                        "group_size": 16,
                        **_ONE_UPDATE,
                        "max_new_tokens": 4096,
                        "learning_rate": 1e-6,
                        "max_grad_norm": 0.3,
                        **_NO_KL,
                    },
                ),
                (
                    "the defaults of verl, which it runs on",
                    {
                        "policy_loss": "clip",
                        "dual_clip": 3.0,
                        "loss_aggregation": "token_mean",
                        **_PLAIN_SAMPLING,
                        **_CONSTANT_LR,
                        "weight_decay": 0.01,
                        **_ADAM,
                    },
                ),
                (OURS, {"delta": None, "mask_truncated": False, "prompt_template": None}),
            ),
        ),
        "wapo": Preset(
            source="WAPO, arXiv:2606.16154, and layer6ai-labs/wapo, configs/vf-rl/numina_lean_math.toml",
            summary="Only completions above their group's mean are learned from; reward minus mean, no other scaling.",
            reward="your own",
            choices=cited(
                (
                    "trainer.py, loss_type wapo: adv=r-mean, pos seqs only, token IR upper-clip",
                    {
                        "baseline": "mean",
                        "reward_scaling": "none",
                        "negative_advantages": "zero",
                        "policy_loss": "clip",
                        "loss_aggregation": "fixed_length",
                        "zero_variance": "keep",
                    },
                ),
                ("trainer.py: the ratio is against the sampler", {"bypass_old_log_probs": True}),
                (
                    "numina_lean_math.toml",
                    {
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
                ),
                (
                    "the defaults of config.py",
                    {**_PLAIN_SAMPLING, "weight_decay": 0.0, **_ADAM, "mask_truncated": False, **_NO_KL},
                ),
                (OURS, {"min_lr_ratio": 0.0, "prompt_template": None}),
            ),
            defects=(
                Defect(
                    "A difference: the source divides by the longest sequence, prompt included (max_seq_len, 8192); "
                    "fixed_length divides by max_new_tokens.",
                    reproduced=False,
                ),
            ),
        ),
    }
)
