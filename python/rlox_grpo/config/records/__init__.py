"""The options of a run by stage. Each is declared once, in the record of the stage that reads it."""

from __future__ import annotations

from typing import Generic, TypeVar

from pydantic import ConfigDict

from rlox_grpo.config.records.episodes import EpisodeConfig
from rlox_grpo.config.records.loss import ImportanceConfig, LossConfig, ReferenceConfig
from rlox_grpo.config.records.option import Record
from rlox_grpo.config.records.prompts import PromptConfig
from rlox_grpo.config.records.rewards import AdvantageConfig, RewardConfig
from rlox_grpo.config.records.run import RunConfig
from rlox_grpo.config.records.sampling import EngineConfig, PresetConfig, SamplingConfig
from rlox_grpo.config.records.update import LoraConfig, OptimizerConfig, UpdateConfig, UpdaterConfig

__all__ = [
    "CLEARABLE",
    "DOORS",
    "RECORDS",
    "AdvantageConfig",
    "EngineConfig",
    "EpisodeConfig",
    "ImportanceConfig",
    "LoraConfig",
    "LossConfig",
    "OptimizerConfig",
    "Options",
    "PresetConfig",
    "PromptConfig",
    "Record",
    "ReferenceConfig",
    "RewardConfig",
    "RunConfig",
    "SamplingConfig",
    "UpdateConfig",
    "UpdaterConfig",
]

R = TypeVar("R", bound=Record)


class Stage(Generic[R]):
    """A property of :class:`Options`: the options of one stage as its record."""

    def __init__(self, record: type[R]) -> None:
        self._record = record

    def __get__(self, options: Record | None, owner: type) -> R:
        if options is None:  # of the class, as help() asks
            return self  # type: ignore[return-value]
        return self._record.model_construct(**{name: getattr(options, name) for name in self._record.model_fields})


class Options(  # pydantic takes fields from the last base first
    RunConfig,
    LoraConfig,
    UpdaterConfig,
    OptimizerConfig,
    UpdateConfig,
    ReferenceConfig,
    ImportanceConfig,
    LossConfig,
    AdvantageConfig,
    RewardConfig,
    EpisodeConfig,
    EngineConfig,
    SamplingConfig,
    PromptConfig,
    PresetConfig,
):
    """All options of a run, with a property for the record of each stage.

    The records are base classes, so that type checkers and editors know the name of each option. None overrides
    another.
    """

    model_config = ConfigDict(ignored_types=(Stage,))

    prompts = Stage(PromptConfig)
    sampling = Stage(SamplingConfig)
    episodes = Stage(EpisodeConfig)
    advantages = Stage(AdvantageConfig)
    loss = Stage(LossConfig)
    importance = Stage(ImportanceConfig)
    reference_policy = Stage(ReferenceConfig)
    optimizer = Stage(OptimizerConfig)
    sharding = Stage(UpdaterConfig)

    def count_most_sampled_tokens(self) -> int:
        """Return the largest number of tokens that the policy can sample in an episode of several turns."""
        every_turn = self.max_turns * self.max_new_tokens
        return every_turn if self.max_episode_tokens is None else min(every_turn, self.max_episode_tokens)


DOORS = ("policy_loss", "advantage_fn", "engine")
"""Options that take an object of the user, or its ``module:name``."""

CLEARABLE = ("dual_clip", "delta", "kl_target", "prompt_template", "limit_reward")
"""Options that a preset, a run file or the command line can set to None, by the text "none"."""

RECORDS: tuple[type[Record], ...] = Options.__bases__[::-1]
"""Every record, in the order in which options are shown."""
