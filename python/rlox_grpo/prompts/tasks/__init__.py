"""Datasets with checkable answers, in the form that the trainer takes."""
