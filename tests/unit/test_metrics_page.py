"""docs/metrics.md names every metric that short real runs write, and no other."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from rlox_grpo import GRPO
from rlox_grpo.rewards import Repetition

PAGE = Path(__file__).resolve().parents[2] / "docs" / "metrics.md"
TABLES = PAGE.read_text(encoding="utf-8").partition("## Reward metrics")[2]
DOCUMENTED = re.findall(r"^\| `([a-z_]+/[^`]+)` \|", TABLES, re.MULTILINE)
ELSEWHERE = {"perf/mfu"}
"""Documented, and not written on a CPU."""


def pattern(name: str) -> str:
    """A regular expression of a documented name, whose `<…>` stands for a name or number."""
    return re.sub(r"<\w+>", "[a-z0-9_]+", re.sub(r"([.@])", r"\\\1", name))


def first_token_is_even(completion_ids, **_):
    """0 or 1, so that about half of the groups of two have equal rewards and are replaced."""
    return [float(ids[0] % 2 == 0) for ids in completion_ids]


RUNS: dict[str, dict[str, Any]] = {
    "exact": {
        "kl_coef": 0.1,
        "kl_schedule": "linear",
        "curriculum": "pass_rate",
        "on_reward_error": "none",
        "eval_greedy": True,
        "eval_samples": 2,
        "zero_variance": "refill",
        "max_refills": 1,
    },
    "corrected": {"importance_correction": "token", "async_steps": 1},
}


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory, make_tiny_model: Any, byte_tokenizer: Any) -> set[str]:
    """Names of all metrics of both runs."""
    names: set[str] = set()
    for run, options in RUNS.items():
        folder = tmp_path_factory.mktemp(run)
        trainer = GRPO(
            make_tiny_model("qwen2", vocab_size=259, eos_token_id=1),
            [first_token_is_even, Repetition(unit="tokens")],
            tokenizer=byte_tokenizer,
            group_size=2,
            prompts_per_step=3,
            max_new_tokens=5,
            stop=tuple("abcdefghijklmnopqrstuvwxyz"),  # some completions end before the limit
            max_steps=2,
            eval_steps=2,
            checkpoint_steps=0,
            learning_rate=1e-3,
            output_dir=folder,
            log_to=(),
            **options,
        )
        prompts = ["a", "bc", "def", "gh"]
        trainer.train(prompts, eval_prompts=prompts[:2])
        for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines():
            names |= json.loads(line).keys()
        for line in (folder / "evaluations.jsonl").read_text(encoding="utf-8").splitlines():
            names |= {name if name == "step" else f"eval/{name}" for name in json.loads(line)}
    return names - {"step"}


def test_every_metric_is_documented(written: set[str]) -> None:
    known = re.compile("|".join(pattern(name) for name in DOCUMENTED))
    assert len(written) > 50
    assert not {name for name in written if not known.fullmatch(name)}


def test_every_documented_metric_is_written(written: set[str]) -> None:
    missing = {name for name in DOCUMENTED if not any(re.fullmatch(pattern(name), found) for found in written)}
    assert missing == ELSEWHERE
    assert len(DOCUMENTED) == len(set(DOCUMENTED))
