"""Episodes of several turns beside TRL's `environment_factory`, and rollouts with slow tools.

    python benches/turns.py [--turns 4 8] [--new 32] [--prompts 2] [--instructions 0] [--ragged] [--rounds 3]

Steps: the same model, environment class, rows and lengths for this library and TRL, in turns, each in a process of its
own. The model is untrained, so both libraries read every reply as one call of the tool `move`; rewards count even ids.
Rollouts: one of this library's with a tool that waits 0 to 1 s at random, beside the same without waits. The table and
the raw figures go to `benches/results/turns.md` and `.json`; results of other sizes stay there.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import platform
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
import step_systems
from test_step import in_turns

ROOT = Path(__file__).parents[1]
RESULTS = Path(__file__).parent / "results" / "turns"
OBSERVATION = "You moved to field {}. The wind blows from the north, and there are walls to your left and right."


@dataclass(frozen=True)
class Turns:
    """Sizes: `turns` replies of `new` tokens in each of `group` episodes of each of `prompts` rows.

    `instructions` are the words of a system message, about a token each. With `ragged` a reply ends at each token with
    the same probability, so that `new` is the longest and its half about the mean.
    """

    turns: int
    new: int = 32
    group: int = 8
    prompts: int = 2
    vocabulary: int = 8192
    hidden: int = 256
    layers: int = 4
    instructions: int = 0
    ragged: bool = False

    def __str__(self) -> str:
        lengths = f"1 to {self.new}" if self.ragged else str(self.new)
        instructions = f", {self.instructions:,} words of instructions" if self.instructions else ""
        return (
            f"{self.turns} turns of {lengths} tokens, G {self.group}, {self.prompts} prompts{instructions}, "
            f"vocabulary {self.vocabulary:,}"
        )


class Walk:
    """An environment in TRL's form. Its result is as long at each turn."""

    def reset(self, start: int, **row: Any) -> str:
        self.place = start
        return f" You are on field {start}."

    def move(self, steps: int) -> str:
        """Move forward.

        Args:
            steps: How many fields to move.
        """
        self.place = (self.place + steps) % 100
        return OBSERVATION.format(self.place)


def make_tokenizer(vocabulary: int) -> Any:
    """A byte-level BPE, trained on this repository's documentation, with Qwen2.5's chat template from TRL.

    Words that no text has fill the vocabulary up to its size.
    """
    import trl
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    special = ["<pad>", "<|im_start|>", "<|im_end|>"]
    learned = Tokenizer(models.BPE())
    learned.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    template = (Path(trl.__file__).parent / "chat_templates" / "qwen2_5.jinja").read_text()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=4096, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    texts = [path.read_text() for path in sorted(ROOT.glob("docs/**/*.md"))]
    learned.train_from_iterator([*texts, template, OBSERVATION], trainer)
    parts = json.loads(learned.to_str())
    words = parts["model"]["vocab"]
    words |= {f"filler{token}": token for token in range(len(words), vocabulary)}
    tokenizer = Tokenizer.from_str(json.dumps(parts))
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<|im_end|>")
    fast.chat_template = template
    return fast


