"""Checkpoints: whole or absent, exact, and refusing what is not theirs."""

import json
import os
import random
import re
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from tokenizers.models import BPE
from torch import nn
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen2ForCausalLM

from rlox_grpo.errors import CheckpointError, NonFiniteError
from rlox_grpo.run import history
from rlox_grpo.run.checkpoint import (
    load_optimizer,
    load_random_states,
    load_weights,
    read_state,
    save_checkpoint,
)
from rlox_grpo.run.files import replace_file
from rlox_grpo.run.history import checkpoints, choose_newest, require_good, set_aside, set_later_aside
from rlox_grpo.run.manifest import _digest, find_damage

STATE = {
    "config": {},
    "data": {},
    "model": "owner/model",
    "sources": {},
    "rewards": [],
    "progress": {"draws": 21},
    "rollouts": {},
    "pass_rates": {},
    "moving_baselines": {},
    "kl_weight": {},
    "reward_sources": [],
    "last_metrics": {},
}


def tied_model():
    model = nn.Sequential(nn.Embedding(5, 3), nn.Linear(3, 5, bias=False))
    model[1].weight = model[0].weight
    model.register_buffer("seen", torch.tensor([1.0]))
    return model


def test_round_trip_is_exact_and_ties_stay(tmp_path):
    model = tied_model()
    optimizer = {"0.weight/exp_avg": torch.randn(5, 3), "0.weight/step": torch.tensor(3.0)}
    place = save_checkpoint(tmp_path, 7, model, optimizer, STATE, keep=2)
    assert place.name == "step_000007"
    other = tied_model()
    load_weights(place, other)
    assert torch.equal(other[0].weight, model[0].weight)
    assert other[1].weight is other[0].weight
    for name, tensor in load_optimizer(place).items():
        assert torch.equal(tensor, optimizer[name])
    assert read_state(place)["progress"]["draws"] == 21
    assert read_state(place)["step"] == 7


def test_random_states_continue(tmp_path):
    place = save_checkpoint(tmp_path, 1, tied_model(), {}, STATE, keep=1)
    expected = random.random(), np.random.rand(), float(torch.rand(()))
    random.random(), np.random.rand(), torch.rand(())
    load_random_states(place)
    assert (random.random(), np.random.rand(), float(torch.rand(()))) == expected


def test_only_the_newest_stay(tmp_path):
    for step in (2, 10, 100):
        save_checkpoint(tmp_path, step, tied_model(), {}, STATE, keep=2)
    assert [path.name for path in checkpoints(tmp_path)] == ["step_000010", "step_000100"]


def test_a_torn_checkpoint_is_no_checkpoint(tmp_path):
    (tmp_path / ".writing_step_000005.3f").mkdir()
    (tmp_path / ".writing_step_000005.3f" / "model.safetensors").write_bytes(b"half")
    assert checkpoints(tmp_path) == []
    save_checkpoint(tmp_path, 6, tied_model(), {}, STATE, keep=2)
    assert [path.name for path in tmp_path.iterdir()] == ["step_000006"]


def test_a_failed_write_leaves_nothing_and_says_what(tmp_path, monkeypatch):
    save_checkpoint(tmp_path, 1, tied_model(), {}, STATE, keep=2)

    def full(*arguments, **options):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("rlox_grpo.run.checkpoint.save_file", full)
    with pytest.raises(CheckpointError, match="step_000002: .*No space left"):
        save_checkpoint(tmp_path, 2, tied_model(), {}, STATE, keep=2)
    assert [path.name for path in tmp_path.iterdir()] == ["step_000001"]


def test_a_full_disk_for_real(tmp_path):
    """A write past RLIMIT_FSIZE fails as a full disk does, inside safetensors' own code."""
    resource = pytest.importorskip("resource")
    import signal

    before, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
    try:
        with pytest.raises(CheckpointError, match="cannot write the checkpoint"):
            save_checkpoint(tmp_path, 1, nn.Linear(100, 100), {}, STATE, keep=1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="Linux has a device that is always full")
@pytest.mark.parametrize("argument", ["tokenizer", "processor"])
def test_a_disk_that_is_full_at_the_tokenizer(tmp_path, argument):
    """The library tokenizers then raises a plain Exception, and no OSError."""
    model, full = nn.Linear(2, 3), SimpleNamespace(save_pretrained=lambda folder: Tokenizer(BPE()).save("/dev/full"))
    model.save_pretrained = None
    with pytest.raises(CheckpointError, match="cannot write the checkpoint .*No space left"):
        save_checkpoint(tmp_path, 1, model, {}, STATE, keep=1, **{argument: full})
    assert list(tmp_path.iterdir()) == []


