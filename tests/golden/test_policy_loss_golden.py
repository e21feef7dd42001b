"""Each policy term against arithmetic by hand: value, gradient by log-prob, and what counts as held back."""

import math
from dataclasses import replace
from math import exp, log, sqrt
from types import SimpleNamespace

import pytest
import torch

from rlox_grpo.config.records import LossConfig
from rlox_grpo.loss.entropy import top_entropy_masks
from rlox_grpo.loss.inputs import make_loss_inputs
from rlox_grpo.loss.kl import kl_penalty
from rlox_grpo.loss.objective import grpo_loss
from rlox_grpo.loss.policies.p3o import policy_sample_size
from rlox_grpo.loss.policy_term import make_policy_loss
from rlox_grpo.loss.step_statistics import with_step_statistics
from rlox_grpo.types import Batch, Branches, PolicyWeights, StepTotals, TokenLogProbs

TINY = 1e-12  # float64 sums of two or three numbers of size 1


def policy_term(config, log_probs, log_ratio, advantages, mask, measured=None):
    """The term of ``config.policy_loss``, from log-ratios and advantages ``[N, 1]``."""
    rows = torch.arange(len(mask))
    ones = torch.ones(len(mask), dtype=torch.int64)
    batch = Batch(
        *(mask, ones, mask, mask, mask, advantages.expand(mask.shape), rows, rows),
        totals=StepTotals(num_loss_tokens=float(mask.sum()), num_sequences=float(len(mask))),
        log_probs=TokenLogProbs(old=(log_probs - log_ratio).detach()),
        policy=PolicyWeights(measured=measured),
    )
    inputs = make_loss_inputs(log_probs, batch, config)
    term = make_policy_loss(config.policy_loss)(inputs)
    low, high = (torch.zeros_like(mask) if marks is None else marks for marks in (term.low, term.high))
    return replace(term, ratio=inputs.ratio if term.ratio is None else term.ratio, low=low, high=high)


def term(kind, ratios, advantage, *, old=None, mask=None, **options):
    """One row; returns its token losses, their gradients by log-prob, and the term."""
    old = torch.tensor([old or [1.0] * len(ratios)], dtype=torch.float64).log()
    log_probs = (old + torch.tensor([ratios], dtype=torch.float64).log()).requires_grad_()
    mask = torch.ones(1, len(ratios), dtype=torch.bool) if mask is None else torch.tensor([mask])
    config = LossConfig.create(policy_loss=kind, **options)
    found = policy_term(config, log_probs, log_probs - old, torch.tensor([[advantage]], dtype=torch.float64), mask)
    (gradient,) = torch.autograd.grad(found.loss[mask].sum(), log_probs)
    return found.loss.detach()[0].tolist(), gradient[0].tolist(), found


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        # -max(-5, -3): the loss is capped at 3 and the gradient is zero.
        pytest.param({"ratio": 5.0, "advantage": -1.0}, {"loss": 3.0, "gradient": 0.0, "held": True}, id="capped"),
        pytest.param({"ratio": 2.0, "advantage": -1.0}, {"loss": 2.0, "gradient": 2.0, "held": False}, id="below"),
        # The ordinary clip for a positive advantage.
        pytest.param({"ratio": 5.0, "advantage": 1.0}, {"loss": -1.2, "gradient": 0.0, "held": True}, id="clipped"),
    ],
)
def test_dual_clip(given, expected):
    found, slope, of = term("clip", [given["ratio"]], given["advantage"], dual_clip=3.0)
    assert found == pytest.approx([expected["loss"]], abs=TINY)
    assert slope == pytest.approx([expected["gradient"]], abs=TINY)
    assert bool(of.high[0, 0]) is expected["held"]


