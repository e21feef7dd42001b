"""The rewards of published systems, by name, with their own parts and weights.

These rewards reproduce the systems' rules with their errors, for runs that must reproduce these systems. For other runs
use the rules of ``answers.py``. The docstring of each scorer has its scores, and the text that it reads as the answer.
Two things differ, for safety: no interpreter evaluates expressions, and every scan is linear.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise
from typing import Any, ClassVar

import numpy as np

from rlox_grpo.rewards.arithmetic import OverBudgetError, evaluate
from rlox_grpo.rewards.columns import Columns, read_golds, read_ragged_whole_numbers, read_texts, read_whole_numbers
from rlox_grpo.rewards.formats import CosineLength, ReasoningLength, Repetition, TagCount, TagFormat
from rlox_grpo.rewards.math_answers import MathAnswer
from rlox_grpo.rewards.verdicts import NO_ANSWER, OK, UNDECIDED, UNPARSEABLE, Rule, Verdicts, call_rule, check_choice

Judgement = tuple[float, int]
"""A score and a status, as an index of ``STATUSES``."""


def nano_aha(text: str, numbers: Sequence[int], target: int) -> Judgement:
    """nano-aha-moment: 1 or 0. Reads the first ``<answer>`` that closes on its line."""
    span = _find_first_on_a_line(text)
    return _judge_equation(span and span.strip(), r"[\d+\-*/().\s]+", numbers, target, real=True)


def grpo_zero(text: str, numbers: Sequence[int], target: int) -> Judgement:
    """GRPO-Zero: 1 or 0. Reads the first ``<answer>`` that closes; no decimal points, no white space but blanks."""
    start = text.find("<answer>") + len("<answer>")
    end = text.find("</answer>", start)
    span = text[start:end] if start >= len("<answer>") and end >= 0 else None
    return _judge_equation(span, r"[0-9+\-*/() ]+\n?", numbers, target, real=True)


def tinyzero(text: str, numbers: Sequence[int], target: int) -> Judgement:
    """TinyZero: 1; 0.1 for a wrong answer; 0 without an answer. Reads the last ``<answer>`` on the last line."""
    span = _find_last_closed(text.rpartition("\n")[2])
    score, status = _judge_equation(span and span.strip(), r"[\d+\-*/().\s]+", numbers, target, real=False)
    return (0.0 if status == NO_ANSWER else max(score, 0.1)), status


def simple_grpo(text: str, gold: str) -> Judgement:
    """simple_GRPO: 1 or -1. Reads the last unsigned decimal, fraction or whole number of the text.

    Values are compared as in math-verify: exactly, or rounded to 6 digits if either is a decimal.
    """
    numbers = re.findall(r"[0-9]+\.[0-9]+|[0-9]+/[0-9]+|[0-9]+", text)
    if not numbers:
        return -1.0, NO_ANSWER
    value, wanted = parse_exact(numbers[-1]), parse_exact(gold)
    if value is None or wanted is None:
        return -1.0, UNPARSEABLE
    if "." in numbers[-1] or "." in gold:
        value, wanted = Fraction(round(value * 10**6)), Fraction(round(wanted * 10**6))
    return (1.0 if value == wanted else -1.0), OK


def lm_book(text: str, gold: str) -> Judgement:
    """The Hundred-Page Language Models Book: 2 for the gold text, 1.5 for only its number, else 0."""
    _, opened, rest = text.rpartition("<answer>")
    answer, closed, _ = rest.partition("</answer>")
    answer = answer.strip()
    if not opened or not closed or answer == "...":
        return 0.0, NO_ANSWER
    if answer == gold:
        return 2.0, OK
    numbers = [re.findall(r"-?\d*\.?\d+", side) for side in (answer, gold)]
    if not all(len(side_numbers) == 1 for side_numbers in numbers):
        return 0.0, OK
    return (1.5 if float(numbers[0][0]) == float(numbers[1][0]) else 0.0), OK


def rl_from_scratch(text: str, gold: str) -> Judgement:
    """RLFromScratch: 2 or 0. Reads the text after the last ``<answer>``, or all text, up to its first ``</answer>``."""
    answer = text.rpartition("<answer>")[2].partition("</answer>")[0].strip()
    return (2.0 if answer == gold else 0.0), OK


def verl_gsm8k(text: str, gold: str) -> Judgement:
    """The strict gsm8k of verl: 1 or 0. Reads the last ``#### number`` in the last 300 characters, without commas."""
    matches = re.findall(r"#### (-?[0-9.,]+)", text[-300:])
    return (float(matches[-1].replace(",", "") == gold), OK) if matches else (0.0, NO_ANSWER)


