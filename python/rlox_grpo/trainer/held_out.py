"""Evaluate the policy on sets of held-out prompts, with the engine of training."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any

from rlox_grpo.config.eval_set import UNNAMED, EvalSet, list_sets, name_argument
from rlox_grpo.config.records import EpisodeConfig, StageConfigs
from rlox_grpo.config.records.option import list_evaluated
from rlox_grpo.config.schema import is_resumable
from rlox_grpo.distributed.ranks import Ranks
from rlox_grpo.errors import ConfigError
from rlox_grpo.model.load import count_sampled_ids
from rlox_grpo.model.policy import Policy
from rlox_grpo.prompts.ends import refuse_hidden_stops
from rlox_grpo.rewards import RewardFn, reward_weights
from rlox_grpo.rewards.calls import RewardError
from rlox_grpo.rewards.environment import EnvironmentReward
from rlox_grpo.rewards.scoring import make_unique_names
from rlox_grpo.rewards.workers import closing_workers
from rlox_grpo.rollout.engines.calls import fill_texts
from rlox_grpo.rollout.engines.custom_engine import choose_turn_check
from rlox_grpo.rollout.episodes.run import EpisodeRunner
from rlox_grpo.rollout.generate import Generate, choose_generate
from rlox_grpo.rollout.sampler import Sampler, derive_seed
from rlox_grpo.run.digests import digest_data, digest_rewards
from rlox_grpo.run.eval_history import EvaluationHistory
from rlox_grpo.run.evaluation import evaluate, has_vote, list_k, measure_prompts
from rlox_grpo.run.inputs import PromptReader
from rlox_grpo.trainer.prepare_rewards import connect_rewards, list_in_workers
from rlox_grpo.types import Prompt, RolloutGroup, Sampling, ScoredGroup

_SAMPLING = ("temperature", "top_p", "top_k", "max_new_tokens", "stop")
"""The settings of a set that are fields of :class:`rlox_grpo.types.Sampling`."""

_PROMPTS = ("max_new_tokens", "system_prompt")
"""The settings of a set that reading its prompts needs, as options."""


_EPISODE_OPTIONS = [name for name in list_evaluated(EpisodeConfig) if not is_resumable(name)]
"""The options of episodes that change their results."""


@dataclass(frozen=True, eq=False)
class LoadedSet:
    """A set that can be evaluated.

    Attributes:
        prompts: its prompts.
        sampling: the sampling parameters.
        samples: completions for each prompt.
        reward_fns: the reward functions; an environment's comes first.
        weights: the weights of their total; None: their own.
        generate: samples the groups, as single replies or as episodes.
        settings: the settings from which the set was made.
        episodes: the environment of the set, if the set has its own.
        played_in: the environment that plays the prompts, the set's own or that of training; None: single replies.
        episode_options: the options of its episodes.
        digest: digest of everything that an evaluation depends on, except the weights and the seed.
        code_digest: the same without the values that functions hold in attributes, closures and defaults, which may
            differ between ranks.
    """

    prompts: Sequence[Prompt]
    sampling: Sampling
    samples: int
    reward_fns: Sequence[RewardFn]
    weights: Sequence[float] | None
    generate: Generate
    settings: EvalSet
    episodes: EpisodeRunner | None
    played_in: EpisodeRunner | None
    episode_options: EpisodeConfig
    digest: str = field(init=False)
    code_digest: str = field(init=False)

    def __post_init__(self) -> None:
        """Compute the digests now, before an evaluation changes what the functions hold."""
        functions = digest_rewards(self.reward_fns, self.played_in)
        codes = [(name, digest and digest.partition("+")[0]) for name, digest in functions]
        settings = f"{self.sampling} {self.samples} {self.weights} {digest_data(self.prompts)}"
        if self.played_in is not None:
            options = {name: getattr(self.episode_options, name) for name in _EPISODE_OPTIONS}
            settings += f" {options} {self.played_in.system_prompt}"
        for name, described in (("digest", functions), ("code_digest", codes)):
            text = f"{settings} {described}"
            object.__setattr__(self, name, hashlib.sha256(text.encode()).hexdigest()[:16])

    def close(self) -> None:
        """End the worker processes of the set's own rewards and environment."""
        with closing_workers(self.reward_fns):
            if self.episodes is not None:
                self.episodes.close()


