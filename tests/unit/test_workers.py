"""Functions in worker processes: deadlines that hold, deaths that are named, and nothing left behind."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from misbehaving import judges, misbehaves
from test_score import group

from rlox_grpo.rewards import OUTCOMES, InWorkers, RewardError, TagFormat, in_workers, score, status_counts
from rlox_grpo.rewards.worker import Job
from rlox_grpo.rewards.worker_pool import START_SECONDS, Outcomes, Worker
from rlox_grpo.rewards.workers import closing_workers

TIMEOUT = 1.0
SLACK = 20.0
"""What a kill, a new process and this machine's other work may add."""

posix = pytest.mark.skipif(os.name != "posix", reason="signals and process groups")


def outcomes_of(function: InWorkers, texts: list[str]) -> tuple[list[str], dict[int, str], list[float]]:
    found = function.outcomes({"completions": texts})
    return [OUTCOMES[code] for code in found.codes], found.messages, found.scores.tolist()


@pytest.fixture
def misbehaving() -> Iterator[InWorkers]:
    function = InWorkers(misbehaves, timeout=TIMEOUT, workers=2, on_error="none")
    with closing_workers([function]):
        yield function


@pytest.mark.parametrize("text", ["loop", "loop in C", "sleep"])
def test_nothing_outlives_its_deadline(misbehaving: InWorkers, text: str) -> None:
    misbehaving.start()
    start = time.monotonic()
    outcomes, _, scores = outcomes_of(misbehaving, ["a", text, "bb"])
    assert TIMEOUT <= time.monotonic() - start < TIMEOUT + SLACK
    assert outcomes == ["ok", "timeout", "ok"]
    assert [scores[0], scores[2]] == [1.0, 2.0]
    assert np.isnan(scores[1])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("exit", "its worker exited with code 3"),
        pytest.param("crash", "its worker died of SIGSEGV", marks=posix),
        ("raise", "KeyError: 'gone' (misbehaving.py, line"),
        ("sys.exit", "SystemExit: 1 (misbehaving.py, line"),
        ("memory", "MemoryError (misbehaving.py, line"),
    ],
)
def test_a_failure_costs_its_own_sample_and_says_why(misbehaving: InWorkers, text: str, message: str) -> None:
    outcomes, messages, scores = outcomes_of(misbehaving, ["a", text, "bb", text])
    assert outcomes == ["ok", "error", "ok", "error"]
    assert [scores[0], scores[2]] == [1.0, 2.0]
    assert messages[1].startswith(message)
    assert messages[3].startswith(message)


def test_what_a_function_prints_is_no_answer(misbehaving: InWorkers, capfd: pytest.CaptureFixture[str]) -> None:
    assert outcomes_of(misbehaving, ["print"]) == (["ok"], {}, [5.0])
    assert "not an answer" in capfd.readouterr().err


def test_the_workers_are_kept_and_end_with_close() -> None:
    function = InWorkers(lambda completions: [float(os.getpid())], timeout=5.0, workers=1)
    with closing_workers([function]):
        first, second = function(completions=["a"]), function(completions=["a", "b"])
        assert first * 2 == second  # one process for all three calls
        assert int(first[0] or 0) != os.getpid()
        (worker,) = function._pool._workers
        process = worker._process
    assert process is not None
    assert process.returncode is not None
    assert worker._process is None
    assert function(completions=["a"]) != first  # and a later call starts a new one
    function.close()


def test_an_unused_function_starts_nothing() -> None:
    function = InWorkers(misbehaves)
    assert function._pool._workers == []
    assert function(completions=[]) == []
    assert function._pool._workers == []


def test_coroutines_wait_together_each_under_its_own_deadline() -> None:
    # 500 sleeps of 0.05 s in turn would be 25 s. A busy machine takes seconds for what takes tenths on an idle one.
    function = InWorkers(judges, timeout=3.0, workers=2, on_error="none")
    with closing_workers([function]):
        function.start()
        start = time.monotonic()
        outcomes, messages, _ = outcomes_of(function, ["a"] * 1000 + ["slow", "raise"])
        assert time.monotonic() - start < 25
        assert outcomes == ["ok"] * 1000 + ["timeout", "error"]
        assert messages[1001].startswith("KeyError: 'gone'")


