"""Turns of completions: what is sampled, which turn a token belongs to, and what is refused."""

import html
import json
import re
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch

from rlox_grpo import GRPO
from rlox_grpo.advantages.door import make_advantage_fn
from rlox_grpo.batch import build_batch
from rlox_grpo.config.schema import GRPOConfig
from rlox_grpo.errors import ConfigError, NonFiniteError
from rlox_grpo.groups import (
    check_turns,
    count_sampled,
    count_turns,
    has_zero_variance,
    mark_sampled,
    number_turns,
    select_sampled,
)
from rlox_grpo.rewards import CosineLength, ExactAnswer, Overlong, ReasoningLength, Repetition, score
from rlox_grpo.rollout.generate import refill_groups
from rlox_grpo.run.evaluation import evaluate
from rlox_grpo.run.files import write_completions
from rlox_grpo.run.metrics import step_metrics
from rlox_grpo.run.report.pictures import PicturesShown
from rlox_grpo.run.report.samples import training_samples
from rlox_grpo.trainer.step import take_optimizer_step
from rlox_grpo.types import Completion, Prompt, RolloutGroup, Sampling, ScoredGroup
from toy import ToyLM

BY_TURN = partial(has_zero_variance, by_turn=True)
SAMPLED = [1, 1, 1, 0, 0, 1, 1]


def episode(sampled=SAMPLED, turns=(0, 5), log_probs=None, length=7):
    flags = np.array(sampled, bool)
    own = -np.where(flags, np.arange(1, len(flags) + 1), 0).astype(np.float32) if log_probs is None else log_probs
    return Completion(np.arange(5, 5 + length), own, "stop", None, flags, turns)


def one_turn(length=3):
    return Completion(np.arange(length), -np.ones(length, np.float32), "stop")


def test_the_example_of_the_module():
    completion = episode()
    assert count_sampled(completion) == 5
    assert select_sampled(completion).tolist() == [5, 6, 7, 10, 11]
    assert count_turns(completion) == 2
    assert number_turns(completion).tolist() == [0, 0, 0, 0, 0, 1, 1]
    assert mark_sampled([one_turn(), completion]).tolist() == [True] * 3 + [bool(flag) for flag in SAMPLED]


def test_one_turn_is_sampled_throughout():
    completion = one_turn()
    assert (count_sampled(completion), count_turns(completion)) == (3, 1)
    assert select_sampled(completion) is completion.token_ids
    assert number_turns(completion).tolist() == [0, 0, 0]
    assert mark_sampled([completion]) is None


@pytest.mark.parametrize(
    ("wrong", "error", "message"),
    [
        (
            episode(sampled=[1, 0], log_probs=np.zeros(7, np.float32)),
            ValueError,
            r"completions\[1\].sampled has 2 values, but its token_ids has 7",
        ),
        (episode(turns=(0, 5, 5)), ValueError, r"turns is \(0, 5, 5\): expected ascending offsets below 7"),
        (episode(turns=(0, 7)), ValueError, r"turns is \(0, 7\): expected ascending offsets below 7"),
        (episode(turns=(-1, 5)), ValueError, "expected ascending offsets"),
        (episode(turns=(0, 3)), ValueError, r"turns\[1\] is 3, a token that was not sampled"),
        (episode(turns=(1, 5)), ValueError, r"sampled marks a token before turns\[0\], 1"),
        (episode(log_probs=np.full(7, -1, np.float32)), ValueError, r"log_probs\[3\] is -1, but the token was not"),
        (Completion(np.arange(2), np.zeros(2, np.float32), "stop", None, np.ones(2)), TypeError, "expected a bool"),
        (Completion(np.arange(2), np.zeros(2, np.float32), "stop", None, [True] * 2), TypeError, "expected a bool"),
        (Completion(np.arange(2), np.zeros(2, np.float32), "stop", None, None, (0, 2)), ValueError, "ascending"),
    ],
)
def test_what_does_not_fit_is_refused(wrong, error, message):
    with pytest.raises(error, match=message):
        check_turns([one_turn(), wrong])
    group = RolloutGroup(Prompt(np.array([1]), 0), (one_turn(), wrong))
    with pytest.raises(error, match=message):
        build_batch([ScoredGroup(group, np.zeros(2, np.float32), {})], [0.0, 0.0])


# What counts tokens counts sampled ones: the episode has 5 of 7, and its observation repeats nothing of the policy's.


def scored_episodes():
    episodes = (episode(), one_turn(9))
    return [ScoredGroup(RolloutGroup(Prompt(np.array([1]), 0), episodes), np.array([1.0, 0.0], np.float32), {})]


