"""Whole runs on a toy policy: it learns, it resumes exactly, it stops with a word on how to go on."""

import copy
import functools
import json
import os
import shutil
import signal
import threading
from pathlib import Path

import pytest
import torch

import warm
from rlox_grpo import GRPO, GRPOConfig
from rlox_grpo.errors import CheckpointError, ConfigError, NonFiniteError
from rlox_grpo.rewards import GSM8KAnswer, RewardError
from rlox_grpo.run.folder import refuse_full_disk
from toy import PROMPTS, TARGET, ToyLM, options, share_of_target

HERE = Path(__file__).parent


def weights(trainer):
    return {name: parameter.detach().clone() for name, parameter in trainer.model.named_parameters()}


def assert_equal(left, right):
    assert left.keys() == right.keys()
    for name, tensor in left.items():
        assert torch.equal(tensor, right[name]), name


def test_rlox_quick_start_improves_its_reward():
    model = ToyLM()
    reference = copy.deepcopy(model)
    trainer = GRPO(
        model=model,
        ref_model=reference,
        reward_fn=share_of_target,
        group_size=4,
        kl_coef=0.1,
        learning_rate=0.02,
        max_new_tokens=8,
    )
    first = trainer.train(prompts=PROMPTS, n_epochs=1)
    last = trainer.train(prompts=PROMPTS, n_epochs=40)
    assert first["mean_reward"] < 0.3  # chance is 1/12
    assert last["mean_reward"] > 0.6
    assert last["kl"] > 0
    assert trainer.step == 41


def test_without_learning_nothing_changes():
    trainer = GRPO(ToyLM(), share_of_target, **options(learning_rate=1e-30, max_steps=10))
    assert trainer.train(PROMPTS)["mean_reward"] < 0.3
    for left, right in zip(trainer.model.parameters(), ToyLM().parameters(), strict=True):
        assert torch.equal(left, right)


def test_a_report_that_cannot_be_written_does_not_end_the_run(tmp_path):
    def break_the_folder(completions, prompts):  # while the run holds it: a start removes files of later steps
        (tmp_path / "completions").mkdir(exist_ok=True)
        (tmp_path / "completions" / "step_000009.jsonl").write_text("not JSON\n")
        return share_of_target(completions, prompts)

    trainer = GRPO(ToyLM(), break_the_folder, **options(max_steps=2, output_dir=tmp_path))
    with pytest.warns(RuntimeWarning, match=r"report cannot be written, training continues: .*step_000009\.jsonl:1"):
        trainer.train(PROMPTS)
    assert trainer.step == 2


def test_rewards_that_never_differ_cost_no_update():
    trainer = GRPO(ToyLM(), lambda completions, prompts: [0.3] * len(completions), **options(max_steps=2))
    metrics = trainer.train(PROMPTS)
    assert metrics["rollout/frac_reward_zero_std"] == 1.0
    assert "update/grad_norm" not in metrics
    assert_equal(weights(trainer), dict(ToyLM().named_parameters()))


def test_the_reward_function_sees_groups_prompt_by_prompt():
    seen = []

    def reward(completions, prompts):
        seen.append((completions, prompts))
        return share_of_target(completions, prompts)

    GRPO(ToyLM(), reward, **options(max_steps=1)).train(PROMPTS)
    completions, prompts = seen[0]
    assert len(completions) == 4 * 8
    assert all(completion.dtype == torch.int64 and completion.shape == (6,) for completion in completions)
    assert prompts.shape == (32, 3)
    for group in prompts.reshape(4, 8, 3):
        assert (group == group[0]).all()


