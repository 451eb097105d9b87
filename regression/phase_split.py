"""How a change of the end-to-end time splits into phases: exactly, at the mean and in the tails.

Owns: matching of two sets of requests, the split and its intervals. Refuses to know: spans, engines, what is
reported. Invariants: at each place the phases' changes sum to the end-to-end change; pairs stay pairs, and
blocks blocks, in every resample; sets that asked different things are weighted until they are alike in
length; seeded, and None where there are too few requests.

A place in the tail is a window of ranks, since no single request is the p99: "p99" is the mean over the
slowest 2 %, "p90" over ranks 85 to 95 %, "p50" over 45 to 55 %.

Usage: `matched = match(base, candidate); splits = split(matched, PLACES, seed=0)`.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.stats import t

from firstdiff.regression.trace_phases import TracedRequest

Floats = NDArray[np.float64]
PLACES: dict[str, tuple[float, float]] = {
    "mean": (0.0, 1.0),
    "p50": (0.45, 0.55),
    "p90": (0.85, 0.95),
    "p99": (0.98, 1.0),
}
"""Windows of ranks by end-to-end time, as fractions."""
MIN_IN_WINDOW = 2.0
TAIL = 0.05
"""Chance that the truth lies beyond each end of an interval."""


@dataclass(frozen=True, slots=True)
class Matched:
    """Two sets that can be compared: pairs in equal order, or unpaired with weights that make them alike.

    `blocks` name what was disturbed together: of each pair, or of each request of either side.
    """

    base: list[TracedRequest]
    candidate: list[TracedRequest]
    is_paired: bool
    base_weights: Floats
    candidate_weights: Floats
    blocks: list[str]
    num_left_out: int


@dataclass(frozen=True, slots=True)
class Range:
    """An estimate with the ends of its interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Split:
    """One place: the end-to-end change in ns and each phase's part of it; `num_requests` lie there."""

    place: str
    base_ns: float
    candidate_ns: float
    change: Range
    parts: dict[str, Range]
    base_parts_ns: dict[str, float]
    candidate_parts_ns: dict[str, float]
    num_requests: float


def match(base: Sequence[TracedRequest], candidate: Sequence[TracedRequest]) -> Matched:
    """Pair by case where the same cases ran on both sides; else by strata of prompt and output length."""
    of_base = {one.key: one for one in base if one.key is not None}
    of_candidate = {one.key: one for one in candidate if one.key is not None}
    shared = [key for key in of_base if key in of_candidate]
    if shared and 2 * len(shared) >= max(len(of_base), len(of_candidate)):
        ones, others = [of_base[key] for key in shared], [of_candidate[key] for key in shared]
        ones_weights = np.ones(len(shared))
        blocks = [one.block or str(index) for index, one in enumerate(ones)]
        left_out = len(base) + len(candidate) - 2 * len(shared)
        return Matched(ones, others, True, ones_weights, ones_weights, blocks, left_out)
    return _stratified(base, candidate)


def _stratified(base: Sequence[TracedRequest], candidate: Sequence[TracedRequest]) -> Matched:
    sides: list[dict[tuple[int, int], list[TracedRequest]]] = [defaultdict(list), defaultdict(list)]
    for side, requests in zip(sides, (base, candidate), strict=True):
        for one in requests:
            side[_stratum(one)].append(one)
    shared = [stratum for stratum in sides[0] if stratum in sides[1]]
    chosen: list[list[TracedRequest]] = [[], []]
    weights: list[list[float]] = [[], []]
    for stratum in shared:
        counts = [len(side[stratum]) for side in sides]
        for index, side in enumerate(sides):
            chosen[index] += side[stratum]
            weights[index] += [min(counts) / counts[index]] * counts[index]
    blocks = [f"b{index}" for index in range(len(chosen[0]))] + [
        f"c{index}" for index in range(len(chosen[1]))
    ]
    return Matched(
        chosen[0],
        chosen[1],
        False,
        np.asarray(weights[0]),
        np.asarray(weights[1]),
        blocks,
        len(base) + len(candidate) - len(chosen[0]) - len(chosen[1]),
    )


def _stratum(request: TracedRequest) -> tuple[int, int]:
    """Powers of two of the tokens to compute and of those put out; -1 where the trace does not say."""
    num_prompt, num_output = request.num_prompt_tokens, request.num_output_tokens
    num_computed = None if num_prompt is None else num_prompt - (request.num_cached_tokens or 0)
    return tuple(-1 if count is None else max(count, 0).bit_length() for count in (num_computed, num_output))  # type: ignore[return-value]


