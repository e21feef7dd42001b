"""Protocols of generation engines, and :func:`make_engine`.

The built-in engine ``<name>`` is the module or package ``rollout/engines/<name>``, whose ``make_engine`` creates it for
one rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any, Protocol, TypeGuard, runtime_checkable

from rlox_grpo.errors import ConfigError
from rlox_grpo.rewards.import_callable import find_folder, import_callable, search_also
from rlox_grpo.signatures import explain_misfit
from rlox_grpo.types import Prompt, RolloutGroup, Sampling

if TYPE_CHECKING:
    from torch import Tensor

    from rlox_grpo.config.schema import GRPOConfig
    from rlox_grpo.distributed.ranks import Ranks
    from rlox_grpo.model.policy import Policy
    from rlox_grpo.rollout.engines.canary import Canary


@runtime_checkable
class GenerationEngine(Protocol):
    """Samples completions from the current policy.

    Attributes:
        exact: whether its log-probs equal the trainer's, because weights and arithmetic are the same.
        takes_weights: whether it has its own copy of the weights, which ``load_weights`` replaces. False: it samples
            from the trainer's module, and ``load_weights`` only sets the version.
        policy_version: version of the engine's weights; −1 before the first ``load_weights`` of an engine that takes
            weights.
        max_length: maximum number of tokens of a prompt with its completion; None without a limit.
    """

    exact: bool
    takes_weights: bool
    policy_version: int
    max_length: int | None

    def generate(
        self, prompts: Sequence[Prompt], group_size: int, sampling: Sampling, seed: int, *, first_prompt: int = 0
    ) -> list[RolloutGroup]:
        """Sample ``group_size`` completions for each prompt; the same arguments and weights give the same result.

        ``first_prompt`` is the index of ``prompts[0]`` among all prompts of the step, so that several ranks sample what
        one process would.
        """
        ...

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Replace the weights. Later completions have the policy version ``version``."""
        ...

    def close(self) -> None:
        """Release the engine's memory, processes and connections."""
        ...


ENGINE_MEMBERS = ("exact", "takes_weights", "policy_version", "max_length", "generate", "load_weights", "close")
"""The members of :class:`GenerationEngine`."""


@runtime_checkable
class MeasuredEngine(Protocol):
    """An engine with its own metrics."""

    def take_metrics(self) -> dict[str, float]:
        """Return the metrics of this rank since the last call, by name."""
        ...


@runtime_checkable
class CheckedEngine(Protocol):
    """An engine that compares its log-probs with the trainer's after each ``load_weights``."""

    def expect_log_probs(self, canary: Canary | None) -> None:
        """Set the log-probs to compare after the next ``load_weights``; None: no comparison.

        ``load_weights`` raises EngineError if the engine's log-probs differ.
        """
        ...


@runtime_checkable
class ReceivingEngine(Protocol):
    """An engine that runs on several ranks, of which only some read new weights.

    Attributes:
        reads_weights: whether this rank reads the weights of ``load_weights``.
    """

    reads_weights: bool


def is_measured(engine: object) -> TypeGuard[MeasuredEngine]:
    """Return whether an engine has metrics of its own.

    This function and the following ones look members up with ``getattr``, which also finds them in a wrapper with
    ``__getattr__``. From Python 3.12 on, ``isinstance`` with a protocol does not find such members.
    """
    return hasattr(engine, "take_metrics")


def is_checked(engine: object) -> TypeGuard[CheckedEngine]:
    """Return whether an engine compares its log-probs with the trainer's."""
    return hasattr(engine, "expect_log_probs")


def is_receiving(engine: object) -> TypeGuard[ReceivingEngine]:
    """Return whether only some ranks of an engine read new weights."""
    return hasattr(engine, "reads_weights")


def returns_mask(engine: object) -> bool:
    """Return whether an engine has ``returns_sampling_mask = True``.

    Such an engine returns the ids from which it drew each token, if ``Sampling.return_sampling_mask`` asks for them:
    completions and turns have a :class:`rlox_grpo.types.SamplingMask`.
    """
    return bool(getattr(engine, "returns_sampling_mask", False))


def returns_experts(engine: object) -> bool:
    """Return whether an engine has ``returns_experts = True``.

    Such an engine returns the experts to which it routed each token of a mixture of experts, if
    ``Sampling.return_experts`` asks for them: ``Completion.experts``.
    """
    return bool(getattr(engine, "returns_experts", False))


def make_engine(config: GRPOConfig, policy: Policy, ranks: Ranks | None = None) -> GenerationEngine:
    """Create the engine that ``config.engine`` names, for one rank, or return the custom engine.

    ``"module:make_engine"`` names a function that has the same arguments and returns an engine.

    Raises:
        ConfigError: the engine cannot serve this policy, or the custom engine lacks a member of
            :class:`GenerationEngine`.
        ImportError: the engine is not installed; the message names the extra.
    """
    from rlox_grpo.distributed.ranks import Ranks

    engine = config.engine
    if not isinstance(engine, str):
        is_maker = callable(engine) and not hasattr(engine, "generate")
        return _check_members(engine(config, policy, ranks or Ranks()) if is_maker else engine)
    make: Callable[[GRPOConfig, Policy, Ranks], GenerationEngine]
    is_custom = ":" in engine
    make = import_callable("engine", engine) if is_custom else import_module(f"{__name__}.{engine}").make_engine
    folder = find_folder(make)
    try:
        with search_also([] if folder is None else [folder]):  # it may import its neighbours only now
            made = make(config, policy, ranks or Ranks())
    except ValueError as error:
        raise ConfigError(str(error)) from error
    return _check_members(made) if is_custom else made


def _check_members(engine: Any) -> GenerationEngine:
    """Return the custom engine.

    Raises:
        ConfigError: the engine lacks a member of :class:`GenerationEngine`.
    """
    missing = [name for name in ENGINE_MEMBERS if not hasattr(engine, name)]
    if missing:
        raise ConfigError(
            f"engine is {engine!r} and has no {', '.join(missing)}: expected the members of "
            f"rlox_grpo.rollout.engines.GenerationEngine: {', '.join(ENGINE_MEMBERS)}"
        )
    misfits = {
        "generate": explain_misfit(
            engine.generate, "prompts", "group_size", "sampling", "seed", keywords=("first_prompt",)
        ),
        "load_weights": explain_misfit(engine.load_weights, "weights", keywords=("version",)),
    }
    for method, misfit in misfits.items():
        if misfit is not None:
            raise ConfigError(f"engine {type(engine).__name__}, {method}: {misfit}")
    made: GenerationEngine = engine
    return made
