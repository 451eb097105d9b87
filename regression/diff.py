"""Two Runs in, one Verdict out.

Owns: the order of gate, checks, comparisons, correction and judgement, and the sentence that sums it up.
Refuses to know: formulas, rendering, networks, clocks, engines. Invariants: pure, so that the same Runs and
settings give the same bytes; every test takes part in one correction before anything is judged; what makes
times worthless (a late client, another load) takes nothing from the tokens.

Usage: `verdict = compare(Run.open(base), Run.open(candidate), floor=Run.open(twin))`.
"""

from __future__ import annotations

import msgspec

from firstdiff.regression.checkers import CHECKERS, check_client
from firstdiff.regression.comparisons import (
    check_comparable,
    check_distinct,
    check_logs,
    compare_coverage,
    compare_exact,
    differences_of,
    judge_outcomes,
    load_difference,
    outcomes_p,
)
from firstdiff.regression.divergence import compare_tokens, first_words, judge_shift, judge_tokens
from firstdiff.regression.latency import (
    compare_latency,
    explain_unjudged,
    judge_metric,
    judge_phases,
    phase_words,
)
from firstdiff.regression.pairing import took_turns
from firstdiff.regression.quantiles import judge_quantiles
from firstdiff.regression.quoting import quoted
from firstdiff.regression.stats import holm
from firstdiff.regression.summary import RunView, read_run
from firstdiff.regression.verdict import (
    CompareConfig,
    Finding,
    PhaseEvidence,
    Status,
    TokenEvidence,
    Verdict,
    status_of,
)
from firstdiff.tracing.store import Run

__all__ = ["CompareConfig", "compare"]

_LATE = "A client was late, so no time it took can be judged."


def compare(
    base: Run, candidate: Run, *, floor: Run | None = None, config: CompareConfig | None = None
) -> Verdict:
    """Judge `candidate` against `base`; `floor` is a Run of a twin of base, on the same workload.

    ValueError for settings out of bounds. Whatever the Runs hold becomes a Finding.
    """
    config = config or CompareConfig()
    config.validate()
    one, other = read_run(base), read_run(candidate)
    twin = None if floor is None else read_run(floor)
    findings: list[Finding] = []
    phase: PhaseEvidence | None = None
    for view in (one, other):
        for check in CHECKERS.values():
            findings += check(view, config)
    gate = check_distinct(one, other) or check_comparable(one, other)
    findings += gate
    if twin is not None:
        reasons = _unfit_floor(one, twin)
        if not reasons and not gate and check_distinct(other, twin):
            title = f"{quoted(twin.manifest.label)} is no noise floor: it is the candidate itself"
            reasons = [Finding(status="unknown", part="comparability", title=title)]
        findings += reasons
        twin = None if reasons else twin
    if not gate:
        compared, phase = _compare(one, other, twin, config)
        findings += compared
    status = status_of(findings)
    return Verdict(
        status=status,
        reason=_reason(status, findings, phase, margin=config.latency_margin),
        findings=findings,
        base=one.summary(),
        candidate=other.summary(),
        floor=None if twin is None else twin.summary(),
        differences=differences_of(one, other),
        took_turns=None if gate else took_turns(one, other, config),
        false_alarm_rate=config.alpha,
        config=config,
    )


def _unfit_floor(base: RunView, twin: RunView) -> list[Finding]:
    """Why a Run is no noise floor for `base`: nothing may be excused by it then."""
    reasons = [finding.title for finding in check_comparable(base, twin)]
    reasons += twin.problems
    one, other = base.manifest.identity, twin.manifest.identity
    if one is not None and other is not None:
        if one.faults != other.faults:
            reasons.append(f"it has faults planted: {quoted(', '.join(other.faults))}")
        elif one.engine_config_sha256 != other.engine_config_sha256 or one.dtype != other.dtype:
            reasons.append("its engine is configured differently from base's")
    if base.manifest.run_id == twin.manifest.run_id:
        reasons.append("it is base itself")
    label = quoted(twin.manifest.label)
    return [
        Finding(status="unknown", part="comparability", title=f"{label} is no noise floor: {reason}")
        for reason in reasons
    ]


