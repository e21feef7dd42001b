"""TRL's PPO trainer on a cell of the learning study: policy, value model, reference and a rule as its reward model.

TRL 1.16 has no PPO trainer any more. 1.12 has one, in a folder of its own beside the installed TRL:

    pip install --target runs/trl-1.12 --no-deps trl==1.12.0
    PYTHONPATH=runs/trl-1.12 python benches/learning.py --cells 'countdown/trl_ppo/[0-2]'
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from step_systems import TRL_ALONE

VARIANTS: dict[str, Mapping[str, Any]] = {"trl_ppo": {}, "trl_ppo_one_epoch": {"num_ppo_epochs": 1}}
"""Arguments of TRL's ``PPOConfig``. The defaults have four epochs over the batch, and a KL penalty of 0.05."""


class Rule(nn.Module):
    """The form of a reward model that TRL's PPO takes, around reward functions: the rewards are its hidden states."""

    base_model_prefix = "rule"

    def __init__(self, reward_fn: Sequence[Any], rows: Mapping[tuple[int, ...], Mapping[str, Any]], tokenizer: Any):
        """``rows`` are the columns of each prompt by its token ids, of which all prompts have as many."""
        super().__init__()
        self.reward_fn, self.rows, self.tokenizer = reward_fn, rows, tokenizer
        (self.length,) = {len(ids) for ids in rows}
        self.score = nn.Identity()

    def rule(self, input_ids: Tensor, attention_mask: Tensor, **_: Any) -> Any:
        """Return each row's reward at every position, ``[N, L, 1]``."""
        kept = [ids[mask].tolist() for ids, mask in zip(input_ids, attention_mask, strict=True)]
        prompts, completion_ids = [ids[: self.length] for ids in kept], [ids[self.length :] for ids in kept]
        found = [self.rows[tuple(ids)] for ids in prompts]
        given = {name: [row[name] for row in found] for name in found[0] if name != "prompt"}
        texts = [self.tokenizer.decode(ids, skip_special_tokens=True) for ids in completion_ids]
        given |= {"prompts": [row["prompt"] for row in found], "completions": texts, "completion_ids": completion_ids}
        totals = torch.zeros(len(texts))
        for function in self.reward_fn:
            totals += function.weight * torch.tensor(function(**given), dtype=torch.float32)
        return SimpleNamespace(hidden_states=[totals[:, None, None].expand(-1, input_ids.shape[1], 1)])


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
    """As :func:`learning_trl.train`. The value model starts from the policy with a new head."""
    if find_spec("trl.experimental.ppo") is None:
        raise SystemExit((__doc__ or "").strip())
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer
    from trl.experimental.ppo import PPOConfig, PPOTrainer

    tokenizer = AutoTokenizer.from_pretrained(policy, padding_side="left")
    ids = [tokenizer(row["prompt"])["input_ids"] for row in rows]
    columns = {tuple(prompt): row for prompt, row in zip(ids, rows, strict=True)}
    batch = settings["group_size"] * settings["prompts_per_step"]
    arguments = {
        "per_device_train_batch_size": batch,
        "local_rollout_forward_batch_size": batch,
        "total_episodes": steps * batch,
        "response_length": settings["max_new_tokens"],
        "temperature": 1.0,
        "stop_token": "eos",
        "learning_rate": settings["learning_rate"],
        "lr_scheduler_type": "constant_with_warmup",
        "warmup_steps": 3,
        "seed": seed,
        **VARIANTS[variant],
    }
    model = AutoModelForCausalLM.from_pretrained(policy)
    trainer = PPOTrainer(
        args=PPOConfig(
            output_dir=str(folder),
            bf16=False,
            logging_steps=1,
            num_sample_generations=0,
            gradient_checkpointing=False,
            **TRL_ALONE,
            **arguments,
        ),
        processing_class=tokenizer,
        model=model,
        ref_model=AutoModelForCausalLM.from_pretrained(policy),
        reward_model=Rule(reward_fn, columns, tokenizer),
        value_model=AutoModelForSequenceClassification.from_pretrained(policy, num_labels=1),
        train_dataset=Dataset.from_dict({"input_ids": ids * math.ceil(steps * batch / len(ids))}),
    )
    trainer.train()
    model.save_pretrained(folder)  # not by the trainer: its TRL knows an older transformers
    tokenizer.save_pretrained(folder)
    log = [entry for entry in trainer.state.log_history if "objective/scores" in entry]
    return arguments, {"reward/mean": [float(f"{entry['objective/scores']:.4g}") for entry in log]}
