"""The README's Python runs, block after block, as a reader would paste it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

README = Path(__file__).resolve().parents[2] / "README.md"
BLOCK = re.compile(r"^( *)```python *\n(.*?)^\1``` *$", re.MULTILINE | re.DOTALL)


def runnable(text: str) -> str:
    """All ```python blocks as one program; one that begins with `# sketch` needs more than this machine has.

    Each line keeps its place in the page, so that a traceback names the README's own line.
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


def test_readme_runs(tmp_path: Path) -> None:
    program = runnable(README.read_text(encoding="utf-8"))
    assert program.strip(), "README.md shows no Python that runs"
    script = tmp_path / "README.py"
    script.write_text(program, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, str(script)],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