def test_every_prompt_is_drawn_once_an_epoch_also_when_steps_do_not_divide():
    drawn = []

    def reward(completions, prompts):
        drawn.append(prompts[::2].tolist())
        return share_of_target(completions, prompts)

    trainer = GRPO(ToyLM(), reward, **options(max_steps=None, prompts_per_step=3, group_size=2))
    trainer.train(PROMPTS, n_epochs=2)
    assert [len(step) for step in drawn] == [3, 3, 3, 3, 3, 1]
    rows = [tuple(row) for step in drawn for row in step]
    assert sorted(rows[:8]) == sorted(rows[8:]) == sorted(map(tuple, PROMPTS.tolist()))


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"updates_per_batch": 2, "kl_coef": 0.05},
        {"lr_schedule": "cosine", "warmup_steps": 2},
        {"zero_variance": "refill", "curriculum": "pass_rate", "max_group_size": 16, "curriculum_floor": 0.3},
        {"async_steps": 1},
        {"async_steps": 3, "curriculum": "pass_rate"},
        {"kl_coef": 0.05, "kl_schedule": "adaptive", "kl_target": 0.01, "kl_horizon": 100},
        {"kl_coef": 0.05, "kl_in": "reward", "kl_estimator": "k1", "kl_schedule": "cosine", "mini_batches": 2},
    ],
)
def test_a_resumed_run_equals_an_uninterrupted_one(tmp_path, changes):
    whole = GRPO(ToyLM(), share_of_target, **options(output_dir=tmp_path / "whole", **changes))
    whole_metrics = whole.train(PROMPTS)
    interrupted = options(output_dir=tmp_path / "parts", **changes)
    calls = 0

    @functools.wraps(share_of_target)  # by name and source that function
    def fails_in_step_7(completions, prompts):
        nonlocal calls
        calls += 1
        if calls > 6 and trainer.step == 6:
            raise OSError("the grader went away")
        return share_of_target(completions, prompts)

    trainer = GRPO(ToyLM(), fails_in_step_7, **interrupted)
    with pytest.raises(RuntimeError, match="grader went away|share_of_target"):
        trainer.train(PROMPTS)
    # What a resumed run starts from does not matter, unless it is the reference.
    again = GRPO(ToyLM(seed=0 if "kl_coef" in changes else 99), share_of_target, **interrupted)
    metrics = again.train(PROMPTS)
    assert again.step == 12
    assert_equal(weights(whole), weights(again))
    assert metrics["mean_reward"] == whole_metrics["mean_reward"]
    steps = [json.loads(line)["step"] for line in (tmp_path / "parts" / "metrics.jsonl").read_text().splitlines()]
    assert steps == list(range(1, 13))


