"""Two sets of traces compared: which phase the change is in, how sure that is, and what goes with it.

Owns: the refusals, the verdict, what belongs into the answer. Refuses to know: where traces come from, how
the answer is printed. Invariants: unlike definitions, too few requests and traces with holes give "unknown"
with the reason, never a number that looks like one; the same spans give the same bytes.

Usage: `found = diff_traces(base_spans, candidate_spans)`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import msgspec
import numpy as np

from firstdiff.regression.phase_causes import Attribute, Rate, Shift, ranked_attributes, rates, shifts
from firstdiff.regression.phase_split import PLACES, Matched, Range, Resamples, Split, match, split
from firstdiff.regression.stats import Estimate, block_estimate
from firstdiff.regression.trace_phases import TracedRequest, Unread, read_requests
from firstdiff.tracing.span_record import SpanRecord

NUM_EXAMPLES = 5
MIN_SHARE = 0.02
"""A phase that adds less than this share of the request is no explanation."""


class DiffConfig(msgspec.Struct, frozen=True, kw_only=True):
    """How strict to be; the fields mean what CompareConfig's of the same name do."""

    alpha: float = 0.01
    miss_rate: float = 0.05
    latency_margin: float = 0.15
    min_pairs: int = 16
    min_blocks: int = 4
    session_sd: float = 0.03
    session_factor: float = 2.0
    max_missing_fraction: float = 0.05
    num_resamples: int = 1000
    seed: int = 0


class Example(msgspec.Struct, frozen=True, kw_only=True):
    """A base request and a candidate request side by side: trace ids, what they asked, phases in ns."""

    base_trace_id: str
    candidate_trace_id: str
    case: str | None
    base_phases_ns: dict[str, int]
    candidate_phases_ns: dict[str, int]
    num_output_tokens: tuple[int | None, int | None]


class TraceDiff(msgspec.Struct, frozen=True, kw_only=True):
    """The answer. `reasons` say why the status is unknown; the rest is empty then, or as far as it could go.

    `guilty` is the phase that certainly adds most at the mean, None when none does. `slowdown` is the typical
    end-to-end change of a request as a fraction, with its interval.
    """

    status: Literal["pass", "fail", "unknown"]
    reasons: list[str]
    engine: str | None = None
    num_base: int = 0
    num_candidate: int = 0
    num_left_out: int = 0
    is_paired: bool = False
    took_turns: bool = False
    slowdown: Range | None = None
    splits: list[Split] = []
    guilty: str | None = None
    rates: list[Rate] = []
    shifts: list[Shift] = []
    attributes: list[Attribute] = []
    examples: list[Example] = []


def diff_traces(
    base: Sequence[SpanRecord], candidate: Sequence[SpanRecord], config: DiffConfig | None = None
) -> TraceDiff:
    """Compare the requests of two sets of spans."""
    config = config or DiffConfig()
    sides = [read_requests(base), read_requests(candidate)]
    reasons = _refusals(sides, config)
    if reasons:
        return TraceDiff(
            status="unknown", reasons=reasons, num_base=len(sides[0][0]), num_candidate=len(sides[1][0])
        )
    requests, others = sides[0][0], sides[1][0]
    matched = match(requests, others)
    num_alike = min(len(matched.base), len(matched.candidate))
    if num_alike < config.min_pairs:
        kind = "pairs" if matched.is_paired else "requests of like length on each side"
        return TraceDiff(
            status="unknown",
            reasons=[f"expected {config.min_pairs} {kind} or more, got {num_alike}: collect more traces"],
            num_base=len(requests),
            num_candidate=len(others),
        )
    return _compare(matched, requests, others, config)


def _compare(
    matched: Matched,
    requests: Sequence[TracedRequest],
    others: Sequence[TracedRequest],
    config: DiffConfig,
) -> TraceDiff:
    turns = took_turns(requests, others)
    estimate = _estimate(matched, config, extra_sd=0.0 if turns else config.session_sd)
    status, reasons = _judge(estimate, turns, config)
    resamples = Resamples(matched, seed=config.seed, num_resamples=config.num_resamples)
    splits = [one for place in PLACES if (one := split(resamples, place)) is not None]
    guilty = _guilty(splits[0])
    slowdown = None
    if estimate is not None:
        low, high = estimate.bound(0.05)
        slowdown = Range(math.expm1(estimate.value), math.expm1(low), math.expm1(high))
    return TraceDiff(
        status=status,
        reasons=reasons,
        engine=matched.base[0].definition.engine,
        num_base=len(matched.base),
        num_candidate=len(matched.candidate),
        num_left_out=matched.num_left_out,
        is_paired=matched.is_paired,
        took_turns=turns,
        slowdown=slowdown,
        splits=splits,
        guilty=guilty,
        rates=rates(resamples, requests, others),
        shifts=shifts(matched),
        attributes=ranked_attributes(matched, guilty) if guilty is not None else [],
        examples=_examples(matched, guilty),
    )


