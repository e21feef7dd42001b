"""Advice for an unknown option: the option with that name in TRL or verl, or the option with the nearest name."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping

_NO_CRITIC = "there is none: GRPO has no critic"
_RULE = "pass the function to GRPO as reward_fn, or name it in [[rewards]] as 'module:function'"


def index_by_name(advice: Mapping[str, str]) -> Mapping[str, str]:
    """Invert a table of advice → foreign names, separated by spaces."""
    return {name: what for what, names in advice.items() for name in names.split()}


VERL_GROUPS = frozenset(
    {
        "actor_rollout_ref", "algorithm", "critic", "custom_reward_function", "data", "distillation",
        "global_profiler", "ray_kwargs", "reward", "reward_model", "sandbox_fusion", "skip", "trainer",
        "transfer_queue",
    }
)  # fmt: skip
"""First parts of verl's keys."""

OTHER_PARTS: Mapping[str, str] = {
    "critic": _NO_CRITIC,
    "distillation": "there is none: no loss is against a teacher",
    "transfer_queue": "there is none: batches stay in the trainer's process",
    "qat": "there is none: weights are trained in float32",
    "mtp": "there is none: a model predicts one token",
    "profiler": "there is none: use torch.profiler around train()",
    "global_profiler": "there is none: use torch.profiler around train()",
    "reward_model": "give a reward model by its path: reward_fn='path', or a [[rewards]] table with name = "
    "'reward_model'",
    "sandbox_fusion": "use the reward rlox_grpo.rewards.PythonTests, which has its own sandbox",
    "ref": "there is none: a frozen reference computes with the policy's options; reference chooses it, and "
    "reference='server' keeps it elsewhere",
    "val_kwargs": "set eval_samples and eval_greedy; evaluations sample as training does",
    "reward_manager": _RULE,
    "custom_reward_function": _RULE,
}
"""Parts of verl's keys under which an option differs from the option of the same name here."""

_BOTH: Mapping[str, tuple[str, str]] = {
    "set engine='vllm' or engine='vllm_server'": ("use_vllm", "rollout.mode"),
    "there is none: dropout is off": ("disable_dropout", "lora.dropout"),
    "pass it to GRPO as tokenizer": ("processing_class", "data.tokenizer"),
    "start one process for each GPU with torchrun": (
        "ddp_backend local_rank",
        "data_parallel_size n_gpus_per_node nnodes world_size",
    ),
    "gradient_checkpointing": ("", "enable_gradient_checkpointing"),
    "there is none: log-probs are computed without all the logits at once": (
        "use_liger_kernel liger_kernel_config",
        "entropy_checkpointing entropy_from_logits_with_chunking use_fused_kernels use_liger",
    ),
    "there is none: models are text only": ("log_multimodal", "image_key"),
    "max_turns": ("", "max_assistant_turns"),
    "group_size": ("num_generations", "n_resp_per_prompt rollout_n n"),
    "there is none: a rank that shows life is waited for; rank_timeout is the time without a sign of life": (
        "ddp_timeout",
        "nccl_timeout",
    ),
    "load the model yourself and pass it as model": ("model_init_kwargs trust_remote_code", "override_config"),
    "max_new_tokens": ("max_completion_length", "response_length max_response_length"),
    "set importance_mode='mask' with importance_cap and importance_floor": ("", "rollout_rs rollout_rs_threshold"),
    "set both in sapo_temperatures = [positive, negative]": (
        "sapo_temperature_neg sapo_temperature_pos",
        "tau_neg tau_pos",
    ),
    "torch_compile": ("", "use_torch_compile"),
    "clip_high": ("epsilon_high", "clip_ratio_high"),
    "clip_low": ("epsilon", "clip_ratio_low"),
    "output_dir": ("", "default_local_dir"),
    "there is none: trackers name a run by its output_dir, and WANDB_PROJECT in the environment is the project": (
        "run_name project",
        "experiment_name project_name",
    ),
    "engine_sleep": ("vllm_enable_sleep_mode", "free_cache_engine"),
    "set shard_parameters=true, which shards over all ranks": ("fsdp fsdp_config", "fsdp_size"),
    "prompts_per_step": ("", "train_batch_size"),
    "kl_coef": ("beta", "kl_loss_coef"),
    "log_to": ("report_to", "logger"),
    "lr_schedule": ("lr_scheduler_type", "lr_scheduler warmup_style"),
    "warmup_steps": ("", "lr_warmup_steps"),
    "it is a share, and warmup_steps a number of steps: warmup_steps = share · the steps of the run": (
        "warmup_ratio",
        "lr_warmup_steps_ratio",
    ),
    "keep_checkpoints": ("save_total_limit", "max_actor_ckpt_to_keep"),
    "engine_max_length": ("vllm_max_model_length", "max_model_len"),
    "reward_scaling": ("scale_rewards", ""),
    "updates_per_batch": ("num_iterations", "ppo_epochs"),
    "resume": ("resume_from_checkpoint", "resume_from_path"),
    "importance_correction": ("", "rollout_is"),
    "importance_cap": ("vllm_importance_sampling_cap vllm_importance_sampling_clip_max", "rollout_is_threshold"),
    "importance_floor": ("vllm_importance_sampling_clip_min", "rollout_is_threshold_lower"),
    "checkpoint_steps": ("save_steps", "save_freq"),
    "tensor_parallel_size": ("vllm_tensor_parallel_size", "tensor_model_parallel_size"),
    "eval_steps": ("", "test_freq"),
    "pass n_epochs to train(), or write it in the run file": ("num_train_epochs", "total_epochs"),
    "there is none: eval_prompts are always evaluated at the start": ("eval_on_start eval_delay", "val_before_train"),
}
"""Advice → the names in TRL, and those in verl."""

