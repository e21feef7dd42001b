"""Rollout: sample completions for prompts, on one rank or several, in step with the update or ahead of it."""
