"""Save and load checkpoints: weights, optimizer state, random states and the position in the data.

Tensors are stored as safetensors, everything else as JSON; nothing is pickled. A checkpoint is first written to a
temporary folder, with digests of its files, and then renamed. A checkpoint is therefore complete or absent, even after
a kill.
"""

from __future__ import annotations

import copy
import json
import logging
import os
import random
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import transformers
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file, save_model
from torch import Tensor, nn
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from rlox_grpo.distributed.shards import find_whole_shape
from rlox_grpo.errors import CheckpointError, NonFiniteError
from rlox_grpo.model.blank import StoredWeights
from rlox_grpo.model.load_checks import ADAPTER_CONFIG
from rlox_grpo.model.quantize import make_unpacked
from rlox_grpo.rollout.engines.weight_sync import collect_weights
from rlox_grpo.run.files import json_line, replace_file, sync_path
from rlox_grpo.run.history import checkpoint_path, checkpoints, partial_path, remove_leftovers, remove_old, set_aside
from rlox_grpo.run.manifest import MANIFEST, STATE, read_object, read_write_time, write_manifest

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

REFERENCE, TEACHER = "reference.safetensors", "teacher.safetensors"
"""Files of a checkpoint with the weights of a reference policy or a teacher that follow the policy."""

_SAMPLING_KEYS = ("temperature", "top_p", "top_k", "min_p", "top_h", "typical_p", "epsilon_cutoff", "eta_cutoff")
"""Settings of generation that greedy decoding ignores."""

_PROBE = "The 12 cats cost $3.50 each;  x^2 + 3x = 10, so x = 2.\nNaïve café, 答案是 99。 def f(a): return a[-1]\t# ok"


def save_checkpoint(
    root: Path,
    step: int,
    model: nn.Module,
    optimizer_state: Mapping[str, Tensor],
    state: Mapping[str, Any],
    *,
    keep: int,
    best: Path | None = None,
    again: bool = False,
    tokenizer: PreTrainedTokenizerBase | None = None,
    processor: Any = None,
    weights: Mapping[str, Tensor] | None = None,
    reference_state: Mapping[str, Tensor] | None = None,
    teacher_state: Mapping[str, Tensor] | None = None,
) -> Path:
    """Write ``root/step_<step>`` and remove all but the ``keep`` newest checkpoints and ``best``.

    ``from_pretrained`` loads the checkpoint of a transformers model or a peft adapter. Only the process that has the
    lock of the run folder (:mod:`rlox_grpo.run.folder`) may call this.

    Args:
        state: JSON values for ``state.json``.
        again: remove a checkpoint of this step, which the same run wrote; otherwise it is renamed.
        processor: the processor of a vision-language model whose prompts may have pictures.
        weights: whole float32 parameters by name, if ``model`` has shards or rounded weights.
        reference_state: weights of a reference policy that is refreshed during training.
        teacher_state: weights of a teacher that is a moving average of the policy.

    Raises:
        CheckpointError: the folder cannot be written, for example because the disk is full. The other checkpoints stay.
        NonFiniteError: a weight or a moment of the optimizer is NaN or infinite. Nothing is written.
    """
    target = checkpoint_path(root, step)
    partial = partial_path(target)
    masters = weights or {}
    tensors = {  # copies on the CPU: safetensors takes only contiguous tensors that share no storage
        name: masters.get(name, tensor).detach().cpu().contiguous().clone()
        for name, tensor in _stored_tensors(model).items()
    }
    moments = {name: tensor.detach().cpu() for name, tensor in optimizer_state.items()}
    _refuse_non_finite(model, tensors, moments)
    try:
        remove_leftovers(root)
        root.mkdir(exist_ok=True)  # without parents: a run folder that was moved during the run is not made anew
        partial.mkdir()
        save_file(tensors, partial / "model.safetensors", metadata={"format": "pt"})
        if isinstance(model, transformers.PreTrainedModel):
            model.config.save_pretrained(partial)
            _save_generation_config(model, tokenizer, partial)
        elif hasattr(model, "peft_config"):
            save_adapter: Any = model.save_pretrained
            # The embedding is frozen. With True, peft may ask the hub whether the embedding was resized.
            save_adapter(partial, state_dict=dict(tensors), save_embedding_layers=False)
            (partial / "README.md").unlink(missing_ok=True)
        if processor is not None:  # it writes its tokenizer too, which the policy's then replaces
            _save_tokenizer(processor, partial)
        if tokenizer is not None and hasattr(model, "save_pretrained"):
            _save_tokenizer(tokenizer, partial)
        save_file(moments, partial / "optimizer.safetensors")
        for name, weights_by_name in ((REFERENCE, reference_state), (TEACHER, teacher_state)):
            if weights_by_name:
                save_file(dict(weights_by_name), partial / name)
        random_values, random_tensors = _read_random_states()
        save_file(random_tensors, partial / "random.safetensors")
        whole = {**state, "step": step, "random": random_values}
        (partial / STATE).write_text(json.dumps(whole, indent=1))
        write_manifest(partial, after=max(map(read_write_time, checkpoints(root)), default=0.0))
        for path in (*partial.rglob("*"), partial):
            sync_path(path)
        previous = set_aside(target, "superseded") if os.path.lexists(target) else None
        os.replace(partial, target)
        sync_path(root)
        if again and previous is not None:
            shutil.rmtree(previous, ignore_errors=True)
    except (OSError, SafetensorError) as error:  # SafetensorError also reports a full disk
        shutil.rmtree(partial, ignore_errors=True)
        raise CheckpointError(f"cannot write the checkpoint {target}: {error}") from error
    remove_old(root, keep=keep, newest=target, best=best)
    return target


