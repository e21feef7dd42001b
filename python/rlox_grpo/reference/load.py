"""Load a model that only scores tokens: a custom reference, or a teacher."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from torch import nn

from rlox_grpo.errors import ConfigError
from rlox_grpo.model.load import count_sampled_ids, count_vocabulary, load_scorer
from rlox_grpo.model.load_checks import refuse_other_architectures
from rlox_grpo.model.policy import Policy

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def is_url(source: object) -> bool:
    """Return whether ``source`` is the URL of a server rather than a path or a hub id."""
    return isinstance(source, str) and source.startswith(("http://", "https://"))


def load_frozen(name: str, source: str | Path, policy: Policy) -> nn.Module:
    """Load the model of a path (a folder or a GGUF file) or hub id, in float32 in host memory.

    Args:
        name: the argument, for errors: ``ref_model`` or ``teacher``.
        source: where the model is.
        policy: the model in training. Policy and reference must have the same tokens.

    Raises:
        ConfigError: the model's tokens differ from the policy's.
        ValueError: there is no such model.
    """
    try:
        model, tokenizer = load_scorer(source)
    except ValueError as error:
        message = str(error).replace("model=", f"{name}=", 1).replace("model is a ", f"{name} is a ", 1)
        # The tokenizer of the policy, GRPO's argument, cannot stand for that of another model.
        remedy = "save its tokenizer there by save_pretrained, so that it can be compared with the policy's"
        raise ValueError(message.replace("pass tokenizer=", remedy)) from error
    _refuse_other_tokens(name, policy.tokenizer, tokenizer)
    return model


def refuse_unfit_model(name: str, model: nn.Module, policy: Policy, instead: str) -> None:
    """Check a frozen model object before anything is sampled.

    Args:
        name: the argument, for errors: ``ref_model`` or ``teacher``.
        model: the frozen model.
        policy: the model in training, whose tokens the frozen model scores.
        instead: what to set if the frozen model is the model in training.

    Raises:
        ValueError: the model is not a causal language model.
        ConfigError: the model shares parameters with the policy, or lacks ids that the policy samples.
    """
    refuse_other_architectures(model, has_reader=True, argument=name)  # no warning: it is not trained
    _refuse_shared_weights(name, model, policy, instead)
    _refuse_fewer_ids(name, model, policy)


def _refuse_fewer_ids(name: str, model: nn.Module, policy: Policy) -> None:
    """Raise ConfigError if the policy samples ids that ``model`` does not have."""
    sampled, size = count_sampled_ids(policy), count_vocabulary(model)
    if sampled is None or size is None:
        return
    if size < sampled or (policy.tokenizer is None and size != sampled):
        raise ConfigError(f"{name} has another vocabulary: {size} ids, and the policy samples {sampled}")


def _refuse_shared_weights(name: str, model: nn.Module, policy: Policy, instead: str) -> None:
    """Raise ConfigError if the frozen ``model`` shares parameters with the policy; ``instead`` says what to set."""
    ours = {id(parameter) for parameter in policy.model.parameters()}
    if any(id(parameter) in ours for parameter in model.parameters()):
        raise ConfigError(
            f"{name} is the model in training, or shares its weights: pass another model or a copy of this one, or "
            f"{instead}"
        )


def _refuse_other_tokens(
    name: str, tokenizer: PreTrainedTokenizerBase | None, other: PreTrainedTokenizerBase | None
) -> None:
    """Raise ConfigError if the same id stands for different tokens."""
    if tokenizer is None or other is None:
        return
    ours, theirs = ({index: token for token, index in side.get_vocab().items()} for side in (tokenizer, other))
    if ours == theirs:
        return
    index = next(index for index in sorted(ours.keys() | theirs.keys()) if ours.get(index) != theirs.get(index))
    raise ConfigError(
        f"{name} has another vocabulary: its tokenizer has {len(theirs)} tokens and the policy's {len(ours)}; id "
        f"{index} is {theirs.get(index)!r} there and {ours.get(index)!r} here. The policy's tokens are scored as they "
        "are, so both need the same tokenizer"
    )
