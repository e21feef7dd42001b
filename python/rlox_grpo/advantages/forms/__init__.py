"""The built-in advantage functions, a module each, written against the interface of :mod:`rlox_grpo.advantages.door`.

A module has ``CHOSEN_BY``, the options and values that choose it, and ``make(config, weights, moving)``, which returns
the advantage function. A new form is a new module here; :func:`find_form` finds it by these options.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from importlib import import_module
from pkgutil import iter_modules
from typing import Protocol

from rlox_grpo.advantages.form import AdvantageFn
from rlox_grpo.advantages.moving import MovingBaselines
from rlox_grpo.config.records import AdvantageConfig

_ORDER = ("turn_credit", "baseline", "reward_aggregation", "reward_scaling")
"""The options that choose a form; the first with a value that a form names decides."""


class Form(Protocol):
    """A form of advantages: a module of this folder.

    Attributes:
        CHOSEN_BY: one option and the value that chooses the form; empty for the default.
    """

    CHOSEN_BY: Mapping[str, str]

    def make(self, config: AdvantageConfig, weights: Sequence[float], moving: MovingBaselines) -> AdvantageFn:
        """Return the advantage function.

        Args:
            config: the options.
            weights: one for each reward component.
            moving: the averages of ``baseline="moving"``.
        """
        ...


@cache
def list_forms() -> tuple[Form, ...]:
    """Return every form, in the order of the modules' names."""
    return tuple(import_module(f"{__name__}.{module.name}") for module in iter_modules(__path__))


def find_form(config: AdvantageConfig) -> Form:
    """Return the form that the options choose."""
    chosen = {next(iter(form.CHOSEN_BY.items()), None): form for form in list_forms()}
    for name in _ORDER:
        if (form := chosen.get((name, getattr(config, name)))) is not None:
            return form
    return chosen[None]
