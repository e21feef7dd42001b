"""Conversations of an episode that do not extend each other: matched by messages, trained once, drawn by themselves."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

import chatml
from rlox_grpo import GRPO, GRPOConfig
from rlox_grpo.environments import EpisodeEnded
from rlox_grpo.groups import check_turns, list_rows
from rlox_grpo.prompts.load import load_rows
from rlox_grpo.rollout.engines.hf.engine import HFEngine
from rlox_grpo.rollout.engines.turns import SampledTurn, TurnRequest
from rlox_grpo.rollout.episodes.budget import Budget
from rlox_grpo.rollout.episodes.chat import Chat
from rlox_grpo.rollout.episodes.groups import Played, make_group
from rlox_grpo.rollout.episodes.run import EpisodeRunner
from rlox_grpo.rollout.episodes.template import Template
from rlox_grpo.types import Episode, Prompt, Sampling

HEAD = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
NEXT = "\n<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"


class Policy:
    """Says ``replies`` in their order, each with its end token unless it ends with ``…``; keeps what it was shown."""

    def __init__(self, tokenizer: Any, *replies: str) -> None:
        self.tokenizer, self.replies, self.requests = tokenizer, list(replies), list[TurnRequest]()

    async def __call__(self, request: TurnRequest) -> SampledTurn:
        self.requests.append(request)
        said = self.replies.pop(0)
        await asyncio.sleep(0)
        stopped = not said.endswith("…")
        ids = np.array(self.tokenizer(said.rstrip("…"))["input_ids"], np.int64)
        ids = np.append(ids, self.tokenizer.eos_token_id) if stopped else ids
        return SampledTurn(ids, np.full(len(ids), -0.5, np.float32), stopped)

    def shown(self, place: int) -> str:
        return self.tokenizer.decode(self.requests[place].token_ids)


def make_chat(tokenizer: Any, policy: Policy, **limits: Any) -> Chat:
    budget = Budget(**{"max_turns": 99, "max_new_tokens": 100, **limits})
    return Chat(Template(tokenizer), policy, budget, end_ids=[tokenizer.eos_token_id])


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def read_rows(chat: Chat, tokenizer: Any) -> list[tuple[str, list[str]]]:
    """Each row's text, and what of it is trained, turn by turn."""
    found = []
    for row in chat.rows():
        edges = np.flatnonzero(np.diff(np.concatenate([[0], row.sampled.astype(int), [0]])))
        spans = [tokenizer.decode(row.token_ids[a:b]) for a, b in zip(edges[::2], edges[1::2], strict=True)]
        assert [int(edge) for edge in edges[::2]] == list(row.turns)
        assert (row.log_probs[~row.sampled] == 0).all()
        found.append((tokenizer.decode(np.concatenate([row.prompt_ids, row.token_ids])), spans))
    return found


def complete(chat: Chat, *conversations: Sequence[dict[str, Any]]) -> list[str]:
    async def run() -> list[str]:
        return [(await chat.complete(list(messages))).text for messages in conversations]

    return asyncio.run(run())


def test_an_extended_history_continues_the_conversation(tokenizer: Any) -> None:
    policy = Policy(tokenizer, "one", "two")
    chat = make_chat(tokenizer, policy)
    complete(chat, [user("a")], [user("a"), assistant("one"), user("b")])
    assert policy.shown(1) == HEAD.format("a") + "one<|im_end|>" + NEXT.format("b")
    assert [request.branch for request in policy.requests] == [0, 0]
    assert [request.turn for request in policy.requests] == [0, 1]
    assert read_rows(chat, tokenizer) == [(policy.shown(1) + "two<|im_end|>", ["one<|im_end|>", "two<|im_end|>"])]


