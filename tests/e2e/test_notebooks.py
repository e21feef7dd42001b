"""The notebooks run from top to bottom, each on no names of another, and an interrupted cell goes on when run again."""

from __future__ import annotations

import json
import os
import re
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

nbformat = pytest.importorskip("nbformat")
nbclient = pytest.importorskip("nbclient")
pytest.importorskip("ipykernel")

# jupyter_client and its event loops, on some versions of Python and pyzmq.
pytestmark = [pytest.mark.filterwarnings("default::DeprecationWarning", "default::ResourceWarning")]

FOLDER = Path(__file__).resolve().parents[2] / "docs" / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
ELSEWHERE = {"pretrained_model"}
"""Run in tests/real, with the model that they train."""
STEPS = 20
"""Of each training, in place of up to 80."""


@pytest.fixture(scope="module")
def kernel() -> Iterator[Any]:
    """A client of a kernel on one thread. A new kernel takes seconds to import torch, so all tests share this one."""
    client = nbclient.NotebookClient(nbformat.v4.new_notebook(), timeout=300, kernel_name="python3")
    with client.setup_kernel():
        run(client, "import os; os.environ['OMP_NUM_THREADS'] = '1'")  # before torch is loaded
        yield client


@pytest.fixture
def client(kernel: Any, tmp_path: Path) -> Any:
    """The client with an empty notebook; the kernel has no names of an earlier test, and works in ``tmp_path``."""
    kernel.nb = nbformat.v4.new_notebook()
    run(kernel, "%reset -f")
    run(kernel, f"import os; os.chdir({str(tmp_path)!r}); del os")
    return kernel


def run(client: Any, source: str) -> Any:
    """Run a further cell; returns its outputs."""
    cell = nbformat.v4.new_code_cell(source)
    client.nb.cells.append(cell)
    return client.execute_cell(cell, len(client.nb.cells) - 1).outputs


def displays(outputs: Any) -> list[str]:
    """The live displays of a run among a cell's outputs."""
    pages = [output.data["text/html"] for output in outputs if "text/html" in output.get("data", {})]
    return [page for page in pages if "<progress" in page]


def test_there_are_six() -> None:
    assert [path.stem for path in NOTEBOOKS] == [
        *("comparing_runs", "distillation", "first_run", "own_reward", "pretrained_model", "several_turns")
    ]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_outputs_stay_out_of_git(path: Path) -> None:
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        assert not cell.get("outputs")
        assert cell.get("execution_count") is None


@pytest.mark.parametrize("path", [path for path in NOTEBOOKS if path.stem not in ELSEWHERE], ids=lambda path: path.stem)
def test_a_notebook_runs_from_top_to_bottom(path: Path, tmp_path: Path, client: Any) -> None:
    client.nb = nbformat.read(path, as_version=4)
    cells = client.nb.cells
    for cell in cells:
        if path.stem == "distillation":  # its teacher has to learn, and its student in two thirds of the steps
            cell.source = cell.source.replace("max_steps=120", "max_steps=80")
        else:
            cell.source = re.sub(r"max_steps=\d+", f"max_steps={STEPS}", cell.source)
    for index, cell in enumerate(cells):
        client.execute_cell(cell, index)
    code = [cell for cell in cells if cell.cell_type == "code"]
    trained = [cell for cell in code if ".train(" in cell.source]
    assert trained
    for cell in trained:
        lines = [output.text for output in cell.outputs if output.output_type == "stream" and output.name == "stdout"]
        assert not re.search(r"^step \d", "".join(lines), re.MULTILINE)  # no flood of lines
        trainings = 3 if path.stem == "comparing_runs" else 1
        assert len(displays(cell.outputs)) == trainings
        assert all("<polyline" in page for page in displays(cell.outputs))
    if path.stem == "distillation":
        assert "KL from the teacher" in displays(trained[-1].outputs)[0]
        accuracies = re.search(r"accuracy ([\d.]+) -> ([\d.]+), teacher/kl ([\d.]+)", str(code[-2].outputs))
        before, after, kl = map(float, accuracies.groups())
        assert after > before + 0.4
        assert kl < 0.1
    learned = json.loads((next(tmp_path.glob("runs/*/metrics.jsonl"))).read_text().splitlines()[-1])
    assert learned["reward/mean"] > 0.04


TRAINER = """
import time, torch
from torch import nn
from rlox_grpo import GRPO

def slow(completions, prompts):
    time.sleep(0.02)
    return [float((completion == 7).float().mean()) for completion in completions]

torch.manual_seed(0)
trainer = GRPO(nn.Sequential(nn.Embedding(16, 8), nn.Linear(8, 16)), slow, max_steps=100, group_size=4,
               prompts_per_step=2, max_new_tokens=2, output_dir="runs/stopped", guards=False)
prompts = torch.randint(16, (4, 3))
"""


@pytest.mark.skipif(os.name != "posix", reason="signals")
def test_the_stop_button_stops_the_cell_and_the_cell_again_goes_on(tmp_path: Path, client: Any) -> None:
    metrics = tmp_path / "runs" / "stopped" / "metrics.jsonl"

    def press(pid: int) -> None:
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline and not (metrics.exists() and metrics.read_text().count("\n") >= 3):
            time.sleep(0.05)
        os.kill(pid, signal.SIGINT)  # as the stop button of a local Jupyter

    run(client, TRAINER)
    (pid,) = run(client, "import os; os.getpid()")
    button = threading.Thread(target=press, args=(int(pid.data["text/plain"]),))
    button.start()
    with pytest.raises(nbclient.exceptions.CellExecutionError, match="KeyboardInterrupt") as stopped:
        run(client, "done = trainer.train(prompts)")
    button.join()
    assert "saved up to runs/stopped/checkpoints/step_" in str(stopped.value)
    assert "run the cell again" in str(stopped.value)
    taken = metrics.read_text().count("\n")
    assert 3 <= taken < 100
    (page,) = displays(run(client, "done = trainer.train(prompts)"))
    assert 'value="100" max="100"' in page
    (shown,) = run(client, "trainer.step, done['steps_trained']")
    assert shown.data["text/plain"] == f"(100, {100 - taken:.1f})"
    # In a new trainer, as after a restart of the kernel, the run is complete.
    said = run(client, TRAINER + "trainer.train(prompts)['steps_trained']")
    assert "is complete" in said[0].text
    assert said[-1].data["text/plain"] == "0.0"