def test_groups_without_spread_are_replaced_by_other_prompts():
    seen = []

    def reward(completions, prompts):
        seen.append([row[0] for row in prompts.tolist()[::8]])
        return [
            0.5 if prompt[0] < 6 else float(completion[0] % 2)  # half of the prompts teach nothing
            for completion, prompt in zip(completions, prompts.tolist(), strict=True)
        ]

    trainer = GRPO(ToyLM(), reward, **options(zero_variance="refill", max_refills=20, max_steps=3))
    metrics = trainer.train(PROMPTS)
    assert metrics["rollout/groups_chosen"] == 4
    assert metrics["rollout/groups"] > 4
    assert metrics["rollout/refills"] >= 1
    assert trainer.progress.draws == sum(
        map(len, seen)
    )  # every prompt that was sampled was drawn, and none twice an epoch
    drawn = [prompt for call in seen for prompt in call]
    for epoch in range(len(drawn) // 8):
        assert sorted(drawn[8 * epoch : 8 * epoch + 8]) == sorted(PROMPTS[:, 0].tolist())
    scored, advantages = trainer.last_rollout
    assert [len(group.group.completions) for group in scored] == [8] * 4
    assert advantages.reshape(4, 8).any(axis=1).all()


def test_prompts_that_are_hard_get_larger_groups_and_rare_turns():
    seen = []

    def right(completions, prompts):  # of a prompt that begins with 9: one completion in twelve
        seen.append([row[0] for row in prompts.tolist()])
        return [
            float(int(completion[0]) == 3 if prompt[0] == 9 else True)
            for completion, prompt in zip(completions, prompts.tolist(), strict=True)
        ]

    trainer = GRPO(
        ToyLM(),
        right,
        **options(curriculum="pass_rate", max_group_size=32, curriculum_floor=0.05, learning_rate=1e-9, max_steps=40),
    )
    metrics = trainer.train(PROMPTS)
    late = [prompt for call in seen[20:] for prompt in call]
    hard = sum(prompt == 9 for prompt in late) / len(late)
    assert hard > 0.5  # two prompts of eight begin with 9
    assert metrics["curriculum/measured_prompts"] == 8
    assert max(len(call) for call in seen) > 4 * 8
    assert all(len(call) % 8 == 0 for call in seen)


@pytest.mark.parametrize("steps", [1, 2])
def test_generation_ahead_is_exactly_so_stale_and_learns(steps):
    trainer = GRPO(ToyLM(), share_of_target, **options(async_steps=steps, max_steps=40))
    seen = []
    record, trainer.train_step = trainer.train_step, lambda *a: seen.append(record(*a)) or seen[-1]
    metrics = trainer.train(PROMPTS)
    assert [step["rollout/staleness_max"] for step in seen] == [min(step, steps) for step in range(40)]
    assert metrics["mean_reward"] > 0.5
    assert len(trainer.sampler.ahead) == 0
    assert trainer.progress.draws == 40 * 4
    again = GRPO(ToyLM(), share_of_target, **options(async_steps=steps, max_steps=40))
    again.train(PROMPTS)
    assert_equal(weights(trainer), weights(again))  # whatever the timing


def test_refills_within_a_step_and_generation_ahead_of_it_exclude_each_other():
    with pytest.raises(ConfigError, match="async_steps=1 ahead of it"):
        GRPOConfig.create(async_steps=1, zero_variance="refill")


def test_kill_9_in_mid_step_and_a_second_start(tmp_path):
    whole = GRPO(ToyLM(), share_of_target, **options(output_dir=tmp_path / "whole"))
    whole.train(PROMPTS)
    process = warm.run(0, HERE / "killed_run.py", str(tmp_path / "killed"), "6")
    assert process.returncode == -signal.SIGKILL, process.stderr
    assert (tmp_path / "killed" / "checkpoints" / "step_000004").is_dir()
    again = GRPO(ToyLM(seed=99), share_of_target, **options(output_dir=tmp_path / "killed"))
    again.train(PROMPTS)
    assert_equal(weights(whole), weights(again))


def test_ctrl_c_finishes_the_step_saves_and_says_how_to_go_on(tmp_path):
    trainer, before = None, signal.getsignal(signal.SIGINT)  # ignored in a job of a shell's background

    def interrupt_in_step_5(completions, prompts):
        if trainer.step == 4:
            os.kill(os.getpid(), signal.SIGINT)
        return share_of_target(completions, prompts)

    trainer = GRPO(ToyLM(), interrupt_in_step_5, **options(output_dir=tmp_path))
    with pytest.raises(KeyboardInterrupt, match=r"SIGINT after step 5; saved up to .*step_000005; start the same"):
        trainer.train(PROMPTS)
    assert signal.getsignal(signal.SIGINT) is before
    again = GRPO(ToyLM(), interrupt_in_step_5, **options(output_dir=tmp_path))
    again.train(PROMPTS)
    assert again.step == 12


def test_training_off_the_main_thread():
    results = []
    trainer = GRPO(ToyLM(), share_of_target, **options(max_steps=1))
    thread = threading.Thread(target=lambda: results.append(trainer.train(PROMPTS)))
    thread.start()
    thread.join()
    assert results[0]["mean_reward"] >= 0


def test_a_finished_run_is_not_trained_again(tmp_path, caplog):
    first = GRPO(ToyLM(), share_of_target, **options(output_dir=tmp_path)).train(PROMPTS)
    again = GRPO(ToyLM(), share_of_target, **options(output_dir=tmp_path))
    with caplog.at_level("INFO"):
        second = again.train(PROMPTS)
    assert "is complete" in caplog.text
    assert (first["resumed_from_step"], first["steps_trained"]) == (0.0, 12.0)
    assert (second["resumed_from_step"], second["steps_trained"]) == (12.0, 0.0)
    progress = {"resumed_from_step": 0.0, "steps_trained": 12.0}
    assert {**second, **progress} == pytest.approx(first, nan_ok=True)
    longer = GRPO(ToyLM(), share_of_target, **options(output_dir=tmp_path, max_steps=14))
    longer.train(PROMPTS)
    assert longer.step == 14


def test_a_checkpoint_of_another_configuration_is_refused(tmp_path):
    GRPO(ToyLM(), share_of_target, **options(output_dir=tmp_path, max_steps=2)).train(PROMPTS)
    changed = GRPO(ToyLM(), share_of_target, **options(output_dir=tmp_path, group_size=4))
    with pytest.raises(CheckpointError, match="group_size: 8 there, 4 here"):
        changed.train(PROMPTS)
    other_prompts = GRPO(ToyLM(), share_of_target, **options(output_dir=tmp_path))
    with pytest.raises(CheckpointError, match="prompts: not those"):
        other_prompts.train(PROMPTS[:4])
    with_kl = options(output_dir=tmp_path / "kl", max_steps=2, kl_coef=0.1)
    GRPO(ToyLM(), share_of_target, **with_kl).train(PROMPTS)
    with pytest.raises(CheckpointError, match="frozen reference: not those of the run"):
        GRPO(ToyLM(seed=1), share_of_target, **with_kl).train(PROMPTS)
    other_reward = GRPO(ToyLM(), lambda completions, prompts: [0.0] * 32, **options(output_dir=tmp_path))
    with pytest.raises(CheckpointError, match="reward functions"):
        other_reward.train(PROMPTS)
    with pytest.raises(CheckpointError, match="resume='never'"):
        GRPO(ToyLM(), share_of_target, **options(output_dir=tmp_path, resume="never")).train(PROMPTS)


def test_a_non_finite_loss_names_the_sample_and_saves_what_was_right(tmp_path):
    trainer = GRPO(ToyLM(), share_of_target, **options(output_dir=tmp_path, checkpoint_steps=0))
    forward = trainer.updater.forward

    def broken(batch):
        log_probs, entropy = forward(batch)
        if trainer.step == 3:
            log_probs = log_probs * torch.where(batch.row_index == batch.row_index.max(), torch.nan, 1.0)[:, None]
        return log_probs, entropy

    trainer.updater.forward = broken
    with pytest.raises(NonFiniteError, match=r"step 4: .*not finite.*is completion \d of prompts\[\d\]: \[\d+"):
        trainer.train(PROMPTS)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step_000003"]


def test_a_checkpoint_that_cannot_be_written_is_tried_again(tmp_path, monkeypatch):
    import rlox_grpo.run.run as run

    real, failures = run.save_checkpoint, []

    def full_at_4(root, step, *arguments, **keywords):
        if step == 4:
            failures.append(step)
            raise CheckpointError(f"cannot write the checkpoint {root}: No space left on device")
        return real(root, step, *arguments, **keywords)

    monkeypatch.setattr(run, "save_checkpoint", full_at_4)
    trainer = GRPO(ToyLM(), share_of_target, **options(output_dir=tmp_path, max_steps=6, keep_checkpoints=5))
    with pytest.warns(RuntimeWarning, match="tries again after the next step"):
        trainer.train(PROMPTS)
    assert failures == [4]
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["step_000005", "step_000006"]


def test_a_disk_too_small_is_refused_before_any_work(tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr("rlox_grpo.run.folder.shutil.disk_usage", lambda path: usage._replace(free=1000))
    calls = []
    trainer = GRPO(ToyLM(), lambda completions, prompts: calls.append(1), **options(output_dir=tmp_path))
    with pytest.raises(CheckpointError, match=r"1,000 bytes free, and two checkpoints take \d+,\d+: free space or"):
        trainer.train(PROMPTS)
    assert not calls


def test_the_disk_needs_room_for_float32_weights_and_moments(tmp_path, monkeypatch):
    """Also where the model holds rounded weights, or DeepSpeed has taken the elements of its parameters."""
    usage, numel = shutil.disk_usage(tmp_path), 4 * 3
    monkeypatch.setattr("rlox_grpo.run.folder.shutil.disk_usage", lambda path: usage._replace(free=24 * numel - 1))
    rounded, partitioned = torch.nn.Linear(4, 3, bias=False).bfloat16(), torch.nn.Linear(4, 3, bias=False)
    partitioned.weight.data, partitioned.weight.ds_shape = torch.empty(0), torch.Size((3, 4))
    for model, masters in ((rounded, {"weight": torch.empty(3, 4)}), (partitioned, {})):
        with pytest.raises(CheckpointError, match=f"two checkpoints take {24 * numel}: free space or"):
            refuse_full_disk(tmp_path, model, masters)


def test_held_out_prompts_are_evaluated_before_during_and_after(tmp_path):
    def right_or_wrong(completions, prompts):
        return [float((completion == TARGET).any()) for completion in completions]

    trainer = GRPO(ToyLM(), right_or_wrong, **options(output_dir=tmp_path, eval_steps=6, max_steps=12))
    metrics = trainer.train(PROMPTS, eval_prompts=PROMPTS[:2])
    lines = [json.loads(line) for line in (tmp_path / "evaluations.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [0, 6, 12]
    assert lines[-1]["accuracy"] == metrics["eval/accuracy"] == lines[-1]["pass@1"]
    assert lines[-1]["pass@4"] >= lines[-1]["pass@1"]
    assert (tmp_path / "completions" / "eval_step_000000.jsonl").exists()
    assert all(line["time_s"] > 0 for line in lines)
    assert trainer.evaluate(PROMPTS[:2]) == trainer.evaluate(PROMPTS[:2])
    assert set(trainer.evaluate(PROMPTS[:2], greedy=True)) >= {"accuracy", "pass@1", "mean_reward"}


def test_the_runs_folder(tmp_path):
    GRPO(ToyLM(), share_of_target, **options(output_dir=tmp_path, max_steps=2, log_completions=5)).train(PROMPTS)
    assert {path.name for path in tmp_path.iterdir()} >= {
        "config.toml",
        "metrics.jsonl",
        "completions",
        "checkpoints",
        "report.html",
    }
    rows = [json.loads(line) for line in (tmp_path / "completions" / "step_000002.jsonl").read_text().splitlines()]
    assert len(rows) == 5
    assert set(rows[0]) >= {"prompt", "completion", "rewards", "advantage"}
    line = json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[-1])
    stages = sum(value for name, value in line.items() if name.startswith("time/") and name != "time/step_s")
    assert line["time/step_s"] == pytest.approx(stages)


def test_the_step_after_a_checkpoint_tells_its_time(tmp_path):
    trainer = GRPO(ToyLM(), share_of_target, **options(output_dir=tmp_path, checkpoint_steps=2, max_steps=5))
    trainer.train(PROMPTS)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if line.get("checkpoint/time_s", 0) > 0] == [3, 5]


def test_a_run_that_logs_no_completions_writes_none_of_evaluations_either(tmp_path):
    trainer = GRPO(ToyLM(), share_of_target, **options(output_dir=tmp_path, max_steps=1, log_completions=0))
    trainer.train(PROMPTS, eval_prompts=PROMPTS[:2])
    assert not (tmp_path / "completions").exists()
    assert len((tmp_path / "evaluations.jsonl").read_text().splitlines()) == 2


def test_save_writes_a_plain_module(tmp_path):
    from safetensors.torch import load_model

    trainer = GRPO(ToyLM(), share_of_target, **options(max_steps=1))
    trainer.train(PROMPTS)
    trainer.save(tmp_path / "out")
    loaded = ToyLM(seed=5)
    load_model(loaded, tmp_path / "out" / "model.safetensors")
    assert_equal(dict(loaded.named_parameters()), weights(trainer))


def training_with(reward):
    """A call that trains with this reward, on completions of two tokens."""
    return lambda: GRPO(ToyLM(), reward, max_new_tokens=2).train(PROMPTS)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: GRPO(ToyLM(), share_of_target, group_sise=4), ConfigError, "did you mean 'group_size'"),
        (lambda: GRPO(ToyLM(), share_of_target, config=GRPOConfig(), seed=1), ConfigError, "leave out seed"),
        (lambda: GRPO(ToyLM(), [], seed=1).train(PROMPTS), ValueError, "reward_fn is empty"),
        (lambda: GRPO(ToyLM(), [], seed=1).evaluate(PROMPTS), ValueError, "reward_fn is empty"),
        (lambda: GRPO(ToyLM(), [], reward_weights=(1.0,)), ConfigError, "1 values for 0 reward functions"),
        (lambda: GRPO(ToyLM(), [share_of_target, 3]), TypeError, r"reward_fn\[1\] is int"),
        (lambda: GRPO(ToyLM(), share_of_target, reward_weights=(1.0, 2.0)), ConfigError, "2 values for 1 reward"),
        (lambda: GRPO("no/such/folder", share_of_target), ValueError, "model='no/such/folder': no such folder"),
        (lambda: GRPO(ToyLM(), share_of_target, gradient_checkpointing=True), ValueError, "transformers model"),
        (lambda: GRPO(ToyLM().requires_grad_(False), share_of_target), ValueError, "nothing to train"),
        (lambda: GRPO(ToyLM(), share_of_target).train([]), ValueError, "prompts is empty"),
        (lambda: GRPO(ToyLM(), share_of_target).train(["a"]), ValueError, "there is no tokenizer"),
        (lambda: GRPO(ToyLM(), share_of_target).train(PROMPTS, n_epochs=0), ValueError, "n_epochs is 0"),
        (training_with(lambda c, p: [1.0]), RewardError, "returned 1 scores for 64 completions"),
        (training_with(lambda c, p: [None] * len(c)), RewardError, "no score for any of 64"),
        (training_with(lambda c, p: ["x"] * len(c)), RewardError, "'x' for sample 0"),
        (training_with(lambda c, p: [float("inf")] * len(c)), RewardError, "inf.* for sample 0"),
    ],
)
def test_bad_input(make, error, message):
    with pytest.raises(error, match=message):
        make()


