"""The teacher of a run: a model that scores the tokens which the policy samples."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from rlox_grpo.config.records.loss import ReferenceConfig
from rlox_grpo.config.schema import GRPOConfig
from rlox_grpo.errors import ConfigError
from rlox_grpo.model.forward import Forward, scatter_to_rectangle, take_log_probs
from rlox_grpo.model.load import count_vocabulary, load_policy
from rlox_grpo.model.log_probs import is_most_likely
from rlox_grpo.model.policy import Policy
from rlox_grpo.reference.local import make_reference
from rlox_grpo.reference.protocol import Reference, fingerprint_model
from rlox_grpo.types import Batch

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, eq=False)
class Teacher:
    """Adds a teacher's view of the sampled tokens to a micro-batch.

    Attributes:
        reference: the teacher's model or server.
        temperature: the temperature of the run, by which the logits of both models are divided.
        is_full: whether the whole distributions are added, for ``teacher_kl="full"``.
        has_distributions: whether the model is in this process.
    """

    reference: Reference
    temperature: float
    is_full: bool
    has_distributions: bool

    @property
    def in_use(self) -> Callable[[], Any]:
        """The context manager around the forward passes of a step; it moves an offloaded model to the device."""
        return self.reference.in_use

    @torch.no_grad()
    def add(self, batch: Batch) -> Batch:
        """Return ``batch`` with the teacher's log-probs of its loss tokens, or with its distributions.

        Raises:
            ValueError: a log-prob is NaN or +inf.
        """
        if self.is_full:
            distributions = self.reference.distributions(batch)
            return replace(batch, log_probs=replace(batch.log_probs, ref_distributions=distributions))
        if not self.has_distributions:
            return replace(batch, log_probs=replace(batch.log_probs, teacher=_check(self.reference(batch))))
        distributions, mask = self.reference.distributions(batch), batch.loss_mask
        ids = batch.completion_ids[mask]  # int64 [M], the loss tokens in row order
        log_probs, _ = take_log_probs(
            distributions, ids, temperature=self.temperature, with_entropy=False, entropy_gradient=False
        )
        taken = replace(
            batch.log_probs,
            teacher=scatter_to_rectangle(_check(log_probs), mask),
            is_teacher_top=scatter_to_rectangle(is_most_likely(distributions, ids), mask),
        )
        return replace(batch, log_probs=taken)


def make_teacher(
    teacher: str | Path | nn.Module,
    policy: Policy,
    policy_forward: Forward,
    config: ReferenceConfig,
    *,
    is_full: bool,
    in_bfloat16: bool,
    **forward_options: Any,
) -> Teacher:
    """Load and freeze a teacher.

    Args:
        teacher: a path or hub id, a model, or the URL of a reference server (``rlox-grpo serve-reference``).
        policy: the model in training. The teacher must have the same vocabulary.
        policy_forward: the forward pass of the policy.
        config: read are ``teacher_offload``, ``teacher_token_file`` and ``teacher_timeout``.
        is_full: whether whole distributions are compared.
        in_bfloat16: whether the policy is stored in bfloat16; the teacher then is too.
        forward_options: the policy's own options of :func:`rlox_grpo.model.forward.make_forward`.

    Raises:
        ConfigError: another vocabulary, the policy itself, or a server for ``teacher_kl="full"``.
        ReferenceServerError: the server does not answer, or has fewer ids.
        TypeError: ``teacher`` is something else.
    """
    temperature = forward_options["temperature"]
    # Ids from here on are padding of the embedding, and left out on both sides.
    forward_options["vocabulary"] = policy.vocabulary or count_vocabulary(policy.model)
    is_url = isinstance(teacher, str) and teacher.startswith(("http://", "https://"))
    if is_url:
        if is_full:
            raise ConfigError("teacher_kl='full' needs whole distributions, and a server sends log-probs of tokens")
        settings = config.model_copy(
            update={
                "reference": "server",
                "reference_url": teacher,
                "reference_token_file": config.teacher_token_file,
                "reference_timeout": config.teacher_timeout,
            }
        )
        reference = make_reference(settings, policy, policy_forward, kl_coef=1.0, **forward_options)
        assert reference is not None
        return Teacher(reference, temperature, is_full=False, has_distributions=False)
    if isinstance(teacher, (str, Path)):
        teacher, tokenizer = _load(teacher)
        _refuse_other_tokens(policy.tokenizer, tokenizer)
    if not isinstance(teacher, nn.Module):
        raise TypeError(f"teacher is {type(teacher).__name__}: expected a path, a hub id, a URL or a torch.nn.Module")
    if teacher is policy.model:
        raise ConfigError("teacher is the model in training: its KL is 0; pass another model, or a copy of this one")
    _refuse_fewer_ids(policy, teacher)
    settings = config.model_copy(update={"reference": "frozen", "reference_offload": config.teacher_offload})
    reference = make_reference(
        settings,
        policy,
        policy_forward,
        kl_coef=1.0,
        ref_model=teacher,
        in_bfloat16=in_bfloat16,
        **forward_options,
    )
    assert reference is not None
    if (
        policy.shards is None
        and policy.stored is None
        and reference.fingerprint == fingerprint_model(policy.model, policy.masters)
    ):
        raise ConfigError("teacher has the weights of the policy: its KL is 0, and nothing would be learned from it")
    return Teacher(reference, temperature, is_full, has_distributions=True)


def _load(source: str | Path) -> tuple[nn.Module, PreTrainedTokenizerBase | None]:
    try:
        loaded = load_policy(source, None, GRPOConfig.create(dtype="float32"))
    except ValueError as error:
        raise ValueError(str(error).replace("model=", "teacher=", 1)) from error
    return loaded.model, loaded.tokenizer


def _refuse_other_tokens(tokenizer: PreTrainedTokenizerBase | None, other: PreTrainedTokenizerBase | None) -> None:
    """Raise ConfigError if the same id stands for different tokens."""
    if tokenizer is None or other is None:
        return
    ours, theirs = ({index: token for token, index in side.get_vocab().items()} for side in (tokenizer, other))
    if ours == theirs:
        return
    index = next(index for index in sorted(ours.keys() | theirs.keys()) if ours.get(index) != theirs.get(index))
    raise ConfigError(
        f"teacher has another vocabulary: its tokenizer has {len(theirs)} tokens and the policy's {len(ours)}; id "
        f"{index} is {theirs.get(index)!r} there and {ours.get(index)!r} here. The policy's tokens are scored as they "
        "are, so both need the same tokenizer"
    )


def _refuse_fewer_ids(policy: Policy, teacher: nn.Module) -> None:
    """Raise ConfigError if the policy samples ids that the teacher does not have."""
    sampled, size = policy.vocabulary or count_vocabulary(policy.model), count_vocabulary(teacher)
    if sampled is None or size is None:
        return
    if size < sampled or (policy.tokenizer is None and size != sampled):
        raise ConfigError(f"teacher has another vocabulary: {size} ids, and the policy samples {sampled}")


def _check(log_probs: Tensor) -> Tensor:
    """Return log-probs of a teacher if none is NaN or +inf; −inf is a token that the teacher excludes."""
    if bool((log_probs.isnan() | log_probs.isposinf()).any()):
        raise ValueError("the teacher's log-probs are not finite: its weights or activations have overflowed")
    return log_probs
