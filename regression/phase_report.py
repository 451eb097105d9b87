"""A comparison of traces as text and as JSON.

Owns: how a TraceDiff is shown. Refuses to know: how it was reached. Invariants: every number has its interval
and its count beside it where it has one; text from traces stands between « and » and is harmless.

Usage: `print(to_text(found, jaeger_url="http://127.0.0.1:16686"))`.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from firstdiff.regression.cells import aligned, duration, percent
from firstdiff.regression.phase_split import Range
from firstdiff.regression.quoting import for_text, quoted
from firstdiff.regression.trace_diff import Example, TraceDiff

BAR_CHARS = 60
_MARKS = {
    "tokenize": "t",
    "queue": "q",
    "prefill": "P",
    "decode": "d",
    "preempted": "x",
    "stream": "s",
    "other": ".",
    "queue and prefill": "Q",
}


def to_json(found: TraceDiff) -> bytes:
    """The whole of it, indented."""
    return msgspec.json.format(msgspec.json.encode(found), indent=2) + b"\n"


def to_text(found: TraceDiff, *, jaeger_url: str | None = None) -> str:
    """For a terminal: the verdict line, then tables; with links when there is a Jaeger to open them in."""
    lines = [for_text(f"{found.status.upper()}: {_headline(found)}")]
    lines += [for_text(f"  {reason}") for reason in found.reasons]
    if found.splits:
        lines += ["", "where the time went: change at the mean, and at places of the end-to-end time"]
        lines += [for_text(line) for line in aligned(list(_split_rows(found)))]
    if found.rates:
        rows = [["speed", "base", "candidate", "change", "90 % range", "requests"]]
        rows += [
            [
                f"{rate.phase} per {rate.unit}",
                duration(rate.base_ns),
                duration(rate.candidate_ns),
                percent(rate.change.value),
                f"[{rate.change.low:+.1%}, {rate.change.high:+.1%}]",
                f"{rate.num_base}, {rate.num_candidate}",
            ]
            for rate in found.rates
        ]
        lines += ["", *aligned(rows)]
    if found.shifts:
        rows = [["workload", "base", "candidate", "change by workload", "change by speed"]]
        rows += [
            [
                f"{shift.unit}s a request",
                f"{shift.base_units:.4g}",
                f"{shift.candidate_units:.4g}",
                f"{shift.phase} {duration(shift.by_workload_ns, sign=True)}",
                f"{shift.phase} {duration(shift.by_speed_ns, sign=True)}",
            ]
            for shift in found.shifts
        ]
        lines += ["", *aligned(rows)]
    if found.attributes:
        rows = [["goes with it", "value", "effect (-1..1)", "p (corrected)", "requests"]]
        rows += [
            [
                quoted(one.name),
                "-" if one.value is None else quoted(one.value),
                f"{one.effect:+.2f}",
                f"{one.p_value:.1g}",
                str(one.num_requests),
            ]
            for one in found.attributes
        ]
        lines += ["", *(for_text(line) for line in aligned(rows))]
    if found.examples:
        lines += ["", "the pairs that show most: base above, candidate below, on one scale"]
        for example in found.examples:
            lines += [for_text(line) for line in _example(example, jaeger_url)]
    return "\n".join(lines) + "\n"


def _headline(found: TraceDiff) -> str:
    if found.slowdown is None:
        return "nothing can be said"
    change = found.slowdown
    how = "in pairs" if found.is_paired else "of like length"
    text = (
        f"a request takes {percent(change.value)} [{change.low:+.1%}, {change.high:+.1%}] typically, "
        f"n = {found.num_base} and {found.num_candidate} {how}"
    )
    if found.guilty is None:
        return text + "; no phase certainly adds"
    mean = found.splits[0]
    part = mean.parts[found.guilty]
    text += f"; {found.guilty} adds {_change(part)}"
    if mean.change.low > 0:
        text += (
            f", {part.value / mean.change.value:.0%} of the mean's {duration(mean.change.value, sign=True)}"
        )
    return text


def _change(part: Range) -> str:
    low, high = duration(part.low, sign=True), duration(part.high, sign=True)
    return f"{duration(part.value, sign=True)} [{low}, {high}]"


def _split_rows(found: TraceDiff) -> Iterator[list[str]]:
    mean = found.splits[0]
    yield [
        "phase",
        "base",
        "candidate",
        *(f"{one.place} [90 % range], n={one.num_requests:.0f}" for one in found.splits),
    ]
    for phase in mean.parts:
        yield [
            phase + (" <-" if phase == found.guilty else ""),
            duration(mean.base_parts_ns[phase]),
            duration(mean.candidate_parts_ns[phase]),
            *(_change(one.parts[phase]) for one in found.splits),
        ]
    yield [
        "sum",
        duration(mean.base_ns),
        duration(mean.candidate_ns),
        *(_change(one.change) for one in found.splits),
    ]


def _example(example: Example, jaeger_url: str | None) -> Iterator[str]:
    sides = (example.base_phases_ns, example.candidate_phases_ns)
    longest = max(sum(phases.values()) for phases in sides)
    case = "" if example.case is None else f"case {quoted(example.case)}  "
    counts = " / ".join("-" if count is None else str(count) for count in example.num_output_tokens)
    ids = f"{quoted(example.base_trace_id)} / {quoted(example.candidate_trace_id)}"
    yield f"  {case}{ids}  output tokens {counts}"
    for phases in sides:
        yield f"    {_bar(phases, longest):<{BAR_CHARS}} {duration(sum(phases.values()))}"
    yield "    " + "  ".join(
        f"{_MARKS.get(phase, '?')} {phase} {duration(sides[0][phase])} -> {duration(sides[1][phase])}"
        for phase in sides[0]
        if sides[0][phase] or sides[1][phase]
    )
    if jaeger_url is not None:
        ids = f"{example.base_trace_id}...{example.candidate_trace_id}"
        yield f"    {jaeger_url.rstrip('/')}/trace/{ids}"


def _bar(phases: dict[str, int], longest_ns: int) -> str:
    """Each phase as many marks as it has of the longest, rounded so that the ends lie where they should."""
    bar, end_ns = "", 0
    for phase, duration_ns in phases.items():
        end_ns += duration_ns
        bar += _MARKS.get(phase, "?") * (round(end_ns / max(longest_ns, 1) * BAR_CHARS) - len(bar))
    return bar
