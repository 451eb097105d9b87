"""What /metrics of a server says of requests that were sampled, refused, or asked under vLLM's names."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families

sys.path.insert(0, str(Path(__file__).parent))
from scripted_server import MODEL, Script, ServerUnderTest, scripted_server, spell

from firstdiff.tracing.names import METRICS
from firstdiff.tracing.token_log import read_token_log

COMPLETIONS = "/v1/completions"
OPENMETRICS = "application/openmetrics-text"
TRACES = ("1" * 32, "2" * 32)
WITH_EXEMPLARS = {f"{metric.full_name}_bucket" for metric in METRICS if metric.has_exemplars}


def wait_until(true: Callable[[], bool]) -> None:
    for _ in range(1500):
        if true():
            return
        time.sleep(0.01)
    raise AssertionError("it did not come true in 15 s")


def scrape(server: ServerUnderTest) -> tuple[dict[str, float], dict[str, set[str]]]:
    """Each sample's value, and the traces that the exemplars of each name."""
    status, headers, body = server.request("GET", "/metrics", headers={"Accept": OPENMETRICS})
    assert (status, headers["content-type"].startswith(OPENMETRICS)) == (200, True)
    values: dict[str, float] = {}
    traces: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(body.decode()):
        for sample in family.samples:
            labels = [
                f"{k}={v}" for k, v in sorted(sample.labels.items()) if k not in ("engine", "model_name")
            ]
            values[" ".join([sample.name, *labels])] = sample.value
            if sample.exemplar:
                traces.setdefault(sample.name, set()).add(sample.exemplar.labels["trace_id"])
    return values, traces


def ask(server: ServerUnderTest, trace_id: str, flags: str) -> None:
    header = {"traceparent": f"00-{trace_id}-{'3' * 16}-{flags}"}
    body = {"model": MODEL, "prompt": "hi", "max_tokens": 4}
    assert server.request("POST", COMPLETIONS, body, header)[0] == 200


def test_exemplars_name_the_traces_that_are_kept(tmp_path: Path) -> None:
    with scripted_server(Script(spell("word ")), log_dir=tmp_path) as server:
        ask(server, TRACES[0], "01")
        ask(server, TRACES[1], "00")
        values, traces = scrape(server)
        assert server.running.ledger.num_kept == 0
    assert traces == {name: {TRACES[0]} for name in WITH_EXEMPLARS}
    assert values["firstdiff_e2e_request_latency_seconds_count"] == 2
    assert {row.trace_id for row in read_token_log(tmp_path)[1]} == set(TRACES)


def test_a_server_that_makes_no_spans_names_no_traces() -> None:
    with scripted_server(Script(spell("word "))) as server:
        ask(server, TRACES[0], "01")
        assert scrape(server)[1] == {}


@pytest.mark.parametrize("dialect", ["firstdiff", "vllm"])
def test_the_dialect_adds_vllms_names(dialect: str) -> None:
    with scripted_server(Script(spell("word ")), serve={"metrics_dialect": dialect}) as server:
        server.post(COMPLETIONS, prompt="hi", max_tokens=3)
        values, _ = scrape(server)
    assert values["firstdiff_generation_tokens_total"] == 3
    assert values.get("vllm:generation_tokens_total") == (3 if dialect == "vllm" else None)
    assert values.get("vllm:request_success_total finished_reason=length") == (
        1 if dialect == "vllm" else None
    )


def test_an_unknown_dialect_is_a_mistake() -> None:
    with (
        pytest.raises(ValueError, match="expected --metrics-dialect out of firstdiff, vllm, got 'sglang'"),
        scripted_server(Script(spell("word ")), serve={"metrics_dialect": "sglang"}),
    ):
        pass


def test_refusals_are_counted_by_their_reason_and_keep_nothing(tmp_path: Path) -> None:
    script = Script(spell("word "))
    script.gate.clear()
    body = {"model": MODEL, "prompt": "hi", "max_tokens": 2}
    engine = {"max_num_seqs": 1, "max_num_waiting": 1}
    with (
        scripted_server(script, log_dir=tmp_path, **engine) as server,
        ThreadPoolExecutor(3) as pool,
    ):
        asked = [pool.submit(server.request, "POST", COMPLETIONS, body)]
        wait_until(lambda: script.is_waiting)
        asked += [pool.submit(server.request, "POST", COMPLETIONS, body) for _ in range(2)]
        wait_until(lambda: server.running.dispatcher.num_in_flight == 3)
        script.gate.set()
        assert sorted(future.result()[0] for future in asked) == [200, 200, 429]
        server.running.dispatcher.draining = "the server is shutting down"
        assert server.request("POST", COMPLETIONS, body)[0] == 503
        assert server.request("POST", COMPLETIONS, body | {"max_tokens": -1})[0] == 400
        values, _ = scrape(server)
        assert server.running.ledger.num_kept == 0
    assert values["firstdiff_admission_rejections_total reason=queue_full"] == 1
    assert values["firstdiff_admission_rejections_total reason=engine_unavailable"] == 1
    counts = {
        name.split()[1].removeprefix("error_type="): value
        for name, value in values.items()
        if name.startswith("gen_ai_server_request_duration_seconds_count") and "text_completion" in name
    }
    assert counts == {"": 2, "queue_full": 1, "engine_unavailable": 1, "400": 1}