def test_metrics_count_sampled_tokens():
    found = step_metrics(scored_episodes(), np.zeros(2, np.float32), [], {"rollout": 2.0, "step": 4.0})
    assert (found["completions/mean_length"], found["completions/min_length"]) == (7.0, 5.0)
    assert found["completions/mean_terminated_length"] == 7.0
    assert (found["perf/tokens_per_s"], found["perf/rollout_tokens_per_s"]) == (14 / 4, 14 / 2)


def test_repeats_are_those_of_the_policy():
    flags = [1, 1, 1, 1, 0, 0, 0, 0, 1]
    ids, log_probs = np.array([1, 2, 3, 4, 1, 2, 3, 4, 5]), -np.array(flags, np.float32)
    own = Completion(ids, log_probs, "stop", None, np.array(flags, bool), (0, 8))
    group = ScoredGroup(RolloutGroup(Prompt(np.array([1]), 0), (own,)), np.ones(1, np.float32), {})
    assert step_metrics([group], np.zeros(1, np.float32), [], {})["completions/repeated_share"] == 0.0


def test_the_length_in_the_completions_file(tmp_path):
    path = write_completions(tmp_path, 1, scored_episodes(), None)
    assert [json.loads(line)["length"] for line in path.read_text().splitlines()] == [5, 9]


def test_the_length_in_an_evaluation():
    class Engine:
        def generate(self, prompts, group_size, sampling, seed, *, first_prompt=0):
            return [RolloutGroup(prompt, (episode(),) * group_size) for prompt in prompts]

    metrics, _ = evaluate(
        Engine(), [Prompt(np.array([1]), 0)], [lambda completions, prompts: [1.0]], Sampling(9), samples=1, seed=0
    )
    assert metrics["mean_length"] == 5.0


def test_length_rules_count_sampled_tokens():
    groups = [scored.group for scored in scored_episodes()]
    seen = {}

    def look(completion_ids, sampled_mask):
        seen.update(ids=completion_ids, mask=sampled_mask)
        return [0.0, 0.0]

    rules = [Overlong(6, 2), ReasoningLength(10, unit="tokens", tag=None), look]
    (scored,) = score(groups, rules)
    assert scored.components["overlong"].tolist() == [-0.5, -1.0]  # 5 and 9 tokens: over 4, over 6
    assert scored.components["reasoning_length"].tolist() == pytest.approx([0.5, 0.9])
    assert seen["ids"][0] == [5, 6, 7, 8, 9, 10, 11]
    assert seen["mask"] == [[bool(flag) for flag in SAMPLED], [True] * 9]


def test_length_rules_by_hand():
    columns = {
        "completion_ids": [[1, 2, 7, 7, 1, 2, 3], [1, 2, 1, 2]],
        "sampled_mask": [[True, True, False, False, True, True, True], [True] * 4],
        "answer": ["1", "1"],
    }
    texts = ["<answer>1</answer>", "<answer>2</answer>"]
    # 1 2 1 2 3: of the pairs 12 21 12 23 one of four occurred before; 1 2 1 2: one of three.
    found = Repetition(ngram_size=2, unit="tokens").verdicts(texts, columns).scores
    assert found.tolist() == pytest.approx([-1 / 4, -1 / 3])
    cosine = CosineLength(rule=ExactAnswer(tag="answer"), max_length=5, unit="tokens").verdicts(texts, columns).scores
    assert cosine[0] == pytest.approx(0.5)  # all 5 tokens: the least that a right answer earns
    with pytest.raises(
        ValueError, match=r"overlong: sampled_mask\[0\] has shape \(1,\), but completion_ids\[0\] has 7"
    ):
        Overlong(4, 2).verdicts(texts, {**columns, "sampled_mask": [[True], [True] * 4]})


def test_a_column_of_that_name_is_refused():
    prompt = Prompt(np.array([1]), 0, columns={"sampled_mask": 1})
    with pytest.raises(ValueError, match="a column is named 'sampled_mask'"):
        score([RolloutGroup(prompt, (one_turn(),))], lambda completions, prompts: [0.0])


# turn_credit="turn" from the rewards to the step


def paid_by_turn(paid):
    """Episodes of two turns, one sampled token each, and an observation between; equal rewards in all."""
    completions = tuple(
        Completion(np.array([3 + row, 1, 7 - row]), np.zeros(3, np.float32), "stop", None, np.arange(3) != 1, (0, 2))
        for row in range(len(paid))
    )
    group = RolloutGroup(Prompt(np.array([1, 2]), 0), completions)
    rewards = np.array([sum(own) for own in paid], np.float32)
    return ScoredGroup(group, rewards, {}, turn_rewards=tuple(np.array(own, np.float32) for own in paid))


