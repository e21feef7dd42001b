"""Run episodes concurrently. Each episode is a coroutine, and the pending replies of all are decoded together."""

from __future__ import annotations

import asyncio
import copy
import functools
import json
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from rlox_grpo.config.records.episodes import EpisodeConfig
from rlox_grpo.config.records.prompts import PromptConfig
from rlox_grpo.environments import EpisodeEnded, Outcome
from rlox_grpo.errors import EXITS, ConfigError, EpisodeError, locate_error
from rlox_grpo.rewards.copies import copy_row
from rlox_grpo.rollout.async_generation import BackgroundEngine
from rlox_grpo.rollout.engines import GenerationEngine
from rlox_grpo.rollout.engines.custom_engine import TurnCheck
from rlox_grpo.rollout.engines.turns import runs_turns
from rlox_grpo.rollout.episodes.adapters import (
    Environment,
    EpisodeFn,
    adapt_environment,
    check_columns,
    check_outcome,
    end_episode,
)
from rlox_grpo.rollout.episodes.budget import Budget
from rlox_grpo.rollout.episodes.chat import Chat
from rlox_grpo.rollout.episodes.compaction import draw_compaction
from rlox_grpo.rollout.episodes.endpoint import Endpoints
from rlox_grpo.rollout.episodes.groups import Played, make_group
from rlox_grpo.rollout.episodes.partial import Gate, StartedGroup
from rlox_grpo.rollout.episodes.pictures import EpisodePictures
from rlox_grpo.rollout.episodes.process_main import WorkerSetup
from rlox_grpo.rollout.episodes.processes import ProcessPool, ToolProcesses, play_in_process
from rlox_grpo.rollout.episodes.run_templates import RunTemplates
from rlox_grpo.rollout.episodes.scheduler import Replies, Running, run_coroutine, run_episodes
from rlox_grpo.rollout.episodes.template import Template
from rlox_grpo.rollout.episodes.tools import ToolLimits, Tools, describe_failure, make_schemas
from rlox_grpo.types import Episode, Prompt, RolloutGroup, Sampling

if TYPE_CHECKING:
    from rlox_grpo.prompts.pictures import PictureReader

logger = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class Prepared:
    """An environment that is ready to play.

    Attributes:
        source: the user's environment.
        environment: the adapted environment.
        play: plays an episode, in a worker process if there is a deadline for sync code.
        template: the chat template for the tools of the environment.
        processes: the worker processes; None without.
        max_live: maximum number of concurrent episodes; None: no limit.
    """

    source: Any
    environment: Environment
    play: EpisodeFn
    template: Template
    processes: ProcessPool | None
    max_live: int | None

    def close(self) -> None:
        """End the worker processes; later episodes start new ones."""
        if self.processes is not None:
            self.processes.close()


