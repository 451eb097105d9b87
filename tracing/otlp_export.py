"""Spans to an OpenTelemetry collector, over HTTP or gRPC.

Owns: the exporter's settings, its queue, what was lost on the way. Refuses to know: what spans mean. The only
module that imports opentelemetry. Invariants: what `send` is given is exported whole or not at all; a slow,
refusing or dead collector delays and fails nothing, what it did not take is counted.

Usage: `output = OtlpOutput(OtlpTarget.from_environment(os.environ), identity); output.send(spans)`.
"""

from __future__ import annotations

import importlib.util
import os
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, cast
from urllib.parse import urlsplit

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags, TraceState

from firstdiff.tracing import names
from firstdiff.tracing.records import Identity
from firstdiff.tracing.span_record import AttributeValue, SpanRecord
from firstdiff.tracing.token_log import hash_identity

MAX_BATCH_SPANS = 512
TRACES_PATH = "/v1/traces"
Protocol = Literal["http/protobuf", "grpc"]
PROTOCOLS: tuple[Protocol, ...] = ("http/protobuf", "grpc")
_ENDPOINT, _PROTOCOL = "OTEL_EXPORTER_OTLP{}_ENDPOINT", "OTEL_EXPORTER_OTLP{}_PROTOCOL"
_KINDS = {
    "internal": SpanKind.INTERNAL,
    "server": SpanKind.SERVER,
    "client": SpanKind.CLIENT,
    "producer": SpanKind.PRODUCER,
    "consumer": SpanKind.CONSUMER,
}


@dataclass(frozen=True, slots=True)
class OtlpTarget:
    """A collector: over HTTP the URL that traces are posted to, over gRPC the server's."""

    url: str
    protocol: Protocol = "http/protobuf"

    @classmethod
    def from_environment(
        cls, environ: Mapping[str, str], *, endpoint: str | None = None, protocol: str | None = None
    ) -> OtlpTarget | None:
        """By OpenTelemetry's variables, the arguments before them; None when neither names a collector.

        Headers, compression, certificates and the time-out are read by the exporter itself. ValueError when
        something cannot be used.
        """
        is_off = environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true"
        is_off = is_off or environ.get("OTEL_TRACES_EXPORTER", "").strip() == "none"
        if endpoint is None and is_off:
            return None
        named = {part: environ.get(_ENDPOINT.format(part), "").strip() for part in ("_TRACES", "")}
        base = named["_TRACES"] or named[""] if endpoint is None else endpoint
        if endpoint is None and not base:
            return None
        if protocol is None:
            protocol = environ.get(_PROTOCOL.format("_TRACES")) or environ.get(_PROTOCOL.format(""))
        protocol = (protocol or PROTOCOLS[0]).strip()
        if protocol not in PROTOCOLS:
            raise ValueError(f"expected an OTLP protocol out of {', '.join(PROTOCOLS)}, got {protocol!r}")
        if protocol == "grpc":
            if importlib.util.find_spec("grpc") is None:
                raise ValueError(
                    "expected grpcio for OTLP over gRPC, got an installation without it: "
                    "pip install 'firstdiff[engine]', or take http/protobuf"
                )
            return cls(_checked(base), cast(Protocol, protocol))
        is_whole = endpoint is None and bool(named["_TRACES"])
        return cls(_checked(base) if is_whole else traces_url(base))


class OtlpOutput:
    """Sends spans to a collector, from a thread of the OpenTelemetry SDK.

    At most `max_pending_spans` wait, beside the batch that is on its way; what does not fit is dropped, all
    that was given at once. `send` may be called from an event loop.
    """

    def __init__(
        self,
        target: OtlpTarget,
        identity: Identity,
        *,
        max_pending_spans: int = 8192,
        delay_s: float = 1.0,
        timeout_s: float = 5.0,
    ) -> None:
        self._resource = resource_of(identity)
        self._scope = InstrumentationScope(names.SERVICE_NAME, identity.engine_version)
        self._max_pending_spans = max_pending_spans
        self._exporter = _CountingExporter(_exporter(target, timeout_s))
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

    def send(self, spans: Sequence[SpanRecord]) -> None:
        """Send in the background; never waits."""
        num_pending_spans = self._num_submitted_spans - self._exporter.num_taken_spans
        if self._closed or num_pending_spans + len(spans) > self._max_pending_spans:
            self._num_refused_spans += len(spans)
            return
        self._num_submitted_spans += len(spans)
        for span in spans:
            self._processor.on_end(_to_otel(span, self._resource, self._scope))

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


def _exporter(target: OtlpTarget, timeout_s: float) -> SpanExporter:
    if target.protocol == "http/protobuf":
        return OTLPSpanExporter(target.url, timeout=timeout_s)
    # Only here: grpcio takes a second to import.
    from opentelemetry.exporter.otlp.proto.grpc import trace_exporter as over_grpc

    exporter: SpanExporter = over_grpc.OTLPSpanExporter(target.url, timeout=timeout_s)
    return exporter


def traces_url(endpoint: str) -> str:
    """The URL to post traces to: `endpoint`, with /v1/traces where it does not end so; ValueError."""
    base = _checked(endpoint).rstrip("/")
    return base if base.endswith(TRACES_PATH) else base + TRACES_PATH


def _checked(endpoint: str) -> str:
    """ValueError when `endpoint` is not an http(s) URL with a host."""
    try:
        parts = urlsplit(endpoint)
        usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        usable = False
    if not usable:
        raise ValueError(
            f"expected an OTLP endpoint like http://127.0.0.1:4318, got {endpoint!r}: give its URL"
        )
    return endpoint


def resource_of(identity: Identity) -> Resource:
    """Who makes the spans; OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES are heeded."""
    attributes: dict[str, AttributeValue] = {
        names.SERVICE_VERSION_KEY: identity.engine_version,
        names.SERVICE_INSTANCE_KEY: identity.instance_id,
        names.IDENTITY_SHA256: hash_identity(identity),
    }
    # Whoever deploys may name the service with OpenTelemetry's own variable, which Resource.create reads.
    if not os.environ.get("OTEL_SERVICE_NAME"):
        attributes[names.SERVICE_NAME_KEY] = names.SERVICE_NAME
    return Resource.create(attributes)


def resource_attributes(identity: Identity) -> dict[str, AttributeValue]:
    """The same as plain values."""
    return cast("dict[str, AttributeValue]", dict(resource_of(identity).attributes))


def _to_otel(span: SpanRecord, resource: Resource, scope: InstrumentationScope) -> ReadableSpan:
    trace_id = int(span.trace_id, 16)
    flags = TraceFlags(TraceFlags.SAMPLED)
    state = TraceState.from_header([span.tracestate]) if span.tracestate else TraceState()
    parent = None
    if span.parent_span_id is not None:
        is_remote = span.kind == "server"
        parent = SpanContext(trace_id, int(span.parent_span_id, 16), is_remote, flags, state)
    return ReadableSpan(
        name=span.name,
        context=SpanContext(
            trace_id, int(span.span_id, 16), is_remote=False, trace_flags=flags, trace_state=state
        ),
        parent=parent,
        resource=resource,
        attributes=span.attributes,
        kind=_KINDS.get(span.kind, SpanKind.INTERNAL),
        status=Status(StatusCode.UNSET) if span.error is None else Status(StatusCode.ERROR, span.error),
        start_time=span.start_unix_ns,
        end_time=span.end_unix_ns,
        instrumentation_scope=scope,
    )
