"""OpenRLHF adapter: use a rule as ``reward_func`` in the file of ``--reward.remote_url``.

Written against OpenRLHF 0.11.0 (commit 3c3be62): it calls ``reward_func(queries, prompts, labels)`` by position, in a
thread, with lists of one element, and reads ``rewards``, ``scores`` and ``extra_logs`` of the result. Importing this
module imports neither OpenRLHF nor torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rlox_grpo.adapters.samples import as_rules, fill_missing, read_columns, score_samples
from rlox_grpo.rewards import RewardFn

if TYPE_CHECKING:
    from torch import Tensor

END_TOKENS = (
    "<|im_end|>",
    "<|endoftext|>",
    "<|eot_id|>",
    "<|end_of_text|>",
    "<|end|>",
    "<end_of_turn>",
    "<eos>",
    "</s>",
)
"""End tokens as text: OpenRLHF decodes responses with their special tokens."""

_LEAST_OVERLAP = 16
"""Least number of characters of a truncated prompt at the start of its query. Fewer could match by chance."""


@dataclass(frozen=True)
class RewardFunction:
    """A ``reward_func`` of OpenRLHF; see :func:`reward_function`."""

    rules: tuple[RewardFn, ...]
    end_tokens: tuple[str, ...] = END_TOKENS
    columns: Mapping[str, str] | None = None
    not_applicable: float = 0.0

    def __call__(
        self, queries: Sequence[str], prompts: Sequence[str], labels: Sequence[Any], **kwargs: Any
    ) -> dict[str, Any]:
        """Score a batch; each of the three lists has N elements.

        Returns:
            ``rewards`` ``float32 [N]``, the weighted sum; ``scores`` ``float32 [N]``, the scores of the first rule, by
            which OpenRLHF filters groups; ``extra_logs``, the scores of each rule by name, ``float32 [N]``.

        Raises:
            ValueError: a query does not contain its prompt, or a rule cannot read a label.
        """
        import torch

        completions = [
            extract_completion(query, prompt, self.end_tokens) for query, prompt in zip(queries, prompts, strict=True)
        ]
        rows = [read_columns(label) for label in labels]
        scores = score_samples(self.rules, completions, rows, prompts=prompts, rename=self.columns)

        def tensor(values: Any) -> Tensor:
            return torch.tensor(fill_missing(values, self.not_applicable), dtype=torch.float32)

        logs = {name: tensor(values) for name, values in scores.components.items()}
        return {"rewards": tensor(scores.total), "scores": next(iter(logs.values())), "extra_logs": logs}


def reward_function(
    rules: RewardFn | Sequence[RewardFn],
    *,
    end_tokens: Sequence[str] = END_TOKENS,
    columns: Mapping[str, str] | None = None,
    not_applicable: float = 0.0,
) -> RewardFunction:
    """Return a ``reward_func`` for OpenRLHF with one or several rules.

    A label is the answer, or a JSON object of columns: ``{"nums": [3, 4, 7], "target": 16}``.

    Args:
        rules: rules, or reward functions of TRL. Groups are filtered by the score of the first rule.
        end_tokens: removed from the end of responses.
        columns: column that a rule reads → its name in the label.
        not_applicable: the reward if no rule applies or the sample failed.

    Raises:
        ValueError: there is no rule.
    """
    return RewardFunction(as_rules(rules), tuple(end_tokens), columns, not_applicable)


def extract_completion(query: str, prompt: str, end_tokens: Sequence[str] = END_TOKENS) -> str:
    """Return the response of ``query``, which is the prompt followed by the response, without trailing end tokens.

    If the prompt was truncated on the left, its longest suffix with which the query begins is removed.

    Raises:
        ValueError: the query contains no part of the prompt. Scoring all of it could reward text of the prompt.
    """
    start = query.find(prompt)
    if start >= 0:
        response = query[start + len(prompt) :]
    else:
        longest = range(1, len(prompt) - _LEAST_OVERLAP + 1)
        cut = next((cut for cut in longest if query.startswith(prompt[cut:])), None)
        if cut is None:
            raise ValueError(f"the query does not begin with its prompt: query {query[:80]!r}, prompt {prompt[:80]!r}")
        response = query[len(prompt) - cut :]
    response = response.rstrip()
    while ended := next((token for token in end_tokens if response.endswith(token)), None):
        response = response[: -len(ended)].rstrip()
    return response
