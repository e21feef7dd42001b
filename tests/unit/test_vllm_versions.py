"""The supported versions of vLLM: which are accepted, and the transfer by NCCL with the interfaces of each.

The files of a version that has no wheel for CPUs are read, not installed. To test with those of vLLM 0.33::

    pip download --no-deps --only-binary :all: vllm==0.33.0
    unzip vllm-0.33.0-*.whl 'vllm/*.py' -d vllm-0.33
    RLOX_GRPO_VLLM_FILES=vllm-0.33 pytest tests/unit/test_vllm_versions.py
"""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import sys
from functools import cached_property
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from rlox_grpo.rollout.engines.vllm.startup import TESTED_VLLM, check_vllm_version

MODULE = "rlox_grpo.rollout.engines.vllm.nccl_transfer"
FILES = os.environ.get("RLOX_GRPO_VLLM_FILES")


@pytest.mark.parametrize("version", ["0.32.0", "0.32.1+cpu", "0.33.0", "0.33.1rc1"])
def test_supported_versions(monkeypatch, version):
    monkeypatch.setattr(importlib.metadata, "version", lambda name: version)
    check_vllm_version()


@pytest.mark.parametrize("version", ["0.31.4", "0.34.0", "1.0.0", "0.3.3"])
def test_other_versions_are_refused(monkeypatch, version):
    monkeypatch.setattr(importlib.metadata, "version", lambda name: version)
    message = rf"vLLM {version} is not supported: rlox-grpo is tested with vLLM 0.32 and 0.33.*pip install 'vllm==0.33"
    with pytest.raises(ImportError, match=message):
        check_vllm_version()


def test_the_extra_names_the_supported_versions():
    (line,) = [line for line in Path("pyproject.toml").read_text().splitlines() if line.startswith("vllm = ")]
    first, last = next(iter(TESTED_VLLM)), list(TESTED_VLLM)[-1]
    assert f"vllm>={first},<0.{int(last.split('.')[1]) + 1};" in line


class Source032:
    """vLLM 0.32's WeightSource: ``metadata()``, and iteration."""


class Source033:
    """vLLM 0.33's WeightSource: ``metadata`` is a cached_property, and ``iter_full`` yields the tensors."""

    def __init_subclass__(cls) -> None:
        if not isinstance(cls.__dict__.get("metadata"), cached_property):
            raise TypeError(f"{cls.__name__}.metadata must be a functools.cached_property")

    def iter_full(self) -> Any:
        raise NotImplementedError


class Trainer032:
    """Sends the metadata and the tensors of a source, as vLLM 0.32's trainer does."""

    def __init__(self, client: Any, source: Any) -> None:
        self.client, self.source, self.sent = client, source, []

    @classmethod
    def trainer_init(cls, info: Any, *, client: Any, source: Any) -> Trainer032:
        trainer = cls(client, source)
        client.init_weight_transfer_engine(info)
        return trainer

    def send_weights(self) -> None:
        self.send(self.source.metadata(), self.source)

    def send(self, metadata: Any, tensors: Any) -> None:
        self.client.start_weight_update()
        self.client.update_weights({"names": [each[0] for each in metadata]})
        self.sent.append(list(tensors))
        self.client.finish_weight_update()

    def shutdown(self) -> None:
        self.sent.clear()


class Trainer033(Trainer032):
    """As vLLM 0.33's, which reads the metadata when the group is formed."""

    @classmethod
    def trainer_init(cls, info: Any, *, client: Any, source: Any) -> Trainer033:
        assert source.metadata
        return super().trainer_init(info, client=client, source=source)

    def send_weights(self) -> None:
        self.send(self.source.metadata, self.source.iter_full())


def module(name: str, **members: Any) -> ModuleType:
    made = ModuleType(name)
    made.__dict__.update(members)
    return made


def load_transfer(monkeypatch, modules: dict[str, ModuleType]) -> Any:
    for name, each in modules.items():
        monkeypatch.setitem(sys.modules, name, each)
    monkeypatch.delitem(sys.modules, MODULE, raising=False)
    loaded = importlib.import_module(MODULE)
    monkeypatch.setitem(sys.modules, MODULE, loaded)  # removed at the end: it has this version's classes
    return loaded


