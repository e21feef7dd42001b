"""A vision-language model from scratch, of 0.2 M parameters, that the examples with pictures train on a CPU."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import transformers
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers


def make_small_vlm(
    template: str, *, side: int, patch: int, image_tokens: int, words: Sequence[str] = ()
) -> tuple[transformers.PreTrainedModel, transformers.ProcessorMixin]:
    """Return an Idefics3 with random weights, and its processor with a tokenizer of characters.

    Args:
        template: the chat template.
        side: width and height of a picture in pixels; larger pictures are shrunk.
        patch: width and height of a patch of the vision tower.
        image_tokens: number of tokens of a picture, a quarter of its patches. Two marks enclose them.
        words: texts that are one token each.
    """
    special = ["<pad>", "<|start|>", "<end_of_utterance>", "<image>", "<fake_token_around_image>", "<global-img>"]
    vocabulary = {token: index for index, token in enumerate([*special, *words, *map(chr, range(32, 127))])}
    inner = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    inner.pre_tokenizer, inner.decoder = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated"), decoders.Fuse()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=inner,
        eos_token="<end_of_utterance>",
        pad_token="<pad>",
        unk_token="<pad>",
        additional_special_tokens=["<|start|>", *special[3:]],
    )
    tokenizer.add_tokens(list(words))
    tokenizer.chat_template = template
    sizes = {"intermediate_size": 192, "num_hidden_layers": 2, "num_attention_heads": 4}
    text = {"model_type": "llama", "vocab_size": len(tokenizer), "hidden_size": 64, "num_key_value_heads": 2}
    ids = {"eos_token_id": 2, "pad_token_id": 0, "bos_token_id": None}
    vision = {"image_size": side, "patch_size": patch, "hidden_size": 48, **sizes}
    config = transformers.Idefics3Config(
        text_config={**text, **sizes, **ids}, vision_config=vision, scale_factor=2, image_token_id=3, pad_token_id=0
    )
    edge = {"longest_edge": side}
    images = transformers.Idefics3ImageProcessor(size=edge, max_image_size=edge, do_image_splitting=False)
    processor = transformers.Idefics3Processor(images, tokenizer, image_seq_len=image_tokens, chat_template=template)
    torch.manual_seed(0)
    model = transformers.Idefics3ForConditionalGeneration(config)
    model.generation_config.eos_token_id = 2
    return model, processor
