"""What a checkpoint records of its run, so that ``rlox-grpo eval`` evaluates it as the run did."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlox_grpo.config.presets import PRESETS
from rlox_grpo.config.records import EngineConfig, EpisodeConfig, PromptConfig, RewardConfig, SamplingConfig
from rlox_grpo.config.records.option import OBJECT, is_custom, list_evaluated
from rlox_grpo.config.schema import GRPOConfig
from rlox_grpo.errors import CheckpointError
from rlox_grpo.run.manifest import STATE, read_object

logger = logging.getLogger(__name__)

EVALUATED: tuple[str, ...] = (
    *(
        name
        for record in (PromptConfig, SamplingConfig, EngineConfig, EpisodeConfig, RewardConfig)
        for name in list_evaluated(record)
    ),
    *("dtype", "fp32_lm_head", "load_in_4bit", "eval_samples", "seed"),
)
"""The options that an evaluation reads."""

_PROCESS_OPTIONS = EngineConfig.model_fields.keys() - {"engine", "engine_max_length", "max_rollout_rows"}
"""Options of the processes and the memory of the run, which an evaluation has for itself."""

_SOURCES = ("rewards", "environment", "environment_args", "tools", "eval_data", "eval", "data_args", "task")

"""Keys of a run file that an evaluation reads."""

_SHOWN = ("system_prompt", "prompt_template", "temperature", "max_new_tokens", "stop", "eval_samples", "seed")
"""Options that are shown even if they have their default values."""


@dataclass(frozen=True)
class RecordedRun:
    """The run of a checkpoint.

    Attributes:
        options: the options of :data:`EVALUATED` that are not the defaults.
        sources: keys of a run file: ``rewards``, ``environment``, ``environment_args``, ``tools``, ``eval_data``,
            ``eval``, ``data_args`` and ``task``; ``folders``, where their modules are searched; and of a run that was
            started from Python ``unrecorded``, the names of Python objects by argument, and ``unrecorded_sets``, why
            its evaluation sets are not there.
        default_template: the prompt template if it is that of the run's preset, so that rows may have prompts of their
            own; otherwise None.
        is_in_its_run: whether the checkpoint lies in the run folder that its record names. Otherwise it was moved, or
            somebody else wrote it.
    """

    options: Mapping[str, Any]
    sources: Mapping[str, Any]
    default_template: str | None = None
    is_in_its_run: bool = True

    def replace_by(self, overrides: RecordedRun) -> RecordedRun:
        """Return the run with the options and sources of ``overrides`` in place of its own.

        An evaluation never sends its weights to the run's vLLM servers: if no other engine is given, the evaluation
        uses the built-in engine.
        """
        preset = str(overrides.options.get("preset"))
        preset_values = PRESETS[preset].values if preset in PRESETS else {}
        options = {
            **self.options,
            **{name: value for name, value in preset_values.items() if name in EVALUATED},
            **overrides.options,
        }
        dropped: set[str] = set()
        if "engine" in overrides.options or self.options.get("engine") == "vllm_server":
            dropped |= EngineConfig.model_fields.keys()
        if {"rewards", "environment"} & overrides.sources.keys() or "rewards" in self.sources.get("unrecorded", {}):
            dropped.add("reward_weights")  # the weights of other functions, or of functions that are not there
        options = {name: value for name, value in options.items() if name in overrides.options or name not in dropped}
        sources = {**self.sources, **overrides.sources}
        if "environment" in overrides.sources and "environment_args" not in overrides.sources:
            sources.pop("environment_args", None)
        if data := {"eval_data", "eval"} & overrides.sources.keys():
            for key in {"eval_data", "eval"} - data:
                sources.pop(key, None)
            if "data_args" not in overrides.sources:
                sources.pop("data_args", None)
        here = {**overrides.sources, **overrides.options}
        if "eval" in sources and "eval" not in overrides.sources:  # a set's own setting gives way, too
            replaced = {"samples" if name == "eval_samples" else name for name in here}
            sources["eval"] = [
                {key: value for key, value in table.items() if key not in replaced} for table in sources["eval"]
            ]
        unrecorded = {key: names for key, names in sources.pop("unrecorded", {}).items() if key not in here}
        default_template = None if "prompt_template" in overrides.options else self.default_template
        return RecordedRun(options, {**sources, **({"unrecorded": unrecorded} if unrecorded else {})}, default_template)

    def list_code(self, replaced: Collection[str] = ()) -> list[str]:
        """Return what an evaluation would import, start or ask, as ``key 'name'``, without the keys ``replaced``.

        That are functions and environments by name, an engine of the user, and judges, which get the samples and a key.
        """
        asked = {key: value for key, value in self.sources.items() if key not in replaced}
        sets = [table for table in asked.get("eval", ()) if isinstance(table, Mapping)]
        code = []
        for table in (asked, *sets):
            code += [("rewards", name) for name in _list_rules(table.get("rewards")) if _runs_code(name)]
            code += [("environment", table["environment"])] if table.get("environment") else []
        code += [("tools", name) for name in asked.get("tools", ())]
        engine = None if "engine" in replaced else self.options.get("engine")
        code += [("engine", engine)] if isinstance(engine, str) and is_custom(engine) else []
        return [f"{key} {name!r}" for key, name in dict.fromkeys(code)]

    def warn_about_differences(self, config: GRPOConfig) -> None:
        """Warn if options for prompts and sampling differ from the run's, so that accuracies cannot be compared."""
        names = [*list_evaluated(PromptConfig), *list_evaluated(SamplingConfig)]
        then = {name: self.options.get(name, GRPOConfig.model_fields[name].default) for name in names}
        differing = [name for name in names if then[name] != getattr(config, name)]
        if differing:
            logger.warning(
                "this evaluation is not as in the run of the checkpoint, which had %s, and here it is %s: pass these "
                "options to GRPO, or use `rlox-grpo eval`",
                ", ".join(f"{name}={then[name]!r}" for name in differing),
                ", ".join(f"{name}={getattr(config, name)!r}" for name in differing),
            )

    def list_settings(self, also: Iterable[str] = ()) -> dict[str, str]:
        """Return the settings to show: sources, options that are not the defaults, and the options ``also``."""
        names = [name for name in (*_SHOWN, *self.options, *also) if name in EVALUATED]
        options = {name: self.options.get(name, GRPOConfig.model_fields[name].default) for name in names}
        settings = {**{name: value for name, value in self.sources.items() if name in _SOURCES}, **options}
        return {name: repr(list(value) if isinstance(value, tuple) else value) for name, value in settings.items()}


