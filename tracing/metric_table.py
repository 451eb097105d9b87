"""The table of metrics: each one's name, kind, source, definition, labels, buckets and twin in vLLM.

Owns: that table. Refuses to know: how metrics are made, exposed, drawn. Invariants: a metric is spelt here
once, and exposition, rules, dashboards and documentation are made from it; ours keep vLLM's suffixes, units
and labels under the prefix `firstdiff_`; `gen_ai_server_*` follow the OpenTelemetry GenAI conventions, dots
as underscores and the unit as a suffix; buckets are fine enough for small, fast models, with the edges of
vLLM's and of the conventions among them.
Source of `gen_ai_server_*`: https://opentelemetry.io/docs/specs/semconv/gen-ai/gen-ai-metrics/

Usage: `for metric in METRICS: print(metric.full_name, metric.help)`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

METRIC_PREFIX = "firstdiff_"
GEN_AI_PREFIX = "gen_ai_server_"
VLLM_PREFIX = "vllm:"

MetricKind = Literal["counter", "gauge", "histogram"]
MetricSource = Literal["identity", "step", "token", "engine_request", "token_log", "http", "losses"]

ENGINE_LABELS = ("model_name", "engine")
GEN_AI_LABELS = (
    "gen_ai_operation_name",
    "gen_ai_provider_name",
    "gen_ai_request_model",
    "gen_ai_response_model",
)


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric: `name` without its prefix (and without `_total` for counters), `help` its definition.

    `source` is the row that moves it. `labels` come after `common_labels`; `values` are all values of the one
    label, where they are known before anything happens. `buckets` are upper bounds without +Inf, histograms
    only. `in_vllm`: vLLM has the same under the same name behind its own prefix. `has_exemplars`: its buckets
    name a trace.
    """

    name: str
    kind: MetricKind
    source: MetricSource
    help: str
    labels: tuple[str, ...] = ()
    values: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()
    in_vllm: bool = False
    has_exemplars: bool = False
    prefix: str = METRIC_PREFIX
    common_labels: tuple[str, ...] = ENGINE_LABELS

    @property
    def full_name(self) -> str:
        return self.prefix + self.name

    @property
    def series(self) -> str:
        """What a query calls it: the sample's name, for a histogram without `_bucket`, `_sum`, `_count`."""
        return self.full_name + ("_total" if self.kind == "counter" else "")

    @property
    def all_labels(self) -> tuple[str, ...]:
        return self.common_labels + self.labels


def _bounds(edges: str) -> tuple[float, ...]:
    return tuple(map(float, edges.split()))


# Finer than vLLM's (whose end-to-end buckets start at 0.3 s), with its edges kept so that both compare.
_SECONDS_SHORT = _bounds(
    ".0005 .001 .002 .003 .004 .005 .0075 .01 .015 .02 .025 .03 .04 .05 .06 .075 .08 .1 .15 .2 .25 .3 .4 .5 "
    ".75 1 2.5 5 7.5 10 20 40 80 160 640 2560"
)
_SECONDS_LONG = _bounds(
    ".005 .01 .02 .04 .08 .1 .16 .2 .3 .4 .5 .64 .8 1 1.28 1.5 2 2.5 5 10 15 20 30 40 50 60 120 240 480 960 "
    "1920 7680"
)
_TOKENS = _bounds("1 2 5 10 20 50 100 200 500 1000 2000 5000 10000 20000 50000 100000 200000")
_STEP_TOKENS = _bounds("1 8 16 32 64 128 256 512 1024 2048 4096 8192 16384")
_SMALL_COUNTS = _bounds("0 1 2 3 5 10 20")

# What the conventions advise.
_GEN_AI_DURATION = _bounds(".01 .02 .04 .08 .16 .32 .64 1.28 2.56 5.12 10.24 20.48 40.96 81.92")
_GEN_AI_TTFT = _bounds(".001 .005 .01 .02 .04 .06 .08 .1 .25 .5 .75 1 2.5 5 7.5 10")
_GEN_AI_TPOT = _bounds(".01 .025 .05 .075 .1 .15 .2 .3 .4 .5 .75 1 2.5")

