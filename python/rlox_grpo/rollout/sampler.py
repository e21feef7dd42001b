"""The sampler of a run: group sizes, seeds, and how many steps to sample ahead."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import fields, replace
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from rlox_grpo.config.generation_kwargs import split_generation_kwargs
from rlox_grpo.config.records import SamplingConfig
from rlox_grpo.distributed.ranks import Ranks
from rlox_grpo.errors import CheckpointError, ConfigError
from rlox_grpo.prompts.curriculum import PassRates
from rlox_grpo.rollout.async_generation import BackgroundEngine, BatchQueue, PendingBatch, join_states
from rlox_grpo.rollout.engines import GenerationEngine, returns_experts, returns_mask
from rlox_grpo.rollout.episodes.run import EpisodeRunner
from rlox_grpo.rollout.generate import Generate
from rlox_grpo.rollout.partial_rollouts import PartialRollouts
from rlox_grpo.types import Prompt, RolloutGroup, Sampling

if TYPE_CHECKING:
    from rlox_grpo.prompts.pictures import PictureReader

logger = logging.getLogger(__name__)


class Sampler:
    """Samples the batch of each step.

    Attributes:
        engine: the generation engine.
        sampling: the sampling parameters.
        generate: samples the groups from an engine, as single replies or as episodes.
        pass_rates: the pass rate of each prompt, for the curriculum and for group sizes.
        ahead: the batches being sampled, those of this step and, with ``async_steps``, of later steps.
        partial: the unfinished episodes with partial rollouts; otherwise None.
    """

    def __init__(
        self,
        engine: GenerationEngine,
        config: SamplingConfig,
        ranks: Ranks,
        *,
        seed: int,
        generate: Generate,
        partial_episodes: EpisodeRunner | None,
        router_replay: str,
        reader: PictureReader | None,
    ) -> None:
        """Prepare to sample.

        ``partial_episodes`` runs the episodes of partial rollouts. ``reader`` reads the pictures of episodes in
        checkpoints.
        """
        self._ranks, self._seed, self._reader = ranks, seed, reader
        self.engine = BackgroundEngine(engine) if config.async_steps > 0 else engine
        sampling = ask_for_mask(make_sampling(config), config.sampling_mask, engine)
        self.sampling = ask_for_experts(sampling, router_replay, engine)
        self.pass_rates = PassRates()
        self.ahead = BatchQueue()
        draws = derive_seed(seed, "partial rollouts", 0)
        self.partial: PartialRollouts | None = None
        if partial_episodes is not None:
            self.partial = PartialRollouts(partial_episodes, draws, ranks, config.async_steps)
        self.generate = generate
        self._config = config

    @property
    def measures_pass_rates(self) -> bool:
        """Whether the curriculum or the group sizes use pass rates."""
        return self._config.curriculum == "pass_rate" or self._config.max_group_size is not None

    def chance(self, index: int) -> float:
        """Return the probability of taking prompt ``index`` when it is drawn."""
        if self._config.curriculum == "none":
            return 1.0
        return self.pass_rates.chance(index, self._config.curriculum_floor)

    def next_batch(self, step: int, draw_prompts: Callable[[int], Sequence[Prompt]]) -> PendingBatch:
        """Return the batch of ``step``, and start the next ``async_steps`` batches. Call :meth:`done` after the update.

        Args:
            step: number of the step, from 0 and in order.
            draw_prompts: ``draw_prompts(step)`` is called once for each step, in order; it returns no prompts after
                the last step.
        """
        if self.partial is not None:
            return self.partial.next_batch(step, draw_prompts, self.engine, self.sampling, self._count_group)
        while len(self.ahead) <= self._config.async_steps:
            later = step + len(self.ahead)
            prompts = draw_prompts(later)
            if not prompts:
                break
            self.ahead.append(self.sample(prompts, later))
        return self.ahead[0]

    def sample(self, prompts: Sequence[Prompt], step: int, refill: int = 0) -> PendingBatch:
        """Sample ``prompts`` for ``step``, in the engine's thread or, without one, before this method returns."""
        sizes = [self._count_group(prompt) for prompt in prompts]
        seed = derive_seed(self._seed, f"refill {refill}" if refill else "rollout", step)
        share, engine_share = self._ranks.share(len(prompts)), self._ranks.engine_share(len(prompts))
        arguments = prompts, sizes, self.sampling, seed, share, engine_share
        if isinstance(self.engine, BackgroundEngine):
            return PendingBatch(prompts, self.engine.submit(lambda engine: self.generate(engine, *arguments)))
        groups: Future[list[RolloutGroup]] = Future()
        try:
            groups.set_result(self.generate(self.engine, *arguments))
        except BaseException as error:  # noqa: BLE001  `result` raises it
            groups.set_exception(error)
        return PendingBatch(prompts, groups)

    def keep_weights(self) -> None:
        """Call this before an update, because an engine in its own thread may not have read the current weights yet."""
        if isinstance(self.engine, BackgroundEngine):
            self.engine.keep_weights()

    def done(self) -> None:
        """Remove the oldest batch after its update."""
        if self.partial is not None:
            self.partial.done()
        else:
            self.ahead.popleft()

    def state_dict(self, *, prompts_alone: bool = False) -> dict[str, Any]:
        """Return the unfinished batches and episodes as JSON values for a checkpoint; every rank calls this.

        Args:
            prompts_alone: leave out the sampled completions, which are sampled again after a resume. The other ranks
                are not contacted, because one of them may be dead.
        """
        batches = self.ahead.state(prompts_alone=prompts_alone, share=self._ranks.share)
        return {
            "batches": batches if prompts_alone else join_states(self._ranks.gather(batches)),
            "partial": None if self.partial is None else self.partial.state(),
        }

    def load_state_dict(
        self, state: Mapping[str, Any], prompts: Sequence[Prompt] | Mapping[int, Prompt], step: int
    ) -> None:
        """Load the result of :meth:`state_dict`. Batches without completions are sampled again.

        Args:
            state: the state that was saved after ``step`` steps.
            prompts: ``prompts[index]`` is a prompt of the batches.
            step: number of steps so far; the engine has the weights after these steps.

        Raises:
            CheckpointError: ``async_steps`` or ``partial_rollout_turns`` is not that of the checkpoint.
        """
        batches, episodes = state["batches"], state["partial"]
        if batches and self.partial is not None:
            raise CheckpointError(
                f"the checkpoint has {len(batches)} batches under way, sampled with async_steps, and "
                "partial_rollout_turns is set here: restore async_steps"
            )
        self.ahead.restore(
            batches, prompts, lambda drawn, index: self.sample(drawn, step + index), self._ranks.share, self._reader
        )
        if self.partial is not None and episodes is not None:
            self.partial.restore(episodes, prompts)
        elif episodes is not None and episodes["groups"]:
            raise CheckpointError(
                f"the checkpoint has {len(episodes['groups'])} prompts whose episodes are under way, and "
                "partial_rollout_turns is None here: set it as it was"
            )

    def list_failed(self) -> list[int]:
        """Return the indices of the batches that failed on any rank; every rank calls this."""
        return sorted(set(chain.from_iterable(self._ranks.gather(self.ahead.list_failed()))))

    def sample_again(self, indices: Sequence[int], step: int) -> None:
        """Sample the batches ``indices`` again, with the same prompts. ``step`` is the step of the first batch."""
        for index in indices:
            self.ahead.replace(index, partial(self.sample, step=step + index))

    def clear(self) -> None:
        """Drop all unfinished batches and episodes, before another checkpoint is loaded."""
        self.ahead.clear(cancels=self._ranks.engine_size == 1)
        if self.partial is not None:
            self.partial.clear()

    def _count_group(self, prompt: Prompt) -> int:
        """Return the group size of ``prompt``."""
        config = self._config
        if config.max_group_size is None:
            return config.group_size
        return self.pass_rates.group_size(prompt.index, config.group_size, config.max_group_size)


