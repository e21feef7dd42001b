"""Each preset against its source's own formula in plain NumPy, and against a copy of its settings.

Every choice is changed in turn: one that the formula depends on moves the loss or its gradient, any other breaks the
table of settings.
"""

from __future__ import annotations

from math import exp
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from credit import make_advantages
from rlox_grpo.batch.build import drop_tokens
from rlox_grpo.config.presets.page import presets_page
from rlox_grpo.config.schema import GRPOConfig
from rlox_grpo.errors import ConfigError
from rlox_grpo.loss import grpo_loss
from rlox_grpo.loss.kl import kl_coef_at
from rlox_grpo.loss.step_statistics import with_step_statistics
from rlox_grpo.presets import PRESETS
from rlox_grpo.types import Batch, EnvironmentTokens, StepTotals, TokenLogProbs
from rlox_grpo.update.mini_batches import trains_equal_rewards

G, T = 4, 5
REWARDS = np.array([1.0, 0.0, 0.25, 2.0, 0.5, 0.5, 0.5, 0.5, 1.0, 3.0, 0.0, 1.5])  # the second group teaches nothing
LENGTHS = np.array([5, 2, 4, 3, 3, 2, 5, 1, 4, 3, 5, 2])
ENDED = np.array([0, 1, 1, 1, 1, 1, 0, 1, 1, 1, 0, 1], dtype=bool)  # the rows of full width were truncated
STEP, STEPS = 30, 100


def data() -> SimpleNamespace:
    """Log-probs of three policies: tokens move by up to a factor of 12, sequences by ten-thousandths and more."""
    rng = np.random.default_rng(7)
    old = -rng.uniform(0.3, 3.0, (12, T))
    change = rng.normal(0, 0.8, (12, T)).clip(-2.2, 2.5)
    mask = np.arange(T) < LENGTHS[:, None]
    still = (change * mask).sum(1) / LENGTHS
    change[2], change[9] = change[2] - still[2] + 2e-4, change[9] - still[9] - 2e-4  # within GSPO's bounds
    change[3, 0], change[1, 0], change[10, 1] = 2.5, 2.5, 2.5  # past every upper bound, for gains and losses
    ref = old + rng.normal(0, 0.5, (12, T))
    ref[0, 1], ref[9, 2] = old[0, 1] + change[0, 1] + 3, old[9, 2] + change[9, 2] + 2.8  # k3 of 16.1 and 12.6
    sampler = old + rng.normal(0, 0.1, (12, T))
    # Two rows without observations; the observations of the others are where their tokens end.
    observed = ~mask & (LENGTHS[:, None] != 4)
    teacher = old + rng.normal(0, 0.7, (12, T))
    return SimpleNamespace(
        lp=old + change, old=old, sampler=sampler, ref=ref, teacher=teacher, mask=mask, observed=observed, R=REWARDS
    )


# --- the sources' formulas: x holds lp, old, sampler, ref, mask and R; sg is lp where a gradient is stopped ---


def grouped(x: Any) -> Any:
    return x.R.reshape(-1, G)


def z(x: Any, ddof: int, eps: float) -> Any:
    centred = grouped(x) - grouped(x).mean(1, keepdims=True)
    return (centred / (grouped(x).std(1, ddof=ddof, keepdims=True) + eps + 1e-300)).reshape(-1, 1)


def centred(x: Any) -> Any:
    return (grouped(x) - grouped(x).mean(1, keepdims=True)).reshape(-1, 1)


def ratio(x: Any) -> Any:
    return np.exp(x.lp - x.old)


def ppo(x: Any, A: Any, low: float, high: float, c: float = np.inf) -> Any:
    worst = np.maximum(-A * ratio(x), -A * np.clip(ratio(x), 1 - low, 1 + high))
    return np.where(A < 0, np.minimum(worst, -c * A) if np.isfinite(c) else worst, worst)


def k3(x: Any) -> Any:
    return np.exp(x.ref - x.lp) - (x.ref - x.lp) - 1


def token_mean(x: Any, losses: Any) -> float:
    return (losses * x.mask).sum() / x.mask.sum()


def paper_mean(x: Any, losses: Any) -> float:
    return ((losses * x.mask).sum(1) / x.mask.sum(1)).mean()


def without_constant_groups(x: Any) -> Any:
    kept = np.repeat(np.ptp(grouped(x), axis=1) > 0, G)
    return SimpleNamespace(**{name: value[kept] for name, value in vars(x).items()})


def plus(x: Any, sg: Any) -> Any:
    """verl's k1+ in numbers: the value log π/π_ref, the slope of its half square."""
    half = 0.5 * (x.lp - x.ref) ** 2
    return half - 0.5 * (sg - x.ref) ** 2 + (sg - x.ref)


def grpo(x: Any, sg: Any) -> float:
    x = without_constant_groups(x)
    return paper_mean(x, ppo(x, z(x, 1, 1e-4), 0.2, 0.2))


def deepseekmath(x: Any, sg: Any) -> float:
    return paper_mean(x, ppo(x, z(x, 1, 1e-4), 0.2, 0.2) + 0.04 * k3(x))


