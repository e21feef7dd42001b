"""Adapters for other trainers: one module each, importable without the trainer.

TRL needs none: a rule is a reward function of TRL as it is. ``docs/migration/other_trainers.md`` has lines to copy.
"""