_RESTORED = "restored.json"
"""Name of the file in a checkpoint that a collapse went back to; the manifest does not name it."""


def save_learning_rate_factor(checkpoint: Path, factor: float) -> None:
    """Record the factor of the learning rate with which a run continues from ``checkpoint`` after a collapse.

    Until the run's next checkpoint, no other file contains the factor, so a run killed before that would lose it.

    Raises:
        CheckpointError: the note cannot be written.
    """
    try:
        replace_file(checkpoint / _RESTORED, json_line({"learning_rate_factor": factor}))
    except OSError as error:
        raise CheckpointError(f"cannot write {checkpoint / _RESTORED}: {error}") from error


def load_learning_rate_factor(checkpoint: Path, saved: float) -> float:
    """Return the factor of :func:`save_learning_rate_factor`; without one, ``saved``, the factor in the checkpoint.

    Raises:
        CheckpointError: the note is damaged.
    """
    if not os.path.lexists(checkpoint / _RESTORED):
        return saved
    note = read_object(checkpoint / _RESTORED)
    factor = None if isinstance(note, str) else note.get("learning_rate_factor")
    if not isinstance(factor, (int, float)):
        raise CheckpointError(
            f"{checkpoint / _RESTORED} is damaged: it holds the factor of the learning rate after a collapse; "
            'write it again, as {"learning_rate_factor": 0.5} after one collapse, or choose another checkpoint'
        )
    return float(factor)


def refuse_unfit_folder(path: Path, model: Any, *, merged: bool) -> None:
    """Raise ValueError if ``path`` is no folder for the model.

    Writing to it would damage a checkpoint, change the base model of an adapter, or hide the written model. ``model``
    may be None, as long as it is not loaded.
    """
    if path.is_file():
        raise ValueError(f"{str(path)!r} is a file: choose the path of a folder")
    if str(path).startswith("~"):
        raise ValueError(f"{str(path)!r} would be a folder named ~ here: write the whole path in place of ~")
    if (path / MANIFEST).exists() and (path / STATE).exists():
        raise ValueError(
            f"{str(path)!r} is a checkpoint of a run, which could not be resumed if its files were replaced: choose "
            "another folder"
        )
    adapters = getattr(model, "peft_config", {})
    base = next((adapter.base_model_name_or_path for adapter in adapters.values()), None)
    if base and path.is_dir() and Path(base).is_dir() and path.samefile(base):
        raise ValueError(
            f"{str(path)!r} is the folder of the base model, which the adapter needs unchanged: choose another folder"
        )
    if (merged or not adapters) and (path / ADAPTER_CONFIG).exists():
        raise ValueError(
            f"{str(path)!r} holds an adapter (adapter_config.json), which transformers and peft would load in place of "
            "the whole model: choose another folder"
        )


