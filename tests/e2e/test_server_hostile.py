"""Whatever a client sends: an answer in time, 2xx or 4xx, refusals in OpenAI's envelope."""

from __future__ import annotations

import gzip
import json
import os
import socket
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from threading import Event
from typing import Any
from urllib.parse import urlsplit

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parent))
from scripted_server import MODEL, Script, ServerUnderTest, scripted_server, spell

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
SCORE, ABORT, RESET = "/score", "/abort", "/reset_prefix_cache"
PATHS = (COMPLETIONS, CHAT, "/tokenize", "/detokenize", SCORE, ABORT, RESET)
BODY_BYTES_MAX = 100_000
NUM_REQUESTS = int(os.environ.get("FIRSTDIFF_FUZZ_REQUESTS", "800"))
"""Of the fuzzing of all routes; CI asks for more."""
MEMORY_GROWTH_MAX_BYTES = 8 << 20


@pytest.fixture(scope="module")
def script() -> Script:
    return Script(spell("one two é three "))


@pytest.fixture(scope="module")
def server(script: Script) -> Iterator[ServerUnderTest]:
    with scripted_server(script, max_body_bytes=BODY_BYTES_MAX) as running:
        yield running


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=20)
    | st.sampled_from(
        [-1, 0, 1, 2**63, -(2**63), 2**64, 10**30, 1e308, -0.0, 5e-324, "", "\0", "\ufffd", "🙂"]
    ),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=8,
)
IDS = st.lists(st.integers(0, 2047), min_size=1, max_size=8)
TEXT = st.text(min_size=1, max_size=9)
MESSAGES = st.lists(
    st.fixed_dictionaries(
        {
            "role": st.sampled_from(["system", "user", "assistant"]),
            "content": TEXT
            | st.lists(st.fixed_dictionaries({"type": st.just("text"), "text": TEXT}), max_size=2),
        }
    ),
    min_size=1,
    max_size=3,
)
NEEDED: dict[str, dict[str, st.SearchStrategy[Any]]] = {
    COMPLETIONS: {
        "prompt": TEXT | IDS | st.lists(TEXT, min_size=1, max_size=3) | st.lists(IDS, min_size=1, max_size=3)
    },
    CHAT: {"messages": MESSAGES},
    "/tokenize": {"prompt": st.text(max_size=9)},
    "/detokenize": {"tokens": IDS},
    SCORE: {"prompt": TEXT | IDS, "target": TEXT | IDS | st.lists(TEXT, min_size=1, max_size=3)},
    ABORT: {"request_id": TEXT},
    RESET: {},
}
GENERATION: dict[str, st.SearchStrategy[Any]] = {
    "max_tokens": st.integers(1, 6),
    "temperature": st.floats(0, 2),
    "top_p": st.floats(0, 1, exclude_min=True),
    "top_k": st.integers(-1, 3000),
    "seed": st.integers(-(2**63), 2**63 - 1),
    "stop": TEXT | st.lists(TEXT, max_size=3),
    "stop_token_ids": IDS,
    "ignore_eos": st.booleans(),
    "stream": st.booleans(),
    "return_token_ids": st.booleans(),
    "user": st.text(max_size=5),
    "n": st.integers(1, 3),
    "min_p": st.floats(0, 1),
    "min_tokens": st.integers(0, 1),
    "presence_penalty": st.floats(-2, 2),
    "repetition_penalty": st.floats(0.5, 2),
    "logit_bias": st.dictionaries(st.integers(0, 2047).map(str), st.floats(-100, 100), max_size=3),
    "metadata": st.dictionaries(st.text(max_size=4), st.text(max_size=4), max_size=3),
    "cache_salt": TEXT,
    "use_prefix_cache": st.booleans(),
    "skip_special_tokens": st.booleans(),
    "include_stop_str_in_output": st.booleans(),
    "truncate_prompt_tokens": st.integers(1, 256),
    "logprobs_mode": st.sampled_from(["raw_logprobs", "processed_logprobs"]),
}
OPTIONAL = {
    COMPLETIONS: GENERATION | {"logprobs": st.integers(0, 20), "echo": st.booleans()},
    CHAT: GENERATION
    | {"logprobs": st.booleans(), "max_completion_tokens": st.integers(1, 6), "tools": st.just([])},
    "/tokenize": {"add_special_tokens": st.booleans()},
    "/detokenize": {},
    SCORE: {"top_logprobs": st.integers(0, 20), "use_prefix_cache": st.booleans(), "user": TEXT},
    ABORT: {},
    RESET: {},
}
# Needs a second field to be right: hostile as often as not.
EXTRA = ["stream_options", "top_logprobs", "messages", "prompt", "tokens", "n", "best_of", "logit_bias",
         "response_format", "structured_outputs", "guided_json", "guided_regex", "guided_choice",
         "guided_grammar", "tools", "tool_choice", "forced_token_ids", "prompt_logprobs", "priority",
         "stop", "target"]  # fmt: skip
