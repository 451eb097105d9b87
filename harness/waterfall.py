"""A trace as a waterfall in the terminal: the tree on the left, when each span ran in the middle.

Owns: how a trace is drawn. Refuses to know: where traces come from, terminals. Invariants: no line is wider
than asked for; text from outside is made harmless before it is measured; a span of any length at all shows
at least one mark; at most MAX_SPANS spans are drawn, and what was left out is said.

Usage: `print(waterfall(trace, width=100))`.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

import msgspec
from rich.cells import cell_len, set_cell_size

from firstdiff.harness.progress import printable
from firstdiff.harness.trace_table import time_text
from firstdiff.tracing.span_record import AttributeValue, SpanRecord
from firstdiff.tracing.trace_set import Trace, service_of

MIN_WIDTH = 40
MAX_SPANS = 1000
_MAX_TEXT_CHARS = 500
_MAX_DEPTH = 20
_BAR = "█"
_TIME_WIDTH = 10


def waterfall(trace: Trace, *, width: int, attributes: bool = False) -> str:
    """The lines of a trace, each at most `width` cells (MIN_WIDTH at least)."""
    width = max(width, MIN_WIDTH)
    shown = list(islice(trace.walk(), MAX_SPANS))
    services = list(dict.fromkeys(service_of(span) for span in trace.spans))
    labels = [_label(depth, span, several=len(services) > 1) for depth, span in shown]
    name_width = min(max(map(cell_len, labels)), max(16, width * 2 // 5))
    bar_width = width - name_width - _TIME_WIDTH * 2 - 3
    lines = [*_head(trace, services), ""]
    for (depth, span), label in zip(shown, labels, strict=True):
        offset_ns = span.start_unix_ns - trace.start_unix_ns
        times = f"{duration_text(offset_ns):>{_TIME_WIDTH}} {duration_text(span.duration_ns):>{_TIME_WIDTH}}"
        bar = _bar(trace, span, bar_width) if bar_width > 0 else ""
        lines.append(f"{set_cell_size(label, name_width)} {bar} {times}")
        indent = "  " * (min(depth, _MAX_DEPTH) + 1)
        if span.error is not None:
            lines.append(f"{indent}! {_text(span.error)}")
        if attributes:
            lines += (f"{indent}{line}" for line in _attribute_lines(span))
    num_hidden = len(trace.spans) - len(shown)
    if num_hidden:
        lines.append(f"... and {num_hidden} more spans")
    return "\n".join(_cut(line, width) for line in lines)


def duration_text(duration_ns: int) -> str:
    """A duration in the unit that leaves one to four digits before the point."""
    for unit, size_ns in (("s", 10**9), ("ms", 10**6)):
        if abs(duration_ns) >= size_ns:
            return f"{duration_ns / size_ns:.2f} {unit}"
    return f"{duration_ns / 1000:.0f} us"


def _head(trace: Trace, services: list[str]) -> Iterator[str]:
    root = trace.root
    yield f"trace {trace.trace_id}"
    yield f"{_text(root.name)}, {time_text(trace.start_unix_ns)} UTC, {duration_text(trace.duration_ns)}"
    counted = f"{len(trace.spans)} spans of {_text(', '.join(services))}"
    if trace.num_errors:
        counted += f", {trace.num_errors} with errors"
    if trace.num_orphans:
        counted += f", {trace.num_orphans} without the parent that they name"
    yield counted


def _label(depth: int, span: SpanRecord, *, several: bool) -> str:
    mark = "! " if span.error is not None else ""
    service = f" ({_text(service_of(span))})" if several and depth == 0 else ""
    return "  " * min(depth, _MAX_DEPTH) + mark + _text(span.name) + service


def _bar(trace: Trace, span: SpanRecord, width: int) -> str:
    total_ns = max(1, trace.duration_ns)
    begin = (span.start_unix_ns - trace.start_unix_ns) * width // total_ns
    end = -((trace.start_unix_ns - span.end_unix_ns) * width // total_ns)
    begin = min(begin, width - 1)
    end = min(max(end, begin + 1), width)
    return " " * begin + _BAR * (end - begin) + " " * (width - end)


def _attribute_lines(span: SpanRecord) -> Iterator[str]:
    for key, value in (span.attributes | span.resource).items():
        yield f"{_text(key)} = {_text(_value_text(value))}"


def _value_text(value: AttributeValue) -> str:
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()


def _text(text: str) -> str:
    shown = printable(text[:_MAX_TEXT_CHARS])
    return shown + "…" if len(text) > _MAX_TEXT_CHARS else shown


def _cut(line: str, width: int) -> str:
    line = line.rstrip()
    return line if cell_len(line) <= width else set_cell_size(line, width - 1) + "…"
