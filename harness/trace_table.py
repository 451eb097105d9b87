"""Traces as a table: one line an answer, with its phases, to sort by any of them.

Owns: which spans are an answer, the columns, sorting. Refuses to know: where traces come from, statistics.
Invariants: a time is exact where the span says it in nanoseconds, else the spans' own; a phase that nobody
told of is None and sorts last, never 0; lines that sort alike keep the order of their start.

Usage: `rows = sort_rows(table_rows(traces), "prefill"); print(table_text(rows))`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import UTC, datetime

import msgspec
from rich.cells import cell_len

from firstdiff.harness.progress import printable
from firstdiff.tracing import names
from firstdiff.tracing.span_record import SpanRecord
from firstdiff.tracing.trace_set import Trace, service_of

SORT_KEYS = ("start", "e2e", "ttft", *names.PHASES)
_MAX_CELL_CHARS = 40


class TraceRow(msgspec.Struct, frozen=True, kw_only=True):
    """One answer of a trace, or the trace itself where it holds none; times in nanoseconds."""

    trace_id: str
    request_id: str | None
    case_id: str | None
    service: str
    operation: str
    start_unix_ns: int
    e2e_ns: int
    ttft_ns: int | None
    phases_ns: dict[str, int | None]
    num_spans: int
    error: str | None

    def value(self, key: str) -> int | None:
        """What `--sort KEY` goes by."""
        known = {"start": self.start_unix_ns, "e2e": self.e2e_ns, "ttft": self.ttft_ns}
        return known[key] if key in known else self.phases_ns[key]


def table_rows(traces: Iterable[Trace]) -> list[TraceRow]:
    """The lines of all traces, in their order."""
    return [row for trace in traces for row in _rows_of(trace)]


def sort_rows(rows: Sequence[TraceRow], key: str) -> list[TraceRow]:
    """By `start` the earliest first, by any duration the longest; what has none comes last."""
    if key == "start":
        return sorted(rows, key=lambda row: row.start_unix_ns)
    present = [row for row in rows if row.value(key) is not None]
    present.sort(key=lambda row: -(row.value(key) or 0))
    return present + [row for row in rows if row.value(key) is None]


def table_text(rows: Sequence[TraceRow], *, num_total: int) -> str:
    """Lines of aligned columns; milliseconds; trace ids as far as they tell these lines apart."""
    width = _id_width(rows)
    header = ["trace", "request", "case", "operation", "start (UTC)", "e2e", "ttft", *names.PHASES, "error"]
    cells = [header, *(_cells(row, width) for row in rows)]
    # A column that nothing is in says nothing.
    kept = [
        column
        for column in range(len(header))
        if any(line[column] for line in cells[1:]) or header[column] in ("trace", "e2e")
    ]
    widths = {column: max(cell_len(line[column]) for line in cells) for column in kept}
    is_time = {header.index(name) for name in ("e2e", "ttft", *names.PHASES)}
    lines = [
        "  ".join(_padded(line[column], widths[column], right=column in is_time) for column in kept).rstrip()
        for line in cells
    ]
    lines.append(f"{len(rows)} of {num_total} requests; times in ms")
    return "\n".join(lines)


def _rows_of(trace: Trace) -> list[TraceRow]:
    spans = [span for _, span in trace.walk()]
    children: dict[str, list[SpanRecord]] = {}
    for span in spans:
        if span.parent_span_id is not None:
            children.setdefault(span.parent_span_id, []).append(span)
    case = next((span.attributes[names.CASE_ID] for span in spans if names.CASE_ID in span.attributes), None)
    answers = [span for span in spans if is_answer(span)] or [trace.root]
    return [_row_of(trace, span, children, None if case is None else str(case)) for span in answers]


def is_answer(span: SpanRecord) -> bool:
    """Whether a span is one answer of a model, as its server saw it."""
    return span.kind != "client" and (
        names.GEN_AI_OPERATION in span.attributes or names.LATENCY_E2E in span.attributes
    )


def _row_of(
    trace: Trace, span: SpanRecord, children: dict[str, list[SpanRecord]], case_id: str | None
) -> TraceRow:
    request_id = span.attributes.get(names.GEN_AI_RESPONSE_ID) or span.attributes.get(names.REQUEST_ID)
    return TraceRow(
        trace_id=trace.trace_id,
        request_id=None if request_id is None else str(request_id),
        case_id=case_id,
        service=service_of(span),
        operation=span.name,
        start_unix_ns=span.start_unix_ns,
        e2e_ns=_seconds(span, names.LATENCY_E2E) or span.duration_ns,
        ttft_ns=_seconds(span, names.LATENCY_TTFT),
        phases_ns={phase: _phase_ns(span, phase, children.get(span.span_id, [])) for phase in names.PHASES},
        num_spans=len(trace.spans),
        error=span.error,
    )


def _phase_ns(span: SpanRecord, phase: str, children: Sequence[SpanRecord]) -> int | None:
    total_ns = span.attributes.get(names.PHASE_TOTAL_NS[phase])
    if isinstance(total_ns, int):
        return total_ns
    found = [child.duration_ns for child in children if child.name == phase]
    return sum(found) if found else None


def _seconds(span: SpanRecord, key: str) -> int | None:
    value = span.attributes.get(key)
    if isinstance(value, int | float) and 0 <= value < 1e9:
        return round(value * 1e9)
    return None


def _cells(row: TraceRow, id_width: int) -> list[str]:
    case = row.case_id or ""
    times = [row.e2e_ns, row.ttft_ns, *(row.phases_ns[phase] for phase in names.PHASES)]
    return [
        row.trace_id[:id_width],
        _short(row.request_id or ""),
        _short(case),
        _short(row.operation),
        time_text(row.start_unix_ns),
        *("" if ns is None else f"{ns / 1e6:.2f}" for ns in times),
        _short(row.error or ""),
    ]


def time_text(unix_ns: int) -> str:
    """A moment as UTC, to the millisecond."""
    moment = datetime.fromtimestamp(unix_ns // 10**9, tz=UTC)
    return f"{moment:%Y-%m-%d %H:%M:%S}.{unix_ns // 10**6 % 1000:03d}"


def _short(text: str) -> str:
    shown = printable(text[: _MAX_CELL_CHARS + 1])
    return shown if len(shown) <= _MAX_CELL_CHARS else shown[: _MAX_CELL_CHARS - 1] + "…"


def _padded(text: str, width: int, *, right: bool) -> str:
    space = " " * (width - cell_len(text))
    return space + text if right else text + space


def _id_width(rows: Sequence[TraceRow]) -> int:
    ids = {row.trace_id for row in rows}
    return next((width for width in (8, 12, 16) if len({text[:width] for text in ids}) == len(ids)), 32)
