"""Options of the run: length, folder, checkpoints, evaluation and logs."""

from __future__ import annotations

from functools import partial
from typing import Literal

from rlox_grpo.config.defaults import SinkName
from rlox_grpo.config.records.option import SET, Record, option

_resumable_option = partial(option, resumable=True)


class RunConfig(Record, title="Run, checkpoints and logs"):
    """Length of the run, checkpoints, evaluations and logs."""

    max_steps: int | None = _resumable_option(None, "Number of training steps; overrides n_epochs.", ge=1)
    seed: int = option(0, "Seed of the order of prompts, of sampling and of new adapters.", ge=0, le=2**63 - 1)
    output_dir: str | None = _resumable_option(
        None, "Run folder. With None, GRPO writes nothing, and `rlox-grpo train NAME.toml` writes to runs/NAME."
    )
    resume: str = _resumable_option(
        "auto",
        "auto: continue the run in output_dir; never: raise an error if the folder holds a run; or the path of a "
        "checkpoint to continue from.",
        hint='write "never" to start anew, "auto" to continue, or the path of a checkpoint',
    )
    resume_changes: tuple[str, ...] = _resumable_option(
        (),
        "Options that a resumed run may change, such as learning_rate. 'rewards' allows edited reward functions, "
        "'optimizer' allows another optimizer.",
    )
    checkpoint_steps: int = _resumable_option(
        50, "Steps between checkpoints; 0 saves only at the end.", ge=0, only_with={"output_dir": SET}
    )
    keep_checkpoints: int = _resumable_option(
        2, "Number of the newest checkpoints to keep.", ge=1, only_with={"output_dir": SET}
    )
    keep_best: str | None = _resumable_option(
        None,
        "Metric of an evaluation, such as eval/accuracy, or eval/math/accuracy of the set math. The checkpoint of the "
        "evaluation with the highest value is kept too, and checkpoints/best links to it.",
        only_with={"output_dir": SET, "eval_prompts": SET},
    )
    eval_steps: int = _resumable_option(
        0,
        "Steps between evaluations of eval_prompts; 0: only at the start and at the end.",
        ge=0,
        only_with={"eval_prompts": SET},
    )
    eval_samples: int = _resumable_option(4, "Number of completions for each prompt in an evaluation.", ge=1)
    eval_greedy: bool = _resumable_option(False, "Also evaluate with greedy decoding.", only_with={"eval_prompts": SET})
    log_completions: int = _resumable_option(
        32, "Number of completions of each step that are written to output_dir.", ge=0, only_with={"output_dir": SET}
    )
    log_to: tuple[SinkName, ...] = _resumable_option(
        ("console",), "Metric sinks, in addition to metrics.jsonl in output_dir."
    )
    guards: bool = _resumable_option(
        True, "Warn once for each training problem that the metrics show, such as an entropy collapse."
    )
    mutual_information_steps: int = _resumable_option(
        0,
        "Steps between measurements of the mutual information of prompts and replies, beginning with the first step; "
        "0: never. A measurement scores at most 16 replies under 16 prompts.",
        ge=0,
        source="RAGEN-2, arXiv:2604.06268",
    )
    on_collapse: Literal["warn", "restore"] = _resumable_option(
        "warn",
        "If the guard reward_collapse finds that the reward has collapsed: only warn, or restore the newest checkpoint "
        "from before the collapse and continue with half the learning rate.",
        only_with={"output_dir": SET, "guards": (True,)},
    )
