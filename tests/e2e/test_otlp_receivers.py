"""Spans on the wire, as two receivers that are not ours decode them; and collectors that do not answer."""

from __future__ import annotations

import asyncio
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from importlib.util import find_spec
from pathlib import Path

import pytest
from opentelemetry.proto.trace.v1.trace_pb2 import Span
from oteltap import OtelTapHttpProtobufReceiver, OtelTapHttpProtobufReceiverSettings

sys.path.insert(0, str(Path(__file__).parent))
from scripted_server import MODEL, Script, scripted_server, spell

from firstdiff.tracing.span_file import read_spans
from firstdiff.tracing.span_record import SpanRecord
from firstdiff.tracing.token_log import read_token_log

COMPLETIONS = "/v1/completions"
TRACEPARENT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
NUM_REQUESTS = 20
_SPAN = re.compile(
    r"Trace ID +: (?P<trace>\w+)\n +Parent ID +: (?P<parent>\w*)\n +ID +: (?P<id>\w+)\n"
    r" +Name +: (?P<name>.*)\n +Kind +: SPAN_KIND_(?P<kind>\w+)\n"
    r"Start time: (?P<start>\d+)\nEnd time: (?P<end>\d+)\n"
)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


@contextmanager
def rotel(folder: Path) -> Iterator[tuple[dict[str, str], Path]]:
    """A collector in Rust: its endpoints by protocol, and the file in which it writes what it decodes."""
    spec = find_spec("rotel")
    assert spec is not None
    assert spec.origin is not None
    ports = {"grpc": free_port(), "http/protobuf": free_port()}
    command = [str(Path(spec.origin).with_name("rotel-agent")), "start", "--exporter", "blackhole"]
    command += ["--otlp-grpc-endpoint", f"127.0.0.1:{ports['grpc']}"]
    command += ["--otlp-http-endpoint", f"127.0.0.1:{ports['http/protobuf']}"]
    command += ["--debug-log", "traces", "--debug-log-verbosity", "detailed"]
    command += ["--pid-file", str(folder / "pid")]
    log = folder / "rotel.log"
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
    try:
        for port in ports.values():
            wait_for_port(port, process)
        yield {protocol: f"http://127.0.0.1:{port}" for protocol, port in ports.items()}, log
    finally:
        process.terminate()
        process.wait(10)


def wait_for_port(port: int, process: subprocess.Popen[bytes]) -> None:
    for _ in range(400):
        assert process.poll() is None, "the collector ended"
        with closing(socket.socket()) as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.05)
    raise AssertionError("the collector did not come up in 20 s")


def ask(folder: Path, endpoint: str, protocol: str) -> list[SpanRecord]:
    """Some requests to a server that sends its spans there; the spans as its own file has them."""
    serve = {"otlp_endpoint": endpoint, "otlp_protocol": protocol}
    with scripted_server(Script(spell("word ")), log_dir=folder, serve=serve) as server:
        for index in range(NUM_REQUESTS):
            body = {"model": MODEL, "prompt": "hi" * index or "h", "max_tokens": 3, "stream": bool(index % 2)}
            headers = {"traceparent": TRACEPARENT} if index == 0 else {}
            assert server.request("POST", COMPLETIONS, body, headers)[0] == 200
        assert server.refusal(COMPLETIONS, {"model": "no"})[0] == 404
    return read_spans(folder)


@pytest.mark.parametrize("protocol", ["http/protobuf", "grpc"])
def test_a_collector_in_rust_decodes_every_span(tmp_path: Path, protocol: str) -> None:
    with rotel(tmp_path) as (endpoints, log):
        expected = ask(tmp_path / "log", endpoints[protocol], protocol)
    found = {
        match["id"]: (
            match["name"],
            match["kind"].lower(),
            match["trace"],
            match["parent"],
            int(match["start"]),
            int(match["end"]),
        )
        for match in _SPAN.finditer(log.read_text())
    }
    assert found == {
        span.span_id: (
            span.name,
            span.kind,
            span.trace_id,
            span.parent_span_id or "",
            span.start_unix_ns,
            span.end_unix_ns,
        )
        for span in expected
    }
    assert len(found) == 7 * NUM_REQUESTS + 1
    text = log.read_text()
    for line in (
        "-> service.name: Str(firstdiff)",
        "-> service.instance.id: Str(scripted)",
        "-> gen_ai.request.temperature: Double(1)",
        "-> error.type: Str(model_not_found)",
    ):
        assert line in text


def test_oteltap_awaits_every_span(tmp_path: Path) -> None:
    async def receive() -> tuple[dict[bytes, Span], list[SpanRecord]]:
        settings = OtelTapHttpProtobufReceiverSettings(http_port=free_port(), listen_on_all_interfaces=False)
        found: dict[bytes, Span] = {}
        async with OtelTapHttpProtobufReceiver(settings) as receiver:

            async def gather() -> None:
                async for span in receiver.stream_traces():
                    found[span.span_id] = span
                    if len(found) == 7 * NUM_REQUESTS + 1:
                        return

            gathering = asyncio.create_task(gather())
            endpoint = f"http://127.0.0.1:{settings.http_port}"
            expected = await asyncio.to_thread(ask, tmp_path, endpoint, "http/protobuf")
            await asyncio.wait_for(gathering, 20)
        return found, expected

    found, expected = asyncio.run(receive())
    for span in expected:
        other = found[bytes.fromhex(span.span_id)]
        assert (other.name, other.start_time_unix_nano) == (span.name, span.start_unix_ns)
        assert len(other.attributes) == len(span.attributes)


@pytest.mark.parametrize("protocol", ["http/protobuf", "grpc"])
def test_a_dead_collector_slows_no_token_and_loses_no_log(tmp_path: Path, protocol: str) -> None:
    serve = {"otlp_endpoint": f"http://127.0.0.1:{free_port()}", "otlp_protocol": protocol}
    with scripted_server(Script(spell("word ")), log_dir=tmp_path, serve=serve) as server:
        started_s = time.monotonic()
        for _ in range(NUM_REQUESTS):
            server.post(COMPLETIONS, prompt="hi", max_tokens=3)
        assert time.monotonic() - started_s < 5
    assert len(read_token_log(tmp_path)[1]) == NUM_REQUESTS
    assert len(read_spans(tmp_path)) == 7 * NUM_REQUESTS
    # What did not arrive by the end is counted, and by then there is no scrape: the ledger knows.
    assert server.running.ledger.num_dropped_spans == 7 * NUM_REQUESTS
