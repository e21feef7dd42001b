"""Score completions with a reward model: a sequence classifier of transformers with one label."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from rlox_grpo.rewards.special_tokens import make_splitter
from rlox_grpo.rewards.verdicts import check_choice, reduce_settings


@dataclass(frozen=True)
class RewardModel:
    """The logit of a reward model for each completion.

    The model reads the prompt with the completion. Chat prompts and episodes are formatted by the chat template of the
    reward model's tokenizer, as one conversation. Text prompts and completions are concatenated. Texts are sorted by
    length, padded on the right and scored in batches. The name in metrics is the last part of the path. Special tokens
    of the reward model that a completion spells out are split by a space, so that the policy cannot write the turns of
    others.

    Args:
        path: A folder or a hub id, with the model and its tokenizer.
        batch_size: Number of texts in one forward pass.
        weight: Weight of the scores in the total reward.
        dtype: Type of the weights; ``auto`` is the type in the checkpoint.
        device: For example ``cuda:1``; None: the policy's device on this rank, or the CPU if there is none.
        max_length: Largest length of a text, in tokens. A longer text loses its first tokens. None: a text that
            exceeds the positions of the model raises an error.
        pad_token: The pad token, if the tokenizer has none.

    Raises:
        ValueError: An argument is out of range.
    """

    path: str | Path
    batch_size: int = field(default=8, repr=False)
    weight: float = field(default=1.0, repr=False)
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    device: str | None = field(default=None, repr=False)
    max_length: int | None = None
    pad_token: str | None = None
    _loaded: dict[str, Any] = field(init=False, repr=False, compare=False, default_factory=dict)

    def __post_init__(self) -> None:
        if not isinstance(self.path, (str, Path)) or not str(self.path):
            raise ValueError(f"path is {self.path!r}, expected a folder or a hub id")
        if isinstance(self.batch_size, bool) or not isinstance(self.batch_size, int) or self.batch_size < 1:
            raise ValueError(f"batch_size is {self.batch_size!r}, expected a whole number of at least 1")
        check_choice("dtype", self.dtype, ("auto", "float32", "bfloat16", "float16"))
        if self.max_length is not None and self.max_length < 1:
            raise ValueError(f"max_length is {self.max_length}, expected at least 1")
        object.__setattr__(self, "__name__", Path(self.path).name or str(self.path))

    __reduce__ = reduce_settings  # a copy loads the model again

    def __call__(self, prompts: Sequence[Any], completions: Sequence[Any]) -> list[float]:
        """Return the logit of each completion. Prompts and completions are texts or lists of messages.

        Raises:
            ValueError: A prompt or completion is token ids, there is no chat template for messages, a text is too long,
                or a logit is not finite; the message names the sample.
        """
        self.load(self.device or "cpu")
        rows = [self._tokenise(index, *pair) for index, pair in enumerate(zip(prompts, completions, strict=True))]
        order = sorted(range(len(rows)), key=lambda index: len(rows[index]))
        scores = [0.0] * len(rows)
        for start in range(0, len(order), self.batch_size):
            batch = order[start : start + self.batch_size]
            for index, score in zip(batch, self._score([rows[index] for index in batch]), strict=True):
                scores[index] = score
        # NaN would mean that the model does not apply to the sample.
        if wrong := [index for index, score in enumerate(scores) if not math.isfinite(score)]:
            raise ValueError(
                f"the reward model {str(self.path)!r} gives {scores[wrong[0]]} for {len(wrong)} of {len(scores)} "
                f"samples, the first is sample {wrong[0]}: its weights or activations have overflowed; set "
                "dtype='float32'"
            )
        return scores

    def load(self, device: Any) -> None:
        """Load the model and its tokenizer, once. The argument ``device`` is used if ``self.device`` is None.

        Raises:
            ValueError: The model or the tokenizer cannot be loaded, the model has no classification head or several
                labels, or the tokenizer has no pad token.
        """
        if self._loaded:
            return
        from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer

        where = f"the reward model {str(self.path)!r}"
        if str(self.path).startswith((".", "/", "~")) and not Path(self.path).is_dir():
            raise ValueError(f"{where} cannot be loaded: there is no such folder")
        try:
            config = AutoConfig.from_pretrained(self.path)
            tokenizer = AutoTokenizer.from_pretrained(self.path)
        except (OSError, ValueError) as error:
            raise ValueError(f"{where} cannot be loaded: {error}") from error
        if config.num_labels != 1:
            raise ValueError(
                f"{where} has {config.num_labels} labels: expected 1, the reward. Choose a model that was trained as a "
                "reward model, or write a reward function that reads its labels"
            )
        if self.pad_token is not None:
            tokenizer.pad_token = self.pad_token
        if tokenizer.pad_token_id is None or not 0 <= tokenizer.pad_token_id < len(tokenizer):
            raise ValueError(
                f"{where} has a tokenizer without a pad token, and its texts are padded to one length: name a token "
                "that no text ends with, RewardModel(path, pad_token='…')"
            )
        try:
            model, report = AutoModelForSequenceClassification.from_pretrained(
                self.path, dtype=self.dtype, output_loading_info=True
            )
        except (OSError, ValueError) as error:
            raise ValueError(f"{where} cannot be loaded: {error}") from error
        if missing := sorted(report["missing_keys"]):
            raise ValueError(
                f"{where} is no sequence classifier: its weights lack {missing[0]!r}, which would be random"
            )
        model.config.get_text_config().pad_token_id = model.config.pad_token_id = tokenizer.pad_token_id
        model.requires_grad_(False)
        model = model.to(self.device or device).eval()
        self._loaded.update(model=model, tokenizer=tokenizer, split=make_splitter(tokenizer))

    def count_bytes(self) -> int:
        """Return the bytes of the weights, before they are loaded from the sizes in the configuration.

        A model whose configuration cannot be read counts 0: :meth:`load` says why.
        """
        if self._loaded:
            return sum(parameter.nbytes for parameter in self._loaded["model"].parameters())
        import torch
        from transformers import AutoConfig, AutoModelForSequenceClassification

        try:
            config = AutoConfig.from_pretrained(self.path)
            with torch.device("meta"):
                model: Any = AutoModelForSequenceClassification.from_config(config)  # type: ignore[no-untyped-call]
        except (OSError, ValueError):
            return 0
        stored = getattr(config, "dtype", None) if self.dtype == "auto" else getattr(torch, self.dtype)
        width = (stored if isinstance(stored, torch.dtype) else torch.float32).itemsize
        return width * int(model.num_parameters())

    def _tokenise(self, index: int, prompt: Any, completion: Any) -> list[int]:
        """Token ids of a prompt and its completion."""
        tokenizer, split = self._loaded["tokenizer"], self._loaded["split"]
        if isinstance(prompt, str) and isinstance(completion, str):
            ids = tokenizer(prompt + split(completion))["input_ids"]
        elif _is_conversation(prompt) and _is_conversation(completion):
            if getattr(tokenizer, "chat_template", None) is None:
                raise ValueError(
                    f"sample {index} is chat messages and the tokenizer of the reward model {str(self.path)!r} has no "
                    "chat_template"
                )
            text = tokenizer.apply_chat_template(join_messages(prompt, split(completion)), tokenize=False)
            ids = tokenizer(text, add_special_tokens=False)["input_ids"]  # the template writes its own
        else:
            raise ValueError(
                f"sample {index} is {type(prompt).__name__} and {type(completion).__name__}: a reward model reads "
                "texts or chat messages; give the policy a tokenizer"
            )
        positions = getattr(self._loaded["model"].config.get_text_config(), "max_position_embeddings", None)
        limit = self.max_length or positions
        if limit is not None and len(ids) > limit:
            if self.max_length is None:
                raise ValueError(
                    f"sample {index} has {len(ids)} tokens and the reward model {str(self.path)!r} {limit} positions: "
                    f"lower max_new_tokens, or cut the beginning of long texts by RewardModel(path, max_length={limit})"
                )
            ids = ids[-limit:]
        return list(ids)

    def _score(self, rows: Sequence[list[int]]) -> list[float]:
        """The logits of one batch of token ids."""
        import torch
        from torch.nn.utils.rnn import pad_sequence

        model, tokenizer = self._loaded["model"], self._loaded["tokenizer"]
        texts = [torch.tensor(row, dtype=torch.int64) for row in rows]
        input_ids = pad_sequence(texts, batch_first=True, padding_value=tokenizer.pad_token_id)
        mask = pad_sequence([torch.ones_like(text) for text in texts], batch_first=True)
        with torch.inference_mode():
            logits = model(input_ids=input_ids.to(model.device), attention_mask=mask.to(model.device)).logits
        scores: list[float] = logits[:, 0].float().tolist()
        return scores


def join_messages(prompt: Sequence[Mapping[str, Any]], completion: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Concatenate messages. A completion of a prefilled assistant message is appended to that message."""
    messages = [dict(message) for message in [*prompt, *completion]]
    last, first = messages[len(prompt) - 1], messages[len(prompt) : len(prompt) + 1]
    if prompt and first and last.get("role") == first[0].get("role") == "assistant":
        last["content"] = f"{last.get('content') or ''}{first[0].get('content') or ''}"
        del messages[len(prompt)]
    return messages


def _is_conversation(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and all(isinstance(message, Mapping) for message in value)
