"""What Jaeger's search asks for, in both generations of its API, and which traces that are.

Owns: parameters, their spellings and their errors, the match. Refuses to know: HTTP, how answers look.
Invariants: a trace is found when one of its spans satisfies all that was asked, as in Jaeger's own storage in
memory; the newest come first; a parameter that cannot be read is an error with its name, never left out.
Source: Jaeger's query service (internal/apiv3/query_parser.go and query_parser.go in its repository).

Usage: `found = find_traces(traces, parse_v3(request.query))`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from itertools import islice

import msgspec

from firstdiff.tracing.records import UNREADABLE
from firstdiff.tracing.span_record import AttributeValue, SpanRecord
from firstdiff.tracing.trace_set import Trace, service_of

_Parser = Callable[[str], int]

DEFAULT_DEPTH = 100
MAX_DEPTH = 10_000
_MAX_TIME_NS = 1 << 63
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_RFC3339 = re.compile(
    r"(\d{4}-\d\d-\d\d)[Tt](\d\d:\d\d:\d\d)(?:\.(\d{1,9})\d*)?([Zz]|[+-]\d\d:\d\d)", re.ASCII
)
_UNITS_NS = {"ns": 1, "us": 10**3, "µs": 10**3, "μs": 10**3, "ms": 10**6, "s": 10**9, "m": 60 * 10**9}
_UNITS_NS["h"] = 60 * _UNITS_NS["m"]
_DURATION_PART = re.compile(r"(\d{1,18}(?:\.\d{0,18})?|\.\d{1,18})(ns|us|µs|μs|ms|s|m|h)", re.ASCII)


@dataclass(frozen=True, slots=True)
class TraceQuery:
    """What a trace must have; empty and None ask for nothing. `attributes` are compared as text."""

    service: str = ""
    operation: str = ""
    attributes: dict[str, str] = field(default_factory=dict)
    start_min_unix_ns: int | None = None
    start_max_unix_ns: int | None = None
    duration_min_ns: int | None = None
    duration_max_ns: int | None = None
    depth: int = DEFAULT_DEPTH


class QueryError(ValueError):
    """A parameter that cannot be read, in Jaeger's words."""


def parse_v3(query: Mapping[str, str]) -> TraceQuery:
    """The parameters of API v3, in camelCase as documented or in the older spelling; QueryError."""
    start_min = _v3(query, "startTimeMin", "start_time_min", unix_ns)
    start_max = _v3(query, "startTimeMax", "start_time_max", unix_ns)
    if start_min is None or start_max is None:
        raise QueryError("query.startTimeMin and query.startTimeMax are required")
    operation, _ = _value(query, "query.operationName", "query.operation_name", "query.span_name")
    depth, name = _value(query, "query.searchDepth", "query.search_depth", "query.num_traces")
    attributes = query.get("query.attributes", "")
    return TraceQuery(
        service=_value(query, "query.serviceName", "query.service_name")[0],
        operation=operation,
        attributes=_attributes(attributes, "query.attributes") if attributes else {},
        start_min_unix_ns=start_min,
        start_max_unix_ns=start_max,
        duration_min_ns=_v3(query, "durationMin", "duration_min", duration_ns),
        duration_max_ns=_v3(query, "durationMax", "duration_max", duration_ns),
        depth=_depth(depth, name) if depth else DEFAULT_DEPTH,
    )


def parse_legacy(query: Mapping[str, str]) -> TraceQuery:
    """The parameters of the API before v3: `service` needed, times in microseconds; QueryError."""
    if not query.get("service"):
        raise QueryError("parameter 'service' is required")
    tags = query.get("tags", "")
    limit = query.get("limit", "")
    return TraceQuery(
        service=query["service"],
        operation=query.get("operation", ""),
        attributes=_attributes(tags, "tags") if tags else {},
        start_min_unix_ns=_legacy_time(query, "start"),
        start_max_unix_ns=_legacy_time(query, "end"),
        duration_min_ns=_parsed(query.get("minDuration", ""), "minDuration", duration_ns),
        duration_max_ns=_parsed(query.get("maxDuration", ""), "maxDuration", duration_ns),
        depth=_depth(limit, "limit") if limit else DEFAULT_DEPTH,
    )


