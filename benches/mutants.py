"""Mutants: the fast tests near a module, on copies of it with one small mistake each. What passes is tested too little.

    uv run --no-sync python benches/mutants.py [guards schedules …] [--seconds 600] [--limit 0.5] [--json mutants.json]

Prints each mutant that no test notices, as ``file:line operator: before → after``, and a count for each target. The
mistakes: a comparison flipped, + and −, × and ÷, ``and`` and ``or``, a ``not`` removed, a number one off, True
and False, a statement removed, a value that is not returned. ``--limit`` tries a random share of them, always the same.

It works in a copy of the tree. Each mutant is a process forked from one that has imported torch and transformers, which
takes seconds (Linux). An exit of pytest other than "all passed", or no exit in ``TIMEOUT_S``, counts as noticed.
"""

from __future__ import annotations

import argparse
import ast
import copy
import json
import os
import random
import shutil
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[1]
TIMEOUT_S = 240.0

TARGETS: dict[str, tuple[str, list[str]]] = {  # name → file, tests
    "guards": ("run/guards.py", ["unit/test_guards.py"]),
    "rates": (
        "update/parameter_groups.py",
        ["unit/test_schedules.py", "unit/test_torch_updater.py", "unit/test_adamw_8bit.py"],
    ),
    "kl": (
        "loss/kl.py",
        [
            *("unit/test_schedules.py", "unit/test_trainer_losses.py"),
            *("golden/test_loss_golden.py", "golden/test_policy_loss_golden.py", "golden/test_branches_golden.py"),
        ],
    ),
    "sinks": ("run/sinks.py", ["unit/test_sinks.py", "unit/test_notebook.py"]),
    "console": ("run/console.py", ["unit/test_sinks.py"]),
    "verdicts": ("rewards/verdicts.py", ["unit/test_score.py", "unit/test_rules.py"]),
    "resume": ("run/resume.py", ["unit/test_checkpoint.py", "unit/test_rerun.py", "unit/test_wrong_inputs.py"]),
}


class Mutant(NamedTuple):
    """One mistake: where, what, and the whole source with it."""

    line: int
    operator: str
    before: str
    after: str
    source: str


COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    **{ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq},
    **{ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In},
}
REVERSED: dict[type[ast.cmpop], type[ast.cmpop]] = {
    **{ast.Lt: ast.Gt, ast.Gt: ast.Lt, ast.LtE: ast.GtE, ast.GtE: ast.LtE},
}
ARITHMETIC: dict[type[ast.operator], type[ast.operator]] = {
    **{ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult},
}


def change(node: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    """Yield each mistake that can be made in this node alone: its name and the node instead."""
    if isinstance(node, ast.Compare):
        for index, operator in enumerate(node.ops):
            for table in (COMPARISONS, REVERSED):
                if type(operator) in table:
                    changed = copy.deepcopy(node)
                    changed.ops[index] = table[type(operator)]()
                    yield "comparison", changed
    elif isinstance(node, ast.BinOp) and type(node.op) in ARITHMETIC:
        yield "arithmetic", ast.BinOp(node.left, ARITHMETIC[type(node.op)](), node.right)
    elif isinstance(node, ast.BoolOp):
        yield "and/or", ast.BoolOp(ast.Or() if isinstance(node.op, ast.And) else ast.And(), node.values)
        for index in range(len(node.values)):
            left = node.values[:index] + node.values[index + 1 :]
            yield "condition removed", left[0] if len(left) == 1 else ast.BoolOp(node.op, left)
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.Not, ast.USub)):
        yield "sign removed", node.operand
    elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
        yield "constant", ast.Constant(not node.value)
    elif isinstance(node, ast.Constant) and isinstance(node.value, (int, float)):
        yield "constant", ast.Constant(node.value + 1)
        yield "constant", ast.Constant(node.value - 1)
    elif isinstance(node, ast.Return) and node.value is not None and not is_none(node.value):
        yield "returns None", ast.Return(ast.Constant(None))
    elif isinstance(node, (ast.AugAssign, ast.Raise, ast.Continue)) or (
        isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)
    ):
        yield "statement removed", ast.Pass()