def _list_rules(rewards: Any) -> Iterator[str]:
    """Return the names in ``rewards`` tables, also those of rules in rules."""
    if isinstance(rewards, str):
        yield rewards
    elif isinstance(rewards, Mapping):
        for key in ("name", "rule", "accuracy", "rules"):
            yield from _list_rules(rewards.get(key))
    elif isinstance(rewards, (list, tuple)):
        for table in rewards:
            yield from _list_rules(table)


def _runs_code(name: str) -> bool:
    """Whether a name in a ``rewards`` table is code to import, or a judge."""
    return name == "judge" or (":" in name and not name.startswith("reasoning_gym:"))


def _choose_folders(checkpoint: Path, folders: Any) -> list[str]:
    """Return the recorded folders to search for modules: absolute ones, which the checkpoint did not bring along."""
    here = checkpoint.resolve()
    named = [Path(folder) for folder in folders if isinstance(folder, str)] if isinstance(folders, list) else []
    return [str(folder) for folder in named if folder.is_absolute() and not folder.resolve().is_relative_to(here)]


def _is_in_its_run(checkpoint: Path, output_dir: Any, folders: list[str]) -> bool:
    """Whether the checkpoint lies under the run folder ``output_dir`` of its record.

    The last of ``folders`` is that in which the run was started. The parent is compared, as every path is under ``/``.
    """
    if not isinstance(output_dir, str):
        return False
    run = Path(*folders[-1:], output_dir)
    return run.is_absolute() and checkpoint.resolve().parent == (run / "checkpoints").resolve()


def read_recorded_run(checkpoint: str | Path) -> RecordedRun | None:
    """Return what a checkpoint records of its run; None if the path is not a checkpoint of a run.

    Raises:
        CheckpointError: the checkpoint's ``state.json`` is damaged.
        ConfigError: the record has a value that this version refuses.
    """
    path = Path(checkpoint)
    if not (path / STATE).is_file():
        return None
    state = read_object(path / STATE)
    if isinstance(state, str):
        raise CheckpointError(f"{path / STATE} is damaged: {state}")
    for key in ("config", "sources"):
        if not isinstance(state.get(key), dict):
            raise CheckpointError(f"{path / STATE} is damaged: it has no {key}")
    saved = {name: state["config"][name] for name in EVALUATED if name in state["config"]}
    if not (saved.get("dtype") == "bfloat16" and saved.get("fp32_lm_head") is False):
        # A run records what "auto" has become. It becomes True here too, and in float32 the option has no effect.
        saved.pop("fp32_lm_head", None)
    objects = {name: [value] for name, value in saved.items() if isinstance(value, str) and value.startswith(OBJECT)}
    config = GRPOConfig.create(**{name: value for name, value in saved.items() if name not in objects})
    options = {
        name: getattr(config, name)
        for name in EVALUATED
        if name not in _PROCESS_OPTIONS and getattr(config, name) != GRPOConfig.model_fields[name].default
    }
    folders = _choose_folders(path, state["sources"].get("folders", ()))
    sources = {**state["sources"], "folders": folders}
    unrecorded = {**sources.get("unrecorded", {}), **objects}
    preset = PRESETS.get(state["config"].get("preset"))
    template = None if preset is None else preset.values.get("prompt_template")
    return RecordedRun(
        options,
        {**sources, "unrecorded": unrecorded} if unrecorded else sources,
        template if template == config.prompt_template else None,
        _is_in_its_run(path, state["config"].get("output_dir"), folders),
    )
