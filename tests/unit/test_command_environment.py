"""A program as an environment: its reward, its failures, its deadline, and nothing of it left behind."""

from __future__ import annotations

import asyncio
import copy
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import chatml
from rlox_grpo import GRPO
from rlox_grpo.errors import ConfigError, EpisodeError
from rlox_grpo.rollout.episodes import command
from rlox_grpo.rollout.episodes.adapters import adapt_environment
from rlox_grpo.rollout.episodes.command import _run
from rlox_grpo.rollout.episodes.play import play_episode
from rlox_grpo.types import Completion

pytestmark = pytest.mark.skipif(not hasattr(os, "killpg"), reason="process groups are of POSIX")

ROWS = [{"secret": 3}, {"secret": 5}]
# Without the openai package, which takes a second to import: one call of urllib is enough here.
ASK = """
import json, os, sys, time, urllib.request

row = json.load(open(os.environ["RLOX_ROW_FILE"]))

def ask(messages):
    request = urllib.request.Request(
        os.environ["OPENAI_BASE_URL"] + "/chat/completions", json.dumps({"model": "m", "messages": messages}).encode(),
        {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"},
    )
    return json.load(urllib.request.urlopen(request))["choices"][0]["message"]

def user(text):
    return {"role": "user", "content": text}

"""
THREE = """
messages = []
for text in (f"{row['secret']} one", "two", "three"):
    messages.append(user(text))
    messages.append(ask(messages))
"""


@pytest.fixture(scope="module")
def model(make_tiny_model: Any, tokenizer: Any) -> Any:
    return make_tiny_model("qwen2", vocab_size=len(tokenizer), max_position_embeddings=2048)


def write(folder: Path, code: str) -> str:
    (folder / "my_agent.py").write_text(ASK + code)
    return f"command: python -S -E {folder / 'my_agent.py'}"


def play(environment: Any, model: Any, tokenizer: Any, rows: Any = ROWS, **options: Any) -> list[Completion]:
    return chatml.play_rows(environment, model, tokenizer, rows, **options)


def test_the_same_tokens_as_the_function(model: Any, tokenizer: Any, tmp_path: Path) -> None:
    command = write(
        tmp_path, THREE + "print('thinking')\n"
        "reward = sum(messages[-1]['content'].encode()) % 11\n"
        "print(json.dumps({'reward': reward, 'metrics': {'seen': row['secret']}}))\n",
    )  # fmt: skip
    expected = play(chatml.take_three_turns, model, tokenizer)
    found = play(command, model, tokenizer)
    for one, other in zip(found, expected, strict=True):
        assert one.token_ids.tolist() == other.token_ids.tolist()
        assert (one.turns, one.episode.reward) == (other.turns, other.episode.reward)
    assert [completion.episode.metrics["seen"] for completion in found] == [3, 3, 5, 5]


def test_the_same_weights_as_the_function(model: Any, tokenizer: Any, tmp_path: Path) -> None:
    def train(environment: Any) -> Any:
        trainer = GRPO(
            copy.deepcopy(model), environment=environment, tokenizer=tokenizer, group_size=2, max_new_tokens=5,
            prompts_per_step=2, max_steps=2, learning_rate=1e-2, log_to=(), seed=3, zero_variance="keep",
        )  # fmt: skip
        trainer.train(ROWS)
        return trainer.model

    expected = train(chatml.take_three_turns)
    found = train(write(tmp_path, THREE + "print(sum(messages[-1]['content'].encode()) % 11)\n"))
    assert any(not a.equal(b) for a, b in zip(expected.parameters(), model.parameters(), strict=True))
    assert all(a.equal(b) for a, b in zip(found.parameters(), expected.parameters(), strict=True))


@pytest.mark.parametrize(
    ("code", "reward"),
    [
        ("print('chatter'); print(0.25)", 0.25),
        ("print(json.dumps({'reward': None}))", None),
        ("print('null')", None),
        ("", 1.0),
        ("sys.exit(1)", 0.0),
        ("print('x' * 3_000_000); print(2)", 2.0),
    ],
)
def test_rewards(code: str, reward: Any, model: Any, tokenizer: Any, tmp_path: Path) -> None:
    for completion in play(write(tmp_path, f"ask([user('a')]); {code}"), model, tokenizer, ROWS[:1]):
        assert completion.episode.reward == reward


