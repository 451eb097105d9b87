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
from ledger_rows import SAMPLING, http_row, log_row

from firstdiff.tracing.names import PHASE_TOTAL_NS, PHASES
from firstdiff.tracing.records import Preemption, PrefillChunk
from firstdiff.tracing.request_spans import NUM_SPANS_MAX, answer_spans, http_span
from firstdiff.tracing.timeline import phase_durations_ns, timeline

MOMENTS_NS = st.lists(st.integers(0, 20_000) | st.integers(0, 1 << 40), min_size=6, max_size=6).map(sorted)
SIMPLE = ["tokenize", "queue", "prefill", "decode", "stream"]


def spans_of(row, http=None):
    return [http_span(http or http_row()), *answer_spans(row, model="m")]


def phase_spans(row):
    return spans_of(row)[2:]


def row_at(moments, *, was_scheduled=True, has_token=True, **changes):
    received, tokenized, scheduled, first_token, finished, flushed = moments
    return log_row(
        received_ns=received,
        tokenized_ns=tokenized,
        first_scheduled_ns=scheduled if was_scheduled else None,
        first_token_ns=first_token if has_token else None,
        finished_ns=finished,
        flushed_ns=flushed,
        **changes,
    )


@st.composite
def busy_rows(draw):
    """Any request: chunks and preemptions in order, in number beyond what has a span of its own."""
    moments = draw(MOMENTS_NS)
    stamp = st.integers(moments[1], moments[5])
    chunks = [
        PrefillChunk(step_index=index, start_token=index, num_tokens=1, finished_ns=at)
        for index, at in enumerate(sorted(draw(st.lists(stamp, max_size=20))))
    ]
    stamps = sorted(draw(st.lists(stamp, max_size=18)))
    preemptions = [
        Preemption(
            preempted_ns=stamps[index],
            num_lost_tokens=1,
            scheduled_ns=stamps[index + 1],
            recovered_ns=draw(st.sampled_from([None, stamps[index + 2]])),
        )
        for index in range(0, len(stamps) - 2, 3)
    ]
    return row_at(
        moments,
        was_scheduled=draw(st.booleans()),
        has_token=draw(st.booleans()),
        prefill_chunks=chunks,
        preemptions=preemptions,
    )


def test_the_tree_of_a_whole_request():
    server, inference, *phases = spans_of(log_row())
    assert (server.name, server.kind) == ("POST /v1/completions", "server")
    assert (server.trace_id, server.span_id, server.parent_span_id) == ("1" * 32, "2" * 16, None)
    assert (inference.name, inference.kind) == ("text_completion m", "internal")
    assert inference.parent_span_id == server.span_id
    assert [span.name for span in phases] == SIMPLE
    assert {span.parent_span_id for span in phases} == {inference.span_id}
    assert (server.start_unix_ns, server.end_unix_ns) == (10**18 - 100, 10**18 + 8_500)
    assert (inference.start_unix_ns, inference.end_unix_ns) == (10**18, 10**18 + 8_000)
    assert [(span.start_unix_ns - 10**18, span.end_unix_ns - 10**18) for span in phases] == [
        (0, 1_000),
        (2_000, 2_000),
        (3_000, 4_000),
        (5_000, 7_000),
        (8_000, 8_000),
    ]
    assert all(span.error is None for span in (server, inference, *phases))


