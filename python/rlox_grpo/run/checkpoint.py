"""Save and restore a run: weights, optimizer, random states, position, step. Tensors as safetensors, the rest as JSON.

A checkpoint appears whole or not at all: it is written beside its place and renamed into it. Nothing is pickled.
"""

from __future__ import annotations

import json
import os
import random
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file, save_model
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rlox_grpo.distributed.shards import place_like
from rlox_grpo.errors import CheckpointError

_NAME = re.compile(r"step_(\d{6,})")
_PARTIAL = ".writing_"


def save_checkpoint(
    root: Path,
    step: int,
    model: nn.Module,
    optimizer_state: Mapping[str, Tensor],
    state: Mapping[str, Any],
    *,
    keep: int,
    tokenizer: PreTrainedTokenizerBase | None = None,
    weights: Mapping[str, Tensor] | None = None,
    reference_state: Mapping[str, Tensor] | None = None,
) -> Path:
    """Write ``root/step_<step>`` and remove all but the newest ``keep`` checkpoints.

    Beside the training state it holds what ``from_pretrained`` reads, so that a checkpoint of a transformers model
    can be used as a model. ``weights`` are the whole parameters where ``model`` holds shards or rounded ones,
    ``reference_state`` the weights of a reference that follows the policy.

    Raises:
        CheckpointError: the folder cannot be written (a full disk, say); what was there before is untouched.
    """
    place = root / f"step_{step:06d}"
    if place.exists():  # a step's state is one: the run has already saved it
        return place
    partial = root / f"{_PARTIAL}{place.name}"
    try:
        for torn in root.glob(f"{_PARTIAL}*"):
            shutil.rmtree(torn)
        partial.mkdir(parents=True)
        save_file(_saved_tensors(model, weights or {}), partial / "model.safetensors", metadata={"format": "pt"})
        if isinstance(model, PreTrainedModel):
            model.config.save_pretrained(partial)
            if tokenizer is not None:
                tokenizer.save_pretrained(partial)
        moments = {name: tensor.detach().cpu() for name, tensor in optimizer_state.items()}
        save_file(moments, partial / "optimizer.safetensors")
        if reference_state:
            save_file(dict(reference_state), partial / "reference.safetensors")
        save_file(_random_tensors(), partial / "random.safetensors")
        (partial / "state.json").write_text(json.dumps({**state, "step": step, "random": _random_values()}, indent=1))
        for file in partial.rglob("*"):
            _flush(file)
        os.replace(partial, place)
        _flush(root)
    except (OSError, SafetensorError) as error:  # safetensors reports a full disk as an error of its own
        shutil.rmtree(partial, ignore_errors=True)
        raise CheckpointError(f"cannot write the checkpoint {place}: {error}") from error
    for old in checkpoints(root)[:-keep]:
        shutil.rmtree(old, ignore_errors=True)
    return place


def export_model(
    path: Path, model: nn.Module, tokenizer: PreTrainedTokenizerBase | None, weights: Mapping[str, Tensor] | None
) -> None:
    """Write a Hugging Face checkpoint (a plain module: ``model.safetensors``) of ``model``, or of its ``weights``."""
    if hasattr(model, "save_pretrained"):
        save_pretrained: Any = model.save_pretrained
        save_pretrained(path, **({} if weights is None else {"state_dict": dict(weights)}))
        if tokenizer is not None:
            tokenizer.save_pretrained(path)
        return
    path.mkdir(parents=True, exist_ok=True)
    if weights is None:
        save_model(model, str(path / "model.safetensors"))
    else:
        save_file(dict(weights), path / "model.safetensors")


def checkpoints(root: Path) -> list[Path]:
    """The complete checkpoints under ``root``, oldest first."""
    if not root.is_dir():
        return []
    found = [(int(match[1]), path) for path in root.iterdir() if (match := _NAME.fullmatch(path.name))]
    return [path for _, path in sorted(found)]


