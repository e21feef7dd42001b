"""The arguments of reward functions: prompts, completions and columns, with one value for each completion."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from rlox_grpo.groups import flag_sampled
from rlox_grpo.rewards.calls import ChatCompletion
from rlox_grpo.rewards.columns import SAMPLED
from rlox_grpo.types import Prompt, RolloutGroup

_RESERVED = ("prompts", "completions", "completion_ids", SAMPLED)
"""The arguments that are not columns of the rows."""


def collect_arguments(groups: Sequence[RolloutGroup]) -> dict[str, Any]:
    """Return all arguments that a reward function may have, with one value for each completion."""
    completions = [completion for group in groups for completion in group.completions]
    has_text = [completion.text is not None for completion in completions]
    if any(has_text) and not all(has_text):
        raise ValueError(f"completion {has_text.index(False)} has no text while others have; expected all or none")
    arguments: dict[str, Any] = _collect_texts(groups) if all(has_text) else _collect_tensors(groups)
    arguments["completion_ids"] = [completion.token_ids.tolist() for completion in completions]
    columns = collect_columns([(group.prompt, len(group.completions)) for group in groups])
    if any(completion.sampled is not None for completion in completions):
        columns[SAMPLED] = [flag_sampled(completion).tolist() for completion in completions]
    return arguments | columns


def collect_columns(prompts: Sequence[tuple[Prompt, int]]) -> dict[str, list[Any]]:
    """Return every column, with each value repeated for each completion of its prompt.

    A column that a source of a mixture does not have is None in its rows.
    """
    columns: dict[str, list[Any]] = {}
    for name in {name: None for prompt, _ in prompts for name in prompt.columns}:
        if name in _RESERVED:
            raise ValueError(
                f"a column is named {name!r}, which reward functions receive as something else: drop it, or rename it: "
                f"columns={{'reference_{name}': {name!r}}}"
            )
        with_column = {prompt.data_source for prompt, _ in prompts if name in prompt.columns}
        for prompt, _ in prompts:
            if name not in prompt.columns and prompt.data_source in with_column:
                raise ValueError(
                    f"{prompt.name} has no column {name!r} while others have: give it in every row or in none"
                )
        columns[name] = [prompt.columns.get(name) for prompt, times in prompts for _ in range(times)]
    return columns


def _collect_texts(groups: Sequence[RolloutGroup]) -> dict[str, Any]:
    prompts: list[Any] = []
    completions: list[Any] = []
    for group in groups:
        source = group.prompt.text if group.prompt.source is None else group.prompt.source
        for completion in group.completions:
            if completion.episode is not None:
                messages, first = list(completion.episode.messages), completion.episode.prompt_messages
                prompts.append(messages[:first])
                completions.append(ChatCompletion(messages[first:]))
                continue
            prompts.append(source)
            said = {"role": "assistant", "content": completion.text}
            completions.append(ChatCompletion([said]) if isinstance(source, list) else completion.text)
    return {"prompts": prompts, "completions": completions}


def _collect_tensors(groups: Sequence[RolloutGroup]) -> dict[str, Any]:
    import torch

    tensor = partial(torch.tensor, dtype=torch.int64)  # a copy
    prompts = [tensor(group.prompt.token_ids) for group in groups for _ in group.completions]
    completions = [tensor(completion.token_ids) for group in groups for completion in group.completions]
    same = len({len(prompt) for prompt in prompts}) == 1
    return {"prompts": torch.stack(prompts) if same else prompts, "completions": completions}
