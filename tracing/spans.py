"""The span fold: one finished request as a tree of OpenTelemetry spans, and its way to a collector.

Owns: the tree's shape, OTLP/HTTP export. Refuses to know: HTTP serving, the engine. The only module that
imports opentelemetry. Invariants: spans are made when a request ends, from its log row alone, so folding
a saved log again gives the same spans with the same ids; names are equal on all replicas; phases never
touch: 1 microsecond at least lies between two, since Jaeger's critical path loses a phase that begins in
the microsecond in which its sibling ends; a request is exported whole or not at all; a slow or dead
collector delays and fails nothing, what it did not take is counted.

    POST /v1/chat/completions      SERVER, the caller's child
      chat {model}                 INTERNAL, gen_ai.*
        tokenize, queue, prefill, decode, stream

Usage: `spans = SpanExporterFold("http://127.0.0.1:4318", identity); spans.end(row, stamps)`.
"""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal
from urllib.parse import urlsplit

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags, TraceState

from firstdiff.tracing import names
from firstdiff.tracing.records import Identity, TokenLogRow
from firstdiff.tracing.token_log import ServerStamps, hash_identity, phase_durations_ns
from firstdiff.tracing.trace_context import TraceContext as TraceContext
from firstdiff.tracing.trace_context import make_traceparent as make_traceparent
from firstdiff.tracing.trace_context import parse_traceparent as parse_traceparent
from firstdiff.tracing.trace_context import start_trace as start_trace

AttributeValue = str | bool | int | float | Sequence[str]

GAP_NS = 1_000
NUM_SPANS_MAX = 2 + len(names.PHASES)
MAX_BATCH_SPANS = 512
TRACES_PATH = "/v1/traces"


@dataclass(frozen=True, slots=True)
class SpanRecord:
    """One span before OpenTelemetry: ids as hex, times in Unix nanoseconds, `error` None when all is well."""

    name: str
    kind: Literal["server", "internal"]
    trace_id: str
    span_id: str
    parent_span_id: str | None
    start_unix_ns: int
    end_unix_ns: int
    attributes: dict[str, AttributeValue]
    error: str | None = None


def request_spans(row: TokenLogRow, stamps: ServerStamps, *, model: str) -> list[SpanRecord]:
    """The spans of one request, parents first: server, inference, then the phases that it entered.

    Ids of the children are derived from the server span's, so the same row gives the same spans. Each
    phase begins GAP_NS after the one before it ended, cut from its own time; where a phase is shorter
    than that, the later ones move, by 5 microseconds at most. The exact durations are attributes.
    """
    unix_offset_ns = row.received_unix_ns - row.received_ns
    phases = _phase_spans(row, stamps, unix_offset_ns)
    end_unix_ns = max(row.flushed_ns + unix_offset_ns, phases[-1].end_unix_ns)
    operation = names.operation_of(row.endpoint)
    failure = _failure(row)
    server = SpanRecord(
        name=f"POST {row.endpoint}",
        kind="server",
        trace_id=stamps.trace_id,
        span_id=stamps.span_id,
        parent_span_id=stamps.parent_span_id,
        start_unix_ns=row.received_unix_ns,
        end_unix_ns=end_unix_ns,
        attributes={
            names.HTTP_METHOD: "POST",
            names.HTTP_ROUTE: row.endpoint,
            names.REQUEST_ID: row.request_id,
            **failure,
        },
        error=_message(row),
    )
    inference = SpanRecord(
        name=f"{operation} {model}",
        kind="internal",
        trace_id=stamps.trace_id,
        span_id=_inference_span_id(stamps),
        parent_span_id=stamps.span_id,
        start_unix_ns=row.received_unix_ns,
        end_unix_ns=end_unix_ns,
        attributes={**_inference_attributes(row, operation, model), **failure},
        error=_message(row),
    )
    return [server, inference, *phases]


