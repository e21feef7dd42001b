"""The rule ``Judge``: a language model on a server grades completions by a rubric."""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import math
import re
import urllib.parse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeAlias

import numpy as np

from rlox_grpo.rewards.calls import MEASURED
from rlox_grpo.rewards.columns import Columns, number_groups, read_column, read_texts
from rlox_grpo.rewards.judge.absolute import grade_alone
from rlox_grpo.rewards.judge.cache import FOLDER, VerdictCache
from rlox_grpo.rewards.judge.grading import Grade, Reply, Sample
from rlox_grpo.rewards.judge.group import grade_groups
from rlox_grpo.rewards.judge.pairwise import grade_pairs
from rlox_grpo.rewards.judge.questions import cut_middle, show_text
from rlox_grpo.rewards.judge.replies import UnreadableReplyError, make_mark, read_verdict, take_reasons
from rlox_grpo.rewards.judge.server import Answer, Pace, Server, read_key
from rlox_grpo.rewards.verdicts import (
    NO_VERDICT,
    OK,
    STATUSES,
    UNANSWERED,
    Float64Array,
    Verdicts,
    check_choice,
    reduce_settings,
    to_floats,
)

logger = logging.getLogger(__name__)

Mode: TypeAlias = Literal["absolute", "pairwise", "group"]

COSTS = ("requests", "tokens", "retries", "latency_s", "cached")
"""Measures of every judge. ``cached`` is in no other reward's metrics, so it marks those of a judge."""

NO_CRITERIA = frozenset({*MEASURED, *COSTS, "agreement"})
"""Names of metrics of a judge that no criterion can have."""

_RESERVED = ("prompt", "prompts", "completion", "completions", "completion_a", "completion_b")
_PLACEHOLDER = re.compile(r"(?<![\w}])\{+[A-Za-z_]\w*\}+")
"""A placeholder of a template, such as ``{completion}`` and ``{{prompt}}``; JSON and ``\\boxed{a}`` have none."""

_FORM = 1
"""Version of the text of questions and of the form of verdicts, which is part of the digest of a question."""

_OTHERS_S = 0.02
"""Seconds between two looks for the verdict of a question that another process asks."""

_SHOWN = 4000
"""Maximum number of characters of a question, and of a reply, that the cache stores for its readers."""


