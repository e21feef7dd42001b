"""Tokenizers of the kinds that checkpoints have, trained here on a few sentences. Needs transformers 5."""

from __future__ import annotations

import tokenizers
from transformers import LlamaTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast, Qwen2Tokenizer

SENTENCES = [
    "20 cats & 3.50 dogs say 'hello' to 17 mice.",
    "Naïve café 答案是 99。\n\tx^2 + y_1 = \\frac{1}{2}",
    " leading spaces  and   runs of them",
    "The quick brown fox jumps over the lazy dog.",
] * 20
TEXTS = [
    *("20 cats & 3.50 dogs", "Naïve café 答案是 99。\n\tx^2", " leading", "a" * 50, "🙂 e\u0301"),
    *("the  fox\n\n jumps 123456", "</s> and <|endoftext|>", "\n", "cats.\r\n"),
]


def _train_unigram() -> PreTrainedTokenizerBase:
    unigram = tokenizers.Tokenizer(tokenizers.models.Unigram())
    unigram.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace()
    unigram.decoder = tokenizers.decoders.Metaspace()
    unigram.normalizer = tokenizers.normalizers.NFKC()
    special = ["<unk>", "<s>", "</s>"]
    trainer = tokenizers.trainers.UnigramTrainer(
        vocab_size=200, special_tokens=special, unk_token="<unk>", show_progress=False
    )
    unigram.train_from_iterator(SENTENCES, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=unigram, unk_token="<unk>", bos_token="<s>", eos_token="</s>")


KINDS = {
    "qwen2": lambda: Qwen2Tokenizer().train_new_from_iterator(SENTENCES, 400, show_progress=False),
    "mistral": lambda: LlamaTokenizer().train_new_from_iterator(SENTENCES, 300, show_progress=False),
    "llama": _train_unigram,
}
"""Type of the model → its tokenizer: BPE of bytes, BPE of words that begin with "▁", unigram."""
