"""Presets of the small systems: one file or a few, read line by line."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from rlox_grpo.config.presets.preset import OURS, Defect, Preset, cited

_NO_CLIP_FORMS = {"dual_clip": None, "delta": None}

SYSTEMS: Mapping[str, Preset] = MappingProxyType(
    {
        "nano_aha": Preset(
            source="McGill-NLP/nano-aha-moment, nano_r1_script.py",
            summary="Policy gradient without ratio or clip over all response tokens, k3 of weight 0.001; Countdown.",
            reward='published("nano_aha")',
            choices=cited(
                (
                    "create_training_episodes",
                    {"baseline": "mean", "reward_scaling": "group", "ddof": 0, "std_epsilon": 1e-4},
                ),
                (
                    "compute_pg_loss",
                    {
                        "policy_loss": "reinforce",
                        "loss_aggregation": "token_mean",
                        "kl_in": "loss",
                        "kl_estimator": "k3",
                        "kl_bias_correction": False,
                        "zero_variance": "keep",
                        "mask_truncated": False,
                    },
                ),
                (
                    "main, and the arguments that it parses",
                    {
                        "kl_coef": 0.001,
                        "prompts_per_step": 16,
                        "group_size": 4,
                        "updates_per_batch": 1,
                        "mini_batches": 1,
                        "temperature": 1.0,
                        "top_p": 0.999,
                        "max_new_tokens": 1024,
                        "learning_rate": 1e-6,
                    },
                ),
                ("main: a second model that stays as it was", {"reference": "frozen"}),
                (
                    "deepspeed_config",
                    {
                        "lr_schedule": "constant",
                        "warmup_steps": 0,
                        "min_lr_ratio": 0.0,
                        "weight_decay": 0.0,
                        "adam_beta1": 0.9,
                        "adam_beta2": 0.999,
                        "max_grad_norm": 1.0,
                    },
                ),
                ("preprocess_example", {"prompt_template": "countdown_think"}),
            ),
            defects=(
                Defect(
                    "With several ranks each divides by its own response tokens; here by those of all. Rows are dealt "
                    "to ranks by their cost here, so a rank has no tokens of its own; on one rank there is no "
                    "difference.",
                    False,
                ),
                Defect(
                    "A resumed run trains on one batch twice; here it draws what comes next. A property of its resume, "
                    "not of its method.",
                    False,
                ),
            ),
        ),
        "grpo_zero": Preset(
            source="policy-gradient/GRPO-Zero, grpo.py and config.yaml",
            summary="Policy gradient without ratio, clip, KL or reference, over all generated tokens; Countdown.",
            reward='published("grpo_zero")',
            choices=cited(
                (
                    "normalize_rewards_per_group",
                    {"baseline": "mean", "reward_scaling": "group", "ddof": 0, "std_epsilon": 1e-4},
                ),
                (
                    "update_policy",
                    {
                        "policy_loss": "reinforce",
                        "loss_aggregation": "token_mean",
                        "zero_variance": "keep",
                        "kl_coef": 0.0,
                        "reference": "none",
                        "updates_per_batch": 1,
                        "mini_batches": 1,
                    },
                ),
                ("config.yaml: skip_unfinished_episodes", {"mask_truncated": False}),
                (
                    "config.yaml",
                    {
                        "prompts_per_step": 32,
                        "group_size": 8,
                        "max_new_tokens": 1024,
                        "learning_rate": 1e-5,
                        "weight_decay": 0.0,
                        "adam_beta1": 0.9,
                        "adam_beta2": 0.999,
                        "max_grad_norm": 1.0,
                    },
                ),
                ("train.py", {"lr_schedule": "constant", "warmup_steps": 0, "min_lr_ratio": 0.0}),
                ("rollout", {"temperature": 1.0, "top_p": 1.0}),
                ("countdown_task.py", {"prompt_template": "countdown_think"}),
            ),
            defects=(
                Defect("An overview gives it a reference server and GSM8K; the source, and this, has neither.", False),
                Defect(
                    "Groups are found by their prompt, so a problem that is drawn twice in a step is one group of 16; "
                    "here it is two of 8. Prompts are drawn without repetition here, so that it cannot happen.",
                    False,
                ),
            ),
        ),
        "simple_grpo": Preset(
            source="lsdefine/simple_GRPO, grpo_vllm_one.py",
            summary="The paper's loss, k3 of weight 0.04, 16 groups between two updates of the sampler; GSM8K.",
            reward='published("simple_grpo")',
            choices=cited(
                (
                    "gen_worker",
                    {
                        "baseline": "mean",
                        "reward_scaling": "group",
                        "ddof": 1,
                        "std_epsilon": 1e-4,
                        "temperature": 0.9,
                        "top_p": 1.0,
                        "max_new_tokens": 700,
                        "prompt_template": "r1_think",
                    },
                ),
                ("gen_worker: groups within 1e-4 are not sent", {"zero_variance": "drop"}),
                (
                    "GRPO_step",
                    {
                        "policy_loss": "clip",
                        "loss_aggregation": "sequence_mean",
                        "kl_in": "loss",
                        "kl_estimator": "k3",
                        "kl_bias_correction": False,
                        "mask_truncated": False,
                        **_NO_CLIP_FORMS,
                    },
                ),
                ("beta, clip_param, num_pre_Q", {"kl_coef": 0.04, "clip_low": 0.2, "clip_high": 0.2, "group_size": 8}),
                ("gen_update_steps, a group each", {"prompts_per_step": 16, "updates_per_batch": 1}),
                ("gradient_accumulation_steps 4: four steps of 16 groups", {"mini_batches": 4}),
                ("ref_server.py, a process of its own", {"reference": "frozen"}),
                (
                    "ds_config, and DeepSpeed where it says nothing",
                    {
                        "learning_rate": 1e-6,
                        "lr_schedule": "constant",
                        "warmup_steps": 0,
                        "min_lr_ratio": 0.0,
                        "weight_decay": 0.0,
                        "adam_beta1": 0.9,
                        "adam_beta2": 0.999,
                        "max_grad_norm": 0.0,
                    },
                ),
            ),
            published=cited(
                ("gen_worker: prompt_logprobs of the sampler", {"bypass_old_log_probs": True}),
                ("GRPO_step: inputs != pad_token_id, the end token of its base model", {"train_end_token": False}),
            ),
            defects=(
                Defect(
                    "Its queues give out what came last, so a group can wait without end and the sampler runs ahead; "
                    "here every group is trained on before the sampler's weights are taken anew. What waits depends "
                    "on the speed of its machines, so no run of it repeats.",
                    False,
                ),
                Defect("Old log-probs are the sampler's own; here the trainer recomputes them.", True),
                Defect(
                    "Padding, masked by its id, is its base model's end token, so no end token is ever trained on.",
                    True,
                ),
                Defect(
                    "It samples at temperature 0.9 and takes log-probs at 1; here both are at 0.9. Brought back with "
                    "the sampler's own log-probs, which are at 0.9 here, it would be a ratio of two temperatures.",
                    False,
                ),
            ),
        ),
        "lm_book": Preset(
            source="The Hundred-Page Language Models Book (A. Burkov), aburkov/theLMbook, GRPO.py",
            summary="The paper's loss with a narrow clip of 0.1, k3 of weight 0.04, 16 samples a question; GSM8K.",
            reward='published("lm_book")',
            choices=cited(
                (
                    "compute_group_relative_advantages",
                    {
                        "baseline": "mean",
                        "reward_scaling": "group",
                        "ddof": 1,
                        "std_epsilon": 1e-4,
                        "zero_variance": "keep",
                    },
                ),
                (
                    "maximize_grpo_objective",
                    {
                        "max_grad_norm": 0.1,
                        "policy_loss": "clip",
                        "loss_aggregation": "sequence_mean",
                        "kl_in": "loss",
                        "kl_estimator": "k3",
                        "kl_bias_correction": False,
                        "mask_truncated": False,
                        **_NO_CLIP_FORMS,
                    },
                ),
                (
                    "training_config",
                    {
                        "prompts_per_step": 4,
                        "group_size": 16,
                        "max_new_tokens": 500,
                        "kl_coef": 0.04,
                        "learning_rate": 5e-6,
                        "updates_per_batch": 1,
                        "mini_batches": 1,
                        "clip_low": 0.1,
                        "clip_high": 0.1,
                    },
                ),
                ("train_with_grpo: copied at each outer iteration, of which there is one", {"reference": "frozen"}),
                ("generate_completions", {"temperature": 1.0, "top_p": 1.0}),
                (
                    "train_with_grpo: Adam",
                    {
                        "weight_decay": 0.0,
                        "adam_beta1": 0.9,
                        "adam_beta2": 0.999,
                        "lr_schedule": "constant",
                        "warmup_steps": 0,
                        "min_lr_ratio": 0.0,
                    },
                ),
                ("prepare_dataset", {"prompt_template": "lm_book"}),
            ),
            defects=(
                Defect(
                    "Rewards are computed again at every update of a batch; here once. The numbers are the same.", False
                ),
            ),
        ),
        "rl_from_scratch": Preset(
            source='mingyin0312/RLFromScratch and its article "GRPO From Scratch"',
            summary="The paper's loss, four updates a batch, k3 of weight 0.005, a warmed-up cosine; GSM8K.",
            reward='published("rl_from_scratch")',
            choices=cited(
                (
                    "Compute Advantages",
                    {"baseline": "mean", "reward_scaling": "group", "ddof": 1, "zero_variance": "keep"},
                ),
                ("clamp_min(1e-6) of the deviation, which is the deviation where rewards differ", {"std_epsilon": 0.0}),
                (
                    "Compute GRPO loss, and kl_coef and ppo_clip_range under Hyperparameters",
                    {
                        "policy_loss": "clip",
                        "clip_low": 0.2,
                        "clip_high": 0.2,
                        "loss_aggregation": "sequence_mean",
                        "kl_in": "loss",
                        "kl_estimator": "k3",
                        "kl_bias_correction": False,
                        "kl_coef": 0.005,
                        "mask_truncated": False,
                        **_NO_CLIP_FORMS,
                    },
                ),
                ("Model Setup: ref_model", {"reference": "frozen"}),
                (
                    "Hyperparameters, generate and get_lr",
                    {
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
                        "adam_beta1": 0.9,
                        "adam_beta2": 0.999,
                        "max_grad_norm": 0.1,
                    },
                ),
                ("get_lr: int(0.1 · 1,869 steps), an epoch of GSM8K on one GPU", {"warmup_steps": 186}),
                ("collate_fn", {"prompt_template": "rl_from_scratch", "train_end_token": True}),
            ),
            published=cited(
                ("Compute Masks & Labels: pad is the end token, and masks come of ids", {"train_end_token": False}),
                ("valid_mask = batch_action_mask[:, :-1]", {"loss_aggregation": "sequence_mean_shifted"}),
            ),
            defects=(
                Defect("Padding is the end token and is masked by its id, so no end token is ever trained on.", True),
                Defect(
                    "The mask that counts tokens is shifted by one: a truncated row is divided by one token too few. A "
                    "row that ended is not: its end token is the one that is missing.",
                    True,
                ),
                Defect(
                    "Positions outside the mask add a constant to the reported loss, which has no slope to train on.",
                    False,
                ),
                Defect(
                    "Rewards and advantages are float16: advantages are off by up to 5e-4 of themselves. The kernels "
                    "here are float32 and float64, and which way it rounds is torch's.",
                    False,
                ),
            ),
        ),
        "r1_blog": Preset(
            source="the article on DeepSeek-R1 and GRPO, its listings",
            summary="A times the sum of a completion's log-probs, a KL weight that falls from 0.1 to 0.04; "
            "accuracy, format and length rewarded together.",
            reward='published("r1_blog")',
            choices=cited(
                (
                    "grpo_loss",
                    {
                        "baseline": "mean",
                        "reward_scaling": "group",
                        "ddof": 1,
                        "std_epsilon": 1e-8,
                        "policy_loss": "reinforce",
                        "loss_aggregation": "sequence_sum",
                        "kl_in": "loss",
                        "zero_variance": "keep",
                        "kl_bias_correction": False,
                    },
                ),
                (
                    "verl's k1+: the article's value with the sign right, and the slope of a divergence",
                    {"kl_estimator": "k1+"},
                ),
                (
                    "cosine_beta_schedule, its middle turned round",
                    {"kl_coef": 0.1, "kl_coef_end": 0.04, "kl_schedule": "cosine"},
                ),
                ("GRPOTrainer: a frozen copy of the SFT model", {"reference": "frozen"}),
                ("the R1 trainer", {"group_size": 16}),
                (
                    "sample_responses",
                    {"temperature": 0.7, "top_p": 1.0, "max_new_tokens": 512, "prompt_template": None},
                ),
                ("train_step", {"max_grad_norm": 1.0, "updates_per_batch": 1, "mini_batches": 1}),
                (
                    OURS,
                    {
                        "mask_truncated": False,
                        "prompts_per_step": 16,
                        "learning_rate": 1e-6,
                        "lr_schedule": "constant",
                        "warmup_steps": 0,
                        "min_lr_ratio": 0.0,
                        "weight_decay": 0.0,
                        "adam_beta1": 0.9,
                        "adam_beta2": 0.999,
                    },
                ),
            ),
            published=cited(
                ("grpo_loss: + beta (ref − log p)", {"kl_estimator": "k1_inverted"}),
                ("cosine_beta_schedule as printed", {"kl_schedule": "cosine_inverted"}),
            ),
            defects=(
                Defect("Its penalty has the wrong sign: it rewards drifting away from the reference.", True),
                Defect(
                    "Its weight's cosine is upside down: 0.1, a drop to 0.04, a climb back to 0.1, then 0.04.", True
                ),
                Defect(
                    "It sums log-probs over the whole vocabulary, not those of the tokens taken, so that its slope "
                    "knows nothing of what was sampled. Not brought back: it is no policy gradient, and needs the "
                    "logits of every token.",
                    False,
                ),
            ),
        ),
    }
)
