"""Which requests' spans are kept, and that they go out together."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parent))
from ledger_rows import http_row, log_row

from firstdiff.tracing.span_fold import SpanFold
from firstdiff.tracing.trace_sampling import Sampler

NUM_SPANS = 7
PARENT = "3" * 16


class Kept:
    """An output that keeps what it gets."""

    num_dropped_spans = 0

    def __init__(self):
        self.sent = []

    def send(self, spans):
        self.sent.append(list(spans))

    def close(self):
        self.sent.append("closed")


def fold_of(sampler=None):
    kept = Kept()
    return SpanFold([kept], sampler or Sampler(), model="m"), kept


def test_a_request_goes_out_when_its_http_request_has_ended():
    fold, kept = fold_of()
    fold.answer(log_row())
    assert kept.sent == []
    fold.http(http_row())
    assert [len(spans) for spans in kept.sent] == [NUM_SPANS]
    assert fold.num_open_requests == 0
    fold.close()
    assert kept.sent[1:] == ["closed"]


def test_answers_of_one_http_request_are_one_tree():
    fold, kept = fold_of()
    fold.answer(log_row(request_id="a"))
    fold.http(http_row(num_answers=3))
    fold.answer(log_row(request_id="b"))
    assert fold.num_open_requests == 1
    fold.answer(log_row(request_id="c"))
    assert fold.num_open_requests == 0
    spans = [span for sent in kept.sent for span in sent]
    assert len(spans) == 1 + 3 * (NUM_SPANS - 1)
    assert len({span.span_id for span in spans}) == len(spans)
    assert {span.parent_span_id for span in spans} - {span.span_id for span in spans} == {None}


@pytest.mark.parametrize(
    ("http", "answer", "is_kept"),
    [
        ({}, {}, False),
        ({"sampled": True}, {}, True),
        ({"error_type": "queue_full"}, None, True),
        ({}, {"finish_reason": "error", "error": "x"}, True),
        ({}, {"finish_reason": "abort"}, True),
        # Slow: from 9 us on.
        ({"ended_ns": 900 + 9_000}, {}, True),
        ({"ended_ns": 900 + 8_999}, {}, False),
        # A caller that did not sample has no span for these to be children of.
        ({"parent_span_id": PARENT, "error_type": "queue_full"}, None, False),
        ({"parent_span_id": PARENT, "ended_ns": 1 << 40}, {}, False),
        ({"parent_span_id": PARENT, "sampled": True}, {}, True),
    ],
)
def test_what_failed_or_was_slow_is_kept_where_the_trace_begins_here(http, answer, is_kept):
    fold, kept = fold_of(Sampler(slow_ns=9_000))
    if answer is not None:
        fold.answer(log_row(**answer))
    fold.http(http_row(**({"sampled": False, "num_answers": int(answer is not None)} | http)))
    assert bool(kept.sent) == is_kept
    assert fold.num_open_requests == 0


def test_what_comes_late_is_kept_with_the_rest_or_not_at_all():
    for sampled in (True, False):
        fold, kept = fold_of()
        fold.http(http_row(sampled=sampled))
        fold.answer(log_row(finish_reason="abort"))
        assert [len(spans) for spans in kept.sent] == ([1, NUM_SPANS - 1] if sampled else [])


def test_a_row_without_a_trace_has_no_spans():
    fold, kept = fold_of()
    fold.answer(log_row(trace_id=None, span_id=None))
    assert (kept.sent, fold.num_open_requests) == ([], 0)


@given(st.integers(0, (1 << 128) - 1), st.floats(0, 1))
def test_the_head_keeps_the_share_by_the_trace_id_alone(number, fraction):
    trace_id = f"{number:032x}"
    sampler = Sampler(fraction=fraction)
    assert sampler.head(trace_id, None) == ((number & ((1 << 64) - 1)) < fraction * (1 << 64))
    assert sampler.head(trace_id, True)
    assert not sampler.head(trace_id, False)
    ignores = Sampler(fraction=fraction, obeys_parent=False)
    assert ignores.head(trace_id, True) == ignores.head(trace_id, False) == sampler.head(trace_id, None)


@pytest.mark.parametrize(
    ("environ", "fraction", "expected"),
    [
        ({}, None, Sampler(1.0, True)),
        ({"OTEL_TRACES_SAMPLER": "always_off"}, None, Sampler(0.0, False)),
        ({"OTEL_TRACES_SAMPLER": "parentbased_always_off"}, None, Sampler(0.0, True)),
        (
            {"OTEL_TRACES_SAMPLER": "traceidratio", "OTEL_TRACES_SAMPLER_ARG": "0.25"},
            None,
            Sampler(0.25, False),
        ),
        ({"OTEL_TRACES_SAMPLER": "parentbased_traceidratio"}, None, Sampler(1.0, True)),
        ({"OTEL_TRACES_SAMPLER": "always_off"}, 0.5, Sampler(0.5, False)),
        ({"OTEL_TRACES_SAMPLER": "  "}, 0.0, Sampler(0.0, True)),
    ],
)
def test_opentelemetrys_variables_are_heeded(environ, fraction, expected):
    assert Sampler.from_environment(environ, fraction=fraction) == expected


@pytest.mark.parametrize(
    "environ",
    [
        {"OTEL_TRACES_SAMPLER": "jaeger_remote"},
        {"OTEL_TRACES_SAMPLER": "traceidratio", "OTEL_TRACES_SAMPLER_ARG": "2"},
        {"OTEL_TRACES_SAMPLER": "traceidratio", "OTEL_TRACES_SAMPLER_ARG": "half"},
        {"OTEL_TRACES_SAMPLER": "traceidratio", "OTEL_TRACES_SAMPLER_ARG": "nan"},
    ],
)
def test_variables_that_say_nothing_usable_are_refused(environ):
    with pytest.raises(ValueError, match="expected OTEL_TRACES_SAMPLER"):
        Sampler.from_environment(environ)
