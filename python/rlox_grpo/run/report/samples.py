"""Sampled completions in a report: held-out prompts before and after training, and groups of training prompts."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from rlox_grpo.groups import RIGHT
from rlox_grpo.run.report.pictures import PicturesShown
from rlox_grpo.run.report.read import read_rows
from rlox_grpo.run.report.text import escape, model_text, number

_MAX_PAIRS = 8
_MAX_CHANGED = 4
_MAX_STEPS = 4
_MAX_GROUPS = 2
_MAX_MESSAGES = 64
_MAX_VALUES = 12
_MAX_ROWS = 32

Row = dict[str, Any]


def before_and_after(held_out: Mapping[str, Mapping[int, Path]], pictures: PicturesShown) -> str:
    """Show the samples of each evaluation set at its first and its last evaluation; empty with fewer than two.

    Args:
        held_out: name of a set → step of an evaluation → file of completions.
        pictures: the thumbnails of the page.
    """
    compared = {name: files for name, files in held_out.items() if len(files) > 1}
    return "".join(
        (f'<p class="quiet">Set <b><bdi>{escape(name)}</bdi></b></p>' if name else "") + _compare(files, pictures)
        for name, files in compared.items()
    )


def _compare(held_out: Mapping[int, Path], pictures: PicturesShown) -> str:
    """Show the samples of the first and the last evaluation, side by side.

    First the samples that became right or wrong, then the first sample of each prompt. Draws depend on the prompt and
    the index of a sample alone, so that the two samples of a pair differ by the weights.
    """
    steps = min(held_out), max(held_out)
    before, after = _read_samples([held_out[step] for step in steps])
    pairs = [(before[sample], after[sample]) for sample in before if sample in after]
    firsts = [(before[sample], after[sample]) for sample in before if sample in after and sample[1] == 0]
    learned = [pair for pair in pairs if (_is_right(pair[0]), _is_right(pair[1])) == (False, True)]
    lost = [pair for pair in pairs if (_is_right(pair[0]), _is_right(pair[1])) == (True, False)]
    note = (
        f"Of {len(pairs):,} samples in both files, {len(learned):,} became right and {len(lost):,} became wrong. A "
        "sample is right if its first reward is at least 1."
    )
    which = f"The first {_MAX_PAIRS} of {len(firsts)}" if len(firsts) > _MAX_PAIRS else f"All {len(firsts)}"
    order = f'<p class="quiet">{which} held-out prompts in both files, in their order, not chosen.</p>'
    return (
        (f'<p class="quiet">{note}</p>' if learned or lost else "")
        + _show_changed("Wrong before, right after", learned, steps, pictures)
        + _show_changed("Right before, wrong after", lost, steps, pictures)
        + order
        + "".join(
            _pair(f"Prompt {number}", pair, steps, pictures) for number, pair in enumerate(firsts[:_MAX_PAIRS], start=1)
        )
    )


def read_verdicts(paths: Sequence[Path]) -> list[dict[str, list[bool]]]:
    """Return for each file whether the samples of each prompt are right, by the prompt's name in all files.

    Samples without a first reward are left out.
    """
    return [_list_verdicts(samples) for samples in _read_samples(paths)]


def _list_verdicts(samples: Mapping[tuple[str, int], Row]) -> dict[str, list[bool]]:
    verdicts: dict[str, list[bool]] = {}
    for (prompt, _), row in samples.items():
        if (is_right := _is_right(row)) is not None:
            verdicts.setdefault(prompt, []).append(is_right)
    return verdicts


def _show_changed(title: str, pairs: list[tuple[Row, Row]], steps: tuple[int, int], pictures: PicturesShown) -> str:
    """Show the first pairs of samples that changed in one way, folded; empty without any."""
    if not pairs:
        return ""
    shown = pairs[:_MAX_CHANGED]
    count = f"{len(pairs):,}" if len(pairs) == len(shown) else f"the first {len(shown)} of {len(pairs):,}"
    body = "".join(_pair(f"Sample {number}", pair, steps, pictures) for number, pair in enumerate(shown, start=1))
    return f"<details><summary><h3>{title}: {count}</h3></summary>{body}</details>"


def _pair(title: str, pair: tuple[Row, Row], steps: tuple[int, int], pictures: PicturesShown) -> str:
    completions = "".join(_completion(row, f"Step {step:,}") for row, step in zip(pair, steps, strict=True))
    return (
        f'<article class="pair"><h3>{title}</h3>{pictures.show(pair[0])}{model_text(pair[0]["prompt"])}'
        f'<div class="columns">{completions}</div></article>'
    )


def _is_right(row: Row) -> bool | None:
    """Whether the first reward of a sample is at least 1; None if the sample has no first reward."""
    rewards = row.get("rewards")
    first = next(iter(rewards.values()), None) if isinstance(rewards, dict) else None
    return first >= RIGHT if isinstance(first, (int, float)) else None


def training_samples(samples: Mapping[int, Path], pictures: PicturesShown) -> str:
    """Show groups of completions with rewards and advantages, from a few steps spread over the run."""
    if not samples:
        return ""
    steps = sorted(samples)
    chosen = sorted({steps[round(k * (len(steps) - 1) / (_MAX_STEPS - 1))] for k in range(_MAX_STEPS)})
    bodies = "".join(_step(step, samples[step], pictures, is_open=step == chosen[-1]) for step in chosen)
    note = "The first groups of a few steps spread over the run. A green edge: positive advantage; a red one: negative."
    return f'<p class="quiet">{note}</p>{bodies}'


def _step(step: int, path: Path, pictures: PicturesShown, *, is_open: bool) -> str:
    rows = [{**row, "prompt": row.get("prompt")} for row in read_rows(path, limit=_MAX_ROWS)]
    groups = [list(group) for _, group in groupby(rows, key=_name_prompt)]
    body = "".join(
        f'<article class="group">{pictures.show(group[0])}{model_text(group[0]["prompt"])}'
        + '<div class="columns">'
        + "".join(_completion(row, f"Completion {number}") for number, row in enumerate(group, start=1))
        + "</div></article>"
        for group in groups[:_MAX_GROUPS]
    )
    return f"<details{' open' if is_open else ''}><summary><h3>Step {step:,}</h3></summary>{body}</details>"


def _join(values: list[Any]) -> str:
    """Join the first values; those of all tokens of a long completion would fill the page."""
    shown = " · ".join(map(number, values[:_MAX_VALUES]))
    return shown if len(values) <= _MAX_VALUES else f"{shown} … {len(values)} in all"


def _completion(row: Row, title: str) -> str:
    rewards, advantage = row.get("rewards"), row.get("advantage")
    if row.get("origin"):  # a demonstration or a replay, which was not sampled in this step
        title = f"{title}, {row['origin']}"
    by_turn = advantage if isinstance(advantage, list) else [advantage]
    facts = [
        ("reward", number(row.get("reward"))),
        *((str(name), number(value)) for name, value in (rewards.items() if isinstance(rewards, dict) else ())),
        *((str(name), number(value)) for name, value in _items(row, "measures")),
        ("advantage" if len(by_turn) < 2 else "advantages by turn or token", _join(by_turn)),
        ("tokens", number(row.get("length"))),
        ("ended by", number(row.get("stop_reason") or row.get("finish_reason"))),
    ]
    listed = "".join(
        f"<div><dt><bdi>{escape(name)}</bdi></dt><dd>{value}</dd></div>" for name, value in facts if value != "—"
    )
    return (
        f'<section class="completion {_sign(by_turn[0] if by_turn else None)}"><h4>{escape(title)}</h4>'
        f'<dl class="facts">{listed}</dl>{_conversation(row) or model_text(row.get("completion"))}'
        f"{_feedback(row)}</section>"
    )


def _feedback(row: Row) -> str:
    """Show what rules say about a completion, such as a judge's reasons; empty without any."""
    return "".join(
        f'<div class="feedback"><h5><bdi>{escape(name)}</bdi> says</h5>{model_text(text)}</div>'
        for name, text in _items(row, "feedback")
    )


