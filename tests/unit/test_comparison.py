"""docs/concepts/comparison.md against the sources of the systems that are installed here, at its versions."""

from __future__ import annotations

import importlib.util
import re
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest

from rlox_grpo.config.presets import PRESETS
from rlox_grpo.run.guards import GUARDS

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "concepts" / "comparison.md").read_text(encoding="utf-8")
PACKAGES = {"TRL": "trl", "verl": "verl", "OpenRLHF": "openrlhf", "rlox": "rlox"}
CLAIM = re.compile(r"`([^` ]+)` (has|lacks) (``.+?``|`[^`]+`)")


def rows(text: str) -> dict[str, list[str]]:
    """Cells by feature of the tables that compare all five."""
    split = [[cell.strip() for cell in line.strip("|\n").split("|")] for line in text.splitlines() if line[:1] == "|"]
    return {cells[0]: cells[1:] for cells in split if len(cells) == 6 and cells[0] and set(cells[0]) != {"-"}}


def proofs() -> dict[str, dict[str, list[tuple[str, str, str]]]]:
    """Feature → system → (path, has or lacks, text)."""
    found = {}
    for line in PAGE.splitlines():
        if line.startswith("- **"):
            feature, _, rest = line.removeprefix("- **").partition(".**")
            parts = re.split(r"(?:^|; )(ours|TRL|verl|OpenRLHF|rlox): ", rest.strip())
            found[feature] = {
                system: [(path, verb, text.strip("`")) for path, verb, text in CLAIM.findall(claims)]
                for system, claims in zip(parts[1::2], parts[2::2], strict=True)
                if system != "ours"
            }
    return found


def holds(package: Path, path: str, verb: str, text: str) -> bool:
    """Whether the file has the text, or no source file under the folder does."""
    place = package / path
    assert place.exists(), f"{place} does not exist"
    files = [place] if place.is_file() else [*place.rglob("*.py"), *place.rglob("*.yaml")]
    assert files, f"{place} holds no sources"
    return any(text in file.read_text(encoding="utf-8") for file in files) == (verb == "has")


def test_every_line_has_its_proofs() -> None:
    shown = proofs()
    lines = rows(PAGE)
    assert len(lines) > 25
    assert shown.keys() == lines.keys()
    for feature, systems in shown.items():
        if systems:  # the last line says that no file proves it
            assert list(systems) == list(PACKAGES), feature
            assert all(systems.values()), feature
    assert sum(not systems for systems in shown.values()) == 1


@pytest.mark.parametrize("system", PACKAGES)
def test_the_sources_show_what_the_page_says(system: str) -> None:
    name = PACKAGES[system]
    try:
        installed = version(name)
    except PackageNotFoundError:
        pytest.skip(f"{name} is not installed")
    if f"{system} {installed}" not in PAGE:
        pytest.skip(f"the page is about another {name} than {installed}")
    spec = importlib.util.find_spec(name)
    assert spec is not None
    assert spec.origin is not None
    package = Path(spec.origin).parent
    wrong = [
        f"{feature}: {path} {verb} {text!r}"
        for feature, systems in proofs().items()
        for path, verb, text in systems.get(system, [])
        if not holds(package, path, verb, text)
    ]
    assert not wrong


def test_the_counts_are_those_of_the_code() -> None:
    variants = len(PRESETS.keys() - {"grpo", "recommended"})  # the others are settings of this library
    assert rows(PAGE)["Presets of published variants, with sources"][0] == str(variants)
    assert f"for {variants} published variants" in (ROOT / "README.md").read_text(encoding="utf-8")
    assert rows(PAGE)["Warnings with a remedy when metrics go wrong"][0] == str(len(GUARDS))


def test_the_readmes_lines_are_the_pages() -> None:
    readme = rows((ROOT / "README.md").read_text(encoding="utf-8"))
    shown = {feature: cells for feature, cells in readme.items() if feature in rows(PAGE)}
    assert 10 <= len(shown) <= 20
    for feature, cells in shown.items():
        assert cells == rows(PAGE)[feature], feature
