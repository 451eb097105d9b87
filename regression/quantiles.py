"""Exact latency quantiles of both sides, with paired bootstrap ranges: where the tails went.

Owns: pooling by block and the choice of the tail worth a sentence. Refuses to know: pass and fail, which
rest on paired ratios (latency.py); tails need more requests than a gate usually has. Invariants: no quantile
is given for fewer values than it needs; gaps are between chunks, whatever they hold, and never called TPOT.

Usage: `finding = judge_quantiles(base, candidate, config)`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from firstdiff.regression.pairing import Pair, blocks_of, both_ok, took_turns
from firstdiff.regression.stats import quantile, quantile_ratio_range
from firstdiff.regression.summary import RunView, e2e_ns, gaps_ns, tpot_ns, ttft_ns
from firstdiff.regression.verdict import CompareConfig, Finding, Interval, QuantileEvidence
from firstdiff.tracing.records import RequestRow

FRACTIONS = (0.5, 0.9, 0.99)
_RANGE_TAIL = 0.05


def _one(value: float | None) -> list[float]:
    return [] if value is None else [value]


_VALUES: dict[str, Callable[[RequestRow], Sequence[float]]] = {
    "ttft": lambda row: _one(ttft_ns(row)),
    "itl": gaps_ns,
    "tpot": lambda row: _one(tpot_ns(row)),
    "e2e": lambda row: _one(e2e_ns(row)),
}


def judge_quantiles(base: RunView, candidate: RunView, config: CompareConfig) -> Finding | None:
    """A finding that never gates: all quantiles, and the tail that got certainly worse by most."""
    pairs = both_ok(base, candidate)
    evidence: list[QuantileEvidence] = []
    for number, metric in enumerate(_VALUES):
        evidence += _evidence(pairs, metric, number, base, candidate, config)
    if not evidence:
        return None
    worse = [
        one
        for one in evidence
        if one.interval is not None and one.interval.low > config.latency_margin and one.fraction > 0.5
    ]
    worst = max(worse, key=lambda one: one.interval.low if one.interval is not None else 0.0, default=None)
    title = "no tail is certainly longer by more than the margin"
    if worst is not None and worst.change is not None and worst.interval is not None:
        title = (
            f"p{worst.fraction * 100:.0f} of {worst.metric} is {worst.change:+.1%} "
            f"[{worst.interval.low:+.1%}, {worst.interval.high:+.1%}]"
        )
    return Finding(
        status="pass",
        part="latency",
        title=title,
        gates=False,
        evidence=list(evidence),
        interval=None if worst is None else worst.interval,
        n=len(pairs),
    )


def _evidence(
    pairs: Sequence[Pair],
    metric: str,
    number: int,
    base: RunView,
    candidate: RunView,
    config: CompareConfig,
) -> list[QuantileEvidence]:
    blocks = blocks_of(pairs, by_turns=took_turns(base, candidate, config), config=config)
    sides: tuple[dict[object, list[float]], dict[object, list[float]]] = ({}, {})
    for key, one, other in pairs:
        for side, row in zip(sides, (one, other), strict=True):
            side.setdefault(blocks[key], []).extend(_VALUES[metric](row))
    if not any(values for side in sides for values in side.values()):
        return []
    found = []
    for fraction in FRACTIONS:
        ends = [quantile([value for values in side.values() for value in values], fraction) for side in sides]
        change = None
        if ends[0] is not None and ends[1] is not None and ends[0] > 0:
            change = ends[1] / ends[0] - 1
        ratio = quantile_ratio_range(
            *sides,
            fraction,
            tail=_RANGE_TAIL,
            seed=(config.seed, number, int(fraction * 100)),
            num_resamples=config.num_resamples,
        )
        found.append(
            QuantileEvidence(
                metric=metric,
                fraction=fraction,
                base_ns=ends[0],
                candidate_ns=ends[1],
                change=None if change is None else _tidy(change),
                interval=None if ratio is None else Interval(*(_tidy(math.expm1(end)) for end in ratio)),
            )
        )
    return found


def _tidy(value: float) -> float:
    return float(f"{value:.6g}")
