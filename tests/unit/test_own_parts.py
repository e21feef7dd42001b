"""Policy losses, advantage functions, step scores and engines that a user brings."""

from __future__ import annotations

import copy
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

import played
from own_parts import by_thirds
from rlox_grpo import GRPO, EvalSet, GRPOConfig
from rlox_grpo.advantages.door import compute_advantages, make_advantage_fn, make_constant_test
from rlox_grpo.advantages.moving import MovingBaselines
from rlox_grpo.advantages.process import step_advantages
from rlox_grpo.config.records import LossConfig
from rlox_grpo.errors import CheckpointError, ConfigError, EngineError, SampleError
from rlox_grpo.loss import LossInputs, PolicyTerm
from rlox_grpo.loss.inputs import make_loss_inputs, number_turns
from rlox_grpo.loss.policies import POLICY_LOSSES, find_policy_loss
from rlox_grpo.loss.policy_term import call_custom_loss
from rlox_grpo.rewards import RewardError, StepScores, score
from rlox_grpo.rewards.import_callable import import_callable
from rlox_grpo.rewards.steps import locate_steps
from rlox_grpo.rollout.engines.calls import fill_texts
from rlox_grpo.rollout.serialize import decode_scored_group, encode_scored_group
from rlox_grpo.run.recorded import RecordedRun, read_recorded_run
from rlox_grpo.types import Batch, Completion, Prompt, RolloutGroup, ScoredGroup, StepTotals
from toy import PROMPTS, ToyLM, options, share_of_target


def run(reward: Any = share_of_target, **changes: Any) -> tuple[torch.Tensor, GRPO]:
    """Weights after a short run on the toy task, and the trainer."""
    trainer = GRPO(ToyLM(), reward, **options(**{"max_steps": 3, **changes}))
    trainer.train(PROMPTS)
    return torch.cat([parameter.detach().flatten() for parameter in trainer.model.parameters()]), trainer


# --- policy losses ---


def own_clip(inputs: LossInputs) -> torch.Tensor:
    bounded = inputs.ratio.clamp(1 - inputs.options.clip_low, 1 + inputs.options.clip_high)
    return -torch.minimum(inputs.ratio * inputs.advantages, bounded * inputs.advantages)


@pytest.mark.parametrize(
    "changes",
    [{"updates_per_batch": 2}, {"mini_batches": 2}, {"async_steps": 1}, {"micro_batch_tokens": 64}, {"kl_coef": 0.1}],
)
def test_the_clip_written_by_a_user_trains_what_the_built_in_one_trains(changes: dict[str, Any]) -> None:
    assert torch.equal(run(**changes)[0], run(policy_loss=own_clip, **changes)[0])


def test_a_term_has_ratios_and_clip_marks_for_the_metrics() -> None:
    def loss(inputs: LossInputs) -> PolicyTerm:
        all_of_them = torch.ones_like(inputs.mask)
        return PolicyTerm(
            own_clip(inputs), inputs.ratio * 3, all_of_them, ~all_of_them, {"answer": inputs.ratio * 0 + 42}
        )

    def metrics_of(policy_loss: Any) -> dict[str, float]:
        trainer = GRPO(ToyLM(), share_of_target, policy_loss=policy_loss, **options(max_steps=1))
        return trainer.train(PROMPTS)

    metrics, plain = metrics_of(loss), metrics_of(own_clip)
    assert metrics["policy/ratio_mean"] == pytest.approx(3 * plain["policy/ratio_mean"])
    assert (metrics["policy/clip_fraction_low"], metrics["policy/clip_fraction_high"]) == (pytest.approx(1), 0)
    assert metrics["policy/answer"] == pytest.approx(42)


def test_measure_is_called_once_before_each_optimizer_step() -> None:
    class Measured:
        def __init__(self) -> None:
            self.calls, self.seen = 0, []

        def measure(self, step: Any) -> Any:
            self.calls += 1
            sizes = [float(inputs.mask.sum()) for inputs in step.micro_batches]
            assert sum(sizes) == step.micro_batches[0].totals.num_loss_tokens  # of the whole step
            return [self.calls * 100 + place for place in range(len(sizes))]

        def __call__(self, inputs: LossInputs) -> torch.Tensor:
            assert inputs.log_probs.requires_grad
            self.seen.append(inputs.measured)
            return own_clip(inputs)

    loss = Measured()
    run(policy_loss=loss, max_steps=1, updates_per_batch=2, micro_batch_tokens=64)
    micro_batches = len(loss.seen) // 2
    assert loss.calls == 2
    assert micro_batches > 1
    assert loss.seen == [step * 100 + place for step in (1, 2) for place in range(micro_batches)]


def test_a_list_of_another_length_is_an_error() -> None:
    class Measured:
        def measure(self, step: Any) -> Any:
            return [1, 2, 3, 4, 5, 6, 7]

        def __call__(self, inputs: LossInputs) -> torch.Tensor:
            return own_clip(inputs)

    with pytest.raises(ValueError, match="returned a list of 7 values for 1 micro-batches"):
        run(policy_loss=Measured())


SAMPLE = r"row \d+ is completion \d+ of prompts\[\d+\]"


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (lambda inputs: 3, "returned int: expected a tensor"),
        (lambda inputs: own_clip(inputs).mean(), r"loss has shape \(\), expected \(32, 6\); return the loss of each"),
        (lambda inputs: own_clip(inputs).detach(), f"the loss has no gradient.*{SAMPLE}"),
        (lambda inputs: own_clip(inputs) / 0, f"is (-?inf|nan) at token 0 of a sample, and it is not finite; {SAMPLE}"),
        (lambda inputs: PolicyTerm(own_clip(inputs), low=inputs.mask[0]), r"low has shape \(6,\), expected \(32, 6\)"),
        (
            lambda inputs: PolicyTerm(own_clip(inputs), metrics={"loss": inputs.ratio}),
            "the metric 'loss' is one of every",
        ),
        (
            lambda inputs: PolicyTerm(own_clip(inputs), metrics={"approx_kl": inputs.ratio}),
            "the metric 'approx_kl' is one of every loss",
        ),
        (lambda inputs: PolicyTerm(own_clip(inputs), metrics={"x": 3.0}), "x is float, expected a tensor"),
        (lambda inputs: PolicyTerm(own_clip(inputs), inputs.ratio / 0), "ratio is not finite at a token"),
        (lambda inputs: own_clip(inputs) + 1j, "the loss has dtype torch.complex64"),
        (lambda inputs: inputs.nothing, r"raised AttributeError: .*\(test_own_parts.py, line \d+\)"),
    ],
)
def test_a_wrong_loss_names_the_function_and_the_sample(loss: Any, message: str) -> None:
    with pytest.raises(SampleError, match=rf"(?s)step 1: policy loss <lambda>.*{message}"):
        run(policy_loss=loss)


