"""Compaction: a long conversation is summarised by the policy, and its pieces are rows of one episode."""

from __future__ import annotations

import asyncio
import copy
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import chatml
from rlox_grpo import GRPO, GRPOConfig
from rlox_grpo.environments import EpisodeEnded
from rlox_grpo.errors import ConfigError
from rlox_grpo.groups import count_sampled, list_rows
from rlox_grpo.model.prefix_tree import build_prefix_tree
from rlox_grpo.prompts.load import load_rows
from rlox_grpo.rollout.engines.hf.engine import HFEngine
from rlox_grpo.rollout.engines.turns import SampledTurn, TurnRequest
from rlox_grpo.rollout.episodes.budget import Budget
from rlox_grpo.rollout.episodes.chat import Chat
from rlox_grpo.rollout.episodes.compaction import HEADING, Compaction, draw_compaction
from rlox_grpo.rollout.episodes.play import play_episode
from rlox_grpo.rollout.episodes.run import EpisodeRunner
from rlox_grpo.rollout.episodes.template import Template
from rlox_grpo.rollout.episodes.tools import Tools, make_schemas
from rlox_grpo.rollout.serialize import decode_episode, encode_group
from rlox_grpo.run.metrics import episode_metrics
from rlox_grpo.types import Sampling, ScoredGroup

SYSTEM = {"role": "system", "content": "be brief"}


def look_up(word: str) -> str:
    """Look a word up.

    Args:
        word: The word.
    """
    return word * 2


class Policy:
    """Says ``replies`` in their order, each with its end token unless it ends with ``…``."""

    def __init__(self, tokenizer: Any, replies: Sequence[str]) -> None:
        self.tokenizer, self.replies = tokenizer, list(replies)
        self.requests: list[TurnRequest] = []
        self.said: list[list[int]] = []

    async def __call__(self, request: TurnRequest) -> SampledTurn:
        self.requests.append(request)
        text = self.replies.pop(0)
        ids = [*self.tokenizer(text.rstrip("…"))["input_ids"], *[self.tokenizer.eos_token_id] * (text[-1] != "…")]
        self.said.append(ids)
        return SampledTurn(np.array(ids, np.int64), np.full(len(ids), -0.5, np.float32), text[-1] != "…")

    def shown(self, index: int) -> str:
        return str(self.tokenizer.decode(self.requests[index].token_ids))


def converse(
    base: Any,
    replies: Sequence[str],
    turns: Sequence[Any],
    *,
    at_tokens: int,
    keep: int = 1,
    template: str = chatml.CHATML,
    tools: Any = (),
    **limits: Any,
) -> tuple[Chat, Policy]:
    tokenizer = chatml.make_tokenizer(base, template)
    policy = Policy(tokenizer, replies)
    written = Template(tokenizer, make_schemas(tools))
    written.rewrites = template == chatml.FORGETS
    chat = Chat(
        written, policy, Budget(**{"max_turns": 99, "max_new_tokens": 999, **limits}), tools=Tools(tools),
        end_ids=[tokenizer.eos_token_id], compaction=Compaction(at_tokens, "SUM UP", keep),
    )  # fmt: skip

    async def run() -> None:
        for messages in turns:
            reply = await chat.turn(messages)
            while reply.tool_calls:
                reply = await chat.turn(await chat.call_tools(reply))

    asyncio.run(run())
    return chat, policy


def write(*messages: tuple[str, str]) -> str:
    text = "".join(f"<|im_start|>{role}\n{content}<|im_end|>\n" for role, content in messages)
    return f"{text}<|im_start|>assistant\n"


def check_rows(chat: Chat, policy: Policy) -> int:
    """Each reply is trained once, behind exactly what the engine was given; return the number of rows."""
    rows, ends = chat.rows(), {}
    for row in rows:
        whole = [*row.prompt_ids.tolist(), *row.token_ids.tolist()]
        for start in row.turns:
            ends[tuple(whole[: len(row.prompt_ids) + start])] = row, start
        assert (row.log_probs[~row.sampled] == 0).all()
    for request, said in zip(policy.requests, policy.said, strict=True):
        row, start = ends.pop(tuple(request.token_ids.tolist()))
        assert row.token_ids[start : start + len(said)].tolist() == said
        assert row.sampled[start : start + len(said)].all()
    assert not ends
    assert sum(int(row.sampled.sum()) for row in rows) == sum(map(len, policy.said))
    return len(rows)