def export_model(
    path: Path,
    model: Any,
    tokenizer: PreTrainedTokenizerBase | None,
    weights: Mapping[str, Tensor] | None = None,
    *,
    merged: bool = False,
    processor: Any = None,
) -> None:
    """Write a Hugging Face checkpoint, or ``model.safetensors`` alone for a plain module.

    Args:
        weights: whole parameters by name, if those of ``model`` are shards or rounded.
        merged: write the base model with the LoRA adapter merged in; ``model`` itself is not changed. 4-bit weights are
            dequantized before the merge, because that is the function that was trained.
        processor: the processor of a vision-language model whose prompts may have pictures.

    Raises:
        ValueError: with ``merged``, the model has no adapter, or one that is not plain LoRA; or ``path`` is a file,
            begins with ``~``, is a checkpoint of a run or the folder of the base model, or holds an adapter beside
            which a whole model would be written.
    """
    refuse_unfit_folder(path, model, merged=merged)
    if weights is not None and not hasattr(model, "peft_config"):
        weights = {**weights, **_find_buffers(model)}
    if merged:
        if not hasattr(model, "peft_config"):
            raise ValueError(f"there is no adapter to merge: the model is a {type(model).__name__}")
        weights = dict(collect_weights(model, None if weights is None else weights.items()))
        model = model.get_base_model()
        if getattr(model.config, "quantization_config", None) is not None:
            model = make_unpacked(model)
    elif not hasattr(model, "save_pretrained"):
        path.mkdir(parents=True, exist_ok=True)
        if weights is None:
            save_model(model, str(path / "model.safetensors"))
        else:
            save_file(dict(weights), path / "model.safetensors")
        return
    settings: dict[str, Any] = {} if weights is None else {"state_dict": dict(weights)}
    adapters = getattr(model, "peft_config", {})
    if any(Path(adapter.base_model_name_or_path or "").is_file() for adapter in adapters.values()):
        settings["save_embedding_layers"] = False  # peft would ask the hub for the config of a GGUF file
    is_whole = isinstance(model, transformers.PreTrainedModel)
    if is_whole:
        (path / SAFE_WEIGHTS_INDEX_NAME).unlink(missing_ok=True)
    with _without_generation_config(model):
        model.save_pretrained(path, **settings)
    if is_whole and (path / SAFE_WEIGHTS_INDEX_NAME).exists():
        # In several files. save_pretrained leaves an earlier model in one file, which from_pretrained prefers.
        (path / SAFE_WEIGHTS_NAME).unlink(missing_ok=True)
    if weights and not merged and is_whole:
        # config.json has the dtype of the rounded parameters. from_pretrained would round the weights to it.
        model.config.dtype = next(iter(weights.values())).dtype
        model.config.save_pretrained(path)
    _save_generation_config(model, tokenizer, path)
    if processor is not None:
        _save_tokenizer(processor, path)
    if tokenizer is not None:
        _save_tokenizer(tokenizer, path)
        if (path / "config.json").exists():  # not in the folder of an adapter
            _warn_about_other_tokenizer(path, tokenizer)


def _save_tokenizer(tokenizer: Any, folder: Path) -> None:
    """Write the files of a tokenizer or a processor.

    Raises:
        OSError: a file cannot be written, also where the library tokenizers raises a plain ``Exception`` for it.
    """
    try:
        tokenizer.save_pretrained(folder)
    except Exception as error:
        if type(error) is not Exception:
            raise
        raise OSError(str(error)) from error


