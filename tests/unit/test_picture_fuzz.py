"""Mutated picture files: each is a picture or an error that names row and picture, in bounded memory and time."""

from __future__ import annotations

import io
import json
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from rlox_grpo.prompts.pictures import MAX_PIXELS, read_picture

WHERE = "prompts[3], picture 1"
FILES = 600
"""Mutated files of the test, a few milliseconds each."""

MAX_GROWTH = 768
"""MiB by which the memory of the process may grow: the largest picture has 96 MiB, and its decoder some copies."""


def _encode(image: Image.Image, kind: str, **options: object) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def make_files() -> dict[str, bytes]:
    """A small valid file of each kind and layout."""
    noise = Image.fromarray(np.random.default_rng(0).integers(0, 256, (20, 24, 3), dtype=np.uint8))
    smooth = Image.linear_gradient("L").resize((64, 48)).convert("RGB")
    exif = Image.Exif()
    exif[0x0112], exif[0x010E] = 6, "a description"
    grey, palette = noise.convert("L"), smooth.quantize(16)
    frames = [smooth.rotate(angle) for angle in (90, 180)]
    return {
        "png": _encode(noise, "PNG"),
        "png palette": _encode(palette, "PNG", transparency=3),
        "png alpha": _encode(noise.convert("RGBA"), "PNG"),
        "png 16 bit": _encode(Image.fromarray(np.arange(600, dtype=np.uint16).reshape(20, 30)), "PNG"),
        "png exif": _encode(grey, "PNG", exif=exif),
        "jpeg": _encode(noise, "JPEG", exif=exif, comment=b"a comment"),
        "jpeg progressive": _encode(smooth, "JPEG", progressive=True),
        "jpeg cmyk": _encode(smooth.convert("CMYK"), "JPEG"),
        "gif": _encode(palette, "GIF"),
        "gif animated": _encode(palette, "GIF", save_all=True, append_images=frames),
        "webp": _encode(smooth, "WEBP"),
        "webp lossless": _encode(noise.convert("RGBA"), "WEBP", lossless=True, exif=exif),
        "tiff": _encode(noise, "TIFF", compression="tiff_lzw"),
        "bmp": _encode(noise, "BMP"),
        "bmp palette": _encode(palette, "BMP"),
    }


def _flip(data: bytearray, draw: random.Random) -> None:
    for _ in range(draw.choice((1, 1, 2, 8))):
        data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)


def _cut(data: bytearray, draw: random.Random) -> None:
    del data[draw.randrange(len(data)) :]


def _remove(data: bytearray, draw: random.Random) -> None:
    start = draw.randrange(len(data))
    del data[start : start + draw.randrange(1, 64)]


def _insert(data: bytearray, draw: random.Random) -> None:
    start = draw.randrange(len(data))
    data[start:start] = draw.randbytes(draw.randrange(1, 64))


def _repeat(data: bytearray, draw: random.Random) -> None:
    start = draw.randrange(len(data))
    data[start:start] = bytes(data[start : start + draw.randrange(1, 256)]) * draw.choice((1, 4, 200))


def _write_extreme(data: bytearray, draw: random.Random) -> None:
    """A large or negative number, most often in the header, where sizes and offsets are."""
    size = draw.choice((2, 4))
    number = draw.choice((0, 1, 2**7, 2**15 - 1, 2**15, 2**16 - 1, 2**20, 2**31 - 1, 2**31, 2**32 - 1)) % 2 ** (
        8 * size
    )
    start = draw.randrange(min(len(data), draw.choice((64, len(data)))))
    data[start : start + size] = number.to_bytes(size, draw.choice(("big", "little")))


MUTATIONS: tuple[Callable[[bytearray, random.Random], None], ...] = (
    *(_flip, _cut, _remove, _insert, _repeat, _write_extreme, _write_extreme),
)


def _mend(kind: str, data: bytes) -> bytes:
    """Correct the checksums of a PNG, behind which its decoder is."""
    import zlib

    if not kind.startswith("png") or data[:8] != b"\x89PNG\r\n\x1a\n":
        return data
    mended, at = bytearray(data[:8]), 8
    while at + 12 <= len(data):
        end = at + 8 + min(int.from_bytes(data[at : at + 4], "big"), len(data))
        chunk = data[at + 4 : end]
        mended += data[at : at + 4] + chunk + zlib.crc32(chunk).to_bytes(4, "big")
        at = end + 4
    return bytes(mended)


def mutate(count: int, seed: int) -> Iterator[tuple[str, bytes]]:
    """Yield kinds and files, the same for a seed. Half of the PNG files have right checksums."""
    files = make_files()
    for index in range(count):
        draw = random.Random(f"{seed} {index}")
        kind = draw.choice(list(files))
        data = bytearray(files[kind])
        if draw.random() < 0.1:  # the beginning of one format and the rest of another
            data[: draw.randrange(4, 32)] = files[draw.choice(list(files))][: draw.randrange(4, 32)]
        for _ in range(draw.choice((1, 1, 2, 4))):
            if data:
                draw.choice(MUTATIONS)(data, draw)
        yield kind, _mend(kind, bytes(data)) if draw.random() < 0.5 else bytes(data)


def read_all(count: int, seed: int) -> dict[str, object]:
    """Read mutated files; return what came of them: accepted pictures, errors, and anything else with its index."""
    counts: Counter[str] = Counter()
    strange = []
    for index, (kind, data) in enumerate(mutate(count, seed)):
        try:
            image = read_picture(data, Path(), WHERE)
        except ValueError as error:
            counts["errors"] += 1
            if not str(error).startswith(WHERE):
                strange.append([index, kind, f"no name: {error}"])
        except BaseException as error:  # noqa: BLE001  what must not come is counted
            strange.append([index, kind, f"{type(error).__name__}: {error}"])
        else:
            counts["pictures"] += 1
            if image.mode != "RGB" or not 0 < image.width * image.height <= MAX_PIXELS:
                strange.append([index, kind, f"{image.mode} {image.size}"])
    return {**counts, "strange": strange}


def test_mutated_files_are_pictures_or_errors_with_their_names() -> None:
    script = (
        "import json, resource, test_picture_fuzz as fuzz; from PIL import Image; Image.init(); fuzz.make_files();"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss;"
        f"result = fuzz.read_all({FILES}, seed=0);"
        "growth = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before;"
        "print(json.dumps({**result, 'growth': growth / 2**10}))"
    )
    path = [str(Path(__file__).parent), *sys.path]
    pytest.importorskip("resource")
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", f"import sys; sys.path[:0] = {path!r}; {script}"],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr  # no crash of a decoder
    result = json.loads(done.stdout)
    assert result["strange"] == []
    assert result["pictures"] > FILES // 20
    assert result["errors"] > FILES // 4
    assert result["growth"] < MAX_GROWTH
    assert "Warning" not in done.stderr


def test_the_files_are_the_same_in_each_run_and_valid_before_they_are_mutated() -> None:
    assert list(mutate(50, seed=1)) == list(mutate(50, seed=1)) != list(mutate(50, seed=2))
    refused = {"png 16 bit", "gif animated", "tiff"}
    for kind, data in make_files().items():
        if kind in refused:
            with pytest.raises(ValueError, match=WHERE.replace("[", r"\[")):
                read_picture(data, Path(), WHERE)
        else:
            assert read_picture(data, Path(), WHERE).mode == "RGB"
