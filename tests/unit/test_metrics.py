"""The metrics are what an independent count over the log says, and Prometheus' own parsers read them."""

from __future__ import annotations

import math
import random
import re
import sys
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text

sys.path.insert(0, str(Path(__file__).parent))
from ledger_rows import STAMPS, engine_row, identity, log_row, step_row, token_rows
from metric_samples import OPENMETRICS, feed_as_the_server_does, new_fold, random_requests, samples

from firstdiff.tracing.metric_table import METRIC_PREFIX
from firstdiff.tracing.names import METRICS
from firstdiff.tracing.token_log import (
    TokenLogFold,
    TokenLogWriter,
    phase_durations_ns,
    read_token_log,
    unfold,
)


def expected_distributions(rows):
    """Each request histogram's observations, counted from the log with nothing of the fold's code."""
    with_token = [row for row in rows if row.first_token_ns is not None]
    scheduled = [row for row in rows if row.first_scheduled_ns is not None]
    return {
        "e2e_request_latency_seconds": [(row.flushed_ns - row.received_ns) / 1e9 for row in rows],
        "time_to_first_token_seconds": [(row.first_token_ns - row.received_ns) / 1e9 for row in with_token],
        "request_tokenize_time_seconds": [(row.tokenized_ns - row.received_ns) / 1e9 for row in rows],
        "request_queue_time_seconds": [
            ((row.first_scheduled_ns or row.first_token_ns or row.finished_ns) - row.tokenized_ns) / 1e9
            for row in rows
        ],
        "request_prefill_time_seconds": [
            ((row.first_token_ns or row.finished_ns) - row.first_scheduled_ns) / 1e9 for row in scheduled
        ],
        "request_inference_time_seconds": [
            (row.finished_ns - row.first_scheduled_ns) / 1e9 for row in scheduled
        ],
        "request_decode_time_seconds": [(row.finished_ns - row.first_token_ns) / 1e9 for row in with_token],
        "request_preempted_time_seconds": [
            phase_durations_ns(row)["preempted"] / 1e9 for row in rows if row.preemptions
        ],
        "request_stream_time_seconds": [(row.flushed_ns - row.finished_ns) / 1e9 for row in rows],
        "request_time_per_output_token_seconds": [
            (row.finished_ns - row.first_token_ns) / 1e9 / (len(row.token_ids) - 1)
            for row in with_token
            if len(row.token_ids) > 1
        ],
        "inter_token_latency_seconds": [
            (later - earlier) / 1e9
            for row in rows
            for earlier, later in zip(row.emitted_ns, row.emitted_ns[1:], strict=False)
        ],
        "request_prompt_tokens": [len(row.prompt_token_ids) for row in rows],
        "request_generation_tokens": [len(row.token_ids) for row in rows],
        "request_params_max_tokens": [row.sampling.max_tokens for row in rows],
        "request_num_preemptions": [row.num_preemptions for row in rows],
        "request_prefill_kv_computed_tokens": [
            len(row.prompt_token_ids) - row.num_cached_tokens for row in rows
        ],
    }


@pytest.mark.parametrize("seed", range(8))
def test_values_equal_an_independent_count_over_the_saved_log(tmp_path, seed):
    rng = random.Random(seed)
    live = new_fold()
    rows = random_requests(seed, num_requests=40)
    feed_as_the_server_does(live, rows, rng)
    writer = TokenLogWriter(tmp_path, identity())
    for row in rows:
        writer.write(row)
    writer.close()
    _, saved = read_token_log(tmp_path)
    # The writer itself says what the text was.
    assert [msgspec.structs.replace(row, text_sha256="", num_text_chars=0) for row in saved] == rows

    found = samples(live)
    buckets = {m.name: m.buckets for m in METRICS if m.prefix == METRIC_PREFIX}
    for name, observed in expected_distributions(saved).items():
        assert found[f"firstdiff_{name}_count", ()] == len(observed), name
        assert found[f"firstdiff_{name}_sum", ()] == pytest.approx(math.fsum(observed), rel=1e-9), name
        for bound in (*buckets[name], math.inf):
            labels = (("le", "+Inf" if bound == math.inf else str(float(bound))),)
            below = sum(value <= bound for value in observed)
            assert found[f"firstdiff_{name}_bucket", labels] == below, (name, bound)
    for reason in ("stop", "length", "abort", "error"):
        number = sum(row.finish_reason == reason for row in saved)
        assert found["firstdiff_request_success_total", (("finished_reason", reason),)] == number
    prefilled = [row for row in saved if row.token_ids or row.finish_reason in ("stop", "length")]
    assert 0 < len(prefilled) < len(saved)
    assert found["firstdiff_prompt_tokens_total", ()] == sum(len(row.prompt_token_ids) for row in prefilled)
    assert found["firstdiff_prompt_tokens_cached_total", ()] == sum(r.num_cached_tokens for r in prefilled)
    assert found["firstdiff_generation_tokens_total", ()] == sum(len(row.token_ids) for row in saved)


