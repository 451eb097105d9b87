"""`firstdiff trace fetch`: our own facade, fakes of both generations of Jaeger's API, hostile answers."""

from __future__ import annotations

import asyncio
import json
import sys
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import pytest

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))
from span_samples import FIRST, SECOND, first_trace, second_trace
from test_jaeger_facade import facade, write_spans

from firstdiff.harness.jaeger_fetch import FetchQuery, fetch_traces
from firstdiff.harness.wire import EndpointError
from firstdiff.tracing.jaeger_json import encode_jaeger
from firstdiff.tracing.otlp_json import encode_traces
from firstdiff.tracing.trace_set import group_traces, read_traces

Command = Callable[..., tuple[int, str, str]]
SPAN = ["--since", "2026-11-01T00:00:00Z", "--until", "2026-12-31T00:00:00Z"]
UI_PAGE = (200, b"<!doctype html><title>Jaeger UI</title>")


@pytest.fixture
def firstdiff(firstdiff: Command) -> Command:
    """Without the lines of progress, which are as many as the machine is slow."""

    def command(*arguments: object) -> tuple[int, str, str]:
        code, out, err = firstdiff(*arguments)
        lines = err.splitlines(keepends=True)
        return code, out, "".join(line for line in lines if not line.startswith("fetching: "))

    return command