class EpisodeRunner:
    """Samples groups by running episodes; called in place of :func:`rlox_grpo.rollout.generate.generate`.

    Attributes:
        main: the environment of the run, which plays the rows of sources without their own.
        reader: see :meth:`__init__`.
        prefilled_tokens: tokens that the last call prefilled for its replies.
    """

    def __init__(
        self,
        environment: Any,
        tools: Sequence[Callable[..., Any]],
        config: EpisodeConfig,
        tokenizer: Any,
        prompts: PromptConfig | None = None,
        *,
        on_ended: Callable[[int, int], None] | None = None,
        check_turn: TurnCheck | None = None,
        reader: PictureReader | None = None,
    ) -> None:
        """Check the environment, the tools, the chat template and the deadlines.

        Args:
            environment, tools: the arguments of :class:`rlox_grpo.GRPO`.
            config: the options of episodes.
            tokenizer: the policy's tokenizer.
            prompts: the options of prompts; the defaults when None.
            on_ended: called with the numbers of finished and of all episodes, as episodes finish.
            check_turn: checks each reply, if the engine is custom.
            reader: reads pictures; None: the model is trained on text, and pictures are errors.

        Raises:
            ConfigError: one of these cannot be used.
        """
        self.prefilled_tokens = 0
        self._on_ended, self._check_turn = on_ended, check_turn
        self.reader = reader
        if reader is not None and tokenizer is not None and reader.chat_template != tokenizer.chat_template:
            tokenizer = copy.copy(tokenizer)  # the processor's template shows pictures
            tokenizer.chat_template = reader.chat_template
        self._config = config
        self._prompts = prompts or PromptConfig()
        if self._prompts.prompt_template is not None:
            raise ConfigError(
                f"prompt_template={self._prompts.prompt_template!r} is ignored: the environment writes the prompts"
            )
        self._templates = RunTemplates(tokenizer, config, self._prompts)
        self._has_warned_about_room = False
        self._limits = ToolLimits.for_run(config)
        self._tokenizer = tokenizer
        size = config.episode_workers
        self._tool_processes = (
            None if config.tool_timeout is None else ToolProcesses(tools, self._limits, size, reader is not None)
        )
        self._tools = tools
        self._by_source: dict[str, Prepared] = {}
        self.main = self._prepare(adapt_environment(environment, tools), environment)

    @property
    def environment(self) -> Environment:
        """The adapted environment of the run."""
        return self.main.environment

    @property
    def source(self) -> Any:
        """The user's ``environment``; None for tools only, False for single replies."""
        return self.main.source

    @property
    def system_prompt(self) -> str | None:
        """The system message before each conversation."""
        return self._prompts.system_prompt

    @property
    def rewrites_history(self) -> bool:
        """Whether the chat template rewrites earlier messages, so that episodes may have branches."""
        return self.main.template.rewrites

    def use_environments(self, by_source: Mapping[str, Any]) -> Mapping[str, Prepared]:
        """Play the rows of these sources of a mixture in environments of their own, from now on.

        Of two different environments with one name, the second becomes ``name_2``.

        Args:
            by_source: the environments by the name of the source, in any form that :class:`rlox_grpo.GRPO` takes.

        Raises:
            ConfigError: an environment cannot be used; the message names the source.
        """
        chosen: dict[str, Prepared] = {}
        for name, source in by_source.items():
            others = [self.main, *chosen.values()]
            same = next((other for other in others if _is_same(other.source, source)), None)
            try:
                chosen[name] = same or self._prepare(
                    _rename(adapt_environment(source, self._tools), [other.environment.name for other in others]),
                    source,
                )
            except (ConfigError, TypeError) as error:
                raise ConfigError(f"prompts[{name!r}]: {error}") from error
        for each in self._by_source.values():
            each.close()
        self._by_source = chosen
        return chosen

    def choose(self, source: str | None) -> Prepared:
        """Return the environment of the rows of a source; of the run for rows that are not of a mixture."""
        return self.main if source is None else self._by_source.get(source, self.main)

    def close(self) -> None:
        """End the worker processes; later episodes start new ones."""
        for prepared in (self.main, *self._by_source.values()):
            prepared.close()
        if self._tool_processes is not None:
            self._tool_processes.close()

    def check_rows(self, prompts: Sequence[Prompt], source: str | None = None) -> None:
        """Raise ValueError if a row lacks a column that the environment of ``source`` needs."""
        for prompt in prompts:
            check_columns(self.choose(source).environment, make_row(prompt), prompt.name)

    def __call__(
        self,
        engine: GenerationEngine,
        prompts: Sequence[Prompt],
        group_sizes: Sequence[int],
        sampling: Sampling,
        seed: int,
        share: slice = slice(None),
        engine_share: slice | None = None,
    ) -> list[RolloutGroup]:
        """Run ``group_sizes[i]`` episodes for each ``prompts[i]`` of this rank's ``share``.

        ``engine_share`` is ignored, because engines that several ranks share do not run episodes.

        Raises:
            EpisodeError: the environment raised an exception, with ``on_environment_error="stop"``.
        """
        if isinstance(engine, BackgroundEngine):
            return engine.submit(lambda inner: self(inner, prompts, group_sizes, sampling, seed, share)).result()
        indices = range(len(prompts))[share]
        sizes = [group_sizes[index] for index in indices]
        if not sizes:
            return []
        chosen = [prompts[index] for index in indices]
        asked = [
            (prompt, (index, episode))
            for prompt, index, size in zip(chosen, indices, sizes, strict=True)
            for episode in range(size)
        ]
        running: list[Running] = []
        run_coroutine(lambda: self._run(engine, asked, sampling, seed, running))
        played = iter([Played(state.chat.rows(), state.episode) for state in running if state.episode is not None])
        groups = [
            make_group(prompt, [next(played) for _ in range(size)], self._tokenizer, engine.policy_version)
            for prompt, size in zip(chosen, sizes, strict=True)
        ]
        return [replace(group, prefilled_tokens=self.prefilled_tokens / len(groups)) for group in groups]

    def continue_groups(
        self,
        engine: GenerationEngine,
        groups: Sequence[StartedGroup],
        sampling: Sampling,
        seed: int,
        must_stop: Callable[[int], bool],
    ) -> None:
        """Run the unfinished episodes of ``groups`` in rounds of ``partial_rollout_turns`` replies each.

        After each round, ``must_stop(finished)`` is called with the number of finished groups; True ends the call.
        Replies and outcomes are stored in ``groups``, even after an error.

        Raises:
            EpisodeError: the environment raised an exception, with ``on_environment_error="stop"``.
        """
        turns = self._config.partial_rollout_turns
        assert turns is not None
        unfinished = {
            (started.draw, index): (started.prompt, episode)
            for started in groups
            for index, episode in enumerate(started.episodes)
            if started.group is None and episode.played is None
        }
        gate = Gate(turns, engine.policy_version, {key: episode for key, (_, episode) in unfinished.items()})

        def count_finished() -> int:
            for state in running:
                if state.episode is not None and unfinished[state.key][1].played is None:
                    unfinished[state.key][1].played = Played(state.chat.rows(), state.episode)
            for started in groups:
                played = [episode.played for episode in started.episodes if episode.played is not None]
                if started.group is None and len(played) == len(started.episodes):
                    versions = [version for episode in played for row in episode.rows for version in row.versions]
                    version = min(versions, default=engine.policy_version)
                    started.group = make_group(started.prompt, played, self._tokenizer, version)
            return sum(started.group is not None for started in groups)

        running: list[Running] = []
        asked = [(prompt, key) for key, (prompt, _) in unfinished.items()]
        run_coroutine(
            lambda: self._run(engine, asked, sampling, seed, running, gate, lambda: must_stop(count_finished()))
        )
        count_finished()

    def _make_tools(self, functions: Sequence[Callable[..., Any]]) -> Tools:
        """Make the tools of an episode. Raises ConfigError for a sync tool that ``tool_timeout`` cannot stop."""
        if self._tool_processes is None:
            return Tools(functions, self._limits)
        for function in functions:
            if not self._tool_processes.reach(function):
                raise ConfigError(
                    f"tool_timeout does not reach {function.__name__}: it is sync and belongs to the environment. Make "
                    "it async, give it by GRPO(tools=), or leave tool_timeout out and set turn_timeout"
                )
        return Tools(functions, self._limits, self._tool_processes.call)

    def _prepare(self, environment: Environment, source: Any) -> Prepared:
        """Make an environment ready: its worker processes, its template, and its limit of concurrent episodes.

        Raises:
            ConfigError: its tools, its template or its worker processes cannot be made.
        """
        config, size, most = self._config, self._config.episode_workers, environment.max_live
        play, processes = environment.play, None
        if config.max_live_episodes is not None:
            most = None
        # Maximum time between two turns of a sync environment. Without a deadline, the environment needs no process.
        timeouts = [timeout for timeout in (config.turn_timeout, config.episode_timeout) if timeout is not None]
        if timeouts and not environment.is_async:
            foreign = WorkerSetup(source, tuple(self._tools), self._limits, min(timeouts), self.reader is not None)
            processes = ProcessPool(f"environment {environment.name}", foreign, size)
            play = functools.partial(play_in_process, processes)
            if config.partial_rollout_turns is not None:
                # An episode keeps its process while it waits for its next round.
                most = min(most or size, size)
        schemas = make_schemas(environment.tools)
        self._make_tools(environment.tools)
        template = self._templates.give(schemas)
        return Prepared(source, environment, play, template, processes, most)

    def _list_limits(self, source: str | None) -> list[tuple[str, int]]:
        """Return the limits of concurrent episodes of a source: that of the option, and that of its environment."""
        limits = []
        if source is not None and source in self._config.max_live_by_source:
            limits.append((f"source {source}", self._config.max_live_by_source[source]))
        prepared = self.choose(source)
        if prepared.max_live is not None:
            limits.append((f"environment {prepared.environment.name}", prepared.max_live))
        return limits

    def _count_live(self, sources: Collection[str | None]) -> int | None:
        """Return the largest number of concurrent episodes of these sources; None: no limit."""
        if self._config.max_live_episodes is not None:
            return self._config.max_live_episodes
        each = {id(prepared): prepared.max_live for prepared in map(self.choose, sources)}
        limits = [most for most in each.values() if most is not None]
        return sum(limits) if len(limits) == len(each) else None

    async def _play_environment(self, row: Mapping[str, Any], chat: Chat, play: EpisodeFn) -> Any:
        try:
            returned = await play(row, chat)
        except Exception:  # not if the episode is cancelled
            await chat.finish_streams()
            raise
        await chat.finish_streams()
        return returned

    async def _run(
        self,
        engine: GenerationEngine,
        asked: Sequence[tuple[Prompt, tuple[int, int]]],
        sampling: Sampling,
        seed: int,
        running: list[Running],
        gate: Gate | None = None,
        must_stop: Callable[[], bool] | None = None,
    ) -> None:
        """Run an episode for each prompt and key of ``asked``, and append the episodes to ``running``."""
        if not runs_turns(engine):
            raise ConfigError(f"{type(engine).__name__} cannot run episodes of several turns: it has no open_turns")
        config, most = self._config, self._count_live({prompt.data_source for prompt, _ in asked})
        budget = Budget(config.max_turns, sampling.max_new_tokens, config.max_episode_tokens, engine.max_length)
        with engine.open_turns(sampling, seed, min(len(asked), most or len(asked))) as session:
            check = None if self._check_turn is None else functools.partial(self._check_turn, engine)
            replies = Replies(session, gate, check)
            endpoints = Endpoints(sampling, len(asked), replies.environment_time)
            for prompt, key in asked:
                prepared = self.choose(prompt.data_source)
                chat = Chat(
                    prepared.template,
                    replies.sample,
                    budget,
                    episode=key,
                    seed=derive_episode_seed(seed, *key),
                    tools=self._make_tools(prepared.environment.tools),
                    end_ids=engine.end_ids,
                    make_tools=self._make_tools,
                    give_template=self._templates.give,
                    system_prompt=self._prompts.system_prompt,
                    open_endpoint=endpoints.open,
                    compaction=draw_compaction(config, seed, key[0]),
                    pictures=EpisodePictures(self.reader, prompt.pictures),
                )
                end_endpoint = functools.partial(endpoints.end_episode, chat)
                running.append(Running(prompt, key, chat, end_endpoint, self._list_limits(prompt.data_source)))
            try:
                await run_episodes(
                    running, replies, self._play, config, max_live=most, on_ended=self._on_ended, must_stop=must_stop
                )
            finally:
                endpoints.close()
        self.prefilled_tokens = session.prefilled_tokens

    async def _play(self, state: Running) -> Episode:
        """Run one episode to its end, and describe the end, whether a limit, an error or the environment ended it."""
        chat, error, prepared = state.chat, None, self.choose(state.prompt.data_source)
        end = functools.partial(end_episode, prepared.environment, self._config)
        try:
            row = copy_row(make_row(state.prompt), state.prompt.name)
            returned = await self._play_environment(row, chat, prepared.play)
            outcome = check_outcome(returned, chat.turns, chat.ended)
            self._warn_about_room(state)
            if chat.ended == "timeout":  # it caught the cancellation, and its answer is late
                outcome = end(chat.ended)
        except EpisodeEnded as ended:
            outcome, error = end(ended.reason), str(ended)
            self._warn_about_room(state)
        except asyncio.CancelledError as cause:
            if chat.ended is not None:
                outcome = end(chat.ended)
            elif state.is_cancelled:
                raise
            else:  # raised by the environment: a library that it uses was cancelled
                outcome, error = self._judge_failure(state, cause)
        except (Exception, *EXITS) as cause:  # noqa: BLE001  the environment is the user's
            outcome, error = self._judge_failure(state, cause)
        return self._describe(chat, outcome, error, prepared.environment.name)

    def _warn_about_room(self, state: Running) -> None:
        """Warn once in a run of an episode that has no reply because its first messages are too long."""
        if state.chat.turns or state.chat.ended not in ("context", "max_tokens") or self._has_warned_about_room:
            return
        self._has_warned_about_room = True
        logger.warning(
            "%s: an episode ended by %s before the first reply: its first messages leave no room for a token in the "
            "model's positions or in max_episode_tokens. Such an episode trains nothing; shorten or drop the row",
            *(state.prompt.name, state.chat.ended),
        )

    def _judge_failure(self, state: Running, cause: BaseException) -> tuple[Outcome, str]:
        """Return the outcome of an episode whose environment raised ``cause``, and its description.

        Raises:
            EpisodeError: ``on_environment_error`` is ``"stop"``.
        """
        chat, environment = state.chat, self.choose(state.prompt.data_source).environment
        reported_end = chat.ended if chat.has_reported_end else None  # the agent failed because its call was refused
        failure = describe_failure(cause)
        if reported_end is None and self._config.on_environment_error == "stop":
            raise EpisodeError(
                f"environment {environment.name} failed at {state.prompt.name}, episode {state.key[1]}, "
                f"turn {chat.turns}: {failure}{locate_error(cause)}"
            ) from cause
        return end_episode(environment, self._config, reported_end or "environment_error"), failure[:2000]

    def _describe(self, chat: Chat, outcome: Outcome, error: str | None, environment: str) -> Episode:
        def as_json(messages: Sequence[Mapping[str, Any]]) -> tuple[Mapping[str, Any], ...]:
            return tuple(json.loads(json.dumps(messages, default=str)))

        tools = chat.tools
        return Episode(
            stop_reason=outcome.stop_reason,
            reward=outcome.reward,
            turn_rewards=None if outcome.turn_rewards is None else tuple(outcome.turn_rewards),
            metrics=dict(outcome.metrics),
            messages=as_json(chat.messages),
            prompt_messages=chat.prompt_messages,
            tool_calls=tools.calls,
            tool_errors=tools.errors,
            observations_cut=tools.cut,
            tool_seconds=tools.seconds,
            parse_errors=chat.parse_errors,
            compactions=tuple((each.before, each.after, each.summary) for each in chat.compactions),
            error=error,
            cancelled_calls=chat.cancelled_calls,
            branch_messages=tuple(map(as_json, chat.branch_messages)),
            environment=environment,
            tools=tuple(chat.prompt_tools),
        )


def _is_same(source: Any, other: Any) -> bool:
    """Whether two sources of environments are one object, or one command."""
    return source is other or (isinstance(source, str) and bool(source == other))


def _rename(environment: Environment, taken: Collection[str]) -> Environment:
    """Return the environment, with a number after its name if the name is taken."""
    name, number = environment.name, 2
    while name in taken:
        name, number = f"{environment.name}_{number}", number + 1
    return replace(environment, name=name)


def make_row(prompt: Prompt) -> dict[str, Any]:
    """Return the columns of a prompt's row, including ``prompt`` if there is one."""
    return {**({} if prompt.source is None else {"prompt": prompt.source}), **prompt.columns}


def derive_episode_seed(seed: int, prompt: int, completion: int) -> int:
    """Derive the 63-bit seed of an episode's environment."""
    state = np.random.SeedSequence([seed, prompt, completion, *b"environment"]).generate_state(1, np.uint64)
    return int(state[0] >> np.uint64(1))
