"""Options of the loss: policy term, KL penalty, importance weights and reference policy."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

from rlox_grpo.config.records.option import IMPORT_PATH, LONGEST_TIMEOUT, SET, Condition, Door, Record, option
from rlox_grpo.config.records.sampling import INEXACT_ENGINES

POLICY_LOSSES = tuple(sorted(path.stem for path in (Path(__file__).parents[2] / "loss" / "policies").glob("[a-z]*.py")))
"""The built-in policy losses: a module each in ``rlox_grpo/loss/policies``, which this list does not import."""

DEMO_LOSSES = tuple(
    sorted(path.stem for path in (Path(__file__).parents[2] / "loss" / "demonstrations").glob("[a-z]*.py"))
)
"""The built-in losses of demonstrations: a module each in ``rlox_grpo/loss/demonstrations``."""

SEQUENCE_RATIO_LOSSES = ("gspo", "gmpo")
"""Policy losses with one ratio for a sequence, which would spread the advantage of a token over all tokens."""

ZERO_WITHOUT_ADVANTAGE = tuple(name for name in POLICY_LOSSES if name not in ("dro", "kl_cov", "p3o"))
"""Built-in policy losses that are 0 where the advantage is 0; the others have a penalty of their own."""

LossAggregation = Literal["sequence_mean", "token_mean", "fixed_length", "sequence_sum", "sequence_mean_shifted"]
KLEstimator = Literal["k1", "k2", "k3", "abs", "k1+", "k3+", "abs+", "k1_inverted", "k3_clamped", "full"]
KLSchedule = Literal["constant", "linear", "cosine", "cosine_inverted", "adaptive"]

_CLIPS_LOW = {
    "policy_loss": ("clip", "gspo", "gspo_token", "gspo_turn", "cispo_clip", "gmpo", "dppo", "clip_cov", IMPORT_PATH)
}
_CLIPS_HIGH = {"policy_loss": (*_CLIPS_LOW["policy_loss"], "cispo_upper", "cispo_cap")}
# The KL is also measured, as a metric, with a reference and kl_coef=0.
_MEASURES_KL: tuple[Condition, ...] = (
    {"kl_coef": SET},
    {"reference": ("frozen", "periodic", "adapter_off", "server")},
    {"reference": ("auto",), "ref_model": SET},
)
_KEEPS_A_COPY: tuple[Condition, ...] = (
    {"reference": ("frozen", "periodic")},
    {"reference": ("auto",), "kl_coef": SET},
    {"reference": ("auto",), "ref_model": SET},
)
_CORRECTS: tuple[Condition, ...] = (
    {"importance_correction": ("token", "sequence", "sequence_mean")},
    {"importance_correction": ("auto",), "engine": INEXACT_ENGINES, "bypass_old_log_probs": (False,)},
    {"importance_correction": ("auto",), "dtype": ("bfloat16",), "bypass_old_log_probs": (False,)},
    {"importance_correction": ("auto",), "async_steps": SET, "bypass_old_log_probs": (False,)},
    {"importance_correction": ("auto",), "partial_rollout_turns": SET, "bypass_old_log_probs": (False,)},
)
_PERIODIC = {"reference": ("periodic",)}
_HAS_TEACHER = {"teacher": SET}
_server_option = partial(option, only_with={"reference": ("server",)}, resumable=True)


class LossConfig(Record, title="Loss"):
    """The objective: policy term, aggregation, KL penalty and entropy."""

    policy_loss: Annotated[Any, Door(POLICY_LOSSES, "a policy loss")] = option(
        "clip",
        "Policy term of a token; docs/concepts/algorithm.md has the formulas. Your own: a function of LossInputs, or "
        "its module:name; docs/guides/own_parts.md shows how to write one.",
        source="DeepSeekMath, arXiv:2402.03300, eq. 3",
    )
    clip_low: float = option(
        0.2,
        "Lower clipping range ε: the ratio is clipped at 1 − clip_low.",
        ge=0,
        le=1,
        only_with=_CLIPS_LOW,
        source="PPO, arXiv:1707.06347, section 6.1",
    )
    clip_high: float = option(
        0.2,
        "Upper clipping range ε: the ratio is clipped at 1 + clip_high.",
        ge=0,
        only_with=_CLIPS_HIGH,
        source="PPO, arXiv:1707.06347, section 6.1",
    )
    dual_clip: float | None = option(
        None,
        "Dual clip c: the loss of a token with A < 0 is at most −c·A.",
        gt=1,
        only_with={"policy_loss": ("clip", IMPORT_PATH)},
        source="arXiv:1912.09729",
    )
    delta: float | None = option(
        None,
        "Upper bound of the ratio in the unclipped branch, as in TRL; with dppo, upper bound of the importance weight.",
        gt=0,
        only_with={"policy_loss": ("clip", "gspo", "gspo_token", "gspo_turn", "dppo", IMPORT_PATH)},
        source="INTELLECT-2, arXiv:2505.07291",
    )
    sapo_temperatures: tuple[float, float] = option(
        (1.0, 1.05),
        "sapo: τ for A > 0, and τ for the other tokens.",
        only_with={"policy_loss": ("sapo", IMPORT_PATH)},
        source="SAPO, arXiv:2511.20347",
    )
    vespo_shape: tuple[float, float, float, float] = option(
        (2.0, 3.0, 3.0, 2.0),
        "vespo: k and λ for A ≥ 0, k and λ for A < 0.",
        only_with={"policy_loss": ("vespo", IMPORT_PATH)},
        source="VESPO, arXiv:2602.10693",
    )
    dro_beta: float | None = option(
        None,
        "dro: weight β of half the squared log-ratio; there is no published default.",
        gt=0,
        only_with={"policy_loss": ("dro", IMPORT_PATH)},
        source="DRO, arXiv:2405.19107; verl",
    )
    covariance_share: float = option(
        2e-4,
        "clip_cov, kl_cov: share of the loss tokens of an optimizer step to select, at least one token.",
        gt=0,
        le=1,
        only_with={"policy_loss": ("clip_cov", "kl_cov", IMPORT_PATH)},
        source="arXiv:2505.22617; verl",
    )
    covariance_bounds: tuple[float, float] = option(
        (1.0, 5.0),
        "clip_cov: tokens are drawn from those whose covariance lies between these bounds.",
        only_with={"policy_loss": ("clip_cov", IMPORT_PATH)},
        source="arXiv:2505.22617; verl",
    )
    covariance_kl_coef: float = option(
        1.0,
        "kl_cov: weight of |log r| at the selected tokens.",
        ge=0,
        only_with={"policy_loss": ("kl_cov", IMPORT_PATH)},
        source="arXiv:2505.22617",
    )
    loss_aggregation: LossAggregation = option(
        "sequence_mean",
        "Reduction of token losses to one number; docs/concepts/algorithm.md has the formulas.",
        source="DeepSeekMath, arXiv:2402.03300, eq. 3",
        hint="GRPO's is 'sequence_mean', DAPO's 'token_mean', Dr. GRPO's 'fixed_length'",
    )
    entropy_coef: float = option(0.0, "Weight of the entropy bonus, per token; a negative weight is a penalty.")
    environment_loss_coef: float = option(
        0.0,
        "Weight λ of the cross-entropy of the environment's tokens, which trains the policy to predict the "
        "observations that follow its replies. The authors use 0.05.",
        ge=0,
        only_with=({"environment": SET}, {"tools": SET}),
        source="ECHO, arXiv:2605.24517, eq. 1 and 3",
    )
    demo_loss: Annotated[Any, Door(DEMO_LOSSES, "a loss of demonstrations", allows_none=True)] = option(
        None,
        "Train on the column demonstration, a reply to the prompt that the policy did not write: its loss of a token. "
        "ce: −log π, as in supervised fine-tuning; luffy: −A·π/(π + demo_gamma), A its advantage in its group. Your "
        "own: a function of DemonstrationInputs, or its module:name; docs/guides/demonstrations.md.",
        source="ce: CHORD, arXiv:2508.11408; luffy: LUFFY, arXiv:2504.14945",
    )
    demo_coef: float = option(
        1.0,
        "Weight of the loss of demonstrations, which is a mean over their tokens in the optimizer step.",
        gt=0,
        only_with={"demo_loss": SET},
    )
    demo_gamma: float = option(
        0.1,
        "luffy: γ of the shaping π/(π + γ). The smaller it is, the more the gradient is that of rare tokens.",
        gt=0,
        only_with={"demo_loss": ("luffy", IMPORT_PATH)},
        source="LUFFY, arXiv:2504.14945",
    )
    top_entropy_share: float = option(
        1.0,
        "Share of the tokens that have a policy term: the tokens with the highest entropy.",
        gt=0,
        le=1,
        source="arXiv:2506.01939",
    )
    train_end_token: bool = option(True, "Train on the token that ends a completion.")
    mask_truncated: bool = option(False, "Leave truncated completions out of the loss.")
    mask_unhinted: bool = option(
        False,
        "Leave completions for which teacher_prompt returns None out of the loss.",
        only_with={"teacher_prompt": SET},
        source="SDPO, arXiv:2601.20802: self_distillation_mask",
    )
    kl_coef: float = option(0.0, "Weight β of the KL penalty against the reference policy.", ge=0)
    kl_estimator: KLEstimator = option(
        "k3",
        "Estimator of the KL per token, from d = log π_ref − log π, clamped to ±20.",
        only_with=_MEASURES_KL,
        source="DeepSeekMath, arXiv:2402.03300, eq. 4; Schulman, Approximating KL divergence, 2020",
        choices={
            "k1": "−d, derivative 1 with respect to log π: unbiased, may be negative; its gradient has expectation 0 "
            "in the loss.",
            "k2": "d²/2, derivative −d: biased value; the gradient is that of KL(π ‖ π_ref).",
            "k3": "exp(d) − d − 1, derivative 1 − exp(d): unbiased, never negative.",
            "abs": "|d|, derivative ±1, as in verl.",
            "k1+": "k1 with the gradient of k2, as in verl.",
            "k3+": "k3 with the gradient of k2, as in verl.",
            "abs+": "abs with the gradient of k2, as in verl.",
            "k1_inverted": "d, derivative −1: the wrong sign, for the preset r1_blog with published=True.",
            "k3_clamped": "min(k3, 10), derivative 0 above the limit: verl's low_var_kl, for the preset verl with "
            "published=True.",
            "full": "Σ p (log p − log q) over the whole vocabulary: exact.",
        },
    )
    kl_in: Literal["loss", "reward"] = option(
        "loss",
        "loss: the penalty is a term of the loss; reward: the penalty is subtracted from the reward.",
        only_with={"kl_coef": SET},
    )
    kl_bias_correction: bool = option(
        False,
        "Multiply the KL estimate by the ratio.",
        only_with=_MEASURES_KL,
        source="DeepSeek-V3.2, arXiv:2512.02556, section 3.1",
    )
    kl_schedule: KLSchedule = option(
        "constant", "Schedule of kl_coef over the run; docs/guides/kl.md has the formulas.", only_with={"kl_coef": SET}
    )
    kl_coef_end: float = option(
        0.0,
        "linear, cosine and cosine_inverted: kl_coef at the end of the run.",
        ge=0,
        only_with={"kl_schedule": ("linear", "cosine", "cosine_inverted")},
    )
    kl_target: float | None = option(
        None, "adaptive: target of the KL, in nats per token.", gt=0, only_with={"kl_schedule": ("adaptive",)}
    )
    kl_horizon: float = option(
        10_000.0,
        "adaptive: number of completions over which kl_coef follows the error.",
        gt=0,
        only_with={"kl_schedule": ("adaptive",)},
        source="arXiv:1909.08593, section 2.2",
    )

    teacher_coef: float = option(
        1.0,
        "Weight c of the teacher. With a weight above 1 the policy is trained beyond the teacher.",
        gt=0,
        only_with=_HAS_TEACHER,
        source="Thinking Machines, On-Policy Distillation, 2025; above 1: G-OPD, arXiv:2602.12125",
    )
    teacher_in: Literal["advantage", "loss"] = option(
        "advantage",
        "advantage: c·(log q − log π_old) is added to the advantage of each token, where q is the teacher; loss: "
        "c·KL(π ‖ q) is added to the loss.",
        only_with=_HAS_TEACHER,
        source="Thinking Machines, On-Policy Distillation, 2025; loss: GKD, arXiv:2306.13649",
    )
    teacher_kl: Literal["sampled", "full"] = option(
        "sampled",
        "sampled: from the log-probs of the sampled tokens; full: over the whole vocabulary, for teacher_in='loss'.",
        only_with=_HAS_TEACHER,
        choices={
            "sampled": "d = log q − log π of the sampled token; in the loss (log q − log π)²/2, whose gradient is −d "
            "times that of log π.",
            "full": "Σ π (log π − log q) over the whole vocabulary: the same mean gradient with less variance.",
        },
    )


class ImportanceConfig(Record, title="Train/inference mismatch"):
    """Importance weights that correct for the difference between the sampler's log-probs and the trainer's."""

    importance_correction: Literal["auto", "none", "token", "sequence", "sequence_mean"] = option(
        "auto",
        "Weight of the policy term, the ratio of the trainer's probability to the sampler's: of each token, of the "
        "sequence, or the geometric mean over the sequence. auto: token, or none if the engine's log-probs are exact.",
    )
    importance_mode: Literal["truncate", "mask"] = option(
        "truncate",
        "truncate: clip the ratio to its bounds; mask: set a ratio outside the bounds to zero.",
        only_with=_CORRECTS,
    )
    importance_cap: float = option(2.0, "Upper bound of the ratio.", gt=0, only_with=_CORRECTS)
    importance_floor: float = option(0.0, "Lower bound of the ratio.", ge=0, only_with=_CORRECTS)
    bypass_old_log_probs: bool = option(
        False,
        "Use the sampler's log-probs as those of the old policy. This saves a forward pass and turns off the "
        "importance correction.",
    )


class ReferenceConfig(Record, title="Reference policy and teacher"):
    """The reference policy of the KL penalty, and the teacher."""

    reference: Literal["auto", "none", "frozen", "periodic", "adapter_off", "server"] = option(
        "auto",
        "auto: a frozen copy, or the model without its adapter, if kl_coef is above 0; otherwise none. periodic: a "
        "copy that is refreshed. server: `rlox-grpo serve-reference`.",
    )
    reference_offload: bool = option(
        False, "Keep the reference's copy in host memory between uses.", only_with=_KEEPS_A_COPY, resumable=True
    )
    reference_refresh_steps: int | None = option(
        None, "Steps between refreshes of a periodic reference.", ge=1, only_with=_PERIODIC
    )
    reference_mix: float = option(
        1.0,
        "Share of the policy's weights in a refresh; 1 replaces the reference's weights.",
        gt=0,
        le=1,
        only_with=_PERIODIC,
        source="TR-DPO, arXiv:2404.09656",
    )
    reference_url: str | None = _server_option(None, "URL of the reference server: http(s)://host:port.")
    reference_token_file: str | None = _server_option(
        None, "File with the reference server's token; None: the environment variable RLOX_GRPO_REFERENCE_TOKEN."
    )
    reference_timeout: float = _server_option(
        120.0, "Timeout of a request to the reference server with its retries, in seconds.", gt=0, le=LONGEST_TIMEOUT
    )
    teacher_prompt: Annotated[
        Any, Door((), "a template with {column}, a function", allows_none=True, allows_template=True)
    ] = option(
        None,
        "Prompt that the teacher reads instead of the policy's, with a hint: a template such as '{prompt}\\nA right "
        "answer: {answer}', a function of row, verdict and siblings, or its module:name; see docs/guides/teacher.md.",
        only_with=_HAS_TEACHER,
        source="SDFT, arXiv:2601.19897; SDPO, arXiv:2601.20802",
    )
    teacher_column: str | None = option(
        None,
        "With several teachers, teacher={'math': …, 'code': …}: the column that holds the name of each row's teacher.",
        only_with=_HAS_TEACHER,
    )
    teacher_mix: float = option(
        0.05,
        "Share of the policy's weights that teacher='ema' takes over after each step; the rest stays the teacher's.",
        gt=0,
        le=1,
        only_with=_HAS_TEACHER,
        source="SDPO, arXiv:2601.20802",
    )
    teacher_offload: bool = option(
        False, "Keep the teacher in host memory between uses.", only_with=_HAS_TEACHER, resumable=True
    )
    teacher_token_file: str | None = option(
        None,
        "File with the token of a teacher behind a URL; None: the environment variable RLOX_GRPO_REFERENCE_TOKEN.",
        only_with=_HAS_TEACHER,
        resumable=True,
    )
    teacher_timeout: float = option(
        120.0,
        "Timeout of a request to a teacher behind a URL with its retries, in seconds.",
        gt=0,
        le=LONGEST_TIMEOUT,
        only_with=_HAS_TEACHER,
        resumable=True,
    )