def test_a_loss_on_tokens_that_are_not_trained_is_an_error() -> None:
    mask, rows = torch.tensor([[True, True], [True, False]]), torch.tensor([4, 9])
    log_probs = torch.zeros(2, 2, requires_grad=True)
    batch = Batch(
        *(mask, rows, rows, mask, mask, torch.ones(2), rows, rows),
        totals=StepTotals(num_loss_tokens=3, num_sequences=2),
    )
    inputs = make_loss_inputs(log_probs, batch, LossConfig())
    assert inputs.advantages.tolist() == [[1, 1], [1, 0]]
    with pytest.raises(
        SampleError, match="is 2 at token 1 of a sample, and the token is not trained: multiply"
    ) as error:
        call_custom_loss(lambda inputs: inputs.ratio + 1, inputs)
    assert error.value.rows == (9,)
    assert call_custom_loss(lambda inputs: (inputs.ratio + 1) * inputs.mask, inputs).loss.sum() == 6


def test_inputs_are_zero_outside_the_mask() -> None:
    seen: list[LossInputs] = []

    def loss(inputs: LossInputs) -> torch.Tensor:
        seen.append(inputs)
        return own_clip(inputs)

    run(policy_loss=loss, max_steps=1, updates_per_batch=2, train_end_token=False)
    for inputs in seen:
        for values in (inputs.log_probs, inputs.old_log_probs, inputs.log_ratio, inputs.advantages):
            assert values.shape == inputs.mask.shape
            assert not values[~inputs.mask].any()
        assert inputs.turns is None
        assert len(inputs.sequences) == len(inputs.mask)


def test_turns_are_runs_of_trained_tokens() -> None:
    mask = torch.tensor([[1, 1, 0, 1, 0, 0], [0, 1, 0, 1, 1, 0]], dtype=torch.bool)
    assert number_turns(mask).tolist() == [[0, 0, -1, 1, -1, -1], [-1, 0, -1, 1, 1, -1]]


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_every_built_in_loss_goes_through_the_door(name: str) -> None:
    """The callable, given as an object, trains what its name trains."""
    more = {"dro": {"dro_beta": 0.1}, "cispo_cap": {"clip_high": 5.0}}.get(name, {})
    if name == "gspo_turn":
        assert callable(find_policy_loss(name))
        return
    changes = {"updates_per_batch": 2, "max_steps": 1, **more}
    assert torch.equal(run(policy_loss=name, **changes)[0], run(policy_loss=find_policy_loss(name), **changes)[0])


@pytest.mark.parametrize("changes", [{}, {"async_steps": 1}, {"lora_rank": 2}, {"turn_credit": "turn"}])
def test_an_own_loss_trains_episodes_of_several_turns(changes: dict[str, Any], tmp_path: Any) -> None:
    seen: list[Any] = []

    def loss(inputs: LossInputs) -> torch.Tensor:
        if inputs.log_probs.requires_grad:
            seen.append(inputs.turns)
        return own_clip(inputs)

    own = played.train(tmp_path / "own", policy_loss=loss, updates_per_batch=2, **changes)
    built_in = played.train(tmp_path / "built_in", updates_per_batch=2, **changes)
    for (name, one), other in zip(own.model.named_parameters(), built_in.model.parameters(), strict=True):
        assert torch.equal(one, other), name
    assert max(int(turns.max()) for turns in seen if turns is not None) >= 1  # of two turns or more


# --- advantages ---


def own_advantages(groups: Any) -> list[np.ndarray]:
    return [(group.rewards - group.rewards.mean()) / (group.rewards.std(ddof=1) + 1e-4) for group in groups]


def of_tokens(groups: Any) -> list[list[np.ndarray]]:
    return [
        [np.full(len(c.token_ids), value) for c, value in zip(group.group.completions, values, strict=True)]
        for group, values in zip(groups, own_advantages(groups), strict=True)
    ]


@pytest.mark.parametrize("function", [own_advantages, of_tokens])
def test_an_advantage_function_of_a_user_trains_what_the_default_trains(function: Any) -> None:
    weights, trainer = run(advantage_fn=function, updates_per_batch=2)
    assert torch.allclose(weights, run(updates_per_batch=2)[0], atol=1e-5)
    assert trainer.last_rollout[1].shape == ((32,) if function is own_advantages else (32, 6))


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda groups: 3, "returned int for 4 groups"),
        (lambda groups: own_advantages(groups)[:2], "returned 2 values for 4 groups"),
        (
            lambda groups: [values[:3] for values in own_advantages(groups)],
            r"group of prompts\[\d\]: got .* shape \(3,\)",
        ),
        (lambda groups: [values * np.nan for values in own_advantages(groups)], "the advantage of completion 0 is nan"),
        (
            lambda groups: [[row[:2] for row in rows] for rows in of_tokens(groups)],
            "expected a number for each of 6 tok",
        ),
        (lambda groups: [[row / 0 for row in rows] for rows in of_tokens(groups)], "advantage of token 0 is"),
        (lambda groups: [own_advantages(groups)[0], *of_tokens(groups)[1:]], "for some groups and not for others"),
    ],
)
@pytest.mark.filterwarnings("ignore:.*encountered in divide")
def test_wrong_advantages_name_the_function_and_the_sample(function: Any, message: str) -> None:
    with pytest.raises(SampleError, match=rf"advantage function <lambda>.*{message}"):
        run(advantage_fn=function)


