"""Every name that leaves the process: phases, span names, span attributes, metrics with their definitions.

Owns: the spelling and the definition (start and end event, unit) of each. Refuses to know: how spans and
metrics are made. Invariants: a name is spelt here once; span names are few and equal on all replicas, so
that trees can be compared; metrics keep vLLM's suffixes, units and labels under the prefix `firstdiff_`,
so that one alias map reads both; GenAI attributes follow the OpenTelemetry GenAI conventions (all of them
in development, hence NAMES_VERSION), `gen_ai.latency.*` has vLLM's meaning: prefill excludes the queue.

Usage: `for metric in METRICS: print(metric.name, metric.help)`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

NAMES_VERSION = 2
"""Raised when a name or a definition in this file changes its meaning."""

SERVICE_NAME = "firstdiff"
CLIENT_SERVICE_NAME = "firstdiff-client"
METRIC_PREFIX = "firstdiff_"

PHASES = ("tokenize", "queue", "prefill", "decode", "preempted", "stream")
"""The phases that partition a request, in order; their borders are the stamps of a TokenLogRow:

tokenize received -> tokenized, queue -> first_scheduled, prefill -> first_token, decode -> finished,
stream -> flushed; what lies inside prefill and decode between losing the KV blocks and having as many tokens
computed again is preempted instead (tracing/timeline.py).
"""

# Span and resource attributes: OpenTelemetry's.
HTTP_METHOD = "http.request.method"
HTTP_ROUTE = "http.route"
HTTP_STATUS = "http.response.status_code"
ERROR_TYPE = "error.type"
SERVER_ADDRESS = "server.address"
SERVER_PORT = "server.port"
SERVICE_NAME_KEY = "service.name"
SERVICE_VERSION_KEY = "service.version"
SERVICE_INSTANCE_KEY = "service.instance.id"
GEN_AI_OPERATION = "gen_ai.operation.name"
GEN_AI_PROVIDER = "gen_ai.provider.name"
GEN_AI_REQUEST_MODEL = "gen_ai.request.model"
GEN_AI_RESPONSE_MODEL = "gen_ai.response.model"
GEN_AI_RESPONSE_ID = "gen_ai.response.id"
GEN_AI_FINISH_REASONS = "gen_ai.response.finish_reasons"
GEN_AI_MAX_TOKENS = "gen_ai.request.max_tokens"
GEN_AI_TEMPERATURE = "gen_ai.request.temperature"
GEN_AI_TOP_P = "gen_ai.request.top_p"
GEN_AI_TOP_K = "gen_ai.request.top_k"
GEN_AI_SEED = "gen_ai.request.seed"
GEN_AI_STREAM = "gen_ai.request.stream"
GEN_AI_FIRST_CHUNK = "gen_ai.response.time_to_first_chunk"
GEN_AI_STOP = "gen_ai.request.stop_sequences"
GEN_AI_INPUT_TOKENS = "gen_ai.usage.input_tokens"
GEN_AI_OUTPUT_TOKENS = "gen_ai.usage.output_tokens"
GEN_AI_CACHED_TOKENS = "gen_ai.usage.cache_read.input_tokens"

# Span attributes: vLLM's keys with vLLM's meaning, in seconds.
LATENCY_TTFT = "gen_ai.latency.time_to_first_token"
LATENCY_E2E = "gen_ai.latency.e2e"
LATENCY_QUEUE = "gen_ai.latency.time_in_queue"
LATENCY_PREFILL = "gen_ai.latency.time_in_model_prefill"
LATENCY_DECODE = "gen_ai.latency.time_in_model_decode"
LATENCY_INFERENCE = "gen_ai.latency.time_in_model_inference"

# Span attributes: our own.
NAMES_VERSION_KEY = "firstdiff.names_version"
REQUEST_ID = "firstdiff.request_id"
IDENTITY_SHA256 = "firstdiff.identity_sha256"
NUM_ANSWERS = "firstdiff.num_answers"
SPAN_DURATION_NS = "firstdiff.duration_ns"
"""The span's stretch of time exactly as logged; the span may differ by the gaps between spans."""
PHASE_TOTAL_NS = {phase: f"firstdiff.phase.{phase}.duration_ns" for phase in PHASES}
"""On the inference span, for each phase: all of its time, 0 when never entered; the sum is the request's."""
HIDDEN_PHASES = "firstdiff.hidden_phases"
"""Other phases that lie inside the span, where there were too many for a span each."""
START_TOKEN = "firstdiff.start_token"
FIRST_BATCH_SIZE = "firstdiff.batch_size_at_first_token"
PRIORITY = "firstdiff.priority"
CASE_ID = "firstdiff.case_id"
BLOCK_INDEX = "firstdiff.block_index"
SCHEDULE_LAG_NS = "firstdiff.client.schedule_lag_ns"
"""How much later than intended the client sent it."""

# Jaeger's tags for evaluation runs.
JAEGER_TRIAL_ID = "jaeger.eval.trial_id"
JAEGER_ITERATION_INDEX = "jaeger.eval.iteration_index"
NUM_PREFILL_CHUNKS = "firstdiff.num_prefill_chunks"
NUM_COMPUTED_PROMPT_TOKENS = "firstdiff.num_computed_prompt_tokens"
NUM_PREEMPTIONS = "firstdiff.num_preemptions"
MAX_BATCH_SIZE = "firstdiff.max_batch_size"


