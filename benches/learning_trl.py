"""TRL's GRPOTrainer on a cell of the learning study: the same warm start, rows, rewards and completions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from rlox_grpo.config.schema import GRPOConfig as OurConfig
from rlox_grpo.model.load import load_policy
from rlox_grpo.prompts.load import load_prompts
from step_systems import TRL_ALONE

VARIANTS: dict[str, Mapping[str, Any]] = {
    "trl": {"num_generations": 8, "lr_scheduler_type": "linear"},
    "trl_same_choices": {
        "lr_scheduler_type": "constant_with_warmup",
        "warmup_steps": 3,
        "loss_type": "grpo",
    },
}
"""Arguments of ``GRPOConfig``. ``trl`` has the defaults of TRL 1.16, ``trl_same_choices`` those of the study's default.

Both take the learning rate, the completions of a step, their length and, if it is not set here, the group size from the
task: TRL has no default for a task.
"""

CURVES = {"reward/mean": "reward", "policy/entropy": "entropy", "completions/mean_length": "completions/mean_length"}
"""The study's names of what TRL logs."""


def prepare(policy: Path, rows: Sequence[Mapping[str, Any]], template: str | None) -> list[dict[str, Any]]:
    """Import TRL and write each row's prompt as text, so that neither counts as training.

    Raises:
        ValueError: a prompt that TRL would tokenise to other ids than this library.
    """
    import datasets  # noqa: F401
    import trl.trainer.grpo_trainer  # noqa: F401

    tokenizer = AutoTokenizer.from_pretrained(policy)
    written = []
    for prompt in load_prompts(rows, tokenizer, template):
        if tokenizer(text=[prompt.text])["input_ids"] != [prompt.token_ids.tolist()]:
            raise ValueError(f"rows[{prompt.index}]: TRL would tokenise the prompt to other ids: {prompt.text!r}")
        written.append({**prompt.columns, "prompt": prompt.text})
    return written


def train(
    policy: Path,
    rows: Sequence[Mapping[str, Any]],
    reward_fn: Sequence[Any],
    variant: str,
    settings: Mapping[str, Any],
    steps: int,
    seed: int,
    folder: Path,
) -> tuple[dict[str, Any], dict[str, list[float]]]:
    """Train ``policy`` on rows from :func:`prepare` and save it to ``folder``.

    Returns the arguments of ``GRPOConfig`` that the study sets, and the rewards and lengths of each step.
    """
    from datasets import Dataset
    from transformers.trainer_callback import PrinterCallback
    from trl import GRPOConfig, GRPOTrainer

    model = AutoModelForCausalLM.from_pretrained(policy)
    in_bfloat16 = settings.get("dtype") == "bfloat16"  # of a pretrained model, and of none from scratch
    passes = 2 if in_bfloat16 else 1  # all activations of a pretrained model in one backward pass are 13 GB
    arguments = {
        "num_generations": settings["group_size"],
        "per_device_train_batch_size": settings["group_size"] * settings["prompts_per_step"] // passes,
        "gradient_accumulation_steps": passes,
        "max_completion_length": settings["max_new_tokens"],
        "learning_rate": settings["learning_rate"],
        "reward_weights": [getattr(rule, "weight", 1.0) for rule in reward_fn],  # a function of the user has none
        "max_steps": steps,
        "seed": seed,
        **VARIANTS[variant],
        # Not a choice of the algorithm: no second forward pass, which would only cost time.
        "gradient_checkpointing": False,
    }
    trainer = GRPOTrainer(
        model,
        reward_funcs=list(reward_fn),
        args=GRPOConfig(
            output_dir=str(folder),
            bf16=torch.cuda.is_available() or in_bfloat16,  # as this library's cells; TRL's own is bfloat16 for all
            logging_steps=1,
            **{**TRL_ALONE, "use_cpu": not torch.cuda.is_available()},
            **arguments,
        ),
        train_dataset=Dataset.from_list([dict(row) for row in rows]),
        processing_class=AutoTokenizer.from_pretrained(policy),
    )
    ends = load_policy(policy, None, OurConfig()).eos_token_ids
    if set(trainer.eos_token_ids) != set(ends):
        raise ValueError(f"TRL ends a completion at the tokens {trainer.eos_token_ids}, this library at {ends}")
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    trainer.save_model(str(folder))
    log = [entry for entry in trainer.state.log_history if "reward" in entry]
    return arguments, {ours: [float(f"{entry[theirs]:.4g}") for entry in log] for ours, theirs in CURVES.items()}
