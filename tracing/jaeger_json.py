"""Jaeger's own JSON: what its `/api/traces/{id}` answers and its upload takes.

Owns: the wire shape, both ways. Refuses to know: what spans mean, HTTP. Invariants: times are floored to
microseconds at both ends, so that a gap of a microsecond between two spans stays one; what Jaeger has no
place for is a tag, by the names that Jaeger itself gives it; what is read may be anybody's and is trusted but
by ValueError. Lost: events and links, what is finer than a microsecond, that a list was none but text.
Source: the model that Jaeger's query service shows (internal/uimodel in its repository).

Usage: `content = encode_jaeger([spans of one trace, ...]); spans = decode_jaeger(content)`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from firstdiff.tracing import names
from firstdiff.tracing.records import UNREADABLE
from firstdiff.tracing.span_record import AttributeValue, SpanKind, SpanRecord

_KINDS: dict[str, SpanKind] = {
    "internal": "internal",
    "server": "server",
    "client": "client",
    "producer": "producer",
    "consumer": "consumer",
}
_SAFE_INTEGER = 1 << 53
"""Beyond it a browser rounds, so that Jaeger writes text."""
_TIME_MAX_US = (1 << 63) // 1000
_HEX = re.compile(r"[0-9a-f]+")

_KIND_TAG, _ERROR_TAG, _TRACESTATE_TAG = "span.kind", "error", "w3c.tracestate"
_CODE_TAG, _MESSAGE_TAG = "otel.status_code", "otel.status_description"
_OWN_TAGS = {_KIND_TAG, _ERROR_TAG, _TRACESTATE_TAG, _CODE_TAG, _MESSAGE_TAG}


class _Tag(msgspec.Struct):
    key: str
    type: str = "string"
    value: Any = None


class _Reference(msgspec.Struct, rename={"ref_type": "refType", "trace_id": "traceID", "span_id": "spanID"}):
    ref_type: str
    trace_id: str
    span_id: str


_SPAN_FIELDS = {
    "trace_id": "traceID",
    "span_id": "spanID",
    "operation_name": "operationName",
    "start_time": "startTime",
    "process_id": "processID",
    "parent_span_id": "parentSpanID",
}


class _Span(msgspec.Struct, rename=_SPAN_FIELDS):
    """Times in microseconds; `parent_span_id` is how Jaeger wrote parents before there were references."""

    trace_id: str
    span_id: str
    operation_name: str = ""
    references: list[_Reference] | None = []
    start_time: int = 0
    duration: int = 0
    tags: list[_Tag] | None = []
    logs: list[Any] | None = []
    process_id: str = ""
    warnings: list[str] | None = None
    parent_span_id: str | msgspec.UnsetType = msgspec.UNSET


class _Process(msgspec.Struct, rename={"service_name": "serviceName"}):
    service_name: str = ""
    tags: list[_Tag] | None = []


class _Trace(msgspec.Struct, rename={"trace_id": "traceID"}):
    trace_id: str
    spans: list[_Span]
    processes: dict[str, _Process] = {}
    warnings: list[str] | None = None


class _Answer(msgspec.Struct):
    data: list[_Trace]
    total: int = 0
    limit: int = 0
    offset: int = 0
    errors: list[Any] | None = None


class _Probe(msgspec.Struct, rename={"trace_id": "traceID"}):
    data: Any = None
    spans: Any = None
    trace_id: Any = None


def is_jaeger(content: bytes) -> bool:
    """Whether a JSON document has the look of Jaeger's own, by its outermost fields."""
    try:
        probe = msgspec.json.decode(content, type=_Probe)
    except UNREADABLE:
        return False
    return isinstance(probe.data, list) or (probe.trace_id is not None and probe.spans is not None)


def encode_jaeger(traces: Iterable[Sequence[SpanRecord]]) -> bytes:
    """The answer of Jaeger's API that holds these traces, each given as its spans."""
    return msgspec.json.encode(_Answer([_encode_trace(spans) for spans in traces]))


def decode_jaeger(content: bytes) -> list[SpanRecord]:
    """The spans of all traces of an answer or a downloaded file, in order.

    A file of a single trace, without the answer around it, is read too. ValueError, with what is wrong, when
    it is neither.
    """
    try:
        probe = msgspec.json.decode(content, type=_Probe)
        if probe.data is None and probe.trace_id is not None:
            traces = [msgspec.json.decode(content, type=_Trace)]
        else:
            traces = msgspec.json.decode(content, type=_Answer).data
    except UNREADABLE as error:
        raise ValueError(f"expected traces as Jaeger's JSON, got: {error}") from error
    return [_decode(span, trace.processes) for trace in traces for span in trace.spans]


def _encode_trace(spans: Sequence[SpanRecord]) -> _Trace:
    processes: dict[str, _Process] = {}
    ids: dict[bytes, str] = {}
    encoded = []
    for span in spans:
        key = msgspec.json.encode(span.resource)
        process_id = ids.setdefault(key, f"p{len(ids) + 1}")
        if process_id not in processes:
            processes[process_id] = _encode_process(span.resource)
        encoded.append(_encode(span, process_id))
    return _Trace(spans[0].trace_id if spans else "", encoded, processes)


