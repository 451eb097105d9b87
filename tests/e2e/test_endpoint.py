"""The endpoint over real sockets: good replies in every framing, hostile ones never crash it or hang it."""

from __future__ import annotations

import asyncio
import json
import random
import socket
import sys
from contextlib import aclosing
from pathlib import Path

import msgspec
import pytest

sys.path.insert(0, str(Path(__file__).parent))
from fake_server import HANG_UP, FakeServer, Script, chat_events, chunked, event, http, usage

from firstdiff.harness.dialect import DIALECTS
from firstdiff.harness.driver import ask
from firstdiff.harness.endpoint import HttpEndpoint
from firstdiff.harness.wire import EndpointError, WireLimits
from firstdiff.tracing.clock import SystemClock
from firstdiff.tracing.records import Identity, Request, RequestRow

CHAT = "/v1/chat/completions"
CASE = Request(case_id="a", messages=[{"role": "user", "content": "hi"}])
SHORT = WireLimits(timeout_s=0.4, max_reply_bytes=1 << 20, max_head_bytes=4096)


def rows_from(script: Script, *, num_requests: int = 1, case: Request = CASE) -> list[RequestRow]:
    """Ask one after another; also checks that every row can be written down."""

    async def ask_them(url: str) -> list[RequestRow]:
        endpoint = HttpEndpoint(url, model="m", limits=SHORT)
        rows = [
            await ask(endpoint, case, clock=SystemClock(), request_id=f"r{index}")
            for index in range(num_requests)
        ]
        await endpoint.close()
        return rows

    with FakeServer({CHAT: script, "/v1/completions": script}) as server:
        rows = asyncio.run(ask_them(server.url))
    assert [msgspec.json.decode(msgspec.json.encode(row), type=RequestRow) for row in rows] == rows
    return rows


STREAM = b"".join(chat_events(["Hello ", "wörld"]))
SSE_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"
FRAMINGS: dict[str, list[bytes]] = {
    "chunked": chunked(chat_events(["Hello ", "wörld"])),
    "one chunk": chunked([STREAM]),
    "chunks of three bytes": chunked([STREAM[i : i + 3] for i in range(0, len(STREAM), 3)]),
    "length": [http(STREAM, kind="text/event-stream")],
    "until close": [SSE_HEAD + b"Connection: close\r\n\r\n" + STREAM, HANG_UP],
    "http/1.0": [SSE_HEAD.replace(b"1.1", b"1.0") + b"\r\n" + STREAM, HANG_UP],
    "after 100": [b"HTTP/1.1 100 Continue\r\n\r\n", *chunked([STREAM])],
    "trailers and extensions": [
        SSE_HEAD
        + b"transfer-encoding: Chunked\r\n\r\n%x;a=b\r\n%s\r\n0\r\nX: y\r\n\r\n" % (len(STREAM), STREAM)
    ],
    "bare line feeds": [SSE_HEAD.replace(b"\r", b"") + b"Content-Length: %d\n\n" % len(STREAM) + STREAM],
    "a charset": [http(STREAM, kind="text/event-stream; charset=utf-8")],
    "no DONE": [http(STREAM.replace(b"data: [DONE]\n\n", b""), kind="text/event-stream")],
    "carriage returns": [http(STREAM.replace(b"\n", b"\r"), kind="text/event-stream")],
}


@pytest.mark.parametrize("framing", FRAMINGS)
def test_a_good_answer_is_the_same_in_every_framing(framing: str) -> None:
    for row in rows_from(FRAMINGS[framing], num_requests=2):
        assert (row.outcome, row.error, row.status) == ("ok", None, 200)
        assert (row.text, row.token_ids, row.chunk_num_tokens) == ("Hello wörld", [100, 101], [1, 1])
        assert (row.finish_reason, row.usage and row.usage.completion_tokens) == ("stop", 2)
        assert row.headers_received_ns is not None
        assert row.sent_ns < row.headers_received_ns <= row.chunk_received_ns[0] <= row.finished_ns


def test_the_wire_may_cut_anywhere() -> None:
    whole = b"".join(FRAMINGS["chunked"])
    rng = random.Random(0)
    for _ in range(10):
        cuts = sorted(rng.randrange(1, len(whole)) for _ in range(8))
        parts: list[bytes | float] = []
        for start, end in zip([0, *cuts], [*cuts, len(whole)], strict=True):
            parts += [whole[start:end], 0.002] if end > start else []
        assert [row.token_ids for row in rows_from(parts)] == [[100, 101]]


