"""Turns of conversations with pictures: log-probs against each conversation forwarded whole with its pixels.

Pictures are in the first prompt and in a later message. Weights are float32 in the engine and in the reference.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_picture_rows import EXCLUDED, make_reader
from torch import Tensor

from rlox_grpo.prompts.pictures import PictureReader
from rlox_grpo.rollout.engines.hf.engine import HFEngine
from rlox_grpo.rollout.engines.turns import SampledTurn, TurnRequest
from rlox_grpo.types import Int64Array, Picture, Sampling
from tiny_vlms import FAMILIES, draw_picture, make_tiny_vlm

pytestmark = pytest.mark.usefixtures("one_thread")
CLOSE = 2e-5  # float32 in two orders, as for completions of one turn
EPISODES = [(0, 0), (0, 1), (1, 0), (2, 0)]


def read(reader: PictureReader, seed: int, *size: int) -> Picture:
    return reader.read(draw_picture(seed, *size), Path(), "picture")


def show(picture: Picture) -> Int64Array:
    return np.concatenate([[21, 22], picture.token_ids, [23, 24, 25]])


def run(session: Any, requests: list[TurnRequest]) -> dict[tuple[int, int], SampledTurn]:
    for request in requests:
        session.submit(request)
    finished = {}
    while len(session):
        finished |= {request.episode: turn for request, turn in session.step()}
    return finished


def play(engine: HFEngine, first: list[Picture], later: list[Picture], *, forget: bool = False) -> tuple[Any, int]:
    """Three turns of each episode: a picture in the prompt, text, and in the second message another picture.

    The first two episodes have the first picture, and the last one has none until its last turn. Returns each turn's
    request and reply, and the number of prefilled tokens.
    """
    shown = {(0, 0): (first[0],), (0, 1): (first[0],), (1, 0): (first[1],), (2, 0): ()}
    history = {e: show(*shown[e]) if shown[e] else np.arange(21, 26) for e in EPISODES}
    turns = []
    with engine.open_turns(Sampling(6), 5, len(EPISODES)) as session:
        for turn in range(3):
            requests = [TurnRequest(e, turn, history[e], 3 + sum(e), pictures=shown[e]) for e in EPISODES]
            replies = run(session, requests)
            for request in requests:
                episode, reply = request.episode, replies[request.episode]
                turns.append((request, reply))
                if forget:
                    session.forget(episode)
                added = np.arange(30, 33 + episode[0])
                if turn == 1:
                    picture = later[EPISODES.index(episode) % 2]
                    shown[episode], added = (*shown[episode], picture), show(picture)
                history[episode] = np.concatenate([history[episode], reply.token_ids, added])
        return turns, session.prefilled_tokens


@torch.no_grad()
def score(model: Any, request: TurnRequest, reply: SampledTurn, family: str) -> Tensor:
    """Log-probs of a reply, ``[T]``; its whole conversation in one forward pass, with the pixels."""
    excluded = EXCLUDED[family]
    ids = torch.from_numpy(np.concatenate([request.token_ids, reply.token_ids]))[None]
    tensors = [picture.read() for picture in request.pictures]
    inputs = {name: torch.cat([each[name] for each in tensors]) for name in (tensors[0] if tensors else ())}
    if "image_grid_thw" in inputs:
        inputs["mm_token_type_ids"] = (ids == excluded[0]).int()
    if family == "gemma3":
        inputs["token_type_ids"] = (ids == excluded[0]).int()
    logits = model(input_ids=ids, use_cache=False, **inputs).logits[0]
    model.base_model.rope_deltas = None  # a later call must not read what this one left
    log_probs = torch.log_softmax(logits.index_fill(-1, torch.tensor(excluded), -torch.inf), -1)
    start = len(request.token_ids)
    return log_probs[start - 1 : -1].gather(1, ids[0, start:, None])[:, 0]


def make(family: str) -> tuple[Any, HFEngine, PictureReader]:
    model, processor = make_tiny_vlm(family)
    reader = make_reader(family, processor)
    return model.float(), HFEngine(model, processor.tokenizer, reader=reader, eos_token_ids=[2]), reader


@pytest.mark.parametrize("family", [*FAMILIES, "gemma3"])
def test_replies_have_the_log_probs_of_whole_conversations(family: str) -> None:
    """With the keys and values of earlier turns, and without them; equal ids with other pictures are apart."""
    model, engine, reader = make(family)
    first, later = [read(reader, 0), read(reader, 1)], [read(reader, 2, 48, 32), read(reader, 3)]
    assert np.array_equal(first[0].token_ids, first[1].token_ids)
    turns, prefilled = play(engine, first, later)
    for request, reply in turns:
        np.testing.assert_allclose(reply.log_probs, score(model, request, reply, family).numpy(), atol=CLOSE, rtol=0)
    again, whole = play(engine, first, later, forget=True)
    assert [reply.token_ids.tolist() for _, reply in turns] == [reply.token_ids.tolist() for _, reply in again]
    assert prefilled < whole


def test_swapped_pictures_change_log_probs() -> None:
    """Negative control: the check above fails by far with the other picture, in the prompt or in a later message."""
    model, engine, reader = make("qwen3_vl")
    first, later = [read(reader, 0), read(reader, 1)], [read(reader, 2), read(reader, 3)]
    turns, _ = play(engine, first, later)
    request, reply = turns[-4]  # the last turn of the first episode
    assert len(request.pictures) == 2
    for pictures in [(first[1], later[0]), (first[0], later[1]), (later[0], first[0])]:
        moved = score(model, replace(request, pictures=pictures), reply, "qwen3_vl").numpy()
        assert np.abs(moved - reply.log_probs).max() > 100 * CLOSE


def test_a_turn_with_another_picture_does_not_continue_the_stored_keys() -> None:
    """An episode whose picture is replaced between its turns gets the log-probs of the new picture."""
    model, engine, reader = make("qwen2_5_vl")
    old, new = read(reader, 0), read(reader, 1)
    with engine.open_turns(Sampling(6), 5, 1) as session:
        reply = run(session, [TurnRequest((0, 0), 0, show(old), 4, pictures=(old,))])[0, 0]
        context = np.concatenate([show(old), reply.token_ids, [30, 31]])
        request = TurnRequest((0, 0), 1, context, 4, pictures=(new,))
        reply = run(session, [request])[0, 0]
    np.testing.assert_allclose(reply.log_probs, score(model, request, reply, "qwen2_5_vl").numpy(), atol=CLOSE, rtol=0)


def test_requests_whose_pictures_do_not_fit_are_refused() -> None:
    _, engine, reader = make("qwen3_vl")
    picture = read(reader, 0)
    with engine.open_turns(Sampling(6), 5, 1) as session:
        for pictures in [(), (picture, picture)]:
            with pytest.raises(ValueError, match="ids of pictures"):
                session.submit(TurnRequest((0, 0), 0, show(picture), 4, pictures=pictures))
        assert len(session) == 0
    blind = HFEngine(engine._model, engine._tokenizer, eos_token_ids=[2])
    with blind.open_turns(Sampling(6), 5, 1) as session, pytest.raises(ValueError, match="this engine reads none"):
        session.submit(TurnRequest((0, 0), 0, show(picture), 4, pictures=(picture,)))


@pytest.mark.parametrize("is_frozen", [True, False])
def test_the_tower_reads_each_picture_once_in_a_prefill(is_frozen: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A frozen tower reads each of the four pictures once; a trained one reads it once in each prefill.

    The first prefill shows two pictures, the third turn's four; the second turn continues the stored keys and values.
    """
    model, engine, reader = make("qwen3_vl")
    model.model.visual.requires_grad_(not is_frozen)
    first, later = [read(reader, 0), read(reader, 1)], [read(reader, 2), read(reader, 3)]
    read_by_tower: list[str] = []
    vision: Any = engine._vision
    run_tower = vision._run_tower

    def count(pictures: list[Picture]) -> Any:
        read_by_tower.extend(picture.digest for picture in pictures)
        return run_tower(pictures)

    monkeypatch.setattr(vision, "_run_tower", count)
    play(engine, first, later)
    assert len(set(read_by_tower)) == 4
    assert len(read_by_tower) == (4 if is_frozen else 6)