NAMES = sorted({*EXTRA, *(name for fields in (*NEEDED.values(), *OPTIONAL.values()) for name in fields)})


@st.composite
def requests(draw: st.DrawFn) -> tuple[str, dict[str, Any]]:
    """(path, body): most bodies are right and get to the engine; some have a field that is anything."""
    path = draw(st.sampled_from(PATHS))
    model = {} if path in (ABORT, RESET) else {"model": st.just(MODEL)}
    body = draw(st.fixed_dictionaries(model | NEEDED[path], optional=OPTIONAL[path]))
    if path in (COMPLETIONS, CHAT) and draw(st.booleans()):
        body |= {
            "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": draw(st.booleans())},
        }
    if draw(st.booleans()):
        body[draw(st.sampled_from(NAMES) | st.text(max_size=6))] = draw(JSON)
    if body and draw(st.integers(0, 9)) == 0:
        body.pop(draw(st.sampled_from(sorted(body))))
    return path, body


def resident_bytes() -> int:
    """Memory of this process, server included; 0 where that is not told."""
    statm = Path("/proc/self/statm")
    return int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") if statm.exists() else 0


def check_answer(status: int, headers: dict[str, str], body: bytes) -> None:
    assert 200 <= status < 300 or 400 <= status < 500, (status, body)
    if status >= 400:
        error = json.loads(body)["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert error["message"].startswith("expected "), error
        assert ", got" in error["message"], error
    elif headers["content-type"].startswith("text/event-stream"):
        *events, done, rest = body.split(b"\n\n")
        assert (done, rest) == (b"data: [DONE]", b"")
        for event in events:
            assert "error" not in json.loads(event.removeprefix(b"data: "))
    else:
        json.loads(body)


@pytest.mark.timeout(600)
def test_any_json_body_gets_an_answer(server: ServerUnderTest, script: Script) -> None:
    seen: Counter[tuple[str, int]] = Counter()
    sent: list[tuple[str, dict[str, Any]]] = []

    @settings(max_examples=NUM_REQUESTS, deadline=None, suppress_health_check=list(HealthCheck))
    @given(request=requests())
    def check(request: tuple[str, dict[str, Any]]) -> None:
        path, body = request
        status, headers, answer = server.request("POST", path, body)
        check_answer(status, headers, answer)
        seen[path, status // 100] += 1
        sent.append(request)

    check()
    # The bodies are worth something only when they reach the engine about as often as they are refused.
    for path in PATHS:
        assert seen[path, 2] >= 10, seen
        assert seen[path, 4] >= 10, seen
    # Nothing is left of it: no request, no block, and no memory by asking it all again. (Hypothesis keeps
    # more of its examples than the server does of its requests, so its own run would tell nothing.)
    sizes = []
    for _ in range(3):
        for path, body in sent[:400]:
            server.request("POST", path, body)
        sizes.append(resident_bytes())
    assert sizes[2] - sizes[0] < MEMORY_GROWTH_MAX_BYTES
    assert server.running.dispatcher.num_open == 0
    for _ in range(500):
        if server.running.dispatcher.num_in_flight == 0:
            break
        Event().wait(0.01)
    assert script.engine is not None
    script.engine.scheduler.check_integrity()
    assert script.engine.scheduler.pool.num_used_blocks == 0


@settings(max_examples=100, deadline=None)
@given(path=st.sampled_from(PATHS), body=st.binary(max_size=60) | JSON.map(lambda v: json.dumps(v).encode()))
def test_any_bytes_get_an_answer(server: ServerUnderTest, path: str, body: bytes) -> None:
    check_answer(*server.request("POST", path, body))


@pytest.mark.parametrize("path", PATHS)
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


def test_the_server_still_answers(server: ServerUnderTest) -> None:
    """Last in this file on purpose: after all of the above, nothing is left running."""
    assert server.post(COMPLETIONS, prompt="a", max_tokens=2)["usage"]["completion_tokens"] == 2
    assert server.running.dispatcher.num_in_flight == 0
