"""Sends a workload's requests and writes down what came back, one RequestRow each, as each ends.

Owns: pacing (closed loop, open loop, interleaving of sides), stamps of intention and sending, request ids.
Refuses to know: HTTP, dialects, verdicts.
Invariants: every case and repeat of a side gives exactly one row, whatever its endpoint does; open-loop
intentions are absolute, so a slow answer never postpones the next intention (no coordinated omission);
when sides are interleaved, only one of them has requests in flight at any moment; a repeat that the Run
already holds is not asked again.

Usage: `await drive(endpoint, cases, run, clock=clock, concurrency=4)`.
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Callable, Coroutine, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from itertools import count
from typing import Literal, TypeVar

import msgspec

from firstdiff.harness.client_health import LoopLagProbe, client_summary
from firstdiff.harness.client_spans import client_line, trace_ids
from firstdiff.harness.endpoint import Endpoint
from firstdiff.harness.replies import Chunk
from firstdiff.harness.wire import EndpointError
from firstdiff.harness.workload import poisson_arrivals_s
from firstdiff.tracing.clock import Clock
from firstdiff.tracing.records import Request, RequestRow
from firstdiff.tracing.store import Run

T = TypeVar("T")
Order = Literal["abba", "rotate"]
Report = Callable[[int, int], None]
"""Called with (requests done, requests in all) after each."""

REQUESTS = "requests"
WARMUP = "warmup"
SPANS = "spans"


def no_report(num_done: int, num_total: int) -> None:
    """Say nothing."""


@dataclass(frozen=True, slots=True)
class Side:
    """One of the endpoints under comparison and the Run that its rows go to."""

    label: str
    endpoint: Endpoint
    run: Run


@dataclass(frozen=True, slots=True)
class _Job:
    case: Request
    repeat_index: int
    block_index: int


@dataclass(slots=True)
class _Answer:
    """What the chunks of one answer add up to."""

    chunk_received_ns: list[int] = field(default_factory=list)
    chunk_num_tokens: list[int | None] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    chunks: list[Chunk] = field(default_factory=list)

    def add(self, chunk: Chunk) -> None:
        self.chunks.append(chunk)
        self.texts.append(chunk.text)
        if chunk.has_content:
            self.chunk_received_ns.append(chunk.received_ns)
            self.chunk_num_tokens.append(chunk.num_tokens)


async def ask(
    endpoint: Endpoint,
    case: Request,
    *,
    clock: Clock,
    request_id: str,
    intended_ns: int | None = None,
    repeat_index: int = 0,
    block_index: int = 0,
) -> RequestRow:
    """Send one request, wait for its end, and say what came back; whatever comes gives a row."""
    trace_id, span_id = trace_ids(request_id)
    answer = _Answer()
    failure: EndpointError | None = None
    sent_unix_ns = clock.now_unix_ns()
    sent_ns = clock.now_ns()
    try:
        async with aclosing(
            endpoint.stream(case, request_id=request_id, traceparent=f"00-{trace_id}-{span_id}-01")
        ) as chunks:
            async for chunk in chunks:
                answer.add(chunk)
    except EndpointError as error:
        failure = error
    last = answer.chunks[-1] if answer.chunks else None
    status = 200 if failure is None else failure.status
    headers_received_ns = last.headers_received_ns if last is not None else None
    if failure is not None and failure.headers_received_ns is not None:
        headers_received_ns = failure.headers_received_ns
    return RequestRow(
        request_id=request_id,
        case_id=case.case_id,
        repeat_index=repeat_index,
        block_index=block_index,
        trace_id=trace_id,
        intended_ns=sent_ns if intended_ns is None else intended_ns,
        sent_ns=sent_ns,
        sent_unix_ns=sent_unix_ns,
        headers_received_ns=headers_received_ns,
        chunk_received_ns=answer.chunk_received_ns,
        chunk_num_tokens=answer.chunk_num_tokens,
        finished_ns=last.received_ns if last is not None and failure is None else clock.now_ns(),
        outcome="ok" if failure is None else failure.outcome,
        status=status,
        error=None if failure is None else str(failure),
        text="".join(answer.texts),
        prompt_token_ids=next((c.prompt_token_ids for c in answer.chunks if c.prompt_token_ids), None),
        token_ids=_joined([c.token_ids for c in answer.chunks], answer),
        token_texts=_joined([c.token_texts for c in answer.chunks], answer),
        logprobs=_joined([c.logprobs for c in answer.chunks], answer),
        top_logprobs=_joined([c.top_logprobs for c in answer.chunks], answer),
        finish_reason=next((c.finish_reason for c in reversed(answer.chunks) if c.finish_reason), None),
        usage=next((c.usage for c in reversed(answer.chunks) if c.usage), None),
    )


def _joined(parts: list[list[T] | None], answer: _Answer) -> list[T] | None:
    """The parts as one list; None when none came, or when a chunk with content lacks its part."""
    if all(part is None for part in parts):
        return None
    if any(part is None and chunk.has_content for part, chunk in zip(parts, answer.chunks, strict=True)):
        return None
    return [item for part in parts for item in part or []]


def done_repeats(run: Run) -> set[tuple[str, int]]:
    """The (case id, repeat) pairs that the Run already holds."""
    return {(row.case_id, row.repeat_index) for row in run.rows(REQUESTS, RequestRow)}


class _Lane:
    """Sends jobs to one side and writes their rows."""

    def __init__(self, side: Side, clock: Clock, *, rows: str, on_row: Callable[[RequestRow], None]) -> None:
        self.side = side
        self._clock = clock
        self._rows = rows
        self._on_row = on_row
        self.dispatch_lags_ns: array[int] = array("q")

    async def closed_loop(self, jobs: Sequence[_Job], concurrency: int) -> None:
        """Keep `concurrency` requests in flight: each is intended for when its place became free."""
        waiting = iter(jobs)

        async def place() -> None:
            for job in waiting:
                await self._run(job, self._clock.now_ns())

        await _all_of([place() for _ in range(min(concurrency, len(jobs)))])

    async def open_loop(self, jobs: Sequence[_Job], arrivals_s: Sequence[float], max_in_flight: int) -> None:
        """Send each job at its own time, whatever became of the others; beyond the bound they go late."""
        places = asyncio.Semaphore(max_in_flight)
        started_ns = self._clock.now_ns()

        async def arrive(job: _Job, arrival_s: float) -> None:
            intended_ns = started_ns + int(arrival_s * 1e9)
            await self._clock.sleep_until_ns(intended_ns)
            async with places:
                await self._run(job, intended_ns)

        await _all_of([arrive(job, at_s) for job, at_s in zip(jobs, arrivals_s, strict=True)])

    async def _run(self, job: _Job, intended_ns: int) -> None:
        row = await ask(
            self.side.endpoint,
            job.case,
            clock=self._clock,
            request_id=f"{self.side.run.manifest.run_id}-{job.case.case_id}-{job.repeat_index}",
            intended_ns=intended_ns,
            repeat_index=job.repeat_index,
            block_index=job.block_index,
        )
        self.side.run.append(self._rows, row)
        if self._rows == REQUESTS:
            self.side.run.append_line(SPANS, client_line(row, job.case, self.side.run.manifest))
        self.dispatch_lags_ns.append(row.sent_ns - row.intended_ns)
        self._on_row(row)

    def finish(self, loop_lags_ns: Sequence[int]) -> None:
        """Write the client's health into the manifest and mark the Run complete."""
        manifest = self.side.run.manifest
        health = client_summary(loop_lags_ns=loop_lags_ns, dispatch_lags_ns=self.dispatch_lags_ns)
        self.side.run.write_manifest(
            msgspec.structs.replace(manifest, client=manifest.client | health, complete=True)
        )


