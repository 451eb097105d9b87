"""`firstdiff jaeger`: the shapes that Jaeger documents, while files grow, until a signal."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import quote, urlencode

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))
from ledger_rows import http_row, log_row
from span_samples import FIRST, SECOND, SERVER, T0, answer, first_trace, second_trace, span

from firstdiff.harness.jaeger_facade import serve_traces
from firstdiff.tracing.otlp_json import decode_traces, encode_traces
from firstdiff.tracing.request_spans import answer_spans, http_span
from firstdiff.tracing.trace_set import read_source

RANGE = {"query.startTimeMin": "2026-11-01T00:00:00Z", "query.startTimeMax": "2026-12-31T00:00:00.000Z"}
EVER = {"query.startTimeMin": "1970-01-01T00:00:00Z", "query.startTimeMax": "2200-01-01T00:00:00Z"}


@contextmanager
def facade(*sources: Path, ui: Path | None = None) -> Iterator[str]:
    """The URL of a facade in a thread of this process."""
    ready: list[object] = []
    started = threading.Event()

    async def serve() -> None:
        until = asyncio.Event()

        def announce(url: str, num_traces: int) -> None:
            ready.extend([url, until, asyncio.get_running_loop()])
            started.set()

        await serve_traces(sources, port=0, ui=ui, announce=announce, until=until)

    thread = threading.Thread(target=asyncio.run, args=(serve(),))
    thread.start()
    assert started.wait(10)
    url, until, loop = ready
    try:
        yield url
    finally:
        loop.call_soon_threadsafe(until.set)
        thread.join(10)
        assert not thread.is_alive()


def write_spans(path: Path, *traces) -> Path:
    path.mkdir(exist_ok=True)
    with (path / "spans.jsonl").open("ab") as file:
        for spans in traces:
            file.write(encode_traces(spans) + b"\n")
    return path


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with facade(write_spans(tmp_path_factory.mktemp("run"), first_trace(), second_trace())) as url:
        yield url


def ask(url: str, path: str, query: object = None, *, data: bytes | None = None) -> tuple[int, bytes]:
    whole = f"{url}{path}" + (f"?{urlencode(query)}" if query else "")
    try:
        with urllib.request.urlopen(urllib.request.Request(whole, data), timeout=10) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read()


def ask_json(*arguments, **named):
    status, body = ask(*arguments, **named)
    assert status == 200, body
    return json.loads(body)


def found_ids(url, **query):
    body = ask_json(
        url, "/api/v3/trace-summaries", RANGE | {f"query.{key}": text for key, text in query.items()}
    )
    return [summary["traceId"] for summary in body["summaries"]]


def test_services_and_operations_have_the_documented_shape(url):
    assert ask_json(url, "/api/v3/services") == {"services": ["firstdiff", "firstdiff-client", "other"]}
    both = [{"name": "GET /", "spanKind": "server"}, {"name": "step", "spanKind": "internal"}]
    assert ask_json(url, "/api/v3/operations", {"service": "other"}) == {"operations": both}
    server = {"service": "other", "spanKind": "server"}
    assert ask_json(url, "/api/v3/operations", server) == {"operations": both[:1]}
    assert ask_json(url, "/api/v3/operations", {"service": "none"}) == {"operations": []}


def test_summaries_have_the_documented_shape(url):
    body = ask_json(url, "/api/v3/trace-summaries", RANGE)
    assert body["summaries"][0] == {
        "traceId": SECOND,
        "rootServiceName": "other",
        "rootOperationName": "GET /",
        "minStartTimeUnixNano": str(T0 + 10**9),
        "maxEndTimeUnixNano": str(T0 + 3 * 10**9),
        "spanCount": 2,
        "errorSpanCount": 1,
        "orphanSpanCount": 0,
        "services": [{"name": "other", "spanCount": 2, "errorSpanCount": 1}],
    }
    first = body["summaries"][1]
    assert (first["rootServiceName"], first["rootOperationName"]) == ("firstdiff-client", "chat m")
    assert [service["spanCount"] for service in first["services"]] == [4, 1]


def test_a_trace_has_the_documented_shape(url):
    body = ask_json(url, f"/api/v3/traces/{SECOND}")
    (group,) = body["result"]["resourceSpans"]
    assert group["resource"]["attributes"] == [{"key": "service.name", "value": {"stringValue": "other"}}]
    (scope,) = group["scopeSpans"]
    root, step = scope["spans"]
    assert root == {
        "traceId": SECOND,
        "spanId": "0000000000000001",
        "name": "GET /",
        "flags": 1,
        "kind": 2,
        "startTimeUnixNano": str(T0 + 10**9),
        "endTimeUnixNano": str(T0 + 3 * 10**9),
        "status": {"message": "boom", "code": 2},
    }
    assert step["parentSpanId"] == root["spanId"]
    assert step["attributes"] == [
        {"key": "n", "value": {"intValue": "3"}},
        {"key": "who", "value": {"stringValue": "x"}},
    ]
    assert (
        decode_traces(ask(url, "/api/v3/traces", RANGE | {"query.serviceName": "firstdiff"})[1])[0].trace_id
        == FIRST
    )


VALUE_KEYS = {
    "stringValue": str,
    "boolValue": bool,
    "intValue": str,
    "doubleValue": int | float,
    "arrayValue": dict,
}


def check_value(value: dict[str, object]) -> None:
    """Exactly one field, an integer as a decimal string: Jaeger's UI refuses the whole trace otherwise."""
    ((key, content),) = value.items()
    assert isinstance(content, VALUE_KEYS[key])
    if key == "intValue":
        assert -(1 << 63) <= int(content) < 1 << 63
    if key == "arrayValue":
        for item in content["values"]:
            check_value(item)


