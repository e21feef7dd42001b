"""A made-up run's folder, as the trainer would leave it: a small model learning Countdown over 120 steps."""

import math
from pathlib import Path

import numpy as np

from rlox_grpo.run.files import write_completions
from rlox_grpo.run.metrics import reward_times, step_metrics
from rlox_grpo.run.sinks import JsonlSink
from rlox_grpo.types import Completion, Prompt, RolloutGroup, ScoredGroup, UpdateStats

GROUP_SIZE = 8

CONFIG = """\
model = "from-scratch-2m"
preset = "dr_grpo"
seed = 0
max_steps = 150

[sampling]
temperature = 1.0
max_new_tokens = 96

[loss]
clip_low = 0.2
clip_high = 0.28
kl_coef = 0.001
loss_aggregation = "fixed_length"

[optimizer]
learning_rate = 3e-4
max_grad_norm = 1.0

[reward]
functions = ["countdown", "tag_format"]
weights = [1.0, 0.1]
"""


def write_run(run_dir: Path, *, num_steps: int = 120, hostile: str = "") -> Path:
    """Write the folder; ``hostile`` goes into every place that holds a name or a text."""
    run_dir.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(0)
    (run_dir / "config.toml").write_text(CONFIG, encoding="utf-8")
    metrics, evaluations = JsonlSink(run_dir / "metrics.jsonl"), JsonlSink(run_dir / "evaluations.jsonl")
    for step in range(num_steps + 1):
        skill = 1 / (1 + math.exp(-(step - 0.45 * num_steps) / (0.09 * num_steps)))
        if step % 20 == 0:
            noise = rng.normal(0, 0.01)
            accuracy = 0.03 + 0.74 * skill + noise
            evaluations.write(
                step,
                {
                    "accuracy": accuracy,
                    "accuracy_low": accuracy * 0.8,
                    "accuracy_high": accuracy * 1.2,
                    **({"accuracy_vs_start": 0.74 * skill, "accuracy_vs_start_low": -0.01} if step else {}),
                    **({"accuracy_vs_start_high": 0.8 * skill} if step else {}),
                    "rewards/judge/cached": 0.0,
                    "rewards/judge/clear": 0.4 + 0.2 * skill,
                    "greedy_accuracy": 0.05 + 0.78 * skill + noise,
                    "pass@4": 0.1 + 0.83 * skill,
                    "mean_reward": 0.08 + 0.78 * skill,
                },
            )
            held_out = [_group(np.random.default_rng(900 + k), skill, step, 900 + k, 1, hostile) for k in range(10)]
            write_completions(run_dir, step, held_out, None, kind="eval_step")
        if step == 0:
            continue
        groups = [_group(rng, skill, step, 16 * step + k, GROUP_SIZE, hostile) for k in range(16)]
        rewards = np.stack([scored.rewards for scored in groups])
        advantages = (rewards - rewards.mean(axis=1, keepdims=True)).ravel()
        stats = UpdateStats(
            grad_norm=float(0.3 + 0.4 * rng.gamma(2.0) * (1 - 0.6 * skill) + (6.0 if step == num_steps // 2 else 0.0)),
            learning_rate=3e-4 * min(1.0, step / 10) * (1 - 0.9 * max(0, step - 10) / num_steps),
            metrics={
                "kl": float(0.08 * skill * rng.gamma(20, 1 / 20)) if step != 31 else math.nan,
                "entropy": float(1.9 - 1.5 * skill + rng.normal(0, 0.03)),
                "clip_fraction": float(0.01 * rng.gamma(3.0)),
                "ratio_max": float(1 + 0.3 * rng.gamma(2.0)),
                f"loss{hostile}": float(rng.normal(0, 0.02)),
            },
        )
        timings = {
            "rollout": 1.1 + 0.5 * (1 - skill) + abs(rng.normal(0, 0.06)),
            "rewards": 0.03,
            "log_probs": 0.3 + 0.03 * rng.random(),
            "update": 0.75 + abs(rng.normal(0, 0.04)),
            "weights": 0.08,
        }
        seconds = {**timings, "step": sum(timings.values()) + 0.12}
        metrics.write(step, {**step_metrics(groups, advantages, stats, seconds), **reward_times(groups)})
        if step in (1, 2) or step % 10 == 0:
            write_completions(run_dir, step, groups, advantages)
    metrics.close()
    evaluations.close()
    return run_dir


def _group(rng: np.random.Generator, skill: float, step: int, index: int, size: int, hostile: str) -> ScoredGroup:
    a, b, c = (int(number) for number in np.random.default_rng(index).integers(2, 50, 3))
    prompt = f"Use {a}, {b} and {c} once each to make {a + b * c}. Think first, then answer in <answer>.{hostile}"
    completions, right, tagged = [], [], []
    for _ in range(size):
        right.append(float(rng.random() < 0.02 + 0.9 * skill))
        tagged.append(float(rng.random() < 0.3 + 0.69 * skill))
        tried = f"{b} * {c} + {a}" if right[-1] else f"{a} * {b} + {c}"
        thought = f"I need {a + b * c}. " + f"{a} + {b} + {c} = {a + b + c}, no. " * int(
            rng.integers(1, 2 + 4 * (1 - skill))
        )
        answer = f"<answer>{tried}</answer>" if tagged[-1] else tried
        length = int(min(96, 18 + 9 * len(thought.split()) / 4 + rng.integers(0, 30 if skill < 0.5 else 9)))
        text = f"<think>{thought}{tried} = {a + b * c}.</think>\n{answer}{hostile}"
        completions.append(
            Completion(np.arange(length), np.zeros(length, np.float32), "length" if length == 96 else "stop", text)
        )
    components = {
        f"countdown{hostile}": np.array(right, np.float32),
        "tag_format": np.array(tagged, np.float32),
        "overlong": np.full(size, np.nan, np.float32),
    }
    rewards = components[f"countdown{hostile}"] + np.float32(0.1) * components["tag_format"]
    group = RolloutGroup(Prompt(np.arange(5), index, text=prompt), tuple(completions), max(0, step - 1))
    statuses = {f"countdown{hostile}": np.where(tagged, 0, 1).astype(np.uint8)}
    seconds = dict.fromkeys(components, 0.001 * size)
    measures = {"judge/cached": np.zeros(size, np.float32), "judge/clear": np.full(size, 0.25, np.float32)}
    feedback = {f"judge{hostile}": (f"It is clear.{hostile}",) * size}
    outcomes = {"overlong": np.zeros(size, np.uint8)}
    return ScoredGroup(group, rewards, components, statuses, outcomes, seconds, measures, feedback=feedback)
