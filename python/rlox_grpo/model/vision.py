"""Pictures in the forward pass of a vision-language model.

The vision tower runs once for each distinct picture of a call; its features are repeated by index for the rows that
show the picture, with gradient. The features are passed to the model together with the token ids
(``mm_encoder_outputs``); pixels are not. Models with positions in three axes (M-RoPE) get these positions in every
call, and never use those of an earlier call.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from rlox_grpo.errors import ConfigError
from rlox_grpo.model.packed_row import PackedRow
from rlox_grpo.prompts.pictures import PictureReader
from rlox_grpo.types import Batch, Int64Array, Picture

Shown = tuple[Int64Array, tuple[Picture, ...]]
"""The token ids ``int64 [P]`` of a prompt, and its pictures in order."""


def find_language_model(model: Any) -> Any:
    """Return the module of a vision-language model that has its text config; None if there is none."""
    config = model.config.get_text_config()
    return next((module for module in model.base_model.modules() if getattr(module, "config", None) is config), None)


def list_outer_parameters(core: nn.Module, text: nn.Module) -> list[nn.Parameter]:
    """Return the parameters of the vision tower and its projection: those of ``core`` outside of ``text``."""
    inner = {id(parameter) for parameter in text.parameters()}
    return [parameter for parameter in core.parameters() if id(parameter) not in inner]


class Vision:
    """The parts of a vision-language model that pictures need.

    Attributes:
        reader: the pictures' processor.
        core: the module with the vision tower and the language model, under the output layer.
        text: the language model inside ``core``.
        attends_both_ways: whether the tokens of a picture attend to later tokens of it (Gemma 3). Such a model is told
            which tokens these are, and is never packed.
    """

    def __init__(self, model: nn.Module, reader: PictureReader) -> None:
        """Find the language model.

        Raises:
            ConfigError: the model takes no features of pictures.
        """
        base: Any = model
        base = base.get_base_model() if hasattr(model, "get_base_model") else base
        self.reader = reader
        self.core: Any = base.base_model
        text = find_language_model(base)
        if not hasattr(self.core, "get_image_features") or text is None:
            raise ConfigError(
                f"processor: pictures need a vision-language model that transformers loads by "
                f"AutoModelForImageTextToText, and model is a {type(base).__name__}"
            )
        self.text: Any = text
        self.attends_both_ways = "token_type_ids" in inspect.signature(self.core.forward).parameters

    def prepare_rows(self, rows: Sequence[Shown], width: int, *, padded_left: bool = False) -> dict[str, Any]:
        """Return the inputs other than ``input_ids [N, width]``: features, and positions for M-RoPE.

        Without pictures there are none.

        ``rows`` are the tokens at the beginning of the rows up to the last picture or further, or with ``padded_left``
        the tokens at their end.
        """
        shown = [picture for _, pictures in rows for picture in pictures]
        self._check_counts(sum(int((ids == self.reader.image_token_id).sum()) for ids, _ in rows), shown)
        if not shown:
            return {}
        options: dict[str, Any] = {"mm_encoder_outputs": {"image": self._encode(shown)}}
        if self.has_axes:
            columns = np.arange(width)
            positions = np.zeros((3, len(rows), width), np.int64)
            for index, row in enumerate(rows):
                located, delta = self.locate(row)
                length = located.shape[1]
                if padded_left:
                    positions[:, index, width - length :] = located
                else:
                    # A completion token has the position of its column, moved by what the pictures save.
                    positions[:, index] = columns + delta
                    positions[:, index, :length] = located
            options["position_ids"] = torch.from_numpy(positions).to(self.device)
        if self.attends_both_ways:
            marks = np.zeros((len(rows), width), np.int64)
            for index, (token_ids, _) in enumerate(rows):
                start = width - len(token_ids) if padded_left else 0
                marks[index, start : start + len(token_ids)] = token_ids == self.reader.image_token_id
            options["token_type_ids"] = torch.from_numpy(marks).to(self.device)
        return options

    def prepare_batch(self, batch: Batch) -> dict[str, Any]:
        """Return the inputs other than ``batch.input_ids``."""
        ids: Any = batch.input_ids.cpu().numpy()
        shown = [picture for pictures in batch.pictures for picture in pictures]
        self._check_counts(int((ids == self.reader.image_token_id).sum()), shown)
        if not shown:
            return {}
        ends = batch.prompt_lengths
        if self.shows_later(batch):
            ends = ends + batch.completion_mask.sum(1)
        lengths = ends.tolist()
        rows = [(row[:length], pictures) for row, length, pictures in zip(ids, lengths, batch.pictures, strict=True)]
        return self.prepare_rows(rows, ids.shape[1])

    def shows_later(self, batch: Batch) -> bool:
        """Whether a completion shows pictures. Such rows share no tokens: equal ids may stand for other pictures."""
        if not any(batch.pictures):
            return False
        return bool(((batch.completion_ids == self.reader.image_token_id) & batch.completion_mask).any())

    def prepare_packed(self, row: PackedRow, batch: Batch, first_rows: Int64Array) -> dict[str, Any]:
        """Return the inputs other than ``row.input_ids[None]``.

        ``first_rows`` is the row of ``batch`` from which each prompt of the packed row is copied.
        """
        shown_ids = int((row.input_ids == self.reader.image_token_id).sum())
        if not any(batch.pictures):
            self._check_counts(shown_ids, ())
            return {}
        pictures = [batch.pictures[index] for index in first_rows]
        shown = [picture for several in pictures for picture in several]
        self._check_counts(shown_ids, shown)
        options: dict[str, Any] = {"mm_encoder_outputs": {"image": self._encode(shown)}}
        if self.has_axes:
            positions: Any = row.position_ids.cpu().numpy()[None].repeat(3, axis=0)
            ids: Any = row.input_ids.cpu().numpy()
            for (start, middle, end), several in zip(row.layout.spans, pictures, strict=True):
                located, delta = self.locate((ids[start:middle], several))
                positions[:, start:middle] = located
                positions[:, middle:end] += delta
            options["position_ids"] = torch.from_numpy(positions)[:, None].to(self.device)
        return options

    @property
    def device(self) -> torch.device:
        """The device of the model."""
        device: torch.device = next(self.core.parameters()).device
        return device

    @property
    def has_axes(self) -> bool:
        """Whether the model's positions have three axes."""
        return hasattr(self.core, "get_rope_index")

    def locate(self, row: Shown) -> tuple[Int64Array, int]:
        """Return the positions of a prompt's tokens, ``int64 [3, P]``, and what is added to those of later tokens."""
        token_ids, pictures = row
        if not pictures or not self.has_axes:
            return np.arange(len(token_ids))[None].repeat(3, axis=0), 0
        ids = torch.from_numpy(np.array(token_ids, np.int64))[None]
        positions, delta = self.core.get_rope_index(
            ids,
            mm_token_type_ids=(ids == self.reader.image_token_id).int(),
            image_grid_thw=torch.cat([picture.read()["image_grid_thw"] for picture in pictures]),
        )
        located: Int64Array = positions[:, 0].numpy()
        return located, int(delta.item())

    def check_pictures(self, token_ids: Int64Array, pictures: Sequence[Picture]) -> None:
        """Raise ValueError unless ``token_ids`` have as many ids of pictures as ``pictures`` have features."""
        self._check_counts(int((token_ids == self.reader.image_token_id).sum()), pictures)

    @staticmethod
    def _check_counts(count: int, shown: Sequence[Picture]) -> None:
        """Raise ValueError unless there are as many ids of pictures as features: no row is run without its pictures."""
        if count != (features := sum(picture.num_features for picture in shown)):
            raise ValueError(
                f"the token ids have {count} ids of pictures, and the pictures {features} features: a prompt with "
                "pictures lost them, or a completion holds such ids"
            )

    def _encode(self, shown: Sequence[Picture]) -> Any:
        """Return the features of pictures in the order in which rows show them, as the model takes them."""
        distinct = {picture.digest: picture for picture in shown}
        outer = list_outer_parameters(self.core, self.text)
        if any(parameter.requires_grad for parameter in outer):
            features = self._run_tower(list(distinct.values()))
        else:
            features = self._read_features(list(distinct.values()), outer)
        pooled = [features[picture.digest].pooled for picture in shown]
        levels = [features[picture.digest].levels for picture in shown]
        is_list = next(iter(features.values())).is_list
        return _Features(
            pooler_output=pooled if is_list else torch.cat(pooled),
            deepstack_features=[list(level) for level in zip(*levels, strict=True)],
        )

    def _read_features(self, pictures: Sequence[Picture], outer: Sequence[Tensor]) -> dict[str, SimpleNamespace]:
        """Return the features of pictures under a frozen tower, which reads each picture once while its weights stay.

        The policy, its engine and the policy without its adapter share the features. A reload of the weights changes
        the version of a parameter, and the features of other weights are never used.
        """
        versions = tuple((parameter.data_ptr(), parameter._version) for parameter in outer)
        dtype = torch.get_autocast_dtype(self.device.type) if torch.is_autocast_enabled(self.device.type) else None
        cache, key = self.reader.features, (versions, dtype)
        # Read before the new features are added, which may drop others.
        read = {picture.digest: cache.get((key, picture.digest)) for picture in pictures}
        cached = {digest: entry for digest, entry in read.items() if entry is not None}
        missing = [picture for picture in pictures if picture.digest not in cached]
        features: dict[str, SimpleNamespace] = {}
        if missing:
            with torch.no_grad():
                features = self._run_tower(missing)
            for digest, entry in features.items():
                pooled, levels = entry.pooled.clone(), [level.clone() for level in entry.levels]
                cache.add((key, digest), SimpleNamespace(pooled=pooled, levels=levels, is_list=entry.is_list))
        return {**cached, **features}

    def _run_tower(self, pictures: Sequence[Picture]) -> dict[str, SimpleNamespace]:
        """Return the features of each picture by its digest: ``pooled [n, H]``, and ``levels`` of deepstack.

        Pictures whose tensors have equal shapes except for the first dimension share a run of the tower.
        """
        alike: dict[Any, list[tuple[Picture, dict[str, Tensor]]]] = {}
        for picture in pictures:
            tensors = {name: tensor.to(self.device) for name, tensor in picture.read().items() if _is_tensor(tensor)}
            shapes = tuple((name, tensor.shape[1:]) for name, tensor in tensors.items())
            alike.setdefault(shapes, []).append((picture, tensors))
        features = {}
        for several in alike.values():
            names = several[0][1].keys()
            inputs = {name: torch.cat([tensors[name] for _, tensors in several]) for name in names}
            with self.reader.tower_use.measuring(len(several), self.device):
                output = self.core.get_image_features(**inputs, return_dict=True)
            counts = [picture.num_features for picture, _ in several]
            is_list = isinstance(output.pooler_output, (list, tuple))
            pooled = _split(output.pooler_output, counts)
            levels = [_split(level, counts) for level in getattr(output, "deepstack_features", None) or ()]
            for index, (picture, _) in enumerate(several):
                features[picture.digest] = SimpleNamespace(
                    pooled=pooled[index], levels=[level[index] for level in levels], is_list=is_list
                )
        return features


class _Features(SimpleNamespace):
    """Features in place of the result of ``get_image_features``, with what a model's forward pass reads of it."""

    def to_tuple(self) -> tuple[Any, ...]:
        """Return the features, as transformers' outputs do; transformers 5.24 calls this."""
        return tuple(vars(self).values())


def _is_tensor(value: Any) -> bool:
    return isinstance(value, Tensor)


def _split(output: Any, counts: Sequence[int]) -> list[Tensor]:
    """Split features, in a list or in rows of any rank, by picture: ``[n, H]`` each.

    Raises:
        ValueError: the number of features differs from the number of their places in the token ids.
    """
    flat = torch.cat([entry.reshape(-1, entry.shape[-1]) for entry in output]) if not _is_tensor(output) else output
    flat = flat.reshape(-1, flat.shape[-1])
    if len(flat) != sum(counts):
        raise ValueError(
            f"the vision tower gives {len(flat)} features for {len(counts)} pictures, and the processor leaves "
            f"{sum(counts)} places: model and processor do not belong together"
        )
    return list(flat.split(list(counts)))


def make_vision(model: nn.Module, reader: PictureReader | None) -> Vision | None:
    """Return what pictures need; None without a processor."""
    return None if reader is None else Vision(model, reader)
