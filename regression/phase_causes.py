"""What goes with a change of a phase: speed per token, another workload, attributes of requests.

Owns: the normalised rates, the share of the workload, the ranking of attributes. Refuses to know: verdicts,
how it is printed. Invariants: a longer prompt is never called slowness: what more tokens cost at base's
speed is apart from what each costs more; a rate has the unit in its name; attributes are ranked by exact
tests with one correction for all.

Usage: `rates(resamples, base, candidate); shifts(matched); ranked_attributes(matched, "prefill")`.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from typing import Literal

import msgspec
import numpy as np
from scipy.stats import mannwhitneyu, spearmanr

from firstdiff.regression.phase_split import Floats, Matched, Range, Resamples
from firstdiff.regression.stats import holm
from firstdiff.regression.trace_phases import TracedRequest

NUM_ATTRIBUTES = 5
MIN_GROUP = 5
SIGNIFICANCE = 0.05


class Rate(msgspec.Struct, frozen=True, kw_only=True):
    """A phase's time per unit of work in ns on both sides, and the change as a fraction with its interval."""

    phase: str
    unit: str
    base_ns: float
    candidate_ns: float
    change: Range
    num_base: int
    num_candidate: int


class Shift(msgspec.Struct, frozen=True, kw_only=True):
    """Why a phase's mean changed: other amounts of work, or another speed; both in ns, they sum to it."""

    phase: str
    unit: str
    base_units: float
    candidate_units: float
    by_workload_ns: float
    by_speed_ns: float


class Attribute(msgspec.Struct, frozen=True, kw_only=True):
    """An attribute that goes with the change. `effect`: a rank correlation for numbers; for other values the

    chance that a request with `value` changed more than one without, less a half, doubled. Both are -1..1.
    """

    name: str
    kind: Literal["number", "value"]
    value: str | None
    effect: float
    p_value: float
    num_requests: int


_UNITS = {"prefill": "uncached prompt token", "decode": "output token"}


def _units(request: TracedRequest, phase: str) -> int | None:
    """The work of a phase: prompt tokens to compute, output tokens after the first; None when not known."""
    if phase == "prefill":
        if request.num_prompt_tokens is None:
            return None
        return max(request.num_prompt_tokens - (request.num_cached_tokens or 0), 1)
    return None if request.num_output_tokens is None else max(request.num_output_tokens - 1, 1)


def rates(
    resamples: Resamples, base: Sequence[TracedRequest], candidate: Sequence[TracedRequest]
) -> list[Rate]:
    """Time per uncached prompt token, per output token, and of the queue per request ahead in it.

    `base` and `candidate` are all requests of the sides, also those left out: they were ahead of others.
    """
    matched = resamples.matched
    found = []
    for phase, unit in _UNITS.items():
        units = [[_units(one, phase) for one in side] for side in (matched.base, matched.candidate)]
        rate = _rate(resamples, phase, unit, units)
        if rate is not None:
            found.append(rate)
    ahead = [
        _num_ahead(mine, everybody)
        for mine, everybody in ((matched.base, base), (matched.candidate, candidate))
    ]
    rate = _rate(resamples, "queue", "request ahead", ahead)
    return found if rate is None else [*found, rate]


def _rate(resamples: Resamples, phase: str, unit: str, units: Sequence[Sequence[int | None]]) -> Rate | None:
    matched = resamples.matched
    if phase not in matched.base[0].phases_ns or any(None in side for side in units):
        return None
    work = [np.asarray(side, dtype=np.float64) for side in units]
    times = [
        np.asarray([one.phases_ns[phase] for one in side], dtype=np.float64)
        for side in (matched.base, matched.candidate)
    ]
    # Who had nobody ahead waited for no one.
    times = [np.where(amount > 0, time, 0.0) for time, amount in zip(times, work, strict=True)]
    counts = [int((amount > 0).sum()) for amount in work]
    if min(counts) < MIN_GROUP:
        return None

    def change(base_weights: Floats, candidate_weights: Floats) -> Floats:
        per_unit = [
            (weights @ time) / np.maximum(weights @ amount, 1e-300)
            for weights, time, amount in zip((base_weights, candidate_weights), times, work, strict=True)
        ]
        with np.errstate(divide="ignore", invalid="ignore"):
            result: Floats = (per_unit[1] / per_unit[0] - 1)[:, None]
        return result

    per_unit = [
        float((weights @ time) / (weights @ amount))
        for weights, time, amount in zip(
            (matched.base_weights, matched.candidate_weights), times, work, strict=True
        )
    ]
    if per_unit[0] <= 0:
        return None
    (found,) = resamples.range_of(change)
    return Rate(
        phase=phase,
        unit=unit,
        base_ns=per_unit[0],
        candidate_ns=per_unit[1],
        change=found,
        num_base=counts[0],
        num_candidate=counts[1],
    )


