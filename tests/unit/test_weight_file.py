"""Weights in a file that is written and read a tensor at a time, with its bytes counted."""

from __future__ import annotations

import os
import subprocess
import sys
import weakref
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from counted_bytes import CountedBytes
from rlox_grpo.distributed.ray_cluster.remote_file import SCHEME, FileReader, RemoteFile
from rlox_grpo.rollout.engines import weight_file, weight_sync
from rlox_grpo.rollout.engines.vllm.transfer import WeightTransfer
from rlox_grpo.rollout.engines.vllm.worker import WeightReceiver
from rlox_grpo.rollout.engines.weight_file import opened_weights, write_weights
from rlox_grpo.rollout.engines.weight_folder import PREFIX, WeightFolder
from rlox_grpo.rollout.engines.weight_sync import WeightMismatchError, digest_weights

LAYERS, ROWS, COLUMNS = 20, 100, 250
ONE = ROWS * COLUMNS * 4
EXPECTED = {f"layers.{index}.weight": (ROWS, COLUMNS) for index in range(LAYERS)}


@pytest.fixture(autouse=True)
def _short_chunks(monkeypatch):
    """The digest reads so many numbers at once, as numbers of 8 bytes; a tensor has 25 times as many here."""
    monkeypatch.setattr(weight_sync, "_CHUNK", ROWS * COLUMNS // 25)


def gather(names=EXPECTED, dtype=torch.float32):
    """The weights of a model in shards: each is whole for as long as somebody holds it."""
    for index, (name, shape) in enumerate(names.items()):
        generator = torch.Generator().manual_seed(index)
        yield name, torch.randn(shape, generator=generator).to(dtype)


def test_what_is_written_is_read_and_has_the_digest_of_the_weights(tmp_path):
    weights = [
        *gather({"a": (3, 5), "b": (), "empty": (0, 4)}),
        *gather({"half": (7,)}, torch.bfloat16),
        ("turned", torch.arange(6.0).reshape(2, 3).T),
    ]
    expected = {name: tuple(tensor.shape) for name, tensor in weights}
    path = tmp_path / "1.safetensors"
    assert write_weights(iter(weights), expected, path) == digest_weights(weights)
    for read in (load_file(path), dict(_read(path, expected))):
        assert read.keys() == expected.keys()
        for name, tensor in weights:
            assert read[name].dtype == tensor.dtype
            assert torch.equal(read[name], tensor), name
    assert [file.name for file in tmp_path.iterdir()] == ["1.safetensors"]


@pytest.fixture
def remote(monkeypatch):
    """Reads of ``ray:PATH`` go to the file itself; yields the sizes that were asked for."""
    sizes = []

    class File(RemoteFile):
        def __init__(self, name):
            self._path = name.removeprefix(SCHEME)

        def read(self, start, size):
            sizes.append(size)
            found = FileReader().read(self._path, start, size)
            if len(found) < size:
                raise OSError("too short")
            return found

    monkeypatch.setattr(weight_file, "RemoteFile", File)
    return sizes


def test_a_file_of_another_node_reads_as_one_of_this_node(tmp_path, remote):
    weights = [
        *gather({"a": (3, 5), "b": (), "empty": (0, 4)}),
        *gather({"half": (7,)}, torch.bfloat16),
        *gather({"short": (2, 2)}, torch.float16),
    ]
    expected = {name: tuple(tensor.shape) for name, tensor in weights}
    path = tmp_path / "1.safetensors"
    write_weights(iter(weights), expected, path)
    local, read = dict(_read(path, expected)), dict(_read(f"ray:{path}", expected))
    assert list(read) == list(local)
    for name, tensor in local.items():
        assert read[name].dtype == tensor.dtype
        assert torch.equal(read[name], tensor), name
    assert sorted(remote[2:]) == [4, 8, 14, 60]  # one tensor at a time
    with pytest.raises(WeightMismatchError, match="half"):
        dict(_read(f"ray:{path}", {**expected, "half": (8,)}))
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size - 1)
    with pytest.raises(OSError, match="too short"):
        dict(_read(f"ray:{path}", expected))


def test_ray_s_object_store_needs_engines_that_ray_starts(monkeypatch):
    monkeypatch.delenv("RLOX_GRPO_REMOTE_FILES", raising=False)
    with pytest.raises(ValueError, match=r"server_sync_dir='ray:' is for servers that Ray starts \(\[layout\] engines"):
        WeightTransfer("ray:", None, is_first=True, timeout=1.0, note=lambda *_, **__: None)
    with pytest.raises(OSError, match="no launcher serves files to this process"):
        RemoteFile("ray:/tmp/1.safetensors")


def _read(path, expected):
    with opened_weights(str(path), expected) as weights:
        yield from weights