def test_a_file_removed_during_the_write_publishes_nothing(tmp_path, monkeypatch):
    """As a second run does on a file system without locks, which removes what it takes for leftovers."""

    def save_and_lose(tensors, path, **options):
        save_file(tensors, path, **options)
        if path.name == "optimizer.safetensors":
            path.with_name("model.safetensors").unlink()

    monkeypatch.setattr("rlox_grpo.run.checkpoint.save_file", save_and_lose)
    with pytest.raises(CheckpointError, match=r"step_000002: model\.safetensors was removed while"):
        save_checkpoint(tmp_path, 2, tied_model(), {}, STATE, keep=2)
    assert list(tmp_path.iterdir()) == []


def test_another_models_checkpoint_is_refused_before_anything_is_loaded(tmp_path):
    place = save_checkpoint(tmp_path, 1, nn.Linear(2, 3), {}, STATE, keep=1)
    wider = nn.Linear(4, 3)
    before = wider.bias.clone()
    with pytest.raises(CheckpointError, match=r"weight has shape \(3, 2\), here \(3, 4\)"):
        load_weights(place, wider)
    assert torch.equal(wider.bias, before)
    with pytest.raises(CheckpointError, match="lacks"):
        load_weights(place, tied_model())


def test_broken_files_are_named(tmp_path):
    place = save_checkpoint(tmp_path, 1, tied_model(), {}, STATE, keep=1)
    (place / "model.safetensors").write_bytes(b"not safetensors")
    with pytest.raises(CheckpointError, match=r"cannot read .*model\.safetensors"):
        load_weights(place, tied_model())
    (place / "state.json").write_text("{")
    with pytest.raises(CheckpointError, match="is not a checkpoint"):
        read_state(place)
    with pytest.raises(CheckpointError, match="is not a checkpoint"):
        read_state(tmp_path / "nowhere")


def three(root, keep=5):
    for step in (2, 4, 6):
        save_checkpoint(root, step, tied_model(), {"0.weight/step": torch.tensor(float(step))}, STATE, keep=keep)
    return root


def cut(path):
    path.write_bytes(path.read_bytes()[:-3])


def flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def other_json(path):
    path.write_text('{"step": "six"}')


def newer_format(path):
    path.write_text(json.dumps({**json.loads(path.read_text()), "format": 99, "version": "9.0"}))


FILES = ("model.safetensors", "optimizer.safetensors", "random.safetensors", "state.json", "manifest.json")
DAMAGE = [
    *((name, damage) for damage in ("unlink", cut, flip) for name in FILES),
    *((name, other_json) for name in FILES[3:]),
    ("manifest.json", newer_format),
]


@pytest.mark.parametrize(("name", "damage"), DAMAGE, ids=lambda value: getattr(value, "__name__", value))
def test_damage_of_any_kind_names_the_file_and_the_newest_good_checkpoint(tmp_path, name, damage, caplog):
    three(tmp_path)
    last = tmp_path / "step_000006"
    (last / name).unlink() if damage == "unlink" else damage(last / name)
    with pytest.raises(CheckpointError) as caught:
        require_good(last)
    said = str(caught.value)
    assert name in said, said
    assert f"the newest good checkpoint beside it is {tmp_path / 'step_000004'}" in said
    if damage is newer_format:
        assert "is of format 99, written by rlox-grpo 9.0" in said
        assert "upgrade rlox-grpo" in said
    chosen, damaged = choose_newest(tmp_path)
    assert (chosen, damaged) == (tmp_path / "step_000004", [last])
    assert f"{last} is damaged" in caplog.text
    assert f"resuming from {chosen} instead" in caplog.text


def edit_manifest(checkpoint, change, *, sign=True):
    """Change the manifest, and with ``sign`` its digest of itself too."""
    path = checkpoint / "manifest.json"
    content = json.loads(path.read_text())
    change(content)
    if sign:
        content["sha256"] = _digest(content)
    path.write_text(json.dumps(content, indent=1))


def test_every_bit_of_the_manifest_counts(tmp_path):
    place = save_checkpoint(tmp_path, 6, tied_model(), {}, STATE, keep=5)
    path = place / "manifest.json"
    whole = path.read_bytes()
    for position in range(len(whole)):
        data = bytearray(whole)
        data[position] ^= 1 << (position % 8)
        path.write_bytes(data)
        assert find_damage(place).startswith("manifest.json") or not data[position : position + 1].strip(), position
    path.write_bytes(whole)
    edit_manifest(place, lambda content: content.update(written=0.0), sign=False)
    assert find_damage(place) == "manifest.json is not what was written: its SHA-256 differs"


def test_a_manifest_without_a_digest_of_its_own_is_damage(tmp_path):
    place = save_checkpoint(tmp_path, 6, tied_model(), {}, STATE, keep=5)
    edit_manifest(place, lambda content: content.pop("sha256"), sign=False)
    assert find_damage(place) == "manifest.json is not what this library writes"