def dapo(x: Any, sg: Any) -> float:
    x = without_constant_groups(x)
    return token_mean(x, ppo(x, z(x, 1, 1e-6), 0.2, 0.28, 10.0))


def dr_grpo(x: Any, sg: Any) -> float:
    return (ppo(x, centred(x), 0.2, 0.2) * x.mask).sum() / (len(x.R) * 3000)


def gspo(x: Any, sg: Any) -> float:
    s = np.exp(((x.lp - x.old) * x.mask).sum(1) / x.mask.sum(1))
    A = z(x, 1, 1e-4)[:, 0]
    return -np.minimum(s * A, np.clip(s, 1 - 3e-4, 1 + 4e-4) * A).mean()


def cispo(x: Any, sg: Any) -> float:
    return token_mean(x, -np.minimum(np.exp(sg - x.old), 5.0) * z(x, 1, 1e-4) * x.lp)


def cispo_verl(x: Any, sg: Any) -> float:
    return token_mean(x, -np.clip(np.exp(sg - x.old), 0.8, 1.2) * z(x, 1, 1e-6) * x.lp)


def cispo_open_instruct(x: Any, sg: Any) -> float:
    x, sg = without_constant_groups(x), sg[np.repeat(np.ptp(grouped(x), axis=1) > 0, G)]
    return token_mean(x, -np.minimum(np.exp(sg - x.old), 1.272) * centred(x) * x.lp)


def sapo(x: Any, sg: Any) -> float:
    A = z(x, 1, 1e-4)
    tau = np.where(A > 0, 1.0, 1.05)
    return paper_mean(x, -4 / tau / (1 + np.exp(-tau * (ratio(x) - 1))) * A)


def penalised(x: Any, coef: float) -> Any:
    return x.R - coef * ((x.old - x.ref) * x.mask).sum(1)


def rloo(x: Any, sg: Any) -> float:
    R = penalised(x, 0.05).reshape(-1, G)
    A = (R - (R.sum(1, keepdims=True) - R) / (G - 1)).reshape(-1, 1)
    return (-A * x.lp * x.mask).sum(1).mean()


def reinforce_pp(x: Any, sg: Any) -> float:
    R = penalised(x, 0.001)
    A = ((R - R.mean()) / (R.std(ddof=1) + 1e-8))[:, None]
    return token_mean(x, ppo(x, A, 0.2, 0.2, 3.0))


def reinforce_pp_baseline(x: Any, sg: Any) -> float:
    A = centred(x) / (centred(x).std(ddof=1) + 1e-8)
    return token_mean(x, ppo(x, A, 0.2, 0.2, 3.0) + 0.001 * 0.5 * (x.lp - x.ref) ** 2)


def maxrl(x: Any, sg: Any) -> float:
    A = centred(x).reshape(-1, G) / (grouped(x).mean(1, keepdims=True) + 1e-6)
    return token_mean(x, ppo(x, A.reshape(-1, 1), 0.2, 0.2, 3.0))


def wapo(x: Any, sg: Any) -> float:
    A = np.maximum(centred(x), 0)
    losses = -np.minimum(np.exp(x.lp - x.sampler), 10.0) * A * x.mask
    return losses.sum() / (len(x.R) * 4096)


def covariances(x: Any, A: Any, sg: Any) -> Any:
    """Of all tokens under the mask, in row order; and which of these tokens the ratio clips at 0 and 2."""
    lp, A, r = sg[x.mask], np.broadcast_to(A, x.mask.shape)[x.mask], np.exp(sg - x.old)[x.mask]
    return (lp - lp.mean()) * (A - A.mean()), (r > 2) & (A > 0)


def clip_cov(x: Any, sg: Any) -> float:
    x, sg = without_constant_groups(x), sg[np.repeat(np.ptp(grouped(x), axis=1) > 0, G)]
    A = z(x, 1, 1e-6)
    cov, clipped = covariances(x, A, sg)
    inside = np.flatnonzero((cov > 1) & (cov < 5) & ~clipped)
    kept = np.ones(len(cov))
    lots = np.random.default_rng([0]).random(len(cov))[inside]
    kept[inside[lots.argmin()]] = 0  # 2e-4 of some 20 tokens: at least one
    losses = ppo(x, A, 1.0, 1.0)
    losses[x.mask] *= kept
    return token_mean(x, losses)


def kl_cov(x: Any, sg: Any) -> float:
    x, sg = without_constant_groups(x), sg[np.repeat(np.ptp(grouped(x), axis=1) > 0, G)]
    A = z(x, 1, 1e-6)
    cov, _ = covariances(x, A, sg)
    losses = -A * ratio(x)
    penalty = np.zeros(len(cov))
    penalty[cov.argmax()] = np.abs(x.lp - x.old)[x.mask][cov.argmax()]
    losses[x.mask] += penalty
    return token_mean(x, losses)


