"""The code blocks of README.md and of every page of docs/: Python runs, in order, as a reader would paste it."""

from __future__ import annotations

import ast
import copy
import importlib.util
import json
import re
import shlex
import shutil
import textwrap
from pathlib import Path
from typing import Any

import pytest

import warm
from fake_judge import fake_judge
from rlox_grpo.cli import _make_parser, parse_overrides
from rlox_grpo.config.run_file import Origin, read_run_file
from rlox_grpo.config.schema import GRPOConfig
from rlox_grpo.config.toml import parse_toml
from rlox_grpo.sandbox.confine import find_missing

ROOT = Path(__file__).resolve().parents[2]
DOCS = sorted(path.relative_to(ROOT).as_posix() for path in ROOT.glob("docs/**/*.md"))
PAGES = ["README.md", *DOCS]
ELSEWHERE = {
    *("docs/migration/other_trainers.md", "docs/guides/several_gpus.md", "docs/guides/reasoning_gym.md"),
    "docs/guides/images.md",
}
"""The first's blocks run with TRL, verl and OpenRLHF's calls, in tests/e2e/test_trl.py and test_adapters.py, the
second's on a Ray cluster, in tests/cluster/test_ray_ranks.py, the third's in
tests/environments/test_reasoning_gym.py, the fourth's with a vision-language model in test_pictures.py."""
NOT_HERE = ("# sketch", "# trl")
"""First lines of blocks that are compiled alone: what needs more than this machine, and what test_trl.py runs."""
NEEDS_CONFINEMENT = {"docs/guides/code_rewards.md"}
"""Its blocks run programs in the sandbox, which not every system has."""
OPTIONAL = ("bitsandbytes", "gymnasium", "openai", "rlox", "trl")
"""What a page's program may need and `make test-oldest` lacks; an option of lora.md loads the first."""
FENCE = r"^( *)```{language}(?: +title=\"[^\"]*\")? *\n(.*?)^\1``` *$"

# The pages name real models and sizes. A folder of the model's name holds a tiny one, and sizes are cut.
MODEL = "Qwen/Qwen2.5-0.5B-Instruct"
TEACHERS = ("Qwen/Qwen2.5-1.5B-Instruct", "Qwen/Qwen2.5-Coder-1.5B-Instruct")
CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SMALLER = """
import os, runpy
import rlox_grpo
from rlox_grpo.trainer import GRPO

SIZES = {"group_size": 2, "prompts_per_step": 2, "max_new_tokens": 4, "log_to": ()}

def small(model, *given, **options):
    if isinstance(model, str):
        sizes = {**SIZES, "max_steps": min(options.get("max_steps", 2), 4)}
        if "demo_loss" in options:  # no demonstration may be longer
            del sizes["max_new_tokens"]
        options = {**options, **sizes}
    return GRPO(model, *given, **options)

rlox_grpo.GRPO = small

def local(url, *given, **options):
    return Judge(os.environ["FAKE_JUDGE"], *given, **options)

from rlox_grpo import rewards
Judge, rewards.Judge = rewards.Judge, local
"""
"""Runs before the pages' programs. Judges are asked at a local server. A module that the page passes itself
keeps the page's sizes."""


def find_blocks(text: str, language: str) -> list[tuple[int, str]]:
    """Line and code of each block of a language."""
    pattern = re.compile(FENCE.format(language=language), re.MULTILINE | re.DOTALL)
    return [(text.count("\n", 0, block.start(2)), textwrap.dedent(block[2])) for block in pattern.finditer(text)]


def runnable(text: str) -> str:
    """All ```python blocks as one program, without those that begin with a line of :data:`NOT_HERE`.

    Each line keeps its place in the page, so that a traceback names the page's own line.
    """
    lines = [""] * (text.count("\n") + 1)
    for first, code in find_blocks(text, "python"):
        if not code.lstrip().startswith(NOT_HERE):
            lines[first : first + code.count("\n")] = code.splitlines()
    return "\n".join(lines) + "\n"


def test_blocks_keep_their_lines_and_sketches_are_left_out() -> None:
    page = (
        '# T\n```python title="a.py"\nx = 1\n```\ntext\n```python\n# sketch\ny = 2\n```\n- item\n'
        "  ```python\n  z = x\n  ```\n"
    )
    assert runnable(page).splitlines() == ["", "", "x = 1", *[""] * 8, "z = x", "", ""]


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory: pytest.TempPathFactory, make_tiny_model: Any, byte_tokenizer: Any) -> Path:
    """A folder that holds a random model and a tokenizer with a chat template."""
    folder = tmp_path_factory.mktemp("model")
    make_tiny_model("qwen2", vocab_size=259, max_position_embeddings=1024, eos_token_id=1).save_pretrained(folder)
    tokenizer = copy.deepcopy(byte_tokenizer)  # the fixture is shared with other files
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def teacher_model(tiny_model: Path, make_tiny_model: Any) -> Path:
    """A folder with the same tokenizer and another model."""
    folder = tiny_model.with_name("teacher")
    shutil.copytree(tiny_model, folder)
    options = {"vocab_size": 259, "max_position_embeddings": 1024, "eos_token_id": 1, "initializer_range": 0.1}
    make_tiny_model("qwen2", **options).save_pretrained(folder)
    return folder


