"""Spans as a file of OTLP JSON lines, which Jaeger's upload takes and every command here reads.

Owns: the file `spans.jsonl` of a server's log. Refuses to know: what spans mean. Invariants: a line is what
was sent at once, whole; what the disk does not take is counted and fails nobody.

Usage: `output = SpanFile(directory, resource); output.send(spans)`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from firstdiff.tracing.lines import LineFile, read_lines
from firstdiff.tracing.otlp_json import decode_traces, encode_traces
from firstdiff.tracing.span_record import AttributeValue, SpanRecord

SPANS_FILE = "spans.jsonl"


class SpanFile:
    """Open for appending; OSError or ValueError when the file cannot be used at all."""

    def __init__(self, directory: Path, resource: dict[str, AttributeValue], *, version: str) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.num_dropped_spans = 0
        self._resource = resource
        self._version = version
        self._file = LineFile(directory / SPANS_FILE)

    def send(self, spans: Sequence[SpanRecord]) -> None:
        """Append one line. Never raises: spans that cannot be written are counted."""
        try:
            self._file.append(encode_traces(spans, self._resource, version=self._version))
        except (OSError, ValueError):
            self.num_dropped_spans += len(spans)

    def close(self) -> None:
        """Flush to disk; spans that come later are dropped and counted."""
        try:
            self._file.close()
        except OSError:
            # How many of them the disk refused at the end cannot be told.
            self.num_dropped_spans += 1


def read_spans(path: Path) -> list[SpanRecord]:
    """All spans of a file, or of the directory that holds one, in order; an unfinished last line is left out.

    A file of one OTLP JSON document over many lines is read too. ValueError when there is no such file or a
    whole line is something else.
    """
    file = path / SPANS_FILE if path.is_dir() else path
    if not file.is_file():
        raise ValueError(f"expected a file of OTLP JSON lines, got {file}, which does not exist")
    spans: list[SpanRecord] = []
    for number, line in enumerate(read_lines(file), start=1):
        try:
            spans += decode_traces(line)
        except ValueError as error:
            if number == 1:
                return _read_document(file, error)
            raise ValueError(f"{error} in {file} line {number}") from error
    if not spans:
        return _read_document(file, None)
    return spans


def _read_document(file: Path, error: ValueError | None) -> list[SpanRecord]:
    content = file.read_bytes()
    if not content.strip():
        return []
    try:
        return decode_traces(content)
    except ValueError as other:
        raise ValueError(f"{error or other} in {file} line 1") from other
