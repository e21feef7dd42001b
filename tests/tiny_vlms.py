"""Vision-language models of random weights with processors, from configurations alone; a forward pass takes 10 ms."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import torch

from versions import skip_if_no_pictures

skip_if_no_pictures()  # the module that imports this one

TEMPLATE = (
    "{%- for m in messages -%}<|im_start|>{{ m['role'] }}\n"
    "{%- if m['content'] is string -%}{{ m['content'] }}"
    "{%- else -%}{%- for p in m['content'] -%}"
    "{%- if p['type'] == 'image' -%}IMAGE{%- else -%}{{ p['text'] }}{%- endif -%}{%- endfor -%}{%- endif -%}"
    "<|im_end|>\n"
    "{%- endfor -%}{%- if add_generation_prompt -%}<|im_start|>assistant\n{%- endif -%}"
)


def make_tokenizer(special: list[str], end: str, image: str, start: str = "<|im_start|>", **names: Any) -> Any:
    """Special tokens, the first of which pads, then the printable characters of ASCII."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {token: index for index, token in enumerate([*special, "\n", *map(chr, range(32, 127))])}
    inner = Tokenizer(models.WordLevel(vocabulary, unk_token=special[0]))
    inner.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    inner.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner,
        eos_token=end,
        pad_token=special[0],
        unk_token=special[0],
        additional_special_tokens=[token for token in special[1:] if token != end],
        **names,
    )
    template = TEMPLATE.replace("IMAGE", image).replace("<|im_end|>", end).replace("<|im_start|>", start)
    tokenizer.chat_template = template
    return tokenizer


def _text(tokenizer: Any, scale: int, **overrides: Any) -> dict[str, Any]:
    return {
        "vocab_size": len(tokenizer),
        "hidden_size": 32 * scale,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "initializer_range": 0.3 if scale == 1 else 0.1,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": None,
        **overrides,
    }


def _qwen(kind: str, scale: int) -> tuple[Any, Any]:
    import transformers as t

    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>"]
    special += ["<|image_pad|>", "<|video_pad|>"]
    tokenizer = make_tokenizer(special, "<|im_end|>", "<|vision_start|><|image_pad|><|vision_end|>")
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2 * scale, scale, scale]}
    vision = {
        **{"depth": 2, "hidden_size": 16 * scale, "intermediate_size": 32, "num_heads": 2, "patch_size": 8},
        **{"spatial_merge_size": 2, "temporal_patch_size": 2, "out_hidden_size": 32 * scale},
    }
    marks = {"image_token_id": 5, "video_token_id": 6, "vision_start_token_id": 3, "vision_end_token_id": 4}
    size = {"shortest_edge": 16 * 16, "longest_edge": 64 * 64}
    sizes = {"patch_size": 8, "merge_size": 2, "temporal_patch_size": 2, "size": size}
    if kind == "qwen3_vl":
        text = _text(tokenizer, scale, head_dim=8 * scale, rope_parameters={**rope, "mrope_interleaved": True})
        vision |= {"num_position_embeddings": 64, "deepstack_visual_indexes": [0]}
        config: Any = t.Qwen3VLConfig(text_config=text, vision_config=vision, tie_word_embeddings=False, **marks)
        model: Any = t.Qwen3VLForConditionalGeneration(config)
        make, video = t.Qwen3VLProcessor, t.Qwen3VLVideoProcessor(**sizes)
    else:
        text = _text(tokenizer, scale, rope_parameters=rope)
        vision |= {"window_size": 64, "fullatt_block_indexes": [1]}
        config = t.Qwen2_5_VLConfig(text_config=text, vision_config=vision, tie_word_embeddings=False, **marks)
        model = t.Qwen2_5_VLForConditionalGeneration(config)
        make, video = t.Qwen2_5_VLProcessor, t.Qwen2VLVideoProcessor(**sizes)
    images = t.Qwen2VLImageProcessor(**sizes)
    return model, make(images, tokenizer, video, chat_template=tokenizer.chat_template)


def _idefics3(scale: int) -> tuple[Any, Any]:
    import transformers as t

    special = ["<|endoftext|>", "<|im_start|>", "<end_of_utterance>", "<image>", "<fake_token_around_image>"]
    tokenizer = make_tokenizer([*special, "<global-img>"], "<end_of_utterance>", "<image>")
    text = _text(tokenizer, scale, model_type="llama")
    vision = {"image_size": 24, "patch_size": 4, "hidden_size": 16 * scale, "intermediate_size": 32}
    vision |= {"num_hidden_layers": 2, "num_attention_heads": 2}
    config = t.Idefics3Config(
        text_config=text,
        vision_config=vision,
        scale_factor=2,
        image_token_id=3,
        pad_token_id=0,
        tie_word_embeddings=False,
    )
    edge = {"longest_edge": 24}
    images = t.Idefics3ImageProcessor(size=edge, max_image_size=edge, do_image_splitting=False)
    processor = t.Idefics3Processor(images, tokenizer, image_seq_len=9, chat_template=tokenizer.chat_template)
    return t.Idefics3ForConditionalGeneration(config), processor


