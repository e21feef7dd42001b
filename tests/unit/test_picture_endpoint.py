"""Pictures at the OpenAI-compatible endpoint of an episode: data URLs, and errors in OpenAI's form."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlox_grpo import GRPO
from rlox_grpo.prompts.pictures import encode_png
from tiny_vlms import draw_picture, make_tiny_vlm

openai = pytest.importorskip("openai")
pytestmark = pytest.mark.usefixtures("one_thread")


def make_url(picture: Any) -> str:
    return "data:image/png;base64," + base64.b64encode(encode_png(picture)).decode()


def part(url: Any, **more: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url, **more}}


def play(environment: Any, folder: Path, rows: Any, **options: Any) -> Any:
    model, processor = make_tiny_vlm("qwen3_vl")
    options = {"max_new_tokens": 4, "max_turns": 9, "log_to": (), "group_size": 2, "prompts_per_step": 1, **options}
    trainer = GRPO(model, processor=processor, environment=environment, output_dir=str(folder), **options)
    scored = trainer.evaluate_sets(rows, samples=2)[""][1]
    return [completion for group in scored for completion in group.group.completions]


async def by_turns(row: Any, chat: Any) -> float:
    await chat.turn(row["prompt"])
    later = [{"type": "text", "text": "now "}, {"type": "image", "image": draw_picture(row["later"])}]
    reply = await chat.turn([{"role": "user", "content": later}])
    await chat.turn("and?")
    return float(len(reply.text))


async def by_client(row: Any, chat: Any) -> float:
    async with openai.AsyncOpenAI(base_url=chat.base_url, api_key=chat.api_key, max_retries=0) as client:

        async def ask(**options: Any) -> Any:
            create = client.chat.completions.create
            return (await create(model="policy", messages=messages, **options)).choices[0]

        messages: Any = list(row["prompt"])
        messages.append((await ask()).message)
        later = [{"type": "text", "text": "now "}, part(make_url(draw_picture(row["later"])), detail="auto")]
        messages.append({"role": "user", "content": later})
        reply = await ask(logprobs=True)
        messages += [reply.message, {"role": "user", "content": "and?"}]
        await ask()
    return float(len(reply.message.content or ""))


ROWS = [{"prompt": "look", "images": [draw_picture(0)], "later": 2}, {"prompt": "text", "images": [], "later": 2}]


def test_the_same_tokens_and_log_probs_as_the_function(tmp_path: Path) -> None:
    expected, found = play(by_turns, tmp_path, ROWS), play(by_client, tmp_path, ROWS)
    for one, other in zip(found, expected, strict=True):
        assert not one.branches
        assert one.token_ids.tolist() == other.token_ids.tolist()
        assert np.allclose(one.log_probs, other.log_probs, rtol=0, atol=1e-5)  # decoded in other batches
        assert [each.digest for each in one.pictures] == [each.digest for each in other.pictures]
    assert [len(completion.pictures) for completion in found] == [2, 2, 1, 1]


SECRET = "/etc/hostname"
WRONG: list[tuple[Any, str, str | None]] = [
    (part("https://example.org/a.png"), "without a data URL", "messages[0].content[1]"),
    (part(SECRET), "no address and no file is opened", "messages[0].content[1]"),
    (part(f"file://{SECRET}"), "without a data URL", "messages[0].content[1]"),
    ({"type": "image_url", "image_url": SECRET}, "without a data URL", "messages[0].content[1]"),
    ({"type": "image", "image": SECRET}, "without a data URL", "messages[0].content[1]"),
    ({"type": "image", "path": SECRET}, "without a data URL", "messages[0].content[1]"),
    (part(3), "without a data URL", "messages[0].content[1]"),
    (part(make_url(draw_picture(0)), detail="low"), "detail must be 'auto'", "messages[0].content[1]"),
    (part("data:image/png;base64,!!"), "is a data URI that is not base64", None),
    (part("data:image/png,x"), "expected 'data:image/png;base64,'", None),
    (part("data:image/png;base64,aGk="), "is no picture", None),
    (part(make_url(draw_picture(0, 1, 999))), "more than 200 times the other", None),
    (part(make_url(draw_picture(0))[:300]), "", None),
    ({"type": "image", "digest": "0" * 32}, "has the digest of a picture that this episode has not shown", None),
    (
        {"type": "input_audio", "input_audio": {"data": "x"}},
        "it has a part of the type 'input_audio', and video",
        "messages[0]",
    ),
    ({"type": "text", "text": "<|image_pad|>"}, "which the model's tokenizer reads as a picture", None),
]


def test_bad_pictures_are_errors_in_openais_form(tmp_path: Path) -> None:
    async def ask(row: Any, chat: Any) -> float:
        async with openai.AsyncOpenAI(base_url=chat.base_url, api_key=chat.api_key, max_retries=0) as client:
            for entry, said, param in WRONG:
                content: Any = [{"type": "text", "text": "a"}, entry]
                messages = [{"role": "user", "content": content}]
                with pytest.raises(openai.BadRequestError) as caught:
                    await client.chat.completions.create(model="policy", messages=messages)
                assert said in caught.value.body["message"]
                assert "messages[0]" in caught.value.body["message"]
                assert caught.value.body["type"] == "invalid_request_error"
                assert caught.value.body["param"] == param
            for role in ("system", "assistant"):
                messages = [{"role": role, "content": [part(make_url(draw_picture(0)))]}]
                with pytest.raises(openai.BadRequestError, match="'image_url' in messages of the user and of tools"):
                    await client.chat.completions.create(model="policy", messages=messages)
        await chat.turn("x")
        return 1.0

    completions = play(ask, tmp_path, [{"prompt": "x"}])
    assert all(completion.episode.stop_reason == "completed" for completion in completions)


def test_a_picture_that_is_sent_again_is_decoded_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from rlox_grpo.prompts import pictures

    decoded = []
    read = pictures.read_picture
    monkeypatch.setattr(pictures, "read_picture", lambda *args: decoded.append(args[2]) or read(*args))
    play(by_client, tmp_path, ROWS[1:])
    assert sum(where.startswith("messages") for where in decoded) == 2  # once in each of two episodes