def gagpo(x: Any, sg: Any) -> float:
    """With one turn each: the turn's ratio is the sequence's, and the state's value the mean of the group."""
    s = np.exp(((x.lp - x.old) * x.mask).sum(1, keepdims=True) / x.mask.sum(1, keepdims=True))
    A = z(x, 1, 1e-6)
    return token_mean(x, -np.minimum(s * A, np.clip(s, 0.8, 1.2) * A) + 0.01 * k3(x))


def p3o(x: Any, sg: Any) -> float:
    """Ratios are against the sampler; those of the formula's own e and weight are constants."""
    held = np.exp(sg - x.sampler)
    e = held[x.mask].sum() ** 2 / (x.mask.sum() * (held[x.mask] ** 2).sum())
    distance = np.exp(x.sampler - x.lp) - (x.sampler - x.lp) - 1
    return token_mean(x, -np.minimum(held, e) * z(x, 1, 1e-8) * x.lp + (1 - e) * distance)


def echo(x: Any, sg: Any) -> float:
    of_rows = [-lp[seen].sum() / max(seen.sum(), 1) for lp, seen in zip(x.lp, x.observed, strict=True)]
    return paper_mean(x, ppo(x, z(x, 1, 1e-4), 0.2, 0.2)) + 0.05 * float(np.mean(of_rows))


def opd(x: Any, sg: Any) -> float:
    """The sum over tokens, over the 12 completions; the ratio and log π are the sampler's."""
    A = centred(x) + (x.teacher - x.sampler)
    return (-np.exp(x.lp - x.sampler) * A * x.mask).sum() / len(x.R)


def whole_kl(log_probs: Any, teacher: Any) -> Any:
    """Stands for the KL over a vocabulary, which test_teacher_golden.py has: any function of the log-prob will do."""
    return 0.3 * (log_probs - teacher) ** 2


def opd_full(x: Any, sg: Any) -> float:
    return token_mean(x, ppo(x, z(x, 1, 1e-4), 0.2, 0.2) + whole_kl(x.lp, x.teacher))


def sdft(x: Any, sg: Any) -> float:
    return paper_mean(x, whole_kl(x.lp, x.teacher))


def sdpo(x: Any, sg: Any) -> float:
    return token_mean(x, whole_kl(x.lp, x.teacher))


def nano_aha(x: Any, sg: Any) -> float:
    return token_mean(x, -z(x, 0, 1e-4) * x.lp + 0.001 * k3(x))


def grpo_zero(x: Any, sg: Any) -> float:
    return token_mean(x, -z(x, 0, 1e-4) * x.lp)


def simple_grpo(x: Any, sg: Any) -> float:
    x = without_constant_groups(x)
    return paper_mean(x, ppo(x, z(x, 1, 1e-4), 0.2, 0.2) + 0.04 * k3(x))


def trained(x: Any) -> Any:
    """Masks of systems whose padding is the end token and whose masks come of ids."""
    return x.mask & ~(ENDED[: len(x.R), None] & (np.arange(T) == LENGTHS[: len(x.R), None] - 1))


def simple_grpo_published(x: Any, sg: Any) -> float:
    """Its own sampler's log-probs for the old ones, and no end token; a row of which nothing is left is no sequence."""
    x = without_constant_groups(SimpleNamespace(**{**vars(x), "mask": trained(x), "old": x.sampler}))
    losses = (ppo(x, z(x, 1, 1e-4), 0.2, 0.2) + 0.04 * k3(x)) * x.mask
    return (losses.sum(1) / np.maximum(x.mask.sum(1), 1)).sum() / x.mask.any(1).sum()


def lm_book(x: Any, sg: Any) -> float:
    return paper_mean(x, ppo(x, z(x, 1, 1e-4), 0.1, 0.1) + 0.04 * k3(x))


def rl_from_scratch(x: Any, sg: Any) -> float:
    return paper_mean(x, ppo(x, z(x, 1, 0.0), 0.2, 0.2) + 0.005 * k3(x))


def rl_from_scratch_published(x: Any, sg: Any) -> float:
    """No end token, and a count whose mask lacks the last column; a row of which nothing is left is no sequence."""
    mask = trained(x)
    losses = (ppo(x, z(x, 1, 0.0), 0.2, 0.2) + 0.005 * k3(x)) * mask
    count = mask[:, :-1].sum(1)  # valid_mask = batch_action_mask[:, :-1]
    return (losses.sum(1) / np.maximum(count, 1)).sum() / mask.any(1).sum()


def rlox(x: Any, sg: Any) -> float:
    return (-(z(x, 0, 0.0)[:, 0] * (x.lp * x.mask).sum(1)) + 0.1 * (plus(x, sg) * x.mask).sum(1)).mean()


def rlox_published(x: Any, sg: Any) -> float:
    return (-(z(x, 0, 0.0)[:, 0] * (x.lp * x.mask).sum(1)) + 0.1 * ((x.lp - x.ref) * x.mask).sum(1)).mean()


def falls(step: int, steps: int) -> float:
    """The share of the way down left at a step in the middle of the article's schedule."""
    return (1 + np.cos(np.pi * (step - 0.1 * steps) / (0.7 * steps))) / 2


