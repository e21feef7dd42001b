"""The update on a DeepSpeed engine, with moments, gradients and parameters sharded over ranks (ZeRO)."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from rlox_grpo.config.records.update import OptimizerConfig, UpdaterConfig
from rlox_grpo.distributed.ranks import Ranks, join_alone
from rlox_grpo.errors import NonFiniteError, import_extra
from rlox_grpo.model.adapted_layers import get_base
from rlox_grpo.model.blank import StoredWeights, find_device, list_stored, replace_parameters
from rlox_grpo.model.forward import Forward, ForwardModule
from rlox_grpo.update.parameter_groups import parameter_groups, sort_moments

_MOMENTS = ("exp_avg", "exp_avg_sq")


class DeepSpeedUpdater:
    """Torch's AdamW under ZeRO 0 to 3; needs no compiler.

    The DeepSpeed engine is created at its first use, from the weights at that time. Until then every rank has the whole
    model, so a checkpoint is loaded as without DeepSpeed. Afterwards the model has sharded weights, or bfloat16 weights
    and sharded float32 master weights, and :meth:`weights` gathers them. With ``stored``, the model has no weights
    before the engine is created, and each parameter is read from the files of ``stored``.

    The losses of micro-batches are parts of one sum over all ranks, because their denominators are those of the whole
    step. DeepSpeed averages gradients over ranks, so each loss is multiplied by the number of ranks first. DeepSpeed
    is configured with one micro-batch a step, so that it divides by no other count.

    State is saved by parameter name as whole tensors, as in :class:`TorchUpdater`: it resumes on any number of ranks
    and at any stage. DeepSpeed's own universal checkpoints need a conversion between two runs. A checkpoint is loaded
    into an existing engine in place.
    """

    def __init__(
        self,
        model: nn.Module,
        forward: Forward,
        optimizer: OptimizerConfig,
        sharding: UpdaterConfig,
        *,
        bfloat16: bool = False,
        ranks: Ranks | None = None,
        stored: StoredWeights | None = None,
    ) -> None:
        self._stored = stored
        self._deepspeed = _import_deepspeed()
        self._named = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
        if not self._named:
            raise ValueError("model has no parameter that requires a gradient: there is nothing to train")
        self._model = model
        self._ranks = ranks or Ranks()
        self._stage, self._bfloat16, self._config = sharding.zero_stage, bfloat16, optimizer
        self._dtype = torch.bfloat16 if bfloat16 else torch.float32
        self._settings = _settings(sharding, bfloat16, optimizer.max_grad_norm, self._ranks.size)
        self._plain_forward = forward
        self.forward = replace(forward, compute=lambda batch, **how: self._engine()(batch, **how))
        self.is_sharded, self.is_model_sharded = sharding.zero_stage > 0, sharding.zero_stage == 3
        self.masters: Mapping[str, Tensor] = {}  # made from the model, at its first use
        self.peak_learning_rate = optimizer.learning_rate
        self.weights_are_whole = True
        # As of whole parameters, also after DeepSpeed has partitioned them.
        self._shapes = {name: parameter.detach().to("meta") for name, parameter in self._named.items()}
        self._started: Any = None
        self._adamw: torch.optim.AdamW | None = None
        self._steps = 0
        self._norm = float("nan")  # of the gradients, at stage 0
        self._moments: dict[str, dict[str, Tensor]] = {}
        """Moments that were loaded before the engine was created."""

    def backward(self, loss: Tensor, *, is_last: bool) -> None:
        """See :class:`rlox_grpo.update.protocol.Updater`."""
        self.weights_are_whole = False  # until ``step`` or ``discard`` the engine may hold gradients of a failed step
        engine = self._engine()
        engine.set_gradient_accumulation_boundary(is_last)
        # DeepSpeed divides the sum over ranks by their number.
        engine.backward(loss * self._ranks.size)

    def step(self, learning_rate: float) -> float:
        """See :class:`rlox_grpo.update.protocol.Updater`."""
        engine = self._engine()
        for group in engine.optimizer.param_groups:
            group["lr"] = learning_rate
        try:
            engine.step()
        except NonFiniteError:  # of :meth:`_clip`
            self.weights_are_whole = True
            raise
        if self._stage > 0 and not engine.was_step_applied():
            self.weights_are_whole = True  # DeepSpeed has dropped the gradients and changed no weight
            raise NonFiniteError("the gradient norm is not finite though every loss is; DeepSpeed skipped the step")
        self._steps += 1
        self.weights_are_whole = True
        return self._norm if self._stage == 0 else float(engine.get_global_grad_norm())

    def discard(self, *, on_every_rank: bool) -> None:
        """See :class:`rlox_grpo.update.protocol.Updater`.

        After an error on this rank alone, DeepSpeed cannot drop its gradients: ``weights_are_whole`` stays False.
        """
        if on_every_rank:  # DeepSpeed drops gradients that are not finite instead of taking the step
            with contextlib.suppress(NonFiniteError):
                self.step(0.0)

    def start(self) -> None:
        """See :class:`rlox_grpo.update.protocol.Updater`: DeepSpeed casts and shards the model in place."""
        if self.is_sharded:
            self._engine()

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """See :class:`rlox_grpo.update.protocol.Updater`: master weights, gathered one parameter at a time."""
        self._engine()
        return ((name, self._whole(parameter)) for name, parameter in self._model.named_parameters())

    def state_dict(self) -> dict[str, Any]:
        """Return moments as ``{"<parameter>/<moment>": tensor}`` on rank 0's CPU, {} on other ranks. A collective."""
        # Before the first step the moments are those of the checkpoint, because the engine does not exist yet.
        if self._started is None or not self._steps:
            return {f"{name}/{key}": value for name, state in self._moments.items() for key, value in state.items()}
        return {
            f"{name}/{moment}": value
            for name, parameter in self._named.items()
            for moment, value in self._read_state(parameter).items()
            if self._ranks.is_first
        }

    @torch.no_grad()
    def set_weight(self, name: str, tensor: Tensor, value: Tensor) -> None:
        """See :class:`rlox_grpo.update.protocol.Updater`."""
        if self._started is not None and self._stage == 3 and isinstance(tensor, nn.Parameter):
            # Rank 0's values are broadcast and partitioned at the end of the block.
            with self._deepspeed.zero.GatheredParameters([tensor], modifier_rank=0):
                if self._ranks.is_first:
                    tensor.copy_(value)
        else:
            tensor.copy_(value)
        if self._started is not None and self._stage > 0 and name in self._named:
            self._set(tensor, value)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the result of :meth:`state_dict`, on any number of ranks.

        Raises:
            ValueError: a moment of an unknown parameter, or of another shape; or DeepSpeed still holds gradients of an
                optimizer step that failed, which would add to those of the next one.
        """
        if not self.weights_are_whole:
            raise ValueError("an optimizer step failed, and DeepSpeed holds its gradients: make the trainer anew")
        self._moments = sort_moments(state, self._shapes)
        if self._started is not None:
            self._restore_moments()

    def _engine(self) -> Any:
        """Return the DeepSpeed engine; create it at the first call."""
        if self._started is None:
            self._started = self._start()
            self._restore_moments()
        return self._started

    def _start(self) -> Any:
        join_alone()
        # The groups are made before sharding, because they depend on the shapes of the parameters.
        groups = parameter_groups(self._named.values(), self._config)
        if self._stored is not None:
            filled = self._fill(self._stored)
            groups = [{**group, "params": [filled[id(blank)] for blank in group["params"]]} for group in groups]
        whole = ForwardModule(self._model, self._plain_forward)
        betas = (self._config.adam_beta1, self._config.adam_beta2)
        self._adamw = torch.optim.AdamW(groups, lr=0.0, betas=betas, eps=self._config.adam_epsilon)
        # DeepSpeed makes its master weights from rounded ones, so a resume would not be exact.
        exact = {}
        if self._stored is None and self._bfloat16:
            exact = {name: parameter.detach().cpu().clone() for name, parameter in self._named.items()}
        engine, *_ = self._deepspeed.initialize(
            model=whole, optimizer=self._adamw, config=self._settings, dist_init_required=False
        )
        for name, value in exact.items():
            self._set(self._named[name], value)
        if self._stored is not None and self._bfloat16:
            for name, parameter in self._named.items():
                # Example: a parameter of 10 numbers on 4 ranks has shards of 3: the ranks read 0 to 3, 3 to 6, 6 to 9
                # and 9 to 10.
                size = parameter.ds_tensor.numel()  # type: ignore[attr-defined]
                start, numel = size * self._ranks.rank, parameter.ds_numel  # type: ignore[attr-defined]
                self._set_shard(parameter, self._stored.read_range(name, min(start, numel), min(start + size, numel)))
        self._stored = None
        if self._stage == 0:
            self._adamw.register_step_pre_hook(self._clip)
        if self._stage == 3:
            # The loss reads the output layer's weight outside that layer's own forward.
            for parameter in _head_parameters(self._model):
                self._deepspeed.zero.register_external_parameter(whole, parameter)
        return engine

    @torch.no_grad()
    def _fill(self, stored: StoredWeights) -> dict[int, nn.Parameter]:
        """Give a blank model its weights: rank 0 reads each parameter, and every rank keeps its part (ZeRO 3).

        Returns:
            The new parameters by the identities of those without weights.
        """
        self._deepspeed.init_distributed(dist_init_required=False)  # uses the existing process group
        device = find_device(self._model)
        names = {id(parameter): name for name, parameter in self._model.named_parameters()}
        for name, tensor in list_stored(self._model):
            if id(tensor) not in names:
                stored.read_into(name, tensor)

        def load(blank: nn.Parameter) -> nn.Parameter:
            # One whole parameter at a time on each device.
            whole = torch.empty(blank.shape, dtype=self._dtype, device=device)
            if self._ranks.is_first:
                stored.read_into(names[id(blank)], whole)
            loaded = nn.Parameter(whole, requires_grad=blank.requires_grad)
            # Broadcasts the parameter from rank 0, and keeps this rank's shard of it.
            self._deepspeed.zero.Init(
                module=nn.ParameterList([loaded]), config_dict_or_path=self._settings, dtype=self._dtype
            )
            return loaded

        filled = replace_parameters(self._model, load)
        self._named = {name: parameter for name, parameter in self._model.named_parameters() if parameter.requires_grad}
        return filled

    def _clip(self, *_: Any) -> None:
        """Clip the gradients at stage 0 as TorchUpdater does; DeepSpeed only averages them."""
        gradients = [parameter.grad for parameter in self._named.values() if parameter.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients)
        self._norm = float(norm)
        if not torch.isfinite(norm):
            for gradient in gradients:
                gradient.zero_()
            raise NonFiniteError(f"the gradient norm is {self._norm}")
        if self._config.max_grad_norm > 0:
            torch.nn.utils.clip_grads_with_norm_(list(self._named.values()), self._config.max_grad_norm, norm)

    def _whole(self, parameter: nn.Parameter) -> Tensor:
        if self._stage == 0:
            return parameter.detach()
        if parameter.requires_grad:
            whole: Tensor = self._deepspeed.utils.safe_get_full_fp32_param(parameter)
            return whole.detach().clone()
        if self._stage == 3:
            with self._deepspeed.zero.GatheredParameters([parameter]):
                return parameter.detach().clone()
        return parameter.detach()

    def _read_state(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        assert self._adamw is not None
        if self._stage == 0:
            return dict(self._adamw.state[parameter])
        read = self._deepspeed.utils.safe_get_full_optimizer_state
        moments = {moment: read(parameter, moment).detach().cpu().clone() for moment in _MOMENTS}
        return {"step": torch.tensor(float(self._steps)), **moments}

    def _restore_moments(self) -> None:
        """Create AdamW's state, and copy the loaded moments into the shards."""
        assert self._adamw is not None
        loaded, self._moments = self._moments, {}
        steps = next(iter(loaded.values()))["step"] if loaded else torch.tensor(0.0)
        self._steps = int(steps)
        if self._stage == 0:
            self._adamw.state.clear()
            for name, state in loaded.items():
                parameter = self._named[name]
                self._adamw.state[parameter] = {k: v.to(parameter.device, copy=True) for k, v in state.items()}
            return
        zero = self._started.optimizer
        flats = zero.fp32_partitioned_groups_flat if self._stage == 3 else zero.single_partition_of_fp32_groups
        for flat in flats:
            state = self._adamw.state[flat]
            state["step"] = steps.clone()
            for moment in _MOMENTS:
                # In place, if there is one: DeepSpeed has views of it.
                state[moment] = state[moment].zero_() if moment in state else torch.zeros_like(flat)
        if self._stage < 3:
            # DeepSpeed calls this after the first step of the first parameter group, when other groups have no state.
            # A second call does nothing.
            zero._lazy_init_hp_params_optimizer_state()
        for name, state in loaded.items():
            for moment in _MOMENTS:
                self._set(self._named[name], state[moment], moment)

    def _set(self, parameter: Any, value: Tensor, moment: str | None = None) -> None:
        """Copy a whole moment, or the whole master weights (``moment`` is None), into the shards."""
        utils = self._deepspeed.utils
        if self._stage < 3:
            value = value.to(parameter.device)
            if moment is None:
                utils.safe_set_full_fp32_param(parameter, value)
            else:
                utils.safe_set_full_optimizer_state(parameter, value, moment)
            return
        size = parameter.ds_tensor.numel()  # of one rank's shard
        self._set_shard(parameter, value.flatten()[size * self._ranks.rank :][:size], moment)

    def _set_shard(self, parameter: Any, mine: Tensor, moment: str | None = None) -> None:
        """Copy this rank's flat part into its shard; the last rank's part is padded with zeros."""
        utils = self._deepspeed.utils
        padded = torch.zeros(parameter.ds_tensor.numel())
        padded[: mine.numel()] = mine
        padded = padded.to(parameter.device)
        if moment is None:
            utils.safe_set_local_fp32_param(parameter, padded)
        else:
            utils.safe_set_local_optimizer_state(parameter, padded, moment)


