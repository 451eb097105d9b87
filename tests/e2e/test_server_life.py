"""Clients that leave, engines that fail, queues that fill, shutdowns: nothing leaks and nothing hangs."""

from __future__ import annotations

import json
import re
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection
from pathlib import Path
from urllib.parse import urlsplit

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from scripted_server import MODEL, TOKENIZER, Script, ServerUnderTest, scripted_server, spell

from firstdiff.engine.sequence import Sequence
from firstdiff.tracing.records import TokenLogRow
from firstdiff.tracing.token_log import phase_durations_ns, read_token_log

COMPLETIONS = "/v1/completions"
LONG = 200


def wait_until(true: Callable[[], bool], *, timeout_s: float = 10) -> None:
    deadline = time.monotonic() + timeout_s
    while not true():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.01)


def open_request(server: ServerUnderTest, request_id: str, **body: object) -> HTTPConnection:
    connection = HTTPConnection(urlsplit(server.url).netloc, timeout=20)
    raw = json.dumps({"model": MODEL, "prompt": "hi", "max_tokens": LONG, **body})
    connection.request("POST", COMPLETIONS, raw, {"X-Request-Id": request_id})
    return connection


def leave(connection: HTTPConnection) -> None:
    assert connection.sock is not None
    connection.sock.shutdown(socket.SHUT_RDWR)
    connection.close()


def log_of(log_dir: Path) -> dict[str, TokenLogRow]:
    return {row.request_id: row for row in read_token_log(log_dir)[1]}


def num_used_blocks(script: Script) -> int:
    assert script.engine is not None
    return script.engine.scheduler.pool.num_used_blocks


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_while_decoding_frees_its_blocks(tmp_path: Path, stream: bool) -> None:
    script = Script(spell("word "), step_s=0.005)
    with scripted_server(script, log_dir=tmp_path) as server:
        connection = open_request(server, "gone", stream=stream)
        if stream:
            assert connection.getresponse().read(10)
        wait_until(lambda: num_used_blocks(script) > 0)
        leave(connection)
        wait_until(lambda: num_used_blocks(script) == 0)
        wait_until(lambda: server.running.dispatcher.num_in_flight == 0)
    row = log_of(tmp_path)["gone"]
    assert row.finish_reason == "abort"
    assert 0 < len(row.token_ids) < LONG


def gauges(server: ServerUnderTest) -> list[float]:
    names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
    text = server.request("GET", "/metrics", None)[2].decode()
    return [float(re.findall(rf"^firstdiff_{name}{{.*}} (.*)$", text, re.MULTILINE)[0]) for name in names]


def test_metrics_of_an_idle_server_say_so(tmp_path: Path) -> None:
    """After answers and after clients that left, with no step in between that could say it."""
    script = Script(spell("word "), step_s=0.005)
    with scripted_server(script, log_dir=tmp_path, max_num_seqs=2) as server:
        assert server.post(COMPLETIONS, prompt="a", max_tokens=3)
        wait_until(lambda: gauges(server) == [0, 0, 0])
        connections = [open_request(server, f"gone-{index}", stream=True) for index in range(5)]
        wait_until(lambda: num_used_blocks(script) > 0 and gauges(server)[:2] == [2, 3])
        for connection in connections:
            leave(connection)
        wait_until(lambda: server.running.dispatcher.num_in_flight == 0)
        wait_until(lambda: gauges(server) == [0, 0, 0])


def test_clients_that_reset_their_connections_leave_no_error_in_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    script = Script(spell("word "))
    with scripted_server(script, log_dir=tmp_path) as server:
        for index in range(20):
            connection = open_request(server, f"reset-{index}", stream=True)
            sock = connection.sock
            assert sock is not None
            sock.recv(100)
            # Linger 0: closing sends a reset, so that the server's next write fails.
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            connection.close()
        wait_until(lambda: server.running.dispatcher.num_in_flight == 0)
        assert num_used_blocks(script) == 0
        assert server.post(COMPLETIONS, prompt="a", max_tokens=1)
    assert len(log_of(tmp_path)) == 21
    assert [record.getMessage() for record in caplog.records if record.levelname == "ERROR"] == []


def test_a_client_that_leaves_the_queue_frees_its_place(tmp_path: Path) -> None:
    script = Script(spell("word "))
    with scripted_server(script, log_dir=tmp_path, max_num_seqs=1) as server:
        script.gate.clear()
        running = open_request(server, "running", max_tokens=2)
        wait_until(lambda: num_used_blocks(script) > 0)
        queued = open_request(server, "queued")
        wait_until(lambda: server.running.dispatcher.num_in_flight == 2)
        leave(queued)
        time.sleep(0.1)
        script.gate.set()
        assert running.getresponse().status == 200
        running.close()
        wait_until(lambda: server.running.dispatcher.num_in_flight == 0)
    rows = log_of(tmp_path)
    assert rows["queued"].finish_reason == "abort"
    assert rows["queued"].token_ids == []
    assert rows["running"].finish_reason == "length"


