"""A Verdict for people and for programs: plain text, Markdown, JSON.

Owns: layout and wording of numbers. Refuses to know: how anything was found. Invariants: the first line is
the verdict and its reason; foreign text appears only as quoting.py renders it; the same Verdict gives the
same bytes.

Usage: `print(to_text(verdict))`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import msgspec

from firstdiff.regression.cells import aligned, duration, percent
from firstdiff.regression.divergence import first_words
from firstdiff.regression.quoting import for_markdown, for_text, quoted, quoted_end
from firstdiff.regression.verdict import (
    Divergence,
    Finding,
    Interval,
    MetricEvidence,
    PhaseEvidence,
    QuantileEvidence,
    ShiftEvidence,
    SideSummary,
    TokenEvidence,
    Verdict,
)

_MARKS = {"pass": "ok", "unknown": "unknown", "fail": "FAIL", "invalid": "INVALID"}
_QUANTILE_NOTE = "exact quantiles, ranges by a paired bootstrap over blocks (no part of the verdict)"
_PHASE_NOTE = "phases by the servers' own logs, medians a request"


def to_json(verdict: Verdict) -> bytes:
    """The whole Verdict, indented; in sentences foreign text stands between « and », elsewhere it is raw."""
    return msgspec.json.format(msgspec.json.encode(verdict), indent=2) + b"\n"


def to_text(verdict: Verdict) -> str:
    """For a terminal: verdict, findings, tables."""
    lines = [f"{verdict.status.upper()}: {for_text(verdict.reason)}", ""]
    width = max((len(finding.part) for finding in verdict.findings), default=0)
    for finding in verdict.findings:
        lines.append(f"  {_mark(finding):<8} {finding.part:<{width}}  {for_text(finding.title)}")
        if finding.detail:
            lines.append(f"  {'':<8} {'':<{width}}  {for_text(finding.detail)}")
    for title, header, rows in _tables(verdict):
        cells = [header, *([for_text(cell) for cell in row] for row in rows)]
        lines += ["", title, *aligned(cells)]
    lines.append("")
    lines += [for_text(line) for line in _about(verdict)]
    return "\n".join(lines) + "\n"


def to_markdown(verdict: Verdict) -> str:
    """For a pull request or report.md."""
    lines = [f"**{verdict.status.upper()}**: {for_markdown(verdict.reason)}", ""]
    lines += ["| | part | finding |", "|---|---|---|"]
    for finding in verdict.findings:
        text = for_markdown(f"{finding.title}. {finding.detail}" if finding.detail else finding.title)
        lines.append(f"| {_mark(finding)} | {finding.part} | {text} |")
    for title, header, rows in _tables(verdict):
        lines += ["", f"**{title}**", "", _row(header, str), "|" + "---|" * len(header)]
        lines += [_row(row, for_markdown) for row in rows]
    lines.append("")
    lines += [f"- {for_markdown(line)}" for line in _about(verdict)]
    return "\n".join(lines) + "\n"


def _row(cells: list[str], render: Callable[[str], str]) -> str:
    return "| " + " | ".join(render(cell) for cell in cells) + " |"


def _mark(finding: Finding) -> str:
    return _MARKS[finding.status] if finding.gates else "note"


def _tables(verdict: Verdict) -> Iterator[tuple[str, list[str], list[list[str]]]]:
    evidence = [item for finding in verdict.findings for item in finding.evidence]
    tokens = next((item for item in evidence if isinstance(item, TokenEvidence)), None)
    if tokens is not None and tokens.examples:
        header = ["case", "at", "base", "candidate", "gap (nat)", "moved by", "after"]
        yield "where replies part", header, [_divergence_row(one) for one in tokens.examples]
    metrics = [item for item in evidence if isinstance(item, MetricEvidence)]
    if metrics:
        marks = {
            item.name: _mark(finding)
            for finding in verdict.findings
            for item in finding.evidence
            if isinstance(item, MetricEvidence)
        }
        header = ["metric", "p50", "change", "90 % range", "margin", "pairs", "detects", "outliers", ""]
        yield "latency, base -> candidate", header, [_metric_row(one, marks[one.name]) for one in metrics]
    if any(one.floor_change is not None for one in metrics):
        header = ["metric", "change", "90 % range"]
        rows = [[one.name, percent(one.floor_change), _range(one.floor_interval)] for one in metrics]
        yield "latency of the twin against base", header, rows
    quantiles = [item for item in evidence if isinstance(item, QuantileEvidence)]
    if quantiles:
        header = ["metric", "quantile", "base", "candidate", "change", "90 % range"]
        yield _QUANTILE_NOTE, header, [_quantile_row(one) for one in quantiles if one.base_ns is not None]
    phases = [item for item in evidence if isinstance(item, PhaseEvidence)]
    if phases:
        yield (
            _PHASE_NOTE,
            ["phase", "base", "candidate", "added", "change", "90 % range"],
            [
                [
                    one.name,
                    duration(one.base_ns),
                    duration(one.candidate_ns),
                    duration(one.added_ns, sign=True),
                    percent(one.change),
                    _range(one.interval),
                ]
                for one in phases
            ],
        )


def _divergence_row(one: Divergence) -> list[str]:
    gaps = []
    for gap, at_least in (
        (one.base_gap, one.base_gap_at_least),
        (one.candidate_gap, one.candidate_gap_at_least),
    ):
        gaps.append("-" if gap is None else f"{'>=' if at_least else ''}{gap:.3g}")
    repeat = f" repeat {one.repeat_index}" if one.repeat_index else ""
    return [
        quoted(one.case_id) + repeat,
        f"{one.unit} {one.position}",
        _token(one.base_text, one.base_token_id),
        _token(one.candidate_text, one.candidate_token_id),
        " / ".join(gaps),
        "-" if one.shift is None else f"{one.shift:.3g}",
        quoted_end(one.before, 24),
    ]


def _token(text: str | None, token_id: int | None) -> str:
    if text is None:
        return "(ends)"
    return quoted(text, 24) + (f" {token_id}" if token_id is not None else "")


def _metric_row(one: MetricEvidence, mark: str) -> list[str]:
    return [
        one.name,
        f"{duration(one.base_p50)} -> {duration(one.candidate_p50)}",
        percent(one.change),
        _range(one.interval),
        "-" if one.margin is None else f"{one.margin:.0%}",
        f"{one.num_pairs} in {one.num_blocks} blocks",
        "-" if one.detectable is None else f">= {one.detectable:.0%}",
        f"{one.num_base_outliers} : {one.num_candidate_outliers}",
        mark,
    ]


def _quantile_row(one: QuantileEvidence) -> list[str]:
    return [
        one.metric,
        f"p{one.fraction * 100:.0f}",
        duration(one.base_ns),
        duration(one.candidate_ns),
        percent(one.change),
        _range(one.interval),
    ]


def _range(interval: Interval | None) -> str:
    return "-" if interval is None else f"[{interval.low:+.1%}, {interval.high:+.1%}]"


def _about(verdict: Verdict) -> Iterator[str]:
    """What the verdict rests on and how far it can be trusted."""
    for name, side in (("base", verdict.base), ("candidate", verdict.candidate), ("floor", verdict.floor)):
        if side is not None:
            yield _side(name, side)
    if verdict.differences:
        yield "the servers differ in " + "; ".join(verdict.differences)
    evidence = [item for finding in verdict.findings for item in finding.evidence]
    tokens = next((item for item in evidence if isinstance(item, TokenEvidence)), None)
    if tokens is not None and tokens.first is not None:
        yield f"first divergence: {first_words(tokens.first)}"
    shift = next((item for item in evidence if isinstance(item, ShiftEvidence)), None)
    if shift is not None:
        yield f"log-probabilities of {shift.num_tokens} tokens after equal tokens were compared"
    if tokens is not None:
        # 1 - (1 - 1/N)^n = 0.95
        yield (
            f"a fault that touches 1 request in {max(1, tokens.num_cases // 3)} shows in at least one of "
            f"{tokens.num_cases} cases with 95 % chance; a rarer one needs more cases"
        )
    yield (
        f"chance of a false alarm, all tests together: {verdict.false_alarm_rate:g}; a slow-down of exactly "
        f"the margin passes with chance {verdict.config.miss_rate:g} a metric; column detects: what would "
        "have failed nine times in ten"
    )
    if verdict.took_turns is False:
        factor = verdict.config.session_factor
        yield (
            "the sides did not take turns: for latencies that chance holds as long as the machine is not "
            f"more than {factor:g} times slower in one session than in another, for passing as long as its "
            f"speed varies by {verdict.config.session_sd:.0%} (sd); only a slow-down certainly beyond "
            f"{factor:g} times fails, a smaller one is unknown: compare the URLs in turns"
        )
    yield (
        "ranges cover what changes from block to block, not from server start to server start: to cover that "
        "too, repeat with new processes"
    )


def _side(name: str, side: SideSummary) -> str:
    dtype = f", {quoted(side.dtype)}" if side.dtype else ""
    faults = f", planted faults {quoted(', '.join(side.faults))}" if side.faults else ""
    return (
        f"{name}: {quoted(side.label)}, Run {quoted(side.run_id)}, model {quoted(side.model)}{dtype}{faults}"
        f", {side.num_ok} of {side.num_requests} requests answered"
    )
