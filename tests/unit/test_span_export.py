"""Spans on the wire: what a collector decodes; a dead, slow or refusing one delays and fails nothing."""

from __future__ import annotations

import gzip
import random
import socket
import sys
import threading
import time
from collections import Counter
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import msgspec
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

sys.path.insert(0, str(Path(__file__).parent))
from ledger_rows import http_row, identity, log_row

from firstdiff.tracing.otlp_export import OtlpOutput, OtlpTarget, traces_url
from firstdiff.tracing.request_spans import answer_spans, http_span
from firstdiff.tracing.token_log import hash_identity
from firstdiff.tracing.trace_context import start_trace

NUM_SPANS = 7
"""Of one small request: server, inference and five phases."""

END_LIMIT_S = 5.0
"""For hundreds of `end`s of 0.2 ms each on a busy machine: one that waited for a collector would pass it."""


class Collector(ThreadingHTTPServer):
    """An OTLP/HTTP receiver that keeps what it accepts; `answer` gives the status code for each post."""

    daemon_threads = True

    def __init__(self, answer):
        super().__init__(("127.0.0.1", 0), Handler)
        self.answer = answer
        self.requests = []
        self.paths = []
        self.release = threading.Event()

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_address[1]}"

    def spans(self):
        """(resource, scope, span) in the order of arrival."""
        return [
            (group.resource, scoped.scope, span)
            for request in self.requests
            for group in request.resource_spans
            for scoped in group.scope_spans
            for span in scoped.spans
        ]


class Handler(BaseHTTPRequestHandler):
    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.headers.get("Content-Encoding") == "gzip":
            body = gzip.decompress(body)
        assert self.headers["Content-Type"] == "application/x-protobuf"
        self.server.paths.append(self.path)
        status = self.server.answer(self.server)
        if status is None:
            return
        if status == 200:
            self.server.requests.append(ExportTraceServiceRequest.FromString(body))
        answer = ExportTraceServiceResponse().SerializeToString()
        self.send_response(status)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *arguments):
        pass


@contextmanager
def collector(answer=lambda _: 200):
    server = Collector(answer)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield server
    finally:
        server.release.set()
        server.shutdown()
        thread.join()
        server.server_close()


def hang(server):
    server.release.wait()


def output_to(url, **settings):
    return OtlpOutput(OtlpTarget(traces_url(url)), identity(), **settings)


def spans_of(index, row=None, **changes):
    """The spans of a request in a trace of its own."""
    context = start_trace(None, random_bytes=random.Random(index).randbytes)
    ids = {"trace_id": context.trace_id, "span_id": context.span_id}
    row = msgspec.structs.replace(row or log_row(request_id=f"r{index}"), **ids)
    http = http_row(**(ids | changes))
    row = msgspec.structs.replace(row, tracestate=http.tracestate)
    return [http_span(http), *answer_spans(row, model="m")]


def send_many(output, num_requests):
    """Send the spans of so many requests; how long that took, in seconds."""
    started_s = time.monotonic()
    for index in range(num_requests):
        output.send(spans_of(index))
    return time.monotonic() - started_s


def value_of(any_value):
    kind = any_value.WhichOneof("value")
    if kind == "array_value":
        return tuple(value_of(item) for item in any_value.array_value.values)
    return getattr(any_value, kind)


def attributes_of(message):
    return {item.key: value_of(item.value) for item in message.attributes}


def test_a_collector_decodes_what_the_row_said(monkeypatch):
    monkeypatch.delenv("OTEL_SERVICE_NAME", raising=False)
    row = log_row(finish_reason="error", error="the engine core died")
    changes = {"parent_span_id": "00f067aa0ba902b7", "tracestate": "rojo=1,congo=2"}
    expected = spans_of(1, row, error_type="engine_unavailable", **changes)
    with collector() as server:
        fold = output_to(server.url)
        fold.send(expected)
        fold.close(timeout_s=10)
        received = server.spans()
    assert set(server.paths) == {"/v1/traces"}
    assert (fold.num_sent_spans, fold.num_dropped_spans) == (NUM_SPANS, 0)
    assert len(received) == len(expected)
    by_id = {span.span_id.hex(): (resource, scope, span) for resource, scope, span in received}
    for record in expected:
        resource, scope, span = by_id[record.span_id]
        assert span.name == record.name
        assert span.kind == (Span.SPAN_KIND_SERVER if record.kind == "server" else Span.SPAN_KIND_INTERNAL)
        assert span.trace_id.hex() == record.trace_id
        assert span.parent_span_id.hex() == record.parent_span_id
        assert (span.start_time_unix_nano, span.end_time_unix_nano) == (
            record.start_unix_ns,
            record.end_unix_ns,
        )
        assert attributes_of(span) == dict(record.attributes)
        assert span.trace_state == "rojo=1,congo=2"
        # OTLP's flags say that the parent is known to be remote (0x300) or known not to be (0x100).
        assert span.flags & 0x300 == (0x300 if record.kind == "server" else 0x100)
        assert span.status.code == (Status.STATUS_CODE_ERROR if record.error else Status.STATUS_CODE_UNSET)
        assert span.status.message == (record.error or "")
        described = attributes_of(resource)
        assert described["service.name"] == "firstdiff"
        assert described["service.version"] == "0.1"
        assert described["service.instance.id"] == "i1"
        assert described["firstdiff.identity_sha256"] == hash_identity(identity())
        assert scope.name == "firstdiff"
    assert [record.error for record in expected[:2]] == ["engine_unavailable", "the engine core died"]
    # One tree and no orphan: each parent but the caller's is among the spans.
    parents = {span.parent_span_id.hex() for _, _, span in received}
    assert parents - by_id.keys() == {"00f067aa0ba902b7"}


