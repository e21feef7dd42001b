"""Paired comparisons over few seeds: bootstrap intervals, Student's t, and Holm's correction, in NumPy alone."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

RESAMPLES = 10_000


def t_tail(t: float, freedom: int) -> float:
    """P(T > t) for t ≥ 0, by Simpson's rule over the density after u = atan(x / √freedom)."""
    # With x = √ν tan u the density of T becomes cos(u)^(ν − 1) / B(1/2, ν/2) on (−π/2, π/2).
    points = np.linspace(math.atan(t / math.sqrt(freedom)), math.pi / 2, 2001)
    values = np.cos(points) ** (freedom - 1)
    weights = np.ones(len(points))
    weights[1:-1:2], weights[2:-1:2] = 4, 2
    area = float((values * weights).sum()) * (points[1] - points[0]) / 3
    log_beta = math.lgamma(0.5) + math.lgamma(freedom / 2) - math.lgamma((freedom + 1) / 2)
    return area / math.exp(log_beta)


def t_quantile(tail: float, freedom: int) -> float:
    """The t with P(T > t) = tail, tail below one half, by bisection."""
    low, high = 0.0, 1e6
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if t_tail(middle, freedom) > tail else (low, middle)
    return (low + high) / 2


def paired_p_value(differences: Sequence[float]) -> float:
    """Two-sided p of Student's paired t test; NaN with fewer than two differences, 0 or 1 if they are all equal."""
    values = np.asarray(differences, dtype=np.float64)
    if len(values) < 2:
        return math.nan
    deviation = float(values.std(ddof=1))
    if deviation == 0:
        return float(values.mean() == 0)
    return 2 * t_tail(abs(float(values.mean())) / (deviation / math.sqrt(len(values))), len(values) - 1)


def bootstrap_interval(differences: Sequence[float], *, level: float = 0.95, seed: int = 0) -> tuple[float, float]:
    """Expanded percentile interval of the mean (Hesterberg, arXiv:1411.5279, section 5.3); NaN below 3 differences.

    The plain percentile interval of n values is too narrow, by √((n − 1)/n) and by the normal quantile in place of
    Student's. Its percentiles are therefore taken at Φ(∓ √(n/(n − 1)) t): 0.4 % and 99.6 % instead of 2.5 % and 97.5 %
    with 8 values.
    """
    values = np.asarray(differences, dtype=np.float64)
    count = len(values)
    if count < 3:
        return math.nan, math.nan
    means = values[np.random.default_rng(seed).integers(count, size=(RESAMPLES, count))].mean(axis=1)
    reach = math.sqrt(count / (count - 1)) * t_quantile((1 - level) / 2, count - 1)
    tail = 0.5 * math.erfc(reach / math.sqrt(2))
    low, high = np.quantile(means, [tail, 1 - tail])
    return float(low), float(high)


def holm(p_values: Sequence[float]) -> list[float]:
    """Return adjusted p values (Holm 1979); a NaN stays one and is not counted."""
    adjusted = [math.nan] * len(p_values)
    order = sorted((p, place) for place, p in enumerate(p_values) if not math.isnan(p))
    worst = 0.0
    for rank, (p, place) in enumerate(order):
        worst = max(worst, min(1.0, (len(order) - rank) * p))
        adjusted[place] = worst
    return adjusted