def test_the_context_is_rebuilt_from_the_summary(byte_tokenizer: Any) -> None:
    first = [SYSTEM, {"role": "user", "content": "task"}]
    chat, policy = converse(byte_tokenizer, ["one", "two", "S", "three"], [first, "b", "c" * 200], at_tokens=250)
    system, task = ("system", "be brief"), ("user", "task")
    history = [system, task, ("assistant", "one"), ("user", "b"), ("assistant", "two")]
    rebuilt = [system, ("user", f"{HEADING}\n\nS"), ("assistant", "two"), ("user", "c" * 200)]
    assert [policy.shown(index) for index in (1, 2, 3)] == [
        write(*history[:4]), write(*history, ("user", "SUM UP")), write(*rebuilt),
    ]  # fmt: skip
    assert check_rows(chat, policy) == 2
    assert [len(row.turns) for row in chat.rows()] == [1, 3], "the row of the last reply comes first"
    assert [message["content"] for message in chat.messages] == [
        "be brief", "task", "one", "b", "two", "SUM UP", "S", "c" * 200, "three",
    ]  # fmt: skip
    assert (chat.turns, chat.prompt_messages, chat.branch_messages) == (3, 2, [])
    assert chat.remaining_turns == 96, "a summary is no turn of the environment"
    first_branch, later = policy.requests[2].branch, policy.requests[3]
    assert (first_branch, later.turn, later.replaces) == (0, 0, 0)
    assert later.branch != 0
    (compacted,) = chat.compactions
    without = len(byte_tokenizer(write(*history, ("user", "c" * 200)))["input_ids"])
    end = 3 * (len("<|im_end|>") - 1)  # one token in the conversation, and ten of the byte tokenizer
    assert abs(compacted.before - without) <= 5 * len("<|im_end|>") + end
    assert compacted.before > 250 > compacted.before - 200
    assert compacted.after == len(later.token_ids)
    assert compacted.summary == 2


def test_an_episode_is_compacted_several_times(byte_tokenizer: Any) -> None:
    turns = [f"question {index} " + "x" * 60 for index in range(8)]
    replies = ["a", "b", "S1", "c", "S2", "d", "S3", "e", "S4", "f", "S5", "g", "S6", "h"]
    chat, policy = converse(byte_tokenizer, replies, turns, at_tokens=150)
    assert check_rows(chat, policy) == 7
    assert [len(row.turns) for row in chat.rows()] == [1, 3, 2, 2, 2, 2, 2]
    contents = [message["content"] for message in chat.messages]
    assert [text for text in contents if len(text) == 1] == list("abcdefgh")
    assert [text for text in contents if text.startswith("question")] == turns
    assert contents.count("SUM UP") == len(chat.compactions) == 6
    assert not any(text.startswith(HEADING) for text in contents)
    assert policy.shown(13).count(HEADING) == 1
    assert len({request.draw for request in policy.requests}) == len(policy.requests)
    assert all(len(request.token_ids) < 400 for request in policy.requests)


def test_a_short_conversation_is_left_alone(byte_tokenizer: Any) -> None:
    chat, policy = converse(byte_tokenizer, ["a", "b", "c"], ["q", "r", "s"], at_tokens=10_000)
    assert (len(chat.rows()), chat.compactions, len(policy.requests)) == (1, [], 3)


def test_replies_that_stay_are_not_summarised(byte_tokenizer: Any) -> None:
    """With one reply, or with no more than those that stay, a summary would not make the context shorter."""
    _, policy = converse(byte_tokenizer, ["a", "b", "c", "S", "d"], ["q"] * 4, at_tokens=1, keep=2)
    assert policy.shown(4) == write(
        ("user", f"{HEADING}\n\nS"), ("assistant", "b"), ("user", "q"), ("assistant", "c"), ("user", "q")
    )
    assert "SUM UP" not in policy.shown(2)


def test_system_messages_of_the_middle_stay(byte_tokenizer: Any) -> None:
    late = {"role": "system", "content": "now in French"}
    turns = [[SYSTEM, {"role": "user", "content": "a"}], [late, {"role": "user", "content": "b"}], "c" * 300]
    _, policy = converse(byte_tokenizer, ["one", "two", "S", "three"], turns, at_tokens=250)
    assert policy.shown(3) == write(
        ("system", "be brief"),
        ("system", "now in French"),
        ("user", f"{HEADING}\n\nS"),
        ("assistant", "two"),
        ("user", "c" * 300),
    )