@dataclass(frozen=True, eq=False)
class HeldOut:
    """Loads sets of held-out prompts, and evaluates the weights that the engine has.

    Attributes:
        stages: the options; those for the run, prompts, episodes and rewards are read.
        sampler: the sampler of training, with its engine.
        reader: reads the prompts of training, with its reward functions and environment.
        tools: the tools of training.
        ranks: the ranks that share the prompts.
        policy: the policy; reward models of a set are loaded on its device.
        history: the evaluations of training with which later ones are compared; part of a checkpoint.
    """

    stages: StageConfigs
    sampler: Sampler
    reader: PromptReader
    tools: Sequence[Callable[..., Any]]
    ranks: Ranks
    policy: Policy
    history: EvaluationHistory = field(default_factory=EvaluationHistory)

    def load(self, eval_prompts: Any, argument: str = "eval_prompts") -> dict[str, LoadedSet]:
        """Read the prompts of every set, by name; see :func:`rlox_grpo.config.eval_set.list_sets`.

        Args:
            eval_prompts: the sets.
            argument: name of the sets in error messages.

        Raises:
            ConfigError, TypeError, ValueError, RewardError: a set cannot be used; the message names it.
        """
        loaded = {}
        for name, asked in list_sets(eval_prompts).items():
            try:
                loaded[name] = self.load_set(asked)
            except (ValueError, TypeError, RewardError) as error:  # a ConfigError is a ValueError
                if name == UNNAMED and argument == "prompts":  # the error begins with it
                    raise
                kinds = (ConfigError, RewardError, TypeError, ValueError)
                kind = next(error_type for error_type in kinds if isinstance(error, error_type))
                raise kind(f"{name_argument(argument, name)}: {error}") from error
        return loaded

    def load_set(self, asked: EvalSet) -> LoadedSet:
        """Read the prompts of one set, and make its reward functions and its environment.

        Raises:
            ConfigError, TypeError, ValueError, RewardError: the set cannot be used.
        """
        changes = {name: value for name in _PROMPTS if (value := getattr(asked, name)) is not None}
        config = self.reader.config.model_copy(update=changes)
        episodes, runner, generate_groups = self.reader.episodes, None, self.sampler.generate
        if asked.environment is False:
            episodes, generate_groups = None, choose_generate(config.engine, count_sampled_ids(self.policy))
        elif asked.environment is not None or (episodes is not None and asked.system_prompt is not None):
            episodes = runner = generate_groups = self._make_episodes(asked)
        reward_fns = self._list_rewards(asked, episodes)
        reader = replace(self.reader, config=config, reward_fns=reward_fns, episodes=episodes)
        refuse_hidden_stops(asked.stop or (), self.reader.tokenizer, self.reader.end_ids)
        changes = {name: value for name in _SAMPLING if (value := getattr(asked, name)) is not None}
        # The training's weights are those of the training's functions.
        is_changed = asked.rewards is not None or asked.environment is not None
        weights = None if is_changed else self.stages.rewards.reward_weights
        reward_weights(reward_fns, weights)
        return LoadedSet(
            prompts=reader.read(asked.prompts, trained=False),
            sampling=replace(self.sampler.sampling, return_sampling_mask=False, return_experts=False, **changes),
            samples=asked.samples or (1 if asked.temperature == 0 else self.stages.run.eval_samples),
            reward_fns=reward_fns,
            weights=weights,
            generate=generate_groups,
            settings=asked,
            episodes=runner,
            played_in=episodes,
            episode_options=self.stages.episodes,
        )

    def share_digests(self, sets: Mapping[str, LoadedSet]) -> None:
        """Take the digests of the first rank on every rank, which has the same sets.

        What functions hold may differ between ranks, and all of them must continue a comparison, or none.
        """
        digests = self.ranks.gather({name: loaded.digest for name, loaded in sets.items()})[0]
        for name, loaded in sets.items():
            object.__setattr__(loaded, "digest", digests[name])

    def find_set(self, metric: str, sets: Mapping[str, LoadedSet]) -> LoadedSet:
        """Return the set of ``metric``, by which ``keep_best`` chooses a checkpoint.

        Raises:
            ConfigError: no set has the metric, or less of it may be better.
        """
        by_metric = {
            f"eval/{score}": loaded for name, loaded in sets.items() for score in self._list_scores(name, loaded)
        }
        if metric not in by_metric:
            reason = "no evaluation has it, or more of it is not better"
            raise ConfigError(f"keep_best={metric!r}: {reason}; choose one of {', '.join(by_metric)}")
        return by_metric[metric]

    def _list_scores(self, name: str, loaded: LoadedSet) -> list[str]:
        """Return the metrics of every evaluation of the set ``name`` for which higher is better."""
        scores = ["accuracy", *(f"pass@{k}" for k in list_k(loaded.samples)), "mean_reward"]
        if has_vote(loaded.samples, loaded.reward_fns):
            scores.append(f"maj@{loaded.samples}")
        scores += [f"rewards/{function}" for function in make_unique_names(loaded.reward_fns)]
        if self.stages.run.eval_greedy and loaded.sampling.temperature > 0:
            scores.append("greedy_accuracy")
        return [*prefix(name, dict.fromkeys(scores, 0.0))]

    def evaluate(self, loaded: LoadedSet, *, samples: int | None = None, greedy: bool = False) -> Evaluated:
        """Evaluate a set once; see :func:`rlox_grpo.run.evaluation.evaluate`.

        Args:
            loaded: the set.
            samples: completions for each prompt, if they are sampled; None: the set's own number.
            greedy: decode one completion greedily for each prompt instead.
        """

        def generate_texts(*arguments: Any, **keywords: Any) -> list[RolloutGroup]:
            return fill_texts(loaded.generate(*arguments, **keywords), self.reader.tokenizer)

        sampling = replace(loaded.sampling, temperature=0.0) if greedy else loaded.sampling
        return evaluate(
            self.sampler.engine,
            loaded.prompts,
            loaded.reward_fns,
            sampling,
            samples=1 if sampling.temperature == 0 else samples or loaded.samples,
            seed=derive_seed(self.stages.run.seed, "evaluation", 0),
            weights=loaded.weights,
            on_error=self.stages.rewards.on_reward_error,
            ranks=self.ranks,
            generate=generate_texts,
            reader=self.reader.reader,
        )

    def evaluate_in_training(self, name: str, loaded: LoadedSet, step: int) -> Evaluated:
        """Evaluate the set ``name`` after ``step``, and compare it with its evaluations before.

        With ``eval_greedy`` also measure the accuracy of greedy decoding. ``time_s`` is the wall-clock time of both.
        """
        start = time.perf_counter()
        metrics, groups = self.evaluate(loaded)
        metrics |= self.history.compare(name, loaded.digest, loaded.samples, step, measure_prompts(groups))
        if self.stages.run.eval_greedy and loaded.sampling.temperature > 0:
            metrics["greedy_accuracy"] = self.evaluate(loaded, greedy=True)[0]["accuracy"]
        metrics["time_s"] = time.perf_counter() - start
        return metrics, groups

    def _make_episodes(self, asked: EvalSet) -> EpisodeRunner:
        """Return what runs the episodes of a set with its own environment or its own system prompt."""
        config, training = self.reader.config, self.reader.episodes
        if config.tensor_parallel_size > 1:
            raise ConfigError("environment needs tensor_parallel_size=1")
        source = asked.environment
        if source is None and training is not None:
            source = training.source
        changes = {} if asked.system_prompt is None else {"system_prompt": asked.system_prompt}
        return EpisodeRunner(
            source,
            self.tools,
            self.stages.episodes,
            self.reader.tokenizer,
            # The environment writes the prompts.
            self.stages.prompts.model_copy(update={**changes, "prompt_template": None}),
            check_turn=choose_turn_check(config.engine, count_sampled_ids(self.policy)),
            reader=self.reader.reader,
        )

    def _list_rewards(self, asked: EvalSet, episodes: EpisodeRunner | None) -> list[RewardFn]:
        """Return the reward functions of a set: first that of ``episodes``, then its own, or those of training."""
        functions = list(self.reader.reward_fns)
        if asked.rewards is not None:
            functions = list_in_workers(asked.rewards, self.stages)
            connect_rewards(functions, self.policy.model, self.reader.config.output_dir, self.ranks.size)
        functions = [function for function in functions if not isinstance(function, EnvironmentReward)]
        if episodes is not None and episodes.environment.has_reward:
            functions.insert(0, EnvironmentReward(episodes.environment.name))
        return functions


Evaluated = tuple[dict[str, float], list[ScoredGroup]]
"""The metrics of an evaluation and its scored groups."""


def prefix(name: str, metrics: Mapping[str, float]) -> dict[str, float]:
    """Return the metrics of a set with its name before each: ``math/accuracy``."""
    return dict(metrics) if name == UNNAMED else {f"{name}/{metric}": value for metric, value in metrics.items()}


def closing_sets(sets: Mapping[str, LoadedSet]) -> ExitStack:
    """Return a context that ends the worker processes of the sets."""
    stack = ExitStack()
    for loaded in sets.values():
        stack.callback(loaded.close)
    return stack