def is_none(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


def walk(node: ast.AST) -> Iterator[tuple[ast.AST, str, int | None]]:
    """Yield the place of each node that may change: its parent, field and index. Types and texts are left alone."""
    for field, value in ast.iter_fields(node):
        if field in ("annotation", "returns", "decorator_list") or isinstance(node, ast.JoinedStr):
            continue
        for index, child in enumerate(value) if isinstance(value, list) else [(None, value)]:
            if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
                continue
            if isinstance(child, ast.AST):
                yield node, field, index
                yield from walk(child)


def make_mutants(source: str) -> list[Mutant]:
    """Every mutant of a module, in the order of its lines."""
    tree = ast.parse(source)
    found = []
    for parent, field, index in list(walk(tree)):
        value = getattr(parent, field)
        node = value if index is None else value[index]
        for operator, changed in change(node):
            put(parent, field, index, changed)
            text = ast.unparse(ast.fix_missing_locations(tree))
            put(parent, field, index, node)
            before, after = (" ".join(ast.unparse(one).split())[:90] for one in (node, changed))
            found.append(Mutant(node.lineno, operator, before, after, text))
    return sorted(found, key=lambda mutant: mutant.line)


def put(parent: ast.AST, field: str, index: int | None, node: ast.AST) -> None:
    if index is None:
        setattr(parent, field, node)
    else:
        getattr(parent, field)[index] = node


def passes(tree: Path, tests: list[str]) -> bool:
    """Whether the tests pass in the copy, in a forked process."""
    child = os.fork()
    if child == 0:
        code = 99
        try:
            os.setsid()
            output = os.open(tree / "output.txt", os.O_RDWR | os.O_CREAT | os.O_TRUNC)
            for descriptor in (0, 1, 2):
                os.dup2(output, descriptor)
            os.chdir(tree)
            code = pytest.main(
                ["-x", "-q", "--assert=plain", "-p", "no:cacheprovider", "-m", "not slow and not browser", *tests]
            )
        except BaseException:  # noqa: BLE001  a child never returns
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            os._exit(int(code))
    deadline = time.monotonic() + TIMEOUT_S
    while True:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status) == 0
        if time.monotonic() > deadline:
            os.killpg(child, 9)
            os.waitpid(child, 0)
            return False
        time.sleep(0.02)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("targets", nargs="*", default=list(TARGETS), help=f"of {', '.join(TARGETS)}; default: all")
    parser.add_argument("--seconds", type=float, default=3600.0, help="stop after so long (default: %(default)g)")
    parser.add_argument("--limit", type=float, default=1.0, help="share of the mutants, 0 to 1 (default: all)")
    parser.add_argument("--json", type=Path, help="write the survivors here, too")
    arguments = parser.parse_args()
    sys.dont_write_bytecode = True
    os.environ.update(OMP_NUM_THREADS="1", PYTHONDONTWRITEBYTECODE="1", HF_HUB_OFFLINE="1")
    end, survivors = time.monotonic() + arguments.seconds, []
    with tempfile.TemporaryDirectory(prefix="mutants_") as temporary:
        tree = Path(temporary)
        for name in ("python", "tests", "examples", "benches", "docs"):
            shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("__pycache__", "results"))
        for name in ("pyproject.toml", "README.md"):
            shutil.copy(ROOT / name, tree)
        sys.path.insert(0, str(tree / "python"))
        os.environ["PYTHONPATH"] = str(tree / "python")
        import torch
        import transformers.models.qwen2.modeling_qwen2  # noqa: F401

        torch.set_num_threads(1)
        for target in arguments.targets:
            file, tests = TARGETS[target]
            path, tests = tree / "python/rlox_grpo" / file, [f"tests/{test}" for test in tests]
            source = path.read_text(encoding="utf-8")
            assert passes(tree, tests), "without a mutant: " + (tree / "output.txt").read_text()
            mutants = make_mutants(source)
            mutants = random.Random(0).sample(mutants, round(arguments.limit * len(mutants)))
            tried = lived = 0
            for mutant in mutants:
                if time.monotonic() > end:
                    break
                path.write_text(mutant.source, encoding="utf-8")
                tried += 1
                if passes(tree, tests):
                    lived += 1
                    survivors.append({"file": file, **mutant._asdict(), "source": None})
                    said = f"{mutant.operator}: {mutant.before} → {mutant.after}"
                    print(f"{file}:{mutant.line} {said}", flush=True)
            path.write_text(source, encoding="utf-8")
            print(f"{target}: {lived} of {tried} mutants passed all tests ({len(mutants)} chosen)", flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps(survivors, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
