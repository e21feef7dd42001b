"""A training step with pictures beside TRL's: the same model, pictures, prompts, lengths and threads, in turns.

    python benches/pictures.py [--rounds 5] [--group 8] [--new 64] [--prompts 2]

The model is an Idefics3 (the form of SmolVLM) from scratch with a decoder of hidden size 256 and 4 layers. A picture of
128 × 128 pixels is 256 patches in the vision tower, which is trained, and 64 tokens in the decoder. Each system has a
process of its own; a row of the table has medians over the rounds, and the ratios are medians within a round. The
memory is what steps add to the process. Results: benches/results/pictures.md and .json.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
import step_systems
from test_step import in_turns, table_rows

RESULTS = Path(__file__).parent / "results" / "pictures"
EDGE, PATCH, SHRINK = 128, 8, 2
IMAGE_TOKENS = (EDGE // PATCH // SHRINK) ** 2
SPECIAL = [
    "<pad>",
    "<eos>",
    "<image>",
    "<fake_token_around_image>",
    "<global-img>",
    "<end_of_utterance>",
    "<user>",
    "<assistant>",
]
TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{% if m['content'] is string %}{{ m['content'] }}{% else %}"
    "{% for p in m['content'] %}{{ '<image>' if p['type'] == 'image' else p['text'] }}{% endfor %}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


@dataclass(frozen=True)
class Pictured:
    """`prompts` prompts of a picture and `text` words, and `group` completions of `new` tokens for each."""

    group: int = 8
    new: int = 64
    prompts: int = 2
    text: int = 32
    vocabulary: int = 8192

    def __str__(self) -> str:
        return (
            f"{IMAGE_TOKENS} image tokens, {self.text} words, new {self.new}, G {self.group}, {self.prompts} prompts, "
            f"vocabulary {self.vocabulary:,}"
        )


def make_model(shape: Pictured) -> tuple[Any, Any]:
    """A model that ends no completion within a bench, and its processor."""
    import torch
    import transformers
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    words = [*SPECIAL, *(f" w{index}" for index in range(len(SPECIAL), shape.vocabulary))]
    inner = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="<pad>"))
    inner.pre_tokenizer = pre_tokenizers.Split(Regex(r"<[a-z_-]+>| w\d+"), "isolated")
    inner.decoder = decoders.Fuse()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=inner,
        eos_token="<eos>",
        pad_token="<pad>",
        unk_token="<pad>",
        additional_special_tokens=SPECIAL[2:6],
    )
    tokenizer.chat_template = TEMPLATE
    text = {
        **{"model_type": "llama", "vocab_size": shape.vocabulary, "hidden_size": 256, "intermediate_size": 682},
        **{"num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 4},
        **{"eos_token_id": 1, "pad_token_id": 0, "bos_token_id": None},
    }
    vision = {
        **{"image_size": EDGE, "patch_size": PATCH, "hidden_size": 128, "intermediate_size": 512},
        **{"num_hidden_layers": 4, "num_attention_heads": 4},
    }
    config = transformers.Idefics3Config(
        text_config=text, vision_config=vision, scale_factor=SHRINK, image_token_id=2, pad_token_id=0
    )
    edge = {"longest_edge": EDGE}
    images = transformers.Idefics3ImageProcessor(size=edge, max_image_size=edge, do_image_splitting=False)
    processor = transformers.Idefics3Processor(images, tokenizer, image_seq_len=IMAGE_TOKENS, chat_template=TEMPLATE)
    torch.manual_seed(0)
    model = transformers.Idefics3ForConditionalGeneration(config)
    model.generation_config.eos_token_id = 1
    return model, processor


def make_rows(shape: Pictured) -> list[dict[str, Any]]:
    """Rows with a picture each."""
    import numpy as np
    from PIL import Image

    rng = np.random.default_rng(0)
    rows = []
    for _ in range(shape.prompts):
        picture = Image.fromarray(rng.integers(0, 256, (EDGE, EDGE, 3), dtype=np.uint8))
        words = "".join(f" w{index}" for index in rng.integers(len(SPECIAL), shape.vocabulary, shape.text))
        rows.append({"prompt": [{"role": "user", "content": words}], "image": picture})
    return rows


def ours(shape: Pictured) -> Callable[[], Any]:
    """A step of this library; the vision tower is trained."""
    from rlox_grpo import GRPO

    model, processor = make_model(shape)
    trainer = GRPO(
        model,
        step_systems.reward,
        processor=processor,
        group_size=shape.group,
        prompts_per_step=shape.prompts,
        max_new_tokens=shape.new,
        learning_rate=step_systems.LEARNING_RATE,
        kl_coef=0.0,
        zero_variance="keep",
        dtype="float32",
        log_to=(),
    )
    prompts = trainer.prompts.read(make_rows(shape))
    return lambda: trainer.train_step(lambda step: prompts)


def trl(shape: Pictured, gradient_checkpointing: bool = False) -> Callable[[], Any]:
    """TRL's GRPOTrainer with the column `image`."""
    from datasets import Dataset, Image
    from trl import GRPOConfig, GRPOTrainer

    folder = tempfile.mkdtemp()
    rows = make_rows(shape) * 50
    data = {name: [row[name] for row in rows] for name in ("prompt", "image")}
    model, processor = make_model(shape)
    return step_systems.let_step(
        lambda callback: GRPOTrainer(
            model,
            reward_funcs=lambda completion_ids, **columns: step_systems.reward(completion_ids),
            args=GRPOConfig(
                output_dir=folder,
                per_device_train_batch_size=shape.prompts * shape.group,
                num_generations=shape.group,
                max_completion_length=shape.new,
                beta=0.0,
                gradient_checkpointing=gradient_checkpointing,
                **step_systems.TRL,
            ),
            train_dataset=Dataset.from_dict(data).cast_column("image", Image()),
            processing_class=processor,
            callbacks=[callback],
        )
    )


def trl_checkpointed(shape: Pictured) -> Callable[[], Any]:
    """TRL as it comes: activations are checkpointed."""
    return trl(shape, gradient_checkpointing=True)


NAMES = ("rlox_grpo", "TRL", "TRL, checkpointing (its default)")
step_systems.SYSTEMS |= dict(zip(NAMES, (ours, trl, trl_checkpointed), strict=True))  # type: ignore[arg-type]


def main() -> None:
    """Take the steps, and write and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--new", type=int, default=64)
    parser.add_argument("--prompts", type=int, default=2)
    options = parser.parse_args()
    shape = Pictured(group=options.group, new=options.new, prompts=options.prompts)
    result = in_turns(shape, list(NAMES), 1, options.rounds, 1, script=__file__)
    versions = {package: version(package) for package in ("torch", "transformers", "trl")}
    listed = ", ".join(f"{package} {number}" for package, number in versions.items())
    lines = [
        f"`python benches/pictures.py`: {platform.machine()}, {os.cpu_count()} cores, 1 thread, float32; {listed}.",
        "",
        "| shape | system | processor s a step (min-max) | times ours | added peak MiB | times ours |",
        "| --- | --- | ---: | ---: | ---: | ---: |",
        *table_rows([result], measure="cpu_seconds", time_of=NAMES[0], memory_of=NAMES[0]),
    ]
    RESULTS.with_suffix(".json").write_text(json.dumps({"versions": versions, **result}, indent=1) + "\n")
    RESULTS.with_suffix(".md").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))


if __name__ == "__main__":
    if len(sys.argv) == 3 and sys.argv[1] in NAMES:
        step_systems.serve(sys.argv[1], Pictured(**json.loads(sys.argv[2])), sys.stdin)  # type: ignore[arg-type]
    else:
        main()