def test_an_advantage_function_is_called_once_in_each_step() -> None:
    calls: list[int] = []

    def count(groups: Any) -> list[np.ndarray]:
        calls.append(len(groups))
        return own_advantages(groups)

    run(advantage_fn=count)
    assert calls == [4, 4, 4]


def whiten(groups: Any) -> list[np.ndarray]:
    """Standardize over the batch: NaN if all rewards of ``groups`` are equal."""
    rewards = np.concatenate([group.rewards for group in groups])
    return [(group.rewards - rewards.mean()) / rewards.std() for group in groups]


def reward_by_prompt(completions: Any, prompts: Any) -> list[float]:
    """A reward that is equal in each group, and 0 in those of half of the prompts."""
    return [float(int(prompt[0]) % 2) for prompt in prompts]


@pytest.mark.filterwarnings("ignore:.*invalid value encountered in divide")
def test_a_group_of_equal_rewards_is_no_error_where_advantages_are_of_the_batch() -> None:
    trainer = GRPO(ToyLM(), reward_by_prompt, advantage_fn=whiten, **options(max_steps=1, prompts_per_step=8))
    metrics = trainer.train({"all": PROMPTS})
    assert metrics["rollout/frac_reward_zero_std"] == metrics["source/all/zero_variance_share"] == 0.0
    assert metrics["advantages/max"] == 1.0


@pytest.mark.parametrize(("zero_variance", "share"), [("drop", 0.5), ("refill", None)])
def test_the_share_of_constant_groups_is_that_of_the_advantages(zero_variance: str, share: float | None) -> None:
    """Half of the prompts have advantages of 0; a refill replaces their groups, and draws others like them."""

    def of_odd(groups: Any) -> list[np.ndarray]:
        return [own_advantages([group])[0] * (int(group.group.prompt.token_ids[0]) % 2) for group in groups]

    trainer = GRPO(
        ToyLM(),
        share_of_target,
        advantage_fn=of_odd,
        **options(max_steps=1, prompts_per_step=8, zero_variance=zero_variance),
    )
    metrics = trainer.train({"all": PROMPTS})
    if share is None:
        share = 1 - metrics["rollout/groups_chosen"] / metrics["rollout/groups"]
    assert metrics["rollout/frac_reward_zero_std"] == metrics["source/all/zero_variance_share"] == share


@pytest.mark.parametrize("policy_loss", ["gspo", "gmpo"])
def test_advantages_of_tokens_with_one_ratio_for_the_sequence_are_an_error(policy_loss: str) -> None:
    with pytest.raises(ConfigError, match=f"policy_loss='{policy_loss}' is one for the sequence"):
        run(advantage_fn=of_tokens, policy_loss=policy_loss)
    run(advantage_fn=own_advantages, policy_loss=policy_loss)


def test_advantages_of_tokens_that_were_not_sampled_are_an_error() -> None:
    sampled = np.array([True, False, True])
    completion = Completion(np.arange(3), np.zeros(3, np.float32), "stop", sampled=sampled, turns=(0, 2))
    scored = ScoredGroup(RolloutGroup(Prompt(np.array([1]), 5), (completion,)), np.ones(1, np.float32), {})
    with pytest.raises(
        SampleError, match=r"completion 0 of prompts\[5\]: the advantage of token 1 is 2, and the policy did"
    ):
        compute_advantages(lambda groups: [[np.array([1.0, 2.0, 3.0])]], [scored])
    (found,) = compute_advantages(lambda groups: [[np.array([1.0, 0.0, 3.0])]], [scored])
    assert found.tolist() == [1, 0, 3]


def test_options_that_an_advantage_function_replaces_are_errors() -> None:
    with pytest.raises(ConfigError, match="baseline='leave_one_out' is ignored: advantage_fn='test_own_parts:own_adv"):
        GRPOConfig.create(advantage_fn=own_advantages, baseline="leave_one_out")
    assert GRPOConfig.create(advantage_fn=own_advantages, preset="dr_grpo").reward_scaling == "none"


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (
            lambda groups: [np.stack([np.arange(6.0) + r for r in g.rewards]) for g in groups],
            "return a list of 8 arrays",
        ),
        (lambda groups: [[*rows, rows[0]] for rows in of_tokens(groups)], "got 9 arrays for 8 completions"),
        (lambda groups: [np.subtract(g.rewards, 1, out=g.rewards) for g in groups], "raised ValueError.*read-only"),
        (lambda groups: [g.group.completions[0].token_ids.fill(1) for g in groups], "raised ValueError.*read-only"),
        (lambda groups: [g.group.completions[0].log_probs.fill(0) for g in groups], "raised ValueError.*read-only"),
        (
            lambda groups: [[1.0, np.zeros(2), *g.rewards[2:]] for g in groups],
            r"prompts\[\d\]: .*shapes \(\), \(2,\), expected",
        ),
        (lambda groups: groups[0].nothing, r"raised AttributeError: .*test_own_parts.py, line \d+"),
    ],
)
def test_mistakes_that_an_attack_found(function: Any, message: str) -> None:
    with pytest.raises(SampleError, match=rf"advantage function <lambda>.*{message}"):
        run(advantage_fn=function)


def test_numbers_and_tensors_are_advantages_of_completions() -> None:
    def of_numbers(groups: Any) -> Any:
        return [[torch.tensor(value) for value in values] for values in own_advantages(groups)]

    assert torch.equal(run(advantage_fn=of_numbers)[0], run(advantage_fn=own_advantages)[0])


