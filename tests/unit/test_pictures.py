"""Pictures in prompts: reading, expansion, errors that name row and picture, and runs with them."""

from __future__ import annotations

import base64
import copy
import io
import json
import re
import subprocess
import sys
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from PIL.PngImagePlugin import PngInfo
from tokenizers import AddedToken

from rlox_grpo import GRPO
from rlox_grpo.batch.build import build_batch, group_prompt
from rlox_grpo.errors import ConfigError
from rlox_grpo.model.forward import make_forward
from rlox_grpo.model.memory import read_shape
from rlox_grpo.model.prefix_tree import build_prefix_tree
from rlox_grpo.prompts import pictures as pictures_module
from rlox_grpo.prompts.load import fingerprint_prompts, load_prompts
from rlox_grpo.prompts.pictures import PictureReader, digest_picture, read_picture, shrink_picture
from rlox_grpo.prompts.tensor_cache import TensorCache
from rlox_grpo.rollout.engines.hf.engine import HFEngine
from rlox_grpo.types import Prompt, Sampling
from tiny_vlms import FAMILIES, draw_picture, make_tiny_vlm
from toy import ToyLM, share_of_target

pytestmark = pytest.mark.usefixtures("one_thread")
SETTINGS: dict[str, Any] = {
    **{"group_size": 4, "prompts_per_step": 2, "max_new_tokens": 5, "max_steps": 2, "log_to": ()},
    **{"learning_rate": 1e-2, "seed": 0},
}


@pytest.fixture(scope="module")
def qwen() -> tuple[Any, Any]:
    return make_tiny_vlm("qwen3_vl")


@pytest.fixture(scope="module")
def reader(qwen: tuple[Any, Any]) -> PictureReader:
    return PictureReader(qwen[1], qwen[1].tokenizer, image_token_id=5, excluded_ids=(5, 6))


def score(completions: Any) -> list[float]:
    return [float(sum(map(ord, completion[0]["content"])) % 7) for completion in completions]


def train(model: Any, processor: Any, rows: list[dict[str, Any]], **settings: Any) -> GRPO:
    trainer = GRPO(copy.deepcopy(model), score, processor=processor, **{**SETTINGS, **settings})
    trainer.train(rows)
    return trainer


def encode(image: Any, format: str = "PNG", **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, format, **options)
    return file.getvalue()


def load(rows: Any, reader: PictureReader, **options: Any) -> list[Prompt]:
    return load_prompts(rows, reader.processor.tokenizer, reader=reader, **options)


# --- forms of pictures ---

PICTURE = draw_picture(0)
ENCODED = encode(PICTURE)
URI = "data:image/png;base64," + base64.b64encode(ENCODED).decode()
FORMS: dict[str, Callable[[Path], Any]] = {
    "PIL": lambda folder: PICTURE,
    "bytes": lambda folder: ENCODED,
    "undecoded": lambda folder: {"bytes": ENCODED, "path": None},
    "undecoded path": lambda folder: {"bytes": None, "path": str(folder / "a.png")},
    "data URI": lambda folder: URI,
    "array": lambda folder: np.asarray(PICTURE),
    "path": lambda folder: folder / "a.png",
    "text path": lambda folder: str(folder / "a.png"),
}


@pytest.mark.parametrize("form", FORMS)
def test_each_form_of_a_picture_is_the_same_record(form: str, tmp_path: Path, reader: PictureReader) -> None:
    (tmp_path / "a.png").write_bytes(ENCODED)
    value = FORMS[form](tmp_path)
    expected = load([{"prompt": "x", "images": [PICTURE]}], reader)[0]
    for row in (
        {"prompt": "x", "images": [value]},
        {"prompt": "x", "image": value},
        {"prompt": [{"role": "user", "content": [{"type": "image", "image": value}, {"type": "text", "text": "x"}]}]},
    ):
        prompt = load([row], reader)[0]
        assert prompt.token_ids.tolist() == expected.token_ids.tolist()
        assert prompt.pictures == expected.pictures  # one record, so one run of the processor


def test_paths_are_relative_to_the_file_of_rows(tmp_path: Path, reader: PictureReader) -> None:
    (tmp_path / "a.png").write_bytes(ENCODED)
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": "x", "images": ["a.png"]}))
    assert len(load(tmp_path / "rows.jsonl", reader)[0].pictures) == 1
    with pytest.raises(ValueError, match=r"prompts\[0\], picture 0 is the path 'a.png': there is no such file in \."):
        load([{"prompt": "x", "images": ["a.png"]}], reader)


def test_images_are_put_where_the_prompt_shows_them(reader: PictureReader) -> None:
    first, second = draw_picture(1, 16, 16), draw_picture(2, 32, 16)
    text = reader.processor.tokenizer

    def show(prompt: Any, *images: Any) -> str:
        """The prompt's text, with the number of features of each picture in angle brackets."""
        loaded = load([{"prompt": prompt, "images": list(images)}], reader)[0]
        written = text.decode(loaded.token_ids)
        for count in (2, 1):
            written = written.replace("<|vision_start|>" + "<|image_pad|>" * count + "<|vision_end|>", f"<{count}>")
        return written.replace("\n", "").removesuffix("<|im_start|>assistant")

    def user(*entries: Any) -> list[Any]:
        return [{"role": "user", "content": list(entries)}]

    x, empty = {"type": "text", "text": "x"}, {"type": "image"}
    assert show("x", first, second) == "<|im_start|>user<1><2>x<|im_end|>"
    assert show("a<image>b<image>", second, first) == "<|im_start|>usera<2>b<1><|im_end|>"
    assert show(user(empty, x, empty), first, second) == "<|im_start|>user<1>x<2><|im_end|>"
    held = {"type": "image", "image": second}
    assert show(user(held, x, empty), first) == "<|im_start|>user<2>x<1><|im_end|>"
    uri = "data:image/png;base64," + base64.b64encode(encode(second)).decode()
    assert show(user({"type": "image_url", "image_url": {"url": uri}}, x)) == "<|im_start|>user<2>x<|im_end|>"
    chat = [{"role": "system", "content": "s"}, {"role": "user", "content": "x"}]
    assert show(chat, first) == "<|im_start|>systems<|im_end|><|im_start|>user<1>x<|im_end|>"


def test_equal_messages_with_other_pictures_are_other_prompts_for_rewards(reader: PictureReader) -> None:
    """Rules compare prompts to find the groups of a batch."""
    rows = [{"prompt": "x", "images": [draw_picture(seed)]} for seed in (1, 2, 1)]
    first, second, third = (prompt.source for prompt in load(rows, reader))
    assert first == third != second
    assert json.loads(json.dumps(first)) == first  # without pixels


