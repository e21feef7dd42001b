"""A lossless tokenizer with the words of given texts as its vocabulary, for small models trained from scratch."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from tokenizers import Regex, decoders, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from rlox_grpo.demo.tokenizer import EOS, PAD, make_word_tokenizer

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
"""Writes the end token behind each reply; for conversations of several turns."""

TOOLS_TEMPLATE = (
    "{% for message in messages %}<{{ message['role'] }}>"
    "{% if message['tool_calls'] %}{% for call in message['tool_calls'] %}"
    '{"name": "{{ call["function"]["name"] }}", "arguments": {{ call["function"]["arguments"] | tojson }}}'
    "{% endfor %}{% else %}{{ message['content'] }}{% endif %}"
    "{% if message['role'] == 'assistant' %}<eos>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
"""As :data:`TURNS_TEMPLATE`; writes tool calls as JSON, and no list of tools."""


def build_tokenizer(
    texts: Iterable[str], largest: int, *, chat_template: str = CHAT_TEMPLATE, phrases: Sequence[str] = ()
) -> PreTrainedTokenizerFast:
    """Build a tokenizer from the pieces of ``texts`` and the numbers 0 to ``largest``, sorted by text.

    Encoding and decoding restore every text. There is no unknown token: a piece outside the vocabulary is an error,
    because the model was not trained on it. The chat template writes ``<role>`` and the content of each message. Each
    of ``phrases`` is one token wherever it stands.
    """
    splitter = pre_tokenizers.Split(Regex("|".join([*map(re.escape, phrases), PIECE])), "isolated")
    pieces = {piece for text in texts for piece, _ in splitter.pre_tokenize_str(text)}
    pieces |= {f"{blank}{number}" for number in range(largest + 1) for blank in ("", " ")}
    words = [PAD, EOS, *sorted(pieces | set(ROLES) | set(phrases))]
    return make_word_tokenizer(words, splitter, decoder=decoders.Fuse(), chat_template=chat_template)
