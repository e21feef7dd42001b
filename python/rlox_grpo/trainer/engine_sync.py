"""Push the policy's weights to the generation engine, and let an engine compare its log-probs with the trainer's."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rlox_grpo.batch.build import build_batch, group_prompt
from rlox_grpo.config.records import StageConfigs
from rlox_grpo.distributed.ranks import Ranks
from rlox_grpo.model.blank import find_device
from rlox_grpo.model.forward import Forward
from rlox_grpo.model.policy import Policy
from rlox_grpo.rollout.async_generation import BackgroundEngine
from rlox_grpo.rollout.engines import GenerationEngine, is_checked
from rlox_grpo.rollout.engines.adapter_changes import AdapterChanges
from rlox_grpo.rollout.engines.canary import Canary, choose_tokens, draw_canary
from rlox_grpo.rollout.engines.custom_engine import check_version
from rlox_grpo.rollout.engines.weight_sync import WeightStream
from rlox_grpo.types import Float32Array, Picture, Prompt
from rlox_grpo.update.protocol import Updater

logger = logging.getLogger(__name__)


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
        self._picture: Picture | None = None  # of the canary prompt

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

    def measure_tokens(self, token_ids: Sequence[int], pictures: tuple[Picture, ...] = ()) -> Float32Array:
        """Return the policy's log-probs of all tokens but the first, ``[T − 1]``; a collective for a sharded policy.

        With ``pictures`` at the beginning of ``token_ids``, return the log-probs of the tokens after them.

        The log-probs are taken at temperature 1 and over every id of the output layer, as an engine reports log-probs
        of a prompt.
        """
        ids = np.array(token_ids, np.int64)
        device = find_device(self._policy.model)
        start = sum(len(picture.token_ids) for picture in pictures) or 1
        group = group_prompt(Prompt(ids[:start], 0, pictures=pictures), [ids[start:]])
        batch = build_batch([group], np.zeros(1), device=device)
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
            token_ids, pictures = self._choose_canary()
            log_probs = self.measure_tokens(token_ids, pictures)
            dtype, tolerance = self._stages.update.dtype, options.check_weights_tolerance
            canary = Canary(token_ids, log_probs, dtype, tolerance, pictures)
        engine.expect_log_probs(canary)
        return AdapterChanges() if options.check_weights else None

    def _choose_canary(self) -> tuple[list[int], tuple[Picture, ...]]:
        """Return the tokens of the canary prompt, and a picture at their beginning if the policy reads pictures."""
        model: Any = self._policy.model
        vocabulary = self._policy.vocabulary or model.config.get_text_config(decoder=True).vocab_size
        reader, longest = self._policy.reader, self._engine.max_length
        if reader is None:
            return choose_tokens(vocabulary, longest), ()
        token_ids = choose_tokens(vocabulary, longest, {*reader.excluded_ids, reader.placeholder_id})
        if self._picture is None:
            self._picture = reader.read(draw_canary(), Path(), "the picture that checks an engine's weights")
        shown = self._picture.token_ids.tolist()
        if longest is not None and len(shown) + len(token_ids) >= longest:
            logger.warning(
                "the check of the engine's weights is without a picture: its %d tokens do not fit %d positions",
                len(shown),
                longest,
            )
            return token_ids, ()
        return [*shown, *token_ids], (self._picture,)
