"""The demos of several turns: their optimum, their scripted players, and a short run of each."""

import json
import re
from itertools import pairwise

import numpy as np
import pytest

from rlox_grpo.cli import main
from rlox_grpo.demo import countdown_calculator, frozen_lake, guess_the_number
from rlox_grpo.demo.episodes import evaluate_without_tools, make_trainer, run_task, write_example
from rlox_grpo.rewards import Countdown
from rlox_grpo.rollout.episodes.play import play_episode
from rlox_grpo.rollout.episodes.tools import make_schemas

TASKS = [module.TASK for module in (guess_the_number, countdown_calculator, frozen_lake)]
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


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("6+5*9", "51"),
        ("10*10", "100"),
        ("10*10+1", "too large"),
        ("6-5-9", "negative"),
        ("3", "3"),
        ("6+", "error"),
        ("", "error"),
        ("6/5", "error"),
        ("1/0", "error"),
        ("9**9**9**9", "error"),
        ("__import__('os')", "error"),
    ],
)
def test_the_calculator_answers_in_words_of_the_vocabulary(expression, value):
    assert countdown_calculator.calculate(expression) == value
    assert countdown_calculator.fail(expression) == "error"
    tokenizer = countdown_calculator.TASK.build_tokenizer()
    assert tokenizer.decode(tokenizer(value)["input_ids"]) == value


def test_an_episode_of_countdown_calls_the_calculator_and_is_scored_by_the_exact_rule():
    row = {"prompt": "6,5,9:39", "nums": [6, 5, 9], "target": 39}
    call, end, _ = countdown_calculator.write_call("6+5*9", "51").partition("<eos>")
    assert end
    said, replies = [], [call, call.replace("6+5*9", "6*5+9"), "<answer>6*5+9</answer>"]
    play_episode(None, row, iter(replies).__next__, said.append, tools=[*countdown_calculator.TASK.tools], config=None)
    assert [line for line in said if not line.startswith("tool calculate(")][:3] == [
        "user: 6,5,9:39",
        "tool calculate: 51",
        "tool calculate: 39",
    ]
    answers = [replies[-1], "<answer>6+5*9</answer>", "<answer>30+9</answer>", replies[1]]
    columns = {"nums": [row["nums"]] * 4, "target": [row["target"]] * 4}
    assert Countdown()(completions=answers, **columns) == [1.0, 0.0, 0.0, 0.0]
    assert isinstance(countdown_calculator.TASK.rewards[0], Countdown)


def test_every_problem_can_be_solved_and_no_numbers_are_on_both_sides():
    train, held_out = countdown_calculator.make_rows(0)
    assert len(held_out) == countdown_calculator.NUM_HELD_OUT
    for row in held_out:
        found = countdown_calculator._list_expressions(tuple(row["nums"]))
        assert all(countdown_calculator.evaluate(text) == value for text, value in found)
        likely = [text for text, value in found if value == row["target"]]
        assert Countdown()(completions=[f"<answer>{likely[0]}</answer>"], nums=[row["nums"]], target=[row["target"]])[0]
    trained = {tuple(sorted(row["nums"])) for row in train}
    for seed in range(3):
        assert not trained & {tuple(sorted(row["nums"])) for row in countdown_calculator.make_rows(seed)[1]}


def test_the_calculator_makes_the_task_a_search():
    """The five best pairs of signs in a fixed order reach most targets, and the best pair alone few."""
    rows = countdown_calculator.make_rows(0)[0]
    reached = np.array(
        [
            [value == row["target"] for _, value in countdown_calculator._list_expressions(tuple(row["nums"]))]
            for row in rows
        ]
    )
    shares = []
    for _ in range(countdown_calculator.CALLS):
        reached = reached[~reached[:, reached.sum(axis=0).argmax()]]
        shares.append(1 - len(reached) / len(rows))
    assert shares[0] < 0.3
    assert shares[-1] > 0.8


