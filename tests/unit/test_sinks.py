import errno
import io
import json
import math
import os
import re
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from rlox_grpo.run import files
from rlox_grpo.run.console import ConsoleSink, duration, shows_accuracy
from rlox_grpo.run.files import cut_after, read_jsonl, replace_file, set_broken_lines_aside, write_completions
from rlox_grpo.run.sinks import JsonlSink, MetricSink, Sinks, TensorBoardSink, TrackingSink, make_sinks
from rlox_grpo.types import Completion, Episode, Prompt, RolloutGroup, ScoredGroup


class ScriptedSink:
    """Fails at the steps it is told to."""

    def __init__(self, *fails_at):
        self.fails_at, self.written, self.closed = fails_at, [], False

    def write(self, step, metrics):
        if step in self.fails_at:
            raise ConnectionError("the server is gone")
        self.written.append(step)

    def close(self):
        self.closed = True
        if "close" in self.fails_at:
            raise ConnectionError("the server is gone")


# JSON lines


def write_steps(path, last, **options):
    sink = JsonlSink(path, **options)
    for step in range(options.get("resume_step", 0) + 1, last + 1):
        sink.write(step, {"reward/mean": step / 10})
    sink.close()


def steps_in(path):
    return [row["step"] for row in read_jsonl(path)]


def test_jsonl_has_a_line_a_step_on_disk_at_once(tmp_path):
    path = tmp_path / "metrics.jsonl"
    sink = JsonlSink(path)
    sink.write(1, {"reward/mean": 0.25, "policy/kl": math.nan, "policy/ratio_max": math.inf})
    assert path.read_text() == '{"step": 1, "reward/mean": 0.25, "policy/kl": null, "policy/ratio_max": null}\n'
    sink.close()


def test_jsonl_takes_numpy_numbers(tmp_path):
    sink = JsonlSink(tmp_path / "metrics.jsonl")
    sink.write(1, {"reward/mean": np.float32(0.5)})
    sink.close()
    assert read_jsonl(tmp_path / "metrics.jsonl") == [{"step": 1, "reward/mean": 0.5}]


