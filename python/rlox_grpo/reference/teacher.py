"""The teacher of a run: a model that scores the tokens which the policy samples."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from rlox_grpo.batch.other_prompts import number_loss_tokens
from rlox_grpo.config.records.loss import ReferenceConfig
from rlox_grpo.config.schema import GRPOConfig
from rlox_grpo.distributed.ranks import Ranks
from rlox_grpo.errors import ConfigError, NonFiniteError
from rlox_grpo.model.blank import find_device
from rlox_grpo.model.forward import Forward, scatter_to_rectangle, select_mask, take_log_probs
from rlox_grpo.model.load import count_sampled_ids, find_max_positions, read_settings
from rlox_grpo.model.log_probs import is_most_likely
from rlox_grpo.model.memory import count_teacher_bytes, measure_shape, read_shape
from rlox_grpo.model.policy import Policy
from rlox_grpo.reference.client import connect
from rlox_grpo.reference.load import is_url, load_frozen, refuse_unfit_model
from rlox_grpo.reference.local import follow_policy, freeze_model, refer_to_policy
from rlox_grpo.reference.protocol import Reference, fingerprint_rounded, fingerprint_weights
from rlox_grpo.reference.vllm_server import connect_to_vllm, is_vllm
from rlox_grpo.types import Batch, TokenDistributions

TeacherLike: TypeAlias = "str | Path | nn.Module"
"""A path (a folder or a GGUF file) or hub id, the URL of a server, ``"self"``, ``"ema"``, or a model."""

SELF, EMA = "self", "ema"
"""Teachers that are the policy itself and a moving average of it, with a prompt of their own (``teacher_prompt``)."""


@dataclass(frozen=True, eq=False)
class Teacher:
    """Adds a teacher's view of the sampled tokens to a micro-batch.

    Attributes:
        reference: the teacher's model or server.
        temperature: the temperature of the run, by which the logits of both models are divided.
        is_full: whether the whole distributions are added, for ``teacher_kl="full"``.
        has_distributions: whether the model is in this process.
        name: ``"self"`` or ``"ema"``; None for a model of its own.
    """

    reference: Reference
    temperature: float
    is_full: bool
    has_distributions: bool
    name: str | None = None

    @property
    def fingerprint(self) -> str | None:
        """What a resumed run must have: the digest of frozen weights, or the name of a teacher without a digest."""
        return self.name or self.reference.fingerprint

    @property
    def max_positions(self) -> int | None:
        """Maximum number of tokens of a prompt and its completion; None: no limit, or a server's own."""
        return self.reference.max_positions

    @property
    def held_bytes(self) -> int:
        """Bytes of weights of its own on the device between two steps."""
        return self.reference.held_bytes

    @property
    def moving(self) -> Reference | None:
        """What takes over the policy's weights after a step, and is saved in checkpoints; None for a frozen teacher."""
        return self.reference if self.name == EMA else None

    @property
    def in_use(self) -> Callable[[], Any]:
        """The context manager around the forward passes of a step; it moves an offloaded model to the device."""
        return self.reference.in_use

    @torch.no_grad()
    def add(self, batch: Batch, layouts: Sequence[Batch] | None = None) -> Batch:
        """Return ``batch`` with the teacher's log-probs of its loss tokens, or with its distributions.

        Args:
            batch: a micro-batch.
            layouts: its rows after the teacher's own prompts, from :func:`rlox_grpo.batch.other_prompts.lay_out_after`;
                None: the teacher reads the policy's prompts.
        """
        if self.is_full:
            distributions = self._read_distributions(batch, layouts)
            return replace(batch, log_probs=replace(batch.log_probs, ref_distributions=distributions))
        if not self.has_distributions:
            return replace(batch, log_probs=replace(batch.log_probs, teacher=self._read_log_probs(batch, layouts)))
        distributions, mask = self._read_distributions(batch, layouts), batch.loss_mask
        ids = batch.completion_ids[mask]  # int64 [M], the loss tokens in row order
        if distributions.head is None and ids.numel() and int(ids.max()) >= distributions.hidden.shape[1]:
            raise ConfigError(
                f"teacher gives logits of {distributions.hidden.shape[1]} ids, and the policy has sampled id "
                f"{int(ids.max())}: both need the same vocabulary"
            )
        log_probs, _ = take_log_probs(
            distributions,
            ids,
            temperature=self.temperature,
            with_entropy=False,
            entropy_gradient=False,
            sampling_mask=select_mask(batch, mask),
        )
        taken = replace(
            batch.log_probs,
            teacher=scatter_to_rectangle(log_probs, mask),
            is_teacher_top=scatter_to_rectangle(is_most_likely(distributions, ids), mask),
        )
        return replace(batch, log_probs=taken)

    def _read_distributions(self, batch: Batch, layouts: Sequence[Batch] | None) -> TokenDistributions:
        """Return the teacher's distributions of the loss tokens of ``batch``, in row order."""
        if layouts is None:
            return self.reference.distributions(batch)
        read = [self.reference.distributions(layout) for layout in layouts]
        hidden = torch.cat([distributions.hidden for distributions in read])  # [M, H], in the order of the layouts
        return replace(read[0], hidden=reorder(hidden, number_loss_tokens(batch, layouts)))

    def _read_log_probs(self, batch: Batch, layouts: Sequence[Batch] | None) -> Tensor:
        """Return the teacher's log-probs of the loss tokens of ``batch``, ``[N, T]``."""
        if layouts is None:
            return self.reference(batch)
        values = torch.cat([self.reference(layout)[layout.loss_mask] for layout in layouts])  # [M]
        return scatter_to_rectangle(reorder(values, number_loss_tokens(batch, layouts)), batch.loss_mask)


