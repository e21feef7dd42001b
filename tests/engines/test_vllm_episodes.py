"""Episodes of several turns with vLLM, in this process and from a server, on the CPU."""

from __future__ import annotations

import asyncio
import copy
import random
import threading
import time

import numpy as np
import pytest
from byte_model import CHATML, END, SERVED, SIZES, log_probs, training

from rlox_grpo import GRPO, GRPOConfig
from rlox_grpo.environments import Outcome
from rlox_grpo.groups import check_turns, list_rows
from rlox_grpo.prompts.load import load_rows
from rlox_grpo.rollout.engines.turns import TurnEngine, TurnRequest
from rlox_grpo.rollout.engines.vllm import in_flight
from rlox_grpo.rollout.engines.vllm.client import VLLMServerEngine
from rlox_grpo.rollout.engines.vllm.engine import VLLMEngine
from rlox_grpo.rollout.engines.weight_sync import collect_weights
from rlox_grpo.rollout.episodes.run import EpisodeRunner
from rlox_grpo.types import Prompt, Sampling

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]

ROWS = [{"secret": 3}, {"secret": 5}]
SAMPLING = Sampling(max_new_tokens=6)


@pytest.fixture(scope="module")
def tokenizer(byte_tokenizer):
    tokenizer = copy.deepcopy(byte_tokenizer)
    tokenizer.chat_template = CHATML
    return tokenizer


@pytest.fixture(scope="module")
def in_process(make_tiny_model, tokenizer):
    model = make_tiny_model("qwen2", **SIZES)
    engine = VLLMEngine(model, tokenizer, eos_token_ids=[END], max_length=512, max_rows=4)
    engine.load_weights(collect_weights(model), version=5)
    yield model, engine
    engine.close()


@pytest.fixture(scope="module")
def at_server(launcher, make_tiny_model, tokenizer):
    model = make_tiny_model("qwen2", **SERVED)
    engine = VLLMServerEngine([launcher.url], model, tokenizer, eos_token_ids=[END], max_length=256, timeout=120.0)
    engine.load_weights(collect_weights(model), version=5)
    yield model, engine
    engine.close()


@pytest.fixture(params=["in_process", "at_server"])
def served(request):
    return request.getfixturevalue(request.param)


def sample(engine, requests, sampling=SAMPLING, seed=3, order=0, together=True):
    """Replies by episode and turn; the requests at once, or one after the other."""
    found = {}
    requests = [requests[place] for place in np.random.default_rng(order).permutation(len(requests))]
    with engine.open_turns(sampling, seed, 8) as session:
        for request in requests:
            session.submit(request)
            while len(session) and not together:
                found |= {(one.episode, one.turn): turn for one, turn in session.step()}
        while len(session):
            found |= {(one.episode, one.turn): turn for one, turn in session.step()}
        return found, session.prefilled_tokens


def ask(episode, turn=0, length=20, most=6, stop=()):
    ids = np.random.default_rng([episode[0], turn]).integers(3, 259, length)
    return TurnRequest(episode, turn, ids, most, stop)


EPISODES = [ask((prompt, completion), turn) for prompt in range(2) for completion in range(2) for turn in range(2)]


def tokens(found):
    return {name: turn.token_ids.tolist() for name, turn in found.items()}


def test_replies_depend_on_their_own_request_alone(served):
    model, engine = served
    assert isinstance(engine, TurnEngine)
    assert engine.end_ids == (END,)
    first, _ = sample(engine, EPISODES)
    assert len({str(ids) for ids in tokens(first).values()}) == len(EPISODES)
    for order, together in ((1, True), (2, False)):
        assert tokens(sample(engine, EPISODES, order=order, together=together)[0]) == tokens(first)
    assert tokens(sample(engine, EPISODES, seed=4)[0]) != tokens(first)
    for request in EPISODES:
        turn = first[request.episode, request.turn]
        expected = log_probs(model, Prompt(request.token_ids, 0), turn.token_ids)
        np.testing.assert_allclose(turn.log_probs, expected, atol=2e-4, rtol=0)
        assert turn.stopped == (turn.token_ids[-1] == END)
        assert turn.stopped or len(turn.token_ids) == 6


def test_limits_and_stop_strings_are_a_requests_own(served):
    _, engine = served
    (whole,) = sample(engine, [ask((0, 0), most=20)], Sampling(20, temperature=0.0))[0].values()
    (short,) = sample(engine, [ask((0, 0), most=3)], Sampling(20, temperature=0.0))[0].values()
    assert short.token_ids.tolist() == whole.token_ids[:3].tolist()
    assert not short.stopped
    letters = [place for place, token in enumerate(whole.token_ids) if 3 <= token < 97]  # printable ASCII
    if not letters:
        pytest.skip("the random model says no letter")
    string = engine._tokenizer.decode([int(whole.token_ids[letters[0]])])
    (stopped,) = sample(engine, [ask((0, 0), most=20, stop=(string,))], Sampling(20, temperature=0.0))[0].values()
    assert stopped.stopped
    assert stopped.token_ids.tolist() == whole.token_ids[: letters[0] + 1].tolist()


