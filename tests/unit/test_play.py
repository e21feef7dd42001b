"""`rlox-grpo play`: an environment without a model."""

import asyncio
import json
import sys

import pytest

from rlox_grpo.cli import main
from rlox_grpo.config.records import EpisodeConfig
from rlox_grpo.environments import Outcome
from rlox_grpo.rollout.episodes.chat import Chat
from rlox_grpo.rollout.episodes.play import NoReplyError, play_episode

MODULE = '''
from rlox_grpo.environments import EpisodeEnded, Outcome


async def guess(row, chat):
    message = f"a number from 1 to {row['top']}"
    for guesses in range(1, 4):
        reply = await chat.turn(message)
        if reply.text == str(row["secret"]):
            return Outcome(1.0, metrics={"guesses": guesses})
        message = "higher" if int(reply.text) < row["secret"] else "lower"
    return 0.0


def guess_in_a_thread(row, chat):
    return float(chat.turn("yes or no").text == "yes")


class Walk:
    def reset(self, goal):
        self.place, self.goal = 0, goal
        return "at 0"

    def step(self, reply):
        self.place += 1 if reply.text == "right" else -1
        return f"at {self.place}", float(self.place == self.goal), self.place == self.goal


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: The first number.
        b: The second number.
    """
    return a + b


class Sums:
    """TRL's form."""

    def reset(self):
        self.total = 0
        return "make 5"

    def more(self, amount: int) -> str:
        """Add an amount.

        Args:
            amount: How much.
        """
        self.total += amount
        return f"\\x1b[31mtotal {self.total}"

    def get_reward(self):
        return float(self.total == 5)


async def seed_of(row, chat):
    await chat.turn(str(chat.seed), stop="!")
    return 0.0


async def silent(row, chat):
    return 1.0


async def odd_rewards(row, chat):
    await chat.turn("x")
    return Outcome(1.0, turn_rewards=[0.5, 0.5])


async def catches(row, chat):
    try:
        while True:
            await chat.turn("on")
    except EpisodeEnded as ended:
        return Outcome(0.25)
'''
NAME = "environments_that_a_test_plays"


@pytest.fixture(autouse=True)
def module(tmp_path, monkeypatch):
    (tmp_path / f"{NAME}.py").write_text(MODULE)
    rows = [{"top": 9, "secret": 7}, {"top": 9, "secret": 2, "goal": 2, "prompt": "2 + 3?"}]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    sys.modules.pop(NAME, None)


def play(environment, replies, *more):
    with open("replies.txt", "w", encoding="utf-8") as file:
        file.write("".join(f"{reply}\n" for reply in replies))
    return main(["play", f"{NAME}:{environment}", "--script", "replies.txt", *more])


def test_a_script_plays_a_function(capsys):
    assert play("guess", ["5", "8", "7"], "--data", "rows.jsonl") == 0
    assert capsys.readouterr().out.splitlines() == [
        "user: a number from 1 to 9",
        "policy: 5",
        "user: higher",
        "policy: 8",
        "user: lower",
        "policy: 7",
        "turns        3",
        "stop reason  completed",
        "reward       1",
        "metric       guesses 3",
    ]
    assert play("guess", ["2", "3"], "--data", "rows.jsonl", "--row", "1") == 0
    assert "replies.txt: 1 lines were not read" in capsys.readouterr().out
    assert play("guess", ["5", "6"], "--data", "rows.jsonl", "--max_turns", "2") == 0
    shown = capsys.readouterr().out
    assert "ended: max_turns\nturns        2\nstop reason  max_turns\nreward       0\n" in shown


def test_a_script_plays_a_class_and_a_sync_function(capsys):
    assert play("Walk", ["right", "left", "right", "right"], "--data", "rows.jsonl", "--row", "1") == 0
    shown = capsys.readouterr().out
    assert "reward       1\nby turn      0  0  0  1\n" in shown
    assert play("guess_in_a_thread", ["yes"]) == 0
    assert "reward       1" in capsys.readouterr().out