def test_a_full_queue_is_429_with_retry_after() -> None:
    script = Script(spell("word "))
    with scripted_server(script, max_num_seqs=1, max_num_waiting=1) as server:
        script.gate.clear()
        taken = [open_request(server, f"taken-{i}", max_tokens=1) for i in range(2)]
        wait_until(lambda: server.running.dispatcher.num_in_flight == 2)
        with ThreadPoolExecutor(2) as pool:
            body = {"model": MODEL, "prompt": ["a", "b"], "max_tokens": 1}
            late = [
                pool.submit(server.request, "POST", COMPLETIONS, body | {"stream": stream})
                for stream in (True, False)
            ]
            wait_until(lambda: server.running.dispatcher.num_in_flight == 6)
            script.gate.set()
            for answer in late:
                status, headers, error = answer.result()
                assert status == 429
                assert headers["retry-after"] == "1"
                assert json.loads(error)["error"]["code"] == "queue_full"
        for connection in taken:
            assert connection.getresponse().status == 200
            connection.close()
        assert server.post(COMPLETIONS, prompt="a", max_tokens=1)


def test_an_id_in_flight_is_refused_and_free_again_afterwards() -> None:
    script = Script(spell("word "))
    with scripted_server(script) as server:
        script.gate.clear()
        first = open_request(server, "same", max_tokens=1)
        wait_until(lambda: server.running.dispatcher.num_in_flight == 1)
        body = {"model": MODEL, "prompt": "hi", "max_tokens": 1}
        status, error = server.refusal(COMPLETIONS, body, **{"X-Request-Id": "same"})
        assert (status, error["code"]) == (400, "duplicate_request_id")
        script.gate.set()
        assert first.getresponse().status == 200
        first.close()
        assert server.request("POST", COMPLETIONS, body, {"X-Request-Id": "same"})[0] == 200


def test_a_failing_step_fails_its_requests_and_no_others(tmp_path: Path) -> None:
    def next_token(sequence: Sequence) -> int:
        if sequence.request_id.startswith("bad") and sequence.num_output_tokens == 2:
            raise FloatingPointError("NaN in row 0")
        return 7

    script = Script(next_token)
    with scripted_server(script, log_dir=tmp_path) as server:
        body = {"model": MODEL, "prompt": "hi", "max_tokens": 5}
        status, _, answer = server.request("POST", COMPLETIONS, body, {"X-Request-Id": "bad-whole"})
        assert status == 500
        assert json.loads(answer)["error"]["code"] == "engine_error"
        assert "NaN in row 0" in json.loads(answer)["error"]["message"]
        raw = server.request("POST", COMPLETIONS, body | {"stream": True}, {"X-Request-Id": "bad-stream"})[2]
        *tokens, error, done, _ = raw.split(b"\n\n")
        assert len(tokens) == 2
        assert json.loads(error.removeprefix(b"data: "))["error"]["code"] == "engine_error"
        assert done == b"data: [DONE]"
        assert server.request("POST", COMPLETIONS, body, {"X-Request-Id": "good"})[0] == 200
        assert num_used_blocks(script) == 0
    rows = log_of(tmp_path)
    assert {name: rows[name].finish_reason for name in rows} == {
        "bad-whole": "error",
        "bad-stream": "error",
        "good": "length",
    }
    assert len(rows["bad-stream"].token_ids) == 2


def test_a_broken_engine_answers_503_from_then_on(tmp_path: Path) -> None:
    script = Script(spell("word "), step_s=0.01)
    with scripted_server(script, log_dir=tmp_path) as server:
        connection = open_request(server, "cut-off", stream=True)
        response = connection.getresponse()
        assert response.read(10)
        assert script.engine is not None
        script.engine.scheduler.commit = lambda *_: 1 / 0
        error = response.read().split(b"\n\n")[-3]
        assert json.loads(error.removeprefix(b"data: "))["error"]["code"] == "engine_unavailable"
        connection.close()
        status, _, body = server.request("GET", "/health")
        assert status == 503
        assert "ZeroDivisionError" in json.loads(body)["error"]["message"]
        body = {"model": MODEL, "prompt": "hi", "max_tokens": 1}
        assert server.refusal(COMPLETIONS, body)[0] == 503
        assert server.refusal(COMPLETIONS, body | {"stream": True})[0] == 503
    row = log_of(tmp_path)["cut-off"]
    assert (row.finish_reason, len(row.token_ids) > 0) == ("error", True)


