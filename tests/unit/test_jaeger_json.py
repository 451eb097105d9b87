"""Jaeger's own JSON: the documented shape, there and back, and what others may send."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parent))
from ledger_rows import http_row, log_row

from firstdiff.tracing.jaeger_json import decode_jaeger, encode_jaeger, is_jaeger
from firstdiff.tracing.request_spans import answer_spans, http_span
from firstdiff.tracing.span_record import SpanRecord

RESOURCE = {"service.name": "firstdiff", "service.version": "0.1"}


def span(**changes):
    fields = {
        "name": "queue",
        "kind": "internal",
        "trace_id": "1" * 32,
        "span_id": "2" * 16,
        "parent_span_id": None,
        "start_unix_ns": 10**18 + 999,
        "end_unix_ns": 10**18 + 5_000,
        "attributes": {},
        "resource": RESOURCE,
    }
    return SpanRecord(**(fields | changes))


def test_shape_is_jaegers():
    failed = span(
        span_id="3" * 16,
        parent_span_id="2" * 16,
        kind="client",
        error="boom",
        tracestate="a=1",
        attributes={"s": "x", "b": True, "i": 7, "big": 1 << 60, "f": 0.5, "list": ["stop", "length"]},
    )
    answer = json.loads(encode_jaeger([[span(), failed]]))
    assert answer == {
        "data": [
            {
                "traceID": "1" * 32,
                "spans": [
                    {
                        "traceID": "1" * 32,
                        "spanID": "2" * 16,
                        "operationName": "queue",
                        "references": [],
                        "startTime": 10**15,
                        "duration": 5,
                        "tags": [{"key": "span.kind", "type": "string", "value": "internal"}],
                        "logs": [],
                        "processID": "p1",
                        "warnings": None,
                    },
                    {
                        "traceID": "1" * 32,
                        "spanID": "3" * 16,
                        "operationName": "queue",
                        "references": [{"refType": "CHILD_OF", "traceID": "1" * 32, "spanID": "2" * 16}],
                        "startTime": 10**15,
                        "duration": 5,
                        "tags": [
                            {"key": "s", "type": "string", "value": "x"},
                            {"key": "b", "type": "bool", "value": True},
                            {"key": "i", "type": "int64", "value": 7},
                            {"key": "big", "type": "int64", "value": str(1 << 60)},
                            {"key": "f", "type": "float64", "value": 0.5},
                            {"key": "list", "type": "string", "value": '["stop","length"]'},
                            {"key": "span.kind", "type": "string", "value": "client"},
                            {"key": "error", "type": "bool", "value": True},
                            {"key": "otel.status_code", "type": "string", "value": "ERROR"},
                            {"key": "otel.status_description", "type": "string", "value": "boom"},
                            {"key": "w3c.tracestate", "type": "string", "value": "a=1"},
                        ],
                        "logs": [],
                        "processID": "p1",
                        "warnings": None,
                    },
                ],
                "processes": {
                    "p1": {
                        "serviceName": "firstdiff",
                        "tags": [{"key": "service.version", "type": "string", "value": "0.1"}],
                    }
                },
                "warnings": None,
            }
        ],
        "total": 0,
        "limit": 0,
        "offset": 0,
        "errors": None,
    }


TEXTS = st.text(max_size=8)
VALUES = TEXTS | st.booleans() | st.integers(-(1 << 63), (1 << 63) - 1) | st.floats(allow_nan=False, width=32)
TIMES_US = st.integers(0, 1 << 52)


@st.composite
def whole_spans(draw):
    start_us = draw(TIMES_US)
    return span(
        name=draw(TEXTS),
        kind=draw(st.sampled_from(["unspecified", "internal", "server", "client", "producer", "consumer"])),
        span_id=f"{draw(st.integers(1, (1 << 64) - 1)):016x}",
        parent_span_id=draw(st.none() | st.integers(1, (1 << 64) - 1).map(lambda number: f"{number:016x}")),
        start_unix_ns=start_us * 1000,
        end_unix_ns=(start_us + draw(st.integers(0, 1 << 30))) * 1000,
        attributes=draw(st.dictionaries(TEXTS, VALUES.filter(lambda value: abs(value) != float("inf")
                                                             if isinstance(value, float) else True))),
        error=draw(st.none() | st.text(min_size=1, max_size=8)),
        resource=draw(st.sampled_from([RESOURCE, {}, {"service.name": "other", "n": 1}])),
    )  # fmt: skip


@given(st.lists(whole_spans(), min_size=1, max_size=4))
def test_there_and_back(spans):
    assert decode_jaeger(encode_jaeger([spans])) == spans


@given(st.lists(st.integers(0, 3_000) | st.integers(0, 1 << 40), min_size=6, max_size=6).map(sorted))
def test_phases_stay_a_microsecond_apart(moments):
    """Jaeger's critical path loses a span that begins in the microsecond in which its sibling ends."""
    received, tokenized, scheduled, first_token, finished, flushed = moments
    row = log_row(
        received_ns=received,
        tokenized_ns=tokenized,
        first_scheduled_ns=scheduled,
        first_token_ns=first_token,
        finished_ns=finished,
        flushed_ns=flushed,
    )
    trace = json.loads(encode_jaeger([answer_spans(row, model="m")[1:]]))["data"][0]
    for before, after in zip(trace["spans"], trace["spans"][1:], strict=False):
        assert before["startTime"] + before["duration"] < after["startTime"]


