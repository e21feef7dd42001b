"""Format rules: tags in a completion."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import rlox_grpo._native as _native
from rlox_grpo.rewards.columns import Columns, read_texts
from rlox_grpo.rewards.verdicts import Verdicts, call_rule, check_choice, check_tags

__all__ = ["TagCount", "TagFormat"]

FormatMode = Literal[
    "strict", "nano_aha", "grpo_zero", "simple_grpo", "simple_grpo_v1", "rl_from_scratch", "open_r1", "trl_think"
]


@dataclass(frozen=True)
class TagFormat:
    r"""Whether a completion has the form ``<first>…</first><second>…</second>``, by a named rule.

    ``strict``: 1.0 if the text, trimmed, is exactly the two blocks with whitespace or nothing between them, each of the
    four tags occurs once and neither block is blank; else 0.0. Case-sensitive, no attributes.

    The published rules, each with its own values (``$`` matches before a final newline if it does in the original):
    ``nano_aha`` 1.0, 0.5 if the answer has other characters than digits, ``+-*/().`` and whitespace, 0.0;
    ``grpo_zero`` 1.0, or 0.1 for a first block plus 0.5 for a second; ``simple_grpo``, ``simple_grpo_v1`` 1.25 or -1.0;
    ``rl_from_scratch``, ``open_r1`` and ``trl_think`` 1.0 or 0.0. ``rust/rewards/format.rs`` states each as its regex.

    ``prefix`` is text at the end of the prompt, such as ``<think>``, that is added before each completion.
    """

    first: str = "think"
    second: str = "answer"
    mode: FormatMode = "strict"
    weight: float = 1.0
    prefix: str = ""
    __name__: ClassVar[str] = "tag_format"

    def __post_init__(self) -> None:
        check_tags(self.first, self.second)
        check_choice("mode", self.mode, _native.format_modes())

    def verdicts(self, completions: Sequence[Any], columns: Columns) -> Verdicts:
        """Score a batch; no column is read."""
        answers = read_texts(completions, self.__name__)
        return Verdicts(*_native.score_tag_format(answers, self.first, self.second, self.mode, self.prefix))

    __call__ = call_rule


@dataclass(frozen=True)
class TagCount:
    r"""Points for tags in any order.

    ``lm_book``: 0.2 for each of the four tags that occurs. ``open_r1``: 0.25 for each of ``<first>\n``,
    ``\n</first>\n``, ``\n<second>\n``, ``\n</second>`` that occurs exactly once. ``blocks``: 0.05 for each of the two
    blocks that is opened and later closed.
    """

    first: str = "think"
    second: str = "answer"
    mode: Literal["open_r1", "lm_book", "blocks"] = "open_r1"
    weight: float = 1.0
    __name__: ClassVar[str] = "tag_count"

    def __post_init__(self) -> None:
        check_tags(self.first, self.second)
        check_choice("mode", self.mode, ("open_r1", "lm_book", "blocks"))

    def verdicts(self, completions: Sequence[Any], columns: Columns) -> Verdicts:
        """Score a batch; no column is read."""
        answers = read_texts(completions, self.__name__)
        if self.mode == "blocks":
            return Verdicts(*_native.score_tag_blocks(answers, self.first, self.second, 0.05))
        return Verdicts(*_native.score_tag_count(answers, self.first, self.second, self.mode))

    __call__ = call_rule
