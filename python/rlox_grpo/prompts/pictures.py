"""Read pictures of data rows, and turn each distinct picture into tensors and token ids, once.

Files and rows are hostile: sizes are checked before anything is decoded, nothing is downloaded, and every error names
the row and the picture.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import io
import threading
import warnings
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from rlox_grpo.errors import import_extra
from rlox_grpo.prompts.chat_entries import needs_entries, wrap_texts
from rlox_grpo.prompts.line_breaks import LineBreaks
from rlox_grpo.prompts.picture_metadata import refuse_large_exif, refuse_large_metadata
from rlox_grpo.prompts.tensor_cache import TensorCache
from rlox_grpo.prompts.tower_use import TowerUse
from rlox_grpo.types import Int64Array, Picture

if TYPE_CHECKING:
    from PIL.Image import Image
    from torch import Tensor

MAX_FILE_BYTES = 64 * 2**20
"""Largest encoded picture that is read."""

MAX_PIXELS = 32 * 2**20
"""Largest picture that is decoded: 96 MiB of memory."""

MAX_ASPECT_RATIO = 200
"""Largest ratio of a picture's sides; Qwen's image processors refuse more."""

MAX_SCANS = 100
"""Most scans of a JPEG. A progressive one has 10. Each is a pass over all pixels, and a file can hold millions."""

CACHE_BYTES = 2**30
"""Memory for the processed tensors of pictures that were used last, and for the features of a frozen tower."""

_BICUBIC = 3
"""``PIL.Image.Resampling.BICUBIC``; Pillow is imported with the first picture."""

_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
_MODES = ("1", "L", "LA", "P", "PA", "RGB", "RGBA", "RGBX", "CMYK", "YCbCr")
_SCAN_START = b"\xff\xda"
_NOT_TENSORS = frozenset({"input_ids", "attention_mask", "mm_token_type_ids", "token_type_ids"})


def read_picture(value: Any, folder: Path, where: str) -> Image:
    """Read a picture as RGB on a white background, turned upright by its EXIF orientation.

    Args:
        value: a PIL image, a path, encoded bytes, ``{"bytes", "path"}``, a data URI, or an array ``uint8 [H, W, 3]``.
        folder: the folder to which paths are relative.
        where: the name of the picture in errors, such as ``prompts[3], picture 0``.

    Raises:
        ValueError: the picture cannot be read, is too large, or has several frames or 16 bits a channel.
        TypeError: the value is not a picture.
    """
    pillow = import_extra(f"{where}: a picture", "PIL.Image", "vision")
    if isinstance(value, pillow.Image):
        return _decode(value, where)
    if hasattr(value, "__array_interface__"):
        return _read_array(pillow, np.asarray(value), where)
    data = _read_bytes(value, folder, where)
    with warnings.catch_warnings():
        # Of broken metadata, without which a picture can be read, and of its size, whose check follows.
        warnings.filterwarnings("ignore", module=r"PIL\.")
        return _open(pillow, data, where)


def _open(pillow: Any, data: bytes, where: str) -> Image:
    """Return an encoded picture as RGB and upright; errors are as in :func:`read_picture`."""
    refuse_large_metadata(data, where)
    try:
        opened = pillow.open(io.BytesIO(data), formats=_FORMATS)
    except pillow.UnidentifiedImageError:
        raise ValueError(f"{where} is no picture: expected {', '.join(_FORMATS)}") from None
    except pillow.DecompressionBombError as error:
        raise ValueError(f"{where} has more than {MAX_PIXELS} pixels: make it smaller ({error})") from None
    except Exception as error:  # noqa: BLE001  whatever a reader of a format raises
        raise ValueError(f"{where} cannot be read: {error}") from None
    with opened:
        if opened.format in ("JPEG", "MPO") and (scans := data.count(_SCAN_START)) > MAX_SCANS:
            raise ValueError(f"{where} is a JPEG of {scans} scans: at most {MAX_SCANS} are decoded; save it again")
        return _decode(opened, where)


def _read_bytes(value: Any, folder: Path, where: str) -> bytes:
    """Return the encoded picture of a path, bytes, a dict or a data URI."""
    if isinstance(value, Mapping) and value.keys() <= {"bytes", "path"}:
        value = value.get("bytes") if value.get("bytes") is not None else value.get("path")
    if isinstance(value, (bytes, bytearray)):
        _refuse_large(len(value), where)
        return bytes(value)
    if isinstance(value, str) and value[:5].lower() == "data:":
        header, comma, encoded = value.partition(",")
        _refuse_large(len(encoded) * 3 // 4, where)
        if not comma or not header.lower().endswith(";base64"):
            raise ValueError(f"{where} is the data URI {value[:30]!r}…: expected 'data:image/png;base64,' and base64")
        try:
            return base64.b64decode(encoded, validate=True)
        except (binascii.Error, ValueError) as error:
            raise ValueError(f"{where} is a data URI that is not base64: {error}") from None
    if not isinstance(value, (str, Path)):
        raise TypeError(
            f"{where} is {type(value).__name__}: expected a PIL image, a path, bytes, {{'bytes', 'path'}}, a data URI "
            "or an array uint8 [H, W, 3]"
        )
    if "://" in str(value):
        raise ValueError(f"{where} is the address {str(value)[:80]!r}: nothing is downloaded; pass a file's path")
    path = folder / value
    try:
        if not path.is_file():  # a folder, a pipe or a device too
            raise ValueError(f"{where} is the path {str(value)[:80]!r}: there is no such file in {folder}")
        with path.open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
    except (OSError, ValueError) as error:
        if str(error).startswith(where):
            raise
        raise ValueError(f"{where} is the path {str(value)[:80]!r}, which cannot be read: {error}") from None
    _refuse_large(len(data), where)
    return data


def _refuse_large(size: int, where: str) -> None:
    if size > MAX_FILE_BYTES:
        raise ValueError(f"{where} has more than {MAX_FILE_BYTES // 2**20} MiB: make it smaller")


def _read_array(pillow: Any, array: Any, where: str) -> Image:
    if array.dtype != np.uint8 or array.ndim != 3 or array.shape[2] != 3:
        raise ValueError(f"{where} is an array {array.dtype} {list(array.shape)}: expected uint8 [H, W, 3]")
    _refuse_size(array.shape[1], array.shape[0], where)
    read: Image = pillow.fromarray(np.ascontiguousarray(array))
    return read


def _refuse_size(width: int, height: int, where: str) -> None:
    if not width or not height:
        raise ValueError(f"{where} has {width} × {height} pixels: it is empty")
    if width * height > MAX_PIXELS:
        raise ValueError(f"{where} has {width} × {height} pixels: at most {MAX_PIXELS} are decoded; make it smaller")
    if max(width, height) > MAX_ASPECT_RATIO * min(width, height):
        raise ValueError(
            f"{where} has {width} × {height} pixels: a side is more than {MAX_ASPECT_RATIO} times the other; cut it"
        )


def refuse_unfit_image(value: Any, where: str) -> None:
    """Raise ValueError for a PIL image that is animated, empty or too large; other values pass.

    A copy of a PIL image has the first frame alone, and all of its pixels: this check comes before the row is copied.
    """
    if any(base.__module__ == "PIL.Image" for base in type(value).__mro__):
        width, height = value.size
        _refuse_size(width, height, where)
        if _is_animated(value, where):
            raise ValueError(f"{where} is animated: pass the frame to show")


def _decode(opened: Image, where: str) -> Image:
    """Return an opened picture as RGB and upright, on a white background where it is transparent."""
    refuse_unfit_image(opened, where)
    if opened.mode not in _MODES:
        raise ValueError(f"{where} has the mode {opened.mode!r}, more than 8 bits a channel: convert it to 8 bits")
    import PIL.Image
    import PIL.ImageOps

    with _naming(where):
        opened.load()  # EXIF data may be behind the pixels
    refuse_large_exif(opened, where)
    with _naming(where):
        upright = PIL.ImageOps.exif_transpose(opened)
        if not upright.has_transparency_data:
            return upright.convert("RGB")
        # The colour of transparent pixels, which `convert` would show, is often black: so are lines drawn over it.
        pixels = upright.convert("RGBA")
        return PIL.Image.alpha_composite(PIL.Image.new("RGBA", pixels.size, "white"), pixels).convert("RGB")


def _is_animated(opened: Image, where: str) -> bool:
    """Whether there is a second frame. ``n_frames`` would go through all frames, of which a small GIF has millions."""
    with _naming(where):
        return bool(getattr(opened, "is_animated", False))


@contextmanager
def _naming(where: str) -> Iterator[None]:
    """Raise ValueError with the name of the picture for whatever a decoder raises for a broken file."""
    try:
        yield
    except Exception as error:  # noqa: BLE001
        raise ValueError(f"{where} is broken or cut off: {type(error).__name__}: {error}") from None


def shrink_picture(image: Image, max_pixels: int) -> Image:
    """Return a picture of at most ``max_pixels`` pixels, in the same proportions."""
    scale = (max_pixels / (image.width * image.height)) ** 0.5
    if scale >= 1:
        return image
    # A side has at least 1 pixel, so that the other one may have max_pixels at most.
    width, height = (max(1, min(int(side * scale), max_pixels)) for side in image.size)
    return image.resize((width, height), resample=_BICUBIC)


def digest_picture(image: Image) -> str:
    """Return a digest of size and pixels, 32 hexadecimal digits."""
    return hashlib.sha256(b"%d %d " % image.size + image.tobytes()).hexdigest()[:32]


def encode_png(image: Image) -> bytes:
    """Return a picture as a PNG, without loss."""
    file = io.BytesIO()
    image.save(file, "PNG", compress_level=1)
    return file.getvalue()


class PictureReader:
    """Reads pictures, and processes each distinct one alone, once.

    A processor that gets several pictures at once lays them out in a way that depends on the model; single pictures
    always have the same layout. The tensors used last stay in host memory, at most ``cache_bytes``; other tensors are
    made again from the row's picture.

    Attributes:
        processor: the processor of transformers.
        image_token_id: the id at the places of a picture's features.
        excluded_ids: ids of places of pictures and videos, which are never sampled.
        chat_template: the template of the processor, or of the tokenizer if the processor has none; None if there is no
            template.
        features: the features of pictures under a frozen tower (:mod:`rlox_grpo.model.vision`).
        tower_use: counts the pictures that the tower reads.
    """

    def __init__(
        self,
        processor: Any,
        tokenizer: Any,
        *,
        image_token_id: int,
        excluded_ids: Sequence[int],
        cache_bytes: int = CACHE_BYTES,
        max_pixels: int | None = None,
    ) -> None:
        """Store the processor. Pictures of more than ``max_pixels`` are made smaller; None: they are not.

        Raises:
            ValueError: the processor has no image token, or its tokenizer writes it as several tokens.
        """
        self.processor, self.image_token_id, self.excluded_ids = processor, image_token_id, tuple(excluded_ids)
        self.chat_template = getattr(processor, "chat_template", None) or getattr(tokenizer, "chat_template", None)
        # What a chat template writes for a picture. Gemma 3 writes its begin-of-image token.
        self.placeholder = getattr(processor, "boi_token", None) or getattr(processor, "image_token", None)
        name = type(processor).__name__
        if not isinstance(self.placeholder, str):
            raise ValueError(f"processor is a {name}, which has no image_token: pictures in prompts need one")
        ids = tokenizer(self.placeholder, add_special_tokens=False)["input_ids"]
        if len(ids) != 1:
            raise ValueError(f"processor is a {name}: its tokenizer writes {self.placeholder!r} as {len(ids)} tokens")
        self.placeholder_id = int(ids[0])
        self._breaks = LineBreaks(tokenizer, getattr(processor, "full_image_sequence", ""))
        self.writes_entries = needs_entries(tokenizer, self.chat_template)
        self._tokenizer, self._max_pixels = tokenizer, max_pixels
        self._marks = tuple(
            dict.fromkeys([self.placeholder, *map(str, tokenizer.convert_ids_to_tokens([*self.excluded_ids]))])
        )
        self._lock = threading.Lock()
        # The prompts hold the records. Those of a stream, with the pictures of their rows, go after their step.
        self._pictures: weakref.WeakValueDictionary[str, Picture] = weakref.WeakValueDictionary()
        self._tensors = TensorCache(cache_bytes)
        self.features = TensorCache(cache_bytes)
        self.tower_use = TowerUse()

    def render(self, messages: Sequence[Any], **variables: Any) -> str:
        """Write messages by the chat template; contents are lists of entries if the template needs such lists."""
        if self.writes_entries:
            messages = wrap_texts(messages)
        return str(
            self._tokenizer.apply_chat_template(
                list(messages), tokenize=False, chat_template=self.chat_template, **variables
            )
        )

    def read(self, value: Any, folder: Path, where: str) -> Picture:
        """Return the record of a picture; equal pictures have the same record. See :func:`read_picture`."""
        image = self._read_image(value, folder, where)
        digest = digest_picture(image)
        with self._lock:
            if (before := self._pictures.get(digest)) is not None:
                return before
            token_ids = self._process(digest, image, where)
        num_features = int((token_ids == self.image_token_id).sum())
        return self._make_record(digest, token_ids, num_features, value, folder, where)

    def restore(self, digest: str, token_ids: Int64Array, num_features: int, png: bytes) -> Picture:
        """Return the record of a picture that was read before, in another process or run.

        The PNG is decoded when the record is read first; ValueError is then raised if it is another picture.

        Args:
            digest, token_ids, num_features: fields of the record, see :class:`rlox_grpo.types.Picture`.
            png: the picture as the processor reads it.
        """
        with self._lock:
            if (before := self._pictures.get(digest)) is not None:
                return before
        return self._make_record(digest, token_ids, num_features, png, Path(), f"the stored picture {digest}")

    def _make_record(
        self, digest: str, token_ids: Int64Array, num_features: int, value: Any, folder: Path, where: str
    ) -> Picture:
        def read_again() -> Image:
            again = self._read_image(value, folder, where)
            if digest_picture(again) != digest:
                raise ValueError(f"{where} has changed since it was read first: training needs the same pixels")
            return again

        def read_tensors() -> Mapping[str, Tensor]:
            with self._lock:
                tensors: Mapping[str, Tensor] | None = self._tensors.get(digest)
                if tensors is None:
                    self._process(digest, read_again(), where)
                    tensors = self._tensors.get(digest)
                assert tensors is not None  # the newest entry stays
                return tensors

        picture = Picture(digest, token_ids, num_features, read_tensors, read_again)
        return self._pictures.setdefault(digest, picture)

    def _read_image(self, value: Any, folder: Path, where: str) -> Image:
        image = read_picture(value, folder, where)
        return image if self._max_pixels is None else shrink_picture(image, self._max_pixels)

    def _process(self, digest: str, image: Image, where: str) -> Int64Array:
        """Store the tensors of a picture; return the ids that replace its placeholder."""
        try:
            outputs = self.processor(
                text=[self.placeholder], images=[image], return_tensors="pt", add_special_tokens=False
            )
        except Exception as error:  # whatever the processor of a model raises
            size = f"{image.width} × {image.height}"
            raise ValueError(
                f"{where} ({size} pixels): {type(self.processor).__name__} refuses it: {type(error).__name__}: {error}"
            ) from error
        tensors = {name: tensor for name, tensor in outputs.items() if name not in _NOT_TENSORS}
        self._tensors.add(digest, tensors)
        ids = self._breaks.strip(outputs["input_ids"][0].numpy().astype(np.int64))
        if self._breaks.are_written and ids[0] != self.placeholder_id:
            raise ValueError(f"{where}: the processor cuts it into parts with text between: set do_pan_and_scan=False")
        return ids

    def expand(self, token_ids: Int64Array, pictures: Sequence[Picture], where: str) -> Int64Array:
        """Replace each placeholder by the ids of its picture, in order.

        Raises:
            ValueError: there are more or fewer placeholders than pictures, or the text holds the ids of pictures or
                videos.
        """
        ids = token_ids
        indices = np.flatnonzero(ids == self.placeholder_id)
        if len(indices) != len(pictures):
            is_more = len(indices) > len(pictures)
            cause = "the text holds the token" if is_more else "the chat template left pictures out"
            raise ValueError(
                f"{where} has {len(pictures)} pictures and its text {len(indices)} times {self.placeholder!r}: {cause}"
            )
        strange = np.isin(ids, [index for index in self.excluded_ids if index != self.placeholder_id])
        if strange.any():
            raise ValueError(
                f"{where} holds the token id {ids[strange.argmax()]} of pictures or videos in its text: remove it"
            )
        first, *others = np.split(ids, indices)
        pieces = self._breaks.add([first, *(piece[1:] for piece in others)])
        expanded = [pieces[0]]
        for picture, piece in zip(pictures, pieces[1:], strict=True):
            expanded += [picture.token_ids, piece]
        return np.concatenate(expanded)

    def find_mark(self, text: str) -> str | None:
        """Return a mark of pictures or videos in a text, which the tokenizer would read as one; None without."""
        return next((mark for mark in self._marks if mark in text), None)

    def drop_marks(self, text: str) -> str:
        """Return a text without the marks of pictures and videos."""
        while (mark := self.find_mark(text)) is not None:  # what is left may join to a mark again
            text = text.replace(mark, "")
        return text

    def collapse(self, token_ids: Int64Array, pictures: Sequence[Picture], where: str) -> Int64Array:
        """Replace the ids of each picture by its placeholder: the inverse of :meth:`expand`.

        Raises:
            ValueError: the ids are not those of these pictures, in order.
        """
        pieces, end = [], 0
        for index, picture in enumerate(pictures):
            start = picture.find_in(token_ids, end)
            if start is None or (token_ids[end:start] == self.image_token_id).any():
                raise ValueError(f"{where}: the token ids after index {end} are not those of its picture {index}")
            pieces.append(token_ids[end:start])
            end = start + len(picture.token_ids)
        if (token_ids[end:] == self.image_token_id).any():
            raise ValueError(f"{where} has more pictures in its token ids than the {len(pictures)} that it comes with")
        first, *others = self._breaks.remove([*pieces, token_ids[end:]])
        mark = np.array([self.placeholder_id], np.int64)
        return np.concatenate([first, *(ids for piece in others for ids in (mark, piece))])