def make_model(shape: Turns, tokenizer: Any) -> Any:
    """As `step_systems.make_model`, with room for the conversation."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=shape.hidden,
        intermediate_size=shape.hidden * 8 // 3,
        num_hidden_layers=shape.layers,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=4096,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
    )
    model = Qwen2ForCausalLM(config)
    if shape.ragged:
        end_replies(model, tokenizer.eos_token_id, 2 / shape.new)
    return model


def end_replies(model: Any, end: int, probability: float) -> None:
    """Give the end token about this probability everywhere.

    The first feature of every hidden state is made a constant that no layer changes; the head's row of the end token
    reads it.
    """
    import torch

    with torch.no_grad():
        embedding, features = model.get_input_embeddings().weight, model.config.hidden_size
        embedding[:, 0] = 30.0
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight[0] = 0
            layer.mlp.down_proj.weight[0] = 0
        head = model.lm_head.weight
        head[:, 0] = 0
        # The constant outweighs the other features, so the final norm makes it about the square root of their number.
        head[end] = 0
        head[end, 0] = math.log(len(head) * probability) / features**0.5


def make_rows(shape: Turns) -> list[dict[str, Any]]:
    asked = [{"role": "user", "content": "Walk to field 42 by calling move."}]
    if shape.instructions:
        words = " ".join(["the"] * shape.instructions)
        asked.insert(0, {"role": "system", "content": words})
    return [{"prompt": asked, "start": start} for start in range(shape.prompts)]


def read_calls_ours() -> None:
    """Read every reply as a call."""
    from rlox_grpo.rollout.episodes import conversation
    from rlox_grpo.rollout.episodes.parsing import ParsedReply

    assert hasattr(conversation, "parse_reply"), "replies are parsed elsewhere: every episode would end after one turn"
    conversation.parse_reply = lambda text, **_: ParsedReply("", None, (("move", {"steps": 3}),))  # type: ignore[assignment]


def make_trainer(shape: Turns, environment: Any, **options: Any) -> Any:
    """A trainer of this library, through its public face."""
    from rlox_grpo import GRPO

    read_calls_ours()
    tokenizer = make_tokenizer(shape.vocabulary)
    return GRPO(
        make_model(shape, tokenizer),
        step_systems.reward,
        environment=environment,
        tokenizer=tokenizer,
        group_size=shape.group,
        prompts_per_step=shape.prompts,
        max_new_tokens=shape.new,
        max_turns=shape.turns,
        log_to=(),
        **{"dtype": "float32", **options},
    )


def ours(shape: Turns) -> Callable[[], Any]:
    """A step of this library."""
    trainer = make_trainer(
        shape,
        Walk,
        kl_coef=step_systems.KL_COEF,
        learning_rate=step_systems.LEARNING_RATE,
        reference="frozen",
        zero_variance="keep",
    )
    prompts = trainer.prompts.read(make_rows(shape))
    return lambda: trainer.train_step(lambda step: prompts)


def trl(shape: Turns) -> Callable[[], Any]:
    """TRL's GRPOTrainer with `environment_factory`, without activation checkpointing."""
    from datasets import Dataset
    from transformers import AutoModelForCausalLM
    from trl import GRPOConfig, GRPOTrainer
    from trl.trainer import grpo_trainer

    call = {"type": "function", "function": {"name": "move", "arguments": {"steps": 3}}}
    grpo_trainer.parse_response = lambda *_, **__: {"role": "assistant", "content": "", "tool_calls": [call]}
    tokenizer = make_tokenizer(shape.vocabulary)
    folder = tempfile.mkdtemp()
    make_model(shape, tokenizer).save_pretrained(folder)
    observed = len(tokenizer(OBSERVATION)["input_ids"]) + 40  # and the template's own tokens
    return step_systems.let_step(
        lambda callback: GRPOTrainer(
            AutoModelForCausalLM.from_pretrained(folder),
            reward_funcs=lambda completion_ids, **columns: step_systems.reward(completion_ids),
            args=GRPOConfig(
                output_dir=folder,
                per_device_train_batch_size=shape.prompts * shape.group,
                num_generations=shape.group,
                max_completion_length=shape.turns * (shape.new + observed),
                max_tool_calling_iterations=shape.turns - 1,
                generation_kwargs={"max_new_tokens": shape.new},
                beta=step_systems.KL_COEF,
                gradient_checkpointing=False,
                **step_systems.TRL,
            ),
            train_dataset=Dataset.from_list(make_rows(shape) * 500),
            processing_class=tokenizer,
            environment_factory=Walk,
            callbacks=[callback],
        )
    )


