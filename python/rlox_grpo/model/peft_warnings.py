"""Warnings of peft that do not apply."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def ignoring_peft_warnings() -> Iterator[None]:
    """Ignore peft's warnings of adapters on tied layers and of the ranks of stacked experts.

    :func:`rlox_grpo.model.untie.untie_adapted_layers` separates tied layers.
    peft 0.21 looks for the rank of the stacked matrix ``gate_up_proj`` of experts among modules, warns, and applies it.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Model has `tie_word_embeddings=True`", UserWarning)
        warnings.filterwarnings("ignore", r"The following (rank|alpha)_pattern keys did not match", RuntimeWarning)
        yield