def test_delta_bounds_the_unclipped_branch_only():
    # A < 0: -min(min(r, 4) A, 1.2 A) = -min(-4, -1.2) = 4, without gradient past delta
    found, slope, of = term("clip", [6.0], -1.0, delta=4.0)
    assert (found, slope) == (pytest.approx([4.0], abs=TINY), [0.0])
    assert of.high.all()
    found, slope, _ = term("clip", [3.0], -1.0, delta=4.0)
    assert (found, slope) == (pytest.approx([3.0], abs=TINY), pytest.approx([3.0], abs=TINY))


@pytest.mark.parametrize("kind", ["gspo", "gspo_token"])
def test_sequence_ratio(kind):
    # Ratios 1.2 and 1.05: s = sqrt(1.26) = 1.1225, the third token is padding. -s A at each token; the gradient is
    # s A for each of the two tokens either way: twice s A / 2, or once s A.
    s = sqrt(1.2 * 1.05)
    found, slope, of = term(kind, [1.2, 1.05, 9.0], 2.0, mask=[True, True, False])
    assert found[:2] == pytest.approx([-2 * s] * 2, abs=TINY)
    assert slope == pytest.approx([-2 * s, -2 * s, 0.0], abs=TINY)
    assert not of.high[0, :2].any()
    # Ratios 1.5 and 1.4: s = 1.449, clipped at 1.2 for a gain.
    found, slope, of = term(kind, [1.5, 1.4], 2.0)
    assert (found, slope) == (pytest.approx([-2.4] * 2, abs=TINY), [0.0, 0.0])
    assert of.high.all()


@pytest.mark.parametrize("kind", ["gspo", "gspo_token", "gspo_turn"])
def test_rounding_does_not_clip_some_tokens_of_a_sequence(kind):
    # float32 at −13 has steps of 9.5e-7. The sequence's ratio is 5e-8 below the bound 1 + 4e-4, at every token.
    log_probs = torch.tensor([[-13.1, -0.3, -7.7, -2.9]])
    mask, options = torch.ones(1, 4, dtype=torch.bool), LossConfig.create(policy_loss=kind, clip_high=4e-4)
    of = make_policy_loss(kind)(
        SimpleNamespace(
            log_probs=log_probs.requires_grad_(),
            log_ratio=torch.full((1, 4), 4e-4 - 1.3e-7),
            advantages=torch.ones(1, 4),
            mask=mask,
            options=options,
        )
    )
    assert of.ratio.unique().numel() == 1
    assert not of.high.any()


@pytest.mark.parametrize(
    ("kind", "clip_high", "weights"),
    [
        ("cispo_clip", 0.5, [0.7, 1.0, 1.5]),  # both bounds: 1 - 0.3 and 1 + 0.5
        ("cispo_upper", 0.5, [0.1, 1.0, 1.5]),  # the upper alone
        ("cispo_cap", 2.5, [0.1, 1.0, 2.5]),  # the upper, given as it is
    ],
)
def test_the_three_meanings_of_cispo(kind, clip_high, weights):
    # -w A log p and gradient -w A, with A = -2; old probabilities 0.5, so log p = log(0.5 r)
    ratios = [0.1, 1.0, 4.0]
    found, slope, of = term(kind, ratios, -2.0, old=[0.5] * 3, clip_low=0.3, clip_high=clip_high)
    expected = [2 * w * log(0.5 * r) for w, r in zip(weights, ratios, strict=True)]
    assert found == pytest.approx(expected, abs=TINY)
    assert slope == pytest.approx([2 * w for w in weights], abs=TINY)
    assert of.low[0].tolist() == [kind == "cispo_clip", False, False]
    assert of.high[0].tolist() == [False, False, True]


@pytest.mark.parametrize(("advantage", "tau"), [(2.0, 1.0), (-2.0, 1.05)])
def test_sapo(advantage, tau):
    # r = 1.5: gate g = sigmoid(tau / 2); loss -(4/tau) g A; slope -4 g (1 - g) r A
    gate = 1 / (1 + exp(-tau * 0.5))
    found, slope, _ = term("sapo", [1.5], advantage)
    assert found == pytest.approx([-4 / tau * gate * advantage], abs=TINY)
    assert slope == pytest.approx([-4 * gate * (1 - gate) * 1.5 * advantage], abs=TINY)


