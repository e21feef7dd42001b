"""Frozen dataclasses that the stages of a step pass to each other, with the shapes of their arrays."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from torch import Tensor

BoolArray = NDArray[np.bool_]
Int64Array = NDArray[np.int64]
Float32Array = NDArray[np.float32]
FinishReason = Literal["stop", "length"]


@dataclass(frozen=True, eq=False)
class Prompt:
    """One prompt, tokenised.

    Attributes:
        token_ids: ``int64 [prompt_len]``, at least one token.
        index: index in the user's prompts; the same in every epoch and after a resume.
        text: the tokenised text, with the template applied; None for a prompt of token ids.
        source: the user's prompt as reward functions get it: text, chat messages or token ids.
        columns: the other columns of the user's row, which reward functions get by name.
    """

    token_ids: Int64Array
    index: int
    text: str | None = None
    source: str | list[dict[str, Any]] | None = None
    columns: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Sampling:
    """Sampling parameters. Temperature 0 is greedy. The filters apply in the order top-k, top-p, min-p.

    Attributes:
        max_new_tokens: maximum length of a completion, its end token included.
        temperature: divisor of the logits, applied before the filters.
        top_p, top_k, min_p: filters; 1.0, 0 and 0.0 disable them.
        stop: strings that end a completion; their tokens are part of it.
        stop_token_ids: ids that end a completion, in addition to the model's end tokens.
        extra: further parameters of the engine, (name, value). An engine refuses parameters that it does not support.
    """

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    extra: tuple[tuple[str, Any], ...] = ()


@dataclass(frozen=True, eq=False)
class Episode:
    """The outcome of an episode of several turns, as JSON values.

    Attributes:
        stop_reason: one of :data:`rlox_grpo.environments.outcome.STOP_REASONS`.
        reward: the environment's reward; None if it is unscored.
        turn_rewards: one reward for each turn, if the environment returned them.
        metrics: the environment's metrics.
        messages: the conversation. In an episode with branches, the one that ``chat.turn`` continues.
        prompt_messages: number of messages in the first prompt.
        tool_calls, tool_errors, observations_cut: counts.
        tool_seconds: time that the tools took.
        error: an error message, or None.
        branch_messages: the other conversations, in the order of ``Completion.branches``, without those that the chat
            template rewrote: their rewritten form has their messages.
        cancelled_calls: number of calls that were cancelled before the reply was complete. They are not trained.
    """

    stop_reason: str
    reward: float | None
    turn_rewards: tuple[float, ...] | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    messages: tuple[Mapping[str, Any], ...] = ()
    prompt_messages: int = 0
    tool_calls: int = 0
    tool_errors: int = 0
    observations_cut: int = 0
    tool_seconds: float = 0.0
    error: str | None = None
    branch_messages: tuple[tuple[Mapping[str, Any], ...], ...] = ()
    cancelled_calls: int = 0


@dataclass(frozen=True, eq=False)
class Completion:
    """One completion of a prompt, in one turn or in several.

    An episode of several turns is one completion. Its tokens are the policy's turns and, between them, observations:
    tokens of the environment or the chat template. Only sampled tokens are trained and counted as length.

    Attributes:
        token_ids: ``int64 [T]``, including end tokens and observations.
        log_probs: ``float32 [T]``, under the distribution from which each token was sampled; 0.0 on other tokens.
        finish_reason: ``"stop"`` (end token or stop string) or ``"length"`` (truncated), of the last turn.
        text: decoded without special tokens; None without a tokenizer.
        sampled: ``bool [T]``, True on tokens that the policy sampled; None: all.
        turns: offsets in ``token_ids`` where the turns begin, ascending; (): one turn, from 0.
        episode: the outcome of the episode; None without an environment.
        branches: the other rows of the episode, if its history was rewritten or it had several conversations. They
            share its reward and advantage. Each sampled token is ``sampled`` in one row only, so it is trained once. A
            branch has no episode and no branches.
        prompt_ids: ``int64 [P]``, the row's own prompt; None: the group's prompt.
        versions: the policy version of each of ``turns``, with partial rollouts; (): the version of the group.
    """

    token_ids: Int64Array
    log_probs: Float32Array
    finish_reason: FinishReason
    text: str | None = None
    sampled: BoolArray | None = None
    turns: tuple[int, ...] = ()
    episode: Episode | None = None
    branches: tuple[Completion, ...] = ()
    prompt_ids: Int64Array | None = None
    versions: tuple[int, ...] = ()


@dataclass(frozen=True, eq=False)
class RolloutGroup:
    """The completions sampled for one prompt.

    Attributes:
        prompt, completions: see above.
        policy_version: version of the policy that sampled them; with partial rollouts, that of the oldest turn.
        prefilled_tokens: tokens run through the model to prepare the replies of episodes: those of the engine's call,
            divided evenly among its groups.
    """

    prompt: Prompt
    completions: tuple[Completion, ...]
    policy_version: int = 0
    prefilled_tokens: float = 0.0


@dataclass(frozen=True, eq=False)
class ScoredGroup:
    """A group with its rewards.

    Attributes:
        group: the prompt and its G completions.
        rewards: ``float32 [G]``, weighted total; NaN if no function applied.
        components: scores of each function by name, ``float32 [G]``, NaN where it did not apply.
        statuses: status of each rule's scores, ``uint8 [G]``, indices of ``rewards.STATUSES``.
        outcomes: outcome of each other function's calls, ``uint8 [G]``, indices of ``rewards.OUTCOMES``.
        seconds: time of each function: that of the batch, divided evenly among its completions.
        measures: further numbers of functions, ``float32 [G]`` by ``function/name``, NaN if missing.
        turn_rewards: for each completion, the part of its reward that is paid at each turn, ``float32 [turns]``; None:
            the whole reward is paid at the last turn. So is the rest, ``rewards[i] - turn_rewards[i].sum()``.
    """

    group: RolloutGroup
    rewards: Float32Array
    components: Mapping[str, Float32Array]
    statuses: Mapping[str, NDArray[np.uint8]] = field(default_factory=dict)
    outcomes: Mapping[str, NDArray[np.uint8]] = field(default_factory=dict)
    seconds: Mapping[str, float] = field(default_factory=dict)
    measures: Mapping[str, Float32Array] = field(default_factory=dict)
    turn_rewards: tuple[Float32Array, ...] | None = None


@dataclass(frozen=True, eq=False)
class OutputHead:
    """The last layer of a language model: logits = cap(scale · (hidden @ weightᵀ + bias)).

    Attributes:
        weight: ``[V, H]``, tied to the embedding or not.
        bias: ``[V]`` or None.
        scale: multiplies the logits (Cohere's ``logit_scale``, the inverse of Granite's ``logits_scaling``).
        softcap: logits become softcap · tanh(logits / softcap) (Gemma 2's ``final_logit_softcapping``).
    """

    weight: Tensor
    bias: Tensor | None = None
    scale: float = 1.0
    softcap: float | None = None


@dataclass(frozen=True, eq=False)
class TokenDistributions:
    """The next-token distributions of M tokens, as hidden states and output layer, or as logits.

    Attributes:
        hidden: ``[M, H]`` final hidden states, or ``[M, V]`` logits without a head.
        head: the output layer, or None.
    """

    hidden: Tensor
    head: OutputHead | None


@dataclass(frozen=True, eq=False)
class Batch:
    """Rows of one micro-batch: prompt then completion, padded on the right.

    N rows; L is the longest row, T the longest completion.

    Attributes:
        input_ids: ``int64 [N, L]``.
        attention_mask: ``bool [N, L]``, True on real tokens.
        position_ids: ``int64 [N, L]``, counted from each row's first real token.
        prompt_lengths: ``int64 [N]``; completion token t of row i is ``input_ids[i, prompt_lengths[i] + t]``.
        completion_ids: ``int64 [N, T]``.
        completion_mask: ``bool [N, T]``, True on the tokens after the prompt, including end tokens and observations.
            For attention and positions; counts and means of tokens use ``loss_mask``.
        loss_mask: ``bool [N, T]``, the trained tokens: sampled tokens, never observations.
        advantages: ``float32 [N]``, or ``[N, T]`` if each turn has its own; then 0 outside ``loss_mask``.
        row_index: ``int64 [N]``, index of each row's completion in the optimizer step; branches have that of their
            completion.
        prompt_index: ``int64 [N]``, ascending; rows with the same value share their prompt.
        num_loss_tokens: denominator: loss tokens of the whole optimizer step, over micro-batches and ranks.
        num_sequences: denominator: sequences with a loss token of the whole optimizer step.
        old_log_probs, ref_log_probs, sampling_log_probs: ``float32 [N, T]``, or None.
        policy_mask: ``bool [N, T]``, the loss tokens with a policy term; None: all. It does not change denominators.
        covariance_mask: ``bool [N, T]``, the loss tokens that ``policy_loss`` ``clip_cov`` or ``kl_cov`` selects; see
            :mod:`rlox_grpo.loss.covariance`.
        importance_weights: ``float32 [N, T]``, factors of the policy term; see :mod:`rlox_grpo.loss.importance`.
        ref_distributions: the reference's distributions of the loss tokens in row order, for ``kl_estimator="full"``.
        branch_index: ``int64 [N]``, 0 for a completion itself and b for its ``branches[b - 1]``; None: no branches.
        sequence_lengths: ``int64 [N]``, loss tokens of the completion with its branches, which are one sequence; None:
            each row is a sequence.
        is_unscaled: whether log-probs are computed at temperature 1 over all ids of the output layer, regardless of the
            forward's temperature and vocabulary.
    """

    input_ids: Tensor
    attention_mask: Tensor
    position_ids: Tensor
    prompt_lengths: Tensor
    completion_ids: Tensor
    completion_mask: Tensor
    loss_mask: Tensor
    advantages: Tensor
    row_index: Tensor
    prompt_index: Tensor
    num_loss_tokens: float
    num_sequences: float
    old_log_probs: Tensor | None = None
    ref_log_probs: Tensor | None = None
    sampling_log_probs: Tensor | None = None
    policy_mask: Tensor | None = None
    covariance_mask: Tensor | None = None
    importance_weights: Tensor | None = None
    ref_distributions: TokenDistributions | None = None
    branch_index: Tensor | None = None
    sequence_lengths: Tensor | None = None
    is_unscaled: bool = False


@dataclass(frozen=True, eq=False)
class LossOutput:
    """A scalar loss to minimise and its metrics.

    Attributes:
        loss: Scalar; micro-batch losses of one optimizer step add up to the loss of the whole step.
        metrics: detached scalars: sums under ``loss_mask`` over the step's denominators, which add up in the same way.
    """

    loss: Tensor
    metrics: Mapping[str, Tensor]


@dataclass(frozen=True)
class UpdateStats:
    """Result of one optimizer step: gradient norm before clipping, learning rate, and metrics of the loss."""

    grad_norm: float
    learning_rate: float
    metrics: Mapping[str, float]
