"""The options of a run by stage. Each is declared once, in the record of the stage that reads it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, get_type_hints

from pydantic import create_model

from rlox_grpo.config.records.episodes import EpisodeConfig
from rlox_grpo.config.records.experts import ExpertConfig
from rlox_grpo.config.records.loss import ImportanceConfig, LossConfig, ReferenceConfig
from rlox_grpo.config.records.off_policy import OffPolicyConfig
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
    "ExpertConfig",
    "ImportanceConfig",
    "LoraConfig",
    "LossConfig",
    "OffPolicyConfig",
    "OptimizerConfig",
    "Options",
    "PresetConfig",
    "PromptConfig",
    "Record",
    "ReferenceConfig",
    "RewardConfig",
    "RunConfig",
    "SamplingConfig",
    "StageConfigs",
    "UpdateConfig",
    "UpdaterConfig",
    "split_options",
]


@dataclass(frozen=True)
class StageConfigs:
    """The options of a run, a record for each stage."""

    preset: PresetConfig
    prompts: PromptConfig
    sampling: SamplingConfig
    engine: EngineConfig
    episodes: EpisodeConfig
    rewards: RewardConfig
    advantages: AdvantageConfig
    loss: LossConfig
    off_policy: OffPolicyConfig
    importance: ImportanceConfig
    reference: ReferenceConfig
    update: UpdateConfig
    optimizer: OptimizerConfig
    sharding: UpdaterConfig
    lora: LoraConfig
    experts: ExpertConfig
    run: RunConfig


RECORDS: tuple[type[Record], ...] = tuple(get_type_hints(StageConfigs).values())
"""Every record, in the order in which options are shown."""

DOORS = ("policy_loss", "demo_loss", "advantage_fn", "engine", "teacher_prompt")
"""Options that take a custom object, or its ``module:name``."""

CLEARABLE = (
    *("dual_clip", "delta", "kl_target", "prompt_template", "limit_reward"),
    *("advantage_fn", "demo_loss", "teacher_prompt"),
)
"""Options that a preset, a run file or the command line can set to None, by the text "none"."""

if TYPE_CHECKING:
    # For type checkers and editors: in Python's types only bases can say "every field of these records", and a list of
    # the fields would state name and type of each option twice. At run time the one base is Record.
    class Options(  # the last base has the first fields
        RunConfig,
        ExpertConfig,
        LoraConfig,
        UpdaterConfig,
        OptimizerConfig,
        UpdateConfig,
        ReferenceConfig,
        ImportanceConfig,
        OffPolicyConfig,
        LossConfig,
        AdvantageConfig,
        RewardConfig,
        EpisodeConfig,
        EngineConfig,
        SamplingConfig,
        PromptConfig,
        PresetConfig,
    ):
        """All options of a run, flat."""

else:
    Options = create_model(
        "Options",
        __base__=Record,
        __module__=__name__,
        __doc__="All options of a run, flat.",
        **{name: (field.annotation, field) for record in RECORDS for name, field in record.model_fields.items()},
    )


def split_options(options: Options) -> StageConfigs:
    """Return the options as one record for each stage."""
    records = {
        name: record.model_construct(**{option: getattr(options, option) for option in record.model_fields})
        for name, record in get_type_hints(StageConfigs).items()
    }
    return StageConfigs(**records)