@pytest.mark.parametrize(("advantage", "k", "rate"), [(2.0, 2.0, 3.0), (-2.0, 3.0, 2.0)])
def test_vespo(advantage, k, rate):
    # w = 1.2 * 0.9 = 1.08; phi = e^rate w^k e^(-rate w)
    phi = exp(rate) * 1.08**k * exp(-rate * 1.08)
    found, slope, _ = term("vespo", [1.2, 0.9, 7.0], advantage, mask=[True, True, False])
    assert slope[:2] == pytest.approx([-phi * advantage] * 2, abs=TINY)
    assert found[:2] == pytest.approx([-phi * advantage * log(1.2), -phi * advantage * log(0.9)], abs=TINY)


def test_gmpo():
    # Logs log 2 and log 1.1, bounds ±0.4. A > 0: 0.4 and 0.0953; ratio exp(0.2477); slope only for the second token.
    ratio = exp((0.4 + log(1.1)) / 2)
    found, slope, of = term("gmpo", [2.0, 1.1], 3.0, clip_low=0.4, clip_high=0.4)
    assert found == pytest.approx([-3 * ratio] * 2, abs=TINY)
    assert slope == pytest.approx([0.0, -3 * ratio], abs=TINY)  # the sum over both tokens of a half each
    assert of.high[0].tolist() == [True, False]
    # A < 0 keeps log 2 and would bound log 0.5 at -0.4
    ratio = exp((log(2) - 0.4) / 2)
    found, _, of = term("gmpo", [2.0, 0.5], -3.0, clip_low=0.4, clip_high=0.4)
    assert found == pytest.approx([3 * ratio] * 2, abs=TINY)
    assert of.low[0].tolist() == [False, True]


def test_dppo_drops_tokens_by_probability_and_not_by_ratio():
    # old .5 .01 .5 .9, ratio 1.5 9 .5 .9: moved +.25 +.08 -.25 -.09. Bounds .2: for A > 0 only the first drops out,
    # though the second's ratio is 9; delta 4 bounds that weight.
    arguments = {"ratios": [1.5, 9.0, 0.5, 0.9], "old": [0.5, 0.01, 0.5, 0.9], "delta": 4.0}
    _, slope, of = term("dppo", advantage=1.0, **arguments)
    assert slope == pytest.approx([0.0, -4.0, -0.5, -0.9], abs=TINY)
    assert of.high[0].tolist() == [True, False, False, False]
    _, slope, of = term("dppo", advantage=-1.0, **arguments)
    assert slope == pytest.approx([1.5, 4.0, 0.0, 0.9], abs=TINY)
    assert of.low[0].tolist() == [False, False, True, False]


def test_reinforce_reads_no_ratio():
    found, slope, of = term("reinforce", [5.0, 0.1], -2.0, old=[0.1, 0.5])
    assert found == pytest.approx([2 * log(0.5), 2 * log(0.05)], abs=TINY)
    assert slope == pytest.approx([2.0, 2.0], abs=TINY)
    assert not (of.low | of.high).any()


def test_unknown_loss():
    with pytest.raises(
        ValueError, match="policy_loss: expected a policy loss or its module:name, got 'ppo': did you mean 'dppo'"
    ):
        term("ppo", [1.0], 1.0)


# --- KL forms ---


