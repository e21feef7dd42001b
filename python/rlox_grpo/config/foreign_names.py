"""Advice for an unknown option: the option with that name in TRL or verl, or the option with the nearest name."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from rlox_grpo.config.toml import read_toml


@dataclass(frozen=True)
class ForeignNames:
    """The tables of ``foreign_names.toml``: a name in another library → the option here, or advice.

    Attributes:
        trl: options of TRL's ``GRPOConfig``, ``GRPOTrainer`` and ``TrainingArguments``.
        verl: last words of verl's keys, such as ``ppo_epochs``.
        verl_sections: words of verl's keys under which an option differs from the option of the same name here.
        verl_first_words: first words of verl's keys.
    """

    trl: Mapping[str, str]
    verl: Mapping[str, str]
    verl_sections: Mapping[str, str]
    verl_first_words: Sequence[str]


@cache
def read_foreign_names() -> ForeignNames:
    """Read ``foreign_names.toml``. Only error messages and a page of documentation need these names."""
    return ForeignNames(**read_toml(Path(__file__).with_suffix(".toml")))


OTHER: Mapping[str, str] = {
    "teacher_model": "pass it to GRPO as teacher",
    "teacher_model_name_or_path": "pass it to GRPO as teacher",
    "teacher_model_server_url": "pass it to GRPO as teacher",
    "teacher_model_kind": "pass teacher='self', 'ema', or the path of the model in training to GRPO",
    "teacher_prompt_template": "did you mean 'teacher_prompt'? (TRL's teacher_prompt_template)",
    "teacher_update_rate": "did you mean 'teacher_mix'? (TRL's teacher_update_rate)",
    "lmbda": "there is none: the policy samples every completion, as with TRL's lmbda=1",
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
    "compute_metrics": "a reward function returns (scores, metrics), also for the held-out prompts",
    "predict": "call trainer.evaluate(prompts)",
    "ray_address": "pass it to rlox_grpo.launch_on_ray",
    "train_data": "pass it to train() as prompts; it is a key of run files",
}
"""Arguments of methods, keys of run files, and TRL's class and methods → what to use."""

_RUN_FILE_KEYS = ("launcher", "layout")
"""Keys of run files that start processes: in Python that is :func:`rlox_grpo.launch_on_ray`, and not ``GRPO``."""

_FEW = 10
_NEAR = 0.8
"""Least similarity of a suggested name. The similarity of ``group_sze`` and ``group_size`` is 0.95; that of
``save_steps`` and ``max_steps``, which is no typo, is 0.74."""


def advise(name: str, options: Iterable[str]) -> str:
    """Return the end of the error about an unknown option: ``: did you mean 'kl_coef'? (TRL's beta)``."""
    options = list(options)
    if name in _RUN_FILE_KEYS:
        return (
            ": it is a key of run files, because Ray starts other processes than this one. Write a run file and start "
            "`rlox-grpo train run.toml --ray auto`; from Python: rlox_grpo.launch_on_ray(model, "
            "reward_fn, layout={'trainers': 2}, output_dir='runs/first')"
        )
    foreign = read_foreign_names()
    if name.partition(".")[0] in foreign.verl_first_words and "." in name:
        return _advise_on_verls_key(name, options)
    for library, names in (("TRL", foreign.trl), ("verl", foreign.verl)):
        if name in names:
            advice = names[name]
            return (
                f": did you mean {advice!r}? ({library}'s {name})" if advice in options else f" ({library}'s): {advice}"
            )
    if name in OTHER:
        return f": {OTHER[name]}"
    if close := difflib.get_close_matches(name, options, n=1, cutoff=_NEAR):
        return f": did you mean {close[0]!r}?"
    # A table with few keys, such as [layout], is not on the page of options.
    return f"; expected {', '.join(options)}" if len(options) < _FEW else "; `rlox-grpo options` lists the options"


def _advise_on_verls_key(key: str, options: Iterable[str]) -> str:
    """Like :func:`advise`, for a full key such as ``actor_rollout_ref.rollout.n``.

    Looks up the longest known ending.
    """
    foreign = read_foreign_names()
    for section, advice in foreign.verl_sections.items():
        if f".{section}." in f".{key}.":
            return f" (verl's): {advice}"
    words = key.split(".")
    for end in (".".join(words[first:]) for first in range(len(words))):
        if end in options:
            return f": did you mean {end!r}? (verl's {end})"
        if ours := foreign.verl.get(end) or foreign.trl.get(end):
            return f": did you mean {ours!r}? (verl's {end})" if ours in options else f" (verl's): {ours}"
    return " (verl's): there is no such option; `rlox-grpo options` lists the options"