class Resamples:
    """The weights of both sides in each resample, the same for every question that is asked of them."""

    def __init__(self, matched: Matched, *, seed: int, num_resamples: int = 1000) -> None:
        self.matched = matched
        rng = np.random.default_rng(seed)
        if matched.is_paired:
            codes = _codes(matched.blocks)
            counts = _draw(rng, codes, num_resamples)
            num_blocks = int(codes.max()) + 1
            self.base = self.candidate = counts * matched.base_weights
        else:
            num_base = len(matched.base)
            self.base = _draw(rng, np.arange(num_base), num_resamples) * matched.base_weights
            num_candidate = len(matched.candidate)
            drawn = _draw(rng, np.arange(num_candidate), num_resamples)
            self.candidate = drawn * matched.candidate_weights
            num_blocks = min(num_base, num_candidate)
        dof = max(num_blocks - 1, 1)
        self._stretch = float(t.ppf(1 - TAIL, dof)) * math.sqrt(num_blocks / dof)

    def range_of(self, statistic: Callable[[Floats, Floats], Floats]) -> list[Range]:
        """`statistic(base weights [R, n], candidate weights [R, m]) -> [R, k]` with intervals, k of them."""
        matched = self.matched
        value = statistic(matched.base_weights[None], matched.candidate_weights[None])[0]
        drawn = statistic(self.base, self.candidate)
        # Percentiles of few blocks are too narrow: Student's t on the spread instead, which is by as much too
        # small as a variance divided by n and not n - 1.
        widths = self._stretch * np.nanstd(drawn, axis=0)
        lows, highs = value - widths, value + widths
        return [
            Range(float(v), float(low), float(high)) for v, low, high in zip(value, lows, highs, strict=True)
        ]


def _codes(blocks: Sequence[str]) -> NDArray[np.int64]:
    known = {block: code for code, block in enumerate(dict.fromkeys(blocks))}
    return np.asarray([known[block] for block in blocks])


def _draw(rng: np.random.Generator, codes: NDArray[np.int64], num_resamples: int) -> Floats:
    """How often each value counts in each resample of whole blocks [R, n]."""
    num_blocks = int(codes.max()) + 1
    counts = rng.multinomial(num_blocks, [1 / num_blocks] * num_blocks, size=num_resamples)
    return counts[:, codes].astype(np.float64)


def split(resamples: Resamples, place: str) -> Split | None:
    """The split at one of PLACES; None when fewer than MIN_IN_WINDOW requests of a side lie there."""
    matched = resamples.matched
    window = PLACES[place]
    num_inside = (window[1] - window[0]) * min(len(matched.base), len(matched.candidate))
    if num_inside < MIN_IN_WINDOW - 1e-9:
        return None
    phases = list(matched.base[0].phases_ns)
    base, candidate = table_of(matched.base, phases), table_of(matched.candidate, phases)

    def change(base_weights: Floats, candidate_weights: Floats) -> Floats:
        parts = window_mean(candidate, candidate_weights, window) - window_mean(base, base_weights, window)
        return np.concatenate([parts, parts.sum(axis=1, keepdims=True)], axis=1)

    *parts, total = resamples.range_of(change)
    ends = [
        window_mean(table, weights[None], window)[0]
        for table, weights in ((base, matched.base_weights), (candidate, matched.candidate_weights))
    ]
    return Split(
        place=place,
        base_ns=float(ends[0].sum()),
        candidate_ns=float(ends[1].sum()),
        change=total,
        parts=dict(zip(phases, parts, strict=True)),
        base_parts_ns=dict(zip(phases, map(float, ends[0]), strict=True)),
        candidate_parts_ns=dict(zip(phases, map(float, ends[1]), strict=True)),
        num_requests=num_inside,
    )


def table_of(requests: Sequence[TracedRequest], phases: Sequence[str]) -> Floats:
    """Durations in ns [n, phases], in the order of `requests`."""
    return np.asarray([[one.phases_ns[phase] for phase in phases] for one in requests], dtype=np.float64)


def window_mean(table: Floats, weights: Floats, window: tuple[float, float]) -> Floats:
    """Mean phases [R, P] over requests whose rank by total time lies in `window`, under weights [R, n]."""
    order = np.argsort(table.sum(axis=1), kind="stable")
    ordered, weights = table[order], weights[:, order]
    ends = np.cumsum(weights, axis=1)
    totals = ends[:, -1:]
    low, high = (fraction * totals for fraction in window)
    inside = np.clip(ends, low, high) - np.clip(ends - weights, low, high)
    result: Floats = (inside @ ordered) / (high - low)
    return result
