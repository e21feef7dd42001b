"""Data types that the stages of a step pass to each other: frozen dataclasses, documented with their shapes."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from torch import Tensor

BoolArray = NDArray[np.bool_]
UInt8Array = NDArray[np.uint8]
Int16Array = NDArray[np.int16]
Int32Array = NDArray[np.int32]
Int64Array = NDArray[np.int64]
Float32Array = NDArray[np.float32]
FinishReason = Literal["stop", "length"]
Origin = Literal["demonstration", "replay"]
ORIGINS: tuple[Origin | None, ...] = (None, "demonstration", "replay")
"""Where a completion comes from; the number of a row's origin is its position here."""
Array = TypeVar("Array")

FAILURES = ("timeout", "tool_error", "environment_error")
"""Stop reasons of episodes caused by the environment; the option ``failure_reward`` is their reward."""


@dataclass(frozen=True, eq=False)
class Picture:
    """A distinct picture of prompts, processed alone.

    Attributes:
        digest: hexadecimal digest of its size and pixels; equal pictures have equal digests.
        token_ids: ``int64 [n]``, the ids that stand for it in a prompt, with marks around it.
        num_features: the number of these ids at which the model reads a feature of the picture.
        read: returns the tensors that the processor made, by name.
        read_image: returns the picture itself as the processor reads it, a ``PIL.Image`` in RGB.
    """

    digest: str
    token_ids: Int64Array
    num_features: int
    read: Callable[[], Mapping[str, Tensor]]
    read_image: Callable[[], Any]

    def __deepcopy__(self, memo: object) -> Picture:
        """Return the record itself: it does not change, and its tensors are shared."""
        return self

    def find_in(self, token_ids: Int64Array, start: int) -> int | None:
        """Return the first index of ``token_ids``, at ``start`` or later, where its ids begin; None without any."""
        row, wanted = (np.ascontiguousarray(ids, np.int64).tobytes() for ids in (token_ids, self.token_ids))
        offset = row.find(wanted, 8 * start)
        while offset >= 0 and offset % 8:  # bytes of two neighbouring ids
            offset = row.find(wanted, offset + 1)
        return None if offset < 0 else offset // 8


@dataclass(frozen=True, eq=False)
class Prompt:
    """One prompt, tokenised.

    Attributes:
        token_ids: ``int64 [prompt_len]``, at least one token.
        index: Position in the user's list of prompts; the same in all epochs and after a resume. In a mixture of
            sources a number of its own for each row.
        text: The tokenised text, after the chat template, or None if the prompt was given as token ids.
        source: The user's prompt, as passed to reward functions: text, chat messages or token ids.
        columns: The other columns of the user's row, which are passed to reward functions by name.
        data_source: The name of the prompt's source in a mixture; otherwise None.
        row: Position in its source, in a mixture.
        pictures: The pictures of the prompt, in the order of their places in ``token_ids``.
        demonstration: ``int64 [T]``, a reply that the policy did not write, with its end token, for ``demo_loss``.
            None: the row has none.
    """

    token_ids: Int64Array
    index: int
    text: str | None = None
    source: str | list[dict[str, Any]] | None = None
    columns: Mapping[str, Any] = field(default_factory=dict)
    data_source: str | None = None
    row: int | None = None
    pictures: tuple[Picture, ...] = ()
    demonstration: Int64Array | None = None

    @property
    def name(self) -> str:
        """The name of the prompt in messages: ``prompts[3]``, in a mixture ``prompts['math'][3]``."""
        return f"prompts[{self.index}]" if self.data_source is None else f"prompts[{self.data_source!r}][{self.row}]"