def test_chunks_and_preemptions_have_spans_of_their_own():
    chunks = [
        PrefillChunk(step_index=index, start_token=start, num_tokens=num, finished_ns=at)
        for index, (start, num, at) in enumerate(
            [(1, 10, 20_000), (11, 10, 30_000), (21, 5, 60_000), (1, 30, 95_000)]
        )
    ]
    preemptions = [
        # In the prefill; then in the decoding, and once more before it had come back.
        Preemption(preempted_ns=32_000, num_lost_tokens=20, scheduled_ns=40_000, recovered_ns=50_000),
        Preemption(preempted_ns=70_000, num_lost_tokens=27, scheduled_ns=75_000),
        Preemption(preempted_ns=80_000, num_lost_tokens=27, scheduled_ns=85_000, recovered_ns=95_000),
    ]
    row = row_at([0, 5_000, 10_000, 60_000, 110_000, 120_000], prefill_chunks=chunks, preemptions=preemptions)
    assert [(one.phase, one.start_ns // 1000, one.end_ns // 1000) for one in timeline(row)] == [
        ("tokenize", 0, 5),
        ("queue", 5, 10),
        ("prefill", 10, 20),
        ("prefill", 20, 30),
        ("prefill", 30, 32),
        ("preempted", 32, 50),
        ("prefill", 50, 60),
        ("decode", 60, 70),
        ("preempted", 70, 95),
        ("decode", 95, 110),
        ("stream", 110, 120),
    ]
    assert phase_durations_ns(row) == {
        "tokenize": 5_000,
        "queue": 5_000,
        "prefill": 32_000,
        "decode": 25_000,
        "preempted": 43_000,
        "stream": 10_000,
    }
    spans = phase_spans(row)
    # One too many: the two last of the chunks that touch share a span.
    names = "tokenize queue prefill prefill preempted prefill decode preempted decode stream"
    assert [span.name for span in spans] == names.split()
    assert [span.attributes["firstdiff.num_prefill_chunks"] for span in spans if span.name == "prefill"] == [
        1,
        1,
        1,
    ]
    inference = spans_of(row)[1].attributes
    # As vLLM has it, what a preemption cost lies inside.
    assert inference["gen_ai.latency.time_in_model_prefill"] == 50e-6
    assert inference["gen_ai.latency.time_in_model_decode"] == 50e-6
    assert {phase: inference[PHASE_TOTAL_NS[phase]] for phase in PHASES} == phase_durations_ns(row)


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
        assert [span.name for span in spans_of(row, http_row(route=endpoint))] == [*names, *SIMPLE]


def test_the_caller_is_the_parent():
    assert http_span(http_row(parent_span_id="3" * 16)).parent_span_id == "3" * 16


@given(MOMENTS_NS, st.booleans(), st.booleans())
def test_only_phases_that_were_entered_have_a_span(moments, was_scheduled, has_token):
    row = row_at(moments, was_scheduled=was_scheduled, has_token=has_token)
    entered = ["tokenize", "queue", *["prefill"] * was_scheduled, *["decode"] * has_token, "stream"]
    assert [span.name for span in phase_spans(row)] == entered


@given(busy_rows())
def test_phases_nest_and_never_touch_as_jaeger_reads_them(row):
    inference, *phases = answer_spans(row, model="m")
    assert len(phases) + 2 <= NUM_SPANS_MAX
    for span in phases:
        assert span.start_unix_ns <= span.end_unix_ns
        assert inference.start_unix_ns <= span.start_unix_ns
        assert span.end_unix_ns <= inference.end_unix_ns
    for before, after in itertools.pairwise(phases):
        # Jaeger holds a start and a duration in whole microseconds; a sibling counts only if strictly before.
        start_us = before.start_unix_ns // 1_000
        duration_us = (before.end_unix_ns - before.start_unix_ns) // 1_000
        assert start_us + duration_us < after.start_unix_ns // 1_000
    # The gaps come out of the phases: at most 10 us are added at the end, when phases are shorter than a gap.
    assert 0 <= inference.end_unix_ns - (10**18 + row.flushed_ns - row.received_ns) <= 10_000


@given(busy_rows())
def test_durations_are_kept_exactly_beside_the_gaps(row):
    segments, durations = timeline(row), phase_durations_ns(row)
    assert segments[0].start_ns == row.received_ns
    assert segments[-1].end_ns == row.flushed_ns
    assert all(one.end_ns == other.start_ns for one, other in itertools.pairwise(segments))
    assert all(segment.duration_ns >= 0 for segment in segments)
    assert sum(durations.values()) == row.flushed_ns - row.received_ns
    inference, *spans = answer_spans(row, model="m")
    assert {phase: inference.attributes[PHASE_TOTAL_NS[phase]] for phase in PHASES} == durations
    shown = [span.attributes["firstdiff.duration_ns"] for span in spans]
    assert sum(shown) == row.flushed_ns - row.received_ns
    for span, shown_ns in zip(spans, shown, strict=True):
        assert abs(span.duration_ns - shown_ns) <= 10_000
    if not any("firstdiff.hidden_phases" in span.attributes for span in spans):
        for phase in PHASES:
            own = [ns for span, ns in zip(spans, shown, strict=True) if span.name == phase]
            assert sum(own) == durations[phase]


def test_the_same_row_gives_the_same_spans_and_no_id_twice():
    assert spans_of(log_row()) == spans_of(log_row())
    # Two answers to one HTTP request, and one to another.
    rows = [log_row(), log_row(request_id="r2"), log_row(span_id="4" * 16)]
    ids = [span.span_id for row in rows for span in answer_spans(row, model="m")]
    assert len(set(ids)) == len(ids)
    assert all(len(span_id) == 16 and span_id.strip("0") for span_id in ids)
    assert answer_spans(log_row(trace_id=None), model="m") == []


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
        "firstdiff.num_preemptions": 2,
        "firstdiff.num_prefill_chunks": 1,
        "firstdiff.priority": 0,
        "firstdiff.batch_size_at_first_token": 1,
        "firstdiff.max_batch_size": 3,
        "firstdiff.phase.tokenize.duration_ns": 1_000,
        "firstdiff.phase.queue.duration_ns": 1_000,
        "firstdiff.phase.prefill.duration_ns": 2_000,
        "firstdiff.phase.decode.duration_ns": 3_000,
        "firstdiff.phase.preempted.duration_ns": 0,
        "firstdiff.phase.stream.duration_ns": 1_000,
        "firstdiff.identity_sha256": "s",
        "firstdiff.names_version": 2,
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
    inference, *phases = answer_spans(log_row(finish_reason=reason, error=error), model="m")
    assert inference.attributes.get("error.type") == error_type
    assert inference.error == message
    assert all(span.error is None for span in phases)


@pytest.mark.parametrize(
    ("status", "error_type"), [(200, None), (429, "queue_full"), (400, "400"), (None, "cancelled")]
)
def test_the_servers_span_says_how_http_ended(status, error_type):
    span = http_span(http_row(status=status, error_type=error_type, num_answers=0))
    assert span.attributes.get("http.response.status_code") == status
    assert span.attributes.get("error.type") == error_type == span.error
    assert span.attributes["http.route"] == "/v1/completions"
