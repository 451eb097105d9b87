"""OTLP in JSON: traces as lines of a file, as Jaeger uploads them and as its API answers.

Owns: the wire shape, both ways. Refuses to know: what spans mean, HTTP. Invariants: what is written is one
ExportTraceServiceRequest a line with ids in hex; what is read may be anybody's: ids also in base64, enums as
numbers or names, times and integers as numbers or strings; nothing of it is trusted but by ValueError.
Source: https://opentelemetry.io/docs/specs/otlp/#json-protobuf-encoding

Usage: `line = encode_traces(spans, resource, version="1"); spans = decode_traces(line)`.
"""

from __future__ import annotations

import base64
import binascii
import math
import re
from collections.abc import Iterator, Sequence
from typing import Any, cast

import msgspec

from firstdiff.tracing import names
from firstdiff.tracing.records import UNREADABLE
from firstdiff.tracing.span_record import AttributeValue, SpanKind, SpanRecord

_KINDS: tuple[SpanKind, ...] = ("unspecified", "internal", "server", "client", "producer", "consumer")
_STATUS_ERROR = 2
_SAMPLED = 1
_IDS = {32: re.compile(r"[0-9a-f]{32}"), 16: re.compile(r"[0-9a-f]{16}")}
_TIME_MAX_NS = 1 << 63


class _KeyValue(msgspec.Struct):
    key: str
    value: dict[str, Any] = {}


class _Status(msgspec.Struct, omit_defaults=True):
    message: str = ""
    code: int | str = 0


class _Span(msgspec.Struct, rename="camel", omit_defaults=True):
    trace_id: str
    span_id: str
    name: str = ""
    parent_span_id: str = ""
    trace_state: str = ""
    flags: int = 0
    kind: int | str = 0
    start_time_unix_nano: int | str = 0
    end_time_unix_nano: int | str = 0
    attributes: list[_KeyValue] = []
    status: _Status = msgspec.field(default_factory=_Status)


class _Scope(msgspec.Struct, omit_defaults=True):
    name: str = ""
    version: str = ""


class _ScopeSpans(msgspec.Struct, rename="camel", omit_defaults=True):
    scope: _Scope = msgspec.field(default_factory=_Scope)
    spans: list[_Span] = []


class _Resource(msgspec.Struct):
    attributes: list[_KeyValue] = []


class _ResourceSpans(msgspec.Struct, rename="camel", omit_defaults=True):
    resource: _Resource = msgspec.field(default_factory=_Resource)
    scope_spans: list[_ScopeSpans] = []


class _Traces(msgspec.Struct, rename="camel", omit_defaults=True):
    resource_spans: list[_ResourceSpans] = []


class _Answer(msgspec.Struct, rename="camel", omit_defaults=True):
    """A request as exported, or the `result` that Jaeger's API wraps one in."""

    resource_spans: list[_ResourceSpans] = []
    result: _Traces | None = None


def encode_traces(
    spans: Sequence[SpanRecord], resource: dict[str, AttributeValue] | None = None, *, version: str = ""
) -> bytes:
    """One ExportTraceServiceRequest without a line break. Spans are grouped by resource.

    A span without a resource of its own has `resource`; `version` is that of the scope `firstdiff`.
    """
    groups: dict[bytes, tuple[dict[str, AttributeValue], list[SpanRecord]]] = {}
    for span in spans:
        own = span.resource or resource or {}
        groups.setdefault(msgspec.json.encode(own), (own, []))[1].append(span)
    scope = _Scope(names.SERVICE_NAME, version)
    return msgspec.json.encode(
        _Traces(
            [
                _ResourceSpans(
                    _Resource(_encode_attributes(own)),
                    [_ScopeSpans(scope, [_encode(span) for span in group])],
                )
                for own, group in groups.values()
            ]
        )
    )


def decode_traces(data: bytes | str) -> list[SpanRecord]:
    """The spans of an ExportTraceServiceRequest, or of an answer of Jaeger's API v3, in order.

    ValueError, with what is wrong, when it is neither.
    """
    try:
        answer = msgspec.json.decode(data, type=_Answer, strict=True)
    except UNREADABLE as error:
        raise ValueError(f"expected traces as OTLP JSON, got: {error}") from error
    groups = answer.resource_spans if answer.result is None else answer.result.resource_spans
    return [span for group in groups for span in _decode_group(group)]


