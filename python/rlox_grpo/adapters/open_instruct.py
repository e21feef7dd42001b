"""open-instruct adapter: use a rule as a verifier.

Written against open-instruct of August 2026 (commit e6c3044): it awaits ``verifier.async_call`` for each sample, and
reads ``score`` of the result and ``name`` and ``weight`` of the verifier. Importing this module does not import
open-instruct.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlox_grpo.adapters.samples import as_rules, fill_missing, read_columns, score_samples
from rlox_grpo.rewards import RewardFn


@dataclass(frozen=True)
class VerificationResult:
    """The result of a verifier, with the fields of open-instruct's class of the same name."""

    score: float
    cost: float = 0.0
    reasoning: str | None = None


@dataclass(frozen=True)
class Verifier:
    """A verifier with the interface of open-instruct's; see :func:`verifier`."""

    rules: tuple[RewardFn, ...]
    name: str
    weight: float = 1.0
    columns: Mapping[str, str] | None = None
    not_applicable: float = 0.0

    def __call__(
        self,
        tokenized_prediction: list[int],
        prediction: str,
        label: Any,
        query: str | None = None,
        rollout_state: dict[str, Any] | None = None,
    ) -> VerificationResult:
        """Score one prediction by the weighted sum of the rules. ``reasoning`` is the worst status, or None for "ok".

        Raises:
            ValueError: a rule cannot read the label.
        """
        row = {"completion_ids": list(tokenized_prediction), **read_columns(label)}
        scores = score_samples(self.rules, [prediction], [row], prompts=[query], rename=self.columns)
        (score,), (status,) = fill_missing(scores.total, self.not_applicable), scores.statuses
        return VerificationResult(score, reasoning=None if status == "ok" else status)

    async def async_call(
        self,
        tokenized_prediction: list[int],
        prediction: str,
        label: Any,
        query: str | None = None,
        rollout_state: dict[str, Any] | None = None,
    ) -> VerificationResult:
        """Like ``__call__``, but in another thread, so that the event loop is not blocked."""
        return await asyncio.to_thread(self, tokenized_prediction, prediction, label, query, rollout_state)


def verifier(
    rules: RewardFn | Sequence[RewardFn],
    name: str,
    *,
    weight: float = 1.0,
    columns: Mapping[str, str] | None = None,
    not_applicable: float = 0.0,
) -> Verifier:
    """Return a verifier for one or several rules.

    A label is the answer, or a mapping (or JSON object) of columns.

    Args:
        rules: rules, or reward functions of TRL.
        name: the name in the ``dataset`` column of rows, compared in lower case.
        weight: factor by which open-instruct multiplies the score.
        columns: column that a rule reads → its name in the label.
        not_applicable: the score if no rule applies or the sample failed.

    Raises:
        ValueError: there is no rule.
    """
    return Verifier(as_rules(rules), name, weight, columns, not_applicable)


_REGISTERED: list[type] = []
"""Keeps the classes alive: open-instruct finds verifiers by ``__subclasses__()``, which has weak references."""


def register(rules: RewardFn | Sequence[RewardFn], name: str, **options: Any) -> type:
    """Register a :func:`verifier` with open-instruct. Call this before its ``main``.

    The new verifier replaces one of open-instruct with the same name, such as ``gsm8k``: ``build_all_verifiers`` keeps
    the class that was created last.

    Returns:
        The subclass of open-instruct's ``VerifierFunction``.

    Raises:
        ImportError: open-instruct is not installed.
    """
    try:
        from open_instruct.ground_truth_utils import VerifierFunction
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "open_instruct":
            raise
        raise ImportError(
            "open-instruct is not installed: clone https://github.com/allenai/open-instruct and run inside it"
        ) from error
    ours = verifier(rules, name, **options)

    def initialise(self: Any, verifier_config: Any = None) -> None:
        VerifierFunction.__init__(self, ours.name, weight=ours.weight, verifier_config=verifier_config)

    def verify(self: Any, *arguments: Any, **named: Any) -> VerificationResult:
        return ours(*arguments, **named)

    made = type(
        f"RloxGrpo_{name}", (VerifierFunction,), {"__init__": initialise, "__call__": verify, "__module__": __name__}
    )
    _REGISTERED.append(made)
    return made
