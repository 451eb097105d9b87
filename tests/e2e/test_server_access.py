"""Who is answered, and what clients may cost that never ask, never finish or never read."""

from __future__ import annotations

import json
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event
from urllib.parse import urlsplit

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from scripted_server import MODEL, Script, ServerUnderTest, scripted_server, spell

from firstdiff.engine import dispatcher
from firstdiff.engine.access import check_keys, exposure_warning

COMPLETIONS = "/v1/completions"
BODY = {"model": MODEL, "prompt": "hi", "max_tokens": 1}


def wait_until(true: Callable[[], bool]) -> None:
    for _ in range(1500):
        if true():
            return
        Event().wait(0.01)
    raise AssertionError("waited too long")


@contextmanager
def connected(server: ServerUnderTest) -> Iterator[socket.socket]:
    parts = urlsplit(server.url)
    with socket.create_connection((parts.hostname, parts.port), timeout=20) as connection:
        yield connection


def is_cut(connection: socket.socket) -> bool:
    """Whether the other end closes or resets without a further byte."""
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:
        return True


PROTECTED = [
    ("POST", COMPLETIONS), ("POST", "/v1/chat/completions"), ("POST", "/tokenize"), ("POST", "/detokenize"),
    ("POST", "/score"), ("POST", "/v1/firstdiff/score"), ("POST", "/abort"), ("POST", "/reset_prefix_cache"),
    ("GET", "/v1/models"), ("GET", f"/v1/models/{MODEL}"), ("GET", "/tokenizer_info"),
    ("GET", "/v1/firstdiff/identity"), ("GET", "/no/such/path"),
]  # fmt: skip


def test_without_a_key_nothing_is_answered_but_probes() -> None:
    with scripted_server(Script(spell("a")), serve={"api_keys": ("first-key", "second-key")}) as server:
        assert server.running.dispatcher.num_in_flight == 0
        for method, path in PROTECTED:
            for value in (
                None,
                "Bearer wrong",
                "Bearer first-ke",
                "Bearer first-key2",
                "first-key",
                "Basic first-key",
            ):
                headers = {} if value is None else {"Authorization": value}
                status, got, body = server.request(method, path, {} if method == "POST" else None, headers)
                assert (status, got["www-authenticate"]) == (401, "Bearer"), path
                error = json.loads(body)["error"]
                assert (error["code"], error["type"]) == ("invalid_api_key", "authentication_error")
                assert "first-key" not in error["message"]
        for path in ("/health", "/ready", "/metrics", "/version"):
            assert server.request("GET", path)[0] == 200
        for key in ("first-key", "second-key"):
            headers = {"Authorization": f"Bearer {key}"}
            assert server.request("POST", COMPLETIONS, BODY, headers)[0] == 200
            assert server.request("GET", "/no/such/path", None, headers)[0] == 404


def test_keys_that_no_header_can_carry_are_refused() -> None:
    check_keys(["a", "x" * 512])
    for key in ("", "a b", "é", "a\n", "x" * 513):
        with pytest.raises(ValueError, match="expected --api-key") as caught:
            check_keys(["fine", key])
        assert not key or key not in str(caught.value)


@pytest.mark.parametrize(
    ("host", "is_open"),
    [("127.0.0.1", False), ("127.8.9.1", False), ("::1", False), ("localhost", False), ("::1%lo", False),
     ("0.0.0.0", True), ("::", True), ("10.0.0.1", True), ("example.test", True)],
)  # fmt: skip
def test_a_warning_for_what_others_can_reach(host: str, is_open: bool) -> None:
    assert (exposure_warning(host, []) is not None) == is_open
    assert exposure_warning(host, ["key"]) is None