async def _all_of(work: Sequence[Coroutine[None, None, None]]) -> None:
    """Run all to their ends; the first exception cancels the rest and is raised as it is."""
    try:
        async with asyncio.TaskGroup() as group:
            for part in work:
                group.create_task(part)
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None


async def _warm_up(side: Side, cases: Sequence[Request], clock: Clock, concurrency: int) -> None:
    repeat_index = len(list(side.run.rows(WARMUP, RequestRow)))
    lane = _Lane(side, clock, rows=WARMUP, on_row=lambda _: None)
    await lane.closed_loop([_Job(case, repeat_index, 0) for case in cases], concurrency)


def _counting(report: Report, num_total: int) -> Callable[[RequestRow], None]:
    numbers = count(1)
    return lambda _: report(next(numbers), num_total)


async def ask_all(
    endpoint: Endpoint,
    repeats: Sequence[tuple[Request, int]],
    run: Run,
    *,
    clock: Clock,
    concurrency: int,
    report: Report = no_report,
) -> list[RequestRow]:
    """Ask (request, repeat index) pairs in a closed loop into `run`; their rows in the same order."""
    rows: dict[tuple[str, int], RequestRow] = {}

    def keep(row: RequestRow) -> None:
        rows[row.case_id, row.repeat_index] = row
        report(len(rows), len(repeats))

    lane = _Lane(Side(run.manifest.label, endpoint, run), clock, rows=REQUESTS, on_row=keep)
    await lane.closed_loop([_Job(request, repeat, 0) for request, repeat in repeats], concurrency)
    return [rows[request.case_id, repeat] for request, repeat in repeats]


