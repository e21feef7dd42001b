"""The documentation builds without a warning, and its search box finds the page of each question in one query.

The index is searched twice: by the site's own web worker, where node is installed, and by the `lunr` package with the
fields, boosts, separator and grouping of that worker.
"""

from __future__ import annotations

import html
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("mkdocs")
pytest.importorskip("mkdocstrings")
pytest.importorskip("material")
lunr_builder = pytest.importorskip("lunr.builder")

ROOT = Path(__file__).resolve().parents[2]
FIRST = 3
"""A page counts as found among so many results."""

TWELVE = {
    "default loss aggregation": "concepts/algorithm",
    "set kl coefficient": "guides/kl",
    "log completions": "guides/logging",
    "how much gpu memory": "guides/memory",
    "use several gpus": "guides/several_gpus",
    "async reward function": "guides/rewards",
    "stop at a string": "guides/chat_templates",
    "what do the metrics mean": "reference/metrics",
    "choose group_size": "guides/hyperparameters",
    "use a reward model": "guides/rewards",
    "system prompt": "guides/chat_templates",
    "file formats jsonl": "guides/data",
}
"""The questions that had no answer, or half of one, when a newcomer tried the documentation."""

MORE = {
    "hugging face datasets": "guides/data",
    "temperature top_p": "guides/hyperparameters",
    "early stopping": "guides/callbacks",
    "completion[0] content": "guides/rewards",
    "num_generations": "migration/from_trl",
    "save_steps": "migration/from_trl",
    "compute_score verl": "migration/from_verl",
    "reward function signature": "guides/rewards",
    "lora_target_modules": "guides/lora",
    "wandb project": "guides/logging",
    "resume after kill": "guides/resume",
    "reward stays at zero": "guides/debugging",
    "sft data in rl": "guides/demonstrations",
    "LUFFY": "guides/demonstrations",
    "off-policy demonstrations": "guides/demonstrations",
    "none right hard prompts": "guides/demonstrations",
    "experience replay buffer": "guides/demonstrations",
    "learning rate warmup": "guides/hyperparameters",
    "load trained model in transformers": "guides/save_and_load",
    "ray cluster": "guides/several_gpus",
    "8-bit optimizer": "guides/memory",
    "several names options command": "reference/command_line",
    "install": "start/install",
    "pytorch module without tokenizer": "start/own_model",
    "rename columns": "guides/data",
    "enable_thinking qwen3": "guides/chat_templates",
    "time limit for a reward": "guides/rewards",
    "boxed answer equal fractions": "concepts/math_equality",
    "tool calling": "guides/several_turns",
    "stale weights in vllm": "guides/vllm",
    "lora merged bfloat16": "guides/lora",
    "context compaction": "guides/long_agents",
    "several environments": "guides/mixtures",
    "several environments in one run": "guides/mixtures",
    "environment timeout": "guides/failing_environments",
    "environment crashes": "guides/failing_environments",
    "memory leak in environment": "guides/failing_environments",
    "agent that edits files": "guides/code_rewards",
    "agent compacts its own history": "guides/openai_agents",
    "summarize a long conversation": "guides/long_agents",
    "compact_at_tokens": "guides/long_agents",
    "long tool results": "guides/several_turns",
    "penalty for malformed tool calls": "guides/several_turns",
    "openai base_url api_key": "guides/openai_agents",
    "chat completions endpoint": "guides/openai_agents",
    "prime verifiers taskset": "guides/other_environments",
    "openenv server": "guides/other_environments",
    "unit tests as reward for code": "guides/code_rewards",
    "sandbox landlock seccomp": "guides/code_rewards",
    "gymnasium environment": "guides/other_environments",
    "chat template drops reasoning": "guides/several_turns",
    "lora merge adapter": "guides/lora",
    "qlora 4-bit bitsandbytes": "guides/lora",
    "push_to_hub upload": "guides/save_and_load",
    "resume from checkpoint": "guides/resume",
    "output_dir files": "guides/resume",
    "evaluate a checkpoint pass@k": "guides/evaluate",
    "several test sets": "guides/evaluate",
    "mix datasets": "guides/mixtures",
    "several datasets": "guides/mixtures",
    "data sources weights": "guides/mixtures",
    "compare two checkpoints": "guides/evaluate",
    "confidence interval of accuracy": "guides/evaluate",
    "callback after each step": "guides/callbacks",
    "learning rate": "guides/hyperparameters",
    "out of memory": "guides/memory",
    "multi-GPU torchrun": "guides/several_gpus",
    "deepspeed zero 3": "guides/several_gpus",
    "vllm server": "guides/vllm",
    "async_steps": "guides/async",
    "partial rollouts": "guides/async",
    "wandb tensorboard": "guides/logging",
    "reward is flat": "guides/debugging",
    "jupyter notebook": "notebooks/first_run",
    "compare learning rates notebook": "notebooks/comparing_runs",
    "unknown option did you mean": "guides/errors",
    "entropy collapse": "guides/hyperparameters",
    "learning study protocol": "concepts/learning_study",
    "command line": "reference/command_line",
    "attention kernel flash": "guides/gpu",
    "bfloat16 precision dtype": "guides/gpu",
    "layout one host 8 gpus": "guides/scaling",
    "slurm kubernetes": "guides/several_gpus",
    "reference policy": "guides/kl",
    "reward weights several rewards": "guides/rewards",
    "save total limit checkpoints": "guides/resume",
    "greedy decoding evaluation": "guides/evaluate",
    "gguf llama.cpp": "guides/save_and_load",
    "train from gguf file": "guides/save_and_load",
    "convert gguf to hugging face": "guides/save_and_load",
    "curve looks healthy": "guides/reading_metrics",
    "speed compared with trl": "concepts/performance",
    "without full logits": "concepts/algorithm",
    "advantages baseline leave one out": "concepts/algorithm",
    "model from scratch": "start/own_model",
    "small pretrained model smollm2": "start/pretrained_model",
    "csv file": "guides/data",
    "optimizer": "guides/hyperparameters",
    "question column prompt_template": "guides/chat_templates",
    "repetition_penalty": "guides/vllm",
    "peft_config": "migration/from_trl",
    "ctrl-c stop": "guides/resume",
    "dr_grpo preset": "reference/presets",
    "arxiv paper dapo": "reference/papers",
    "num_generations beta trl": "migration/from_trl",
    "migrate from verl": "migration/from_verl",
    "time of a step estimate": "guides/scaling",
    "reward function raised keyerror": "guides/errors",
    "loss is nan": "guides/debugging",
    "zero variance groups": "concepts/algorithm",
    "kl explodes": "guides/debugging",
    "reward_model ground_truth column": "migration/from_verl",
    "self-play roles baseline": "concepts/algorithm",
    "cuda out of memory": "guides/memory",
    "resume from checkpoint other folder": "guides/resume",
    "how long does training take": "guides/scaling",
    "eos token never generated": "guides/chat_templates",
    "reward stays zero": "guides/debugging",
    "train without a gpu": "guides/gpu",
    "vllm version not supported": "guides/vllm",
    "nccl timeout hang": "guides/debugging",
    "use my own dataset": "guides/data",
    "stop training early": "guides/resume",
    "grad norm is zero": "guides/debugging",
    "should i use trl or verl": "concepts/comparison",
    "bytes per parameter adamw": "guides/memory",
    "oom": "guides/memory",
    "prompt too long": "guides/data",
    "upload model": "guides/save_and_load",
    "watch a run live": "guides/reading_metrics",
    "continue training with another learning rate": "guides/resume",
    "asynchronous generation example": "guides/async",
    "kl coefficient beta": "guides/kl",
    "how many generations per prompt": "guides/hyperparameters",
    "reward hacking": "guides/debugging",
    "completions cut off": "guides/debugging",
    "gradient checkpointing": "guides/memory",
    "fsdp": "guides/several_gpus",
    "vllm colocate mode": "guides/vllm",
    "llm as a judge": "guides/judge",
    "rubric": "guides/judge",
    "judge prompt injection": "guides/judge",
    "async reward": "guides/rewards",
    "custom reward function": "guides/rewards",
    "dataset columns passed to reward": "guides/rewards",
    "load adapter in vllm": "guides/save_and_load",
    "report to wandb": "guides/logging",
    "warmup cosine schedule": "guides/hyperparameters",
    "clip higher dapo": "guides/hyperparameters",
    "length penalty overlong": "reference/reward_rules",
    "dynamic sampling": "concepts/algorithm",
    "multi turn environment": "guides/several_turns",
    "python interpreter tool": "guides/code_rewards",
    "reproducible seed": "concepts/numerics",
    "early stopping callback": "guides/callbacks",
    "slow training tokens per second": "guides/debugging",
    "8-bit adam": "guides/memory",
    "per_device_train_batch_size": "migration/from_trl",
    "bf16": "guides/gpu",
    "iterable dataset streaming": "guides/data",
    "clipped_ratio": "reference/metrics",
    "tensor_model_parallel_size": "migration/from_verl",
    "ppo_mini_batch_size": "migration/from_verl",
    "gsm8k example": "guides/data",
    "hyperparameters for small model": "guides/hyperparameters",
    "best checkpoint": "guides/evaluate",
    "keep the best checkpoint": "guides/evaluate",
    "load_best_model_at_end": "guides/evaluate",
}