VERL: Mapping[str, str] = index_by_name(
    {
        **{advice: names for advice, (_, names) in _BOTH.items()},
        "engine": "rollout.name",
        "pass it to GRPO as model": "model.path model_path",
        "lora_rank": "lora.rank",
        "lora_alpha": "lora.alpha",
        "there is none: engines always get merged weights": "lora.merge",
        "there is none: ranks always get micro-batches of balanced cost": "balance_batch",
        "bypass_old_log_probs": "bypass_mode",
        "there is none: the sampler's log-probs are always recorded": "calculate_log_probs",
        "max_grad_norm": "clip_grad grad_clip",
        _NO_CRITIC: "critic_warmup lam max_critic_ckpt_to_keep",
        "pass a tokenizer whose chat_template you have set": "custom_chat_template",
        _RULE: "custom_reward_function reward_manager",
        "there is none: training samples; eval_greedy evaluates greedily": "do_sample",
        "there is none: gradient_checkpointing saves activations' memory": "enable_activation_offload",
        "there is none: start `rlox-grpo serve` with vLLM's own flags and set "
        "engine='vllm_server'": "enable_chunked_prefill enable_prefix_caching enforce_eager max_num_batched_tokens",
        "there is none: a prompt that is too long for the model is an error": "filter_overlong_prompts prompt_length "
        "truncation max_prompt_length",
        "pass functions or environments to GRPO as tools or environment": "function_tool_path multi_turn "
        "tool_config_path",
        "there is none: rewards are not discounted": "gamma",
        "there is none: micro_batch_tokens bounds every forward pass": "log_prob_max_token_len_per_gpu "
        "log_prob_micro_batch_size log_prob_micro_batch_size_per_gpu log_prob_use_dynamic_bsz",
        "there is none: evaluations write their completions to the run's folder": "log_val_generations "
        "validation_data_dir",
        "pass the adapter's folder to GRPO as model": "lora_adapter_path",
        "set loss_aggregation='fixed_length', which divides by max_new_tokens": "loss_scale_factor",
        "set async_steps, the number of steps that generation runs ahead": "max_off_policy_threshold",
        "it counts messages to the policy, and max_turns its replies: max_turns = max_user_turns + 1": "max_user_turns",
        "there is none: output_dir has the completions, and log_completions is their number": "rollout_data_dir",
        "it is a number of prompts, and mini_batches a number of parts: mini_batches = train_batch_size / "
        "ppo_mini_batch_size": "ppo_mini_batch_size",
        "it is a number of sequences, and micro_batch_tokens of tokens: micro_batch_tokens = sequences · (longest "
        "prompt + max_new_tokens)": "ppo_micro_batch_size ppo_micro_batch_size_per_gpu",
        "set prompts_per_step to the prompts that are trained; zero_variance='refill' samples as many more as are "
        "missing": "gen_batch_size",
        "set reward_scaling='group' for true, 'none' for false": "norm_adv_by_std_in_grpo",
        "set resume='auto' for auto, the path of a checkpoint for resume_path, 'never' with a new output_dir for "
        "disable": "resume_mode",
        "set kl_in='reward' and kl_coef": "kl_ctrl.kl_coef use_kl_in_reward",
        "there is none: prompts are always shuffled, by seed": "shuffle",
        "there is none: engines get the trainer's weights before the first completion": "load_format",
        "there is none: environment or tools make a run of several turns": "multi_turn.enable",
        "max_observation_chars": "max_tool_response_length",
        "there is none: shard_parameters shards by transformer block": "min_num_params",
        "there is none: weights are float32; dtype is the arithmetic's": "model_dtype",
        "set updater='deepspeed', zero_stage=3 and offload_params=true": "offload_policy param_offload",
        "optim": "optimizer",
        "there is none: tensor_parallel_size splits vLLM's model": "pipeline_model_parallel_size",
        "there is none: reward functions get chat prompts as messages": "return_raw_chat",
        "there is none: reward functions read every column by name": "reward_fn_key",
        "there is none: importance weights are not normalised": "rollout_is_batch_normalize",
        "there is none: every checkpoint has weights, optimizer and state": "save_contents",
        "set updater='torch' with shard_parameters (FSDP2), or updater='deepspeed'": "strategy",
        "there is none: give the rows that you want as prompts": "train_max_samples val_max_samples",
        "there is none: a row is never split over ranks": "ulysses_sequence_parallel_size",
        "there is none: each prompt is always computed once for its group where the model allows "
        "it": "use_prefix_grouper",
        "there is none: rows are packed where the model allows it": "use_remove_padding",
        "max_rollout_rows": "max_num_seqs",
        "there is none: max_rollout_rows bounds what is decoded at once": "val_batch_size",
        "use `rlox-grpo eval`, or trainer.evaluate": "val_only",
        "chat_template_kwargs": "apply_chat_template_kwargs",
        "set baseline and reward_scaling, or a preset": "adv_estimator",
        "set adam_beta1 and adam_beta2": "betas",
        "set both in covariance_bounds = [clip_cov_lb, clip_cov_ub]": "clip_cov_lb clip_cov_ub",
        "covariance_share": "clip_cov_ratio kl_cov_ratio",
        "set clip_low and clip_high": "clip_ratio",
        "dual_clip": "clip_ratio_c",
        "entropy_coef": "entropy_coeff",
        "set zero_variance='refill' and max_refills": "filter_groups",
        "kl_horizon": "horizon",
        "kl_estimator": "kl_loss_type kl_penalty",
        "loss_aggregation": "loss_agg_mode",
        "policy_loss": "loss_mode",
        "learning_rate": "lr",
        "it counts the first batch too: max_refills = max_num_gen_batches - 1": "max_num_gen_batches",
        "offload_optimizer": "optimizer_offload",
        "add the reward rlox_grpo.rewards.Overlong": "overlong_buffer",
        "covariance_kl_coef": "ppo_kl_coef",
        "micro_batch_tokens": "ppo_max_token_len_per_gpu",
        "prompt_column": "prompt_key",
        "kl_target": "target_kl",
        "lora_target_modules": "target_modules",
        "max_steps": "total_training_steps",
        "train_data": "train_files",
        "there is none: micro_batch_tokens always bounds a forward pass": "use_dynamic_bsz",
        "set kl_in='loss' and kl_coef": "use_kl_loss",
        "eval_data": "val_files",
    }
)
"""Last words of verl's keys, such as ``ppo_epochs`` → the option here, or advice."""