def r1_blog(x: Any, sg: Any) -> float:
    beta = 0.04 + 0.06 * falls(STEP, STEPS)
    return (-(z(x, 1, 1e-8)[:, 0] * (x.lp * x.mask).sum(1)) + beta * (plus(x, sg) * x.mask).sum(1)).mean()


def r1_blog_published(x: Any, sg: Any) -> float:
    beta = 0.1 - (0.1 - 0.04) * falls(STEP, STEPS)
    return (-(z(x, 1, 1e-8)[:, 0] * (x.lp * x.mask).sum(1)) + beta * ((x.ref - x.lp) * x.mask).sum(1)).mean()


def trl(x: Any, sg: Any) -> float:
    return token_mean(x, ppo(x, z(x, 1, 1e-4), 0.2, 0.2))


def verl(x: Any, sg: Any) -> float:
    return token_mean(x, ppo(x, z(x, 1, 1e-6), 0.2, 0.2, 3.0) + 0.001 * k3(x))


def verl_published(x: Any, sg: Any) -> float:
    return token_mean(x, ppo(x, z(x, 1, 1e-6), 0.2, 0.2, 3.0) + 0.001 * np.clip(k3(x), -10, 10))


FORMULAS: dict[tuple[str, bool], Any] = {
    ("grpo", False): grpo,
    ("recommended", False): grpo,
    ("deepseekmath", False): deepseekmath,
    ("dapo", False): dapo,
    ("dr_grpo", False): dr_grpo,
    ("gspo", False): gspo,
    ("cispo", False): cispo,
    ("cispo_trl", False): cispo,  # the same number: a cap of 5 over no lower bound
    ("cispo_verl", False): cispo_verl,
    ("cispo_open_instruct", False): cispo_open_instruct,
    ("sapo", False): sapo,
    ("rloo", False): rloo,
    ("reinforce_pp", False): reinforce_pp,
    ("reinforce_pp_baseline", False): reinforce_pp_baseline,
    ("maxrl", False): maxrl,
    ("wapo", False): wapo,
    ("clip_cov", False): clip_cov,
    ("kl_cov", False): kl_cov,
    ("p3o", False): p3o,
    ("p3o", True): p3o,  # it differs in the sampling mask, which the formula's log-probs do not have
    ("gagpo", False): gagpo,
    ("echo", False): echo,
    ("opd", False): opd,
    ("opd_full", False): opd_full,
    ("sdft", False): sdft,
    ("sdpo", False): sdpo,
    ("nano_aha", False): nano_aha,
    ("nano_aha", True): nano_aha,  # likewise
    ("grpo_zero", False): grpo_zero,
    ("simple_grpo", False): simple_grpo,
    ("simple_grpo", True): simple_grpo_published,
    ("lm_book", False): lm_book,
    ("rl_from_scratch", False): rl_from_scratch,
    ("rl_from_scratch", True): rl_from_scratch_published,
    ("rlox", False): rlox,
    ("rlox", True): rlox_published,
    ("r1_blog", False): r1_blog,
    ("r1_blog", True): r1_blog_published,
    ("trl", False): trl,
    ("verl", False): verl,
    ("verl", True): verl_published,
}
CASES = list(FORMULAS)


def expected(name: str, published: bool) -> tuple[float, Any]:
    """The source's loss and its slope by each log-prob, by central differences."""
    formula, x = FORMULAS[name, published], data()

    def at(row: int, step: int, by: float) -> float:
        moved = x.lp.copy()
        moved[row, step] += by
        return formula(SimpleNamespace(**{**vars(x), "lp": moved}), x.lp)

    h = 1e-6
    slopes = [[(at(row, step, h) - at(row, step, -h)) / (2 * h) for step in range(T)] for row in range(12)]
    return formula(x, x.lp), np.array(slopes)


