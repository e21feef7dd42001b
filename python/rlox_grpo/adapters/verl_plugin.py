"""What verl loads at ``import verl`` from the entry-point group ``verl.plugins``: loading is registering."""

from rlox_grpo.adapters.verl import register

register()