@pytest.mark.parametrize("seed", range(4))
def test_folding_the_saved_log_again_gives_the_same_metrics(seed):
    rows = random_requests(seed, num_requests=25)
    live, again = new_fold(), new_fold()
    feed_as_the_server_does(live, rows, random.Random(seed))
    for row in rows:
        tokens, engine = unfold(row)
        for token in tokens:
            again.feed(token)
        again.feed(engine)
        again.observe_end(row)
    first, second = samples(live), samples(again)
    assert first.keys() == second.keys()
    for key, value in first.items():
        # Sums of floats depend on their order, by an ulp or so; counts do not.
        assert value == (pytest.approx(second[key], rel=1e-9) if key[0].endswith("_sum") else second[key]), (
            key
        )


@settings(max_examples=50, deadline=None)
@given(
    st.lists(
        st.fixed_dictionaries(
            {
                "num_prefill_tokens": st.integers(0, 20_000),
                "num_decode_tokens": st.integers(0, 64),
                "num_running": st.integers(0, 64),
                "num_waiting": st.integers(0, 64),
                "num_preemptions": st.integers(0, 3),
                "num_used_blocks": st.integers(0, 8),
                "num_blocks": st.just(8),
                "num_prefix_queried_tokens": st.integers(0, 500),
                "num_prefix_hit_tokens": st.integers(0, 500),
                "ended_ns": st.integers(0, 10**10),
            }
        ),
        min_size=1,
        max_size=10,
    )
)
def test_steps_move_gauges_and_counters(changes):
    steps = [msgspec.structs.replace(step_row(0), started_ns=0, **change) for change in changes]
    fold = new_fold()
    for step in steps:
        fold.feed(step)
    found = samples(fold)
    assert found["firstdiff_num_requests_running", ()] == steps[-1].num_running
    assert found["firstdiff_num_requests_waiting", ()] == steps[-1].num_waiting
    assert found["firstdiff_kv_cache_usage_perc", ()] == steps[-1].num_used_blocks / 8
    assert found["firstdiff_engine_steps_total", ()] == len(steps)
    assert found["firstdiff_num_preemptions_total", ()] == sum(step.num_preemptions for step in steps)
    queried = sum(step.num_prefix_queried_tokens for step in steps)
    hit = sum(step.num_prefix_hit_tokens for step in steps)
    computed = sum(step.num_prefill_tokens for step in steps)
    assert found["firstdiff_prefix_cache_queries_total", ()] == queried
    assert found["firstdiff_prefix_cache_hits_total", ()] == hit
    assert found["firstdiff_prompt_tokens_by_source_total", (("source", "local_cache_hit"),)] == hit
    assert found["firstdiff_prompt_tokens_by_source_total", (("source", "local_compute"),)] == computed
    sizes = [step.num_prefill_tokens + step.num_decode_tokens for step in steps]
    assert found["firstdiff_iteration_tokens_total_sum", ()] == sum(sizes)
    assert found["firstdiff_iteration_tokens_total_bucket", (("le", "64.0"),)] == sum(n <= 64 for n in sizes)
    assert found["firstdiff_step_time_seconds_sum", ()] == pytest.approx(
        math.fsum(step.ended_ns / 1e9 for step in steps)
    )


def test_an_unused_server_already_shows_every_metric():
    fold = new_fold()
    assert set(samples(fold).values()) == {0.0}
    fold.feed(identity(engine_config={"block_size": 16, "num_blocks": 64}))
    found = samples(fold)
    shape = (("block_size", "16"), ("num_gpu_blocks", "64"))
    assert found.pop(("firstdiff_cache_config_info", shape)) == 1
    for metric in METRICS[1:]:
        name = metric.series + ("_count" if metric.kind == "histogram" else "")
        assert any(shown == name for shown, _ in found), metric.name
    assert set(found.values()) == {0.0}


