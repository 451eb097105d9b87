"""The token-ID log: rows joined whole, phases that partition the request."""

from __future__ import annotations

import itertools
import sys
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parent))
from ledger_rows import SAMPLING, STAMPS, engine_row, identity, log_row, token_rows

from firstdiff.tracing.names import PHASES
from firstdiff.tracing.records import (
    PrefillChunk,
    TokenLogRow,
)
from firstdiff.tracing.token_log import (
    TokenLogFold,
    phase_durations_ns,
    unfold,
)

MOMENTS_NS = st.integers(0, 1 << 62)


def test_a_request_is_joined_whole():
    row = log_row()
    assert row == TokenLogRow(
        request_id="r1",
        trace_id="1" * 32,
        span_id="2" * 16,
        endpoint="/v1/completions",
        identity_sha256="s",
        received_unix_ns=10**18,
        received_ns=1_000,
        tokenized_ns=2_000,
        arrived_ns=2_500,
        first_scheduled_ns=3_000,
        first_token_ns=5_000,
        finished_ns=8_000,
        flushed_ns=9_000,
        prompt_token_ids=[1, 2, 3],
        sampling=SAMPLING,
        token_ids=[100, 101, 102],
        emitted_ns=[5_000, 6_000, 7_000],
        step_index=[10, 11, 12],
        batch_size=[1, 2, 3],
        logprobs=[0.0, None, -0.5],
        text="abc",
        finish_reason="length",
        error=None,
        num_cached_tokens=1,
        prefill_chunks=[PrefillChunk(step_index=10, start_token=1, num_tokens=2)],
        num_preemptions=2,
    )


def test_unfold_gives_the_engines_rows_back():
    assert unfold(log_row()) == (token_rows(3), engine_row(3))
    with pytest.raises(
        ValueError, match=r"expected lists of 3 tokens in request r1, got lengths \[3, 2, 3, 3, 3\]"
    ):
        unfold(log_row(emitted_ns=[1, 2]))


@given(st.permutations(range(12)), st.data())
def test_interleaved_requests_do_not_mix(order, data):
    streams = {f"r{i}": [*token_rows(i % 4, f"r{i}"), engine_row(i % 4, f"r{i}")] for i in order}
    fold = TokenLogFold()
    while streams:
        request_id = data.draw(st.sampled_from(sorted(streams)))
        fold.feed(streams[request_id].pop(0))
        if not streams[request_id]:
            del streams[request_id]
            stamps = msgspec.structs.replace(STAMPS, request_id=request_id)
            row = fold.end(stamps, text="", flushed_ns=99_000, identity_sha256="s")
            num_tokens = int(request_id[1:]) % 4
            assert unfold(row) == (token_rows(num_tokens, request_id), engine_row(num_tokens, request_id))
    assert fold.num_open_requests == 0


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], "got 0 token rows"),
        (token_rows(2), "got 2 token rows"),
        ([*token_rows(2), engine_row(3)], r"expected tokens 0..2 of request r1 in order, got \[0, 1\]"),
        ([*token_rows(3), engine_row(2)], r"expected tokens 0..1 .* got \[0, 1, 2\]"),
        ([*token_rows(3)[::-1], engine_row(3)], r"got \[2, 1, 0\]"),
        ([*token_rows(3)[1:], engine_row(2)], r"got \[1, 2\]"),
        ([*token_rows(2), *token_rows(2), engine_row(4)], r"got \[0, 1, 0, 1\]"),
        ([*token_rows(20), engine_row(2)], r"got \[0, 1, 2, 3, 4, 5, 6, 7, \.\.\.\] \(20 rows\)"),
    ],
)
def test_incomplete_rows_are_refused_and_forgotten(rows, message):
    fold = TokenLogFold()
    for row in rows:
        fold.feed(row)
    with pytest.raises(ValueError, match=message):
        fold.end(STAMPS, text="", flushed_ns=9_000, identity_sha256="s")
    assert fold.num_open_requests == 0


