"""Policy losses, one module for each: the module ``<name>`` has the callable ``<name>``, as the option calls it.

A new loss is a new module here; :data:`POLICY_LOSSES` lists the files of this folder. The user's own loss is a callable
of the same kind, passed as an object or as ``module:name``.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from rlox_grpo.config.records.loss import POLICY_LOSSES
from rlox_grpo.errors import ConfigError
from rlox_grpo.loss.inputs import PolicyLoss
from rlox_grpo.rewards.calls import function_name
from rlox_grpo.rewards.import_callable import import_callable
from rlox_grpo.signatures import explain_misfit

__all__ = ["POLICY_LOSSES", "find_policy_loss"]


def find_policy_loss(policy_loss: Any) -> PolicyLoss:
    """Return the callable of the option ``policy_loss``: a built-in name, ``module:name``, or the callable itself.

    Raises:
        ConfigError: an unknown name, a module that cannot be imported, or something that is not callable.
    """
    resolved: PolicyLoss
    if isinstance(policy_loss, str) and policy_loss in POLICY_LOSSES:
        resolved = getattr(import_module(f"{__name__}.{policy_loss}"), policy_loss)
    elif isinstance(policy_loss, str):
        resolved = import_callable("policy_loss", policy_loss)
    else:
        resolved = policy_loss
    if isinstance(resolved, type) or not callable(resolved):
        kind = (
            f"the class {resolved.__name__}: give an instance, or the module:name of one"
            if isinstance(resolved, type)
            else repr(resolved)
        )
        raise ConfigError(f"policy_loss is {kind}; expected a function of LossInputs")
    name, measure = function_name(resolved), getattr(resolved, "measure", None)
    if misfit := explain_misfit(resolved, "inputs"):
        raise ConfigError(f"policy_loss {name}: {misfit}; inputs is a rlox_grpo.loss.LossInputs")
    if measure is not None and (misfit := explain_misfit(measure, "step")):
        raise ConfigError(f"policy_loss {name}, measure: {misfit}; step is a rlox_grpo.loss.StepInputs")
    return resolved
