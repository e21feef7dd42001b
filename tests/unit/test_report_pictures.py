"""Pictures of prompts in a report: small copies that Pillow has encoded again, one for each distinct picture."""

from __future__ import annotations

import base64
import io
import json
import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import chromium
from rlox_grpo.prompts.pictures import digest_picture
from rlox_grpo.run.files import write_completions
from rlox_grpo.run.report import write_report
from rlox_grpo.run.report.pictures import MAX_PICTURES
from rlox_grpo.run.thumbnails import SIDE, encode_thumbnail, read_thumbnail, write_thumbnails
from rlox_grpo.types import Completion, Picture, Prompt, RolloutGroup, ScoredGroup

LINK = re.compile(r"url\(data:image/jpeg;base64,([A-Za-z0-9+/=]+)\)")


def make_picture(colour: tuple[int, int, int], size: tuple[int, int] = (24, 24)) -> Picture:
    image = Image.new("RGB", size, colour)
    ids = np.array([5, 5], np.int64)
    return Picture(digest_picture(image), ids, 2, dict, lambda: image)


def make_group(index: int, *pictures: Picture) -> ScoredGroup:
    prompt = Prompt(np.array([1, 5, 5], np.int64), index, text="how many?", pictures=pictures)
    ids = np.array([20, 21], np.int64)
    completions = tuple(Completion(ids, np.zeros(2, np.float32), "stop", text=f"answer {k}") for k in range(2))
    rewards = np.array([0.0, 1.0], np.float32)
    return ScoredGroup(RolloutGroup(prompt, completions), rewards, {"right": rewards})


def write_run(folder: Path, *groups: ScoredGroup) -> Path:
    """A run's folder with an evaluation before and after a training step, all with the same groups."""
    folder.mkdir()
    for step in (0, 1):
        write_completions(folder, step, groups, None, kind="eval_step")
    write_completions(folder, 1, groups, np.zeros(2 * len(groups), np.float32))
    write_thumbnails(folder, groups, limit=1000)
    return folder


def decode_links(page: str) -> list[Image.Image]:
    return [Image.open(io.BytesIO(base64.b64decode(link))) for link in LINK.findall(page)]


RED, BLUE = (255, 0, 0), (0, 0, 255)