def step_of(**options):
    config = {"max_steps": 1, "group_size": 2, "learning_rate": 0.1, "log_to": (), **options}
    model = ToyLM()
    trainer = GRPO(model, lambda completions, prompts: [0.0], **config)
    own = GRPOConfig.create(**config, turn_credit="turn", reward_scaling="none")
    advantage_fn = make_advantage_fn(own.split().advantages, [1.0], trainer._step.moving_baselines)
    return replace(trainer._step, advantage_fn=advantage_fn), model


def test_equal_rewards_that_differ_by_turn_are_trained(tmp_path):
    step, model = step_of()
    ended = RolloutGroup(Prompt(np.array([1, 2]), 0), (one_turn(), one_turn()))
    groups = [
        paid_by_turn([[1, 0], [0, 1]]),
        paid_by_turn([[0.5, 0.5], [0.5, 0.5]]),
        ScoredGroup(ended, np.ones(2, np.float32), {}),
    ]
    _, advantages = step.compute_advantages(groups, 0, 1)
    np.testing.assert_array_equal(advantages, [[0, -0.5], [0, 0.5], [0, 0], [0, 0], [0, np.nan], [0, np.nan]])
    (part,) = step.batcher.make_mini_batches(groups, advantages, 0)
    assert torch.cat([batch.row_index for batch in part]).tolist() == [0, 1]  # the other groups teach nothing
    before = model(torch.tensor([[1, 2, 3, 1], [1, 2, 4, 1]])).detach().log_softmax(-1)
    stats = [take_optimizer_step(step.updater, step._compute_loss, part, 0.1)]
    after = model(torch.tensor([[1, 2, 3, 1], [1, 2, 4, 1]])).detach().log_softmax(-1)
    change = after - before
    assert change[0, 3, 7] < 0 < change[1, 3, 6]  # the second tokens, of advantages −0.5 and 0.5
    found = step_metrics(groups, advantages, stats, {}, constant=[BY_TURN(group) for group in groups])
    assert found["rollout/frac_reward_zero_std"] == pytest.approx(2 / 3)
    assert step_metrics(groups, advantages, stats, {})["rollout/frac_reward_zero_std"] == 1.0
    path = write_completions(tmp_path, 1, groups, advantages)
    rows = [json.loads(line)["advantage"] for line in path.read_text().splitlines()]
    assert rows == [*advantages[:4].tolist(), [0], [0]]
    assert "0 · -0.5" in training_samples({1: path}, PicturesShown(path.parent)).replace("−", "-")


def test_the_rows_of_shorter_episodes_have_no_place_for_later_turns(tmp_path):
    groups = scored_episodes()
    advantages = np.array([[1.0, 0.25], [-1.0, np.nan]], np.float32)
    path = write_completions(tmp_path, 1, groups, advantages)
    assert [json.loads(line)["advantage"] for line in path.read_text().splitlines()] == [[1.0, 0.25], [-1.0]]
    found = step_metrics(groups, advantages, [], {})
    assert (found["advantages/mean"], found["advantages/max"]) == (0.25 / 3, 1.0)


def test_a_loss_that_is_not_finite_names_its_rows_with_advantages_by_turn():
    step, _ = step_of()
    groups = [paid_by_turn([[1, 0], [0, 1]])]
    batch = step.batcher.make_mini_batches(*step.compute_advantages(groups, 0, 1), 0)[0][0]
    wrong = replace(batch, advantages=torch.where(torch.arange(2)[:, None] == 1, torch.nan, batch.advantages))
    with (
        pytest.raises(NonFiniteError, match=r"not finite in rows \[1\]; row 1 is completion 1 of prompts\[0\]"),
        step._naming_samples(groups, []),
    ):
        take_optimizer_step(step.updater, step._compute_loss, [wrong], 0.1)


def test_zero_variance_is_judged_by_turn_where_turns_are_credited():
    equal, constant = paid_by_turn([[1, 0], [0, 1]]), paid_by_turn([[1, 0], [1, 0]])
    asked = []

    def more(count):
        asked.append(count)
        return [equal] * count

    assert refill_groups([equal, constant], more, most_refills=1, is_constant=BY_TURN).chosen == [equal, equal]
    assert refill_groups([equal, constant], more, most_refills=1).chosen == []
    assert asked == [1, 2]


