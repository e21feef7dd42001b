"""What several unit tests share."""

from __future__ import annotations

from typing import Any

import pytest

import chatml


@pytest.fixture(scope="module")
def tokenizer(byte_tokenizer: Any) -> Any:
    """The byte tokenizer with the ChatML template; of each module its own."""
    return chatml.make_tokenizer(byte_tokenizer)