def test_a_call_stays_with_its_result_and_a_summary_calls_nothing(byte_tokenizer: Any) -> None:
    call = json.dumps({"name": "look_up", "arguments": {"word": "ab"}})
    call = f"<tool_call>\n{call}\n</tool_call>"
    chat, policy = converse(byte_tokenizer, ["hm", call, call, "done"], ["q", "r"], at_tokens=120, tools=[look_up])
    assert chat.tools.calls == 1
    assert chat.messages[5] == {"role": "assistant", "content": call}, "the call in the summary is text"
    assert policy.shown(3).endswith("<|im_start|>tool\nabab<|im_end|>\n<|im_start|>assistant\n")
    assert chat.messages[-2]["content"] == "abab"
    assert chat.parse_errors == 0
    assert check_rows(chat, policy) == 2


def test_reasoning_of_a_summary_does_not_stay(byte_tokenizer: Any) -> None:
    replies = ["a", "b", "<think>\nhm\n</think>\n\nS", "c"]
    chat, policy = converse(byte_tokenizer, replies, ["q"] * 3, at_tokens=1)
    assert f"{HEADING}\n\nS<|im_end|>" in policy.shown(3)
    assert check_rows(chat, policy) == 2


def test_reasoning_does_not_stay_in_place_of_an_empty_summary(byte_tokenizer: Any) -> None:
    replies = ["a", "b", "<think>\nhm\n</think>\n\n", "c"]
    chat, policy = converse(byte_tokenizer, replies, ["q"] * 3, at_tokens=1)
    assert policy.shown(3) == write(("user", f"{HEADING}\n\n"), ("assistant", "b"), ("user", "q"))
    assert check_rows(chat, policy) == 2


def test_a_template_that_rewrites_history_is_compacted_too(byte_tokenizer: Any) -> None:
    replies = ["a", "b", "c", "S1", "d", "e", "S2", "f"]
    chat, policy = converse(byte_tokenizer, replies, ["q" * 40] * 6, at_tokens=260, template=chatml.FORGETS)
    assert len(chat.compactions) == 2
    assert check_rows(chat, policy) == 8
    contents = [message["content"] for message in chat.messages if message["content"] != "q" * 40]
    assert contents == ["a", "b", "c", "SUM UP", "S1", "d", "e", "SUM UP", "S2", "f"]
    assert f"{HEADING}\n\nS2<|im_end|>\n<|im_start|>assistant\n~e<|im_end|>" in policy.shown(7)
    assert chat.branch_messages == []


def test_limits_count_summaries_but_no_turn(byte_tokenizer: Any) -> None:
    with pytest.raises(EpisodeEnded, match="max_turns"):
        converse(byte_tokenizer, ["a", "b", "S", "c"], ["q"] * 4, at_tokens=1, max_turns=3)
    with pytest.raises(EpisodeEnded, match="max_tokens"):
        converse(byte_tokenizer, ["a", "b", "S" * 300, "c"], ["q"] * 4, at_tokens=1, max_episode_tokens=400)


def test_a_truncated_reply_goes_on_before_a_summary(byte_tokenizer: Any) -> None:
    chat, policy = converse(byte_tokenizer, ["a", "half…", " done", "S", "c"], ["q", "q", None, "q"], at_tokens=100)
    assert [message["content"] for message in chat.messages][:4] == ["q", "a", "q", "half done"]
    assert policy.shown(4).count("half done") == 1
    check_rows(chat, policy)


def test_a_summary_that_was_cancelled_is_asked_for_again(byte_tokenizer: Any) -> None:
    """An environment limits the time of a turn: the first request for a summary does not stay in the context.

    The message of that turn stays, as after any reply that was cancelled.
    """
    tokenizer = chatml.make_tokenizer(byte_tokenizer)
    policy = Policy(tokenizer, ["a", "b", "S", "c"])
    starts = 0

    async def sample(request: TurnRequest) -> SampledTurn:
        nonlocal starts
        starts += 1
        if starts == 3:
            await asyncio.Event().wait()
        return await policy(request)

    chat = Chat(
        Template(tokenizer), sample, Budget(99, 999), end_ids=[tokenizer.eos_token_id],
        compaction=Compaction(1, "SUM UP", 1),
    )  # fmt: skip

    async def run() -> None:
        await chat.turn("q")
        await chat.turn("r")
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(chat.turn("s"), 0.01)
        await chat.turn("t")

    asyncio.run(run())
    context = [("user", f"{HEADING}\n\nS"), ("assistant", "b"), ("user", "s"), ("user", "t")]
    assert policy.shown(3) == write(*context)
    assert [message["content"] for message in chat.messages].count("s") == 1
    assert check_rows(chat, policy) == 2