def test_a_coroutine_that_blocks_the_loop_is_killed_too() -> None:
    function = InWorkers(judges, timeout=TIMEOUT, workers=1)
    with closing_workers([function]):
        function.start()
        start = time.monotonic()
        assert outcomes_of(function, ["a", "blocks"])[0][1] == "timeout"
        assert time.monotonic() - start < TIMEOUT + 1.0 + SLACK  # the loop's own grace is 1 s


def test_a_batch_shares_one_deadline() -> None:
    def ranks(completions: list[str]) -> list[float | None]:
        if "loop" in completions:
            while True:
                pass
        return [None if text == "skip" else float(sorted(completions).index(text)) for text in completions]

    function = InWorkers(ranks, timeout=TIMEOUT / 3, per="batch", timeout_score=-1.0)
    with closing_workers([function]):
        assert function(completions=["b", "a", "skip"]) == [1.0, 0.0, None]
        start = time.monotonic()
        assert function(completions=["b", "loop", "c"]) == [-1.0] * 3
        assert TIMEOUT <= time.monotonic() - start < TIMEOUT + SLACK


def test_every_column_and_kind_of_completion_arrives() -> None:
    def looks(completions: Any, prompts: Any, target: Any, completion_ids: Any = None) -> list[float]:
        assert len(completions) == len(prompts) == len(target) == 1
        text = completions[0][0]["content"] if isinstance(completions[0], list) else completions[0]
        return [float(text == prompts[0] == target[0])]

    function = InWorkers(looks)
    with closing_workers([function]):
        scores = function(
            prompts=["a", "b"], completions=["a", "b"], target=["a", "x"], trainer_state=object(), log_metric=print
        )
        assert scores == [1.0, 0.0]
        scored = score([group(["a", "b"], source="a", target="a")], function)
        assert scored[0].rewards.tolist() == [1.0, 0.0]
        assert list(scored[0].components) == ["looks"]


def test_plain_modules_tensors_arrive_as_tensors() -> None:
    def longer(completions: Any, prompts: Any) -> Any:
        return torch.stack([c.sum() + p.sum() for c, p in zip(completions, prompts, strict=True)])

    function = InWorkers(longer)
    with closing_workers([function]):
        scored = score([group([None, None], ids=3), group([None, None], ids=3)], function)
    assert scored[0].rewards.tolist() == [3.0, 4.0]  # [0] and [0, 1], each beside the prompt 0 1 2


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda completions: [1.0, 2.0], "it returned 2 scores for 1 completions"),
        (lambda completions: ["x"], "it returned 'x' for sample 0"),
        (lambda completions: [float("inf")], "it returned inf for sample 0"),
        (lambda completions: None, "it returned None"),
    ],
)
def test_what_is_no_reward_is_refused(function: Any, message: str) -> None:
    with closing_workers([in_worker := InWorkers(function)]), pytest.raises(RewardError, match=message) as caught:
        in_worker(completions=["a", "b"])
    assert caught.value.row in (0, 1)


def test_score_stops_and_names_the_sample() -> None:
    groups = [group(["a", "b"], 4), group(["c", "raise"], 7)]
    function = InWorkers(misbehaves, workers=2)
    with closing_workers([function]), pytest.raises(RewardError) as caught:
        score(groups, [TagFormat(), function])
    message = str(caught.value)
    assert message.startswith("reward function misbehaves: KeyError: 'gone' (misbehaving.py, line ")
    assert message.endswith("the sample is completion 1 of prompts[7]: 'raise'")
    assert caught.value.row == 3


