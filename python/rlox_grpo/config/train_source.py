"""Training sources: the data sets of a mixture, each with its share and settings of its own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from pydantic import model_validator

from rlox_grpo.config.eval_set import is_name, refuse_true
from rlox_grpo.config.records.option import Record, option
from rlox_grpo.errors import ConfigError

if TYPE_CHECKING:
    from typing_extensions import Self

COLUMN = "source"
"""The column with the name of a row's source."""

PROMPT_SETTINGS = ("prompt_template", "prompt_column", "columns", "system_prompt", "chat_template_kwargs")
"""The settings of a source that are options of prompts."""

COLUMNS = ("answer", "completion", "input_ids", "messages", "prompt", "prompts", "question")
"""Names of columns, which no source may have: a dict with one of them is a dict of columns."""


class TrainSource(Record, title="Training source"):
    """The rows of one source of a mixture, and its settings. A setting that is None has its value in the run.

    ``TrainSource(rows, weight=2)`` takes the prompts as its first argument.
    """

    prompts: Any = option(..., "Training prompts, in any form that train takes, streams included.")
    weight: float | None = option(
        None, "Share of the prompts: that of a source with weight 2 is twice that of a source with 1. None: 1.", gt=0
    )
    quota: int | None = option(
        None, "Prompts of each step, instead of a weight. The quotas of all sources sum to prompts_per_step.", ge=1
    )
    rewards: Any = option(
        None, "A reward function or several for the rows of this source alone; the first says whether one is right."
    )
    environment: Any = option(
        None,
        "Environment of the rows of this source alone, in any form that GRPO takes; False: none, one reply to each "
        "prompt.",
    )
    prompt_template: str | None = option(None, "Template that writes the prompts of rows without a prompt column.")
    prompt_column: str | None = option(None, "Column of the data that holds the prompt.")
    columns: dict[str, str] | None = option(None, "New name of a column → its name in the data.")
    system_prompt: str | None = option(None, "System message before each prompt.")
    chat_template_kwargs: dict[str, bool | int | float | str] | None = option(
        None, "Variables for the tokenizer's chat template."
    )

    def __init__(self, prompts: Any, **settings: Any) -> None:
        """Create a source from its prompts and its settings.

        Raises:
            ConfigError: an unknown setting, a value out of range, environment=True, or both a weight and a quota.
        """
        super().__init__(**{"prompts": prompts, **settings})

    @model_validator(mode="after")
    def _refuse_two_shares(self) -> Self:
        if self.weight is not None and self.quota is not None:
            raise ConfigError(f"weight={self.weight:g} and quota={self.quota}: give one of them")
        return self

    @model_validator(mode="after")
    def _refuse_true(self) -> Self:
        refuse_true(self.environment)
        return self

    @property
    def share(self) -> float:
        """The quota, or the weight if there is no quota. The share of the prompts is proportional to this number."""
        return self.quota or self.weight or 1


def is_mixture(prompts: Any) -> bool:
    """Whether ``prompts`` are sources by name, or one :class:`TrainSource`.

    The splits of a ``DatasetDict`` and a dict of columns are not sources.
    """
    if not isinstance(prompts, Mapping):
        return isinstance(prompts, TrainSource)
    return not type(prompts).__name__.endswith("DatasetDict") and not any(name in prompts for name in COLUMNS)


def list_sources(prompts: Any, prompts_per_step: int) -> dict[str, TrainSource]:
    """Return the sources of a mixture by name: a mapping from names to rows or to a :class:`TrainSource`.

    Raises:
        ConfigError: a mapping without sources; a name that cannot be part of the name of a metric; quotas of some
            sources only, or whose sum is not ``prompts_per_step``.
    """
    if isinstance(prompts, TrainSource):
        raise ConfigError("prompts is a TrainSource without a name: give it one, as {'math': TrainSource(rows)}")
    if not prompts:
        raise ConfigError("prompts has no source: give at least one, as {'math': rows}")
    for name in prompts:
        check_source_name("prompts", name)
    sources = {name: value if isinstance(value, TrainSource) else TrainSource(value) for name, value in prompts.items()}
    check_quotas(sources, prompts_per_step)
    return sources


def check_source_name(where: str, name: Any) -> None:
    """Raise ConfigError unless ``name`` can be part of the name of a metric, and is not that of a column."""
    if not is_name(name) or name in COLUMNS:
        raise ConfigError(
            f"{where}: {name!r} is not the name of a source: write letters, digits, _ and -, as in 'math_500', and "
            f"none of {', '.join(COLUMNS)}"
        )


def check_quotas(sources: Mapping[str, TrainSource], prompts_per_step: int) -> None:
    """Raise ConfigError if only some sources have a quota, or if the quotas do not fill a step."""
    quotas = {name: source.quota for name, source in sources.items() if source.quota is not None}
    if not quotas:
        return
    if others := [name for name in sources if name not in quotas]:
        first = next(iter(quotas))
        raise ConfigError(
            f"source {first!r} has quota={quotas[first]} and source {others[0]!r} has none: give all sources quotas, "
            "or all of them weights"
        )
    if (total := sum(quotas.values())) != prompts_per_step:
        terms = " + ".join(f"{quota} ({name})" for name, quota in quotas.items())
        raise ConfigError(
            f"the quotas {terms} sum to {total}, and prompts_per_step={prompts_per_step}: change one of them"
        )