@pytest.mark.parametrize(
    "entry",
    [
        {"state.json": {"size": None}},
        {"state.json": {"size": "many"}},
        {"state.json": {"size": True}},
        {"state.json": None},
        {"state.json": {"sha256": 3}},
        {"": {}},
        {"a\0b": {}},
        {"/etc/hostname": {}},
        {"../state.json": {}},
    ],
    ids=str,
)
def test_a_manifest_with_an_odd_entry_is_damage(tmp_path, entry):
    place = save_checkpoint(tmp_path, 6, tied_model(), {}, STATE, keep=5)

    def change(content):
        files = content["files"]
        ((name, told),) = entry.items()
        files[name] = told if told is None else {**files["state.json"], **told}

    edit_manifest(place, change)
    assert find_damage(place).startswith("manifest.json is not what this library writes: ")


@pytest.mark.skipif(os.name != "posix", reason="pipes and devices")
@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("kind", ["pipe", "device", "folder", "broken link"])
def test_what_is_no_file_is_damage(tmp_path, name, kind):
    """A pipe without a writer is not waited for, and a device that never ends is not read."""
    three(tmp_path)
    last = tmp_path / "step_000006"
    path = last / name
    path.unlink()
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        path.symlink_to("/dev/null" if kind == "device" else tmp_path / "nothing")
    assert name in find_damage(last)
    with pytest.raises(CheckpointError, match=rf"{name}.*the newest good checkpoint beside it is .*step_000004"):
        require_good(last)
    if name == "state.json":
        with pytest.raises(CheckpointError, match=r"state\.json"):
            read_state(last)


def test_what_is_no_folder_is_no_checkpoint(tmp_path):
    """Such as a file of such a name, which neither ends a save nor counts among those that are kept."""
    (tmp_path / "step_000001").write_text("")
    (tmp_path / "step_000004").symlink_to(tmp_path / "nothing")
    three(tmp_path, keep=2)
    assert [path.name for path in checkpoints(tmp_path)] == ["step_000004", "step_000006"]
    assert choose_newest(tmp_path) == (tmp_path / "step_000006", [])


@pytest.mark.parametrize("named", ["", "checkpoints"])
def test_the_folder_of_a_run_is_no_checkpoint_and_its_newest_is_named(tmp_path, named):
    root = tmp_path / "checkpoints"
    place = save_checkpoint(root, 1, nn.Linear(2, 3), {}, STATE, keep=1)
    with pytest.raises(
        CheckpointError, match=rf"is not a checkpoint, .* the newest good one is {re.escape(str(place))}$"
    ):
        require_good(tmp_path / named)


def test_where_every_checkpoint_is_damaged_each_is_named(tmp_path):
    three(tmp_path)
    for path in checkpoints(tmp_path):
        cut(path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"step_000006: model\.safetensors has .* bytes.*step_000002: model"):
        choose_newest(tmp_path)


@pytest.mark.parametrize("key", list(STATE))
def test_a_key_that_the_state_lacks_is_named(key, tmp_path):
    state = {name: value for name, value in STATE.items() if name != key}
    save_checkpoint(tmp_path, 2, tied_model(), {}, state, keep=5)
    with pytest.raises(CheckpointError, match=f"step_000002: state.json has no '{key}'"):
        choose_newest(tmp_path)


def test_going_back_sets_later_checkpoints_aside_and_keeps_the_new_ones(tmp_path):
    three(tmp_path)
    later = read_state(tmp_path / "step_000006")["random"]
    (aside,) = set_later_aside(tmp_path, 4)
    assert [path.name for path in checkpoints(tmp_path)] == ["step_000002", "step_000004"]
    assert aside.name.startswith("step_000006.superseded-")
    assert read_state(aside)["random"] == later
    save_checkpoint(tmp_path, 5, tied_model(), {}, STATE, keep=1)
    assert [path.name for path in checkpoints(tmp_path)] == ["step_000005"]
    assert aside.is_dir()


def test_a_kill_between_the_renames_of_later_checkpoints_does_not_go_forward_again(tmp_path, monkeypatch):
    three(tmp_path)

    def killed_at_the_second(checkpoint, why):
        if checkpoint.name == "step_000006":
            raise KeyboardInterrupt
        return set_aside(checkpoint, why)

    with monkeypatch.context() as patched:
        patched.setattr(history, "set_aside", killed_at_the_second)
        with pytest.raises(KeyboardInterrupt):
            set_later_aside(tmp_path, 2)
    assert [path.name for path in checkpoints(tmp_path)] == ["step_000002", "step_000006"]
    assert choose_newest(tmp_path) == (tmp_path / "step_000002", [])
    assert [path.name[:11] for path in set_later_aside(tmp_path, 2)] == ["step_000006"]
    save_checkpoint(tmp_path, 4, tied_model(), {}, STATE, keep=2)
    assert choose_newest(tmp_path) == (tmp_path / "step_000004", [])