def test_score_goes_on_without_the_samples_that_failed(
    misbehaving: InWorkers, caplog: pytest.LogCaptureFixture
) -> None:
    scored = score([group(["a", "loop"], 4), group(["exit", "bb"], 7)], [TagFormat(), misbehaving])
    rewards = np.concatenate([part.components["misbehaves"] for part in scored])
    assert rewards.tolist() == pytest.approx([1.0, np.nan, np.nan, 2.0], nan_ok=True)
    assert scored[0].rewards.tolist() == pytest.approx([1.0, np.nan], nan_ok=True)  # not TagFormat's 0
    assert status_counts(scored)["misbehaves"] == {"ok": 2, "timeout": 1, "error": 1}
    assert scored[0].outcomes["misbehaves"].tolist() == [0, 1]
    assert "of 4 samples 1 ran out of time and 1 failed; the first: it took more than 1 s" in caplog.text
    assert "completion 1 of prompts[4]: 'loop'" in caplog.text


def test_all_samples_may_fail_but_none_may_have_no_score(misbehaving: InWorkers) -> None:
    scored = score([group(["raise", "exit"])], misbehaving)
    assert np.isnan(scored[0].rewards).all()
    silent = InWorkers(lambda completions: [None])
    with closing_workers([silent]), pytest.raises(RewardError, match="returned no score for any of 2 completions"):
        score([group(["a", "b"])], silent)


def test_what_cannot_be_sent_is_refused_before_any_work() -> None:
    lock = threading.Lock()

    def locks(completions: list[str]) -> list[float]:
        with lock:
            return [0.0]

    with pytest.raises(
        RewardError, match=r"reward function locks cannot be sent to a worker process \(TypeError: .*lock"
    ):
        InWorkers(locks).start()


def test_what_cannot_be_loaded_over_there_is_refused() -> None:
    class Loads:
        def __reduce__(self) -> Any:
            return int, ("no number",)

        def __call__(self, completions: list[str]) -> list[float]:
            return [0.0]

    function = InWorkers(Loads())
    with pytest.raises(RewardError, match="reward function Loads cannot run in a worker process: ValueError: invalid"):
        function.start()
    with pytest.raises(RewardError, match="cannot run in a worker process"):
        function(completions=["a"])


def test_a_worker_that_dies_at_the_start_is_no_endless_loop() -> None:
    class Dies:
        def __reduce__(self) -> Any:
            return os._exit, (7,)

        def __call__(self, completions: list[str]) -> list[float]:
            return [0.0]

    start = time.monotonic()
    with pytest.raises(RewardError, match="cannot run in a worker process: exited with code 7"):
        InWorkers(Dies(), workers=2)(completions=["a"] * 10)
    assert time.monotonic() - start < START_SECONDS / 2


def test_arguments_that_no_column_gives_are_named_at_once() -> None:
    with pytest.raises(RewardError, match="reward function scores requires solution, rubric"):
        InWorkers(named_by_columns)(completions=["a"])
    assert InWorkers(named_by_columns)._pool._workers == []


def named_by_columns(completions: Any, *, solution: Any, rubric: Any) -> list[float]:
    return [0.0]


named_by_columns.__name__ = "scores"


@pytest.mark.parametrize(
    "options",
    [
        {"timeout": 0.0},
        {"timeout": float("nan")},
        {"timeout": float("inf")},
        {"workers": 0},
        {"per": "group"},
        {"on_error": "zero"},
    ],
)
def test_bad_settings_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r" is .*, expected "):
        InWorkers(misbehaves, **options)


def test_a_copy_has_the_settings_and_its_own_workers() -> None:
    function = InWorkers(misbehaves, timeout=2.0, workers=3, on_error="none", timeout_score=-1.0, weight=0.5)
    copy = pickle.loads(pickle.dumps(function))  # noqa: S301
    assert copy == function
    assert copy.__name__ == "misbehaves"
    assert copy._pool is not function._pool


def test_only_a_users_functions_go_to_workers() -> None:
    rule, own = TagFormat(), InWorkers(misbehaves, timeout=1.0)
    wrapped = in_workers([rule, own, misbehaves], 2.0, 3, "none")
    assert wrapped[:2] == [rule, own]
    assert wrapped[2] == InWorkers(misbehaves, timeout=2.0, workers=3, on_error="none")
    assert in_workers([misbehaves], None, None, "stop") == [misbehaves]


