"""The routers of a mixture of experts: record their choices and logits, and replay the choices of another pass.

A router chooses k of E experts for each token. An update may move a token to other experts, and its log-prob then jumps
by far more than the step. Replayed choices prevent this jump: the experts are fixed, and only their gates are computed
again, with gradients (arXiv:2507.18071, section 5.3; arXiv:2510.11370).

Hooks are on the routers while a forward pass runs. With forced choices and gradients they stay until
:meth:`Routers.release`, because checkpointed layers run again in the backward pass.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from rlox_grpo.errors import ConfigError
from rlox_grpo.model.adapted_layers import get_base


@dataclass(eq=False)
class RoutedPass:
    """What the routers of a model did in one forward pass of S tokens.

    Attributes:
        logits: for each layer with a router the logits ``[S, E]`` with gradient; [] if they were not asked for.
        choices: for each of these layers the chosen experts, ``int64 [S, k]``.
        moved: for each of these layers, where choices were forced, ``bool [S]``: whether the router would have chosen
            other experts; [] if nothing was forced.
        predicting: ``int64 [M]``, the token that predicts each token under ``Batch.loss_mask``, in row order.
        sources: ``int64 [S]``, the index of each token in ``Batch.input_ids.flatten()``; None: the tokens are in this
            order.
    """

    logits: list[Tensor] = field(default_factory=list)
    choices: list[Tensor] = field(default_factory=list)
    moved: list[Tensor] = field(default_factory=list)
    predicting: Tensor | None = None
    sources: Tensor | None = None

    def count(self, num_experts: int) -> Tensor:
        """Return the number of loss tokens that are routed to each expert, ``float64 [layers, E]``."""
        assert self.predicting is not None
        chosen = [choices[self.predicting].flatten() for choices in self.choices]
        return torch.stack([torch.bincount(experts, minlength=num_experts) for experts in chosen]).double()

    def count_moved(self) -> int:
        """Return the number of choices of loss tokens, over all layers, that were forced to other experts."""
        assert self.predicting is not None
        return int(sum(moved[self.predicting].sum() for moved in self.moved))

    def spread(self, shape: Sequence[int]) -> Tensor:
        """Return the choices of a batch of this ``shape``, ``int16 [N, L, layers, k]``; −1 for tokens that did not run.

        In a packed row a token runs once for all rows that share it, under the row that owns it.
        """
        choices = torch.stack(self.choices, dim=1).to(torch.int16)  # [S, layers, k]
        if self.sources is None:
            return choices.view(*shape, *choices.shape[1:])
        whole = choices.new_full((math.prod(shape), *choices.shape[1:]), -1)
        whole[self.sources] = choices
        return whole.view(*shape, *choices.shape[1:])


class _ForcedChoices(TorchFunctionMode):
    """Replaces the result of the router's choice, the ``topk`` over ``[S, E]`` scores, by forced experts.

    The values are gathered from the same scores, so the router's own arithmetic goes on from there. Routers with groups
    of experts call ``topk`` on other shapes before.
    """

    def __init__(self, forced: Tensor, experts: int) -> None:
        super().__init__()
        self._forced, self._shape = forced, (len(forced), experts)
        self.moved = torch.zeros(len(forced), dtype=torch.bool, device=forced.device)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func not in (torch.topk, Tensor.topk) or tuple(args[0].shape) != self._shape:
            return result
        # −1: no choice is known, and the router makes its own.
        indices = torch.where(self._forced >= 0, self._forced, result.indices)
        self.moved = (indices.sort(dim=-1).values != result.indices.sort(dim=-1).values).any(dim=-1)
        return torch.return_types.topk((args[0].gather(-1, indices), indices))


class Routers:
    """The routers of a model, in the order of its layers.

    Attributes:
        balances: whether the routing losses apply: the model's config has ``router_aux_loss_coef``, as those whose
            routers take a softmax over all experts.
        num_experts: E.
        layers: the layers of the model that have these routers, from 0.
        keeps_logits: whether passes with gradients record the logits.
        last: what the routers did in the last forward pass inside :meth:`watch`.
    """

    def __init__(self, modules: Mapping[str, nn.Module], logits_index: int, *, balances: bool) -> None:
        self.layers, self._modules = [*map(_find_layer, modules)], list(modules.values())
        self._logits_index = logits_index
        self.balances, self.keeps_logits = balances, False
        self.num_experts = _count_experts(self._modules[0])
        self.last = RoutedPass()
        self._forced: Tensor | None = None  # int64 [S, layers, k]
        self._mode: _ForcedChoices | None = None
        self._handles: list[Any] = []
        self._is_watching = False

    def __len__(self) -> int:
        return len(self._modules)

    @contextmanager
    def watch(self, forced: Tensor | None = None) -> Iterator[None]:
        """Record what the routers do in a forward pass, with the experts ``forced [S, layers, k]``, −1: not forced.

        Raises:
            ValueError: the forced experts are not those of this model's layers.
        """
        self.release()
        if forced is not None and (forced.shape[1] != len(self) or int(forced.max()) >= self.num_experts):
            raise ValueError(
                f"router_replay: the experts of the tokens are those of {forced.shape[1]} layers, up to expert "
                f"{int(forced.max())}, and this model has {len(self)} layers of {self.num_experts} experts"
            )
        self.last, self._forced, self._is_watching = RoutedPass(), forced, True
        for layer, module in enumerate(self._modules):
            self._handles.append(module.register_forward_pre_hook(partial(self._force, layer)))
            self._handles.append(module.register_forward_hook(self._record, always_call=True))
        try:
            yield
        except BaseException:
            self.release()
            raise
        finally:
            self._is_watching = False
        if forced is None or not torch.is_grad_enabled():
            self.release()

    def release(self) -> None:
        """Remove the hooks; call this after the backward pass of a forward pass with forced choices."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._forced = None

    def _force(self, layer: int, module: nn.Module, arguments: Any) -> None:
        if self._forced is not None:
            self._mode = _ForcedChoices(self._forced[:, layer], self.num_experts)
            self._mode.__enter__()  # type: ignore[no-untyped-call]

    def _record(self, module: nn.Module, arguments: Any, output: Any) -> None:
        if self._mode is not None:
            mode, self._mode = self._mode, None
            mode.__exit__(None, None, None)  # type: ignore[no-untyped-call]
            if self._is_watching:
                self.last.moved.append(mode.moved)
        if self._is_watching and output is not None:
            if self.keeps_logits and torch.is_grad_enabled():
                self.last.logits.append(output[self._logits_index])
            self.last.choices.append(_find_choices(output))