@dataclass(frozen=True)
class Judge:
    """A score from 0 to 1 by a language model on a server, which judges completions by a rubric (LLM as a judge).

    The judge is asked over OpenAI's chat API. The modes are:

    - ``"absolute"``: the judge grades each completion by itself. With ``criteria`` it gives a score for each criterion
      in one reply, and the score is their weighted mean.
    - ``"group"``: the judge grades the completions of a group together, in one question in which their order is
      shuffled.
    - ``"pairwise"``: the judge compares pairs of a group, each in both orders; the score is the share of wins.
      :func:`~rlox_grpo.rewards.judge.pairwise.grade_pairs` describes the pairs.

    The verdict is one JSON object at the end of the reply. A sample whose reply has no verdict has the status
    ``no_verdict``, one without an answer of the server ``unanswered``. Neither sample has a score: both are left out of
    their group, and neither counts as 0. Completions are quoted as JSON, and a verdict that a completion states is not
    read.

    Verdicts are stored in the folder ``judge`` of the run, so that a run that was killed and resumed asks nothing twice
    and has the same rewards. ``rlox-grpo judge-cache RUN`` prints the verdicts.

    What the judge says before its verdict is the feedback of the sample: it is in the file of completions and in the
    report, and a ``teacher_prompt`` can read it.

    The object is an async reward function, also without a trainer:
    ``asyncio.run(Judge(…)(prompts=[…], completions=[…]))`` returns a list with a float or None for each completion.
    A group is ``group_size`` consecutive completions, or without it, consecutive completions with equal ``prompts``.

    Args:
        url: Base URL of the API, such as ``http://127.0.0.1:8000/v1``.
        model: Name of the judge on the server.
        rubric: What a good completion is. With ``criteria`` it may be empty.
        mode: See above.
        criteria: Names, or name → weight.
        columns: Columns of the data that the judge sees, such as a reference answer.
        weight: Weight of the score in the total reward.
        max_concurrent: Largest number of questions at a time, over all ranks.
        max_per_minute: Largest number of requests in a minute, over all ranks.
        retries: Largest number of further requests for a question.
        timeout: Seconds for a question with all of its retries, after its turn has come.
        max_outage: Seconds that questions wait for a server that has answered before and cannot be reached.
        api_key_env: Environment variable with the API key; None: no key is sent.
        temperature: Temperature of the judge; None: not sent.
        max_reply_tokens: Sent as ``max_tokens``; None: not sent.
        max_characters: Largest length of a prompt and of all completions in a question. Longer texts lose their middle.
        max_comparisons: For ``pairwise``, the largest number of comparisons of a completion.
        repeat_share: Share of the questions that are asked twice, to measure ``agreement``.
        group_size: See above.
        seed: Decides the order of completions.
        extra_body: Further fields of a request, such as ``{"chat_template_kwargs": {"enable_thinking": False}}``.
        cache: Folder of the verdicts; None: the folder of the run; without a run, verdicts are kept only in memory.

    Raises:
        ValueError: An argument is out of range.
    """

    url: str
    model: str
    rubric: str = ""
    mode: Mode = "absolute"
    criteria: Any = ()
    columns: Sequence[str] = ()
    weight: float = 1.0
    max_concurrent: int = field(default=16, repr=False)
    max_per_minute: float | None = field(default=None, repr=False)
    retries: int = field(default=3, repr=False)
    timeout: float = field(default=60.0, repr=False)
    max_outage: float = field(default=300.0, repr=False)
    api_key_env: str | None = field(default=None, repr=False)
    temperature: float | None = 0.0
    max_reply_tokens: int | None = 1024
    max_characters: int = 32_000
    max_comparisons: int = 4
    repeat_share: float = 0.0
    group_size: int | None = None
    seed: int = 0
    extra_body: Mapping[str, Any] = field(default_factory=dict, hash=False)
    cache: str | Path | None = field(default=None, repr=False)
    _state: dict[str, Any] = field(init=False, repr=False, compare=False, default_factory=dict)
    __name__: ClassVar[str] = "judge"

    def __post_init__(self) -> None:
        object.__setattr__(self, "url", _check_url(self.url))
        object.__setattr__(self, "criteria", _read_criteria(self.criteria))
        object.__setattr__(self, "columns", tuple([self.columns] if isinstance(self.columns, str) else self.columns))
        if not isinstance(self.model, str) or not self.model.strip():
            raise ValueError(f"model is {self.model!r}, expected the name of the judge on the server")
        check_choice("mode", self.mode, ("absolute", "pairwise", "group"))
        if not isinstance(self.rubric, str) or not (self.rubric.strip() or self.criteria):
            raise ValueError(f"rubric is {self.rubric!r}, expected a text that says what a good completion is")
        if self.criteria and self.mode != "absolute":
            raise ValueError(f"criteria are for mode='absolute', and mode is {self.mode!r}: write them into the rubric")
        for name in self.columns:
            if not isinstance(name, str) or name in _RESERVED:
                raise ValueError(f"columns has {name!r}, expected names of columns other than {', '.join(_RESERVED)}")
        least = {"max_concurrent": 1, "retries": 0, "max_characters": 100, "max_comparisons": 2}
        optional = {name: 1 for name in ("max_reply_tokens", "group_size") if getattr(self, name) is not None}
        for name, smallest in {**least, **optional}.items():
            if type(getattr(self, name)) is not int or getattr(self, name) < smallest:
                raise ValueError(f"{name} is {getattr(self, name)!r}, expected a whole number of at least {smallest}")
        for name in ("timeout", "max_per_minute"):
            if (value := getattr(self, name)) is not None and not 0 < value < math.inf:
                raise ValueError(f"{name} is {value!r}, expected a finite number above 0")
        if not 0 <= self.max_outage < math.inf:
            raise ValueError(f"max_outage is {self.max_outage!r}, expected a finite number of at least 0")
        if type(self.seed) is not int:
            raise ValueError(f"seed is {self.seed!r}, expected a whole number")
        if not 0 <= self.repeat_share <= 1:
            raise ValueError(f"repeat_share is {self.repeat_share!r}, expected a share from 0 to 1")
        fixed = {"model", "messages", "stream", "n", "temperature", "max_tokens"} & {*self.extra_body}
        if fixed:
            raise ValueError(
                f"extra_body has {', '.join(sorted(fixed))}: leave it out, or use the argument of the judge"
            )
        try:
            json.dumps(dict(self.extra_body), allow_nan=False)
        except (TypeError, ValueError) as error:
            raise ValueError(f"extra_body is {self.extra_body!r}, expected JSON values: {error}") from None
        self._state["ranks"] = 1

    __reduce__ = reduce_settings  # a copy reads the cache again

    def join_run(self, folder: Path | None, num_ranks: int) -> None:
        """Store verdicts in the run's folder, and take this rank's share of the limits."""
        self._state.clear()
        self._state.update(ranks=num_ranks, folder=None if folder is None else folder / FOLDER)

    def check(self, columns: Columns, rows: int) -> None:
        """Check the API key and the columns before a run.

        Raises:
            ConfigError: the environment variable of the API key is not set.
            ValueError: a column is missing.
        """
        read_key(self.api_key_env)
        for name in self.columns:
            read_column(columns, name, rows, self.__name__)
        if placeholders := _PLACEHOLDER.findall(self.rubric):
            logger.warning(
                "the rubric of judge %s has %s, which the judge reads as it is written: a rubric is not a template. "
                "The prompt, the completion and the columns that columns=[…] names are below the rubric in a question",
                *(self.model, ", ".join(dict.fromkeys(placeholders))),
            )

    async def __call__(
        self, prompts: Any = None, completions: Sequence[Any] = (), **columns: Any
    ) -> list[float | None]:
        """Score a batch, called as TRL calls reward functions."""
        arguments = columns if prompts is None else {**columns, "prompts": prompts}
        return to_floats((await self.gather_verdicts(completions, arguments)).scores)

    async def gather_verdicts(self, completions: Sequence[Any], columns: Columns) -> Verdicts:
        """Score a batch; reads ``prompts``, if there are any, and :attr:`columns`.

        Raises:
            ValueError: a completion is neither text nor messages, a column is missing, or there is no API key.
            OSError: a verdict cannot be written to the cache.
        """
        samples = self._read_samples(completions, columns)
        async with Server(
            self.url,
            read_key(self.api_key_env),
            slots=self._share_slots(),
            max_concurrent=self._count_slots(),
            pace=self._share_pace(),
            retries=self.retries,
            timeout=self.timeout,
            max_outage=self.max_outage,
        ) as server:
            interview = _Interview(self, server, self._open_cache(), len(samples))
            if self.mode == "absolute":
                grades = await grade_alone(samples, self.rubric, dict(self.criteria), interview)
            elif self.mode == "group":
                grades = await grade_groups(samples, self.rubric, self.seed, interview)
            else:
                grades = await grade_pairs(samples, self.rubric, self.seed, self.max_comparisons, interview)
        interview.warn(grades)
        measures = interview.measure() | _collect_measures(grades, [name for name, _ in self.criteria])
        scores = np.array([grade.score for grade in grades], dtype=np.float64)  # NumPy reads None as NaN
        statuses = np.array([grade.status for grade in grades], dtype=np.uint8)
        feedback = tuple(cut_middle(grade.reasons, 2 * _SHOWN) or None for grade in grades)
        return Verdicts(scores, statuses, measures, feedback if any(feedback) else ())

    def _read_samples(self, completions: Sequence[Any], columns: Columns) -> list[Sample]:
        rows = len(completions)
        read_texts(completions, self.__name__)  # refuses what is neither text nor messages
        columns_shown = {name: read_column(columns, name, rows, self.__name__) for name in self.columns}
        prompts = columns.get("prompts")
        if prompts is not None and len(prompts) != rows:
            raise ValueError(f"{self.__name__}: prompts has {len(prompts)} rows, expected {rows}")
        if self.mode == "absolute":
            groups = list(range(rows))
        else:
            groups = number_groups(columns, rows, self.group_size, self.__name__)
        sizes = np.bincount(groups, minlength=rows + 1) if rows else np.zeros(1, np.int64)
        samples = []
        for row, (completion, group) in enumerate(zip(completions, groups, strict=True)):
            in_question = {"absolute": 1, "pairwise": 2, "group": int(sizes[group])}[self.mode]
            context = {} if prompts is None else {"prompt": show_text(prompts[row], self.max_characters)}
            for name, values in columns_shown.items():
                context[name] = show_text(values[row], self.max_characters)
            shown = show_text(completion, max(1, self.max_characters // in_question))
            samples.append(Sample(shown, context, group))
        return samples

    def _count_slots(self) -> int:
        ranks: int = self._state["ranks"]
        return max(1, self.max_concurrent // ranks)

    def _share_slots(self) -> asyncio.Semaphore:
        """Return the slots of all batches that wait at the same time, such as those of several sources."""
        loop = asyncio.get_running_loop()
        if self._state.get("loop") is not loop:
            self._state.update(loop=loop, slots=asyncio.Semaphore(self._count_slots()))
        slots: asyncio.Semaphore = self._state["slots"]
        return slots

    def _share_pace(self) -> Pace:
        if "pace" not in self._state:
            rate = self.max_per_minute
            self._state["pace"] = Pace(None if rate is None else rate / self._state["ranks"])
        pace: Pace = self._state["pace"]
        return pace

    def _open_cache(self) -> VerdictCache:
        if "cache" not in self._state:
            folder = self._state.get("folder") if self.cache is None else Path(self.cache).expanduser()
            self._state["cache"] = VerdictCache(folder)
        cache: VerdictCache = self._state["cache"]
        return cache


class _Interview:
    """The questions of one batch, each asked once, and what they cost.

    Attributes:
        costs: requests, tokens and retries, ``float64 [N]``: each sample's share.
    """

    def __init__(self, judge: Judge, server: Server, cache: VerdictCache, rows: int) -> None:
        self._judge, self._server, self._cache = judge, server, cache
        self._asked: dict[str, asyncio.Task[Answer[tuple[Any, Any]]]] = {}
        self._troubles: list[str] = []
        self.costs = {name: np.zeros(rows) for name in ("requests", "tokens", "retries")}
        self._seconds: list[list[float]] = [[] for _ in range(rows)]
        self._cached: list[list[float]] = [[] for _ in range(rows)]

    async def __call__(
        self,
        rows: Sequence[int],
        question: str,
        texts: Sequence[str],
        read: Callable[[Any], Any],
        longest: int,
        *,
        again: bool = False,
    ) -> Reply:
        """Ask, or return an earlier verdict; see :class:`~rlox_grpo.rewards.judge.grading.Ask`."""
        if mark := make_mark(question, texts):
            question += f' Add the key "mark" with the value "{mark}" to this object, after its other key.'
        body = self._make_body(question)
        key = hashlib.sha256(json.dumps([_FORM, self._judge.url, body, again]).encode()).hexdigest()
        if (earlier := await self._claim(key, read)) is not None:
            for row in rows:
                self._cached[row].append(1.0)
            return earlier
        is_new = key not in self._asked
        if is_new:
            self._asked[key] = asyncio.create_task(
                self._server.ask(json.dumps(body).encode(), lambda reply: read_verdict(reply, read, longest, mark))
            )
        try:
            answer = await self._asked[key]
            if is_new:
                self._store(key, question, answer)
                self._count(rows, answer)
        finally:
            if is_new:
                self._cache.release(key)
        for row in rows:
            self._cached[row].append(float(not is_new))
        if answer.trouble:
            self._troubles.append(answer.trouble)
        status = OK if not answer.trouble else NO_VERDICT if answer.is_answered else UNANSWERED
        # Of the reply as the cache stores it, so that a resumed run has the same reasons.
        reasons = take_reasons(cut_middle(answer.reply, _SHOWN)) if answer.is_answered else ""
        return Reply(None if answer.values is None else answer.values[1], status, reasons)

    def repeats(self, question: str) -> bool:
        """Whether the question is asked twice, as its digest decides."""
        digest = hashlib.sha256(question.encode()).digest()
        return int.from_bytes(digest[:4], "big") < self._judge.repeat_share * 2**32

    def warn(self, grades: Sequence[Grade]) -> None:
        """Log how many samples have no score, and the first reason."""
        unscored = [STATUSES[grade.status] for grade in grades if grade.score is None]
        if unscored:
            counts = ", ".join(f"{unscored.count(status)} {status}" for status in dict.fromkeys(unscored))
            logger.warning(
                "judge %s at %s: %d of %d samples have no score (%s); the first reason: %s",
                *(self._judge.model, self._judge.url, len(unscored), len(grades), counts),
                self._troubles[0] if self._troubles else "the judge had no verdict about them before",
            )

    def measure(self) -> dict[str, Float64Array]:
        """Return the costs, ``float64 [N]`` by name; NaN for the latency of a sample without a request."""
        return {
            **self.costs,
            "latency_s": _average_rows(self._seconds),
            "cached": _average_rows(self._cached),
        }

    def _make_body(self, question: str) -> dict[str, Any]:
        judge = self._judge
        sampling = {"temperature": judge.temperature, "max_tokens": judge.max_reply_tokens}
        return {
            "model": judge.model,
            "messages": [{"role": "user", "content": question}],
            **{name: value for name, value in sampling.items() if value is not None},
            **judge.extra_body,
        }

    async def _claim(self, key: str, read: Callable[[Any], Any]) -> Reply | None:
        """Return an earlier verdict; None once this process may ask, or is asking. Wait while another process asks."""
        while (earlier := self._find(key, read)) is None and key not in self._asked:
            is_claimed = self._cache.claim(key)
            if (earlier := self._find(key, read)) is None and is_claimed:
                break
            if is_claimed:
                self._cache.release(key)
            else:
                await asyncio.sleep(_OTHERS_S)
        return earlier

    def _find(self, key: str, read: Callable[[Any], Any]) -> Reply | None:
        entry = self._cache.find(key)
        if entry is None:
            return None
        verdict, reasons = entry[0], take_reasons(self._cache.find_reply(key))
        if verdict is None:
            return Reply(None, NO_VERDICT, reasons)
        try:
            return Reply(read(verdict), OK, reasons)
        except UnreadableReplyError:  # somebody has edited the file
            return None

    def _store(self, key: str, question: str, answer: Answer[Any]) -> None:
        """Store what the judge said. A question without an answer is asked again the next time."""
        if answer.is_answered:
            about = {
                "model": self._judge.model,
                "question": cut_middle(question, _SHOWN),
                "reply": cut_middle(answer.reply, _SHOWN),
                "trouble": answer.trouble,
                "tokens": answer.tokens,
                "seconds": round(answer.seconds, 3),
            }
            self._cache.add(key, None if answer.values is None else answer.values[0], about)

    def _count(self, rows: Sequence[int], answer: Answer[Any]) -> None:
        shares = {
            "requests": answer.requests,
            "tokens": answer.tokens,
            "retries": max(0, answer.requests - 1),
        }
        for name, count in shares.items():
            np.add.at(self.costs[name], list(rows), count / len(rows))
        for row in rows:
            self._seconds[row].append(answer.seconds)


def _average_rows(values: Sequence[Sequence[float]]) -> Float64Array:
    return np.array([float(np.mean(row)) if row else math.nan for row in values], dtype=np.float64)


def _collect_measures(grades: Sequence[Grade], criteria: Sequence[str]) -> dict[str, Float64Array]:
    measures = {name: np.array([grade.criteria.get(name) for grade in grades], dtype=np.float64) for name in criteria}
    agreement = np.array([grade.agreement for grade in grades], dtype=np.float64)
    return measures if np.isnan(agreement).all() else {**measures, "agreement": agreement}


def _check_url(url: Any) -> str:
    try:
        split = urllib.parse.urlsplit(url if isinstance(url, str) else "")
        host, _ = split.hostname, split.port
    except ValueError as error:
        raise ValueError(f"url cannot be read: {error}") from None
    if "@" in split.netloc or split.query or split.fragment:  # not shown: it may be a password
        raise ValueError(
            f"url has a user, a password, a query or a fragment for the host {host}: leave it out. The API key comes "
            "from the environment variable that api_key_env names"
        )
    if split.scheme not in ("http", "https") or not host:
        raise ValueError(f"url is {url!r}, expected http:// or https:// and the base of the API, such as …/v1")
    return split.geturl().rstrip("/").removesuffix("/chat/completions")


def _read_criteria(criteria: Any) -> tuple[tuple[str, float], ...]:
    """Return criteria as pairs of name and weight. Raises ValueError."""
    if isinstance(criteria, Mapping):
        pairs = list(criteria.items())
    elif isinstance(criteria, (list, tuple)):
        pairs = [(entry, 1.0) if isinstance(entry, str) else tuple(entry) for entry in criteria]
    else:
        pairs = [(None, None)]
    for pair in pairs:
        name, weight = pair if len(pair) == 2 else (None, None)
        if not isinstance(name, str) or not re.fullmatch(r"[^\W\d][\w -]{0,63}", name):
            raise ValueError(
                f"criteria is {criteria!r}, expected names, or a table of name and weight; a name begins with a letter "
                "and has letters, digits, spaces, _ and -"
            )
        if name in NO_CRITERIA:
            raise ValueError(f"criteria has {name!r}, which is another metric of a reward: choose another name")
        if isinstance(weight, bool) or not isinstance(weight, (int, float)) or not 0 < weight < math.inf:
            raise ValueError(f"the weight of the criterion {name!r} is {weight!r}, expected a finite number above 0")
    if len({name for name, _ in pairs}) != len(pairs):
        raise ValueError(f"criteria is {criteria!r}, and a name is in it twice")
    return tuple((name, float(weight)) for name, weight in pairs)