@pytest.mark.parametrize("by_number", [False, True])
def test_advantages_may_be_tensors_in_bfloat16(by_number: bool) -> None:
    def in_bfloat16(groups: Any) -> Any:
        ranks = [torch.arange(float(len(g.rewards)), dtype=torch.bfloat16) for g in groups]
        return [[*values] for values in ranks] if by_number else ranks

    completions = tuple(Completion(np.arange(2), np.zeros(2, np.float32), "stop") for _ in range(3))
    scored = ScoredGroup(RolloutGroup(Prompt(np.arange(2), 0), completions), np.zeros(3, np.float32), {})
    assert compute_advantages(in_bfloat16, [scored]).tolist() == [0.0, 1.0, 2.0]


# --- scores of steps ---


def test_step_advantages_by_hand() -> None:
    # mean of 1, 0, 2 is 1: steps of 0, -1 and 1. Ends at 1 and 3: token 0 has 0 - 1, tokens 1 and 2 have -1.
    first, second = step_advantages([[1, 3], [2]], [[1, 0], [2]], [3, 2], scaling="none")
    assert (first.tolist(), second.tolist()) == ([-1, -1, -1], [1, 1])
    # By the sample deviation, 1, plus 1: half of it. After its last step a token has nothing.
    first, second = step_advantages([[1, 3], [2]], [[1, 0], [2]], [4, 3], ddof=1, std_epsilon=1.0)
    assert (first.tolist(), second.tolist()) == ([-0.5, -0.5, -0.5, 0], [0.5, 0.5, 0])
    # Sums over later steps: scores 3 0 and 0 of mean 1: 2 - 1, then -1.
    first, _ = step_advantages([[1, 2], [1]], [[3, 0], [0]], [2, 1], scaling="none")
    assert first.tolist() == [1, -1]
    # Equal scores: exactly 0.
    assert not any(row.any() for row in step_advantages([[1], [1]], [[0.3], [0.3]], [2, 2]))


def test_scores_of_steps_are_rewards_and_advantages_of_tokens() -> None:
    _, trainer = run(by_thirds, max_steps=1)
    groups, advantages = trainer.last_rollout
    assert advantages.shape == (32, 6)
    row = 0
    for scored in groups:
        steps = scored.step_scores["by_thirds"]
        pooled = np.array([value for own in steps for value in own.scores])
        for own, reward in zip(steps, scored.rewards, strict=True):
            assert reward == pytest.approx(np.mean(own.scores))
            normalised = (np.array(own.scores) - pooled.mean()) / (pooled.std(ddof=1) + 1e-4)
            by_token = np.repeat(np.cumsum(normalised[::-1])[::-1], 2)
            np.testing.assert_allclose(advantages[row], by_token if pooled.any() else 0, rtol=1e-5, atol=1e-6)
            row += 1


def test_scores_of_steps_beside_another_function() -> None:
    _, trainer = run([by_thirds, share_of_target], max_steps=1)
    _, alone = run(by_thirds, max_steps=1)
    _, outcome = run(share_of_target, max_steps=1)
    both = alone.last_rollout[1] + outcome.last_rollout[1][:, None]
    np.testing.assert_allclose(trainer.last_rollout[1], both, rtol=1e-4, atol=1e-5)


def test_a_constant_reward_beside_steps_adds_exactly_nothing() -> None:
    def constant(completions: Any, prompts: Any) -> list[float]:
        return [1.0] * len(completions)

    def ten(completions: Any, prompts: Any) -> list[StepScores]:
        return [StepScores([1, 6], [float(row), 10.0]) for row in range(len(completions))]

    alone = run(by_thirds, max_steps=1, std_epsilon=1e-8)[1].last_rollout[1]
    np.testing.assert_array_equal(run([by_thirds, constant], max_steps=1, std_epsilon=1e-8)[1].last_rollout[1], alone)
    # A weight of 0 only measures.
    measured = run([by_thirds, ten], max_steps=1, std_epsilon=1e-8, reward_weights=[1.0, 0.0])[1]
    np.testing.assert_array_equal(measured.last_rollout[1], alone)


def test_steps_of_text_end_at_the_token_that_has_their_last_character() -> None:
    # One token for each letter and digit, but "34" is one token.
    pieces = ["a", "b", " 12", "34", "x"]
    completion = Completion(np.arange(5), np.zeros(5, np.float32), "stop", text="ab 1234x")
    group = RolloutGroup(Prompt(np.array([1]), 0), (completion,))

    def judge(completions: Any, prompts: Any) -> list[StepScores]:
        return [StepScores([2, 6, 7, 8], [1, 2, 3, 4])]

    (scored,) = score([group], judge)
    found = locate_steps(scored, lambda ids: "".join(pieces[token] for token in ids)).step_scores["judge"][0]
    assert found == StepScores([2, 4, 4, 5], [1, 2, 3, 4])
    again = decode_scored_group(encode_scored_group(scored), group.prompt)
    assert again.step_scores == scored.step_scores


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (lambda n: [StepScores([9], [1.0])] * n, r"ends is \[9\] for a completion of 6 tokens of prompts\[\d\]"),
        (lambda n: [StepScores([1], [1.0])] + [1.0] * (n - 1), "returned 1.0 for sample 1 and StepScores for others"),
    ],
)
def test_wrong_steps_name_the_sample(values: Any, message: str) -> None:
    with pytest.raises(RewardError, match=message):
        run(lambda completions, prompts: values(len(completions)))


@pytest.mark.parametrize(
    ("ends", "scores"), [([1, 2], [1]), ([], []), ([2, 1], [1, 1]), ([1], [float("nan")]), ([1.5], [1])]
)
def test_scores_that_are_no_steps(ends: Any, scores: Any) -> None:
    with pytest.raises(ValueError, match="StepScores"):
        StepScores(ends, scores)


