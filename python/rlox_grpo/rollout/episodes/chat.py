"""The chat object of an episode: messages for the environment, exact tokens for the update."""

from __future__ import annotations

import functools
import time
from asyncio import CancelledError
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from rlox_grpo.environments import EpisodeEnded, Reply
from rlox_grpo.prompts.rows import add_system_message
from rlox_grpo.rewards.copies import copy_value
from rlox_grpo.rollout.engines.turns import SampledTurn, TurnRequest
from rlox_grpo.rollout.episodes.budget import Budget, Usage, check_room
from rlox_grpo.rollout.episodes.compaction import Compacted, Compaction
from rlox_grpo.rollout.episodes.conversation import ChatTokens, Conversation
from rlox_grpo.rollout.episodes.conversations import Conversations
from rlox_grpo.rollout.episodes.messages import (
    Message,
    MessageKey,
    bound_messages,
    cut_reply,
    cut_stop,
    list_messages,
    make_message_key,
    read_stop,
    refuse_late_tools,
    refuse_long_prompt,
)
from rlox_grpo.rollout.episodes.pictures import EpisodePictures
from rlox_grpo.rollout.episodes.streaming import Delta, ReplyPieces, begin_pieces
from rlox_grpo.rollout.episodes.template import Template, TemplateError
from rlox_grpo.rollout.episodes.tools import Tools, make_schemas
from rlox_grpo.types import Int64Array