@dataclass(frozen=True)
class Sampling:
    """Sampling parameters. The filters are applied in the order top-k, top-p, min-p.

    Attributes:
        max_new_tokens: Maximum length of a completion, with its end token.
        temperature: Divisor of the logits, applied before the filters. 0: greedy decoding.
        top_p, top_k, min_p: Filters; 1.0, 0 and 0.0 turn them off.
        stop: Strings that end a completion. The tokens of such a string remain in the completion.
        stop_token_ids: Token ids that end a completion, in addition to the end tokens of the model.
        extra: Further parameters of the engine, (name, value). An engine raises an error for unknown parameters.
        return_sampling_mask: Whether completions have a :class:`SamplingMask`. Only an engine that
            ``returns_sampling_mask`` is asked for masks.
        return_experts: Whether completions have ``experts``. Only an engine that ``returns_experts`` is asked for them.
    """

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    extra: tuple[tuple[str, Any], ...] = ()
    return_sampling_mask: bool = field(default=False, repr=False)
    return_experts: bool = field(default=False, repr=False)

    @property
    def is_truncated(self) -> bool:
        """Whether a filter excludes ids. Greedy decoding has no distribution to truncate."""
        return self.temperature > 0 and (self.top_p < 1 or self.top_k > 0 or self.min_p > 0)


@dataclass(frozen=True, eq=False)
class SamplingMask(Generic[Array]):
    """The ids from which each token was drawn, where ``top_p``, ``top_k`` or ``min_p`` excluded others.

    The log-prob of a token is normalised over its ids, by the engine and by the trainer (DeepSeek-V3.2,
    arXiv:2512.02556, section 3.1). Arrays of a completion are NumPy's; those of a batch are tensors.

    Attributes:
        sizes: The number of ids of each token: ``int32 [T]`` of a completion, ``int64 [N, T]`` of a batch. 0: all ids,
            as for a token that was not sampled.
        token_ids: ``int32 [sum of sizes]``, the ids of token after token, ascending for each token.
    """

    sizes: Array
    token_ids: Array


@dataclass(frozen=True, eq=False)
class Episode:
    """The result of an episode of several turns. All values are JSON values.

    Attributes:
        stop_reason: Why the episode ended; see :data:`rlox_grpo.environments.outcome.STOP_REASONS`.
        reward: The reward of the environment. None: unscored; an episode that failed has then no score at all.
        turn_rewards: One reward for each turn, if the environment returned them.
        metrics: Metrics of the environment.
        messages: The whole conversation; with branches, the conversation that ``chat.turn`` continues. With
            compactions, the messages before each, the request for a summary, the summary, and what followed.
        prompt_messages: Number of messages of the first prompt.
        tool_calls, tool_errors, observations_cut: Numbers of tool calls, of failed calls and of truncated observations.
        tool_seconds: Time of the tool calls.
        error: Error message, if there was an error.
        branch_messages: The conversations other than ``messages``, in the order of ``Completion.branches``. A
            conversation that the chat template rewrote later is left out, because ``messages`` or a later branch
            contains it.
        cancelled_calls: Number of calls that the client cancelled before the reply was complete. Cancelled calls are
            not trained on.
        parse_errors: Number of replies with a tool call that cannot be parsed.
        compactions: For each compaction, the tokens of the conversation before and after it, and of the summary.
        environment: Name of the environment.
        tools: JSON schemas of the tools that the first prompt lists.
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
    parse_errors: int = 0
    compactions: tuple[tuple[int, int, int], ...] = ()
    environment: str = ""
    tools: tuple[Mapping[str, Any], ...] = ()


@dataclass(frozen=True, eq=False)
class Completion:
    """One completion of a prompt, in one or several turns.

    An episode of several turns is one completion. The tokens of an episode are the turns of the policy and the
    observations between them, which the environment or the chat template wrote. Only sampled tokens are trained on and
    counted as length.

    Attributes:
        token_ids: ``int64 [T]``, as sampled, with end tokens and observations.
        log_probs: ``float32 [T]``, of each token under the distribution from which it was drawn; 0.0 for observations.
        finish_reason: ``"stop"`` (end token or stop string) or ``"length"`` (truncated), of the last turn.
        text: The text, decoded without special tokens; None without a tokenizer.
        sampled: ``bool [T]``, True on tokens that the policy sampled; None: all of them.
        turns: The offset in ``token_ids`` where each turn's sampled tokens begin, ascending; (): one turn, from 0.
        episode: The result of the episode, if an environment ran it.
        branches: Further rows of the episode, if its history was rewritten or it had several conversations. These rows
            have the reward and the advantage of the completion. A token is marked as ``sampled`` only in the first row
            that contains it, and ``turns`` are those of the row, so every sampled token is trained on once. A branch
            has no episode and no branches.
        prompt_ids: ``int64 [P]``, the prompt of the row; None: the prompt of its group.
        versions: The policy version that sampled each of ``turns``, with partial rollouts; (): the group's version.
        sampling_mask: The ids from which each of the T tokens was drawn; None: all of them could be drawn, or the
            engine does not say.
        experts: ``int16 [P + T, layers, k]``, in a mixture of experts the experts to which the engine routed each token
            of the prompt and the completion; −1 for a token that it did not run, such as the last. None: the engine
            does not say.
        pictures: The pictures of the row, in order, of its prompt and then of its ``token_ids``. None: those of its
            group's prompt.
        origin: The source of a completion that was not sampled in this step: ``"demonstration"``, or ``"replay"`` of an
            earlier step. None: the completion was sampled in this step.
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
    sampling_mask: SamplingMask[Int32Array] | None = None
    experts: Int16Array | None = None
    origin: Origin | None = None
    pictures: tuple[Picture, ...] | None = None