def test_a_step_that_ends_outside_the_completion_fails_its_sample_alone(caplog: Any) -> None:
    def judge(completions: Any, prompts: Any) -> Any:
        return [StepScores([7 if row == 3 else 6], [float(row)]) for row in range(len(completions))]

    trainer = run(judge, max_steps=1, on_reward_error="none")[1]
    rewards = np.concatenate([scored.rewards for scored in trainer.last_rollout[0]])
    assert np.flatnonzero(np.isnan(rewards)).tolist() == [3]
    assert "reward function judge: StepScores.ends is [7] for a completion of 6 tokens" in caplog.text
    assert "1 of its 32 samples fail" in caplog.text
    with pytest.raises(RewardError, match=r"function judge: StepScores.ends is \[7\].*the sample is completion 3 of"):
        run(judge, max_steps=1)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"reward_scaling": "batch"}, "reward_scaling='batch' with a reward function that returns StepScores, "),
        ({"baseline": "leave_one_out"}, "baseline='leave_one_out' with a reward function that returns StepScores, "),
        ({"kl_in": "reward", "kl_coef": 0.1}, "kl_in='reward' with a reward function that returns StepScores, "),
        ({"policy_loss": "gspo"}, "policy_loss='gspo' with a reward function that returns StepScores, "),
        ({"policy_loss": "gmpo"}, "policy_loss='gmpo' with a reward function that returns StepScores, "),
    ],
)
def test_options_that_scores_of_steps_do_not_have(changes: dict[str, Any], message: str) -> None:
    def silent(completions: Any, prompts: Any) -> Any:
        return by_thirds(completions, prompts)

    with pytest.raises(ConfigError, match=f"^{message}by_thirds: set"):
        GRPO(ToyLM(), by_thirds, **options(**changes))  # its annotation says what it returns
    trainer = GRPO(ToyLM(), silent, **options(**changes))
    before = [parameter.clone() for parameter in trainer.model.parameters()]
    with pytest.raises(ConfigError, match=f"{message}silent: set.*no weights have changed in this step, 1"):
        trainer.train(PROMPTS)
    assert all(torch.equal(*pair) for pair in zip(before, trainer.model.parameters(), strict=True))
    assert trainer.step == 0


def test_a_penalty_of_the_total_is_none_of_the_steps() -> None:
    """It would be subtracted from the rewards, and the advantages are those of the scores."""
    with pytest.raises(ConfigError, match=r"^parse_error_penalty=0.5 with a reward function that returns StepScores, "):
        GRPO(ToyLM(), by_thirds, tools=[len], **options(parse_error_penalty=0.5, max_turns=2))


def test_groups_are_constant_if_all_advantages_of_their_steps_are_0() -> None:
    """With the weights of the functions: a weight of 0 only measures, and equal scores of other weights differ."""
    config = GRPOConfig.create(zero_variance="refill").split().advantages
    completions = (Completion(np.arange(6), np.zeros(6, np.float32), "stop"),) * 2

    def is_constant(weights: Sequence[float], rewards: Sequence[float], **steps: Any) -> bool:
        components = {name: np.array([each.mean for each in own], np.float32) for name, own in steps.items()}
        components["number"] = np.zeros(2, np.float32)
        group = RolloutGroup(Prompt(np.arange(3), 0), completions)
        scored = ScoredGroup(group, np.array(rewards, np.float32), components, step_scores=steps)
        advantages = compute_advantages(make_advantage_fn(config, weights, MovingBaselines(0.9, None)), [scored])
        found = make_constant_test(config, weights)(scored)
        assert found == (not any(values.any() for values in advantages))
        return found

    ones, late, apart = (
        [StepScores([2, 6], [1, 1])] * 2,
        [StepScores([6], [1])] * 2,
        [StepScores([6], [own]) for own in (1, 0)],
    )
    assert is_constant([1.0, 1.0, 1.0], [2, 2], first=ones, second=late)
    assert not is_constant([1.0, 0.5, 1.0], [1.5, 1.5], first=ones, second=late)
    assert is_constant([1.0, 0.0, 1.0], [1, 1], first=ones, second=apart)
    assert is_constant([1.0, 1.0, 1.0], [2, np.nan], first=ones, second=apart)


@pytest.mark.parametrize("per", ["sample", "batch"])
def test_steps_of_a_function_in_workers_are_those_of_the_function(per: Any) -> None:
    from rlox_grpo.rewards import InWorkers

    inside = InWorkers(by_thirds, 30.0, workers=1, per=per)
    one, other = run(by_thirds, max_steps=1)[1], run(inside, max_steps=1)[1]
    assert np.array_equal(one.last_rollout[1], other.last_rollout[1])
    assert one.last_rollout[0][0].step_scores == other.last_rollout[0][0].step_scores


def test_wrong_steps_of_a_function_in_workers_name_the_sample() -> None:
    def judge(completions: Any, prompts: Any) -> Any:
        if float(completions[0][0]) == 0:
            return [1.0]
        return [StepScores([6], [1.0])]

    groups = [
        RolloutGroup(
            Prompt(np.array([1]), 4),
            tuple(Completion(np.arange(start, start + 6), np.zeros(6, np.float32), "stop") for start in (1, 0)),
        )
    ]
    from rlox_grpo.rewards.workers import closing_workers, in_workers

    for on_error in ("stop", "none"):
        (inside,) = in_workers([judge], 30.0, 1, on_error)
        with closing_workers([inside]):
            if on_error == "stop":
                with pytest.raises(
                    RewardError, match=r"returned 1 for sample 1 and StepScores.*completion 1 of prompts\[4"
                ):
                    score(groups, inside, on_error="stop")
            else:
                (scored,) = score(groups, inside, on_error="none")
                assert scored.rewards[0] == 1
                assert np.isnan(scored.rewards[1])
                assert scored.step_scores["judge"] == (StepScores([6], [1.0]), None)


# --- engines ---


