"""Word-level tokenizers whose vocabulary is closed, for small models that are trained from scratch."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

PAD, EOS = "<pad>", "<eos>"
TAGS = ("<think>", "</think>", "<answer>", "</answer>")
TOO_LARGE = "big"
"""Stands for a result that is larger than the largest number in the vocabulary."""
WORDS = (*TAGS, "+", "-", "*", "/", "(", ")", "=", ":", ",", ";", TOO_LARGE)


def build_countdown_tokenizer(largest: int) -> PreTrainedTokenizerFast:
    """Build the tokenizer for numbers from 0 to ``largest``; its ids are 0 to ``len(tokenizer) - 1``, without gaps.

    Words are separated by single spaces, and decoding returns the encoded text. There is no unknown token: a word
    outside the vocabulary raises an error.
    """
    words = [PAD, EOS, *WORDS, *(str(n) for n in range(largest + 1))]
    return make_word_tokenizer(words, pre_tokenizers.WhitespaceSplit())


def make_word_tokenizer(
    words: Sequence[str], splitter: Any, *, decoder: Any = None, **options: Any
) -> PreTrainedTokenizerFast:
    """Make a tokenizer whose vocabulary is ``words``, in the order of their ids, including :data:`PAD` and :data:`EOS`.

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


PIECE = r" ?(?:</?[a-z]+>|[0-9]+|[A-Za-z]+|#+|[^\s0-9A-Za-z])|\s"
"""A tag, number, word, sequence of # or other character with the blank before it; or a single blank or line break."""

ROLES = ("<system>", "<user>", "<assistant>")

CHAT_TEMPLATE = (
    "{% for message in messages %}<{{ message['role'] }}>{{ message['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)

TURNS_TEMPLATE = (
    "{% for message in messages %}<{{ message['role'] }}>{{ message['content'] }}"
    "{% if message['role'] == 'assistant' %}<eos>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
"""Chat template for conversations of several turns, which writes the end token after each reply."""

TOOLS_TEMPLATE = (
    "{% for message in messages %}<{{ message['role'] }}>"
    "{% if message['tool_calls'] %}{% for call in message['tool_calls'] %}"
    '{"name": "{{ call["function"]["name"] }}", "arguments": {{ call["function"]["arguments"] | tojson }}}'
    "{% endfor %}{% else %}{{ message['content'] }}{% endif %}"
    "{% if message['role'] == 'assistant' %}<eos>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
"""Like :data:`TURNS_TEMPLATE`, but writes tool calls as JSON, and no list of tools."""


def build_tokenizer(
    texts: Iterable[str], largest: int, *, chat_template: str = CHAT_TEMPLATE, phrases: Sequence[str] = ()
) -> PreTrainedTokenizerFast:
    """Build a tokenizer from the pieces of ``texts`` and the numbers 0 to ``largest``, sorted by text.

    Encoding and decoding restore every text. There is no unknown token: a piece outside the vocabulary raises an error,
    because the model was not trained on it. The chat template writes ``<role>`` and the content of each message. Each
    of ``phrases`` is one token wherever it stands.
    """
    splitter = pre_tokenizers.Split(Regex("|".join([*map(re.escape, phrases), PIECE])), "isolated")
    pieces = {piece for text in texts for piece, _ in splitter.pre_tokenize_str(text)}
    pieces |= {f"{blank}{number}" for number in range(largest + 1) for blank in ("", " ")}
    words = [PAD, EOS, *sorted(pieces | set(ROLES) | set(phrases))]
    return make_word_tokenizer(words, splitter, decoder=decoders.Fuse(), chat_template=chat_template)