def _phase_spans(row: TokenLogRow, stamps: ServerStamps, unix_offset_ns: int) -> list[SpanRecord]:
    durations_ns = phase_durations_ns(row)
    entered = {
        "tokenize": True,
        "queue": True,
        "prefill": row.first_scheduled_ns is not None,
        "decode": row.first_token_ns is not None,
        "stream": True,
    }
    details = _phase_attributes(row)
    parent_span_id = _inference_span_id(stamps)
    spans: list[SpanRecord] = []
    border_ns = row.received_unix_ns
    earliest_ns = border_ns
    for name in names.PHASES:
        start_ns = max(border_ns, earliest_ns)
        border_ns += durations_ns[name]
        if not entered[name]:
            continue
        end_ns = max(border_ns, start_ns)
        earliest_ns = end_ns + GAP_NS
        attributes: dict[str, AttributeValue] = {names.PHASE_DURATION_NS: durations_ns[name], **details[name]}
        span_id = _child_span_id(stamps.trace_id, stamps.span_id, name)
        spans.append(
            SpanRecord(
                name, "internal", stamps.trace_id, span_id, parent_span_id, start_ns, end_ns, attributes
            )
        )
    assert border_ns == row.flushed_ns + unix_offset_ns
    return spans


def _phase_attributes(row: TokenLogRow) -> dict[str, dict[str, AttributeValue]]:
    num_computed_tokens = len(row.prompt_token_ids) - row.num_cached_tokens
    return {
        "tokenize": {names.GEN_AI_INPUT_TOKENS: len(row.prompt_token_ids)},
        "queue": {},
        "prefill": {
            names.GEN_AI_CACHED_TOKENS: row.num_cached_tokens,
            names.NUM_COMPUTED_PROMPT_TOKENS: num_computed_tokens,
            names.NUM_PREFILL_CHUNKS: len(row.prefill_chunks),
        },
        "decode": {
            names.GEN_AI_OUTPUT_TOKENS: len(row.token_ids),
            names.NUM_PREEMPTIONS: row.num_preemptions,
            names.MAX_BATCH_SIZE: max(row.batch_size, default=0),
        },
        "stream": {},
    }


def _inference_attributes(row: TokenLogRow, operation: str, model: str) -> dict[str, AttributeValue]:
    sampling = row.sampling
    seconds = {name: duration_ns / 1e9 for name, duration_ns in phase_durations_ns(row).items()}
    attributes: dict[str, AttributeValue] = {
        names.GEN_AI_OPERATION: operation,
        names.GEN_AI_PROVIDER: names.SERVICE_NAME,
        names.GEN_AI_REQUEST_MODEL: model,
        names.GEN_AI_RESPONSE_MODEL: model,
        names.GEN_AI_RESPONSE_ID: row.request_id,
        names.GEN_AI_FINISH_REASONS: (row.finish_reason,),
        names.GEN_AI_MAX_TOKENS: sampling.max_tokens,
        names.GEN_AI_TEMPERATURE: sampling.temperature,
        names.GEN_AI_TOP_P: sampling.top_p,
        names.GEN_AI_TOP_K: sampling.top_k,
        names.GEN_AI_STOP: tuple(sampling.stop),
        names.GEN_AI_INPUT_TOKENS: len(row.prompt_token_ids),
        names.GEN_AI_OUTPUT_TOKENS: len(row.token_ids),
        names.GEN_AI_CACHED_TOKENS: row.num_cached_tokens,
        names.LATENCY_E2E: (row.flushed_ns - row.received_ns) / 1e9,
        names.LATENCY_QUEUE: seconds["queue"],
        names.IDENTITY_SHA256: row.identity_sha256,
        names.NAMES_VERSION_KEY: names.NAMES_VERSION,
    }
    # OTLP integers are 64-bit signed; a larger seed is kept in the token log only.
    if -(1 << 63) <= sampling.seed < 1 << 63:
        attributes[names.GEN_AI_SEED] = sampling.seed
    if row.first_scheduled_ns is not None:
        attributes[names.LATENCY_PREFILL] = seconds["prefill"]
        attributes[names.LATENCY_INFERENCE] = seconds["prefill"] + seconds["decode"]
    if row.first_token_ns is not None:
        attributes[names.LATENCY_TTFT] = seconds["tokenize"] + seconds["queue"] + seconds["prefill"]
        attributes[names.LATENCY_DECODE] = seconds["decode"]
    return attributes


