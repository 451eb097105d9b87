"""The spans of a request, made from its log rows when it has ended.

Owns: the tree's shape, its attributes. Refuses to know: OpenTelemetry, collectors, files. Invariants: a span
is a function of one row, so folding a saved log again gives the same spans with the same ids; names are few
and equal on all replicas; a request of one answer has NUM_SPANS_MAX spans at most; phases never touch: one
microsecond at least lies between two, since Jaeger's critical path loses a phase that begins in the
microsecond in which its sibling ends.

    POST /v1/chat/completions      SERVER, the caller's child                        (HttpRow)
      chat {model}                 INTERNAL, one for each answer, gen_ai.*           (TokenLogRow)
        tokenize, queue, prefill (a chunk each), decode, preempted, stream

Usage: `spans = [http_span(http), *answer_spans(row, model="m")]`.
"""

from __future__ import annotations

from dataclasses import dataclass

from firstdiff.tracing import names
from firstdiff.tracing.records import HttpRow, TokenLogRow
from firstdiff.tracing.span_record import AttributeValue, SpanRecord, child_span_id
from firstdiff.tracing.timeline import Segment, borders, phase_durations_ns, timeline

GAP_NS = 1_000
NUM_SPANS_MAX = 12
_NUM_SEGMENTS_MAX = NUM_SPANS_MAX - 2


def http_span(row: HttpRow) -> SpanRecord:
    """The server's span: head read to answer ended, refusals and answers that nobody waited for included."""
    attributes: dict[str, AttributeValue] = {
        names.HTTP_METHOD: row.method,
        names.HTTP_ROUTE: row.route,
        names.NUM_ANSWERS: row.num_answers,
    }
    if row.request_id is not None:
        attributes[names.REQUEST_ID] = row.request_id
    if row.status is not None:
        attributes[names.HTTP_STATUS] = row.status
    if row.error_type is not None:
        attributes[names.ERROR_TYPE] = row.error_type
    return SpanRecord(
        name=f"{row.method} {row.route}",
        kind="server",
        trace_id=row.trace_id,
        span_id=row.span_id,
        parent_span_id=row.parent_span_id,
        start_unix_ns=row.received_unix_ns,
        end_unix_ns=row.received_unix_ns + row.ended_ns - row.received_ns,
        attributes=attributes,
        error=row.error_type,
        tracestate=row.tracestate,
    )


def answer_spans(row: TokenLogRow, *, model: str) -> list[SpanRecord]:
    """The spans of one answer, parents first: inference, then its phases in order; none without a trace.

    Each phase begins GAP_NS after the one before it ended, cut from its own time; where phases are shorter
    than that, the later ones move, by 10 microseconds at most. The exact durations are attributes.
    """
    if row.trace_id is None or row.span_id is None:
        return []
    operation = names.operation_of(row.endpoint)
    span_id = child_span_id(row.trace_id, row.span_id, row.request_id)
    phases = _phase_spans(row, row.trace_id, span_id)
    flushed_unix_ns = row.received_unix_ns + row.flushed_ns - row.received_ns
    inference = SpanRecord(
        name=f"{operation} {model}",
        kind="internal",
        trace_id=row.trace_id,
        span_id=span_id,
        parent_span_id=row.span_id,
        start_unix_ns=row.received_unix_ns,
        end_unix_ns=max(flushed_unix_ns, phases[-1].end_unix_ns),
        attributes=_inference_attributes(row, operation, model),
        error=_message(row),
        tracestate=row.tracestate,
    )
    return [inference, *phases]


@dataclass(frozen=True, slots=True)
class _Stretch:
    """Segments that share a span; the first gives it its name."""

    segments: list[Segment]

    @property
    def phase(self) -> str:
        return self.segments[0].phase

    @property
    def duration_ns(self) -> int:
        return self.segments[-1].end_ns - self.segments[0].start_ns


def _stretches(segments: list[Segment]) -> list[_Stretch]:
    """One for each segment; where those are too many, later prefill chunks, then all but the first few."""
    stretches: list[_Stretch] = []
    num_over = len(segments) - _NUM_SEGMENTS_MAX
    for segment in reversed(segments):
        joins = bool(stretches) and num_over > 0 and segment.phase == stretches[-1].phase == "prefill"
        if joins:
            stretches[-1].segments.insert(0, segment)
            num_over -= 1
        else:
            stretches.append(_Stretch([segment]))
    stretches.reverse()
    if num_over > 0:
        # The last is `stream`, and the one before it takes in what has no place.
        rest = stretches[_NUM_SEGMENTS_MAX - 2 : -1]
        joined = _Stretch([segment for stretch in rest for segment in stretch.segments])
        stretches = [*stretches[: _NUM_SEGMENTS_MAX - 2], joined, stretches[-1]]
    return stretches