def _save_generation_config(model: Any, tokenizer: PreTrainedTokenizerBase | None, folder: Path) -> None:
    """Write ``generation_config.json``. If it names no end token, add the tokenizer's, which training used."""
    generation = copy.deepcopy(getattr(model, "generation_config", None))
    if generation is None:
        return
    if generation.eos_token_id is None and tokenizer is not None:
        generation.eos_token_id = tokenizer.eos_token_id
    try:
        generation.save_pretrained(folder)
    except ValueError:  # transformers loads contradictory sampling settings, but refuses to write them
        left_out = [name for name in _SAMPLING_KEYS if getattr(generation, name, None) is not None]
        for name in left_out:
            setattr(generation, name, None)
        try:
            generation.save_pretrained(folder)
        except ValueError as error:
            (folder / "generation_config.json").unlink(missing_ok=True)
            logger.warning("generation_config.json was not written: %s", error)
        else:
            logger.warning("generation_config.json: left out %s, without use in greedy decoding", ", ".join(left_out))


@contextmanager
def _without_generation_config(model: Any) -> Iterator[None]:
    """Let ``save_pretrained`` write a default one, which :func:`_save_generation_config` replaces; it may refuse it."""
    if not isinstance(model, transformers.PreTrainedModel) or model.generation_config is None:
        yield
        return
    config = model.generation_config
    model.generation_config = transformers.GenerationConfig()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        model.generation_config = config


