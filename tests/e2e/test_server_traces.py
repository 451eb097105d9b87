"""What a server remembers of each HTTP request as a trace: one tree, no orphan, however it went."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection
from pathlib import Path
from threading import Event
from urllib.parse import urlsplit

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from scripted_server import MODEL, Script, ServerUnderTest, scripted_server, spell

from firstdiff.harness import cli
from firstdiff.tracing.lines import read_lines
from firstdiff.tracing.records import HttpRow, decode_row
from firstdiff.tracing.request_spans import NUM_SPANS_MAX, answer_spans, http_span
from firstdiff.tracing.span_file import read_spans
from firstdiff.tracing.span_record import SpanRecord
from firstdiff.tracing.token_log import read_token_log

COMPLETIONS = "/v1/completions"
CALLER = ("4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7")
BODY = {"model": MODEL, "prompt": "hi", "max_tokens": 4}


def http_rows(folder: Path) -> list[HttpRow]:
    return [decode_row(line, HttpRow) for line in read_lines(folder / "http.jsonl")]


def tree_of(spans: list[SpanRecord], *, caller: str | None = None) -> dict[str, list[str]]:
    """Children's names by parent's name; AssertionError unless it is one tree below `caller`."""
    by_id = {span.span_id: span for span in spans}
    assert len(by_id) == len(spans), "an id twice"
    assert len({span.trace_id for span in spans}) == 1, "more than one trace"
    tree: dict[str, list[str]] = {}
    for span in spans:
        if span.parent_span_id == caller:
            assert span.kind == "server"
            tree.setdefault("", []).append(span.name)
        else:
            assert span.parent_span_id in by_id, f"{span.name} is an orphan"
            tree.setdefault(by_id[span.parent_span_id].name, []).append(span.name)
    return tree


@pytest.mark.parametrize(
    ("traceparent", "tracestate", "joins", "is_sampled"),
    [
        (None, None, False, True),
        (f"00-{CALLER[0]}-{CALLER[1]}-01", "a=1", True, True),
        (f"00-{CALLER[0]}-{CALLER[1]}-03", "a=" + "x" * 1000, True, True),
        (f"00-{CALLER[0]}-{CALLER[1]}-00", None, True, False),
        (f"00-{CALLER[0].upper()}-{CALLER[1]}-01", None, False, True),
        (f"00-{'0' * 32}-{CALLER[1]}-01", "a=1", False, True),
        ("garbage", "a=1", False, True),
        (f"00-{CALLER[0]}-{CALLER[1]}-01-more", None, False, True),
        (f"cc-{CALLER[0]}-{CALLER[1]}-01-more", None, True, True),
    ],
    ids=["none", "valid", "oversize state", "unsampled", "upper", "zero", "garbage", "too long", "newer"],
)
def test_every_traceparent_gives_one_tree(
    tmp_path: Path, traceparent: str | None, tracestate: str | None, joins: bool, is_sampled: bool
) -> None:
    headers = {"traceparent": traceparent, "tracestate": tracestate}
    sent = {name: value for name, value in headers.items() if value is not None}
    with scripted_server(Script(spell("word ")), log_dir=tmp_path) as server:
        assert server.request("POST", COMPLETIONS, BODY, sent)[0] == 200
    (row,) = http_rows(tmp_path)
    assert (row.trace_id == CALLER[0], row.parent_span_id) == (joins, CALLER[1] if joins else None)
    assert row.tracestate == ("a=1" if joins and tracestate == "a=1" else "")
    spans = read_spans(tmp_path)
    if not is_sampled:
        assert spans == []
        return
    tree = tree_of(spans, caller=CALLER[1] if joins else None)
    assert tree == {
        "": ["POST /v1/completions"],
        "POST /v1/completions": [f"text_completion {MODEL}"],
        f"text_completion {MODEL}": ["tokenize", "queue", "prefill", "decode", "stream"],
    }
    assert {span.tracestate for span in spans} == {row.tracestate}


def test_all_answers_of_a_request_are_in_its_tree(tmp_path: Path) -> None:
    with scripted_server(Script(spell("word ")), log_dir=tmp_path) as server:
        server.post(COMPLETIONS, prompt=["a", "b"], n=3, max_tokens=2)
    tree = tree_of(read_spans(tmp_path))
    assert tree["POST /v1/completions"] == [f"text_completion {MODEL}"] * 6
    assert http_rows(tmp_path)[0].num_answers == 6


def refuse(server: ServerUnderTest, _: Script) -> None:
    assert server.refusal(COMPLETIONS, BODY | {"max_tokens": -1})[0] == 400


def ask_another_model(server: ServerUnderTest, _: Script) -> None:
    assert server.refusal(COMPLETIONS, BODY | {"model": "no"})[0] == 404


def ask_too_much(server: ServerUnderTest, _: Script) -> None:
    assert server.refusal(COMPLETIONS, BODY | {"prompt": "x" * 200_000})[0] == 413


def ask_without_a_key(server: ServerUnderTest, _: Script) -> None:
    assert server.request("POST", COMPLETIONS, BODY, {"Authorization": "Bearer no"})[0] == 401


def leave(server: ServerUnderTest, script: Script) -> None:
    script.gate.clear()
    connection = HTTPConnection(urlsplit(server.url).netloc, timeout=20)
    # Steps long enough that the engine hears of it before the answer has ended.
    script.step_s = 0.02
    connection.request("POST", COMPLETIONS, json.dumps(BODY | {"max_tokens": 200}))
    wait_until(lambda: script.is_waiting)
    connection.close()
    script.gate.set()


def abort(server: ServerUnderTest, script: Script) -> None:
    script.gate.clear()
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(server.request, "POST", COMPLETIONS, BODY, {"X-Request-Id": "mine"})
        wait_until(lambda: script.is_waiting)
        assert server.request("POST", "/abort", {"request_id": "mine"})[0] == 200
        script.gate.set()
        assert asked.result(20)[0] == 200


def wait_until(condition: Callable[[], bool]) -> None:
    for _ in range(2000):
        if condition():
            return
        Event().wait(0.01)
    raise AssertionError("waited for 20 s")


@pytest.mark.parametrize(
    ("deed", "status", "error_type", "num_answers"),
    [
        (refuse, 400, "400", 0),
        (ask_another_model, 404, "model_not_found", 0),
        (ask_too_much, 413, "body_too_large", 0),
        (ask_without_a_key, 401, "invalid_api_key", 0),
        (leave, None, "cancelled", 1),
        (abort, 200, None, 1),
    ],
)
@pytest.mark.parametrize("keeps", [True, False], ids=["sampled", "not sampled"])
def test_what_goes_wrong_is_in_the_trace(
    tmp_path: Path,
    deed: Callable[[ServerUnderTest, Script], None],
    status: int | None,
    error_type: str | None,
    num_answers: int,
    keeps: bool,
) -> None:
    """Also where sampling would drop it: what failed is always kept."""
    script = Script(spell("word "))
    serve = {"api_keys": ("key",)} if deed is ask_without_a_key else {}
    serve["trace_sample_fraction"] = 1.0 if keeps else 0.0
    with scripted_server(script, log_dir=tmp_path, max_body_bytes=100_000, serve=serve) as server:
        deed(server, script)
        wait_until(lambda: bool(http_rows(tmp_path)))
    # The server has ended, so that late rows are in.
    (row,) = http_rows(tmp_path)
    assert (row.status, row.error_type, row.num_answers) == (status, error_type, num_answers)
    spans = read_spans(tmp_path)
    tree_of(spans)
    assert spans[0].attributes.get("error.type") == error_type
    errors = [span.attributes["error.type"] for span in spans if "error.type" in span.attributes]
    assert errors == [error_type] * (error_type is not None) + ["abort"] * num_answers


def test_a_failing_step_is_in_the_trace(tmp_path: Path) -> None:
    def fails(_: object) -> int:
        raise ValueError("no")

    with scripted_server(Script(fails), log_dir=tmp_path) as server:
        assert server.refusal(COMPLETIONS, BODY)[0] == 500
    server_span, inference, *_ = read_spans(tmp_path)
    assert (server_span.error, server_span.attributes["http.response.status_code"]) == ("engine_error", 500)
    assert inference.attributes["error.type"] == "error"
    assert "no" in (inference.error or "")


def test_only_the_wanted_share_is_kept_and_what_was_slow(tmp_path: Path) -> None:
    script = Script(spell("word "))
    serve = {"trace_sample_fraction": 0.5, "trace_slow_s": 0.5}
    with scripted_server(script, log_dir=tmp_path, serve=serve) as server:
        for _ in range(40):
            server.post(COMPLETIONS, prompt="a", max_tokens=1)
        script.step_s = 0.6
        server.post(COMPLETIONS, prompt="slow", max_tokens=1)
    rows = http_rows(tmp_path)
    kept = {span.trace_id for span in read_spans(tmp_path)}
    assert {row.trace_id for row in rows[:-1] if row.sampled} <= kept
    assert 5 < sum(row.sampled for row in rows) < 35
    assert rows[-1].trace_id in kept


def test_the_spans_are_the_log_folded_again(tmp_path: Path) -> None:
    script = Script(spell("word "))
    with scripted_server(script, log_dir=tmp_path, max_num_seqs=4) as server, ThreadPoolExecutor(8) as pool:
        bodies = [{"prompt": "a" * index, "n": 1 + index % 3, "max_tokens": 5} for index in range(1, 20)]
        list(pool.map(lambda body: server.post(COMPLETIONS, **body), bodies))
    (identity,), answers = read_token_log(tmp_path)
    folded = [http_span(row) for row in http_rows(tmp_path)]
    for answer in answers:
        folded += answer_spans(answer, model=MODEL)
        assert len(answer_spans(answer, model=MODEL)) < NUM_SPANS_MAX
    found = {span.span_id: span for span in read_spans(tmp_path)}
    assert len(found) == len(folded)
    for span in folded:
        other = found[span.span_id]
        assert (other.name, other.start_unix_ns, other.end_unix_ns) == (
            span.name,
            span.start_unix_ns,
            span.end_unix_ns,
        )
        assert {key: _plain(value) for key, value in span.attributes.items()} == other.attributes
        assert other.resource["service.instance.id"] == identity.instance_id


def _plain(value: object) -> object:
    return list(value) if isinstance(value, tuple) else value


def test_the_command_proves_that_log_spans_and_metrics_agree(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with scripted_server(Script(spell("word ")), log_dir=tmp_path / "log", max_num_seqs=4) as server:
        bodies = [{"prompt": "a" * index, "n": 1 + index % 3, "max_tokens": 5} for index in range(1, 20)]
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda body: server.post(COMPLETIONS, **body), bodies))
        refuse(server, Script(spell("word ")))
        # The log is written off the step path: a moment later it is all there.
        wait_until(lambda: len(http_rows(tmp_path / "log")) == len(bodies) + 1)
        with pytest.raises(SystemExit) as ended:
            cli.main(["log", "agree", str(tmp_path / "log"), "--metrics", f"{server.url}/metrics"])
        scrape = server.request("GET", "/metrics")[2]
    out, err = capsys.readouterr()
    assert (ended.value.code or 0, err) == (0, ""), out
    assert out.endswith(" 0 disagreements\n")
    # One token more in the scrape than in the log.
    saved = tmp_path / "scrape"
    name = b"firstdiff_generation_tokens_total{"
    lines = [line[:-1] + b"9" if line.startswith(name) else line for line in scrape.splitlines()]
    saved.write_bytes(b"\n".join(lines) + b"\n")
    with pytest.raises(SystemExit) as ended:
        cli.main(["log", "agree", str(tmp_path / "log"), "--metrics", str(saved)])
    assert ended.value.code == 1
    assert "firstdiff_generation_tokens_total" in capsys.readouterr().out