def test_rows_without_pictures_stand_beside_rows_with_them(reader: PictureReader) -> None:
    rows = [{"prompt": "x", "images": [PICTURE]}, {"prompt": "y"}, {"prompt": "z", "images": None}]
    loaded = load([*rows, {"prompt": "z", "images": []}], reader)
    assert [len(prompt.pictures) for prompt in loaded] == [1, 0, 0, 0]
    assert loaded[1].source == [{"role": "user", "content": "y"}]  # all prompts are chat messages
    assert loaded[1].columns["images"] == []
    assert load(["x", "y"], reader)[0].source == "x"  # without any picture, text stays text


@pytest.mark.parametrize("family", [*FAMILIES, "gemma3"])
def test_the_ids_are_those_of_the_processor(family: str) -> None:
    """Two pictures of several sizes, placed by the template and expanded by the processor in one call."""
    _, processor = make_tiny_vlm(family)
    mark = {"idefics3": 3, "internvl": 5, "gemma3": 7}.get(family, 5)
    reader = PictureReader(processor, processor.tokenizer, image_token_id=mark, excluded_ids=(mark,))
    wide, square = draw_picture(0, 64, 32), draw_picture(1)
    prompt = load([{"prompt": "a<image>b<image>c", "images": [wide, square]}], reader)[0]
    images = [[wide, square]] if family in ("idefics3", "gemma3") else [wide, square]
    whole = processor(text=[prompt.text], images=images, return_tensors="pt", add_special_tokens=False)
    assert prompt.token_ids.tolist() == whole["input_ids"][0].tolist()
    assert sum(picture.num_features for picture in prompt.pictures) == int((whole["input_ids"] == mark).sum())


@pytest.mark.parametrize("text", ["a<image>b", "\n<image>\n\n<image>\nb\n", "<image><image>", "a\n\n\n\n\n<image>"])
def test_line_breaks_are_encoded_with_those_of_the_text(text: str) -> None:
    """Gemma 3's processor writes two line breaks around a picture, and its tokenizer has tokens of several."""
    _, processor = make_tiny_vlm("gemma3")
    tokenizer = processor.tokenizer
    tokenizer.add_tokens([AddedToken("\n" * count, normalized=False) for count in (2, 3, 4, 6)])
    reader = PictureReader(processor, tokenizer, image_token_id=7, excluded_ids=(7,))
    images = [draw_picture(index) for index in range(text.count("<image>"))]
    prompt = load([{"prompt": text, "images": images}], reader)[0]
    whole = processor(text=[prompt.text], images=[images], return_tensors="pt", add_special_tokens=False)
    assert prompt.token_ids.tolist() == whole["input_ids"][0].tolist()
    written = tokenizer(prompt.text, add_special_tokens=False)["input_ids"]
    assert reader.collapse(prompt.token_ids, prompt.pictures, "x").tolist() == written


@pytest.mark.parametrize("family", [*FAMILIES, "gemma3"])
def test_collapsed_ids_are_those_before_the_expansion(family: str) -> None:
    _, processor = make_tiny_vlm(family)
    mark = getattr(processor, "image_token_id", None) or processor.tokenizer.image_token_id
    tokenizer = processor.tokenizer
    reader = PictureReader(processor, tokenizer, image_token_id=mark, excluded_ids=(mark,))
    pictures = [reader.read(draw_picture(index, 32 + 16 * index), Path(), "x") for index in range(2)]
    text = reader.render(user([{"type": "image"}, {"type": "text", "text": "or"}, {"type": "image"}]))
    ids = np.array(tokenizer(text, add_special_tokens=False)["input_ids"], np.int64)
    expanded = reader.expand(ids, pictures, "x")
    assert reader.collapse(expanded, pictures, "x").tolist() == ids.tolist() != expanded.tolist()
    assert reader.collapse(ids[:2], [], "x").tolist() == ids[:2].tolist()
    for wrong in (expanded[:-12], np.delete(expanded, int((expanded == mark).argmax()))):
        with pytest.raises(ValueError, match="are not those of its picture"):
            reader.collapse(wrong, pictures, "x")
    with pytest.raises(ValueError, match="x has more pictures in its token ids than the 1"):
        reader.collapse(expanded, pictures[:1], "x")


