"""`firstdiff trace diff` on Runs, on one file with two replicas in it, and on a Jaeger's answers."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))
from test_jaeger_facade import facade
from traced_sides import side

from firstdiff.tracing.clock import SystemClock
from firstdiff.tracing.otlp_json import encode_traces
from firstdiff.tracing.span_record import SpanRecord

Command = Callable[..., tuple[int, str, str]]


def write(path: Path, spans: list[SpanRecord], instance: str = "i") -> Path:
    path.write_bytes(encode_traces(spans, {"service.instance.id": instance}) + b"\n")
    return path


def test_two_files(firstdiff: Command, tmp_path: Path) -> None:
    base = write(tmp_path / "base.jsonl", side(1))
    alike = write(tmp_path / "alike.jsonl", side(2))
    slower = write(tmp_path / "slower.jsonl", side(3, factors={"prefill": 8}))
    code, out, _ = firstdiff("trace", "diff", base, alike)
    assert (code, out.startswith("PASS: ")) == (0, True)
    code, out, _ = firstdiff("trace", "diff", base, slower, "--jaeger-url", "http://jaeger:16686")
    assert (code, out.startswith("FAIL: ")) == (1, True)
    assert "prefill adds +" in out.splitlines()[0]
    assert out.count("http://jaeger:16686/trace/") == 5
    report = tmp_path / "report.json"
    code, out, _ = firstdiff("trace", "diff", base, slower, "--format", "json", "--report", report)
    assert json.loads(out)["guilty"] == json.loads(report.read_bytes())["guilty"] == "prefill"
    assert firstdiff("trace", "diff", base, slower, "--margin", "9")[0] == 0


def test_two_replicas_in_one_file_are_told_apart_by_what_they_say(firstdiff: Command, tmp_path: Path) -> None:
    file = tmp_path / "both.jsonl"
    lines = [
        encode_traces(side(index, factors={"decode": factor}, has_cases=False), {"service.instance.id": name})
        for index, (name, factor) in enumerate([("one", 1.0), ("two", 2.0)])
    ]
    file.write_bytes(b"".join(line + b"\n" for line in lines))
    where = ["--base-where", "service.instance.id=one", "--candidate-where", "service.instance.id=two"]
    code, out, _ = firstdiff("trace", "diff", file, file, *where)
    assert (code, "decode adds +" in out) == (1, True)
    code, _, err = firstdiff("trace", "diff", file, file, "--base-where", "service.instance.id=three")
    assert (code, "got none" in err) == (2, True)
    assert firstdiff("trace", "diff", file, file, "--base-where", "three")[0] == 2


def test_too_little_is_unknown(firstdiff: Command, tmp_path: Path) -> None:
    few = write(tmp_path / "few.jsonl", side(1, 5))
    code, out, _ = firstdiff("trace", "diff", few, few)
    assert (code, out.splitlines()[0]) == (3, "UNKNOWN: nothing can be said")
    assert "expected 16 pairs or more, got 5: collect more traces" in out


def test_what_is_no_source_is_one_line(firstdiff: Command, tmp_path: Path) -> None:
    code, out, err = firstdiff("trace", "diff", tmp_path / "none", tmp_path / "none")
    assert (code, out, err.count("\n")) == (2, "", 1)


def test_the_phases_of_a_failed_run_are_left_out(firstdiff: Command, tmp_path: Path) -> None:
    spans = side(1, 40)
    broken = [
        msgspec.structs.replace(span, error="abort") if index % 8 == 1 else span
        for index, span in enumerate(spans)
    ]
    base, candidate = write(tmp_path / "b.jsonl", spans), write(tmp_path / "c.jsonl", broken)
    code, out, _ = firstdiff("trace", "diff", base, candidate)
    assert (code, "n = 30 and 30 in pairs" in out) == (0, True)


def test_both_sides_may_be_in_a_jaeger(firstdiff: Command, tmp_path: Path) -> None:
    now_ns = SystemClock().now_unix_ns() - 60 * 10**9
    folders = []
    for index, (name, factor) in enumerate([("one", 1.0), ("two", 2.0)]):
        folder = tmp_path / name
        folder.mkdir()
        resource = {"service.instance.id": name, "service.name": "firstdiff"}
        spans = side(index, factors={"decode": factor}, has_cases=False, start_ns=now_ns)
        (folder / "spans.jsonl").write_bytes(encode_traces(spans, resource) + b"\n")
        folders.append(folder)
    where = ["--base-where", "service.instance.id=one", "--candidate-where", "service.instance.id=two"]
    with facade(*folders) as url:
        code, out, _ = firstdiff("trace", "diff", url, url, *where, "--last", "10m")
    assert (code, "decode adds +" in out) == (1, True)
    assert f"{url}/trace/" in out