ABSENT = {
    "own policy loss": "guides/own_parts",
    "process rewards": "guides/own_parts",
    "distillation": "guides/teacher",
    "teacher": "guides/teacher",
    "teacher model": "guides/teacher",
    "opd": "guides/teacher",
    "on-policy distillation": "guides/teacher",
    "GKDTrainer": "migration/from_trl",
    "DistillationTrainer": "migration/from_trl",
    "use_policy_gradient": "migration/from_verl",
    "MoE": "concepts/limits",
    "mixture of experts": "concepts/limits",
    "share a GPU": "guides/several_gpus",
    "images": "concepts/limits",
    "own advantage": "guides/own_parts",
    "judge": "guides/judge",
    "self-rewarding": "concepts/limits",
}
"""What people ask for that is not there, or only in part: a page says so."""

QUESTIONS = {**TWELVE, **MORE, **ABSENT}

Search = Callable[[str], list[str]]
"""Query → locations of pages, best first."""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built as `make docs` does: `--quiet` would hide the warnings from `--strict`."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "WARNING" not in done.stderr
    return folder


def read_index(site: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    index = json.loads((site / "search" / "search_index.json").read_text(encoding="utf-8"))
    return index["config"], index["docs"]


def search_by_lunr(config: dict[str, Any], docs: list[dict[str, Any]]) -> Search:
    """As the worker: no normalisation by length, pages weigh more than sections, results are grouped by page."""
    separator = re.compile(config["separator"])

    def split(text: str) -> list[str]:
        return [word for word in separator.split(html.unescape(re.sub(r"<[^>]*>", " ", text)).lower()) if word]

    builder = lunr_builder.Builder()
    builder.b(0)
    builder.ref("location")
    for name, options in config["fields"].items():
        builder.field(name, boost=options["boost"])
    for doc in docs:
        fields = {name: split(doc.get(name, "")) for name in ("title", "text")}
        builder.add({"location": doc["location"], "tags": [], **fields}, {"boost": doc.get("boost", 1)})
    index = builder.build()

    def search(query: str) -> list[str]:
        words = split(query)
        best: dict[str, float] = {}
        for result in index.search(" ".join(words)):
            page, is_section, _ = result["ref"].partition("#")
            matched = len(set(result["match_data"].metadata) & set(words)) / len(words)
            score = result["score"] * (1 + (matched + (not is_section)) ** 2)
            best[page] = max(best.get(page, 0.0), score)
        return sorted(best, key=lambda page: -best[page])

    return search


def search_by_worker(site: Path, queries: list[str]) -> dict[str, list[str]]:
    """The site's own worker, in node."""
    (worker,) = (site / "assets" / "javascripts" / "workers").glob("search*.min.js")
    command = ["node", str(ROOT / "tests/unit/search_page.js"), str(worker), str(site / "search/search_index.json")]
    done = subprocess.run(command, input="\n".join(queries), capture_output=True, text=True, check=True)
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    return dict(zip(queries, answers, strict=True))


def find_missing(search: Search) -> dict[str, list[str]]:
    """Questions whose page is not among the first results, with those results."""
    shown = {query: search(query)[:FIRST] for query in QUESTIONS}
    return {query: shown[query] for query, page in QUESTIONS.items() if f"{page}/" not in shown[query]}


def test_there_are_enough_questions() -> None:
    assert len(TWELVE) == 12
    assert len(MORE) >= 20


def test_one_query_finds_each_page(site: Path) -> None:
    assert not find_missing(search_by_lunr(*read_index(site)))


@pytest.mark.skipif(shutil.which("node") is None, reason="needs node")
def test_the_search_box_finds_each_page(site: Path) -> None:
    assert not find_missing(search_by_worker(site, [*QUESTIONS]).__getitem__)


def test_a_page_that_is_missing_is_not_found(site: Path) -> None:
    config, docs = read_index(site)
    without = [doc for doc in docs if not doc["location"].startswith("guides/logging/")]
    asked = {query for query, page in QUESTIONS.items() if page == "guides/logging"}
    assert find_missing(search_by_lunr(config, without)).keys() == asked


def test_pages_load_nothing_from_elsewhere(site: Path) -> None:
    for page in site.rglob("*.html"):
        text = page.read_text(encoding="utf-8")
        assert not re.findall(r"<(?:script|img|iframe)[^>]*src=[\"']?(?:https?:)?//", text), page
        assert not re.findall(r"<link[^>]*rel=[\"']?stylesheet[^>]*href=[\"']?(?:https?:)?//", text), page


def test_llms_txt_lists_every_page_and_each_is_there_as_markdown(site: Path) -> None:
    listed = re.findall(r"^- \[.+?\]\((\S+?)\)", (site / "llms.txt").read_text(encoding="utf-8"), re.MULTILINE)
    pages = [*ROOT.glob("docs/**/*.md"), *(path.with_suffix(".md") for path in ROOT.glob("docs/**/*.ipynb"))]
    assert sorted(listed) == sorted(path.relative_to(ROOT / "docs").as_posix() for path in pages)
    for path in listed:
        assert (site / path).read_text(encoding="utf-8").startswith("# "), path
