"""OTLP in JSON: what is written reads back; what others write is understood; what is hostile is refused."""

from __future__ import annotations

import base64
import json
import sys
from contextlib import suppress
from pathlib import Path

import pytest
from google.protobuf import json_format
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

sys.path.insert(0, str(Path(__file__).parent))
from ledger_rows import http_row, log_row

from firstdiff.tracing.otlp_json import decode_traces, encode_traces
from firstdiff.tracing.request_spans import answer_spans, http_span
from firstdiff.tracing.span_file import SpanFile, read_spans
from firstdiff.tracing.span_record import SpanRecord

RESOURCE = {"service.name": "firstdiff", "host.cpus": 2}
INTEGERS = st.integers(-(1 << 63), (1 << 63) - 1)
FLOATS = st.floats(allow_nan=False, allow_infinity=False)
VALUES = (
    st.text()
    | st.booleans()
    | INTEGERS
    | FLOATS
    | st.lists(st.text(), max_size=3)
    | st.lists(INTEGERS, max_size=3)
)
IDS = {
    num: st.integers(1, (1 << 4 * num) - 1).map(lambda value, num=num: f"{value:0{num}x}") for num in (16, 32)
}
SPANS = st.builds(
    SpanRecord,
    name=st.text(),
    kind=st.sampled_from(["internal", "server", "client"]),
    trace_id=IDS[32],
    span_id=IDS[16],
    parent_span_id=st.none() | IDS[16],
    start_unix_ns=st.integers(0, (1 << 63) - 1),
    end_unix_ns=st.integers(0, (1 << 63) - 1),
    attributes=st.dictionaries(st.text(), VALUES, max_size=4),
    error=st.none() | st.text(min_size=1),
    tracestate=st.sampled_from(["", "a=1"]),
    resource=st.dictionaries(st.text(max_size=3), st.text(), max_size=2),
)


def request_spans():
    return [http_span(http_row()), *answer_spans(log_row(finish_reason="abort"), model="m")]


@given(st.lists(SPANS, max_size=5))
def test_what_is_written_reads_back(spans):
    line = encode_traces(spans)
    assert b"\n" not in line
    found = decode_traces(line)
    # Grouped by resource, in the order of their first span.
    order = {json.dumps(span.resource): index for index, span in reversed(list(enumerate(spans)))}
    assert found == sorted(spans, key=lambda span: order[json.dumps(span.resource)])


def test_protobufs_own_reader_takes_it():
    """Its JSON has ids in base64: the one place where OTLP differs."""
    document = json.loads(encode_traces(request_spans(), RESOURCE, version="1"))
    for scope in document["resourceSpans"][0]["scopeSpans"]:
        for span in scope["spans"]:
            for name in ("traceId", "spanId", "parentSpanId"):
                if name in span:
                    span[name] = base64.b64encode(bytes.fromhex(span[name])).decode()
    message = json_format.ParseDict(document, ExportTraceServiceRequest())
    found = message.resource_spans[0].scope_spans[0].spans
    assert [(span.name, span.start_time_unix_nano) for span in found] == [
        (span.name, span.start_unix_ns) for span in request_spans()
    ]
    # And what it writes is read here: ids in base64, kinds and codes by name.
    back = decode_traces(json_format.MessageToJson(message))
    assert [(span.span_id, span.kind, span.error) for span in back] == [
        (span.span_id, span.kind, span.error) for span in request_spans()
    ]


def test_jaegers_answer_and_a_document_of_many_lines_are_read(tmp_path):
    document = json.loads(encode_traces(request_spans(), RESOURCE))
    expected = [span.span_id for span in request_spans()]
    assert [span.span_id for span in decode_traces(json.dumps({"result": document}))] == expected
    file = tmp_path / "pretty.json"
    file.write_text(json.dumps(document, indent=2))
    assert [span.span_id for span in read_spans(file)] == expected
    assert read_spans(file)[0].resource == RESOURCE


@pytest.mark.parametrize(
    ("span", "message"),
    [
        ({"traceId": "x", "spanId": "1" * 16}, "expected an id of 32 hex digits"),
        ({"traceId": "0" * 32, "spanId": "1" * 16}, "expected an id of 32 hex digits"),
        ({"traceId": "1" * 32, "spanId": "é" * 16}, "expected an id of 16 hex digits"),
        ({"traceId": "1" * 32}, "expected traces as OTLP JSON"),
        ({"traceId": "1" * 32, "spanId": "1" * 16, "startTimeUnixNano": "-1"}, "expected a time"),
        ({"traceId": "1" * 32, "spanId": "1" * 16, "endTimeUnixNano": "9" * 5000}, "expected a time"),
        (
            {
                "traceId": "1" * 32,
                "spanId": "1" * 16,
                "attributes": [{"key": "k", "value": {"intValue": "x"}}],
            },
            "expected a value of attribute 'k'",
        ),
        (
            {
                "traceId": "1" * 32,
                "spanId": "1" * 16,
                "attributes": [{"key": "k", "value": {"arrayValue": 1}}],
            },
            "expected a value of attribute 'k'",
        ),
    ],
)
def test_what_is_no_span_is_refused(span, message):
    line = json.dumps({"resourceSpans": [{"scopeSpans": [{"spans": [span]}]}]})
    with pytest.raises(ValueError, match=message):
        decode_traces(line)


@given(
    st.binary(max_size=80)
    | st.recursive(st.none() | st.integers() | st.text(), st.lists).map(lambda v: json.dumps(v).encode())
)
def test_no_bytes_raise_anything_else(data):
    with suppress(ValueError):
        decode_traces(data)


def test_a_file_has_whole_lines_and_counts_what_it_could_not_take(tmp_path):
    output = SpanFile(tmp_path, RESOURCE, version="1")
    output.send(request_spans())
    output.close()
    output.send(request_spans())
    assert output.num_dropped_spans == len(request_spans())
    with (tmp_path / "spans.jsonl").open("ab") as file:
        file.write(b'{"resourceSpans": [')
    assert [span.span_id for span in read_spans(tmp_path)] == [span.span_id for span in request_spans()]
    with pytest.raises(ValueError, match="which does not exist"):
        read_spans(tmp_path / "none")
