"""Batches: pad, pack and mask rows of tokens; split a step into micro-batches within a token budget."""

from __future__ import annotations

from rlox_grpo.batch.build import (
    Packing,
    Padded,
    SharedPrefixes,
    build_batch,
    microbatches,
    pack,
    pad,
    share_prefixes,
)

__all__ = ["Packing", "Padded", "SharedPrefixes", "build_batch", "microbatches", "pack", "pad", "share_prefixes"]
