"""One step of a run file with a small random model, in this process: ``rlox-grpo train RUN.TOML --dry-run``."""

from __future__ import annotations

import logging
import math
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers
from transformers.utils.logging import disable_progress_bar

from rlox_grpo.config.eval_set import UNNAMED, list_sets
from rlox_grpo.config.generation_kwargs import list_honoured
from rlox_grpo.config.records import (
    EngineConfig,
    ExpertConfig,
    LoraConfig,
    OptimizerConfig,
    Options,
    UpdateConfig,
    UpdaterConfig,
)
from rlox_grpo.config.schema import GRPOConfig
from rlox_grpo.errors import ConfigError
from rlox_grpo.model.load import find_end_tokens, find_tokenizer, read_settings, refuse_missing_folder
from rlox_grpo.prompts.load import list_entries
from rlox_grpo.reference.teacher import EMA, SELF
from rlox_grpo.trainer import GRPO

if TYPE_CHECKING:
    from rlox_grpo.config.run_file import Origin
    from rlox_grpo.rewards import RewardFn

MACHINE = (EngineConfig, UpdateConfig, OptimizerConfig, UpdaterConfig, LoraConfig, ExpertConfig)
"""Records of options that only a real model on its own machine can try; a dry run has their defaults."""

SMALL: Mapping[str, Any] = {
    "group_size": 2,
    "prompts_per_step": 4,
    "max_steps": 1,
    "dtype": "float32",
    "zero_variance": "keep",
    "eval_samples": 1,
    "log_to": (),
}
"""Options of the size of a dry run, in which each group is trained."""

RESET = (
    # What needs several steps, several evaluations, or a group size of its own.
    *("max_group_size", "async_steps", "drop_stale", "partial_rollout_turns", "replay", "replay_prompts"),
    *("replay_max_age", "reward_variance_share", "max_refills", "on_collapse", "mutual_information_steps"),
    *("eval_greedy", "eval_steps"),
    # What is read only with another engine, dtype or with async_steps.
    *("importance_cap", "importance_mode", "importance_floor"),
    # Models and servers that a dry run replaces.
    *("reference_url", "reference_token_file", "reference_timeout"),
    *("teacher_token_file", "teacher_timeout", "teacher_offload"),
)
"""Options that have their defaults in a dry run, as those of :data:`MACHINE` have."""

END_SHARE = 0.1
"""How likely a token is the last one."""

HELD_OUT_ROWS = 4
"""Rows of each held-out set that a dry run evaluates."""


def run_dry(
    origin: Origin,
    config: GRPOConfig,
    rewards: list[RewardFn],
    train_data: Any,
    eval_data: Any,
    *,
    environment: Any,
    tools: list[Callable[..., Any]],
    say: Callable[[str], None] = print,
) -> None:
    """Take one step and one evaluation with a random model in place of the run's, and report what they read.

    All training rows are read and checked. The tokenizer, the chat template, the rewards, the environment and the judge
    are those of the run.

    Raises:
        ConfigError: the model reads pictures, or has no tokenizer.
        Exception: what the run would raise.
    """
    disable_progress_bar()  # type: ignore[no-untyped-call]  # transformers shows one for each small file that it writes
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        model = Path(folder) / "model"
        write_stand_in(origin.model, model, config)
        teacher = origin.teacher
        if teacher is not None:
            write_stand_in(origin.model, other := Path(folder) / "teacher", config)  # other weights: its KL is above 0
            teacher = replace_teachers(teacher, other)
        trainer = GRPO(
            model,
            rewards,
            None if origin.ref_model is None else model,
            environment=environment,
            tools=tools,
            teacher=teacher,
            config=shrink(config, Path(folder) / "run", train_data),
        )
        with quiet_folder():
            held_out = take_first(eval_data, keeps_samples=config.keep_best is not None)
            metrics = trainer.train(train_data, eval_prompts=held_out)
        prompt = trainer.last_rollout[0][0].group.prompt
        if trainer.policy.tokenizer is not None and len(prompt.token_ids):  # an environment writes its own prompts
            say(f"a prompt as the model reads it:\n{trainer.policy.tokenizer.decode(prompt.token_ids)}\n")
    for name, value in metrics.items():
        if name.startswith("rewards/") and name.endswith("/mean"):
            say(f"{name} of random text: {value:.4g}")
    say(
        f"dry run: one step passed, with the tokenizer of {origin.model} and a small random model. The engine, LoRA "
        "and the other options of the machine were not tried; `rlox-grpo memory` estimates the memory of the run"
    )