class FakeJaeger:
    """Answers given paths; the first that is a prefix of what is asked counts. `asked` keeps the queries."""

    def __init__(self, answers: dict[str, object]) -> None:
        self.asked: list[tuple[str, dict[str, list[str]]]] = []
        fake = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                parts = urlsplit(self.path)
                fake.asked.append((parts.path, parse_qs(parts.query)))
                known = (answers[path] for path in answers if parts.path.startswith(path))
                status, body = next(known, (404, b"not found"))
                self.send_response(status)
                self.send_header("Location", "/elsewhere")
                self.end_headers()
                self.wfile.write(body() if callable(body) else body)

            def log_message(self, *arguments: object) -> None: ...

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))

    def __enter__(self) -> FakeJaeger:
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        return self

    def __exit__(self, *error: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def names_by_trace(path: Path) -> dict[str, list[str]]:
    return {trace.trace_id: [span.name for _, span in trace.walk()] for trace in read_traces([path])}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_spans(tmp_path_factory.mktemp("run"), first_trace(), second_trace())


@pytest.fixture(scope="module")
def url(run: Path) -> Iterator[str]:
    with facade(run) as url:
        yield url


def test_everything_comes_back_exactly(firstdiff, url, run, tmp_path):
    code, out, error = firstdiff("trace", "fetch", url, "--out", tmp_path / "got", *SPAN)
    assert (code, out, error) == (0, f"{tmp_path / 'got'}: 2 traces\n", "")
    traces, expected = (read_traces([path]) for path in (tmp_path / "got", run))
    assert [trace.spans for trace in traces] == [trace.spans for trace in expected]
    assert len(firstdiff("trace", "list", tmp_path / "got")[1].splitlines()) == 4


@pytest.mark.parametrize(
    ("options", "ids"),
    [
        (["--service", "other"], {SECOND}),
        (["--service", "firstdiff", "--operation", "queue"], {FIRST}),
        (["--operation", "step"], {SECOND}),
        (["--limit", "1"], {SECOND}),
    ],
)
def test_filters(firstdiff, url, tmp_path, options, ids):
    code, _, error = firstdiff("trace", "fetch", url, "--out", tmp_path / "got", *SPAN, *options)
    assert code == 0
    assert set(names_by_trace(tmp_path / "got")) == ids
    assert ("only the newest 1 were asked for" in error) == ("--limit" in options)


def test_time_ranges(firstdiff, url, tmp_path):
    early = ["--until", "2026-11-30T00:53:20.5Z", "--last", "10m"]
    assert firstdiff("trace", "fetch", url, "--out", tmp_path / "got", *early)[0] == 0
    assert set(names_by_trace(tmp_path / "got")) == {FIRST}
    code, _, error = firstdiff(
        "trace", "fetch", url, "--out", tmp_path / "no", "--until", "2026-11-01T00:00:00Z"
    )
    assert code == 4
    assert error == (
        f"firstdiff: expected traces from {url}, got none: try another --service, or a longer --last\n"
    )
    assert not (tmp_path / "no").exists()


def v3_answer(*traces) -> bytes:
    return b'{"result":' + encode_traces([span for spans in traces for span in spans]) + b"}"


LEGACY = {
    "/api/services": (200, b'{"data":["other","firstdiff"],"total":2,"limit":0,"offset":0,"errors":null}'),
    "/api/traces": (200, encode_jaeger([first_trace(), second_trace()])),
}
V3 = {
    "/api/v3/services": (200, b'{"services":["other","firstdiff"]}'),
    f"/api/v3/traces/{FIRST}": (200, v3_answer(first_trace())),
    f"/api/v3/traces/{SECOND}": (200, v3_answer(second_trace())),
    "/api/v3/traces": (200, v3_answer(first_trace(), second_trace())),
}
SUMMARIES = {"summaries": [{"traceId": SECOND, "minStartTimeUnixNano": "2"}, {"traceId": FIRST}]}
WITH_SUMMARIES = V3 | {"/api/v3/trace-summaries": (200, json.dumps(SUMMARIES).encode())}
STREAMED = v3_answer(first_trace()) + b"\n" + v3_answer(second_trace()) + b"\n"


@pytest.mark.parametrize(
    ("answers", "last_path"),
    [
        pytest.param(WITH_SUMMARIES, "/api/v3/traces/", id="v3"),
        pytest.param(V3, "/api/v3/traces", id="v3 before summaries"),
        pytest.param(V3 | {"/api/v3/trace-summaries": UI_PAGE}, "/api/v3/traces", id="v3, ui for the rest"),
        pytest.param(V3 | {"/api/v3/traces": (200, STREAMED)}, "/api/v3/traces", id="v3, streamed"),
        pytest.param(LEGACY, "/api/traces", id="legacy"),
        pytest.param({"/api/v3": UI_PAGE} | LEGACY, "/api/traces", id="legacy, ui for the rest"),
    ],
)
def test_both_generations(firstdiff, tmp_path, answers, last_path):
    with FakeJaeger(answers) as fake:
        code, _, error = firstdiff("trace", "fetch", fake.url, "--out", tmp_path / "got", *SPAN)
    assert (code, error) == (0, "")
    expected = {trace.trace_id: [span.name for _, span in trace.walk()]
                for trace in group_traces([*first_trace(), *second_trace()])}  # fmt: skip
    assert names_by_trace(tmp_path / "got") == expected
    assert fake.asked[-1][0].startswith(last_path)


def test_what_is_asked_is_as_documented(firstdiff, tmp_path):
    options = [*SPAN, "--service", "other", "--operation", "step", "--limit", "7", "--out"]
    with FakeJaeger(WITH_SUMMARIES) as fake:
        assert firstdiff("trace", "fetch", fake.url + "/", *options, tmp_path / "v3")[0] == 0
    assert ("/api/v3/trace-summaries", {
        "query.serviceName": ["other"],
        "query.operationName": ["step"],
        "query.startTimeMin": ["2026-11-01T00:00:00.000000000Z"],
        "query.startTimeMax": ["2026-12-31T00:00:00.000000000Z"],
        "query.searchDepth": ["7"],
    }) in fake.asked  # fmt: skip
    with FakeJaeger(LEGACY) as fake:
        assert firstdiff("trace", "fetch", fake.url, *options, tmp_path / "legacy")[0] == 0
    assert fake.asked[-1] == ("/api/traces", {
        "service": ["other"],
        "operation": ["step"],
        "start": ["1793491200000000"],
        "end": ["1798675200000000"],
        "limit": ["7"],
    })  # fmt: skip


SERVICES = {"/api/v3/services": (200, b'{"services":["s"]}')}
MANY_SERVICES = b'{"services":[' + b'"s",' * 1000 + b'"s"]}'


def summaries(content: bytes) -> dict[str, object]:
    return {"/api/v3/trace-summaries": (200, b'{"summaries":' + content + b"}")}


ID = summaries(b'[{"traceId":"' + FIRST.encode() + b'"}]')


def slowly() -> bytes:
    time.sleep(1)
    return b"{}"


@pytest.mark.parametrize(
    ("answers", "error"),
    [
        ({}, "/api/services, got status 404: not found"),
        ({"/api": (500, b'{"error":{"httpCode":500,"message":"no storage"}}')}, "got status 500: no storage"),
        ({"/api": (302, b"")}, "/api/v3/services, got status 302"),
        ({"/api": (200, b"nonsense")}, "got JSON is malformed"),
        ({"/api": (200, b"[" * 100_000)}, "/api/services, got "),
        ({"/api": (200, slowly)}, "got nothing within the time-out"),
        ({"/api/v3/services": (200, MANY_SERVICES)}, "got 1001 services: name one"),
        (SERVICES | summaries(b"7"), "got Expected `array`, got `int`"),
        (SERVICES | summaries(b'[{"traceId":"../x"}]'), "a trace id that is none: '../x'"),
        (SERVICES | ID | {"/api/v3/traces": (200, b"nonsense")}, "got expected traces as OTLP JSON"),
        (SERVICES | ID | {"/api/v3/traces": (200, v3_answer(second_trace()))}, "got spans of another trace"),
        (SERVICES | ID | {"/api/v3/traces": (400, b"bad")}, "got status 400: bad"),
        (LEGACY | {"/api/traces": (200, b'{"data":[{"\x1b[2J":1}]}')}, "got expected traces as Jaeger's"),
        (LEGACY | {"/api/services": (200, b'{"data":7}')}, "/api/services, got Expected"),
    ],
)  # fmt: skip
def test_hostile_answers_are_one_line(firstdiff, tmp_path, answers, error):
    out = tmp_path / "got"
    with FakeJaeger(answers) as fake:
        code, printed, err = firstdiff("trace", "fetch", fake.url, "--out", out, "--timeout", "0.5", *SPAN)
    assert (code, printed, err.count("\n")) == (4, "", 1)
    assert err.startswith(f"firstdiff: expected a Jaeger's answer from {fake.url}/api")
    assert error in err
    assert "\x1b" not in err
    assert not out.exists()


@pytest.mark.parametrize("spare", [0, -1])
def test_an_answer_is_read_up_to_a_limit(spare):
    query = FetchQuery(start_unix_ns=0, end_unix_ns=1, num_traces=5, service="s")
    longest = max(len(body) for _, body in LEGACY.values())

    async def number_of_traces(url: str) -> int:
        found = fetch_traces(url, query, report=lambda done, total: None, max_answer_bytes=longest + spare)
        return len([spans async for spans in found])

    with FakeJaeger(LEGACY) as fake:
        if spare == 0:
            assert asyncio.run(number_of_traces(fake.url)) == 2
            return
        with pytest.raises(EndpointError, match="got more than is read: ask for less with --limit or --last"):
            asyncio.run(number_of_traces(fake.url))


def test_no_jaeger_at_all(firstdiff, tmp_path):
    with FakeJaeger({}) as fake:
        pass
    code, _, error = firstdiff("trace", "fetch", fake.url, "--out", tmp_path / "got")
    assert (code, error.count("\n")) == (4, 1)
    assert "Cannot connect" in error


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["ftp://x"], "expected a Jaeger's URL like http://127.0.0.1:16686, got 'ftp://x'"),
        (["http://user:secret@x"], "expected a Jaeger's URL"),
        (["http://x", "--limit", "0"], "expected --limit in 1..100000, got 0"),
        (["http://x", "--since", "monday"], "cannot parse 'monday' as a time like 2026-12-01T12:00:00Z"),
        (["http://x", "--last", "1d"], "cannot parse '1d' as a duration like 1.5s or 100ms"),
        (
            ["http://x", "--last", "1h", "--since", "2026-12-01T12:00:00Z"],
            "expected --since or --last, got both",
        ),
        (
            ["http://x", "--since", "2026-12-02T00:00:00Z", "--until", "2026-12-01T00:00:00Z"],
            "must lie before",
        ),
        (["http://x", "--timeout", "0"], "'--timeout'"),
    ],
)
def test_mistakes_are_one_line(firstdiff, tmp_path, arguments, error):
    code, out, err = firstdiff("trace", "fetch", *arguments, "--out", tmp_path / "got")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert error in err


def test_a_folder_with_spans_is_not_written_over(firstdiff, url, run):
    before = (run / "spans.jsonl").read_bytes()
    code, _, error = firstdiff("trace", "fetch", url, "--out", run, *SPAN)
    assert (code, (run / "spans.jsonl").read_bytes()) == (2, before)
    assert "which holds spans: choose another" in error