def test_the_calculators_player_writes_what_the_template_writes_and_calls_first():
    rng = np.random.default_rng(0)
    tokenizer = countdown_calculator.TASK.build_tokenizer()
    for _ in range(50):
        messages, rest = countdown_calculator.draw_conversation(rng)
        *calls, answer = rest.split("<assistant>")
        assert 1 <= len(calls) <= countdown_calculator.CALLS
        shown = list(messages)
        for call in calls:
            text, result = re.fullmatch(r'{.*{"expression": "(.*)"}}<eos><tool>(.*)', call).groups()
            assert result in {countdown_calculator.calculate(text), "error"}
            function = {"name": "calculate", "arguments": {"expression": text}}
            shown.append({"role": "assistant", "tool_calls": [{"type": "function", "function": function}]})
            shown.append({"role": "tool", "content": result})
            assert len(tokenizer(call.partition("<eos>")[0])["input_ids"]) < TASKS[1].settings["max_new_tokens"]
        assert len(tokenizer(answer)["input_ids"]) < TASKS[1].settings["max_new_tokens"]
        shown.append({"role": "assistant", "content": answer})
        whole = tokenizer.apply_chat_template(shown, tokenize=False)
        assert "".join(write_example(tokenizer, messages, rest)) + "<eos>" == whole
        assert len(tokenizer(whole)["input_ids"]) <= TASKS[1].warm_start.get("positions", 128)


def test_the_trained_policy_is_also_evaluated_with_a_tool_that_computes_nothing(tmp_path, monkeypatch):
    task, asked = countdown_calculator.TASK, {}

    class Trainer:
        def __init__(self, model, rewards, **options):
            asked.update(model=model, **options)

        def evaluate(self, prompts):
            asked["prompts"] = prompts
            return {"accuracy": 0.25}

    monkeypatch.setattr("rlox_grpo.demo.episodes.GRPO", Trainer)
    assert evaluate_without_tools(task, tmp_path, 5, {"eval_samples": 3}) == 0.25
    assert asked["model"] == tmp_path / "final"
    assert asked["prompts"] == task.make_rows(5)[1]
    assert (asked["seed"], asked["eval_samples"], asked["max_turns"]) == (5, 3, countdown_calculator.CALLS + 1)
    assert make_schemas(asked["tools"])[0]["function"]["name"] == make_schemas(task.tools)[0]["function"]["name"]
    assert [tool("1+1+1") for tool in asked["tools"]] == ["error"]


def test_the_players_are_read_by_the_tokenizers_and_end_where_the_tasks_do():
    rng = np.random.default_rng(0)
    for task in (guess_the_number.TASK, frozen_lake.TASK):
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
def test_a_short_demo_runs_and_resumes(task, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(frozen_lake, "HELD_OUT", 4)
    monkeypatch.setattr(countdown_calculator, "NUM_HELD_OUT", 4)
    last = run_task(task, tmp_path, seed=1, settings={**SHORT, "max_steps": 1}, warm_start_steps=3)
    assert ("the trained policy without the tool: 0." in capsys.readouterr().out) == bool(task.tools)
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


def test_the_command_line_chooses_the_task(tmp_path, monkeypatch, capsys):
    asked = []
    monkeypatch.setattr(
        "rlox_grpo.demo.episodes.run_task",
        lambda task, out, *, seed, settings: asked.append((task.name, out, seed, settings)),
    )
    monkeypatch.setattr(
        "rlox_grpo.demo.run.run_demo",
        lambda out, *, seed, settings: asked.append(("countdown", out, seed, settings)),
    )
    assert main(["demo", "--max_steps", "3", "--policy_loss", "p3o"]) == 0
    assert main(["demo", "--task", "frozen_lake", "--out", str(tmp_path), "--seed", "4"]) == 0
    assert main(["demo", "--task", "guess_the_number", "--kl_coef=0.1"]) == 0
    assert [(name, str(out), seed, settings) for name, out, seed, settings in asked] == [
        ("countdown", "runs/demo", 0, {"max_steps": 3, "policy_loss": "p3o"}),
        ("frozen_lake", str(tmp_path), 4, {}),
        ("guess_the_number", "runs/demo_guess_the_number", 0, {"kl_coef": 0.1}),
    ]
    assert main(["demo", "--output_dir", str(tmp_path)]) == 2
    assert "--output_dir: the demo writes its run and its models to --out" in capsys.readouterr().err
