"""Traces from every kind of source, and trees that hostile parents cannot break."""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parent))
from ledger_rows import http_row, identity, log_row

from firstdiff.tracing.jaeger_json import encode_jaeger
from firstdiff.tracing.otlp_json import encode_traces
from firstdiff.tracing.records import encode_row
from firstdiff.tracing.request_spans import answer_spans, http_span
from firstdiff.tracing.span_record import SpanRecord
from firstdiff.tracing.token_log import hash_identity
from firstdiff.tracing.trace_set import group_traces, read_source, read_traces, service_of

SERVER = {"service.name": "firstdiff", "service.instance.id": "i1"}


def request_spans():
    return [http_span(http_row()), *answer_spans(log_row(), model="m")]


def span(number, parent=None, start=0, **changes):
    fields = {
        "name": f"s{number}",
        "kind": "internal",
        "trace_id": "1" * 32,
        "span_id": f"{number:016x}",
        "parent_span_id": None if parent is None else f"{parent:016x}",
        "start_unix_ns": start,
        "end_unix_ns": start + 10,
        "attributes": {},
    }
    return SpanRecord(**(fields | changes))


def names_and_depths(*spans):
    (trace,) = group_traces(spans)
    return [(depth, one.name) for depth, one in trace.walk()]


def test_tree_has_parents_first_and_siblings_by_start():
    found = names_and_depths(span(3, 1, start=7), span(2, 1, start=5), span(1), span(4, 2, start=6))
    assert found == [(0, "s1"), (1, "s2"), (2, "s4"), (1, "s3")]


def test_orphans_are_roots_and_rings_are_cut():
    assert names_and_depths(span(1), span(2, 99, start=1)) == [(0, "s1"), (0, "s2")]
    assert names_and_depths(span(1, 2), span(2, 1, start=1)) == [(0, "s1"), (1, "s2")]
    assert names_and_depths(span(1, 1)) == [(0, "s1")]
    (trace,) = group_traces([span(1, 99), span(2, 1, start=1, error="x")])
    assert (trace.num_orphans, trace.num_errors, trace.root.name) == (1, 1, "s1")


def test_a_span_that_came_twice_counts_once_unless_it_differs():
    assert names_and_depths(span(1), span(1)) == [(0, "s1")]
    assert len(names_and_depths(span(1), span(1, name="other"))) == 2


def test_a_deep_chain_needs_no_recursion():
    chain = [span(number, number - 1 if number > 1 else None) for number in range(1, 5_001)]
    found = names_and_depths(*chain)
    assert found[-1] == (4_999, "s5000")


@given(
    st.lists(
        st.tuples(st.integers(1, 6), st.none() | st.integers(1, 8), st.integers(0, 3)),
        min_size=1,
        max_size=12,
    )
)
def test_every_span_is_walked_once(drawn):
    spans = [
        span(number, parent, start, name=f"{index}") for index, (number, parent, start) in enumerate(drawn)
    ]
    (trace,) = group_traces(spans)
    walked = [one.name for _, one in trace.walk()]
    assert sorted(walked) == sorted(one.name for one in spans)
    assert trace.root in trace.spans
    assert trace.start_unix_ns <= trace.end_unix_ns


def test_traces_are_by_start():
    early, late = span(1, start=5), span(2, start=9, trace_id="2" * 32)
    assert [trace.trace_id for trace in group_traces([late, early])] == ["1" * 32, "2" * 32]


@pytest.mark.parametrize("kind", ["lines", "document", "indented", "jaeger", "jaeger-indented", "v3"])
def test_files_of_every_kind(tmp_path, kind):
    spans = [msgspec.structs.replace(one, resource=SERVER) for one in request_spans()]
    line = encode_traces(spans)
    jaeger = encode_jaeger([spans])
    content = {
        "lines": line + b"\n" + encode_traces([span(1, trace_id="3" * 32)]) + b"\n",
        "document": line,
        "indented": msgspec.json.format(line),
        "jaeger": jaeger,
        "jaeger-indented": msgspec.json.format(jaeger),
        "v3": b'{"result":' + line + b"}",
    }[kind]
    file = tmp_path / "spans.jsonl"
    file.write_bytes(content)
    found = [one for one in read_source(file) if one.trace_id == spans[0].trace_id]
    assert [one.name for one in found] == [one.name for one in spans]
    assert service_of(found[0]) == "firstdiff"
    if not kind.startswith("jaeger"):
        assert found == [msgspec.structs.replace(one, attributes=two.attributes)
                         for one, two in zip(spans, found, strict=True)]  # fmt: skip
        assert read_source(tmp_path) == read_source(file)


def test_a_log_without_spans_is_folded(tmp_path):
    server = identity()
    row = log_row(identity_sha256=hash_identity(server))
    (tmp_path / "tokens.jsonl").write_bytes(encode_row(server) + b"\n" + encode_row(row) + b"\n")
    (trace,) = read_traces([tmp_path])
    # No HTTP row: the answer has no parent to look for.
    assert (trace.root.name, trace.root.parent_span_id, trace.num_orphans) == ("text_completion m", None, 0)
    (tmp_path / "http.jsonl").write_bytes(encode_row(http_row()) + b"\n")
    (trace,) = read_traces([tmp_path])
    assert [one.name for _, one in trace.walk()][:3] == [
        "POST /v1/completions",
        "text_completion m",
        "tokenize",
    ]
    assert {one.resource["service.instance.id"] for one in trace.spans} == {"i1"}
    assert [msgspec.structs.replace(one, resource={}) for _, one in trace.walk()] == [
        http_span(http_row()),
        *answer_spans(row, model="m"),
    ]


def test_refused_requests_alone_are_traces(tmp_path):
    refused = http_row(status=400, error_type="invalid", num_answers=0)
    (tmp_path / "http.jsonl").write_bytes(encode_row(refused) + b"\n")
    (trace,) = read_traces([tmp_path])
    assert (trace.num_errors, service_of(trace.root)) == (1, "firstdiff")


@pytest.mark.parametrize(
    ("name", "content", "error"),
    [
        (None, b"", "expected spans.jsonl, tokens.jsonl or http.jsonl in"),
        ("spans.jsonl", b"nonsense\n", "expected traces as OTLP JSON"),
        ("http.jsonl", b"{}\n", "expected an HttpRow in .* line 1"),
        ("tokens.jsonl", b"{}\n", "expected an identity or token_log row in .* line 1"),
    ],
)
def test_other_folders_are_one_line(tmp_path, name, content, error):
    if name is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=error):
        read_source(tmp_path)


@pytest.mark.parametrize(
    "content", [b"nonsense", b'{"data": [{"traceID": "1"}]}', b'{"traceID": "x", "spans": [], "x": [}', b"[]"]
)
def test_other_files_are_one_line(tmp_path, content):
    file = tmp_path / "file.json"
    file.write_bytes(content)
    with pytest.raises(ValueError, match=r"expected traces as .*file\.json"):
        read_source(file)
    with pytest.raises(ValueError, match="does not exist"):
        read_source(tmp_path / "none.json")


def test_numbers_beyond_json_are_exported_and_read(tmp_path):
    odd = {"nan": float("nan"), "inf": float("inf"), "list": [-float("inf"), 0.5]}
    for number, content in enumerate(
        (encode_traces([span(1, attributes=odd)]), encode_jaeger([[span(1, attributes=odd)]]))
    ):
        file = tmp_path / f"{number}.json"
        file.write_bytes(content)
        (found,) = read_source(file)
        assert (str(found.attributes["nan"]), str(found.attributes["inf"])) == ("nan", "inf")
