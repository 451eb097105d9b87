"""Every name that leaves the process: phases, span names, span attributes, metrics with their definitions.

Owns: the spelling and the definition (start and end event, unit) of each. Refuses to know: how spans and
metrics are made. Invariants: a name is spelt here once; span names are few and equal on all replicas, so
that trees can be compared; metrics are spelt in metric_table.py and found here too; GenAI attributes follow
the OpenTelemetry GenAI conventions (all of them in development, hence NAMES_VERSION), `gen_ai.latency.*` has
vLLM's meaning: prefill excludes the queue.

Usage: `for metric in METRICS: print(metric.name, metric.help)`.
"""

from __future__ import annotations

from dataclasses import dataclass

from firstdiff.tracing.metric_table import METRICS as METRICS
from firstdiff.tracing.metric_table import Metric as Metric

NAMES_VERSION = 2
"""Raised when a name or a definition in this file changes its meaning."""

SERVICE_NAME = "firstdiff"
CLIENT_SERVICE_NAME = "firstdiff-client"

PHASES = ("tokenize", "queue", "prefill", "decode", "preempted", "stream")
"""The phases that partition a request, in order; their borders are the stamps of a TokenLogRow:

tokenize received -> tokenized, queue -> first_scheduled, prefill -> first_token, decode -> finished,
stream -> flushed; what lies inside prefill and decode between losing the KV blocks and having as many tokens
computed again is preempted instead (tracing/timeline.py).
"""


@dataclass(frozen=True, slots=True)
class PhaseEvents:
    """Which event begins a phase and which ends it."""

    phase: str
    begins: str
    ends: str


PHASE_EVENTS = (
    PhaseEvents("tokenize", "HTTP body read", "prompt ids ready"),
    PhaseEvents("queue", "prompt ids ready", "first scheduled"),
    PhaseEvents("prefill", "first scheduled", "first token, without preempted"),
    PhaseEvents("decode", "first token", "finished, without preempted"),
    PhaseEvents("preempted", "KV blocks lost", "as many tokens computed again"),
    PhaseEvents("stream", "finished", "last byte written"),
)
"""The definition of each phase, in the order of PHASES."""

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

# Span attributes: vLLM's keys with vLLM's meaning, in seconds; what a preemption cost lies inside.
LATENCY_TTFT = "gen_ai.latency.time_to_first_token"
"""HTTP body read to first token out of the model."""
LATENCY_E2E = "gen_ai.latency.e2e"
"""HTTP body read to last byte written."""
LATENCY_QUEUE = "gen_ai.latency.time_in_queue"
"""Prompt ids ready to first scheduled."""
LATENCY_PREFILL = "gen_ai.latency.time_in_model_prefill"
"""First scheduled to first token. SGLang's, of the same key, begins when it was dispatched: queue inside."""
LATENCY_DECODE = "gen_ai.latency.time_in_model_decode"
"""First token to finished."""
LATENCY_INFERENCE = "gen_ai.latency.time_in_model_inference"
"""First scheduled to finished."""

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
