"""Two sets of traces: the split is exact, the phase is named, and what cannot be said is not."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parent))
from traced_sides import START_NS, side

from firstdiff.regression.phase_report import to_json, to_text
from firstdiff.regression.phase_split import window_mean
from firstdiff.regression.trace_diff import DiffConfig, diff_traces
from firstdiff.regression.trace_phases import FIRSTDIFF, SGLANG, SGLANG_ROOT, VLLM, read_requests
from firstdiff.tracing import names
from firstdiff.tracing.span_record import SpanRecord

FAR_NS = START_NS + 10**14


def quick(base, candidate, **settings_):
    return diff_traces(base, candidate, DiffConfig(num_resamples=200, **settings_))


@pytest.mark.parametrize("has_cases", [True, False], ids=["in pairs", "by length"])
@pytest.mark.parametrize("phase", ["prefill", "decode", "queue", "stream"])
def test_the_slower_phase_is_named(phase, has_cases):
    factor = {"prefill": 6, "decode": 1.5, "queue": 100, "stream": 800}[phase]
    base, candidate = side(1, has_cases=has_cases), side(2, has_cases=has_cases, factors={phase: factor})
    found = quick(base, candidate)
    assert (found.status, found.guilty, found.is_paired) == ("fail", phase, has_cases)
    assert [one.place for one in found.splits] == ["mean", "p50", "p90", "p99"]
    for one in found.splits:
        # The parts are the whole, at every place.
        assert sum(part.value for part in one.parts.values()) == pytest.approx(one.change.value, rel=1e-9)
        assert one.candidate_ns - one.base_ns == pytest.approx(one.change.value, rel=1e-9)
        assert one.change.low <= one.change.value <= one.change.high
        assert sum(one.base_parts_ns.values()) == pytest.approx(one.base_ns)
    mean = found.splits[0]
    assert mean.parts[phase].value > 0.9 * mean.change.value
    assert mean.parts[phase].low > 0
    assert f"{phase} adds" in to_text(found)


def test_two_alike_sides_pass_and_blame_nobody():
    found = quick(side(1), side(2))
    assert (found.status, found.guilty, found.attributes) == ("pass", None, [])
    assert "no phase certainly adds" in to_text(found)


def test_a_longer_workload_is_no_slowness():
    """The candidate was asked for twice as long answers: all of it is workload, none of it speed."""
    found = quick(side(1), side(2, output_factor=2.0))
    decode = next(shift for shift in found.shifts if shift.phase == "decode")
    mean = found.splits[0]
    assert decode.by_workload_ns + decode.by_speed_ns == pytest.approx(mean.parts["decode"].value)
    # Not exactly twice the gaps: n tokens have n - 1.
    assert abs(decode.by_speed_ns) < 0.05 * decode.by_workload_ns
    rate = next(rate for rate in found.rates if rate.phase == "decode")
    assert abs(rate.change.value) < 0.05


def test_unpaired_sides_with_another_mix_are_made_alike_first():
    """The candidate has twice as many of the long requests; each is as quick as on base."""
    base = side(1, 400, has_cases=False)
    candidate = side(2, 400, has_cases=False)
    long = {span.trace_id for span in candidate if span.attributes[names.GEN_AI_OUTPUT_TOKENS] > 30}
    again = [
        msgspec.structs.replace(span, trace_id="f" + span.trace_id[1:])
        for span in candidate
        if span.trace_id in long
    ]
    found = quick(base, candidate + again)
    assert (found.status, found.is_paired) == ("pass", False)
    assert abs(found.slowdown.value) < 0.05


def test_what_goes_with_the_change_is_ranked():
    """Decoding got slower only where the batch was large; a tenant had no part in it."""
    batch_of = lambda index: 8 if index % 3 == 0 else 1  # noqa: E731
    slower = lambda index: 3.0 if index % 3 == 0 else 1.0  # noqa: E731
    base = side(1, batch_of=batch_of)
    candidate = side(2, batch_of=batch_of, factors={"decode": slower})
    found = quick(base, candidate)
    assert found.guilty == "decode"
    assert found.attributes[0].name == names.FIRST_BATCH_SIZE
    assert found.attributes[0].effect > 0.7
    assert all(one.p_value < 0.05 for one in found.attributes)


def test_the_queue_is_measured_by_who_was_ahead():
    """Two come at once, ten times a second: the second waits for the first."""

    def crowd(seed, wait_ns):
        spans = side(seed, 60, has_cases=False, noise=0.01)
        out = []
        for index, span in enumerate(spans):
            own = dict(span.attributes) | {
                names.PHASE_TOTAL_NS["tokenize"]: 0,
                names.PHASE_TOTAL_NS["queue"]: wait_ns * (1 + index % 2),
            }
            start = START_NS + index // 2 * 10**8 + index % 2
            out.append(msgspec.structs.replace(span, start_unix_ns=start, attributes=own))
        return out

    found = quick(crowd(1, 10**6), crowd(2, 3 * 10**6))
    rate = next(rate for rate in found.rates if rate.phase == "queue")
    assert rate.unit == "request ahead"
    assert rate.num_base == 30
    assert rate.change.value == pytest.approx(2.0, abs=0.01)


def test_examples_show_the_pairs_that_changed_most_with_links():
    worst = {10, 50, 90, 130, 170}
    slower = lambda index: 4.0 if index in worst else 1.4  # noqa: E731
    found = quick(side(1), side(2, factors={"prefill": 1.0, "decode": slower}))
    assert found.guilty == "decode"
    assert len(found.examples) == 5
    text = to_text(found, jaeger_url="http://jaeger:16686/")
    one = found.examples[0]
    assert f"http://jaeger:16686/trace/{one.base_trace_id}...{one.candidate_trace_id}" in text
    lines = text.splitlines()
    at = next(index for index, line in enumerate(lines) if one.base_trace_id in line)
    assert lines[at + 1].count("d") < lines[at + 2].count("d")
    assert json.loads(to_json(found))["examples"][0]["base_trace_id"] == one.base_trace_id


@pytest.mark.parametrize(
    ("base", "candidate", "reason"),
    [
        (side(1, 10), side(2, 10), "expected 16 pairs or more, got 10"),
        (side(1, 10, has_cases=False), side(2, 10, has_cases=False), "of like length on each side"),
        ([], side(2), "expected requests in base's traces, got none"),
        (side(1), [span for span in side(2) if span.kind == "client"], "200 lack the server's spans"),
        (
            side(1),
            [span for index, span in enumerate(side(2)) if span.kind == "client" or index % 10 != 1],
            "expected the server's spans of each request",
        ),
    ],
)
def test_what_cannot_be_compared_is_refused_with_the_reason(base, candidate, reason):
    found = quick(base, candidate)
    assert (found.status, found.splits) == ("unknown", [])
    assert reason in found.reasons[0]
    assert reason in to_text(found)


def test_sides_that_did_not_take_turns_fail_only_grossly():
    base = side(1)
    slower = quick(base, side(2, factors={"decode": 1.5}, start_ns=FAR_NS))
    assert (slower.status, slower.took_turns) == ("unknown", False)
    assert "did not take turns" in slower.reasons[0]
    assert quick(base, side(2, factors={"decode": 3.0}, start_ns=FAR_NS)).status == "fail"
    assert quick(base, side(2, start_ns=FAR_NS)).status == "pass"


def test_the_same_spans_give_the_same_bytes():
    assert to_json(quick(side(1), side(2))) == to_json(quick(side(1), side(2)))


def test_text_from_traces_is_harmless():
    spans = [
        msgspec.structs.replace(
            span, attributes={**span.attributes, names.CASE_ID: f"\x1b[31m{span.attributes[names.CASE_ID]}\n"}
        )
        if span.kind == "client"
        else span
        for span in side(1)
    ]
    text = to_text(quick(spans, spans))
    assert "\x1b" not in text


@given(
    st.lists(st.tuples(st.integers(0, 1000), st.integers(0, 1000)), min_size=1, max_size=30),
    st.floats(0, 0.98),
    st.floats(0.01, 1),
    st.randoms(),
)
@settings(max_examples=200)
def test_a_window_of_ranks_is_what_a_slow_count_gives(rows, low, width, rng):
    high = min(1.0, low + width)
    table = np.asarray(rows, dtype=np.float64)
    weights = np.asarray([rng.randint(0, 3) for _ in rows], dtype=np.float64)
    if not weights.sum():
        weights[0] = 1
    found = window_mean(table, weights[None], (low, high))[0]
    # Each request as many times as it counts, in a thousand slices each.
    order = sorted(range(len(rows)), key=lambda index: (table[index].sum(), index))
    slices = [index for index in order for _ in range(int(weights[index]) * 1000)]
    chosen = slices[round(low * len(slices)) : max(round(high * len(slices)), round(low * len(slices)) + 1)]
    expected = table[chosen].mean(axis=0)
    assert np.allclose(found, expected, atol=0.01 * max(1.0, table.max()) + 2000 / len(slices))


# Foreign traces.


def foreign(name, attributes, *, duration_ns=10**8, index=0, parent=None, span_id="5" * 16):
    start = START_NS + index * 10**8
    return SpanRecord(
        name=name,
        kind="server",
        trace_id=f"{index + 1:032x}",
        span_id=span_id,
        parent_span_id=parent,
        start_unix_ns=start,
        end_unix_ns=start + duration_ns,
        attributes=attributes,
    )


def vllm(index=0, prefill_s=0.02, **attributes):
    return foreign(
        "llm_request",
        {
            "gen_ai.latency.time_in_queue": 0.01,
            "gen_ai.latency.time_in_model_prefill": prefill_s,
            "gen_ai.latency.time_in_model_decode": 0.05,
            "gen_ai.latency.e2e": 0.07 + prefill_s,
            "gen_ai.usage.prompt_tokens": 100,
            "gen_ai.usage.completion_tokens": 20,
            **attributes,
        },
        index=index,
    )


def test_vllms_one_span_has_phases():
    (request,), unread = read_requests([vllm()])
    assert request.definition is VLLM
    assert request.phases_ns == {"queue": 10**7, "prefill": 2 * 10**7, "decode": 5 * 10**7, "other": 10**7}
    assert (request.num_prompt_tokens, request.num_output_tokens) == (100, 20)
    assert dataclasses.astuple(unread) == (0, 0, 0, 0)
    slower = quick([vllm(i) for i in range(40)], [vllm(i, prefill_s=0.1) for i in range(40)])
    assert (slower.status, slower.guilty) == ("fail", "prefill")


def test_phases_that_do_not_fit_are_counted_as_skewed():
    requests, unread = read_requests([vllm(**{"gen_ai.latency.e2e": 0.01})])
    assert (requests, unread.skewed) == ([], 1)
    found = quick([vllm(i) for i in range(40)], [vllm(i, **{"gen_ai.latency.e2e": 0.01}) for i in range(40)])
    assert found.status == "unknown"


def sglang(index=0, ranks=2):
    """A root, a thread for each rank, and slices in it; all ranks compute the same at the same time."""
    root = foreign("null Req 1a2b3c4d", {"gen_ai.usage.prompt_tokens": 9}, index=index, span_id="a" * 16)
    spans = [root]
    for rank in range(ranks):
        thread = foreign(f"scheduler [TP {rank}](host:x | pid:{rank})", {}, index=index, parent="a" * 16)
        thread = msgspec.structs.replace(thread, span_id=f"b{rank:015x}")
        spans.append(thread)
        parts = [("prefill_waiting", 10**7), ("prefill_forward", 3 * 10**7), ("decode_forward", 5 * 10**7)]
        for number, (name, duration_ns) in enumerate(parts):
            part = foreign(name, {}, index=index, duration_ns=duration_ns, parent=thread.span_id)
            spans.append(msgspec.structs.replace(part, span_id=f"c{rank:07x}{number:08x}"))
    return spans


def test_sglangs_tree_has_phases():
    (request,), _ = read_requests(sglang())
    assert request.definition is SGLANG
    assert request.phases_ns == {
        "tokenize": 0,
        "queue": 10**7,
        "prefill": 3 * 10**7,
        "decode": 5 * 10**7,
        "other": 10**7,
    }


def test_sglangs_root_alone_has_the_queue_inside_its_prefill():
    root = foreign(
        "null Req 1a2b3c4d",
        {"gen_ai.latency.time_in_model_prefill": 0.03, "gen_ai.latency.time_in_model_decode": 0.05},
    )
    (request,), _ = read_requests([root])
    assert request.definition is SGLANG_ROOT
    assert request.phases_ns == {"queue and prefill": 3 * 10**7, "decode": 5 * 10**7, "other": 2 * 10**7}


def test_unlike_definitions_are_not_compared():
    sides = {
        "firstdiff": side(1, 40),
        "vllm": [vllm(index) for index in range(40)],
        "sglang": [span for index in range(40) for span in sglang(index)],
    }
    for one in sides:
        for other in sides:
            found = quick(sides[one], sides[other])
            if one != other:
                assert found.status == "unknown"
                assert "expected phases of one definition" in found.reasons[0]
            else:
                assert found.splits
    mixed = quick(sides["vllm"] + sides["firstdiff"], sides["vllm"])
    assert "expected one kind of trace in base" in mixed.reasons[0]


def test_our_own_definitions_are_the_table_of_names():
    assert tuple(phase for phase, _, _ in FIRSTDIFF.phases) == names.PHASES


def test_failed_requests_are_counted_apart():
    spans = side(1, 20)
    failed = msgspec.structs.replace(spans[1], error="abort")
    refused = foreign("POST /v1/completions", {"error.type": "queue_full"}, index=900)
    lost = msgspec.structs.replace(spans[0], trace_id="e" * 32, error="time-out")
    strange = foreign("GET /", {}, index=901)
    requests, unread = read_requests([*spans[:1], failed, *spans[2:], refused, lost, strange])
    assert len(requests) == 19
    assert (unread.failed, unread.unknown, unread.without_server) == (3, 1, 0)
