"""Two test modules with one name cannot be collected in one run: pytest imports each by its name alone."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

TESTS = Path(__file__).parents[1]


def test_no_two_test_modules_have_the_same_name() -> None:
    # tests/gpu and tests/e2e are collected together by `make test`, and apart by everything that a change usually runs
    names = Counter(path.name for path in TESTS.rglob("test_*.py") if ".venv" not in path.parts)
    assert [name for name, count in names.items() if count > 1] == []
