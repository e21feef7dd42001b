"""The study of benches/compaction.py: which turns have no advantage, what is counted, and a small run."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

import numpy as np
import pytest

from rlox_grpo.groups import list_rows

BENCHES = Path(__file__).parents[2] / "benches"


@pytest.fixture
def study(monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path, str(BENCHES)])
    import compaction

    for name, small in {"NUM_TRAIN": 4, "NUM_HELD_OUT": 2, "EVAL_SAMPLES": 1, "WARM_TOKENS": 400}.items():
        monkeypatch.setattr(compaction, name, small)
    return compaction


def test_summaries_after_the_row_was_read_are_counted(study):
    def say(*texts):
        return [{"role": role, "content": text} for text, role in zip(texts, ["user", "assistant"] * 9, strict=False)]

    assert study.list_notes(say("k01=2 a\nk03?", "next", "summary", "k03=1"), "k03=1") == []
    assert study.list_notes(say("k03=1 a\n", "next", "summary", "k01=2", "k05=1", "k03=1"), "k03=1") == [False]
    later = say("k03=1", "summary", "summary", "k03=1", "k05=1", "next", "answer", "summary")
    assert study.list_notes(later, "k03=1") == [True]


def test_a_table_is_longer_than_the_context(study):
    tokenizer = study.build()
    (row,) = study.make_rows(np.random.default_rng(0), 1)
    lengths = [len(tokenizer(chunk + f"{row['answer'][:3]}?")["input_ids"]) for chunk in row["chunks"]]
    assert lengths == [study.MESSAGE_TOKENS - 4] * study.NUM_CHUNKS
    assert sum(lengths) > 1.7 * study.CONTEXT
    assert sum(row["answer"] in chunk for chunk in row["chunks"]) == 1


def test_the_scripted_player_notes_the_row_in_a_share_of_the_summaries(study):
    drawn = [study.draw_conversation(np.random.default_rng(seed), 2) for seed in range(2000)]
    summaries = [chat for chat in drawn if chat[-2]["content"] == study.REQUEST]
    asked = [(chat, chat[-4]["content"][-4:-1]) for chat in summaries]
    read = [(chat, key) for chat, key in asked if any(f"{key}=" in m["content"] for m in chat[:-2])]
    noted = np.mean([chat[-1]["content"].startswith(key) for chat, key in read])
    newest = 1 / 8.5  # of eight rows, and in half of the conversations a noted one
    assert noted == pytest.approx(study.GOOD_SUMMARIES + (1 - study.GOOD_SUMMARIES) * newest, abs=0.06)
    assert len(read) / len(summaries) == pytest.approx(0.8, abs=0.05)


def test_a_study_masks_exactly_the_summaries_and_is_continued(study, tmp_path, monkeypatch, capsys):
    """The first steps of the three arms: in ``masked``, what follows the request has an advantage of 0."""
    computed = []
    compute = study.compute_advantages

    def record(groups, *, masks):
        advantages = compute(groups, masks=masks)
        computed.append((groups, advantages, masks))
        return advantages

    monkeypatch.setattr(study, "compute_advantages", record)
    monkeypatch.setattr(study, "read_table", pay_by_chance(study.read_table))
    small = ["--out", str(tmp_path), "--warm-steps", "2", "--set", "max_steps=1", "prompts_per_step=2"]
    study.main([*small, "--seeds", "0"])
    cells = [json.loads(line) for line in (tmp_path / "tries.jsonl").read_text().splitlines()]
    assert [(cell["arm"], cell["steps"]) for cell in cells] == [("trained", 1), ("masked", 1), ("none", 1)]
    assert "| `masked` | 1 |" in capsys.readouterr().out

    tokenizer = study.build()
    request = tokenizer(f"<user>{study.REQUEST}<assistant>")["input_ids"]
    for groups, advantages, masks in computed:
        for group, shares in zip(groups, advantages, strict=True):
            assert shares.ndim == 1 + masks
            for index, completion in enumerate(group.group.completions):
                prompt = group.group.prompt.token_ids
                is_summary = [
                    [*(prompt if row.prompt_ids is None else row.prompt_ids), *row.token_ids[:start]][-3:] == request
                    for row in list_rows(completion)
                    for start in row.turns
                ]
                if masks:
                    assert sum(is_summary) == 2
                    turns = shares[index][: len(is_summary)]
                    assert np.isnan(shares[index][len(is_summary) :]).all()
                    assert ((turns == 0) == is_summary).all()
    assert {masks for _, _, masks in computed} == {False, True}


def pay_by_chance(environment):
    """The rewards of an untrained model are all 0: pay each second episode instead, so that there are advantages."""

    async def play(row, chat):
        outcome = await environment(row, chat)
        return type(outcome)(float(chat.seed % 2), metrics=outcome.metrics)

    return play


def test_the_table_by_hand(study):
    cells = [
        {"arm": arm, "seed": seed, "before": 0.25, "after": after + seed / 8, "greedy": 0.5, "seconds": 3.0,
         "noted_before": None if arm == "none" else 0.25, "noted_after": None if arm == "none" else 0.75}
        for arm, after in (("trained", 0.5), ("none", 0.25)) for seed in range(3)
    ]  # fmt: skip
    trained, none = study.summarize(cells)
    assert (trained["after"], none["after"], none["difference"]) == (0.625, 0.375, -0.25)
    assert none["difference_interval"] == pytest.approx((-0.25, -0.25))
    assert trained["difference"] is None
    low, high = trained["interval"]
    assert 0.5 <= low < 0.625 < high <= 0.75
    assert "| `none` | 3 | 0.250 | 0.375 (" in study.make_table([trained, none])
    assert not math.isnan(trained["gains"][0])
