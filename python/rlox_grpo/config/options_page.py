"""Documentation of the options: a list, one option in full, and the page docs/reference/options.md."""

from __future__ import annotations

import re
from collections.abc import Container, Iterator
from typing import Any, Literal, get_args, get_origin

from pydantic.fields import FieldInfo

from rlox_grpo.config.foreign_names import advise, read_foreign_names
from rlox_grpo.config.presets import PRESETS
from rlox_grpo.config.records import RECORDS, Options
from rlox_grpo.config.records.option import (
    IMPORT_PATH,
    LARGEST,
    LARGEST_INTEGER,
    Door,
    Record,
    describe_conditions,
    members,
    read_metadata,
)
from rlox_grpo.config.tiers import TIERS, Tier, find_tier
from rlox_grpo.errors import ConfigError

_LIMITS = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}


def list_tier(tier: Tier) -> str:
    """List the options of a tier by stage, as :func:`list_options` does, and how to see the others."""
    shown = [name for name in Options.model_fields if find_tier(name) == tier]
    rest = [f"`rlox-grpo options --tier {other}` ({_count(other)})" for other in TIERS if other != tier]
    return (
        f"{TIERS[tier]}\n\n{list_options(shown)}\n\nOther options: {', '.join(rest)}; `rlox-grpo options NAME or WORD`."
    )


def _count(tier: Tier) -> int:
    return sum(find_tier(name) == tier for name in Options.model_fields)


def list_options(names: Container[str] | None = None) -> str:
    """List the options ``names``, or all, by stage: name, default and values, and below them the description."""
    lines = []
    for record in RECORDS:
        fields = {name: field for name, field in record.model_fields.items() if names is None or name in names}
        lines += ["", f"{_title(record)}:"] if fields else []
        for name, field in fields.items():
            source = read_metadata(field)["source"]
            lines.append(f"  {name} = {_show(field.default)}    {_values(field)}")
            lines.append(f"      {field.description}" + (f" Source: {source}." if source else ""))
    return "\n".join(lines[1:])


def describe_option(name: str) -> str:
    """Describe one option in full, or list the options that contain the word ``name``.

    A word is searched in names, descriptions, sources and values of options, and in the titles of stages.

    Raises:
        ConfigError: nothing was found, or ``name`` is an option of another library.
    """
    if (underscored := name.replace("-", "_")) in Options.model_fields:
        name = underscored
    elif matches := _search(name):
        return list_options(matches)
    elif name in PRESETS:
        raise ConfigError(f"{name!r} is a preset: set preset={name!r}; `rlox-grpo presets {name}` shows it")
    else:
        raise ConfigError(f"unknown option {name!r}{advise(name, Options.model_fields)}")
    field = Options.model_fields[name]
    (record,) = (record for record in RECORDS if name in record.model_fields)
    lines = [f"{name}: {field.description}", f"stage: {_title(record)}", f"default: {_show(field.default)}"]
    lines.append(f"tier: {find_tier(name)}")
    lines.append(f"values: {_values(field)}")
    details = read_metadata(field)
    lines += [f"  {value}: {meaning}" for value, meaning in details["choices"].items()]
    if details["only_with"]:
        lines.append(f"read only with: {describe_conditions(details['only_with'], Options.model_fields)}")
    if details["source"]:
        lines.append(f"source: {details['source']}")
    lines.append(f"a resumed run may change it: {'yes' if details['resumable'] else 'no'}")
    chosen = {preset: choices.values[name] for preset, choices in PRESETS.items() if name in choices.values}
    if other := [f"{preset} {_show(value)}" for preset, value in chosen.items() if value != field.default]:
        lines.append(f"presets that set another value: {', '.join(other)}")
    foreign = read_foreign_names()
    for library, names in (("TRL", foreign.trl), ("verl", foreign.verl)):
        if same := [theirs for theirs, ours in names.items() if ours == name]:
            lines.append(f"{library}: {', '.join(same)}")
    return "\n".join(lines)


def _search(word: str) -> list[str]:
    """Return the options that :func:`describe_option` lists for a word; none for an option of TRL or verl."""
    foreign = read_foreign_names()
    if word in foreign.trl or word in foreign.verl:
        return []
    fragment, whole = word.lower().replace("-", "_"), re.compile(rf"\b{re.escape(word)}\b", re.IGNORECASE)
    return [
        name
        for record in RECORDS
        for name, field in record.model_fields.items()
        if fragment in name
        or whole.search(f"{field.description} {read_metadata(field)['source']}")
        or repr(fragment) in _values(field)
        or _title(record).lower() == word.lower()
    ]


