"""Options of the run: length, folder, checkpoints, evaluation and logs."""

from __future__ import annotations

from typing import Literal

from rlox_grpo.config.defaults import SinkName
from rlox_grpo.config.records.option import SET, Record, option


class RunConfig(Record, title="Run, checkpoints and logs"):
    """Length of the run, checkpoints, evaluations and logs."""

    max_steps: int | None = option(None, "Steps to train; overrides n_epochs.", ge=1, resumable=True)
    seed: int = option(0, "Seed of the order of prompts, of sampling and of new adapters.", ge=0)
    output_dir: str | None = option(None, "Run folder; None writes nothing.", resumable=True)
    resume: str = option(
        "auto",
        "auto: continue the run in output_dir; never: refuse a folder that holds a run; or the path of a checkpoint.",
        resumable=True,
        hint='write "never" to start anew, "auto" to continue, or the path of a checkpoint',
    )
    resume_changes: tuple[str, ...] = option(
        (),
        "Options that a resumed run may change, such as learning_rate. 'rewards' allows edited reward functions, "
        "'optimizer' another optimizer=.",
        resumable=True,
    )
    checkpoint_steps: int = option(
        50, "Steps between checkpoints; 0 saves only at the end.", ge=0, only_with={"output_dir": SET}, resumable=True
    )
    keep_checkpoints: int = option(
        2, "Number of the newest checkpoints to keep.", ge=1, only_with={"output_dir": SET}, resumable=True
    )
    eval_steps: int = option(
        0,
        "Steps between evaluations of eval_prompts; 0: only at the start and at the end.",
        ge=0,
        only_with={"eval_prompts": SET},
        resumable=True,
    )
    eval_samples: int = option(4, "Completions for each prompt in an evaluation.", ge=1, resumable=True)
    eval_greedy: bool = option(
        False, "Also evaluate with greedy decoding.", only_with={"eval_prompts": SET}, resumable=True
    )
    log_completions: int = option(
        32, "Completions of each step to write to output_dir.", ge=0, only_with={"output_dir": SET}, resumable=True
    )
    log_to: tuple[SinkName, ...] = option(
        ("console",), "Metric sinks, in addition to metrics.jsonl in output_dir.", resumable=True
    )
    guards: bool = option(
        True, "Warn when metrics show a training problem, such as an entropy collapse; once for each.", resumable=True
    )
    mutual_information_steps: int = option(
        0,
        "Steps between measurements of the mutual information of prompts and replies, the first step among them; 0: "
        "never. A measurement scores 16 replies under 16 prompts at most.",
        ge=0,
        resumable=True,
        source="RAGEN-2, arXiv:2604.06268",
    )
    on_collapse: Literal["warn", "restore"] = option(
        "warn",
        "If the guard reward_collapse finds that the reward has collapsed: only warn, or restore the newest checkpoint "
        "from before the collapse and continue with half the learning rate.",
        only_with={"output_dir": SET, "guards": (True,)},
        resumable=True,
    )