def test_pillow_is_imported_at_the_first_picture() -> None:
    code = (
        "import sys, rlox_grpo.prompts.load, rlox_grpo.prompts.pictures, rlox_grpo.prompts.picture_messages\n"
        "assert not {'PIL', 'torchvision'} & sys.modules.keys()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_image_max_pixels_bounds_the_processed_size(qwen: tuple[Any, Any]) -> None:
    """The processor has 16 × 16 pixels a token; 2 × 1 tokens are left of 4 × 2, and a small picture stays."""
    model, processor = qwen
    trainer = GRPO(copy.deepcopy(model), score, processor=processor, image_max_pixels=32 * 16, **SETTINGS)
    wide, small = draw_picture(1, 64, 32), draw_picture(2, 16, 16)
    prompt = trainer.prompts.read([{"prompt": "x", "images": [wide, small]}])[0]
    assert [picture.num_features for picture in prompt.pictures] == [2, 1]
    (before,) = load([{"prompt": "x", "images": [small]}], trainer.policy.reader)[0].pictures
    assert before.digest == digest_picture(small)
    for width, height, most in ((6000, 30, 100), (30, 6000, 1), (1000, 1000, 999), (7, 5, 35)):
        shrunk = shrink_picture(Image.new("RGB", (width, height)), most)
        assert 1 <= shrunk.width * shrunk.height <= most


def test_image_max_pixels_needs_pictures() -> None:
    with pytest.raises(ConfigError, match="image_max_pixels=64 and prompts can have no pictures: pictures need a vis"):
        GRPO(ToyLM(), share_of_target, image_max_pixels=64, log_to=())


def test_a_stream_has_rows_with_and_without_pictures(qwen: tuple[Any, Any]) -> None:
    """Each row is read alone, so the column makes messages of its prompt, with pictures or without."""
    model, processor = qwen
    trainer = GRPO(copy.deepcopy(model), score, processor=processor, **SETTINGS)
    rows = [{"prompt": "x", "images": []}] * 18 + [
        {"prompt": "y", "images": [PICTURE]},
        {"prompt": "z", "images": None},
    ]
    stream = trainer.prompts.open_stream(lambda: iter(rows), 0)
    prompts = stream.take(20)
    assert [len(prompt.pictures) for prompt in prompts] == [0] * 18 + [1, 0]
    assert {type(prompt.source) for prompt in prompts} == {list}
    turning = trainer.prompts.open_stream(lambda: iter([{"prompt": "x"}] * 18 + rows[18:]), 0)
    with pytest.raises(ValueError, match="row 18 of the stream: .* is chat messages and prompts.0. text"):
        turning.take(20)


# --- errors ---


def grow_png(width: int, height: int) -> bytes:
    """A PNG of white pixels that is small as a file, made without its pixels in memory."""
    raw = zlib.compressobj()
    rows = b"".join(raw.compress(b"\0" + b"\xff" * width) for _ in range(height)) + raw.flush()

    def chunk(kind: bytes, data: bytes) -> bytes:
        return len(data).to_bytes(4, "big") + kind + data + zlib.crc32(kind + data).to_bytes(4, "big")

    header = width.to_bytes(4, "big") + height.to_bytes(4, "big") + bytes([8, 0, 0, 0, 0])
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")


def animate() -> bytes:
    return encode(draw_picture(0), "GIF", save_all=True, append_images=[draw_picture(1)])


def repeat_scans() -> bytes:
    """A progressive JPEG whose last scan, a pass over all pixels, comes 200 times."""
    whole = encode(draw_picture(0), "JPEG", progressive=True)
    return whole[:-2] + whole[whole.rindex(b"\xff\xda") : -2] * 200 + whole[-2:]


def repeat_exif() -> bytes:
    """A JPEG with three segments of EXIF data, which Pillow joins."""
    whole = encode(draw_picture(0), "JPEG")
    segment = b"\xff\xe1" + (50_000).to_bytes(2, "big") + b"Exif\0\0" + bytes(50_000 - 8)
    return whole[:2] + segment * 3 + whole[2:]


def write_comment(size: int, *, behind: bool = False) -> bytes:
    """A GIF with a comment before or behind its frame."""
    whole = encode(draw_picture(0), "GIF")
    comment = b"!\xfe" + (b"\xff" + bytes(255)) * (size // 255) + b"\0"
    place = len(whole) - 1 if behind else 13 + (3 << (whole[10] & 7) + 1)
    return whole[:place] + comment + whole[place:]


HOSTILE: dict[str, tuple[Callable[[], Any], str]] = {
    "bomb": (lambda: grow_png(30000, 30000 // 20), "30000 × 1500 pixels: at most 33554432 are decoded"),
    "large bomb": (lambda: grow_png(60000, 4), "60000 × 4 pixels: a side is more than 200 times"),
    "truncated": (lambda: ENCODED[: len(ENCODED) // 2], "is broken or cut off: OSError"),
    "header alone": (lambda: ENCODED[:20], "is no picture|cannot be read|broken or cut off"),
    "line": (lambda: encode(Image.new("RGB", (40000, 1))), "40000 × 1 pixels: a side is more than 200 times the other"),
    "animated": (animate, "is animated: pass the frame"),
    "animated GIF of PIL": (lambda: Image.open(io.BytesIO(animate())), "is animated: pass the frame"),
    # Cut after the second frame's separator: Pillow raises struct.error and IndexError where it looks for a frame.
    "cut animation": (lambda: animate()[: animate().rindex(b",\0\0\0\0") + 3], "is broken or cut off: error"),
    "scans": (repeat_scans, "is a JPEG of 21[0-9] scans: at most 100 are decoded"),
    "EXIF": (lambda: encode(PICTURE, exif=b"MM\0*" + bytes(2**18)), "26[0-9]+ bytes of EXIF data: at most 131072 are"),
    "EXIF of a WebP": (lambda: encode(PICTURE, "WEBP", exif=b"MM\0*" + bytes(2**18)), "26[0-9]+ bytes of EXIF data"),
    "EXIF of a JPEG": (repeat_exif, "150000 bytes of EXIF data"),
    "comment": (lambda: write_comment(2**20), "is a GIF with more than 64 KiB of comments: save it without them"),
    "comment behind": (lambda: write_comment(2**20, behind=True), "is a GIF with more than 64 KiB of comments"),
    "16 bits": (lambda: encode(Image.fromarray(np.zeros((8, 8), np.uint16))), "mode 'I;16', more than 8 bits"),
    "text": (lambda: b"a text file named a.png", "is no picture: expected PNG"),
    "SVG": (lambda: b"<svg xmlns='http://www.w3.org/2000/svg'/>", "is no picture: expected PNG"),
    "empty": (lambda: b"", "is no picture"),
    "TIFF": (lambda: encode(PICTURE, "TIFF"), "is no picture: expected PNG, JPEG"),
    "address": (
        lambda: "https://example.org/a.png",
        "is the address 'https://example.org/a.png': nothing is downloaded",
    ),
    "file address": (lambda: "file:///etc/passwd", "is the address 'file:///etc/passwd': nothing is downloaded"),
    "device": (lambda: "/dev/zero", "is the path '/dev/zero': there is no such file"),
    "folder": (lambda: "/", "is the path '/': there is no such file"),
    "NUL": (lambda: "a\0.png", "is the path"),
    "long": (lambda: "a" * 5000, "is the path"),
    "not base64": (lambda: "data:image/png;base64,?", "is a data URI that is not base64"),
    "no base64": (lambda: "data:image/png,abc", "expected 'data:image/png;base64,' and base64"),
    "floats": (lambda: np.zeros((8, 8, 3)), r"is an array float64 \[8, 8, 3\]: expected uint8 \[H, W, 3\]"),
    "grey array": (lambda: np.zeros((8, 8), np.uint8), r"is an array uint8 \[8, 8\]"),
    "no pixels": (lambda: np.zeros((0, 8, 3), np.uint8), "8 × 0 pixels: it is empty"),
    "number": (lambda: 7, "is int: expected a PIL image, a path, bytes"),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_hostile_picture_is_an_error_that_names_row_and_picture(kind: str, reader: PictureReader) -> None:
    make, message = HOSTILE[kind]
    rows = [{"prompt": "x"}, {"prompt": "x", "images": [PICTURE, make()]}]
    with pytest.raises((ValueError, TypeError), match=rf"^prompts\[1\], picture 1 .*({message})"):
        load(rows, reader)


def test_metadata_of_usual_size_is_read(reader: PictureReader) -> None:
    """Such as a photograph that lies on its side, also in the format of old versions of ImageMagick, which is not."""
    turned = Image.Exif()
    turned[274] = 6  # by 90 degrees
    wide = PICTURE.resize((40, 20))
    for format in ("JPEG", "PNG", "WEBP"):
        image = read_picture(encode(wide, format, exif=turned), Path(), "it")
        assert image.size == (20, 40)
    for behind in (False, True):
        assert read_picture(write_comment(2**15, behind=behind), Path(), "it").size == draw_picture(0).size
    text = PngInfo()
    text.add_text("Raw profile type exif", "\nexif\n0\n" + turned.tobytes().hex())
    assert read_picture(encode(wide, pnginfo=text), Path(), "it").size == (40, 20)


def test_a_large_file_is_not_read_whole(tmp_path: Path, reader: PictureReader, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pictures_module, "MAX_FILE_BYTES", 2**20)
    with (tmp_path / "a.png").open("wb") as file:
        file.truncate(2**40)  # a sparse file of 1 TiB
    with pytest.raises(ValueError, match=r"prompts\[0\], picture 0 has more than 1 MiB"):
        load([{"prompt": "x", "image": tmp_path / "a.png"}], reader)
    with pytest.raises(ValueError, match=r"prompts\[0\], picture 0 has more than 1 MiB"):
        load([{"prompt": "x", "image": "data:image/png;base64," + "A" * 2**21}], reader)


def test_colours_and_orientation() -> None:
    """CMYK, palettes and grey become RGB, and EXIF's orientation turns the picture upright."""
    red = Image.new("RGB", (8, 4), (255, 0, 0))
    for mode in ("CMYK", "P", "RGBA"):
        file = encode(red.convert(mode), "JPEG" if mode == "CMYK" else "PNG")
        pixels = np.asarray(read_picture(file, Path(), "p"))
        assert pixels.shape == (4, 8, 3)
        np.testing.assert_allclose(pixels.astype(int), np.broadcast_to([255, 0, 0], (4, 8, 3)), atol=3)  # JPEG's loss
    exif = Image.Exif()
    exif[0x0112] = 6  # turned by 90 degrees
    assert read_picture(encode(red, "JPEG", exif=exif), Path(), "p").size == (4, 8)


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P", "RGB"])
def test_transparent_pixels_are_white(mode: str, reader: PictureReader) -> None:
    """Black lines on a transparent background, whose pixels have the colour black too, as plots and formulas are."""
    colours = Image.new("RGBA", (8, 4), (0, 0, 0, 0))
    colours.paste((1, 1, 1, 255), (0, 0, 4, 4))
    image, options = colours.convert(mode), {}
    if mode in ("P", "RGB"):
        options["transparency"] = image.getpixel((7, 0))
    file = encode(image, **options)
    (picture,) = load([{"prompt": "x", "images": [file]}], reader)[0].pictures
    pixels = np.asarray(picture.read_image())
    assert (pixels[:, 4:] == 255).all()
    assert (pixels[:, :4] <= 1).all()
    again = read_picture(pictures_module.encode_png(picture.read_image()), Path(), "p")
    assert digest_picture(again) == picture.digest


def user(content: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": content}]


WRONG_ROWS = [
    ({"prompt": "a<image>", "images": [PICTURE] * 2}, r"prompts\[0\] has 1 tags <image> and 2 pictures"),
    ({"prompt": "a<image>", "images": []}, r"prompts\[0\] has 1 tags <image> and 0 pictures"),
    ({"prompt": user([{"type": "text", "text": "<image>a"}]), "image": None}, r"has 1 tags <image> and 0 pictures"),
    (
        {"prompt": user([{"type": "image", "image": PICTURE, "text": "which?"}])},
        r"prompts\[0\] has an entry of the type 'image' with the text 'which\?', which would not be shown: put it in",
    ),
    (
        {"prompt": user([{"type": "image"}]), "images": []},
        r"prompts\[0\] has 1 entries of the type 'image' without a pic",
    ),
    (
        {"prompt": user([{"type": "image", "index": 1}, {"type": "image", "index": 0}]), "images": [PICTURE] * 2},
        r"prompts\[0\] has an entry of the type 'image' with the index 1, and it is entry 0",
    ),
    ({"prompt": "x", "images": [PICTURE], "image": PICTURE}, r"prompts\[0\] has pictures in the columns 'images' and"),
    ({"prompt": [1, 2], "images": [PICTURE]}, r"prompts\[0\] is token ids and has pictures"),
    (
        {"prompt": [{"role": "system", "content": "x"}], "image": PICTURE},
        r"prompts\[0\] has pictures and no message of",
    ),
    (
        {"prompt": "<|image_pad|>"},
        r"prompts\[0\] has 0 pictures and its text 1 times '<\|image_pad\|>': the text holds",
    ),
    ({"prompt": "<|video_pad|>"}, r"prompts\[0\] holds the token id 6 of pictures or videos in its text"),
    ({"prompt": "x", "video": "a.mp4"}, r"prompts\[0\], column 'video' holds the path"),
    (
        {"prompt": user([{"type": "video", "video": "a.mp4"}])},
        r"prompts\[0\], message 0 has a part of the type 'video'",
    ),
    (
        {"prompt": user([{"type": "image_url", "image_url": {"url": "https://example.org/a.png"}}])},
        r"prompts\[0\] has an image_url that is no data URI: nothing is downloaded",
    ),
    ({"prompt": "x", "image": "a red circle"}, r"prompts\[0\], picture 0 is the path 'a red circle': there is no such"),
    ({"prompt": "x", "photo": PICTURE}, r"prompts\[0\], column 'photo' holds a PIL Image"),
    (
        {"prompt": user([{"type": "image", "source": {"data": "AA=="}}]), "image": PICTURE},
        r"prompts\[0\] has an entry of the type 'image' with the key 'source', which is not read: put its picture",
    ),
    (
        {"prompt": user([{"type": "image", "image": PICTURE, "max_pixels": 256}])},
        r"prompts\[0\] has an entry of the type 'image' with the key 'max_pixels', which is not read: .* processor",
    ),
    (
        {"prompt": user([{"type": "image", "image": PICTURE, "path": "other.png"}])},
        r"prompts\[0\] has an entry of the type 'image' with a picture under 'image' and one under 'path': keep one",
    ),
    (
        {"prompt": user({"type": "image", "image": PICTURE})},
        r"prompts\[0\], message 0 has a part of the type 'image'",
    ),
]


@pytest.mark.parametrize(("row", "message"), WRONG_ROWS, ids=[message[11:45] for _, message in WRONG_ROWS])
def test_rows_that_do_not_fit_their_pictures(row: dict[str, Any], message: str, reader: PictureReader) -> None:
    with pytest.raises(ValueError, match=message):
        load([row], reader)


def test_a_template_without_pictures_is_an_error(qwen: tuple[Any, Any]) -> None:
    processor = copy.deepcopy(qwen[1])
    processor.chat_template = "{% for m in messages %}{{ m['content'] if m['content'] is string else 'x' }}{% endfor %}"
    blind = PictureReader(processor, processor.tokenizer, image_token_id=5, excluded_ids=(5, 6))
    with pytest.raises(ValueError, match=r"prompts\[0\] has 1 pictures and its text 0 times .*the chat template left"):
        load([{"prompt": "x", "image": PICTURE}], blind)


def test_a_template_that_reads_entries_alone_gets_entries(qwen: tuple[Any, Any]) -> None:
    """SmolVLM's template drops contents that are text."""
    processor = copy.deepcopy(qwen[1])
    processor.chat_template = (
        "{% for m in messages %}{% for p in m['content'] %}"
        "{% if p['type'] == 'image' %}<|image_pad|>{% elif p['type'] == 'text' %}{{ p['text'] }}{% endif %}"
        "{% endfor %}{% endfor %}"
    )
    strict = PictureReader(processor, processor.tokenizer, image_token_id=5, excluded_ids=(5, 6))
    prompts = load([{"prompt": [{"role": "system", "content": "s"}, *user("x")], "image": PICTURE}], strict)
    assert prompts[0].text == "s<|image_pad|>x"


# --- one record, one run ---


def test_equal_ids_with_other_pictures_are_never_merged(qwen: tuple[Any, Any], reader: PictureReader) -> None:
    model, processor = qwen
    first, second = draw_picture(1), draw_picture(2)
    prompts = load([{"prompt": "x", "image": image} for image in (first, second, first)], reader)
    assert prompts[0].token_ids.tolist() == prompts[1].token_ids.tolist()
    assert fingerprint_prompts(prompts[:1]) != fingerprint_prompts(prompts[1:2])
    assert fingerprint_prompts(prompts[:1]) == fingerprint_prompts(prompts[2:])
    completions = [np.array([20, 21, 22])] * 2
    batch = build_batch([group_prompt(prompt, completions) for prompt in prompts], np.zeros(6))
    assert len(build_prefix_tree(batch).prompt_lengths) == 3
    with torch.no_grad():
        log_probs = make_forward(copy.deepcopy(model), reader=reader)(batch)[0]
    torch.testing.assert_close(log_probs[0], log_probs[4], atol=1e-5, rtol=0)  # the same picture: float32 rounding
    assert (log_probs[0] - log_probs[2]).abs().max() > 1e-2
    greedy = Sampling(4, temperature=0.0)
    engine = HFEngine(copy.deepcopy(model), processor.tokenizer, reader=reader, eos_token_ids=[])
    alone = [engine.generate([prompt], 2, greedy, 0)[0].completions[0].token_ids.tolist() for prompt in prompts]
    together = [group.completions[1].token_ids.tolist() for group in engine.generate(prompts, 2, greedy, 0)]
    assert together == alone
    assert alone[0] == alone[2] != alone[1]


def test_a_prompt_that_lost_its_pictures_is_an_error(qwen: tuple[Any, Any], reader: PictureReader) -> None:
    """In the update and in the engine: no row is run without its pictures."""
    model = copy.deepcopy(qwen[0])
    prompt = load([{"prompt": "x", "image": PICTURE}], reader)[0]
    lost = replace(prompt, pictures=())
    for share in (True, False):
        forward = make_forward(model, reader=reader, share_prompts=share)
        for groups in (
            [group_prompt(lost, [np.arange(20, 30)] * 4)],
            [group_prompt(prompt, [np.array([20, 5, 21])] * 4)],
        ):
            with torch.no_grad(), pytest.raises(ValueError, match="a prompt with pictures lost them, or a completion"):
                forward(build_batch(groups, np.zeros(4)))
    engine = HFEngine(model, qwen[1].tokenizer, reader=reader)
    with pytest.raises(ValueError, match="the token ids have 4 ids of pictures, and the pictures 0 features"):
        engine.generate([lost], 2, Sampling(4), 0)
    blind = HFEngine(copy.deepcopy(qwen[0]), qwen[1].tokenizer)
    with pytest.raises(ValueError, match=r"prompts\[0\] has pictures, and this engine has no processor"):
        blind.generate([prompt], 2, Sampling(4), 0)


def test_the_tower_and_the_processor_run_once_for_each_distinct_picture(
    qwen: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, processor = copy.deepcopy(qwen[0]), copy.deepcopy(qwen[1])
    patches: list[int] = []  # of each run of the tower
    model.model.visual.register_forward_pre_hook(
        lambda module, args, kwargs: patches.append(len(kwargs.get("hidden_states", args[0] if args else ()))),
        with_kwargs=True,
    )
    processed = []
    plain = type(processor).__call__
    monkeypatch.setattr(
        type(processor), "__call__", lambda self, *args, **options: processed.append(1) or plain(self, *args, **options)
    )
    trainer = GRPO(model, score, processor=processor, **{**SETTINGS, "max_steps": 1})
    processed.clear()
    patches.clear()
    shared = draw_picture(1)
    rows = [{"prompt": "x", "images": [shared]}, {"prompt": "yy", "images": [draw_picture(2), shared]}]
    metrics = trainer.train(rows)
    assert len(processed) == 2
    # 16 patches of 8 × 8 pixels a picture: 2 pictures in the prefill, and 2 in the update of 8 rows.
    assert patches == [32, 32]
    assert metrics["images/tower_pictures"] == 4
    assert 0 < metrics["images/tower_seconds"] < metrics["time/step_s"]


def test_pictures_of_evaluations_are_not_those_of_a_step(qwen: tuple[Any, Any], tmp_path: Path) -> None:
    """Every step shows 2 distinct pictures, in the prefill and in the update; each evaluation shows 3 others."""
    trainer = GRPO(
        *(copy.deepcopy(qwen[0]), score),
        **{"processor": copy.deepcopy(qwen[1]), "output_dir": tmp_path, "eval_steps": 1, "eval_samples": 1, **SETTINGS},
    )
    rows = [{"prompt": "x", "images": [draw_picture(number)]} for number in (1, 2)]
    trainer.train(rows, eval_prompts=[{"prompt": "x", "images": [draw_picture(number)]} for number in (3, 4, 5)])
    steps = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [step["images/tower_pictures"] for step in steps if "images/shown" in step] == [4, 4]


def test_a_frozen_tower_runs_once_for_each_distinct_picture_of_the_run(qwen: tuple[Any, Any]) -> None:
    """Its weights stay, those of the language model change; after a change of its weights it runs again."""
    model, processor = copy.deepcopy(qwen[0]), copy.deepcopy(qwen[1])
    patches: list[int] = []
    model.model.visual.register_forward_pre_hook(
        lambda module, args, kwargs: patches.append(len(kwargs.get("hidden_states", args[0] if args else ()))),
        with_kwargs=True,
    )
    trainer = GRPO(model, score, processor=processor, freeze_vision=True, **{**SETTINGS, "max_steps": 3})
    patches.clear()
    rows = [
        {"prompt": "x", "images": [draw_picture(1)]},
        {"prompt": "yy", "images": [draw_picture(2), draw_picture(1)]},
    ]
    metrics = trainer.train(rows)
    assert metrics["images/tower_pictures"] == 0  # in the last step
    assert sum(patches) == 32  # 16 patches for each of two pictures, in three steps
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, qwen[0].get_parameter(name)) is ("visual" in name), name
        assert parameter.grad is None
    prompts = trainer.prompts.read(rows)
    batch = build_batch([group_prompt(prompt, [np.array([20, 21])] * 2) for prompt in prompts], np.zeros(4))
    forward = make_forward(model, reader=trainer.policy.reader)
    with torch.no_grad():
        before = forward(batch)[0]
        assert torch.equal(forward(batch)[0], before)
        assert sum(patches) == 32
        model.model.visual.merger.linear_fc2.weight.mul_(2)
        assert (forward(batch)[0] - before).abs().max() > 1e-3
    assert sum(patches) == 64


def test_the_check_of_an_engines_weights_shows_a_picture(qwen: tuple[Any, Any]) -> None:
    """Its log-probs are over every id, as an engine reports those of a prompt, and follow the weights of the tower."""
    model, processor = copy.deepcopy(qwen[0]), qwen[1]
    trainer = GRPO(model, score, processor=processor, **SETTINGS)
    trainer.updater.start()
    sync = trainer._step.engine_sync
    token_ids, pictures = sync._choose_canary()
    assert not np.isin(token_ids[-17:], [5, 6]).any()
    row, tensors = torch.tensor([token_ids]), pictures[0].read()

    def expect() -> Any:
        with torch.no_grad():
            logits = model(input_ids=row, mm_token_type_ids=(row == 5).int(), **tensors).logits[0, :-1]
        return torch.log_softmax(logits, -1).gather(1, row[0, 1:, None])[-17:, 0].numpy()

    first = sync.measure_tokens(token_ids, pictures)
    np.testing.assert_allclose(first, expect(), atol=1e-4, rtol=0)
    with torch.no_grad():
        model.model.visual.merger.linear_fc2.weight.mul_(2)
    second = sync.measure_tokens(token_ids, pictures)
    np.testing.assert_allclose(second, expect(), atol=1e-4, rtol=0)
    assert np.abs(second - first).mean() > 1e-3


def test_freeze_vision_needs_a_vision_tower() -> None:
    with pytest.raises(ConfigError, match="freeze_vision=True, and model is a ToyLM, which has no vision tower"):
        GRPO(ToyLM(), share_of_target, freeze_vision=True, log_to=())
    with pytest.raises(ConfigError, match="freeze_vision"):
        GRPO(ToyLM(), share_of_target, freeze_vision=True, lora_rank=4, log_to=())


def test_pictures_of_a_stream_are_dropped_with_their_prompts(qwen: tuple[Any, Any]) -> None:
    processor = qwen[1]
    reader = PictureReader(processor, processor.tokenizer, image_token_id=5, excluded_ids=(5, 6))
    rows = [[{"prompt": "x", "images": [encode(draw_picture(seed))]}] for seed in range(3)]
    first = load(rows[0], reader)
    for row in rows:
        load(row, reader)
    assert list(reader._pictures) == [first[0].pictures[0].digest]
    assert load(rows[0], reader)[0].pictures[0] is first[0].pictures[0]
    load(rows[1], reader)  # its tensors are still there, and are counted once
    entries = list(reader._tensors._entries.values())
    assert len(entries) == 3
    assert reader._tensors._bytes == sum(size for _, size in entries)


def test_the_cache_of_tensors_is_bounded_and_pictures_are_read_again(qwen: tuple[Any, Any], tmp_path: Path) -> None:
    processor = qwen[1]
    small = PictureReader(processor, processor.tokenizer, image_token_id=5, excluded_ids=(5, 6), cache_bytes=1)
    draw_picture(1).save(tmp_path / "a.png")
    pictures = load([{"prompt": "x", "images": [tmp_path / "a.png", draw_picture(2)]}], small)[0].pictures
    for picture in (*pictures, *pictures):
        assert picture.read()["pixel_values"].shape == (16, 3 * 2 * 8 * 8)
        assert len(small._tensors) == 1
    draw_picture(3).save(tmp_path / "a.png")
    with pytest.raises(ValueError, match=r"prompts\[0\], picture 0 has changed since it was read first"):
        pictures[0].read()


def test_two_threads_use_a_cache_of_tensors() -> None:
    """With ``async_steps``, the engine and the update read the features of a frozen tower."""
    cache = TensorCache(200)

    def use(first: int) -> None:
        for number in range(first, first + 20000):  # without a lock, five runs of five lost count of the bytes
            cache.add(number % 7, "x" * 40)

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(2) as threads:
            for done in [threads.submit(use, first) for first in (0, 3)]:
                done.result()
    finally:
        sys.setswitchinterval(before)
    assert cache._bytes == sum(size for _, size in cache._entries.values()) == 200


def test_ids_of_pictures_are_never_sampled(qwen: tuple[Any, Any], reader: PictureReader) -> None:
    model, processor = copy.deepcopy(qwen[0]), qwen[1]
    with torch.no_grad():
        model.lm_head.weight[5:7] *= 100  # a model that loves these ids
    prompts = load([{"prompt": "x", "image": PICTURE}], reader)
    blind = HFEngine(copy.deepcopy(model), processor.tokenizer, eos_token_ids=[])
    text = [Prompt(np.arange(20, 30), 0)]
    assert np.isin(blind.generate(text, 8, Sampling(8), 0)[0].completions[0].token_ids, (5, 6)).any()
    engine = HFEngine(model, processor.tokenizer, reader=reader, eos_token_ids=[])
    for completion in engine.generate(prompts, 64, Sampling(8), 0)[0].completions:
        assert not np.isin(completion.token_ids, (5, 6)).any()
        assert np.isfinite(completion.log_probs).all()


# --- runs ---


def test_a_run_learns_from_pictures_and_is_saved_with_its_processor(
    qwen: tuple[Any, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Save → load by path → the same ids and the same weights; the checkpoint has the processor too."""
    import transformers

    model, processor = qwen
    rows = [{"prompt": "x", "images": [draw_picture(seed)]} for seed in range(4)]
    trainer = train(model, processor, rows, output_dir=str(tmp_path / "run"), checkpoint_steps=1)
    changed = [name for name, p in trainer.model.named_parameters() if not torch.equal(p, model.get_parameter(name))]
    assert any("visual" in name for name in changed)
    assert any("language_model" in name for name in changed)
    trainer.save(tmp_path / "out")
    caplog.clear()
    for folder in (tmp_path / "out", max((tmp_path / "run" / "checkpoints").glob("step_*"))):
        again = GRPO(str(folder), score, **SETTINGS)
        assert type(again.model).__name__ == "Qwen3VLForConditionalGeneration"
        loaded = again.prompts.read(rows)
        assert [prompt.token_ids.tolist() for prompt in loaded] == [
            prompt.token_ids.tolist() for prompt in trainer.prompts.read(rows)
        ]
        assert [p.pictures[0].digest for p in loaded] == [p.pictures[0].digest for p in trainer.prompts.read(rows)]
        for name, parameter in again.model.named_parameters():
            assert torch.equal(parameter, trainer.model.get_parameter(name))
    assert "trained on text alone" not in caplog.text
    whole = transformers.AutoProcessor.from_pretrained(tmp_path / "out")
    assert type(whole) is type(processor)


@pytest.mark.parametrize("family", [*FAMILIES[1:], "gemma3"])
def test_a_path_is_loaded_with_its_processor(family: str, tmp_path: Path) -> None:
    model, processor = make_tiny_vlm(family)
    model.save_pretrained(tmp_path)
    processor.save_pretrained(tmp_path)
    trainer = GRPO(str(tmp_path), score, **{**SETTINGS, "max_steps": 1})
    assert type(trainer.model) is type(model)
    metrics = trainer.train([{"prompt": "x", "images": [PICTURE]}])
    assert np.isfinite(metrics["mean_reward"])
    assert (metrics["images/per_prompt"], metrics["images/distinct"]) == (1, 1)
    prompt = trainer.prompts.read([{"prompt": "x", "images": [PICTURE]}])[0]
    (picture,) = prompt.pictures
    assert metrics["images/tokens"] == len(picture.token_ids)
    assert metrics["images/tokens_share"] == len(picture.token_ids) / len(prompt.token_ids)


def test_a_killed_run_resumes_to_the_same_weights(qwen: tuple[Any, Any], tmp_path: Path) -> None:
    model, processor = qwen
    rows = [{"prompt": "x", "images": [draw_picture(seed)]} for seed in range(4)]
    whole = train(model, processor, rows, output_dir=str(tmp_path / "whole"), max_steps=3)
    train(model, processor, rows, output_dir=str(tmp_path / "halves"), max_steps=2, checkpoint_steps=1)
    resumed = train(model, processor, rows, output_dir=str(tmp_path / "halves"), max_steps=3)
    for name, parameter in resumed.model.named_parameters():
        assert torch.equal(parameter, whole.model.get_parameter(name)), name
    other = [{**row, "images": [draw_picture(9)]} for row in rows]
    with pytest.raises(Exception, match="prompts|column values"):
        train(model, processor, other, output_dir=str(tmp_path / "halves"), max_steps=4)


def test_lora_adapts_the_language_model_alone(qwen: tuple[Any, Any]) -> None:
    pytest.importorskip("peft", reason="pip install peft (the extra 'lora')")
    model, processor = make_tiny_vlm("idefics3")  # its tower has layers of the names q_proj and v_proj too
    rows = [{"prompt": "x", "images": [PICTURE]}]
    trainer = train(model, processor, rows, lora_rank=2, prompts_per_step=1, kl_coef=0.1)
    adapted = [name for name, p in trainer.model.named_parameters() if "lora_" in name]
    assert adapted
    assert all("text_model" in name for name in adapted)
    for name, parameter in trainer.model.named_parameters():
        if "vision" in name or "connector" in name:
            assert parameter.grad is None
            assert not parameter.requires_grad
    named = GRPO(
        make_tiny_vlm("idefics3")[0],
        score,
        processor=processor,
        lora_rank=2,
        **SETTINGS,
        lora_target_modules=r".*vision_model.*q_proj",
    )
    assert any("vision_model" in name for name, _ in named.model.named_parameters() if "lora_" in name)


@pytest.mark.parametrize("family", ["qwen3_vl", "idefics3"])
def test_the_memory_estimate_knows_a_vision_model_by_its_config(family: str) -> None:
    """Its weights with the tower's, and adapters in the language model alone."""
    pytest.importorskip("peft", reason="pip install peft (the extra 'lora')")
    model, processor = make_tiny_vlm(family)
    shape = read_shape(model.config)
    assert shape.parameters == sum(parameter.numel() for parameter in model.parameters())
    adapted = GRPO(model, score, processor=processor, lora_rank=2, lora_target_modules="all-linear", **SETTINGS).model
    trained = sum(parameter.numel() for parameter in adapted.parameters() if parameter.requires_grad)
    assert 2 * shape.adapted_width == trained


def test_the_memory_command_counts_pictures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from rlox_grpo.cli import main

    make_tiny_vlm("qwen3_vl")[0].config.save_pretrained(tmp_path)
    shape = read_shape(make_tiny_vlm("qwen3_vl")[0].config)
    assert shape.vision is not None
    # 16 × 16 pixels a token: four patches of 8 × 8.
    assert (shape.vision.patches_per_token, shape.vision.count_tokens(256 * 4)) == (4, 4)
    assert shape.tower == sum(p.numel() for p in make_tiny_vlm("qwen3_vl")[0].model.visual.parameters())
    totals = {}
    for options in ([], ["--pictures", "2", "--picture-pixels", str(2**24)]):
        main(["memory", str(tmp_path), "--gpu-memory", "8", *options])
        shown = capsys.readouterr().out
        totals[bool(options)] = float(re.findall(r"these options.* ([0-9.]+)  ", shown)[0])
    assert "2 pictures of 16,777,216 pixels have 131,072 tokens" in shown
    assert totals[True] > totals[False] + 1


def test_references_checkpointing_and_several_updates(qwen: tuple[Any, Any]) -> None:
    """A frozen reference, recomputed activations, old log-probs and micro-batches read pictures like the policy."""
    model, processor = qwen
    rows = [{"prompt": "x", "images": [draw_picture(seed)]} for seed in range(2)]
    settings = {"kl_coef": 0.1, "updates_per_batch": 2, "micro_batch_tokens": 64, "max_steps": 1}
    trainer = train(model, processor, rows, **settings)
    recomputed = train(model, processor, rows, **settings, gradient_checkpointing=True)
    for name, parameter in recomputed.model.named_parameters():
        # Two steps of Adam of 0.01 each: a difference of 2e-4 is rounding of gradients near 0.
        torch.testing.assert_close(parameter, trainer.model.get_parameter(name), atol=2e-4, rtol=0)


def test_prompts_with_pictures_can_be_evaluated(qwen: tuple[Any, Any]) -> None:
    model, processor = qwen
    trainer = GRPO(copy.deepcopy(model), score, processor=processor, **SETTINGS)
    metrics = trainer.evaluate([{"prompt": "x", "images": [PICTURE]}])
    assert np.isfinite(metrics["mean_reward"])


CONFLICTS = [
    ({"engine": "mine:make_engine"}, "engine='mine:make_engine': set engine to 'hf', 'vllm' or 'vllm_server'"),
    ({"mutual_information_steps": 5}, "set mutual_information_steps=0"),
    ({"reference": "server", "reference_url": "http://127.0.0.1:1", "kl_coef": 0.1}, "reference='server'"),
    ({"updater": "deepspeed"}, "updater='deepspeed' and a trained vision tower"),
    ({"updater": "deepspeed", "lora_rank": 2, "lora_target_modules": ".*attn.*"}, "and a trained vision tower"),
    ({"updater": "deepspeed", "zero_stage": 3, "freeze_vision": True}, "zero_stage=3"),
]


def test_settings_that_take_no_pictures_yet_say_so(qwen: tuple[Any, Any]) -> None:
    from rlox_grpo.config.schema import GRPOConfig
    from rlox_grpo.model.processor import make_reader

    model, processor = qwen
    for options, message in CONFLICTS:
        config = GRPOConfig.create(**options)
        read, reason = make_reader(model, processor.tokenizer, processor, "", config)
        assert read is None
        assert message in reason
        with pytest.raises(ValueError, match="pictures in prompts are not supported yet"):
            load_prompts([{"prompt": "x", "image": PICTURE}], processor.tokenizer, no_pictures=reason)
        with pytest.raises(ValueError, match="pictures in prompts are not supported yet"):
            load_prompts([{"prompt": user([{"type": "image"}])}], processor.tokenizer, no_pictures=reason)
    for options in ({"freeze_vision": True}, {"lora_rank": 2}):
        config = GRPOConfig.create(updater="deepspeed", zero_stage=2, **options)
        assert make_reader(model, processor.tokenizer, processor, "", config)[0] is not None


def test_a_teacher_takes_no_pictures_yet(qwen: tuple[Any, Any]) -> None:
    model, processor = qwen
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.lm_head.weight.mul_(1.5)
    trainer = GRPO(copy.deepcopy(model), score, processor=processor, teacher=other, teacher_coef=1.0, **SETTINGS)
    with pytest.raises(ValueError, match="pictures in prompts are not supported yet with teacher="):
        trainer.train([{"prompt": "x", "images": [PICTURE]}])


def test_a_model_of_another_tokenizer_is_refused(qwen: tuple[Any, Any]) -> None:
    model, processor = qwen
    _, other = make_tiny_vlm("idefics3")
    with pytest.raises(ValueError, match="processor has a tokenizer of .* pass processor alone"):
        GRPO(copy.deepcopy(model), score, tokenizer=other.tokenizer, processor=processor, **SETTINGS)


def test_a_prompt_that_its_pictures_make_too_long_is_an_error(qwen: tuple[Any, Any]) -> None:
    """Expanded ids count, and nothing is cut."""
    model, processor = qwen
    trainer = GRPO(copy.deepcopy(model), score, processor=processor, **SETTINGS)
    with pytest.raises(ValueError, match=r"prompts\[0\] has 737 tokens, 640 of them for 40 pictures"):
        trainer.train([{"prompt": "x", "images": [draw_picture(seed, 64, 64) for seed in range(40)]}])


def test_a_vision_model_without_its_processor_is_trained_on_text(
    qwen: tuple[Any, Any], caplog: pytest.LogCaptureFixture
) -> None:
    model, processor = qwen
    trainer = GRPO(copy.deepcopy(model), score, tokenizer=processor.tokenizer, **SETTINGS)
    assert trainer.policy.reader is None
    assert "the processor of model='' cannot be loaded" in caplog.text
    with pytest.raises(ValueError, match="the processor of model='' cannot be loaded: .*pass processor="):
        trainer.train([{"prompt": "x", "image": PICTURE}])


GUIDE = Path(__file__).resolve().parents[2] / "docs" / "guides" / "images.md"


def test_the_guide_runs(qwen: tuple[Any, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its blocks in order, with a tiny model in the folder of the model's name."""
    import runpy

    from test_readme import runnable

    import rlox_grpo

    folder = tmp_path / "Qwen" / "Qwen2.5-VL-3B-Instruct"
    qwen[0].save_pretrained(folder)
    qwen[1].save_pretrained(folder)
    for number in range(2):
        draw_picture(number).save(tmp_path / f"shapes_{number}.png")
    program = runnable(GUIDE.read_text(encoding="utf-8"))
    (tmp_path / "page.py").write_text(program, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    sizes = {**SETTINGS, "group_size": 2}

    def make(model: Any, *rewards: Any, **options: Any) -> GRPO:
        return GRPO(model, *([score] if rewards else []), **{**options, **sizes})

    monkeypatch.setattr(rlox_grpo, "GRPO", make)
    names = runpy.run_path("page.py")
    assert (tmp_path / "out" / "preprocessor_config.json").exists() or (
        tmp_path / "out" / "processor_config.json"
    ).exists()
    frozen = names["trainer"]
    before = {name: p.clone() for name, p in frozen.model.named_parameters()}
    frozen.train(names["rows"])
    for name, parameter in frozen.model.named_parameters():
        assert torch.equal(parameter, before[name]) is ("visual" in name), name
        assert "visual" not in name or parameter.grad is None
