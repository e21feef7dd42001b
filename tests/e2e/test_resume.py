"""A run's folder over several starts: who holds it, what a start continues from, what it says."""

import json
import os
import resource
import shutil
import signal
import socket
import subprocess
import sys
import time
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

import ranked
import warm
from rlox_grpo import GRPO
from rlox_grpo.errors import CheckpointError, ConfigError, NonFiniteError
from rlox_grpo.run.files import append_line, json_line, read_jsonl
from rlox_grpo.run.guards import write_warnings
from rlox_grpo.run.history import checkpoints
from rlox_grpo.run.manifest import write_manifest
from toy import PROMPTS, ToyLM, options, share_of_target

TESTS = Path(__file__).parents[1]


def run(folder, reward=share_of_target, seed=0, **changes):
    trainer = GRPO(
        ToyLM(seed), reward, **options(output_dir=folder, **{"checkpoint_steps": 2, "max_steps": 6, **changes})
    )
    trainer.train(PROMPTS)
    return trainer


def weights(trainer):
    return torch.cat([parameter.detach().flatten() for parameter in trainer.model.parameters()])


def names(folder):
    return [path.name for path in checkpoints(folder / "checkpoints")]


def steps(path):
    return [row["step"] for row in read_jsonl(path)]


def test_a_start_beside_a_living_run_is_refused_and_the_run_goes_on(tmp_path):
    refusals = []

    def start_another(completions, prompts):
        if not refusals:
            done = warm.run(0, TESTS / "e2e" / "killed_run.py", str(tmp_path), "99")
            refusals.append((done.returncode, done.stderr))
        return share_of_target(completions, prompts)

    run(tmp_path, start_another, max_steps=2)
    ((code, said),) = refusals
    assert code == 1
    assert f"in use by another run (process {os.getpid()} on host" in said
    assert names(tmp_path) == ["step_000002"]


def test_a_checkpoint_of_another_run_does_not_continue_in_the_folder_of_a_run(tmp_path):
    run(tmp_path / "first", max_steps=2)
    run(tmp_path / "second", max_steps=4)
    checkpoint = tmp_path / "first" / "checkpoints" / "step_000002"
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "second").rglob("*")}
    with pytest.raises(CheckpointError, match=r"second'?, which holds another run: choose a new output_dir"):
        run(tmp_path / "second", resume=str(checkpoint), max_steps=4)
    shutil.rmtree(tmp_path / "second" / "checkpoints")
    with pytest.raises(CheckpointError, match="holds another run"):  # its metrics would be cut
        run(tmp_path / "second", resume=str(checkpoint), max_steps=4)
    after = {path: path.stat().st_mtime_ns for path in (tmp_path / "second").rglob("*") if path.is_file()}
    changed = {path.name for path, when in after.items() if before.get(path) != when}
    assert changed <= {".lock"}
    run(tmp_path / "third", resume=str(checkpoint), max_steps=4)
    assert steps(tmp_path / "third" / "metrics.jsonl") == [3, 4]
    os.symlink(tmp_path / "second", tmp_path / "link")
    run(tmp_path / "link", resume="auto", max_steps=2)
    run(tmp_path / "link", resume=str(tmp_path / "second/checkpoints/step_000002"), max_steps=4)
    assert steps(tmp_path / "second" / "metrics.jsonl") == [1, 2, 3, 4]


def test_a_damaged_newest_checkpoint_falls_back_by_itself_and_ends_at_the_same_weights(tmp_path, caplog):
    whole = run(tmp_path, keep_checkpoints=9)
    damaged = tmp_path / "checkpoints" / "step_000006"
    data = bytearray((damaged / "model.safetensors").read_bytes())
    data[-5] ^= 4
    (damaged / "model.safetensors").write_bytes(data)
    with pytest.raises(CheckpointError, match=r"step_000006 .*model\.safetensors is not what was written.*step_000004"):
        run(tmp_path, resume=str(damaged))
    with caplog.at_level("INFO"):
        again = run(tmp_path, seed=9, keep_checkpoints=9)
    assert "model.safetensors is not what was written" in caplog.text
    assert f"resuming at step 4 of 6 from {tmp_path / 'checkpoints' / 'step_000004'}" in caplog.text
    assert torch.equal(weights(whole), weights(again))
    assert names(tmp_path) == ["step_000002", "step_000004", "step_000006"]
    assert len(list((tmp_path / "checkpoints").glob("step_000006.damaged-*"))) == 1


