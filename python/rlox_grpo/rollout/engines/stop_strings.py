"""Find the rows whose last token completed a stop string."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rlox_grpo.types import Int64Array

if TYPE_CHECKING:
    import torch
    from torch import Tensor

# Tokens decoded beyond the bytes of the longest stop string, because the first character may be cut, or some tokens
# may have no text.
_SPARE_TOKENS = 16


class StopStrings:
    """Finds the rows whose last token completed one of ``strings``.

    Only a token whose own text holds a stop string's last character can complete it, so a table over the vocabulary,
    made once, picks the few rows whose tail is worth decoding.
    """

    def __init__(self, tokenizer: Any, strings: Sequence[str], vocab_size: int, device: torch.device) -> None:
        self._tokenizer = tokenizer
        self._strings = tuple(strings)
        self._tail_tokens = max(len(string.encode()) for string in strings) + _SPARE_TOKENS
        self._candidates = self._completing_tokens(vocab_size).to(device)  # bool [V]

    def candidates(self, token_ids: Tensor) -> Tensor:
        """Whether each of these tokens could complete a stop string: ``bool``, like ``token_ids``."""
        return self._candidates[token_ids]

    def ended(self, completions: Sequence[Int64Array]) -> list[bool]:
        """Whether each completion's last tokens spell a stop string."""
        tails = [completion[-self._tail_tokens :].tolist() for completion in completions]
        return [any(string in text for string in self._strings) for text in decode(self._tokenizer, tails)]

    def _completing_tokens(self, vocab_size: int) -> Tensor:
        import torch  # `rlox-grpo serve` imports this module by way of the requests and needs no torch

        # A decoder may strip the space that a first token begins with. The text of a single token then says nothing.
        if any(string.endswith(" ") for string in self._strings):
            return torch.ones(vocab_size, dtype=torch.bool)
        # A part of a multi-byte character decodes to U+FFFD on its own.
        endings = {string[-1] for string in self._strings} | {"�"}
        texts = decode(self._tokenizer, [[token] for token in range(min(vocab_size, len(self._tokenizer)))])
        flags = [any(ending in text for ending in endings) for text in texts]
        return torch.tensor(flags + [False] * (vocab_size - len(flags)), dtype=torch.bool)


def decode(tokenizer: Any, rows: Sequence[Sequence[int]]) -> list[str]:
    """Return the text of each row of token ids, without special tokens. Spaces are not cleaned up."""
    texts: list[str] = tokenizer.batch_decode(list(rows), skip_special_tokens=True, clean_up_tokenization_spaces=False)
    return texts
