"""``keep_best``: the checkpoint of the best evaluation is kept beside the newest ones."""

from __future__ import annotations

import json
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import ranked
import warm
from rlox_grpo import GRPO, EvalSet
from rlox_grpo.cli import main
from rlox_grpo.errors import CheckpointError, ConfigError
from rlox_grpo.rewards import MathAnswer
from rlox_grpo.run.best import BestCheckpoint, link_best
from rlox_grpo.run.history import checkpoints
from toy import KEEP_BEST, PROMPTS, ToyLM, near_half, options, share_of_target

HERE = Path(__file__).parent
CURVE = {0: 0.6, 1: 0.1, 2: 0.3, 3: 0.5, 4: 0.2, 5: 0.5, 6: 0.4}
"""The reward of the evaluation after each step: the best are 3 and 5, and the earlier one is kept."""


def run(
    folder: Path, curve: dict[int, float] | None = None, callbacks: Any = (), prompts: Any = PROMPTS[:2], **changes: Any
) -> tuple[GRPO, dict[str, float]]:
    """Train for six steps, with an evaluation after each of which the reward is on the curve."""

    _curve = CURVE if curve is None else curve  # with _, so that runs with other curves have the same set

    def rewarded(completions: Any, prompts: Any) -> list[float]:
        return [_curve[trainer.step] for _ in completions]

    settings = {**KEEP_BEST, "max_steps": 6, "checkpoint_steps": 4, "keep_checkpoints": 1, **changes}
    trainer = GRPO(ToyLM(), share_of_target, callbacks=callbacks, **options(output_dir=folder, **settings))
    sets = {"toy": EvalSet(prompts, samples=1, rewards=rewarded)}
    return trainer, trainer.train(PROMPTS, eval_prompts=sets)


def list_steps(folder: Path) -> list[int]:
    return [int(path.name[5:]) for path in checkpoints(folder / "checkpoints")]


def read_choice(checkpoint: Path) -> tuple[int, float]:
    state = json.loads((checkpoint / "state.json").read_text())
    return state["best"]["step"], state["best"]["value"]


def test_the_best_checkpoint_is_kept_and_of_equal_ones_the_earlier(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, metrics = run(tmp_path, log_to=("console",))
    root = tmp_path / "checkpoints"
    assert list_steps(tmp_path) == [3, 6]  # 3 is due by its evaluation alone
    assert (root / "best").readlink() == Path("step_000003")
    assert (metrics["best_step"], metrics["best_value"]) == (3.0, pytest.approx(0.5))
    assert read_choice(root / "step_000006") == read_choice(root / "best") == (3, pytest.approx(0.5))
    best = f"best: {root / 'step_000003'}, eval/toy/mean_reward 0.5 (0.6 before the first step: training has not"
    assert best in capsys.readouterr().out
    _, again = run(tmp_path, log_to=("console",))  # the run is complete
    assert (again["best_step"], again["steps_trained"]) == (3.0, 0.0)
    assert best in capsys.readouterr().out


def test_the_best_checkpoint_is_also_one_of_the_newest(tmp_path: Path) -> None:
    run(tmp_path, checkpoint_steps=1, keep_checkpoints=3, curve={**CURVE, 6: 0.9})
    assert list_steps(tmp_path) == [4, 5, 6]
    assert (tmp_path / "checkpoints" / "best").readlink() == Path("step_000006")


def test_a_run_without_it_has_no_trace_of_it(tmp_path: Path) -> None:
    run(tmp_path)
    _, metrics = run(tmp_path, keep_best=None, max_steps=8, curve={**CURVE, 7: 0.0, 8: 0.0})
    assert list_steps(tmp_path) == [8]
    assert not (tmp_path / "checkpoints" / "best").is_symlink()
    assert "best" not in json.loads((tmp_path / "checkpoints" / "step_000008" / "state.json").read_text())
    assert not any(name.startswith("best") for name in metrics)


@pytest.mark.parametrize("step", [2, 6, 9])
def test_a_run_that_was_killed_makes_the_same_choice(tmp_path: Path, step: int) -> None:
    def start(folder: Path, seed: int = 0) -> dict[str, float]:
        trainer = GRPO(ToyLM(seed), share_of_target, **options(output_dir=folder, **KEEP_BEST))
        sets = {"toy": EvalSet(PROMPTS[:3], samples=2, rewards=near_half)}
        return trainer.train(PROMPTS, eval_prompts=sets)

    whole = start(tmp_path / "whole")
    assert 1 < whole["best_step"] < 12
    killed = tmp_path / "killed"
    process = warm.run(0, HERE / "killed_run.py", str(killed), str(step), "best")
    assert process.returncode == -signal.SIGKILL, process.stderr
    (killed / "checkpoints" / "best").unlink(missing_ok=True)  # a kill may come before the link
    metrics = start(killed, seed=9)
    assert {name: metrics[name] for name in ("best_step", "best_value")} == {
        name: whole[name] for name in ("best_step", "best_value")
    }
    assert metrics["resumed_from_step"] > 0
    assert list_steps(killed) == list_steps(tmp_path / "whole")
    root, other = killed / "checkpoints", tmp_path / "whole" / "checkpoints"
    assert (root / "best").readlink() == (other / "best").readlink()
    ours, theirs = (load_file(path / "best" / "model.safetensors") for path in (root, other))
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in ours.items())