@pytest.mark.parametrize(
    ("code", "told"),
    [
        ("print('done')", "its last line on stdout is 'done': expected its reward"),
        ("print('NaN')", "expected a finite number"),
        ("print('true')", "its last line on stdout is 'true'"),
        ("print(json.dumps({'reward': 'high'}))", "reward is str 'high'"),
        ("print(json.dumps({'score': 1}))", "expected its reward"),
        ("print(1); sys.exit(3)", "exited with code 3"),
        ("raise RuntimeError('no luck')", "exited with code 1; its stderr ends with: .*no luck"),
        ("os.kill(os.getpid(), 9)", "killed by signal 9"),
        ("os.killpg(0, 9)", "killed by signal 9"),
    ],
)
def test_failures(code: str, told: str, model: Any, tokenizer: Any, tmp_path: Path) -> None:
    command = write(tmp_path, f"ask([user('a')])\n{code}")
    with pytest.raises(EpisodeError, match=f"(?s)environment my_agent failed at prompts.*{told}"):
        play(command, model, tokenizer, ROWS[:1])
    for completion in play(command, model, tokenizer, ROWS[:1], on_environment_error="end"):
        assert (completion.episode.stop_reason, completion.episode.reward) == ("environment_error", None)


KILLED = """
import signal, subprocess
if row["secret"] == 3:  # while the policy is asked; the killer is in no group of the program's
    target = {target}
    code = f"import os, time; time.sleep(0.05); os.kill({{target}}, 9)"
    subprocess.Popen([sys.executable, "-S", "-c", code], start_new_session=True)
    while True:
        ask([user("a")])
print(len(ask([user("a")])))
"""


@pytest.mark.parametrize("target", ["os.getpid()", "os.getppid()"])
def test_a_kill_from_outside_ends_one_episode(target: str, model: Any, tokenizer: Any, tmp_path: Path) -> None:
    """Of the program, or of the process that guards it; perhaps while a reply is sampled, perhaps the first one."""
    command = write(tmp_path, KILLED.format(target=target))
    found = play(command, model, tokenizer, on_environment_error="end", max_turns=10_000)
    ends = [(completion.episode.stop_reason, completion.episode.reward) for completion in found]
    assert ends == [("environment_error", None)] * 2 + [("completed", 3.0)] * 2
    with pytest.raises(EpisodeError, match="killed by signal 9"):
        play(command, model, tokenizer, max_turns=10_000)


def test_a_kill_before_the_first_reply_is_an_end_too(model: Any, tokenizer: Any, tmp_path: Path) -> None:
    command = write(tmp_path, "if row['secret'] == 3: os.kill(os.getpid(), 9)\nask([user('a')])")
    found = play(command, model, tokenizer, on_environment_error="end")
    ends = [(completion.episode.stop_reason, completion.episode.reward) for completion in found]
    assert ends == [("environment_error", None)] * 2 + [("completed", 1.0)] * 2


def test_a_program_that_asks_nothing_is_an_error(model: Any, tokenizer: Any, tmp_path: Path) -> None:
    with pytest.raises(EpisodeError, match="it ended before the policy had a turn"):
        play(write(tmp_path, "print(1)"), model, tokenizer, ROWS[:1])


def test_a_limit_ends_a_program(model: Any, tokenizer: Any, tmp_path: Path) -> None:
    command = write(tmp_path, THREE + "print(1)")
    for completion in play(command, model, tokenizer, ROWS[:1], max_turns=2):
        assert (completion.episode.stop_reason, completion.episode.reward) == ("max_turns", 0.0)


def test_a_program_that_is_cancelled_twice_is_waited_for() -> None:
    async def cancel_twice() -> subprocess.Popen[bytes]:
        loop, started = asyncio.get_running_loop(), []
        make_transport = loop._make_subprocess_transport

        async def noted(*given: Any, **options: Any) -> Any:
            transport = await make_transport(*given, **options)
            started.append(transport.get_extra_info("subprocess"))
            return transport

        loop._make_subprocess_transport = noted
        task = asyncio.create_task(_run([sys.executable, "-S", "-c", "import time; time.sleep(600)"], os.environ))
        while not started:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.05)
        task.cancel()
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return started[0]

    # Where it is not waited for, Popen warns when it is dropped, and the system keeps a zombie until then.
    assert [asyncio.run(cancel_twice()).returncode for _ in range(10)] == [-signal.SIGKILL] * 10