def _internvl(scale: int) -> tuple[Any, Any]:
    import transformers as t

    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<img>", "</img>", "<IMG_CONTEXT>", "<video>"]
    names = {"start_image_token": "<img>", "end_image_token": "</img>", "context_image_token": "<IMG_CONTEXT>"}
    tokenizer = make_tokenizer(
        special, "<|im_end|>", "<IMG_CONTEXT>\n", extra_special_tokens={**names, "video_token": "<video>"}
    )
    vision = {"image_size": [32, 32], "patch_size": [8, 8], "hidden_size": 16 * scale, "intermediate_size": 32}
    vision |= {"num_hidden_layers": 2, "num_attention_heads": 2}
    config = t.InternVLConfig(
        text_config=_text(tokenizer, scale, model_type="qwen2"),
        vision_config=vision,
        image_token_id=5,
        downsample_ratio=0.5,
        image_seq_length=4,
        tie_word_embeddings=False,
    )
    size = {"height": 32, "width": 32}
    images = t.GotOcr2ImageProcessor(size=size, crop_to_patches=True, min_patches=1, max_patches=4)
    videos = t.InternVLVideoProcessor(size=size)
    processor = t.InternVLProcessor(
        images, tokenizer, videos, image_seq_length=4, chat_template=tokenizer.chat_template
    )
    return t.InternVLForConditionalGeneration(config), processor


def _gemma3(scale: int) -> tuple[Any, Any]:
    import transformers as t

    special = ["<pad>", "<eos>", "<bos>", "<start_of_turn>", "<end_of_turn>", "<start_of_image>", "<end_of_image>"]
    names = {"image_token": "<image_soft_token>", "boi_token": "<start_of_image>", "eoi_token": "<end_of_image>"}
    tokenizer = make_tokenizer(
        [*special, "<image_soft_token>"],
        "<end_of_turn>",
        "<start_of_image>",
        "<start_of_turn>",
        bos_token="<bos>",
        extra_special_tokens=names,
    )
    text = _text(
        tokenizer,
        scale,
        head_dim=8 * scale,
        query_pre_attn_scalar=8 * scale,
        sliding_window=512,
        layer_types=["sliding_attention", "full_attention"],
        bos_token_id=2,
    )
    vision = {
        "image_size": 32,
        "patch_size": 8,
        "hidden_size": 16 * scale,
        "intermediate_size": 32,
        "vision_use_head": False,
    }
    vision |= {"num_hidden_layers": 2, "num_attention_heads": 2}
    config = t.Gemma3Config(
        text_config=text,
        vision_config=vision,
        mm_tokens_per_image=4,
        boi_token_index=5,
        eoi_token_index=6,
        image_token_index=7,
    )
    images = t.Gemma3ImageProcessor(size={"height": 32, "width": 32}, image_seq_length=4)
    processor = t.Gemma3Processor(images, tokenizer, chat_template=tokenizer.chat_template, image_seq_length=4)
    model = t.Gemma3ForConditionalGeneration(config)
    torch.nn.init.normal_(model.model.multi_modal_projector.mm_input_projection_weight, std=0.3)  # it begins as zeros
    return model, processor


_MAKERS = {
    "qwen3_vl": partial(_qwen, "qwen3_vl"),
    "qwen2_5_vl": partial(_qwen, "qwen2_5_vl"),
    "idefics3": _idefics3,
    "internvl": _internvl,
    "gemma3": _gemma3,
}
FAMILIES = ("qwen3_vl", "qwen2_5_vl", "idefics3", "internvl")


def make_tiny_vlm(family: str, scale: int = 1) -> tuple[Any, Any]:
    """A model in evaluation mode and its processor, always the same. Heads have a size of 8 × ``scale``."""
    torch.manual_seed(0)
    model, processor = _MAKERS[family](scale)
    model.generation_config.eos_token_id = processor.tokenizer.eos_token_id
    model.generation_config.pad_token_id = processor.tokenizer.pad_token_id
    return model.eval(), processor


def draw_picture(seed: int, width: int = 32, height: int = 32) -> Any:
    """A picture of noise."""
    from PIL import Image

    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8))