def _find_layer(name: str) -> int:
    """Return 3 for the router ``model.layers.3.mlp.gate``; 0 if no layer is in the name."""
    return int(next(filter(str.isdecimal, name.split(".")), 0))


def _count_experts(module: Any) -> int:
    return int(getattr(module, "num_experts", None) or module.weight.shape[0])


def _find_choices(output: Sequence[Tensor]) -> Tensor:
    """Return the chosen experts among a router's outputs: the only integers."""
    (choices,) = [tensor for tensor in output if not tensor.is_floating_point()]
    return choices.detach()


def find_routers(model: Any) -> Routers | None:
    """Return the routers of a transformers model, with or without adapters; None if it has none that are known.

    transformers lists the class of a model's routers, which return logits, scores and chosen experts.
    """
    base = get_base(model)
    decoder = getattr(base, "base_model", None)
    recorder = (getattr(decoder, "_can_record_outputs", None) or {}).get("router_logits")
    target, index = getattr(recorder, "target_class", None), getattr(recorder, "index", None)
    if target is None or index is None or target is nn.Linear:
        return None
    modules = {name: module for name, module in base.named_modules() if isinstance(module, target)}
    if not modules:
        return None
    config: Any = base.config.get_text_config(decoder=True)
    return Routers(modules, index, balances=hasattr(config, "router_aux_loss_coef"))


def refuse_other_routers(routers: Routers, run: Callable[[], Tensor]) -> None:
    """Check that choices can be recorded and replayed in the model that ``run`` runs on a few tokens.

    Args:
        routers: the routers of the model.
        run: returns the hidden states ``[S, H]`` of S tokens.

    Raises:
        ConfigError: replayed choices of the model's own do not give its own result, or other choices are not taken.
    """
    with torch.no_grad():
        try:
            with routers.watch():
                expected = run()
            chosen = torch.stack(routers.last.choices, dim=1)  # [S, layers, k]
            with routers.watch(chosen):
                is_same = torch.equal(run(), expected)
            # The next expert of each: distinct experts stay distinct.
            others = (chosen + 1) % routers.num_experts
            with routers.watch(others):
                run()
            is_taken = torch.equal(torch.stack(routers.last.choices, dim=1), others)
        except (ValueError, TypeError, IndexError, RuntimeError) as error:
            raise ConfigError(f"router_replay: the choices of this model's routers cannot be read: {error}") from error
    if not is_same or not is_taken:
        raise ConfigError(
            "router_replay: this model's routers do not compute the same from their own choices "
            f"({'other choices are taken' if is_taken else 'other choices are not taken'}): set router_replay='none'"
        )