def test_a_damaged_note_of_going_back_is_named(tmp_path):
    three(tmp_path)
    (tmp_path / "going_back_to").write_text("two")
    with pytest.raises(CheckpointError, match="going_back_to is damaged .*name it by resume="):
        choose_newest(tmp_path)


def test_keep_counts_by_time_of_writing(tmp_path):
    """Not by step: a lower step that was written last is the newest."""
    three(tmp_path)
    save_checkpoint(tmp_path, 3, tied_model(), {}, STATE, keep=2)
    assert [path.name for path in checkpoints(tmp_path)] == ["step_000003", "step_000006"]


def test_keep_counts_in_the_order_of_writing_when_the_clock_is_set_back(tmp_path, monkeypatch):
    three(tmp_path)
    monkeypatch.setattr("time.time", lambda: 1000.0)
    for step in (8, 10):
        save_checkpoint(tmp_path, step, tied_model(), {}, STATE, keep=2)
    assert [path.name for path in checkpoints(tmp_path)] == ["step_000008", "step_000010"]


def test_a_step_written_again_does_not_keep_the_old_files(tmp_path):
    three(tmp_path)
    cut(tmp_path / "step_000006" / "model.safetensors")
    model = tied_model()
    place = save_checkpoint(tmp_path, 6, model, {}, STATE, keep=5)
    assert find_damage(place) == ""
    other = tied_model()
    load_weights(place, other)
    assert torch.equal(other[0].weight, model[0].weight)


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_weights_that_are_not_finite_are_not_saved(tmp_path, bad):
    three(tmp_path, keep=1)
    model = tied_model()
    with torch.no_grad():
        model[0].weight[1, 2] = bad
    with pytest.raises(NonFiniteError, match=r"parameter 0\.weight has 1 of 15 values that are NaN or infinite"):
        save_checkpoint(tmp_path, 8, model, {}, STATE, keep=1)
    with pytest.raises(NonFiniteError, match=r"optimizer's 0\.weight/exp_avg_sq has 2 of 2"):
        save_checkpoint(tmp_path, 8, tied_model(), {"0.weight/exp_avg_sq": torch.full((2,), bad)}, STATE, keep=1)
    assert [path.name for path in tmp_path.iterdir()] == ["step_000006"]


@pytest.mark.parametrize(
    "broken", [{}, {"python": 3, "numpy": []}, {"python": [3, [1], None], "numpy": ["x", 0, 0, 0]}]
)
def test_random_states_that_are_none_are_an_error_of_the_checkpoint(tmp_path, broken):
    place = three(tmp_path) / "step_000006"
    (place / "state.json").write_text(json.dumps({"random": broken}))
    with pytest.raises(CheckpointError, match=r"the random states in state\.json"):
        load_random_states(place)


@pytest.mark.parametrize("tied", [True, False])
def test_a_checkpoint_of_a_transformers_model_is_a_model(tmp_path, tied):
    config = Qwen2Config(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        tie_word_embeddings=tied,
    )
    model = Qwen2ForCausalLM(config).eval()
    place = save_checkpoint(tmp_path, 1, model, {}, STATE, keep=1)
    loaded = AutoModelForCausalLM.from_pretrained(place).eval()
    ids = torch.arange(6)[None]
    assert torch.equal(loaded(ids).logits, model(ids).logits)
    assert json.loads((place / "state.json").read_text())["step"] == 1
    assert (place / "generation_config.json").exists()


@pytest.fixture
def disk(monkeypatch):
    """What was asked of the disk, in order: the inode of each file or folder to hold, and "rename"."""
    asked, rename = [], os.replace

    def replace(*paths):
        asked.append("rename")
        rename(*paths)

    monkeypatch.setattr(os, "fsync", lambda descriptor: asked.append(os.fstat(descriptor).st_ino))
    monkeypatch.setattr(os, "replace", replace)
    return asked


@pytest.mark.skipif(os.name != "posix", reason="Windows opens no folder")
def test_the_disk_holds_a_checkpoint_before_its_name_and_then_the_name(tmp_path, disk):
    place = save_checkpoint(tmp_path, 7, tied_model(), {}, STATE, keep=2)
    last = len(disk) - disk[::-1].index("rename") - 1
    assert {path.stat().st_ino for path in (place, *place.rglob("*"))} <= set(disk[:last])
    assert disk[last + 1 :] == [tmp_path.stat().st_ino]


@pytest.mark.skipif(os.name != "posix", reason="Windows opens no folder")
def test_the_disk_holds_a_file_before_its_name_and_then_the_name(tmp_path, disk):
    replace_file(tmp_path / "run.toml", b"new")
    assert disk == [(tmp_path / "run.toml").stat().st_ino, "rename", tmp_path.stat().st_ino]
