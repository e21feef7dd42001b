"""Rules and advantages inside other trainers: one module for each, importable without the trainer.

TRL needs none: a rule is a reward function of TRL as it is. ``docs/integrations.md`` has lines to copy.
"""
