"""How often MathAnswer and math-verify agree with the labels of tests/reward_cases/math.jsonl.

    python benches/math_labels.py [--timeout 5]

The labels were decided by mathematics. math-verify reads golds and answers as LaTeX between dollar signs, and
completions as they are. It stops a pair after its time limit; its verdict is then "not equal". The figures go to
benches/results/math_labels.json.
"""

from __future__ import annotations

import argparse
import json
import logging
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from math_verify import parse, verify

from rlox_grpo import rewards

ROOT = Path(__file__).parents[1]
RESULTS = Path(__file__).parent / "results" / "math_labels.json"


def read_cases() -> list[dict[str, Any]]:
    """Cases with a label, each with the text of its reply."""
    lines = (ROOT / "tests/reward_cases/math.jsonl").read_text(encoding="utf-8").splitlines()
    cases = [case for case in map(json.loads, lines) if "expected" in case]
    for case in cases:
        text = case.get("completion", f"${case.get('answer')}$")
        case["reply"] = text if isinstance(text, str) else "".join(piece * times for piece, times in text)
    return cases


def judge_ours(cases: Sequence[dict[str, Any]]) -> list[bool]:
    """Bare answers by `math_equal`, completions by `MathAnswer`."""
    return [
        rewards.math_equal(case["gold"], case["answer"]) is True
        if "answer" in case
        else rewards.MathAnswer()(completions=[case["reply"]], answer=[case["gold"]]) == [1.0]
        for case in cases
    ]


def judge_theirs(cases: Sequence[dict[str, Any]], timeout: int) -> list[bool]:
    """Verdicts of math-verify; what raises or takes too long is not right."""
    logging.disable(logging.CRITICAL)
    return [
        verify(
            parse(f"${case['gold']}$", parsing_timeout=timeout),
            parse(case["reply"], parsing_timeout=timeout),
            timeout_seconds=timeout,
        )
        for case in cases
    ]


def share(cases: Sequence[dict[str, Any]], verdicts: Sequence[bool]) -> dict[str, float]:
    """Accuracy, and the share of right answers among those that are called right."""
    called_right = [case["expected"] for case, verdict in zip(cases, verdicts, strict=True) if verdict]
    equal = [case["expected"] == verdict for case, verdict in zip(cases, verdicts, strict=True)]
    return {"accuracy": sum(equal) / len(equal), "precision": sum(called_right) / len(called_right)}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--timeout", type=int, default=5, help="seconds that math-verify has for parsing and comparing")
    timeout = parser.parse_args().timeout
    cases = read_cases()
    result = {
        "cases": len(cases),
        "rlox_grpo": share(cases, judge_ours(cases)),
        f"math-verify {version('math-verify')}": share(cases, judge_theirs(cases, timeout)),
        "timeout": timeout,
    }
    RESULTS.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
