"""The modules of each Rust crate import one another in one direction: no circle. Between crates cargo refuses circles.

Rule: module A depends on module B when A's code, tests aside, names an item that B defines, in a ``use`` or in a path.
A name that B only passes on (``pub use``, or a ``use`` that B's children read through ``super``) leads to the module
that defines it. Declaring a child (``mod child;``) and passing its items on is no dependency: a parent may do so for
children that take items of the parent. It becomes a circle when the parent's own code uses what the child defines.

Not seen: methods called on a value, and traits implemented for a type of another module.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path as File

import pytest

RUST = File(__file__).parents[2] / "rust"

# One or several segments: ``("expr", "germ")`` is `crate::expr::germ`, ``()`` is the crate.
Path = tuple[str, ...]

_NO_CODE = re.compile(
    r"""//[^\n]*                              # a comment to the end of the line
    | /\*.*?\*/                               # a comment block
    | b?r(?P<marks>\#*)".*?"(?P=marks)        # a raw string
    | b?"(?:\\.|[^"\\])*"                     # a string
    | b?'(?:\\.[^']*|[^'\\])'                 # a character; a lifetime has no closing mark
    """,
    re.VERBOSE | re.DOTALL,
)
_TEST_ITEM = re.compile(r"#\[cfg\(test\)\]\s*(?:pub )?mod (\w+)\s*([;{])")
_USE = re.compile(r"\buse\s+([^;]+);")
_PUBLIC_USE = re.compile(r"\bpub(?:\([^)]*\))? use\s+([^;]+);")
_WRITTEN_PATH = re.compile(r"(?<![\w:])(?:::)?\w+(?:\s*::\s*\w+)+")


@dataclass(frozen=True)
class Source:
    """One module: its path and its code without comments, strings and tests."""

    path: Path
    code: str
    test_children: frozenset[str]

    @staticmethod
    def read(path: Path, text: str) -> Source:
        code = _NO_CODE.sub('""', text)
        tests = set()
        while found := _TEST_ITEM.search(code):
            end = found.end()
            if found[2] == ";":
                tests.add(found[1])
            else:
                depth = 1
                while depth:
                    depth += {"{": 1, "}": -1}.get(code[end], 0)
                    end += 1
            code = code[: found.start()] + code[end:]
        return Source(path, code, frozenset(tests))

    @cached_property
    def imports(self) -> dict[str, Path]:
        """Local name to the path that a ``use`` gives it; the paths are absolute where they start in the crate."""
        return {name: self.absolute(path) for used in _USE.findall(self.code) for name, path in _leaves(used)}

    @cached_property
    def passed_on(self) -> set[str]:
        """Names that the module imports publicly, so that others find them here."""
        return {name for used in _PUBLIC_USE.findall(self.code) for name, _ in _leaves(used)}

    @cached_property
    def body(self) -> str:
        """The code without its ``use`` lines and declarations of modules."""
        return re.sub(r"\bmod \w+;", "", _USE.sub("", self.code))

    def absolute(self, path: Path) -> Path:
        """``path`` as written here, from the root of the crate."""
        base = self.path
        if path[0] == "crate":
            return path[1:]
        if path[0] == "self":
            return base + path[1:]
        while path and path[0] == "super":
            base, path = base[:-1], path[1:]
            if path[:1] != ("super",):
                return base + path
        return base + path  # a child, or a crate of another author: looked up by the caller


def _leaves(tree: str, before: Path = ()) -> Iterator[tuple[str, Path]]:
    """Each name of a ``use`` tree with its path: ``a::{b, c as d}`` gives ``b: a::b`` and ``d: a::c``."""
    depth, start, parts = 0, 0, []
    for place, mark in enumerate(tree):
        depth += {"{": 1, "}": -1}.get(mark, 0)
        if mark == "," and depth == 0:
            parts.append(tree[start:place])
            start = place + 1
    for part in (part.strip() for part in [*parts, tree[start:]]):
        head, brace, rest = part.partition("{")
        if brace:
            yield from _leaves(rest[:-1], before + tuple(_segments(head)))
        elif part:
            written, _, renamed = part.partition(" as ")
            path = before + tuple(_segments(written))
            path = path[:-1] if path[-1] == "self" and len(path) > 1 else path
            yield renamed.strip() or path[-1], path


def _segments(text: str) -> list[str]:
    return [segment.strip() for segment in text.split("::") if segment.strip()]


def dependencies(modules: dict[Path, Source]) -> dict[Path, set[Path]]:
    """The modules whose items each module names."""

    def defined_in(path: Path, seen: frozenset[Path] = frozenset()) -> Path | None:
        """The module that defines the item at the absolute ``path``; None outside this crate."""
        if path in modules:
            return path
        for length in range(len(path) - 1, -1, -1):
            home, name = path[:length], path[length]
            if home in modules:
                passed_on = modules[home].imports.get(name)
                if passed_on is None or passed_on in seen or defined_in(passed_on, seen | {path}) is None:
                    return home if length or name in _top_items(modules) else None
                return defined_in((*passed_on, *path[length + 1 :]), seen | {path})
        return None

    graph: dict[Path, set[Path]] = {}
    for path, source in modules.items():
        named = [
            imported
            for name, imported in source.imports.items()
            if name not in source.passed_on or re.search(rf"\b{name}\b", source.body)
        ]
        for written in _WRITTEN_PATH.findall(source.body):
            segments = tuple(_segments(written))
            if segments[0] in ("crate", "super", "self") or (*path, segments[0]) in modules:
                named.append(source.absolute(segments))
        found = {defined_in(absolute) for absolute in named if _starts_here(absolute, path, modules)}
        graph[path] = {module for module in found if module is not None} - {path}
    return graph


def _starts_here(absolute: Path, path: Path, modules: dict[Path, Source]) -> bool:
    """Whether the path leads into this crate: what `Source.absolute` takes for a child may be another crate."""
    relative = absolute[len(path) :]
    return absolute[: len(path)] != path or not relative or (*path, relative[0]) in modules or len(relative) == 1


def _top_items(modules: dict[Path, Source]) -> set[str]:
    return set(re.findall(r"\b(?:fn|struct|enum|trait|const|static|type)\s+(\w+)", modules[()].code))


def circles(graph: dict[Path, set[Path]]) -> list[list[str]]:
    """Groups of modules that reach one another, each sorted."""
    reach = {module: set(direct) for module, direct in graph.items()}
    changed = True
    while changed:
        changed = False
        for reached in reach.values():
            wider = reached.union(*(reach[module] for module in reached))
            changed |= len(wider) > len(reached)
            reached |= wider
    groups = {
        tuple(sorted("::".join(other) for other in reached if module in reach[other]))
        for module, reached in reach.items()
        if module in reached
    }
    return sorted(list(group) for group in groups)


def modules_of(files: dict[str, str]) -> dict[Path, Source]:
    """Sources by module, from file names relative to the root of the crate; modules of tests are left out."""
    sources = {}
    for name, text in files.items():
        parts = File(name).with_suffix("").parts
        path = parts[:-1] if parts[-1] in ("mod", "lib") else parts
        sources[path] = Source.read(path, text)
    tests = {(*path, child) for path, source in sources.items() for child in source.test_children}
    return {path: source for path, source in sources.items() if path not in tests}


# An import of each crate that the parser must see.
SEEN = {
    "kernels": (("batch", "padding"), ("batch", "layout")),
    "math_answers": (("error",), ("parser",)),
    "python": (("errors",), ("arrays",)),
    "rules": (("error",), ("math",)),
}


def test_every_crate_is_checked() -> None:
    assert {file.parent.name for file in RUST.glob("*/Cargo.toml")} == {*SEEN}


@pytest.mark.parametrize("crate", SEEN)
def test_no_circle_between_the_modules_of_a_crate(crate: str) -> None:
    source = RUST / crate / "src"
    files = {str(file.relative_to(source)): file.read_text() for file in sorted(source.rglob("*.rs"))}
    graph = dependencies(modules_of(files))
    imported, importer = SEEN[crate]
    assert imported in graph[importer]
    assert circles(graph) == []


PARENT = "mod child; pub struct Common;"
CASES = {
    "siblings that import each other": (
        {"a.rs": "use crate::b::B; pub struct A;", "b.rs": "use super::a::A; pub struct B;"},
        [["a", "b"]],
    ),
    "three modules, one of them by a path in its code": (
        {
            "a.rs": "use crate::b::B; pub struct A;",
            "b.rs": "pub struct B; fn f() { crate::c::f() }",
            "c.rs": "use super::a::A; pub fn f() {}",
        },
        [["a", "b", "c"]],
    ),
    "a parent that only declares and passes on": (
        {"a/mod.rs": PARENT + "pub use child::Child;", "a/child.rs": "use super::Common; pub struct Child;"},
        [],
    ),
    "a parent that uses its child's item": (
        {"a/mod.rs": PARENT + "use child::{Child, Other as X}; fn f(_: Child) {}", "a/child.rs": "use super::Common;"},
        [["a", "a::child"]],
    ),
    "a parent that uses its child by a path": (
        {"a/mod.rs": PARENT + "fn f() { child::run() }", "a/child.rs": "use super::Common; pub fn run() {}"},
        [["a", "a::child"]],
    ),
    "a child that reads another module through its parent": (
        {
            "a/mod.rs": "mod child; use crate::b::B; fn f(_: B) { child::run() }",
            "a/child.rs": "use super::B; pub fn run() {}",
            "b.rs": "pub struct B;",
        },
        [],
    ),
    "tests, comments and strings": (
        {
            "a.rs": "use crate::b::B; // crate::b\npub struct A;",
            "b.rs": '/// [`crate::a::A`]\npub struct B; const X: &str = "crate::a::A"; '
            "#[cfg(test)] mod tests { use crate::a::A; fn f() { if true {} } }",
        },
        [],
    ),
}


@pytest.mark.parametrize(("files", "expected"), CASES.values(), ids=CASES)
def test_what_counts_as_a_circle(files: dict[str, str], expected: list[list[str]]) -> None:
    assert circles(dependencies(modules_of({"lib.rs": "", **files}))) == expected
