"""Is the candidate slower? Paired log-ratios of TTFT, TPOT and E2E, judged against a margin.

Owns: pairing in time (blocks), the estimate, its p-value, what pass, fail and unknown mean for a metric,
and the phase to blame. Refuses to know: whether tokens pass. Invariants: ratios are candidate over base of
one case and repeat; E2E is compared as it is where the answers are equal, else at base's answer length; a
metric passes only when a slow-down by its margin is ruled out, and fails only when more than half the margin
is certain and the estimate is beyond all of it; a metric that one side gives and that is not judged is
unknown, never left out; where the sides did not take turns the machine may have changed between them, so
only a slow-down certainly beyond `session_factor` fails, and the interval allows for `session_sd`.

Usage: `metrics = compare_latency(base, candidate, floor, config)`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from firstdiff.regression.pairing import Pair, blocks_of, both_ok, took_turns
from firstdiff.regression.phases import compare_phases, slower_phase
from firstdiff.regression.stats import Estimate, block_estimate, quantile
from firstdiff.regression.summary import (
    METRICS,
    Key,
    RunView,
    e2e_at_ns,
    e2e_ns,
    lack_of,
    metric_ns,
    num_output_tokens,
)
from firstdiff.regression.verdict import (
    MAX_TESTS,
    CompareConfig,
    Finding,
    Interval,
    MetricEvidence,
    PhaseEvidence,
    Status,
)
from firstdiff.tracing.records import RequestRow

_RANGE_TAIL = 0.05
_OUTLIER = math.log(1.5)


@dataclass(frozen=True, slots=True)
class MetricComparison:
    """One metric, measured; `p_value` None without enough pairs."""

    evidence: MetricEvidence
    estimate: Estimate | None
    p_value: float | None
    took_turns: bool


def ratio_of(one: RequestRow, other: RequestRow, metric: str) -> float | None:
    """The log-ratio of one metric, other over one; None where a side cannot give it.

    Equal answers take equal work whatever the sides count, so their E2E needs no counts.
    """
    mine = metric_ns(one, metric)
    if metric != "e2e":
        theirs = metric_ns(other, metric)
    elif _is_same_answer(one, other):
        theirs = e2e_ns(other)
    else:
        theirs = e2e_at_ns(other, num_output_tokens(one))
    if mine is None or theirs is None or mine <= 0 or theirs <= 0:
        return None
    return math.log(theirs / mine)


def _is_same_answer(one: RequestRow, other: RequestRow) -> bool:
    if one.token_ids is not None and other.token_ids is not None:
        return one.token_ids == other.token_ids
    return one.text == other.text


def margin_of(metric: str, config: CompareConfig) -> float:
    """The slow-down, as a fraction, that is still fine."""
    return config.ttft_margin if metric == "ttft" else config.latency_margin


@dataclass(frozen=True, slots=True)
class _Pairs:
    """The pairs of two Runs that give one metric."""

    ratios: dict[Key, float]
    blocks: dict[Key, object]
    by_turns: bool

    def estimate(self, config: CompareConfig) -> Estimate | None:
        return block_estimate(
            list(self.ratios.values()),
            [str(self.blocks[key]) for key in self.ratios],
            min_values=config.min_pairs,
            min_blocks=config.min_blocks,
            extra_sd=0.0 if self.by_turns else math.sqrt(2) * config.session_sd,
        )


def _pairs_of(base: RunView, other: RunView, metric: str, config: CompareConfig) -> _Pairs:
    pairs = both_ok(base, other)
    by_turns = took_turns(base, other, config)
    ratios = {key: ratio_of(mine, theirs, metric) for key, mine, theirs in pairs}
    return _Pairs(
        ratios={key: ratio for key, ratio in ratios.items() if ratio is not None},
        blocks=blocks_of(pairs, by_turns=by_turns, config=config),
        by_turns=by_turns,
    )


def compare_latency(
    base: RunView, candidate: RunView, floor: RunView | None, config: CompareConfig
) -> list[MetricComparison]:
    """The metrics that at least half of the pairs can give, in the order of METRICS."""
    rows = both_ok(base, candidate)
    comparisons = []
    for metric in METRICS:
        pairs = _pairs_of(base, candidate, metric, config)
        if not pairs.ratios or 2 * len(pairs.ratios) < len(rows):
            continue
        estimate = pairs.estimate(config)
        twin = None
        margin = math.log1p(margin_of(metric, config))
        threshold = _threshold(metric, config, by_turns=pairs.by_turns)
        is_slower = estimate is not None and estimate.value > max(margin, threshold)
        if floor is not None:
            twin = _pairs_of(base, floor, metric, config).estimate(config)
            if estimate is not None and twin is not None:
                # Base may have had a good start: the candidate has to be slower than its twin as well.
                is_slower = is_slower and estimate.value - twin.value > margin / 2
        p_value = None
        if estimate is not None:
            p_value = estimate.p_above(threshold) if is_slower else 1.0
        comparisons.append(
            MetricComparison(
                evidence=_evidence(
                    metric, rows, list(pairs.ratios.values()), estimate, twin, config, threshold=threshold
                ),
                estimate=estimate,
                p_value=p_value,
                took_turns=pairs.by_turns,
            )
        )
    return comparisons


def _threshold(metric: str, config: CompareConfig, *, by_turns: bool) -> float:
    """The log-ratio that has to be certain for a metric to fail."""
    half = math.log1p(margin_of(metric, config)) / 2
    return half if by_turns else max(half, math.log(config.session_factor))


def explain_unjudged(base: RunView, candidate: RunView, judged: Sequence[str]) -> list[Finding]:
    """Why each other metric is not judged: unknown when a side gives it, a note when neither does.

    E2E is always given, only not comparable, so it is never a note; nor does TPOT alone make a pass.
    """
    pairs = both_ok(base, candidate)
    findings = []
    for metric in METRICS:
        if metric in judged:
            continue
        reasons = []
        for side, rows in (("base", [one for _, one, _ in pairs]), ("candidate", [row for *_, row in pairs])):
            lacks = Counter(lack for row in rows if (lack := lack_of(row, metric)) is not None)
            if 2 * lacks.total() > len(rows):
                lack = max(lacks, key=lambda words: (lacks[words], words))
                reasons.append(f"{side} {lack} in {lacks[lack]} of {len(rows)} requests")
        is_note = len(reasons) == 2 and metric != "e2e"
        why = "; ".join(reasons) or "fewer than half of the requests give it on both sides"
        if metric == "e2e":
            why = f"the answers differ, and {why}"
        findings.append(
            Finding(
                status="pass" if is_note else "unknown",
                part="latency",
                title=f"{metric} {'is given by neither side' if is_note else 'cannot be judged'}: {why}",
                detail="" if is_note else "Let both sides stream and report usage or token ids.",
                gates=not is_note,
                n=len(pairs),
            )
        )
    return findings


def _evidence(
    metric: str,
    pairs: Sequence[Pair],
    values: Sequence[float],
    estimate: Estimate | None,
    twin: Estimate | None,
    config: CompareConfig,
    *,
    threshold: float,
) -> MetricEvidence:
    sides = ([one for _, one, _ in pairs], [other for _, _, other in pairs])
    medians = [
        quantile([value for row in rows if (value := metric_ns(row, metric)) is not None], 0.5)
        for rows in sides
    ]
    centre = estimate.value if estimate is not None else 0.0
    margin = margin_of(metric, config)
    detectable = None
    if estimate is not None:
        # Holm's strictest step, which the only test that finds something has to clear.
        detectable = _change(estimate.detectable(threshold, config.alpha / MAX_TESTS))
    return MetricEvidence(
        name=metric,
        base_p50=medians[0],
        candidate_p50=medians[1],
        change=None if estimate is None else _change(estimate.value),
        interval=_range(estimate),
        margin=margin,
        detectable=detectable,
        num_pairs=len(values),
        num_blocks=0 if estimate is None else estimate.num_blocks,
        num_base_outliers=sum(value < centre - _OUTLIER for value in values),
        num_candidate_outliers=sum(value > centre + _OUTLIER for value in values),
        floor_change=None if twin is None else _change(twin.value),
        floor_interval=_range(twin),
    )


def _range(estimate: Estimate | None) -> Interval | None:
    if estimate is None:
        return None
    low, high = estimate.bound(_RANGE_TAIL)
    return Interval(_change(low), _change(high))


def _change(log_ratio: float) -> float:
    return float(f"{math.expm1(min(log_ratio, 100.0)):.6g}")


def judge_metric(
    comparison: MetricComparison, adjusted: Mapping[str, float], config: CompareConfig
) -> Finding:
    """Pass, fail or unknown for one metric, as the module says; without a p-value it cannot fail."""
    evidence, estimate = comparison.evidence, comparison.estimate
    p_value = adjusted.get(evidence.name)
    margin = margin_of(evidence.name, config)
    status: Status = "unknown"
    detail = ""
    if estimate is None:
        title = f"{evidence.name} has too few pairs to judge"
        detail = (
            f"At least {config.min_pairs} pairs in {config.min_blocks} blocks are needed, "
            f"there are {evidence.num_pairs} pairs."
        )
    else:
        upper = estimate.bound(config.miss_rate)[1]
        title = f"{evidence.name} {change_words(evidence.change, evidence.interval)}"
        if p_value is not None and p_value < config.alpha:
            status = "fail"
            title += f", beyond the margin of {margin:.0%}"
            if not comparison.took_turns:
                title += f" and what sessions may differ by, {config.session_factor:g} times"
        elif upper < math.log1p(margin):
            status = "pass"
            title += f", within the margin of {margin:.0%}"
        elif not comparison.took_turns:
            title += f" against a margin of {margin:.0%}: the server or the session, nobody can tell"
        else:
            title += f" against a margin of {margin:.0%}: too noisy to settle"
            detail = "More cases, or less else on the machine, would settle it."
    if estimate is not None and not comparison.took_turns:
        detail = (
            "The sides did not take turns, so the interval allows for a drift between sessions of "
            f"{config.session_sd:.0%} (sd), and only a slow-down certainly beyond {config.session_factor:g} "
            "times fails."
        )
        if status == "unknown":
            detail += " Compare the URLs in turns: firstdiff compare URL URL."
    return Finding(
        status=status,
        part="latency",
        title=title,
        detail=detail,
        evidence=[evidence],
        p_value=None if p_value is None else float(f"{p_value:.6g}"),
        interval=evidence.interval,
        n=evidence.num_pairs,
    )


def change_words(change: float | None, interval: Interval | None) -> str:
    """A relative change with its interval, in words."""
    if change is None or interval is None:
        return "not known"
    word = "slower" if change >= 0 else "faster"
    return f"{abs(change):.1%} {word} [{interval.low:+.1%}, {interval.high:+.1%}]"


def judge_phases(
    base: RunView, candidate: RunView, config: CompareConfig
) -> tuple[Finding | None, PhaseEvidence | None]:
    """Where the time went by the servers' logs, a finding that never gates, and the phase to blame."""
    pairs = both_ok(base, candidate)
    blocks = blocks_of(pairs, by_turns=took_turns(base, candidate, config), config=config)
    phases = compare_phases(base, candidate, [key for key, _, _ in pairs], blocks, config)
    if not phases:
        return None, None
    slower = slower_phase(phases)
    title = "no phase of the request is certainly slower" if slower is None else phase_words(slower)
    finding = Finding(
        status="pass",
        part="latency",
        title=title,
        gates=False,
        evidence=list(phases),
        interval=None if slower is None else slower.interval,
        n=phases[0].num_pairs,
    )
    return finding, slower


def phase_words(phase: PhaseEvidence) -> str:
    """A slower phase, in words."""
    return (
        f"the {phase.name} phase is {change_words(phase.change, phase.interval)}, "
        f"{phase.added_ns / 1e6:+.1f} ms a request"
    )