def test_an_answer_that_is_not_streamed() -> None:
    body = {"choices": [{"message": {"content": "Hi"}, "finish_reason": "length"}], "usage": usage(1)}
    case = msgspec.structs.replace(CASE, stream=False)
    [row] = rows_from([http(json.dumps(body).encode())], case=case)
    assert (row.outcome, row.text, row.finish_reason, row.chunk_num_tokens) == ("ok", "Hi", "length", [1])


def chunked_body(body: bytes) -> list[bytes]:
    return [SSE_HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + body]


ROLE = b"".join(chat_events([])[:1])
HOSTILE: dict[str, tuple[Script, str, str]] = {
    "an error reply": ([http(b'{"error": {"message": "too long"}}', status=400)], "failed", "too long"),
    "overloaded": ([http(b"busy", status=429)], "failed", "status 429: busy"),
    "a redirect": ([http(b"", status=302, extra="Location: http://x\r\n")], "failed", "status 302"),
    "an error in the stream": (chunked([ROLE, event({"error": {"message": "oom"}})]), "failed", "oom"),
    "an error as JSON": ([http(b'{"error": "nope"}')], "failed", "nope"),
    "a web page": ([http(b"<html>", kind="text/html")], "failed", "<html>"),
    "JSON in place of a stream": (
        [http(b'{"choices": [{"text": "x", "finish_reason": "stop"}]}')],
        "failed",
        "expected a text/event-stream",
    ),
    "broken JSON": (chunked([b"data: {broken\n\n"]), "failed", "expected an OpenAI-style JSON"),
    "wrong types": (chunked([event({"choices": 5})]), "failed", "expected an OpenAI-style JSON"),
    "no finish reason": (chunked([*chat_events(["a"])[:2], b"data: [DONE]\n\n"]), "failed", "finish_reason"),
    "a clean early end": (chunked(chat_events(["a"])[:2]), "failed", "finish_reason"),
    "nothing at all": ([HANG_UP], "unknown", "closed the connection"),
    "cut in a chunk": ([*chunked(chat_events(["a", "b"]))[:3], HANG_UP], "unknown", "closed the connection"),
    "cut in a length": ([http(STREAM)[:-200], HANG_UP], "unknown", "bytes too early"),
    "silence": ([], "unknown", "no whole reply within 0.4 s"),
    "silence after the start": (chunked(chat_events(["a"]))[:3], "unknown", "no whole reply"),
    "a reply without end": (chunked_body(b"4\r\n: a\n\r\n"), "unknown", "no whole"),
    "a huge reply": (chunked_body(b"200000\r\n" + b": comment\n" * 200_000), "failed", "at most 1048576"),
    "a huge event": (chunked_body(b"fffffff\r\ndata: " + b"x" * 2_000_000), "failed", "at most"),
    "a huge length": (
        [SSE_HEAD + b"Content-Length: 99999999999999999999999\r\n\r\n"],
        "failed",
        "expected a number as content-length",
    ),
    "a negative length": ([SSE_HEAD + b"Content-Length: -5\r\n\r\n"], "failed", "content-length"),
    "no HTTP": ([b"SSH-2.0-OpenSSH_9.6\r\n"], "failed", "expected an HTTP/1.1 status line"),
    "HTTP/2": ([b"HTTP/2 200\r\n\r\n"], "failed", "expected an HTTP/1.1 status line"),
    "binary noise": ([bytes(range(256)) * 40], "failed", "expected"),
    "endless headers": ([b"HTTP/1.1 200 OK\r\n" + b"X: y\r\n" * 9000], "failed", "headers of at most 4096"),
    "an endless header": ([b"HTTP/1.1 200 OK\r\nX: " + b"y" * 9000], "failed", "headers of at most 4096"),
    "a header without colon": ([b"HTTP/1.1 200 OK\r\nnonsense\r\n\r\n"], "failed", "expected a reply header"),
    "endless informational replies": ([b"HTTP/1.1 100 C\r\n\r\n" * 20], "failed", "informational"),
    "a bad chunk size": (chunked_body(b"zz\r\n"), "failed", "expected a chunk size"),
    "a negative chunk size": (chunked_body(b"-1\r\n"), "failed", "expected a chunk size"),
    "a huge chunk size": (chunked_body(b"f" * 17 + b"\r\n"), "failed", "expected a chunk size"),
    "an overlong chunk": (chunked_body(b"2\r\nabcdef\r\n"), "failed", "expected a line end after a chunk"),
    "compressed": ([http(b"x", extra="Content-Encoding: gzip\r\n")], "failed", "uncompressed"),
    "deep nesting": (chunked([b'data: {"a":' + b"[" * 50_000 + b"\n\n"]), "failed", "expected an OpenAI"),
    "an empty body": ([http(b"")], "failed", "expected an OpenAI-style"),
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_reply_becomes_a_row(name: str) -> None:
    script, outcome, error = HOSTILE[name]
    [row] = rows_from(script)
    assert row.outcome == outcome, row.error
    assert row.error is not None
    assert error in row.error
    assert len(row.error) < 1000
    assert row.finished_ns - row.sent_ns < 5e9


def test_a_reply_that_drips_for_ever_ends_in_time() -> None:
    drip: list[bytes | float] = [*chunked_body(b"")]
    drip += [part for _ in range(200) for part in (0.02, b"4\r\n: a\n\r\n")]
    [row] = rows_from(drip)
    assert (row.outcome, row.status) == ("unknown", 200)
    assert 0.3e9 < row.finished_ns - row.sent_ns < 2e9


def test_whatever_bytes_come_there_is_a_row() -> None:
    whole = b"".join(FRAMINGS["chunked"])
    for seed in range(60):
        rng = random.Random(seed)
        body = bytearray(whole)
        for _ in range(rng.randint(1, 4)):
            start = rng.randrange(len(body))
            body[start : start + rng.randint(0, 4)] = rng.randbytes(rng.randint(0, 4))
        [row] = rows_from([bytes(body), HANG_UP])
        assert row.outcome in ("ok", "failed", "unknown")


def test_no_server_is_a_failure() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]

    async def ask_nobody() -> RequestRow:
        endpoint = HttpEndpoint(f"http://127.0.0.1:{port}", model="m")
        return await ask(endpoint, CASE, clock=SystemClock(), request_id="r")

    row = asyncio.run(ask_nobody())
    assert (row.outcome, row.status, row.headers_received_ns) == ("failed", None, None)
    assert "cannot connect to 127.0.0.1" in (row.error or "")


