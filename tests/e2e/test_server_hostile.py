"""Whatever a client sends: an answer in time, 2xx or 4xx, refusals in OpenAI's envelope."""

from __future__ import annotations

import gzip
import json
import socket
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from http.client import HTTPResponse
from pathlib import Path
from threading import Event
from typing import Any
from urllib.parse import urlsplit

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parent))
from fuzz_requests import ABORT, CHAT, COMPLETIONS, JSON, NAMES, POSTS, RESET, SCORE
from fuzz_wire import address_of, check_answer
from scripted_server import MODEL, Script, ServerUnderTest, scripted_server, spell

from firstdiff.engine.sequence import RunnerOutput, ScheduledBatch

BODY_BYTES_MAX = 100_000
PROMPT = [*range(300, 330)]


@pytest.fixture(scope="module")
def script() -> Script:
    return Script(spell("one two é three "))


@pytest.fixture(scope="module")
def server(script: Script) -> Iterator[ServerUnderTest]:
    with scripted_server(script, max_body_bytes=BODY_BYTES_MAX) as running:
        yield running


@settings(max_examples=100, deadline=None)
@given(path=st.sampled_from(POSTS), body=st.binary(max_size=60) | JSON.map(lambda v: json.dumps(v).encode()))
def test_any_bytes_get_an_answer(server: ServerUnderTest, path: str, body: bytes) -> None:
    check_answer(*server.request("POST", path, body))


@pytest.mark.parametrize("path", POSTS)
@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"", 400),
        (b"{", 400),
        (b"[" * 90_000, 400),
        (b'{"a":' * 15_000 + b"1" + b"}" * 15_000, 400),
        (b'{"model":"\\ud800"}', 400),
        (b'{"model":"\xed\xa0\x80"}', 400),
        (b'{"model":"\xff"}', 400),
        (b'{"seed":NaN}', 400),
        (b'{"seed":1e999}', 400),
        (b'{"seed":' + b"9" * 50_000 + b"}", 400),
        (b"x" * (BODY_BYTES_MAX + 1), 413),
        (gzip.compress(b"{}"), 400),
    ],
)
def test_malformed_bodies(server: ServerUnderTest, path: str, body: bytes, status: int) -> None:
    if path == RESET and not body:
        # The one body that may be empty.
        status = 200
    assert server.request("POST", path, body)[0] == status