def options_page() -> str:
    """Return docs/reference/options.md."""
    return "\n".join(_page()) + "\n"


def _page() -> Iterator[str]:
    yield "# Options"
    yield "\nThis page lists every option of a run, with its default, its values and its meaning."
    yield "`rlox-grpo options --markdown` prints it."
    yield "\nEach option is a keyword of `GRPO(…)` and of `GRPOConfig(…)`, a key of a run file, and an argument of"
    yield "`rlox-grpo train run.toml --name value`. `rlox-grpo options NAME` shows one option in full, and"
    yield "`rlox-grpo options WORD` lists the options with this word in their name, meaning, values or stage."
    yield "\n- A preset sets some options; see [presets.md](presets.md). An option that you give overrides the preset."
    yield f"- Where no upper limit is shown, an integer is at most {LARGEST_INTEGER}, and a number at most {LARGEST:g}."
    yield "- *Read only with* names the options that an option depends on. Setting an option that would be ignored"
    yield "  raises an error, unless the value is the default or the preset's."
    yield "- *Resume*: whether a resumed run may change the option."
    yield "- The options are listed in three tiers: options of a first run, options that many runs set, and special"
    yield "  options. The tier has no effect on what an option does."
    yield "- A policy loss of your own may also read the options that are *read only with* a built-in `policy_loss`."
    for tier, heading in TIERS.items():
        yield f"\n## {heading}"
        yield from _list_by_stage(tier)
    for record in RECORDS:
        yield from _list_values(record)


def _list_by_stage(tier: Tier) -> Iterator[str]:
    """Yield the tables of a tier, one for each stage."""
    for record in RECORDS:
        fields = {name: field for name, field in record.model_fields.items() if find_tier(name) == tier}
        if not fields:
            continue
        yield f"\n### {_title(record)}" if tier == "special" else f"\n**{_title(record)}**"
        yield "\n| option | default | values | meaning | resume |"
        yield "| --- | --- | --- | --- | --- |"
        for name, field in fields.items():
            details = read_metadata(field)
            meaning = field.description or ""
            if details["only_with"]:
                meaning += f" *Read only with* {describe_conditions(details['only_with'], Options.model_fields)}."
            if details["source"]:
                meaning += f" Source: {details['source']}."
            cells = (
                f"`{name}`",
                f"`{_show(field.default)}`",
                _values(field),
                meaning,
                (details["resumable"] and "yes") or "",
            )
            yield _row(*cells)


def _list_values(record: type[Record]) -> Iterator[str]:
    """Yield a table of the values of each option that describes them."""
    for name, field in record.model_fields.items():
        if choices := read_metadata(field)["choices"]:
            yield f"\n### Values of `{name}`"
            yield "\n| value | meaning |"
            yield "| --- | --- |"
            for value, meaning in choices.items():
                yield _row(f"`{value}`", meaning)


def _row(*cells: str) -> str:
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def _title(record: type[Record]) -> str:
    return record.model_config.get("title") or record.__name__


def _show(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else repr(value)


def _values(field: FieldInfo) -> str:
    """Format the choices of an option, or its type and range: ``integer ≥ 1``."""
    doors = [mark for mark in field.metadata if isinstance(mark, Door)]
    if doors:
        none = " or None" if doors[0].allows_none else ""
        return ", ".join([*map(repr, doors[0].names), f"'{IMPORT_PATH}'"]) + f" or {doors[0].what}{none}"
    kinds = " or ".join(_kind(kind) for kind in members(field.annotation))
    limits = [
        f"{sign} {getattr(limit, name):g}"
        for limit in field.metadata
        for name, sign in _LIMITS.items()
        if getattr(limit, name, None) is not None
    ]
    none = " or None" if field.default is None else ""
    return " ".join([kinds, " and ".join(limits)]).strip() + none


def _kind(kind: Any) -> str:
    if get_origin(kind) is Literal:
        return ", ".join(repr(choice) for choice in get_args(kind))
    if get_origin(kind) is tuple:
        arguments = get_args(kind)
        return f"list of {_kind(arguments[0])}" if arguments[-1] is ... else f"{len(arguments)} numbers"
    if get_origin(kind) is dict:
        return "table"
    return {int: "integer", float: "number", bool: "true or false", str: "text"}[kind]