@dataclass(frozen=True, eq=False)
class RolloutGroup:
    """The completions sampled for one prompt.

    Attributes:
        prompt, completions: The prompt and its completions.
        policy_version: The version of the policy that sampled them; with partial rollouts, the oldest turn's version.
        prefilled_tokens: Number of tokens that were prefilled for the replies of episodes. The number of an engine's
            call is divided evenly among the groups, so that the groups can be summed.
    """

    prompt: Prompt
    completions: tuple[Completion, ...]
    policy_version: int = 0
    prefilled_tokens: float = 0.0


@dataclass(frozen=True)
class StepScores:
    """The scores of a completion's steps, which a reward function returns in place of one number.

    The completion's reward is the mean of ``scores``. Each token gets an advantage of its own: all step scores of a
    group are normalised together, and the advantage of a token is the sum of the normalised scores of the steps that
    end at it or later (DeepSeekMath, arXiv:2402.03300, section 4.1.3).

    Attributes:
        ends: where each step ends, ascending: the offset after its last character in the text of the completion; for
            completions of token ids, the offset after its last token.
        scores: one finite number for each step.
    """

    ends: Sequence[int]
    scores: Sequence[float]

    def __post_init__(self) -> None:
        ends, scores = list(self.ends), [float(score) for score in self.scores]
        if not ends or len(ends) != len(scores):
            raise ValueError(
                f"StepScores has {len(ends)} ends and {len(scores)} scores: expected one of each for each step"
            )
        if any(int(end) != end for end in ends) or ends != sorted(ends):
            raise ValueError(f"StepScores.ends is {ends}: expected ascending whole numbers")
        if not all(map(math.isfinite, scores)):
            raise ValueError(f"StepScores.scores is {scores}: expected finite numbers")
        object.__setattr__(self, "ends", tuple(map(int, ends)))
        object.__setattr__(self, "scores", tuple(scores))

    @property
    def mean(self) -> float:
        """The reward of the completion."""
        return math.fsum(self.scores) / len(self.scores)


