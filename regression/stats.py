"""Statistics: exact tests, a robust paired estimate over blocks, one correction for many tests.

Owns: every formula. Refuses to know: requests, tokens, metrics. Invariants: pure and seeded, the same input
gives the same floats; None where there are too few values, never 0; p-values are one-sided against "worse".

Usage: `estimate = block_estimate(log_ratios, blocks, min_values=16, min_blocks=4)`.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.special import bdtrc
from scipy.stats import beta, binomtest, t

TRIMMED_FRACTION = 0.2
_CHUNK = 1 << 22
_NODES, _WEIGHTS = np.polynomial.legendre.leggauss(128)
_SMALLEST_P = 1e-12


def quantile(values: Sequence[float], fraction: float) -> float | None:
    """The smallest value that at least `fraction` of `values` do not exceed.

    None when fewer than one value is expected beyond it: p99 needs 100 values, p90 ten.
    """
    if not values or len(values) * (1 - fraction) < 1 - 1e-9:
        return None
    rank = math.ceil(fraction * len(values) - 1e-9)
    return float(sorted(values)[max(rank, 1) - 1])


@dataclass(frozen=True, slots=True)
class Estimate:
    """A trimmed mean with its standard error over blocks; `dof` degrees of freedom for its t intervals."""

    value: float
    standard_error: float
    dof: int
    num_values: int
    num_blocks: int

    def bound(self, tail: float) -> tuple[float, float]:
        """Lower and upper end, each of which the truth lies beyond with chance `tail`."""
        width = float(t.ppf(1 - tail, self.dof)) * self.standard_error
        return self.value - width, self.value + width

    def p_above(self, threshold: float) -> float:
        """How likely a value this high is when the truth is `threshold`: small means above it."""
        return float(t.sf((self.value - threshold) / self.standard_error, self.dof))

    def detectable(self, threshold: float, tail: float, power: float = 0.9) -> float:
        """The truth that `p_above(threshold) < tail` would find with chance `power`."""
        quantiles = float(t.ppf(1 - tail, self.dof) + t.ppf(power, self.dof))
        return threshold + quantiles * self.standard_error


def block_estimate(
    values: Sequence[float],
    blocks: Sequence[Hashable],
    *,
    min_values: int = 2,
    min_blocks: int = 2,
    extra_sd: float = 0.0,
) -> Estimate | None:
    """The trimmed mean of `values` (a fifth cut off at each end) with a standard error over blocks.

    Values of one block were measured at the same moment, so a disturbance hits them together: the block is
    the independent unit. The error is the sandwich of the winsorised values' sums by block (Yuen's error
    for a trimmed mean, by clusters): a stalled request or a disturbed block can move it only so far, which
    the error of a bootstrap over few blocks cannot say. `extra_sd` is spread that no repetition inside
    these data shows. None below the two minima.
    """
    codes = {block: code for code, block in enumerate(dict.fromkeys(blocks))}
    num_blocks, num_values = len(codes), len(values)
    if num_values < max(min_values, 2) or num_blocks < max(min_blocks, 2):
        return None
    data = np.asarray(values, dtype=np.float64)
    ordered = np.sort(data)
    cut = int(TRIMMED_FRACTION * num_values)
    winsorised = np.clip(data, ordered[cut], ordered[num_values - 1 - cut])
    sums = np.bincount([codes[block] for block in blocks], weights=winsorised - winsorised.mean())
    correction = num_blocks / (num_blocks - 1)
    kept = num_values * (1 - 2 * TRIMMED_FRACTION)
    standard_error = math.sqrt(correction * float(np.sum(sums**2))) / kept
    return Estimate(
        value=float(_trimmed_mean(ordered)),
        standard_error=max(math.hypot(standard_error, extra_sd), 1e-9),
        dof=num_blocks - 1,
        num_values=num_values,
        num_blocks=num_blocks,
    )


def _trimmed_mean(ordered: np.ndarray) -> float:
    """Mean of sorted values without TRIMMED_FRACTION at each end; a value on the edge counts in part."""
    num_values = len(ordered)
    edge = TRIMMED_FRACTION * num_values
    ends = np.clip(np.arange(num_values + 1), edge, num_values - edge)
    return float(np.diff(ends) @ ordered) / (num_values - 2 * edge)


def quantile_ratio_range(
    base: Mapping[Hashable, Sequence[float]],
    other: Mapping[Hashable, Sequence[float]],
    fraction: float,
    *,
    tail: float,
    seed: Sequence[int],
    num_resamples: int,
) -> tuple[float, float] | None:
    """Range of the log-ratio of a quantile, `other` over `base`: percentiles of a paired block bootstrap.

    Values by block; both sides have the same blocks, and a block is drawn with both sides' values in it,
    so what hit both stays paired. None when a side has too few values, or there are fewer than two blocks.
    """
    assert base.keys() == other.keys()
    sides = [
        [(code, value) for code, block in enumerate(base) for value in side[block]] for side in (base, other)
    ]
    known = [quantile([value for _, value in side], fraction) for side in sides]
    if len(base) < 2 or any(value is None or value <= 0 for value in known):
        return None
    rng = np.random.default_rng(list(seed))
    counts = rng.multinomial(len(base), [1 / len(base)] * len(base), size=num_resamples)
    drawn = [_quantiles(side, counts, fraction) for side in sides]
    # A gap may be 0 (two chunks in one read), and so may a draw's quantile: it has no ratio.
    usable = (drawn[0] > 0) & (drawn[1] > 0)
    if not usable.any():
        return None
    ratios = np.log(drawn[1][usable] / drawn[0][usable])
    low, high = np.quantile(ratios, [tail, 1 - tail], method="nearest")
    return float(low), float(high)


def _quantiles(side: Sequence[tuple[int, float]], counts: np.ndarray, fraction: float) -> np.ndarray:
    """The quantile of (block, value) pairs under each row of block counts [R, blocks] -> [R]."""
    ordered = sorted(side, key=lambda pair: pair[1])
    codes = np.asarray([code for code, _ in ordered])
    values = np.asarray([value for _, value in ordered], dtype=np.float64)
    rows = max(1, _CHUNK // len(values))
    found = []
    for first in range(0, len(counts), rows):
        ends = np.cumsum(counts[first : first + rows][:, codes], axis=1)
        # A draw may hold none of a side's values; it then counts with the smallest.
        rank = np.maximum(np.ceil(fraction * ends[:, -1:] - 1e-9), 1)
        found.append(values[np.argmax(ends >= rank, axis=1)])
    return np.concatenate(found)


def holm(p_values: Mapping[str, float], weights: Mapping[str, float] | None = None) -> dict[str, float]:
    """Each p-value adjusted (Holm 1979), so that all together keep the false-alarm rate of one.

    `weights` (1 where not given) fixes beforehand how much of that rate a test gets of what is left.
    """
    weights = {name: (weights or {}).get(name, 1.0) for name in p_values}
    adjusted: dict[str, float] = {}
    running, left = 0.0, sum(weights.values())
    for name in sorted(p_values, key=lambda name: (p_values[name] / weights[name], name)):
        running = max(running, min(1.0, p_values[name] * left / weights[name]))
        adjusted[name] = running
        left -= weights[name]
    return adjusted


def discordant_p(num_worse: int, num_better: int) -> float | None:
    """Exact McNemar test, one-sided: pairs that differ fall either way with equal chance.

    None without such pairs: a test that could not have rejected takes no share of the error rate (Tarone
    1990).
    """
    total = num_worse + num_better
    return float(binomtest(num_worse, total, 0.5, alternative="greater").pvalue) if total else None


def upper_fraction(num_hits: int, num_trials: int, tail: float = 0.05) -> float | None:
    """Clopper-Pearson upper bound of a share, beyond which the truth lies with chance `tail`."""
    if num_trials == 0:
        return None
    return 1.0 if num_hits == num_trials else float(beta.ppf(1 - tail, num_hits + 1, num_trials - num_hits))


def excess_p(
    values: Sequence[float],
    *,
    scale: float,
    num_floor: int,
    num_draws: int | None = None,
    min_value: float = 0.0,
) -> float:
    """How likely values this far above the floor's largest are, were they of the floor's own kind.

    `scale` is the largest of `num_floor` floor values (or something larger). Beyond it the floor's tail is
    assumed to fall at least as fast as 1/x: a value s times as large is at least s times rarer. That is
    heavier than any rounding noise we measured (about 1/x^2). For k = 1, 2, 4, ... the k-th largest value is
    tested with a share 1/2, 1/4, 1/8, ... of the error rate, and the smallest p-value is returned.
    Values below `min_value` never count. `num_draws`: when each value is the largest of several draws,
    how many draws there were in all.
    """
    num_draws = len(values) if num_draws is None else num_draws
    if num_floor == 0 or not values:
        return 1.0
    ordered = sorted(values, reverse=True)
    smallest, rank, share = 1.0, 1, 0.5
    while rank <= len(ordered):
        value = ordered[rank - 1]
        if value < min_value or value <= scale:
            break
        smallest = min(smallest, _exceedance_p(rank, num_draws, num_floor, value / scale) / share)
        rank, share = rank * 2, share / 2
    return smallest


def _exceedance_p(rank: int, num_values: int, num_floor: int, factor: float) -> float:
    """P(at least `rank` of `num_values` exceed `factor` times the largest of `num_floor`), tails 1/x.

    The chance u that one value exceeds the floor's largest is Beta(1, num_floor) whatever the noise is;
    integrated over its quantiles.
    """
    u = -np.expm1(np.log1p(-(_NODES + 1) / 2) / num_floor)
    p_value = float(_WEIGHTS @ bdtrc(rank - 1, num_values, u / factor)) / 2
    return max(p_value, _SMALLEST_P)
