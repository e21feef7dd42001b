"""Questions to a judge over OpenAI's chat API: concurrency, pace, retries, outages, and the deadline of a question."""

from __future__ import annotations

import asyncio
import email.utils
import itertools
import json
import logging
import os
import random
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from rlox_grpo.errors import ConfigError
from rlox_grpo.rewards.judge.replies import UnreadableReplyError

logger = logging.getLogger(__name__)

Values = TypeVar("Values")

LARGEST_BODY = 4 * 2**20
"""Bytes of an answer. A longer one is not read further."""

_TRY_AGAIN = frozenset({408, 409, 425, 429, *range(500, 600)})
_AWAY = frozenset({502, 503, 504})
"""HTTP statuses of a server that is down, or of the proxy before it."""
_CONNECT_S, _WARN_EVERY_S = 10.0, 60.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 20.0
_RANDOM = random.SystemRandom()  # the generators of a run's seed are not touched


class Unanswered(Exception):  # noqa: N818  # not an error of the run: the sample has no score
    """The server gave no usable answer. The message contains the reason and never the API key."""


class _TryAgain(Exception):  # noqa: N818
    """A temporary failure, the number of seconds that the server asks to wait, and whether the server is down."""

    def __init__(self, message: str, wait_s: float = 0.0, *, is_away: bool = False) -> None:
        super().__init__(message)
        self.wait_s, self.is_away = wait_s, is_away


@dataclass
class Answer(Generic[Values]):
    """The outcome of a question to the judge.

    Attributes:
        values: what the verdict says; None without a verdict.
        trouble: the reason why there is no verdict; "" if there is a verdict.
        reply: the judge's last reply.
        is_answered: whether the judge replied; if it replied, a missing verdict means that the reply has none.
        requests: number of requests.
        tokens: tokens of prompts and replies, as the server counts them.
        seconds: time from the first request to the end.
    """

    values: Values | None = None
    trouble: str = ""
    reply: str = ""
    is_answered: bool = False
    requests: int = 0
    tokens: int = 0
    seconds: float = 0.0