@pytest.mark.parametrize(
    "accept", ["", "text/plain", "*/*", "text/plain;version=0.0.4", OPENMETRICS, ";;,=;q", "\xff"]
)
def test_the_exposition_is_parsed_with_its_types_and_definitions(accept):
    fold = new_fold()
    feed_as_the_server_does(fold, random_requests(1, num_requests=5), random.Random(1))
    content_type, body = fold.exposition(accept)
    is_openmetrics = accept == OPENMETRICS
    assert content_type.startswith("application/openmetrics-text" if is_openmetrics else "text/plain")
    families = list((parse_openmetrics if is_openmetrics else parse_text)(body.decode()))
    shown = {family.name: family for family in families}
    for metric in METRICS:
        family = shown[metric.full_name]
        assert (family.type, family.documentation) == (metric.kind, metric.help)


def test_metrics_and_phases_are_the_same_numbers():
    fold = new_fold()
    row = log_row(first_token_ns=None)
    fold.observe_end(row)
    found = samples(fold)
    phases = phase_durations_ns(row)
    for name in ("tokenize", "queue", "prefill", "stream"):
        assert found[f"firstdiff_request_{name}_time_seconds_sum", ()] == phases[name] / 1e9
    # No first token: not observed rather than observed as 0.
    assert found["firstdiff_request_decode_time_seconds_count", ()] == 0
    assert found["firstdiff_time_to_first_token_seconds_count", ()] == 0


def test_nothing_is_kept_of_ended_requests():
    fold = new_fold()
    for row in (*token_rows(2), engine_row(2)):
        fold.feed(row)
    assert fold.num_open_requests == 0
    # The same id again: no gap from the first request's last token to this one's first.
    fold.feed(token_rows(1)[0])
    assert samples(fold)["firstdiff_inter_token_latency_seconds_count", ()] == 1


def test_losses_are_totals_and_never_fall():
    fold = new_fold()
    for num_lost_rows, num_dropped_spans in ((0, 0), (2, 7), (2, 7), (5, 14)):
        fold.observe_losses(num_lost_rows=num_lost_rows, num_dropped_spans=num_dropped_spans)
        found = samples(fold)
        assert found["firstdiff_lost_log_rows_total", ()] == num_lost_rows
        assert found["firstdiff_dropped_spans_total", ()] == num_dropped_spans


def test_rows_of_no_concern_move_nothing():
    fold = new_fold()
    fold.feed(identity(engine_config={}))
    fold.feed(log_row())
    assert set(samples(fold).values()) == {0.0}


def test_two_servers_in_one_process_do_not_share_metrics():
    one, other = new_fold(), new_fold()
    one.feed(step_row(0))
    assert samples(one)["firstdiff_engine_steps_total", ()] == 1
    assert samples(other)["firstdiff_engine_steps_total", ()] == 0


def test_the_table_is_well_formed():
    assert len({metric.full_name for metric in METRICS}) == len(METRICS)
    for metric in METRICS:
        assert re.fullmatch(r"[a-z][a-z0-9_]*", metric.name)
        assert metric.help.endswith(".")
        assert bool(metric.buckets) == (metric.kind == "histogram")
        assert metric.kind == "histogram" or not metric.has_exemplars
        assert len(metric.labels) == 1 or not metric.values
        assert list(metric.buckets) == sorted(set(metric.buckets))


def test_vllms_bucket_edges_are_among_ours():
    edges = {metric.name: set(metric.buckets) for metric in METRICS if metric.in_vllm}
    ttft = {
        0.001,
        0.005,
        0.01,
        0.02,
        0.04,
        0.06,
        0.08,
        0.1,
        0.25,
        0.5,
        0.75,
        1,
        2.5,
        5,
        7.5,
        10,
        20,
        40,
        80,
        160,
        640,
        2560,
    }
    assert ttft <= edges["time_to_first_token_seconds"]
    assert {0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 1920, 7680} <= edges[
        "e2e_request_latency_seconds"
    ]


def test_the_folds_see_one_stream():
    # What the server does: both folds are fed the same rows, then the log row ends the request in both.
    metrics, log = new_fold(), TokenLogFold()
    for row in (*token_rows(3), engine_row(3), step_row(0)):
        metrics.feed(row)
        log.feed(row)
    row = log.end(STAMPS, text="", flushed_ns=9_000, identity_sha256="s")
    metrics.observe_end(row)
    found = samples(metrics)
    assert found["firstdiff_generation_tokens_total", ()] == len(row.token_ids)
    assert (
        found["firstdiff_e2e_request_latency_seconds_sum", ()] == sum(phase_durations_ns(row).values()) / 1e9
    )
