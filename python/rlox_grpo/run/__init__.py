"""A run: its folder, logs, metrics, checkpoints, evaluation and report."""
