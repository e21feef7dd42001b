"""A word-level tokenizer for small Countdown models: one token for each number, operator and tag."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

PAD, EOS = "<pad>", "<eos>"
TAGS = ("<think>", "</think>", "<answer>", "</answer>")
TOO_LARGE = "big"
"""Stands for a result that is larger than the largest number in the vocabulary."""
WORDS = (*TAGS, "+", "-", "*", "/", "(", ")", "=", ":", ",", ";", TOO_LARGE)


def build_tokenizer(largest: int) -> PreTrainedTokenizerFast:
    """Build the tokenizer for numbers from 0 to ``largest``; its ids are 0 to ``len(tokenizer) - 1``, without gaps.

    Words are separated by single spaces, and decoding returns the encoded text. There is no unknown token: a word
    outside the vocabulary is an error.
    """
    words = [PAD, EOS, *WORDS, *(str(n) for n in range(largest + 1))]
    return make_word_tokenizer(words, pre_tokenizers.WhitespaceSplit())


def make_word_tokenizer(
    words: Sequence[str], splitter: Any, *, decoder: Any = None, **options: Any
) -> PreTrainedTokenizerFast:
    """Make a tokenizer whose vocabulary is ``words``, in the order of their ids, :data:`PAD` and :data:`EOS` included.

    Args:
        words: without an unknown token.
        splitter: the pre-tokenizer; each of its pieces is a word.
        decoder: joins the words; None: by single spaces.
        **options: further arguments of ``PreTrainedTokenizerFast``.
    """
    backend = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}))
    backend.pre_tokenizer = splitter
    if decoder is not None:
        backend.decoder = decoder
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=backend,
        pad_token=PAD,
        eos_token=EOS,
        padding_side="left",
        clean_up_tokenization_spaces=False,
        **options,
    )
