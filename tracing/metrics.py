"""The metric fold: the engine's rows as Prometheus counters, gauges and histograms.

Owns: moving each metric of the table in metric_table.py by the row it names. Refuses to know: HTTP, which
process it runs in. Invariants: a value is a function of the rows fed, so folding a saved log again gives
the same (`begin` only makes some move earlier, and adds exemplars); nothing is kept of an ended request; a
phase that a request never entered is not observed (never 0); an exemplar names a trace that was kept; the
registry is an argument.

Usage: `fold = MetricFold(CollectorRegistry(), model_name="m"); fold.feed(row); fold.exposition()`.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from typing import Literal

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.exposition import choose_encoder

from firstdiff.tracing.metric_table import GEN_AI_PREFIX, METRICS, REJECTION_REASONS, Metric
from firstdiff.tracing.names import SERVICE_NAME, operation_of
from firstdiff.tracing.records import (
    EngineRequestRow,
    HttpRow,
    Identity,
    LoadRow,
    Row,
    StepRow,
    TokenLogRow,
    TokenRow,
)
from firstdiff.tracing.timeline import borders, phase_durations_ns
from firstdiff.tracing.vllm_metrics import Original, VllmTwins

MetricsDialect = Literal["firstdiff", "vllm"]

_CORRUPTED = FloatingPointError.__name__
"""How the error of a request begins whose logits were not finite (engine/sampler.py)."""
_OPERATIONS = ("chat", "text_completion")


@dataclass(slots=True)
class _Open:
    """A request of which the engine's last row has not come."""

    num_prompt_tokens: int | None = None
    """None: not told."""
    is_prompt_counted: bool = False
    last_emitted_ns: int | None = None
    marked_buckets: int = 0
    """A bit for each bucket of the gaps between tokens that has this request as exemplar."""


