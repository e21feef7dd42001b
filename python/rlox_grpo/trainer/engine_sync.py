"""Push the policy's weights to the generation engine, and let an engine compare its log-probs with the trainer's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from rlox_grpo.batch.build import build_batch, group_tokens
from rlox_grpo.config.records import StageConfigs
from rlox_grpo.distributed.ranks import Ranks
from rlox_grpo.model.blank import find_device
from rlox_grpo.model.forward import Forward
from rlox_grpo.model.policy import Policy
from rlox_grpo.rollout.async_generation import BackgroundEngine
from rlox_grpo.rollout.engines import GenerationEngine, is_checked
from rlox_grpo.rollout.engines.adapter_changes import AdapterChanges
from rlox_grpo.rollout.engines.canary import Canary, choose_tokens
from rlox_grpo.rollout.engines.custom_engine import check_version
from rlox_grpo.rollout.engines.weight_sync import WeightStream
from rlox_grpo.types import Float32Array
from rlox_grpo.update.protocol import Updater


class EngineSync:
    """Pushes the current weights to the engine, once for each training step.

    Attributes:
        changes: compares the merged with the original weights of an adapter in the last push; None: not compared.
    """

    def __init__(
        self,
        stages: StageConfigs,
        policy: Policy,
        forward: Forward,
        updater: Updater,
        engine: GenerationEngine,
        ranks: Ranks,
    ) -> None:
        self.changes: AdapterChanges | None = None
        self._stages, self._policy, self._forward = stages, policy, forward
        self._updater, self._engine, self._ranks = updater, engine, ranks
        self._step: int | None = None  # the step whose weights the engine has

    def push(self, step: int, *, again: bool = False) -> None:
        """Push the weights of ``step`` if the engine has other weights, or always with ``again``.

        Every rank calls this method.

        Raises:
            EngineError: the engine did not take the version of these weights.
        """
        if not again and self._step == step:
            return
        self._updater.start()
        self.changes = self._expect_log_probs()
        gather = self._updater.weights if self._updater.is_model_sharded else None
        weights = WeightStream(self._policy.model, gather, changes=self.changes)
        self._engine.load_weights(weights if self._engine.takes_weights else (), version=step)
        check_version(self._engine, step)
        self._ranks.gather(None)  # a barrier: every engine has the weights
        self._step = step

    def forget(self) -> None:
        """Push again before the next batch, because another checkpoint is loaded."""
        self._step = None

    def measure_tokens(self, token_ids: Sequence[int]) -> Float32Array:
        """Return the policy's log-probs of all tokens but the first, ``[T − 1]``; a collective for a sharded policy.

        The log-probs are taken at temperature 1 and over every id of the output layer, as an engine reports log-probs
        of a prompt.
        """
        ids = np.array(token_ids, np.int64)
        device = find_device(self._policy.model)
        batch = build_batch([group_tokens(ids[:1], [ids[1:]])], np.zeros(1), device=device)
        with torch.no_grad():
            log_probs: Float32Array = self._forward(batch, is_unscaled=True)[0][0].float().cpu().numpy()
        return log_probs

    def _expect_log_probs(self) -> AdapterChanges | None:
        """Send the engine the log-probs to compare its next weights with; None if weights are not checked."""
        engine, options = self._engine, self._stages.engine
        if not is_checked(engine):
            return None
        if isinstance(engine, BackgroundEngine) and not engine.checks_log_probs:
            return None
        canary = None
        if options.check_weights:
            model: Any = self._policy.model
            vocabulary = self._policy.vocabulary or model.config.get_text_config(decoder=True).vocab_size
            token_ids = choose_tokens(vocabulary, self._engine.max_length)
            log_probs = self.measure_tokens(token_ids)
            canary = Canary(token_ids, log_probs, self._stages.update.dtype, options.check_weights_tolerance)
        engine.expect_log_probs(canary)
        return AdapterChanges() if options.check_weights else None
