"""Several teachers on a Ray cluster: a column of the rows chooses the teacher of each row."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch
from tiny_run import DRIVER, SAVED, environment, same
from transformers import AutoModelForCausalLM

import warm

pytestmark = pytest.mark.cluster

OPTIONS = {
    **{"group_size": 2, "prompts_per_step": 4, "max_steps": 3, "max_new_tokens": 8, "learning_rate": 1e-3},
    **{"teacher_column": "subject", "rank_timeout": 60.0, "log_to": ["console"], "checkpoint_steps": 1},
}
TEACHERS = {"math": "teacher_math", "code": "teacher_code"}


@pytest.fixture
def taught_folder(folder, byte_tokenizer):
    """The folder of the run with two teachers, rows of both, and the run file ``taught.toml`` without a layout."""
    for seed, name in enumerate(TEACHERS.values()):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_pretrained(folder / "model")
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.1 * torch.randn_like(parameter))
        model.save_pretrained(folder / name)
        byte_tokenizer.save_pretrained(folder / name)
    rows = [json.dumps({"prompt": f"{index}:", "subject": ("math", "code")[index % 3 % 2]}) for index in range(8)]
    (folder / "taught.jsonl").write_text("\n".join(rows) + "\n")
    lines = [f"{name} = {json.dumps(value)}" for name, value in OPTIONS.items()]
    tables = ["[teacher]", *(f"{name} = {json.dumps(path)}" for name, path in TEACHERS.items())]
    text = "\n".join(['model = "model"', 'train_data = "taught.jsonl"', *lines, *tables])
    (folder / "taught.toml").write_text(text + "\n")
    (folder / "command.py").write_text(DRIVER)
    return folder


def test_a_column_chooses_the_teacher_of_each_row(taught_folder, cluster, monkeypatch):
    """The weights are those of two ranks without Ray, and other ones with the teachers exchanged."""
    script = f"""
from rlox_grpo import launch_on_ray

run = launch_on_ray("model", ray_address={cluster!r}, layout={{"trainers": 2}}, output_dir="ray_taught",
                    teacher={TEACHERS!r}, **{OPTIONS!r})
metrics = run.train("taught.jsonl")
print(run.step, metrics["teacher/kl"])
"""
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, cwd=taught_folder, env=environment(), capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr
    step, kl = done.stdout.splitlines()[-1].split()
    assert step == "3"
    assert float(kl) > 0.01

    monkeypatch.chdir(taught_folder)
    swapped = (taught_folder / "taught.toml").read_text().replace('math = "teacher_math"', 'math = "teacher_code"')
    swapped = swapped.replace('\ncode = "teacher_code"', '\ncode = "teacher_math"')
    (taught_folder / "swapped.toml").write_text(swapped)
    for name in ("taught", "swapped"):
        ended = warm.run(2, taught_folder / "command.py", "train", f"{name}.toml", *SAVED[2:], f"plain_{name}")
        assert ended.returncode == 0, ended.stderr
    assert same(taught_folder / "plain_taught", taught_folder / "ray_taught")
    assert not same(taught_folder / "plain_swapped", taught_folder / "ray_taught")
