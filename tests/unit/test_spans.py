"""The span tree of a request: its shape, times, ids and what it says of failures."""

from __future__ import annotations

import itertools
import sys
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parent))
from ledger_rows import SAMPLING, STAMPS, log_row

from firstdiff.tracing.names import PHASES
from firstdiff.tracing.spans import NUM_SPANS_MAX, request_spans
from firstdiff.tracing.token_log import phase_durations_ns

MOMENTS_NS = st.lists(st.integers(0, 20_000) | st.integers(0, 1 << 40), min_size=6, max_size=6).map(sorted)


def spans_of(row, stamps=STAMPS):
    return request_spans(row, stamps, model="m")


def phase_spans(row):
    return spans_of(row)[2:]


def row_at(moments, *, was_scheduled=True, has_token=True):
    received, tokenized, scheduled, first_token, finished, flushed = moments
    return log_row(
        received_ns=received,
        tokenized_ns=tokenized,
        first_scheduled_ns=scheduled if was_scheduled else None,
        first_token_ns=first_token if has_token else None,
        finished_ns=finished,
        flushed_ns=flushed,
    )


def test_the_tree_of_a_whole_request():
    server, inference, *phases = spans_of(log_row())
    assert len(phases) + 2 == NUM_SPANS_MAX
    assert (server.name, server.kind) == ("POST /v1/completions", "server")
    assert (server.trace_id, server.span_id, server.parent_span_id) == ("1" * 32, "2" * 16, None)
    assert (inference.name, inference.kind) == ("text_completion m", "internal")
    assert inference.parent_span_id == server.span_id
    assert [span.name for span in phases] == list(PHASES)
    assert {span.parent_span_id for span in phases} == {inference.span_id}
    assert (server.start_unix_ns, server.end_unix_ns) == (10**18, 10**18 + 8_000)
    assert [(span.start_unix_ns - 10**18, span.end_unix_ns - 10**18) for span in phases] == [
        (0, 1_000),
        (2_000, 2_000),
        (3_000, 4_000),
        (5_000, 7_000),
        (8_000, 8_000),
    ]
    assert all(span.error is None for span in (server, inference, *phases))


@pytest.mark.parametrize(
    ("endpoint", "names"),
    [
        ("/v1/completions", ["POST /v1/completions", "text_completion m"]),
        ("/v1/chat/completions", ["POST /v1/chat/completions", "chat m"]),
    ],
)
def test_names_say_the_route_and_nothing_of_the_request(endpoint, names):
    for request_id in ("a", "b"):
        row = log_row(endpoint=endpoint, request_id=request_id)
        assert [span.name for span in spans_of(row)] == [*names, *PHASES]


def test_the_caller_is_the_parent():
    stamps = msgspec.structs.replace(STAMPS, parent_span_id="3" * 16)
    assert spans_of(log_row(), stamps)[0].parent_span_id == "3" * 16


@given(MOMENTS_NS, st.booleans(), st.booleans())
def test_phases_nest_and_never_touch_as_jaeger_reads_them(moments, was_scheduled, has_token):
    row = row_at(moments, was_scheduled=was_scheduled, has_token=has_token)
    server, inference, *phases = spans_of(row)
    entered = ["tokenize", "queue", *["prefill"] * was_scheduled, *["decode"] * has_token, "stream"]
    assert [span.name for span in phases] == entered
    for span in (server, inference, *phases):
        assert span.start_unix_ns <= span.end_unix_ns
        assert server.start_unix_ns <= span.start_unix_ns
        assert span.end_unix_ns <= server.end_unix_ns
    for before, after in itertools.pairwise(phases):
        # Jaeger holds a start and a duration in whole microseconds; a sibling counts only if strictly before.
        start_us = before.start_unix_ns // 1_000
        duration_us = (before.end_unix_ns - before.start_unix_ns) // 1_000
        assert start_us + duration_us < after.start_unix_ns // 1_000
    # The gaps come out of the phases: at most 5 us are added at the end, when phases are shorter than a gap.
    assert 0 <= server.end_unix_ns - (10**18 + row.flushed_ns - row.received_ns) <= 5_000


