"""What Jaeger's query service answers, as bytes, in both generations of its API.

Owns: the shapes of answers and errors. Refuses to know: HTTP, where traces come from. Invariants: fields are
always there, also where they are empty; times that a browser would round are text.
Source: Jaeger's API v3 (OpenAPI and response snapshots) and its query service's structured responses.

Usage: `body = summaries_answer(found)`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from firstdiff.tracing.jaeger_json import encode_jaeger
from firstdiff.tracing.otlp_json import encode_traces
from firstdiff.tracing.span_record import SpanRecord
from firstdiff.tracing.trace_set import Trace, service_of


def services_of(traces: Iterable[Trace]) -> list[str]:
    """Every service of these traces, in the alphabet's order."""
    return sorted({service_of(span) for trace in traces for span in trace.spans})


def operations_of(traces: Iterable[Trace], service: str, kind: str = "") -> list[tuple[str, str]]:
    """(name, kind) of a service's spans, of one kind only where it is given."""
    found = {
        (span.name, _kind_of(span))
        for trace in traces
        for span in trace.spans
        if service_of(span) == service and kind in ("", _kind_of(span))
    }
    return sorted(found)


def services_answer(services: Sequence[str]) -> bytes:
    return _json({"services": services})


def operations_answer(operations: Iterable[tuple[str, str]]) -> bytes:
    return _json({"operations": [{"name": name, "spanKind": kind} for name, kind in operations]})


def traces_answer(traces: Iterable[Trace]) -> bytes:
    """OTLP JSON in the envelope that a stream of results has."""
    return b'{"result":' + encode_traces([span for trace in traces for span in trace.spans]) + b"}"


def summaries_answer(traces: Iterable[Trace]) -> bytes:
    return _json({"summaries": [_summary(trace) for trace in traces]})


def error_answer(status: int, message: str) -> bytes:
    """An error of API v3."""
    return _json({"error": {"httpCode": status, "message": message}})


def legacy_answer(data: Sequence[object] | None, *, errors: Sequence[tuple[int, str]] = ()) -> bytes:
    """What the API before v3 wraps everything in; `errors` are (status, message)."""
    named = [{"code": status, "msg": message} for status, message in errors] or None
    total = 0 if data is None else len(data)
    return _json({"data": data, "total": total, "limit": 0, "offset": 0, "errors": named})


def legacy_traces_answer(traces: Iterable[Trace]) -> bytes:
    return encode_jaeger([trace.spans for trace in traces])


def _summary(trace: Trace) -> dict[str, Any]:
    by_service: dict[str, list[SpanRecord]] = {}
    for span in trace.spans:
        by_service.setdefault(service_of(span), []).append(span)
    return {
        "traceId": trace.trace_id,
        "rootServiceName": service_of(trace.root),
        "rootOperationName": trace.root.name,
        "minStartTimeUnixNano": str(trace.start_unix_ns),
        "maxEndTimeUnixNano": str(trace.end_unix_ns),
        "spanCount": len(trace.spans),
        "errorSpanCount": trace.num_errors,
        "orphanSpanCount": trace.num_orphans,
        "services": [
            {
                "name": service,
                "spanCount": len(spans),
                "errorSpanCount": sum(span.error is not None for span in spans),
            }
            for service, spans in sorted(by_service.items())
        ],
    }


def _kind_of(span: SpanRecord) -> str:
    return "internal" if span.kind == "unspecified" else span.kind


def _json(value: object) -> bytes:
    return msgspec.json.encode(value)
