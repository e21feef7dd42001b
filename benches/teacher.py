"""A step with a teacher of the policy's size beside the step without one, and beside TRL's DistillationTrainer.

    python benches/teacher.py [--rounds 5] [--large]

Each system runs in a process of its own, and they take turns; see `step_systems.py`. All sample the same number of
completions of the same length, on one thread: processor seconds are then those of a step on a machine of its own. The
table and the raw figures go to `benches/results/teacher.md` and `.json`.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import tempfile
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import step_systems
from step_systems import TRL, Shape, let_step, make_model, make_tokenizer, prompt_ids, text_of

SMALL = Shape(prompt=200, new=64, group=8, prompts=4, vocabulary=8192)
LARGE = Shape(prompt=512, new=128, group=16, prompts=2, vocabulary=32768)
RESULTS = Path(__file__).parent / "results" / "teacher"
ALONE = "no teacher"


def make_teacher(shape: Shape) -> Any:
    """A model of the policy's shape with a sharper output layer."""
    import torch

    model = make_model(shape)
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(2.0)
    return model


def rlox_grpo(shape: Shape, **options: Any) -> Callable[[], Any]:
    """This library without a KL penalty; rewards give the step without a teacher its advantages."""
    return step_systems.rlox_grpo(shape, kl_coef=0.0, reference="auto", **options)


def trl(shape: Shape, gradient_checkpointing: bool = False) -> Callable[[], Any]:
    """TRL's trainer, which samples one completion of a row: each prompt has a row for each of its completions."""
    from datasets import Dataset
    from transformers import AutoModelForCausalLM
    from trl import DistillationConfig, DistillationTrainer

    folder = tempfile.mkdtemp()
    make_model(shape).save_pretrained(folder)
    rows = [text_of(ids) for ids in prompt_ids(shape) for _ in range(shape.group)]
    return let_step(
        lambda callback: DistillationTrainer(
            AutoModelForCausalLM.from_pretrained(folder),
            make_teacher(shape),
            args=DistillationConfig(
                output_dir=folder,
                per_device_train_batch_size=len(rows),
                max_completion_length=shape.new,
                gradient_checkpointing=gradient_checkpointing,
                **TRL,
            ),
            train_dataset=Dataset.from_dict({"prompt": rows * 500}),
            processing_class=make_tokenizer(shape.vocabulary),
            callbacks=[callback],
        )
    )


SYSTEMS: dict[str, Callable[[Shape], Callable[[], Any]]] = {
    ALONE: rlox_grpo,
    "teacher_in='advantage'": lambda shape: rlox_grpo(shape, teacher=make_teacher(shape)),
    "teacher_kl='full'": lambda shape: rlox_grpo(
        shape, teacher=make_teacher(shape), teacher_in="loss", teacher_kl="full"
    ),
    "TRL's DistillationTrainer": trl,
    "TRL's, checkpointing (its default)": lambda shape: trl(shape, gradient_checkpointing=True),
}


def table(results: list[dict[str, Any]]) -> str:
    """Medians of processor seconds, of the ratios within a round, and the memory that steps added at their peak."""
    from test_step import table_rows

    lines = [
        f"| shape | system | processor s a step (min-max) | times {ALONE} | added peak MiB | times teacher_kl='full' |",
        "| --- | --- | ---: | ---: | ---: | ---: |",
        *table_rows(results, measure="cpu_seconds", time_of=ALONE, memory_of="teacher_kl='full'"),
    ]
    return "\n".join(lines)


def main() -> None:
    from test_step import in_turns

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--large", action="store_true", help="the large shape too (minutes a round)")
    options = parser.parse_args()
    shapes = [SMALL, LARGE] if options.large else [SMALL]
    results = [in_turns(shape, list(SYSTEMS), 1, options.rounds, warm_up=1, script=__file__) for shape in shapes]
    versions = {package: version(package) for package in ("torch", "transformers", "trl")}
    listed = ", ".join(f"{package} {number}" for package, number in versions.items())
    heading = (
        f"`python benches/teacher.py --rounds {options.rounds}{' --large' if options.large else ''}`: "
        f"{platform.machine()}, {os.cpu_count()} cores, 1 thread, float32, Qwen2-type models of hidden size "
        f"{SMALL.hidden} and {SMALL.layers} layers; {listed}. Systems take turns; a ratio is the median of those "
        "within a round."
    )
    raw = json.dumps({"versions": versions, "results": results}, indent=1)
    RESULTS.with_suffix(".json").write_text(raw + "\n")
    RESULTS.with_suffix(".md").write_text(f"{heading}\n\n{table(results)}\n")
    print(RESULTS.with_suffix(".md").read_text())


if __name__ == "__main__":
    if len(sys.argv) > 2 and sys.argv[1] in SYSTEMS:  # a worker of `in_turns`
        step_systems.SYSTEMS.update(SYSTEMS)
        step_systems.serve(sys.argv[1], Shape(**json.loads(sys.argv[2])), sys.stdin)
    else:
        main()
