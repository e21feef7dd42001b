"""Adapters for other trainers: one module each, importable without the trainer.

TRL needs no adapter: a rule is already a TRL reward function. ``docs/migration/other_trainers.md`` has lines to copy.
"""
