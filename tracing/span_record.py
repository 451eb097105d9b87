"""One span, before any library or wire format: what all who make, read and compare spans hand around.

Owns: the record and the ids of children. Refuses to know: OpenTelemetry, Jaeger, requests. Invariants: ids
are lower-case hex, 32 digits a trace, 16 a span, never all zero; times are Unix nanoseconds.

Usage: `SpanRecord(name="queue", kind="internal", trace_id=..., ...)`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Literal

import msgspec

AttributeValue = str | bool | int | float | Sequence[str] | Sequence[bool] | Sequence[int] | Sequence[float]
SpanKind = Literal["unspecified", "internal", "server", "client", "producer", "consumer"]


class SpanRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A span as sent or as read; `error` is the status message of one that failed, None when all is well.

    `resource` says what process made it, by OpenTelemetry's names; a writer that sends it once for many
    spans leaves it empty.
    """

    name: str
    kind: SpanKind
    trace_id: str
    span_id: str
    parent_span_id: str | None
    start_unix_ns: int
    end_unix_ns: int
    attributes: dict[str, AttributeValue]
    error: str | None = None
    tracestate: str = ""
    resource: dict[str, AttributeValue] = {}

    @property
    def duration_ns(self) -> int:
        return self.end_unix_ns - self.start_unix_ns


def child_span_id(trace_id: str, span_id: str, name: str) -> str:
    """A span id made from its parent's, the same each time: 16 hex digits, never all zero."""
    digest = hashlib.sha256(f"{trace_id}-{span_id}-{name}".encode()).digest()[:8]
    return f"{int.from_bytes(digest) | 1:016x}"
