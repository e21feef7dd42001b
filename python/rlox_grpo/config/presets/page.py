"""Text of the presets: one preset for the command line, all presets as docs/reference/presets.md."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from rlox_grpo.config.presets import PRESETS, Preset
from rlox_grpo.config.records import RECORDS


def describe_preset(name: str) -> str:
    """Describe one preset for the command line: each option with its source, the reward, the defects."""
    preset = PRESETS[name]
    width = max(len(f"{field} = {choice.value!r}") for field, choice in preset.choices.items())
    lines = [f"{name}: {preset.summary}", f"source: {preset.source}"]
    for record in RECORDS:
        shown = [field for field in record.model_fields if field in preset.choices]
        lines += [f"{record.model_config['title']}:"] if shown else []
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
    """Return the content of docs/reference/presets.md."""
    return "\n".join(_page()) + "\n"


def _page() -> Iterator[str]:
    yield "# Presets"
    yield '\nA preset sets the options of a published GRPO variant: `GRPO(model, reward_fn, preset="dapo")`.'
    yield "Options that you also pass override the preset. `rlox-grpo presets NAME` prints one preset."
    yield "A preset does not set the reward; pass the reward of the preset's section as `reward_fn`."
    yield "\nSome published code contains bugs or differs from its paper. Presets use the corrected behaviour. Pass"
    yield "`published=True` to get the original behaviour; each preset's section lists what changes."
    yield "\nA prompt template has the roles, tags and prefill of its system, with our wording. The template"
    yield "applies only to rows without a `prompt` column."
    yield "\n`rlox-grpo presets --markdown` prints this page."
    yield "\n## Compare all presets"
    yield "\nAn empty cell means that the option has no effect in that preset. `kl_coef` 0 means no KL penalty."
    for record in RECORDS:
        used = [field for field in record.model_fields if any(field in preset.choices for preset in PRESETS.values())]
        if used:
            yield f"\n**{record.model_config['title']}**"
        for first in range(0, len(used), _COLUMNS):
            yield from _compare(used[first : first + _COLUMNS])
    yield "\n**Reward**"
    yield "\n| preset | reward |"
    yield "| --- | --- |"
    for name, preset in PRESETS.items():
        yield f"| `{name}` | {_words(preset.reward)} |"
    for name, preset in PRESETS.items():
        yield from _section(name, preset)


_COLUMNS = 5
"""Options side by side in a table of presets, so that it fits on the page."""


def _compare(fields: Sequence[str]) -> Iterator[str]:
    """Yield a table with a row for each preset that sets one of ``fields``."""
    yield "\n| preset | " + " | ".join(f"`{field}`" for field in fields) + " |"
    yield "| --- |" + " --- |" * len(fields)
    for name, preset in PRESETS.items():
        cells = [_cell(preset.choices[field].value) if field in preset.choices else "" for field in fields]
        if any(cells):
            yield f"| `{name}` | " + " | ".join(cells) + " |"


def _section(name: str, preset: Preset) -> Iterator[str]:
    yield f"\n## {name}"
    yield ""
    yield preset.summary
    yield f"\nSource: {preset.source}. Reward: {_words(preset.reward)}."
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
