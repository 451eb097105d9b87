"""Traces of any engine as requests with phases: one model, with each engine's own definitions beside it.

Owns: what a request, its phases and its attributes are in each kind of trace. Refuses to know: statistics,
where traces come from. Invariants: the phases of a request sum exactly to its end-to-end time; a phase is
compared only with one that begins and ends at the same events; what cannot be read as a request is counted,
never guessed.

Sources of the foreign definitions: vLLM 0.33 (vllm/v1/engine/output_processor.py), SGLang 0.5.23
(sglang/srt/tracing).

Usage: `requests, unread = read_requests(spans)`.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from firstdiff.tracing import names
from firstdiff.tracing.span_record import AttributeValue, SpanRecord

OTHER = "other"
"""What no phase of its engine covers: the end-to-end time less the rest."""
_SLACK_NS = 1_000_000
"""By which the phases of a trace may overlap: clocks and roundings."""

Key = tuple[str, int, int]
"""Case id, repeat and which of a request's answers."""


@dataclass(frozen=True, slots=True)
class Definition:
    """What an engine's phases are: (phase, event that begins it, event that ends it)."""

    engine: str
    phases: tuple[tuple[str, str, str], ...]


FIRSTDIFF = Definition("firstdiff", tuple((one.phase, one.begins, one.ends) for one in names.PHASE_EVENTS))
VLLM = Definition(
    "vllm",
    (
        ("queue", "queued in the engine", "first scheduled"),
        ("prefill", "first scheduled", "first token"),
        ("decode", "first token", "last token"),
        (OTHER, "arrival in the front end", "answer processed, without the phases"),
    ),
)
SGLANG = Definition(
    "sglang",
    (
        ("tokenize", "slice tokenize begins", "slice tokenize ends"),
        ("queue", "slice prefill_waiting begins", "slice prefill_waiting ends"),
        ("prefill", "prefill_forward or chunked_prefill begins", "prefill_forward or chunked_prefill ends"),
        ("decode", "decode_forward or decode_loop begins", "decode_forward or decode_loop ends"),
        (OTHER, "root begins", "root ends, without the slices"),
    ),
)
SGLANG_ROOT = Definition(
    "sglang, root span only",
    (
        ("queue and prefill", "dispatch finished", "first token"),
        ("decode", "first token", "finished"),
        (OTHER, "received", "finished, without the phases"),
    ),
)


@dataclass(frozen=True, slots=True)
class TracedRequest:
    """One answer; counts are None where the trace does not say, `attributes` what may explain a change."""

    trace_id: str
    key: Key | None
    block: str | None
    start_unix_ns: int
    definition: Definition
    phases_ns: dict[str, int]
    num_prompt_tokens: int | None
    num_cached_tokens: int | None
    num_output_tokens: int | None
    attributes: dict[str, AttributeValue]

    @property
    def e2e_ns(self) -> int:
        return sum(self.phases_ns.values())


@dataclass(slots=True)
class Unread:
    """Traces that gave no request to compare: how many, by why."""

    failed: int = 0
    """The request failed or was aborted."""
    without_server: int = 0
    """A client's span with no server's below it."""
    unknown: int = 0
    """No kind of trace that is known here."""
    skewed: int = 0
    """Phases that do not fit into their request: clocks differ."""


def read_requests(spans: Sequence[SpanRecord]) -> tuple[list[TracedRequest], Unread]:
    """The requests of all traces in `spans`, by their start; what could not be read, counted by trace."""
    traces: dict[str, list[SpanRecord]] = defaultdict(list)
    for span in spans:
        traces[span.trace_id].append(span)
    requests: list[TracedRequest] = []
    unread = Unread()
    for trace in traces.values():
        requests += _read_trace(trace, unread)
    return sorted(requests, key=lambda one: (one.start_unix_ns, one.trace_id)), unread


def _read_trace(trace: Sequence[SpanRecord], unread: Unread) -> list[TracedRequest]:
    client = next(
        (span for span in trace if span.kind == "client" and names.CASE_ID in span.attributes), None
    )
    own = [span for span in trace if names.PHASE_TOTAL_NS["queue"] in span.attributes]
    if own:
        found = [_firstdiff(span, index, client) for index, span in enumerate(own) if not _has_failed(span)]
        unread.failed += len(own) - len(found)
        return found
    vllm = [span for span in trace if span.name == "llm_request"]
    if vllm:
        return _checked([_vllm(span, index, client) for index, span in enumerate(vllm)], unread)
    roots = [span for span in trace if _SGLANG_ROOT.fullmatch(span.name)]
    if roots:
        return _checked([_sglang(roots[0], trace, client)], unread)
    if client is not None:
        if client.error is None:
            unread.without_server += 1
        else:
            unread.failed += 1
    elif any(_has_failed(span) for span in trace):
        # Refused: a server's span and nothing below it.
        unread.failed += 1
    else:
        unread.unknown += 1
    return []


def _has_failed(span: SpanRecord) -> bool:
    return span.error is not None or names.ERROR_TYPE in span.attributes


def _checked(requests: list[TracedRequest], unread: Unread) -> list[TracedRequest]:
    """Those whose phases fit into their request, `other` 0 where they overlap by no more than the slack."""
    found = []
    for request in requests:
        if min(request.phases_ns.values()) < -_SLACK_NS:
            unread.skewed += 1
            continue
        phases = {name: max(0, duration) for name, duration in request.phases_ns.items()}
        request.phases_ns.update(phases)
        found.append(request)
    return found


