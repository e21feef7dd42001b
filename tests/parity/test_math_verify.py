"""Math answers against sympy and against math-verify, over generated pairs whose verdict is known from their making.

Ours has to give sympy's verdict on every pair. Where math-verify gives another one, the pair must be of a named kind of
disagreement; any other difference fails, so that neither a new version of theirs nor of ours goes by unseen.

Their verdicts on the many pairs take minutes (sympy's ``simplify``), and those of one version never change: they are
recorded in math_verify_verdicts.json with the versions and a digest of the pairs. Where one of these differs, they are
asked again. ``python tests/parity/test_math_verify.py`` records anew. The few pairs of each kind are always asked.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from hashlib import sha256
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import pytest
from math_pairs import GENERATORS

from rlox_grpo import rewards

QUICK, THOROUGH = 8, 400
"""Pairs of each kind that math-verify is asked about at every run, and pairs whose recorded verdicts are compared."""

Pair = tuple[str, str, bool]
"""A gold, an answer, and whether they are equal."""

RECORD = Path(__file__).with_name("math_verify_verdicts.json")
"""By kind of pairs: their digest, and theirs on each of them, 1 for equal."""


class Known(NamedTuple):
    """A kind of disagreement: where it occurs, what they say, and why ours is another verdict."""

    kinds: tuple[str, ...]
    theirs: bool
    applies: Callable[[str, str], bool]
    reason: str


KNOWN = {
    "rounds to six digits": Known(
        ("decimals", "constants"),
        True,
        lambda gold, answer: "." in answer,
        "theirs compares round(x, 6) where one side is a decimal; a decimal is exact by the house rules",
    ),
    "sets are tuples": Known(
        ("sets_against_tuples",),
        True,
        lambda gold, answer: answer.startswith("("),
        "theirs reads two whole numbers in parentheses as an interval or a set; order matters in a tuple",
    ),
    "no relation against an interval": Known(
        ("intervals",),
        False,
        lambda gold, answer: "x" in answer,
        "theirs refuses an inequality where the gold is an interval; both are forms of one set",
    ),
    "i is a letter": Known(
        ("complex_numbers",),
        False,
        lambda gold, answer: "i" in gold,
        "theirs takes i for a free symbol unless told otherwise, so that products with i² do not multiply out",
    ),
    "zero after fifteen digits": Known(
        ("powers", "tiny_values"),
        True,
        lambda gold, answer: "^{-" in gold,
        "theirs compares the difference to fifteen digits, where all small values are equal",
    ),
    "a decimal is no bare percent": Known(
        ("percents",),
        False,
        lambda gold, answer: "." in answer,
        "theirs takes 25 for 25% and refuses 25.0; the two numbers are equal by the house rules",
    ),
    "units are dropped": Known(
        ("units",),
        True,
        lambda gold, answer: "text" in answer,
        "theirs deletes unit words before it compares; a different unit is wrong",
    ),
}


@contextmanager
def quiet() -> Iterator[None]:
    """Their log says at each call that an unbounded one has no timeout; the generated pairs need none."""
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)


@pytest.fixture(scope="module", autouse=True)
def quick_parsing() -> Iterator[None]:
    with two_stage_parsing():
        yield


@contextmanager
def two_stage_parsing() -> Iterator[None]:
    """ANTLR's two stages: SLL prediction, which gives the tree of LL or a syntax error, and LL only after an error.

    Theirs uses LL at once, which looks ahead over the whole context again for each text: ten times slower.
    """
    converter = pytest.importorskip("latex2sympy2_extended.latex2sympy2")._Latex2Sympy
    modes = pytest.importorskip("antlr4").PredictionMode
    parse, create_parser = converter.parse, converter.create_parser
    mode = modes.SLL

    def create(self: Any, text: str) -> Any:
        parser = create_parser(self, text)
        parser._interp.predictionMode = mode
        return parser

    def parse_in_two_stages(self: Any, text: str) -> Any:
        nonlocal mode
        try:
            return parse(self, text)
        except Exception:  # noqa: BLE001  their listener raises it for every syntax error
            mode = modes.LL
            try:
                return parse(self, text)
            finally:
                mode = modes.SLL

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(converter, "create_parser", create)
        patch.setattr(converter, "parse", parse_in_two_stages)
        yield


def their_verdict(gold: str, answer: str) -> bool:
    theirs: Any = pytest.importorskip("math_verify")
    config = (theirs.LatexExtractionConfig(), theirs.ExprExtractionConfig())
    read = [theirs.parse(f"${text}$", extraction_config=config, parsing_timeout=None) for text in (gold, answer)]
    return bool(theirs.verify(*read, timeout_seconds=None))


def explained(kind: str, gold: str, answer: str, theirs: bool) -> str | None:
    """The name of the known disagreement that this is, if any."""
    return next(
        (
            name
            for name, known in KNOWN.items()
            if kind in known.kinds and theirs == known.theirs and known.applies(gold, answer)
        ),
        None,
    )


def make_pairs(kind: str, count: int) -> list[Pair]:
    rng = Random(kind)
    return [GENERATORS[kind](rng) for _ in range(count)]


def digest(pairs: Sequence[Pair]) -> str:
    return sha256(json.dumps(pairs).encode()).hexdigest()[:16]


def their_versions() -> dict[str, str]:
    found = {}
    for name in ("math-verify", "latex2sympy2_extended", "sympy", "antlr4-python3-runtime"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "missing"
    return found


def ask_them(pairs: Sequence[Pair]) -> list[bool]:
    with quiet():
        return [their_verdict(gold, answer) for gold, answer, _ in pairs]


def recorded_verdicts(kind: str, pairs: Sequence[Pair]) -> list[bool] | None:
    """Their recorded verdicts, or None where the versions or the pairs are others."""
    record = json.loads(RECORD.read_text())
    found = record["verdicts"].get(kind, {})
    if record["versions"] != their_versions() or found.get("pairs") != digest(pairs):
        return None
    return [bit == "1" for bit in found["theirs"]]


def compare(kind: str, pairs: Sequence[Pair], verdicts: Sequence[bool]) -> set[str]:
    """Compare ours and theirs on each pair with the verdict of its making; the names of the disagreements met."""
    ours_wrong, unexplained, met = [], [], set()
    for (gold, answer, equal), theirs in zip(pairs, verdicts, strict=True):
        ours = rewards.math_equal(gold, answer)
        if ours is not equal:
            ours_wrong.append(f"{gold!r} and {answer!r}: ours {ours}, sympy {equal}")
        if theirs != equal:
            name = explained(kind, gold, answer, theirs)
            if name is None:
                unexplained.append(f"{gold!r} and {answer!r}: theirs {theirs}, sympy {equal}")
            else:
                met.add(name)
    assert not ours_wrong, "\n".join(ours_wrong)
    assert not unexplained, "\n".join(unexplained)
    return met


@pytest.mark.parametrize("kind", GENERATORS)
def test_generated_pairs(kind: str) -> None:
    pairs = make_pairs(kind, QUICK)
    verdicts = ask_them(pairs)
    compare(kind, pairs, verdicts)
    record = json.loads(RECORD.read_text())
    if record["versions"] == their_versions():
        recorded = record["verdicts"][kind]["theirs"]
        assert "".join(str(int(verdict)) for verdict in verdicts) == recorded[:QUICK]


@pytest.mark.slow
@pytest.mark.parametrize("kind", GENERATORS)
def test_more_generated_pairs(kind: str) -> None:
    pairs = make_pairs(kind, THOROUGH)
    verdicts = recorded_verdicts(kind, pairs)
    met = compare(kind, pairs, ask_them(pairs) if verdicts is None else verdicts)
    expected = {name for name, known in KNOWN.items() if kind in known.kinds}
    assert met == expected, "a disagreement that no longer occurs is no exception any more"


def test_symmetry() -> None:
    for kind, generate in GENERATORS.items():
        rng = Random(f"{kind} again")
        for _ in range(3 * QUICK):
            gold, answer, _ = generate(rng)
            assert rewards.math_equal(gold, answer) is rewards.math_equal(answer, gold), (gold, answer)
            assert rewards.math_equal(gold, gold) is True, gold


def record_verdicts() -> None:
    """Ask them where the record has no verdicts of these versions and pairs; it is written after each kind."""
    record = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    versions = their_versions()
    verdicts = record["verdicts"] if record.get("versions") == versions else {}
    with two_stage_parsing():
        for kind in GENERATORS:
            pairs = make_pairs(kind, THOROUGH)
            if verdicts.get(kind, {}).get("pairs") != digest(pairs):
                theirs = "".join(str(int(verdict)) for verdict in ask_them(pairs))
                verdicts[kind] = {"pairs": digest(pairs), "theirs": theirs}
                RECORD.write_text(json.dumps({"versions": versions, "verdicts": verdicts}, indent=1) + "\n")


if __name__ == "__main__":
    record_verdicts()