def test_each_prompt_draws_its_limit_once() -> None:
    config = GRPOConfig.create(compact_at_tokens=[100, 200]).split().episodes
    drawn = [draw_compaction(config, 3, prompt) for prompt in range(50)]
    limits = [compaction.at_tokens for compaction in drawn if compaction is not None]
    assert drawn == [draw_compaction(config, 3, prompt) for prompt in range(50)]
    assert (min(limits) >= 100, max(limits) <= 200, len(set(limits)) > 20) == (True, True, True)
    assert limits != [each.at_tokens for prompt in range(50) if (each := draw_compaction(config, 4, prompt))]
    fixed = draw_compaction(GRPOConfig.create(compact_at_tokens=64).split().episodes, 3, 1)
    assert fixed is not None
    assert fixed.at_tokens == 64


async def long_talk(row: Any, chat: Any) -> float:
    reply = await chat.turn([SYSTEM, {"role": "user", "content": f"{row['secret']} begin"}])
    for turn in range(row["turns"]):
        reply = await chat.turn(f"turn {turn} " + "z" * 30)
    return chatml.pay(reply.text)


ROWS = [{"secret": 3, "turns": 4}, {"secret": 5, "turns": 6}, {"secret": 8, "turns": 2}]
OPTIONS: dict[str, Any] = {"compact_at_tokens": [150, 200], "compact_prompt": "sum up"}


@pytest.fixture(scope="module")
def tokenizer(byte_tokenizer: Any) -> Any:
    return chatml.make_tokenizer(byte_tokenizer)


@pytest.fixture(scope="module")
def model(make_tiny_model: Any, tokenizer: Any) -> Any:
    return make_tiny_model("qwen2", vocab_size=len(tokenizer), max_position_embeddings=1024)


def play(model: Any, tokenizer: Any, max_rows: int) -> Any:
    runner = EpisodeRunner(long_talk, (), GRPOConfig.create(**OPTIONS).split().episodes, tokenizer)
    engine = HFEngine(model, tokenizer, eos_token_ids=[tokenizer.eos_token_id], max_rows=max_rows)
    return runner(engine, load_rows(ROWS), [2] * 3, Sampling(max_new_tokens=5), 7)


def list_ids(groups: Any) -> list[list[int]]:
    return [row.token_ids.tolist() for group in groups for c in group.completions for row in list_rows(c)]


def test_the_samples_do_not_depend_on_what_is_decoded_together(model: Any, tokenizer: Any) -> None:
    groups, others = play(model, tokenizer, 2), play(model, tokenizer, 8)
    ids = [
        [row.token_ids.tolist() for g in played for c in g.completions for row in list_rows(c)]
        for played in (groups, others)
    ]
    assert ids[0] == ids[1]
    episodes = [completion.episode for group in groups for completion in group.completions]
    assert all(len(episode.compactions) >= 1 for episode in episodes[:4])
    assert max(len(episode.compactions) for episode in episodes) >= 2
    scored = [ScoredGroup(group, np.zeros(2, np.float32), {}) for group in groups]
    metrics = episode_metrics(scored)
    made = [compaction for episode in episodes for compaction in episode.compactions]
    sampled = sum(count_sampled(completion) for group in groups for completion in group.completions)
    assert metrics["episode/compactions"] == len(made) / 6
    assert (metrics["episode/turns_mean"], metrics["episode/turns_max"]) == (5, 7), "as chat.turns, without summaries"
    assert metrics["episode/compaction_tokens_before"] == pytest.approx(
        sum(before for before, _, _ in made) / len(made)
    )
    assert metrics["episode/compaction_tokens_after"] == pytest.approx(np.mean([after for _, after, _ in made]))
    assert metrics["episode/summary_token_share"] == pytest.approx(sum(tokens for *_, tokens in made) / sampled)
    records = [json.loads(json.dumps(record)) for group in groups for record in encode_group(group)["completions"]]
    assert [decode_episode(record["episode"]).compactions for record in records] == [e.compactions for e in episodes]


def make_trainer(model: Any, tokenizer: Any, **options: Any) -> GRPO:
    return GRPO(
        model, environment=long_talk, tokenizer=tokenizer, group_size=2, prompts_per_step=2, max_new_tokens=5,
        zero_variance="keep", log_to=(), **{**OPTIONS, **options},
    )  # fmt: skip


