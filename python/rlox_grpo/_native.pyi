"""Typed signatures of the Rust extension; a test checks them against the built module.

Errors: `TypeError` for a wrong type or layout, `ValueError` for a wrong value, `MemoryError` for an output that does
not fit in memory. No argument causes a panic.

Threads: a kernel releases the interpreter. Offsets, lengths, indices and flags are copied before they are checked, so a
change by another thread during the call has no effect. Values (token ids, rewards, log-probs, numbers) are read in
place: a change during the call can change the result.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

__version__: str

_Ids = NDArray[np.int64]
_Mask = NDArray[np.bool_]

# advantages

def group_advantages(
    rewards: NDArray[Any],
    group_size: int,
    group_offsets: _Ids | None,
    scaling: str,
    baseline: str,
    ddof: int,
    std_epsilon: float,
) -> NDArray[Any]: ...
def broadcast_advantages(advantages: NDArray[Any], lengths: _Ids) -> NDArray[Any]: ...

# batch

def flatten_rows(rows: list[list[int]], argument: str) -> tuple[_Ids, _Ids]: ...
def pad(values: _Ids, offsets: _Ids, side: str, pad_token_id: int, multiple_of: int) -> tuple[_Ids, _Mask, _Ids]: ...
def pad_arrays(rows: list[_Ids], side: str, pad_token_id: int, multiple_of: int) -> tuple[_Ids, _Mask, _Ids] | None: ...
def pad_values(
    values: NDArray[np.float32], offsets: _Ids, rows: _Ids, width: int, fill: float
) -> NDArray[np.float32]: ...
def layout_rows(
    prompts: _Ids,
    prompt_offsets: _Ids,
    completions: _Ids,
    completion_offsets: _Ids,
    prompt_of_row: _Ids,
    train: _Mask,
    rows: _Ids,
    pad_token_id: int,
    multiple_of: int,
) -> tuple[_Ids, _Mask, _Ids, _Mask, _Mask, _Ids]: ...
def pack(
    lengths: _Ids, token_budget: int, padded: bool, num_ranks: int, linear_cost: int, oversize: str
) -> tuple[_Ids, _Ids]: ...
def share_prefixes(values: _Ids, offsets: _Ids) -> tuple[_Ids, _Ids, _Ids, _Ids]: ...

# Rewards: scores (float64) and statuses (uint8, see rlox_grpo.rewards.STATUSES), one for each completion.
def score_tag_format(
    completions: list[str], first: str, second: str, mode: str, prefix: str
) -> tuple[NDArray[np.float64], NDArray[np.uint8]]: ...
def format_modes() -> list[str]: ...
def score_tag_count(
    completions: list[str], first: str, second: str, mode: str
) -> tuple[NDArray[np.float64], NDArray[np.uint8]]: ...
def score_countdown(
    completions: list[str], numbers: NDArray[np.int64], offsets: NDArray[np.int64], targets: NDArray[np.int64]
) -> tuple[NDArray[np.float64], NDArray[np.uint8]]: ...
def score_gsm8k(
    completions: list[str], golds: list[str], percent_optional: bool
) -> tuple[NDArray[np.float64], NDArray[np.uint8]]: ...
def score_exact(
    completions: list[str], golds: list[str], tag: str | None, case_sensitive: bool
) -> tuple[NDArray[np.float64], NDArray[np.uint8]]: ...
def score_choice(
    completions: list[str], golds: list[str], options: str
) -> tuple[NDArray[np.float64], NDArray[np.uint8]]: ...
def score_word_repetition(
    completions: list[str], ngram_size: int, max_penalty: float
) -> tuple[NDArray[np.float64], NDArray[np.uint8]]: ...
def score_token_repetition(
    ids: NDArray[np.int64], offsets: NDArray[np.int64], ngram_size: int, max_penalty: float
) -> NDArray[np.float64]: ...
def extract_answer(text: str) -> str | None: ...
def extract_by_form(text: str, form: str) -> str | None: ...
def answer_forms() -> list[str]: ...

# Math answers. Settings: tolerance, percent optional, units, base optional, brackets optional, unsolved right,
# unevaluated right.
_MathSettings = tuple[float | None, bool, str, bool, bool, bool, bool]

def score_math(
    completions: list[str], golds: list[str], settings: _MathSettings
) -> tuple[NDArray[np.float64], NDArray[np.uint8]]: ...
def score_majority(
    completions: list[str], groups: list[int], settings: _MathSettings
) -> tuple[NDArray[np.float64], NDArray[np.uint8]]: ...
def math_equal(gold: str, answer: str, settings: _MathSettings) -> bool | None: ...
def unreadable_golds(golds: list[str]) -> list[tuple[int, str]]: ...
def score_tag_blocks(
    completions: list[str], first: str, second: str, each: float
) -> tuple[NDArray[np.float64], NDArray[np.uint8]]: ...
def score_reasoning_length(
    completions: list[str], tag: str | None, unit: str, max_length: int
) -> tuple[NDArray[np.float64], NDArray[np.uint8]]: ...
