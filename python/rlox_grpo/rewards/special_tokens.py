"""Split special tokens that are written in texts of the policy, so that they are read as text.

A policy that writes ``<|im_end|>`` letter by letter would otherwise end its message in the chat of a teacher or of a
reward model, and could write the next message of the user itself.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def make_splitter(tokenizer: PreTrainedTokenizerBase) -> Callable[[Any], Any]:
    """Return a function that splits each special token of ``tokenizer`` in a text by a space.

    Of messages and other lists and tables, the function splits the texts in them, and the names of a table too: those
    of the arguments of a tool call are the policy's. It returns a copy.
    """
    special = [token.content for token in tokenizer.added_tokens_decoder.values() if token.special]
    pattern = re.compile("|".join(re.escape(token) for token in special if len(token) > 1) or r"\b\B")

    def split(value: Any) -> Any:
        if isinstance(value, str):
            while pattern.search(value):  # the pieces of two tokens can form a third
                value = pattern.sub(lambda match: f"{match[0][0]} {match[0][1:]}", value)
            return value
        if isinstance(value, Mapping):
            return {split(key) if isinstance(key, str) else key: split(entry) for key, entry in value.items()}
        return [split(entry) for entry in value] if isinstance(value, (list, tuple)) else value

    return split
