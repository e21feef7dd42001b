"""The demos: small models learn from scratch on a CPU; Countdown in :mod:`rlox_grpo.demo.run`."""