def test_going_back_to_an_older_checkpoint_is_a_branch(tmp_path, caplog):
    run(tmp_path, keep_checkpoints=9)
    older = str(tmp_path / "checkpoints" / "step_000002")

    def stop_at_5(completions, prompts):
        return share_of_target(completions, prompts)

    stop_at_5.__wrapped__ = share_of_target
    stop_at_5.__name__ = "share_of_target"
    with caplog.at_level("INFO"):
        branch = run(tmp_path, stop_at_5, resume=older, max_steps=4, keep_checkpoints=2)
    assert "the run continues from step 2; the later checkpoint is now" in caplog.text
    assert "removed 4 lines of steps after 2" in caplog.text
    assert names(tmp_path) == ["step_000002", "step_000004"]
    aside = sorted(path.name.partition(".")[0] for path in (tmp_path / "checkpoints").glob("*superseded*"))
    assert aside == ["step_000004", "step_000006"]
    assert steps(tmp_path / "metrics.jsonl") == [1, 2, 3, 4]
    assert [path.name for path in sorted((tmp_path / "completions").glob("step_*"))][-1] == "step_000004.jsonl"
    # The next start continues the branch: the old step 6 is not its progress.
    caplog.clear()
    with caplog.at_level("INFO"):
        longer = run(tmp_path, max_steps=6)
    assert "resuming at step 4 of 6" in caplog.text
    assert longer.step == 6
    assert branch.step == 4


def test_a_start_says_what_it_does_on_the_console(tmp_path, capsys):
    run(tmp_path, max_steps=2)
    capsys.readouterr()
    metrics = GRPO(ToyLM(), share_of_target, **options(output_dir=tmp_path, max_steps=4, log_to=("console",))).train(
        PROMPTS
    )
    assert f"resuming at step 2 of 4 from {tmp_path}" in capsys.readouterr().out
    assert (metrics["resumed_from_step"], metrics["steps_trained"]) == (2.0, 2.0)
    GRPO(ToyLM(), share_of_target, **options(output_dir=tmp_path, max_steps=4, log_to=("console",))).train(PROMPTS)
    assert "is complete: all 4 steps are done, nothing to train" in capsys.readouterr().out


def reward_of(text):
    """A function ``r`` of this source, as an edited file gives it."""
    import linecache

    name = f"<reward {hash(text)}>"
    linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
    namespace = {"__name__": "rewards_of_mine"}
    exec(compile(text, name, "exec"), namespace)  # noqa: S102  (this test's own text)
    return namespace["r"]


BEFORE = "def r(completions, prompts):\n    return [float(c[0]) for c in completions]\n"
SAME = "def r(completions, prompts):\n    # a comment\n\n    return [float(c[0])\n        for c in completions]\n"
EDITED = BEFORE.replace("c[0]", "100 + c[0]")


def test_an_edited_reward_is_named_and_permitted_by_name(tmp_path):
    run(tmp_path, reward_of(BEFORE), max_steps=2)
    run(tmp_path, reward_of(SAME), max_steps=2)
    for max_steps in (2, 4):  # complete or not
        with pytest.raises(CheckpointError, match=r"the reward function r was edited.*resume_changes=\['rewards'\]"):
            run(tmp_path, reward_of(EDITED), max_steps=max_steps)
    trainer = run(tmp_path, reward_of(EDITED), max_steps=4, resume_changes=("rewards",))
    assert trainer.step == 4
    (change,) = read_jsonl(tmp_path / "changes.jsonl")
    assert change["step"] == 2
    assert change["changed"]["rewards"][1] == ["the reward function r was edited"]


def test_edited_data_columns_are_named(tmp_path):
    def r(completions, answer):
        return [float(c[0]) * a for c, a in zip(completions, answer, strict=True)]

    rows = [{"prompt": [1, 2], "answer": index} for index in range(4)]
    settings = options(output_dir=tmp_path, max_steps=1)
    GRPO(ToyLM(), r, **settings).train(rows)
    with pytest.raises(CheckpointError, match="columns: not those of the run"):
        GRPO(ToyLM(), r, **settings).train([{**row, "answer": 7} for row in rows])