def found(name: str, published: bool, **changes: Any) -> tuple[float, Any]:
    """The same by this library's functions, from the preset's configuration."""
    sizes = {"group_size": G, "prompts_per_step": 64}
    if name == "rl_from_scratch":
        sizes["max_new_tokens"] = T
    if name == "gagpo":
        sizes["turn_credit"] = "episode"  # the data has one turn; test_turn_values_golden.py has others
    config = GRPOConfig.create(preset=name, published=published, **{**sizes, **changes})
    x = data()
    coef = kl_coef_at(STEP, STEPS, config.split().loss)
    rewards = x.R
    if config.kl_in == "reward":
        kl = {"k1": x.old - x.ref, "k3": np.exp(x.ref - x.old) - (x.ref - x.old) - 1}[config.kl_estimator]
        rewards = rewards - coef * (kl * x.mask).sum(1)
    advantages = make_advantages(config.split().advantages, [1.0])(rewards, np.arange(0, len(rewards) + 1, G), {})
    advantages = advantages * (config.advantage_fn != "zero")
    by_group = advantages.reshape(-1, G)
    has_teacher, is_full = "teacher_coef" in PRESETS[name].values, config.teacher_kl == "full"
    kept = np.repeat((by_group != 0).any(1) | trains_equal_rewards(config.split(), has_teacher=has_teacher), G)
    mask = x.mask & (ENDED[:, None] | (not config.mask_truncated))
    ids = torch.zeros(12, T + 1, dtype=torch.int64)
    tensors = {
        name: torch.from_numpy(value[kept])
        for name, value in {
            "mask": mask,
            "observed": x.observed,
            "old": x.old,
            "sampler": x.sampler,
            "ref": x.ref,
            "teacher": x.teacher,
            "advantages": advantages,
        }.items()
    }
    count = int(kept.sum())
    batch = Batch(
        input_ids=ids[:count],
        prompt_lengths=torch.ones(count, dtype=torch.int64),
        completion_ids=ids[:count, 1:],
        completion_mask=torch.from_numpy(x.mask[kept]),
        loss_mask=tensors["mask"],
        advantages=tensors["advantages"],
        row_index=torch.arange(count),
        prompt_index=torch.arange(count),
        totals=StepTotals(
            num_loss_tokens=float(tensors["mask"].sum()), num_sequences=float(tensors["mask"].any(1).sum())
        ),
        log_probs=TokenLogProbs(
            old=tensors["sampler" if config.bypass_old_log_probs else "old"],
            ref=tensors["ref"],
            teacher=tensors["teacher"] if has_teacher and not is_full else None,
        ),
        environment=EnvironmentTokens(mask=tensors["observed"]),
    )
    if not config.train_end_token:
        (batch,) = drop_tokens(
            [batch],
            {(row, 0): [length - 1] for row, length in enumerate(x.mask[kept].sum(1)) if ENDED[kept][row]},
        )
    log_probs = torch.from_numpy(x.lp).requires_grad_()
    weight = coef if config.kl_in == "loss" else 0.0
    kept_log_probs, length = log_probs[torch.from_numpy(kept)], config.max_new_tokens
    (batch,) = with_step_statistics([batch], config.split().loss, lambda _: kept_log_probs)
    kl = whole_kl(kept_log_probs, tensors["teacher"]) if is_full else None
    options = config.split().loss
    loss = grpo_loss(kept_log_probs, batch, options, kl_coef=weight, max_length=length, distribution_kl=kl).loss
    (gradient,) = torch.autograd.grad(loss, log_probs)
    return float(loss.detach()), gradient.numpy()


def same(one: tuple[float, Any], other: tuple[float, Any]) -> bool:
    """Losses to nine digits (float64, but whitened advantages, which are float32); slopes to central differences'."""
    return bool(
        np.isclose(one[0], other[0], rtol=2e-7, atol=1e-12) and np.allclose(one[1], other[1], rtol=1e-5, atol=1e-8)
    )


@pytest.mark.parametrize(("name", "published"), CASES)
def test_loss_and_slope_are_the_sources(name: str, published: bool) -> None:
    loss, slopes = expected(name, published)
    our_loss, our_slopes = found(name, published)
    assert our_loss == pytest.approx(loss, rel=2e-7)
    np.testing.assert_allclose(our_slopes, slopes, rtol=1e-5, atol=1e-8)
    assert np.abs(slopes).max() > 1e-5


CHANGES: dict[str, tuple[dict[str, Any], ...]] = {
    "baseline": (
        {"baseline": "leave_one_out"},
        {"baseline": "mean"},
        {"baseline": "batch", "reward_scaling": "batch"},  # whitening undoes the factor of leaving one out
    ),
    "reward_scaling": ({"reward_scaling": "whiten"}, {"reward_scaling": "none"}),
    "negative_advantages": ({"negative_advantages": "keep"},),
    "ddof": ({"ddof": 0}, {"ddof": 1}),
    "std_epsilon": ({"std_epsilon": 1e-2},),
    "zero_variance": ({"zero_variance": "drop_always"}, {"zero_variance": "keep"}),
    "policy_loss": ({"policy_loss": "sapo", "dual_clip": None, "delta": None}, {"policy_loss": "vespo"}),
    "clip_low": ({"clip_low": 0.05}, {"clip_low": 0.6}, {"clip_low": 0.0}),
    "clip_high": ({"clip_high": 0.05}, {"clip_high": 1.6}),
    "dual_clip": ({"dual_clip": 1.5},),
    "delta": ({"delta": 2.0},),
    "sapo_temperatures": ({"sapo_temperatures": (1.0, 1.0)},),
    "covariance_share": ({"covariance_share": 0.2},),
    "covariance_bounds": ({"covariance_bounds": (-0.5, 0.5)},),
    "covariance_kl_coef": ({"covariance_kl_coef": 0.5},),
    "environment_loss_coef": ({"environment_loss_coef": 0.1},),
    "loss_aggregation": ({"loss_aggregation": "sequence_mean"}, {"loss_aggregation": "token_mean"}),
    "bypass_old_log_probs": ({"bypass_old_log_probs": False},),
    "mask_truncated": ({"mask_truncated": True},),
    "train_end_token": ({"train_end_token": False}, {"train_end_token": True}),
    "kl_coef": ({"kl_coef": 0.3, "reference": "auto"},),
    "kl_estimator": ({"kl_estimator": "k3"}, {"kl_estimator": "k1"}),
    "kl_in": ({"kl_in": "reward", "kl_estimator": "k1"}, {"kl_in": "loss"}),
    "kl_bias_correction": ({"kl_bias_correction": True},),
    "kl_schedule": ({"kl_schedule": "constant"},),
    "kl_coef_end": ({"kl_coef_end": 0.09},),
    "advantage_fn": ({"advantage_fn": None, "mask_unhinted": False},),
    "teacher_coef": ({"teacher_coef": 0.5},),
    "teacher_in": ({"teacher_in": "loss"}, {"teacher_in": "advantage", "teacher_kl": "sampled"}),
    "teacher_kl": ({"teacher_kl": "sampled"}, {"teacher_kl": "full", "teacher_in": "loss"}),
}
"""What each field of the loss is changed to: the first that is not what it was."""


