"""Messages with pictures in episodes: what is read, what is refused, and marks of pictures in texts."""

from __future__ import annotations

import asyncio
import base64
import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlox_grpo import GRPO
from rlox_grpo.batch.pictures import mark_pictures
from rlox_grpo.environments import Reply, ToolCall
from rlox_grpo.errors import EpisodeError
from rlox_grpo.prompts.load import load_rows
from rlox_grpo.prompts.pictures import PictureReader
from rlox_grpo.rollout.episodes.messages import list_messages
from rlox_grpo.rollout.episodes.pictures import EpisodePictures, RefusedPictureError
from rlox_grpo.rollout.episodes.tools import Tools
from tiny_vlms import draw_picture, make_tiny_vlm

pytestmark = pytest.mark.usefixtures("one_thread")
MARK = "<|image_pad|>"


@pytest.fixture(scope="module")
def vlm() -> Any:
    return make_tiny_vlm("qwen3_vl")


@pytest.fixture(scope="module")
def reader(vlm: Any) -> PictureReader:
    processor = vlm[1]
    return PictureReader(processor, processor.tokenizer, image_token_id=5, excluded_ids=(5, 6))


def encode(picture: Any) -> bytes:
    file = io.BytesIO()
    picture.save(file, "PNG")
    return file.getvalue()


def show(*values: Any) -> list[dict[str, Any]]:
    return [{"role": "tool", "name": "crop", "content": [{"type": "image", "image": value} for value in values]}]


def test_equal_pictures_in_any_form_are_one(reader: PictureReader) -> None:
    picture = draw_picture(0)
    data = encode(picture)
    uri = "data:image/png;base64," + base64.b64encode(data).decode()
    forms = [picture, data, bytearray(data), uri, {"bytes": data, "path": "nowhere.png"}, np.asarray(picture)]
    pictures = EpisodePictures(reader)
    (message,) = list_messages(show(*forms), pictures)
    digests = {entry["digest"] for entry in message["content"]}
    assert len(digests) == 1
    assert [shown.digest for shown in pictures.list_shown([message])] == [*digests] * len(forms)
    assert list_messages([message], pictures) == [message]  # as an environment passes it back
    with pytest.raises(ValueError, match="digest of a picture that this episode has not shown"):
        list_messages([message], EpisodePictures(reader))


def test_a_picture_that_changes_later_was_read_before(reader: PictureReader) -> None:
    picture, pictures = draw_picture(11), EpisodePictures(reader)
    messages = list_messages(show(picture), pictures)
    picture.paste((0, 0, 0), (0, 0, *picture.size))
    (shown,) = pictures.list_shown(messages)
    assert np.array_equal(np.asarray(shown.read_image()), np.asarray(draw_picture(11)))


def test_no_file_and_no_address_is_opened(reader: PictureReader, tmp_path: Path) -> None:
    path = tmp_path / "secret.png"
    draw_picture(0).save(path)
    for value in [
        str(path),
        path,
        f"file://{path}",
        "http://a/b.png",
        {"path": str(path)},
        {"bytes": None, "path": "x"},
    ]:
        with pytest.raises(ValueError, match=r"messages\[0\], part 0 is the text .*no file or address"):
            list_messages(show(value), EpisodePictures(reader))
    for entry in [
        {"type": "image", "path": str(path)},
        {"type": "image", "url": str(path)},
        {"type": "image_url", "image_url": {"url": str(path)}},
    ]:
        with pytest.raises(ValueError, match=r"messages\[0\], part 0"):
            list_messages([{"role": "user", "content": [entry]}], EpisodePictures(reader))


@pytest.mark.parametrize(
    ("value", "why"),
    [
        (b"no picture", "is no picture"),
        (encode(draw_picture(0))[:200], "broken or cut off"),
        (b"\0" * (64 * 2**20 + 1), "more than 64 MiB"),
        (np.zeros((1, 999, 3), np.uint8), "more than 200 times the other"),
        (np.zeros((2**13, 2**13, 3), np.uint8), "make it smaller"),
        (None, "without a picture"),
        (3, "is int"),
    ],
)
def test_bad_pictures_name_their_part(reader: PictureReader, value: Any, why: str) -> None:
    messages = [{"role": "user", "content": ["text", *show(value)[0]["content"]]}]
    with pytest.raises((ValueError, TypeError), match=rf"messages\[0\], part 1.*{why}"):
        list_messages(messages, EpisodePictures(reader))


def test_a_message_has_a_limit_of_pictures(reader: PictureReader) -> None:
    with pytest.raises(ValueError, match=r"messages\[0\] has 65 pictures: expected at most 64"):
        list_messages(show(*[draw_picture(0)] * 65), EpisodePictures(reader))


@pytest.mark.parametrize(
    "message",
    [
        {"role": "tool", "name": "search", "content": f"a {MARK} b"},
        {"role": "user", "content": [{"type": "text", "text": "<|video_pad|>"}]},
        {"role": "user", "content": "x", "name": MARK},
        {"role": "system", "content": [MARK, {"type": "image", "image": draw_picture(0)}]},
    ],
)
def test_a_mark_in_a_text_is_an_error(reader: PictureReader, message: dict[str, Any]) -> None:
    role = message["role"]
    with pytest.raises(ValueError, match=rf"messages\[1\], of the role '{role}', holds the text '<\|(image|video)_pad"):
        list_messages([{"role": "user", "content": "x"}, message], EpisodePictures(reader))
    list_messages([{"role": "user", "content": MARK}], EpisodePictures())  # a model of text