@dataclass(frozen=True, eq=False)
class ScoredGroup:
    """A group with its rewards.

    Attributes:
        group: The prompt and its G completions.
        rewards: ``float32 [G]``, the weighted total; NaN if no function applies, or if the sample failed.
        components: The scores of each function by name, ``float32 [G]``, NaN where it does not apply. A sample that
            failed has NaN for every function.
        statuses: The statuses of each rule, ``uint8 [G]``, indices of ``rewards.STATUSES``.
        outcomes: The outcomes of each other function, ``uint8 [G]``, indices of ``rewards.OUTCOMES``.
        seconds: The time of each function. The time of a batch is divided evenly among its completions, so that the
            groups can be summed.
        measures: Measures of functions, ``float32 [G]`` by ``function/name``, NaN without a value.
        turn_rewards: The reward of each turn of each completion, ``float32 [turns]``, in the unit of ``rewards``; None:
            there are no turn rewards. Turn rewards are part of ``rewards``: the rest,
            ``rewards[i] - turn_rewards[i].sum()``, belongs to the last turn.
        step_scores: The steps of each completion by function, for functions that return :class:`StepScores`; None where
            a function does not apply. The ends are offsets of tokens.
        feedback: What each rule says about each completion, for those that say something; None where it says nothing.
        judged_by: The name of the function that says whether a completion is right, the first of its source in a
            mixture; None: the first of ``components``.
    """

    group: RolloutGroup
    rewards: Float32Array
    components: Mapping[str, Float32Array]
    statuses: Mapping[str, NDArray[np.uint8]] = field(default_factory=dict)
    outcomes: Mapping[str, NDArray[np.uint8]] = field(default_factory=dict)
    seconds: Mapping[str, float] = field(default_factory=dict)
    measures: Mapping[str, Float32Array] = field(default_factory=dict)
    turn_rewards: tuple[Float32Array, ...] | None = None
    step_scores: Mapping[str, tuple[StepScores | None, ...]] = field(default_factory=dict)
    feedback: Mapping[str, tuple[str | None, ...]] = field(default_factory=dict)
    judged_by: str | None = None

    @property
    def first_rewards(self) -> Float32Array:
        """The rewards that say whether each completion is right, ``float32 [G]``; NaN where there is none."""
        return next(iter(self.components.values())) if self.judged_by is None else self.components[self.judged_by]


@dataclass(frozen=True, eq=False)
class OutputHead:
    """The last layer of a language model: logits = cap(scale · (hidden @ weightᵀ + bias)).

    Attributes:
        weight: ``[V, H]``, tied to the embedding or not.
        bias: ``[V]`` or None.
        scale: multiplies the logits (Cohere's ``logit_scale``, the inverse of Granite's ``logits_scaling``).
        softcap: logits become softcap · tanh(logits / softcap) (Gemma 2's ``final_logit_softcapping``).
        in_float32: whether the product of operands of 16 bits is kept in float32, instead of being rounded to 16 bits.
    """

    weight: Tensor
    bias: Tensor | None = None
    scale: float = 1.0
    softcap: float | None = None
    in_float32: bool = False


@dataclass(frozen=True, eq=False)
class TokenDistributions:
    """The distributions of M tokens, before the output layer.

    Attributes:
        hidden: ``[M, H]`` final hidden states, or ``[M, V]`` logits if there is no head.
        head: the output layer, or None.
    """

    hidden: Tensor
    head: OutputHead | None


@dataclass(frozen=True)
class StepTotals:
    """Denominators of the whole optimizer step, over micro-batches and ranks.

    Attributes:
        num_loss_tokens: number of tokens under the loss masks.
        num_sequences: number of sequences with such a token. An episode with its branches is one sequence.
        num_demonstration_tokens: number of tokens of demonstrations, which are under no loss mask.
        num_replays: number of rows that an earlier step sampled.
    """

    num_loss_tokens: float
    num_sequences: float
    num_demonstration_tokens: float = 0.0
    num_replays: float = 0.0


