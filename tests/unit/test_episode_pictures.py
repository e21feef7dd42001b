"""Messages with pictures in episodes: what is read, what is refused, and marks of pictures in texts."""

from __future__ import annotations

import asyncio
import base64
import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rlox_grpo import GRPO
from rlox_grpo.batch.pictures import mark_pictures
from rlox_grpo.environments import Reply, ToolCall
from rlox_grpo.errors import EpisodeError
from rlox_grpo.prompts.load import load_rows
from rlox_grpo.prompts.pictures import PictureReader
from rlox_grpo.rollout.engines.turns import SampledTurn, TurnRequest
from rlox_grpo.rollout.episodes.conversation import Conversation
from rlox_grpo.rollout.episodes.messages import list_messages
from rlox_grpo.rollout.episodes.partial import Gate, StartedEpisode
from rlox_grpo.rollout.episodes.pictures import EpisodePictures, RefusedPictureError, RefusedPictures
from rlox_grpo.rollout.episodes.template import Template
from rlox_grpo.rollout.episodes.tools import Tools
from rlox_grpo.rollout.serialize import decode_group, encode_group
from rlox_grpo.run.metrics import picture_metrics
from rlox_grpo.types import Completion, Episode, Picture, Prompt, RolloutGroup, ScoredGroup
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


@pytest.mark.parametrize("message", [{"images": [draw_picture(0)]}, {"content": [{"type": "video"}]}])
def test_media_beside_the_parts_of_pictures_are_errors(reader: PictureReader, message: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"messages\[0\] has .*a picture is a part of the type 'image'.*and video"):
        list_messages([{"role": "user", "content": "x", **message}], EpisodePictures(reader))


def test_ids_of_pictures_without_pictures_are_errors(reader: PictureReader) -> None:
    with pytest.raises(ValueError, match="prompt has 0 pictures"):
        EpisodePictures(reader).check_ids(np.array([20, 5, 21]))


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


@pytest.mark.parametrize("name", ["crop", MARK])
@pytest.mark.parametrize("error", [None, f"no argument {MARK}"])
def test_a_mark_that_a_tool_repeats_is_left_out(name: str, error: str | None, reader: PictureReader) -> None:
    """A policy could end the run otherwise, by a call that names a mark, prints one or has one in its arguments."""

    def crop() -> str:
        return f"a {MARK} b"

    nothing = np.empty(0, np.int64)
    calls = (ToolCall(name, {}, "call00000"),)
    reply = Reply("", "", None, calls, "stop", nothing, nothing.astype(np.float32), parse_error=error)
    pictures = EpisodePictures(reader)
    (message,) = list_messages(asyncio.run(Tools([crop]).answer(reply, pictures)), pictures)
    shown = (
        "error: no argument " if error else "a  b" if name == "crop" else "error: there is no tool ''; there are crop"
    )
    assert message["content"] == shown


def test_a_bad_picture_of_a_tool_is_a_message_to_the_policy(reader: PictureReader) -> None:
    def crop() -> Any:
        """Crop."""
        return show("/etc/passwd")[0]["content"]

    assert "no file or address of a message is opened" in call(crop, EpisodePictures(reader))["content"]
    with pytest.raises(RefusedPictureError, match="not here"):
        call(crop, RefusedPictures("not here"))


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


def make_completion(pictures: tuple[Picture, ...] | None, **fields: Any) -> Completion:
    ids = np.array([8, 9], np.int64)
    return Completion(ids, np.zeros(2, np.float32), "stop", "x", pictures=pictures, **fields)


def test_pictures_travel_with_a_group(vlm: Any, reader: PictureReader) -> None:
    """A PNG for each distinct picture but those of the row; the record of another process has the same tensors."""
    of_row, later = (reader.read(draw_picture(seed), Path(), "x") for seed in (21, 22))
    asked = Prompt(np.array([1]), 0, pictures=(of_row,))
    shown = replace(asked, pictures=(later,), source="x")
    rows = (make_completion((of_row, later)), make_completion((), prompt_ids=np.array([1])))
    episode = Episode("completed", 1.0)
    group = RolloutGroup(shown, (replace(rows[0], episode=episode, branches=(rows[1],)), make_completion(None)))
    record = json.loads(json.dumps(encode_group(group, asked)))
    assert list(record["pictures"]) == [later.digest]
    other = PictureReader(vlm[1], vlm[1].tokenizer, image_token_id=5, excluded_ids=(5, 6))
    back = decode_group(record, asked, other)
    first, second = back.completions
    assert [[p.digest for p in row.pictures] for row in (first, *first.branches)] == [[of_row.digest, later.digest], []]
    assert second.pictures is None
    (read,) = back.prompt.pictures
    assert (read.digest, read.num_features, read.token_ids.tolist()) == (
        later.digest,
        later.num_features,
        later.token_ids.tolist(),
    )
    assert first.pictures[1] is read
    for name, tensor in later.read().items():
        assert torch.equal(read.read()[name], tensor)
    assert encode_group(group)["pictures"].keys() == {of_row.digest, later.digest}
    with pytest.raises(ValueError, match=r"prompts\[0\] has 1 stored pictures, and the model is trained on text"):
        decode_group(record, asked)
    with pytest.raises(ValueError, match=f"the picture {of_row.digest} is shown in a stored rollout, and is not"):
        decode_group(record, replace(asked, pictures=()), other)