def _items(row: Row, key: str) -> list[tuple[str, Any]]:
    table = row.get(key)
    return list(table.items()) if isinstance(table, dict) else []


def _conversation(row: Row) -> str:
    """Show the messages of an episode, and mark those that the policy sampled; empty for one turn."""
    messages = row.get("messages")
    if not isinstance(messages, list) or not messages or not all(isinstance(message, dict) for message in messages):
        return ""
    paid = row.get("turn_rewards")
    rewards = iter(paid if isinstance(paid, list) else ())
    shown = "".join(
        _message(message, next(rewards, None) if message.get("role") == "assistant" else None)
        for message in messages[:_MAX_MESSAGES]
    )
    left = len(messages) - _MAX_MESSAGES
    return shown + (f'<p class="quiet">… and {left:,} more messages</p>' if left > 0 else "")


def _message(message: Row, reward: Any) -> str:
    role, content, calls = (message.get(key) for key in ("role", "content", "tool_calls"))
    sampled = role == "assistant"
    name, reasoning = message.get("name"), message.get("reasoning_content")
    facts = [str(role), *([str(name)] if name else []), *(["sampled"] if sampled else [])]
    facts += [] if reward is None else [f"reward {number(reward)}"]
    sections = [f"<think>{reasoning}</think>"] if reasoning else []
    sections += [content] if content else []
    sections += [_describe_call(call) for call in calls] if isinstance(calls, list) else []
    body = "".join(map(model_text, sections))
    return (
        f'<div class="message {"sampled" if sampled else "observed"}"><h5>{" · ".join(map(escape, facts))}</h5>'
        f"{body}</div>"
    )


def _describe_call(call: Any) -> str:
    """Format a tool call as ``call: name(argument=value)``, or as JSON if it has another form."""
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), dict):
        return json.dumps(call, ensure_ascii=False)
    shown = (f"{name}={json.dumps(value, ensure_ascii=False)}" for name, value in function["arguments"].items())
    return f"call: {function.get('name')}({', '.join(shown)})"


def _sign(advantage: Any) -> str:
    if not isinstance(advantage, (int, float)) or advantage == 0:
        return ""
    return "up" if advantage > 0 else "down"


def _name_prompt(row: Row) -> str:
    """Return the JSON of a row's prompt, with its pictures: prompts of equal text may show other pictures."""
    pictures = row.get("pictures")
    return json.dumps([row.get("prompt"), pictures] if pictures else row.get("prompt"))


def _read_samples(paths: Sequence[Path]) -> list[dict[tuple[str, int], Row]]:
    """Return the completions of each file by prompt and by index among those of the prompt, in the order of the file.

    Prompts are numbered, because several may have the same text, such as the first message of an environment. If a file
    is of an older version, which did not write the numbers, the prompts of all files have their text alone.
    """
    files = [read_rows(path) for path in paths]
    are_numbered = all("prompt_index" in row for rows in files for row in rows)
    return [_by_sample(rows, are_numbered) for rows in files]


def _by_sample(rows: list[Row], are_numbered: bool) -> dict[tuple[str, int], Row]:
    samples: dict[tuple[str, int], Row] = {}
    counts: Counter[str] = Counter()
    for row in rows:
        prompt = _name_prompt(row)
        if are_numbered:
            prompt = json.dumps([row["prompt_index"], prompt])
        samples[prompt, counts[prompt]] = {**row, "prompt": row.get("prompt")}
        counts[prompt] += 1
    return samples