FINISH_REASONS = ("stop", "length", "abort", "error")
PROMPT_SOURCES = ("local_compute", "local_cache_hit")
REJECTION_REASONS = ("queue_full", "engine_unavailable")
"""The `error_type` of an HTTP request that the engine did not take: no room; draining, or without a core."""


def _of_engine(
    name: str, kind: MetricKind, help_: str, *, buckets: tuple[float, ...] = (), in_vllm: bool = True
) -> Metric:
    return Metric(name, kind, "step", help_, buckets=buckets, in_vllm=in_vllm)


def _of_request(name: str, help_: str, buckets: tuple[float, ...]) -> Metric:
    return Metric(name, "histogram", "engine_request", help_, buckets=buckets, in_vllm=True)


def _of_answer(
    name: str,
    help_: str,
    buckets: tuple[float, ...],
    *,
    in_vllm: bool = True,
    has_exemplars: bool = False,
) -> Metric:
    return Metric(
        name, "histogram", "token_log", help_, buckets=buckets, in_vllm=in_vllm, has_exemplars=has_exemplars
    )


def _of_gen_ai(
    name: str, source: MetricSource, help_: str, buckets: tuple[float, ...], labels: tuple[str, ...] = ()
) -> Metric:
    return Metric(
        name,
        "histogram",
        source,
        help_,
        labels=labels,
        buckets=buckets,
        prefix=GEN_AI_PREFIX,
        common_labels=GEN_AI_LABELS,
    )