def test_plus_forms_have_the_gradient_of_k2():
    # d = ref - log p = -ln 2: value of each by hand, gradient of k2 by log p is -d = ln 2
    log_probs = torch.tensor([0.5]).double().log().requires_grad_()
    ref = torch.tensor([0.25]).double().log()
    ln2 = math.log(2)
    for estimator, value in {"k1+": ln2, "k3+": 0.5 + ln2 - 1, "abs+": ln2}.items():
        found = kl_penalty(log_probs, ref, estimator)
        (slope,) = torch.autograd.grad(found.sum(), log_probs)
        assert float(found.detach()) == pytest.approx(value, abs=TINY), estimator
        assert float(slope) == pytest.approx(ln2, abs=TINY), estimator


def test_the_gradients_of_plain_forms():
    # by log p with d = -ln 2: k1 1; k2 -d = ln 2; k3 1 - e^d = 1/2; abs 1; the inverted one -1
    ln2 = math.log(2)
    for estimator, expected in {"k1": 1.0, "k2": ln2, "k3": 0.5, "abs": 1.0, "k1_inverted": -1.0}.items():
        log_probs = torch.tensor([0.5]).double().log().requires_grad_()
        (slope,) = torch.autograd.grad(kl_penalty(log_probs, torch.tensor([0.25]).double().log(), estimator), log_probs)
        assert float(slope) == pytest.approx(expected, abs=TINY), estimator


@pytest.mark.parametrize("reference", [-25.0, -math.inf])
def test_the_penalty_pulls_most_where_the_policy_is_furthest_away(reference):
    # d is clamped to −20: values and slopes by log p are those at −20, and those of published code end there.
    slopes = {"k1": 1.0, "k2": 20.0, "k3": 1 - exp(-20), "abs": 1.0, "k1+": 20.0, "k3+": 20.0, "abs+": 20.0}
    for estimator, expected in {**slopes, "k3_clamped": 0.0, "k1_inverted": 0.0}.items():
        log_probs = torch.tensor([-0.5], dtype=torch.float64, requires_grad=True)
        found = kl_penalty(log_probs, torch.tensor([reference], dtype=torch.float64), estimator)
        at_limit = kl_penalty(torch.zeros(1).double(), torch.tensor([-20.0]).double(), estimator)
        (slope,) = torch.autograd.grad(found.sum(), log_probs)
        assert float(found.detach()) == pytest.approx(float(at_limit), rel=1e-12), estimator
        assert float(slope) == pytest.approx(expected, abs=TINY), estimator
    # Above 20 the slope of k3 would be −exp(20).
    log_probs = torch.tensor([-30.0], dtype=torch.float64, requires_grad=True)
    (slope,) = torch.autograd.grad(kl_penalty(log_probs, torch.zeros(1).double(), "k3").sum(), log_probs)
    assert float(slope) == 0.0


# --- top entropy ---


def test_top_entropy_has_one_threshold_for_all_micro_batches():
    entropies = [torch.tensor([[0.1, 0.9], [0.5, 99.0]]), torch.tensor([[0.7, 0.3]])]
    masks = [torch.tensor([[True, True], [True, False]]), torch.tensor([[True, True]])]
    # Tokens 0.1 0.3 0.5 0.7 0.9; a share of 0.5 puts the threshold at the median, 0.5.
    found = top_entropy_masks(entropies, masks, 0.5)
    assert found[0].tolist() == [[False, True], [True, False]]
    assert found[1].tolist() == [[True, False]]
    assert torch.equal(top_entropy_masks(entropies, masks, 1.0)[0], masks[0])


def test_rounding_does_not_divide_tokens_of_equal_entropy():
    """The threshold is an entropy that three tokens share, which a layout rounds in its own way."""
    entropies = torch.tensor([[0.5, 0.7 + 1e-6, 0.7, 0.7 - 1e-6, 0.9]])
    mask = torch.ones(1, 5, dtype=torch.bool)
    for share in (0.5, 0.6, 0.75):
        selected = top_entropy_masks([entropies], [mask], share)[0]
        assert selected.tolist() == [[False, True, True, True, True]], share


def test_top_entropy_of_nothing():
    nothing = torch.zeros(1, 2, dtype=torch.bool)
    assert not top_entropy_masks([torch.ones(1, 2)], [nothing], 0.5)[0].any()


