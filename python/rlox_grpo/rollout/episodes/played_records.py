"""Recorded episodes of ``rlox-grpo play``: a JSON line for each, and where a second play differs from it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rlox_grpo.environments import Outcome
from rlox_grpo.errors import ConfigError
from rlox_grpo.prompts.files import read_rows
from rlox_grpo.rollout.episodes.play import NoReplyError, PlayedEpisode

MAX_FILE_BYTES = 256 * 2**20
"""Largest file of recorded episodes that is read."""

MAX_SHOWN = 200
"""Maximum characters of a value that a difference shows."""


@dataclass(frozen=True)
class PlayedRecord:
    """A recorded episode. All values are JSON values.

    Attributes:
        row: the data row.
        seed: ``chat.seed``.
        options: options of episodes that differ from their defaults.
        replies: the replies as they were typed, including summaries.
        messages: the conversation.
        outcome: the fields of :class:`rlox_grpo.environments.Outcome`.
        pictures: the pictures of the row and of the messages as PNGs in base64, by their digests.
    """

    row: Mapping[str, Any]
    seed: int
    options: Mapping[str, Any]
    replies: Sequence[str]
    messages: Sequence[Mapping[str, Any]]
    outcome: Mapping[str, Any] = field(default_factory=dict)
    pictures: Mapping[str, str] = field(default_factory=dict)


def refuse_other_values(row: Mapping[str, Any]) -> None:
    """Raise ConfigError if the row has a value that a JSON line cannot hold."""
    for name, value in row.items():
        try:
            same = json.loads(json.dumps(value, allow_nan=False)) == value
        except (TypeError, ValueError, RecursionError):
            same = False
        if not same:
            raise ConfigError(f"--record: the column {name!r} is {type(value).__name__}, which is not a JSON value")


def append_record(
    path: Path, row: Mapping[str, Any], seed: int, options: Mapping[str, Any], played: PlayedEpisode
) -> None:
    """Append an episode that has ended to a file.

    Raises:
        ConfigError: a message or a metric of the environment is not a JSON value, or the pictures are too large.
        OSError: the file cannot be written.
    """
    assert played.outcome is not None
    outcome, pictures = _list_outcome(played.outcome), played.pictures.encode()
    record = asdict(PlayedRecord(row, seed, options, played.replies, played.messages, outcome, pictures))
    if not pictures:
        del record["pictures"]
    try:
        line = json.dumps(record, allow_nan=False)  # ASCII, so that lone surrogates are restored
    except (TypeError, ValueError) as error:
        raise ConfigError(f"--record: the episode has a value that is not JSON: {error}") from None
    with path.open("a", encoding="ascii") as file:
        file.write(line + "\n")


def read_records(path: Path) -> list[PlayedRecord]:
    """Read the episodes of a file.

    Raises:
        ConfigError: the file is too large, is not a file of recorded episodes, or a line has a wrong value.
    """
    if path.suffix != ".jsonl":
        raise ConfigError(f"--replay {path}: expected a file of recorded episodes that ends with .jsonl")
    if path.stat().st_size > MAX_FILE_BYTES:
        raise ConfigError(f"--replay {path} has {path.stat().st_size} bytes, more than {MAX_FILE_BYTES}: split it")
    kinds = {
        "row": dict,
        "seed": int,
        "options": dict,
        "replies": list,
        "messages": list,
        "outcome": dict,
        "pictures": dict,
    }
    try:
        entries = read_rows(path)
    except RecursionError:
        raise ConfigError(f"--replay {path}: a line is nested too deeply") from None
    if not entries:
        raise ConfigError(f"--replay {path} has no recorded episode")
    records = []
    for number, entry in enumerate(entries):
        entry = {"pictures": {}, **entry}
        for name, kind in kinds.items():
            if type(entry.get(name)) is not kind:
                raise ConfigError(
                    f"--replay {path}, episode {number}: {name} is {type(entry.get(name)).__name__}, expected "
                    f"{kind.__name__}; the file is one that --record wrote"
                )
        if not all(isinstance(reply, str) for reply in entry["replies"]):
            raise ConfigError(f"--replay {path}, episode {number}: replies must be a list of text")
        records.append(PlayedRecord(**{name: entry[name] for name in kinds}))
    return records


def make_reader(record: PlayedRecord) -> Callable[[], str]:
    """Return a function that returns the recorded replies one after the other, and then raises NoReplyError."""
    replies = iter(record.replies)

    def read() -> str:
        reply = next(replies, None)
        if reply is None:
            raise NoReplyError
        return reply

    return read


def list_differences(record: PlayedRecord, played: PlayedEpisode) -> list[str]:
    """Say where an episode that was played again differs from its record; nothing if they are the same."""
    differences = []
    messages = [json.loads(json.dumps(message)) for message in played.messages]
    for index in range(max(len(messages), len(record.messages))):
        before = record.messages[index] if index < len(record.messages) else None
        now = messages[index] if index < len(messages) else None
        if before != now:
            differences.append(f"message {index}: {_show(before)} recorded, {_show(now)} now")
            break  # what follows depends on it
    if played.outcome is None:
        differences.append(f"the environment asks for another reply after the {len(record.replies)} recorded ones")
        return differences
    if len(played.replies) < len(record.replies):
        differences.append(f"the episode ended after {len(played.replies)} of {len(record.replies)} replies")
    outcome = json.loads(json.dumps(_list_outcome(played.outcome)))
    for name in {**record.outcome, **outcome}:
        if record.outcome.get(name) != outcome.get(name):
            differences.append(f"{name}: {_show(record.outcome.get(name))} recorded, {_show(outcome.get(name))} now")
    return differences


def _list_outcome(outcome: Outcome) -> dict[str, Any]:
    return {
        "reward": outcome.reward,
        "turn_rewards": None if outcome.turn_rewards is None else list(outcome.turn_rewards),
        "stop_reason": outcome.stop_reason,
        "metrics": dict(outcome.metrics),
    }


def _show(value: Any) -> str:
    text = json.dumps(value)  # ASCII: a record cannot move the cursor of the terminal
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}… ({len(text)} characters)"