def _failure(row: TokenLogRow) -> dict[str, AttributeValue]:
    return {names.ERROR_TYPE: row.finish_reason} if row.finish_reason in ("abort", "error") else {}


def _message(row: TokenLogRow) -> str | None:
    return (row.error or row.finish_reason) if row.finish_reason in ("abort", "error") else None


def _inference_span_id(stamps: ServerStamps) -> str:
    return _child_span_id(stamps.trace_id, stamps.span_id, "inference")


def _child_span_id(trace_id: str, span_id: str, name: str) -> str:
    """A span id made from its parent's: 16 hex digits, never all zero (the last bit is set)."""
    digest = hashlib.sha256(f"{trace_id}-{span_id}-{name}".encode()).digest()[:8]
    return f"{int.from_bytes(digest) | 1:016x}"


class SpanExporterFold:
    """Sends the spans of ended requests to an OTLP/HTTP collector, from a thread of the OpenTelemetry SDK.

    `otlp_endpoint` is a collector's base URL (`/v1/traces` is added) or the full traces URL. At most
    `max_pending_spans` wait, beside the batch that is on its way; a request that does not fit is dropped
    whole. Unsampled requests are not sent. `end` may be called from an event loop.
    """

    def __init__(
        self,
        otlp_endpoint: str,
        identity: Identity,
        *,
        max_pending_spans: int = 8192,
        delay_s: float = 1.0,
        timeout_s: float = 5.0,
    ) -> None:
        if max_pending_spans < NUM_SPANS_MAX:
            raise ValueError(f"expected {NUM_SPANS_MAX} pending spans or more, got {max_pending_spans}")
        self._model = identity.model
        self._resource = _resource(identity)
        self._scope = InstrumentationScope(names.SERVICE_NAME, identity.engine_version)
        self._max_pending_spans = max_pending_spans
        self._exporter = _CountingExporter(OTLPSpanExporter(traces_url(otlp_endpoint), timeout=timeout_s))
        self._processor = BatchSpanProcessor(
            self._exporter,
            max_queue_size=max_pending_spans,
            schedule_delay_millis=delay_s * 1e3,
            max_export_batch_size=min(MAX_BATCH_SPANS, max_pending_spans),
        )
        self._num_submitted_spans = 0
        self._num_refused_spans = 0
        self._closed = False

    @property
    def num_sent_spans(self) -> int:
        """Spans that the collector took."""
        return self._exporter.num_sent_spans

    @property
    def num_dropped_spans(self) -> int:
        """Spans that will never reach the collector: no room, refused, timed out, or left over at `close`."""
        return self._num_refused_spans + self._exporter.num_failed_spans

    def end(self, row: TokenLogRow, stamps: ServerStamps) -> None:
        """Send the spans of a request in the background. Takes well under a millisecond; never waits."""
        if not stamps.sampled:
            return
        spans = request_spans(row, stamps, model=self._model)
        num_pending_spans = self._num_submitted_spans - self._exporter.num_taken_spans
        if self._closed or num_pending_spans + len(spans) > self._max_pending_spans:
            self._num_refused_spans += len(spans)
            return
        self._num_submitted_spans += len(spans)
        for span in spans:
            self._processor.on_end(_to_otel(span, stamps, self._resource, self._scope))

    def close(self, *, timeout_s: float = 2.0) -> None:
        """Send what is pending, for `timeout_s` at most; the rest is dropped and counted."""
        if self._closed:
            return
        self._closed = True
        # The SDK's own shutdown waits 30 s for a collector that hangs, hence the thread and the two steps.
        flusher = threading.Thread(target=self._processor.shutdown, name="span-flush", daemon=True)
        flusher.start()
        flusher.join(timeout_s)
        if flusher.is_alive():
            self._exporter.give_up()
        num_pending_spans = self._num_submitted_spans - self._exporter.num_settled_spans
        self._num_refused_spans += num_pending_spans