def test_what_jaegers_ui_checks_of_a_trace(tmp_path):
    """The refinements of its `schemas.ts`: ids, times, values, no parent rather than an empty one."""
    row = log_row()
    spans = [http_span(http_row()), *answer_spans(row, model="m")]
    with facade(write_spans(tmp_path / "run", spans)) as url:
        body = ask_json(url, f"/api/v3/traces/{spans[0].trace_id}")
        (summary,) = ask_json(url, "/api/v3/trace-summaries", EVER)["summaries"]
    assert re.fullmatch("(?!0+$)[0-9a-f]{32}", summary["traceId"])
    for group in body["result"]["resourceSpans"]:
        attributes = list(group["resource"]["attributes"])
        for scope in group["scopeSpans"]:
            assert isinstance(scope["scope"].get("name", ""), str)
            for one in scope["spans"]:
                assert re.fullmatch("(?!0+$)[0-9a-f]{32}", one["traceId"])
                assert re.fullmatch("(?!0+$)[0-9a-f]{16}", one["spanId"])
                assert re.fullmatch("(?!0+$)[0-9a-f]{16}", one.get("parentSpanId", "1" * 16))
                assert 0 <= int(one["startTimeUnixNano"]) <= int(one["endTimeUnixNano"]) < 1 << 64
                assert one["startTimeUnixNano"].isdigit()
                assert one["endTimeUnixNano"].isdigit()
                assert one["kind"] >= 0
                assert one.get("status", {}).get("code", 0) in (0, 2)
                attributes += one.get("attributes", [])
    assert len(attributes) > 20
    for attribute in attributes:
        assert set(attribute) == {"key", "value"}
        check_value(attribute["value"])


