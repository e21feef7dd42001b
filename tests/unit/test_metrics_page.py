"""docs/reference/metrics.md names every metric that short real runs write, and no other."""

from __future__ import annotations

import copy
import json
import re
from pathlib import Path
from typing import Any

import pytest

from rlox_grpo import GRPO
from rlox_grpo.environments import Outcome
from rlox_grpo.rewards import Repetition
from rlox_grpo.run.guards import GUARDS

PAGE = Path(__file__).resolve().parents[2] / "docs" / "reference" / "metrics.md"
TABLES = PAGE.read_text(encoding="utf-8").partition("## Reward metrics")[2]
DOCUMENTED = re.findall(r"^\| `([a-z_]+/[^`]+)` \|", TABLES, re.MULTILINE)
TOOLS = {f"episode/{name}" for name in ("tool_calls", "tool_errors", "tool_seconds", "observations_cut")}
PROGRAMS = {"rewards/<name>/out_of_memory", "rewards/<name>/killed"}
SERVERS = {
    "engines/waiting_max",
    *(f"engines/<i>/{name}" for name in ("tokens_per_s", "requests_max", "restarts", "transfer_s")),
}
VLLM = {"mismatch/canary_gap_max", "weights/adapter_change_kept", "weights/adapter_matrices_unchanged"}
ROUTERS = {
    f"router/{name}" for name in ("busiest_share", "load_entropy", "idle_share", "moved_share", "aux_loss", "z_loss")
}
JUDGES = {"rewards/<name>/no_verdict", "rewards/<name>/unanswered"}
ELSEWHERE = {
    "perf/mfu",
    "perf/gpu_memory_gib_max",
    *TOOLS,
    *PROGRAMS,
    *JUDGES,
    *ROUTERS,
    *SERVERS,
    *VLLM,
    "episode/cancelled_calls",
    "episode/parse_errors",
    "episode/compactions",
    "episode/compaction_tokens_before",
    "episode/compaction_tokens_after",
    "episode/summary_token_share",
    "replay/staleness",
}
ELSEWHERE |= {f"images/{name}" for name in ("per_prompt", "shown", "distinct", "tokens", "tokens_share")}
ELSEWHERE |= {"images/tower_pictures", "images/tower_seconds"}
ELSEWHERE |= {"eval/frac_unscored", "eval/rewards/<name>/<metric>", "eval/maj@<k>"}
"""Documented, and not written on a CPU, without vLLM, tools, killed programs, failed samples, judges, experts, clients
that go away, replayed completions, tasks of reasoning_gym, pictures, or a rule on final answers."""