def test_named_options_may_change_on_resume_and_are_logged(tmp_path):
    run(tmp_path, max_steps=2)
    with pytest.raises(
        CheckpointError, match=r"learning_rate: 0\.02 there, 0\.01 here.*resume_changes=\['learning_rate'\]"
    ):
        run(tmp_path, max_steps=4, learning_rate=0.01)
    changed = {"learning_rate": 0.01, "lr_schedule": "linear", "max_steps": 4}
    trainer = run(tmp_path, **changed, resume_changes=("learning_rate", "lr_schedule"))
    assert trainer.step == 4
    assert read_jsonl(tmp_path / "metrics.jsonl")[2]["update/learning_rate"] < 0.01
    (change,) = read_jsonl(tmp_path / "changes.jsonl")
    assert change["changed"]["learning_rate"] == [0.02, 0.01]
    assert change["changed"]["lr_schedule"] == ["constant", "linear"]
    with pytest.raises(
        ConfigError, match="resume_changes: unknown option 'learning_rte': did you mean 'learning_rate'"
    ):
        run(tmp_path, resume_changes=("learning_rte",))


def test_an_option_that_the_checkpoint_lacks_is_named(tmp_path):
    run(tmp_path, max_steps=2)
    place = tmp_path / "checkpoints" / "step_000002"
    state = json.loads((place / "state.json").read_text())
    del state["config"]["delta"], state["data"]["columns"]
    (place / "state.json").write_text(json.dumps(state))
    (place / "manifest.json").unlink()
    write_manifest(place)
    with pytest.raises(CheckpointError, match="delta: missing there; columns: not those of the run"):
        run(tmp_path, max_steps=4)


def test_weights_that_became_infinite_leave_the_last_good_checkpoint(tmp_path):
    run(tmp_path, max_steps=2, keep_checkpoints=1)
    with pytest.raises(NonFiniteError) as caught:
        run(
            tmp_path,
            max_steps=9,
            learning_rate=3e38,
            max_grad_norm=0.0,
            keep_checkpoints=1,
            checkpoint_steps=1,
            resume_changes=("learning_rate", "max_grad_norm"),
        )
    assert names(tmp_path) == ["step_000002"]
    assert "step_000002" in str(caught.value)
    assert run(tmp_path, max_steps=4, keep_checkpoints=1).step == 4


def test_a_run_that_ends_in_bad_numbers_does_not_advise_the_same_command(tmp_path, caplog):
    with pytest.raises(FloatingPointError):
        run(tmp_path, learning_rate=3e38, checkpoint_steps=0, max_grad_norm=0.0)
    assert "start the same command again" not in caplog.text
    assert "resume_changes=['learning_rate']" in caplog.text


def test_a_disk_that_is_full_for_a_moment_tears_no_line(tmp_path):
    """RLIMIT_FSIZE during an evaluation: the line is missing, the others stay, the run ends and resumes."""
    before, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    trainer = None

    def full_at_4(completions, prompts):
        full = trainer.step == 4
        resource.setrlimit(resource.RLIMIT_FSIZE, (300 if full else before[0], before[1]))
        return share_of_target(completions, prompts)

    full_at_4.__wrapped__ = share_of_target
    try:
        trainer = GRPO(
            ToyLM(), full_at_4, **options(output_dir=tmp_path, max_steps=6, checkpoint_steps=0, eval_steps=2)
        )
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            trainer.train(PROMPTS, eval_prompts=PROMPTS[:2])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert any("evaluations cannot be written, training continues" in str(warning.message) for warning in caught)
    assert 4 not in steps(tmp_path / "evaluations.jsonl")
    assert steps(tmp_path / "evaluations.jsonl")[:2] == [0, 2]
    assert (tmp_path / "report.html").exists()
    assert run(tmp_path, full_at_4, max_steps=6, checkpoint_steps=0).step == 6


def test_a_line_broken_in_the_middle_ends_no_run(tmp_path, caplog):
    run(tmp_path, max_steps=4)
    path = tmp_path / "metrics.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([lines[0], b"\x00\x00\n", *lines[2:]]))
    run(tmp_path, max_steps=6)
    assert steps(path) == [1, 3, 4, 5, 6]
    assert (tmp_path / "metrics.jsonl.broken").read_bytes() == b"\x00\x00\n"
    assert "moved 1 line(s) that are not a step's JSON object to metrics.jsonl.broken: 2" in caplog.text


