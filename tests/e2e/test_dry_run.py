"""``rlox-grpo train RUN.TOML --dry-run``: mistakes are found without the model."""

import itertools
import json

import pytest

import worded
from rlox_grpo import GRPOConfig
from rlox_grpo.cli import main
from rlox_grpo.cli.dry_run import RESET, SMALL, shrink
from rlox_grpo.config.presets import PRESETS
from rlox_grpo.config.records import Options


@pytest.fixture
def run_file(tmp_path):
    """A run file for a cluster. The weights of its model are not there: only a dry run can use it."""
    worded.save(tmp_path / "model")
    (tmp_path / "model" / "model.safetensors").unlink()
    worded.save_rows(tmp_path / "rows.jsonl")
    path = tmp_path / "run.toml"
    path.write_text(
        f'model = "{tmp_path}/model"\ntrain_data = "{tmp_path}/rows.jsonl"\neval_data = "{tmp_path}/rows.jsonl"\n'
        f'output_dir = "{tmp_path}/run"\nengine = "vllm"\nasync_steps = 1\ngroup_size = 8\nprompts_per_step = 4\n'
        'max_new_tokens = 32\nmini_batches = 2\nlora_rank = 16\nupdater = "deepspeed"\ndtype = "bfloat16"\n'
        'keep_best = "eval/accuracy"\neval_steps = 5\nmax_steps = 100\nkl_coef = 0.01\n'
        '[[rewards]]\nname = "countdown"\n[[rewards]]\nname = "tag_count"\nweight = 0.5\n'
    )
    return path


def test_a_step_passes_without_the_weights_and_leaves_nothing(run_file, tmp_path, capsys):
    before = sorted(tmp_path.rglob("*"))
    assert main(["train", str(run_file), "--dry-run"]) == 0
    shown = capsys.readouterr().out
    assert "a prompt as the model reads it:\n3 , " in shown
    assert "rewards/countdown/mean of random text: " in shown
    assert "dry run: one step passed" in shown
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(
    "change",
    [
        ["--teacher", "{a='somewhere', b='elsewhere'}", "--teacher_column", "kind", "--kl_coef", "0"],
        ["--teacher", "http://127.0.0.1:1", "--kl_coef", "0"],
        ["--reference", "server", "--reference_url", "http://127.0.0.1:1", "--reference_token_file", "missing"],
        ["--reference", "adapter_off"],
        ["--zero_variance", "refill", "--max_refills", "9", "--async_steps", "0"],
    ],
)
def test_models_and_services_of_the_run_are_not_asked(run_file, tmp_path, change, capsys):
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row | {"kind": "a"}) + "\n" for row in rows))
    assert main(["train", str(run_file), "--dry-run", *change]) == 0, capsys.readouterr().err


@pytest.mark.parametrize(
    "change",
    [
        ["--keep_best", "eval/pass@8", "--eval_samples", "8"],
        ["--keep_best", "eval/greedy_accuracy", "--eval_greedy", "true"],
        ["--importance_cap", "3", "--importance_mode", "mask", "--importance_floor", "2.5"],
        ["--generation_kwargs", "{repetition_penalty=1.1, min_tokens=2, top_k=5}"],
    ],
)
def test_options_that_the_stand_in_reads_otherwise_are_no_mistakes(run_file, change, capsys):
    assert main(["train", str(run_file), "--dry-run", *change]) == 0, capsys.readouterr().err


def test_a_set_keeps_its_samples_for_keep_best(run_file, tmp_path, capsys):
    text = run_file.read_text().replace(f'eval_data = "{tmp_path}/rows.jsonl"\n', "")
    table = f'[[eval]]\nname = "often"\ndata = "{tmp_path}/rows.jsonl"\nsamples = 2\n'
    run_file.write_text(text + table)
    assert main(["train", str(run_file), "--dry-run", "--keep_best", "eval/often/pass@2"]) == 0, capsys.readouterr().err


def test_quotas_of_sources_keep_their_step(run_file, tmp_path, capsys):
    text = run_file.read_text().replace(f'train_data = "{tmp_path}/rows.jsonl"\n', "")
    tables = (f'[[train]]\nname = "{name}"\ndata = "{tmp_path}/rows.jsonl"\nquota = 3\n' for name in ("a", "b"))
    run_file.write_text(text.replace("prompts_per_step = 4", "prompts_per_step = 6") + "".join(tables))
    assert main(["train", str(run_file), "--dry-run"]) == 0, capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (["--prompt_column", "question"], "question"),
        (["--columns", "{nums='numbers'}"], "numbers"),
        (["--keep_best", "eval/acuracy"], "eval/acuracy"),
        (["--max_new_tokens", "200"], "64 positions"),
        (["--teacher_column", "kind", "--teacher", "{a='somewhere'}"], "kind"),
    ],
)
def test_what_the_run_would_refuse_is_refused(run_file, change, message, capsys):
    assert main(["train", str(run_file), "--dry-run", *change]) == 2
    assert message in capsys.readouterr().err


def test_a_reward_that_raises_is_seen(run_file, tmp_path, monkeypatch, capsys):
    (tmp_path / "my_reward_of_a_dry_run.py").write_text(
        "def first_word(completions, **_):\n    return [c[0] for c in []]\n"
    )
    monkeypatch.chdir(tmp_path)
    text = run_file.read_text().replace('"tag_count"', '"my_reward_of_a_dry_run:first_word"')
    run_file.write_text(text.replace("weight = 0.5\n", ""))
    assert main(["train", str(run_file), "--dry-run"]) != 0
    assert "first_word" in capsys.readouterr().err


def test_every_preset_can_be_tried(tmp_path):
    changes = ({}, {"engine": "vllm", "async_steps": 1, "lora_rank": 8})
    for preset, more in itertools.product(PRESETS, changes):
        small = shrink(GRPOConfig.create(preset=preset, **more), tmp_path, [])
        assert (small.engine, small.lora_rank, small.max_steps) == ("hf", 0, 1)


def test_what_a_dry_run_replaces_are_options():
    assert {*SMALL, *RESET} <= set(Options.model_fields)