class OwnEngine:
    """Samples token by token from the trainer's module."""

    exact, takes_weights, policy_version, max_length = True, False, 0, None

    def __init__(self, model: Any) -> None:
        self.model = model

    def generate(self, prompts, group_size, sampling, seed, *, first_prompt=0):
        draws = torch.Generator().manual_seed(seed % 2**63)
        return [
            RolloutGroup(
                prompt,
                tuple(self._complete(prompt, sampling, draws) for _ in range(group_size)),
                self.policy_version,
            )
            for prompt in prompts
        ]

    def _complete(self, prompt, sampling, draws):
        ids, log_probs = prompt.token_ids.tolist(), []
        for _ in range(sampling.max_new_tokens):
            with torch.no_grad():
                scores = (self.model(torch.tensor([ids]))[0, -1] / (sampling.temperature or 1)).log_softmax(-1)
            ids.append(int(torch.multinomial(scores.exp(), 1, generator=draws)))
            log_probs.append(float(scores[ids[-1]]))
        sampled = np.array(ids[len(prompt.token_ids) :])
        return Completion(sampled, np.array(log_probs, np.float32), "length")

    def load_weights(self, weights, version):
        self.policy_version = version

    def close(self):
        pass


def test_an_engine_of_a_user_learns() -> None:
    model = ToyLM()
    trainer = GRPO(model, share_of_target, engine=OwnEngine(model), **options())
    assert trainer.train(PROMPTS)["mean_reward"] > 0.9
    written = GRPOConfig.create(engine=OwnEngine(model)).model_dump()["engine"]
    assert written == "an object of the program: test_own_parts.OwnEngine"


class Reversed(OwnEngine):
    def generate(self, prompts, *given, **more):
        return super().generate(prompts, *given, **more)[::-1]


class Fewer(OwnEngine):
    def generate(self, prompts, group_size, *given, **more):
        return super().generate(prompts, group_size - 1, *given, **more)


class Strange(OwnEngine):
    def generate(self, prompts, *given, **more):
        return [0 for _ in prompts]


class Nothing(OwnEngine):
    def generate(self, *given, **more):
        return None


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (
            Reversed,
            r"engine Reversed: group 0 is of prompts\[\d\], expected prompts\[\d\]: return the groups in the order",
        ),
        (Fewer, r"engine Fewer returned 7 completions for prompts\[\d\], expected 8"),
        (Nothing, "engine Nothing returned NoneType for 4 prompts"),
        (Strange, "engine Strange: group 0 is int, expected a RolloutGroup"),
    ],
)
def test_what_an_engine_returns_is_checked(kind: Any, message: str) -> None:
    model = ToyLM()
    with pytest.raises(EngineError, match=message):
        GRPO(model, share_of_target, engine=kind(model), **options()).train(PROMPTS)


class Wrong(OwnEngine):
    """Returns one wrong value, in completion 2 of the second prompt."""

    def __init__(self, model: Any, change: Any) -> None:
        super().__init__(model)
        self.change = change

    def generate(self, *given, **more):
        first, second, *rest = super().generate(*given, **more)
        completions = list(second.completions)
        completions[2] = self.change(completions[2])
        return [first, replace(second, completions=tuple(completions)), *rest]


def put(values: np.ndarray, value: Any) -> np.ndarray:
    """The values with another one at token 3."""
    changed = values.copy()
    changed[3] = value
    return changed


@pytest.mark.parametrize("changes", [{}, {"async_steps": 1}])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda one: replace(one, token_ids=put(one.token_ids, 99)), ": token 3 is 99, expected an id from 0 to 11"),
        (lambda one: replace(one, token_ids=put(one.token_ids, -1)), ": token 3 is -1, expected an id from 0 to 11"),
        (
            lambda one: replace(one, token_ids=one.token_ids * 1.0),
            r": token_ids is an array of dtype float64 and shape \(6,\), expected an array of dtype int64",
        ),
        (lambda one: replace(one, token_ids=one.token_ids.tolist()), ": token_ids is list, expected an array"),
        (
            lambda one: replace(one, log_probs=put(one.log_probs, np.nan)),
            ": the log-prob of token 3 is nan, expected a finite number of at most 0",
        ),
        (lambda one: replace(one, log_probs=put(one.log_probs, -np.inf)), ": the log-prob of token 3 is -inf"),
        (lambda one: replace(one, log_probs=put(one.log_probs, 0.5)), ": the log-prob of token 3 is 0.5"),
        (
            lambda one: replace(one, log_probs=one.log_probs[:4]),
            r": log_probs is an array of dtype float32 and shape \(4,\), expected an array of dtype float32 of shape "
            r"\(6,\)",
        ),
        (
            lambda one: replace(one, log_probs=one.log_probs.astype(np.float64)),
            r": log_probs is an array of dtype float64 and shape \(6,\), expected an array of dtype float32",
        ),
        (
            lambda one: replace(one, token_ids=np.tile(one.token_ids, 2), log_probs=np.tile(one.log_probs, 2)),
            " has 12 tokens, above max_new_tokens=6",
        ),
        (lambda one: replace(one, finish_reason="eos"), ": finish_reason is 'eos', expected 'stop' or 'length'"),
        (
            lambda one: replace(one, sampled=np.ones(5, bool)),
            r": sampled is an array of dtype bool and shape \(5,\), expected an array of dtype bool of shape \(6,\)",
        ),
        (lambda one: one.token_ids, " is ndarray, expected a Completion"),
    ],
)
def test_wrong_completions_of_an_engine_name_the_completion(change: Any, message: str, changes: dict[str, Any]) -> None:
    model = ToyLM()
    with pytest.raises(EngineError, match=rf"^engine Wrong, completion 2 of prompts\[\d\]{message}"):
        GRPO(model, share_of_target, engine=Wrong(model, change), **options(**changes)).train(PROMPTS)


def test_the_rounding_of_a_log_prob_is_no_error() -> None:
    model = ToyLM()
    engine = Wrong(model, lambda one: replace(one, log_probs=put(one.log_probs, 1e-6)))
    GRPO(model, share_of_target, engine=engine, **options(max_steps=1)).train(PROMPTS)


class SamplesPadding(OwnEngine):
    """Samples an id of the embedding that has no token."""

    def generate(self, prompts, group_size, sampling, seed, *, first_prompt=0):
        padding = Completion(np.array([259]), np.array([-1.0], np.float32), "length")
        return [RolloutGroup(prompt, (padding,) * group_size, self.policy_version) for prompt in prompts]