# --- dro, clip-cov and kl-cov ---


def test_dro():
    # -A log(0.5 r) + (0.4 / 2) log(r)^2, slope -A + 0.4 log r
    found, slope, of = term("dro", [0.5, 2.0], 3.0, old=[0.5] * 2, dro_beta=0.4)
    assert found == pytest.approx([-3 * log(0.25) + 0.2 * log(2) ** 2, 0.2 * log(2) ** 2], abs=TINY)
    assert slope == pytest.approx([-3 - 0.4 * log(2), -3 + 0.4 * log(2)], abs=TINY)
    assert not (of.low | of.high).any()


def covariance_batches(pieces):
    """Micro-batches of a step of two rows, A = 1 and -1; ``pieces`` are lists of rows."""
    # Probabilities e^0, e^-2, e^-4 and e^-2, e^-4: log-probs have mean -12/5, advantages 1/5.
    log_probs = torch.tensor([[0.0, -2.0, -4.0], [-2.0, -4.0, 99.0]], dtype=torch.float64)
    mask = torch.tensor([[True, True, True], [True, True, False]])
    old = log_probs - torch.tensor([[0.0, 0.1, 0.5], [-0.5, 0.0, 0.0]], dtype=torch.float64)
    ids = torch.zeros(2, 4, dtype=torch.int64)
    batches = [
        Batch(
            input_ids=ids[rows],
            prompt_lengths=torch.ones(len(rows), dtype=torch.int64),
            completion_ids=ids[rows, 1:],
            completion_mask=mask[rows],
            loss_mask=mask[rows],
            advantages=torch.tensor([1.0, -1.0], dtype=torch.float64)[rows],
            row_index=torch.tensor(rows),
            prompt_index=torch.zeros(len(rows), dtype=torch.int64),
            totals=StepTotals(num_loss_tokens=5.0, num_sequences=2.0),
            log_probs=TokenLogProbs(old=old[rows]),
        )
        for rows in pieces
    ]
    return [log_probs[rows] for rows in pieces], batches


def covariance_masks(log_probs, batches, config, **options):
    """The tokens that the policy loss selects, ``bool [N, T]`` for each micro-batch."""
    of = dict(zip(map(id, batches), log_probs, strict=True))
    measured = with_step_statistics(batches, config, lambda batch: of[id(batch)], **options)
    return [batch.policy.measured for batch in measured]


# (log pi + 2.4)(A - 0.2): 2.4 · 0.8 = 1.92, 0.32, -1.28 of the first row; 0.4 · -1.2 = -0.48 and 1.92 of the second.


@pytest.mark.parametrize("pieces", [[[0, 1]], [[0], [1]], [[1], [0]]])
@pytest.mark.parametrize(
    ("options", "expected"),
    [
        # floor(0.2 · 5) = 1: of two equal ones the first row's.
        ({"policy_loss": "kl_cov", "covariance_share": 0.2}, {0: [1, 0, 0], 1: [0, 0, 0]}),
        ({"policy_loss": "kl_cov", "covariance_share": 0.6}, {0: [1, 1, 0], 1: [0, 1, 0]}),
        ({"policy_loss": "kl_cov", "covariance_share": 1e-9}, {0: [1, 0, 0], 1: [0, 0, 0]}),  # at least one
        # All tokens within the bounds; a share of 1 leaves nothing to chance.
        ({"covariance_bounds": (0.3, 5.0), "covariance_share": 1.0}, {0: [1, 1, 0], 1: [0, 1, 0]}),
        ({"covariance_bounds": (0.3, 1.9), "covariance_share": 1.0}, {0: [0, 1, 0], 1: [0, 0, 0]}),
        # The ratio e^0.5 of the third token is clipped where A > 0, e^-0.5 of the fourth where A < 0.
        ({"covariance_bounds": (-5.0, 0.0), "covariance_share": 1.0}, {0: [0, 0, 0], 1: [0, 0, 0]}),
        (
            {"covariance_bounds": (-5.0, 0.0), "covariance_share": 1.0, "clip_low": 0.5, "clip_high": 0.7},
            {0: [0, 0, 1], 1: [1, 0, 0]},
        ),
    ],
)
def test_tokens_are_selected_over_the_whole_step(pieces, options, expected):
    log_probs, batches = covariance_batches(pieces)
    config = LossConfig.create(**{"policy_loss": "clip_cov", **options})
    masks = covariance_masks(log_probs, batches, config)
    found = {
        row: mask.int().tolist()
        for batch, part in zip(batches, masks, strict=True)
        for row, mask in zip(batch.row_index.tolist(), part, strict=True)
    }
    assert found == expected


