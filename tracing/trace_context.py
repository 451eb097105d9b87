"""W3C Trace Context: which trace a request belongs to.

Owns: reading and writing `traceparent`, keeping or dropping `tracestate`. Refuses to know: spans, HTTP.
Invariants: no header value raises; a malformed or all-zero `traceparent` starts a new, sampled trace, a
valid one is joined and its sampled bit obeyed (flags are bits: 01, 03 and ff are all sampled); a
`tracestate` is kept only beside a valid `traceparent` and only when well-formed and within its limits.
Source: https://www.w3.org/TR/trace-context-2/ sections 3.2 and 3.3.

Usage: `context = start_trace(headers.get("traceparent"), headers.get("tracestate"))`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import dataclass

RandomBytes = Callable[[int], bytes]

MAX_TRACESTATE_CHARS = 512
MAX_TRACESTATE_MEMBERS = 32

_SAMPLED = 0x01
_TRACEPARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?", re.ASCII)
_MEMBER = re.compile(
    r"(?:[a-z][a-z0-9_\-*/]{0,255}|[a-z0-9][a-z0-9_\-*/]{0,240}@[a-z][a-z0-9_\-*/]{0,13})"
    r"=[\x20-\x2b\x2d-\x3c\x3e-\x7e]{0,255}[\x21-\x2b\x2d-\x3c\x3e-\x7e]",
    re.ASCII,
)


@dataclass(frozen=True, slots=True)
class TraceContext:
    """This side's place in a trace: `span_id` is ours and new, `parent_span_id` the caller's if any.

    Ids are lower-case hex, 32 digits the trace, 16 a span, never all zero.
    """

    trace_id: str
    span_id: str
    parent_span_id: str | None
    sampled: bool
    tracestate: str = ""

    @property
    def traceparent(self) -> str:
        """The header that makes the next hop a child of this span."""
        return make_traceparent(self.trace_id, self.span_id, sampled=self.sampled)


def start_trace(
    traceparent: str | None, tracestate: str | None = None, *, random_bytes: RandomBytes = os.urandom
) -> TraceContext:
    """Join the caller's trace, or start one when there is none to join. Never raises."""
    span_id = new_id(8, random_bytes)
    parsed = None if traceparent is None else parse_traceparent(traceparent)
    if parsed is None:
        return TraceContext(new_id(16, random_bytes), span_id, None, sampled=True)
    trace_id, parent_span_id, sampled = parsed
    return TraceContext(trace_id, span_id, parent_span_id, sampled, clean_tracestate(tracestate or ""))


def parse_traceparent(header: str) -> tuple[str, str, bool] | None:
    """(trace id, parent span id, sampled) of a `traceparent`; None when it is not one.

    Versions above 00 are read by the rules of 00 and may carry more fields; version ff, upper-case
    digits and all-zero ids are not valid.
    """
    match = _TRACEPARENT.fullmatch(header.strip(" \t"))
    if match is None:
        return None
    version, trace_id, span_id, flags, rest = match.groups()
    if version == "ff" or (version == "00" and rest is not None):
        return None
    if not trace_id.strip("0") or not span_id.strip("0"):
        return None
    return trace_id, span_id, bool(int(flags, 16) & _SAMPLED)


def make_traceparent(trace_id: str, span_id: str, *, sampled: bool) -> str:
    """The `traceparent` header for the given ids (hex as in TraceContext)."""
    header = f"00-{trace_id}-{span_id}-{_SAMPLED if sampled else 0:02x}"
    assert parse_traceparent(header) is not None, header
    return header


def clean_tracestate(header: str) -> str:
    """`header` as comma-joined members, or "" when it is malformed or over the limits."""
    if len(header) > MAX_TRACESTATE_CHARS:
        return ""
    members = [member for part in header.split(",") if (member := part.strip(" \t"))]
    keys = {member.partition("=")[0] for member in members}
    if len(members) > MAX_TRACESTATE_MEMBERS or len(keys) < len(members):
        return ""
    return ",".join(members) if all(map(_MEMBER.fullmatch, members)) else ""


def new_id(num_bytes: int, random_bytes: RandomBytes = os.urandom) -> str:
    """A random id of `num_bytes` bytes as lower-case hex, never all zero (16: a trace, 8: a span)."""
    while not any(value := random_bytes(num_bytes)):
        pass
    return value.hex()