def test_a_connection_is_reused_only_after_a_whole_answer() -> None:
    good = chunked(chat_events(["a"]))

    async def ask_two(url: str) -> list[str]:
        endpoint = HttpEndpoint(url, model="m", limits=SHORT)
        rows = [await ask(endpoint, CASE, clock=SystemClock(), request_id="r") for _ in range(2)]
        await endpoint.close()
        return [row.outcome for row in rows]

    for script, num_connections in (
        (good, 1),
        ([*good[:-1]], 2),  # the framing never ends
        ([*good, b"surplus"], 2),
        ([http(b"{}", status=500)], 1),
        ([*chunked([b"data: {broken\n\n"])], 2),  # given up in the middle
    ):
        with FakeServer({CHAT: script}) as server:
            outcomes = asyncio.run(ask_two(server.url))
            assert (server.num_connections, len(server.requests)) == (num_connections, 2), script
            assert len(set(outcomes)) == 1


def test_leaving_early_closes_the_connection() -> None:
    async def leave(url: str) -> None:
        endpoint = HttpEndpoint(url, model="m")
        async with aclosing(endpoint.stream(CASE, request_id="r")) as chunks:
            await anext(chunks)
        await asyncio.sleep(0.05)

    endless = [*chunked(chat_events(["a"]))[:3]]
    with FakeServer({CHAT: endless}) as server:
        asyncio.run(leave(server.url))
        assert server.num_lost == 1


def test_what_is_sent() -> None:
    case = Request(case_id="a", prompt=[1, 2], max_tokens=3, seed=4, logprobs=2, extra={"top_k": 5})

    async def send(url: str) -> None:
        endpoint = HttpEndpoint(f"{url}/prefix/v1/", model="m", api_key="secret", dialect=DIALECTS["vllm"])
        row = await ask(endpoint, case, clock=SystemClock(), request_id="run-a-0")
        assert row.outcome == "ok", row.error
        await endpoint.close()

    with FakeServer({"/prefix/v1/completions": chunked(chat_events(["a"]))}) as server:
        asyncio.run(send(server.url))
        head, _, body = server.requests[0].partition(b"\r\n\r\n")
    assert b"\r\nX-Request-Id: run-a-0\r\n" in head
    assert b"\r\nAuthorization: Bearer secret\r\n" in head
    assert b"\r\ntraceparent: 00-" in head
    assert json.loads(body) == {
        "model": "m", "prompt": [1, 2], "max_tokens": 3, "temperature": 0.0, "top_p": 1.0, "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        "seed": 4, "logprobs": 2, "return_token_ids": True, "top_k": 5,
    }  # fmt: skip