class Chat:
    """An environment's interface to the policy. Each episode has its own chat.

    Attributes:
        seed: seed of this episode, for the environment's random numbers.
        ended: the limit that has ended the episode, or None.
        compactions: the compactions so far.
        parse_errors: number of replies with a tool call that cannot be parsed.
        has_reported_end: whether the endpoint has answered a call with the error ``episode_ended``.
        abandoned: whether the agent ignores the error ``episode_ended`` and keeps calling, so that the episode must be
            cancelled.
        waiting_since: ``time.monotonic()`` of the last return to the environment; None while the environment waits
            for the policy or for tools.
        calling_since: ``time.monotonic()`` of the beginning of the tool calls that run now and have no deadline of
            their own; None: there are none.
    """

    def __init__(
        self,
        template: Template,
        sample: Callable[[TurnRequest], Awaitable[SampledTurn]],
        budget: Budget,
        *,
        episode: tuple[int, int] = (0, 0),
        seed: int = 0,
        tools: Tools | None = None,
        end_ids: Sequence[int] = (),
        make_tools: Callable[[Sequence[Callable[..., Any]]], Tools] = Tools,
        give_template: Callable[[Sequence[Mapping[str, Any]]], Template] | None = None,
        system_prompt: str | None = None,
        open_endpoint: Callable[[Chat], tuple[str, str]] | None = None,
        compaction: Compaction | None = None,
        pictures: EpisodePictures | None = None,
    ) -> None:
        """Begin an empty conversation.

        Args:
            template: the chat template, with the schemas of ``tools``.
            sample: samples one reply.
            budget: the limits.
            episode: index of the prompt in its step, and of the completion in its group.
            seed: see above.
            tools: the tools that :meth:`call_tools` calls.
            end_ids: the engine's end tokens.
            make_tools: makes the tools of functions that the environment passes at its first turn.
            give_template: returns the template for JSON schemas of tools.
            system_prompt: text of a system message before the first message, or None.
            open_endpoint: opens the episode's OpenAI-compatible endpoint; returns its URL and key.
            compaction: when :meth:`turn` compacts the conversation; None: never.
            pictures: reads the pictures of messages; None: they are errors.
        """
        self.seed = seed
        self.tools = tools if tools is not None else Tools(())
        self.ended: str | None = None
        self.parse_errors = 0
        self.compactions: list[Compacted] = []
        self.has_reported_end = self.abandoned = False
        self.waiting_since: float | None = time.monotonic()
        self.calling_since: float | None = None
        self._sample, self._usage, self._episode = sample, Usage(budget), episode
        self._system_prompt = system_prompt
        self._make_tools = make_tools
        self._give_template = give_template or functools.partial(Template, template.tokenizer)
        self._open_endpoint, self._compaction = open_endpoint, compaction
        self._template = template
        self._end_ids = frozenset(end_ids)
        self._pictures = pictures or EpisodePictures()
        self._conversations = Conversations(template, self._end_ids, self._pictures)
        self._streamed: set[ReplyPieces] = set()  # the replies that are being streamed
        self._unsent: list[dict[str, Any]] = []  # messages of a turn that was cancelled while a summary was sampled

    @property
    def messages(self) -> list[dict[str, Any]]:
        """The conversation so far, with the messages before a compaction; a copy."""
        return [copy_value(message) for message in self._conversations.current.transcript]

    @property
    def prompt_messages(self) -> int:
        """Number of :attr:`messages` in the first prompt."""
        return self._conversations.first.prompt_messages

    @property
    def prompt_tools(self) -> list[Mapping[str, Any]]:
        """JSON schemas of the tools that the first prompt lists."""
        return self._conversations.first.template.tools or []

    @property
    def branch_messages(self) -> list[list[dict[str, Any]]]:
        """Copies of the conversations other than :attr:`messages`, in the order of :meth:`rows`."""
        return self._conversations.list_branch_messages()

    @property
    def turns(self) -> int:
        """Number of replies so far, without summaries."""
        return self._usage.replies

    @property
    def cancelled_calls(self) -> int:
        """Number of calls that were cancelled before the reply was complete."""
        return self._usage.cancelled_replies

    @property
    def tokens_left(self) -> int | None:
        """Number of tokens left for replies and messages of the episode; None without a limit."""
        return self._usage.count_left(self._conversations.current.length)

    @property
    def remaining_tokens(self) -> int | None:
        """The same as :attr:`tokens_left`."""
        return self.tokens_left

    @property
    def remaining_turns(self) -> int:
        """Number of replies that ``max_turns`` still allows."""
        return self._usage.count_turns_left()

    @property
    def base_url(self) -> str:
        """URL of this episode's OpenAI-compatible endpoint, for ``OpenAI(base_url=…)``; valid until the episode ends.

        Raises:
            ValueError: this chat has no endpoint.
        """
        return self._endpoint[0]

    @property
    def api_key(self) -> str:
        """Key of :attr:`base_url`, valid for this episode only."""
        return self._endpoint[1]

    @property
    def _endpoint(self) -> tuple[str, str]:
        if self._open_endpoint is None:
            raise ValueError("this chat has no endpoint: chat.base_url exists only in episodes of a run or of eval")
        return self._open_endpoint(self)

    def pause(self) -> None:
        """Stop the environment's clock while it waits for a worker process."""
        self.waiting_since = None

    def resume(self) -> None:
        """Start the environment's clock."""
        self.waiting_since = time.monotonic()

    async def turn(
        self,
        messages: str | Sequence[Message] | None = None,
        *,
        tools: Sequence[Callable[..., Any]] | None = None,
        max_new_tokens: int | None = None,
        stop: str | Sequence[str] = (),
    ) -> Reply:
        """Append ``messages`` and sample one reply.

        If the chat template rewrites earlier messages, for example because it drops earlier reasoning, the reply
        opens a branch. A branch is another row of the episode, whose prompt is the rewritten history. With the option
        ``compact_at_tokens``, a reply to a long conversation opens one too, after the policy's summary.

        Args:
            messages: the text of one user message; a list of messages; or None, to continue a truncated reply or to
                begin another reply after a complete one.
            tools: functions that the policy may call in this episode, instead of those of the option ``tools``. Tools
                can be passed only at the first turn, because templates list tools at the beginning.
            max_new_tokens: limit of this reply, at most the option ``max_new_tokens``, which is the default.
            stop: one or several strings that end this reply, in addition to the option ``stop``.

        Raises:
            EpisodeEnded: a limit has ended the episode.
            ValueError: there is no message at the first turn, a message is malformed, or a stop string is empty or
                has a lone surrogate.
            TemplateError: the chat template refuses the messages.
        """
        if self.ended is not None:  # stop an environment that ignored EpisodeEnded: it may never return
            raise CancelledError(f"chat.turn was called after the episode had ended by {self.ended}")
        check_room(max_new_tokens)
        stop = read_stop(stop)
        if self.waiting_since is None:
            raise ValueError("chat.turn was called while another turn or its tools were under way: await that first")
        current = self._conversations.current
        first = not current.messages
        new = [*self._unsent, *self._bound(list_messages(messages, self._pictures), first=first)]
        self._unsent = []
        if new and first and self._system_prompt is not None:
            new = add_system_message(new, self._system_prompt, "the conversation")
        if tools is not None:
            refuse_late_tools(current.messages)
            schemas = make_schemas(tools)
            self.tools = self._make_tools(tools)
            self._template = current.template = self._give_template(schemas)
        current, new = await self._compact(current, new)
        return await self._reply(current, new, max_new_tokens, stop)

    async def complete(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        max_new_tokens: int | None = None,
        stop: str | Sequence[str] = (),
        on_delta: Callable[[Delta], None] | None = None,
    ) -> Reply:
        """Sample the reply to a complete list of messages, as OpenAI's API does.

        If ``messages`` extend a conversation of this episode, they continue it. The messages open a branch if they go
        back to an earlier reply, change a message or begin a new conversation, or if another reply to the same
        conversation is being sampled. If a reply comes back unchanged, its sampled tokens are used; its text is never
        encoded again. Calls may run concurrently.

        Args:
            messages: the conversation so far; the last message is not the policy's.
            tools: JSON schemas of the tools that the policy may call, as in OpenAI's API; None: the tools of the option
                ``tools``. A list that differs from the previous one begins a branch.
            max_new_tokens, stop: see :meth:`turn`.
            on_delta: called with each piece of the reply that later tokens cannot change, and at the end with the
                rest. After the first piece, the reply is sampled to its end even if the call is cancelled.

        Raises:
            EpisodeEnded: a limit has ended the episode.
            ValueError: see :meth:`turn`.
            TemplateError: the chat template refuses the messages.
        """
        if self.ended is not None:
            raise EpisodeEnded(self.ended)
        check_room(max_new_tokens)
        stop = read_stop(stop)
        history = list_messages(messages, self._pictures)
        if history and self._system_prompt is not None:
            history = add_system_message(history, self._system_prompt, "the conversation")
        template = self._template if tools is None else self._give_template(tools)
        keys = [make_message_key(message) for message in history]
        match = self._conversations.find_longest(
            lambda candidate: candidate.find(keys) if candidate.template is template else None
        )
        if match is not None:
            conversation, count = match
            new = history[count:]
            if new[0]["role"] != "assistant":
                try:
                    return await self._reply(
                        conversation, self._bound(new), max_new_tokens, stop, keys[count:], on_delta=on_delta
                    )
                except TemplateError:  # such as assistant messages that the template shows only at the beginning
                    if all(message["role"] != "assistant" for message in new):
                        raise
        conversation = self._conversations.begin(template)
        return await self._reply(
            conversation, self._bound(history, first=True), max_new_tokens, stop, keys, on_delta=on_delta
        )

    async def complete_ids(
        self,
        token_ids: Int64Array,
        *,
        max_new_tokens: int | None = None,
        stop: str | Sequence[str] = (),
        on_delta: Callable[[Delta], None] | None = None,
    ) -> Reply:
        """Sample the reply to token ids, ``int64 [L]``; otherwise like :meth:`complete`.

        ``on_delta`` gets the text of the reply, including reasoning, as content, and its token ids.

        Raises:
            EpisodeEnded: a limit has ended the episode.
            ValueError: there is no token, or the tokenizer does not have one of the token ids.
        """
        if self.ended is not None:
            raise EpisodeEnded(self.ended)
        if not len(token_ids):
            raise ValueError("prompt has no token ids")
        size = len(self._template.tokenizer)
        if int(token_ids.max()) >= size or int(token_ids.min()) < 0:
            raise ValueError(f"prompt has the id {token_ids.max()}: the tokenizer has {size}")
        self._pictures.check_ids(token_ids)
        check_room(max_new_tokens)
        stop = read_stop(stop)
        match = self._conversations.find_longest(lambda candidate: candidate.find_ids(token_ids))
        conversation, shared = match or (self._conversations.begin(self._template), 0)
        added = token_ids[shared:]
        text = conversation.template.decode(added, with_special=True)
        new = [{"role": "user", "content": text}] if len(added) or match is None else []
        keys = [("token ids", ("",), None, (), "")] * len(new)  # equal to no message's key
        return await self._reply(conversation, new, max_new_tokens, stop, keys, added, on_delta)

    async def _compact(
        self, conversation: Conversation, new: list[dict[str, Any]]
    ) -> tuple[Conversation, list[dict[str, Any]]]:
        """Sample a summary if ``new`` messages would make ``conversation`` too long.

        Returns:
            The conversation to continue, and its new messages.
        """
        compaction, goes_on = self._compaction, not new and conversation.can_go_on
        if compaction is None or goes_on or not self.remaining_turns:
            return conversation, new
        # An environment may have cancelled its turn while the summary was sampled; this request does not stay.
        messages = [message for message in conversation.messages if message != compaction.request]
        if not compaction.shortens(messages):
            return conversation, new
        continued, added = conversation, new
        if conversation.is_rewritten_by(new):
            continued, added, _ = conversation.begin_again(new)
        before = continued.length + len(continued.encode(added))
        if before <= compaction.at_tokens:
            return conversation, new
        try:
            reply = await self._reply(conversation, [compaction.request], None, (), is_summary=True)
        except CancelledError:  # the messages stay, as after a reply that was cancelled
            self._unsent = list(new)
            raise
        rebuilt = compaction.rebuild(messages, self._pictures.drop_marks(reply.content))
        continued = self._conversations.current.compact(len(rebuilt))
        after = len(continued.encode([*rebuilt, *new]))
        self.compactions.append(Compacted(before, after, len(reply.token_ids)))
        return continued, [*rebuilt, *new]

    async def _reply(
        self,
        conversation: Conversation,
        new: list[dict[str, Any]],
        max_new_tokens: int | None,
        stop: tuple[str, ...],
        keys: Sequence[MessageKey] | None = None,
        added: Int64Array | None = None,
        on_delta: Callable[[Delta], None] | None = None,
        *,
        is_summary: bool = False,
    ) -> Reply:
        """Append messages to a conversation, or the token ids ``added`` instead, and sample the reply.

        If the chat template rewrites the conversation, the reply is in a branch. A new branch is stored here. A summary
        has no tool calls and is not counted as a turn.
        """
        is_raw = added is not None
        if added is None and conversation.is_rewritten_by(new):
            conversation, new, keys = conversation.begin_again(new, keys)
        try:
            if not is_summary:
                self._usage.check_turn()
            added = conversation.encode(new) if added is None else added
            counted = conversation.count_added(added)
            room = self._usage.find_room(conversation.length + len(added), counted, max_new_tokens)
        except EpisodeEnded as ended:
            self.ended = ended.reason
            raise
        continues = not new and conversation.can_go_on
        self._usage.add(counted)
        conversation.append(new, added, keys)
        context = conversation.token_ids
        is_new = conversation.branch < 0 or not conversation.turns
        self._conversations.add(conversation, context)
        tools = self.tools if conversation.template is self._template else conversation.template.tools
        has_tools = bool(tools) and not is_summary
        pieces = on_delta and begin_pieces(
            conversation.template, context, self._end_ids, stop, on_delta, has_tools, is_raw
        )
        if pieces is not None:
            self._streamed.add(pieces)
        watch = pieces.add if pieces else None
        branch, replaces = conversation.branch, conversation.replaces
        request = TurnRequest(
            self._episode,
            conversation.turns,
            context,
            room,
            stop,
            branch,
            replaces,
            watch,
            pictures=conversation.pictures,
        )
        self.waiting_since = None
        conversation.busy = True
        try:
            with self._usage.reserve(room):
                sampled = await self._sample(request)
        except CancelledError:
            if self.ended is None and keys is not None:  # only this call of complete() was cancelled
                self._usage.give_up(counted)
                self._conversations.give_up(conversation, is_new=is_new)
            raise
        finally:
            conversation.busy = False
            if pieces is not None:
                self._streamed.remove(pieces)
                pieces.is_sampled.set()
            if not self._usage.pending:
                self.waiting_since = time.monotonic()
        self._usage.replies += not is_summary
        self._usage.add(len(sampled.token_ids))
        reply = conversation.take(sampled, continues=continues, with_tools=has_tools, stop=stop)
        self.parse_errors += reply.parse_error is not None
        if pieces is not None and is_raw:
            pieces.finish(cut_stop(reply.text, stop), None, reply.token_ids.tolist())
        elif pieces is not None:
            pieces.finish(cut_reply(reply, stop), reply.reasoning)
            conversation.accept_shown(pieces.content, pieces.reasoning)
        return reply

    async def finish_streams(self) -> None:
        """Wait for the replies that have begun to stream, which count even if the agent stops reading."""
        for pieces in list(self._streamed):
            if pieces.is_shown:
                await pieces.is_sampled.wait()

    async def call_tools(self, reply: Reply) -> list[dict[str, Any]]:
        """Run the tool calls of ``reply`` concurrently; return their messages in the order of the calls.

        An error becomes a message for the policy. The list is empty if ``reply`` has no call. A result that is a
        ``PIL.Image``, or a list of parts with one ``{"type": "image", "image": …}``, shows its pictures.

        Raises:
            EpisodeEnded: there was an error, and ``on_parse_error`` or ``on_tool_error`` is ``"end"``.
        """
        self.waiting_since = None
        self.calling_since = None if self.tools.have_deadline else time.monotonic()
        try:
            return await self.tools.answer(reply, self._pictures)
        except EpisodeEnded as ended:
            self.ended = ended.reason
            raise
        finally:
            self.waiting_since, self.calling_since = time.monotonic(), None

    def rows(self) -> list[ChatTokens]:
        """The tokens so far of each conversation that has a reply of its own; see :meth:`Conversations.list_rows`."""
        return [tokens for _, tokens in self._conversations.list_rows()]

    def _bound(self, new: list[dict[str, Any]], *, first: bool = False) -> list[dict[str, Any]]:
        """Cut long observations. The ``first`` prompt is not cut, but raises ValueError above a limit."""
        return bound_messages(new, refuse_long_prompt if first else self.tools.bound)