def find_traces(traces: Iterable[Trace], query: TraceQuery) -> list[Trace]:
    """The newest `depth` traces that `query` asks for, given all of them by start."""
    newest_first = reversed(list(traces))
    found = (trace for trace in newest_first if any(_matches(span, query) for span in trace.spans))
    return list(islice(found, query.depth))


def unix_ns(text: str) -> int:
    """A moment as RFC 3339 writes it, to the nanosecond; ValueError."""
    match = _RFC3339.fullmatch(text)
    if match is None:
        raise ValueError(f"cannot parse {text[:40]!r} as a time like 2026-12-01T12:00:00Z")
    day, clock, fraction, zone = match.groups()
    moment = datetime.fromisoformat(f"{day}T{clock}{'+00:00' if zone in 'Zz' else zone}")
    return (moment - _EPOCH) // timedelta(seconds=1) * 10**9 + int((fraction or "0").ljust(9, "0"))


def rfc3339(unix_ns: int) -> str:
    """A moment as RFC 3339 writes it, in UTC, to the nanosecond."""
    moment = datetime.fromtimestamp(unix_ns // 10**9, tz=UTC)
    return f"{moment:%Y-%m-%dT%H:%M:%S}.{unix_ns % 10**9:09d}Z"


def duration_ns(text: str) -> int:
    """A duration as Go writes it (`1.5s`, `100ms`, `1h2m`); ValueError."""
    total_ns, end = 0.0, 0
    for part in _DURATION_PART.finditer(text[:80]):
        if part.start() != end:
            break
        total_ns += float(part.group(1)) * _UNITS_NS[part.group(2)]
        end = part.end()
    if text == "0":
        return 0
    if not text or end != len(text) or total_ns >= _MAX_TIME_NS:
        raise ValueError(f"cannot parse {text[:40]!r} as a duration like 1.5s or 100ms")
    return round(total_ns)


def _matches(span: SpanRecord, query: TraceQuery) -> bool:
    if query.service and service_of(span) != query.service:
        return False
    if query.operation and span.name != query.operation:
        return False
    if query.start_min_unix_ns is not None and span.start_unix_ns < query.start_min_unix_ns:
        return False
    if query.start_max_unix_ns is not None and span.start_unix_ns > query.start_max_unix_ns:
        return False
    if query.duration_min_ns is not None and span.duration_ns < query.duration_min_ns:
        return False
    if query.duration_max_ns is not None and span.duration_ns > query.duration_max_ns:
        return False
    return all(_has(span, key, value) for key, value in query.attributes.items())


def _has(span: SpanRecord, key: str, wanted: str) -> bool:
    if key == "error":
        return (span.error is not None) == (wanted == "true")
    if key == "span.kind":
        return span.kind == wanted
    return any(key in group and _text(group[key]) == wanted for group in (span.attributes, span.resource))


def _text(value: AttributeValue) -> str:
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()


def _value(query: Mapping[str, str], *spellings: str) -> tuple[str, str]:
    """(value, spelling) of the first one that is there and not empty."""
    for name in spellings:
        if query.get(name):
            return query[name], name
    return "", spellings[0]


def _v3(query: Mapping[str, str], name: str, older: str, parse: _Parser) -> int | None:
    text, spelling = _value(query, f"query.{name}", f"query.{older}")
    return _parsed(text, spelling, parse)


def _parsed(text: str, name: str, parse: _Parser) -> int | None:
    if not text:
        return None
    try:
        return parse(text)
    except (ValueError, OverflowError) as error:
        raise QueryError(f"malformed parameter {name}: {error}") from error


def _attributes(text: str, name: str) -> dict[str, str]:
    try:
        return msgspec.json.decode(text, type=dict[str, str])
    except UNREADABLE as error:
        raise QueryError(f"malformed parameter {name}: {error}") from error


def _depth(text: str, name: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 10 and 0 < int(text) <= MAX_DEPTH):
        raise QueryError(f"malformed parameter {name}: expected 1..{MAX_DEPTH}, got {text[:40]!r}")
    return int(text)


def _legacy_time(query: Mapping[str, str], name: str) -> int | None:
    text = query.get(name, "")
    if not text:
        return None
    if not (text.isascii() and text.isdigit() and len(text) < 20):
        raise QueryError(f"malformed parameter {name}: expected microseconds, got {text[:40]!r}")
    return int(text) * 1000
