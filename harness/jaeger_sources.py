"""The traces of several sources, kept up to date while their files grow.

Owns: noticing that a file changed, reading only what was appended. Refuses to know: who asks. Invariants: a
line counts once it is whole; what was read stays in memory; a file that shrank, was replaced or is no file of
lines is read anew; nothing is written or locked.

Usage: `live = LiveTraces([Path("runs/base")]); traces = live.refreshed()`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from firstdiff.tracing.otlp_json import decode_traces
from firstdiff.tracing.span_file import SPANS_FILE
from firstdiff.tracing.span_record import SpanRecord
from firstdiff.tracing.token_log import HTTP_FILE, TOKENS_FILE
from firstdiff.tracing.trace_set import Trace, group_traces, read_source

_Stamp = tuple[tuple[str, int, int, int], ...]
"""(name, inode, bytes, mtime in ns) of each file that a source is read from."""


@dataclass(slots=True)
class _Followed:
    path: Path
    stamp: _Stamp = ()
    lines: Path | None = None
    num_read_bytes: int = 0
    spans: list[SpanRecord] = field(default_factory=list)


class LiveTraces:
    """All traces of `sources`; not for two threads at a time."""

    def __init__(self, sources: Sequence[Path]) -> None:
        self._followed = [_Followed(path) for path in sources]
        self._groups: dict[str, list[SpanRecord]] = {}
        self._traces: dict[str, Trace] = {}
        self._in_order: list[Trace] = []
        self._is_stale = False

    def refreshed(self) -> list[Trace]:
        """The traces by start, as the files are now; errors as `read_source`."""
        appended: list[SpanRecord] = []
        # Until all went well, so that what a later source's error leaves out comes with the next refresh.
        is_whole, self._is_stale = self._is_stale, True
        for source in self._followed:
            stamp = _stamp(source.path)
            if stamp == source.stamp and stamp:
                continue
            new = _appended(source, stamp)
            if new is None:
                _read_anew(source)
                is_whole = True
            else:
                source.spans += new
                appended += new
            source.stamp = stamp
        if is_whole:
            self._groups.clear()
            self._traces.clear()
            appended = [span for source in self._followed for span in source.spans]
        if appended or is_whole:
            self._regroup(appended)
        self._is_stale = False
        return self._in_order

    def trace(self, trace_id: str) -> Trace | None:
        """The trace of that id, as of the last refresh."""
        return self._traces.get(trace_id)

    def _regroup(self, spans: Sequence[SpanRecord]) -> None:
        for span in spans:
            self._groups.setdefault(span.trace_id, []).append(span)
        for trace_id in {span.trace_id for span in spans}:
            (self._traces[trace_id],) = group_traces(self._groups[trace_id])
        self._in_order = sorted(
            self._traces.values(), key=lambda trace: (trace.start_unix_ns, trace.trace_id)
        )


def _stamp(path: Path) -> _Stamp:
    files = [path / name for name in (SPANS_FILE, TOKENS_FILE, HTTP_FILE)] if path.is_dir() else [path]
    if files[0].is_file():
        # Where there are spans, the other rows are not asked.
        files = files[:1]
    found = [(file.name, file.stat()) for file in files if file.is_file()]
    return tuple((name, status.st_ino, status.st_size, status.st_mtime_ns) for name, status in found)


def _appended(source: _Followed, stamp: _Stamp) -> list[SpanRecord] | None:
    """The spans of the lines that came since; None where the whole source must be read."""
    if source.lines is None or len(stamp) != 1 or len(source.stamp) != 1:
        return None
    (name, inode, num_bytes, _), (old_name, old_inode, _, _) = stamp[0], source.stamp[0]
    if (name, inode) != (old_name, old_inode) or num_bytes < source.num_read_bytes:
        return None
    return _read_lines(source, source.lines)


def _read_anew(source: _Followed) -> None:
    lines = source.path / SPANS_FILE if source.path.is_dir() else source.path
    source.lines, source.num_read_bytes, source.spans = None, 0, []
    if lines.suffix == ".jsonl" and lines.is_file():
        try:
            source.spans = _read_lines(source, lines)
        except ValueError:
            # Not lines after all, or broken: the ordinary reader says which.
            source.spans = []
    if source.spans:
        source.lines = lines
    else:
        source.spans = read_source(source.path)


def _read_lines(source: _Followed, lines: Path) -> list[SpanRecord]:
    """The spans of the whole lines that were not read yet; ValueError leaves all of them unread."""
    spans: list[SpanRecord] = []
    num_bytes = source.num_read_bytes
    with lines.open("rb") as file:
        file.seek(num_bytes)
        for line in file:
            if not line.endswith(b"\n"):
                break
            try:
                spans += decode_traces(line)
            except ValueError as error:
                raise ValueError(f"{error} in {lines} at byte {num_bytes}") from error
            num_bytes += len(line)
    source.num_read_bytes = num_bytes
    return spans
