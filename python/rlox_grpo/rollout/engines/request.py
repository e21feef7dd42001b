"""Checks of a generation request, the same for every engine."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

import numpy as np

from rlox_grpo.rollout.engines.sampling import check_sampling
from rlox_grpo.types import Prompt, Sampling


def check_request(
    prompts: Sequence[Prompt],
    group_size: int,
    sampling: Sampling,
    seed: int,
    *,
    vocab_size: int | None,
    max_length: int | None,
    has_tokenizer: bool,
    extra: Collection[str] = (),
) -> None:
    """Raise ValueError for a request that an engine cannot serve as it is.

    Args:
        prompts: Their token ids are checked one by one.
        group_size: Completions for each prompt.
        sampling: See :func:`~rlox_grpo.rollout.engines.sampling.check_sampling`.
        seed: Of the request.
        vocab_size: Rows of the model's embedding; None where they are unknown.
        max_length: Positions of the model or of the engine; None where there is no limit.
        has_tokenizer: Whether stop strings can be found.
        extra: Names of further parameters that the engine honours.

    Raises:
        ValueError: Names the argument, the prompt's position in ``prompts`` and the value.
    """
    if group_size < 1:
        raise ValueError(f"group_size is {group_size}, expected at least 1")
    if seed < 0:
        raise ValueError(f"seed is {seed}, expected at least 0")
    if not prompts:
        raise ValueError("prompts is empty, expected at least one prompt")
    check_sampling(sampling, extra)
    if sampling.stop and not has_tokenizer:
        raise ValueError(f"stop is {sampling.stop!r} and there is no tokenizer: pass tokenizer=, or stop_token_ids")
    for place, prompt in enumerate(prompts):
        ids = np.asarray(prompt.token_ids)
        if ids.ndim != 1 or not len(ids):
            raise ValueError(f"prompts[{place}] has shape {ids.shape}, expected one dimension with at least one token")
        if max_length is not None and len(ids) + sampling.max_new_tokens > max_length:
            raise ValueError(
                f"prompts[{place}] has {len(ids)} tokens: with max_new_tokens={sampling.max_new_tokens} it does not "
                f"fit the model's {max_length} positions; lower max_new_tokens or shorten the prompt"
            )
        beyond = (ids < 0) | (ids >= (math.inf if vocab_size is None else vocab_size))
        if beyond.any():
            at = int(beyond.argmax())
            raise ValueError(
                f"prompts[{place}].token_ids[{at}] is {ids[at]}, outside the model's vocabulary of {vocab_size}"
            )