@pytest.mark.parametrize(("name", "published"), CASES)
def test_each_choice_of_the_loss_moves_it(name: str, published: bool) -> None:
    preset = PRESETS[name]
    values = {**preset.values, **(preset.published_values if published else {})}
    source = expected(name, published)
    still = []
    for field in values.keys() & CHANGES.keys():
        if field == "kl_bias_correction" and values["kl_coef"] == 0:
            continue  # TRL's default, which acts once there is a penalty
        if field == "covariance_share" and name == "clip_cov":
            continue  # one token of the data lies within its bounds; test_policy_loss_golden.py has others
        if field == "zero_variance" and "advantage_fn" in values:
            continue  # drop_always would leave out every group, and is refused
        if field == "zero_variance" and values.get("kl_in") == "reward":
            continue  # KL makes equal rewards differ but in a first step; the table below has it
        changes = [c for c in CHANGES[field] if c[field] != values[field]]
        if field == "delta" and values["clip_high"] > 0.5:
            continue
        outcomes = []
        for change in changes:
            try:
                outcomes.append(same(found(name, published, **change), source))
            except ConfigError:
                continue
        if not outcomes or all(outcomes):
            still.append(field)
    assert not still


# --- everything else: a second copy of the settings, from the table of sources ---

ADAM = ("adam_beta1", "adam_beta2")
ADAPTER = {"lora_rank": 128}
HINTS = {
    "sdft": {"teacher_prompt": "{prompt}\n\n{privileged_context}", "teacher_mix": 0.05},
    "sdpo": {
        "teacher_prompt": "rlox_grpo.prompts.reprompt:show_solution_or_feedback",
        "teacher_mix": 0.05,
        "mask_unhinted": True,
    },
}
# What most presets have. Each row below lists every setting in which its preset differs.
USUAL: dict[str, Any] = {
    "prompts_per_step": 16,
    "group_size": 8,
    "updates_per_batch": 1,
    "mini_batches": 1,
    "temperature": 1.0,
    "top_p": 1.0,
    "max_new_tokens": 512,
    "learning_rate": 1e-6,
    "lr_schedule": "constant",
    "warmup_steps": 0,
    "min_lr_ratio": 0.0,
    "weight_decay": 0.0,
    "max_grad_norm": 1.0,
    "reference": "frozen",
    "prompt_template": None,
}
ENTROPY: dict[str, Any] = {
    **USUAL,
    "prompts_per_step": 256,
    "mini_batches": 8,
    "max_new_tokens": 8192,
    "learning_rate": 5e-7,
    "reference": "auto",
}
SETTINGS: dict[str, dict[str, Any]] = {
    "grpo": {**USUAL, "reference": "auto"},
    "recommended": {**USUAL, "group_size": 4, "prompts_per_step": 32, "reference": "auto"},
    "deepseekmath": {**USUAL, "group_size": 64, "max_new_tokens": 1024, "prompt_template": "boxed"},
    "dapo": {
        **USUAL,
        "prompts_per_step": 512,
        "group_size": 16,
        "mini_batches": 16,
        "max_new_tokens": 20480,
        "warmup_steps": 20,
        "weight_decay": 0.1,
        "reference": "auto",
        "prompt_template": "verl_dapo",
    },
    "dr_grpo": {**USUAL, "max_new_tokens": 3000, "reference": "auto", "prompt_template": "boxed"},
    "gspo": {**USUAL, "mini_batches": 4, "reference": "auto"},
    "cispo": {**USUAL, "mini_batches": 4, "reference": "auto"},
    "sapo": {**USUAL, "mini_batches": 4, "reference": "auto"},
    "rloo": {**USUAL, "group_size": 2, "lr_schedule": "linear"},
    "reinforce_pp": {**USUAL, "prompts_per_step": 128, "group_size": 1, "mini_batches": 4},
    "reinforce_pp_baseline": {**USUAL, "mini_batches": 4},
    "maxrl": {
        **USUAL,
        "prompts_per_step": 256,
        "group_size": 16,
        "max_new_tokens": 4096,
        "weight_decay": 0.01,
        "max_grad_norm": 0.3,
        "reference": "auto",
    },
    "wapo": {
        **USUAL,
        "prompts_per_step": 32,
        "mini_batches": 4,
        "max_new_tokens": 4096,
        "learning_rate": 1e-5,
        "warmup_steps": 10,
        "reference": "auto",
    },
    "clip_cov": ENTROPY,
    "kl_cov": ENTROPY,
    "gagpo": {**USUAL, "weight_decay": 0.01},
    "p3o": {
        **USUAL,
        "prompts_per_step": 128,
        "temperature": 0.7,
        "top_p": 0.8,
        "max_new_tokens": 4096,
        "lr_schedule": "cosine",
        "warmup_steps": 5,
        "min_lr_ratio": 0.1,
        "weight_decay": 0.01,
        "reference": "auto",
    },
    "echo": {
        **USUAL,
        "group_size": 16,
        "temperature": 0.8,
        "max_new_tokens": 2048,
        "max_grad_norm": 0.2,
        "reference": "auto",
    },
    "opd": {
        **USUAL,
        "prompts_per_step": 1024,
        "group_size": 4,
        "max_new_tokens": 4096,
        "learning_rate": 1e-4,
        "max_grad_norm": 0.0,
        "reference": "auto",
    },
    "opd_full": {**USUAL, "prompts_per_step": 8, "group_size": 1, "lr_schedule": "linear", "reference": "auto"},
    "sdft": {
        **USUAL,
        "prompts_per_step": 1,
        "max_new_tokens": 256,
        "learning_rate": 5e-5,
        "lr_schedule": "linear",
        "reference": "auto",
    },
    "sdpo": {
        **USUAL,
        "prompts_per_step": 32,
        "max_new_tokens": 8192,
        "learning_rate": 1e-5,
        "warmup_steps": 10,
        "weight_decay": 0.01,
        "reference": "auto",
    },
    "nano_aha": {
        **USUAL,
        "group_size": 4,
        "top_p": 0.999,
        "max_new_tokens": 1024,
        "prompt_template": "countdown_think",
    },
    "grpo_zero": {
        **USUAL,
        "prompts_per_step": 32,
        "max_new_tokens": 1024,
        "learning_rate": 1e-5,
        "reference": "none",
        "prompt_template": "countdown_think",
    },
    "simple_grpo": {
        **USUAL,
        "mini_batches": 4,
        "temperature": 0.9,
        "max_new_tokens": 700,
        "max_grad_norm": 0.0,
        "prompt_template": "r1_think",
    },
    "lm_book": {
        **USUAL,
        "prompts_per_step": 4,
        "group_size": 16,
        "max_new_tokens": 500,
        "learning_rate": 5e-6,
        "max_grad_norm": 0.1,
        "prompt_template": "lm_book",
    },
    "rl_from_scratch": {
        **USUAL,
        "prompts_per_step": 4,
        "group_size": 4,
        "updates_per_batch": 4,
        "top_p": 0.9,
        "max_new_tokens": 256,
        "learning_rate": 1e-5,
        "lr_schedule": "cosine",
        "warmup_steps": 186,
        "min_lr_ratio": 0.1,
        "weight_decay": 0.1,
        "max_grad_norm": 0.1,
        "prompt_template": "rl_from_scratch",
    },
    "rlox": {**USUAL, "prompts_per_step": 1024, "group_size": 4, "max_new_tokens": 8, "learning_rate": 1e-4},
    "r1_blog": {**USUAL, "group_size": 16, "temperature": 0.7},
    "trl": {**USUAL, "prompts_per_step": 1, "lr_schedule": "linear", "reference": "auto"},
    "cispo_trl": {**USUAL, "mini_batches": 4, "lr_schedule": "linear", "reference": "auto"},
    "verl": {
        **USUAL,
        "prompts_per_step": 1024,
        "group_size": 5,
        "mini_batches": 4,
        "max_new_tokens": 1024,
        "weight_decay": 0.01,
        "prompt_template": "verl_gsm8k",
    },
    "cispo_verl": {
        **USUAL,
        "prompts_per_step": 1024,
        "group_size": 5,
        "mini_batches": 4,
        "max_new_tokens": 1024,
        "weight_decay": 0.01,
        "reference": "auto",
    },
    "cispo_open_instruct": {**USUAL, "mini_batches": 4, "reference": "auto"},
}
TURNS = {"turn_credit": "gae", "turn_discount": 0.95, "turn_lambda": 0.95, "turn_state": "observation"}
REWARDS_OF = {
    "dapo": '(*published("verl_math_dapo"), Overlong(20480, 4096))',
    "dr_grpo": "MathAnswer()",
    **{name: f'published("{name}")' for name in ("nano_aha", "grpo_zero", "simple_grpo", "lm_book", "r1_blog")},
    "rl_from_scratch": 'published("rl_from_scratch")',
    "verl": 'published("verl_gsm8k")',
}


