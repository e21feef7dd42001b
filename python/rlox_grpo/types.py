"""Data types that stages pass to each other: frozen, with shapes, no behaviour beyond validation."""

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
        index: Position in the list that the user gave; stable over epochs and resumes.
        text: What was tokenised (the template applied), or None when the prompt came as token ids.
        source: What the user gave, as reward functions receive it: text, chat messages or token ids.
        columns: The other columns of the user's row; they reach reward functions by name.
    """

    token_ids: Int64Array
    index: int
    text: str | None = None
    source: str | list[dict[str, Any]] | None = None
    columns: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Sampling:
    """How to draw a completion. Temperature 0 is greedy; the filters apply in the order top-k, top-p, min-p.

    Attributes:
        max_new_tokens: Longest completion, its end token included.
        temperature: Logits are divided by it before anything else.
        top_p, top_k, min_p: Off at 1.0, 0 and 0.0.
        stop: Strings that end a completion; the tokens that spelled one stay in it.
        stop_token_ids: Ids that end a completion beside the model's own end tokens.
        extra: Further parameters of the engine, (name, value); an engine that does not know one refuses it.
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
    """How an episode of several turns went. Every value is JSON's.

    Attributes:
        stop_reason: Why it ended; see :data:`rlox_grpo.environments.outcome.STOP_REASONS`.
        reward: The environment's, or None: unscored.
        turn_rewards: One for each turn, where the environment gave them.
        metrics: The environment's own numbers.
        messages: The whole conversation; of an episode with branches, the one that ``chat.turn`` goes on with.
        prompt_messages: How many of them make up the first prompt.
        tool_calls, tool_errors, observations_cut: Counts.
        tool_seconds: Time that the tools took.
        error: What went wrong, where something did.
        branch_messages: The other conversations, in the order of ``Completion.branches``; one that the chat template
            rewrote when it went on is left out, because ``messages`` or a later one holds it.
        cancelled_calls: Calls whose caller went away before the reply was complete; nothing of them is trained.
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
    """One completion: what the policy sampled after a prompt, in one turn or in several.

    An episode of several turns is one completion. Its tokens are the policy's turns and, between them, observations:
    tokens that the environment or the chat template wrote. Only sampled tokens are trained on and counted as length.
    :mod:`rlox_grpo.groups` reads the last two fields.

    Attributes:
        token_ids: ``int64 [T]``, as sampled, the end tokens and the observations included.
        log_probs: ``float32 [T]``, of each token under the distribution that it was really drawn from; 0.0 where it was
            not sampled.
        finish_reason: ``"stop"`` (end token or stop string) or ``"length"`` (truncated), of the last turn.
        text: Decoded without special tokens, or None when there is no tokenizer.
        sampled: ``bool [T]``, True on tokens that the policy sampled; None: all of them.
        turns: The offset in ``token_ids`` where each turn's sampled tokens begin, ascending; (): one turn, from 0.
        episode: How the episode went, where an environment ran it.
        branches: The other rows of the episode, where its history was rewritten or it had several conversations. They
            share its reward and advantage. What an earlier row sampled is not ``sampled`` in a later one, and
            ``turns`` are a row's own, so every sampled token is trained once. A branch has no episode and no branches.
        prompt_ids: ``int64 [P]``, where the row does not begin with its group's prompt; None: it does.
        versions: The policy version that sampled each of ``turns``, with partial rollouts; (): that of the group.
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
        prompt, completions: See above.
        policy_version: The version of the policy that sampled them; with partial rollouts that of the oldest turn.
        prefilled_tokens: Tokens run through the model to prepare the replies of its episodes: those of the engine's
            call, shared out evenly over its groups, so that groups add up.
    """

    prompt: Prompt
    completions: tuple[Completion, ...]
    policy_version: int = 0
    prefilled_tokens: float = 0.0


@dataclass(frozen=True, eq=False)
class ScoredGroup:
    """A group with its rewards.

    Attributes:
        group: The prompt and its G completions.
        rewards: ``float32 [G]``, weighted total; NaN where no function applied.
        components: Each function's own scores by name, ``float32 [G]``, NaN where it did not apply.
        statuses: How each rule's scores came about, ``uint8 [G]``, indices of ``rewards.STATUSES``; rules only.
        outcomes: How each other function's calls ended, ``uint8 [G]``, indices of ``rewards.OUTCOMES``.
        seconds: Each function's time, its batch's shared out evenly over the completions, so that groups add up.
        measures: What functions measured beside their scores, ``float32 [G]`` by ``function/name``, NaN where nothing.
        turn_rewards: For each completion the reward that each of its turns was paid, ``float32 [turns]``, in the unit
            of ``rewards``; None: no turn was paid on its own. They are a part of ``rewards``, not an addition to it:
            the rest, ``rewards[i] - turn_rewards[i].sum()``, is paid at the last turn.
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
    """What the distributions of M tokens are made of.

    Attributes:
        hidden: ``[M, H]`` final hidden states, or ``[M, V]`` logits where there is no head.
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
        completion_mask: ``bool [N, T]``, True on the tokens after the prompt, end tokens and observations included;
            from lengths, never ids. It is for attention and positions; everything that counts tokens or averages over
            them uses ``loss_mask``.
        loss_mask: ``bool [N, T]``, the tokens trained on: a subset of the sampled tokens, never an observation.
        advantages: ``float32 [N]``, or ``[N, T]`` where each turn has its own; then 0 outside ``loss_mask``.
        row_index: ``int64 [N]``, each row's place among the completions of the optimizer step; the branches of an
            episode have that of their completion.
        prompt_index: ``int64 [N]``, ascending; rows with the same value share their prompt.
        num_loss_tokens: Denominator: loss tokens of the whole optimizer step, over micro-batches and ranks.
        num_sequences: Denominator: sequences of the whole optimizer step that hold a loss token, likewise.
        old_log_probs, ref_log_probs, sampling_log_probs: ``float32 [N, T]`` where they are known.
        policy_mask: ``bool [N, T]``, the loss tokens whose policy term counts; None: all of them. It enters no
            denominator.
        covariance_mask: ``bool [N, T]``, the loss tokens that ``policy_loss`` ``clip_cov`` or ``kl_cov`` selects; see
            :mod:`rlox_grpo.loss.covariance`.
        importance_weights: ``float32 [N, T]``, factors of the policy term; see :mod:`rlox_grpo.loss.importance`.
        ref_distributions: the reference's, of the tokens under ``loss_mask`` in row order, for ``kl_estimator="full"``.
        branch_index: ``int64 [N]``, 0 for a completion itself and b for its ``branches[b - 1]``; None: no branches.
        sequence_lengths: ``int64 [N]``, loss tokens of the completion with its branches, which are one sequence; None:
            each row is a sequence.
        is_unscaled: Whether log-probs are those at temperature 1 over every id of the output layer, whatever the
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
        metrics: Sums under ``loss_mask`` divided by the step's global denominators, so that they too add up
            over micro-batches; detached scalars.
    """

    loss: Tensor
    metrics: Mapping[str, Tensor]


@dataclass(frozen=True)
class UpdateStats:
    """What one optimizer step did: gradient norm before clipping, learning rate used, metrics of its loss."""

    grad_norm: float
    learning_rate: float
    metrics: Mapping[str, float]