def reorder(values: Tensor, numbers: Tensor) -> Tensor:
    """Return ``values`` ``[M, …]`` with value i at ``numbers[i]``."""
    ordered = torch.empty_like(values)
    ordered[numbers] = values
    return ordered


def make_teacher(
    teacher: TeacherLike,
    policy: Policy,
    policy_forward: Forward,
    config: ReferenceConfig,
    *,
    is_full: bool,
    in_bfloat16: bool,
    argument: str = "teacher",
    **forward_options: Any,
) -> Teacher:
    """Load and freeze a teacher, or make the policy its own teacher.

    Args:
        teacher: a path (a folder or a GGUF file) or hub id, a model, the URL of a reference server
            (``rlox-grpo serve-reference``) or, with the path ``/v1``, of a vLLM server, ``"self"``, or ``"ema"``.
        policy: the model in training. The teacher must have the same vocabulary.
        policy_forward: the forward pass of the policy; for ``"self"``, the forward pass under its updater.
        config: the options; only those of the teacher are read.
        is_full: whether whole distributions are compared.
        in_bfloat16: whether the policy is stored in bfloat16; the teacher is then stored in bfloat16 too.
        argument: what errors call the teacher.
        forward_options: the policy's own options of :func:`rlox_grpo.model.forward.make_forward`.

    Raises:
        ConfigError: the teacher has another vocabulary, is the policy itself, or is a server with
            ``teacher_kl="full"``.
        ReferenceServerError: the server does not answer, or has fewer ids than the policy.
        TypeError: ``teacher`` is something else.
    """
    temperature, positions = forward_options["temperature"], find_max_positions(policy.model)
    if teacher == SELF:
        reference = replace(refer_to_policy(policy_forward), max_positions=positions)
        return Teacher(reference, temperature, is_full, True, SELF)
    if teacher == EMA:
        reference = follow_policy(
            policy, every=1, share=config.teacher_mix, offload=config.teacher_offload, **forward_options
        )
        return Teacher(replace(reference, max_positions=positions), temperature, is_full, True, EMA)
    # Ids from here on are padding of the embedding, and left out on both sides.
    vocabulary = count_sampled_ids(policy)
    if is_url(teacher):
        if is_full:
            raise ConfigError("teacher_kl='full' needs whole distributions, and a server sends log-probs of tokens")
        url, token_file, timeout = str(teacher), config.teacher_token_file, config.teacher_timeout
        if is_vllm(url):
            reference = connect_to_vllm(url, token_file, timeout, temperature=temperature, tokenizer=policy.tokenizer)
        else:
            reference = connect(
                url,
                token_file,
                timeout,
                temperature=temperature,
                vocabulary=vocabulary,
                tokenizer=policy.tokenizer,
            )
        return Teacher(reference, temperature, is_full=False, has_distributions=False)
    if isinstance(teacher, (str, Path)):
        teacher = load_frozen(argument, teacher, policy)
    if not isinstance(teacher, nn.Module):
        raise TypeError(
            f"{argument} is {type(teacher).__name__}: expected a path, a hub id, a URL or a torch.nn.Module"
        )
    refuse_unfit_model(argument, teacher, policy, "teacher='self' with teacher_prompt")
    reference = freeze_model(
        teacher,
        device=find_device(policy.model),
        in_bfloat16=in_bfloat16,
        offload=config.teacher_offload,
        **{**forward_options, "vocabulary": vocabulary},
    )
    # With a prompt of its own, a frozen copy of the policy is a teacher (SDFT's base teacher).
    is_whole = policy.shards is None and policy.stored is None
    is_rounded = forward_options.get("autocast_dtype") is not None
    if config.teacher_prompt is None and is_whole and _has_policys_weights(reference, teacher, policy, is_rounded):
        raise ConfigError(
            f"{argument} has the weights of the policy: its KL is 0, and nothing would be learned from it"
        )
    return Teacher(reference, temperature, is_full, has_distributions=True)