def verl_gsm8k_flexible(text: str, gold: str) -> Judgement:
    """The flexible gsm8k of verl: 1 or 0. Reads the last run of ``[0-9.,]`` in the last 300 characters."""
    matches = re.findall(r"-?[0-9.,]+", text[-300:])
    if not matches:
        return 0.0, NO_ANSWER
    # As in verl: skip a single point, and if there is nothing else, take the first match.
    last = next((number for number in reversed(matches) if number != "."), matches[0])
    return float(last == gold), OK


def verl_math_dapo(text: str, gold: str) -> Judgement:
    """The math_dapo of verl: 1 or -1. Reads the last "Answer:" line in the last 300 characters, normalised as text."""
    matches = re.findall(r"(?i)Answer\s*:\s*([^\n]+)", text[-300:])
    answer, status = (matches[-1], OK) if matches else ("[INVALID]", NO_ANSWER)
    return (1.0 if _normalise_minerva(answer) == _normalise_minerva(gold) else -1.0), status


def verl_math_dapo_box(text: str, gold: str) -> Judgement:
    r"""The math_dapo of verl with ``strict_box_verify``: 1 or -1.

    Reads the last ``\boxed{…}`` in the last 100 characters.
    """
    tail = text[-300:][-100:]
    at = tail.rfind(r"\boxed{")
    depth = 0
    for end in range(at, len(tail)) if at >= 0 else ():
        depth += {"{": 1, "}": -1}.get(tail[end], 0)
        if tail[end] == "}" and depth == 0:
            return (1.0 if tail[at + len(r"\boxed{") : end] == gold else -1.0), OK
    return (1.0 if gold == "[INVALID]" else -1.0), NO_ANSWER


EQUATIONS: dict[str, Callable[[str, Sequence[int], int], Judgement]] = {
    judge.__name__: judge for judge in (nano_aha, grpo_zero, tinyzero)
}
ANSWERS: dict[str, Callable[[str, str], Judgement]] = {
    judge.__name__: judge
    for judge in (
        simple_grpo,
        lm_book,
        rl_from_scratch,
        verl_gsm8k,
        verl_gsm8k_flexible,
        verl_math_dapo,
        verl_math_dapo_box,
    )
}


def extract_gold(system: str, text: str) -> str:
    """Return the gold answer as the system prepares it: the text after ``####``, or the whole text without ``####``."""
    if "####" in text:
        number = text.split("####")[1].strip()
        return number.replace(",", "") if system.startswith("verl") else number
    return text


def parse_exact(text: str) -> Fraction | None:
    """Return a plain number as a fraction; None for other text and for a division by zero."""
    match = re.fullmatch(r"(-?[0-9]+(?:\.[0-9]+)?|-?\.[0-9]+)(?:/([0-9]+))?", text.strip().replace(",", ""))
    if match is None or max(map(len, match.group(0).split("/"))) > 4000 or (match[2] and not match[2].strip("0")):
        return None
    return Fraction(match[1]) / int(match[2] or 1)


def _judge_equation(span: str | None, allowed: str, numbers: Sequence[int], target: int, *, real: bool) -> Judgement:
    """Score 1 if the expression uses exactly the numbers and its value by ``eval`` is within 1e-5 of the target."""
    if span is None:
        return 0.0, NO_ANSWER
    if not re.fullmatch(allowed, span):
        return 0.0, UNPARSEABLE
    try:
        # Every run of digits counts, as in the sources: "1.5" uses the numbers 1 and 5.
        used = sorted(int(digits) for digits in re.findall(r"\d+", span))
        if used != sorted(numbers):
            return 0.0, OK
        value = evaluate(span)
        gap = abs(float(value) - float(target)) if real else abs(value - target)
        return float(gap < 1e-5), OK
    except OverBudgetError:
        return 0.0, UNDECIDED
    except ArithmeticError:  # no value, or one past every float
        return 0.0, OK
    except (SyntaxError, ValueError, TypeError):  # digits past int()'s limit; a complex number is no float
        return 0.0, UNPARSEABLE