def _phase_spans(row: TokenLogRow, trace_id: str, parent_span_id: str) -> list[SpanRecord]:
    spans: list[SpanRecord] = []
    counts = dict.fromkeys(names.PHASES, 0)
    border_ns = earliest_ns = row.received_unix_ns
    for stretch in _stretches(timeline(row)):
        start_ns = max(border_ns, earliest_ns)
        border_ns += stretch.duration_ns
        end_ns = max(border_ns, start_ns)
        earliest_ns = end_ns + GAP_NS
        index = counts[stretch.phase]
        counts[stretch.phase] += 1
        spans.append(
            SpanRecord(
                name=stretch.phase,
                kind="internal",
                trace_id=trace_id,
                span_id=child_span_id(trace_id, parent_span_id, f"{stretch.phase}-{index}"),
                parent_span_id=parent_span_id,
                start_unix_ns=start_ns,
                end_unix_ns=end_ns,
                attributes=_stretch_attributes(row, stretch, is_first=index == 0),
                tracestate=row.tracestate,
            )
        )
    return spans


def _stretch_attributes(row: TokenLogRow, stretch: _Stretch, *, is_first: bool) -> dict[str, AttributeValue]:
    attributes: dict[str, AttributeValue] = {names.SPAN_DURATION_NS: stretch.duration_ns}
    hidden = sorted({segment.phase for segment in stretch.segments} - {stretch.phase})
    if hidden:
        attributes[names.HIDDEN_PHASES] = hidden
    if stretch.phase == "tokenize":
        attributes[names.GEN_AI_INPUT_TOKENS] = row.num_prompt_tokens
    elif stretch.phase == "prefill":
        chunks = [segment.chunk for segment in stretch.segments if segment.chunk is not None]
        if is_first and all(chunk.finished_ns is None for chunk in row.prefill_chunks):
            # A log from before chunks were timed: they are all in the one span.
            chunks = row.prefill_chunks
        attributes[names.NUM_PREFILL_CHUNKS] = len(chunks)
        attributes[names.NUM_COMPUTED_PROMPT_TOKENS] = sum(chunk.num_tokens for chunk in chunks)
        if chunks:
            attributes[names.START_TOKEN] = chunks[0].start_token
        if is_first:
            attributes[names.GEN_AI_CACHED_TOKENS] = row.num_cached_tokens
    elif stretch.phase == "decode" and is_first:
        attributes[names.GEN_AI_OUTPUT_TOKENS] = row.num_output_tokens
    return attributes


def _inference_attributes(row: TokenLogRow, operation: str, model: str) -> dict[str, AttributeValue]:
    sampling, at = row.sampling, borders(row)
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
        names.GEN_AI_INPUT_TOKENS: row.num_prompt_tokens,
        names.GEN_AI_OUTPUT_TOKENS: row.num_output_tokens,
        names.GEN_AI_CACHED_TOKENS: row.num_cached_tokens,
        names.LATENCY_E2E: (at.flushed_ns - at.received_ns) / 1e9,
        names.LATENCY_QUEUE: (at.scheduled_ns - at.tokenized_ns) / 1e9,
        names.NUM_PREEMPTIONS: row.num_preemptions,
        names.NUM_PREFILL_CHUNKS: len(row.prefill_chunks),
        names.PRIORITY: row.priority,
        names.IDENTITY_SHA256: row.identity_sha256,
        names.NAMES_VERSION_KEY: names.NAMES_VERSION,
    }
    for phase, duration_ns in phase_durations_ns(row).items():
        attributes[names.PHASE_TOTAL_NS[phase]] = duration_ns
    # OTLP integers are 64-bit signed; a larger seed is kept in the token log only.
    if -(1 << 63) <= sampling.seed < 1 << 63:
        attributes[names.GEN_AI_SEED] = sampling.seed
    if row.batch_size:
        attributes[names.FIRST_BATCH_SIZE] = row.batch_size[0]
        attributes[names.MAX_BATCH_SIZE] = max(row.batch_size)
    # These have vLLM's meaning: what a preemption cost lies inside prefill or decode.
    if row.first_scheduled_ns is not None:
        attributes[names.LATENCY_PREFILL] = (at.first_token_ns - at.scheduled_ns) / 1e9
        attributes[names.LATENCY_INFERENCE] = (at.finished_ns - at.scheduled_ns) / 1e9
    if row.first_token_ns is not None:
        attributes[names.LATENCY_TTFT] = (at.first_token_ns - at.received_ns) / 1e9
        attributes[names.LATENCY_DECODE] = (at.finished_ns - at.first_token_ns) / 1e9
    if row.finish_reason in ("abort", "error"):
        attributes[names.ERROR_TYPE] = row.finish_reason
    return attributes


def _message(row: TokenLogRow) -> str | None:
    return (row.error or row.finish_reason) if row.finish_reason in ("abort", "error") else None
