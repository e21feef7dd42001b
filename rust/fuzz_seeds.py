"""Write the labelled cases as seed inputs: ``python rust/fuzz_seeds.py`` fills ``fuzz/corpus`` of each crate."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent


def cases(name: str) -> list[dict[str, Any]]:
    lines = (HERE.parent / "tests" / "reward_cases" / f"{name}.jsonl").read_text("utf8").rstrip("\n").split("\n")
    return [json.loads(line) for line in lines]


def text(case: dict[str, Any]) -> str:
    completion = case["completion"]
    return completion if isinstance(completion, str) else "".join(piece * times for piece, times in completion)


def write(crate: str, target: str, seeds: list[bytes]) -> None:
    folder = HERE / crate / "fuzz/corpus" / target
    folder.mkdir(parents=True, exist_ok=True)
    for seed in seeds:
        (folder / hashlib.sha256(seed).hexdigest()[:20]).write_bytes(seed[:65536])
    print(f"{target}: {len(seeds)} seeds in {folder.relative_to(HERE.parent)}")


def main() -> None:
    math = [case for name in ("math", "math_kinds", "math_held_out", "math_peers") for case in cases(name)]
    bare = [case for case in math if "answer" in case]
    completions = [text(case) for name in ("countdown", "gsm8k", "format") for case in cases(name)]
    completions += [text(case) for case in math if "completion" in case]
    sums = [
        " ".join(map(str, (*case["nums"], case["target"])))
        + "\n"
        + text(case).split("<answer>")[-1].split("</answer>")[0]
        for case in cases("countdown")
    ]
    numbers = [text(case) for case in cases("gsm8k")]
    for target, texts in (("formats", completions), ("gsm8k", numbers), ("countdown", sums)):
        write("rules", target, [each.encode() for each in texts])
    write("math_answers", "extraction", [each.encode() for each in completions])
    write("math_answers", "numbers", [each.encode() for each in numbers])
    write("math_answers", "math_parse", [side.encode() for case in bare for side in (case["gold"], case["answer"])])
    write("math_answers", "math_equal", [f"{case['gold']}\n{case['answer']}".encode() for case in bare])


if __name__ == "__main__":
    main()