@dataclass(frozen=True, eq=False)
class TokenLogProbs:
    """Log-probs of the completion tokens that stay fixed during the updates, ``float32 [N, T]``.

    Attributes:
        sampling: log-probs that the engine reported; None if they are unknown.
        old: log-probs of the policy that sampled, computed by the trainer; None if that is the policy in training.
        ref: log-probs of the reference; None without a reference, and for ``kl_estimator="full"``.
        teacher: log-probs of the teacher; None without a teacher, and for ``teacher_kl="full"``. −inf where the teacher
            excludes a token.
        ref_distributions: the reference's distributions of the loss tokens in row order, for ``kl_estimator="full"``;
            with ``teacher_kl="full"`` they are the teacher's.
        is_teacher_top: ``bool [N, T]``, whether the token is the teacher's most likely; None if that is unknown.
        mask: the ids from which each token was drawn, over which all these log-probs and those of the policy are
            normalised; None: all ids.
        origins: ``int8 [N]``, positions in :data:`ORIGINS`, which say whose log-probs ``sampling`` are: for a
            replay, those of an earlier policy; a demonstration has none. None: this step sampled all rows.
    """

    sampling: Tensor | None = None
    old: Tensor | None = None
    ref: Tensor | None = None
    teacher: Tensor | None = None
    ref_distributions: TokenDistributions | None = None
    is_teacher_top: Tensor | None = None
    mask: SamplingMask[Tensor] | None = None
    origins: Tensor | None = None


@dataclass(frozen=True, eq=False)
class Routing:
    """What is known of the experts of a micro-batch's tokens before its update, in a mixture of experts.

    Attributes:
        choices: ``int16 [N, L, layers, k]``, the experts that the update uses for each token of ``Batch.input_ids``; −1
            where the router chooses. None: the router chooses everywhere.
        counts: ``float64 [layers, E]``, the loss tokens of the micro-batch that the old policy routes to each expert.
        load: ``float64 [layers, E]``, the share of the loss tokens that are routed to each expert, over all
            micro-batches and ranks of the optimizer step; each layer adds up to k.
    """

    choices: Tensor | None = None
    counts: Tensor | None = None
    load: Tensor | None = None


@dataclass(frozen=True, eq=False)
class PolicyWeights:
    """Masks and factors of the policy term of single tokens. Masks and factors do not change any denominator.

    Attributes:
        mask: ``bool [N, T]``, the loss tokens whose policy term counts; None: all of them.
        importance: ``float32 [N, T]``, factors of the policy term; see :mod:`rlox_grpo.loss.importance`.
        measured: this micro-batch's part of what the policy loss measured over the whole optimizer step; see
            :class:`rlox_grpo.loss.inputs.PolicyLoss`.
        routing: the experts of the tokens, in a mixture of experts.
    """

    mask: Tensor | None = None
    importance: Tensor | None = None
    measured: Any = None
    routing: Routing = Routing()


@dataclass(frozen=True, eq=False)
class EnvironmentTokens:
    """The tokens that ``environment_loss_coef`` trains on.

    Attributes:
        mask: ``bool [N, T]``, the tokens that the environment or the chat template wrote after a reply of the row. The
            mask does not overlap ``Batch.loss_mask``.
        lengths: ``int64 [N]``, tokens under ``mask`` of the completion with its branches; None: each row is a sequence,
            and its tokens are counted in ``mask``.
    """

    mask: Tensor
    lengths: Tensor | None = None


@dataclass(frozen=True, eq=False)
class Branches:
    """The rows of episodes with branches.

    Attributes:
        index: ``int64 [N]``, 0 for a completion itself and b for its ``branches[b - 1]``.
        sequence_lengths: ``int64 [N]``, loss tokens of the completion with its branches, which are one sequence.
    """

    index: Tensor
    sequence_lengths: Tensor