def test_ids_without_a_token_are_refused_in_held_out_sets_too(make_tiny_model: Any, byte_tokenizer: Any) -> None:
    model = make_tiny_model("qwen2", vocab_size=264, eos_token_id=1)  # the tokenizer has 259 ids
    tokenizer = copy.deepcopy(byte_tokenizer)
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    settings = {"tokenizer": tokenizer, "engine": SamplesPadding(model), **options(max_new_tokens=1)}
    settings["environment"] = lambda row, chat: 1.0
    trainer = GRPO(model, **settings)
    with pytest.raises(EngineError, match="token 0 is 259, expected an id from 0 to 258"):
        trainer.evaluate(EvalSet(["a"], environment=False, rewards=[lambda completions: [0.0] * len(completions)]))


class Forgetful(OwnEngine):
    def load_weights(self, weights, version):
        pass


class Unversioned(OwnEngine):
    def generate(self, *given, **more):
        return [replace(group, policy_version=0) for group in super().generate(*given, **more)]


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (Forgetful, r"engine Forgetful has policy_version 0 after load_weights\(…, version=1\): set"),
        (Unversioned, r"engine Unversioned: the group of prompts\[\d\] has policy_version 0, and the engine has 1"),
    ],
)
def test_an_engine_has_the_version_of_its_weights(kind: Any, message: str) -> None:
    model = ToyLM()
    with pytest.raises(EngineError, match=message):
        GRPO(model, share_of_target, engine=kind(model), **options()).train(PROMPTS)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda turn: replace(turn, token_ids=put(turn.token_ids, 10_000)), "token 3 is 10000, expected an id from 0"),
        (lambda turn: replace(turn, log_probs=put(turn.log_probs, np.inf)), "the log-prob of token 3 is inf"),
        (lambda turn: replace(turn, log_probs=turn.log_probs[1:]), "log_probs is an array of dtype float32"),
    ],
)
def test_wrong_turns_of_an_engine_name_the_turn(change: Any, message: str, tmp_path: Any) -> None:
    from contextlib import contextmanager

    from rlox_grpo.rollout.engines import hf

    class Session:
        def __init__(self, inner: Any) -> None:
            self._inner = inner

        def __getattr__(self, name: str) -> Any:
            return getattr(self._inner, name)

        def __len__(self) -> int:
            return len(self._inner)

        def step(self) -> Any:
            return [
                (request, change(turn) if len(turn.token_ids) > 3 else turn) for request, turn in self._inner.step()
            ]

    class Turns:
        """The built-in engine, whose sessions return wrong replies."""

        def __init__(self, inner: Any) -> None:
            self._inner = inner

        def __getattr__(self, name: str) -> Any:
            return getattr(self._inner, name)

        @contextmanager
        def open_turns(self, *given: Any) -> Any:
            with self._inner.open_turns(*given) as session:
                yield Session(session)

    with pytest.raises(
        EngineError, match=rf"engine Turns, turn \d of completion \d of prompt \d of the step: {message}"
    ):
        played.train(tmp_path, engine=lambda *given: Turns(hf.make_engine(*given)))


def test_a_function_that_makes_an_engine_is_an_engine() -> None:
    def make(config: Any, policy: Any, ranks: Any) -> OwnEngine:
        return OwnEngine(policy.model)

    assert isinstance(run(engine=make)[1].engine, OwnEngine)


def test_completions_without_text_are_decoded() -> None:
    class Tokenizer:
        def batch_decode(self, rows: Any, **_: Any) -> list[str]:
            return [" ".join(map(str, row)) for row in rows]

    group = RolloutGroup(Prompt(np.array([1]), 0), (Completion(np.array([4, 5]), np.zeros(2, np.float32), "stop"),))
    assert fill_texts([group], None) == [group]
    assert fill_texts([group], Tokenizer())[0].completions[0].text == "4 5"


def test_what_an_engine_lacks_is_named() -> None:
    with pytest.raises(ConfigError, match="has no exact, takes_weights, .*: expected the members of"):
        GRPO(ToyLM(), share_of_target, engine=object(), **options())


# --- names ---