def test_requests_in_flight_at_shutdown_are_answered_with_503(tmp_path: Path) -> None:
    script = Script(spell("word "), step_s=0.01)
    with ThreadPoolExecutor(2) as pool:
        with scripted_server(script, log_dir=tmp_path) as server:
            body = {"model": MODEL, "prompt": "hi", "max_tokens": LONG}
            whole = pool.submit(server.request, "POST", COMPLETIONS, body, {"X-Request-Id": "whole"})
            stream = open_request(server, "stream", stream=True)
            response = stream.getresponse()
            assert response.read(10)
            wait_until(lambda: server.running.dispatcher.num_in_flight == 2)
            rest = pool.submit(response.read)
        status, _, answer = whole.result()
        assert status == 503
        assert "shutting down" in json.loads(answer)["error"]["message"]
        error = rest.result().split(b"\n\n")[-3]
        assert json.loads(error.removeprefix(b"data: "))["error"]["code"] == "engine_unavailable"
        stream.close()
    rows = log_of(tmp_path)
    assert {row.finish_reason for row in rows.values()} == {"abort"}
    assert rows.keys() == {"whole", "stream"}


def test_a_client_that_never_reads_holds_up_nobody(tmp_path: Path) -> None:
    script = Script(spell("word "))
    with scripted_server(script, log_dir=tmp_path, num_blocks=512) as server:
        many = ["hi"] * 64
        slow = socket.create_connection(
            (urlsplit(server.url).hostname, urlsplit(server.url).port), timeout=20
        )
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        raw = json.dumps(
            {"model": MODEL, "prompt": many, "max_tokens": LONG, "stream": True, "return_token_ids": True}
        ).encode()
        slow.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nX-Request-Id: slow\r\n"
            + f"Content-Length: {len(raw)}\r\n\r\n".encode()
            + raw
        )
        wait_until(lambda: server.running.dispatcher.num_in_flight > 0)
        assert server.post(COMPLETIONS, prompt="a", max_tokens=2)
        wait_until(lambda: server.running.dispatcher.num_in_flight == 0, timeout_s=30)
        slow.close()
        wait_until(lambda: len(log_of(tmp_path)) == 65)


def test_the_token_log_has_every_request_once(tmp_path: Path) -> None:
    script = Script(spell("one two <end> three "), step_s=0.001)
    trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    with scripted_server(script, log_dir=tmp_path, max_num_seqs=4) as server:
        body = {"model": MODEL, "prompt": "hi", "max_tokens": 30}
        variants = [{}, {"stream": True}, {"stop": "<end>"}, {"stop": "<end>", "stream": True}, {"seed": 5}]

        def ask(index: int) -> bytes:
            headers = {"X-Request-Id": f"r{index}", "traceparent": trace}
            return server.request("POST", COMPLETIONS, body | variants[index % len(variants)], headers)[2]

        with ThreadPoolExecutor(12) as pool:
            list(pool.map(ask, range(40)))
        server.request("POST", COMPLETIONS, body | {"prompt": ["a", "b"]}, {"X-Request-Id": "pair"})
        server.refusal(COMPLETIONS, body | {"max_tokens": 0}, **{"X-Request-Id": "refused"})
    identities, rows = read_token_log(tmp_path)
    assert len(identities) == 1
    assert sorted(row.request_id for row in rows) == sorted(
        [*(f"r{i}" for i in range(40)), "pair-0", "pair-1"]
    )
    for row in rows:
        assert row.endpoint == COMPLETIONS
        assert row.received_ns <= row.tokenized_ns <= row.arrived_ns <= row.flushed_ns
        assert sum(phase_durations_ns(row).values()) == row.flushed_ns - row.received_ns
        if not row.sampling.stop:
            assert row.text == TOKENIZER.decode(row.token_ids)
            assert row.finish_reason == "length"
        else:
            assert row.text == "one two "
            assert row.finish_reason in ("stop", "length")
    by_id = {row.request_id: row for row in rows}
    assert by_id["r4"].sampling.seed == 5
    assert len({by_id[f"r{i}"].sampling.seed for i in range(40) if i % 5 != 4}) == 32
    assert {by_id[f"r{i}"].trace_id for i in range(40)} == {trace[3:35]}
    # The two answers of the pair share their HTTP request.
    assert len({row.span_id for row in rows}) == 41
    assert by_id["pair-0"].trace_id == by_id["pair-1"].trace_id
    steps = (tmp_path / "steps.jsonl").read_bytes().splitlines()
    assert len(steps) > 12


def test_a_slow_body_is_408() -> None:
    with scripted_server(Script(spell("a")), body_timeout_s=0.2) as server:
        parts = urlsplit(server.url)
        with socket.create_connection((parts.hostname, parts.port), timeout=20) as connection:
            connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 100\r\n\r\n{")
            assert connection.recv(65536).startswith(b"HTTP/1.1 408")


def test_no_thread_is_left() -> None:
    before = threading.active_count()
    with scripted_server(Script(spell("a"))) as server:
        assert server.post(COMPLETIONS, prompt="a", max_tokens=1)
    wait_until(lambda: threading.active_count() <= before)