def test_a_stored_picture_is_that_of_its_digest(vlm: Any, reader: PictureReader) -> None:
    picture = reader.read(draw_picture(23), Path(), "x")
    other = PictureReader(vlm[1], vlm[1].tokenizer, image_token_id=5, excluded_ids=(5, 6))
    wrong = other.restore(picture.digest, picture.token_ids, picture.num_features, encode(draw_picture(24)))
    with pytest.raises(ValueError, match=f"the stored picture {picture.digest} has changed"):
        wrong.read()


def test_a_recorded_reply_is_that_to_its_pictures(reader: PictureReader) -> None:
    """Equal token ids with another picture are another context, whose reply is sampled again."""
    first, second = (reader.read(draw_picture(seed), Path(), "x") for seed in (25, 26))
    episode = StartedEpisode()
    gate = Gate(1, 0, {(0, 0): episode})
    requests = [TurnRequest((0, 0), 0, first.token_ids, 4, pictures=(picture,)) for picture in (first, second)]
    gate.record(requests[0], SampledTurn(np.array([2]), np.zeros(1, np.float32), stopped=True))
    assert gate.find(requests[0]) is not None
    assert gate.find(requests[1]) is None


def test_marks_that_the_policy_wrote_are_left_out_of_later_contexts(reader: PictureReader) -> None:
    """A reply that spells a mark would be read as a picture where its text is encoded again."""
    pictures = EpisodePictures(reader)
    assert pictures.drop_marks({"a": [f"x{MARK}y", 3]}) == {"a": ["xy", 3]}
    assert pictures.drop_marks(f"{MARK[:5]}{MARK}{MARK[5:]}") == ""
    assert EpisodePictures().drop_marks(MARK) == MARK
    conversation = Conversation(Template(reader.processor.tokenizer), (), pictures)
    new = [
        {"role": "user", "content": [{"type": "image", "image": draw_picture(0)}]},
        {"role": "assistant", "content": f"a {MARK}", "reasoning_content": MARK},
        {"role": "user", "content": "b"},
    ]
    ids = conversation.encode(list_messages(new, pictures))
    assert int((ids == 5).sum()) == pictures.list_shown(list_messages(new, pictures))[0].num_features


def test_a_summary_that_spells_a_mark(vlm: Any, tmp_path: Path) -> None:
    """Compaction puts the policy's text into a user message: a mark in it is left out, and the episode goes on."""

    async def talk(row: Any, chat: Any) -> float:
        say = chat._sample

        async def spell(request: Any) -> SampledTurn:
            turn = await say(request)
            text = vlm[1].tokenizer.backend_tokenizer.token_to_id
            spelled = [text(letter) for letter in MARK] + [2]
            return replace(turn, token_ids=np.array(spelled), log_probs=np.full(len(spelled), -1, np.float32))

        chat._sample = spell
        await chat.turn(row["prompt"])
        await chat.turn([{"role": "user", "content": [{"type": "image", "image": draw_picture(0)}]}])
        await chat.turn("more")
        return float(len(chat.compactions))

    trainer = GRPO(
        vlm[0], processor=vlm[1], environment=talk, output_dir=str(tmp_path / "x"), log_to=(), max_new_tokens=20,
        group_size=2, prompts_per_step=1, compact_at_tokens=40, max_turns=9,
    )  # fmt: skip
    (group,) = trainer.evaluate_sets([{"prompt": "x"}], samples=1)[""][1]
    assert group.group.completions[0].episode.reward >= 1


def test_metrics_count_the_pictures_of_episodes(reader: PictureReader) -> None:
    first, second = (reader.read(draw_picture(seed), Path(), "x") for seed in (27, 28))
    prompt = Prompt(np.arange(9), 0, pictures=(first,))
    rows = make_completion((first, second)), make_completion(None), make_completion((second, second))
    group = RolloutGroup(prompt, (replace(rows[0], branches=(rows[2],)), rows[1]))
    ones = np.ones(2, np.float32)
    metrics = picture_metrics([ScoredGroup(group, ones, {"a": ones})])
    assert metrics["images/shown"] == 5
    assert metrics["images/distinct"] == 2
    assert metrics["images/per_prompt"] == 1
    assert metrics["images/tokens"] == len(first.token_ids)
    bare = replace(group, prompt=replace(prompt, pictures=()), completions=(make_completion(None),))
    assert picture_metrics([ScoredGroup(bare, ones[:1], {"a": ones[:1]})]) == {}