def _find_first_on_a_line(text: str) -> str | None:
    """Return the content of the first ``<answer>`` that is closed on its line."""
    for line in text.split("\n"):
        _, opened, rest = line.partition("<answer>")
        inside, closed, _ = rest.partition("</answer>")
        if opened and closed:
            return inside
    return None


def _find_last_closed(text: str) -> str | None:
    """Return the content of the last match of the regex ``<answer>(.*?)</answer>``, in linear time."""
    last, at = None, 0
    while (start := text.find("<answer>", at)) >= 0 and (end := text.find("</answer>", start)) >= 0:
        last, at = text[start + len("<answer>") : end], end + len("</answer>")
    return last


_REPLACED = (
    *(("an ", ""), ("a ", ""), (".$", "$"), ("\\$", ""), ("\\ ", ""), (" ", ""), ("mbox", "text")),
    *((",\\text{and}", ","), ("\\text{and}", ","), ("\\text{m}", "\\text{}")),
)
_REMOVED = (
    *("square", "ways", "integers", "dollars", "mph", "inches", "hours", "km", "units", "\\ldots", "sue", "points"),
    *("feet", "minutes", "digits", "cents", "degrees", "cm", "gm", "pounds", "meters", "meals", "edges", "students"),
    *("childrentickets", "multiples", "\\text{s}", "\\text{.}", "\\text{\ns}", "\\text{}^2", "\\text{}^3"),
    *("\\text{\n}", "\\text{}", "\\mathrm{th}", "^\\circ", "^{\\circ}", "\\;", ",\\!", "{,}", '"', "\\dots"),
)


def _normalise_minerva(text: str) -> str:
    """Return Minerva's normal form of a final answer (arXiv 2206.14858, appendix D.1), as in math_dapo."""
    text = text.rpartition("=")[2]
    for old, new in (*_REPLACED, *((word, "") for word in _REMOVED)):
        text = text.replace(old, new)
    text = re.sub(r".*?\$(.*?)\$.*", r"$\1$", text)
    for command in ("text", "textbf", "overline"):
        text = re.sub(rf"\\{command}\{{(.*?)\}}", r"\1", text)
    text = re.sub(r"\\boxed\{(.*)\}", r"\1", text)
    text = re.sub(r"frac([^{])(.)", r"frac{\1}{\2}", text)
    text = re.sub(r"sqrt([^{])", r"sqrt{\1}", text)
    text = text.replace("$", "")
    if text.replace(",", "").isdigit():
        text = text.replace(",", "")
    return text.strip()


__all__ = ["PUBLISHED", "PublishedAnswer", "PublishedCountdown", "published"]


@dataclass(frozen=True)
class PublishedCountdown:
    """Countdown as scored by ``nano_aha``, ``grpo_zero`` or ``tinyzero``: the value of ``eval``, within 1e-5.

    As in these systems, decimals, ``//`` and ``**`` are allowed, and ``1.5*2`` uses the numbers 1, 5 and 2. No
    interpreter evaluates the expression. An expression with more than 4096 tokens, 100 levels or 65,536 bits is
    ``undecided`` and scored as wrong. Columns: ``nums``, ``target``.
    """

    system: str
    weight: float = 1.0
    __name__: ClassVar[str] = "published_countdown"

    def __post_init__(self) -> None:
        check_choice("system", self.system, list(EQUATIONS))

    def verdicts(self, completions: Sequence[Any], columns: Columns) -> Verdicts:
        """Score a batch. A ValueError names the column, row and value that the rule cannot use."""
        name, rows = self.__name__, len(completions)
        numbers, offsets = read_ragged_whole_numbers(columns, "nums", rows, name)
        targets = read_whole_numbers(columns, "target", rows, name).tolist()
        nums = [numbers[start:end].tolist() for start, end in pairwise(offsets)]
        judge = EQUATIONS[self.system]
        judged = [judge(*row) for row in zip(read_texts(completions, name), nums, targets, strict=True)]
        return _make_verdicts(judged)

    __call__ = call_rule


