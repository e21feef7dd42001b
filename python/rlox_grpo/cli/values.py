"""Values on the command line: options as ``--key value``, reward functions as names or tables."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, Literal, TypeAlias

Commands: TypeAlias = "argparse._SubParsersAction[Parser]"


class Parser(argparse.ArgumentParser):
    """A parser that refuses an argument with one value that is given twice; argparse drops the first value.

    Attributes:
        others: whether the command takes arguments that the parser does not know: options of a run, as
            ``--name VALUE``, or any. The parser returns them as they are.
    """

    others: Literal["refused", "options", "any"] = "refused"

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.register("action", None, _StoreOnce)  # the action of an argument that names none
        self.register("action", "store", _StoreOnce)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Return the parsed arguments, and the others, which are a usage error if the command takes none."""
        if args is not None and self.others == "options":
            args = _put_options_last(args, self._option_string_actions)
        parsed, others = super().parse_known_args(args, namespace)
        if others and self.others == "refused":
            self.error(f"unrecognised arguments: {' '.join(others)}")
        return parsed, others


def _put_options_last(words: Sequence[str], flags: Collection[str]) -> list[str]:
    """Move the options of a run behind the arguments of a command, whose names are ``flags``.

    argparse would take the value of an option that it does not know for a positional argument.
    """
    arguments, options = [], []
    remaining = iter(words)
    for word in remaining:
        name, equals, _ = word.partition("=")
        if not name.startswith("--") or any(flag.startswith(name) for flag in flags):  # flags may be abbreviated
            arguments.append(word)
            continue
        options.append(word)
        if not equals:
            options += islice(remaining, 1)
    return [*arguments, *options]


class _StoreOnce(argparse.Action):
    _value: Any = None

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        """Store the value. A second value is a usage error."""
        if self._value is not None and option_string is not None:
            raise argparse.ArgumentError(self, f"given twice, as {self._value!r} and {values!r}: it takes one value")
        self._value = values
        setattr(namespace, self.dest, values)


def add_episode_arguments(parser: argparse.ArgumentParser) -> None:
    """Add ``--environment-args`` and ``--tools``, which :func:`import_environment` reads."""
    parser.add_argument(
        "--environment-args",
        metavar="TABLE",
        default="{}",
        help="arguments of another package's environment, as a TOML table: {is_slippery = false}",
    )
    parser.add_argument(
        "--tools",
        metavar="MODULE:FUNCTION",
        nargs="+",
        action="extend",
        default=[],
        help="functions that the policy may call",
    )


def parse_reward(text: str) -> dict[str, Any]:
    """Return ``"countdown"`` or ``"{name = 'tag_format', weight = 0.1}"`` as a ``rewards`` table.

    Raises:
        ConfigError: text that begins with a brace and is not a TOML table.
    """
    return parse_table("--reward", text, "{name='exact'}") if text.lstrip().startswith("{") else {"name": text}


def import_environment(
    environment: str | Literal[False] | None,
    tools: Sequence[str],
    folders: Sequence[str | Path],
    arguments: Mapping[str, Any] | None = None,
) -> tuple[Callable[..., Any] | str | Literal[False] | None, list[Callable[..., Any]]]:
    """Import an environment and tools named as ``module:callable``, from packages and then from ``folders``.

    The environment may also be one of another package, such as ``gymnasium:FrozenLake-v1``, which gets ``arguments``,
    or ``command: …`` or False, which are returned unchanged.

    Raises:
        ConfigError: a module or name is not found or not callable, or the environment takes no ``arguments``.
    """
    from rlox_grpo.environments.names import ADAPTERS, make_adapted
    from rlox_grpo.errors import ConfigError
    from rlox_grpo.rewards.import_callable import import_callable

    adapted = make_adapted(environment, arguments) if environment else None
    if adapted is None and arguments:
        words = ", ".join(f"{word}:" for word in ADAPTERS)
        shown = f"{environment!r}, not one of {words}…" if environment else "not set"
        raise ConfigError(f"environment_args is ignored: environment is {shown}")
    if adapted is None and environment and not environment.startswith("command:"):
        adapted = import_callable("environment", environment, folders)
    functions = [import_callable(f"tools[{index}]", name, folders) for index, name in enumerate(tools)]
    return environment if adapted is None else adapted, functions