def test_ids_of_pictures_without_pictures_are_errors(reader: PictureReader) -> None:
    with pytest.raises(ValueError, match="prompt has 0 pictures"):
        EpisodePictures(reader).check_ids(np.array([20, 5, 21]))


def test_a_run_that_cannot_show_them_says_why(reader: PictureReader) -> None:
    with pytest.raises(RefusedPictureError, match=r"messages\[0\] has a picture: not with this engine"):
        list_messages(show(draw_picture(0)), EpisodePictures(reader, "not with this engine"))


def call(tool: Any, pictures: EpisodePictures | None) -> dict[str, Any]:
    nothing = np.empty(0, np.int64)
    calls = (ToolCall("crop", {}, "call00000"),)
    reply = Reply("", "", None, calls, "stop", nothing, nothing.astype(np.float32))
    (message,) = asyncio.run(Tools([tool]).answer(reply, pictures))
    return message


def test_results_of_tools_show_pictures(reader: PictureReader) -> None:
    for result in [draw_picture(0), show(draw_picture(0))[0]["content"], show(draw_picture(0))[0]["content"][0]]:

        def crop(shown: Any = result) -> Any:
            """Crop.

            Args:
                shown: the picture.
            """
            return shown

        content = call(crop, EpisodePictures(reader))["content"]
        assert [entry.keys() for entry in content] == [{"type", "digest"}]
        assert isinstance(call(crop, None)["content"], str)


def test_a_bad_picture_of_a_tool_is_a_message_to_the_policy(reader: PictureReader) -> None:
    def crop() -> Any:
        """Crop."""
        return show("/etc/passwd")[0]["content"]

    assert "no file or address of a message is opened" in call(crop, EpisodePictures(reader))["content"]
    with pytest.raises(RefusedPictureError, match="not here"):
        call(crop, EpisodePictures(reader, "not here"))


def test_rows_show_their_pictures(reader: PictureReader) -> None:
    rows = [{"prompt": "how many?", "images": [draw_picture(0)]}, {"prompt": "none"}]
    first, second = load_rows(rows, reader=reader)
    assert first.source[0]["content"][0]["digest"] == first.pictures[0].digest
    assert second.pictures == ()
    with pytest.raises(ValueError, match=r"prompts\[0\] has pictures and no prompt"):
        load_rows([{"images": [draw_picture(0)]}], reader=reader)
    with pytest.raises(ValueError, match="column 'images' holds .*the reason"):
        load_rows(rows, no_pictures="the reason")


def test_pictures_are_marked_in_their_order(reader: PictureReader) -> None:
    first, second = (reader.read(draw_picture(seed), Path(), "picture") for seed in (0, 1))
    ids = np.concatenate([[3, 20], first.token_ids, [21], second.token_ids, [22]])
    marks = mark_pictures(ids, [first, second])
    assert np.flatnonzero(~marks).tolist() == [0, 1, 2 + len(first.token_ids), len(ids) - 1]
    with pytest.raises(ValueError, match="ids of picture 2"):
        mark_pictures(ids, [first, second, first])


async def echo(row: Any, chat: Any) -> float:
    await chat.turn(row["prompt"])
    await chat.turn([{"role": "user", "content": row["later"]}])
    return 1.0


def make_trainer(vlm: Any, folder: Path, **options: Any) -> GRPO:
    model, processor = vlm
    options = {"max_new_tokens": 3, "log_to": (), "group_size": 2, "prompts_per_step": 1, **options}
    return GRPO(model, processor=processor, environment=echo, output_dir=str(folder), **options)


def test_a_mark_fails_the_episode(vlm: Any, tmp_path: Path) -> None:
    rows = [{"prompt": "x", "later": MARK}]
    with pytest.raises(EpisodeError, match=r"messages\[0\], of the role 'user', holds the text '<\|image_pad\|>'"):
        make_trainer(vlm, tmp_path).evaluate_sets(rows, samples=1)
    trainer = make_trainer(vlm, tmp_path, on_environment_error="end")
    scored = trainer.evaluate_sets([*rows, {"prompt": "x", "later": "y"}], samples=1)[""][1]
    reasons = [group.group.completions[0].episode.stop_reason for group in scored]
    assert reasons == ["environment_error", "completed"]


@pytest.mark.parametrize(
    "options",
    [{"async_steps": 1}, {"partial_rollout_turns": 1}, {"compact_at_tokens": 400}],
)
def test_options_that_cannot_show_them_are_refused_early(vlm: Any, tmp_path: Path, options: dict[str, Any]) -> None:
    (name,) = options
    trainer = make_trainer(vlm, tmp_path, **options)
    with pytest.raises(ValueError, match=rf"pictures in episodes of several turns are not supported with {name}"):
        trainer.train([{"prompt": "x", "images": [draw_picture(0)], "later": "y"}])