def test_connections_that_never_ask_are_closed() -> None:
    with scripted_server(Script(spell("a")), body_timeout_s=0.3) as server:
        for sent in (b"", b"POST /v1/comple", b"GET /health HTTP/1.1\r\nHost: a\r\nX-Slow: "):
            with connected(server) as connection:
                connection.sendall(sent)
                assert is_cut(connection)
        # One that has asked may stay.
        with connected(server) as connection:
            for _ in range(2):
                connection.sendall(b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n")
                assert connection.recv(65536).startswith(b"HTTP/1.1 200")
                Event().wait(0.5)
        assert server.request("POST", COMPLETIONS, BODY)[0] == 200


def slow_stream(connection: socket.socket, *, buffer_bytes: int = 4096, **more: object) -> None:
    """Ask for a long stream and read nothing of it."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer_bytes)
    body = BODY | {"max_tokens": 200, "stream": True, "prompt": ["hi"] * 64, "return_token_ids": True} | more
    raw = json.dumps(body).encode()
    head = (
        f"POST {COMPLETIONS} HTTP/1.1\r\nHost: a\r\nX-Request-Id: slow\r\nContent-Length: {len(raw)}\r\n\r\n"
    )
    connection.sendall(head.encode() + raw)


def test_a_stream_that_nobody_reads_is_cut_and_its_requests_ended() -> None:
    script = Script(spell("word "), step_s=0.001)
    with scripted_server(script, num_blocks=2048, serve={"write_timeout_s": 0.3}) as server:
        with connected(server) as connection:
            slow_stream(connection, max_tokens=250, logprobs=20)
            wait_until(lambda: server.running.dispatcher.num_open == 1)
            wait_until(lambda: server.running.dispatcher.num_open == 0)
            wait_until(lambda: server.running.dispatcher.num_in_flight == 0)
        assert script.engine is not None
        assert script.engine.scheduler.pool.num_used_blocks == 0
        assert server.request("POST", COMPLETIONS, BODY)[0] == 200


def test_a_whole_answer_that_nobody_reads_is_cut_too() -> None:
    with scripted_server(Script(spell("word ")), num_blocks=2048, serve={"write_timeout_s": 0.3}) as server:
        with connected(server) as connection:
            slow_stream(connection, stream=False, logprobs=20)
            wait_until(lambda: server.running.dispatcher.num_open == 1)
            wait_until(lambda: server.running.dispatcher.num_open == 0)
        assert server.request("POST", COMPLETIONS, BODY)[0] == 200


def test_rows_that_wait_for_a_slow_reader_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatcher, "MAX_UNREAD_ROWS", 500)
    # Steps that take a while: an engine that is quicker than its server has nothing left to cut.
    script = Script(spell("word "), step_s=0.004)
    with scripted_server(script, num_blocks=2048) as server, connected(server) as connection:
        script.gate.clear()
        slow_stream(connection, buffer_bytes=1 << 17, max_tokens=250, logprobs=20)
        wait_until(lambda: server.running.dispatcher.num_in_flight == 64)
        script.gate.set()
        # The engine is done with it although its client has not read a byte.
        wait_until(lambda: server.running.dispatcher.num_in_flight == 0)
        raw = b""
        while not raw.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n"):
            part = connection.recv(65536)
            assert part, raw[-300:]
            raw += part
        assert b'"code":"client_too_slow"' in raw[-1000:]


def test_a_body_and_a_head_beyond_their_limits_are_refused() -> None:
    with scripted_server(Script(spell("a")), max_body_bytes=2000) as server:
        status, error = server.refusal(COMPLETIONS, BODY | {"prompt": "x" * 2000})
        assert (status, error["code"]) == (413, "body_too_large")
        raw = b"GET /health HTTP/1.1\r\nHost: a\r\n" + b"X-A: b\r\n" * 500 + b"\r\n"
        for request in (raw, b"GET /health HTTP/1.1\r\nX-A: " + b"b" * 100_000 + b"\r\n\r\n"):
            with connected(server) as connection:
                connection.sendall(request)
                assert connection.recv(100).split(b" ")[1] == b"400"
