"""One tree over all processes that a request goes through: client, router, one of two replicas."""

from __future__ import annotations

import asyncio
import itertools
import sys
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from urllib.parse import urlsplit

sys.path.insert(0, str(Path(__file__).parent))
from scripted_server import MODEL, Script, scripted_server, spell
from test_server_traces import tree_of

from firstdiff.harness.collect_traces import collect_traces
from firstdiff.harness.sessions import Target, fill_run
from firstdiff.harness.workload import WorkloadSpec
from firstdiff.tracing.clock import SystemClock
from firstdiff.tracing.records import HttpRow, RequestRow
from firstdiff.tracing.span_file import read_spans
from firstdiff.tracing.span_record import SpanRecord
from firstdiff.tracing.store import Run
from firstdiff.tracing.trace_context import start_trace

SPEC = WorkloadSpec(
    kind="tokens", prompt_tokens=20, vocab_size=512, num_cases=12, max_tokens=3, concurrency=3, logprobs=None
)
CLOCK = SystemClock()


class Router(ThreadingHTTPServer):
    """Sends each request to the next replica, as a hop of its own in the trace."""

    daemon_threads = True

    def __init__(self, urls: list[str]) -> None:
        super().__init__(("127.0.0.1", 0), Hop)
        self.replicas = itertools.cycle(urls)
        self.spans: list[SpanRecord] = []


class Hop(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Router

    def do_GET(self) -> None:
        self.forward(b"")

    def do_POST(self) -> None:
        self.forward(self.rfile.read(int(self.headers["Content-Length"])))

    def forward(self, body: bytes) -> None:
        started_unix_ns = CLOCK.now_unix_ns()
        context = start_trace(self.headers["traceparent"])
        headers = {
            name: self.headers[name] for name in ("X-Request-Id", "Content-Type") if self.headers[name]
        }
        headers["traceparent"] = context.traceparent
        connection = HTTPConnection(urlsplit(next(self.server.replicas)).netloc, timeout=20)
        connection.request(self.command, self.path, body or None, headers)
        response = connection.getresponse()
        content = response.read()
        self.send_response(response.status)
        self.send_header("Content-Type", response.headers["Content-Type"])
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)
        connection.close()
        if context.parent_span_id is not None:
            self.server.spans.append(
                SpanRecord(
                    name="route",
                    kind="server",
                    trace_id=context.trace_id,
                    span_id=context.span_id,
                    parent_span_id=context.parent_span_id,
                    start_unix_ns=started_unix_ns,
                    end_unix_ns=CLOCK.now_unix_ns(),
                    attributes={},
                )
            )

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def routing(urls: list[str]) -> Iterator[tuple[str, list[SpanRecord]]]:
    router = Router(urls)
    thread = Thread(target=router.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{router.server_address[1]}", router.spans
    finally:
        router.shutdown()
        thread.join()
        router.server_close()


def fill(url: str, path: Path, *, log_dir: Path | None = None) -> Run:
    target = Target(url=url, label="side", log_dir=log_dir)
    run = asyncio.run(fill_run(target, path, spec=SPEC, clock=CLOCK, report=lambda *_: None))
    assert [row.error for row in run.rows("requests", RequestRow) if row.outcome != "ok"] == []
    return Run.open(run.path)


def by_trace(spans: list[SpanRecord]) -> list[list[SpanRecord]]:
    traces: dict[str, list[SpanRecord]] = defaultdict(list)
    for span in spans:
        traces[span.trace_id].append(span)
    return list(traces.values())


def check(spans: list[SpanRecord], *, is_routed: bool) -> None:
    """One tree for each request, from the client down."""
    traces = by_trace(spans)
    assert len(traces) == SPEC.num_cases
    answer = f"text_completion {MODEL}"
    for trace in traces:
        client = next(span for span in trace if span.kind == "client")
        tree = tree_of([span for span in trace if span is not client], caller=client.span_id)
        assert client.parent_span_id is None
        assert client.name == answer
        assert tree[""] == (["route"] if is_routed else ["POST /v1/completions"])
        assert tree.get("route", ["POST /v1/completions"]) == ["POST /v1/completions"]
        assert tree["POST /v1/completions"] == [answer]
        assert tree[answer] == ["tokenize", "queue", "prefill", "decode", "stream"]
        assert client.attributes["jaeger.eval.iteration_index"] == 0
        for span in trace:
            assert client.start_unix_ns <= span.start_unix_ns
    trials = {span.attributes["jaeger.eval.trial_id"] for span in spans if span.kind == "client"}
    assert len(trials) == 1
    assert len({(span.trace_id, span.span_id) for span in spans}) == len(spans)


def test_a_run_has_the_spans_of_client_and_server(tmp_path: Path) -> None:
    with scripted_server(Script(spell("word ")), log_dir=tmp_path / "log") as server:
        run = fill(server.url, tmp_path / "run", log_dir=tmp_path / "log")
    check(read_spans(run.path), is_routed=False)
    assert len(list(run.rows("http", HttpRow))) == SPEC.num_cases
    # Once more, and nothing comes twice.
    with Run.resume(run.path) as again:
        ids = {row.trace_id for row in again.rows("requests", RequestRow)}
        assert collect_traces(tmp_path / "log", again, ids) == 0


def test_client_router_and_two_replicas_are_one_tree(tmp_path: Path) -> None:
    folders = [tmp_path / "one", tmp_path / "two"]
    with (
        scripted_server(Script(spell("word ")), log_dir=folders[0]) as one,
        scripted_server(Script(spell("word ")), log_dir=folders[1]) as two,
        routing([one.url, two.url]) as (url, hops),
    ):
        run = fill(url, tmp_path / "run")
    wanted = {row.trace_id for row in run.rows("requests", RequestRow)}
    spans = read_spans(run.path)
    for folder in folders:
        own = [span for span in read_spans(folder) if span.trace_id in wanted]
        assert own, "a replica without a request"
        spans += own
    check(spans + [span for span in hops if span.trace_id in wanted], is_routed=True)