def test_a_function_in_workers_trains_the_same_policy(tmp_path):
    here = GRPO(ToyLM(), share_of_target, **options(max_steps=3))
    here.train(PROMPTS)
    there = GRPO(
        ToyLM(), share_of_target, **options(max_steps=3, reward_timeout=30.0, reward_workers=1, output_dir=tmp_path)
    )
    metrics = there.train(PROMPTS)
    assert_equal(weights(there), weights(here))
    assert (metrics["rewards/share_of_target/timeout"], metrics["rewards/share_of_target/error"]) == (0.0, 0.0)
    assert 0 < metrics["rewards/share_of_target/time_s"] <= metrics["time/rewards_s"]
    logged = json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[-1])
    assert logged["rewards/share_of_target/timeout"] == 0.0
    (worker,) = there.reward_fns[0]._pool._workers
    assert worker._process is None  # ended with the run


def test_a_function_that_fails_in_its_worker_stops_the_run_or_not():
    def fails(completions, prompts):
        raise KeyError("rubric")

    def counts(completions):  # local, so that its worker imports no model
        return [float((completion == 3).sum()) for completion in completions]

    trainer = GRPO(ToyLM(), fails, **options(max_steps=1, reward_timeout=30.0, reward_workers=1))
    with pytest.raises(RewardError, match=r"fails: KeyError: 'rubric' .*completion 0 of prompts\[\d\]"):
        trainer.train(PROMPTS)
    trainer = GRPO(
        ToyLM(),
        [counts, fails],
        **options(max_steps=1, reward_timeout=30.0, reward_workers=1, on_reward_error="none"),
    )
    metrics = trainer.train(PROMPTS)
    assert metrics["rewards/fails/error"] == 1.0
    assert "update/grad_norm" not in metrics  # no sample has a score: counts alone is not the reward


