"""The example of an agent of the ``openai`` package in another process: its player, its rows, and a short run."""

import json
import re
import sys
from pathlib import Path

import numpy as np
import pytest

from rlox_grpo.demo.episodes import run_task, write_example

pytest.importorskip("openai")
EXAMPLES = Path(__file__).parents[2] / "examples"
SHORT = {
    "group_size": 2,
    "prompts_per_step": 1,
    "checkpoint_steps": 1,
    "eval_steps": 0,
    "log_to": [],
}


@pytest.fixture
def look_up(monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLES)
    import look_up

    yield look_up
    monkeypatch.delitem(sys.modules, "look_up")


def test_the_player_is_read_by_the_tokenizer_and_often_answers_too_early(look_up):
    rng, tokenizer, calls = np.random.default_rng(0), look_up.build(), [0, 0, 0]
    for _ in range(300):
        messages, reply = look_up.draw_conversation(rng)
        prompt, _ = write_example(tokenizer, messages, reply)
        ids = tokenizer(prompt + reply + tokenizer.eos_token)["input_ids"]
        assert tokenizer.decode(ids) == prompt + reply + tokenizer.eos_token
        assert len(tokenizer(reply)["input_ids"]) < look_up.TASK.settings["max_new_tokens"]
        assert len(ids) <= 128
        calls[len(messages) // 2] += reply.startswith("{")
    assert 30 < calls[0] < 70
    assert 30 < calls[1] < 70
    assert calls[2] == 0


def test_two_look_ups_answer_each_question_and_no_held_out_chain_is_trained(look_up):
    train, held_out = look_up.make_rows(0)
    chains = []
    for rows in (train, held_out):
        chains.append(set())
        for row in rows:
            person = row["question"].split("\n")[1]
            city = row["table"][person]
            assert row["table"][city] == row["answer"]
            chains[-1].add((person, city, row["answer"]))
    assert len(chains[1]) == look_up.NUM_HELD_OUT
    assert not chains[0] & chains[1]


def test_a_short_run_of_the_example_runs_and_resumes(look_up, tmp_path, monkeypatch):
    monkeypatch.setattr(look_up, "NUM_HELD_OUT", 1)
    for steps in (1, 2):
        last = run_task(look_up.TASK, tmp_path, settings={**SHORT, "max_steps": steps}, warm_start_steps=3)
        assert re.fullmatch(r"held-out accuracy \d\.\d{3} -> \d\.\d{3} of 1\.000 in \d+ s", last)
    steps = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [step["step"] for step in steps] == [1, 2]
    assert "episode/turns_mean" in steps[0]
    assert "environment/look_ups" in steps[0]