def test_every_published_form_of_a_loss_has_a_formula() -> None:
    assert {name for name, preset in PRESETS.items() if preset.published} == {n for n, form in CASES if form}


@pytest.mark.parametrize("name", list(PRESETS))
def test_settings_are_the_sources(name: str) -> None:
    values = PRESETS[name].values
    assert {setting: values[setting] for setting in USUAL} == SETTINGS[name]
    assert tuple(values[field] for field in ADAM) == (0.9, 0.95 if name in ("p3o", "opd") else 0.999)
    drops = ("grpo", "recommended", "dapo", "clip_cov", "kl_cov", "cispo_open_instruct")
    zero_variance = "drop_always" if name == "simple_grpo" else "drop" if name in drops else "keep"
    assert values["zero_variance"] == zero_variance
    assert name not in REWARDS_OF or PRESETS[name].reward == REWARDS_OF[name]
    turns = {setting: value for setting, value in values.items() if setting.startswith("turn_")}
    assert turns == (TURNS if name == "gagpo" else {})
    assert {setting: value for setting, value in values.items() if setting in ADAPTER} == (
        ADAPTER if name == "opd" else {}
    )
    hints = {setting: value for setting, value in values.items() if setting in HINTS["sdpo"]}
    assert hints == HINTS.get(name, {})
    tested = {*USUAL, *ADAM, *CHANGES, *TURNS, *ADAPTER, *hints}
    assert set(values) <= tested, "every choice is tested here or by its loss"