class Server:
    """A judge's server during one batch, as an async context manager.

    Args:
        url: base URL, to which ``/chat/completions`` is added.
        key: the API key; None: no authorization.
        slots: one for each question at a time, shared by all batches.
        max_concurrent: largest number of connections.
        pace: shared by all batches.
        retries: largest number of further requests for a question.
        timeout: seconds for a question with all of its retries, after its turn has come.
        max_outage: seconds that questions wait for a server that has answered before and cannot be reached. They count
            neither for ``timeout`` nor as retries.
    """

    def __init__(
        self,
        url: str,
        key: str | None,
        *,
        slots: asyncio.Semaphore,
        max_concurrent: int,
        pace: Pace,
        retries: int,
        timeout: float,
        max_outage: float,
    ) -> None:
        import httpx

        self._url, self._key = f"{url}/chat/completions", key
        self._retries, self._timeout, self._max_outage = retries, timeout, max_outage
        self._slots, self._pace = slots, pace
        # Without redirects, which could carry the key elsewhere, and without compression, which could hide the size.
        self._client = httpx.AsyncClient(
            headers={
                "Content-Type": "application/json",
                "Accept-Encoding": "identity",
                **({} if key is None else {"Authorization": f"Bearer {key}"}),
            },
            limits=httpx.Limits(max_connections=max_concurrent, max_keepalive_connections=max_concurrent),
            follow_redirects=False,
            timeout=httpx.Timeout(timeout, connect=min(timeout, _CONNECT_S)),
        )
        self._failures = (httpx.HTTPError, asyncio.TimeoutError, _TryAgain)
        self._no_connection = (httpx.ConnectError, httpx.ConnectTimeout)

    async def __aenter__(self) -> Server:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._client.aclose()

    async def ask(self, body: bytes, read: Callable[[str], Values]) -> Answer[Values]:
        """Ask a question until ``read`` reads a verdict in the reply, retries or time run out, or the server refuses.

        ``read`` raises :class:`UnreadableReplyError` of a reply without a verdict.
        """
        answer: Answer[Values] = Answer()
        async with self._slots:
            await self._pace.wait()
            start = time.monotonic()
            deadline = start + self._timeout
            failures, outage = 0, None
            for attempt in itertools.count():
                began, wait_s, outage_ends = time.monotonic(), 0.0, None
                try:
                    await self._wait_for_resume(deadline)
                    left = deadline - time.monotonic()
                    answer.requests += 1
                    await asyncio.wait_for(self._take_reply(body, answer), left)
                    answer.values, answer.trouble = read(answer.reply), ""
                    break
                except UnreadableReplyError as error:
                    answer.trouble = f"the judge's reply cannot be read: {error}"
                except self._failures as error:
                    answer.is_answered = False
                    answer.trouble = self._describe(error)
                    wait_s = getattr(error, "wait_s", 0.0)
                    if isinstance(error, self._no_connection) or getattr(error, "is_away", False):
                        # If others were answered meanwhile, the next failure is one of this question.
                        earlier, outage = outage, self._begin_outage(answer.trouble)
                        if outage is not None and earlier in (None, outage):
                            outage_ends = outage + self._max_outage
                except Unanswered as error:
                    answer.is_answered, answer.trouble = (
                        False,
                        f"{self._describe(error)}; {answer.trouble}".rstrip("; "),
                    )
                    break
                failures += outage_ends is None
                until = deadline if outage_ends is None else outage_ends
                if failures > self._retries or not await self._wait(attempt, wait_s, until, answer):
                    break
                if outage_ends is not None:
                    deadline += time.monotonic() - began
            answer.seconds = time.monotonic() - start
        return answer

    def _begin_outage(self, trouble: str) -> float | None:
        """Return when the server's outage began, such as now; None if questions do not wait for its end."""
        if not self._pace.was_answered or not self._retries or not self._max_outage:
            return None
        if self._pace.away_since is None:
            began = self._pace.away_since = time.monotonic()
            if began >= self._pace.next_warning:
                self._pace.next_warning = began + _WARN_EVERY_S
                logger.warning(
                    "the judge at %s cannot be reached (%s): questions wait for up to %g s (max_outage)",
                    self._url,
                    trouble,
                    self._max_outage,
                )
        return self._pace.away_since

    async def _wait_for_resume(self, deadline: float) -> None:
        """Wait until the pause that the server asks for has ended, which other answers may extend meanwhile.

        Raises:
            Unanswered: the pause ends after the deadline.
        """
        while (pause_s := self._pace.pause_s) > 0:
            left = deadline - time.monotonic()
            if pause_s > left:
                raise Unanswered(f"the server asks to wait {pause_s:.3g} s more")
            await asyncio.sleep(min(left, pause_s + _RANDOM.uniform(0.0, 0.5)))  # not all at the same moment

    async def _wait(self, attempt: int, wait_s: float, deadline: float, answer: Answer[Values]) -> bool:
        """Wait before another request; False if it could only come after the deadline."""
        pause = min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2 ** min(attempt, 10)) * _RANDOM.uniform(0.5, 1.0)
        if answer.is_answered:  # the server is well
            pause = 0.0
        pause = max(pause, wait_s + (_RANDOM.uniform(0.0, 0.5) if wait_s else 0.0))
        if time.monotonic() + pause >= deadline:
            asked = f"the server asks to wait {wait_s:.3g} s, and " if wait_s else ""
            limit = self._timeout if self._pace.away_since is None else self._max_outage
            answer.trouble += f"; {asked}no time is left for another request within {limit:g} s"
            return False
        await asyncio.sleep(pause)
        try:
            await asyncio.wait_for(self._pace.wait(), deadline - time.monotonic())
        except asyncio.TimeoutError:
            return False
        return True

    async def _take_reply(self, body: bytes, answer: Answer[Values]) -> None:
        """Send one request, and store the reply and its tokens in ``answer``."""
        async with self._client.stream("POST", self._url, content=body) as response:
            if 300 <= response.status_code < 400:
                raise Unanswered(
                    f"HTTP {response.status_code}, a redirect, is not followed: set url to the new address"
                )
            if response.headers.get("content-encoding", "identity") != "identity":
                raise Unanswered("the server compresses its answers although the request forbids it")
            content = bytearray()
            async for chunk in response.aiter_raw():
                content += chunk
                if len(content) > LARGEST_BODY:
                    raise Unanswered(f"the answer has more than {LARGEST_BODY} bytes")
        if response.status_code not in _AWAY:
            self._pace.was_answered, self._pace.away_since = True, None
        if response.status_code in _TRY_AGAIN:
            wait_s = read_retry_after(response.headers.get("retry-after", ""))
            # A longer wait than any question has ends this question alone: nobody could wait it out, and a header that
            # is wrong would stop all later questions.
            if response.status_code in (429, 503) and wait_s <= self._timeout:
                self._pace.pause(wait_s)
            is_away = response.status_code in _AWAY and wait_s <= self._timeout
            raise _TryAgain(f"HTTP {response.status_code}: {self._shorten(content)}", wait_s, is_away=is_away)
        if response.status_code != 200:
            raise Unanswered(f"HTTP {response.status_code}: {self._shorten(content)}")
        try:
            reply, reason, tokens = read_completion(bytes(content))
        except (ValueError, RecursionError, LookupError, TypeError, AttributeError):
            raise _TryAgain(f"not a chat completion: {self._shorten(content)}") from None
        answer.reply = reply.replace(self._key, "…") if self._key else reply
        answer.tokens += tokens
        answer.is_answered = True
        if reason in ("length", "content_filter"):
            raise UnreadableReplyError(f"it was cut, finish_reason {reason!r}; max_reply_tokens limits its length")

    def _shorten(self, content: bytearray) -> str:
        """Return the beginning of an answer for a message. The answer may repeat the key."""
        shown = content.replace(self._key.encode(), b"...") if self._key else content
        return repr(bytes(shown[:200]))[1:]

    def _describe(self, error: BaseException) -> str:
        if isinstance(error, asyncio.TimeoutError):
            return f"no answer within {self._timeout:g} s"
        return str(error) if isinstance(error, (Unanswered, _TryAgain)) else f"{type(error).__name__}: {error}"