def import_sets(eval_data: Any, folders: Sequence[str | Path]) -> Any:
    """Import the environments and make the rewards that evaluation sets of a run file name.

    Args:
        eval_data: an :class:`rlox_grpo.EvalSet`, several by name, or data without settings, which is returned.
        folders: where modules are searched.

    Raises:
        ConfigError: a module, a name or a rule is not found; the message names the set.
    """
    from rlox_grpo.config.eval_set import EvalSet
    from rlox_grpo.errors import ConfigError
    from rlox_grpo.rewards.registry import make_rewards

    if isinstance(eval_data, Mapping):
        imported = {}
        for name, asked in eval_data.items():
            try:
                imported[name] = import_sets(asked, folders)
            except ConfigError as error:
                where = f"[[eval]] {name}".rstrip()
                raise ConfigError(f"{where}: {error}") from None
        return imported
    if not isinstance(eval_data, EvalSet):
        return eval_data
    environment = eval_data.environment
    if environment:  # False stays: the set has none
        environment, _ = import_environment(environment, (), folders)
    rewards = None if eval_data.rewards is None else make_rewards(eval_data.rewards, folders)
    return eval_data.model_copy(update={"environment": environment, "rewards": rewards})


def import_sources(train_data: Any, folders: Sequence[str | Path]) -> Any:
    """Import the environments and make the rewards that training sources name; other training data is returned.

    Args:
        train_data: the sources by name, or data without settings.
        folders: where modules are searched.

    Raises:
        ConfigError: a module, a name or a rule is not found; the message names the source.
    """
    from rlox_grpo.errors import ConfigError
    from rlox_grpo.rewards.registry import make_rewards

    if not isinstance(train_data, Mapping):
        return train_data
    imported = {}
    for name, source in train_data.items():
        try:
            rewards = None if source.rewards is None else make_rewards(source.rewards, folders)
            environment, _ = import_environment(source.environment, (), folders)
        except ConfigError as error:
            raise ConfigError(f"[[train]] {name}: {error}") from None
        imported[name] = source.model_copy(update={"environment": environment, "rewards": rewards})
    return imported


def parse_table(flag: str, text: str, example: str = "{name='value'}") -> dict[str, Any]:
    """Return ``"{is_slippery = false}"`` as a mapping. The error names ``flag`` and shows ``example``.

    Raises:
        ConfigError: the text is not a TOML table.
    """
    from rlox_grpo.config.toml import parse_toml
    from rlox_grpo.errors import ConfigError

    try:
        table = parse_toml(f"table = {text}")["table"]
    except ValueError as error:
        raise ConfigError(f"{flag} {text!r} is not a TOML table such as {example}: {error}") from None
    if not isinstance(table, dict):
        raise ConfigError(f"{flag} {text!r} is not a TOML table such as {example}")
    return table


def parse_overrides(words: Sequence[str]) -> dict[str, Any]:
    """Return ``["--learning_rate", "1e-5", "--stop=['x']"]`` as a mapping.

    Values are TOML; a value that is not valid TOML is text.

    Raises:
        ConfigError: a word is not ``--key``, or a key has no value or two values.
    """
    from rlox_grpo.config.toml import parse_toml
    from rlox_grpo.errors import ConfigError

    overrides: dict[str, Any] = {}
    remaining = list(words)
    while remaining:
        word = remaining.pop(0)
        if not word.startswith("--"):
            raise ConfigError(f"expected --key value, got {word!r}")
        key, equals, text = word[2:].partition("=")
        if not equals:
            if not remaining:
                raise ConfigError(f"--{key} has no value")
            text = remaining.pop(0)
        try:
            value = parse_toml(f"value = {text}")["value"]
        except ValueError:
            value = {"True": True, "False": False}.get(text, text)
        name = key.replace("-", "_")
        if name in overrides:
            raise ConfigError(f"--{key} is given twice, as {overrides[name]!r} and {value!r}: it takes one value")
        overrides[name] = value
    return overrides


def parse_options(words: Sequence[str], command: str, read: Collection[str]) -> dict[str, Any]:
    """Like :func:`parse_overrides`, for a ``command`` that reads only the options ``read``.

    Raises:
        ConfigError: ``words`` has an option that ``command`` does not read.
    """
    from rlox_grpo.config.records import Options
    from rlox_grpo.errors import ConfigError

    options = parse_overrides(words)
    if ignored := [name for name in options if name in Options.model_fields and name not in read]:
        raise ConfigError(f"--{ignored[0]} is an option of training: {command} does not read it")
    return options