def test_a_longer_conversation_prefills_what_is_new(in_process):
    """Whole blocks of 128 tokens on the CPU are kept between the turns."""
    _, engine = in_process
    first = ask((7, 0), length=200)
    with engine.open_turns(SAMPLING, 3, 1) as session:
        session.submit(first)
        turns = []
        while len(session):
            turns += session.step()
        assert session.prefilled_tokens == 200
        history = np.concatenate([first.token_ids, turns[0][1].token_ids, np.arange(10, 80)])
        session.submit(TurnRequest((7, 0), 1, history, 6))
        while len(session):
            session.step()
        assert session.prefilled_tokens == 200 + len(history) - 128


def test_what_the_server_had_cached_is_not_prefilled(at_server):
    _, engine = at_server
    first = ask((8, 0), length=200)
    assert sample(engine, [first])[1] in (200, 72)
    assert sample(engine, [first])[1] == 72


def test_requests_that_do_not_fit_are_refused(served):
    _, engine = served
    with engine.open_turns(SAMPLING, 3, 1) as session:
        for request, told in (
            (ask((0, 0), length=600), "exceeds the model's"),
            (ask((0, 0), most=0), "at least 1"),
            (TurnRequest((0, 0), 0, np.array([3, 999]), 4), r"token_ids\[1\] is 999"),
        ):
            with pytest.raises(ValueError, match=told):
                session.submit(request)
    with pytest.raises(ValueError, match="temperature"), engine.open_turns(Sampling(4, temperature=0.001), 3, 1):
        pass


def test_requests_under_way_at_the_end_are_dropped(served):
    model, engine = served
    with engine.open_turns(SAMPLING, 3, 1) as session:
        session.submit(ask((0, 0), most=100))
        session.step()
    engine.load_weights(collect_weights(model), version=6)
    first, _ = sample(engine, EPISODES[:1])
    assert len(first) == 1


def test_replies_come_as_they_end_and_a_dropped_one_is_not_sampled_to_its_end(at_server):
    """Dropped: one that somebody watches, as a stream, and others, as whole answers."""
    _, engine = at_server

    def read(metric):
        lines = engine._servers[0].get("/metrics", time.monotonic() + 60).text.splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith(f"vllm:{metric}{{"))

    before, told, most = read("generation_tokens_total"), [], 180
    with engine.open_turns(Sampling(most), 3, 12) as session:
        watched = TurnRequest((0, 0), 0, np.arange(60, 70), most, on_tokens=told.extend)
        dropped = [watched, *(ask((prompt, 0), most=most) for prompt in range(1, 11))]
        short = ask((11, 0), most=2)
        for request in (*dropped, short):
            session.submit(request)
        ended = []
        deadline = time.monotonic() + 120
        while short not in ended or not told:
            assert time.monotonic() < deadline
            ended += [request for request, _ in session.step()]
        left = [request for request in dropped if request not in ended]
        assert len(left) > 5  # the short one did not wait for them
        for request in left:
            session.drop(request)
        assert len(session) == 0
        while read("num_requests_running"):
            assert time.monotonic() < deadline
            time.sleep(0.01)
    sampled = read("generation_tokens_total") - before
    assert sampled < len(left) * most / 2


async def count(row, chat):
    said = []
    for turn in range(3):
        said.append((await chat.turn(f"{row['secret']} {turn}")).text)
    return Outcome(float(len(said[0])))


def play(engine, tokenizer, environment, seed=7):
    config = GRPOConfig.create()
    runner = EpisodeRunner(environment, (), config.split().episodes, tokenizer)
    groups = runner(engine, load_rows(ROWS), [3, 3], SAMPLING, seed)
    check_turns([completion for group in groups for completion in group.completions])
    assert runner.prefilled_tokens > 0
    return groups


async def talk_long(row, chat):
    for turn in range(4):
        await chat.turn(f"{row['secret']} {'dust ' * 3}{turn}")
    return 1.0


def test_conversations_are_compacted(served, tokenizer):
    """The summary is sampled and its context rebuilt as with the built-in engine; log-probs are the model's."""
    model, engine = served
    options = {"compact_at_tokens": 90, "compact_prompt": "sum up"}
    runner = EpisodeRunner(talk_long, (), GRPOConfig.create(**options).split().episodes, tokenizer)
    groups = runner(engine, load_rows(ROWS), [2, 2], SAMPLING, 7)
    completions = [completion for group in groups for completion in group.completions]
    assert all(completion.episode.compactions for completion in completions)
    again = runner(engine, load_rows(ROWS), [2, 2], SAMPLING, 7)
    assert list_rows_ids(groups) == list_rows_ids(again)
    for group in groups:
        for completion in group.completions:
            rows = list_rows(completion)
            assert sum(len(row.turns) for row in rows) == 4 + len(completion.episode.compactions)
            for row in rows:
                prompt = group.prompt if row.prompt_ids is None else Prompt(row.prompt_ids, 0)
                expected = log_probs(model, prompt, row.token_ids)
                mask = row.sampled
                np.testing.assert_allclose(row.log_probs[mask], expected[mask], atol=2e-4, rtol=0)