def test_turn_and_complete_are_one_conversation(tokenizer: Any) -> None:
    async def run() -> None:
        await chat.turn("a")
        await chat.complete([*chat.messages, user("b")])
        await chat.turn("c")

    policy = Policy(tokenizer, "one", "two", "three")
    chat = make_chat(tokenizer, policy)
    asyncio.run(run())
    assert [message["content"] for message in chat.messages] == ["a", "one", "b", "two", "c", "three"]
    assert len(chat.rows()) == 1


def test_a_shared_reply_is_trained_once(tokenizer: Any) -> None:
    policy = Policy(tokenizer, "one", "two", "three", "four")
    chat = make_chat(tokenizer, policy)
    shared = [user("a"), assistant("one")]
    complete(
        chat,
        [user("a")],
        [*shared, user("b")],
        [*shared, user("c")],
        [*shared, user("c"), assistant("three"), user("d")],
    )
    first, second = read_rows(chat, tokenizer)
    assert first[1] == ["one<|im_end|>", "two<|im_end|>"]
    assert second == (
        HEAD.format("a") + "one<|im_end|>" + NEXT.format("c") + "three<|im_end|>" + NEXT.format("d") + "four<|im_end|>",
        ["three<|im_end|>", "four<|im_end|>"],
    )
    assert chat.turns == 4
    assert [[message["content"] for message in messages] for messages in chat.branch_messages] == [
        ["a", "one", "c", "three", "d", "four"]
    ]
    assert policy.requests[2].branch == policy.requests[3].branch != 0
    assert [request.turn for request in policy.requests] == [0, 1, 1, 2]


def test_sampled_ids_stay_as_they_were_and_are_not_encoded_again(tokenizer: Any) -> None:
    """Ids that the text's own encoding does not have: <bos>, which decoding leaves out."""

    class Odd(Policy):
        async def __call__(self, request: TurnRequest) -> SampledTurn:
            turn = await super().__call__(request)
            ids = np.concatenate([[tokenizer.bos_token_id], turn.token_ids])
            return SampledTurn(ids, np.full(len(ids), -0.5, np.float32), turn.stopped)

    policy = Odd(tokenizer, "one", "two", "three")
    chat = make_chat(tokenizer, policy)
    complete(chat, [user("a")], [user("a"), assistant("one"), user("b")], [user("a"), assistant("one"), user("c")])
    for place in (1, 2):
        assert "<bos>one<|im_end|>" in policy.shown(place)


def test_an_edited_reply_is_context_of_a_branch(tokenizer: Any) -> None:
    policy = Policy(tokenizer, "one", "two", "three")
    chat = make_chat(tokenizer, policy)
    complete(
        chat,
        [user("a")],
        [user("a"), assistant("one"), user("b")],
        [user("a"), assistant("one"), user("b"), assistant("edited"), user("c")],
    )
    _, (text, spans) = read_rows(chat, tokenizer)
    assert spans == ["three<|im_end|>"]
    assert "edited<|im_end|>" in text
    assert text.startswith(HEAD.format("a") + "one<|im_end|>\n<|im_start|>user\nb")


def test_another_beginning_is_a_branch_with_a_prompt_of_its_own(tokenizer: Any) -> None:
    policy = Policy(tokenizer, "one", "two")
    chat = make_chat(tokenizer, policy)
    complete(chat, [user("a")], [{"role": "system", "content": "s"}, user("b")])
    assert [row.prompt_ids.tolist() for row in chat.rows()] == [
        request.token_ids.tolist() for request in policy.requests
    ]


def test_calls_at_the_same_time_are_branches(tokenizer: Any) -> None:
    async def run() -> list[Any]:
        await chat.complete([user("a")])
        extended = [user("a"), assistant("one")]
        return await asyncio.gather(*(chat.complete([*extended, user(text)]) for text in ("b", "c", "c")))

    policy = Policy(tokenizer, "one", "two", "three", "four")
    chat = make_chat(tokenizer, policy)
    replies = asyncio.run(run())
    assert [reply.text for reply in replies] == ["two", "three", "four"]
    assert [spans for _, spans in read_rows(chat, tokenizer)] == [
        ["one<|im_end|>", "two<|im_end|>"], ["three<|im_end|>"], ["four<|im_end|>"],
    ]  # fmt: skip
    branches = [request.branch for request in policy.requests]
    assert branches[:2] == [0, 0]
    assert len({*branches[1:]}) == 3  # two calls with the same conversation have draws of their own
    assert len({request.draw for request in policy.requests}) == 4