def test_golds_are_read_before_anything_is_sampled():
    trainer = GRPO(ToyLM(), GSM8KAnswer(), **options(max_steps=1))
    trainer.engine = None  # whoever samples, fails
    rows = [{"prompt": [1, 2], "answer": "1"}, {"prompt": [2, 3], "answer": "many"}]
    with pytest.raises(ValueError, match=r'the prompts do not fit the reward gsm8k_answer: .*answer\[1\] is "many"'):
        trainer.train(rows)


def test_rewards_normalised_one_by_one_teach_where_their_sum_does_not():
    def ones(completions, prompts):
        return [float((completion == TARGET).sum()) for completion in completions]

    def twice_against(completions, prompts):
        return [-2 * score for score in ones(completions, prompts)]

    functions, weighted = [ones, twice_against], {"reward_weights": (2.0, 1.0), "max_steps": 2}
    summed = GRPO(ToyLM(), functions, **options(**weighted))  # 2 x - 2 x
    assert "update/grad_norm" not in summed.train(PROMPTS)
    apart = {"reward_aggregation": "normalize_then_sum"}
    both = GRPO(ToyLM(), functions, **options(**weighted, **apart))  # 2 z - z
    alone = GRPO(ToyLM(), ones, **options(max_steps=2, **apart))  # z
    assert "update/grad_norm" in both.train(PROMPTS)
    alone.train(PROMPTS)
    # The epsilons of two deviations, of which one is twice the other, are all that differs.
    for left, right in zip(weights(both).values(), weights(alone).values(), strict=True):
        assert torch.allclose(left, right, atol=1e-4)
    with pytest.raises(ConfigError, match="needs reward_scaling='group', got 'none'"):
        GRPOConfig.create(reward_aggregation="normalize_then_sum", reward_scaling="none")
