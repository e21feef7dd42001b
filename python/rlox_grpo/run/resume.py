"""Compare a resumed run with its checkpoint: options, reward functions, data and optimizer.

Functions and data are compared by their digests; see :mod:`rlox_grpo.run.digests`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from rlox_grpo.config.records import DOORS
from rlox_grpo.config.schema import GRPOConfig, find_changed_options, is_resumable, list_other_options
from rlox_grpo.errors import CheckpointError, ConfigError, suggest_nearest
from rlox_grpo.run.digests import SOURCE_KEY
from rlox_grpo.run.history import checkpoints
from rlox_grpo.run.manifest import STATE, read_object

REWARDS = "rewards"
"""Name in ``resume_changes`` that allows other or edited reward functions."""

OPTIMIZER = "optimizer"
"""Name in ``resume_changes`` that allows another or an edited optimizer; also the key of its fingerprint."""

_OTHER_OPTIMIZER = "the optimizer is another, or was edited"

REFERENCE = "frozen reference"
"""Key of the fingerprint of a frozen reference."""

_OTHER = "{}: not those of the run"

SHARES = "shares of the sources"
"""Key of the text that names the sources of a mixture, with their weights in whole numbers."""

BASE = "frozen weights beside the adapter"
"""Key of their fingerprint: a checkpoint of an adapter does not have them. None is not compared."""

_EDITED = "{} was edited"
"""Message about an edited policy loss, advantage function or engine of the user."""


def refuse_unknown_changes(names: Iterable[str]) -> None:
    """Raise ConfigError if ``resume_changes`` contains a name that is not an option."""
    option_names = [*GRPOConfig.model_fields, REWARDS, OPTIMIZER]
    for name in names:
        if name not in option_names:
            raise ConfigError(f"resume_changes: unknown option {name!r}{suggest_nearest(name, option_names)}")


def read_recorded_dtype(config: GRPOConfig) -> Literal["float32", "bfloat16"] | None:
    """Return the precision of the run that ``config`` continues.

    None if there is no run, or if it records no precision.

    Which checkpoint is continued is decided later, under the folder's lock; all checkpoints of a run have one
    precision.
    """
    if config.resume == "never" or (config.resume == "auto" and config.output_dir is None):
        return None
    root = Path(str(config.output_dir)) / "checkpoints"
    for checkpoint in reversed(checkpoints(root)) if config.resume == "auto" else [Path(config.resume)]:
        state = read_object(checkpoint / STATE)
        options = state.get("config") if isinstance(state, dict) else None
        if isinstance(options, dict) and (dtype := options.get("dtype")) in ("float32", "bfloat16"):
            return dtype  # type: ignore[no-any-return]
    return None


def compare_rewards(state: Mapping[str, Any], rewards: Sequence[tuple[str, str | None]]) -> list[str]:
    """Describe the differences between the checkpoint's reward functions and ``rewards`` (name, digest)."""
    names = [name for name, _ in rewards]
    if state["rewards"] != names:
        return [f"reward functions: {state['rewards']} there, {names} here"]
    return [
        f"the reward function {name} was edited"
        for (name, digest), before in zip(rewards, state["reward_sources"], strict=True)
        if isinstance(before, str) and digest is not None and _comparable(before, digest) and _differ(before, digest)
    ]


def compare_data(then: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Describe the fingerprints that differ."""
    other_kinds = {OPTIMIZER, *map(SOURCE_KEY.format, DOORS)}
    others = [name for name in now if name not in other_kinds and then.get(name) != now[name]]
    if BASE in others and None in (then.get(BASE), now[BASE]):  # in shards, or a checkpoint of an earlier version
        others.remove(BASE)
    changed = [
        f"{name}: {then.get(name)} there, {now[name]} here" if name == SHARES else _OTHER.format(name)
        for name in others
    ]
    for name in DOORS:
        before, here = then.get(SOURCE_KEY.format(name)), now.get(SOURCE_KEY.format(name))
        if before and here and _comparable(before, here) and _differ(before, here):
            changed.append(_EDITED.format(name))
    if _is_other(then.get(OPTIMIZER), now[OPTIMIZER]):
        changed.append(_OTHER_OPTIMIZER)
    return changed


def _is_other(before: str | None, now: str | None) -> bool:
    """Whether two digests of an optimizer differ.

    Digests of bytecode are compared only within one version of Python, and a missing digest is not compared.
    """
    are_code = [digest is None or digest.startswith("python") for digest in (before, now)]
    is_unknown = before is None or now is None or not _comparable(before, now)
    if "adamw" not in (before, now) and all(are_code) and is_unknown:
        return False
    return before != now and (before is None or now is None or _differ(before, now))


def refuse_other_run(
    checkpoint: Any,
    state: Mapping[str, Any],
    config: GRPOConfig,
    rewards: Sequence[tuple[str, str | None]],
    data: Mapping[str, Any],
    model: str,
) -> tuple[dict[str, tuple[Any, Any]], list[str]]:
    """Compare the configuration, rewards and data of a checkpoint with those of the resumed run.

    ``model`` is the name of the resumed run's model, for the error message.

    Returns:
        The options that differ, name → (old value, new value), with the key ``"rewards"`` if anything else differs;
        and descriptions of these other differences.

    Raises:
        CheckpointError: a difference that is neither resumable nor named in ``resume_changes``.
    """
    options = find_changed_options(state["config"], config)
    others = [
        *list_other_options(state["config"]),
        *compare_rewards(state, rewards),
        *compare_data(state["data"], data),
    ]
    allowed = config.resume_changes
    fixed = [name for name in options if not is_resumable(name) and name not in allowed]
    permits = {what: REWARDS for what in others if "reward function" in what} | {_OTHER_OPTIMIZER: OPTIMIZER}
    permits |= {_EDITED.format(name): name for name in DOORS}
    # Dithered weights depend on both options, and a reference that is a copy of the policy has them too.
    permits |= {_OTHER.format(REFERENCE): name for name in ("dither_weights", "dtype") if name in options}
    forbidden = [what for what in others if permits.get(what) not in allowed]
    if fixed or forbidden:
        changed = [f"{name}: {options[name][0]!r} there, {options[name][1]!r} here" for name in fixed]
        wanted = [*fixed, *dict.fromkeys(permits[what] for what in forbidden if what in permits)]
        before = state["model"]  # another model may have another tokenizer, and so other prompts
        models = "" if before == model else f"; the model is another one as well: {before} there, {model} here"
        permit = f"add resume_changes={wanted} to continue with the change, " if wanted else ""
        raise CheckpointError(
            f"{checkpoint} is of another configuration ({'; '.join([*changed, *forbidden])}{models}): restore these to "
            f"continue it, {permit}or choose another output_dir to start anew"
        )
    if others:
        options["rewards"] = ([*state["rewards"]], others)
    return options, others


def _comparable(digest: str, other: str) -> bool:
    """Whether two digests can be compared: not those of bytecode of two versions of Python.

    Digests of other kinds differ: a rule of this library is not a function of the same name.
    """
    kinds = {digest.partition(":")[0], other.partition(":")[0]}
    return len(kinds) == 1 or not all(kind.startswith("python") for kind in kinds)


def _differ(digest: str, other: str) -> bool:
    """Whether two digests differ. Values, after a ``+``, are compared only where both functions have some."""
    (code, _, values), (other_code, _, other_values) = digest.partition("+"), other.partition("+")
    return code != other_code or bool(values and other_values and values != other_values)