class MetricFold:
    """All metrics of one server. `engine_index` tells engines of one server apart, as vLLM's label does.

    With the dialect `vllm`, those that vLLM has too are there a second time under its names.
    """

    def __init__(
        self,
        registry: CollectorRegistry,
        *,
        model_name: str,
        engine_index: int = 0,
        dialect: MetricsDialect = "firstdiff",
    ) -> None:
        self._registry = registry
        self._labels = {"model_name": model_name, "engine": str(engine_index)}
        self._gen_ai_values = (SERVICE_NAME, model_name, model_name)
        self._counters: dict[str, Counter] = {}
        self._gauges: dict[str, Gauge] = {}
        self._histograms: dict[str, Histogram] = {}
        self._labelled: dict[str, dict[str, Counter]] = {}
        """The children of counters with one more label, by its value."""
        self._gen_ai: dict[str, Histogram] = {}
        originals: list[tuple[Metric, Original]] = [(metric, self._declare(metric)) for metric in METRICS]
        if dialect == "vllm":
            registry.register(VllmTwins(originals))
        self._gap_bounds = next(m.buckets for m in METRICS if m.name == "inter_token_latency_seconds")
        self._open: dict[str, _Open] = {}
        self._exemplars: dict[str, dict[str, str]] = {}
        self._losses = {"lost_log_rows": 0, "dropped_spans": 0}

    def _declare(self, metric: Metric) -> Original:
        # Children exist from the start: a scrape sees 0, and a rate counts the first event too.
        name, labels, registry = metric.full_name, metric.all_labels, self._registry
        if metric.kind == "counter":
            counter = Counter(name, metric.help, labels, registry=registry)
            if metric.labels:
                children = [counter.labels(*self._labels.values(), value) for value in metric.values]
                self._labelled[metric.name] = dict(zip(metric.values, children, strict=True))
            else:
                self._counters[metric.name] = counter.labels(**self._labels)
            return counter
        if metric.kind == "gauge":
            gauge = Gauge(name, metric.help, labels, registry=registry)
            self._gauges[metric.name] = gauge if metric.labels else gauge.labels(**self._labels)
            return gauge
        histogram = Histogram(name, metric.help, labels, registry=registry, buckets=metric.buckets)
        if metric.prefix == GEN_AI_PREFIX:
            self._gen_ai[metric.name] = histogram
            for operation in _OPERATIONS:
                histogram.labels(operation, *self._gen_ai_values, *[""] * len(metric.labels))
        else:
            self._histograms[metric.name] = histogram.labels(**self._labels)
        return histogram

    @property
    def num_open_requests(self) -> int:
        """Requests of which something is kept here."""
        return len(self._open.keys() | self._exemplars.keys())

    def begin(self, request_id: str, *, num_prompt_tokens: int, trace_id: str | None) -> None:
        """A request was handed to the engine, before any row of it; `trace_id` None: its trace is not kept.

        Ended by its EngineRequestRow and `observe_end`, or by `forget`.
        """
        self._open[request_id] = _Open(num_prompt_tokens)
        if trace_id is not None:
            self._exemplars[request_id] = {"trace_id": trace_id}

    def forget(self, request_id: str) -> None:
        """The engine refused this request: no row of it will come."""
        self._open.pop(request_id, None)
        self._exemplars.pop(request_id, None)

    def feed(self, row: Row) -> None:
        """Take in an Identity, a StepRow, LoadRow, TokenRow, EngineRequestRow or HttpRow.

        Other rows move nothing here.
        """
        if isinstance(row, TokenRow):
            self._feed_token(row)
        elif isinstance(row, StepRow):
            self._feed_step(row)
        elif isinstance(row, LoadRow):
            self._feed_load(row)
        elif isinstance(row, EngineRequestRow):
            self._feed_request(row)
        elif isinstance(row, HttpRow):
            self._feed_http(row)
        elif isinstance(row, Identity):
            self._feed_identity(row)

    def _feed_identity(self, row: Identity) -> None:
        config = row.engine_config
        if "block_size" in config and "num_blocks" in config:
            shape = (str(config["block_size"]), str(config["num_blocks"]))
            self._gauges["cache_config_info"].labels(*self._labels.values(), *shape).set(1)

    def _feed_token(self, row: TokenRow) -> None:
        self._counters["generation_tokens"].inc()
        request = self._open.get(row.request_id)
        if request is None:
            request = self._open[row.request_id] = _Open()
        if request.last_emitted_ns is not None:
            gap_s = max(0, row.emitted_ns - request.last_emitted_ns) / 1e9
            exemplar = self._exemplars.get(row.request_id)
            if exemplar is not None:
                # Once a bucket and request: an exemplar costs as much as the whole rest of a token.
                bucket = 1 << bisect_left(self._gap_bounds, gap_s)
                exemplar = None if request.marked_buckets & bucket else exemplar
                request.marked_buckets |= bucket
            self._histograms["inter_token_latency_seconds"].observe(gap_s, exemplar)
        elif request.num_prompt_tokens is not None and row.num_cached_tokens is not None:
            self._count_prompt(request.num_prompt_tokens, row.num_cached_tokens)
            request.is_prompt_counted = True
        request.last_emitted_ns = row.emitted_ns

    def _count_prompt(self, num_tokens: int, num_cached_tokens: int) -> None:
        self._counters["prompt_tokens"].inc(num_tokens)
        self._counters["prompt_tokens_cached"].inc(num_cached_tokens)

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
        sources = self._labelled["prompt_tokens_by_source"]
        sources["local_compute"].inc(row.num_prefill_tokens)
        sources["local_cache_hit"].inc(row.num_prefix_hit_tokens)
        self._histograms["iteration_tokens_total"].observe(row.num_prefill_tokens + row.num_decode_tokens)
        self._histograms["step_time_seconds"].observe(max(0, row.ended_ns - row.started_ns) / 1e9)

    def _feed_request(self, row: EngineRequestRow) -> None:
        request = self._open.pop(row.request_id, None)
        num_prompt_tokens = len(row.prompt_token_ids)
        is_computed = row.first_token_ns is not None or row.finish_reason in ("stop", "length")
        if is_computed and not (request is not None and request.is_prompt_counted):
            self._count_prompt(num_prompt_tokens, row.num_cached_tokens)
        self._labelled["request_success"][row.finish_reason].inc()
        if row.error is not None and row.error.startswith(_CORRUPTED):
            self._counters["corrupted_requests"].inc()
        self._histograms["request_prompt_tokens"].observe(num_prompt_tokens)
        self._histograms["request_generation_tokens"].observe(row.num_output_tokens)
        self._histograms["request_params_max_tokens"].observe(row.sampling.max_tokens)
        self._histograms["request_num_preemptions"].observe(row.num_preemptions)
        self._histograms["request_prefill_kv_computed_tokens"].observe(
            num_prompt_tokens - row.num_cached_tokens
        )

    def _feed_http(self, row: HttpRow) -> None:
        error_type = row.error_type or ""
        duration = self._gen_ai["request_duration_seconds"]
        duration.labels(operation_of(row.route), *self._gen_ai_values, error_type).observe(
            max(0, row.ended_ns - row.received_ns) / 1e9
        )
        if row.num_answers == 0 and error_type in REJECTION_REASONS:
            self._labelled["admission_rejections"][error_type].inc()

    def observe_end(self, row: TokenLogRow) -> None:
        """Take in a request whose answer was flushed: its phases and latencies.

        Time to first token and end-to-end carry the trace id as an exemplar (OpenMetrics only) where the
        trace is kept.
        """
        exemplar = self._exemplars.pop(row.request_id, None)
        at, phases_ns = borders(row), phase_durations_ns(row)
        histograms = self._histograms
        histograms["e2e_request_latency_seconds"].observe((at.flushed_ns - at.received_ns) / 1e9, exemplar)
        for phase in ("tokenize", "queue", "stream"):
            histograms[f"request_{phase}_time_seconds"].observe(phases_ns[phase] / 1e9)
        if row.preemptions:
            histograms["request_preempted_time_seconds"].observe(phases_ns["preempted"] / 1e9)
        if row.first_scheduled_ns is not None:
            prefill_s = (at.first_token_ns - at.scheduled_ns) / 1e9
            histograms["request_prefill_time_seconds"].observe(prefill_s)
            inference_s = (at.finished_ns - at.scheduled_ns) / 1e9
            histograms["request_inference_time_seconds"].observe(inference_s)
        if row.first_token_ns is None:
            return
        ttft_s = (at.first_token_ns - at.received_ns) / 1e9
        decode_s = (at.finished_ns - at.first_token_ns) / 1e9
        histograms["time_to_first_token_seconds"].observe(ttft_s, exemplar)
        histograms["request_decode_time_seconds"].observe(decode_s)
        num_gaps = row.num_output_tokens - 1
        if num_gaps > 0:
            histograms["request_time_per_output_token_seconds"].observe(decode_s / num_gaps)
        if row.finish_reason in ("stop", "length"):
            values = (operation_of(row.endpoint), *self._gen_ai_values)
            self._gen_ai["time_to_first_token_seconds"].labels(*values).observe(ttft_s)
            if num_gaps > 0:
                told_s = (at.flushed_ns - at.first_token_ns) / 1e9
                self._gen_ai["time_per_output_token_seconds"].labels(*values).observe(told_s / num_gaps)

    def observe_losses(self, *, num_lost_rows: int, num_dropped_spans: int) -> None:
        """Take in how much log and spans have lost since they started; call before a scrape."""
        for name, value in (("lost_log_rows", num_lost_rows), ("dropped_spans", num_dropped_spans)):
            self._counters[name].inc(value - self._losses[name])
            self._losses[name] = value

    def exposition(self, accept: str = "") -> tuple[str, bytes]:
        """(content type, body) of a scrape; OpenMetrics, with exemplars, when the Accept header says so."""
        if "openmetrics" in accept:
            # All names are of the old character set; else the library writes vLLM's colons as underscores.
            accept += "; escaping=allow-utf-8"
        encode, content_type = choose_encoder(accept)
        return content_type, encode(self._registry)
