"""One run at a time in a folder, by a lock that ends with its process."""

import errno
import fcntl
import os
import shutil
import signal
import subprocess
import sys
import threading

import pytest

import warm
from rlox_grpo.distributed.ranks import Ranks
from rlox_grpo.errors import CheckpointError
from rlox_grpo.run import folder as module
from rlox_grpo.run.folder import hold_folder, hold_run_folder

HOLDER = """
import sys, time
from pathlib import Path
from rlox_grpo.run.folder import hold_folder

with hold_folder(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(float(sys.argv[2]))
"""


def start(folder, seconds=60):
    process = subprocess.Popen([sys.executable, "-c", HOLDER, str(folder), str(seconds)], stdout=subprocess.PIPE)
    assert process.stdout.readline() == b"held\n"
    return process


def test_a_second_start_says_who_holds_the_folder_and_a_dead_process_does_not(tmp_path):
    process = start(tmp_path)
    try:
        with (
            pytest.raises(CheckpointError, match=rf"in use by another run \(process {process.pid} on host .*, since"),
            hold_folder(tmp_path),
        ):
            pass
    finally:
        process.send_signal(signal.SIGKILL)
        process.communicate()
    with hold_folder(tmp_path):
        assert f'"pid": {os.getpid()}' in (tmp_path / ".lock").read_text()


AT_ONCE = """
import sys, time
from pathlib import Path
from rlox_grpo.errors import CheckpointError
from rlox_grpo.run.folder import hold_folder

try:
    with hold_folder(Path(sys.argv[1])):
        print("held", flush=True)
        time.sleep(3)
except CheckpointError as error:
    print(error, flush=True)
"""


def test_of_starts_at_once_one_holds_the_folder(tmp_path):
    script = tmp_path / "at_once.py"
    script.write_text(AT_ONCE)
    ended = warm.run(4, script, tmp_path)
    assert ended.returncode == 0, ended.stderr
    # They may start further apart than the 3 s: then each in turn is right too, so only overlaps are refused.
    lines = ended.stderr.splitlines()
    assert len(lines) == 4
    assert lines[0] == "held"
    assert all(line == "held" or "in use by another run" in line for line in lines), lines


def test_two_trainers_of_one_process(tmp_path):
    errors = []

    def second():
        try:
            with hold_folder(tmp_path / "." / ""):
                pass
        except CheckpointError as error:
            errors.append(str(error))

    with hold_folder(tmp_path):
        thread = threading.Thread(target=second)
        thread.start()
        thread.join()
    assert "in use by another trainer in this process" in errors[0]
    with hold_folder(tmp_path):
        pass


FORKER = """
import os, sys, time
from pathlib import Path
from rlox_grpo.run.folder import hold_folder

with hold_folder(Path(sys.argv[1])):
    if os.fork() == 0:
        time.sleep(60)
    print("held", flush=True)
    time.sleep(60)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_does_not_keep_the_folder_of_a_killed_run(tmp_path):
    process = subprocess.Popen(
        [sys.executable, "-c", FORKER, str(tmp_path)], stdout=subprocess.PIPE, start_new_session=True
    )
    assert process.stdout.readline() == b"held\n"
    process.kill()
    process.wait()
    try:
        with hold_folder(tmp_path):
            pass
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.stdout.close()


def test_a_copy_of_the_folder_does_not_give_up_the_lock(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    with hold_folder(folder):
        shutil.copytree(folder, tmp_path / "copy")
        (folder / ".lock").read_bytes()
        second = subprocess.run([sys.executable, "-c", HOLDER, str(folder), "0"], capture_output=True, text=True)
        assert second.returncode == 1
        assert f"in use by another run (process {os.getpid()} on host" in second.stderr
    with hold_folder(folder):
        pass


@pytest.mark.skipif(not hasattr(fcntl, "F_OFD_SETLK"), reason="needs locks of open files")
def test_a_system_without_locks_of_open_files_uses_flock(tmp_path, monkeypatch):
    def refuse(*given):
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

    monkeypatch.setattr(fcntl, "fcntl", refuse)
    with hold_folder(tmp_path), open(tmp_path / ".lock") as other, pytest.raises(BlockingIOError):
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)


@pytest.mark.parametrize("code", [errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP])
def test_a_file_system_without_locks_is_named_with_a_way_out(tmp_path, monkeypatch, code):
    def refuse(descriptor):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(module, "_lock_file", refuse)
    with (
        pytest.raises(CheckpointError, match=r"has no file locks .*another file system, or set RLOX_GRPO_NO_LOCK=1"),
        hold_folder(tmp_path),
    ):
        pass
    monkeypatch.setenv("RLOX_GRPO_NO_LOCK", "1")
    with hold_folder(tmp_path):
        pass


def test_an_error_of_the_disk_is_not_taken_for_another_run(tmp_path, monkeypatch):
    def refuse(descriptor):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(module, "_lock_file", refuse)
    with (
        pytest.raises(CheckpointError, match=r"cannot be locked \(Input/output error\).*another file system"),
        hold_folder(tmp_path),
    ):
        pass


def test_a_folder_that_cannot_be_written_is_named_by_its_option(tmp_path):
    (tmp_path / "file").write_text("")
    for place, message in (("file", "is a file: choose the path of a folder"), ("file/below", "cannot be made")):
        with (
            pytest.raises(CheckpointError, match=f"output_dir='.*{place}' {message}"),
            hold_run_folder(str(tmp_path / place), Ranks()),
        ):
            pass
    os.symlink(tmp_path / "file", tmp_path / ".lock")
    with pytest.raises(CheckpointError, match="output_dir='.*' cannot be written"), hold_folder(tmp_path):
        pass
    assert (tmp_path / "file").read_text() == ""


def test_only_the_first_rank_holds_the_folder(tmp_path):
    with hold_run_folder(str(tmp_path / "run"), Ranks(rank=1, size=2)):
        assert not (tmp_path / "run").exists()
    with hold_run_folder(None, Ranks()):
        pass
