"""The metric fold: the engine's rows as Prometheus counters, gauges and histograms.

Owns: moving each metric of the table in `names.py` by the row it names. Refuses to know: HTTP, which
process it runs in. Invariants: a value is a function of the rows fed, so folding a saved log again gives
the same; nothing is kept of an ended request; a phase that a request never entered is not observed (never
0); the registry is an argument.

Usage: `fold = MetricFold(CollectorRegistry(), model_name="m"); fold.feed(row); fold.exposition()`.
"""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.exposition import choose_encoder

from firstdiff.tracing.names import METRIC_PREFIX, METRICS, Metric
from firstdiff.tracing.records import EngineRequestRow, LoadRow, Row, StepRow, TokenLogRow, TokenRow
from firstdiff.tracing.token_log import phase_durations_ns

_FINISH_REASONS = ("stop", "length", "abort", "error")
_SOURCES = ("local_compute", "local_cache_hit")


class MetricFold:
    """All metrics of one server. `engine_index` tells engines of one server apart, as vLLM's label does."""

    def __init__(self, registry: CollectorRegistry, *, model_name: str, engine_index: int = 0) -> None:
        self._registry = registry
        self._labels = {"model_name": model_name, "engine": str(engine_index)}
        self._counters: dict[str, Counter] = {}
        self._gauges: dict[str, Gauge] = {}
        self._histograms: dict[str, Histogram] = {}
        for metric in METRICS:
            self._declare(metric)
        # Children exist from the start: a scrape sees 0, and a rate counts the first event too.
        self._reasons = {
            reason: self._counters["request_success"].labels(**self._labels, finished_reason=reason)
            for reason in _FINISH_REASONS
        }
        self._sources = {
            source: self._counters["prompt_tokens_by_source"].labels(**self._labels, source=source)
            for source in _SOURCES
        }
        self._last_emitted_ns: dict[str, int] = {}
        self._losses = {"lost_log_rows": 0, "dropped_spans": 0}

    def _declare(self, metric: Metric) -> None:
        name = METRIC_PREFIX + metric.name
        label_names = (*self._labels, *metric.labels)
        if metric.kind == "counter":
            counter = Counter(name, metric.help, label_names, registry=self._registry)
            self._counters[metric.name] = counter if metric.labels else counter.labels(**self._labels)
        elif metric.kind == "gauge":
            gauge = Gauge(name, metric.help, label_names, registry=self._registry)
            self._gauges[metric.name] = gauge.labels(**self._labels)
        else:
            histogram = Histogram(
                name, metric.help, label_names, registry=self._registry, buckets=metric.buckets
            )
            self._histograms[metric.name] = histogram.labels(**self._labels)

    def feed(self, row: Row) -> None:
        """Take in a StepRow, LoadRow, TokenRow or EngineRequestRow; other rows move nothing here."""
        if isinstance(row, TokenRow):
            self._feed_token(row)
        elif isinstance(row, StepRow):
            self._feed_step(row)
        elif isinstance(row, LoadRow):
            self._feed_load(row)
        elif isinstance(row, EngineRequestRow):
            self._feed_request(row)

    def _feed_token(self, row: TokenRow) -> None:
        self._counters["generation_tokens"].inc()
        previous_ns = self._last_emitted_ns.get(row.request_id)
        if previous_ns is not None:
            gap_s = max(0, row.emitted_ns - previous_ns) / 1e9
            self._histograms["inter_token_latency_seconds"].observe(gap_s)
        self._last_emitted_ns[row.request_id] = row.emitted_ns

    def _feed_load(self, row: StepRow | LoadRow) -> None:
        self._gauges["num_requests_running"].set(row.num_running)
        self._gauges["num_requests_waiting"].set(row.num_waiting)
        used_fraction = row.num_used_blocks / row.num_blocks if row.num_blocks else 0.0
        self._gauges["kv_cache_usage_perc"].set(used_fraction)

    def _feed_step(self, row: StepRow) -> None:
        self._feed_load(row)
        self._counters["engine_steps"].inc()
        self._counters["num_preemptions"].inc(row.num_preemptions)
        self._counters["prefix_cache_queries"].inc(row.num_prefix_queried_tokens)
        self._counters["prefix_cache_hits"].inc(row.num_prefix_hit_tokens)
        self._sources["local_compute"].inc(row.num_prefill_tokens)
        self._sources["local_cache_hit"].inc(row.num_prefix_hit_tokens)
        self._histograms["iteration_tokens_total"].observe(row.num_prefill_tokens + row.num_decode_tokens)
        self._histograms["step_time_seconds"].observe(max(0, row.ended_ns - row.started_ns) / 1e9)

    def _feed_request(self, row: EngineRequestRow) -> None:
        self._last_emitted_ns.pop(row.request_id, None)
        num_prompt_tokens = len(row.prompt_token_ids)
        self._reasons[row.finish_reason].inc()
        self._counters["prompt_tokens"].inc(num_prompt_tokens)
        self._counters["prompt_tokens_cached"].inc(row.num_cached_tokens)
        self._histograms["request_prompt_tokens"].observe(num_prompt_tokens)
        self._histograms["request_generation_tokens"].observe(row.num_output_tokens)
        self._histograms["request_params_max_tokens"].observe(row.sampling.max_tokens)
        self._histograms["request_num_preemptions"].observe(row.num_preemptions)
        self._histograms["request_prefill_kv_computed_tokens"].observe(
            num_prompt_tokens - row.num_cached_tokens
        )

    def observe_end(self, row: TokenLogRow) -> None:
        """Take in a request whose answer was flushed: its phases and latencies.

        Time to first token and end-to-end carry the trace id as an exemplar (OpenMetrics only).
        """
        phases_ns = phase_durations_ns(row)
        exemplar = {"trace_id": row.trace_id} if row.trace_id else None
        self._histograms["e2e_request_latency_seconds"].observe(sum(phases_ns.values()) / 1e9, exemplar)
        seconds = {name: duration_ns / 1e9 for name, duration_ns in phases_ns.items()}
        for phase in ("tokenize", "queue", "stream"):
            self._histograms[f"request_{phase}_time_seconds"].observe(seconds[phase])
        if row.first_scheduled_ns is not None:
            inference_s = (phases_ns["prefill"] + phases_ns["decode"]) / 1e9
            self._histograms["request_prefill_time_seconds"].observe(seconds["prefill"])
            self._histograms["request_inference_time_seconds"].observe(inference_s)
        if row.first_token_ns is not None:
            ttft_ns = phases_ns["tokenize"] + phases_ns["queue"] + phases_ns["prefill"]
            self._histograms["time_to_first_token_seconds"].observe(ttft_ns / 1e9, exemplar)
            self._histograms["request_decode_time_seconds"].observe(seconds["decode"])
            if len(row.token_ids) > 1:
                tpot_s = seconds["decode"] / (len(row.token_ids) - 1)
                self._histograms["request_time_per_output_token_seconds"].observe(tpot_s)

    def observe_losses(self, *, num_lost_rows: int, num_dropped_spans: int) -> None:
        """Take in how much log and spans have lost since they started; call before a scrape."""
        for name, value in (("lost_log_rows", num_lost_rows), ("dropped_spans", num_dropped_spans)):
            self._counters[name].inc(value - self._losses[name])
            self._losses[name] = value

    def exposition(self, accept: str = "") -> tuple[str, bytes]:
        """(content type, body) of a scrape; OpenMetrics, with exemplars, when the Accept header says so."""
        encode, content_type = choose_encoder(accept)
        return content_type, encode(self._registry)
