"""What old versions of dependencies do not do; `make test-oldest` runs the tests with them."""

from __future__ import annotations

import sys

import pytest
import transformers

NAMES_ARGUMENTS = sys.version_info >= (3, 11)
"""Whether errors of the extension end with a note that names the argument; Python 3.10 has no notes."""
REBUILDS_TOKENIZERS = int(transformers.__version__.partition(".")[0]) >= 5
"""Whether AutoTokenizer builds a tokenizer by the model's type instead of reading the saved one."""


def skip_if_not_packed(architecture: str) -> None:
    """transformers 4 gives the attention of these types no place for a packed layout: they run as padded rows."""
    if int(transformers.__version__.partition(".")[0]) < 5 and architecture in ("gpt2", "gemma3_text"):
        pytest.skip(f"{architecture} is packed with transformers 5")


def skip_if_no_pictures() -> None:
    """Skip a module: before transformers 5.18, models take no features of pictures beside token ids."""
    pytest.importorskip("torchvision", reason="pip install torchvision (the extra 'vision')")
    if tuple(map(int, transformers.__version__.split(".")[:2])) < (5, 18):
        pytest.skip("pictures need transformers 5.18", allow_module_level=True)