def _refusals(sides: Sequence[tuple[list[TracedRequest], Unread]], config: DiffConfig) -> list[str]:
    reasons = []
    for name, (requests, unread) in zip(("base", "candidate"), sides, strict=True):
        num_broken = unread.without_server + unread.skewed + unread.unknown
        limit = config.max_missing_fraction * (len(requests) + num_broken)
        if not requests:
            reasons.append(
                f"expected requests in {name}'s traces, got none: {unread.failed} failed, "
                f"{unread.without_server} lack the server's spans, {unread.unknown} are of no known engine"
            )
        elif unread.without_server > limit:
            reasons.append(
                f"expected the server's spans of each request, got {unread.without_server} of {name}'s "
                "without: sample both sides alike"
            )
        elif unread.skewed > limit:
            reasons.append(
                f"expected phases that fit into their requests, got {unread.skewed} of {name}'s that do not: "
                "the clocks of its processes differ"
            )
        definitions = {request.definition.engine for request in requests}
        if len(definitions) > 1:
            reasons.append(f"expected one kind of trace in {name}, got {', '.join(sorted(definitions))}")
    if reasons:
        return reasons
    one, other = (side[0][0].definition for side in sides)
    if one != other:
        mine, theirs = set(one.phases), set(other.phases)
        unlike = sorted({phase for phase, _, _ in mine ^ theirs})
        reasons.append(
            f"expected phases of one definition, got {one.engine}'s and {other.engine}'s, which mean "
            f"different things by {', '.join(unlike)}: compare traces of one engine"
        )
    return reasons


def took_turns(base: Sequence[TracedRequest], candidate: Sequence[TracedRequest]) -> bool:
    """Whether the sides ran at the same time, or in turns: their times overlap by half of the shorter."""
    (first, last), (other_first, other_last) = (
        (side[0].start_unix_ns, side[-1].start_unix_ns) for side in (base, candidate)
    )
    overlap_ns = min(last, other_last) - max(first, other_first)
    return overlap_ns > 0.5 * min(last - first, other_last - other_first)


def _estimate(matched: Matched, config: DiffConfig, *, extra_sd: float) -> Estimate | None:
    """The log-ratio of end-to-end times, candidate over base; None where there is too little."""
    logs = [
        np.log([max(request.e2e_ns, 1) for request in side]) for side in (matched.base, matched.candidate)
    ]
    if matched.is_paired:
        return block_estimate(
            [float(value) for value in logs[1] - logs[0]],
            matched.blocks,
            min_values=config.min_pairs,
            min_blocks=config.min_blocks,
            extra_sd=extra_sd,
        )
    means, variances, sizes = [], [], []
    for values, weights in zip(logs, (matched.base_weights, matched.candidate_weights), strict=True):
        mean = float(np.average(values, weights=weights))
        size = float(weights.sum() ** 2 / (weights**2).sum())
        means.append(mean)
        variances.append(float(np.average((values - mean) ** 2, weights=weights)) / (size - 1))
        sizes.append(size)
    return Estimate(
        value=means[1] - means[0],
        standard_error=max(math.sqrt(sum(variances) + extra_sd**2), 1e-9),
        dof=int(min(sizes)) - 1,
        num_values=int(sum(sizes)),
        num_blocks=int(min(sizes)),
    )


def _judge(
    estimate: Estimate | None, turns: bool, config: DiffConfig
) -> tuple[Literal["pass", "fail", "unknown"], list[str]]:
    if estimate is None:
        return "unknown", [
            f"expected {config.min_blocks} blocks or more, got fewer: a disturbance could explain everything"
        ]
    margin = math.log1p(config.latency_margin)
    is_slower = estimate.value > margin and estimate.p_above(margin / 2) < config.alpha
    if is_slower and not turns and estimate.value < math.log(config.session_factor):
        return "unknown", [
            "the sides did not take turns: a slow-down below "
            f"{config.session_factor:g} times may be the machine's: collect both interleaved"
        ]
    if is_slower:
        return "fail", []
    if estimate.bound(config.miss_rate)[1] < margin:
        return "pass", []
    return "unknown", [
        f"a slow-down of {config.latency_margin:.0%} can neither be shown nor ruled out: collect more traces"
    ]


def _guilty(mean: Split) -> str | None:
    """The phase that adds most among those that certainly add."""
    certain = {
        phase: part.value
        for phase, part in mean.parts.items()
        if part.low > 0 and part.value > MIN_SHARE * mean.base_ns
    }
    return max(certain, key=lambda phase: certain[phase], default=None)


def _examples(matched: Matched, guilty: str | None) -> list[Example]:
    """The pairs that changed most where it matters; unpaired, the slowest beside the most alike."""

    def measure(request: TracedRequest) -> int:
        return request.e2e_ns if guilty is None else request.phases_ns[guilty]

    if matched.is_paired:
        pairs = list(zip(matched.base, matched.candidate, strict=True))
        pairs.sort(key=lambda pair: measure(pair[0]) - measure(pair[1]))
    else:
        slowest = sorted(matched.candidate, key=measure, reverse=True)[:NUM_EXAMPLES]
        pairs = [(_most_alike(matched.base, other), other) for other in slowest]
    return [
        Example(
            base_trace_id=one.trace_id,
            candidate_trace_id=other.trace_id,
            case=None if one.key is None else one.key[0],
            base_phases_ns=one.phases_ns,
            candidate_phases_ns=other.phases_ns,
            num_output_tokens=(one.num_output_tokens, other.num_output_tokens),
        )
        for one, other in pairs[:NUM_EXAMPLES]
    ]


def _most_alike(requests: Sequence[TracedRequest], other: TracedRequest) -> TracedRequest:
    """The first of those that differ least in their token counts."""

    def unlikeness(one: TracedRequest) -> float:
        return math.dist(_counts(one), _counts(other))

    return min(requests, key=unlikeness)


def _counts(request: TracedRequest) -> tuple[int, int, int]:
    return (request.num_prompt_tokens or 0, request.num_output_tokens or 0, request.num_cached_tokens or 0)
