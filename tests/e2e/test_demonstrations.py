"""Runs with demonstrations and replay: what they train on, resumes, streams, metrics, and errors before a run."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import torch

import ranked
from rlox_grpo import GRPO, TrainSource
from rlox_grpo.config.records import OffPolicyConfig
from rlox_grpo.errors import ConfigError
from rlox_grpo.groups import append_completions, find_origin, is_right, select_completions
from rlox_grpo.rollout.off_policy import OffPolicy, make_demonstration
from rlox_grpo.rollout.replay import Replay, identify
from rlox_grpo.run.files import read_jsonl
from rlox_grpo.types import Completion, Prompt, RolloutGroup, ScoredGroup
from toy import PROMPTS, TARGET, ToyLM, options, stop_after

ROWS = [{"prompt": prompt, "demonstration": [TARGET] * 4, "row": at} for at, prompt in enumerate(PROMPTS.tolist())]


def all_target(completions, prompts, **_):
    """1 if every token is ``TARGET``, which a new model never samples."""
    return [float((ids == TARGET).all()) for ids in completions]


def four_target(completions, prompts, **_):
    """1 for at least 4 tokens that are ``TARGET``: rare at first, and sometimes."""
    return [float((ids == TARGET).sum() >= 3) for ids in completions]


def weights(trainer):
    return torch.cat([parameter.detach().flatten() for parameter in trainer.model.parameters()])


def train(reward=all_target, rows=ROWS, **changes):
    trainer = GRPO(ToyLM(), reward, **options(**changes))
    return trainer, trainer.train(rows)


@pytest.mark.parametrize("choices", [{"demo_loss": "ce"}, {"demo_loss": "luffy"}], ids=str)
def test_a_task_that_is_never_solved_by_chance_is_learned(choices):
    trainer, metrics = train(max_steps=1)
    assert torch.equal(weights(trainer), weights(GRPO(ToyLM(), all_target, **options())))
    trainer, metrics = train(**choices)
    assert metrics["mean_reward"] > 0.9
    assert metrics["demo/right_share"] == 1.0


def test_demonstrations_are_in_the_trained_groups_and_not_in_the_metrics_of_the_samples(tmp_path):
    trainer, metrics = train(max_steps=1, demo_loss="luffy", output_dir=tmp_path, log_completions=99)
    groups, advantages = trainer.last_rollout
    assert [len(scored.rewards) for scored in groups] == [9] * 4
    assert all(find_origin(scored, "demonstration") == [8] for scored in groups)
    assert metrics["rollout/completions"] == 32
    assert metrics["mean_reward"] == 0
    # Nine rewards 0 … 0 1 have the mean 1/9 and the standard deviation 1/3: (1 − 1/9)/(1/3 + 1e-4).
    assert advantages[8] == pytest.approx((8 / 9) / (1 / 3 + 1e-4), rel=1e-5)
    assert metrics["advantages/mean"] == metrics["advantages/max"] == pytest.approx(advantages[0], rel=1e-5)
    rows = [row for row in read_jsonl(tmp_path / "completions" / "step_000001.jsonl") if "origin" in row]
    assert [(row["origin"], row["completion"], row["reward"]) for row in rows] == [
        ("demonstration", [TARGET] * 4, 1.0)
    ] * 4


def test_the_adaptive_weight_of_the_kl_counts_the_samples_alone():
    """The policy is the reference in the first step: the weight falls by 0.2 · 32 samples / 1,000."""
    schedule = {"kl_coef": 0.1, "kl_schedule": "adaptive", "kl_target": 0.1, "kl_horizon": 1000}
    trainer, _ = train(max_steps=1, demo_loss="luffy", **schedule)
    assert trainer._step.kl_weight.value == pytest.approx(0.1 * (1 - 0.2 * 32 / 1000), rel=1e-9)


def test_the_reward_of_a_cross_entropy_demonstration_stays_out_of_the_baseline_unless_asked():
    _, advantages = train(max_steps=1, demo_loss="ce")[0].last_rollout
    assert not advantages.any()
    _, advantages = train(max_steps=1, demo_loss="ce", demo_in_baseline=True)[0].last_rollout
    assert advantages.reshape(4, 9)[:, 8].min() > 2
    assert advantages.reshape(4, 9)[:, :8].max() < 0


def test_a_demonstration_that_is_in_no_baseline_is_in_no_variance_either():
    """Samples of row 0 vary most; in the other groups only the demonstration does."""
    trained = set()

    def record(inputs):
        trained.update(inputs.sequences[inputs.mask.any(dim=-1)].tolist())
        return -inputs.ratio * inputs.advantages

    def reward(completions, prompts, row, **_):
        varied = [(index % 2) * (0.01 + (at == 0)) for index, at in enumerate(row)]
        return [10 * shown + part for shown, part in zip(all_target(completions, prompts), varied, strict=True)]

    trainer, _ = train(reward, max_steps=1, demo_loss="ce", reward_variance_share=0.5, policy_loss=record)
    groups, _ = trainer.last_rollout
    (place,) = (at for at, scored in enumerate(groups) if scored.group.prompt.columns["row"] == 0)
    assert trained == set(range(9 * place, 9 * place + 8))


def test_groups_without_a_signal_train_their_demonstrations_alone():
    """The samples of such a group are not in the denominators: with and without them the step is the same."""
    _, metrics = train(max_steps=1, demo_loss="ce")
    assert metrics["demo/used"] == 4
    assert "policy/ratio_mean" not in metrics
    _, more = train(max_steps=1, demo_loss="ce", zero_variance="keep")
    assert more["policy/ratio_mean"] == 1.0
    # Advantages of 0 have no gradient; float32 sums of other rows beside them differ by 1e-7.
    assert metrics["update/grad_norm"] == pytest.approx(more["update/grad_norm"], rel=1e-5)


def test_none_right_leaves_out_the_demonstrations_of_solved_prompts():
    def first_row_is_right(completions, prompts, row):
        return [float(number == 0) for number in row]

    rows = [{**row, "demonstration": [TARGET]} for row in ROWS]
    _, metrics = train(first_row_is_right, rows, max_steps=2, demo_loss="ce", demo_when="none_right")
    assert metrics["demo/used"] == 3 or metrics["demo/used"] == 4
    trainer, _ = train(
        first_row_is_right, rows, max_steps=1, demo_loss="ce", demo_when="none_right", prompts_per_step=8
    )
    shown = {s.group.prompt.columns["row"]: len(find_origin(s, "demonstration")) for s in trainer.last_rollout[0]}
    assert shown == {row: int(row > 0) for row in range(8)}


RESUMED = {
    "ce": {"demo_loss": "ce", "demo_when": "none_right", "demo_in_baseline": True},
    "luffy": {"demo_loss": "luffy", "updates_per_batch": 2, "mini_batches": 2},
    "replay": {"replay": "positive", "replay_prompts": 6},
    "ahead": {"demo_loss": "luffy", "replay": "positive", "async_steps": 1},
}


@pytest.mark.parametrize("choices", RESUMED.values(), ids=RESUMED)
def test_a_resumed_run_ends_at_the_same_weights(choices, tmp_path):
    # A seed at which a completion is replayed after the resume.
    common = {**choices, "max_steps": 10, "checkpoint_steps": 3, "log_completions": 400}
    whole, metrics = train(four_target, output_dir=tmp_path / "whole", **common)
    stopped = GRPO(ToyLM(), four_target, **options(output_dir=tmp_path / "stopped", **common))
    stop_after(stopped, 4)
    stopped.train(ROWS)
    resumed = GRPO(ToyLM(1), four_target, **options(output_dir=tmp_path / "stopped", **common))
    again = resumed.train(ROWS)
    assert again["resumed_from_step"] == 4
    assert torch.equal(weights(whole), weights(resumed))
    shown = ("demo/", "replay/")
    assert {k: v for k, v in metrics.items() if k.startswith(shown)} == {
        k: v for k, v in again.items() if k.startswith(shown)
    }
    if choices == RESUMED["replay"]:
        late = [
            row for step in range(5, 11) for row in read_jsonl(tmp_path / f"whole/completions/step_{step:06d}.jsonl")
        ]
        assert any(row.get("origin") == "replay" for row in late)


def test_a_second_pass_over_a_stream_replays_the_completions_of_the_first(tmp_path):
    def stream():
        yield from ROWS

    _, metrics = train(four_target, stream, replay="positive", max_steps=10, output_dir=tmp_path)
    assert metrics["replay/stored"] <= len(ROWS)
    origins = [
        row.get("origin")
        for step in range(3, 11)
        for row in read_jsonl(tmp_path / "completions" / f"step_{step:06d}.jsonl")
    ]
    assert "replay" in origins


def scored_group(rewards, index=0, version=0, **columns):
    rows = tuple(Completion(np.array([at, 5]), np.full(2, -0.5 - at, np.float32), "stop") for at in range(len(rewards)))
    values = np.array(rewards, np.float32)
    group = RolloutGroup(Prompt(np.array([1, index]), index, columns=columns), rows, version)
    return ScoredGroup(group, values, {"reward": values})


def replayed(replay, group, version):
    (joined,) = replay.join([group], [group], version)
    return [joined.group.completions[index] for index in find_origin(joined, "replay")]


def test_the_last_right_completion_is_replayed_with_its_log_probs_where_none_is_right():
    replay = Replay(OffPolicyConfig(replay="positive"))
    assert replay.finish([scored_group([1.0, 0.0, 1.0, 0.0], version=3)], 4) == {"replay/used": 0, "replay/stored": 1}
    wrong = scored_group([0.0, 0.5], version=7)
    (row,) = replayed(replay, wrong, 8)
    assert (row.token_ids.tolist(), row.log_probs.tolist()) == ([2, 5], [-2.5, -2.5])
    assert replay.finish([wrong], 8) == {"replay/used": 1, "replay/stored": 1, "replay/staleness": 5}
    assert not replayed(replay, scored_group([0.0, 1.0]), 8)
    assert not replayed(replay, scored_group([0.0], index=1), 8)
    assert not replayed(replay, scored_group([0.0], answer=2), 8)  # the same tokens with another answer
    restored = Replay(OffPolicyConfig(replay="positive"))
    restored.load_state_dict(json.loads(json.dumps(replay.state_dict())))
    assert replayed(restored, wrong, 8)[0].log_probs.tolist() == [-2.5, -2.5]


def test_the_buffer_is_bounded_by_prompts_and_by_age():
    replay = Replay(OffPolicyConfig(replay="positive", replay_prompts=2, replay_max_age=3))
    for index in (0, 1, 0, 2):  # prompt 1 was stored first
        replay.finish([scored_group([1.0], index=index, version=index)], index)
    assert [bool(replayed(replay, scored_group([0.0], index=index), 3)) for index in (0, 1, 2)] == [True, False, True]
    assert not replayed(replay, scored_group([0.0]), 4)
    assert replay.finish([], 6) == {"replay/used": 0, "replay/stored": 0}


def test_a_demonstration_in_the_group_does_not_keep_a_replay_away():
    off_policy = OffPolicy(OffPolicyConfig(replay="positive", demo_when="always"), "luffy")
    off_policy.finish([scored_group([1.0])], 1)
    wrong = scored_group([0.0, 0.0])
    shown = scored_group([1.0])
    shown = replace(shown, group=replace(shown.group, completions=(make_demonstration(np.array([5])),)))
    sampled, trained = off_policy.split([append_completions(wrong, shown)], 2)
    assert [completion.origin for completion in trained[0].group.completions] == [None, None, "demonstration", "replay"]
    assert [len(group.rewards) for group in sampled] == [2]
    assert is_right(trained[0]).tolist() == [False, False, True, True]
    assert select_completions(trained[0], [3]).components["reward"].tolist() == [1.0]


def test_identities_do_not_depend_on_the_index():
    one, other = Prompt(np.array([1]), 0, columns={"a": 1}), Prompt(np.array([1]), 9, columns={"a": 1})
    assert identify(one) == identify(other)
    assert identify(Prompt(np.array([1]), 0, columns={"a": 1}, data_source="math")) != identify(one)


COLUMN = "demonstration"
WRONG_ROWS = {
    "no column": ([{"prompt": [1]}], ValueError, r"prompts\[0\] has no column 'demonstration'; it has no other column"),
    "all None": ([{"prompt": [1], COLUMN: None}], ValueError, "none of 1 rows has a demonstration"),
    "a number": ([{"prompt": [1], COLUMN: 3}], TypeError, r"prompts\[0\], demonstration is int: expected text"),
    "numbers": ([{"prompt": [1], COLUMN: [1.0]}], TypeError, "demonstration is list of float"),
    "flags": ([{"prompt": [1], COLUMN: [True]}], TypeError, "demonstration is list of bool"),
    "empty": ([{"prompt": [1], COLUMN: []}], ValueError, "demonstration is empty"),
    "text": ([{"prompt": [1], COLUMN: "7 7"}], ValueError, "not token ids and there is no tokenizer"),
    "too long": (
        [{"prompt": [1], COLUMN: [7] * 7}],
        ValueError,
        "has 7 tokens with its end, more than max_new_tokens=6",
    ),
    "unknown": ([{"prompt": [1], COLUMN: [7, 12]}], ValueError, "has the token id 12 at position 1"),
    "negative": ([{"prompt": [1], COLUMN: [-1]}], ValueError, "has the token id -1 at position 0"),
    "huge": ([{"prompt": [1], COLUMN: [2**70]}], ValueError, "it is no int64"),
}


@pytest.mark.parametrize(("rows", "kind", "said"), WRONG_ROWS.values(), ids=WRONG_ROWS)
def test_wrong_rows_are_named_before_the_run(rows, kind, said):
    with pytest.raises(kind, match=said):
        train(lambda completions, prompts, **_: [0.0] * len(completions), rows, demo_loss="ce", prompts_per_step=1)


@pytest.mark.parametrize(
    ("choices", "said"),
    [
        ({"demo_when": "none_right"}, "demo_when='none_right' is read only with demo_loss"),
        ({"replay_prompts": 5}, "replay_prompts=5 is read only with replay='positive'"),
        ({"demo_loss": "luffy", "demo_in_baseline": True}, "demo_in_baseline=True is read only with demo_loss='ce'"),
        ({"demo_loss": "sft"}, "expected a loss of demonstrations or its module:name, got 'sft'"),
        ({"demo_loss": "no_such_module:loss"}, "no_such_module"),
        ({"demo_loss": "ce", "zero_variance": "refill"}, "demo_loss='ce' with zero_variance='refill' is not supported"),
        ({"replay": "positive", "baseline": "moving", "reward_scaling": "none"}, "replay='positive' with baseline"),
        ({"demo_loss": "luffy", "kl_in": "reward", "kl_coef": 0.1}, "demo_loss='luffy' with kl_in='reward'"),
        ({"demo_loss": "luffy", "advantage_fn": "zero"}, "no demonstration would be trained"),
        ({"demo_loss": "ce", "tools": [max]}, "demo_loss='ce' with tools= is not supported"),
        ({"replay": "positive", "teacher": ToyLM()}, "replay='positive' with teacher= is not supported"),
    ],
    ids=str,
)
def test_options_that_do_not_go_together_are_refused(choices, said):
    with pytest.raises(ConfigError, match=said):
        train(**choices)


def test_a_source_of_a_mixture_may_lack_the_column():
    rows = {"shown": ROWS[:4], "plain": TrainSource(PROMPTS[4:])}
    _, metrics = train(rows=rows, demo_loss="ce", max_steps=1, prompts_per_step=4)
    assert metrics["demo/used"] == 2


def test_held_out_rows_need_no_demonstration():
    trainer, _ = train(demo_loss="ce", max_steps=1)
    assert trainer.evaluate(PROMPTS)["mean_reward"] >= 0


def test_demonstrations_that_nothing_trains_on_are_told(caplog):
    train(max_steps=1)
    assert "demo_loss='ce' or 'luffy' trains on it" in caplog.text
    caplog.clear()
    train(demo_loss="ce", max_steps=1)
    assert "trains on it" not in caplog.text


def own_loss(inputs):
    return -inputs.log_probs * inputs.options.demo_gamma


def test_a_loss_of_the_user_trains():
    _, metrics = train(demo_loss=own_loss, demo_gamma=2.0, max_steps=20)
    assert metrics["mean_reward"] > 0.9


@pytest.mark.parametrize("ids", [[13] * 5, [13, 3], [13, 59]], ids=["no end", "an end", "a stop string"])
def test_text_and_token_ids_are_the_same_demonstration(tmp_path, ids):
    """The words of this tokenizer are the ids. Text without an end gets one end token, the first of the model's: 0."""
    source = ranked.save_policy(tmp_path / "policy")
    trainer = GRPO(source, ranked.share_of_even, **ranked.options(None, demo_loss="ce", max_steps=1, stop="59"))
    with pytest.raises(ValueError, match="has the end token 3 at position 0 of 2: the policy stops there"):
        trainer.prompts.read([{"prompt": "20 21", COLUMN: [3, 4]}])
    rows = [{"prompt": "20 21", COLUMN: " ".join(map(str, ids))} for _ in range(5)]
    (prompt, *_) = trainer.prompts.read(rows)
    assert prompt.demonstration.tolist() == (ids if ids[-1] in (3, 59) else [*ids, 0])


