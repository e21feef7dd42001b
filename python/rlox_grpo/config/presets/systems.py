"""Presets of small systems of one or a few files."""

from __future__ import annotations

from collections.abc import Mapping

from rlox_grpo.config.presets.preset import (
    ADAM,
    CONSTANT_LR,
    GROUP_MEAN,
    K3_IN_LOSS,
    NO_CLIP_FORMS,
    ONE_UPDATE,
    PLAIN_SAMPLING,
    PPO_CLIP,
    Defect,
    Preset,
)

_PAPERS_LOSS = {
    "policy_loss": "clip",
    "loss_aggregation": "sequence_mean",
    **K3_IN_LOSS,
    "mask_truncated": False,
    **NO_CLIP_FORMS,
}

SYSTEMS: Mapping[str, Preset] = {
    "nano_aha": Preset(
        source="McGill-NLP/nano-aha-moment, nano_r1_script.py",
        summary="Policy gradient without ratio or clip over all response tokens, k3 with weight 0.001; Countdown.",
        reward='published("nano_aha")',
        sections={
            "create_training_episodes": {**GROUP_MEAN, "ddof": 0, "std_epsilon": 1e-4},
            "compute_pg_loss": {
                "policy_loss": "reinforce",
                "loss_aggregation": "token_mean",
                **K3_IN_LOSS,
                "zero_variance": "keep",
                "mask_truncated": False,
            },
            "main and its command-line arguments": {
                "kl_coef": 0.001,
                "prompts_per_step": 16,
                "group_size": 4,
                **ONE_UPDATE,
                "temperature": 1.0,
                "top_p": 0.999,
                "max_new_tokens": 1024,
                "learning_rate": 1e-6,
            },
            "main: a second, frozen model": {"reference": "frozen"},
            "deepspeed_config": {**CONSTANT_LR, "weight_decay": 0.0, **ADAM, "max_grad_norm": 1.0},
            "preprocess_example": {"prompt_template": "countdown_think"},
        },
        defects=(
            Defect(
                "With several ranks, each rank divides by its own number of response tokens. Here the number of "
                "all ranks is used, because rows are distributed to ranks by their cost. On one rank there is no "
                "difference."
            ),
            Defect(
                "A resumed run trains on one batch twice. Here it draws the next batch. This concerns resuming, "
                "not the method."
            ),
        ),
    ),
    "grpo_zero": Preset(
        source="policy-gradient/GRPO-Zero, grpo.py and config.yaml",
        summary="Policy gradient without ratio, clipping, KL or reference, over all generated tokens; Countdown.",
        reward='published("grpo_zero")',
        sections={
            "normalize_rewards_per_group": {**GROUP_MEAN, "ddof": 0, "std_epsilon": 1e-4},
            "update_policy": {
                "policy_loss": "reinforce",
                "loss_aggregation": "token_mean",
                "zero_variance": "keep",
                "kl_coef": 0.0,
                "reference": "none",
                **ONE_UPDATE,
            },
            "config.yaml: skip_unfinished_episodes": {"mask_truncated": False},
            "config.yaml": {
                "prompts_per_step": 32,
                "group_size": 8,
                "max_new_tokens": 1024,
                "learning_rate": 1e-5,
                "weight_decay": 0.0,
                **ADAM,
                "max_grad_norm": 1.0,
            },
            "train.py": CONSTANT_LR,
            "rollout": PLAIN_SAMPLING,
            "countdown_task.py": {"prompt_template": "countdown_think"},
        },
        defects=(
            Defect("An overview names a reference server and GSM8K. The source and this preset have neither."),
            Defect(
                "Groups are identified by their prompt, so a problem drawn twice in a step is one group of 16. "
                "Here prompts are drawn without repetition, so this cannot happen."
            ),
        ),
    ),
    "simple_grpo": Preset(
        source="lsdefine/simple_GRPO, grpo_vllm_one.py",
        summary="The paper's loss, k3 with weight 0.04, 16 groups between two weight syncs; GSM8K.",
        reward='published("simple_grpo")',
        sections={
            "gen_worker": {
                **GROUP_MEAN,
                "ddof": 1,
                "std_epsilon": 1e-4,
                "temperature": 0.9,
                "top_p": 1.0,
                "max_new_tokens": 700,
                "prompt_template": "r1_think",
            },
            "gen_worker: groups whose rewards differ by less than 1e-4 are not sent": {"zero_variance": "drop"},
            "GRPO_step": _PAPERS_LOSS,
            "beta, clip_param, num_pre_Q": {"kl_coef": 0.04, **PPO_CLIP, "group_size": 8},
            "gen_update_steps, one group in each": {"prompts_per_step": 16, "updates_per_batch": 1},
            "gradient_accumulation_steps 4: four steps of 16 groups": {"mini_batches": 4},
            "ref_server.py, a separate process": {"reference": "frozen"},
            "ds_config, otherwise DeepSpeed's defaults": {
                "learning_rate": 1e-6,
                **CONSTANT_LR,
                "weight_decay": 0.0,
                **ADAM,
                "max_grad_norm": 0.0,
            },
        },
        changes={
            "gen_worker: the sampler's prompt_logprobs": {"bypass_old_log_probs": True},
            "GRPO_step: inputs != pad_token_id, the end token of its base model": {"train_end_token": False},
        },
        defects=(
            Defect(
                "Its queues are last in, first out, so a group can wait forever while the sampler runs ahead. Here "
                "every group is trained on before the next weight sync. Which groups wait depends on the speed of "
                "the machines, so its runs are not reproducible."
            ),
            Defect("Old log-probs are those of the sampler. Here the trainer recomputes them.", reproduced=True),
            Defect(
                "Padding is masked by its id, the base model's end token, so end tokens are not trained.",
                reproduced=True,
            ),
            Defect(
                "Sampling is at temperature 0.9, log-probs are at 1. Here both are at 0.9. It is not reproduced, "
                "because with the sampler's log-probs, here at 0.9, the ratio would mix two temperatures."
            ),
        ),
    ),
    "lm_book": Preset(
        source="The Hundred-Page Language Models Book (A. Burkov), aburkov/theLMbook, GRPO.py",
        summary="The paper's loss, clip range 0.1, k3 with weight 0.04, 16 completions per question; GSM8K.",
        reward='published("lm_book")',
        sections={
            "compute_group_relative_advantages": {
                **GROUP_MEAN,
                "ddof": 1,
                "std_epsilon": 1e-4,
                "zero_variance": "keep",
            },
            "maximize_grpo_objective": {"max_grad_norm": 0.1, **_PAPERS_LOSS},
            "training_config": {
                "prompts_per_step": 4,
                "group_size": 16,
                "max_new_tokens": 500,
                "kl_coef": 0.04,
                "learning_rate": 5e-6,
                **ONE_UPDATE,
                "clip_low": 0.1,
                "clip_high": 0.1,
            },
            "train_with_grpo: copied at each outer iteration; there is one": {"reference": "frozen"},
            "generate_completions": PLAIN_SAMPLING,
            "train_with_grpo: Adam": {"weight_decay": 0.0, **ADAM, **CONSTANT_LR},
            "prepare_dataset": {"prompt_template": "lm_book"},
        },
        defects=(Defect("Rewards are computed again at every update of a batch. Here once, with the same values."),),
    ),
    "rl_from_scratch": Preset(
        source='mingyin0312/RLFromScratch and its article "GRPO From Scratch"',
        summary="The paper's loss, four updates per batch, k3 with weight 0.005, cosine with warm-up; GSM8K.",
        reward='published("rl_from_scratch")',
        sections={
            "Compute Advantages": {**GROUP_MEAN, "ddof": 1, "zero_variance": "keep"},
            "clamp_min(1e-6) of sd, which has no effect if rewards differ": {"std_epsilon": 0.0},
            "Compute GRPO loss; kl_coef and ppo_clip_range in Hyperparameters": {
                **PPO_CLIP,
                **_PAPERS_LOSS,
                "kl_coef": 0.005,
            },
            "Model Setup: ref_model": {"reference": "frozen"},
            "Hyperparameters, generate and get_lr": {
                "prompts_per_step": 4,
                "group_size": 4,
                "updates_per_batch": 4,
                "mini_batches": 1,
                "temperature": 1.0,
                "top_p": 0.9,
                "max_new_tokens": 256,
                "learning_rate": 1e-5,
                "lr_schedule": "cosine",
                "min_lr_ratio": 0.1,
                "weight_decay": 0.1,
                **ADAM,
                "max_grad_norm": 0.1,
            },
            "get_lr: int(0.1 · 1,869 steps), one epoch of GSM8K on one GPU": {"warmup_steps": 186},
            "collate_fn": {"prompt_template": "rl_from_scratch", "train_end_token": True},
        },
        changes={
            "Compute Masks & Labels: padding is the end token, masked by its id": {"train_end_token": False},
            "valid_mask = batch_action_mask[:, :-1]": {"loss_aggregation": "sequence_mean_shifted"},
        },
        defects=(
            Defect("Padding is the end token and is masked by its id, so end tokens are not trained.", reproduced=True),
            Defect(
                "The mask that counts tokens is shifted by one. A truncated row is divided by one token too few. A "
                "row that ended is not affected, because its missing token is the end token.",
                reproduced=True,
            ),
            Defect("Positions outside the mask add a constant to the reported loss. It has no gradient."),
            Defect(
                "Rewards and advantages are float16, a relative error of up to 5e-4 in advantages. Here kernels "
                "use float32 and float64, and the rounding would be torch's."
            ),
        ),
    ),
    "r1_blog": Preset(
        source="the article on DeepSeek-R1 and GRPO, its listings",
        summary="A times the sum of a completion's log-probs, KL weight decreasing from 0.1 to 0.04; "
        "reward of accuracy, format and length.",
        reward='published("r1_blog")',
        sections={
            "grpo_loss": {
                **GROUP_MEAN,
                "ddof": 1,
                "std_epsilon": 1e-8,
                "policy_loss": "reinforce",
                "loss_aggregation": "sequence_sum",
                "kl_in": "loss",
                "zero_variance": "keep",
                "kl_bias_correction": False,
            },
            "verl's k1+: the article's value with the right sign, and the gradient of a divergence": {
                "kl_estimator": "k1+"
            },
            "cosine_beta_schedule with its middle part corrected": {
                "kl_coef": 0.1,
                "kl_coef_end": 0.04,
                "kl_schedule": "cosine",
            },
            "GRPOTrainer: a frozen copy of the SFT model": {"reference": "frozen"},
            "the R1 trainer": {"group_size": 16},
            "sample_responses": {"temperature": 0.7, "top_p": 1.0, "max_new_tokens": 512, "prompt_template": None},
            "train_step": {"max_grad_norm": 1.0, **ONE_UPDATE},
        },
        changes={
            "grpo_loss: + beta (ref − log p)": {"kl_estimator": "k1_inverted"},
            "cosine_beta_schedule as printed": {"kl_schedule": "cosine_inverted"},
        },
        defects=(
            Defect("The KL penalty has the wrong sign: it rewards distance from the reference.", reproduced=True),
            Defect(
                "The cosine of the KL weight is inverted: 0.1, a drop to 0.04, a rise to 0.1, then 0.04.",
                reproduced=True,
            ),
            Defect(
                "Log-probs are summed over the whole vocabulary instead of the sampled tokens, so the gradient "
                "does not depend on what was sampled. Not reproduced, because it is not a policy gradient "
                "and needs the logits of every token."
            ),
        ),
    ),
}
