"""`firstdiff trace list | show | export`: tables, waterfalls, files, and mistakes in one line."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

sys.path.insert(0, str(Path(__file__).parent))
from span_samples import FIRST, SECOND, answer, first_trace, second_trace, span

from firstdiff.harness.waterfall import MAX_SPANS, MIN_WIDTH, waterfall
from firstdiff.tracing.otlp_json import encode_traces
from firstdiff.tracing.trace_set import group_traces, read_source

Command = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    slow = answer(
        "chat m",
        1,
        None,
        request_id="r2",
        trace_id="c" * 32,
        start=2_000_000,
        end=22_000_000,
        phases_ns=(0, 19_000_000, 500_000, 100_000, 400_000, 0),
    )
    folder = tmp_path / "run"
    folder.mkdir()
    lines = [encode_traces(spans) + b"\n" for spans in (first_trace(), second_trace(), [slow])]
    (folder / "spans.jsonl").write_bytes(b"".join(lines))
    return folder


def test_list_has_a_line_a_request_with_its_phases(firstdiff, run):
    code, out, _ = firstdiff("trace", "list", run)
    header, first, slow, other, last = out.splitlines()
    assert code == 0
    assert header.split()[:4] == ["trace", "request", "case", "operation"]
    assert first.split()[:5] == ["aaaaaaaa", "r1", "case-7", "chat", "m"]
    assert first.split()[-8:] == ["4.60", "2.00", "0.10", "0.50", "1.00", "2.90", "0.00", "0.10"]
    assert slow.split()[:2] == ["cccccccc", "r2"]
    assert other.split() == ["bbbbbbbb", "GET", "/", "2026-11-30", "00:53:21.000", "2000.00", "boom"]
    assert last == "3 of 3 requests; times in ms"


@pytest.mark.parametrize(
    ("key", "order"),
    [
        ("start", "acb"),
        ("e2e", "bca"),
        ("queue", "cab"),
        ("prefill", "acb"),
        ("decode", "acb"),
        ("preempted", "cab"),
        ("tokenize", "acb"),
        ("stream", "acb"),
        ("ttft", "acb"),
    ],
)
def test_list_sorts_by_any_phase_and_cuts(firstdiff, run, key, order):
    code, out, _ = firstdiff("trace", "list", run, "--sort", key, "--format", "json")
    rows = json.loads(out)
    assert code == 0
    assert "".join(row["trace_id"][0] for row in rows) == order
    code, out, _ = firstdiff("trace", "list", run, "--sort", key, "--limit", 1)
    assert out.splitlines()[-1].startswith("1 of 3")
    assert out.splitlines()[1][0] == order[0]


def test_list_as_json_has_exact_times(firstdiff, run):
    row = json.loads(firstdiff("trace", "list", run, "--format", "json")[1])[0]
    assert (row["trace_id"], row["request_id"], row["case_id"]) == (FIRST, "r1", "case-7")
    assert row["phases_ns"] == {
        "tokenize": 100_000,
        "queue": 500_000,
        "prefill": 1_000_000,
        "decode": 2_900_000,
        "preempted": 0,
        "stream": 100_000,
    }
    assert (row["e2e_ns"], row["ttft_ns"], row["num_spans"]) == (4_600_000, 2_000_000, 5)


def test_show_draws_the_tree(firstdiff, run):
    code, out, _ = firstdiff("trace", "show", run, "aa", "--width", 80)
    assert code == 0
    assert out.splitlines() == [
        f"trace {FIRST}",
        "chat m, 2026-11-30 00:53:20.000 UTC, 5.00 ms",
        "5 spans of firstdiff-client, firstdiff",
        "",
        "chat m (firstdiff-client)   ██████████████████████████████       0 us    5.00 ms",
        "  POST /v1/chat/completions ██████████████████████████████     100 us    4.80 ms",
        "    chat m                   ████████████████████████████      200 us    4.60 ms",
        "      queue                  ████                              300 us     500 us",
        "      prefill                   ███████                        801 us     999 us",
    ]
    by_request = firstdiff("trace", "show", run, "r1", "--width", 80)[1]
    assert by_request == out
    shown = firstdiff("trace", "show", run, "r1", "--width", 80, "--attributes")[1]
    assert "firstdiff.case_id = case-7" in shown
    assert "http.response.status_code = 200" in shown
    assert "service.instance.id = i1" in shown


def test_show_marks_errors(firstdiff, run):
    lines = firstdiff("trace", "show", run, SECOND[:8], "--width", 60)[1].splitlines()
    assert lines[2] == "2 spans of other, 1 with errors"
    assert lines[4].startswith("! GET /")
    assert lines[5] == "  ! boom"


def test_export_is_what_the_readers_read(firstdiff, run, tmp_path):
    for kind in ("jaeger", "otlp"):
        file = tmp_path / f"{kind}.json"
        code, out, error = firstdiff("trace", "export", run, "--format", kind, "--out", file)
        assert (code, out) == (0, "")
        assert error.endswith("3 traces\n")
        assert sorted(one.name for one in read_source(file)) == sorted(one.name for one in read_source(run))
        assert firstdiff("trace", "export", run, "r1", SECOND, "--format", kind, "--out", file)[0] == 0
        assert {one.trace_id for one in read_source(file)} == {FIRST, SECOND}


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["list", "RUN", "--sort", "speed"], "expected --sort out of start, e2e, ttft, tokenize, "),
        (["list", "RUN", "--limit", "0"], "'--limit'"),
        (["list", "RUN", "--format", "xml"], "expected --format out of text, json"),
        (["list", "NONE"], "which does not exist"),
        (["list", "EMPTY"], "expected traces in"),
        (["show", "RUN"], "Missing argument"),
        (["show", "RUN", "dd"], "got 'dd', none like it"),
        (["show", "RUN", ""], "got '', none like it"),
        (["show", "TWINS", "e"], "got 'e', one that 2 traces have"),
        (["export", "RUN"], "'--out'"),
        (["export", "RUN", "dd", "--out", "FILE"], "got 'dd', none like it"),
        (["export", "RUN", "--out", "/dev/null/x"], "expected a folder at /dev/null"),
        (["export", "RUN", "--out", "FILE", "--format", "csv"], "expected --format out of jaeger, otlp"),
    ],
)
def test_mistakes_are_one_line(firstdiff, run, tmp_path, arguments, error):
    twins = [span("x", 1, trace_id="e" * 31 + digit) for digit in "12"]
    files = {"RUN": run, "NONE": tmp_path / "none", "FILE": tmp_path / "f", "EMPTY": tmp_path / "empty.jsonl"}
    files["TWINS"] = tmp_path / "twins.jsonl"
    files["TWINS"].write_bytes(encode_traces(twins))
    files["EMPTY"].write_bytes(b"")
    code, out, err = firstdiff("trace", *(files.get(argument, argument) for argument in arguments))
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith("firstdiff: ")
    assert error in err


TEXTS = st.text(max_size=30) | st.sampled_from(["\x1b[2J", "\u202e", "日本語" * 20, "a\nb"])


@given(
    st.lists(st.tuples(TEXTS, st.integers(0, 6), st.integers(0, 10**10), st.integers(0, 10**10)), min_size=1),
    st.integers(1, 200),
    st.booleans(),
)
def test_no_line_is_wider_than_asked_or_steers_the_terminal(drawn, width, attributes):
    spans = [
        span(
            text,
            number + 1,
            parent,
            start=start,
            end=start + length,
            error=text or None,
            attributes={text: text},
        )
        for number, (text, parent, start, length) in enumerate(drawn)
    ]
    (trace,) = group_traces(spans)
    drawing = waterfall(trace, width=width, attributes=attributes)
    assert all(cell_len(line) <= max(width, MIN_WIDTH) for line in drawing.split("\n"))
    assert not set(drawing) & {"\x1b", "\u202e", "\r"}


def test_a_trace_of_too_many_spans_is_cut(run):
    (trace,) = group_traces([span(f"s{number}", number) for number in range(1, MAX_SPANS + 8)])
    assert waterfall(trace, width=80).endswith("... and 7 more spans")