def test_the_draws_of_a_branch_do_not_depend_on_the_order_of_calls(tokenizer: Any) -> None:
    def branches(order: str) -> dict[str, int]:
        policy = Policy(tokenizer, "one", *["reply"] * len(order))
        chat = make_chat(tokenizer, policy)
        complete(chat, [user("a")], *([user(text)] for text in order))
        return {text: request.branch for text, request in zip(order, policy.requests[1:], strict=True)}

    assert branches("bcd") == branches("dbc")


def test_a_stop_string_may_be_cut_from_a_reply_that_comes_back(tokenizer: Any) -> None:
    async def run() -> None:
        await chat.complete([user("a")], stop="###")
        await chat.complete([user("a"), assistant("one"), user("b")])

    class Stops(Policy):
        async def __call__(self, request: TurnRequest) -> SampledTurn:
            turn = await super().__call__(request)
            return SampledTurn(turn.token_ids, turn.log_probs, True)

    policy = Stops(tokenizer, "one###…", "two")
    chat = make_chat(tokenizer, policy)
    asyncio.run(run())
    assert len(chat.rows()) == 1
    assert "one###<|im_end|>" in policy.shown(1)


def test_token_ids_continue_what_they_extend(tokenizer: Any) -> None:
    def ids(text: str) -> np.ndarray[Any, Any]:
        return np.array(tokenizer(text)["input_ids"], np.int64)

    async def run() -> None:
        first = await chat.complete_ids(ids("ask:"))
        whole = np.concatenate([ids("ask:"), first.token_ids])
        await chat.complete_ids(np.concatenate([whole, ids(" more:")]))
        await chat.complete_ids(np.concatenate([whole, ids(" other:")]))
        await chat.complete_ids(ids("new:"))

    policy = Policy(tokenizer, "one", "two", "three", "four")
    chat = make_chat(tokenizer, policy)
    asyncio.run(run())
    assert read_rows(chat, tokenizer) == [
        ("ask:one<|im_end|> more:two<|im_end|>", ["one<|im_end|>", "two<|im_end|>"]),
        ("ask:one<|im_end|> other:three<|im_end|>", ["three<|im_end|>"]),
        ("new:four<|im_end|>", ["four<|im_end|>"]),
    ]


def test_limits_count_the_whole_episode(tokenizer: Any) -> None:
    chat = make_chat(tokenizer, Policy(tokenizer, *["one"] * 9), max_turns=2)
    complete(chat, [user("a")], [user("b")])
    with pytest.raises(EpisodeEnded, match="max_turns"):
        complete(chat, [user("c")])
    assert chat.ended == "max_turns"
    with pytest.raises(EpisodeEnded):
        complete(chat, [user("d")])
    chat = make_chat(tokenizer, Policy(tokenizer, *["one"] * 9), max_episode_tokens=9)
    complete(chat, [user("a")], [user("b")])
    assert chat.tokens_left == 1  # two replies of 4 tokens; prompts are not counted


@pytest.mark.parametrize(
    ("messages", "told"),
    [
        ([], "first turn needs a message"),
        ([user("a"), assistant("b")], "the policy writes that one"),
        ([{"role": "user"}], r"messages\[0\]"),
    ],
)
def test_what_cannot_be_completed_is_refused(messages: Any, told: str, tokenizer: Any) -> None:
    with pytest.raises(ValueError, match=told):
        complete(make_chat(tokenizer, Policy(tokenizer)), messages)