@pytest.mark.parametrize("name", list(PRESETS))
def test_every_preset_fixes_every_choice_that_acts(name: str) -> None:
    values = dict(PRESETS[name].values)
    needed = {*USUAL, *ADAM, "zero_variance", "loss_aggregation", "mask_truncated", "kl_coef"}
    has_advantages = values.get("advantage_fn") != "zero"
    if has_advantages:
        needed |= {"baseline", "reward_scaling", "policy_loss"}
    if has_advantages and values["reward_scaling"] != "none":
        needed |= {"std_epsilon"} | ({"ddof"} if values["reward_scaling"] != "mean" else set())
    if values["kl_coef"]:
        needed |= {"kl_estimator", "kl_in"} | ({"kl_bias_correction"} if values["kl_in"] == "loss" else set())
    needed |= {
        "clip": {"clip_low", "clip_high", "dual_clip", "delta"},
        "gspo": {"clip_low", "clip_high", "delta"},
        "gspo_turn": {"clip_low", "clip_high", "delta"},
        "cispo_clip": {"clip_low", "clip_high"},
        "cispo_cap": {"clip_high"},
        "cispo_upper": {"clip_high"},
        "sapo": {"sapo_temperatures"},
        "clip_cov": {"clip_low", "clip_high", "covariance_share", "covariance_bounds"},
        "kl_cov": {"covariance_share", "covariance_kl_coef"},
        "p3o": {"bypass_old_log_probs"},
        "reinforce": set(),
    }[values["policy_loss"] if has_advantages else "reinforce"]
    if values.get("negative_advantages") == "zero":
        needed -= {"clip_low", "dual_clip", "delta"}  # which bound nothing where advantages are positive
    assert needed <= values.keys()
    page = presets_page()
    assert all(f"| `{field}` |" in page for field in values), "the page leaves it out"
    assert all(choice.source for choice in PRESETS[name].choices.values())


@pytest.mark.parametrize("name", list(PRESETS))
def test_rewards_named_by_a_preset_exist(name: str) -> None:
    from rlox_grpo import rewards

    if "(" in PRESETS[name].reward:
        made = eval(PRESETS[name].reward, vars(rewards))  # noqa: S307  our own text
        assert all(callable(rule) for rule in (made if isinstance(made, tuple) else (made,)))


@pytest.mark.parametrize("name", list(PRESETS))
def test_published_is_for_presets_with_a_defect_that_it_brings_back(name: str) -> None:
    preset = PRESETS[name]
    assert bool(preset.published) == any(defect.reproduced for defect in preset.defects)
    if preset.published:
        config = GRPOConfig.create(preset=name, published=True)
        for field, value in preset.published_values.items():
            assert getattr(config, field) == value != getattr(GRPOConfig.create(preset=name), field)
        field = next(iter(preset.published))
        corrected = getattr(GRPOConfig.create(preset=name), field)
        assert getattr(GRPOConfig.create(preset=name, published=True, **{field: corrected}), field) == corrected
    else:
        with pytest.raises(ConfigError, match=f"published=True: preset '{name}' has no defect"):
            GRPOConfig.create(preset=name, published=True)


def test_published_takes_no_word_for_true() -> None:
    with pytest.raises(ConfigError, match="published: expected true or false, got 'yes'"):
        GRPOConfig.create(preset="rlox", published="yes")


def test_the_data_reaches_every_bound() -> None:
    """Else a bound could be wrong unseen: sequences inside and outside GSPO's, tokens past 5 on both sides."""
    x = data()
    s = np.exp(((x.lp - x.old) * x.mask).sum(1) / LENGTHS)
    assert ((s > 1 - 3e-4) & (s < 1 + 4e-4)).sum() >= 2
    assert (s > 1.001).any()
    assert (s < 0.999).any()
    assert (ratio(x)[x.mask] > exp(2)).sum() >= 3
    assert (ratio(x)[x.mask] < 0.4).any()
    assert (k3(x)[x.mask] > 10).sum() >= 2
