"""Two Runs in, one Verdict out.

Owns: the order of gate, checks, comparisons, correction and judgement, and the sentence that sums it up.
Refuses to know: formulas, rendering, networks, clocks, engines. Invariants: pure, so that the same Runs and
settings give the same bytes; every test takes part in one correction before anything is judged.

Usage: `verdict = compare(Run.open(base), Run.open(candidate), floor=Run.open(twin))`.
"""

from __future__ import annotations

from firstdiff.regression.checkers import CHECKERS
from firstdiff.regression.comparisons import (
    check_comparable,
    check_logs,
    compare_coverage,
    compare_exact,
    differences_of,
    judge_outcomes,
    outcomes_p,
)
from firstdiff.regression.divergence import compare_tokens, first_words, judge_shift, judge_tokens
from firstdiff.regression.latency import compare_latency, judge_metric, judge_phases, phase_words
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
    gate = check_comparable(one, other)
    findings += gate
    if twin is not None:
        reasons = _unfit_floor(one, twin, config)
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
        false_alarm_rate=config.alpha,
        config=config,
    )


def _unfit_floor(base: RunView, twin: RunView, config: CompareConfig) -> list[Finding]:
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
    metrics = compare_latency(base, candidate, twin, config)
    p_values: dict[str, float | None] = {"outcomes": outcomes_p(base, candidate)}
    p_values |= {} if tokens is None else {"tokens": tokens.count_p, "logprobs": tokens.shift_p}
    p_values |= {metric.evidence.name: metric.p_value for metric in metrics}
    adjusted = holm({name: p_value for name, p_value in p_values.items() if p_value is not None})
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
    findings += [judge_metric(metric, adjusted, config) for metric in metrics]
    if not metrics:
        findings.append(
            Finding(status="unknown", part="latency", title="no latency could be measured on both sides")
        )
    where, phase = judge_phases(base, candidate, config)
    tails = judge_quantiles(base, candidate, config)
    findings += [note for note in (where, tails) if note is not None]
    return findings, phase


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