@pytest.mark.parametrize(
    "name",
    [
        "metrics.jsonl",
        "evaluations.jsonl",
        "warnings.jsonl",
        "changes.jsonl",
        "completions/step_000002.jsonl",
        "completions/eval_step_000002.jsonl",
    ],
)
@pytest.mark.parametrize("damage", ["middle", "end"])
def test_a_broken_or_torn_line_of_any_file_ends_neither_the_next_start_nor_the_report(tmp_path, caplog, name, damage):
    def start(max_steps):
        settings = options(output_dir=tmp_path, max_steps=max_steps, checkpoint_steps=2, eval_steps=2)
        return GRPO(ToyLM(), share_of_target, **settings).train(PROMPTS, eval_prompts=PROMPTS[:2])

    start(4)
    path = tmp_path / name
    if not path.exists():  # nothing was warned of or changed
        path.write_bytes(b"".join(b'{"step": %d, "guard": "g", "message": "m", "changed": {}}\n' % s for s in (1, 2)))
    lines = path.read_bytes().splitlines(keepends=True)
    torn = lines[-1][: len(lines[-1]) // 2]
    path.write_bytes(b"".join([lines[0], b'{"step": \xff\n', *lines[1:]] if damage == "middle" else [*lines, torn]))
    assert start(6)["steps_trained"] == 2
    assert (f"{path.name}.broken: 2" in caplog.text) == (damage == "middle")
    assert (path.with_name(f"{path.name}.broken").exists()) == (damage == "middle")
    assert read_jsonl(path)[: len(lines)] == [json.loads(line) for line in lines]
    assert "Step" in (tmp_path / "report.html").read_text()


@pytest.fixture
def full_disk():
    """``full_disk(size)``: no file grows beyond so many bytes; ``full_disk(None)``: there is room again."""
    before, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)

    def limit(size):
        resource.setrlimit(resource.RLIMIT_FSIZE, (before[0] if size is None else size, before[1]))

    yield limit
    limit(None)
    signal.signal(signal.SIGXFSZ, handler)


APPENDED = {
    "evaluations.jsonl": lambda folder, step: append_line(folder / "evaluations.jsonl", json_line({"step": step})),
    "warnings.jsonl": lambda folder, step: write_warnings(folder, step, {"guard": "m" * step}),
    "changes.jsonl": lambda folder, step: append_line(folder / "changes.jsonl", json_line({"step": step, "time": 0.0})),
}


@pytest.mark.parametrize("name", APPENDED)
@pytest.mark.parametrize("room", range(0, 12, 3))
def test_a_line_that_the_disk_takes_in_part_is_cut_and_the_next_one_is_whole(tmp_path, full_disk, caplog, name, room):
    write, path = APPENDED[name], tmp_path / name
    write(tmp_path, 1)
    before = path.read_bytes()
    full_disk(len(before) + room)
    with pytest.raises(OSError, match="File too large"):
        write(tmp_path, 2)
    assert path.read_bytes() == before
    full_disk(None)
    with path.open("ab") as file:
        file.write(b'{"step": 2, "t')
    write(tmp_path, 3)
    assert steps(path) == [1, 3]
    assert f"{path}: removed its last line, which was incomplete" in caplog.text


