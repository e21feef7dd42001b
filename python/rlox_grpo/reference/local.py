"""Make the reference policy of the KL penalty."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from rlox_grpo.config.records.loss import ReferenceConfig
from rlox_grpo.distributed.ranks import Ranks
from rlox_grpo.model.adapted_layers import list_trained_beside
from rlox_grpo.model.blank import StoredWeights, find_device
from rlox_grpo.model.forward import Forward, make_forward
from rlox_grpo.model.load import find_max_positions
from rlox_grpo.model.policy import Policy
from rlox_grpo.model.precision import cast_frozen_layers, cast_weights
from rlox_grpo.reference.protocol import Reference, fingerprint_model, fingerprint_weights
from rlox_grpo.types import Batch, TokenDistributions


def make_reference(
    config: ReferenceConfig,
    policy: Policy,
    policy_forward: Forward,
    *,
    kl_coef: float,
    ref_model: nn.Module | None = None,
    in_bfloat16: bool = False,
    ranks: Ranks | None = None,
    **forward_options: Any,
) -> Reference | None:
    """Return the reference of a run, or None when nothing needs one.

    Args:
        config: the options. ``reference="auto"`` chooses the first that applies: ``ref_model`` if it is given; no
            reference if ``kl_coef`` is 0; the policy without its adapter if it has an adapter and nothing else is
            trained; a frozen copy of the current policy.
        policy: the model in training. A frozen copy of a sharded policy is sharded too, unless ``reference_offload``
            keeps it in host memory.
        policy_forward: the forward pass of the policy, for ``adapter_off``.
        kl_coef: weight of the penalty.
        ref_model: a custom reference, which is frozen.
        in_bfloat16: whether the policy is stored in bfloat16; a frozen reference is then stored in bfloat16 too.
        ranks: all ranks of the run.
        forward_options: the policy's own options of :func:`rlox_grpo.model.forward.make_forward`.

    Raises:
        ValueError: ``ref_model`` with a ``reference`` that does not use it, or ``adapter_off`` without an adapter.
        ReferenceServerError: the server does not answer, or has fewer ids than the policy.
        ConfigError: the server has other tokens than the policy.
    """
    kind = choose_reference(config, policy.model, kl_coef, ref_model)
    if kind == "none":
        return None
    if kind == "adapter_off":
        without_adapter: Any = policy.model.disable_adapter
        compute, distributions = _without_gradient(policy_forward, without_adapter)
        return Reference(compute, None, distributions)
    if kind == "server":
        from rlox_grpo.reference.client import connect

        assert config.reference_url is not None  # rlox_grpo.config.checks
        return connect(
            config.reference_url,
            config.reference_token_file,
            config.reference_timeout,
            temperature=forward_options.get("temperature", 1.0),
            vocabulary=forward_options.get("vocabulary"),
            tokenizer=policy.tokenizer,
        )
    offload = config.reference_offload
    if kind == "periodic":
        assert config.reference_refresh_steps is not None  # rlox_grpo.config.checks
        every, share = config.reference_refresh_steps, config.reference_mix
        return follow_policy(policy, every=every, share=share, offload=offload, **forward_options)
    if ref_model is not None:
        device = find_device(policy.model)
        return freeze_model(ref_model, device=device, in_bfloat16=in_bfloat16, offload=offload, **forward_options)
    is_whole = policy.shards is None and policy.stored is None
    if not is_whole and not offload:
        return _make_sharded(policy, ranks or Ranks(), policy_forward, forward_options)
    return freeze_model(
        policy.copy_whole(), masters=policy.masters, in_bfloat16=in_bfloat16, offload=offload, **forward_options
    )


def freeze_model(
    model: nn.Module,
    *,
    device: torch.device | None = None,
    masters: Mapping[str, Tensor] = MappingProxyType({}),
    in_bfloat16: bool,
    offload: bool,
    **forward_options: Any,
) -> Reference:
    """Return a reference with the weights of ``model``, which is frozen in place.

    Args:
        model: the model.
        device: the device of its forward passes; None: the one where it is.
        masters: the float32 weights that ``model`` holds rounded, by name, for the fingerprint.
        in_bfloat16: whether all weights are stored in the autocast dtype; otherwise those of linear layers are.
        offload: whether the model is in host memory between the forward passes of two steps.
        forward_options: see :func:`make_reference`.
    """
    model.eval().requires_grad_(False)
    digest = fingerprint_model(model, masters)

    def round_weights() -> None:
        if (dtype := forward_options.get("autocast_dtype")) is None:
            return
        if in_bfloat16:
            cast_weights(model, dtype, trained=False)
        else:
            cast_frozen_layers(model, dtype)

    if device is not None and device != find_device(model):
        round_weights()  # before the move, so that a GPU never stores a large teacher in float32
        model.to(device)
    forward = make_forward(model, **forward_options)  # on a CPU, tries the model in its own dtype
    round_weights()
    in_use = _offload_to_host(model) if offload else nullcontext
    positions = find_max_positions(model)
    compute, distributions = _without_gradient(forward, positions=positions)
    held_bytes = 0 if offload else _count_bytes(model)
    return Reference(compute, digest, distributions, in_use, max_positions=positions, held_bytes=held_bytes)


def follow_policy(policy: Policy, *, every: int, share: float, offload: bool, **forward_options: Any) -> Reference:
    """Return a copy of the policy that takes over its weights, as ``reference="periodic"``.

    The copy is in the precision of the policy's master weights, because bfloat16 would drop what it takes over.

    Args:
        policy: the model in training.
        every: number of steps between two updates of the copy.
        share: share of the policy's weights in an update; see :func:`_mix`.
        offload: whether the copy is in host memory between the forward passes of two steps.
        forward_options: see :func:`make_reference`.
    """
    copied = policy.copy_whole()
    copied.eval().requires_grad_(False)
    for name, parameter in copied.named_parameters():
        if name in policy.masters:
            parameter.data = policy.masters[name].to(find_device(policy.model), copy=True)
    in_use = _offload_to_host(copied) if offload else nullcontext
    compute, distributions = _without_gradient(make_forward(copied, **forward_options))

    def follow(step: int, weights: Callable[[], Iterable[tuple[str, Tensor]]]) -> None:
        if step % every == 0:
            _mix(copied, weights(), share)

    return Reference(
        compute,
        None,
        distributions,
        in_use,
        follow,
        state_dict=lambda: {name: tensor.detach().cpu().clone() for name, tensor in copied.named_parameters()},
        load_state_dict=lambda state: _mix(copied, state.items(), 1.0),
        held_bytes=0 if offload else _count_bytes(copied),
    )


def refer_to_policy(policy_forward: Forward) -> Reference:
    """Return the policy itself as a reference: its weights at the time of the call.

    The head of its distributions is the policy's own, so they are valid until the next optimizer step.
    """
    compute, distributions = _without_gradient(policy_forward)
    return Reference(compute, None, distributions)


def choose_reference(config: ReferenceConfig, model: nn.Module, kl_coef: float, ref_model: object | None) -> str:
    """Return the kind of the reference: the option ``reference``, or what ``"auto"`` stands for; see make_reference.

    Raises:
        ValueError: ``ref_model`` with a ``reference`` that does not use it, or ``adapter_off`` without an adapter or
            with trained parameters beside it.
    """
    kind, has_adapter = config.reference, hasattr(model, "disable_adapter")
    beside = list_trained_beside(model) if has_adapter else []
    if kind in ("none", "adapter_off", "periodic", "server") and ref_model is not None:
        raise ValueError(f"ref_model is given and reference={kind!r} does not use it")
    if kind == "adapter_off" and not has_adapter:
        raise ValueError("reference='adapter_off' and the model has no adapter: set lora_rank or pass a PeftModel")
    if kind == "adapter_off" and beside:
        raise ValueError(
            f"reference='adapter_off' and {beside[0].removeprefix('base_model.model.')} is trained beside the adapter, "
            "so the model without its adapter changes too: set reference='frozen'"
        )
    if kind != "auto":
        return kind
    if ref_model is not None:
        return "frozen"
    if kl_coef == 0:
        return "none"
    return "adapter_off" if has_adapter and not beside else "frozen"


def _make_sharded(policy: Policy, ranks: Ranks, policy_forward: Forward, options: Mapping[str, Any]) -> Reference:
    """A frozen copy in shards; where autocast computes in bfloat16, its linear layers are stored in bfloat16."""
    digest = (
        _fingerprint_stored(policy.stored, policy.model, ranks)
        if policy.stored is not None
        else fingerprint_model(policy.model)
    )
    dtype = options.get("autocast_dtype")
    frozen = policy.copy_in_shards(lambda blank: None if dtype is None else cast_frozen_layers(blank, dtype), ranks)
    forward = frozen.wrap(make_forward(frozen.model, like=policy_forward, **options), is_frozen=True)
    compute, distributions = _without_gradient(forward)
    return Reference(compute, digest, distributions)


def _fingerprint_stored(stored: StoredWeights, model: nn.Module, ranks: Ranks) -> str:
    """The digest of the model that these files hold; rank 0 reads them, a parameter at a time."""

    def read() -> Iterator[tuple[str, Tensor]]:
        for name, parameter in model.named_parameters():
            weight = torch.empty(parameter.shape)
            stored.read_into(name, weight)
            yield name, weight

    return str(ranks.gather(fingerprint_weights(read()) if ranks.is_first else None)[0])


def _without_gradient(
    forward: Forward,
    setting: Callable[[], AbstractContextManager[Any]] = nullcontext,
    positions: int | None = None,
) -> tuple[Callable[[Batch], Tensor], Callable[[Batch], TokenDistributions]]:
    """The log-probs and the distributions of ``forward`` without a gradient, computed within ``setting()``.

    Both raise ValueError for a row of more tokens than ``positions``: rotary positions beyond those of the training
    give log-probs that mean nothing. The rows of episodes are as long as their turns make them.
    """

    def check(batch: Batch) -> None:
        if positions is not None and (longest := batch.input_ids.shape[1]) > positions:
            raise ValueError(
                f"a sequence of {longest} tokens passes the {positions} positions of the reference or teacher that "
                "scores it: lower max_new_tokens or max_episode_tokens"
            )

    def compute(batch: Batch) -> Tensor:
        check(batch)
        with torch.no_grad(), setting():
            return forward(batch)[0]

    def distributions(batch: Batch) -> TokenDistributions:
        check(batch)
        with torch.no_grad(), setting():
            return forward.distributions(batch)

    return compute, distributions


def _count_bytes(model: nn.Module) -> int:
    return sum(parameter.nbytes for parameter in model.parameters())


def _offload_to_host(model: nn.Module) -> Callable[[], Any]:
    device = next(model.parameters()).device
    model.to("cpu")

    @contextmanager
    def on_device() -> Iterator[None]:
        model.to(device)
        try:
            yield
        finally:
            model.to("cpu")

    return on_device


@torch.no_grad()
def _mix(reference: nn.Module, weights: Iterable[tuple[str, Tensor]], share: float) -> None:
    """Reference ← ``share`` · weights + (1 − ``share``) · reference, as TR-DPO does (arXiv:2404.09656, eq. 4 and 5).

    Raises:
        ValueError: weights that are not those of the reference, by name and shape.
    """
    waiting = dict(reference.named_parameters())
    for name, tensor in weights:
        target = waiting.pop(name, None)
        if target is None or target.shape != tensor.shape:
            raise ValueError(f"the reference has no weight {name!r} of shape {tuple(tensor.shape)}")
        tensor = tensor.detach().to(target.device, target.dtype)
        if share == 1.0:  # exactly: lerp may round
            target.copy_(tensor)
        else:
            target.lerp_(tensor, share)
    if waiting:
        raise ValueError(f"the reference was not given {sorted(waiting)[:3]}: its weights would be of two versions")