def _settings(sharding: UpdaterConfig, bfloat16: bool, max_grad_norm: float, ranks: int) -> dict[str, Any]:
    stage = sharding.zero_stage
    zero: dict[str, Any] = {"stage": stage}
    if sharding.offload_optimizer:
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": torch.cuda.is_available()}
    if sharding.offload_params:
        zero["offload_param"] = {"device": "cpu", "pin_memory": torch.cuda.is_available()}
    if stage == 3:
        # On the CPU, which only tests use, small parameters are sharded too, so that small models show a wrong gather.
        zero["stage3_param_persistence_threshold"] = 0 if not torch.cuda.is_available() else 100_000
    return {
        "train_batch_size": ranks,
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        # At stage 0 :meth:`_clip` clips the gradients.
        "gradient_clipping": max_grad_norm if stage > 0 else 0.0,
        "zero_optimization": zero,
        "zero_force_ds_cpu_optimizer": False,  # torch's AdamW needs no compiler
        "zero_allow_untested_optimizer": True,
        "bf16": {"enabled": bfloat16},
        # Micro-batches add up in float32. At stage 1 DeepSpeed would change to another optimizer class for that.
        "data_types": {"grad_accum_dtype": "fp32" if bfloat16 and stage > 1 else None},
        "steps_per_print": 2**31,
        "wall_clock_breakdown": False,
    }


def _head_parameters(model: Any) -> list[nn.Parameter]:
    base = get_base(model)
    head = base.get_output_embeddings() if hasattr(base, "get_output_embeddings") else None
    return [] if head is None else list(head.parameters())


def _import_deepspeed() -> Any:
    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    deepspeed = import_extra("updater='deepspeed'", "deepspeed", "deepspeed")
    if not torch.cuda.is_available():
        # Otherwise DeepSpeed compiles its shared-memory collectives at start, which needs g++ and takes a minute.
        with contextlib.suppress(AttributeError, KeyError):
            deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    return deepspeed