def test_the_sender_holds_one_tensor_at_a_time(tmp_path):
    with CountedBytes() as counted:
        write_weights(gather(), EXPECTED, tmp_path / "1.safetensors")
    assert ONE <= counted.peak < 2.5 * ONE  # one that is written, and one that is gathered meanwhile
    with CountedBytes() as counted:
        assert len(list(gather())) == LAYERS
    assert counted.peak >= LAYERS * ONE  # what a list of them would be


def test_rank_0_of_a_sharded_model_hands_over_without_a_copy_of_it(tmp_path):
    transfer = WeightTransfer(tmp_path, None, is_first=True, timeout=1.0, note=lambda *_, **__: None)
    with CountedBytes() as counted:
        for version in (1, 2):
            transfer.hold(gather(), EXPECTED, version)
    assert counted.peak < 2.5 * ONE
    assert counted.live == 0
    assert transfer.mark.startswith("2:")
    assert [file.name for file in transfer.file.parent.glob("*.*")] == ["2.safetensors"]
    with pytest.raises(WeightMismatchError, match=r"missing: layers\.19\.weight"):
        transfer.hold(list(gather())[:-1], EXPECTED, 3)
    assert transfer.mark.startswith("2:")  # a server that starts again still finds them
    assert [file.name for file in transfer.file.parent.glob("*.*")] == ["2.safetensors"]
    transfer.close()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(os.name != "posix", reason="files are not locked there")
def test_the_folder_of_a_killed_process_is_removed_by_the_next_and_no_other_is(tmp_path):
    program = (
        "import os, sys; from rlox_grpo.rollout.engines.weight_folder import WeightFolder; WeightFolder(sys.argv[1])"
    )
    subprocess.run([sys.executable, "-c", f"{program}; os.kill(os.getpid(), 9)", str(tmp_path)], check=False)
    (left,) = tmp_path.iterdir()
    (left / "1.safetensors").write_text("a model")
    young, alive = WeightFolder(tmp_path), WeightFolder(tmp_path)
    assert left.exists()  # as young as one that a process is about to lock
    for folder in (left, alive.path):
        os.utime(folder / "lock", (0, 0))
    (tmp_path / f"{PREFIX}of_somebody").mkdir()
    WeightFolder(tmp_path).remove()
    assert not left.exists()
    assert {path.name for path in tmp_path.iterdir()} == {young.path.name, alive.path.name, f"{PREFIX}of_somebody"}
    young.remove()
    alive.remove()


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({**EXPECTED, "more": (2,)}, "unknown: more"),
        ({**EXPECTED, "layers.3.weight": (COLUMNS, ROWS)}, r"of another shape: layers\.3\.weight"),
    ],
)
def test_wrong_weights_are_read_to_the_end_and_leave_no_file(tmp_path, wrong, told):
    """Other ranks take part in each gather: one that stopped would leave them waiting."""
    read = []

    def watched():
        for name, tensor in gather(wrong):
            read.append(name)
            yield name, tensor

    with pytest.raises(WeightMismatchError, match=told):
        write_weights(watched(), EXPECTED, tmp_path / "1.safetensors")
    assert len(read) == len(wrong)
    assert list(tmp_path.iterdir()) == []
    del read[:]
    with pytest.raises(OSError, match="No such file"):
        write_weights(watched(), EXPECTED, tmp_path / "nowhere" / "1.safetensors")
    assert len(read) == len(wrong)


def test_numbers_that_are_no_weights_are_refused(tmp_path):
    with pytest.raises(WeightMismatchError, match=r"not floating point: layers\.0\.weight torch\.int64"):
        write_weights(gather(dtype=torch.int64), EXPECTED, tmp_path / "1.safetensors")
    with pytest.raises(WeightMismatchError, match=r"without data: layers\.0\.weight"):
        write_weights([(name, t.to("meta")) for name, t in gather()], EXPECTED, tmp_path / "1.safetensors")


def test_the_server_reads_one_tensor_at_a_time(tmp_path):
    write_weights(gather(), EXPECTED, tmp_path / "1.safetensors")
    given, most = [], []
    worker = WeightReceiver()
    worker.model_config = SimpleNamespace(model="", hf_config=SimpleNamespace(tie_word_embeddings=True))
    worker._rlox_manifest, worker._rlox_tied_layers = EXPECTED, {"head": "layers.0.weight"}
    worker._rlox_experts = None
    names = []

    def reload(weights_iterator):
        for name, tensor in weights_iterator:
            given.append(weakref.ref(tensor))
            names.append(name)
            most.append(sum(one() is not None for one in given))

    worker.reload_weights = reload
    assert worker.rlox_load(str(tmp_path / "1.safetensors")) == {"loaded": LAYERS + 1}
    assert sorted(names) == sorted([*EXPECTED, "head"])
    assert max(most) <= 3  # the next one while the one before is held, and a tied one twice; a list would be 20