def test_rows_without_a_common_beginning_keep_their_prompts(tokenizer: Any) -> None:
    """Their first tokens differ, so the group has no prompt that all rows begin with."""

    async def run() -> None:
        await chat.complete_ids(np.array([50, 51]))
        await chat.complete_ids(np.array([60]))

    chat = make_chat(tokenizer, Policy(tokenizer, "one", "two"))
    asyncio.run(run())
    group = make_group(Prompt(np.array([1]), 0), [Played(chat.rows(), Episode("completed", 1.0))], tokenizer, 0)
    (completion,) = group.completions
    rows = list_rows(completion)
    assert [row.prompt_ids.tolist() for row in rows] == [[50, 51], [60]]
    assert [tokenizer.decode(row.token_ids) for row in rows] == ["one<|im_end|>", "two<|im_end|>"]
    assert group.prompt.token_ids.tolist() == [50, 51]


async def branching(row: Any, chat: Any) -> float:
    """Three replies after a common first one, two of them at the same time, and a new conversation."""
    first = await chat.complete([user(f"{row['secret']}")])
    history = [user(f"{row['secret']}"), dict(first.message)]
    await chat.complete([*history, user("b")])
    await asyncio.gather(chat.complete([*history, user("c")]), chat.complete([*history, user("d")]))
    await chat.complete([user("alone")])
    return float(len(first.text) + row["secret"])


ROWS = [{"secret": 3}, {"secret": 5}]


@pytest.fixture(scope="module")
def model(make_tiny_model: Any, tokenizer: Any) -> Any:
    return make_tiny_model("qwen2", vocab_size=len(tokenizer), max_position_embeddings=1024)


def play(model: Any, tokenizer: Any, max_rows: int) -> Any:
    config = GRPOConfig.create()
    runner = EpisodeRunner(branching, (), config.split().episodes, tokenizer)
    engine = HFEngine(model, tokenizer, eos_token_ids=[tokenizer.eos_token_id], max_rows=max_rows)
    return runner(engine, load_rows(ROWS), [2, 2], Sampling(max_new_tokens=5), 7)


def test_branches_on_the_embedded_engine(model: Any, tokenizer: Any) -> None:
    groups = play(model, tokenizer, 3)
    for group in groups:
        for completion in group.completions:
            rows = list_rows(completion)
            check_turns(rows)
            assert [len(row.turns) for row in rows] == [2, 1, 1, 1]
            assert completion.episode is not None
            assert len(completion.episode.branch_messages) == 3
            assert (np.concatenate([row.log_probs[row.sampled] for row in rows]) < 0).all()
    other = play(model, tokenizer, 8)
    ids = [[[row.token_ids.tolist() for row in list_rows(c)] for c in g.completions] for g in groups]
    assert ids == [[[row.token_ids.tolist() for row in list_rows(c)] for c in g.completions] for g in other]


def test_the_update_is_the_gradient_of_every_sampled_token_once(model: Any, tokenizer: Any) -> None:
    """The log-probs of all loss tokens equal those of the sampler: each token is forwarded behind its own context."""
    trainer = GRPO(
        copy.deepcopy(model), environment=branching, tokenizer=tokenizer, group_size=2, max_new_tokens=5,
        prompts_per_step=2, zero_variance="keep", kl_coef=0.0, log_to=(), loss_aggregation="sequence_mean",
    )  # fmt: skip
    scored = trainer.evaluate_sets(ROWS, samples=2)[""][1]
    tokens = chatml.count_trained_tokens(trainer, scored, num_sequences=4)
    parts = trainer._step.batcher.make_mini_batches(*trainer._step.compute_advantages(scored, 0, 1), 0)
    sampled = [row.sampled for group in scored for c in group.group.completions for row in list_rows(c)]
    assert tokens == sum(int(flags.sum()) for flags in sampled) == parts[0][0].totals.num_loss_tokens