def test_a_loss_of_the_environments_tokens_needs_several_turns():
    with pytest.raises(
        ConfigError, match="environment_loss_coef=0.05 is read only with environment, or tools; here no"
    ):
        GRPO(ToyLM(), lambda completions, prompts: [0.0], environment_loss_coef=0.05, log_to=())
    told = "preset='echo': environment_loss_coef=0.05 is read only with environment, or tools; here no environment, no"
    with pytest.raises(ConfigError, match=told):
        GRPO(ToyLM(), lambda completions, prompts: [0.0], preset="echo", log_to=())
    with pytest.raises(ConfigError, match="environment_loss_coef=0.05 with max_turns=1: no observation follows"):
        GRPOConfig.create(environment_loss_coef=0.05, max_turns=1)


def test_turn_credit_needs_an_environment():
    with pytest.raises(ConfigError, match="turn_credit='turn' is read only with environment; here no environment"):
        GRPO(ToyLM(), lambda completions, prompts: [0.0], turn_credit="turn", log_to=())
    with pytest.raises(ConfigError, match="turn_credit='gae' is read only with environment; here no environment"):
        GRPO(ToyLM(), lambda completions, prompts: [0.0], turn_credit="gae", log_to=())
    with pytest.raises(ConfigError, match="policy_loss='gspo_turn' needs environment= or tools=: use 'gspo_token'"):
        GRPO(ToyLM(), lambda completions, prompts: [0.0], policy_loss="gspo_turn", log_to=())


# An episode in the report


def test_the_report_shows_a_conversation(tmp_path):
    row = {
        "prompt": "p",
        "completion": "whole",
        "messages": [
            {"role": "user", "content": "Guess </script><b>"},
            {"role": "assistant", "content": "5", "tool_calls": [{"name": "add\u202e", "arguments": {"a": 1}}]},
            {"role": "<i>tool", "content": "higher"},
            {"role": "assistant", "content": "7"},
        ],
        "turn_rewards": [0.25, 1.0],
        "advantage": [0.5, -0.5],
    }
    path = tmp_path / "step_000001.jsonl"
    path.write_text(json.dumps(row) + "\n")
    page = training_samples({1: path}, PicturesShown(path.parent))
    assert page.count('class="message sampled"') == page.count('class="message observed"') == 2
    assert "assistant · sampled · reward 0.25" in page
    assert page.index("Guess") < page.index("reward 0.25") < page.index("higher") < page.index("reward 1")
    assert "whole" not in page
    assert "add⟨U+202E⟩" in page
    assert "<b>" not in page
    assert "<i>" not in page


def test_the_report_shows_calls_tools_reasoning_and_the_stop_reason(tmp_path):
    function = {"name": "search", "arguments": {"query": "a </b> b", "limit": 3}}
    row = {
        "prompt": "p",
        "finish_reason": "length",
        "stop_reason": "max_tokens",
        "messages": [
            {"role": "user", "content": "who won?"},
            {
                "role": "assistant",
                "content": "",
                "reasoning_content": "let me look",
                "tool_calls": [{"id": "call_0", "type": "function", "function": function}, "odd", {"name": 3}],
            },
            {"role": "tool", "name": "sea<i>rch", "content": "nobody"},
        ],
    }
    path = tmp_path / "step_000001.jsonl"
    path.write_text(json.dumps(row) + "\n")
    page = training_samples({1: path}, PicturesShown(path.parent))
    text = html.unescape(re.sub("<[^>]*>", "", page))
    assert 'call: search(query="a </b> b", limit=3)' in text
    assert '"odd"' in text
    assert '{"name": 3}' in text
    assert "<think>let me look</think>" in text
    assert "tool · sea<i>rch" in text
    assert "ended bymax_tokens" in text
    assert "</b> b" not in page
    assert "<i>" not in page


@pytest.mark.parametrize("messages", [None, [], "text", [1, 2], {"role": "user"}])
def test_rows_without_a_conversation_show_their_completion(tmp_path, messages):
    path = tmp_path / "step_000001.jsonl"
    path.write_text(json.dumps({"prompt": "p", "completion": "whole", "messages": messages}) + "\n")
    assert "whole" in training_samples({1: path}, PicturesShown(path.parent))


def test_a_long_conversation_is_cut(tmp_path):
    row = {"prompt": "p", "messages": [{"role": "user", "content": str(place)} for place in range(100)]}
    path = tmp_path / "step_000001.jsonl"
    path.write_text(json.dumps(row) + "\n")
    page = training_samples({1: path}, PicturesShown(path.parent))
    assert page.count('class="message observed"') == 64
    assert "… and 36 more messages" in page