@pytest.mark.parametrize("lasting", [False, True])
def test_a_full_disk_loses_no_line_that_was_there_and_the_run_resumes(tmp_path, full_disk, lasting):
    """When step 4 is evaluated no file takes more than 300 bytes, for that step or for good."""

    def start(max_steps, *, full_at=None):
        disk = SimpleNamespace(full_at=full_at)  # an object: a number would be a value of the function

        def reward(completions, prompts):
            if disk.full_at is not None:
                full_disk(300 if trainer.step == disk.full_at or (lasting and trainer.step > disk.full_at) else None)
            return share_of_target(completions, prompts)

        reward.__wrapped__ = share_of_target
        settings = options(output_dir=tmp_path, max_steps=max_steps, checkpoint_steps=1, eval_steps=1)
        trainer = GRPO(ToyLM(), reward, **settings)
        return trainer.train(PROMPTS, eval_prompts=PROMPTS[:2])

    start(3)
    names_before = ("metrics.jsonl", "evaluations.jsonl", "completions/step_000002.jsonl")
    before = {name: (tmp_path / name).read_bytes() for name in names_before}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if lasting:
            with pytest.raises(CheckpointError, match="cannot write the checkpoint .*step_000006"):
                start(6, full_at=4)
        else:
            start(6, full_at=4)
    full_disk(None)
    for name, content in before.items():
        assert (tmp_path / name).read_bytes().startswith(content)
    for name in ("metrics.jsonl", "evaluations.jsonl"):
        assert (tmp_path / name).read_bytes().endswith(b"}\n")
    assert steps(tmp_path / "evaluations.jsonl")[:4] == [0, 1, 2, 3]
    assert start(7)["resumed_from_step"] == (3 if lasting else 6)
    assert names(tmp_path)[-1] == "step_000007"
    assert steps(tmp_path / "metrics.jsonl")[-1] == 7


def test_torn_and_lost_lines_are_repaired_with_a_word(tmp_path, caplog):
    run(tmp_path, max_steps=2)
    with (tmp_path / "metrics.jsonl").open("ab") as file:
        file.write(b'{"step": 3, "rew')
    (tmp_path / ".config.toml.1f.part").write_text("left by a kill")
    run(tmp_path, max_steps=3)
    assert "removed its last line, which was incomplete" in caplog.text
    assert steps(tmp_path / "metrics.jsonl") == [1, 2, 3]
    assert not (tmp_path / ".config.toml.1f.part").exists()
    (tmp_path / "metrics.jsonl").unlink()
    run(tmp_path, max_steps=4)
    assert "metrics.jsonl ends at step 0: the steps up to 3 are lost" in caplog.text


@pytest.mark.parametrize("name", ["SIGHUP", "SIGTERM"])
def test_a_signal_finishes_the_step_and_saves(tmp_path, name):
    trainer = None

    def signal_in_step_3(completions, prompts):
        if trainer.step == 2:
            os.kill(os.getpid(), getattr(signal, name))
        return share_of_target(completions, prompts)

    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    try:
        trainer = GRPO(ToyLM(), signal_in_step_3, **options(output_dir=tmp_path))
        with pytest.raises(KeyboardInterrupt, match=rf"{name} after step 3; saved up to .*step_000003"):
            trainer.train(PROMPTS)
    finally:
        signal.signal(signal.SIGHUP, before)


