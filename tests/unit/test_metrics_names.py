"""Metrics under vLLM's names and OpenTelemetry's, their exemplars, and when they move."""

from __future__ import annotations

import random
import sys
from itertools import accumulate
from pathlib import Path

import msgspec
import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text

sys.path.insert(0, str(Path(__file__).parent))
from ledger_rows import STAMPS, engine_row, http_row, identity, log_row, step_row, token_rows
from metric_samples import OPENMETRICS, exemplars, feed_as_the_server_does, new_fold, random_requests, samples

from firstdiff.tracing.names import METRICS

REJECTED = "firstdiff_admission_rejections_total"
DURATION = "gen_ai_server_request_duration_seconds"


def test_latencies_carry_the_trace_as_exemplar_in_openmetrics_only():
    fold = new_fold()
    fold.begin("r1", num_prompt_tokens=3, trace_id=STAMPS.trace_id)
    for row in (*token_rows(3), engine_row(3)):
        fold.feed(row)
    fold.observe_end(log_row())
    assert exemplars(fold) == {
        f"firstdiff_{metric.name}_bucket": {STAMPS.trace_id} for metric in METRICS if metric.has_exemplars
    }
    assert b"trace_id" not in fold.exposition()[1]
    assert fold.num_open_requests == 0


def test_a_trace_that_is_not_kept_is_no_exemplar():
    fold = new_fold()
    fold.begin("r1", num_prompt_tokens=3, trace_id=None)
    for row in (*token_rows(3), engine_row(3)):
        fold.feed(row)
    fold.observe_end(log_row())
    assert exemplars(fold) == {}


def test_each_bucket_names_the_last_request_that_came_into_it():
    fold = new_fold()
    gaps_ms = {"a": [1, 1, 7, 7], "b": [7, 30], "c": [30]}
    for request_id, gaps in gaps_ms.items():
        fold.begin(request_id, num_prompt_tokens=1, trace_id=f"{ord(request_id):032x}")
        emitted_ms = [0, *accumulate(gaps)]
        for token, at_ms in zip(token_rows(len(emitted_ms), request_id), emitted_ms, strict=True):
            fold.feed(msgspec.structs.replace(token, emitted_ns=at_ms * 1_000_000))
    named = {
        float(sample.labels["le"]): chr(int(sample.exemplar.labels["trace_id"], 16))
        for family in parse_openmetrics(fold.exposition(OPENMETRICS)[1].decode())
        for sample in family.samples
        if sample.exemplar
    }
    assert named == {0.001: "a", 0.0075: "b", 0.03: "c"}
    assert samples(fold)["firstdiff_inter_token_latency_seconds_count", ()] == 7


def test_nothing_is_kept_of_requests_that_were_ended_or_refused():
    fold = new_fold()
    for request_id in ("refused", "aborted", "whole"):
        fold.begin(request_id, num_prompt_tokens=3, trace_id=STAMPS.trace_id)
    assert fold.num_open_requests == 3
    fold.forget("refused")
    fold.feed(engine_row(0, "aborted", finish_reason="abort"))
    fold.observe_end(log_row(request_id="aborted", first_token_ns=None, finish_reason="abort"))
    for row in (*token_rows(3, "whole"), engine_row(3, "whole")):
        fold.feed(row)
    assert fold.num_open_requests == 1
    fold.observe_end(log_row(request_id="whole"))
    assert fold.num_open_requests == 0


def families(fold, accept=""):
    """The samples of each family of a scrape, without the moments at which they were made."""
    parse = parse_openmetrics if accept else parse_text
    return {
        family.name: (family.type, [s for s in family.samples if not s.name.endswith("_created")])
        for family in parse(fold.exposition(accept)[1].decode())
    }


@pytest.mark.parametrize("accept", ["", OPENMETRICS])
def test_vllms_dialect_repeats_the_core_set_with_the_same_values(accept):
    fold = new_fold(dialect="vllm")
    fold.feed(identity(engine_config={"block_size": 16, "num_blocks": 64}))
    rows = random_requests(3, num_requests=30)
    for row in rows:
        fold.begin(row.request_id, num_prompt_tokens=len(row.prompt_token_ids), trace_id=STAMPS.trace_id)
    feed_as_the_server_does(fold, rows, random.Random(3))
    fold.feed(step_row(0))
    shown = families(fold, accept)
    twins = {name for name in shown if name.startswith("vllm:") and not name.endswith("_created")}
    assert twins == {f"vllm:{metric.name}" for metric in METRICS if metric.in_vllm}
    for metric in METRICS:
        if not metric.in_vllm:
            continue
        kind, ours = shown[metric.full_name]
        twin_kind, theirs = shown[f"vllm:{metric.name}"]
        assert twin_kind == kind
        assert [s._replace(name=s.name.replace("vllm:", "firstdiff_")) for s in theirs] == ours
    assert sum(s.value for s in shown["vllm:generation_tokens"][1]) == sum(len(r.token_ids) for r in rows)
    named = {name for name in exemplars(fold) if name.startswith("vllm:")}
    assert named == {f"vllm:{metric.name}_bucket" for metric in METRICS if metric.has_exemplars}