def test_the_update_trains_every_sampled_token_once_where_it_was_sampled(model: Any, tokenizer: Any) -> None:
    """Summaries included: the update's log-probs are those of the sampler, and their number is that of the samples."""
    trainer = make_trainer(copy.deepcopy(model), tokenizer, loss_aggregation="sequence_mean", kl_coef=0.0)
    scored = trainer.evaluate_sets(ROWS, samples=2)[""][1]
    tokens = chatml.count_trained_tokens(trainer, scored, num_sequences=6)
    completions = [completion for group in scored for completion in group.group.completions]
    assert tokens == sum(map(count_sampled, completions))
    assert sum(len(completion.episode.compactions) for completion in completions) > 0
    # A common beginning is forwarded once: as many tokens as there are different beginnings, without whole rows.
    step = trainer._step
    parts = step.batcher.make_mini_batches(*step.compute_advantages(scored, 0, 1), 0)
    forwarded = sum(build_prefix_tree(batch).num_tokens for part in parts for batch in part)
    beginnings, num_row_tokens = 0, 0
    for group in (scored_group.group for scored_group in scored):
        prompt = group.prompt.token_ids.tolist()
        rows = [(*prompt, *row.token_ids.tolist()) for c in group.completions for row in list_rows(c)]
        beginnings += len({row[:end] for row in rows for end in range(1, len(row))})
        num_row_tokens += sum(map(len, rows))
    assert forwarded == beginnings < 0.8 * num_row_tokens


@pytest.mark.parametrize("options", [{}, {"partial_rollout_turns": 2}], ids=["whole episodes", "partial rollouts"])
def test_a_resumed_run_ends_with_the_same_weights(model: Any, tokenizer: Any, tmp_path: Path, options: Any) -> None:
    def train(folder: Path) -> dict[str, Any]:
        trainer = make_trainer(
            copy.deepcopy(model), tokenizer, output_dir=folder, max_steps=3, checkpoint_steps=1, keep_checkpoints=9,
            learning_rate=1e-2, **options,
        )  # fmt: skip
        trainer.train(ROWS * 2, n_epochs=2)
        return {key: value.detach().clone() for key, value in trainer.model.state_dict().items()}

    whole = train(tmp_path / "whole")
    assert any(not bool((whole[key] == value).all()) for key, value in model.state_dict().items())
    for step in (1, 2):
        shutil.copytree(tmp_path / "whole", tmp_path / f"from {step}")
        for later in range(step + 1, 4):
            shutil.rmtree(tmp_path / f"from {step}" / "checkpoints" / f"step_{later:06d}")
        resumed = train(tmp_path / f"from {step}")
        assert all(bool((whole[key] == resumed[key]).all()) for key in whole)


def test_play_shows_where_it_was_cut() -> None:
    async def talk(row: Any, chat: Any) -> float:
        for turn in range(3):
            await chat.turn(f"turn {turn} " + "z" * 40)
        return float(len(chat.messages))

    said: list[str] = []
    replies = iter(["one", "two", "my summary", "three"])
    config = GRPOConfig.create(compact_at_tokens=30, compact_prompt="sum up").split().episodes
    outcome = play_episode(talk, {}, lambda: next(replies), said.append, config=config)
    assert outcome.reward == 8.0
    begin = said.index("--- compaction: the conversation has about 36 tokens ---")
    assert said[begin + 1 : begin + 6] == [
        "user: sum up",
        "--- the policy now sees these 2 of 4 messages ---",
        f"user: {HEADING}\n\nmy summary",
        "assistant: two",
        "--- and what follows ---",
    ]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"compact_at_tokens": [200, 100]}, r"compact_at_tokens=\(200, 100\): expected"),
        ({"compact_at_tokens": 0}, "compact_at_tokens=0: expected at least 1"),
        ({"compact_at_tokens": 100, "max_turns": 2}, "raise max_turns to at least 3"),
        ({"compact_at_tokens": 100, "compact_prompt": " "}, "compact_prompt is empty"),
        ({"compact_at_tokens": 100, "compact_keep": 0}, "compact_keep: input should be greater than or equal to 1"),
    ],
)
def test_options_that_cannot_be(options: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        GRPOConfig.create(**options)


def test_options_that_need_one_row(model: Any, tokenizer: Any) -> None:
    with pytest.raises(ConfigError, match=r"turn_credit='turn' needs episodes of one row, but compact_at_tokens"):
        make_trainer(model, tokenizer, turn_credit="turn", reward_scaling="none")