def operation_of(endpoint: str) -> str:
    """The GenAI operation name of an HTTP route: `chat` for chat routes, else `text_completion`."""
    return "chat" if "chat" in endpoint else "text_completion"


MetricKind = Literal["counter", "gauge", "histogram"]


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric: `name` without the prefix (and without `_total` for counters), `help` its definition.

    `source` is the row that moves it, `labels` come after `model_name` and `engine`; `buckets` are upper
    bounds without +Inf, histograms only.
    """

    name: str
    kind: MetricKind
    source: str
    help: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()


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

METRICS = (
    Metric(
        "num_requests_running", "gauge", "step", "Requests in the engine's running set after the last step."
    ),
    Metric("num_requests_waiting", "gauge", "step", "Requests waiting to be scheduled after the last step."),
    Metric(
        "kv_cache_usage_perc", "gauge", "step", "Used fraction (0..1) of the KV blocks after the last step."
    ),
    Metric("engine_steps", "counter", "step", "Engine steps done."),
    Metric("num_preemptions", "counter", "step", "Sequences preempted to be recomputed later."),
    Metric("prefix_cache_queries", "counter", "step", "Prompt tokens looked up in the prefix cache."),
    Metric("prefix_cache_hits", "counter", "step", "Prompt tokens found in the prefix cache."),
    Metric(
        "prompt_tokens_by_source",
        "counter",
        "step",
        "Prompt tokens as the steps took them in: computed (again after a preemption) or found in the cache.",
        labels=("source",),
    ),
    Metric(
        "iteration_tokens_total", "histogram", "step", "Tokens computed in one step.", buckets=_STEP_TOKENS
    ),
    Metric("step_time_seconds", "histogram", "step", "Engine step, start to end.", buckets=_SECONDS_SHORT),
    Metric("generation_tokens", "counter", "token", "Output tokens, counted as each leaves the model."),
    Metric(
        "inter_token_latency_seconds",
        "histogram",
        "token",
        "Gap between two output tokens of one request, as they leave the model.",
        buckets=_SECONDS_SHORT,
    ),
    Metric(
        "prompt_tokens", "counter", "engine_request", "Prompt tokens of ended requests, each counted once."
    ),
    Metric("prompt_tokens_cached", "counter", "engine_request", "Those of them taken from the prefix cache."),
    Metric(
        "request_success",
        "counter",
        "engine_request",
        "Ended requests by finish reason (every reason, also abort and error).",
        labels=("finished_reason",),
    ),
    Metric(
        "request_prompt_tokens", "histogram", "engine_request", "Prompt tokens a request.", buckets=_TOKENS
    ),
    Metric(
        "request_generation_tokens",
        "histogram",
        "engine_request",
        "Output tokens a request.",
        buckets=_TOKENS,
    ),
    Metric(
        "request_params_max_tokens",
        "histogram",
        "engine_request",
        "max_tokens a request asked.",
        buckets=_TOKENS,
    ),
    Metric(
        "request_num_preemptions",
        "histogram",
        "engine_request",
        "Preemptions a request.",
        buckets=_SMALL_COUNTS,
    ),
    Metric(
        "request_prefill_kv_computed_tokens",
        "histogram",
        "engine_request",
        "Prompt tokens a request computed, those from the prefix cache left out.",
        buckets=_TOKENS,
    ),
    Metric(
        "time_to_first_token_seconds",
        "histogram",
        "token_log",
        "HTTP body read to first token out of the model; requests that got one.",
        buckets=_SECONDS_SHORT,
    ),
    Metric(
        "request_time_per_output_token_seconds",
        "histogram",
        "token_log",
        "Decode phase / (output tokens - 1); requests of two tokens or more.",
        buckets=_SECONDS_SHORT,
    ),
    Metric(
        "e2e_request_latency_seconds",
        "histogram",
        "token_log",
        "HTTP body read to last byte written: the sum of the five phases.",
        buckets=_SECONDS_LONG,
    ),
    Metric(
        "request_tokenize_time_seconds",
        "histogram",
        "token_log",
        "HTTP body read to prompt ids ready.",
        buckets=_SECONDS_SHORT,
    ),
    Metric(
        "request_queue_time_seconds",
        "histogram",
        "token_log",
        "Prompt ids ready to first scheduled; to the end where it never was.",
        buckets=_SECONDS_SHORT,
    ),
    Metric(
        "request_prefill_time_seconds",
        "histogram",
        "token_log",
        "First scheduled to first token; requests that were scheduled.",
        buckets=_SECONDS_LONG,
    ),
    Metric(
        "request_decode_time_seconds",
        "histogram",
        "token_log",
        "First token to finished; requests that got a first token.",
        buckets=_SECONDS_LONG,
    ),
    Metric(
        "request_inference_time_seconds",
        "histogram",
        "token_log",
        "First scheduled to finished; requests that were scheduled.",
        buckets=_SECONDS_LONG,
    ),
    Metric(
        "request_stream_time_seconds",
        "histogram",
        "token_log",
        "Finished to last byte written.",
        buckets=_SECONDS_SHORT,
    ),
    Metric("lost_log_rows", "counter", "losses", "Rows that the token log could not write."),
    Metric("dropped_spans", "counter", "losses", "Spans that did not reach the collector."),
)
"""The one table that metric exposition, dashboards and documentation are made from."""