@dataclass(frozen=True, eq=False)
class Batch:
    """Rows of one micro-batch: prompt then completion, padded on the right.

    N rows; L is the longest row, T the longest completion.

    Attributes:
        input_ids: ``int64 [N, L]``.
        prompt_lengths: ``int64 [N]``; completion token t of row i is ``input_ids[i, prompt_lengths[i] + t]``.
        completion_ids: ``int64 [N, T]``.
        completion_mask: ``bool [N, T]``, True on the tokens after the prompt, including end tokens and observations.
            The mask is computed from lengths, never from token ids. The mask is for attention and positions; everything
            that counts tokens or averages over them uses ``loss_mask``.
        loss_mask: ``bool [N, T]``, the tokens trained on: a subset of the sampled tokens, never an observation.
        advantages: ``float32 [N]``, or ``[N, T]`` if each turn has its own; then 0 outside ``loss_mask``.
        row_index: ``int64 [N]``, each row's place among the completions of the optimizer step; the branches of an
            episode have that of their completion.
        prompt_index: ``int64 [N]``, ascending; rows with the same value share their prompt.
        totals: the denominators of the whole optimizer step.
        log_probs: what is known of the tokens' log-probs before the updates.
        policy: masks and weights of the policy term.
        environment: the tokens of ``environment_loss_coef``; None: no such tokens are trained on.
        branches: which rows belong to the same episode; None: no completion has branches, and each row is a sequence.
        pictures: the pictures of each row, in order, of its prompt and then of its completion; (): no row has pictures.
    """

    input_ids: Tensor
    prompt_lengths: Tensor
    completion_ids: Tensor
    completion_mask: Tensor
    loss_mask: Tensor
    advantages: Tensor
    row_index: Tensor
    prompt_index: Tensor
    totals: StepTotals
    log_probs: TokenLogProbs = TokenLogProbs()
    policy: PolicyWeights = PolicyWeights()
    environment: EnvironmentTokens | None = None
    branches: Branches | None = None
    pictures: tuple[tuple[Picture, ...], ...] = ()

    @property
    def has_loss(self) -> bool:
        """Whether the optimizer step of the micro-batch, over all ranks, has a token that is trained on."""
        return self.totals.num_loss_tokens > 0 or self.totals.num_demonstration_tokens > 0

    @property
    def demonstration_mask(self) -> Tensor | None:
        """``bool [N, T]``, the tokens of ``demo_loss``, none of them under ``loss_mask``; None: the step has none."""
        if self.totals.num_demonstration_tokens == 0:
            return None
        return self.completion_mask & self._flag_rows("demonstration")[:, None]

    @property
    def replayed(self) -> Tensor | None:
        """``bool [N]``, the rows that an earlier step sampled; None: the step has no such row."""
        return self._flag_rows("replay") if self.totals.num_replays > 0 else None

    def _flag_rows(self, origin: Origin) -> Tensor:
        origins = self.log_probs.origins
        return (
            self.row_index.new_zeros(len(self.row_index)).bool()
            if origins is None
            else origins == ORIGINS.index(origin)
        )

    @property
    def attention_mask(self) -> Tensor:
        """``bool [N, L]``, True on real tokens. Padding is on the right, so positions are columns."""
        lengths = self.prompt_lengths + self.completion_mask.sum(dim=1)
        columns = self.input_ids.new_ones(self.input_ids.shape[1]).cumsum(dim=0) - 1
        return columns < lengths[:, None]

    @property
    def sampling_mask(self) -> SamplingMask[Tensor] | None:
        """The ids from which each token was drawn; None: all ids."""
        return self.log_probs.mask

    @property
    def predicted_mask(self) -> Tensor:
        """``bool [N, T]``, the tokens whose log-probs the loss reads, with those of environment and demonstrations."""
        mask = self.loss_mask if self.environment is None else self.loss_mask | self.environment.mask
        demonstrated = self.demonstration_mask
        return mask if demonstrated is None else mask | demonstrated


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
    """Statistics of one optimizer step: gradient norm before clipping, learning rate, metrics of the loss."""

    grad_norm: float
    learning_rate: float
    metrics: Mapping[str, float]
