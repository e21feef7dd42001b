"""Names say what they hold: no bound name of the package has a word that fits any value.

A bound name is one that the code chooses: of a module, function, class, parameter, variable, attribute, field, import
alias. Names of other libraries, which the code only reads, do not count. CamelCase is split as well.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

import rlox_grpo

PACKAGE = Path(rlox_grpo.__file__).parent
WORDS = frozenset({"own", "found", "place", "places", "part", "parts", "told", "known", "kept", "given", "one", "of"})
EXEMPT: Mapping[str, str] = {
    "multiple_of": "a parameter of `pad` and `build_batch`, after transformers' `pad_to_multiple_of`",
    "OUT_OF_MEMORY": "the term for this end of a program, and the status that users read in metrics",
    "parse_known_args": "the method of `argparse.ArgumentParser` that a subclass replaces",
}
"""Name → why it stays."""


def list_bound_names(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Yield each name that ``tree`` binds, with its line, in the order of the walk; once for each binding."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield node.name, node.lineno
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id, node.lineno
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr, node.lineno
        elif isinstance(node, ast.arg):
            yield node.arg, node.lineno
        elif isinstance(node, (ast.ExceptHandler, ast.MatchAs, ast.MatchStar)) and node.name:
            yield node.name, node.lineno
        elif isinstance(node, ast.MatchMapping) and node.rest:
            yield node.rest, node.lineno
        elif isinstance(node, ast.alias) and node.asname:
            yield node.asname, node.lineno


def split_words(name: str) -> set[str]:
    """Split a name at underscores and before capitals: ``_find_PartsOfRow`` has find, parts, of and row."""
    return {word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", name)}


def list_package_names() -> Iterator[tuple[str, str]]:
    """Yield each bound name of the package and where it is: ``file:line``."""
    for path in sorted(PACKAGE.rglob("*.py")):
        file = path.relative_to(PACKAGE).as_posix()
        yield path.parent.name if path.name == "__init__.py" else path.stem, file
        for name, line in list_bound_names(ast.parse(path.read_text(encoding="utf-8"))):
            yield name, f"{file}:{line}"


def test_names_say_what_they_hold() -> None:
    names = list(list_package_names())
    hits = [(name, where) for name, where in names if split_words(name) & WORDS]
    print(f"{len(hits)} of {len(names)} bound names, {len(hits) / len(names):.2%}, have one of {sorted(WORDS)}")
    new = [f"{where}: {name}" for name, where in hits if name not in EXEMPT]
    assert not new, "name the value by what it holds, such as scored_groups or row_slices:\n" + "\n".join(new)
    assert len(hits) < 0.01 * len(names)


def test_every_exempt_name_is_used() -> None:
    assert EXEMPT.keys() <= {name for name, _ in list_package_names()}


@pytest.mark.parametrize(
    "code",
    [
        "def find_part(): pass",
        "async def f(*, given): pass",
        "class _PartOfRow: pass",
        "class A:\n    kept: int",
        "own = 1",
        "for place, _ in []: pass",
        "[0 for one in []]",
        "lambda told: 0",
        "with open('x') as found: pass",
        "try: pass\nexcept OSError as known: pass",
        "import os as own",
        "self.row_of = 1",
        "if (parts := 1): pass",
        "match 1:\n    case [*places]: pass",
        "match 1:\n    case {**kept}: pass",
    ],
)
def test_every_form_of_binding_is_seen(code: str) -> None:
    assert sum(bool(split_words(name) & WORDS) for name, _ in list_bound_names(ast.parse(code))) == 1


@pytest.mark.parametrize("name", ["partial", "placement", "ownership", "offset", "components", "__one__x", "OneHot"])
def test_words_are_whole(name: str) -> None:
    assert bool(split_words(name) & WORDS) == name.lower().startswith(("one", "__one"))