def test_resume_cuts_later_steps(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write_steps(path, 5)
    write_steps(path, 4, resume_step=3)
    assert steps_in(path) == [1, 2, 3, 4]
    assert [entry.name for entry in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_a_fresh_run_starts_the_file_anew(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write_steps(path, 5)
    write_steps(path, 2)
    assert steps_in(path) == [1, 2]


class Growing(io.RawIOBase):
    """A file to which a run appends: after the end was read, there is more."""

    def __init__(self, *parts):
        self.parts = [part for one in parts for part in (one, b"")]

    def readable(self):
        return True

    def readinto(self, buffer):
        part = self.parts.pop(0) if self.parts else b""
        buffer[: len(part)] = part
        return len(part)


@pytest.mark.parametrize("half", [b'{"st', b'{"step": 2', b'{"step": 2}'])
def test_a_reader_beside_the_run_does_not_begin_within_a_line(half, monkeypatch):
    rest = b'{"step": 2}\n'[len(half) :] + b'{"step": 3}\n'
    monkeypatch.setattr(
        files, "open_regular", lambda *_, **__: io.BufferedReader(Growing(b'{"step": 1}\n' + half, rest))
    )
    rows = read_jsonl(Path("metrics.jsonl"))
    assert rows == [{"step": 1}] + [{"step": 2}] * (half == b'{"step": 2}')  # this one lacks its newline alone


@pytest.mark.parametrize("torn_at", range(1, 32))
def test_a_line_torn_anywhere_is_repaired(tmp_path, torn_at):
    path = tmp_path / "metrics.jsonl"
    write_steps(path, 3)
    whole = path.read_bytes()
    last = whole.splitlines(keepends=True)[-1]
    assert len(last) == 32
    path.write_bytes(whole[: -len(last)] + last[:torn_at])
    there = [1, 2, 3] if torn_at == 31 else [1, 2]  # only the newline is missing: the line is whole
    assert steps_in(path) == there
    write_steps(path, 5, resume_step=there[-1])
    assert steps_in(path) == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("broken", [b'{"step": 2, "rew\n', b"[1, 2]\n", b"\xff\xfe\n", b'{"reward": 1}\n', b"\n"])
def test_a_broken_line_is_named_and_the_file_kept(tmp_path, broken):
    path = tmp_path / "metrics.jsonl"
    content = b'{"step": 1}\n' + broken + b'{"step": 3}\n'
    path.write_bytes(content)
    with pytest.raises(ValueError, match=re.escape(f"{path}:2: ")):
        JsonlSink(path, resume_step=9)
    assert path.read_bytes() == content


@pytest.mark.parametrize(
    "broken",
    [b'{"step": 2, "rew\n', b"[1, 2]\n", b"\xff\xfe\n", b'{"reward": 1}\n', b"\n", b"[" * 100_000 + b"\n"],
    ids=["torn", "list", "bytes", "no step", "empty", "nested"],
)
def test_broken_lines_are_set_aside_and_the_run_goes_on(tmp_path, broken, caplog):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n' + broken + b'{"step": 3}\n' + broken + b'{"step": 4, "to')
    assert set_broken_lines_aside(path) == 2
    assert path.read_bytes() == b'{"step": 1}\n{"step": 3}\n{"step": 4, "to'
    assert (tmp_path / "metrics.jsonl.broken").read_bytes() == 2 * broken
    assert "moved 2 line(s) that are not a step's JSON object to metrics.jsonl.broken: 2, 4" in caplog.text
    JsonlSink(path, resume_step=3).close()
    assert steps_in(path) == [1, 3]
    assert set_broken_lines_aside(path) == set_broken_lines_aside(tmp_path / "none") == 0


def test_cutting_a_file_that_is_not_there(tmp_path):
    cut_after(tmp_path / "metrics.jsonl", 3)
    assert list(tmp_path.iterdir()) == []


class FullDisk:
    """A file on a disk that takes ten more bytes."""

    def __init__(self, *arguments, **options):
        self._file, self.room = open(*arguments, **options), 10  # noqa: SIM115

    def write(self, data):
        if self.room == 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        taken = self._file.write(data[: self.room])
        self.room -= taken
        return taken

    def __getattr__(self, name):
        return getattr(self._file, name)

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self._file.close()


def test_a_full_disk_says_what_to_do_and_leaves_whole_lines(tmp_path, monkeypatch):
    path = tmp_path / "metrics.jsonl"
    sink = JsonlSink(path)
    sink.write(1, {"reward/mean": 0.5})
    with monkeypatch.context() as patched:
        patched.setattr(files, "open", FullDisk, raising=False)
        with pytest.raises(OSError, match=r"No space left.*step 2 is missing.*Free space.*metrics\.jsonl") as caught:
            sink.write(2, {"reward/mean": 0.5})
    assert caught.value.errno == errno.ENOSPC
    assert path.read_bytes().endswith(b"}\n")
    sink.write(3, {"reward/mean": 0.5})
    sink.close()
    assert steps_in(path) == [1, 3]


def test_a_line_that_could_not_be_cut_off_is_cut_before_the_next_one(tmp_path, monkeypatch, caplog):
    class BadDisk(FullDisk):
        def truncate(self, size):
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    path = tmp_path / "metrics.jsonl"
    sink = JsonlSink(path)
    sink.write(1, {"reward/mean": 0.5})
    with monkeypatch.context() as patched:
        patched.setattr(files, "open", BadDisk, raising=False)
        with pytest.raises(OSError, match="Input/output error"):
            sink.write(2, {"reward/mean": 0.5})
    assert path.read_bytes().endswith(b'\n{"step": 2')
    sink.write(3, {"reward/mean": 0.5})
    sink.close()
    assert steps_in(path) == [1, 3]
    assert f"{path}: removed its last line, which was incomplete" in caplog.text


def test_replacing_a_file_that_fails_leaves_the_old_one(tmp_path):
    path = tmp_path / "report.html"
    replace_file(path, b"old")
    with pytest.raises(TypeError):
        replace_file(path, "not bytes")
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


# Several sinks


def test_a_sink_that_fails_later_warns_once_and_the_others_go_on():
    good, bad = ScriptedSink(), ScriptedSink(2, 3)
    sinks = Sinks({"bad": bad, "good": good})
    sinks.write(1, {})
    message = r"'bad' failed at step 2, training continues: ConnectionError: the server is gone"
    with pytest.warns(RuntimeWarning, match=message) as caught:
        sinks.write(2, {})
    sinks.write(3, {})  # a second warning would be an error here
    sinks.write(4, {})
    assert len(caught) == 1
    assert (good.written, bad.written) == ([1, 2, 3, 4], [1, 4])


def test_every_sink_is_closed():
    bad, good = ScriptedSink("close"), ScriptedSink()
    with pytest.warns(RuntimeWarning, match="'bad' could not be closed"):
        Sinks({"bad": bad, "good": good}).close()
    assert good.closed


def test_an_interrupt_is_not_swallowed():
    class Interrupted(ScriptedSink):
        def write(self, step, metrics):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Sinks({"sink": Interrupted()}).write(1, {})


def test_a_sink_that_cannot_start_stops_the_run(tmp_path):
    (tmp_path / "metrics.jsonl").mkdir()
    with pytest.raises(OSError, match=r"metrics\.jsonl: not a regular file"):
        make_sinks(["jsonl"], tmp_path)
    with pytest.raises(ValueError, match=r"unknown sink 'tensorbord'; known: jsonl, tensorboard"):
        make_sinks(["tensorbord"], tmp_path)


@pytest.mark.parametrize(
    ("names", "files", "printed"),
    [
        (["jsonl", "tensorboard", "console"], {"metrics.jsonl", "tensorboard"}, "step 4/7  reward 0.500\n"),
        (["jsonl"], {"metrics.jsonl"}, ""),
        (["console"], set(), "step 4/7  reward 0.500\n"),
        ([], set(), ""),
    ],
)
def test_sinks_by_name(names, files, printed, tmp_path, capsys):
    """Each is there and no other, and a console knows where a resumed run begins and ends."""
    sinks = make_sinks(names, tmp_path / "run", total_steps=7, resume_step=3)
    assert isinstance(sinks, MetricSink)
    sinks.write(4, {"reward/mean": 0.5})
    sinks.close()
    assert {path.name for path in (tmp_path / "run").iterdir()} == files
    assert capsys.readouterr().out == printed


# TensorBoard and trackers


def test_tensorboard_reads_back_what_was_written(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    sink = TensorBoardSink(tmp_path)
    for step in (1, 2, 3):
        sink.write(step, {"reward/mean": step / 4})
    sink.close()
    resumed = TensorBoardSink(tmp_path, resume_step=2)
    resumed.write(3, {"reward/mean": -1.0})
    resumed.close()
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("reward/mean")] == [(1, 0.25), (2, 0.5), (3, -1.0)]


@pytest.mark.parametrize(
    ("library", "extra"),
    [("tensorboard", "tensorboard"), ("trackio", "tracking"), ("wandb", None)],
)
def test_a_missing_library_names_what_to_install(tmp_path, monkeypatch, library, extra):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    monkeypatch.setitem(sys.modules, "trackio", None)
    monkeypatch.setitem(sys.modules, "wandb", None)
    of = "" if extra is None else f" (the extra {extra!r} of rlox-grpo)"
    with pytest.raises(ImportError, match=re.escape(f"{library}, which is not installed: pip install {library}{of}")):
        make_sinks([library], tmp_path)


def test_a_tracker_gets_the_run_its_steps_and_its_end(tmp_path, monkeypatch):
    calls = []

    class Tracker:  # what the sink uses of trackio and of W&B, which both name it so
        def init(self, *, project, name, config):
            calls.append(("init", project, name, config))

        def log(self, metrics, *, step):
            calls.append(("log", metrics, step))

        def finish(self):
            calls.append(("finish",))

    monkeypatch.setitem(sys.modules, "trackio", Tracker())
    monkeypatch.delenv("WANDB_PROJECT", raising=False)
    sink = TrackingSink("trackio", tmp_path / "first", config={"seed": 0})
    sink.write(4, {"reward/mean": 0.5})
    sink.close()
    assert calls == [
        ("init", "rlox-grpo", "first", {"seed": 0}),
        ("log", {"reward/mean": 0.5}, 4),
        ("finish",),
    ]


# Console


EVALUATED = {"eval/accuracy": 0.125, "eval/mean_reward": 0.15, "eval/rewards/right": 0.125}


def steps_on_console(terminal, *, total=25, width=100, at_step=None, seconds=0.0):
    """The output of 23 steps that take ``seconds`` each; ``at_step``: step → further metrics."""
    text, clock = io.StringIO(), [0.0]
    console = Console(file=text, force_terminal=terminal, width=width)
    sink = ConsoleSink(total, console=console, now=lambda: clock[0])
    for step in range(1, 24):
        clock[0] += seconds
        further = {5: EVALUATED}.get(step, {}) if at_step is None else at_step.get(step, {})
        sink.write(step, {"reward/mean": 0.5, "policy/kl": 0.0012, "time/step_s": 2.0, **further})
    sink.close()
    return text.getvalue()


def test_without_a_terminal_a_plain_line_every_few_steps():
    assert steps_on_console(False).splitlines() == [
        "step 1/25  48.0 s left  reward 0.500  kl 0.0012  s/step 2.00",
        "step 5/25  40.0 s left  reward 0.500  held-out reward 0.150  accuracy 12.5%  kl 0.0012  s/step 2.00",
        "step 10/25  30.0 s left  reward 0.500  held-out reward 0.150  accuracy 12.5%  kl 0.0012  s/step 2.00",
        "step 20/25  10.0 s left  reward 0.500  held-out reward 0.150  accuracy 12.5%  kl 0.0012  s/step 2.00",
        "step 23/25  4.0 s left  reward 0.500  held-out reward 0.150  accuracy 12.5%  kl 0.0012  s/step 2.00",
    ]


def printed_steps(text):
    return [int(line.split()[1].partition("/")[0]) for line in text.splitlines()]


@pytest.mark.parametrize(
    ("seconds", "steps"),
    [(0.1, [1, 10, 20, 23]), (4.0, [1, 5, 9, 10, 14, 18, 20, 23]), (40.0, list(range(1, 24)))],
)
def test_without_a_terminal_slow_steps_get_a_line_every_15_seconds(seconds, steps):
    assert printed_steps(steps_on_console(False, seconds=seconds, at_step={})) == steps


def test_without_a_terminal_a_step_with_a_warning_gets_a_line():
    assert printed_steps(steps_on_console(False, at_step={7: {"guard/kl_runaway": 1.0}})) == [1, 7, 10, 20, 23]


def test_a_sink_that_starts_writes_an_empty_file_at_once(tmp_path):
    make_sinks(["jsonl"], tmp_path / "run").close()
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == b""


def test_in_a_notebook_a_resumed_run_shows_its_earlier_steps_and_no_later_ones(tmp_path, monkeypatch):
    monkeypatch.setattr("rlox_grpo.run.notebook.is_notebook", lambda: True)
    found = {}
    monkeypatch.setattr(
        "rlox_grpo.run.notebook.NotebookSink",
        lambda total_steps=None, *, resume_step=0, earlier=(): found.update(
            total=total_steps, resume=resume_step, steps=[step for step, _ in earlier]
        ),
    )
    make_sinks(["console"], tmp_path, total_steps=9, resume_step=2)
    assert found == {"total": 9, "resume": 2, "steps": []}
    write_steps(tmp_path / "metrics.jsonl", 3)
    make_sinks(["console"], tmp_path, total_steps=9, resume_step=2)
    assert found == {"total": 9, "resume": 2, "steps": [1, 2]}
    make_sinks(["console"], tmp_path, total_steps=9)
    assert found == {"total": 9, "resume": 0, "steps": []}


def test_accuracy_is_not_printed_for_graded_rewards():
    graded = {"eval/accuracy": 0.0, "eval/mean_reward": 0.2, "eval/rewards/graded": 0.3}
    lines = steps_on_console(False, at_step={3: EVALUATED, 7: graded}).splitlines()
    assert ["accuracy" in line for line in lines] == [False, True, False, False, False, False]
    assert "held-out reward 0.200" in lines[2]


def test_a_metric_without_a_value_is_not_printed():
    lines = steps_on_console(False, at_step={10: {"policy/kl": math.nan}}).splitlines()
    assert ["kl" in line for line in lines] == [True, False, True, True]


def test_an_evaluation_before_the_first_step_is_printed():
    text = io.StringIO()
    sink = ConsoleSink(25, console=Console(file=text, force_terminal=False, width=200))
    sink.write(0, EVALUATED)
    sink.write(1, {"reward/mean": 0.5})
    assert text.getvalue().splitlines() == [
        "step 0/25  held-out reward 0.150  accuracy 12.5%",
        "step 1/25  reward 0.500  held-out reward 0.150  accuracy 12.5%",
    ]


def episodes_on_console(terminal, seconds):
    """The output while 4 episodes end, ``seconds`` after each other, between two steps."""
    text, clock = io.StringIO(), [0.0]
    sink = ConsoleSink(25, console=Console(file=text, force_terminal=terminal, width=200), now=lambda: clock[0])
    sink.write(1, {"reward/mean": 0.5})
    for ended in range(1, 5):
        clock[0] += seconds
        sink.show_episodes(ended, 4)
    sink.write(2, {"reward/mean": 0.25})
    sink.close()
    return text.getvalue()


def test_episodes_that_end_within_a_step_are_counted_on_the_console():
    assert episodes_on_console(False, 1.0).splitlines() == ["step 1/25  reward 0.500", "step 2/25  reward 0.250"]
    assert episodes_on_console(False, 8.0).splitlines() == [
        "step 1/25  reward 0.500",
        "rollout: 2 of 4 episodes ended",
        "rollout: 4 of 4 episodes ended",
        "step 2/25  reward 0.250",
    ]
    shown = episodes_on_console(True, 0.15)
    assert [f"{ended} of 4 episodes ended" in shown for ended in range(1, 5)] == [False, True, False, True]
    assert "1/25" in shown.split("2 of 4")[0].splitlines()[-2]


def test_a_console_that_fails_within_a_step_is_warned_of_once():
    class Failing(ScriptedSink):
        def show_episodes(self, ended, total):
            raise OSError("gone")

    sinks = Sinks({"console": Failing()})
    with pytest.warns(RuntimeWarning, match="metric sink 'console' failed within a step"):
        sinks.show_episodes(1, 2)
    sinks.show_episodes(2, 2)  # a second warning would be an error
    Sinks({"jsonl": ScriptedSink()}).show_episodes(1, 2)


def test_one_sink_can_be_left_out():
    first, second = ScriptedSink(), ScriptedSink()
    Sinks({"jsonl": first, "console": second}).write(0, {}, without="jsonl")
    assert (first.written, second.written) == ([], [0])


@pytest.mark.parametrize(
    ("evaluation", "shown"),
    [
        ({}, False),
        ({"accuracy": 0.5}, True),
        ({"accuracy": 0.5, "rewards/right": 0.5}, True),
        ({"accuracy": 0.0, "rewards/right": 0.0}, True),
        ({"accuracy": 0.25, "rewards/right": 0.5}, True),  # some samples have no score
        ({"accuracy": 0.5, "rewards/right": 1.0}, True),
        ({"accuracy": 0.5, "rewards/right": 1.1}, False),
        ({"accuracy": 0.5, "rewards/right": 0.25}, False),
        ({"accuracy": 0.0, "rewards/right": 0.25}, False),
        ({"rewards/right": 0.5}, False),
        ({"accuracy": 0.0, "rewards/right/std": 0.4}, True),  # not the mean of a reward
        ({"accuracy": 0.0, "rewards/right": None}, True),
    ],
)
def test_accuracy_is_shown_where_the_first_reward_is_0_or_1(evaluation, shown):
    assert shows_accuracy(evaluation) == shown


def test_on_a_terminal_a_bar_and_the_numbers():
    text = steps_on_console(True)
    assert "━" in text
    assert "accuracy 12.5%" in text
    assert text.count("\x1b[?25l") == text.count("\x1b[?25h") == 1  # the cursor comes back


def test_a_run_of_unknown_length():
    assert steps_on_console(False, total=None).startswith("step 1  reward")
    assert "step 23" in steps_on_console(True, total=None)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0.0 s"),
        (8.44, "8.4 s"),
        (59.97, "1 min 00 s"),
        (3599, "59 min 59 s"),
        (3600, "1 h 00 min"),
        (60.4, "1 min 00 s"),
        (200, "3 min 20 s"),
        (7500, "2 h 05 min"),
        (math.inf, "?"),
    ],
)
def test_duration(seconds, text):
    assert duration(seconds) == text


# Sampled completions


def group(texts, prompt="p", rewards=None):
    completions = tuple(Completion(np.arange(4), np.zeros(4, np.float32), "stop", text) for text in texts)
    rewards = np.array(rewards or [0.5] * len(texts), np.float32)
    components = {"answer": rewards, "format": np.full(len(texts), np.nan, np.float32)}
    return ScoredGroup(RolloutGroup(Prompt(np.arange(2), 0, text=prompt), completions, 6), rewards, components)


def test_completions_are_rows_with_their_rewards(tmp_path):
    path = write_completions(tmp_path, 7, [group(["a", "b"], rewards=[1.0, 0.0])], np.array([0.5, -0.5], np.float32))
    assert path == tmp_path / "completions" / "step_000007.jsonl"
    assert read_jsonl(path)[1] == {
        "step": 7,
        "prompt": "p",
        "completion": "b",
        "finish_reason": "stop",
        "length": 4,
        "rewards": {"answer": 0.0, "format": None},
        "reward": 0.0,
        "advantage": -0.5,
        "policy_version": 6,
    }


def test_completions_are_bounded_and_hostile_text_comes_back(tmp_path):
    hostile = "\ud800 </script> \x00 \u2028 \u202e é"
    path = write_completions(tmp_path, 1, [group([hostile, "b"]), group(["c", "d"])], None, limit=3, kind="eval_step")
    assert path.name == "eval_step_000001.jsonl"
    rows = read_jsonl(path)
    assert [row["completion"] for row in rows] == [hostile, "b", "c"]
    assert [row["advantage"] for row in rows] == [None] * 3
    assert [row["prompt_index"] for row in rows] == [0, 0, 0]  # of the held-out prompts
    assert len(path.read_bytes().splitlines()) == 3


def test_an_agents_numbers_that_json_lacks_are_null(tmp_path):
    """A tool call's arguments are JSON as Python reads it, with NaN: one of them lost the completions of its step."""
    call = {"function": {"name": "f", "arguments": {"x": [math.nan, 1.5], "y": math.inf, "z": True}}}
    messages = ({"role": "assistant", "content": "", "tool_calls": [call]},)
    episode = Episode("completed", 1.0, (math.nan,), messages=messages, branch_messages=(messages,))
    scored = group(["a"])
    played = replace(scored.group.completions[0], episode=episode)
    scored = replace(scored, group=replace(scored.group, completions=(played,)))
    row = read_jsonl(write_completions(tmp_path, 1, [scored], None))[0]
    assert row["messages"][0]["tool_calls"][0]["function"]["arguments"] == {"x": [None, 1.5], "y": None, "z": True}
    assert row["branches"] == [row["messages"]]
    assert row["turn_rewards"] == [None]


def test_completions_without_a_tokenizer_are_token_ids(tmp_path):
    rows = read_jsonl(write_completions(tmp_path, 1, [group([None], prompt=None)], None))
    assert (rows[0]["prompt"], rows[0]["completion"]) == ([0, 1], [0, 1, 2, 3])


def test_advantages_must_match_the_rows(tmp_path):
    with pytest.raises(ValueError, match="advantages has 1 values for 2 completions"):
        write_completions(tmp_path, 1, [group(["a", "b"])], np.zeros(1, np.float32))


def test_files_are_strict_json(tmp_path):
    path = write_completions(tmp_path, 1, [group(["a"], rewards=[math.nan])], np.array([math.nan], np.float32))

    def refuse(word):
        raise AssertionError(word)

    assert json.loads(path.read_text(), parse_constant=refuse)["reward"] is None