def _num_ahead(requests: Sequence[TracedRequest], everybody: Sequence[TracedRequest]) -> list[int]:
    """For each request, how many were in the queue when it came into it."""
    came, went = [], []
    for one in everybody:
        start_ns = one.start_unix_ns + one.phases_ns.get("tokenize", 0)
        came.append(start_ns)
        went.append(start_ns + one.phases_ns.get("queue", 0))
    came.sort()
    went.sort()
    found = []
    for one in requests:
        start_ns = one.start_unix_ns + one.phases_ns.get("tokenize", 0)
        found.append(bisect_left(came, start_ns) - bisect_right(went, start_ns))
    return [max(count, 0) for count in found]


def shifts(matched: Matched) -> list[Shift]:
    """The two parts of each phase's change that has a unit of work."""
    found = []
    for phase, unit in _UNITS.items():
        if phase not in matched.base[0].phases_ns:
            continue
        units = [[_units(one, phase) for one in side] for side in (matched.base, matched.candidate)]
        if any(None in side for side in units):
            continue
        means, speeds = [], []
        for side, amounts, weights in zip(
            (matched.base, matched.candidate),
            units,
            (matched.base_weights, matched.candidate_weights),
            strict=True,
        ):
            amount = float(np.average(np.asarray(amounts, dtype=np.float64), weights=weights))
            time_ns = float(np.average([one.phases_ns[phase] for one in side], weights=weights))
            means.append(amount)
            speeds.append(time_ns / amount)
        found.append(
            Shift(
                phase=phase,
                unit=unit,
                base_units=means[0],
                candidate_units=means[1],
                by_workload_ns=(means[1] - means[0]) * speeds[0],
                by_speed_ns=means[1] * (speeds[1] - speeds[0]),
            )
        )
    return found


def ranked_attributes(matched: Matched, phase: str) -> list[Attribute]:
    """The attributes of the candidate's requests that go with the change of `phase`, strongest first.

    The change of a pair; unpaired, the phase itself; by unit of work where the phase has one, since that
    longer requests change by more explains nothing. Only what one correction for all leaves standing.
    """
    change = _per_unit(matched.candidate, phase)
    if matched.is_paired:
        change -= _per_unit(matched.base, phase)
    found: dict[str, Attribute] = {}
    for name in dict.fromkeys(name for one in matched.candidate for name in one.attributes):
        values = [one.attributes.get(name) for one in matched.candidate]
        numbers = [value for value in values if isinstance(value, int | float)]
        if len(numbers) == len(values):
            _rank_numbers(name, np.asarray(numbers, dtype=np.float64), change, found)
        else:
            _rank_values(name, [None if value is None else str(value) for value in values], change, found)
    adjusted = holm({key: one.p_value for key, one in found.items()})
    kept = [
        msgspec.structs.replace(one, p_value=adjusted[key])
        for key, one in found.items()
        if adjusted[key] < SIGNIFICANCE
    ]
    return sorted(kept, key=lambda one: (-abs(one.effect), one.name, one.value or ""))[:NUM_ATTRIBUTES]


def _per_unit(requests: Sequence[TracedRequest], phase: str) -> Floats:
    units = [_units(one, phase) if phase in _UNITS else 1 for one in requests]
    times = [one.phases_ns[phase] / (count or 1) for one, count in zip(requests, units, strict=True)]
    return np.asarray(times, dtype=np.float64)


def _rank_numbers(name: str, numbers: Floats, change: Floats, found: dict[str, Attribute]) -> None:
    if len(np.unique(numbers)) < 2 or len(np.unique(change)) < 2:
        return
    result = spearmanr(numbers, change)
    found[name] = Attribute(
        name=name,
        kind="number",
        value=None,
        effect=float(result.statistic),
        p_value=float(result.pvalue),
        num_requests=len(numbers),
    )


def _rank_values(
    name: str, values: Sequence[str | None], change: Floats, found: dict[str, Attribute]
) -> None:
    for value in dict.fromkeys(values):
        has_it = np.asarray([one == value for one in values])
        num_with = int(has_it.sum())
        if value is None or min(num_with, len(values) - num_with) < MIN_GROUP:
            continue
        result = mannwhitneyu(change[has_it], change[~has_it])
        effect = 2 * float(result.statistic) / (num_with * (len(values) - num_with)) - 1
        found[f"{name}={value}"] = Attribute(
            name=name,
            kind="value",
            value=value,
            effect=effect,
            p_value=float(result.pvalue),
            num_requests=num_with,
        )