def test_opentelemetrys_own_variable_names_the_service(monkeypatch):
    monkeypatch.setenv("OTEL_SERVICE_NAME", "my-team")
    with collector() as server:
        fold = output_to(server.url)
        send_many(fold, 1)
        fold.close(timeout_s=10)
        assert {attributes_of(resource)["service.name"] for resource, _, _ in server.spans()} == {"my-team"}


def test_many_requests_arrive_whole():
    with collector() as server:
        fold = output_to(server.url, delay_s=0.05)
        send_many(fold, 300)
        fold.close(timeout_s=20)
        traces = Counter(span.trace_id for _, _, span in server.spans())
    assert (fold.num_sent_spans, fold.num_dropped_spans) == (300 * NUM_SPANS, 0)
    assert traces == {bytes.fromhex(spans_of(index)[0].trace_id): NUM_SPANS for index in range(300)}


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


def test_a_dead_collector_delays_and_fails_nothing():
    fold = output_to(f"http://127.0.0.1:{free_port()}", max_pending_spans=700, delay_s=0.05)
    assert send_many(fold, 500) < END_LIMIT_S
    started_s = time.monotonic()
    fold.close(timeout_s=0.5)
    assert time.monotonic() - started_s < 3
    assert (fold.num_sent_spans, fold.num_dropped_spans) == (0, 500 * NUM_SPANS)


def test_a_hanging_collector_delays_and_fails_nothing():
    with collector(hang) as server:
        fold = output_to(server.url, max_pending_spans=700, delay_s=0.05)
        assert send_many(fold, 500) < END_LIMIT_S
        # 700 wait and one batch of 512 is on its way; all others were dropped at once.
        assert fold.num_dropped_spans >= 500 * NUM_SPANS - 700 - 512
        started_s = time.monotonic()
        fold.close(timeout_s=0.5)
        assert time.monotonic() - started_s < 3
        assert (fold.num_sent_spans, fold.num_dropped_spans) == (0, 500 * NUM_SPANS)


def test_what_a_slow_collector_has_no_room_for_is_dropped_by_whole_requests():
    def slowly(server):
        server.release.wait(0.2)
        return 200

    with collector(slowly) as server:
        fold = output_to(server.url, max_pending_spans=20 * NUM_SPANS, delay_s=0.01)
        assert send_many(fold, 400) < END_LIMIT_S
        fold.close(timeout_s=20)
        traces = Counter(span.trace_id for _, _, span in server.spans())
    assert set(traces.values()) == {NUM_SPANS}
    assert fold.num_dropped_spans > 0
    assert fold.num_sent_spans == sum(traces.values())
    assert fold.num_sent_spans + fold.num_dropped_spans == 400 * NUM_SPANS


def test_the_room_is_exact():
    with collector(hang) as server:
        fold = output_to(server.url, max_pending_spans=3 * NUM_SPANS - 1, delay_s=60)
        send_many(fold, 2)
        assert fold.num_dropped_spans == 0
        send_many(fold, 1)
        assert fold.num_dropped_spans == NUM_SPANS
        fold.close(timeout_s=0.1)


def test_a_refusing_collector_is_counted():
    with collector(lambda _: 400) as server:
        fold = output_to(server.url)
        send_many(fold, 3)
        fold.close(timeout_s=10)
    assert (fold.num_sent_spans, fold.num_dropped_spans) == (0, 3 * NUM_SPANS)


def test_a_collector_that_is_briefly_away_loses_nothing():
    def away_once(server):
        return 503 if len(server.paths) == 1 else 200

    with collector(away_once) as server:
        fold = output_to(server.url, delay_s=0.01)
        send_many(fold, 3)
        deadline_s = time.monotonic() + 10
        while fold.num_sent_spans < 3 * NUM_SPANS and time.monotonic() < deadline_s:
            time.sleep(0.02)
        fold.close(timeout_s=10)
        assert len(server.spans()) == fold.num_sent_spans == 3 * NUM_SPANS
    assert fold.num_dropped_spans == 0


def test_after_close_requests_are_dropped_and_counted_and_no_thread_stays():
    threads = set(threading.enumerate())
    with collector() as server:
        fold = output_to(server.url)
        fold.close()
        fold.close()
        send_many(fold, 2)
        assert fold.num_dropped_spans == 2 * NUM_SPANS
    left = {thread.name for thread in set(threading.enumerate()) - threads}
    assert not any("Span" in name or "flush" in name for name in left), left


@pytest.mark.parametrize(
    ("endpoint", "url"),
    [
        ("http://127.0.0.1:4318", "http://127.0.0.1:4318/v1/traces"),
        ("http://127.0.0.1:4318/", "http://127.0.0.1:4318/v1/traces"),
        ("http://127.0.0.1:4318/v1/traces", "http://127.0.0.1:4318/v1/traces"),
        ("https://collector.example/prefix", "https://collector.example/prefix/v1/traces"),
        ("http://[::1]:4318", "http://[::1]:4318/v1/traces"),
    ],
)
def test_the_endpoint_is_a_base_or_the_full_url(endpoint, url):
    assert traces_url(endpoint) == url


@pytest.mark.parametrize(
    "endpoint",
    [
        "",
        "127.0.0.1:4318",
        "localhost",
        "grpc://x:4317",
        "http://",
        "http://x:99999",
        "http://[::1",
        "file:///x",
    ],
)
def test_what_is_no_endpoint_says_so(endpoint):
    with pytest.raises(ValueError, match="expected an OTLP endpoint like"):
        OtlpTarget.from_environment({}, endpoint=endpoint)