@contextmanager
def quiet_folder() -> Iterator[None]:
    """Silence what a run says of its folder, which does not outlive the dry run."""
    logger = logging.getLogger("rlox_grpo.run")
    level = logger.level
    logger.setLevel(logging.WARNING)
    try:
        yield
    finally:
        logger.setLevel(level)


def write_stand_in(source: str, folder: Path, config: GRPOConfig) -> None:
    """Write a random Qwen2 of two small layers with the tokenizer, end tokens and length of ``source``.

    It samples random tokens, each of which may be the last one: completions are short whatever ``max_new_tokens`` is.

    Raises:
        ConfigError: ``source`` reads pictures, or has no tokenizer.
        OSError, ValueError: its files cannot be read.
    """
    refuse_missing_folder(source)
    tokenizer = find_tokenizer(source, is_needed=True)
    if tokenizer is None:
        raise ConfigError(f"--dry-run: the model {source!r} has no tokenizer")
    settings = read_settings(source)
    if getattr(settings, "vision_config", None) is not None:
        raise ConfigError(f"--dry-run: {source!r} is a model with pictures, which a dry run cannot stand in for yet")
    text = settings.get_text_config(decoder=True)
    shape: dict[str, Any] = {
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "vocab_size": max(len(tokenizer), getattr(text, "vocab_size", 0)),
        "max_position_embeddings": config.engine_max_length or getattr(text, "max_position_embeddings", None) or 2**17,
        **{name: getattr(text, name, None) for name in ("bos_token_id", "eos_token_id", "pad_token_id")},
    }
    stand_in: Any = transformers.Qwen2ForCausalLM(
        transformers.Qwen2Config(**shape, tie_word_embeddings=False)  # type: ignore[no-untyped-call]
    )
    with suppress(OSError):  # many models have none
        stand_in.generation_config = transformers.GenerationConfig.from_pretrained(source)
    ends = list(find_end_tokens(stand_in, tokenizer))
    with torch.no_grad():
        # The first number of every hidden state is much the largest, so that it is sqrt(hidden size) after the norm.
        stand_in.get_input_embeddings().weight[:, 0] = 10.0
        logit = math.log(shape["vocab_size"] * END_SHARE / max(len(ends), 1))
        stand_in.lm_head.weight[ends, 0] = logit / math.sqrt(shape["hidden_size"])
    stand_in.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def replace_teachers(teacher: str | Mapping[str, str], folder: Path) -> str | dict[str, str]:
    """Return ``folder`` for each teacher that is another model than the policy."""
    if isinstance(teacher, Mapping):
        return {name: str(replace_teachers(each, folder)) for name, each in teacher.items()}
    return teacher if teacher in (SELF, EMA) else str(folder)


def shrink(config: GRPOConfig, output_dir: Path, train_data: Any) -> GRPOConfig:
    """Return the options of a run with the size of a dry run.

    Prompts, sampling, episodes, rewards, advantages and the loss stay as they are.
    """
    names = {*RESET, *(name for record in MACHINE for name in record.model_fields)}
    small = {**{name: Options.model_fields[name].default for name in names}, **SMALL}
    if isinstance(train_data, Mapping) and any(getattr(each, "quota", None) for each in train_data.values()):
        del small["prompts_per_step"]  # the quotas sum to it
    if config.keep_best is not None:  # it may name pass@k or the metric of a greedy evaluation
        del small["eval_samples"], small["eval_greedy"]
    honoured = list_honoured(small["engine"])
    small["generation_kwargs"] = {name: value for name, value in config.generation_kwargs.items() if name in honoured}
    if config.reference in ("server", "adapter_off"):
        small["reference"] = "frozen"
    return GRPOConfig.create(**{**config.model_dump(), **small, "output_dir": str(output_dir)})


def take_first(eval_data: Any, *, keeps_samples: bool = False) -> Any:
    """Return the first rows of each held-out set, with its settings; None without a set.

    ``keeps_samples`` keeps the number of completions of each prompt too.
    """
    sets = {
        name: asked.model_copy(
            update={
                "prompts": list(islice(list_entries(asked.prompts), HELD_OUT_ROWS)),
                "samples": asked.samples if keeps_samples else None,
            }
        )
        for name, asked in list_sets(eval_data).items()
    }
    return sets.get(UNNAMED) or sets or None
