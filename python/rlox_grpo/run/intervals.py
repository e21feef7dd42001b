"""95 % confidence intervals of an evaluation, over its prompts.

The samples of a prompt resemble each other, so the prompts are the independent observations (Miller, arXiv:2411.00640,
section 2.2). A normal interval is too narrow for few prompts, and has no width where all samples are right
(arXiv:2503.01747). The intervals here have neither fault: they take Student's t with one degree of freedom fewer than
prompts, and shares and differences have the corrections that their functions name.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

Float64Array = NDArray[np.float64]

NORMAL = 1.959963984540054
"""The 0.975 quantile of the normal distribution."""

_FEW = (12.706205, 4.302653, 3.182446, 2.776445)
"""0.975 quantiles of Student's t for 1 to 4 degrees of freedom."""


def student_quantile(degrees: int) -> float:
    """Return the 0.975 quantile of Student's t for at least 1 degree of freedom, exact to 0.2 %.

    From 5 degrees on by the series in powers of 1 / degrees (Abramowitz and Stegun, 26.7.5).
    """
    if degrees <= len(_FEW):
        return _FEW[degrees - 1]
    z, n = NORMAL, float(degrees)
    first, second = (z**3 + z) / 4, (5 * z**5 + 16 * z**3 + 3 * z) / 96
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    return z + first / n + second / n**2 + third / n**3


def share_interval(right: Any, counts: Any) -> tuple[float, float]:
    """Return the interval of a share: Wilson's, with the effective number of samples (Korn and Graubard, 1998).

    The effective number is p (1 − p) / v, with v the variance of the share p between prompts: the number of independent
    samples that would tell as much. The effective number is at most the number of samples, and the number of prompts if
    p is 0 or 1.

    Args:
        right: ``[P]``, the number of right samples of each prompt, whole or not.
        counts: ``[P]``, the number of its samples. Prompts without samples are left out.

    Returns:
        The lower and the upper limit. With one prompt they are 0 and 1; without any, NaN.
    """
    right, counts = np.asarray(right, np.float64), np.asarray(counts, np.float64)
    right, counts = right[counts > 0], counts[counts > 0]
    prompts = len(counts)
    if prompts < 2:
        return (0.0, 1.0) if prompts else (math.nan, math.nan)
    share = min(1.0, float(right.sum() / counts.sum()))
    effective = float(prompts)
    if 0 < share < 1:
        # The variance of a ratio of sums, by its linearisation.
        residuals = (right - share * counts) / counts.mean()
        variance = float((residuals**2).sum()) / (prompts - 1) / prompts
        limit = float(counts.sum())
        effective = min(limit, share * (1 - share) / variance) if variance > 0 else limit
    t = student_quantile(prompts - 1)
    centre = (share + t**2 / (2 * effective)) / (1 + t**2 / effective)
    width = t * math.sqrt(share * (1 - share) / effective + t**2 / (4 * effective**2)) / (1 + t**2 / effective)
    return max(0.0, min(share, centre - width)), min(1.0, max(share, centre + width))


def mean_interval(values: Any) -> tuple[float, float]:
    """Return the interval of the mean of ``values [P]``, one for each prompt; NaN with fewer than two.

    The interval is Student's, without the skewness of the values: few long completions among short ones make Student's
    own interval too narrow. The skewness is removed by Hall's cubic transformation of the t statistic (Journal of the
    Royal Statistical Society B 54, 1992). Without skewness the interval is Student's own.
    """
    values = np.asarray(values, np.float64)
    values = values[~np.isnan(values)]
    prompts = len(values)
    if prompts < 2:
        return math.nan, math.nan
    mean, spread = float(values.mean()), float(values.std(ddof=1))
    if spread == 0:
        return mean, mean
    standardised = (values - mean) / spread
    skewness = float((standardised**3).mean()) * (prompts / (prompts - 1)) ** 1.5
    limit = student_quantile(prompts - 1)
    low, high = (_undo_skewness(quantile, skewness, prompts) for quantile in (limit, -limit))
    error = spread / math.sqrt(prompts)
    return mean - low * error, mean - high * error


def _undo_skewness(quantile: float, skewness: float, prompts: int) -> float:
    """Return the t statistic t whose transformation x = t + s t² / 3 + s² t³ / 27 + s / 6 is ``quantile``.

    s is the skewness divided by √P (Hall, 1992). There is one solution, because 1 + s (x − s / 6) = (1 + s t / 3)³.
    """
    scaled = skewness / math.sqrt(prompts)
    shifted = quantile - scaled / 6
    if abs(scaled) < 1e-6:
        return shifted
    return 3 / scaled * float(np.cbrt(1 + scaled * shifted) - 1)


def difference_interval(differences: Any, samples: int) -> tuple[float, float]:
    """Return the interval of the mean of paired differences in [−1, 1], one for each prompt.

    A pair of samples is added, half of it without a difference and a quarter of it with each sign, so that equal
    differences have a width. It is 1 / ``samples`` of a prompt. Agresti and Min (Statistics in Medicine 24, 2005) add
    two pairs to an interval with the normal quantile. With Student's t, which is wider, one pair covers as often
    (``benches/eval_intervals.py``).

    Args:
        differences: ``[P]``, the difference of the shares of right samples of each prompt; NaN is left out.
        samples: samples of each prompt.

    Returns:
        The lower and the upper limit. With one prompt they are −1 and 1; without any, NaN.
    """
    values = np.asarray(differences, np.float64)
    values = values[~np.isnan(values)]
    if len(values) < 2:
        return (-1.0, 1.0) if len(values) else (math.nan, math.nan)
    total = len(values) + 1 / samples
    mean = float(values.sum()) / total
    variance = (float((values**2).sum()) + 0.5 / samples) / total - mean**2
    width = student_quantile(len(values) - 1) * math.sqrt(variance / total)
    return max(-1.0, mean - width), min(1.0, mean + width)
