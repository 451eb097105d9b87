"""The client's own span of each request: what it waited for, above the server's.

Owns: that span. Refuses to know: servers' spans, where spans are shown. Invariants: it is made when the
request has ended, from its row; ids follow from the request id, as those sent in `traceparent` did; the
tags `jaeger.eval.*` name the Run and the repeat, as Jaeger groups experiments.
Source: https://opentelemetry.io/docs/specs/semconv/gen-ai/gen-ai-spans/

Usage: `run.append_line("spans", client_line(row, case, run.manifest))`.
"""

from __future__ import annotations

import hashlib
from urllib.parse import urlsplit

from firstdiff.tracing import names
from firstdiff.tracing.otlp_json import encode_traces
from firstdiff.tracing.records import Request, RequestRow
from firstdiff.tracing.span_record import AttributeValue, SpanRecord
from firstdiff.tracing.store import Manifest


def trace_ids(request_id: str) -> tuple[str, str]:
    """The (trace id, span id) of a request, in hex: a function of its id, so that a replay has the same."""
    digest = hashlib.sha256(request_id.encode()).hexdigest()
    return digest[:32], digest[32:48]


def client_line(row: RequestRow, request: Request, manifest: Manifest) -> bytes:
    """The span as one line of a Run's `spans.jsonl`."""
    version = str(manifest.client.get("firstdiff", ""))
    return encode_traces([client_span(row, request, manifest)], _resource(manifest, version), version=version)


def client_span(row: RequestRow, request: Request, manifest: Manifest) -> SpanRecord:
    """Sent to finished, whatever the outcome; a failed one has status or outcome as `error.type`."""
    trace_id, span_id = trace_ids(row.request_id)
    operation = "chat" if request.messages is not None else "text_completion"
    attributes: dict[str, AttributeValue] = {
        names.GEN_AI_OPERATION: operation,
        names.GEN_AI_PROVIDER: manifest.dialect,
        names.GEN_AI_REQUEST_MODEL: manifest.model,
        names.GEN_AI_MAX_TOKENS: request.max_tokens,
        names.GEN_AI_TEMPERATURE: request.temperature,
        names.GEN_AI_TOP_P: request.top_p,
        names.GEN_AI_STREAM: request.stream,
        names.REQUEST_ID: row.request_id,
        names.CASE_ID: row.case_id,
        names.BLOCK_INDEX: row.block_index,
        names.SCHEDULE_LAG_NS: row.sent_ns - row.intended_ns,
        names.JAEGER_TRIAL_ID: manifest.run_id,
        names.JAEGER_ITERATION_INDEX: row.repeat_index,
    }
    address = urlsplit(manifest.endpoint)
    if address.hostname is not None:
        attributes[names.SERVER_ADDRESS] = address.hostname
        attributes[names.SERVER_PORT] = address.port or (443 if address.scheme == "https" else 80)
    if request.seed is not None and -(1 << 63) <= request.seed < 1 << 63:
        attributes[names.GEN_AI_SEED] = request.seed
    if row.status is not None:
        attributes[names.HTTP_STATUS] = row.status
    if row.finish_reason is not None:
        attributes[names.GEN_AI_FINISH_REASONS] = (row.finish_reason,)
    if row.usage is not None:
        attributes[names.GEN_AI_INPUT_TOKENS] = row.usage.prompt_tokens
        attributes[names.GEN_AI_OUTPUT_TOKENS] = row.usage.completion_tokens
        if row.usage.cached_tokens is not None:
            attributes[names.GEN_AI_CACHED_TOKENS] = row.usage.cached_tokens
    if row.chunk_received_ns:
        attributes[names.GEN_AI_FIRST_CHUNK] = (row.chunk_received_ns[0] - row.sent_ns) / 1e9
    if row.outcome != "ok":
        is_answer = row.status is not None and row.status >= 400
        attributes[names.ERROR_TYPE] = str(row.status) if is_answer else row.outcome
    return SpanRecord(
        name=f"{operation} {manifest.model}",
        kind="client",
        trace_id=trace_id,
        span_id=span_id,
        parent_span_id=None,
        start_unix_ns=row.sent_unix_ns,
        end_unix_ns=row.sent_unix_ns + row.finished_ns - row.sent_ns,
        attributes=attributes,
        error=None if row.outcome == "ok" else (row.error or row.outcome),
    )


def _resource(manifest: Manifest, version: str) -> dict[str, AttributeValue]:
    return {
        names.SERVICE_NAME_KEY: names.CLIENT_SERVICE_NAME,
        names.SERVICE_VERSION_KEY: version,
        names.SERVICE_INSTANCE_KEY: manifest.run_id,
    }