def test_a_resume_from_before_the_best_begins_a_new_choice(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run(tmp_path, checkpoint_steps=1, keep_checkpoints=9)
    root = tmp_path / "checkpoints"
    shutil.rmtree(root / "step_000003")
    _, metrics = run(tmp_path, resume=str(root / "step_000004"), keep_checkpoints=9, curve={5: 0.1, 6: 0.2})
    assert f"{root / 'step_000003'}, the best checkpoint so far, is not there" in caplog.text
    assert metrics["best_step"] == 6.0
    _, metrics = run(tmp_path, resume=str(root / "step_000002"), curve={**CURVE, 3: 0.2, 4: 0.25})
    assert metrics["best_step"] == 5.0  # better than 0.3, which was the best at step 2
    assert (root / "best").readlink() == Path("step_000005")


def test_the_best_checkpoint_of_another_run_or_a_damaged_one_is_forgotten(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run(tmp_path / "first")
    last = tmp_path / "first" / "checkpoints" / "step_000006"
    _, metrics = run(tmp_path / "other", resume=str(last), max_steps=8, curve={7: 0.1, 8: 0.2})
    assert f"{Path('checkpoints', 'step_000003')}, the best checkpoint so far, is not there" in caplog.text
    assert (metrics["best_step"], metrics["best_value"]) == (8.0, pytest.approx(0.2))
    assert (tmp_path / "other" / "checkpoints" / "best").readlink() == Path("step_000008")
    weights = tmp_path / "first" / "checkpoints" / "step_000003" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    _, metrics = run(tmp_path / "first", max_steps=8, curve={7: 0.1, 8: 0.2})
    assert "the best checkpoint so far, is damaged (model.safetensors has " in caplog.text
    assert metrics["best_step"] == 8.0


def test_other_held_out_prompts_begin_a_new_choice(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run(tmp_path)
    _, metrics = run(tmp_path, max_steps=8, prompts=PROMPTS[2:4], curve={7: 0.1, 8: 0.05})
    assert "the best checkpoint so far is of step 3, by eval/toy/mean_reward: keep_best or its set has" in caplog.text
    assert metrics["best_step"] == 7.0


def test_a_best_checkpoint_that_cannot_be_written_is_not_chosen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import rlox_grpo.run.run as module

    save = module.save_checkpoint

    def full_at_3(root: Path, step: int, *arguments: Any, **keywords: Any) -> Path:
        if step == 3:
            raise CheckpointError("No space left on device")
        return save(root, step, *arguments, **keywords)

    monkeypatch.setattr(module, "save_checkpoint", full_at_3)
    with pytest.warns(RuntimeWarning, match="tries again after the next step"):
        _, metrics = run(tmp_path)
    assert metrics["best_step"] == 5.0
    assert list_steps(tmp_path) == [5, 6]


def test_save_writes_the_best_weights(tmp_path: Path) -> None:
    trainer, _ = run(tmp_path / "run")
    trainer.save(tmp_path / "now")
    trainer.save(tmp_path / "best", best=True)
    kept = load_file(tmp_path / "run" / "checkpoints" / "best" / "model.safetensors")
    best, now = (load_file(tmp_path / name / "model.safetensors") for name in ("best", "now"))
    assert best.keys() == kept.keys() == now.keys()
    assert all(torch.equal(best[name], kept[name]) for name in kept)
    assert not torch.equal(best["head.weight"], now["head.weight"])
    damaged = tmp_path / "run" / "checkpoints" / "step_000003" / "optimizer.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match=r"step_000003 is damaged"):
        trainer.save(tmp_path / "best", best=True)


def test_a_callback_saves_the_best_weights_before_their_checkpoint_is_written(tmp_path: Path) -> None:
    class Save:
        def on_evaluation(self, step: int, metrics: dict[str, float]) -> None:
            if step > 0:
                self.trainer.save(tmp_path / f"best_{step}", best=True)

    callback = Save()

    class Keep:
        def on_save(self, step: int, path: Path) -> None:
            shutil.copytree(path, tmp_path / f"saved_{step}")

    def rewarded(completions: Any, prompts: Any) -> list[float]:
        return [CURVE[trainer.step] for _ in completions]

    settings = options(output_dir=tmp_path / "run", **KEEP_BEST, max_steps=4)
    trainer = GRPO(ToyLM(), share_of_target, callbacks=[callback, Keep()], **settings)
    callback.trainer = trainer
    trainer.train(PROMPTS, eval_prompts={"toy": EvalSet(PROMPTS[:2], samples=1, rewards=rewarded)})
    for saved, best in ((1, 1), (2, 2), (3, 3), (3, 4)):
        kept = load_file(tmp_path / f"saved_{saved}" / "model.safetensors")
        written = load_file(tmp_path / f"best_{best}" / "model.safetensors")
        assert all(torch.equal(written[name], kept[name]) for name in kept)


def test_the_best_adapter_is_saved_and_merged(tmp_path: Path) -> None:
    def falling(completions: Any, prompts: Any) -> list[float]:
        return [-float(trainer.step) for _ in completions]

    ranked.save_policy(tmp_path / "base", tied=True)
    settings = ranked.options(tmp_path / "run", lora_rank=2, max_steps=3, eval_steps=1, keep_best="eval/mean_reward")
    trainer = GRPO(str(tmp_path / "base"), ranked.share_of_even, **{**settings, "learning_rate": 0.05})
    trainer.train(ranked.PROMPTS, eval_prompts=EvalSet(ranked.PROMPTS[:2], samples=1, rewards=falling))
    trainer.save(tmp_path / "adapter", best=True)
    trainer.save(tmp_path / "merged", merged=True, best=True)
    trainer.save(tmp_path / "now", merged=True)
    best = tmp_path / "run" / "checkpoints" / "best"
    assert best.readlink() == Path("step_000001")
    assert main(["merge", str(best), str(tmp_path / "by_command")]) == 0
    adapter, kept = (load_file(folder / "adapter_model.safetensors") for folder in (tmp_path / "adapter", best))
    assert adapter.keys() == kept.keys()
    assert all(torch.equal(adapter[name], kept[name]) for name in kept)
    merged, by_command, now = (
        load_file(tmp_path / name / "model.safetensors") for name in ("merged", "by_command", "now")
    )
    assert merged.keys() == by_command.keys() == now.keys()
    assert all(torch.equal(merged[name], by_command[name]) for name in merged)
    assert not all(torch.equal(merged[name], now[name]) for name in merged)
    assert ": 1 steps." in (tmp_path / "merged" / "README.md").read_text()


@pytest.mark.parametrize("changes", [{}, {"shard_parameters": True, "dtype": "bfloat16"}], ids=["whole", "shards"])
def test_ranks_keep_one_best_checkpoint(tmp_path: Path, changes: dict[str, Any]) -> None:
    settings = {"keep_best": "eval/mean_reward", "eval_steps": 2, "held_out": True, "keep_checkpoints": 1, **changes}
    folder = tmp_path / "run"
    done = warm.run(2, HERE.parent / "ranked.py", str(folder), json.dumps({**settings, "max_steps": 6}))
    assert done.returncode == 0, done.stderr
    metrics = json.loads((folder / "metrics.json").read_text())
    lines = [json.loads(line) for line in (folder / "evaluations.jsonl").read_text().splitlines()]
    best = max(lines[1:], key=lambda line: line["mean_reward"])
    assert (metrics["best_step"], metrics["best_value"]) == (best["step"], best["mean_reward"])
    kept = load_file(folder / "checkpoints" / "best" / "model.safetensors")
    saved = load_file(folder / "saved_best" / "model.safetensors")
    assert all(torch.equal(saved[name], kept[name]) for name in saved)


@pytest.mark.parametrize("metric", ["eval/toy/accuracy_vs_start", "eval/toy/mean_length", "eval/accuracy", "", "toy"])
def test_a_metric_that_cannot_choose_is_refused_with_those_that_can(tmp_path: Path, metric: str) -> None:
    with pytest.raises(ConfigError) as error:
        run(tmp_path, keep_best=metric)
    listed = "eval/toy/accuracy, eval/toy/pass@1, eval/toy/mean_reward, eval/toy/rewards/rewarded"
    assert f"keep_best={metric!r}: " in str(error.value)
    assert str(error.value).endswith(f"choose one of {listed}")
    assert not (tmp_path / "evaluations.jsonl").exists()


def test_it_needs_held_out_prompts_and_a_folder(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError,
        match="keep_best='eval/accuracy' is read only with output_dir and eval_prompts; here .*no eval_prompts",
    ):
        GRPO(ToyLM(), share_of_target, **options(output_dir=tmp_path, keep_best="eval/accuracy")).train(PROMPTS)
    with pytest.raises(
        ConfigError,
        match="keep_best='eval/accuracy' is read only with output_dir and eval_prompts; here output_dir=None",
    ):
        GRPO(ToyLM(), share_of_target, **options(keep_best="eval/accuracy"))
    with pytest.raises(ValueError, match="best=True needs keep_best"):
        GRPO(ToyLM(), share_of_target, **options()).save(tmp_path / "best", best=True)
    settings = options(output_dir=tmp_path, keep_best="eval/accuracy")
    with pytest.raises(ValueError, match="train has not measured eval/accuracy yet"):
        GRPO(ToyLM(), share_of_target, **settings).save(tmp_path / "best", best=True)


def test_every_metric_that_can_be_named_is_measured(make_tiny_model: Any, byte_tokenizer: Any) -> None:
    model = make_tiny_model("qwen2", vocab_size=259, eos_token_id=1)
    rewards = [MathAnswer(), MathAnswer(), near_half]
    trainer = GRPO(model, rewards, tokenizer=byte_tokenizer, max_new_tokens=3, eval_greedy=True, log_to=())
    loaded = trainer._held_out.load(
        {"math": EvalSet([{"prompt": "1+1", "answer": "2"}], samples=3, rewards=rewards[:2])}
    )
    names = trainer._held_out._list_scores("math", loaded["math"])
    metrics, _ = trainer._held_out.evaluate_in_training("math", loaded["math"], 0)
    assert {name.removeprefix("math/") for name in names} <= metrics.keys()
    assert {"math/pass@3", "math/maj@3", "math/greedy_accuracy", "math/rewards/math_answer_2"} <= {*names}
    assert not any("length" in name or "truncated" in name for name in names)


def test_a_choice_by_another_metric_is_forgotten_and_a_damaged_one_refused() -> None:
    best = BestCheckpoint("eval/accuracy")
    best.begin("rows")
    assert [best.take(step, value) for step, value in ((0, 0.9), (1, None), (2, float("nan")), (3, 0.1))] == [
        False,
        False,
        False,
        True,
    ]
    other, same = BestCheckpoint("eval/pass@4"), BestCheckpoint("eval/accuracy")
    for choice in (other, same):
        choice.begin("rows")
        choice.load_state_dict(json.loads(json.dumps(best.state_dict())))
    assert (other.step, other.start, same.step, same.value, same.start) == (None, None, 3, 0.1, 0.9)
    same.begin("rows")
    assert same.step == 3
    same.begin("other rows")
    assert (same.step, same.start) == (None, None)
    with pytest.raises(KeyError):
        same.load_state_dict({"metric": "eval/accuracy"})


def test_a_folder_in_place_of_the_link_is_named_and_stays(tmp_path: Path) -> None:
    (tmp_path / "checkpoints" / "best").mkdir(parents=True)
    with pytest.warns(RuntimeWarning, match=r"checkpoints/best cannot be written.* is not a link: remove it"):
        run(tmp_path)
    assert list_steps(tmp_path) == [3, 6]
    with pytest.raises(FileExistsError):
        link_best(tmp_path / "checkpoints", 3)
