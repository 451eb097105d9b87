"""The span fold: ended requests as spans, kept or not, and handed to whoever takes them.

Owns: which requests are kept, when a request is whole. Refuses to know: wire formats, collectors, threads.
Invariants: spans are made when the HTTP request has ended, from its rows alone; those of one request are
kept together or not at all; nothing here waits.

Usage: `fold.answer(row)` for each answer, `fold.http(http_row)` after them; late answers may follow.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from firstdiff.tracing.records import HttpRow, TokenLogRow
from firstdiff.tracing.request_spans import answer_spans, http_span
from firstdiff.tracing.span_record import SpanRecord
from firstdiff.tracing.trace_sampling import Sampler


class SpanOutput(Protocol):
    """Where spans go; what it could not take, it counts."""

    @property
    def num_dropped_spans(self) -> int: ...

    def send(self, spans: Sequence[SpanRecord]) -> None: ...

    def close(self) -> None: ...


class SpanFold:
    """The spans of one server's requests, to all `outputs`. `model` is the name that clients ask for."""

    def __init__(self, outputs: Sequence[SpanOutput], sampler: Sampler, *, model: str) -> None:
        self._outputs = outputs
        self._sampler = sampler
        self._model = model
        self._waiting: dict[str, list[TokenLogRow]] = {}
        """Answers by HTTP span, until its request has ended."""
        self._decided: dict[str, tuple[bool, int]] = {}
        """(is kept, answers still to come) by HTTP span, of requests whose answers are not all here."""

    @property
    def num_dropped_spans(self) -> int:
        return sum(output.num_dropped_spans for output in self._outputs)

    @property
    def num_open_requests(self) -> int:
        return len(self._waiting) + len(self._decided)

    def answer(self, row: TokenLogRow) -> None:
        """An answer has ended; its HTTP request may have done so before."""
        if row.span_id is None:
            return
        decided = self._decided.pop(row.span_id, None)
        if decided is None:
            self._waiting.setdefault(row.span_id, []).append(row)
            return
        is_kept, num_missing = decided
        if num_missing > 1:
            self._decided[row.span_id] = (is_kept, num_missing - 1)
        if is_kept:
            self._send(answer_spans(row, model=self._model))

    def http(self, row: HttpRow) -> None:
        """An HTTP request has ended: what is known of it goes out now."""
        answers = self._waiting.pop(row.span_id, [])
        has_failed = row.error_type is not None
        has_failed = has_failed or any(answer.finish_reason in ("abort", "error") for answer in answers)
        is_kept = self._sampler.tail(
            sampled=row.sampled,
            is_root=row.parent_span_id is None,
            has_failed=has_failed,
            duration_ns=row.ended_ns - row.received_ns,
        )
        num_missing = row.num_answers - len(answers)
        if num_missing > 0:
            self._decided[row.span_id] = (is_kept, num_missing)
        if is_kept:
            spans = [http_span(row)]
            for answer in answers:
                spans += answer_spans(answer, model=self._model)
            self._send(spans)

    def close(self) -> None:
        """Let the outputs finish."""
        for output in self._outputs:
            output.close()

    def _send(self, spans: list[SpanRecord]) -> None:
        for output in self._outputs:
            output.send(spans)
