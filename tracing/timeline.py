"""A request's time, cut into segments without gap or overlap: the one definition of the phases.

Owns: where each phase begins and ends. Refuses to know: spans, metrics, who compares. Invariants: segments
follow one another from received_ns to flushed_ns exactly; what a preemption cost, from the moment of losing
the blocks until as many tokens are computed again, is `preempted` and neither prefill nor decode; stamps out
of order move to the nearest moment that keeps it.

Usage: `for segment in timeline(row): print(segment.phase, segment.duration_ns)`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from firstdiff.tracing.names import PHASES
from firstdiff.tracing.records import PrefillChunk, TokenLogRow


@dataclass(frozen=True, slots=True)
class Segment:
    """A stretch of one phase; `chunk` is the prefill chunk whose end it runs to, where there is one."""

    phase: str
    start_ns: int
    end_ns: int
    chunk: PrefillChunk | None = None

    @property
    def duration_ns(self) -> int:
        return self.end_ns - self.start_ns


class Borders(NamedTuple):
    """The moments of a request in order, each between the one before it and the flush."""

    received_ns: int
    tokenized_ns: int
    scheduled_ns: int
    first_token_ns: int
    finished_ns: int
    flushed_ns: int


def borders(row: TokenLogRow) -> Borders:
    """The row's moments; one that was never reached is when the request finished.

    ValueError when flushed_ns lies before received_ns.
    """
    if row.flushed_ns < row.received_ns:
        raise ValueError(
            f"expected flushed_ns >= received_ns in request {row.request_id}, "
            f"got {row.flushed_ns} < {row.received_ns}: the log mixes two machines' clocks"
        )
    first_token_ns = row.finished_ns if row.first_token_ns is None else row.first_token_ns
    first_scheduled_ns = first_token_ns if row.first_scheduled_ns is None else row.first_scheduled_ns
    moments_ns = [row.received_ns]
    for stamp_ns in (row.tokenized_ns, first_scheduled_ns, first_token_ns, row.finished_ns, row.flushed_ns):
        moments_ns.append(min(max(stamp_ns, moments_ns[-1]), row.flushed_ns))
    return Borders._make(moments_ns)


def timeline(row: TokenLogRow) -> list[Segment]:
    """All of received_ns .. flushed_ns, in order; phases that the request never entered are not there.

    A phase that was never left lasts until the request finished: a request aborted in the queue was queued
    to the end. `tokenize`, `queue` and `stream` are always there, if only with no time in them. Errors as
    `borders`.
    """
    at = borders(row)
    segments = [
        Segment("tokenize", at.received_ns, at.tokenized_ns),
        Segment("queue", at.tokenized_ns, at.scheduled_ns),
    ]
    if row.first_scheduled_ns is not None:
        segments += _prefill(row, at.scheduled_ns, at.first_token_ns)
    if row.first_token_ns is not None:
        segments += _cut("decode", at.first_token_ns, at.finished_ns, row)
    segments.append(Segment("stream", at.finished_ns, at.flushed_ns))
    return segments


def phase_durations_ns(row: TokenLogRow) -> dict[str, int]:
    """How long each phase took, in the order of PHASES, never entered ones 0; errors as `timeline`."""
    durations_ns = dict.fromkeys(PHASES, 0)
    for segment in timeline(row):
        durations_ns[segment.phase] += segment.duration_ns
    return durations_ns


def _prefill(row: TokenLogRow, start_ns: int, end_ns: int) -> Iterator[Segment]:
    """Prefill until the first token, cut at the end of each chunk and where it was preempted."""
    chunks = [chunk for chunk in row.prefill_chunks if chunk.finished_ns is not None]
    for segment in _cut("prefill", start_ns, end_ns, row):
        if segment.phase != "prefill":
            yield segment
            continue
        border_ns = segment.start_ns
        while chunks and _end_of(chunks[0]) <= segment.end_ns:
            chunk = chunks.pop(0)
            if _end_of(chunk) > border_ns:
                yield Segment("prefill", border_ns, _end_of(chunk), chunk)
                border_ns = _end_of(chunk)
        if border_ns < segment.end_ns or border_ns == segment.start_ns:
            yield Segment("prefill", border_ns, segment.end_ns)


def _end_of(chunk: PrefillChunk) -> int:
    assert chunk.finished_ns is not None
    return chunk.finished_ns


def _cut(phase: str, start_ns: int, end_ns: int, row: TokenLogRow) -> Iterator[Segment]:
    """`phase` from start to end, but for the times in it that went to preemptions."""
    border_ns = start_ns
    for lost_ns, back_ns in _preempted(row):
        lost_ns, back_ns = max(lost_ns, border_ns), min(back_ns, end_ns)
        if lost_ns >= back_ns:
            continue
        if lost_ns > border_ns:
            yield Segment(phase, border_ns, lost_ns)
        yield Segment("preempted", lost_ns, back_ns)
        border_ns = back_ns
    if border_ns < end_ns or border_ns == start_ns:
        yield Segment(phase, border_ns, end_ns)


def _preempted(row: TokenLogRow) -> list[tuple[int, int]]:
    """(from, to) of each preemption in order, joined where the next came before it was made good."""
    spans_ns: list[tuple[int, int]] = []
    is_open = False
    for preemption in row.preemptions:
        end_ns = row.finished_ns if preemption.recovered_ns is None else preemption.recovered_ns
        if is_open:
            spans_ns[-1] = (spans_ns[-1][0], end_ns)
        else:
            spans_ns.append((preemption.preempted_ns, end_ns))
        is_open = preemption.recovered_ns is None
    return spans_ns
