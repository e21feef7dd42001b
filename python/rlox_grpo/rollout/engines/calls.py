"""What the calls of all engines share: the checks of their arguments, and the groups of their results."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from rlox_grpo.rollout.engines.stop_strings import decode
from rlox_grpo.rollout.engines.turns import TurnRequest
from rlox_grpo.types import Completion, Int64Array, Prompt, RolloutGroup, Sampling


@dataclass
class Limits:
    """The limits of an engine. The methods raise ValueError for arguments beyond them.

    Attributes:
        vocab_size: rows of the model's embedding; None if unknown.
        max_length: maximum number of tokens of a prompt with its completion; None without a limit.
        has_tokenizer: whether there is a tokenizer, which stop strings need.
        extra: names of the further sampling parameters that the engine supports.
        lowest_temperature: lowest temperature above 0; the engine would silently replace a lower one.
    """

    vocab_size: int | None = None
    max_length: int | None = None
    has_tokenizer: bool = False
    extra: Collection[str] = ()
    lowest_temperature: float = 0.0

    def check_sampling(self, sampling: Sampling, seed: int) -> None:
        """Check the sampling parameters and the seed."""
        if seed < 0:
            raise ValueError(f"seed is {seed}, expected at least 0")
        if sampling.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens is {sampling.max_new_tokens}, expected at least 1")
        temperature = sampling.temperature
        if not (math.isfinite(temperature) and temperature >= 0):
            raise ValueError(f"temperature is {temperature}, expected a finite number, at least 0")
        if 0 < temperature < self.lowest_temperature:
            raise ValueError(
                f"temperature is {temperature}: this engine samples at {self.lowest_temperature} or above, or at 0"
            )
        if not 0 < sampling.top_p <= 1:
            raise ValueError(f"top_p is {sampling.top_p}, expected above 0 and at most 1")
        if sampling.top_k < 0:
            raise ValueError(f"top_k is {sampling.top_k}, expected at least 0 (0 is off)")
        if not 0 <= sampling.min_p <= 1:
            raise ValueError(f"min_p is {sampling.min_p}, expected 0 to 1")
        for name, value in sampling.extra:
            if name not in self.extra:
                raise ValueError(f"{name} is {value!r}, and this engine does not honour it")
        if "" in sampling.stop:
            raise ValueError(f"stop is {sampling.stop!r}, expected no empty string: every completion contains it")
        if sampling.stop and not self.has_tokenizer:
            raise ValueError(f"stop is {sampling.stop!r} and there is no tokenizer: pass tokenizer=, or stop_token_ids")

    def check_prompts(self, prompts: Sequence[Prompt], group_size: int, sampling: Sampling, seed: int) -> None:
        """Check the arguments of ``generate``. An error names the argument, the index of the prompt and the value."""
        if group_size < 1:
            raise ValueError(f"group_size is {group_size}, expected at least 1")
        if not prompts:
            raise ValueError("prompts is empty, expected at least one prompt")
        self.check_sampling(sampling, seed)
        for position, prompt in enumerate(prompts):
            ids = np.asarray(prompt.token_ids)
            if ids.ndim != 1 or not len(ids):
                raise ValueError(
                    f"prompts[{position}] has shape {ids.shape}, expected one dimension with at least one token"
                )
            if self.max_length is not None and len(ids) + sampling.max_new_tokens > self.max_length:
                raise ValueError(
                    f"prompts[{position}] has {len(ids)} tokens: with max_new_tokens={sampling.max_new_tokens} it does "
                    f"not fit the model's {self.max_length} positions; lower max_new_tokens or shorten the prompt"
                )
            self._check_vocabulary(f"prompts[{position}].", ids)

    def check_turn(self, request: TurnRequest, *, takes_pictures: bool = False) -> None:
        """Check the request of one reply. ``takes_pictures`` says whether the session reads pictures."""
        if request.pictures and not takes_pictures:
            raise ValueError(f"{len(request.pictures)} pictures in a conversation, and this engine reads none")
        ids = request.token_ids
        if request.max_new_tokens < 1 or not len(ids):
            raise ValueError(f"a reply needs a prompt and max_new_tokens of at least 1, got {request.max_new_tokens}")
        length = len(ids) + request.max_new_tokens
        if self.max_length is not None and length > self.max_length:
            raise ValueError(f"a conversation of {length} tokens exceeds the model's {self.max_length} positions")
        self._check_vocabulary("", ids)

    def _check_vocabulary(self, owner: str, ids: Int64Array) -> None:
        beyond = (ids < 0) | (ids >= (math.inf if self.vocab_size is None else self.vocab_size))
        if beyond.any():
            at = int(beyond.argmax())
            size = "; ids are not negative" if self.vocab_size is None else f" of {self.vocab_size}"
            raise ValueError(f"{owner}token_ids[{at}] is {ids[at]}, outside the model's vocabulary{size}")


def fill_texts(groups: Sequence[RolloutGroup], tokenizer: Any) -> list[RolloutGroup]:
    """Return the groups with the text of each completion, which a custom engine may leave out."""
    if tokenizer is None or all(completion.text is not None for group in groups for completion in group.completions):
        return list(groups)
    filled = []
    for group in groups:
        texts = decode(tokenizer, [completion.token_ids.tolist() for completion in group.completions])
        pairs = zip(group.completions, texts, strict=True)
        completions = tuple(
            completion if completion.text is not None else replace(completion, text=text) for completion, text in pairs
        )
        filled.append(replace(group, completions=completions))
    return filled


def make_groups(
    prompts: Sequence[Prompt], completions: Sequence[Completion], tokenizer: Any, policy_version: int
) -> list[RolloutGroup]:
    """Make groups of equal size from the completions of all prompts in order, with text if there is a tokenizer."""
    rows = [completion.token_ids.tolist() for completion in completions]
    texts = [None] * len(rows) if tokenizer is None else decode(tokenizer, rows)
    with_text = [replace(completion, text=text) for completion, text in zip(completions, texts, strict=True)]
    size = len(with_text) // len(prompts)
    return [
        RolloutGroup(prompt, tuple(with_text[index * size : (index + 1) * size]), policy_version)
        for index, prompt in enumerate(prompts)
    ]
