"""Typed signatures of the Rust extension; a test checks them against the built module."""

__version__: str