def test_each_distinct_picture_is_in_the_page_once(tmp_path: Path) -> None:
    red, blue = make_picture(RED), make_picture(BLUE, (400, 100))
    run = write_run(tmp_path / "run", make_group(0, red), make_group(1, blue, red), make_group(2))
    page = write_report(run).read_text(encoding="utf-8")
    links = decode_links(page)
    assert [(link.format, link.size) for link in links] == [("JPEG", (24, 24)), ("JPEG", (SIDE, SIDE // 4))]
    assert [np.asarray(link).reshape(-1, 3).mean(0).round().tolist()[::2] for link in links] == [[254, 0], [0, 254]]
    assert page.count('class="picture-0" role="img" aria-label="picture 1"') == 2  # before and after, training
    assert page.count('class="picture-0" role="img" aria-label="picture 2"') == 2
    assert page.count('class="picture-1" role="img" aria-label="picture 1"') == 2
    assert "img-src data:" in page
    assert "width:48px;height:48px" in page  # enlarged, so that its pixels can be seen


def test_prompts_of_equal_text_and_other_pictures_are_other_prompts(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", make_group(0, make_picture(RED)), make_group(1, make_picture(BLUE)))
    page = write_report(run).read_text(encoding="utf-8")
    assert page.count('<article class="group">') == 2
    assert page.count("<h3>Prompt ") == 2


def test_a_page_without_pictures_has_no_rule_for_them(tmp_path: Path) -> None:
    page = write_report(write_run(tmp_path / "run", make_group(0))).read_text(encoding="utf-8")
    assert "img-src" not in page
    assert "data:image" not in page
    assert not (tmp_path / "run" / "completions" / "pictures").exists()


def _png_of_a_bomb() -> bytes:
    import zlib

    def chunk(kind: bytes, data: bytes) -> bytes:
        return len(data).to_bytes(4, "big") + kind + data + zlib.crc32(kind + data).to_bytes(4, "big")

    header = (60_000).to_bytes(4, "big") * 2 + bytes([8, 2, 0, 0, 0])
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(bytes(2**20)))


HOSTILE = "<script>document.title='owned'</script>"


def _write_large() -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (SIDE + 1, 8)).save(file, "PNG")
    return file.getvalue()


@pytest.mark.parametrize("content", [HOSTILE.encode(), _png_of_a_bomb(), _write_large(), bytes(2**18), b""])
def test_a_hostile_file_is_not_shown(tmp_path: Path, content: bytes) -> None:
    picture = make_picture(RED)
    run = write_run(tmp_path / "run", make_group(0, picture))
    (run / "completions" / "pictures" / f"{picture.digest}.jpg").write_bytes(content)
    page = write_report(run).read_text(encoding="utf-8")
    assert page.count("picture 1 is not stored") == 2
    assert "data:image" not in page
    assert HOSTILE not in page


def test_bytes_after_a_picture_and_its_metadata_do_not_reach_the_page(tmp_path: Path) -> None:
    picture = make_picture(RED)
    run = write_run(tmp_path / "run", make_group(0, picture))
    path = run / "completions" / "pictures" / f"{picture.digest}.jpg"
    file, exif = io.BytesIO(), Image.Exif()
    exif[0x010E] = HOSTILE  # the description
    Image.new("RGB", (24, 24), RED).save(file, "JPEG", comment=HOSTILE, exif=exif)
    path.write_bytes(file.getvalue() + HOSTILE.encode())
    (link,) = LINK.findall(write_report(run).read_text(encoding="utf-8"))
    shown = base64.b64decode(link)
    assert b"script" not in shown
    assert b"Exif" not in shown
    assert Image.open(io.BytesIO(shown)).size == (24, 24)


@pytest.mark.parametrize("digests", ["x", {"a": 1}, ["../../secret"], [3], [HOSTILE], ["0" * 33], [["0" * 32]]])
def test_a_hostile_digest_is_not_a_path(tmp_path: Path, digests: Any) -> None:
    run = write_run(tmp_path / "run", make_group(0, make_picture(RED)))
    Image.new("RGB", (8, 8)).save(run / "secret.jpg")
    row = json.loads((run / "completions" / "step_000001.jsonl").read_text().splitlines()[0])
    for path in (run / "completions").glob("*.jsonl"):
        path.write_text(json.dumps({**row, "pictures": digests}) + "\n")
    page = write_report(run).read_text(encoding="utf-8")
    assert "data:image" not in page
    assert HOSTILE not in page


@pytest.mark.skipif(os.name == "nt", reason="links need a permission")
def test_a_link_is_not_followed(tmp_path: Path) -> None:
    picture = make_picture(RED)
    run = write_run(tmp_path / "run", make_group(0, picture))
    path = run / "completions" / "pictures" / f"{picture.digest}.jpg"
    path.rename(tmp_path / "other.jpg")
    path.symlink_to(tmp_path / "other.jpg")
    with pytest.raises(OSError, match="symbolic link"):
        read_thumbnail(run, picture.digest)


def test_the_number_of_pictures_is_bounded(tmp_path: Path) -> None:
    pictures = [make_picture((index, 0, 0)) for index in range(MAX_PICTURES + 16)]
    groups = [make_group(index, *pictures[8 * index : 8 * index + 8]) for index in range(len(pictures) // 8)]
    run = write_run(tmp_path / "run", *groups, make_group(99, *pictures[:20]))
    page = write_report(run).read_text(encoding="utf-8")
    assert len(decode_links(page)) == MAX_PICTURES
    few = tmp_path / "few"
    few.mkdir()
    (few / "completions").mkdir()
    write_thumbnails(few, groups)
    assert len(list((few / "completions" / "pictures").iterdir())) == 8


def test_a_thumbnail_is_small_and_keeps_its_proportions() -> None:
    noise = Image.fromarray(np.random.default_rng(0).integers(0, 256, (1000, 500, 3), dtype=np.uint8))
    jpeg = encode_thumbnail(noise)
    assert Image.open(io.BytesIO(jpeg)).size == (SIDE // 2, SIDE)
    assert len(jpeg) < 2**16
    assert noise.size == (500, 1000)


SIZE = """<script>addEventListener("load", () => {
  for (const closed of document.querySelectorAll("details")) closed.open = true;
  const shown = [...document.querySelectorAll(".pictures > [role=img]")];
  document.title = shown.map((one) => one.offsetWidth + "x" + one.offsetHeight).join(" ");
});</script></body>"""


@pytest.mark.browser
@chromium.needed
def test_a_browser_paints_the_pictures(tmp_path: Path) -> None:
    red, blue = make_picture(RED), make_picture(BLUE, (400, 100))
    run = write_run(tmp_path / "run", make_group(0, red, blue))
    page = write_report(run)
    html = page.read_text(encoding="utf-8")
    measured = tmp_path / "measured.html"
    policy = re.search(r'<meta http-equiv="Content-Security-Policy" content="[^"]*">', html)
    assert policy is not None
    measured.write_text(html.replace(policy[0], "").replace("</body>", SIZE), encoding="utf-8")
    assert "<title>48x48 192x48 48x48 192x48</title>" in chromium.show(tmp_path, measured)
    # With the page's policy, on a screenshot: the colours are there.
    shot = tmp_path / "page.png"
    chromium.show(tmp_path, page, "--window-size=1280,2400", f"--screenshot={shot}")
    pixels = np.asarray(Image.open(shot).convert("RGB")).reshape(-1, 3).astype(int)
    assert (np.abs(pixels - [254, 0, 0]).max(1) < 3).sum() >= 48 * 48
    assert (np.abs(pixels - [0, 0, 254]).max(1) < 3).sum() >= 192 * 48
