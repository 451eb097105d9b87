"""Two small traces as spans: a client, a server and a model's answer; and a failed one of another service."""

from __future__ import annotations

from firstdiff.tracing import names
from firstdiff.tracing.span_record import SpanRecord

T0 = 1_796_000_000_000_000_000
"""2026-11-30T00:53:20Z."""
FIRST, SECOND = "a" * 31 + "1", "b" * 31 + "2"
SERVER = {"service.name": "firstdiff", "service.instance.id": "i1"}
CLIENT = {"service.name": "firstdiff-client"}


def span(name, span_id, parent=None, *, start=0, end=1_000_000, **changes):
    """Times in nanoseconds after T0; ids as small numbers."""
    fields = {
        "name": name,
        "kind": "internal",
        "trace_id": FIRST,
        "span_id": f"{span_id:016x}",
        "parent_span_id": None if parent is None else f"{parent:016x}",
        "start_unix_ns": T0 + start,
        "end_unix_ns": T0 + end,
        "attributes": {},
        "resource": SERVER,
    }
    return SpanRecord(**(fields | changes))


def answer(name="chat m", span_id=3, parent=2, *, request_id="r1", phases_ns=(0, 0, 0, 0, 0, 0), **changes):
    attributes = {names.GEN_AI_OPERATION: "chat", names.GEN_AI_RESPONSE_ID: request_id}
    attributes |= {names.PHASE_TOTAL_NS[phase]: ns for phase, ns in zip(names.PHASES, phases_ns, strict=True)}
    attributes |= {names.LATENCY_TTFT: 0.002, names.LATENCY_E2E: sum(phases_ns) / 1e9}
    return span(name, span_id, parent, attributes=attributes, **changes)


def first_trace():
    client = {names.CASE_ID: "case-7", names.REQUEST_ID: "r1", "gen_ai.operation.name": "chat"}
    return [
        span("chat m", 1, end=5_000_000, kind="client", resource=CLIENT, attributes=client),
        span("POST /v1/chat/completions", 2, 1, start=100_000, end=4_900_000, kind="server",
             attributes={"http.response.status_code": 200}),
        answer(start=200_000, end=4_800_000, phases_ns=(100_000, 500_000, 1_000_000, 2_900_000, 0, 100_000)),
        span("queue", 5, 3, start=300_000, end=800_000),
        span("prefill", 6, 3, start=801_000, end=1_800_000),
    ]  # fmt: skip


def second_trace():
    other = {"service.name": "other"}
    at = {"trace_id": SECOND, "resource": other}
    return [
        span("GET /", 1, start=10**9, end=3 * 10**9, kind="server", error="boom", **at),
        span("step", 2, 1, start=10**9 + 5, end=10**9 + 1_000_005, attributes={"n": 3, "who": "x"}, **at),
    ]
