"""Defaults that kernels share with the options, so that they are used without loading the options."""

from __future__ import annotations

DDOF = 1
STD_EPSILON = 1e-4
