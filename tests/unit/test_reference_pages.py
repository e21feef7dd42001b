"""The reference and migration pages name every command, paper, rule and name of TRL and verl that the code has."""

from __future__ import annotations

import argparse
import ast
import dataclasses
import re
from pathlib import Path

import pytest

from rlox_grpo import rewards
from rlox_grpo.cli import _make_parser
from rlox_grpo.config.foreign_names import read_foreign_names
from rlox_grpo.config.presets.page import presets_page
from rlox_grpo.config.records import Options
from rlox_grpo.config.records.option import read_metadata
from rlox_grpo.config.run_file import Origin
from rlox_grpo.config.schema import GRPOConfig, is_resumable

DOCS = Path(__file__).resolve().parents[2] / "docs"
FOREIGN = read_foreign_names()
TRL, VERL = FOREIGN.trl, FOREIGN.verl
KNOWN = {*GRPOConfig.model_fields, *Origin.model_fields}


def read(path: str) -> str:
    return (DOCS / path).read_text(encoding="utf-8")


def test_every_command_and_argument_is_on_the_page() -> None:
    page = read("reference/command_line.md")
    (commands,) = (a for a in _make_parser()._actions if isinstance(a, argparse._SubParsersAction))
    for name, command in commands.choices.items():
        section = page.partition(f"\n## rlox-grpo {name}\n")[2].partition("\n## ")[0]
        assert section, name
        for action in command._actions:
            for option in action.option_strings:
                assert option in ("-h", "--help") or option in section, (name, option)


def test_every_paper_of_an_option_or_a_preset_is_on_the_page() -> None:
    sources = presets_page() + "".join(read_metadata(field)["source"] or "" for field in Options.model_fields.values())
    cited = set(re.findall(r"arXiv:(\d{4}\.\d{5})", sources))
    assert len(cited) > 15
    assert cited <= set(re.findall(r"arxiv\.org/abs/(\d{4}\.\d{5})", read("reference/papers.md")))


def test_the_papers_configurations_are_options() -> None:
    rows = [row.split(" | ") for row in re.findall(r"^\| .*arxiv.*$", read("reference/papers.md"), re.MULTILINE)]
    assert len(rows) > 20
    for *_, configuration in rows:
        for part in re.split("; alone: |, as in |; the default ", configuration):
            words = [word.partition("=") for word in re.findall(r"`([^`]+)`", part)]
            assert words, configuration
            for name, _, _ in words:
                assert name in KNOWN or hasattr(rewards, name) or name == "gsm8k", name
            values = {
                name: ast.literal_eval(value) for name, _, value in words if value and name not in Origin.model_fields
            }
            GRPOConfig.create(**values)


def test_every_option_of_trl_is_on_the_page() -> None:
    trl, transformers = (
        pytest.importorskip("trl", reason="needs TRL, and so Python 3.11"),
        pytest.importorskip("transformers"),
    )
    cells = dict(re.findall(r"^\| `(\w+)` \| (.*) \|$", read("migration/from_trl.md"), re.MULTILINE))
    inherited = {field.name for field in dataclasses.fields(transformers.TrainingArguments)}
    own = [field.name for field in dataclasses.fields(trl.GRPOConfig) if field.name not in inherited]
    assert len(own) > 60
    for name in own:
        assert name in cells, name
    for name, cell in cells.items():
        if name in TRL and TRL[name] in KNOWN:
            assert re.split("[:;]", cell)[0] == f"`{TRL[name]}`", name
        elif name in TRL and TRL[name].startswith("there is"):
            assert cell.startswith("There is no"), name


def test_the_defaults_that_differ_from_trls() -> None:
    trl = pytest.importorskip("trl", reason="needs TRL, and so Python 3.11")
    theirs = {field.name: field.default for field in dataclasses.fields(trl.GRPOConfig)}
    config = GRPOConfig.create(preset="trl")
    section = read("migration/from_trl.md").partition("\n## Defaults that differ\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (`.*) \| (.*) \|$", section, re.MULTILINE)
    assert len(rows) > 7
    for their_cell, our_cell in rows:
        for name, value in re.findall(r"`(\w+)=([^`]+)`", their_cell):
            assert theirs[name] == ast.literal_eval(value), name
        for name, value in re.findall(r"`(\w+)=([^`]+)`", our_cell):
            assert getattr(config, name) == ast.literal_eval(value), name


def test_every_option_that_a_resumed_run_may_change_is_on_the_page() -> None:
    section = read("guides/resume.md").partition("\nThese options may change:\n")[2].partition("\n## ")[0]
    assert set(filter(is_resumable, GRPOConfig.model_fields)) == set(re.findall(r"`(\w+)`", section))


def test_the_names_of_verl_on_the_page_have_the_same_answer() -> None:
    rows = re.findall(r"^\| (`.*?) \| (.*) \|$", read("migration/from_verl.md"), re.MULTILINE)
    keys = {key.rpartition(".")[2] for cell, _ in rows for key in re.findall(r"`([\w.]+)[`=]", cell)}
    assert len(keys) > 40
    for key in keys - KNOWN - {"path", "name"}:
        assert key in VERL or key in TRL, key


def test_every_public_rule_is_in_the_python_reference() -> None:
    page = read("reference/reward_rules.md")
    rules = [name for name in rewards.__all__ if name[0].isupper() and hasattr(getattr(rewards, name), "verdicts")]
    missing = {name for name in rules if f"::: rlox_grpo.rewards.{name}\n" not in page}
    assert missing <= {"Rule", "PublishedAnswer", "PublishedCountdown"}
