"""The policy model: loading it, its forward pass, and the log-probs of sampled tokens."""
