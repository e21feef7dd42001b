"""The demo: a small model learns Countdown from scratch on a CPU."""

from __future__ import annotations

from rlox_grpo.demo.run import run_demo

__all__ = ["run_demo"]