def give_a_verdict(data: dict[str, Any], _: int) -> str:
    """What a judge replies: of two completions the longer one wins."""
    if "completion" in data:
        return '{"score": 0.5}'
    return '{"winner": "A"}' if len(data["completion_a"]) > len(data["completion_b"]) else '{"winner": "B"}'


def test_the_pages_run(tmp_path: Path, tiny_model: Path, teacher_model: Path) -> None:
    """In one process, forked from one that has imported torch and transformers; each page in a folder of its own."""
    rows = [{"question": f"{number} + {number}?", "answer": str(2 * number)} for number in range(4)]
    runs = []
    for page in PAGES:
        program = runnable((ROOT / page).read_text(encoding="utf-8"))
        if page in ELSEWHERE or not program.strip() or (page in NEEDS_CONFINEMENT and find_missing() is not None):
            continue
        needed = {*re.findall(r"^ *(?:import|from) (\w+)", program, re.MULTILINE)}
        needed |= {"bitsandbytes"} if "load_in_4bit" in program else set()
        if any(importlib.util.find_spec(name) is None for name in needed.intersection(OPTIONAL)):
            continue
        folder = tmp_path / page.removesuffix(".md")
        (folder / MODEL).parent.mkdir(parents=True)
        (folder / MODEL).symlink_to(tiny_model)
        for teacher in TEACHERS:
            (folder / teacher).symlink_to(teacher_model)
        for name in ("train", "held_out"):
            text = "".join(json.dumps(row) + "\n" for row in rows)
            (folder / f"{name}.jsonl").write_text(text, encoding="utf-8")
        (folder / "page.py").write_text(program, encoding="utf-8")
        runs.append(f"os.chdir({str(folder)!r})\nrunpy.run_path('page.py', run_name='__main__')\n")
    assert len(runs) > 20
    (tmp_path / "every_page.py").write_text(SMALLER + "".join(runs), encoding="utf-8")
    with fake_judge(give_a_verdict) as judge:
        done = warm.run(0, tmp_path / "every_page.py", FAKE_JUDGE=judge.url)
    assert done.returncode == 0, done.stderr
    assert len(judge.questions) > 4


def test_the_module_example_learns_without_a_warning(tmp_path: Path) -> None:
    """Its seed is fixed, and neither Python's warnings nor a guard of the run writes a line."""
    (program,) = (
        code
        for _, code in find_blocks((ROOT / "README.md").read_text(encoding="utf-8"), "python")
        if "share of 7s" in code
    )
    (tmp_path / "example.py").write_text(program, encoding="utf-8")
    done = warm.run(0, tmp_path / "example.py")
    assert done.returncode == 0, done.stderr
    (line,) = done.stderr.strip().splitlines()
    assert float(line.removeprefix("share of 7s: ")) > 0.9


@pytest.mark.parametrize("page", PAGES)
def test_blocks_that_do_not_run_compile(page: str) -> None:
    for line, code in find_blocks((ROOT / page).read_text(encoding="utf-8"), "python"):
        ast.parse(code, f"{page} from line {line}")


@pytest.mark.parametrize("page", PAGES)
def test_run_files_have_known_keys(page: str, tmp_path: Path) -> None:
    for _, code in find_blocks((ROOT / page).read_text(encoding="utf-8"), "toml"):
        unknown = parse_toml(code).keys() - Origin.model_fields.keys() - GRPOConfig.model_fields.keys()
        assert not unknown, code
        if "model" in parse_toml(code):
            (tmp_path / "run.toml").write_text(code, encoding="utf-8")
            read_run_file(tmp_path / "run.toml", {})


@pytest.mark.parametrize("page", PAGES)
def test_commands_have_known_arguments(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    blocks = "".join(code for _, code in find_blocks(text, "")).replace("\\\n", " ")
    for line in re.findall(r"^(?:\$ )?rlox-grpo (.*)$", blocks, re.MULTILINE):
        words = shlex.split(line, comments=True)
        if words == ["--version"]:
            continue
        arguments, rest = _make_parser().parse_known_args(words)
        if arguments.command in ("train", "eval", "check", "memory"):
            assert parse_overrides(rest).keys() <= GRPOConfig.model_fields.keys(), line
