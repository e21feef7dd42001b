"""Typed signatures of the Rust extension; a test checks them against the built module."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

__version__: str

# Rewards: scores (float64) and statuses (uint8, see rlox_grpo.rewards.STATUSES), one for each completion.
def score_tag_format(
    completions: Sequence[str], first: str, second: str, mode: str, prefix: str
) -> tuple[NDArray[np.float64], NDArray[np.uint8]]: ...
def format_modes() -> list[str]: ...
def score_tag_count(
    completions: Sequence[str], first: str, second: str, mode: str
) -> tuple[NDArray[np.float64], NDArray[np.uint8]]: ...
def score_countdown(
    completions: Sequence[str], numbers: NDArray[np.int64], offsets: NDArray[np.int64], targets: NDArray[np.int64]
) -> tuple[NDArray[np.float64], NDArray[np.uint8]]: ...
def score_gsm8k(
    completions: Sequence[str], golds: Sequence[str], percent_optional: bool
) -> tuple[NDArray[np.float64], NDArray[np.uint8]]: ...
def score_exact(
    completions: Sequence[str], golds: Sequence[str], tag: str | None, case_sensitive: bool
) -> tuple[NDArray[np.float64], NDArray[np.uint8]]: ...
def score_choice(
    completions: Sequence[str], golds: Sequence[str], options: str
) -> tuple[NDArray[np.float64], NDArray[np.uint8]]: ...
def score_word_repetition(
    completions: Sequence[str], ngram_size: int, max_penalty: float
) -> tuple[NDArray[np.float64], NDArray[np.uint8]]: ...
def score_token_repetition(
    ids: NDArray[np.int64], offsets: NDArray[np.int64], ngram_size: int, max_penalty: float
) -> NDArray[np.float64]: ...
def extract_answer(text: str) -> str | None: ...