async def drive(
    endpoint: Endpoint,
    cases: Sequence[Request],
    run: Run,
    *,
    clock: Clock,
    concurrency: int = 4,
    rate_per_s: float | None = None,
    seed: int = 0,
    repeats: int = 1,
    warmup: Sequence[Request] = (),
    max_in_flight: int = 1024,
    report: Report = no_report,
) -> None:
    """Run `cases`, `repeats` times over, against one endpoint.

    A closed loop of `concurrency`, or with `rate_per_s` Poisson arrivals drawn from `seed`, at most
    `max_in_flight` at once. Rows of `warmup` go to a file of their own. Marks the Run complete at the end.
    """
    side = Side(run.manifest.label, endpoint, run)
    done = done_repeats(run)
    jobs = [_Job(case, repeat, 0) for repeat in range(repeats) for case in cases]
    # Times are drawn for all jobs, so that a resumed Run keeps the gaps of those that are left.
    timed = list(zip(jobs, poisson_arrivals_s(rate_per_s or 1.0, seed=seed), strict=False))
    timed = [(job, at_s) for job, at_s in timed if (job.case.case_id, job.repeat_index) not in done]
    jobs = [job for job, _ in timed]
    lane = _Lane(side, clock, rows=REQUESTS, on_row=_counting(report, len(jobs)))
    await _warm_up(side, warmup, clock, concurrency)
    async with LoopLagProbe(clock) as probe:
        if rate_per_s is None:
            await lane.closed_loop(jobs, concurrency)
        else:
            first_s = timed[0][1] if done and timed else 0.0
            await lane.open_loop(jobs, [at_s - first_s for _, at_s in timed], max_in_flight)
    lane.finish(probe.lags_ns)


async def drive_interleaved(
    sides: Sequence[Side],
    cases: Sequence[Request],
    *,
    clock: Clock,
    order: Order,
    concurrency: int = 4,
    block_size: int = 8,
    repeats: int = 1,
    warmup: Sequence[Request] = (),
    report: Report = no_report,
) -> None:
    """Run `cases` on all sides in turns, so that what changes with time changes for all of them.

    Cases go in blocks of `block_size`; each block runs on every side, one side after another, `repeats`
    times. "abba" turns the order of the sides round each time, "rotate" moves it on by one. A row's
    `block_index` is its block's. Marks all Runs complete at the end.
    """
    if not sides or len({side.run.path for side in sides}) != len(sides):
        raise ValueError("expected one Run for each side, got none or one Run twice")
    done = [done_repeats(side.run) for side in sides]
    wanted = [(case.case_id, repeat) for case in cases for repeat in range(repeats)]
    on_row = _counting(report, sum(pair not in pairs for pairs in done for pair in wanted))
    lanes = [_Lane(side, clock, rows=REQUESTS, on_row=on_row) for side in sides]
    turn = count()
    for side in sides:
        await _warm_up(side, warmup, clock, concurrency)
    async with LoopLagProbe(clock) as probe:
        for block_index, first in enumerate(range(0, len(cases), block_size)):
            block = cases[first : first + block_size]
            for repeat in range(repeats):
                for index in in_turn(len(sides), next(turn), order):
                    jobs = [_Job(case, repeat, block_index) for case in block]
                    jobs = [job for job in jobs if (job.case.case_id, repeat) not in done[index]]
                    await lanes[index].closed_loop(jobs, concurrency)
    for lane in lanes:
        lane.finish(probe.lags_ns)


def in_turn(num_sides: int, turn: int, order: Order) -> list[int]:
    """The order in which the sides, by index, are served in turn number `turn`."""
    sides = list(range(num_sides))
    if order == "abba":
        return sides if turn % 2 == 0 else sides[::-1]
    start = turn % num_sides
    return sides[start:] + sides[:start]