@pytest.mark.parametrize("kind", ["clip_cov", "kl_cov"])
def test_tokens_are_selected_over_all_ranks(kind):
    config = LossConfig.create(policy_loss=kind, covariance_share=0.4, covariance_bounds=(0.0, 5.0), clip_low=1)
    log_probs, batches = covariance_batches([[1], [0]])  # rank 0 has the second row
    sent = []

    def send(data):
        sent.append(data)
        return [data]

    for pair in zip(log_probs, batches, strict=True):
        covariance_masks([pair[0]], [pair[1]], config, ranks=SimpleNamespace(rank=0, gather_bytes=send))
    found = [
        covariance_masks([own], [batch], config, ranks=SimpleNamespace(rank=rank, gather_bytes=lambda data: sent))[0]
        for rank, (own, batch) in enumerate(zip(log_probs, batches, strict=True))
    ]
    (expected,) = covariance_masks(*covariance_batches([[0, 1]]), config)
    assert expected.sum() == 2  # of all five tokens, not of each rank's
    assert torch.equal(torch.cat(found)[[1, 0]], expected)


def test_clip_cov_draws_the_same_tokens_in_any_layout():
    config = LossConfig.create(policy_loss="clip_cov", covariance_bounds=(-0.5, 5.0), covariance_share=0.4, clip_low=1)
    drawn = set()
    for seed in range(60):
        found = []
        for pieces in ([[0, 1]], [[1], [0]]):
            log_probs, batches = covariance_batches(pieces)
            masks = covariance_masks(log_probs, batches, config, seed=(seed,))
            order = torch.cat([batch.row_index for batch in batches]).argsort()
            found.append(tuple(torch.cat(masks)[order].flatten().int().tolist()))
        assert found[0] == found[1]
        assert sum(found[0]) == 2
        drawn.add(found[0])
    assert len(drawn) == 6  # every pair of the four candidates: the third token lies outside


def test_clip_cov_draws_the_same_tokens_of_branches_in_any_layout():
    """Both rows belong to one sequence, so that their tokens have the same places in it."""
    config = LossConfig.create(policy_loss="clip_cov", covariance_bounds=(-5.0, 5.0), covariance_share=0.4, clip_low=1)
    for seed in range(20):
        found = []
        for pieces in ([[0, 1]], [[1], [0]]):
            log_probs, batches = covariance_batches(pieces)
            batches = [
                replace(
                    batch,
                    row_index=torch.zeros_like(batch.row_index),
                    branches=Branches(batch.row_index, torch.full_like(batch.row_index, 5)),
                )
                for batch in batches
            ]
            masks = covariance_masks(log_probs, batches, config, seed=(seed,))
            order = torch.cat([batch.branches.index for batch in batches]).argsort()
            found.append(torch.cat(masks)[order].int().tolist())
        assert found[0] == found[1]


def test_selection_of_nothing():
    log_probs, batches = covariance_batches([[0, 1]])
    empty = [replace(batch, loss_mask=torch.zeros_like(batch.loss_mask)) for batch in batches]
    for kind in ("clip_cov", "kl_cov"):
        (mask,) = covariance_masks(log_probs, empty, LossConfig.create(policy_loss=kind))
        assert not mask.any()