TRL: Mapping[str, str] = index_by_name(
    {
        **{advice: names for advice, (names, _) in _BOTH.items()},
        "there is none: the engine has its own cache": "cache_implementation use_cache",
        "there is none: weights are float32": "cast_lm_head_to_fp32",
        "there is none: engines always get whole weights": "ds3_gather_for_generation",
        "there is none: entropy_coef is constant": "entropy_coef_delta entropy_coef_max entropy_coef_min "
        "entropy_target use_adaptive_entropy",
        "set policy_loss='gspo' for ratios of whole sequences": "importance_sampling_level",
        "there is no such upload: the run's folder has them, under completions/": "log_completions_hub_repo",
        "there is none: log_completions sets how many completions are written": "log_unique_prompts",
        "set loss_aggregation (grpo: 'sequence_mean', dapo and bnpo: 'token_mean', dr_grpo: 'fixed_length'), or "
        "policy_loss (cispo_cap for TRL's cispo, sapo, vespo)": "loss_type",
        "mask_truncated": "mask_truncated_completions",
        "reward_aggregation": "multi_objective_aggregation",
        "eval_samples": "num_generations_eval",
        "it counts completions, and prompts_per_step prompts: prompts_per_step = generation_batch_size / "
        "num_generations": "generation_batch_size",
        "it counts micro-batches, and mini_batches optimizer steps: mini_batches = steps_per_generation / "
        "gradient_accumulation_steps": "steps_per_generation",
        "it counts rounds of calls, and max_turns replies: max_turns = max_tool_calling_iterations + "
        "1": "max_tool_calling_iterations",
        "set gradient_checkpointing, which has no further arguments": "gradient_checkpointing_kwargs",
        "set torch_compile=true; backend and mode are torch's defaults": "torch_compile_backend torch_compile_mode",
        "there is none: completions are written to output_dir, and log_completions is their "
        "number": "num_completions_to_print",
        "there is none: no sequence is masked by its divergence and the sign of its "
        "advantage": "off_policy_mask_threshold",
        "there is none: the files of tensorboard are in output_dir": "logging_dir",
        "there is none: choose another output_dir": "overwrite_output_dir",
        "set importance_correction='token' or 'sequence' for true, 'none' for "
        "false": "vllm_importance_sampling_correction",
        "set checkpoint_steps, the number of steps between checkpoints": "save_strategy",
        "pass eval_prompts to train() and set eval_steps, the number of steps between "
        "evaluations": "eval_strategy evaluation_strategy",
        "there is none: micro_batch_tokens bounds a forward pass": "pad_to_multiple_of auto_find_batch_size",
        "reference_mix": "ref_model_mixup_alpha",
        "reference_refresh_steps": "ref_model_sync_steps",
        "with vLLM set generation_kwargs={'repetition_penalty': …}": "repetition_penalty",
        "there is none: the loss has no term of a router": "router_aux_loss_coef",
        "there is none: prompts are always shuffled, by seed": "shuffle_dataset train_sampling_strategy",
        "set reference='periodic' and reference_refresh_steps": "sync_ref_model",
        "top_entropy_share": "top_entropy_quantile",
        "there is none: the engine batches by itself": "transformers_continuous_batching_config "
        "use_transformers_continuous_batching use_transformers_paged",
        "kl_bias_correction": "use_bias_correction_kl",
        "set all four in vespo_shape = [k_pos, lambda_pos, k_neg, lambda_neg]": "vespo_k_neg vespo_k_pos "
        "vespo_lambda_neg vespo_lambda_pos",
        "gpu_memory_utilization": "vllm_gpu_memory_utilization",
        "there is none: server_nccl_address is this host's address": "vllm_group_port",
        "set importance_correction ('token' or 'sequence') and importance_mode ('truncate' or "
        "'mask')": "vllm_importance_sampling_mode",
        "set engine='vllm' (colocate) or engine='vllm_server' (server)": "vllm_mode",
        "there is none: vLLM chooses": "vllm_model_impl",
        "server_urls": "vllm_server_base_url",
        "set server_urls=['http://HOST:PORT']": "vllm_server_host vllm_server_port",
        "there is none: start the servers first; server_timeout is the time of a rollout or a weight "
        "sync": "vllm_server_timeout",
        "there is none: completions are not constrained": "vllm_structured_outputs_regex",
        "give the options as keywords, or config=GRPOConfig(…)": "args",
        "pass it to train() as eval_prompts": "eval_dataset",
        "set lora_rank, lora_alpha and lora_target_modules, or pass a PeftModel as model": "peft_config",
        "pass them to GRPO as reward_fn": "reward_funcs",
        "pass it to train() as prompts": "train_dataset",
        "pass it to GRPO as environment": "environment_factory",
        "pass a function of the parameters to GRPO as optimizer": "optimizers",
        "set load_in_4bit=true and lora_rank": "quantization_config",
        "there is none: a reward model's tokenizer is the one in its folder": "reward_processing_classes",
        "pass an async function to GRPO as environment": "rollout_func",
        "return (scores, metrics) from the reward function; completions are logged by log_completions": "log_extra",
        "return (scores, metrics) from the reward function": "log_metric",
        "there is none: a callback's on_step(step, metrics) has the step": "trainer_state",
        "set dtype='bfloat16'": "bf16",
        "seed": "data_seed",
        "there is none: prompts are read at the start": "dataloader_num_workers",
        "set updater='deepspeed' and zero_stage": "deepspeed",
        "set log_to without 'console'": "disable_tqdm",
        "pass eval_prompts to train() and set eval_steps": "do_eval",
        "there is none: dtype is 'float32' or 'bfloat16'": "fp16 fp16_full_eval",
        "there is none: a run on one device repeats by seed": "full_determinism",
        "set prompts_per_step (prompts in a step) and micro_batch_tokens (tokens in one forward "
        "pass)": "gradient_accumulation_steps per_device_train_batch_size",
        "call trainer.push_to_hub(repo_id) after training": "hub_model_id push_to_hub hub_always_push hub_strategy",
        "there is none: keep_checkpoints keeps the newest": "load_best_model_at_end greater_is_better "
        "metric_for_best_model",
        "there is none: metrics are logged every step": "logging_first_step logging_steps logging_strategy",
        "set min_lr_ratio, the last learning rate as a share of the peak": "lr_scheduler_kwargs",
        "there is none: it would make the sampled distribution differ from the trained one": "neftune_noise_alpha",
        "set adam_beta1, adam_beta2 and adam_epsilon": "optim_args",
        "there is none: max_rollout_rows bounds what is decoded at once": "per_device_eval_batch_size",
        "there is none: every column reaches the reward functions": "remove_unused_columns",
        "there is none: trainer.save(path) writes the model alone": "save_only_model",
        "there is none: CUDA_VISIBLE_DEVICES='' hides the GPU": "use_cpu",
        "there is none: ranks come from torchrun, and accelerate is not used": "accelerator_config",
        "there is none: denominators are always those of all ranks": "average_tokens_across_devices",
        "there is none: an evaluation samples completions, and scores them": "batch_eval_metrics do_predict "
        "eval_accumulation_steps eval_do_concat_batches eval_use_gather_object include_for_metrics "
        "prediction_loss_only",
        "there is none: an evaluation computes in dtype, as training does": "bf16_full_eval",
        "there is none: prompts are read at the start, without a data loader": "dataloader_drop_last "
        "dataloader_in_order dataloader_multiprocessing_context dataloader_persistent_workers "
        "dataloader_pin_memory dataloader_prefetch_factor length_column_name",
        "there is none: ranks sum their gradients once a step": "ddp_broadcast_buffers ddp_bucket_cap_mb "
        "ddp_find_unused_parameters ddp_static_graph",
        "there is none: logits that are not finite always stop the run": "debug logging_nan_inf_filter",
        "there is none: train() trains": "do_train",
        "there is none: SIGTERM always saves a checkpoint": "enable_jit_checkpoint",
        "call trainer.push_to_hub(repo_id, private=True) after training": "hub_private_repo",
        "call trainer.push_to_hub(repo_id, revision=…) after training": "hub_revision",
        "call trainer.push_to_hub(repo_id, token=…) after training, or set HF_TOKEN": "hub_token",
        "there is none: prompts depend on the step alone, so nothing is skipped": "ignore_data_skip",
        "there is none: perf/* in the metrics counts tokens": "include_num_input_tokens_seen",
        "there is none: rewards read columns by name": "label_names",
        "there is none: there are no labels": "label_smoothing_factor",
        "there is none: set log_to, or the level of Python's logger rlox_grpo": "log_level log_level_replica "
        "log_on_each_node",
        "there is none: the optimizer updates every weight that requires a gradient": "optim_target_modules",
        "set shard_parameters, or updater='deepspeed'": "parallelism_config",
        "there is none: callbacks keep their own state": "restore_callback_states_from_checkpoint",
        "there is none: rank 0 writes to output_dir, which all hosts read": "save_on_each_node",
        "there is none: perf/…_memory_gib_max is always in the metrics": "skip_memory_metrics",
        "there is none: set torch.set_float32_matmul_precision": "tf32",
        "there is none: the cache is emptied where an engine needs its memory": "torch_empty_cache_steps",
        "there is none: trackio writes to its folder on this machine": "trackio_bucket_id trackio_space_id "
        "trackio_static_space_id",
    }
)
"""Options of TRL's ``GRPOConfig``, ``GRPOTrainer`` and ``TrainingArguments`` → the option here, or advice."""