def _warn_about_other_tokenizer(folder: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    """Warn if ``AutoTokenizer`` loads another tokenizer from ``folder``: for some models it builds its own class."""
    try:
        other: Any = transformers.AutoTokenizer.from_pretrained(folder)
    except (OSError, ValueError, KeyError) as error:
        logger.warning("AutoTokenizer cannot load the tokenizer saved in %s: %s", folder, error)
        return
    ids = range(min(len(tokenizer), 2000))
    texts = [_PROBE, *(str(tokenizer.decode(some)) for some in (*([index] for index in ids), [*ids][:200]))]
    for text in texts:
        mine, theirs = _encode(tokenizer, text), _encode(other, text)
        if mine is not None and mine != theirs:
            logger.warning(
                "%s: AutoTokenizer builds a %s of this tokenizer, with other ids (%r: %s there, %s here); load it by "
                "PreTrainedTokenizerFast.from_pretrained, or train a model of another type",
                *(folder, type(other).__name__, text[:40], theirs and theirs[:8], mine[:8]),
            )
            return


def _encode(tokenizer: Any, text: str) -> list[int] | None:
    """Return the ids of ``text``, or None if the tokenizer raises an error."""
    try:
        return list(tokenizer(text)["input_ids"])
    except Exception:  # noqa: BLE001  (tokenizers raises Exception itself)
        return None


def _refuse_non_finite(model: nn.Module, tensors: Mapping[str, Tensor], moments: Mapping[str, Tensor]) -> None:
    """Raise NonFiniteError with the name of the first trained parameter or moment that is not finite."""
    trained = {
        name: tensors[name]
        for name, parameter in model.named_parameters()
        if parameter.requires_grad and name in tensors
    }
    for what, checked in (("parameter", trained), ("the optimizer's", moments)):
        for name, tensor in checked.items():
            if tensor.is_floating_point() and not (good := torch.isfinite(tensor)).all():
                bad = tensor.numel() - int(good.sum())
                raise NonFiniteError(f"{what} {name} has {bad:,} of {tensor.numel():,} values that are NaN or infinite")


def read_state(checkpoint: Path) -> dict[str, Any]:
    """Return the content of ``state.json``. Raises CheckpointError if it is missing or damaged."""
    state = read_object(checkpoint / STATE)
    if isinstance(state, str):
        raise CheckpointError(f"{checkpoint} is not a checkpoint of rlox_grpo: {state}")
    return state


def load_weights(
    checkpoint: Path,
    model: nn.Module,
    set_weight: Callable[[str, Tensor, Tensor], None] | None = None,
    stored: StoredWeights | None = None,
) -> None:
    """Load the checkpoint's weights into ``model``.

    If ``model`` is on the meta device, only the path of the weights is recorded in ``stored``.

    Args:
        checkpoint: the checkpoint.
        model: the model.
        set_weight: copies a whole weight into a tensor of the model; see :class:`rlox_grpo.update.protocol.Updater`.
            None: the model is whole, and has no other copy of its weights.
        stored: the files of a model without weights.

    Raises:
        CheckpointError: names or shapes differ from the model's. Nothing is loaded.
    """
    saved = _tensors(checkpoint / "model.safetensors")
    targets = _stored_tensors(model)
    missing, unknown = sorted(targets.keys() - saved.keys()), sorted(saved.keys() - targets.keys())
    if missing or unknown:
        lacks, has = missing[:3] or "nothing", unknown[:3] or "nothing"
        raise CheckpointError(f"{checkpoint} is of another model: it lacks {lacks} and has {has} that is not here")
    for name, tensor in targets.items():
        there, here = tuple(saved[name].shape), find_whole_shape(tensor)
        if there != here:
            raise CheckpointError(f"{checkpoint} is of another model: {name} has shape {there}, here {here}")
    if stored is not None and next(model.parameters()).is_meta:
        stored.take(checkpoint / "model.safetensors")
        return
    with torch.no_grad():
        for name, tensor in targets.items():
            if set_weight is None:
                tensor.copy_(saved[name])
            else:
                set_weight(name, tensor, saved[name])


def read_weights(checkpoint: Path, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return ``weights``, whole parameters by name, with the values that the checkpoint has of them, and its buffers.

    The frozen parameters of a LoRA model, which a checkpoint does not have, stay.

    Raises:
        CheckpointError: the checkpoint cannot be read.
    """
    saved = _tensors(checkpoint / "model.safetensors")
    return {
        **weights,
        **{name: tensor.to(weights[name].device) if name in weights else tensor for name, tensor in saved.items()},
    }


def load_optimizer(checkpoint: Path) -> dict[str, Tensor]:
    """Return the saved state of the updater."""
    return _tensors(checkpoint / "optimizer.safetensors")


def load_reference(checkpoint: Path, name: str = REFERENCE) -> dict[str, Tensor]:
    """Return the saved state of the reference policy, or of the teacher by ``name``; empty if it had none."""
    file = checkpoint / name
    return _tensors(file) if file.exists() else {}


def load_random_states(checkpoint: Path) -> None:
    """Restore the global random generators of Python, NumPy and torch.

    Raises:
        CheckpointError: the states are missing or invalid.
    """
    tensors, state = _tensors(checkpoint / "random.safetensors"), read_state(checkpoint)
    try:
        _set_random_states(state["random"], tensors)
    except (KeyError, TypeError, ValueError, RuntimeError, OverflowError) as error:
        what = f"{type(error).__name__}: {error}"
        raise CheckpointError(f"{checkpoint}: the random states in state.json or random.safetensors: {what}") from error


def _set_random_states(values: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    version, internal, gauss = values["python"]
    random.setstate((version, tuple(internal), gauss))
    name, position, has_gauss, cached = values["numpy"]
    np.random.set_state((name, tensors["numpy"].numpy().astype(np.uint32), position, has_gauss, cached))
    torch.set_rng_state(tensors["torch"])
    for index in range(torch.cuda.device_count()):
        if f"cuda_{index}" in tensors:
            torch.cuda.set_rng_state(tensors[f"cuda_{index}"], index)


def _read_random_states() -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return the states of the global random generators: JSON values and tensors; see :func:`_set_random_states`."""
    state: Any = np.random.get_state(legacy=True)
    name, keys, position, has_gauss, cached = state
    values = {"python": random.getstate(), "numpy": [name, position, has_gauss, cached]}
    tensors = {"torch": torch.get_rng_state(), "numpy": torch.from_numpy(np.asarray(keys).astype(np.int64))}
    for index in range(torch.cuda.device_count()):
        tensors[f"cuda_{index}"] = torch.cuda.get_rng_state(index)
    return values, tensors


def _stored_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return the tensors of ``model`` that a checkpoint stores: of a LoRA model the trained parameters only.

    For other models, return all parameters and persistent buffers. A tied parameter is stored once, under its first
    name.
    """
    if hasattr(model, "peft_config"):
        return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    return {**dict(model.named_parameters()), **_find_buffers(model)}


def _find_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Return the persistent buffers of ``model``, such as the biases of a mixture of experts' routers."""
    persistent = model.state_dict(keep_vars=True)
    return {name: buffer for name, buffer in model.named_buffers() if name in persistent}


def _tensors(file: Path) -> dict[str, Tensor]:
    try:
        return load_file(file)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"cannot read {file}: {error}") from error
