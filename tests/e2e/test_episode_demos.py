"""The demos of several turns: their optimum, their scripted players, and a short run of each."""

import json
import re
from itertools import pairwise

import numpy as np
import pytest

from rlox_grpo.cli import main
from rlox_grpo.demo import frozen_lake, guess_the_number
from rlox_grpo.demo.episodes import make_trainer, run_task, write_example

TASKS = [module.TASK for module in (guess_the_number, frozen_lake)]
SHORT = {
    "max_steps": 2,
    "group_size": 4,
    "prompts_per_step": 2,
    "checkpoint_steps": 1,
    "eval_steps": 0,
    "eval_samples": 1,
    "log_to": [],
}


def test_bisection_is_the_optimum_of_guess_the_number():
    assert guess_the_number.compute_optimum() == 1.0
    assert guess_the_number.find_best(15, 3) == 7  # 1 + 2 + 4 numbers within three guesses
    assert guess_the_number.find_best(100, 5) == 31


def play_lake(choose, episodes, seed):
    """The share of episodes of Gymnasium's own lake that reach the goal."""
    lake, reached = frozen_lake.make_lake(), 0.0
    for episode in range(episodes):
        place, _ = lake.reset(seed=seed + episode)
        for step in range(frozen_lake.STEPS):
            place, reward, fell, late, _ = lake.step(choose(place, step))
            reached += reward
            if fell or late:
                break
    return reached / episodes


def test_value_iteration_is_the_optimum_of_frozen_lake():
    """The best policy by value iteration, played in Gymnasium itself, succeeds as often as the optimum says."""
    table = frozen_lake.make_lake().unwrapped.P
    values, best = np.zeros(frozen_lake.FIELDS), []
    for _ in range(frozen_lake.STEPS):
        paid = np.array(
            [
                [sum(p * (r + (0 if end else values[there])) for p, there, r, end in table[s][a]) for a in range(4)]
                for s in range(frozen_lake.FIELDS)
            ]
        )
        values = paid.max(axis=1)
        best.insert(0, paid.argmax(axis=1))
    optimum = frozen_lake.compute_optimum()
    assert optimum == pytest.approx(values[0])
    found = play_lake(lambda place, step: int(best[step][place]), 2000, 0)
    assert abs(found - optimum) < 4 * (optimum * (1 - optimum) / 2000) ** 0.5
    assert play_lake(lambda place, step: (place + step) % 4, 500, 0) < optimum / 2


def test_the_players_are_read_by_the_tokenizers_and_end_where_the_tasks_do():
    rng = np.random.default_rng(0)
    for task in TASKS:
        tokenizer = task.build_tokenizer()
        for _ in range(200):
            messages, reply = task.draw_conversation(rng)
            assert [a["role"] != b["role"] for a, b in pairwise(messages)].count(False) == 0
            turns = sum(message["role"] == "assistant" for message in messages)
            assert turns < task.settings["max_turns"]
            prompt, _ = write_example(tokenizer, messages, reply)
            ids = tokenizer(prompt + reply + tokenizer.eos_token)["input_ids"]
            assert tokenizer.decode(ids) == prompt + reply + tokenizer.eos_token
            assert len(ids) <= task.warm_start.get("positions", 128)
            assert len(tokenizer(reply)["input_ids"]) < task.settings["max_new_tokens"]


@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.name)
def test_a_short_demo_runs_and_resumes(task, tmp_path, monkeypatch):
    monkeypatch.setattr(frozen_lake, "HELD_OUT", 4)
    last = run_task(task, tmp_path, seed=1, settings={**SHORT, "max_steps": 1}, warm_start_steps=3)
    assert re.fullmatch(r"held-out accuracy \d\.\d{3} -> \d\.\d{3} of \d\.\d{3} in \d+ s", last)
    run_task(task, tmp_path, seed=1, settings=SHORT, warm_start_steps=3)
    steps = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [step["step"] for step in steps] == [1, 2]
    assert "episode/turns_mean" in steps[0]
    assert (tmp_path / "final" / "model.safetensors").exists()


def test_the_same_seed_makes_the_same_run(tmp_path):
    found = []
    for name in "ab":
        trainer = make_trainer(frozen_lake.TASK, tmp_path / name, seed=2, settings=SHORT, warm_start_steps=3)
        found.append(trainer.evaluate(frozen_lake.make_rows(2)[1][:4], samples=4))
    assert found[0] == found[1]


def test_the_command_line_chooses_the_task(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(
        "rlox_grpo.demo.episodes.run_task", lambda task, out, seed: asked.append((task.name, out, seed))
    )
    monkeypatch.setattr("rlox_grpo.demo.run.run_demo", lambda out, seed: asked.append(("countdown", out, seed)))
    assert main(["demo"]) == 0
    assert main(["demo", "--task", "frozen_lake", "--out", str(tmp_path), "--seed", "4"]) == 0
    assert main(["demo", "--task", "guess_the_number"]) == 0
    assert [(name, str(out), seed) for name, out, seed in asked] == [
        ("countdown", "runs/demo", 0),
        ("frozen_lake", str(tmp_path), 4),
        ("guess_the_number", "runs/demo_guess_the_number", 0),
    ]