def _encode_process(resource: dict[str, AttributeValue]) -> _Process:
    tags = [_tag(key, value) for key, value in resource.items() if key != names.SERVICE_NAME_KEY]
    return _Process(str(resource.get(names.SERVICE_NAME_KEY, "")), tags)


def _encode(span: SpanRecord, process_id: str) -> _Span:
    tags = [_tag(key, value) for key, value in span.attributes.items() if key not in _OWN_TAGS]
    if span.kind != "unspecified":
        tags.append(_tag(_KIND_TAG, span.kind))
    if span.error is not None:
        tags += [_tag(_ERROR_TAG, True), _tag(_CODE_TAG, "ERROR"), _tag(_MESSAGE_TAG, span.error)]
    if span.tracestate:
        tags.append(_tag(_TRACESTATE_TAG, span.tracestate))
    references = []
    if span.parent_span_id is not None:
        references.append(_Reference("CHILD_OF", span.trace_id, span.parent_span_id))
    start_us = span.start_unix_ns // 1000
    return _Span(
        trace_id=span.trace_id,
        span_id=span.span_id,
        operation_name=span.name,
        references=references,
        start_time=start_us,
        # Jaeger adds the two again; a span that ends before it starts has no time in it.
        duration=max(0, span.end_unix_ns // 1000 - start_us),
        tags=tags,
        process_id=process_id,
    )


def _tag(key: str, value: AttributeValue) -> _Tag:
    if isinstance(value, str):
        return _Tag(key, "string", value)
    if isinstance(value, bool):
        return _Tag(key, "bool", value)
    if isinstance(value, int):
        return _Tag(key, "int64", value if abs(value) < _SAFE_INTEGER else str(value))
    if isinstance(value, float):
        return _Tag(key, "float64", value) if math.isfinite(value) else _Tag(key, "string", str(value))
    return _Tag(key, "string", msgspec.json.encode(list(value)).decode())


def _decode(span: _Span, processes: dict[str, _Process]) -> SpanRecord:
    tags = _decode_tags(span.tags)
    process = processes.get(span.process_id, _Process())
    resource: dict[str, AttributeValue] = {}
    if process.service_name:
        resource[names.SERVICE_NAME_KEY] = process.service_name
    trace_id = _id_of(span.trace_id, 32)
    start_us, end_us = span.start_time, span.start_time + span.duration
    if not 0 <= start_us <= end_us < _TIME_MAX_US:
        raise ValueError(
            f"expected startTime and duration in microseconds, got {span.start_time} and {span.duration}"
        )
    return SpanRecord(
        name=span.operation_name,
        kind=_KINDS.get(str(tags.get(_KIND_TAG)), "unspecified"),
        trace_id=trace_id,
        span_id=_id_of(span.span_id, 16),
        parent_span_id=_parent_of(span, trace_id),
        start_unix_ns=start_us * 1000,
        end_unix_ns=end_us * 1000,
        attributes={key: value for key, value in tags.items() if key not in _OWN_TAGS},
        error=_error_of(tags),
        tracestate=str(tags.get(_TRACESTATE_TAG, "")),
        resource=resource | _decode_tags(process.tags),
    )


def _parent_of(span: _Span, trace_id: str) -> str | None:
    """The first CHILD_OF of the same trace, else the first FOLLOWS_FROM, as Jaeger chooses."""
    for wanted in ("CHILD_OF", "FOLLOWS_FROM"):
        for reference in span.references or []:
            if reference.ref_type == wanted and _id_of(reference.trace_id, 32) == trace_id:
                return _id_of(reference.span_id, 16)
    if isinstance(span.parent_span_id, str) and span.parent_span_id.strip("0"):
        return _id_of(span.parent_span_id, 16)
    return None


def _error_of(tags: dict[str, AttributeValue]) -> str | None:
    if tags.get(_ERROR_TAG) in (True, "true") or tags.get(_CODE_TAG) == "ERROR":
        return str(tags.get(_MESSAGE_TAG) or "error")
    return None


def _id_of(text: str, num_digits: int) -> str:
    """An id in full; Jaeger once left leading zeros out."""
    found = text.lower().zfill(num_digits)
    if len(found) != num_digits or _HEX.fullmatch(found) is None or not found.strip("0"):
        raise ValueError(f"expected an id of {num_digits} hex digits, not all zero, got {text[:40]!r}")
    return found


def _decode_tags(tags: list[_Tag] | None) -> dict[str, AttributeValue]:
    return {tag.key: _value_of(tag) for tag in tags or []}


def _value_of(tag: _Tag) -> AttributeValue:
    try:
        if tag.type == "bool":
            return tag.value in (True, "true")
        if tag.type == "int64":
            return int(tag.value)
        if tag.type == "float64":
            return float(tag.value)
    except (TypeError, ValueError, OverflowError) as error:
        raise ValueError(
            f"expected a value of tag {tag.key[:60]!r} as {tag.type[:20]}, got: {error}"
        ) from error
    if isinstance(tag.value, str):
        return tag.value
    return msgspec.json.encode(tag.value).decode()
