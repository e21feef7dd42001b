"""What a call of ``train`` draws its prompts from: rows, a stream of rows, or a mixture of such sources."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import ceil
from typing import Any, TypeAlias

from rlox_grpo.config.train_source import PROMPT_SETTINGS, TrainSource, is_mixture, list_sources
from rlox_grpo.errors import ConfigError
from rlox_grpo.prompts.comparison import refuse_different_forms
from rlox_grpo.prompts.demonstrations import refuse_no_demonstration, warn_about_unused_demonstrations
from rlox_grpo.prompts.load import PromptDraws
from rlox_grpo.prompts.mixture import MixtureDraws, Slot, count_draws, derive_source_seed, describe_shares
from rlox_grpo.prompts.stream import StreamDraws, is_stream
from rlox_grpo.rewards import RewardFn
from rlox_grpo.rollout.episodes.adapters import Environment
from rlox_grpo.rollout.episodes.run import Prepared
from rlox_grpo.run.digests import digest_rewards
from rlox_grpo.run.inputs import PromptReader
from rlox_grpo.run.plan import Progress
from rlox_grpo.run.resume import SHARES
from rlox_grpo.types import Prompt

Draws: TypeAlias = "PromptDraws | StreamDraws | MixtureDraws"


@dataclass(frozen=True, eq=False)
class OpenSource:
    """One source: its prompts, or the first prompts of a stream, which are read and checked.

    Attributes:
        reader: the reader that read the prompts, with the slot of the source in a mixture.
        rows: the rows as the user gave them.
        prompts: all prompts, or the first prompts of a stream.
    """

    reader: PromptReader
    rows: Any
    prompts: Sequence[Prompt]

    def begin(
        self, draws: int, under_way: Collection[int], seed: int, chance: Callable[[int], float]
    ) -> PromptDraws | StreamDraws:
        """Begin at the draw ``draws``, a stream at the first of the prompts ``under_way``; see :class:`TrainData`."""
        if is_stream(self.rows):  # the run may go back to a checkpoint from before what the stream has passed
            return self.reader.open_stream(self.rows, min([draws, *self._select_rows(under_way)]))
        return PromptDraws(self.prompts, seed, draws, lambda position: chance(self.prompts[position].index))

    def restore(self, begun: PromptDraws | StreamDraws, draws: int, under_way: Collection[int]) -> dict[int, Prompt]:
        """Return the prompts by index. Of a stream, return those ``under_way`` and skip the rows before ``draws``."""
        loaded = self.prompts
        if isinstance(begun, StreamDraws):
            loaded = list(begun.skip_to(draws, self._select_rows(under_way)).values())
        return {prompt.index: prompt for prompt in loaded}

    def _select_rows(self, indices: Collection[int]) -> Collection[int]:
        slot = self.reader.slot
        return indices if slot is None else slot.select_rows(indices)


def open_source(reader: PromptReader, rows: Any, draws: int) -> OpenSource:
    """Read and check rows, or the first rows of a stream of which ``draws`` were drawn.

    Raises:
        ConfigError, TypeError, ValueError, RewardError: the rows cannot be used.
    """
    return OpenSource(reader, rows, reader.open_stream(rows, draws).first if is_stream(rows) else reader.read(rows))


@dataclass(frozen=True, eq=False)
class TrainData:
    """The sources of a call of ``train``.

    Attributes:
        sources: by name; rows that are not a mixture have the name ``""``.
        shares: share of each source of a mixture; None without a mixture.
        rewards: the reward functions of the sources that have their own, or their own environment.
        weights: the weights of these functions.
        environments: the environments of the sources that have their own.
        template_variables: the variables for the chat template of the sources that set them.
    """

    sources: Mapping[str, OpenSource]
    shares: Mapping[str, float] | None = None
    rewards: Mapping[str, Sequence[RewardFn]] = field(default_factory=dict)
    weights: Mapping[str, Sequence[float]] = field(default_factory=dict)
    environments: Mapping[str, Prepared] = field(default_factory=dict)
    template_variables: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    @property
    def prompts(self) -> list[Prompt]:
        """The prompts of all sources, in order; for a stream, its first prompts."""
        return [prompt for source in self.sources.values() for prompt in source.prompts]

    def count_epoch(self, prompts_per_step: int) -> int:
        """Return the number of prompts of a pass: all rows, rounded up to whole steps for a mixture."""
        if self.shares is not None:
            return prompts_per_step * ceil(len(self.prompts) / prompts_per_step)
        (source,) = self.sources.values()
        return prompts_per_step if is_stream(source.rows) else len(source.prompts)

    def describe(self) -> dict[str, str]:
        """Return what a resumed run compares of a mixture, in addition to its prompts."""
        return {} if self.shares is None else {SHARES: describe_shares(self.shares)}

    def digest_rewards(self) -> list[tuple[str, str | None]]:
        """Return the names and the digests of the reward functions and the environments of the sources."""
        return [
            (f"{source}: {name}", digest)
            for source, functions in self.rewards.items()
            for name, digest in digest_rewards(functions, self.environments.get(source))
        ]

    def begin(self, progress: Progress, under_way: Collection[int], seed: int, chance: Callable[[int], float]) -> Draws:
        """Begin to draw prompts at the position of the run.

        Args:
            progress: of the run.
            under_way: the indices of prompts that were drawn before and not trained.
            seed: of the order.
            chance: from the index of a prompt to the probability that it is not skipped.
        """
        if self.shares is None:
            (source,) = self.sources.values()
            return source.begin(progress.draws, under_way, seed, chance)
        counts = count_draws(self.shares, progress.draws, progress.skipped)
        begun = {
            name: source.begin(counts[name], under_way, derive_source_seed(seed, name), chance)
            for name, source in self.sources.items()
        }
        return MixtureDraws(begun, list(self.shares.values()), progress.draws)

    def restore(self, draws: Draws, progress: Progress, under_way: Collection[int]) -> Mapping[int, Prompt]:
        """Skip the rows of streams that were drawn before, and return the prompts of the run by index.

        For a stream, only the prompts ``under_way`` are returned.
        """
        if not isinstance(draws, MixtureDraws):
            (source,) = self.sources.values()
            return source.restore(draws, progress.draws, under_way)
        counts = count_draws(self.shares or {}, progress.draws, progress.skipped)
        by_index: dict[int, Prompt] = {}
        for name, source in self.sources.items():
            by_index |= source.restore(draws.sources[name], counts[name], under_way)
        return by_index


@dataclass(eq=False)
class DataReader:
    """Reads what ``train`` is given.

    Attributes:
        reader: reads prompts with the options of the run.
        prepare: makes the reward functions of a source ready: ``prepare(rewards, environment)`` → the functions and
            their weights; each argument is None if the source does not have its own.
    """

    reader: PromptReader
    prepare: Callable[[Any, Environment | None], tuple[Sequence[RewardFn], Sequence[float]]]
    _readers: dict[str, PromptReader] = field(default_factory=dict)  # which hold the streams that they have opened

    def open(self, prompts: Any, progress: Progress) -> TrainData:
        """Read and check all sources.

        Raises:
            ConfigError, TypeError, ValueError, RewardError: the prompts cannot be used; the message names the source.
        """
        data = self._open(prompts, progress)
        if self.reader.config.demo_loss is None:
            warn_about_unused_demonstrations(data.prompts)
        elif not any(is_stream(source.rows) for source in data.sources.values()):
            refuse_no_demonstration(data.prompts)
        return data

    def _open(self, prompts: Any, progress: Progress) -> TrainData:
        limits = self.reader.config.max_live_by_source
        if unknown := [name for name in limits if not is_mixture(prompts) or name not in prompts]:
            names = ", ".join(map(repr, prompts)) if is_mixture(prompts) else "none: they are no mixture"
            raise ConfigError(f"max_live_by_source names {unknown[0]!r}; the sources of the prompts are {names}")
        if not is_mixture(prompts):
            return TrainData({"": open_source(self.reader, prompts, progress.draws)})
        asked = list_sources(prompts, self.reader.config.prompts_per_step)
        shares = {name: float(source.share) for name, source in asked.items()}
        counts = count_draws(shares, progress.draws, progress.skipped)
        environments = self._use_environments(asked)
        sources: dict[str, OpenSource] = {}
        rewards: dict[str, Sequence[RewardFn]] = {}
        weights: dict[str, Sequence[float]] = {}
        for position, (name, source) in enumerate(asked.items()):
            try:
                if source.rewards is not None or name in environments:
                    prepared = environments.get(name)
                    environment = None if prepared is None else prepared.environment
                    rewards[name], weights[name] = self.prepare(source.rewards, environment)
                reader = self._make_reader(source, Slot(name, position, len(asked)), rewards.get(name))
                sources[name] = open_source(reader, source.prompts, counts[name])
            except (ValueError, TypeError, OSError, RuntimeError) as error:  # a RewardError is a RuntimeError
                error.args = (f"prompts[{name!r}]: {error}", *error.args[1:])
                raise
        if self.reader.episodes is None:
            refuse_different_forms([source.prompts[0] for source in sources.values()], continue_final_message=True)
        variables = {
            name: source.chat_template_kwargs
            for name, source in asked.items()
            if source.chat_template_kwargs is not None
        }
        return TrainData(sources, shares, rewards, weights, environments, variables)

    def _use_environments(self, sources: Mapping[str, TrainSource]) -> Mapping[str, Prepared]:
        """Let the sources that have an environment of their own use it. Raises ConfigError if one cannot be used."""
        by_source = {name: source.environment for name, source in sources.items() if source.environment is not None}
        if self.reader.episodes is not None:
            return self.reader.episodes.use_environments(by_source)
        if asked := [name for name, environment in by_source.items() if environment is not False]:
            raise ConfigError(
                f"prompts[{asked[0]!r}] has an environment, and GRPO was created without one: pass environment=False "
                "to GRPO, so that the rows of sources without an environment get single replies"
            )
        return {}

    def _make_reader(self, source: TrainSource, slot: Slot, rewards: Sequence[RewardFn] | None) -> PromptReader:
        """Return the reader of a source: the reader that has already opened its stream, if there is one."""
        changes = {name: value for name in PROMPT_SETTINGS if (value := getattr(source, name)) is not None}
        written = {"prompt_template", "system_prompt", "chat_template_kwargs"} & changes.keys()
        if written and self.reader.episodes is not None:
            raise ConfigError(f"{sorted(written)[0]} of a source is ignored: the environment writes the prompts")
        reader = self._readers.setdefault(slot.name, replace(self.reader, slot=slot, _stream=(None, None)))
        reader.config = self.reader.config.model_copy(update=changes)
        if self.reader.teacher_prompts is not None:
            variables = reader.config.chat_template_kwargs
            reader.teacher_prompts = replace(self.reader.teacher_prompts, chat_template_kwargs=variables)
        reader.slot, reader.reward_fns = slot, self.reader.reward_fns if rewards is None else rewards
        return reader