@pytest.mark.parametrize("version", TESTED_VLLM)
def test_a_transfer_by_nccl_with_the_interface_of(monkeypatch, version):
    kind, trainer = {"0.32": (Source032, Trainer032), "0.33": (Source033, Trainer033)}[version]
    base = "vllm.distributed.weight_transfer"
    transfer = load_transfer(
        monkeypatch,
        {
            **{name: module(name) for name in ("vllm", "vllm.distributed", base)},
            f"{base}.base": module("base", ParamMeta=lambda *fields: fields, WeightSource=kind),
            f"{base}.factory": module("factory", WeightTransferTrainerFactory=trainer),
            f"{base}.nccl_engine": module("nccl_engine", NCCLTrainerInitInfo=dict),
        },
    )
    posted: list[str] = []
    group = transfer.NCCLTransfer(lambda path, body: posted.append(path), 1, "127.0.0.1")
    weights = [{"a": torch.zeros(2), "b": torch.ones(3)}, {"a": torch.full((2,), 5.0), "b": torch.full((3,), 6.0)}]
    for each in weights:
        group.send(each.items(), 10.0)
    update = ["/start_weight_update", "/update_weights", "/finish_weight_update"]
    assert posted == ["/init_weight_transfer_engine", *update, *update]
    for sent, each in zip(group._engine.sent, weights, strict=True):
        assert all(tensor is each[name] for name, tensor in sent)
    assert group._source.weights == ()  # no tensor of the policy is held between two transfers
    group.close()


class Anything(ModuleType):
    """A module of vLLM that the transfer does not use, with every name."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {"__init__": lambda self, *arguments, **options: None})


@pytest.mark.skipif(FILES is None, reason="needs RLOX_GRPO_VLLM_FILES: see the top of this file")
def test_the_control_plane_with_the_files_of_vllm(monkeypatch):
    """vLLM's own engine for the trainer sends our metadata over our connection; only the broadcast is left out."""
    assert FILES is not None
    base = "vllm.distributed.weight_transfer"
    packages = {name: module(name) for name in ("vllm", "vllm.distributed", base)}
    for name, package in packages.items():
        package.__path__ = [str(Path(FILES, *name.split(".")))]
    unused = (
        *("vllm.config", "vllm.config.parallel", "vllm.config.weight_transfer", "vllm.logger", "vllm.utils"),
        *("vllm.utils.nccl", "pybase64", "vllm.distributed.device_communicators"),
        *("vllm.distributed.device_communicators.pynccl_wrapper", "vllm.distributed.utils"),
    )
    for name in [name for name in sys.modules if name.startswith(base + ".")]:
        monkeypatch.delitem(sys.modules, name)
    transfer = load_transfer(monkeypatch, {**packages, **{name: Anything(name) for name in unused}})
    engine_module = importlib.import_module(f"{base}.nccl_engine")
    posted: list[tuple[str, Any]] = []
    plane = transfer.ControlPlane(lambda path, body: posted.append((path, body)))
    source = transfer.PolicySource()
    source.weights = [("a", torch.zeros(2)), ("b", torch.ones(3, 4))]
    engine = engine_module.NCCLTrainerWeightTransferEngine(client=plane, source=source)
    sent: list[Any] = []
    engine._broadcast = lambda pairs, metadata: sent.append([*engine._checked_iter(pairs, metadata)])
    engine._post_send_sync = lambda: None
    engine.send_weights()
    assert [path for path, _ in posted] == ["/start_weight_update", "/update_weights", "/finish_weight_update"]
    info = posted[1][1]["update_info"]
    assert (info["names"], info["shapes"]) == (["a", "b"], [[2], [3, 4]])
    assert [name for name, _ in sent[0]] == ["a", "b"]
    source.weights = [("a", torch.ones(2)), ("b", torch.zeros(3, 4))]
    engine.send_weights()
    assert all(tensor is expected for (_, tensor), (_, expected) in zip(sent[1], source.weights, strict=True))
    for name in [name for name in sys.modules if name.startswith(base + ".")]:
        monkeypatch.delitem(sys.modules, name)