@pytest.mark.parametrize(
    "raw",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n",
        b"GET /v1/models/" + b"m" * 9000 + b" HTTP/1.1\r\nHost: a\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: a\r\nX: " + b"x" * 9000 + b"\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: -1\r\n\r\n",
        b"GET /health HTTP/7\r\n\r\n",
        b"GET\r\n\r\n",
    ],
)
def test_what_is_no_http_is_refused_like_the_rest(
    server: ServerUnderTest, raw: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO"), socket.create_connection(address_of(server), timeout=20) as connection:
        connection.sendall(raw)
        with closing(HTTPResponse(connection)) as response:
            response.begin()
            assert response.status == 400
            check_answer(400, dict(response.getheaders()), response.read())
        assert connection.recv(1) == b""
    # A stranger with a port scanner must not fill the log.
    assert not caplog.records


def test_a_nested_value_in_any_field_is_described_by_size(server: ServerUnderTest) -> None:
    deep: Any = []
    for _ in range(400):
        deep = [deep]
    for field in NAMES:
        for path in (COMPLETIONS, CHAT):
            known = (
                {"model": MODEL, "prompt": "a"} if path == COMPLETIONS else {"model": MODEL, "messages": []}
            )
            status, error = server.refusal(path, known | {field: deep})
            assert status == 400
            assert len(error["message"]) < 400


def test_compressed_bodies_are_read_and_bounded(server: ServerUnderTest) -> None:
    gzipped = {"Content-Encoding": "gzip"}
    body = json.dumps({"model": MODEL, "prompt": "a", "max_tokens": 1}).encode()
    assert server.request("POST", COMPLETIONS, gzip.compress(body), gzipped)[0] == 200
    bomb = gzip.compress(b" " * (BODY_BYTES_MAX * 50) + body)
    assert len(bomb) < BODY_BYTES_MAX
    check = server.request("POST", COMPLETIONS, bomb, gzipped)
    assert check[0] == 413
    check_answer(*check)
    broken = server.request("POST", COMPLETIONS, b"not gzip at all", gzipped)
    assert broken[0] == 400
    check_answer(*broken)


@pytest.mark.parametrize(
    ("body", "status", "says"),
    [
        ({"model": "gpt-4", "prompt": "a"}, 404, "model"),
        ({"model": MODEL, "prompt": ""}, 400, "1 token or more"),
        ({"model": MODEL, "prompt": []}, 400, "expected text"),
        ({"model": MODEL, "prompt": "a", "max_tokens": 256}, 400, "context of 256"),
        ({"model": MODEL, "prompt": "a", "max_tokens": -1}, 400, "-1"),
        ({"model": MODEL, "prompt": "a b " * 400}, 400, "context of 256"),
        ({"model": MODEL, "prompt": [10**9]}, 400, "token ids from 0 to"),
        ({"model": MODEL, "prompt": "a", "suffix": "b"}, 400, "not supported"),
        ({"model": MODEL, "prompt": "a", "max_tokens": True}, 400, "got true"),
        ({"model": MODEL, "prompt": "a", "temperature": -1}, 400, "from 0 to 2"),
    ],
)
def test_refusals_say_what_was_expected(
    server: ServerUnderTest, body: object, status: int, says: str
) -> None:
    got, error = server.refusal(COMPLETIONS, body)
    assert got == status
    assert says in error["message"]
    assert error["type"] == "invalid_request_error"


def test_wrong_methods_and_paths(server: ServerUnderTest) -> None:
    for method, path, status in [
        ("GET", COMPLETIONS, 405),
        ("DELETE", "/health", 405),
        ("PUT", CHAT, 405),
        ("GET", "/nope", 404),
        ("POST", "/v1/nope", 404),
        ("GET", "/v1/models/other", 404),
        ("GET", "/%00%ff%ed%a0%80", 404),
    ]:
        got, headers, body = server.request(method, path, b"{}" if method != "GET" else None)
        assert got == status, (method, path, body)
        check_answer(got, headers, body)
        if status == 405:
            assert headers["allow"]


@pytest.mark.parametrize(
    "accept",
    [
        "",
        "*/*",
        "application/openmetrics-text",
        "application/openmetrics-text;version=abc",
        "a;version=é,;;q",
    ],
)
def test_metrics_answer_any_accept_header(server: ServerUnderTest, accept: str) -> None:
    status, headers, body = server.request("GET", "/metrics", headers={"Accept": accept})
    assert status == 200
    assert b"firstdiff_num_requests_running" in body
    assert headers["content-type"].startswith(
        "application/openmetrics-text" if "openmetrics" in accept else "text/plain"
    )


@pytest.mark.parametrize(
    "raw",
    [
        b"GET http://[ HTTP/1.1\r\nHost: a\r\n\r\n",
        b"OPTIONS * HTTP/1.1\r\nHost: a\r\n\r\n",
        b"\0\1\2\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"GET /" + b"a" * 20_000 + b" HTTP/1.1\r\nHost: a\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\nZZ\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: -5\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Encoding: br\r\nContent-Length: 2\r\n\r\n{}",
        b"FOO /health HTTP/1.1\r\nHost: a\r\n\r\n",
    ],
)
def test_what_is_no_http_is_refused_at_once(server: ServerUnderTest, raw: bytes) -> None:
    parts = urlsplit(server.url)
    with socket.create_connection((parts.hostname, parts.port), timeout=20) as connection:
        connection.sendall(raw)
        status_line = connection.recv(65536).split(b"\r\n")[0]
    assert status_line.split(b" ")[1].startswith(b"4"), status_line


@pytest.mark.parametrize("value", ["", " ", "a b", "x" * 129, "é", "a\tb"])
def test_unusable_request_ids_are_refused(server: ServerUnderTest, value: str) -> None:
    body = {"model": MODEL, "prompt": "a"}
    netloc = urlsplit(server.url)
    raw = json.dumps(body).encode()
    head = (
        f"POST {COMPLETIONS} HTTP/1.1\r\nHost: a\r\nContent-Length: {len(raw)}\r\n"
        f"Connection: close\r\nX-Request-Id: {value}\r\n\r\n"
    )
    with socket.create_connection((netloc.hostname, netloc.port), timeout=20) as connection:
        connection.sendall(head.encode() + raw)
        answer = b"".join(iter(lambda: connection.recv(65536), b""))
    assert answer.startswith(b"HTTP/1.1 400")
    assert b"X-Request-Id" in answer.split(b"\r\n\r\n")[1]


def test_other_expectations_are_refused_in_the_envelope(server: ServerUnderTest) -> None:
    body = {"model": MODEL, "prompt": "a", "max_tokens": 1}
    assert server.request("POST", COMPLETIONS, body, {"Expect": "100-continue"})[0] == 200
    status, error = server.refusal(COMPLETIONS, body, Expect="miracles")
    assert status == 417
    assert "miracles" in error["message"]


def test_malformed_trace_headers_change_nothing(server: ServerUnderTest) -> None:
    body = {"model": MODEL, "prompt": "a", "max_tokens": 1}
    for value in ("", "00-0-0-0", "x" * 5000, "00-" + "0" * 32 + "-" + "0" * 16 + "-01"):
        assert (
            server.request("POST", COMPLETIONS, body, {"traceparent": value, "tracestate": value})[0] == 200
        )


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_ended_in_its_prompt_still_has_an_entry_a_token(stream: bool) -> None:
    status, body = aborted_in_prompt(
        COMPLETIONS, prompt=PROMPT, echo=True, logprobs=1, max_tokens=5, stream=stream
    )
    assert status == 200
    (choice,) = json.loads(body.split(b"\n\n")[0].removeprefix(b"data: "))["choices"]
    assert choice["finish_reason"] == "abort"
    assert {name: len(values) for name, values in choice["logprobs"].items()} == dict.fromkeys(
        ("text_offset", "token_logprobs", "tokens", "top_logprobs"), len(PROMPT)
    )
    # Of the first steps there are some, of those that never came none.
    logprobs = choice["logprobs"]["token_logprobs"]
    num_known = len(logprobs) - logprobs.count(None)
    assert num_known == 8
    assert None not in logprobs[1 : 1 + num_known]


def test_a_score_that_is_ended_is_refused() -> None:
    status, body = aborted_in_prompt(SCORE, prompt="a", target=PROMPT)
    check_answer(status, {}, body)
    assert (status, json.loads(body)["error"]["code"]) == (409, "aborted")


class PausesInPrompt(Script):
    """Closes its gate in the fourth step."""

    def execute(self, batch: ScheduledBatch) -> RunnerOutput:
        if batch.step_index == 3:
            self.gate.clear()
        return super().execute(batch)


def aborted_in_prompt(path: str, **body: Any) -> tuple[int, bytes]:
    """(status, answer) of a request that was ended after four steps of its prompt."""
    script = PausesInPrompt(spell("one two "))
    with (
        scripted_server(script, max_num_seqs=1, max_num_batched_tokens=2) as server,
        ThreadPoolExecutor(1) as pool,
    ):
        named = {"X-Request-Id": "to-end"}
        answer = pool.submit(server.request, "POST", path, {"model": MODEL, **body}, named)
        for _ in range(2000):
            if script.is_waiting:
                break
            Event().wait(0.01)
        assert json.loads(server.request("POST", ABORT, {"request_id": "to-end"})[2])["num_aborted"] == 1
        script.gate.set()
        status, _, raw = answer.result(20)
        return status, raw


def test_the_server_still_answers(server: ServerUnderTest) -> None:
    """Last in this file on purpose: after all of the above, nothing is left running."""
    assert server.post(COMPLETIONS, prompt="a", max_tokens=2)["usage"]["completion_tokens"] == 2
    assert server.running.dispatcher.num_in_flight == 0