def make_sampling(config: SamplingConfig) -> Sampling:
    """Return the sampling parameters from the options and ``generation_kwargs``."""
    shared = {field.name for field in fields(Sampling)} & SamplingConfig.model_fields.keys()
    also, extra = split_generation_kwargs(config.generation_kwargs)
    return Sampling(**{**{name: getattr(config, name) for name in shared}, **also, "extra": extra})


def ask_for_experts(sampling: Sampling, choice: str, engine: GenerationEngine) -> Sampling:
    """Ask for the experts of each token if ``choice``, the option ``router_replay``, is ``"sampler"``.

    Raises:
        ConfigError: the engine does not return experts.
    """
    if choice != "sampler":
        return sampling
    if not returns_experts(engine):
        raise ConfigError(
            f"router_replay='sampler': engine {type(engine).__name__} does not return the experts of this model; set "
            "router_replay='trainer', or engine='hf' with a mixture of experts of transformers"
        )
    return replace(sampling, return_experts=True)


def ask_for_mask(sampling: Sampling, choice: Literal["auto", "require", "none"], engine: GenerationEngine) -> Sampling:
    """Ask for the ids from which tokens are drawn, if filters exclude ids and the engine returns the others.

    Args:
        sampling: the sampling parameters of training.
        choice: the option ``sampling_mask``.
        engine: the generation engine.

    Raises:
        ConfigError: the choice is ``"require"``, and the engine does not return the ids.
    """
    if not sampling.is_truncated or choice == "none":
        return sampling
    if returns_mask(engine):
        return replace(sampling, return_sampling_mask=True)
    filters = f"top_p={sampling.top_p:g}, top_k={sampling.top_k} and min_p={sampling.min_p:g}"
    name = f"engine {type(engine).__name__}"
    if choice == "require":
        raise ConfigError(
            f"sampling_mask='require': {name} does not return the ids that {filters} leave, so the update would train "
            "another distribution than was sampled from; set engine='hf', or turn the filters off"
        )
    logger.warning(
        "%s does not return the ids that %s leave: the update normalises log-probs over all ids, which is biased. "
        "mismatch/truncated_mass is the probability that the filters cut off; turn the filters off, or set engine='hf'",
        name,
        filters,
    )
    return sampling


def derive_seed(seed: int, purpose: str, step: int) -> int:
    """Derive an independent 63-bit seed for each purpose and step, the same in a resumed run."""
    entropy = [seed, step, *purpose.encode()]
    return int(np.random.SeedSequence(entropy).generate_state(1, np.uint64)[0] >> np.uint64(1))