def test_our_dialect_has_none_of_vllms_names():
    assert b"vllm" not in new_fold().exposition()[1]


def test_vllms_labels_are_there():
    fold = new_fold(dialect="vllm")
    fold.feed(engine_row(0))
    text = fold.exposition()[1].decode()
    assert 'vllm:num_requests_running{engine="0",model_name="m"} 0.0' in text
    assert 'vllm:request_success_total{engine="0",finished_reason="length",model_name="m"} 1.0' in text


def test_prompt_tokens_move_when_the_first_token_leaves():
    fold = new_fold()
    fold.begin("r1", num_prompt_tokens=3, trace_id=None)

    def counted():
        found = samples(fold)
        return found["firstdiff_prompt_tokens_total", ()], found["firstdiff_prompt_tokens_cached_total", ()]

    first, second = token_rows(2)
    assert counted() == (0, 0)
    fold.feed(msgspec.structs.replace(first, num_cached_tokens=1))
    assert counted() == (3, 1)
    fold.feed(second)
    fold.feed(engine_row(2))
    assert counted() == (3, 1)


@pytest.mark.parametrize(
    ("num_tokens", "reason", "is_counted"),
    [(0, "length", True), (2, "stop", True), (2, "abort", True), (0, "abort", False), (0, "error", False)],
)
def test_prompt_tokens_of_rows_alone_are_those_that_were_computed(num_tokens, reason, is_counted):
    fold = new_fold()
    for row in (*token_rows(num_tokens), engine_row(num_tokens, finish_reason=reason)):
        fold.feed(row)
    assert samples(fold)["firstdiff_prompt_tokens_total", ()] == (3 if is_counted else 0)


def test_only_logits_that_are_not_finite_corrupt_a_request():
    fold = new_fold()
    for error in ("FloatingPointError: expected finite logits, got nan", "ValueError: no", None):
        fold.feed(engine_row(0, finish_reason="error", error=error))
    assert samples(fold)["firstdiff_corrupted_requests_total", ()] == 1


def test_rejections_are_what_the_engine_never_took():
    fold = new_fold()
    fold.feed(http_row())
    fold.feed(http_row(status=429, error_type="queue_full", num_answers=0))
    fold.feed(http_row(status=503, error_type="engine_unavailable", num_answers=0))
    # Its engine died while it was answered.
    fold.feed(http_row(status=503, error_type="engine_unavailable", num_answers=1))
    fold.feed(http_row(status=400, error_type="unknown_parameter", num_answers=0))
    found = samples(fold)
    assert found[REJECTED, (("reason", "queue_full"),)] == 1
    assert found[REJECTED, (("reason", "engine_unavailable"),)] == 1


def test_opentelemetrys_duration_is_of_each_http_request_and_its_error():
    fold = new_fold()
    fold.feed(http_row(received_ns=0, ended_ns=30_000_000))
    fold.feed(http_row(received_ns=0, ended_ns=1_000_000, error_type="queue_full", num_answers=0))
    fold.feed(http_row(received_ns=0, ended_ns=2_000_000, route="/v1/chat/completions"))
    found = {
        tuple(sorted(extra)): value
        for (name, extra), value in samples(fold).items()
        if name == f"{DURATION}_sum"
    }
    assert found == {
        (("error_type", ""), ("gen_ai_operation_name", "text_completion")): 0.03,
        (("error_type", "queue_full"), ("gen_ai_operation_name", "text_completion")): 0.001,
        (("error_type", ""), ("gen_ai_operation_name", "chat")): 0.002,
    }
    # What the conventions advise.
    edges = [metric.buckets for metric in METRICS if metric.full_name == DURATION]
    assert edges == [tuple(0.01 * 2**power for power in range(14))]


@pytest.mark.parametrize(("reason", "is_told"), [("stop", True), ("length", True), ("abort", False)])
def test_opentelemetrys_latencies_are_of_finished_answers(reason, is_told):
    fold = new_fold()
    row = log_row(finish_reason=reason)
    fold.observe_end(row)
    found = samples(fold)
    operation = (("gen_ai_operation_name", "text_completion"),)
    ttft_s = (row.first_token_ns - row.received_ns) / 1e9
    # (request duration - time to first token) / (output tokens - 1)
    tpot_s = ((row.flushed_ns - row.received_ns) / 1e9 - ttft_s) / 2
    assert found["gen_ai_server_time_to_first_token_seconds_sum", operation] == is_told * ttft_s
    shown = found["gen_ai_server_time_per_output_token_seconds_sum", operation]
    assert shown == pytest.approx(is_told * tpot_s)
