"""The Python blocks of README.md and of the guides run, in order, as a reader would paste them."""

from __future__ import annotations

import copy
import json
import re
import textwrap
from pathlib import Path
from typing import Any

import pytest

import warm

ROOT = Path(__file__).resolve().parents[2]
PAGES = ("README.md", "docs/algorithm.md", "docs/rewards.md", "docs/training.md")
BLOCK = re.compile(r"^( *)```python *\n(.*?)^\1``` *$", re.MULTILINE | re.DOTALL)

# The pages name real models and sizes. A folder of the model's name holds a tiny one, and sizes are cut.
MODEL = "Qwen/Qwen2.5-0.5B-Instruct"
CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SMALLER = """
import rlox_grpo
from rlox_grpo.trainer import GRPO

SIZES = {"group_size": 2, "prompts_per_step": 2, "max_new_tokens": 4, "max_steps": 2, "log_to": ()}

def small(model, *given, **options):
    return GRPO(model, *given, **({**options, **SIZES} if isinstance(model, str) else options))

rlox_grpo.GRPO = small
"""
"""Runs before the pages' programs. A module that the page passes itself keeps the page's sizes."""


def runnable(text: str) -> str:
    """All ```python blocks as one program; one that begins with `# sketch` needs more than this machine has.

    Each line keeps its place in the page, so that a traceback names the page's own line.
    """
    lines = [""] * (text.count("\n") + 1)
    for block in BLOCK.finditer(text):
        code = textwrap.dedent(block[2])
        if code.lstrip().startswith("# sketch"):
            continue
        first = text.count("\n", 0, block.start(2))
        lines[first : first + code.count("\n")] = code.splitlines()
    return "\n".join(lines) + "\n"


def test_blocks_keep_their_lines_and_sketches_are_left_out() -> None:
    page = "# T\n```python\nx = 1\n```\ntext\n```python\n# sketch\ny = 2\n```\n- item\n  ```python\n  z = x\n  ```\n"
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


def test_the_pages_run(tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In one process, forked from one that has imported torch and transformers."""
    (tmp_path / MODEL).parent.mkdir()
    (tmp_path / MODEL).symlink_to(tiny_model)
    rows = [{"question": f"{number} + {number}?", "answer": str(2 * number)} for number in range(4)]
    for name in ("train", "held_out"):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    scripts = []
    for page in PAGES:
        program = runnable((ROOT / page).read_text(encoding="utf-8"))
        assert program.strip(), f"{page} shows no Python that runs"
        scripts.append(Path(page).name.replace(".md", ".py"))
        (tmp_path / scripts[-1]).write_text(program, encoding="utf-8")
    runs = "".join(f"runpy.run_path({script!r}, run_name='__main__')\n" for script in scripts)
    (tmp_path / "every_page.py").write_text(f"import runpy\n{SMALLER}\n{runs}", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    done = warm.run(0, tmp_path / "every_page.py")
    assert done.returncode == 0, done.stderr