def _decode_group(group: _ResourceSpans) -> Iterator[SpanRecord]:
    resource = _decode_attributes(group.resource.attributes)
    for scope_spans in group.scope_spans:
        for span in scope_spans.spans:
            yield _decode(span, resource)


def _encode(span: SpanRecord) -> _Span:
    return _Span(
        trace_id=span.trace_id,
        span_id=span.span_id,
        parent_span_id=span.parent_span_id or "",
        trace_state=span.tracestate,
        flags=_SAMPLED,
        name=span.name,
        kind=_KINDS.index(span.kind),
        start_time_unix_nano=str(span.start_unix_ns),
        end_time_unix_nano=str(span.end_unix_ns),
        attributes=_encode_attributes(span.attributes),
        status=_Status() if span.error is None else _Status(span.error, _STATUS_ERROR),
    )


def _decode(span: _Span, resource: dict[str, AttributeValue]) -> SpanRecord:
    code = span.status.code
    failed = code in (_STATUS_ERROR, "STATUS_CODE_ERROR")
    return SpanRecord(
        name=span.name,
        kind=_kind_of(span.kind),
        trace_id=_id_of(span.trace_id, 32),
        span_id=_id_of(span.span_id, 16),
        parent_span_id=_id_of(span.parent_span_id, 16) if span.parent_span_id.strip("0") else None,
        start_unix_ns=_time_of(span.start_time_unix_nano),
        end_unix_ns=_time_of(span.end_time_unix_nano),
        attributes=_decode_attributes(span.attributes),
        error=(span.status.message or "error") if failed else None,
        tracestate=span.trace_state,
        resource=resource,
    )


def _kind_of(kind: int | str) -> SpanKind:
    if isinstance(kind, int):
        return _KINDS[kind] if 0 <= kind < len(_KINDS) else "unspecified"
    name = kind.removeprefix("SPAN_KIND_").lower()
    return name if name in _KINDS else "unspecified"


def _id_of(text: str, num_digits: int) -> str:
    """An id as hex digits; some exporters write the bytes in base64, as plain protobuf JSON has them."""
    found = text.lower()
    if len(text) != num_digits:
        try:
            found = base64.b64decode(text, validate=True).hex()
        except (binascii.Error, ValueError):
            found = ""
    if _IDS[num_digits].fullmatch(found) is None or not found.strip("0"):
        raise ValueError(f"expected an id of {num_digits} hex digits, not all zero, got {text[:40]!r}")
    return found


def _time_of(value: int | str) -> int:
    try:
        time_ns = int(value)
    except ValueError:
        time_ns = -1
    if not 0 <= time_ns < _TIME_MAX_NS:
        raise ValueError(f"expected a time in Unix nanoseconds, got {str(value)[:40]!r}")
    return time_ns


def _encode_attributes(attributes: dict[str, AttributeValue]) -> list[_KeyValue]:
    return [_KeyValue(key, _encode_value(value)) for key, value in attributes.items()]


def _encode_value(value: AttributeValue) -> dict[str, Any]:
    if isinstance(value, str):
        return {"stringValue": value}
    if isinstance(value, bool):
        return {"boolValue": value}
    if isinstance(value, int):
        return {"intValue": str(value)}
    if isinstance(value, float):
        # JSON has no number for the others; protobuf's mapping names them.
        named = "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
        return {"doubleValue": value if math.isfinite(value) else named}
    return {"arrayValue": {"values": [_encode_value(item) for item in value]}}


def _decode_attributes(attributes: list[_KeyValue]) -> dict[str, AttributeValue]:
    return {pair.key: _decode_value(pair.key, pair.value) for pair in attributes}


def _decode_value(key: str, value: dict[str, Any]) -> AttributeValue:
    for kind, content in value.items():
        try:
            if kind in ("stringValue", "bytesValue"):
                return str(content)
            if kind == "boolValue":
                return bool(content)
            if kind == "intValue":
                return int(content)
            if kind == "doubleValue":
                return float(content)
            if kind == "arrayValue":
                items = [_decode_value(key, item) for item in content.get("values", [])]
                return cast(AttributeValue, items)
        except (TypeError, ValueError, AttributeError, OverflowError, RecursionError) as error:
            raise ValueError(f"expected a value of attribute {key[:60]!r} as {kind}, got: {error}") from error
    # Maps, and what is newer than this: kept as text, so that nothing is lost.
    return msgspec.json.encode(value).decode() if value else ""