CHAT_TEMPLATE = (
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def pattern(name: str) -> str:
    """A regular expression of a documented name, whose `<…>` stands for a name or number."""
    return re.sub(r"<\w+>", "[a-z0-9_]+", re.sub(r"([.@])", r"\\\1", name))


def first_token_is_even(completion_ids, **_):
    """0 or 1, so that about half of the groups of two have equal rewards and are replaced."""
    return [float(ids[0] % 2 == 0) for ids in completion_ids]


async def two_turns(row: Any, chat: Any) -> Outcome:
    """Two turns and a branch; pays for odd tokens."""
    first = await chat.turn(row["letters"])
    second = await chat.turn("again")
    await chat.complete([{"role": "user", "content": "another"}])
    return Outcome(float(first.token_ids[0] % 2 + second.token_ids[0] % 2), metrics={"letters": 1.0})


RUNS: dict[str, dict[str, Any]] = {
    "exact": {
        "kl_coef": 0.1,
        "kl_schedule": "linear",
        "curriculum": "pass_rate",
        "mutual_information_steps": 1,
        "on_reward_error": "none",
        "eval_greedy": True,
        "eval_samples": 2,
        "zero_variance": "refill",
        "max_refills": 1,
        "policy_loss": "p3o",
    },
    "corrected": {
        "importance_correction": "token",
        "async_steps": 1,
        "policy_loss": "kl_cov",
        "baseline": "moving",
        "reward_scaling": "none",
        "top_p": 0.9,
        "sampling_mask": "none",
    },
    "shown": {"demo_loss": "ce", "replay": "positive"},
    "taught": {"top_p": 0.9, "teacher_coef": 0.5, "teacher_prompt": "An answer: {prompt}"},
}


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory, make_tiny_model: Any, byte_tokenizer: Any) -> set[str]:
    """Names of all metrics of both runs."""
    names: set[str] = set()
    for run, options in RUNS.items():
        folder = tmp_path_factory.mktemp(run)
        teacher = make_tiny_model("qwen2", vocab_size=259, initializer_range=0.1) if run == "taught" else None
        trainer = GRPO(
            make_tiny_model("qwen2", vocab_size=259, eos_token_id=1),
            [first_token_is_even, Repetition(unit="tokens")],
            teacher=teacher,
            tokenizer=byte_tokenizer,
            group_size=2,
            prompts_per_step=3,
            max_new_tokens=5,
            stop=tuple("abcdefghijklmnopqrstuvwxyz"),  # some completions end before the limit
            max_steps=2,
            eval_steps=2,
            checkpoint_steps=int(run == "shown"),
            learning_rate=1e-3,
            output_dir=folder,
            log_to=(),
            **options,
        )
        prompts = ["a", "bc", "def", "gh"]
        sources = {"short": prompts[:2], "long": prompts[2:]}
        if run == "shown":
            prompts = [{"prompt": text, "demonstration": text} for text in prompts]
        trainer.train(sources if run == "exact" else prompts, eval_prompts=prompts[:2])
        names |= read_names(folder)
    folder = tmp_path_factory.mktemp("episodes")
    tokenizer = copy.deepcopy(byte_tokenizer)
    tokenizer.chat_template = CHAT_TEMPLATE
    trainer = GRPO(
        make_tiny_model("qwen2", vocab_size=259, eos_token_id=1),
        environment=two_turns,
        tokenizer=tokenizer,
        group_size=2,
        prompts_per_step=2,
        max_new_tokens=3,
        max_steps=1,
        partial_rollout_turns=1,
        drop_stale=0,
        environment_loss_coef=0.05,
        output_dir=folder,
        log_to=(),
    )
    rows = [{"letters": letters} for letters in ("a", "bc")]
    trainer.train(rows, eval_prompts=rows)
    return (names | read_names(folder)) - {"step"}


def read_names(folder: Path) -> set[str]:
    """Names of the metrics of one run, its evaluations' among them."""
    names: set[str] = set()
    for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines():
        names |= json.loads(line).keys()
    for line in (folder / "evaluations.jsonl").read_text(encoding="utf-8").splitlines():
        names |= {name if name == "step" else f"eval/{name}" for name in json.loads(line)}
    return names


def test_every_metric_is_documented(written: set[str]) -> None:
    known = re.compile("|".join(pattern(name) for name in DOCUMENTED))
    assert len(written) > 50
    assert not {name for name in written if not known.fullmatch(name)}


def test_every_documented_metric_is_written(written: set[str]) -> None:
    missing = {name for name in DOCUMENTED if not any(re.fullmatch(pattern(name), found) for found in written)}
    assert missing == ELSEWHERE
    assert len(DOCUMENTED) == len(set(DOCUMENTED))


def test_every_metric_has_a_healthy_range_and_a_remedy() -> None:
    rows = [
        line.strip("| ").split(" | ") for line in PAGE.read_text(encoding="utf-8").splitlines() if line[:3] == "| `"
    ]
    of_metrics = [cells for cells in rows if "/" in cells[0].split("`")[1]]
    assert len(of_metrics) == len(DOCUMENTED)
    assert not [cells[0] for cells in of_metrics if len(cells) != 4 or not all(cells)]


def test_every_guard_is_tied_to_its_metrics() -> None:
    text = PAGE.read_text(encoding="utf-8")
    table = text.partition("## Guards")[2]
    guards = {guard.__name__ for guard in GUARDS}
    assert set(re.findall(r"`([a-z_]+)`", "".join(re.findall(r"^\| (.*?) \|", table, re.MULTILINE)))) == guards
    assert {name for name in guards if f"`{name}`" in text.partition("## Guards")[0]} == guards
    for name in re.findall(r"`([a-z]+/[a-z_<>/]+)`", table):
        assert name in DOCUMENTED or name == "guard/<name>"