@given(MOMENTS_NS, st.booleans(), st.booleans())
def test_durations_are_kept_exactly_beside_the_gaps(moments, was_scheduled, has_token):
    row = row_at(moments, was_scheduled=was_scheduled, has_token=has_token)
    durations = phase_durations_ns(row)
    spans = phase_spans(row)
    assert {span.name: span.attributes["firstdiff.phase.duration_ns"] for span in spans} == {
        name: duration for name, duration in durations.items() if name in {span.name for span in spans}
    }
    assert (
        sum(span.attributes["firstdiff.phase.duration_ns"] for span in spans)
        == row.flushed_ns - row.received_ns
    )
    for span in spans:
        assert abs((span.end_unix_ns - span.start_unix_ns) - durations[span.name]) <= 5_000


def test_the_same_row_gives_the_same_spans_and_no_id_twice():
    assert spans_of(log_row()) == spans_of(log_row())
    other = msgspec.structs.replace(STAMPS, span_id="4" * 16)
    ids = [span.span_id for stamps in (STAMPS, other) for span in spans_of(log_row(), stamps)]
    assert len(set(ids)) == len(ids)
    assert all(len(span_id) == 16 and span_id.strip("0") for span_id in ids)


def test_the_inference_span_says_what_was_asked_and_done():
    sampling = msgspec.structs.replace(SAMPLING, top_k=5, top_p=0.5, stop=["\n"], seed=9)
    attributes = spans_of(log_row(sampling=sampling))[1].attributes
    assert attributes == {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "firstdiff",
        "gen_ai.request.model": "m",
        "gen_ai.response.model": "m",
        "gen_ai.response.id": "r1",
        "gen_ai.response.finish_reasons": ("length",),
        "gen_ai.request.max_tokens": 16,
        # Zero is a temperature, not the lack of one.
        "gen_ai.request.temperature": 0.0,
        "gen_ai.request.top_p": 0.5,
        "gen_ai.request.top_k": 5,
        "gen_ai.request.seed": 9,
        "gen_ai.request.stop_sequences": ("\n",),
        "gen_ai.usage.input_tokens": 3,
        "gen_ai.usage.output_tokens": 3,
        "gen_ai.usage.cache_read.input_tokens": 1,
        "gen_ai.latency.time_to_first_token": 4e-6,
        "gen_ai.latency.e2e": 8e-6,
        "gen_ai.latency.time_in_queue": 1e-6,
        "gen_ai.latency.time_in_model_prefill": 2e-6,
        "gen_ai.latency.time_in_model_decode": 3e-6,
        "gen_ai.latency.time_in_model_inference": pytest.approx(5e-6),
        "firstdiff.identity_sha256": "s",
        "firstdiff.names_version": 1,
    }


def test_what_never_happened_has_no_latency():
    attributes = spans_of(log_row(first_scheduled_ns=None, first_token_ns=None))[1].attributes
    latencies = {name for name in attributes if name.startswith("gen_ai.latency.")}
    assert latencies == {"gen_ai.latency.e2e", "gen_ai.latency.time_in_queue"}


@pytest.mark.parametrize("seed", [0, (1 << 63) - 1, 1 << 63, (1 << 64) - 1, -(1 << 63)])
def test_a_seed_beyond_otlp_integers_is_left_to_the_log(seed):
    attributes = spans_of(log_row(sampling=msgspec.structs.replace(SAMPLING, seed=seed)))[1].attributes
    assert attributes.get("gen_ai.request.seed") == (seed if seed < 1 << 63 else None)


@pytest.mark.parametrize(
    ("reason", "error", "error_type", "message"),
    [
        ("stop", None, None, None),
        ("length", None, None, None),
        ("abort", None, "abort", "abort"),
        ("error", "the engine core died", "error", "the engine core died"),
    ],
)
def test_failures_and_aborts_close_the_spans_with_an_error(reason, error, error_type, message):
    server, inference, *phases = spans_of(log_row(finish_reason=reason, error=error))
    for span in (server, inference):
        assert span.attributes.get("error.type") == error_type
        assert span.error == message
    assert all(span.error is None for span in phases)