def _firstdiff(span: SpanRecord, index: int, client: SpanRecord | None) -> TracedRequest:
    phases = {phase: _count(span, names.PHASE_TOTAL_NS[phase]) or 0 for phase in names.PHASES}
    return _request(span, index, client, FIRSTDIFF, phases)


def _vllm(span: SpanRecord, index: int, client: SpanRecord | None) -> TracedRequest:
    e2e_ns = _seconds_as_ns(span, names.LATENCY_E2E)
    phases = {
        "queue": _seconds_as_ns(span, names.LATENCY_QUEUE) or 0,
        "prefill": _seconds_as_ns(span, names.LATENCY_PREFILL) or 0,
        "decode": _seconds_as_ns(span, names.LATENCY_DECODE) or 0,
    }
    phases[OTHER] = (span.duration_ns if e2e_ns is None else e2e_ns) - sum(phases.values())
    return _request(span, index, client, VLLM, phases)


_SGLANG_ROOT = re.compile(r"\S* ?Req [0-9a-fA-F]{1,32}")
_SLICES = {
    "tokenize": ("tokenize",),
    "queue": ("prefill_waiting",),
    "prefill": ("prefill_forward", "chunked_prefill"),
    # Level 3 has the loop's turns, level 1 their sum.
    "decode": ("decode_forward", "decode_loop"),
}


def _sglang(root: SpanRecord, trace: Sequence[SpanRecord], client: SpanRecord | None) -> TracedRequest:
    threads: dict[str | None, list[SpanRecord]] = defaultdict(list)
    for span in trace:
        threads[span.parent_span_id].append(span)
    phases: dict[str, int] = {}
    for phase, slices in _SLICES.items():
        # Ranks of one engine compute the same slice at the same time, each in a thread of its own.
        for name in slices if phase == "decode" else (None,):
            wanted = slices if name is None else (name,)
            of_threads = [
                sum(one.duration_ns for one in own if one.name in wanted) for own in threads.values()
            ]
            phases[phase] = max(of_threads, default=0)
            if phases[phase]:
                break
    definition = SGLANG
    if not any(phases.values()):
        definition = SGLANG_ROOT
        phases = {
            "queue and prefill": _seconds_as_ns(root, names.LATENCY_PREFILL) or 0,
            "decode": _seconds_as_ns(root, names.LATENCY_DECODE) or 0,
        }
    phases[OTHER] = root.duration_ns - sum(phases.values())
    return _request(root, 0, client, definition, phases)


def _request(
    span: SpanRecord, index: int, client: SpanRecord | None, definition: Definition, phases: dict[str, int]
) -> TracedRequest:
    key: Key | None = None
    attributes = {name: value for name, value in span.attributes.items() if name in _EXPLAINING}
    block = None
    if client is not None:
        repeat = _count(client, names.JAEGER_ITERATION_INDEX) or 0
        key = (str(client.attributes[names.CASE_ID]), repeat, index)
        block_index = _count(client, names.BLOCK_INDEX)
        block = None if block_index is None else f"{repeat}-{block_index}"
        attributes[names.SCHEDULE_LAG_NS] = _count(client, names.SCHEDULE_LAG_NS) or 0
    return TracedRequest(
        trace_id=span.trace_id,
        key=key,
        block=block,
        start_unix_ns=span.start_unix_ns,
        definition=definition,
        phases_ns=phases,
        num_prompt_tokens=_first_count(span, names.GEN_AI_INPUT_TOKENS, "gen_ai.usage.prompt_tokens"),
        num_cached_tokens=_first_count(span, names.GEN_AI_CACHED_TOKENS, "gen_ai.usage.cached_tokens"),
        num_output_tokens=_first_count(span, names.GEN_AI_OUTPUT_TOKENS, "gen_ai.usage.completion_tokens"),
        attributes=attributes,
    )


_EXPLAINING = {
    names.GEN_AI_INPUT_TOKENS,
    names.GEN_AI_OUTPUT_TOKENS,
    names.GEN_AI_CACHED_TOKENS,
    names.GEN_AI_MAX_TOKENS,
    names.GEN_AI_TEMPERATURE,
    names.GEN_AI_SEED,
    names.NUM_PREFILL_CHUNKS,
    names.NUM_PREEMPTIONS,
    names.FIRST_BATCH_SIZE,
    names.MAX_BATCH_SIZE,
    names.PRIORITY,
    "gen_ai.usage.prompt_tokens",
    "gen_ai.usage.completion_tokens",
    "gen_ai.usage.cached_tokens",
}


def _count(span: SpanRecord, name: str) -> int | None:
    value = span.attributes.get(name)
    if isinstance(value, str):
        # Formatted by the engine: whatever it is, it is no number to compute with.
        return int(value) if value.isascii() and value.isdigit() and len(value) < 19 else None
    return int(value) if isinstance(value, int | float) and abs(value) < 1 << 62 else None


def _first_count(span: SpanRecord, *candidates: str) -> int | None:
    return next((value for name in candidates if (value := _count(span, name)) is not None), None)


def _seconds_as_ns(span: SpanRecord, name: str) -> int | None:
    value = span.attributes.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1e9:
        return None
    return round(value * 1e9)
