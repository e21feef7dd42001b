"""Pass a cache of keys and values to a transformers model. The name of the parameter depends on the version."""

from __future__ import annotations

import functools
import inspect
from typing import Any

from torch import nn

_NAMES = ("past_key_values", "cache")
"""Names of the parameter; transformers 5.24 has ``cache``, and takes the older one with a warning."""


def takes(model: nn.Module, *names: str) -> bool:
    """Whether the model's ``forward`` has the parameters ``names``."""
    return set(names) <= _list_parameters(model)


def find_cache_argument(model: nn.Module) -> str | None:
    """Return the parameter of the model's ``forward`` that takes the cache; None without one."""
    parameters = _list_parameters(model)
    return next((name for name in _NAMES if name in parameters), None)


def run_with_cache(model: nn.Module, *, cache: Any, **options: Any) -> Any:
    """Run the model's forward pass, which reads ``cache`` and writes the keys and values of its tokens to it.

    ``options`` are the other arguments of ``forward``.
    """
    name = find_cache_argument(model)
    assert name is not None  # as can_decode_with_cache has seen
    return model(**{name: cache}, use_cache=True, **options)


def _list_parameters(model: nn.Module) -> frozenset[str]:
    # The forward of a peft adapter takes any keyword, so look at the base model's.
    base: Any = model
    if hasattr(base, "get_base_model"):
        base = base.get_base_model()
    method = getattr(base.forward, "__func__", None)
    return _read_parameters(base.forward) if method is None else _read_parameters_once(method)


def _read_parameters(forward: Any) -> frozenset[str]:
    return frozenset(inspect.signature(forward).parameters)


_read_parameters_once = functools.lru_cache(maxsize=64)(_read_parameters)  # decoding reads them at every step