@pytest.mark.parametrize("num_before", range(5))
def test_a_discarded_request_leaves_nothing_behind(num_before):
    rows = [*token_rows(3), engine_row(3)]
    fold = TokenLogFold()
    for row in rows[:num_before]:
        fold.feed(row)
    fold.discard("r1")
    for row in rows[num_before:]:
        fold.feed(row)
    assert fold.num_open_requests == 0
    # The id may come again: an ended request is not remembered as discarded.
    for row in rows:
        fold.feed(row)
    assert len(fold.end(STAMPS, text="", flushed_ns=9_000, identity_sha256="s").token_ids) == 3


def test_rows_of_others_are_ignored():
    fold = TokenLogFold()
    fold.feed(identity())
    fold.feed(log_row())
    assert fold.num_open_requests == 0


@pytest.mark.parametrize("num_tokens", [0, 2])
def test_a_dead_engines_request_is_logged_with_the_tokens_that_came(num_tokens):
    fold = TokenLogFold()
    for row in token_rows(num_tokens):
        fold.feed(row)
    made = fold.fail(
        "r1",
        prompt_token_ids=[1, 2],
        sampling=SAMPLING,
        arrived_ns=2_500,
        finished_ns=8_000,
        error="the engine core died",
    )
    row = fold.end(STAMPS, text="ab", flushed_ns=9_000, identity_sha256="s")
    assert unfold(row) == (token_rows(num_tokens), made)
    assert (row.finish_reason, row.error) == ("error", "the engine core died")
    assert made.first_token_ns == (5_000 if num_tokens else None)
    decode_ns = 3_000 if num_tokens else 0
    assert phase_durations_ns(row) == {
        "tokenize": 1_000,
        "queue": 6_000 - decode_ns,
        "prefill": 0,
        "decode": decode_ns,
        "preempted": 0,
        "stream": 1_000,
    }


# Phases.


@pytest.mark.parametrize("missing", list(itertools.product([False, True], repeat=2)), ids=str)
@settings(max_examples=200)
@given(stamps=st.lists(MOMENTS_NS, min_size=6, max_size=6))
def test_phases_partition_any_request(missing, stamps):
    received, flushed = sorted(stamps[:2])
    row = log_row(
        received_ns=received,
        tokenized_ns=stamps[2],
        first_scheduled_ns=None if missing[0] else stamps[3],
        first_token_ns=None if missing[1] else stamps[4],
        finished_ns=stamps[5],
        flushed_ns=flushed,
    )
    phases = phase_durations_ns(row)
    assert tuple(phases) == PHASES
    assert min(phases.values()) >= 0
    assert sum(phases.values()) == flushed - received
    if row.first_scheduled_ns is None:
        assert phases["prefill"] == 0
    if row.first_token_ns is None:
        assert phases["decode"] == 0


@given(st.lists(MOMENTS_NS, min_size=6, max_size=6).map(sorted))
def test_stamps_in_order_are_the_borders(stamps):
    received, tokenized, scheduled, first_token, finished, flushed = stamps
    row = log_row(
        received_ns=received,
        tokenized_ns=tokenized,
        first_scheduled_ns=scheduled,
        first_token_ns=first_token,
        finished_ns=finished,
        flushed_ns=flushed,
    )
    assert list(phase_durations_ns(row).values()) == [
        tokenized - received,
        scheduled - tokenized,
        first_token - scheduled,
        finished - first_token,
        0,
        flushed - finished,
    ]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, [1, 1, 2, 3, 0, 1]),
        ({"first_scheduled_ns": None, "first_token_ns": None}, [1, 6, 0, 0, 0, 1]),
        ({"first_token_ns": None}, [1, 1, 5, 0, 0, 1]),
        ({"first_scheduled_ns": None}, [1, 3, 0, 3, 0, 1]),
        # Flushed at a stop string, before the engine heard of it.
        ({"flushed_ns": 7_000}, [1, 1, 2, 2, 0, 0]),
    ],
    ids=["whole", "never scheduled", "no token", "schedule unknown", "flushed first"],
)
def test_a_phase_that_was_never_left_lasts_to_the_end(changes, expected):
    assert list(phase_durations_ns(log_row(**changes)).values()) == [1_000 * value for value in expected]


def test_flushed_before_received_is_refused():
    with pytest.raises(ValueError, match="expected flushed_ns >= received_ns in request r1, got 999 < 1000"):
        phase_durations_ns(log_row(flushed_ns=999))