def test_what_jaeger_shows_is_read():
    """The documented answer, with what older versions and other exporters left out or wrote otherwise."""
    content = {
        "data": [
            {
                "traceID": "1",
                "spans": [
                    {
                        "traceID": "1",
                        "spanID": "2",
                        "flags": 1,
                        "operationName": "GET",
                        "references": [{"refType": "FOLLOWS_FROM", "traceID": "1", "spanID": "9"}],
                        "startTime": 1485467191639875,
                        "duration": 5,
                        "tags": [
                            {"key": "error", "type": "bool", "value": True},
                            {"key": "javascript_limit", "type": "int64", "value": "9223372036854775222"},
                            {"key": "blob", "type": "binary", "value": "AAAwOQ=="},
                            {"key": "temperature", "type": "float64", "value": 72.5},
                        ],
                        "logs": [{"timestamp": 1485467191639875, "fields": []}],
                        "processID": "p1",
                        "warnings": ["some span warning"],
                    },
                    {"traceID": "1", "spanID": "3", "parentSpanID": "2", "processID": "p9", "tags": None},
                ],
                "processes": {"p1": {"serviceName": "service-x", "tags": []}},
                "warnings": ["some trace warning"],
            }
        ]
    }
    first, second = decode_jaeger(json.dumps(content).encode())
    assert (first.trace_id, first.span_id) == ("1".zfill(32), "2".zfill(16))
    assert (first.parent_span_id, second.parent_span_id) == ("9".zfill(16), "2".zfill(16))
    assert first.error == "error"
    assert first.attributes == {
        "javascript_limit": 9223372036854775222,
        "blob": "AAAwOQ==",
        "temperature": 72.5,
    }
    assert (first.resource, second.resource) == ({"service.name": "service-x"}, {})
    assert (first.start_unix_ns, first.duration_ns) == (1485467191639875000, 5000)
    alone = json.dumps(content["data"][0]).encode()
    assert is_jaeger(alone)
    assert decode_jaeger(alone) == [first, second]


@pytest.mark.parametrize(
    "span",
    [
        {"traceID": "", "spanID": "1"},
        {"traceID": "1" * 33, "spanID": "1"},
        {"traceID": "x", "spanID": "1"},
        {"traceID": "1", "spanID": "0"},
        {"traceID": "1", "spanID": "1", "startTime": -1},
        {"traceID": "1", "spanID": "1", "duration": -1},
        {"traceID": "1", "spanID": "1", "startTime": 1 << 62},
        {"traceID": "1", "spanID": "1", "startTime": "soon"},
        {"traceID": "1", "spanID": "1", "tags": [{"key": "k", "type": "int64", "value": "many"}]},
        {"traceID": "1", "spanID": "1", "tags": [{"key": "k", "type": "float64", "value": [1]}]},
        {"traceID": "1", "spanID": "1", "references": [{"refType": "CHILD_OF", "traceID": "1"}]},
        {"traceID": "1", "spanID": "1", "tags": 5},
        {"spanID": "1"},
        7,
    ],
)
def test_hostile_spans_are_one_line(span):
    content = json.dumps({"data": [{"traceID": "1", "spans": [span], "processes": {}}]}).encode()
    with pytest.raises(ValueError, match="expected"):
        decode_jaeger(content)


@pytest.mark.parametrize(
    "content", [b"", b"[]", b"{}", b'{"data": 1}', b"\xff", b"[" * 100_000, b'{"data": [' * 9_999]
)
def test_other_documents_are_refused(content):
    assert not is_jaeger(content)
    with pytest.raises(ValueError, match="expected traces as Jaeger's JSON"):
        decode_jaeger(content)


def test_a_request_reads_back_to_the_microsecond():
    spans = [msgspec.structs.replace(one, resource=RESOURCE) for one in
             [http_span(http_row()), *answer_spans(log_row(), model="m")]]  # fmt: skip
    found = decode_jaeger(encode_jaeger([spans]))
    assert [one.name for one in found] == [one.name for one in spans]
    assert [one.parent_span_id for one in found] == [one.parent_span_id for one in spans]
    assert [one.start_unix_ns for one in found] == [one.start_unix_ns // 1000 * 1000 for one in spans]