@pytest.mark.parametrize("name", ["policy_loss", "advantage_fn", "engine"])
def test_names_that_cannot_be_imported_are_errors_before_training(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"{name} \(no_such_module:f\): No module named"):
        GRPO(ToyLM(), share_of_target, **options(), **{name: "no_such_module:f"})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"policy_loss": "clipp"}, "policy_loss: expected a policy loss or its module:name, got 'clipp': did you mean"),
        ({"policy_loss": 3}, "policy_loss: 3: expected a policy loss"),
        ({"policy_loss": dict}, "policy_loss: the class dict: expected a policy loss; give an instance"),
        ({"advantage_fn": "group"}, "advantage_fn: expected an advantage function or its module:name, got 'group'"),
        ({"engine": "sglang"}, "engine: expected an engine or its module:name, got 'sglang'"),
        ({"engine": None}, "engine: None: expected an engine"),
    ],
)
def test_values_that_are_none_of_them(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        GRPOConfig.create(**changes)


def test_a_name_of_a_module_is_the_function(monkeypatch: pytest.MonkeyPatch) -> None:
    by_name = {"policy_loss": "test_own_parts:own_clip", "advantage_fn": "test_own_parts:own_advantages"}
    monkeypatch.setitem(sys.modules, "test_own_parts", sys.modules[__name__])
    named, objects = run(**by_name), run(policy_loss=own_clip, advantage_fn=own_advantages)
    assert torch.equal(named[0], objects[0])
    assert LossConfig.create(policy_loss=own_clip).model_dump()["policy_loss"] == f"{__name__}:own_clip"


@pytest.mark.parametrize(
    ("value", "name"),
    [
        (lambda inputs: own_clip(inputs), "test_own_parts.<lambda>"),
        (partial(own_clip), "test_own_parts.own_clip"),
        (find_policy_loss, None),
    ],
)
def test_what_no_file_can_name_is_no_name(value: Any, name: str | None) -> None:
    written = LossConfig.create(policy_loss=value).model_dump()["policy_loss"]
    if name is None:
        assert written == "rlox_grpo.loss.policies:find_policy_loss"
        return
    assert written == f"an object of the program: {name}"
    with pytest.raises(
        ConfigError, match="policy_loss: the run was started with an object of the program: .*into a mod"
    ):
        GRPOConfig.create(policy_loss=written)


def test_an_evaluation_says_that_the_engine_was_an_object(tmp_path: Any) -> None:
    def make(config: Any, policy: Any, ranks: Any) -> OwnEngine:
        return OwnEngine(policy.model)

    run(engine=make, max_steps=1, output_dir=str(tmp_path))
    checkpoint = tmp_path / "checkpoints" / "step_000001"
    recorded = read_recorded_run(checkpoint)
    assert recorded is not None
    assert "engine" not in recorded.options
    (name,) = recorded.sources["unrecorded"]["engine"]
    assert name.startswith("an object of the program: test_own_parts.test_an_evaluation")
    given = RecordedRun({"engine": "hf"}, {"rewards": [{"name": "exact"}]})
    assert "unrecorded" not in recorded.replace_by(given).sources


def test_an_engine_may_import_its_neighbours_when_it_is_made(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "test_own_parts", sys.modules[__name__])
    (tmp_path / "neighbour_of_an_engine.py").write_text("from test_own_parts import OwnEngine as Engine\n")
    (tmp_path / "engine_of_a_test.py").write_text(
        "def make(config, policy, ranks):\n    from neighbour_of_an_engine import Engine\n\n"
        "    return Engine(policy.model)\n"
    )
    before = list(sys.path)
    import_callable("engine", "engine_of_a_test:make", [tmp_path])  # as the command line does
    try:
        assert isinstance(run(engine="engine_of_a_test:make", max_steps=1)[1].engine, OwnEngine)
    finally:
        del sys.modules["engine_of_a_test"]
        sys.modules.pop("neighbour_of_an_engine", None)
    assert sys.path == before


def test_options_of_a_loss_are_read_with_an_own_loss() -> None:
    config = GRPOConfig.create(policy_loss=own_clip, clip_low=0.1, dro_beta=0.3)
    assert (config.split().loss.clip_low, config.split().loss.dro_beta) == (0.1, 0.3)
    with pytest.raises(ConfigError, match="dro_beta=0.3 is read only with policy_loss='dro'; here policy_loss='clip'"):
        GRPOConfig.create(dro_beta=0.3)


# --- resume ---


def _edited(inputs: LossInputs) -> torch.Tensor:
    return 2 * own_clip(inputs)


def _edited_advantages(groups: Any) -> list[np.ndarray]:
    return [group.rewards - 0.5 for group in groups]


@pytest.mark.parametrize(
    ("name", "function", "other"),
    [("policy_loss", own_clip, _edited), ("advantage_fn", own_advantages, _edited_advantages)],
)
def test_a_resumed_run_compares_the_source(name: str, function: Any, other: Any, tmp_path: Any) -> None:
    def continue_run(own: Any, steps: int, **changes: Any) -> torch.Tensor:
        return run(max_steps=steps, output_dir=str(tmp_path), checkpoint_steps=2, **{name: own}, **changes)[0]

    continue_run(function, 2)
    other.__qualname__ = function.__qualname__  # the file was edited
    with pytest.raises(CheckpointError, match=rf"{name} was edited.*add resume_changes=\['{name}'\]"):
        continue_run(other, 4)
    continue_run(other, 3, resume_changes=(name,))
    # Its checkpoint is of the edited function now, and goes on as it would have.
    with pytest.raises(CheckpointError, match=f"{name} was edited"):
        continue_run(function, 4)


class Scaled:
    """A loss with a field that is no dataclass field, and a counter."""

    def __init__(self, scale: float) -> None:
        self.scale, self.calls, self._started = scale, 0, object()

    def __call__(self, inputs: LossInputs) -> torch.Tensor:
        self.calls += 1
        return self.scale * own_clip(inputs)


def make_scaled(scale: float) -> Any:
    calls = [0]

    def scaled(inputs: LossInputs) -> torch.Tensor:
        calls[0] += 1
        return scale * own_clip(inputs)

    return scaled


@pytest.mark.parametrize("make", [Scaled, make_scaled])
def test_a_resumed_run_compares_plain_values(make: Any, tmp_path: Any) -> None:
    def continue_run(loss: Any, steps: int, **changes: Any) -> Any:
        return run(max_steps=steps, output_dir=str(tmp_path), checkpoint_steps=1, policy_loss=loss, **changes)

    first = make(1.0)
    continue_run(first, 1)
    continue_run(first, 2)  # the same object, whose counter has changed
    continue_run(make(1.0), 3)  # as in another process
    with pytest.raises(CheckpointError, match=r"policy_loss was edited.*resume_changes=\['policy_loss'\]"):
        continue_run(make(2.0), 4)
    continue_run(make(2.0), 4, resume_changes=("policy_loss",))


def test_a_run_with_own_parts_resumes_exactly(tmp_path: Any) -> None:
    own = {"policy_loss": own_clip, "advantage_fn": of_tokens, "updates_per_batch": 2}
    whole, _ = run(by_thirds, max_steps=6, **own)
    stopped = {"output_dir": str(tmp_path), "checkpoint_steps": 3, **own}
    run(by_thirds, max_steps=3, **stopped)
    assert torch.equal(run(by_thirds, max_steps=6, **stopped)[0], whole)


def test_the_report_shows_the_first_advantages_of_long_completions(tmp_path: Any) -> None:
    from rlox_grpo.run.report import write_report

    run(by_thirds, max_steps=2, output_dir=str(tmp_path), log_completions=4, log_to=("jsonl",))
    page = write_report(tmp_path).read_text(encoding="utf-8")
    assert "advantages by turn or token" in page