def table_of_steps(results: Sequence[dict[str, Any]]) -> str:
    """Medians of seconds, of the ratios within a round, and the highest memory."""
    lines = [
        "| shape | system | s a step (min-max) | times ours | processor time | added peak MiB | times ours |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for result in results:
        base = result["steps"]["rlox_grpo"]
        for system, steps in result["steps"].items():
            seconds = [step["seconds"] for step in steps]
            ratios = [
                statistics.median(step[name] / own[name] for step, own in zip(steps, base, strict=True))
                for name in ("seconds", "cpu_seconds")
            ]
            added = steps[-1]["added_mib"]
            lines.append(
                f"| {result['name']} | {system} | {statistics.median(seconds):.2f} ({min(seconds):.2f}-"
                f"{max(seconds):.2f}) | {ratios[0]:.2f} | {ratios[1]:.2f} | {added:,.0f} | "
                f"{added / base[-1]['added_mib']:.2f} |"
            )
    return "\n".join(lines)


step_systems.SYSTEMS |= {"rlox_grpo": ours, "TRL": trl}  # type: ignore[dict-item]


def time_rollouts(shape: Turns, rounds: int) -> dict[str, Any]:
    """Rollouts in turns: without waits, with a tool that waits 0 to 1 s, and of one episode alone without waits.

    No schedule ends before the slowest episode has waited and its own replies have been decoded: what it waited and the
    seconds of one episode alone are a lower bound of the rollout with waits.
    """
    from rlox_grpo.rollout.sampler import make_sampling

    waits: dict[int, float] = {}
    longest = 0.0

    class SlowWalk(Walk):
        async def move(self, steps: int) -> str:
            """Move forward.

            Args:
                steps: How many fields to move.
            """
            wait = rng.random() * longest
            waits[id(self)] = waits.get(id(self), 0.0) + wait
            kept.append(self)  # so that no other one gets its id
            await asyncio.sleep(wait)
            return Walk.move(self, steps)

    rng, kept = random.Random(0), list[Any]()
    trainer = make_trainer(shape, SlowWalk)
    prompts = trainer.prompts.read(make_rows(shape))
    sampling = make_sampling(trainer.config.split().sampling)
    found = []
    for turn in range(rounds + 1):
        seconds = []
        slowest = 0.0
        for most, groups in ((0.0, [shape.group] * len(prompts)), (1.0, [shape.group] * len(prompts)), (0.0, [1])):
            longest = most
            waits.clear()
            start = time.perf_counter()
            trainer.sampler.generate(trainer.sampler.engine, prompts[: len(groups)], groups, sampling, turn)
            seconds.append(time.perf_counter() - start)
            slowest = max(slowest, *waits.values())
        if turn:  # the first warms up
            names = ("alone", "with_waits", "one_episode")
            found.append({**dict(zip(names, seconds, strict=True)), "slowest_wait": slowest})
            print(f"{shape}, rollout {turn}: {found[-1]}", file=sys.stderr, flush=True)
    return {"shape": vars(shape), "name": str(shape), "rollouts": found}


def table_of_rollouts(results: Sequence[dict[str, Any]]) -> str:
    lines = [
        "| rollout | generation alone, s | slowest episode's waits, s | one episode alone, s | rollout with waits, s "
        "| over the longer | over the lower bound |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for result in results:
        rows, measured = result["rollouts"], ("alone", "slowest_wait", "one_episode", "with_waits")
        seconds = [statistics.median(row[name] for row in rows) for name in measured]
        bounds = [
            (max(row["alone"], row["slowest_wait"]), max(row["alone"], row["slowest_wait"] + row["one_episode"]))
            for row in rows
        ]
        ratios = [
            statistics.median(row["with_waits"] / bound[which] for row, bound in zip(rows, bounds, strict=True))
            for which in (0, 1)
        ]
        lines.append(f"| {result['name']} | " + " | ".join(f"{number:.2f}" for number in [*seconds, *ratios]) + " |")
    return "\n".join(lines)


def write(part: str, result: dict[str, Any]) -> None:
    """Put a result in the place of that of the same name, and write both files."""
    path = RESULTS.with_suffix(".json")
    kept = json.loads(path.read_text()) if path.exists() else {"steps": {}, "rollouts": {}}
    kept["versions"] = {package: version(package) for package in ("torch", "transformers", "trl")}
    kept[part][result["name"]] = result
    path.write_text(json.dumps(kept, indent=1) + "\n")
    listed = ", ".join(f"{package} {number}" for package, number in kept["versions"].items())
    heading = (
        f"`python benches/turns.py`: {platform.machine()}, {os.cpu_count()} cores, 1 thread, float32, Qwen2-type model "
        f"of hidden size 256 and 4 layers; {listed}. Systems take turns; a ratio is the median of those within a round."
    )
    steps, rollouts = table_of_steps([*kept["steps"].values()]), table_of_rollouts([*kept["rollouts"].values()])
    RESULTS.with_suffix(".md").write_text(f"{heading}\n\n{steps}\n\n{rollouts}\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--warm-up", type=int, default=1, help="rounds that are not counted")
    parser.add_argument("--turns", type=int, nargs="+", default=[4, 8])
    parser.add_argument("--new", type=int, default=32, help="tokens of a reply")
    parser.add_argument("--vocabulary", type=int, default=8192)
    parser.add_argument("--prompts", type=int, default=2, help="prompts of a step, each for 8 episodes")
    parser.add_argument("--instructions", type=int, default=0, help="words of the system message")
    parser.add_argument("--ragged", action="store_true", help="replies of different lengths")
    parser.add_argument("--parts", nargs="+", choices=("steps", "rollouts"), default=["steps", "rollouts"])
    options = parser.parse_args()
    import torch

    torch.set_num_threads(1)
    for turns in options.turns:
        shape = Turns(
            turns,
            options.new,
            prompts=options.prompts,
            vocabulary=options.vocabulary,
            instructions=options.instructions,
            ragged=options.ragged,
        )
        if "steps" in options.parts:
            systems = ["rlox_grpo", "TRL"]
            write("steps", in_turns(shape, systems, 1, options.rounds, options.warm_up, script=__file__))
        if "rollouts" in options.parts:
            write("rollouts", time_rollouts(shape, options.rounds))
    print(RESULTS.with_suffix(".md").read_text())


if __name__ == "__main__":
    if len(sys.argv) == 3 and sys.argv[1] in step_systems.SYSTEMS:
        step_systems.serve(sys.argv[1], Turns(**json.loads(sys.argv[2])), sys.stdin)  # type: ignore[arg-type]
    else:
        main()
