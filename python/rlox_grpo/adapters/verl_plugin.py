"""Entry point ``verl.plugins``: ``import verl`` imports this module, which registers the adapter."""

from rlox_grpo.adapters.verl import register

register()