class Pace:
    """When the next request may be sent: at most ``per_minute``, and not before a pause that the server asks for.

    Attributes:
        was_answered: whether the server has answered in this process.
        away_since: the time since which the server cannot be reached, of ``time.monotonic``; None: it can.
        next_warning: when the next outage is logged, of ``time.monotonic``.
    """

    def __init__(self, per_minute: float | None) -> None:
        self.was_answered = False
        self.away_since: float | None = None
        self.next_warning = 0.0
        self._interval = 0.0 if per_minute is None else 60.0 / per_minute
        self._next = self._resume = 0.0

    async def wait(self) -> None:
        """Wait for the turn of a request."""
        now = time.monotonic()
        turn = max(now, self._next)
        self._next = turn + self._interval
        if turn > now:
            await asyncio.sleep(turn - now)

    def pause(self, seconds: float) -> None:
        """Send nothing for some seconds."""
        self._resume = max(self._resume, time.monotonic() + seconds)

    @property
    def pause_s(self) -> float:
        """Seconds that are left of the pause."""
        return max(0.0, self._resume - time.monotonic())


def read_completion(content: bytes) -> tuple[str, str | None, int]:
    """Return the text of a chat completion, its finish reason, and the tokens of its prompt and its reply.

    Raises:
        ValueError, RecursionError, LookupError, TypeError, AttributeError: the answer is not a chat completion.
    """
    answer = json.loads(content)
    choice = answer["choices"][0]
    text, usage = choice["message"]["content"], answer.get("usage")
    text = "" if text is None else text
    if isinstance(text, list):
        text = "".join(entry["text"] for entry in text if entry["type"] == "text")
    if not isinstance(text, str):
        raise TypeError("its content is no text")
    counts = usage if isinstance(usage, dict) else {}
    tokens = sum(_read_count(counts.get(name)) for name in ("prompt_tokens", "completion_tokens"))
    return text, choice.get("finish_reason"), tokens


def read_retry_after(header: str) -> float:
    """Return the seconds of a Retry-After header, a number or a date; 0 for anything else. They may be very many."""
    header = header.strip()[:100]
    if re.fullmatch(r"[0-9]+(\.[0-9]+)?", header):
        return float(header)
    try:
        return max(0.0, email.utils.parsedate_to_datetime(header).timestamp() - time.time())
    except (ValueError, TypeError, OverflowError, IndexError):
        return 0.0


def read_key(variable: str | None) -> str | None:
    """Return the API key in an environment variable; None without a variable.

    Raises:
        ConfigError: the variable is not set, or its value cannot be sent.
    """
    if variable is None:
        return None
    key = os.environ.get(variable, "").strip()
    if not key or not key.isascii() or not key.isprintable():
        raise ConfigError(
            f"the judge's api_key_env is {variable!r}: set this environment variable to the API key, printable ASCII"
        )
    return key


def _read_count(value: Any) -> int:
    return value if type(value) is int and 0 <= value < 2**31 else 0