def read_state(checkpoint: Path) -> dict[str, Any]:
    """The JSON part. Raises CheckpointError when it is missing or broken."""
    try:
        state: dict[str, Any] = json.loads((checkpoint / "state.json").read_text())
    except (OSError, json.JSONDecodeError) as error:
        raise CheckpointError(f"{checkpoint} is not a checkpoint of rlox_grpo: {error}") from None
    return state


def load_weights(checkpoint: Path, model: nn.Module) -> None:
    """Put the checkpoint's weights into ``model``.

    Raises:
        CheckpointError: names or shapes that are not the model's; nothing is loaded then.
    """
    saved = _tensors(checkpoint / "model.safetensors")
    own = _own_tensors(model)
    missing, unknown = sorted(own.keys() - saved.keys()), sorted(saved.keys() - own.keys())
    if missing or unknown:
        lacks, has = missing[:3] or "nothing", unknown[:3] or "nothing"
        raise CheckpointError(f"{checkpoint} is of another model: it lacks {lacks} and has {has} that is not here")
    for name, tensor in own.items():
        there, here = tuple(saved[name].shape), tuple(tensor.shape)
        if there != here:
            raise CheckpointError(f"{checkpoint} is of another model: {name} has shape {there}, here {here}")
    with torch.no_grad():
        for name, tensor in own.items():
            tensor.copy_(place_like(saved[name], tensor))


def load_optimizer(checkpoint: Path) -> dict[str, Tensor]:
    """The updater's state as it was saved."""
    return _tensors(checkpoint / "optimizer.safetensors")


def load_reference(checkpoint: Path) -> dict[str, Tensor]:
    """The reference's state as it was saved; empty where it kept none."""
    file = checkpoint / "reference.safetensors"
    return _tensors(file) if file.exists() else {}


def load_random_states(checkpoint: Path) -> None:
    """Set Python's, NumPy's and torch's global generators to where the checkpoint was."""
    values: dict[str, Any] = read_state(checkpoint)["random"]
    tensors = _tensors(checkpoint / "random.safetensors")
    version, internal, gauss = values["python"]
    random.setstate((version, tuple(internal), gauss))
    name, position, has_gauss, cached = values["numpy"]
    np.random.set_state((name, tensors["numpy"].numpy().astype(np.uint32), position, has_gauss, cached))
    torch.set_rng_state(tensors["torch"])
    for index in range(torch.cuda.device_count()):
        if f"cuda_{index}" in tensors:
            torch.cuda.set_rng_state(tensors[f"cuda_{index}"], index)


def _random_values() -> dict[str, Any]:
    state: Any = np.random.get_state(legacy=True)
    name, _, position, has_gauss, cached = state
    return {"python": random.getstate(), "numpy": [name, position, has_gauss, cached]}


def _random_tensors() -> dict[str, Tensor]:
    state: Any = np.random.get_state(legacy=True)
    keys = np.asarray(state[1])
    states = {"torch": torch.get_rng_state(), "numpy": torch.from_numpy(keys.astype(np.int64))}
    for index in range(torch.cuda.device_count()):
        states[f"cuda_{index}"] = torch.cuda.get_rng_state(index)
    return states


def _own_tensors(model: nn.Module) -> dict[str, Tensor]:
    """What a checkpoint holds of ``model``, a tied parameter once, under its first name.

    Of a model with an adapter that is what is trained, else all parameters and persistent buffers.
    """
    if hasattr(model, "peft_config"):
        return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    persistent = model.state_dict(keep_vars=True)
    buffers = {name: buffer for name, buffer in model.named_buffers() if name in persistent}
    return {**dict(model.named_parameters()), **buffers}


def _saved_tensors(model: nn.Module, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The same, ready to be saved: on the CPU, contiguous, no storage shared."""
    return {
        name: weights.get(name, tensor).detach().cpu().contiguous().clone()
        for name, tensor in _own_tensors(model).items()
    }


def _tensors(file: Path) -> dict[str, Tensor]:
    try:
        return load_file(file)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"cannot read {file}: {error}") from error


def _flush(path: Path) -> None:
    """Ask the disk to hold ``path`` before anything points to it."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
