"""The presets in words: one preset for the command line, all of them as docs/presets.md."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rlox_grpo.config.presets import PRESETS, Preset

GROUPS: Mapping[str, tuple[str, ...]] = {
    "advantage": ("baseline", "reward_scaling", "ddof", "std_epsilon", "zero_variance"),
    "loss": (
        "policy_loss",
        "clip_low",
        "clip_high",
        "dual_clip",
        "delta",
        "sapo_temperatures",
        "loss_aggregation",
        "mask_truncated",
        "train_end_token",
    ),
    "KL": (
        "kl_coef",
        "kl_estimator",
        "kl_in",
        "kl_bias_correction",
        "kl_schedule",
        "kl_coef_end",
        "reference",
    ),
    "batch": ("prompts_per_step", "group_size", "updates_per_batch", "mini_batches"),
    "sampling": ("temperature", "top_p", "max_new_tokens"),
    "optimizer": (
        "learning_rate",
        "lr_schedule",
        "warmup_steps",
        "min_lr_ratio",
        "weight_decay",
        "adam_beta1",
        "adam_beta2",
        "max_grad_norm",
    ),
    "prompt": ("prompt_template",),
}
"""The fields that presets choose, in the order in which they are shown."""


def describe_preset(name: str) -> str:
    """One preset for the command line: each choice with its source, then its reward and its defects."""
    preset = PRESETS[name]
    width = max(len(f"{field} = {choice.value!r}") for field, choice in preset.choices.items())
    lines = [f"{name}: {preset.summary}", f"source: {preset.source}"]
    for group, fields in GROUPS.items():
        shown = [field for field in fields if field in preset.choices]
        lines += [f"{group}:"] if shown else []
        for field in shown:
            choice = preset.choices[field]
            lines.append(f"  {f'{field} = {choice.value!r}':{width}}  {choice.source}")
    lines.append(f"reward: {preset.reward}")
    for field, choice in preset.published.items():
        lines.append(f"published=True: {field} = {choice.value!r}  ({choice.source})")
    for defect in preset.defects:
        lines.append(f"{'reproduced by published=True' if defect.reproduced else 'not reproduced'}: {defect.what}")
    return "\n".join(lines)


def presets_page() -> str:
    """docs/presets.md."""
    return "\n".join(_page()) + "\n"


def _page() -> Iterator[str]:
    yield "# Presets: what each system means by GRPO"
    yield ""
    yield "Made by `rlox-grpo presets --markdown > docs/presets.md`; a test keeps it up to date."
    yield ""
    yield 'With `GRPO(preset="dapo", …)` a run takes every choice of that preset, and a keyword beside it replaces one.'
    yield "`rlox-grpo presets NAME` prints one. Rewards are passed as `reward_fn`."
    yield ""
    yield "Where a source does what its description or arithmetic does not support, the preset is the corrected form;"
    yield "`published=True` brings back what the preset's section says that it does."
    yield ""
    yield "A `prompt_template` has its system's roles, tags and prefill, in our words. It applies to rows without a"
    yield "`prompt` column."
    yield ""
    yield "## All of them"
    yield ""
    yield "| | " + " | ".join(f"`{name}`" for name in PRESETS) + " |"
    yield "| --- |" + " --- |" * len(PRESETS)
    for fields in GROUPS.values():
        for field in fields:
            cells = [
                _cell(preset.choices[field].value) if field in preset.choices else "" for preset in PRESETS.values()
            ]
            yield f"| `{field}` | " + " | ".join(cells) + " |"
    yield "| reward | " + " | ".join(_words(preset.reward) for preset in PRESETS.values()) + " |"
    yield ""
    yield "An empty cell: the choice does nothing there. A `kl_coef` of 0 has no penalty."
    for name, preset in PRESETS.items():
        yield from _section(name, preset)


def _section(name: str, preset: Preset) -> Iterator[str]:
    yield ""
    yield f"## {name}"
    yield ""
    yield preset.summary
    yield ""
    yield f"Source: {preset.source}. Reward: {_words(preset.reward)}."
    yield ""
    sources: dict[str, list[str]] = {}
    for field, choice in preset.choices.items():
        sources.setdefault(choice.source, []).append(f"`{field}` {_cell(choice.value)}")
    for source, choices in sources.items():
        yield f"- {source}: {', '.join(choices)}"
    if preset.defects:
        yield ""
    for defect in preset.defects:
        yield f"- **{'With `published=True`' if defect.reproduced else 'Not reproduced'}**: {defect.what}"
    if preset.published:
        changes = ", ".join(
            f"`{field}` {_cell(choice.value)} ({choice.source})" for field, choice in preset.published.items()
        )
        yield f"- `published=True` sets {changes}."


def _cell(value: Any) -> str:
    return "–" if value is None else f"{value:g}" if isinstance(value, float) else str(value).replace("|", "\\|")


def _words(reward: str) -> str:
    return f"`{reward}`" if "(" in reward else reward