CHAT = (
    "{% for message in messages %}{{ '14 ' if message.role == 'user' else '15 ' }}{{ message.content }}"
    "{{ ' 1 16 ' }}{% endfor %}{% if add_generation_prompt %}15 {% endif %}"
)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ([{"role": "assistant", "content": "13 13"}], [13, 13, 1]),
        ({"role": "assistant", "content": "13 13"}, [13, 13, 1]),
        ("13 13", [13, 13, 0]),
        ([{"role": "user", "content": "13"}], "messages of the roles ['user']"),
        ([{"role": "assistant", "content": "1"}, {"role": "assistant", "content": "1"}], "expected one of the role"),
        ([{"role": "assistant"}], "has a message without 'content'"),
        ([{"content": "1"}], "messages of the roles [None]"),
        (["13"], "demonstration is list of str"),
        ("\ud800", "lone surrogate"),
    ],
    ids=str,
)
def test_messages_are_rendered_up_to_their_end_token(tmp_path, value, expected):
    source = ranked.save_policy(tmp_path / "policy")
    trainer = GRPO(source, ranked.share_of_even, **ranked.options(None, demo_loss="ce", max_steps=1))
    trainer.policy.tokenizer.chat_template = CHAT
    rows = [{"prompt": [{"role": "user", "content": "20 21"}], COLUMN: value}] * 5
    if isinstance(expected, list):
        assert trainer.prompts.read(rows)[0].demonstration.tolist() == expected
        return
    with pytest.raises((ValueError, TypeError)) as caught:
        trainer.prompts.read(rows)
    assert expected in str(caught.value)
