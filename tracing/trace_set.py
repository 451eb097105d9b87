"""Traces from wherever spans were kept: a Run, a server's log, files that others wrote.

Owns: which spans make a trace, its tree, how each kind of source is read. Refuses to know: what spans mean,
how they are drawn, networks. Invariants: nothing that is read is trusted: a span whose parent is missing is a
root, a ring of parents is cut where it begins, a span that came twice alike counts once; each span is in the
walk exactly once, however the parents lie, without recursion.

Usage: `traces = read_traces([Path("runs/base")]); for depth, span in traces[0].walk(): ...`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import msgspec

from firstdiff.tracing import names
from firstdiff.tracing.jaeger_json import decode_jaeger, is_jaeger
from firstdiff.tracing.log_files import enumerate_log_lines
from firstdiff.tracing.records import UNREADABLE, HttpRow, Identity, TokenLogRow, decode_row
from firstdiff.tracing.request_spans import answer_spans, http_span
from firstdiff.tracing.span_file import SPANS_FILE, read_spans
from firstdiff.tracing.span_record import AttributeValue, SpanRecord
from firstdiff.tracing.token_log import HTTP_FILE, TOKENS_FILE, hash_identity, read_token_log

_UNKNOWN_SERVICE = "unknown_service"


def service_of(span: SpanRecord) -> str:
    """The service that made a span, by OpenTelemetry's name for one that did not say."""
    return str(span.resource.get(names.SERVICE_NAME_KEY) or _UNKNOWN_SERVICE)


@dataclass(frozen=True, eq=False)
class Trace:
    """All spans of one trace, at least one, by their start; `group_traces` makes them."""

    trace_id: str
    spans: tuple[SpanRecord, ...]

    @property
    def start_unix_ns(self) -> int:
        return self.spans[0].start_unix_ns

    @cached_property
    def end_unix_ns(self) -> int:
        return max(self.start_unix_ns, *(span.end_unix_ns for span in self.spans))

    @property
    def duration_ns(self) -> int:
        return self.end_unix_ns - self.start_unix_ns

    @property
    def root(self) -> SpanRecord:
        """The first span that has no parent; where all claim one, the first whose parent is missing."""
        claims_none = (span for span in self.spans if span.parent_span_id is None)
        return next(claims_none, self._tree[0][1])

    @property
    def num_orphans(self) -> int:
        """Spans whose parent is not in the trace."""
        present = {span.span_id for span in self.spans}
        return sum(
            span.parent_span_id is not None and span.parent_span_id not in present for span in self.spans
        )

    @property
    def num_errors(self) -> int:
        return sum(span.error is not None for span in self.spans)

    def walk(self) -> Iterator[tuple[int, SpanRecord]]:
        """(depth, span) of each span once, parents before their children, siblings by start."""
        return iter(self._tree)

    @cached_property
    def _tree(self) -> list[tuple[int, SpanRecord]]:
        children: dict[str, list[int]] = {}
        # Of spans that share an id, the first is the parent.
        first = {span.span_id: index for index, span in reversed(list(enumerate(self.spans)))}
        roots = []
        for index, span in enumerate(self.spans):
            parent = span.parent_span_id
            if parent is None or parent not in first:
                roots.append(index)
            elif first[parent] != index:
                children.setdefault(parent, []).append(index)
        found: list[tuple[int, SpanRecord]] = []
        seen: set[int] = set()
        # Roots first; what is then not reached hangs in a ring, which is cut at its earliest span.
        for root in (*roots, *range(len(self.spans))):
            waiting = [(0, root)]
            while waiting:
                depth, index = waiting.pop()
                if index in seen:
                    continue
                seen.add(index)
                span = self.spans[index]
                found.append((depth, span))
                if first[span.span_id] == index:
                    below = children.get(span.span_id, ())
                    waiting += ((depth + 1, child) for child in reversed(below))
        return found


def group_traces(spans: Iterable[SpanRecord]) -> list[Trace]:
    """The traces that `spans`, in any order, make up; by their start, then by id."""
    groups: dict[str, dict[bytes, SpanRecord]] = {}
    for span in spans:
        # A log copied into a Run twice, or an exporter that tried again, sends the same span once more.
        groups.setdefault(span.trace_id, {}).setdefault(msgspec.msgpack.encode(span), span)
    traces = [
        Trace(trace_id, tuple(sorted(group.values(), key=_order))) for trace_id, group in groups.items()
    ]
    return sorted(traces, key=lambda trace: (trace.start_unix_ns, trace.trace_id))