OTHER: Mapping[str, str] = {
    "data": "pass it to train() as prompts; in a run file it is train_data",
    "dataset": "pass it to train() as prompts; in a run file it is train_data",
    "device": "there is none: a model goes to this process's GPU if there is one",
    "eval_data": "pass it to train() as eval_prompts; it is a key of run files",
    "eval_prompts": "pass it to train()",
    "n_epochs": "pass it to train(); it is a key of run files too",
    "GRPOTrainer": "it is rlox_grpo.GRPO, and its train() gets the prompts",
    "prompts": "pass it to train()",
    "save_model": "call trainer.save(path)",
    "add_callback": "pass callbacks to GRPO",
    "predict": "call trainer.evaluate(prompts)",
    "train_data": "pass it to train() as prompts; it is a key of run files",
}
"""Arguments of methods, keys of run files, and TRL's class and methods → what to use."""

_RUN_FILE_KEYS = ("launcher", "layout")
"""Keys of run files that start processes, which ``GRPO(…)`` in Python cannot do."""

_FEW = 10
_NEAR = 0.8
"""Least similarity of a suggested name. That of ``group_sze`` to ``group_size`` is 0.95; that of ``save_steps`` to
``max_steps``, which is no typo, is 0.74."""


def advise(name: str, known: Iterable[str]) -> str:
    """Return the end of the error about an unknown option: ``: did you mean 'kl_coef'? (TRL's beta)``."""
    known = list(known)
    if name in _RUN_FILE_KEYS:
        return (
            ": it is a key of run files, because Ray starts other processes than this one. Write a run file and start "
            "`rlox-grpo train run.toml --ray auto`; from Python: GRPO(..., launcher='ray', layout={'trainers': 2})"
        )
    if name.partition(".")[0] in VERL_GROUPS and "." in name:
        return _advise_on_verls_key(name, known)
    for library, names in (("TRL", TRL), ("verl", VERL)):
        if name in names:
            advice = names[name]
            return (
                f": did you mean {advice!r}? ({library}'s {name})" if advice in known else f" ({library}'s): {advice}"
            )
    if name in OTHER:
        return f": {OTHER[name]}"
    if close := difflib.get_close_matches(name, known, n=1, cutoff=_NEAR):
        return f": did you mean {close[0]!r}?"
    # A table with few keys, such as [layout], is not on the page of options.
    return f"; expected {', '.join(known)}" if len(known) < _FEW else "; `rlox-grpo options` lists the options"


def _advise_on_verls_key(key: str, known: Iterable[str]) -> str:
    """As :func:`advise`, for a full key such as ``actor_rollout_ref.rollout.n``; looks up the longest known ending."""
    for part, advice in OTHER_PARTS.items():
        if f".{part}." in f".{key}.":
            return f" (verl's): {advice}"
    words = key.split(".")
    for end in (".".join(words[first:]) for first in range(len(words))):
        if end in known:
            return f": did you mean {end!r}? (verl's {end})"
        if found := VERL.get(end) or TRL.get(end):
            return f": did you mean {found!r}? (verl's {end})" if found in known else f" (verl's): {found}"
    return " (verl's): there is no such option; `rlox-grpo options` lists the options"