def test_nohup_stays(tmp_path):
    from rlox_grpo.distributed.signals import stop_on_signal

    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with stop_on_signal() as stop:
            os.kill(os.getpid(), signal.SIGHUP)
            assert not stop
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_block_inside_another_one_sees_the_signal_that_came_before_it():
    """Training ranks are in the outer block from the start of a call, and in the inner one from the first step."""
    from rlox_grpo.distributed.signals import stop_on_signal

    with stop_on_signal() as outer:
        os.kill(os.getpid(), signal.SIGTERM)
        with stop_on_signal() as inner:
            assert (outer.name, inner.name) == ("SIGTERM", "SIGTERM")
    with stop_on_signal() as later:
        assert not later


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_rank_that_waits_for_its_peers_ends_with_its_launcher():
    """Joining the ranks takes up to half an hour when a peer never comes."""
    rank = "from rlox_grpo.distributed.ranks import join_ranks; print('joining', flush=True); join_ranks()"
    script = (
        "import subprocess, sys, time\n"
        f"rank = subprocess.Popen([sys.executable, '-c', {rank!r}])\n"
        "print(rank.pid, flush=True)\n"
        "time.sleep(600)\n"
    )
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = {
        **os.environ,
        **{"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "test"},
        **{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"},
    }
    launcher = subprocess.Popen(
        [sys.executable, "-c", script], env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    with launcher:
        pid = int(launcher.stdout.readline())
        assert launcher.stdout.readline() == "joining\n"
        launcher.kill()
    deadline = time.monotonic() + 300
    while alive(pid):
        assert time.monotonic() < deadline, "the rank outlived its launcher"
        time.sleep(0.1)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("launcher_lives", [False, True])
def test_a_rank_whose_launcher_died_before_the_rank_could_look_ends(tmp_path, launcher_lives):
    """A launcher killed while its ranks import torch: they are orphans from the start, or its store is gone."""
    rank = (
        "import sys; sys.stdin.read()\n"  # until this test closes it: the launcher is gone by then
        "from rlox_grpo.distributed.ranks import join_ranks; join_ranks(timeout=1.0)"
    )
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = {
        **os.environ,
        **{"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "test", "OMP_NUM_THREADS": "1"},
        **{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True"},
    }
    start = f"import subprocess, sys; rank = subprocess.Popen([sys.executable, '-c', {rank!r}]); print(rank.pid)"
    with (tmp_path / "said").open("wb") as said:
        launcher = subprocess.Popen(
            [sys.executable, "-c", start + ("; rank.wait()" if launcher_lives else "")],
            env={**environment, "PYTHONUNBUFFERED": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=said,
        )
    pid = int(launcher.stdout.readline())
    if not launcher_lives:
        launcher.wait()
    launcher.stdin.close()
    deadline = time.monotonic() + 300
    while alive(pid):
        assert time.monotonic() < deadline, "the rank outlived its launcher"
        time.sleep(0.1)
    launcher.wait()
    launcher.stdout.close()
    assert "start the run again" in (tmp_path / "said").read_text()


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc").is_dir(), reason="finds the ranks in /proc")
def test_ranks_end_with_their_killed_launcher_and_the_next_start_continues(tmp_path):
    """A start while they still live is refused; both leave no mixed checkpoint."""
    command = [
        *ranked.torchrun(2),
        str(TESTS / "ranked.py"),
        str(tmp_path),
        '{"max_steps": 100000, "checkpoint_steps": 2, "rank_timeout": 5.0}',
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    launcher = subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL, start_new_session=True)
    deadline = time.monotonic() + 600
    while len(checkpoints(tmp_path / "checkpoints")) < 2:
        assert time.monotonic() < deadline
        assert launcher.poll() is None
        time.sleep(0.2)
    children = Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text()
    ranks = [int(pid) for pid in children.split()]
    assert len(ranks) >= 2
    launcher.kill()
    launcher.wait()
    ended = time.monotonic()
    while any(alive(pid) for pid in ranks):
        assert time.monotonic() < ended + 300, "ranks outlived their launcher"
        time.sleep(0.2)
    newest = int(checkpoints(tmp_path / "checkpoints")[-1].name[-6:])
    ranked.train(tmp_path, max_steps=newest + 1)
    assert read_jsonl(tmp_path / "metrics.jsonl")[-1]["step"] == newest + 1


def test_another_model_is_named_where_its_prompts_differ(tmp_path):
    run(tmp_path, max_steps=2)
    trainer = GRPO(ToyLM(), share_of_target, **options(output_dir=tmp_path, checkpoint_steps=2, max_steps=4))
    trainer.model.name_or_path = "another/model"
    with pytest.raises(CheckpointError, match="prompts: .*; the model is another one as well: ToyLM there, another"):
        trainer.train(PROMPTS.flip(1))


def test_an_adapter_is_not_resumed_on_another_base_model(tmp_path):
    """Its checkpoint has the adapter alone, so the run would go on with other weights beside it."""
    settings = ranked.options(tmp_path / "run", lora_rank=2, max_steps=1)
    ranked.save_policy(tmp_path / "base")
    GRPO(str(tmp_path / "base"), ranked.share_of_even, **settings).train(ranked.PROMPTS)
    longer = {**settings, "max_steps": 2}
    shutil.copytree(tmp_path / "base", tmp_path / "other")
    weights = load_file(tmp_path / "base" / "model.safetensors")
    name = min(weights)
    save_file({**weights, name: weights[name] * 1.5}, tmp_path / "other" / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match="frozen weights beside the adapter: not those of the run; the model is"):
        GRPO(str(tmp_path / "other"), ranked.share_of_even, **longer).train(ranked.PROMPTS)
    (tmp_path / "base").rename(tmp_path / "moved")
    GRPO(str(tmp_path / "moved"), ranked.share_of_even, **longer).train(ranked.PROMPTS)
    assert read_jsonl(tmp_path / "run" / "metrics.jsonl")[-1]["step"] == 2