def test_selected_tokens_in_the_loss():
    """Ratios 1.5 and 0.5, A = 2: the first is clipped at 1.2; the second is selected."""
    log_ratio = torch.tensor([[1.5, 0.5]], dtype=torch.float64).log().requires_grad_()
    advantages, mask = torch.tensor([[2.0]], dtype=torch.float64), torch.ones(1, 2, dtype=torch.bool)
    selected = torch.tensor([[False, True]])

    def losses(**options):
        term = policy_term(LossConfig.create(**options), log_ratio, log_ratio, advantages, mask, selected)
        (slope,) = torch.autograd.grad(term.loss.sum(), log_ratio)
        return term.loss[0].tolist(), slope[0].tolist()

    value, slope = losses(policy_loss="clip_cov")
    assert (value, slope) == (pytest.approx([-2.4, 0.0], abs=TINY), [0.0, 0.0])
    # -r A and, where selected, 3 |log r|, whose slope at r < 1 is -3.
    value, slope = losses(policy_loss="kl_cov", covariance_kl_coef=3.0)
    assert value == pytest.approx([-3.0, -1.0 + 3 * log(2)], abs=TINY)
    assert slope == pytest.approx([-3.0, -1.0 - 3.0], abs=TINY)


def test_a_selection_that_is_missing_is_an_error():
    with pytest.raises(ValueError, match=r"policy_loss='kl_cov' and batch.policy.measured is None: select the tokens"):
        term("kl_cov", [1.0], 1.0)


# p3o: the effective sample size of the step


def test_p3o_caps_the_weights_and_penalises_by_the_sample_size():
    """Ratios 2, 1/2, 1: (7/2)² / (3 · 21/4) = 7/9. A = 3, log-probs log 2, log 1/2, 0 of an old policy of 1.

    Weights 7/9, 1/2, 7/9; the penalty 2/9 (1/r + log r − 1) has the slope 2/9 (1 − 1/r): 1/9, −2/9, 0.
    """
    ratios = torch.tensor([[2.0, 0.5, 1.0]], dtype=torch.float64)
    log_probs = ratios.log().requires_grad_()
    advantages, mask = torch.tensor([[3.0]], dtype=torch.float64), torch.ones(1, 3, dtype=torch.bool)
    found = policy_term(LossConfig.create(policy_loss="p3o"), log_probs, log_probs, advantages, mask, 7 / 9)
    expected = [
        -7 / 3 * log(2) + 2 / 9 * (1 / 2 + log(2) - 1),
        3 / 2 * log(2) + 2 / 9 * (2 - log(2) - 1),
        0.0,
    ]
    assert found.loss[0].tolist() == pytest.approx(expected, abs=TINY)
    (slope,) = torch.autograd.grad(found.loss.sum(), log_probs)
    assert slope[0].tolist() == pytest.approx([-7 / 3 + 1 / 9, -3 / 2 - 2 / 9, -7 / 3], abs=TINY)
    assert found.high[0].tolist() == [True, False, True]
    assert not found.low.any()


# Of covariance_batches, r = 1, e^0.1, e^0.5, e^-0.5, 1 of five tokens.
P3O_SIZE = (2 + exp(0.1) + exp(0.5) + exp(-0.5)) ** 2 / (5 * (2 + exp(0.2) + exp(1.0) + exp(-1.0)))


