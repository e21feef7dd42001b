"""The embedded engine samples turn by turn: the same tokens in any order, and no token is prefilled twice."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from rlox_grpo.model.packed_attention import packed_attention
from rlox_grpo.rollout.engines.hf.engine import HFEngine, NonFiniteLogitsError
from rlox_grpo.rollout.engines.turns import SampledTurn, TurnEngine, TurnRequest
from rlox_grpo.types import Prompt, Sampling
from toy import ToyLM

SAMPLING = Sampling(max_new_tokens=6)
SEED = 5


def run(session: Any, requests: Sequence[TurnRequest], every: int = 0) -> dict[tuple[int, int], SampledTurn]:
    """Submit ``requests``, all at once or one after so many steps, and wait for all."""
    found: dict[tuple[int, int], SampledTurn] = {}
    waiting = list(requests)
    step = 0
    while waiting or len(session):
        while waiting and (not every or step % every == 0):
            session.submit(waiting.pop(0))
            if every:
                break
        step += 1
        found |= {request.episode: turn for request, turn in session.step()}
    return found


def ask(episode: tuple[int, int], ids: Sequence[int], *, turn: int = 0, most: int = 6, stop: Any = ()) -> TurnRequest:
    return TurnRequest(episode, turn, np.array(ids, np.int64), most, stop)


PROMPTS = [[5, 6, 7], [8, 9, 10, 11, 1], [2]]
EPISODES = [(prompt, completion) for prompt in range(3) for completion in range(2)]


@pytest.fixture(scope="module", params=["qwen2", "gemma2", "plain"])
def engine(request: pytest.FixtureRequest, make_tiny_model: Any) -> HFEngine:
    if request.param == "plain":
        torch.manual_seed(0)
        return HFEngine(ToyLM(), eos_token_ids=[3])
    return HFEngine(make_tiny_model(request.param), eos_token_ids=[3])


def test_the_first_turn_is_a_completion_of_one_turn(engine: HFEngine) -> None:
    assert isinstance(engine, TurnEngine)
    prompts = [Prompt(np.array(ids, np.int64), index) for index, ids in enumerate(PROMPTS)]
    groups = engine.generate(prompts, 2, SAMPLING, SEED)
    with engine.open_turns(SAMPLING, SEED, 6) as session:
        turns = run(session, [ask(episode, PROMPTS[episode[0]]) for episode in EPISODES])
    for prompt, completion in EPISODES:
        expected, turn = groups[prompt].completions[completion], turns[prompt, completion]
        assert turn.token_ids.tolist() == expected.token_ids.tolist()
        np.testing.assert_allclose(turn.log_probs, expected.log_probs, atol=1e-5)
        assert turn.stopped == (expected.finish_reason == "stop")


def play(engine: HFEngine, *, order: int, every: int, max_rows: int, forget: bool = False) -> tuple[Any, int]:
    """Three turns of every episode; observations and limits differ by episode."""
    rng = np.random.default_rng(order)
    turns = []
    with engine.open_turns(SAMPLING, SEED, max_rows) as session:
        history = {episode: list(PROMPTS[episode[0]]) for episode in EPISODES}
        for turn in range(3):
            episodes = [EPISODES[place] for place in rng.permutation(len(EPISODES))]
            requests = [ask(e, history[e], turn=turn, most=2 + sum(e) + turn) for e in episodes]
            found = run(session, requests, every)
            for episode in EPISODES:
                if forget:
                    session.forget(episode)
                history[episode] += [*found[episode].token_ids.tolist(), *range(4, 5 + episode[0] + turn)]
            turns.append({episode: found[episode] for episode in EPISODES})
        return turns, session.prefilled_tokens


def test_replies_depend_on_their_own_episode_alone(engine: HFEngine) -> None:
    """Not on the order of the requests, on the rows that decode beside them, or on what is kept between turns."""
    first, prefilled = play(engine, order=0, every=0, max_rows=6)
    for options in (
        {"every": 0, "max_rows": 2},
        {"every": 3, "max_rows": 6},
        {"every": 0, "max_rows": 6, "forget": True},
    ):
        again, _ = play(engine, order=1, **options)
        for one, other in zip(first, again, strict=True):
            for episode in EPISODES:
                assert one[episode].token_ids.tolist() == other[episode].token_ids.tolist(), (options, episode)
                np.testing.assert_allclose(one[episode].log_probs, other[episode].log_probs, atol=2e-5)
    assert any(len(set(turn.token_ids.tolist())) > 1 for turn in first[1].values())
    if engine.uses_cache and engine.max_length and _window(engine) > 100:
        whole = sum(map(len, PROMPTS))  # each prompt once for its group
        for turn, found in enumerate(first[:-1]):  # the reply's last token was sampled and not run
            whole += sum(1 + 1 + episode[0] + turn for episode in found)
        assert prefilled == whole


def _window(engine: HFEngine) -> float:
    window = getattr(engine._model.config, "sliding_window", None)  # type: ignore[attr-defined]
    return float("inf") if window is None else window


def test_a_turn_has_draws_of_its_own(make_tiny_model: Any) -> None:
    """Without them an episode would repeat its first reply wherever the model knows no better."""
    engine = HFEngine(make_tiny_model("qwen2"), eos_token_ids=[])
    with engine.open_turns(SAMPLING, SEED, 1) as session:
        replies = [run(session, [ask((0, 0), PROMPTS[0], turn=turn)])[0, 0].token_ids.tolist() for turn in range(4)]
    assert len({tuple(reply) for reply in replies}) == 4


def test_a_forgotten_episode_drops_its_reply(engine: HFEngine) -> None:
    """One that is decoded and one that waits for a row; the replies beside them stay the same."""
    requests = [ask(episode, PROMPTS[episode[0]]) for episode in EPISODES]
    with engine.open_turns(SAMPLING, SEED, 6) as session:
        whole = run(session, requests)
    dropped = {EPISODES[1], EPISODES[5]}
    with engine.open_turns(SAMPLING, SEED, 4) as session:
        for request in requests:
            session.submit(request)
        found = {request.episode: turn for request, turn in [*session.step(), *session.step()]}
        before = len(session)
        for episode in dropped:
            session.forget(episode)
        assert len(session) < before
        found |= run(session, [])
    assert found.keys() == whole.keys() - dropped
    for episode, turn in found.items():
        assert turn.token_ids.tolist() == whole[episode].token_ids.tolist()


def test_stop_strings_of_a_request_end_it(make_tiny_model: Any, byte_tokenizer: Any) -> None:
    model = make_tiny_model("qwen2", vocab_size=259)
    engine = HFEngine(model, byte_tokenizer, eos_token_ids=[])
    prompt = byte_tokenizer("hello")["input_ids"]
    with engine.open_turns(SAMPLING, SEED, 2) as session:
        free = run(session, [ask((0, 0), prompt, most=40)])[0, 0].token_ids
        text = byte_tokenizer.decode([int(free[5])])
        found = run(session, [ask((0, 0), prompt, most=40, stop=(text,)), ask((0, 1), prompt, most=40)])
    stopped = found[0, 0].token_ids
    assert found[0, 0].stopped
    assert stopped.tolist() == free[: len(stopped)].tolist()
    assert len(stopped) <= 6
    assert not found[0, 1].stopped


def test_requests_that_do_not_fit_are_refused(make_tiny_model: Any) -> None:
    engine = HFEngine(make_tiny_model("qwen2", max_position_embeddings=16), eos_token_ids=[])
    with engine.open_turns(SAMPLING, SEED, 2) as session:
        with pytest.raises(ValueError, match="16 positions"):
            session.submit(ask((0, 0), range(12)))
        with pytest.raises(ValueError, match="needs a prompt"):
            session.submit(ask((0, 0), []))
        assert len(session) == 0


def test_logits_that_are_not_finite_are_named(make_tiny_model: Any) -> None:
    model = make_tiny_model("qwen2")
    engine = HFEngine(model, eos_token_ids=[])
    with torch.no_grad():
        model.get_output_embeddings().weight.fill_(float("nan"))
    with engine.open_turns(SAMPLING, SEED, 2) as session, pytest.raises(NonFiniteLogitsError, match=r"prompts\[1\]"):
        run(session, [ask((1, 0), PROMPTS[0])])


def test_masked_rows_share_heads_without_copies(make_tiny_model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of different lengths have a mask, for which transformers copies keys and values for each query head."""
    from transformers.integrations import sdpa_attention

    copied: list[tuple[int, ...]] = []
    whole = sdpa_attention.repeat_kv

    def repeat(states: torch.Tensor, times: int) -> torch.Tensor:
        copied.append(tuple(states.shape))
        return whole(states, times)

    model = make_tiny_model("qwen2")
    assert model.config.num_key_value_heads < model.config.num_attention_heads
    engine = HFEngine(model, eos_token_ids=[])
    monkeypatch.setattr(sdpa_attention, "repeat_kv", repeat)
    with engine.open_turns(SAMPLING, SEED, 6) as session:
        turns = run(session, [ask(episode, PROMPTS[episode[0]]) for episode in EPISODES])
    assert (len(turns), copied) == (len(EPISODES), [])


@pytest.mark.parametrize("length", [1, 7])
def test_shared_heads_are_the_same_bits_as_copies(length: int) -> None:
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    generator = torch.Generator().manual_seed(0)
    query = torch.randn(3, 8, length, 32, generator=generator)
    key, value = (torch.randn(3, 2, 60, 32, generator=generator)[:, :, 5:45] for _ in range(2))
    mask = torch.arange(40) >= torch.tensor([0, 7, 20])[:, None]
    module: Any = torch.nn.Module()
    module.num_key_value_groups, module.is_causal = 4, True
    given = (module, query, key, value, mask[:, None, None].expand(-1, 1, length, -1))
    with torch.no_grad():
        expected, _ = sdpa_attention_forward(*given, scaling=0.2)
        found, _ = packed_attention(*given, scaling=0.2)
    assert found.equal(expected)
    assert found.stride() == expected.stride()