def test_the_reward_counts_although_a_process_of_a_session_of_its_own_keeps_stdout(monkeypatch: Any) -> None:
    """Such as a browser that the agent started. Without any output, exit code 0 would pay 1."""
    monkeypatch.setattr(command, "_GRACE", 1.0)
    code = (
        "import subprocess, sys\n"
        "keeper = [sys.executable, '-S', '-c', 'import time; time.sleep(20)']\n"
        "print(subprocess.Popen(keeper, start_new_session=True).pid)\n"
        "print(0.25); print('why', file=sys.stderr)"
    )
    exit_code, stdout, stderr = asyncio.run(_run([sys.executable, "-S", "-c", code], os.environ))
    os.kill(int(stdout.split()[0]), signal.SIGKILL)
    assert (exit_code, stdout.splitlines()[1:], stderr) == (0, [b"0.25"], b"why\n")


STARTS = """
import subprocess
ask([user("a")])
child = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(600)"])
with open(os.path.join(sys.argv[1], str(os.getpid())), "w") as file:
    file.write(f"{os.getpid()} {child.pid}")
"""


@pytest.mark.parametrize(("end", "reason"), [("time.sleep(600)", "timeout"), ("print(1)", "completed")])
def test_everything_it_started_ends_with_it(end: str, reason: str, model: Any, tokenizer: Any, tmp_path: Path) -> None:
    folder = tmp_path / "pids"
    folder.mkdir()
    command = f"{write(tmp_path, STARTS + end)} {folder}"
    timeout = {"episode_timeout": 3.0} if reason == "timeout" else {}
    for completion in play(command, model, tokenizer, ROWS[:1], **timeout):
        assert completion.episode.stop_reason == reason
    pids = [int(pid) for file in folder.iterdir() for pid in file.read_text().split()]
    assert reason == "timeout" or len(pids) == 4
    wait_for_end(pids)


def wait_for_end(pids: list[int]) -> None:
    deadline = time.monotonic() + 30
    while alive := [pid for pid in pids if is_alive(pid)]:
        assert time.monotonic() < deadline, alive
        time.sleep(0.05)


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


TRAINER = """
import asyncio, sys
from rlox_grpo.rollout.episodes.command import _run

asyncio.run(_run(sys.argv[1:], {}))
"""


def test_a_program_ends_with_a_trainer_that_is_killed(tmp_path: Path) -> None:
    script = tmp_path / "sleeps.py"
    script.write_text(f"import os, time\nopen({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid()))\ntime.sleep(600)")
    trainer = subprocess.Popen([sys.executable, "-c", TRAINER, sys.executable, "-S", script])
    deadline = time.monotonic() + 60
    while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    trainer.kill()
    trainer.wait()
    wait_for_end([int((tmp_path / "pid").read_text())])


@pytest.mark.parametrize(
    ("environment", "told"),
    [
        ("python my_agent.py", "expected a function, a class, or a text 'command: python my_agent.py'"),
        ("command:", "names no program"),
        ("command: 'x", "cannot be split into words"),
        ("command: no-such-program-here", "is not found"),
    ],
)
def test_what_is_no_command_is_refused(environment: str, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        adapt_environment(environment)


def test_names() -> None:
    assert adapt_environment("command: python -u agents/my_agent.py --fast").name == "my_agent"
    assert adapt_environment("command: python -m json.tool").name == "json"
    assert adapt_environment("command: sh -c 'exit 0'").name == "sh"


def test_play_refuses_a_command() -> None:
    with pytest.raises(ConfigError, match="rlox-grpo eval --environment"):
        play_episode("command: python x.py", {}, input, print)


def test_rows_are_json(model: Any, tokenizer: Any, tmp_path: Path) -> None:
    rows = [{"names": ["ä", "b"], "table": {"x": 1.5}}]
    code = f"ask([user('a')]); print(1.0 if row == {rows[0]!r} else 0.0)"
    for completion in play(write(tmp_path, code), model, tokenizer, rows):
        assert completion.episode.reward == 1.0
    with pytest.raises(EpisodeError, match="the row cannot be written as JSON"):
        play(write(tmp_path, code), model, tokenizer, [{"value": object()}])
    assert json.dumps(rows)