METRICS = (
    Metric(
        "cache_config_info",
        "gauge",
        "identity",
        "Always 1: the KV cache's block size in tokens and its number of blocks, wherever they lie.",
        labels=("block_size", "num_gpu_blocks"),
        in_vllm=True,
    ),
    _of_engine("num_requests_running", "gauge", "Requests in the engine's running set after the last step."),
    _of_engine("num_requests_waiting", "gauge", "Requests waiting to be scheduled after the last step."),
    _of_engine("kv_cache_usage_perc", "gauge", "Used fraction (0..1) of the KV blocks after the last step."),
    _of_engine("engine_steps", "counter", "Engine steps done.", in_vllm=False),
    _of_engine("num_preemptions", "counter", "Sequences preempted to be recomputed later."),
    _of_engine("prefix_cache_queries", "counter", "Prompt tokens looked up in the prefix cache."),
    _of_engine("prefix_cache_hits", "counter", "Prompt tokens found in the prefix cache."),
    Metric(
        "prompt_tokens_by_source",
        "counter",
        "step",
        "Prompt tokens as the steps took them in: computed (again after a preemption) or found in the cache.",
        labels=("source",),
        values=PROMPT_SOURCES,
        in_vllm=True,
    ),
    _of_engine("iteration_tokens_total", "histogram", "Tokens computed in one step.", buckets=_STEP_TOKENS),
    _of_engine(
        "step_time_seconds",
        "histogram",
        "Engine step, start to end.",
        buckets=_SECONDS_SHORT,
        in_vllm=False,
    ),
    Metric(
        "generation_tokens",
        "counter",
        "token",
        "Output tokens, counted as each leaves the model.",
        in_vllm=True,
    ),
    Metric(
        "inter_token_latency_seconds",
        "histogram",
        "token",
        "Gap between two output tokens of one request, as they leave the model.",
        buckets=_SECONDS_SHORT,
        in_vllm=True,
        has_exemplars=True,
    ),
    Metric(
        "prompt_tokens",
        "counter",
        "token",
        "Prompt tokens, cached ones too, each request's once: when its first token leaves the model, or at "
        "its end when it was asked for none.",
        in_vllm=True,
    ),
    Metric(
        "prompt_tokens_cached",
        "counter",
        "token",
        "Those of them taken from the prefix cache.",
        in_vllm=True,
    ),
    Metric(
        "request_success",
        "counter",
        "engine_request",
        "Ended requests by finish reason (every reason, also abort and error).",
        labels=("finished_reason",),
        values=FINISH_REASONS,
        in_vllm=True,
    ),
    Metric(
        "corrupted_requests",
        "counter",
        "engine_request",
        "Requests ended because their logits were not finite.",
        in_vllm=True,
    ),
    _of_request("request_prompt_tokens", "Prompt tokens a request.", _TOKENS),
    _of_request("request_generation_tokens", "Output tokens a request.", _TOKENS),
    _of_request("request_params_max_tokens", "max_tokens a request asked.", _TOKENS),
    _of_request("request_num_preemptions", "Preemptions a request.", _SMALL_COUNTS),
    _of_request(
        "request_prefill_kv_computed_tokens",
        "Prompt tokens a request computed, those from the prefix cache left out.",
        _TOKENS,
    ),
    _of_answer(
        "time_to_first_token_seconds",
        "HTTP body read to first token out of the model; requests that got one.",
        _SECONDS_SHORT,
        has_exemplars=True,
    ),
    _of_answer(
        "request_time_per_output_token_seconds",
        "(First token to finished) / (output tokens - 1); requests of two tokens or more.",
        _SECONDS_SHORT,
    ),
    _of_answer(
        "e2e_request_latency_seconds",
        "HTTP body read to last byte written: the sum of all phases.",
        _SECONDS_LONG,
        has_exemplars=True,
    ),
    _of_answer(
        "request_tokenize_time_seconds",
        "HTTP body read to prompt ids ready.",
        _SECONDS_SHORT,
        in_vllm=False,
    ),
    _of_answer(
        "request_queue_time_seconds",
        "Prompt ids ready to first scheduled; to the end where it never was.",
        _SECONDS_SHORT,
    ),
    _of_answer(
        "request_prefill_time_seconds",
        "First scheduled to first token, preemptions inside; requests that were scheduled.",
        _SECONDS_LONG,
    ),
    _of_answer(
        "request_decode_time_seconds",
        "First token to finished, preemptions inside; requests that got a first token.",
        _SECONDS_LONG,
    ),
    _of_answer(
        "request_inference_time_seconds",
        "First scheduled to finished; requests that were scheduled.",
        _SECONDS_LONG,
    ),
    _of_answer(
        "request_preempted_time_seconds",
        "KV blocks lost to as many tokens computed again; requests that were preempted.",
        _SECONDS_SHORT,
        in_vllm=False,
    ),
    _of_answer(
        "request_stream_time_seconds", "Finished to last byte written.", _SECONDS_SHORT, in_vllm=False
    ),
    Metric(
        "admission_rejections",
        "counter",
        "http",
        "HTTP requests of which the engine took nothing: no room (429), or it is draining or gone (503).",
        labels=("reason",),
        values=REJECTION_REASONS,
        in_vllm=True,
    ),
    Metric("lost_log_rows", "counter", "losses", "Rows that the token log could not write."),
    Metric("dropped_spans", "counter", "losses", "Spans that did not reach the collector."),
    _of_gen_ai(
        "request_duration_seconds",
        "http",
        "HTTP head read to the end of the answer, refused ones too; error_type is empty when all is well.",
        _GEN_AI_DURATION,
        labels=("error_type",),
    ),
    _of_gen_ai(
        "time_to_first_token_seconds",
        "token_log",
        "HTTP body read to first token out of the model; answers that were finished.",
        _GEN_AI_TTFT,
    ),
    _of_gen_ai(
        "time_per_output_token_seconds",
        "token_log",
        "(First token to last byte written) / (output tokens - 1); finished answers of two tokens or more.",
        _GEN_AI_TPOT,
    ),
)
"""The one table that metric exposition, dashboards and documentation are made from."""
