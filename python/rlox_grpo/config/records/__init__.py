"""The options of a run by stage: each is declared once, in the record of the stage that reads it."""

from __future__ import annotations

from typing import TypeVar

from rlox_grpo.config.records.episodes import EpisodeConfig
from rlox_grpo.config.records.loss import ImportanceConfig, LossConfig, ReferenceConfig
from rlox_grpo.config.records.option import Record
from rlox_grpo.config.records.prompts import PromptConfig
from rlox_grpo.config.records.rewards import AdvantageConfig, RewardConfig
from rlox_grpo.config.records.run import RunConfig
from rlox_grpo.config.records.sampling import EngineConfig, PresetConfig, SamplingConfig
from rlox_grpo.config.records.update import LoraConfig, OptimizerConfig, UpdateConfig, UpdaterConfig

__all__ = [
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

RECORDS: tuple[type[Record], ...] = (
    PresetConfig,
    PromptConfig,
    SamplingConfig,
    EngineConfig,
    EpisodeConfig,
    RewardConfig,
    AdvantageConfig,
    LossConfig,
    ImportanceConfig,
    ReferenceConfig,
    UpdateConfig,
    OptimizerConfig,
    UpdaterConfig,
    LoraConfig,
    RunConfig,
)
"""Every record, in the order in which options are shown."""


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
    """Every option of a run by its own name, with properties that give a stage its record.

    The records are base classes so that type checkers and editors know each flat name; nothing is overridden.
    """

    @property
    def prompts(self) -> PromptConfig:
        """The options of prompts."""
        return self._select(PromptConfig)

    @property
    def sampling(self) -> SamplingConfig:
        """The options of sampling."""
        return self._select(SamplingConfig)

    @property
    def episodes(self) -> EpisodeConfig:
        """The options of episodes of several turns."""
        return self._select(EpisodeConfig)

    def count_most_sampled_tokens(self) -> int:
        """Return the most tokens that the policy can sample in an episode of several turns."""
        every_turn = self.max_turns * self.max_new_tokens
        return every_turn if self.max_episode_tokens is None else min(every_turn, self.max_episode_tokens)

    @property
    def rewards(self) -> RewardConfig:
        """The options of reward functions."""
        return self._select(RewardConfig)

    @property
    def advantages(self) -> AdvantageConfig:
        """The options of advantages."""
        return self._select(AdvantageConfig)

    @property
    def loss(self) -> LossConfig:
        """The options of the objective."""
        return self._select(LossConfig)

    @property
    def importance(self) -> ImportanceConfig:
        """The options of importance weights."""
        return self._select(ImportanceConfig)

    @property
    def reference_policy(self) -> ReferenceConfig:
        """The options of the reference policy; ``reference`` is one of them."""
        return self._select(ReferenceConfig)

    @property
    def optimizer(self) -> OptimizerConfig:
        """The options of the optimizer and its schedule."""
        return self._select(OptimizerConfig)

    @property
    def sharding(self) -> UpdaterConfig:
        """The options of the updater and of what it shards over ranks."""
        return self._select(UpdaterConfig)

    def _select(self, record: type[R]) -> R:
        return record.model_construct(**{name: getattr(self, name) for name in record.model_fields})
