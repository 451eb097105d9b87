"""W3C trace context: every header value there is joins its trace, or starts a new one, and never raises."""

from __future__ import annotations

import random
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.trace import get_current_span
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from firstdiff.tracing.trace_context import (
    MAX_TRACESTATE_CHARS,
    clean_tracestate,
    make_traceparent,
    new_id,
    parse_traceparent,
    start_trace,
)

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
SPAN = "00f067aa0ba902b7"
VALID = f"00-{TRACE}-{SPAN}-01"

HEX = "0123456789abcdef"
TRACE_IDS = st.text(HEX, min_size=32, max_size=32).filter(lambda value: value.strip("0"))
SPAN_IDS = st.text(HEX, min_size=16, max_size=16).filter(lambda value: value.strip("0"))


@pytest.mark.parametrize(
    ("header", "sampled"),
    [
        (VALID, True),
        (f"00-{TRACE}-{SPAN}-00", False),
        (f"00-{TRACE}-{SPAN}-03", True),
        (f"00-{TRACE}-{SPAN}-02", False),
        (f"00-{TRACE}-{SPAN}-ff", True),
        (f"00-{TRACE}-{SPAN}-fe", False),
        (f" \t{VALID}\t ", True),
        (f"01-{TRACE}-{SPAN}-01", True),
        (f"fe-{TRACE}-{SPAN}-01-what-comes-later", True),
        (f"cc-{TRACE}-{SPAN}-00-", False),
    ],
)
def test_a_valid_header_is_joined_and_its_sampled_bit_obeyed(header, sampled):
    context = start_trace(header)
    assert (context.trace_id, context.parent_span_id, context.sampled) == (TRACE, SPAN, sampled)
    assert context.span_id != SPAN
    assert re.fullmatch("[0-9a-f]{16}", context.span_id)


MALFORMED = {
    "none": None,
    "empty": "",
    "garbage": "garbage",
    "upper-case trace id": f"00-{TRACE.upper()}-{SPAN}-01",
    "upper-case span id": f"00-{TRACE}-{SPAN.upper()}-01",
    "upper-case flags": f"00-{TRACE}-{SPAN}-0A",
    "zero trace id": f"00-{'0' * 32}-{SPAN}-01",
    "zero span id": f"00-{TRACE}-{'0' * 16}-01",
    "version ff": f"ff-{TRACE}-{SPAN}-01",
    "version 00 with more": f"{VALID}-x",
    "version 00 with a dash": f"{VALID}-",
    "later version without dash": f"01-{TRACE}-{SPAN}-01x",
    "short trace id": f"00-{TRACE[1:]}-{SPAN}-01",
    "long span id": f"00-{TRACE}-{SPAN}0-01",
    "no flags": f"00-{TRACE}-{SPAN}",
    "no hex": f"00-{'g' * 32}-{SPAN}-01",
    "other digits": f"00-{'٣' * 32}-{SPAN}-01",
    "two joined by a comma": f"{VALID},{VALID}",
    "line break": f"{VALID}\n",
    "zero byte": f"{VALID}\x00",
    "a megabyte": VALID + "0" * 1_000_000,
}


@pytest.mark.parametrize("header", MALFORMED.values(), ids=MALFORMED.keys())
def test_a_malformed_header_starts_a_new_sampled_trace(header):
    context = start_trace(header, "vendor=state")
    assert context.trace_id != TRACE
    assert re.fullmatch("[0-9a-f]{32}", context.trace_id)
    assert context.parent_span_id is None
    assert context.sampled
    # A tracestate belongs to its traceparent and goes with it.
    assert context.tracestate == ""


@given(
    st.text(max_size=80) | st.from_regex(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}.?"),
    st.text(max_size=600),
)
def test_no_header_raises(traceparent, tracestate):
    context = start_trace(traceparent, tracestate)
    assert parse_traceparent(context.traceparent) == (context.trace_id, context.span_id, context.sampled)


@given(TRACE_IDS, SPAN_IDS, st.booleans())
def test_what_is_made_is_parsed_back_also_by_opentelemetry(trace_id, span_id, sampled):
    header = make_traceparent(trace_id, span_id, sampled=sampled)
    assert parse_traceparent(header) == (trace_id, span_id, sampled)
    read = get_current_span(
        TraceContextTextMapPropagator().extract({"traceparent": header})
    ).get_span_context()
    assert (read.trace_id, read.span_id) == (int(trace_id, 16), int(span_id, 16))
    assert bool(read.trace_flags & 1) == sampled


def test_hops_form_one_trace():
    client = start_trace(None)
    router = start_trace(client.traceparent, "")
    engine = start_trace(router.traceparent)
    assert client.trace_id == router.trace_id == engine.trace_id
    assert (client.parent_span_id, router.parent_span_id, engine.parent_span_id) == (
        None,
        client.span_id,
        router.span_id,
    )
    assert len({client.span_id, router.span_id, engine.span_id}) == 3


@pytest.mark.parametrize(
    ("header", "kept"),
    [
        ("", ""),
        ("rojo=00f067aa0ba902b7", "rojo=00f067aa0ba902b7"),
        ("rojo=1,congo=2", "rojo=1,congo=2"),
        (" rojo=1 ,\tcongo=2", "rojo=1,congo=2"),
        ("rojo=1,,congo=2,", "rojo=1,congo=2"),
        ("tenant@vendor=a b", "tenant@vendor=a b"),
        (",".join(f"k{i}=v" for i in range(32)), ",".join(f"k{i}=v" for i in range(32))),
        (",".join(f"k{i}=v" for i in range(33)), ""),
        ("a=" + "x" * (MAX_TRACESTATE_CHARS // 2 - 2), "a=" + "x" * (MAX_TRACESTATE_CHARS // 2 - 2)),
        ("a=" + "x" * 257, ""),
        (",".join(f"key{i}=" + "x" * 100 for i in range(6)), ""),
        ("a=" + "x" * 1_000_000, ""),
        ("a=1,a=2", ""),
        ("novalue", ""),
        ("a=", ""),
        ("UPPER=1", ""),
        ("a=b=c", ""),
        ("a=é", ""),
        ("a=\n", ""),
    ],
)
def test_tracestate_is_kept_whole_or_dropped(header, kept):
    context = start_trace(VALID, header)
    assert (context.trace_id, context.tracestate) == (TRACE, kept)
    assert clean_tracestate(kept) == kept


def test_the_limit_of_tracestate_is_exact():
    members = ["a=" + "x" * 254, "b=" + "x" * 253]
    header = ",".join(members)
    assert len(header) == MAX_TRACESTATE_CHARS
    assert clean_tracestate(header) == header
    assert clean_tracestate(header + "x") == ""


def test_ids_are_drawn_from_the_given_source_and_never_zero():
    rng = random.Random(3)
    drawn = [b"\0" * 8, b"\0" * 8, bytes(range(8))]
    assert new_id(8, lambda _: drawn.pop(0)) == "0001020304050607"
    first = start_trace(None, random_bytes=random.Random(3).randbytes)
    assert first == start_trace(None, random_bytes=rng.randbytes)
