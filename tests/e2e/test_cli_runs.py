"""The command line on a real, tiny model: train, stop, go on, evaluate, report."""

import json

import pytest

import worded
from rlox_grpo.cli import main


@pytest.fixture
def run_file(tmp_path):
    worded.save(tmp_path / "model")
    rows = [{"prompt": f"3 , {n} : {n + 3}", "nums": [3, n], "target": n + 3} for n in range(1, 9)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    path = tmp_path / "run.toml"
    path.write_text(
        f'model = "{tmp_path}/model"\ntrain_data = "{tmp_path}/rows.jsonl"\neval_data = "{tmp_path}/rows.jsonl"\n'
        f'output_dir = "{tmp_path}/run"\ngroup_size = 4\nprompts_per_step = 4\nmax_new_tokens = 8\nmax_steps = 3\n'
        'checkpoint_steps = 2\nlog_to = []\nzero_variance = "keep"\n'
        '[[rewards]]\nname = "countdown"\n[[rewards]]\nname = "tag_count"\nweight = 0.5\n'
    )
    return path


def test_train_resume_eval_report(run_file, tmp_path, capsys):
    assert main(["train", str(run_file), "--max_steps", "2"]) == 0
    assert "mean_reward" in capsys.readouterr().out
    resolved = tmp_path / "run" / "config.toml"
    assert 'name = "countdown"' in resolved.read_text()
    assert main(["train", str(resolved), "--max_steps", "3"]) == 0  # what a run writes is what a run can be started by
    steps = [json.loads(line)["step"] for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert steps == [1, 2, 3]
    capsys.readouterr()
    checkpoint = str(tmp_path / "run" / "checkpoints" / "step_000003")
    arguments = ["--data", str(tmp_path / "rows.jsonl"), "--reward", "countdown", "--samples", "2"]
    assert main(["eval", checkpoint, *arguments, "--max-new-tokens", "8"]) == 0
    shown = capsys.readouterr().out
    assert "accuracy" in shown
    assert "pass@2" in shown
    assert main(["eval", checkpoint, *arguments, "--learning_rate", "1e-5"]) == 2
    assert "--learning_rate is an option of training" in capsys.readouterr().err
    (tmp_path / "other.csv").write_text("problem,nums,target\n3 ,4,7\n")
    named = [checkpoint, "--data", str(tmp_path / "other.csv"), "--reward", "tag_count", "--samples", "1"]
    assert main(["eval", *named, "--max-new-tokens", "8", "--prompt_column", "problem"]) == 0
    assert "mean_reward" in capsys.readouterr().out
    assert main(["report", str(tmp_path / "run")]) == 0
    assert capsys.readouterr().out.strip().endswith("report.html")


def test_a_changed_run_is_refused_on_one_line(run_file, capsys):
    assert main(["train", str(run_file), "--max_steps", "1"]) == 0
    assert main(["train", str(run_file), "--learning_rate", "1e-3"]) == 2
    error = capsys.readouterr().err
    assert "learning_rate: 1e-06 there, 0.001 here" in error
    assert "Traceback" not in error


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (["--model", "no/such/model"], "model='no/such/model': no such folder"),
        (["--train_data", "none.jsonl"], "none.jsonl"),
        (["--group_sise", "3"], "did you mean 'group_size'"),
        (["--max_new_tokens", "60"], r"prompts[0] has 5 tokens"),
    ],
)
def test_mistakes_are_told_before_any_work(run_file, change, message, capsys, tmp_path):
    assert main(["train", str(run_file), *change]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "run" / "metrics.jsonl").exists()