def test_tools_are_listed_and_called(capsys):
    call = '<tool_call>{"name": "more", "arguments": {"amount": %d}}</tool_call>'
    assert play("Sums", [call % 2 + call % 3, '{"name": "more"}', "done"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("tool more(amount): Add an amount.\nuser: make 5\n")
    assert "tool more: \\x1b[31mtotal 2\ntool more: \\x1b[31mtotal 5\n" in shown
    assert "tool more: error: missing a required argument" in shown
    assert "reward       1\n" in shown
    assert main(["play", f"{NAME}:guess", "--tools", f"{NAME}:nothing"]) == 2
    assert "has no attribute 'nothing'" in capsys.readouterr().err


def test_a_person_plays(capsys, monkeypatch):
    replies = iter(["3", "2"])
    monkeypatch.setattr("builtins.input", lambda prompt: next(replies))
    assert main(["play", f"{NAME}:guess", "--data", "rows.jsonl", "--row", "1"]) == 0
    assert "reward       1" in capsys.readouterr().out

    def end(prompt):
        raise EOFError

    monkeypatch.setattr("builtins.input", end)
    assert main(["play", f"{NAME}:guess", "--data", "rows.jsonl"]) == 0
    assert "stopped: the episode had not ended" in capsys.readouterr().out


def test_the_seed_and_stop_strings(capsys):
    assert play("seed_of", ["hello! and more"], "--seed", "12") == 0
    assert "user: 12\n" in capsys.readouterr().out
    said = []

    async def stops(row, chat):
        said.append((await chat.turn("x", stop="!")).text)
        return None

    assert play_episode(stops, {}, lambda: "hello! and more", lambda line: None) == Outcome(None)
    assert said == ["hello!"]


@pytest.mark.parametrize(
    ("environment", "replies", "more", "message"),
    [
        ("guess", ["5"], ["--data", "rows.jsonl"], "replies.txt ended before the episode"),
        ("guess", ["five"], ["--data", "rows.jsonl"], "invalid literal for int()"),
        ("guess", ["5"], ["--data", "rows.jsonl", "--row", "2"], "--row 2: rows.jsonl has rows 0 to 1"),
        ("Walk", ["left"], [], "the row has no column 'goal', which Walk needs; it has none: give rows with --data"),
        ("silent", [], [], "ended before the policy had a turn"),
        ("odd_rewards", ["x"], [], "turn_rewards has 2 values for 1 turns"),
        ("guess", [], ["--max_trns", "2"], "did you mean 'max_turns'"),
        ("nowhere", [], [], "has no attribute 'nowhere'"),
    ],
)
def test_mistakes(environment, replies, more, message, capsys):
    assert play(environment, replies, *more) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    if environment == "guess" and replies == ["five"]:
        assert "int(reply.text) < row" in captured.out  # the environment's own line, in the traceback


def test_a_caught_limit_keeps_its_reason(capsys):
    assert play("catches", ["a", "b"], "--max_turns", "2") == 0
    assert "stop reason  max_turns\nreward       0.25" in capsys.readouterr().out


def test_no_further_reply_is_an_error_of_its_own():
    def none():
        raise NoReplyError

    async def one(row, chat):
        await chat.turn("x")

    with pytest.raises(NoReplyError):
        play_episode(one, {}, none, lambda line: None)


def play_turns(*turns, **options):
    """Play an environment that makes these calls of ``chat.turn``; returns what is shown."""
    said = []

    async def makes(row, chat):
        for messages, given in turns:
            await chat.turn(messages, **given)

    def tool(x: int) -> int:
        """A tool.

        Args:
            x: A number.
        """
        return x

    turns = [(messages, {**given, **({"tools": [tool]} if "tools" in given else {})}) for messages, given in turns]
    play_episode(makes, {}, lambda: "yes", said.append, config=EpisodeConfig.create(**options))
    return said


@pytest.mark.parametrize(
    ("turns", "message"),
    [
        ([([{"role": "user"}], {})], r"messages\[0\] is .*: expected"),
        ([([{"role": "assistant", "content": "x"}], {})], "the policy writes that one"),
        ([("\ud800", {})], "lone surrogate"),
        ([("x", {"max_new_tokens": 0})], "max_new_tokens is 0"),
        ([("x", {}), ("y", {"tools": 1})], "at the first turn only"),
        ([("x" * 2_000_001, {})], "has 2000001 characters"),
    ],
)
def test_a_played_chat_refuses_what_a_sampled_one_refuses(turns, message):
    with pytest.raises(ValueError, match=message):
        play_turns(*turns)


def test_a_played_chat_cuts_long_observations_as_a_sampled_one_does():
    parts = [{"role": "user", "content": [{"type": "text", "text": "b" * 12}]}]
    said = play_turns(("a" * 12, {}), ("a" * 12, {}), (parts, {}), max_observation_chars=8)
    shown = [line for line in said if line.startswith("user: ")]
    assert shown[0] == "user: " + "a" * 12
    assert shown[1] == "user: aaaa\n[… 4 characters cut …]\naaaa"
    assert repr("bbbb\n[… 4 characters cut …]\nbbbb") in shown[2]
    assert "b" * 5 not in shown[2]


def test_a_played_chat_refuses_a_turn_beside_another_as_a_sampled_one_does():
    async def at_once(row, chat):
        await asyncio.gather(chat.turn("x"), chat.turn("y"))

    with pytest.raises(ValueError, match="another turn or its tools were under way"):
        play_episode(at_once, {}, lambda: "yes", lambda line: None)


def test_a_played_chat_has_every_attribute_of_a_sampled_one():
    seen = []

    async def looks(row, chat):
        await chat.turn([{"role": "system", "content": "s"}, {"role": "user", "content": "x"}])
        seen.append((chat.prompt_messages, chat.parse_errors, chat.cancelled_calls, chat.compactions, chat.rows()))
        reply = await chat.complete([*chat.messages, {"role": "user", "content": "y"}])
        assert not chat.branch_messages
        await chat.complete([{"role": "user", "content": "z"}])
        seen.append((reply.text, len(chat.branch_messages), len(chat.messages), chat.turns, chat.prompt_messages))
        missing = [name for name in dir(Chat) if not name.startswith("_") and name not in dir(chat)]
        missing += [name for name in LIVE if not hasattr(chat, name)]
        for ask in (lambda: chat.api_key, lambda: chat.base_url):
            with pytest.raises(ValueError, match="use rlox-grpo eval"):
                ask()
        with pytest.raises(ValueError, match="needs a tokenizer"):
            await chat.complete_ids([1])
        return float(not missing)

    assert play_episode(looks, {}, lambda: "yes", lambda line: None).reward == 1.0
    assert seen == [(2, 0, 0, [], []), ("yes", 1, 2, 3, 2)]


LIVE = (
    "seed", "tools", "ended", "parse_errors", "compactions", "has_reported_end", "abandoned", "waiting_since",
    "calling_since",
)  # fmt: skip
"""Attributes of a :class:`Chat` that its constructor sets."""


def test_a_recorded_episode_is_played_again(module, capsys):
    record = ["--record", "played.jsonl"]
    assert play("guess", ["5", "8", "7"], "--data", "rows.jsonl", *record) == 0
    assert (
        play("Walk", ["right"] * 3, "--data", "rows.jsonl", "--row", "1", "--max_turns", "2", "--record", "w.jsonl")
        == 0
    )
    assert play("guess", ["2"], "--data", "rows.jsonl", "--row", "1", "--seed", "3", *record) == 0
    rows = [json.loads(line) for line in (module / "played.jsonl").read_text().splitlines()]
    assert [row["replies"] for row in rows] == [["5", "8", "7"], ["2"]]
    assert rows[0]["outcome"] == {
        "reward": 1.0,
        "turn_rewards": None,
        "stop_reason": "completed",
        "metrics": {"guesses": 3},
    }
    capsys.readouterr()
    assert main(["play", f"{NAME}:guess", "--replay", "played.jsonl"]) == 0
    assert capsys.readouterr().out == "all 2 recorded episodes are the same\n"
    assert main(["play", f"{NAME}:Walk", "--replay", "w.jsonl"]) == 0  # with the recorded max_turns
    capsys.readouterr()

    rows[0]["replies"] = ["5", "8"]
    rows[1]["messages"][0]["content"] = "a number\x1b[31m"
    rows[1]["outcome"]["reward"] = 0.5
    (module / "played.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert main(["play", f"{NAME}:guess", "--replay", "played.jsonl"]) == 2
    captured = capsys.readouterr()
    assert captured.out.splitlines() == [
        'episode 0: message 5: {"role": "assistant", "content": "7"} recorded, null now',
        "episode 0: the environment asks for another reply after the 2 recorded ones",
        'episode 1: message 0: {"role": "user", "content": "a number\\u001b[31m"} recorded, '
        '{"role": "user", "content": "a number from 1 to 9"} now',
        "episode 1: reward: 0.5 recorded, 1.0 now",
    ]
    assert "2 of 2 recorded episodes differ" in captured.err


@pytest.mark.parametrize(
    ("line", "more", "message"),
    [
        ("{}", [], "episode 0: row is NoneType, expected dict"),
        ('{"row": {}, "seed": true}', [], "seed is bool, expected int"),
        ("[" * 100_000, [], "played.jsonl"),
        ("not json", [], "played.jsonl"),
        ("", [], "played.jsonl"),
        ("{}", ["--data", "rows.jsonl"], "--data with --replay: the file has the rows"),
    ],
    ids=["empty", "a flag", "deep", "text", "nothing", "data"],
)
def test_a_damaged_record_is_named(line, more, message, module, capsys):
    (module / "played.jsonl").write_text(line + "\n" * bool(line))
    assert main(["play", f"{NAME}:guess", "--replay", "played.jsonl", *more]) == 2
    assert message in capsys.readouterr().err


def test_play_leaves_the_row_as_it_was() -> None:
    async def edits(row, chat):
        row["nums"].pop()
        await chat.turn(row["prompt"])
        chat.messages[0]["content"] = "edited"
        return 1.0 if chat.messages[0]["content"] == "a" else 0.0

    row = {"prompt": [{"role": "user", "content": "a"}], "nums": [1]}
    assert play_episode(edits, row, lambda: "reply", print).reward == 1.0
    assert row == {"prompt": [{"role": "user", "content": "a"}], "nums": [1]}


ZOOM = '''
from PIL import Image


def draw(size):
    return Image.new("RGB", (size, size), (size, 0, 0))


def zoom(side: int):
    """Show the picture larger.

    Args:
        side: pixels of a side.
    """
    return draw(side)


async def look(row, chat):
    reply = await chat.turn(row["prompt"])
    while reply.tool_calls:
        reply = await chat.turn(await chat.call_tools(reply))
    return float(reply.text == row["answer"])
'''


@pytest.fixture
def zoomed(tmp_path, monkeypatch):
    image = pytest.importorskip("PIL.Image")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "zooms", raising=False)
    (tmp_path / "zooms.py").write_text(ZOOM)
    (tmp_path / "data").mkdir()
    image.new("RGB", (4, 4)).save(tmp_path / "data" / "a.png")
    (tmp_path / "data" / "rows.jsonl").write_text(json.dumps({"prompt": "how?", "images": ["a.png"], "answer": "red"}))
    (tmp_path / "replies.txt").write_text('<tool_call>{"name": "zoom", "arguments": {"side": 16}}</tool_call>\nred\n')
    (tmp_path / "data.txt").write_text("red\n")
    return tmp_path


def test_pictures_are_shown_recorded_and_played_again(zoomed, capsys):
    """The row's picture is read beside its file; a second play compares digests, and needs no file."""
    command = ["play", "zooms:look", "--tools", "zooms:zoom"]
    data = ["--data", "data/rows.jsonl", "--script", "replies.txt"]
    assert main([*command, *data, "--record", "p.jsonl"]) == 0
    shown = capsys.readouterr().out
    assert "user: [picture 4 × 4, " in shown
    assert "] how?" in shown
    assert "tool zoom: [picture 16 × 16, " in shown
    assert "reward       1" in shown
    record = json.loads((zoomed / "p.jsonl").read_text())
    assert len(record["pictures"]) == 2
    assert record["messages"][0]["content"][0]["digest"] in record["pictures"]
    (zoomed / "data" / "a.png").unlink()
    assert main([*command, "--replay", "p.jsonl"]) == 0
    (zoomed / "zooms.py").write_text(
        ZOOM.replace("(size, 0, 0)", "(0,  size, 0)")
    )  # of another size than the cached bytecode's source
    sys.modules.pop("zooms")
    capsys.readouterr()
    assert main([*command, "--replay", "p.jsonl"]) == 2
    assert "episode 0: message 2: " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda digest, png: {digest: "!!"}, "p.jsonl, episode 0, picture "),
        (lambda digest, png: {digest: "aGk="}, "is no picture"),
        (lambda digest, png: {"0" * 32: png}, "the file was changed"),
        (lambda digest, png: {digest: 3}, "picture"),
    ],
)
def test_a_damaged_picture_of_a_record_is_named(change, message, zoomed, capsys):
    assert main(["play", "zooms:look", "--data", "data/rows.jsonl", "--script", "data.txt", "--record", "p.jsonl"]) == 0
    record = json.loads((zoomed / "p.jsonl").read_text())
    ((digest, png),) = record["pictures"].items()
    (zoomed / "p.jsonl").write_text(json.dumps({**record, "pictures": change(digest, png)}))
    assert main(["play", "zooms:look", "--replay", "p.jsonl"]) == 2
    assert message in capsys.readouterr().err


def test_pictures_of_a_record_have_a_limit(zoomed, capsys, monkeypatch):
    monkeypatch.setattr("rlox_grpo.rollout.episodes.played_pictures.MAX_BYTES", 10)
    assert main(["play", "zooms:look", "--data", "data/rows.jsonl", "--script", "data.txt", "--record", "p.jsonl"]) == 2
    assert "--record: the pictures of the episode have more than" in capsys.readouterr().err
    assert not (zoomed / "p.jsonl").exists()
