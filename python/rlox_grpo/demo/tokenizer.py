"""A word-level tokenizer for small Countdown models: one token for each number, operator and tag."""

from __future__ import annotations

from pathlib import Path

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
    """Load a tokenizer that ``save_pretrained`` wrote, next to a model of any type.

    ``AutoTokenizer`` loads the same one next to the demo's model. Next to a model configuration of type ``qwen2`` it
    builds a byte-level Qwen2 tokenizer, whatever ``tokenizer_config.json`` names, and splits the words.
    """
    tokenizer: PreTrainedTokenizerFast = PreTrainedTokenizerFast.from_pretrained(str(folder))
    return tokenizer