@dataclass(frozen=True)
class PublishedAnswer:
    """An answer as scored by ``simple_grpo``, ``lm_book``, ``rl_from_scratch`` or the scorers of verl.

    If a gold answer contains ``####``, the text after it counts, as in the data preparation of these systems. Columns:
    ``answer``.
    """

    system: str
    weight: float = 1.0
    __name__: ClassVar[str] = "published_answer"

    def __post_init__(self) -> None:
        check_choice("system", self.system, list(ANSWERS))

    def verdicts(self, completions: Sequence[Any], columns: Columns) -> Verdicts:
        """Score a batch. A ValueError names the column, row and value that the rule cannot use."""
        golds = read_golds(columns, "answer", len(completions), self.__name__)
        wanted = [extract_gold(self.system, gold) for gold in golds]
        for row, gold in enumerate(wanted):
            if not gold or (self.system == "simple_grpo" and parse_exact(gold) is None):
                raise ValueError(f"{self.__name__}: answer[{row}] is {golds[row]!r}, expected a number or #### and one")
        judge = ANSWERS[self.system]
        return _make_verdicts([judge(*row) for row in zip(read_texts(completions, self.__name__), wanted, strict=True)])

    __call__ = call_rule


def published(system: str, accuracy: Rule | None = None) -> tuple[Rule, ...]:
    """Return the reward of a published system: rules whose weighted sum is the reward.

    Args:
        system: One of :data:`PUBLISHED`; docs/reference/reward_rules.md has the formulas.
        accuracy: The rule for correctness in ``r1_blog``, ``open_r1`` and ``open_r1_cosine``, by default
            ``MathAnswer()``. Other systems have their own rule.

    Raises:
        ValueError: The system is unknown, or has its own rule and ``accuracy`` is given.
    """
    check_choice("system", system, PUBLISHED)
    if system in _AROUND:
        return _AROUND[system](MathAnswer() if accuracy is None else accuracy)
    if accuracy is not None:
        raise ValueError(f"accuracy is {accuracy!r}, expected None: {system} has a rule of its own")
    return _SYSTEM_RULES[system]


def _make_verdicts(judged: Sequence[Judgement]) -> Verdicts:
    scores = np.array([score for score, _ in judged], dtype=np.float64)
    return Verdicts(scores, np.array([status for _, status in judged], dtype=np.uint8))


_SYSTEM_RULES: Mapping[str, tuple[Rule, ...]] = {
    "nano_aha": (PublishedCountdown("nano_aha"), TagFormat(mode="nano_aha", prefix="<think>")),
    "grpo_zero": (PublishedCountdown("grpo_zero"), TagFormat(mode="grpo_zero", prefix="<think>", weight=0.1)),
    "tinyzero": (PublishedCountdown("tinyzero"),),
    "simple_grpo": (PublishedAnswer("simple_grpo"), TagFormat(mode="simple_grpo")),
    "simple_grpo_v1": (PublishedAnswer("simple_grpo"), TagFormat(mode="simple_grpo_v1")),
    "lm_book": (PublishedAnswer("lm_book"), TagCount("reasoning", "answer", mode="lm_book")),
    "rl_from_scratch": (
        PublishedAnswer("rl_from_scratch"),
        TagFormat("reasoning", "answer", mode="rl_from_scratch"),
    ),
    "verl_gsm8k": (PublishedAnswer("verl_gsm8k"),),
    "verl_gsm8k_flexible": (PublishedAnswer("verl_gsm8k_flexible"),),
    "verl_math_dapo": (PublishedAnswer("verl_math_dapo"),),
    "verl_math_dapo_box": (PublishedAnswer("verl_math_dapo_box"),),
}
_AROUND: Mapping[str, Callable[[Rule], tuple[Rule, ...]]] = {
    "r1_blog": lambda accuracy: (accuracy, TagCount(mode="blocks"), ReasoningLength(weight=0.01)),
    "open_r1": lambda accuracy: (accuracy, TagFormat(mode="open_r1"), TagCount(mode="open_r1")),
    "open_r1_cosine": lambda accuracy: (CosineLength(rule=accuracy, beyond="cosine"), Repetition()),
}
PUBLISHED = (*_SYSTEM_RULES, *_AROUND)
"""The systems that :func:`published` knows."""
