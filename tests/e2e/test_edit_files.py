"""The example of an agent that edits files: its tools, the sandbox, and the optimum of its episodes."""

import asyncio
import json
import sys
from pathlib import Path

import numpy as np
import pytest

EXAMPLES = str(Path(__file__).parents[2] / "examples")
sys.path.insert(0, EXAMPLES)  # as for a script that runs there; not for later tests, because rlox.py is there too
try:
    import edit_files
finally:
    sys.path.remove(EXAMPLES)

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the sandbox needs Linux")


def play(row, calls):
    """The results of the calls, and the reward."""

    async def act():
        project = edit_files.Project()
        assert project.reset(**row) == row["task"]
        results = []
        for name, *arguments in calls:
            result = getattr(project, name)(*arguments)
            results.append(await result if asyncio.iscoroutine(result) else result)
        return results, await project.get_reward()

    return asyncio.run(act())


def test_four_replies_mend_every_project():
    rows, held_out = edit_files.make_rows(0)
    assert not {json.dumps(row) for row in rows} & {json.dumps(row) for row in held_out}
    for row in held_out[:20]:
        right = dict(zip(edit_files.FILES, row["task"].split("\n"), strict=True))
        (failed,), reward = play(row, [("test",)])
        assert reward == 0.0
        name = failed.removesuffix(edit_files.FAILS)
        assert row["files"][name] != right[name]
        assert [file for file in right if row["files"][file] != right[file]] == [name]
        results, reward = play(row, [("read", name), ("edit", name, right[name], row["files"][name]), ("test",)])
        assert results == [row["files"][name], edit_files.EDITED, edit_files.PASSED]
        assert reward == 1.0


def test_what_a_policy_may_write_is_an_answer_or_no_reward():
    row = edit_files.make_rows(0)[1][0]
    odd = [("read", "z"), ("edit", "z", "x", "y"), ("edit", "a", "x", "not there")]
    assert play(row, odd) == ([edit_files.NO_FILE, edit_files.NO_FILE, edit_files.NO_TEXT], 0.0)
    for text in ("while True: pass", "import os; os._exit(0)", "def b(x): return 1", "'''"):
        assert play(row, [("edit", "a", text, row["files"]["a"])])[1] == 0.0


def test_the_scripted_player_calls_what_there_is():
    tokenizer = edit_files.build()
    rng = np.random.default_rng(0)
    for _ in range(50):
        messages, episode = edit_files.draw_conversation(rng)
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True) + episode
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
        for part in episode.split("<assistant>")[:-1]:
            call = json.loads(part.partition("<eos>")[0])
            assert (
                set(call["arguments"])
                == {"test": set(), "read": {"file"}, "edit": {"file", "new", "old"}}[call["name"]]
            )