def estimate_teachers(teacher: TeacherLike | Mapping[str, TeacherLike] | None, config: GRPOConfig) -> int:
    """Return the bytes that the weights of teachers will take on the device, before they are loaded.

    A teacher whose sizes are unknown counts 0, and so does a moving average of the policy.
    """
    if isinstance(teacher, Mapping):
        return sum(estimate_teachers(each, config) for each in teacher.values())
    if teacher is None or teacher in (SELF, EMA) or is_url(teacher):
        return 0
    if isinstance(teacher, nn.Module):
        shape = measure_shape(teacher)
    else:
        try:
            shape = read_shape(read_settings(teacher))
        except (OSError, ValueError):  # what loads it says why
            shape = None
    return 0 if shape is None else count_teacher_bytes(shape, config)


def _has_policys_weights(reference: Reference, teacher: nn.Module, policy: Policy, is_rounded: bool) -> bool:
    """Return whether all weights of a frozen teacher are the policy's.

    With ``is_rounded``, as products in bfloat16 see them: dithered weights differ from the teacher's by less.
    """
    weights = _list_weights(policy)
    if weights is None:
        return False
    if is_rounded:
        return fingerprint_rounded(weights) == fingerprint_rounded(teacher.named_parameters())
    return fingerprint_weights(weights) == reference.fingerprint


def _list_weights(policy: Policy) -> list[tuple[str, Tensor]] | None:
    """Return the policy's weights by name, under a new adapter those of the base model; None: it is adapted."""
    model = policy.model
    if not hasattr(model, "peft_config"):
        return [(name, policy.masters.get(name, parameter).detach()) for name, parameter in model.named_parameters()]
    base: Any = model.get_base_model()  # type: ignore[operator]
    plain: list[tuple[str, Tensor]] = []
    for name, parameter in base.named_parameters():
        if "lora_" not in name:
            plain.append((re.sub(r"\.base_layer\b", "", name), parameter.detach()))
        elif ("lora_B" in name or "lora_embedding_A" in name) and parameter.any():  # peft starts them at 0
            return None
    return plain


def refuse_non_finite(batches: Iterable[Batch], ranks: Ranks) -> None:
    """Raise an error on every rank if the teacher gave NaN or +inf anywhere; −inf is a token that it excludes.

    Args:
        batches: this rank's micro-batches of a step, with the teacher's log-probs or distributions.
        ranks: all ranks, each of which calls this.

    Raises:
        NonFiniteError: a value is NaN or +inf; the error has the rows of the step.
    """
    mine = [row for batch in batches for row in batch.row_index[_find_non_finite(batch)].tolist()]
    if rows := sorted(row for rank_rows in ranks.gather(mine) for row in rank_rows):
        raise NonFiniteError(
            f"the teacher's log-probs are not finite in rows {rows[:8]}: its weights or activations have overflowed",
            rows,
        )


def _find_non_finite(batch: Batch) -> Tensor:
    """Return ``bool [N]``, whether a row has a loss token for which the teacher gave NaN or +inf."""
    values, mask = batch.log_probs.teacher, batch.loss_mask
    if values is not None:
        tokens = (values.isnan() | values.isposinf()) & mask
    else:
        assert batch.log_probs.ref_distributions is not None
        hidden = batch.log_probs.ref_distributions.hidden  # [M, H], or logits [M, V] with −inf for what is excluded
        tokens = scatter_to_rectangle((hidden.isnan() | hidden.isposinf()).any(dim=-1), mask)
    return tokens.any(dim=-1).to(batch.row_index.device)