def test_jaegers_own_json(url):
    body = ask_json(url, f"/api/traces/{SECOND.upper()}")
    assert (body["total"], body["limit"], body["offset"], body["errors"]) == (0, 0, 0, None)
    (trace,) = body["data"]
    assert (trace["traceID"], trace["warnings"]) == (SECOND, None)
    assert trace["processes"] == {"p1": {"serviceName": "other", "tags": []}}
    step = trace["spans"][1]
    assert step["references"] == [{"refType": "CHILD_OF", "traceID": SECOND, "spanID": "0000000000000001"}]
    assert (step["startTime"], step["duration"]) == ((T0 + 10**9) // 1000, 1000)


@pytest.mark.parametrize(
    ("query", "ids"),
    [
        ({}, [SECOND, FIRST]),
        ({"searchDepth": "1"}, [SECOND]),
        ({"num_traces": "1"}, [SECOND]),
        ({"serviceName": "firstdiff"}, [FIRST]),
        ({"service_name": "other"}, [SECOND]),
        ({"serviceName": "other", "operationName": "step"}, [SECOND]),
        ({"serviceName": "firstdiff", "operationName": "step"}, []),
        ({"span_name": "queue"}, [FIRST]),
        ({"durationMin": "1.5s"}, [SECOND]),
        ({"duration_max": "500us"}, [FIRST]),
        ({"durationMin": "1h2m"}, []),
        ({"attributes": '{"who": "x", "n": "3"}'}, [SECOND]),
        ({"attributes": '{"who": "x", "http.response.status_code": "200"}'}, []),
        ({"attributes": '{"service.instance.id": "i1"}'}, [FIRST]),
        ({"attributes": '{"error": "true"}'}, [SECOND]),
        ({"startTimeMin": "2026-11-30T00:53:21Z"}, [SECOND]),
        ({"startTimeMax": "2026-11-30T01:53:20.999999999+01:00"}, [FIRST]),
        ({"startTimeMin": "2026-11-30T00:53:21.000000006Z"}, []),
    ],
)  # fmt: skip
def test_search_finds_what_is_asked(url, query, ids):
    assert found_ids(url, **query) == ids


@pytest.mark.parametrize(
    ("path", "query", "status", "message"),
    [
        ("traces", {}, 400, "query.startTimeMin and query.startTimeMax are required"),
        ("trace-summaries", {"query.startTimeMin": "2026-11-30T00:00:00Z"}, 400, "are required"),
        (
            "traces",
            RANGE | {"query.startTimeMin": "yesterday"},
            400,
            "malformed parameter query.startTimeMin: ",
        ),
        ("traces", RANGE | {"query.startTimeMin": "2026-13-40T00:00:00Z"}, 400, "malformed parameter"),
        ("traces", RANGE | {"query.durationMin": "1 s"}, 400, "malformed parameter query.durationMin: "),
        (
            "traces",
            RANGE | {"query.durationMax": "9" * 18 + "h"},
            400,
            "malformed parameter query.durationMax: ",
        ),
        ("traces", RANGE | {"query.search_depth": "-1"}, 400, "malformed parameter query.search_depth: "),
        ("traces", RANGE | {"query.searchDepth": "10001"}, 400, "malformed parameter query.searchDepth: "),
        ("traces", RANGE | {"query.attributes": "{"}, 400, "malformed parameter query.attributes: "),
        ("traces", RANGE | {"query.attributes": '{"a": 1}'}, 400, "malformed parameter query.attributes: "),
        ("traces", RANGE | {"query.serviceName": "nobody"}, 404, "No traces found"),
        ("traces/xyz", {}, 400, "malformed parameter trace_id"),
        ("traces/" + "1" * 33, {}, 400, "malformed parameter trace_id"),
        ("traces/1", {}, 404, "No traces found"),
        ("nothing", {}, 404, "no such path"),
    ],
)
def test_errors_have_the_documented_shape(url, path, query, status, message):
    found, body = ask(url, f"/api/v3/{path}", query)
    error = json.loads(body)["error"]
    assert (found, error["httpCode"], set(error)) == (status, status, {"httpCode", "message"})
    assert message in error["message"]


def test_the_api_before_v3(url):
    assert ask_json(url, "/api/services")["data"] == ["firstdiff", "firstdiff-client", "other"]
    assert ask_json(url, "/api/services/other/operations")["data"] == ["GET /", "step"]
    operations = ask_json(url, "/api/operations", {"service": "other", "spanKind": "server"})["data"]
    assert operations == [{"name": "GET /", "spanKind": "server"}]
    at_us = {"start": T0 // 1000, "end": (T0 + 10**10) // 1000}
    asked = {"service": "other", "operation": "step", "tags": '{"who":"x"}', "limit": 5, "minDuration": "1ms"}
    assert [trace["traceID"] for trace in ask_json(url, "/api/traces", at_us | asked)["data"]] == [SECOND]
    by_id = ask_json(url, "/api/traces", [("traceID", FIRST), ("traceID", SECOND), ("traceID", "9")])
    assert [trace["traceID"] for trace in by_id["data"]] == [FIRST, SECOND]
    for path, status, message in [
        ("/api/traces", 400, "parameter 'service' is required"),
        ("/api/traces?service=x&start=soon", 400, "malformed parameter start"),
        ("/api/traces?service=x&limit=0", 400, "malformed parameter limit"),
        ("/api/traces?service=x&minDuration=long", 400, "malformed parameter minDuration"),
        ("/api/operations", 400, "parameter 'service' is required"),
        ("/api/traces/77", 404, "trace not found"),
    ]:
        found, body = ask(url, path)
        answer = json.loads(body)
        assert (found, answer["data"], answer["errors"][0]["code"]) == (status, None, status)
        assert message in answer["errors"][0]["msg"]


def test_what_the_ui_uploads_is_transformed(url):
    body = ask_json(url, "/api/transform", data=encode_traces(first_trace()))
    assert body["data"][0]["traceID"] == FIRST
    assert ask(url, "/api/transform", data=b"nonsense")[0] == 400


def test_new_lines_are_seen_and_half_ones_are_not(tmp_path):
    run = write_spans(tmp_path / "run", first_trace())
    other = tmp_path / "other.json"
    other.write_bytes(encode_traces([span("x", 1, trace_id="c" * 32)]))
    with facade(run, other) as url:
        assert sorted(found_ids(url)) == [FIRST, "c" * 32]
        line = encode_traces(second_trace()) + b"\n"
        with (run / "spans.jsonl").open("ab", buffering=0) as file:
            file.write(line[:40])
            assert SECOND not in found_ids(url)
            file.write(line[40:])
            assert SECOND in found_ids(url)
            # One more span of a trace that is there already.
            file.write(encode_traces([answer(span_id=9, parent=2, request_id="r2")]) + b"\n")
        assert len(ask_json(url, f"/api/traces/{FIRST}")["data"][0]["spans"]) == 6
        with (run / "spans.jsonl").open("ab", buffering=0) as file:
            file.write(b"nonsense\n")
        status, body = ask(url, "/api/v3/services")
        assert (status, json.loads(body)["error"]["httpCode"]) == (500, 500)
        (run / "spans.jsonl").write_bytes(line)
        assert sorted(found_ids(url)) == [SECOND, "c" * 32]


def test_a_ui_is_served_and_nothing_else(tmp_path):
    ui = tmp_path / "ui"
    (ui / "static").mkdir(parents=True)
    (ui / "index.html").write_text("<title>index</title>")
    (ui / "static" / "app.js").write_text("app")
    (tmp_path / "secret").write_text("secret")
    with facade(write_spans(tmp_path / "run", first_trace()), ui=ui) as url:
        for path in ("/", "/search?service=x", f"/trace/{FIRST}...{SECOND}", "/../secret", "/%2e%2e/secret"):
            assert ask(url, path) == (200, b"<title>index</title>")
        assert ask(url, "/static/app.js") == (200, b"app")
        assert ask(url, "/static/none.js")[0] == 404
        assert b"secret" not in ask(url, "/" + quote("../secret", safe=""))[1]
    with facade(tmp_path / "run") as url:
        assert ask(url, "/")[0] == 404


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_command_serves_until_a_signal(tmp_path, number):
    run = write_spans(tmp_path / "run", first_trace())
    command = [sys.executable, "-m", "firstdiff.harness.cli", "jaeger", str(run), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        line = process.stdout.readline()
        assert line.startswith("firstdiff: Jaeger's API (traces so far: 1) on http://127.0.0.1:")
        assert found_ids(line.split()[-1]) == [FIRST]
        process.send_signal(number)
        assert process.wait(10) == 0
        assert process.stderr.read() == ""


def test_what_is_served_reads_back(url, tmp_path):
    """The file that a browser would save of either generation holds the same spans."""
    for path in (f"/api/v3/traces/{FIRST}", f"/api/traces/{FIRST}"):
        file = tmp_path / "saved.json"
        file.write_bytes(ask(url, path)[1])
        spans = read_source(file)
        assert {one.name for one in spans} == {one.name for one in first_trace()}
        assert {one.resource["service.name"] for one in spans} == {"firstdiff-client", SERVER["service.name"]}
