"""The embedded engine: generation by a transformers model in this process."""
