"""The workflow files parse, pin what they use, and call only targets that the Makefile has."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
TARGETS = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def load(path: Path) -> dict[Any, Any]:
    parsed = yaml.safe_load(path.read_text())
    assert isinstance(parsed, dict)
    return parsed


def test_there_are_two() -> None:
    assert [path.name for path in WORKFLOWS] == ["ci.yml", "wheels.yml"]


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_jobs_are_whole(path: Path) -> None:
    workflow = load(path)
    assert {"name", True, "permissions", "jobs"} <= set(workflow)  # YAML 1.1 reads the key `on` as true
    for name, job in workflow["jobs"].items():
        assert job["runs-on"]
        assert job["timeout-minutes"] <= 60, name
        needed = job.get("needs", [])
        assert set([needed] if isinstance(needed, str) else needed) <= set(workflow["jobs"]), name
        for step in job["steps"]:
            assert ("uses" in step) != ("run" in step), (name, step)


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_actions_are_pinned_by_hash_with_their_version(path: Path) -> None:
    """A tag can be moved to other code; the hash of a commit cannot."""
    lines = [line.strip().removeprefix("- ") for line in path.read_text().splitlines()]
    uses = [line for line in lines if line.startswith("uses:")]
    assert uses
    for line in uses:
        assert re.fullmatch(r"uses: [\w./-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+", line), line


def test_an_action_has_the_same_pin_everywhere() -> None:
    pins: dict[str, set[str]] = {}
    for path in WORKFLOWS:
        for name, pin in re.findall(r"uses: ([\w./-]+)@(.*)", path.read_text()):
            pins.setdefault(name, set()).add(pin)
    assert {name: found for name, found in pins.items() if len(found) > 1} == {}


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_make_targets_exist(path: Path) -> None:
    for name, job in load(path)["jobs"].items():
        for step in job["steps"]:
            for target in re.findall(r"\bmake ([a-z-]+)", step.get("run", "")):
                assert target in TARGETS, (name, target)


def test_published_wheels_name_no_path_of_the_builder() -> None:
    """`make wheel` repacks what maturin wrote; the workflow does too, before it installs and uploads the file."""
    steps = load(ROOT / ".github" / "workflows" / "wheels.yml")["jobs"]["wheel"]["steps"]
    at = [
        name
        for step in steps
        for name in ("maturin-action", "strip_paths", "pip install", "upload-artifact")
        if name in f"{step.get('uses')} {step.get('run')}"
    ]
    assert at == ["maturin-action", "strip_paths", "pip install", "upload-artifact"]
    assert (ROOT / ".ci" / "strip_paths.py").exists()
    (repack,) = (step["run"] for step in steps if "strip_paths" in step.get("run", ""))
    assert "python .ci/strip_paths.py dist/*.whl" in repack


def test_a_choice_of_tests_in_the_makefile_leaves_out_those_that_need_chromium() -> None:
    """``-m`` takes the place of the one in pyproject.toml, which leaves them out by default."""
    chosen = re.findall(r'-m "(not [^"]*)"', (ROOT / "Makefile").read_text())
    assert len(chosen) == 2
    assert [expression for expression in chosen if "not browser" not in expression] == []