SCRIPT = """
import time
from rlox_grpo.rewards import InWorkers
print("the script runs")
scale = 2.0
def double(completions):
    if completions == ["loop"]:
        while True:
            pass
    return [scale * len(completions[0])]
print(InWorkers(double, timeout=0.5)(completions=["abc", "loop"]))
"""


def test_a_script_needs_no_guard_and_leaves_no_process(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    command = [sys.executable, "-X", "dev", "-W", "error", str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.splitlines() == ["the script runs", "[6.0, None]"]
    assert done.stderr == ""


@posix
def test_a_killed_trainer_leaves_no_worker_running(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    # The function writes its process's number, then loops; the deadline is far beyond the kill.
    script.write_text(
        "import os, pathlib, time\nfrom rlox_grpo.rewards import InWorkers\n"
        "def loops(completions):\n"
        f"    pathlib.Path({str(tmp_path / 'pid')!r}).write_text(str(os.getpid()))\n"
        "    while True: pass\n"
        "InWorkers(loops, timeout=1.0, workers=1)(completions=['a'] * 100)\n"
    )
    trainer = subprocess.Popen([sys.executable, str(script)])
    try:
        deadline = time.monotonic() + 30
        while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text():
            assert time.monotonic() < deadline
            time.sleep(0.01)
    finally:
        trainer.kill()
        trainer.wait()
    worker = int((tmp_path / "pid").read_text())
    deadline = time.monotonic() + 1.0 + 5.0 + SLACK  # its own alarm: the timeout and 5 s
    while (running := _is_running(worker)) and time.monotonic() < deadline:
        time.sleep(0.05)
    if running:
        os.kill(worker, 9)
    assert not running


def _is_running(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    state = Path(f"/proc/{process}/stat")
    # Whoever adopted it may not have reaped it yet.
    return not (state.exists() and state.read_text().rpartition(")")[2].split()[0] == "Z")


@posix
def test_a_kill_takes_what_the_function_started(tmp_path: Path) -> None:
    def starts(completions: list[str]) -> list[float]:
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        (tmp_path / "pid").write_text(str(child.pid))
        child.wait()
        return [0.0]

    function = InWorkers(starts, timeout=TIMEOUT)
    with closing_workers([function]):
        assert outcomes_of(function, ["a"])[0] == ["timeout"]
    child = int((tmp_path / "pid").read_text())
    deadline = time.monotonic() + SLACK
    while _is_running(child):
        assert time.monotonic() < deadline
        time.sleep(0.02)


class Forging(Worker):
    """A worker whose process answers for rows that it was not asked about, and twice for one that it was."""

    def __init__(self) -> None:
        super().__init__("forging", b"", [])
        self.answers = iter(
            [{"row": row, "score": score} for row, score in ((0, 9), (-1, 9), (7, 9), (2, 0.5), (2, 9))]
        )

    def start(self) -> None:
        pass

    def ask(self, payload: bytes) -> dict[str, Any]:
        return {"started": True}

    def _receive(self) -> dict[str, Any]:
        return next(self.answers, {"done": True})


def test_a_worker_scores_the_rows_of_its_job_alone_and_once():
    found = Outcomes(np.full(4, np.nan), np.zeros(4, np.uint8), {})
    Forging().do(Job(range(2, 3), {}, each=True, timeout=1.0, deadline=1.0), found)
    np.testing.assert_array_equal(found.scores, [np.nan, np.nan, 0.5, np.nan])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"timeout": "5"}, "timeout is '5', expected seconds"),
        ({"workers": 1.5}, "workers is 1.5, expected a whole number"),
        ({"timeout_score": "0"}, "timeout_score is '0', expected a finite number"),
        ({"timeout_score": float("-inf")}, "timeout_score is -inf, expected a finite number"),
    ],
)
def test_arguments_of_workers_are_numbers(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        InWorkers(len, **arguments)