def _order(span: SpanRecord) -> tuple[int, int]:
    return span.start_unix_ns, -span.end_unix_ns


def read_traces(sources: Sequence[Path]) -> list[Trace]:
    """The traces of all sources together, as `group_traces`; errors as `read_source`."""
    return group_traces(span for source in sources for span in read_source(source))


def read_source(source: Path) -> list[SpanRecord]:
    """The spans of a Run or log directory, or of a file: OTLP JSON, lines of it, or Jaeger's own JSON.

    A directory without `spans.jsonl` gives the spans that its token log and HTTP rows tell of. ValueError
    when there is nothing to read, or it is something else.
    """
    if not source.is_dir():
        return _read_file(source)
    if (source / SPANS_FILE).is_file():
        return read_spans(source)
    spans = [*_fold_http(source), *_fold_answers(source)]
    if not spans and not is_log(source):
        raise ValueError(
            f"expected {SPANS_FILE}, {TOKENS_FILE} or {HTTP_FILE} in {source}, got none of them: "
            "give a Run or a server's log folder"
        )
    return spans


def is_log(folder: Path) -> bool:
    """Whether a directory holds rows of a server or spans."""
    return any((folder / name).is_file() for name in (SPANS_FILE, TOKENS_FILE, HTTP_FILE))


def _read_file(file: Path) -> list[SpanRecord]:
    if not file.is_file():
        raise ValueError(f"expected a Run, a log folder or a file of spans, got {file}, which does not exist")
    with file.open("rb") as lines:
        head = lines.readline()
    try:
        is_whole = bool(msgspec.json.decode(head, type=msgspec.Raw))
    except UNREADABLE:
        is_whole = False
    content = head if is_whole else file.read_bytes()
    if not is_jaeger(content):
        return read_spans(file)
    try:
        return decode_jaeger(file.read_bytes())
    except ValueError as error:
        raise ValueError(f"{error} in {file}") from error


def _fold_answers(folder: Path) -> Iterator[SpanRecord]:
    if not (folder / TOKENS_FILE).is_file():
        return
    identities, rows = read_token_log(folder)
    servers = {hash_identity(identity): identity for identity in identities}
    has_parent = {row.span_id for row in _http_rows(folder)}
    for row in rows:
        identity = servers.get(row.identity_sha256)
        model = "unknown" if identity is None else identity.model
        for span in answer_spans(row, model=model):
            parent = span.parent_span_id
            if span.parent_span_id == row.span_id and row.span_id not in has_parent:
                # A log from before HTTP requests were rows: nobody has that span.
                parent = None
            yield msgspec.structs.replace(span, parent_span_id=parent, resource=_resource(identity))


def _fold_http(folder: Path) -> Iterator[SpanRecord]:
    rows = _http_rows(folder)
    servers: dict[str | None, Identity] = {}
    default: Identity | None = None
    if rows and (folder / TOKENS_FILE).is_file():
        identities, answers = read_token_log(folder)
        default = identities[-1] if identities else None
        servers = _servers_by_span(identities, answers)
    for row in rows:
        identity = servers.get(row.span_id, default)
        yield msgspec.structs.replace(http_span(row), resource=_resource(identity))


def _servers_by_span(
    identities: Sequence[Identity], rows: Sequence[TokenLogRow]
) -> dict[str | None, Identity]:
    servers = {hash_identity(identity): identity for identity in identities}
    return {row.span_id: servers[row.identity_sha256] for row in rows if row.identity_sha256 in servers}


def _http_rows(folder: Path) -> list[HttpRow]:
    rows: list[HttpRow] = []
    for file, number, line in enumerate_log_lines(folder, HTTP_FILE):
        try:
            rows.append(decode_row(line, HttpRow))
        except UNREADABLE as error:
            raise ValueError(f"expected an HttpRow in {file} line {number}, got: {error}") from error
    return rows


def _resource(identity: Identity | None) -> dict[str, AttributeValue]:
    resource: dict[str, AttributeValue] = {names.SERVICE_NAME_KEY: names.SERVICE_NAME}
    if identity is not None:
        resource[names.SERVICE_VERSION_KEY] = identity.engine_version
        resource[names.SERVICE_INSTANCE_KEY] = identity.instance_id
        resource[names.IDENTITY_SHA256] = hash_identity(identity)
    return resource
