"""A server's traces of a Run's requests, brought into the Run.

Owns: which lines of a server's log belong to a Run. Refuses to know: what spans mean. Invariants: lines are
copied as they stand, each once, however often this runs.

Usage: `collect_traces(log_dir, run, {row.trace_id for row in rows})`.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from firstdiff.tracing.lines import read_lines
from firstdiff.tracing.log_files import HTTP_FILE, read_log_lines
from firstdiff.tracing.otlp_json import decode_traces
from firstdiff.tracing.records import UNREADABLE, HttpRow, decode_row
from firstdiff.tracing.span_file import SPANS_FILE
from firstdiff.tracing.store import Run


def collect_traces(log_dir: Path, run: Run, trace_ids: Collection[str | None]) -> int:
    """Copy HttpRows to the Run's `http.jsonl` and spans to its `spans.jsonl`; how many lines came new.

    Lines that are neither are left where they are.
    """
    return _copy(log_dir, HTTP_FILE, run, "http", trace_ids) + _copy(
        log_dir, SPANS_FILE, run, "spans", trace_ids
    )


def _copy(log_dir: Path, file: str, run: Run, name: str, trace_ids: Collection[str | None]) -> int:
    target = run.path / f"{name}.jsonl"
    held = set(read_lines(target)) if target.is_file() else set()
    num_new = 0
    for line in read_log_lines(log_dir, file):
        if line not in held and _trace_id_of(line, name) in trace_ids:
            run.append_line(name, line)
            held.add(line)
            num_new += 1
    return num_new


def _trace_id_of(line: bytes, name: str) -> str | None:
    try:
        if name == "http":
            return decode_row(line, HttpRow).trace_id
        spans = decode_traces(line)
    except (ValueError, *UNREADABLE):
        return None
    return spans[0].trace_id if spans else None
