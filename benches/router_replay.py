"""Replay the routing of a mixture of experts: sampled in bfloat16, trained in float32.

    python benches/router_replay.py [--out runs/router_replay] [--seeds 8] [--steps 40] [--learning-rate 3e-4]

A Qwen3-MoE of two layers with eight experts, of which each token uses two, learns the demo's Countdown by supervised
steps, then by GRPO. The engine has a copy of the weights in bfloat16, as vLLM would have, so its router sends some
tokens to other experts than the trainer's. Three arms start from the same warm start in each seed: no replay, the
experts of the old log-probs (``router_replay="trainer"``), and those of the engine (``"sampler"``).

A line of the table has the mean over the seeds with 95 % intervals, and the share of runs that collapsed: the held-out
accuracy at the end is below that of the warm start. The gap is the mean of |log-prob of the trainer − of the engine|
over the sampled tokens of all steps. Finished cells of ``results.jsonl`` in the folder are not trained again.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.utils.logging import disable_progress_bar

sys.path.insert(0, str(Path(__file__).parent))
from paired_statistics import bootstrap_interval
from rlox_grpo import GRPO
from rlox_grpo.config.eval_set import EvalSet
from rlox_grpo.demo import run as demo
from rlox_grpo.demo.closed_vocabulary import build_countdown_tokenizer
from rlox_grpo.demo.warm_start import make_model, teach
from rlox_grpo.rollout.engines.hf import HFEngine
from rlox_grpo.run.files import append_line, json_line, read_jsonl

ARMS = ("none", "trainer", "sampler")
WARM_START_STEPS = 250
SETTINGS: dict[str, Any] = {
    "group_size": 16,
    "prompts_per_step": 16,
    "max_new_tokens": 40,
    "reward_scaling": "mean",
    "mini_batches": 4,  # later updates of a step are off-policy, so that ratios and the routers' moves matter
    "dtype": "float32",
    "log_to": [],
    "guards": False,
}


def make_warm_start(folder: Path, seed: int) -> Path:
    """Return ``folder`` with a mixture of experts after supervised steps; train it if it is not there."""
    if folder.exists():
        return folder
    rows, _ = demo.problems(seed)
    tokenizer = build_countdown_tokenizer(demo.LARGEST)
    config = Qwen3MoeConfig(
        vocab_size=len(tokenizer.get_vocab()),
        hidden_size=128,
        intermediate_size=128,
        moe_intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        num_experts=8,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        max_position_embeddings=128,
        initializer_range=0.05,
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
    )
    torch.manual_seed(seed)
    model: Any = Qwen3MoeForCausalLM(config)  # type: ignore[no-untyped-call]
    dense: Any = make_model(tokenizer)
    with torch.no_grad():  # the words' first embeddings encode the values of the numbers
        model.get_input_embeddings().weight.copy_(dense.get_input_embeddings().weight)

    def draw(rng: np.random.Generator, count: int) -> list[tuple[str, str]]:
        picked = rng.integers(len(rows), size=count)
        return [demo.write_worked_example(rows[index], rng, demo.LARGEST) for index in picked]

    teach(model, tokenizer, draw, seed=seed, steps=WARM_START_STEPS, rows=64, learning_rate=3e-3)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


class Watch:
    """A callback that keeps two metrics of each step."""

    def __init__(self) -> None:
        self.gaps: list[float] = []
        self.moved: list[float] = []

    def on_step(self, step: int, metrics: dict[str, float]) -> None:
        """Append the step's gap and, with replay, the share of choices that the trainer's router would change."""
        self.gaps.append(metrics["mismatch/gap_mean"])
        if "router/moved_share" in metrics:
            self.moved.append(metrics["router/moved_share"])


def train(arm: str, seed: int, folder: Path, steps: int, learning_rate: float) -> dict[str, Any]:
    """Train one arm from the warm start of a seed; return the figures at its end."""
    rows, held_out = demo.problems(seed)
    first = make_warm_start(folder / f"warm_start_{seed}", seed)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(first), AutoTokenizer.from_pretrained(first)
    engine = HFEngine(copy.deepcopy(model).to(torch.bfloat16), tokenizer, max_rows=256, takes_weights=True)
    engine.exact = False  # its log-probs are those of bfloat16
    watch = Watch()
    trainer = GRPO(
        model,
        demo.make_rewards(),
        tokenizer=tokenizer,
        engine=engine,
        callbacks=[watch],
        router_replay=arm,
        max_steps=steps,
        learning_rate=learning_rate,
        seed=seed,
        **SETTINGS,
    )
    asked = EvalSet(demo.prompts(held_out, seed), samples=4)
    before = trainer.evaluate(asked)["accuracy"]
    trainer.train(demo.prompts(rows, seed))
    after = trainer.evaluate(asked)["accuracy"]
    return {
        "arm": arm,
        "seed": seed,
        "steps": steps,
        "learning_rate": learning_rate,
        "before": before,
        "after": after,
        "gap": statistics.mean(watch.gaps),
        "gap_last": statistics.mean(watch.gaps[-10:]),
        "moved": statistics.mean(watch.moved) if watch.moved else None,
    }


def print_table(cells: list[dict[str, Any]]) -> None:
    """Print a line for each arm; differences are to ``none``, over the seeds that both arms have."""
    print("| `router_replay` | seeds | before | after | difference to none | collapsed | gap | last steps | moved |")
    print("| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |")
    base = {cell["seed"]: cell["after"] for cell in cells if cell["arm"] == "none"}
    for arm in ARMS:
        own = [cell for cell in cells if cell["arm"] == arm]
        if not own:
            continue
        means = {name: statistics.mean(cell[name] for cell in own) for name in ("before", "after", "gap", "gap_last")}
        differences = [cell["after"] - base[cell["seed"]] for cell in own if cell["seed"] in base]
        low, high = bootstrap_interval(differences) if arm != "none" and len(differences) > 1 else (0.0, 0.0)
        moved = [cell["moved"] for cell in own if cell["moved"] is not None]
        print(
            f"| `{arm}` | {len(own)} | {means['before']:.3f} | {means['after']:.3f} | "
            f"{statistics.mean(differences):+.3f} ({low:+.3f} to {high:+.3f}) | "
            f"{sum(cell['after'] < cell['before'] for cell in own)} of {len(own)} | {means['gap']:.4f} | "
            f"{means['gap_last']:.4f} | {f'{statistics.mean(moved):.4f}' if moved else '–'} |"
        )


def main() -> None:
    """Train the missing cells, seed by seed, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/router_replay"))
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--learning-rate", type=float, default=3e-4)
    options = parser.parse_args()
    torch.set_num_threads(1)
    disable_progress_bar()  # type: ignore[no-untyped-call]
    options.out.mkdir(parents=True, exist_ok=True)
    results = options.out / "results.jsonl"
    cells: list[dict[str, Any]] = read_jsonl(results) if results.exists() else []
    asked = {"steps": options.steps, "learning_rate": options.learning_rate}
    cells = [cell for cell in cells if {name: cell[name] for name in asked} == asked]
    for seed in range(options.seeds):
        for arm in ARMS:
            if any((cell["arm"], cell["seed"]) == (arm, seed) for cell in cells):
                continue
            cells.append(train(arm, seed, options.out, options.steps, options.learning_rate))
            append_line(results, json_line(cells[-1]))
            print(cells[-1], flush=True)
    print_table(cells)


if __name__ == "__main__":
    main()