def _compare(
    base: RunView, candidate: RunView, twin: RunView | None, config: CompareConfig
) -> tuple[list[Finding], PhaseEvidence | None]:
    tokens = compare_tokens(base, candidate, twin, config)
    is_late = _is_late(base, config) or _is_late(candidate, config)
    load = load_difference(base, candidate)
    metrics = []
    if load is None:
        # A twin asked at another load, or by a late client, would excuse a slow-down that base does not have.
        is_twin_fit = twin is not None and load_difference(base, twin) is None and not _is_late(twin, config)
        metrics = compare_latency(base, candidate, twin if is_twin_fit else None, config)
    p_values: dict[str, float | None] = {"outcomes": outcomes_p(base, candidate)}
    p_values |= {} if tokens is None else {"tokens": tokens.count_p, "logprobs": tokens.shift_p}
    p_values |= {} if is_late else {metric.evidence.name: metric.p_value for metric in metrics}
    known = {name: p_value for name, p_value in p_values.items() if p_value is not None}
    # Half of the error rate is for failed requests where there are any: they are few, and matter most.
    adjusted = holm(known, {"outcomes": max(1, len(known) - 1)})
    findings = compare_coverage(base, candidate)
    findings += judge_outcomes(base, candidate, adjusted.get("outcomes"), config)
    findings += compare_exact(base, candidate, twin)
    findings += check_logs(base, candidate)
    if tokens is None:
        findings.append(
            Finding(status="unknown", part="tokens", title="no request was answered by both sides")
        )
        return findings, None
    findings.append(judge_tokens(tokens, adjusted, config))
    shift = judge_shift(tokens, adjusted, config)
    findings += [] if shift is None else [shift]
    if load is not None:
        title = f"no latency can be compared: {load}"
        detail = "Ask both sides at the same load."
        findings.append(Finding(status="unknown", part="latency", title=title, detail=detail))
        return findings, None
    latency = [judge_metric(metric, adjusted, config) for metric in metrics]
    latency += explain_unjudged(base, candidate, [metric.evidence.name for metric in metrics])
    where, phase = judge_phases(base, candidate, config)
    tails = judge_quantiles(base, candidate, config)
    latency += [note for note in (where, tails) if note is not None]
    is_sure = not is_late and (took_turns(base, candidate, config) or any(_fails(one) for one in latency))
    findings += [_invalidated(finding) for finding in latency] if is_late else latency
    return findings, phase if is_sure else None


def _fails(finding: Finding) -> bool:
    return finding.status == "fail"


def _is_late(view: RunView, config: CompareConfig) -> bool:
    return any(finding.status == "invalid" for finding in check_client(view, config))


def _invalidated(finding: Finding) -> Finding:
    """A latency finding by a late client: shown, and worth nothing."""
    if not finding.gates:
        return finding
    return msgspec.structs.replace(finding, status="invalid", detail=_LATE, p_value=None)


def _reason(status: Status, findings: list[Finding], phase: PhaseEvidence | None, *, margin: float) -> str:
    """One sentence, the worst first, that a tired engineer understands."""
    worst = [finding for finding in findings if finding.gates and finding.status == status]
    if status == "pass":
        return "; ".join(finding.title for finding in worst if finding.part in ("tokens", "latency"))
    if status == "fail":
        return "; ".join(_failing(findings, worst, phase, margin=margin))
    first = worst[0]
    more = f" ({len(worst) - 1} more below)" if len(worst) > 1 else ""
    return f"{first.title}{more}. {first.detail}".removesuffix(" ").removesuffix(".")


def _failing(
    findings: list[Finding], worst: list[Finding], phase: PhaseEvidence | None, *, margin: float
) -> list[str]:
    """What fails, each thing once: log-probabilities stand behind tokens, metrics behind a phase."""
    clauses = [finding.title for finding in worst if finding.part not in ("tokens", "logprobs", "latency")]
    for finding in findings:
        first = _first_divergence(finding)
        if finding.part == "tokens" and finding in worst:
            clauses.append(finding.title + (f", first in {first}" if first else ""))
        elif first and any(one.part == "logprobs" for one in worst):
            clauses.append(f"{finding.title}, first in {first}")
    if not any(finding.part == "tokens" for finding in worst):
        clauses += [finding.title for finding in worst if finding.part == "logprobs"]
    slower = [finding for finding in worst if finding.part == "latency"]
    if phase is not None and phase.interval is not None and (slower or phase.interval.low > margin):
        names = " and ".join(finding.title.split()[0] for finding in slower)
        clauses.append(phase_words(phase) + (f" ({names} beyond the margin)" if names else ""))
    else:
        clauses += [finding.title for finding in slower]
    return clauses


def _first_divergence(finding: Finding) -> str | None:
    for evidence in finding.evidence:
        if isinstance(evidence, TokenEvidence) and evidence.first is not None:
            return first_words(evidence.first)
    return None