class _CountingExporter(SpanExporter):
    """The OTLP exporter with its results counted; after `give_up` it takes nothing more."""

    def __init__(self, exporter: SpanExporter) -> None:
        self._exporter = exporter
        self._lock = threading.Lock()
        self._given_up = False
        self.num_taken_spans = 0
        self.num_sent_spans = 0
        self.num_failed_spans = 0

    @property
    def num_settled_spans(self) -> int:
        with self._lock:
            return self.num_sent_spans + self.num_failed_spans

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.num_taken_spans += len(spans)
        if self._given_up:
            return SpanExportResult.FAILURE
        result = self._exporter.export(spans)
        with self._lock:
            # What comes back after give_up was counted as dropped there.
            if not self._given_up and result is SpanExportResult.SUCCESS:
                self.num_sent_spans += len(spans)
            elif not self._given_up:
                self.num_failed_spans += len(spans)
        return result

    def give_up(self) -> None:
        with self._lock:
            self._given_up = True
        self._exporter.shutdown()

    def shutdown(self) -> None:
        if not self._given_up:
            self._exporter.shutdown()

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        return self._exporter.force_flush(timeout_millis)


def traces_url(otlp_endpoint: str) -> str:
    """The URL to post traces to; ValueError when `otlp_endpoint` is not an http(s) URL with a host."""
    try:
        parts = urlsplit(otlp_endpoint)
        usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        usable = False
    if not usable:
        raise ValueError(
            f"expected an OTLP/HTTP endpoint like http://127.0.0.1:4318, got {otlp_endpoint!r}: "
            "give the collector's URL"
        )
    base = otlp_endpoint.rstrip("/")
    return base if base.endswith(TRACES_PATH) else base + TRACES_PATH


def _resource(identity: Identity) -> Resource:
    attributes: dict[str, AttributeValue] = {
        names.SERVICE_VERSION_KEY: identity.engine_version,
        names.SERVICE_INSTANCE_KEY: identity.instance_id,
        names.IDENTITY_SHA256: hash_identity(identity),
    }
    # Whoever deploys may name the service with OpenTelemetry's own variable, which Resource.create reads.
    if not os.environ.get("OTEL_SERVICE_NAME"):
        attributes[names.SERVICE_NAME_KEY] = names.SERVICE_NAME
    return Resource.create(attributes)


def _to_otel(
    span: SpanRecord, stamps: ServerStamps, resource: Resource, scope: InstrumentationScope
) -> ReadableSpan:
    trace_id = int(span.trace_id, 16)
    flags = TraceFlags(TraceFlags.SAMPLED if stamps.sampled else TraceFlags.DEFAULT)
    state = TraceState.from_header([stamps.tracestate]) if stamps.tracestate else TraceState()
    parent = None
    if span.parent_span_id is not None:
        remote = span.parent_span_id == stamps.parent_span_id
        parent = SpanContext(trace_id, int(span.parent_span_id, 16), remote, flags, state)
    return ReadableSpan(
        name=span.name,
        context=SpanContext(
            trace_id, int(span.span_id, 16), is_remote=False, trace_flags=flags, trace_state=state
        ),
        parent=parent,
        resource=resource,
        attributes=span.attributes,
        kind=SpanKind.SERVER if span.kind == "server" else SpanKind.INTERNAL,
        status=Status(StatusCode.UNSET) if span.error is None else Status(StatusCode.ERROR, span.error),
        start_time=span.start_unix_ns,
        end_time=span.end_unix_ns,
        instrumentation_scope=scope,
    )
