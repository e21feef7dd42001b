"""A word-level tokenizer for small Countdown models: one token for each number, operator and tag."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

PAD, EOS = "<pad>", "<eos>"
TAGS = ("<think>", "</think>", "<answer>", "</answer>")
TOO_LARGE = "big"
"""Stands for a result past the largest number that has a token."""
WORDS = (*TAGS, "+", "-", "*", "/", "(", ")", "=", ":", ",", ";", TOO_LARGE)


def build_tokenizer(largest: int) -> PreTrainedTokenizerFast:
    """Make the tokenizer whose numbers are 0 to ``largest``; its ids are 0 to ``len(tokenizer) - 1``, none unused.

    Text is words with single spaces between, and decodes to itself. There is no unknown token: a word outside
    the vocabulary is refused, since a model trained without it could do nothing with it.
    """
    words = [PAD, EOS, *WORDS, *(str(n) for n in range(largest + 1))]
    backend = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=backend,
        pad_token=PAD,
        eos_token=EOS,
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )


def load_tokenizer(folder: str | Path) -> PreTrainedTokenizerFast:
    """Load what ``save_pretrained`` wrote, whatever model it lies beside.

    ``AutoTokenizer`` loads the same beside the demo's model; beside a config of type ``qwen2`` it builds a byte-level
    Qwen2 tokenizer of the file, and the words come out in pieces.
    """
    tokenizer: PreTrainedTokenizerFast = PreTrainedTokenizerFast.from_pretrained(str(folder))
    return tokenizer
