"""The update: advantages to micro-batches, log-probs and optimizer steps, by torch or DeepSpeed."""