def list_rows_ids(groups):
    return [row.token_ids.tolist() for group in groups for c in group.completions for row in list_rows(c)]


def test_episodes_do_not_depend_on_timing(served, tokenizer):
    model, engine = served

    async def slow(row, chat):
        said = []
        for turn in range(3):
            await asyncio.sleep(random.random() * 0.05)
            said.append((await chat.turn(f"{row['secret']} {turn}")).text)
        return Outcome(float(len(said[0])))

    groups = play(engine, tokenizer, count)
    again = play(engine, tokenizer, slow)
    for group, other in zip(groups, again, strict=True):
        assert group.policy_version == engine.policy_version
        for one, two in zip(group.completions, other.completions, strict=True):
            assert one.token_ids.tolist() == two.token_ids.tolist()
            assert len(one.turns) == 3
            expected = log_probs(model, group.prompt, one.token_ids)
            np.testing.assert_allclose(one.log_probs[one.sampled], expected[one.sampled], atol=2e-4, rtol=0)


def test_a_slow_episode_holds_up_itself_alone(served, tokenizer):
    order = []

    async def wait(row, chat):
        await chat.turn("a")
        if row["secret"] == 3:
            while order.count(5) < 3:  # until the others have ended
                await asyncio.sleep(0.01)
        await chat.turn("b")
        order.append(row["secret"])
        return 1.0

    play(served[1], tokenizer, wait)
    assert order == [5, 5, 5, 3, 3, 3]


def test_a_server_streams_what_it_samples(at_server, tokenizer, monkeypatch):
    """The agent has its first chunk before the rest of the server's stream is read; the tokens are those without it."""
    openai = pytest.importorskip("openai")
    _, engine = at_server
    has_chunk, chunks, said = threading.Event(), [], []
    read_stream = in_flight.read_stream

    def read_when_shown(lines, deadline, tell):
        def wait():
            for line in lines:
                yield line
                if '"token_ids"' in line:  # of the first token, and later at once
                    assert has_chunk.wait(60)

        return read_stream(wait(), deadline, tell)

    monkeypatch.setattr(in_flight, "read_stream", read_when_shown)

    def agent(row, chat):
        client = openai.OpenAI(base_url=chat.base_url, api_key=chat.api_key, max_retries=0, timeout=120)
        prompt = [*f"{row['secret']} question".encode()]
        stream = client.completions.create(model="policy", prompt=prompt, stream=is_streamed, max_tokens=40)
        if not is_streamed:
            said.append(stream.choices[0].token_ids)
            return 1.0
        first = next(stream)
        has_chunk.set()
        pieces = [first, *stream]
        chunks.append(len(pieces))
        said.append([one for piece in pieces for one in piece.choices[0].token_ids])
        return 1.0

    found = []
    for is_streamed in (True, False):  # noqa: B007  read by the agent
        runner = EpisodeRunner(agent, (), GRPOConfig.create().split().episodes, tokenizer)
        (group,) = runner(engine, load_rows(ROWS[:1]), [1], Sampling(max_new_tokens=40), 7)
        check_turns(group.completions)
        found.append(group.completions[0].token_ids.tolist())
        np.testing.assert_allclose(
            group.completions[0].log_probs,
            log_probs(at_server[0], group.prompt, group.completions[0].token_ids),
            atol=2e-4,
            rtol=0,
        )
    assert found[0] == found[1] == said[0] == said[1]
    assert len(found[0]) > 3
    assert chunks[0] >= 3


@pytest.mark.parametrize(
    ("async_steps", "rounds_of"), [(0, None), pytest.param(1, None, marks=pytest.mark.thorough), (1, 2)]
)
@pytest.mark.parametrize("engine", ["vllm", "vllm_server"])
def test_training_and_resuming(engine, async_steps, rounds_of, make_tiny_model, tokenizer, request, tmp_path):
    def train(folder, **options):
        model = make_tiny_model("qwen2", **SERVED)
        servers = engine == "vllm_server"
        where = {"server_urls": (request.getfixturevalue("launcher").url,)} if servers else {}
        changes = {"engine": engine, "max_steps": 3, "async_steps": async_steps, "engine_max_length": 128, **where}
        changes |= {"partial_rollout_turns": rounds_of}
        changes |= {"group_size": 4, "prompts_per_step": 2, "max_new_tokens": 4, "output_dir": folder, "max_turns": 3}
        trainer = GRPO(
            model,
            environment=count,
            tokenizer=tokenizer,
            **training(**changes, checkpoint_steps=1, keep_checkpoints=3, **options),
        )
        metrics = trainer.train([{"secret": secret} for secret in range(8)])
        trainer.engine.close()
        return trainer, metrics

    whole, metrics = train(tmp_path / "whole")
    (second,) = (tmp_path / "whole" / "checkpoints").glob("step_*2")
    parts, again = train(tmp_path / "parts", resume=str(second))
    assert again["resumed_from_step"] == 2
    assert metrics["episode/turns_mean"] == again["episode/turns_mean"] == 3.0
    assert metrics["perf/prefilled_tokens"] > 0
    for one, other in zip(whole.model.parameters(), parts.model.parameters(), strict=True):
        assert one.equal(other)