def test_a_plain_endpoint_gets_no_foreign_fields() -> None:
    case = msgspec.structs.replace(CASE, logprobs=3, stream=False)
    path, body = DIALECTS["openai"].body(case, model="m")
    assert path == CHAT
    assert set(body) == {
        "model", "messages", "max_tokens", "temperature", "top_p", "stream", "logprobs", "top_logprobs",
    }  # fmt: skip


IDENTITY = Identity(
    model="tiny", engine="firstdiff", engine_version="1", instance_id="i", weights_sha256="w",
    config_sha256="c", tokenizer_sha256="t", chat_template_sha256=None, engine_config_sha256="e",
    engine_config={}, dtype="fp32", device="cpu", vocab_size=77, max_model_len=512, versions={},
)  # fmt: skip


def models(*entries: tuple[str, str | None]) -> bytes:
    return http(json.dumps({"data": [{"id": id_, "owned_by": owner} for id_, owner in entries]}).encode())


@pytest.mark.parametrize(
    ("owner", "identity", "dialect"),
    [
        ("vllm", None, "vllm"),
        ("sglang", None, "sglang"),
        ("llamacpp", None, "llama.cpp"),
        ("openai", None, "openai"),
        (None, None, "openai"),
        ("firstdiff", IDENTITY, "firstdiff"),
        ("me", IDENTITY, "firstdiff"),
    ],
)
def test_an_endpoint_tells_what_it_is(owner: str | None, identity: Identity | None, dialect: str) -> None:
    scripts = {"/v1/models": [models(("first", owner), ("second", owner))]}
    if identity is not None:
        scripts["/v1/firstdiff/identity"] = [http(msgspec.json.encode(identity))]
    with FakeServer(scripts) as server:
        endpoint = asyncio.run(HttpEndpoint.connect(server.url))
        assert (endpoint.model, endpoint.dialect.name, endpoint.identity) == ("first", dialect, identity)
        assert asyncio.run(HttpEndpoint.connect(server.url, model="second")).model == "second"
        forced = asyncio.run(HttpEndpoint.connect(server.url, dialect="vllm"))
        assert forced.dialect.name == "vllm"


@pytest.mark.parametrize(
    ("script", "kind", "message"),
    [
        ([models()], ValueError, "expected a model at .* name one with --model"),
        ([models(("other", None))], ValueError, r"lists \(other\), got 'mine'"),
        ([http(b"[1, 2")], ValueError, "expected a list of models"),
        ([http(b"", status=404)], ValueError, "got status 404"),
        ([http(b"down", status=503)], EndpointError, "got status 503: down"),
    ],
)
def test_an_endpoint_that_cannot_be_used_says_why(
    script: Script, kind: type[Exception], message: str
) -> None:
    with FakeServer({"/v1/models": script}) as server, pytest.raises(kind, match=message):
        asyncio.run(HttpEndpoint.connect(server.url, model=None if "name one" in message else "mine"))


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("localhost:8000", "expected a URL like"),
        ("ftp://x", "expected a URL like"),
        ("http://", "expected a URL like"),
        ("http://x:99999", "expected a URL like"),
        ("http://x?y=1", "expected a URL like"),
        ("http://x/a b", "expected a path of printable ASCII"),
    ],
)
def test_a_wrong_url_is_refused(url: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        HttpEndpoint(url, model="m")


def test_other_settings_out_of_bounds_are_refused() -> None:
    with pytest.raises(ValueError, match="expected a timeout above 0"):
        HttpEndpoint("http://x", model="m", timeout_s=0)
    with pytest.raises(ValueError, match="expected an API key"):
        HttpEndpoint("http://x", model="m", api_key="a\r\nHost: evil")
    with pytest.raises(ValueError, match="expected a dialect out of"):
        asyncio.run(HttpEndpoint.connect("http://x", dialect="klingon"))
