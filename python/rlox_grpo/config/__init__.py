"""Configuration: options, presets, run files and the checks between options."""