@pytest.mark.parametrize("pieces", [[[0, 1]], [[0], [1]], [[1], [0]]])
def test_the_sample_size_is_that_of_the_whole_step(pieces):
    log_probs, batches = covariance_batches(pieces)
    assert policy_sample_size(log_probs, batches) == pytest.approx(P3O_SIZE, rel=1e-12)
    config = LossConfig.create(policy_loss="p3o")
    given = dict(zip(map(id, batches), log_probs, strict=True))
    filled = with_step_statistics(batches, config, lambda batch: given[id(batch)])
    assert [batch.policy.measured for batch in filled] == [pytest.approx(P3O_SIZE, rel=1e-12)] * len(pieces)
    outputs = [grpo_loss(own, batch, config) for own, batch in zip(log_probs, filled, strict=True)]
    # Micro-batches add up to the loss of the step, and the metric to the size.
    (whole,) = (
        grpo_loss(own, replace(batch, policy=replace(batch.policy, measured=P3O_SIZE)), config)
        for own, batch in zip(*covariance_batches([[0, 1]]), strict=True)
    )
    assert sum(float(output.loss) for output in outputs) == pytest.approx(float(whole.loss), rel=1e-12)
    sizes = [float(output.metrics["policy/effective_sample_size"]) for output in outputs]
    assert sum(sizes) == pytest.approx(P3O_SIZE, rel=1e-9)


def test_the_sample_size_is_that_of_all_ranks():
    log_probs, batches = covariance_batches([[1], [0]])
    sent = []

    def send(data):
        sent.append(data)
        return [data]

    alone = [
        policy_sample_size([own], [batch], ranks=SimpleNamespace(gather_bytes=send))
        for own, batch in zip(log_probs, batches, strict=True)
    ]
    assert max(abs(size - P3O_SIZE) for size in alone) > 0.01  # of each rank's own tokens
    for own, batch in zip(log_probs, batches, strict=True):
        found = policy_sample_size([own], [batch], ranks=SimpleNamespace(gather_bytes=lambda data: sent))
        assert found == pytest.approx(P3O_SIZE, rel=1e-12)


def test_the_sample_size_at_its_bounds():
    log_probs, batches = covariance_batches([[0, 1]])
    (batch,) = batches
    fresh = replace(batch, log_probs=replace(batch.log_probs, old=None))

    def never(batch):
        raise AssertionError("a forward pass for ratios of 1")

    config = LossConfig.create(policy_loss="p3o")
    (filled,) = with_step_statistics([fresh], config, never)
    assert filled.policy.measured == 1.0
    # All ratios 1: the policy gradient of reinforce, without a penalty.
    expected = grpo_loss(log_probs[0], fresh, policy_loss="reinforce").loss
    assert float(grpo_loss(log_probs[0], filled, config).loss) == pytest.approx(float(expected), rel=1e-12)
    nothing = replace(batch, loss_mask=torch.zeros_like(batch.loss_mask))
    assert policy_sample_size(log_probs, [nothing]) == 1.0
    # Ratios of e^20, the largest that there are, for e^50 and e^30, and three of e^-20: 2/5.
    far = torch.tensor([[50.0, 30.0, -50.0], [-50.0, -50.0, 0.0]], dtype=torch.float64)
    assert policy_sample_size([batch.log_probs.old + far], [batch]) == pytest.approx(2 / 5)
    # Three ratios of 1 that nobody measured, beside e^-0.5 and 1.
    (first, second), parts = covariance_batches([[0], [1]])
    mixed = policy_sample_size(
        [None, second], [replace(parts[0], log_probs=replace(parts[0].log_probs, old=None)), parts[1]]
    )
    assert mixed == pytest.approx((4 + exp(-0.5)) ** 2 / (5 * (4 + exp(-1.0))), rel=1e-12)
    assert policy_sample_size([first, second], parts) != pytest.approx(mixed, rel=1e-3)
    # A ratio that all tokens share changes no share.
    assert policy_sample_size([batch.log_probs.old + 0.7], [batch]) == pytest.approx(1.0)


def test_a_sample_size_that_is_missing_is_an_error():
    with pytest.raises(ValueError, match=r"policy_loss='p3o' and batch.policy.measured is None: compute the effective"):
        term("p3o", [1.0], 1.0)
