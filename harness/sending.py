"""Requests as a plain blocking call, for callers that know nothing of event loops.

Owns: an event loop of its own and the Run that every row goes to. Refuses to know: who asks and why.
Invariants: rows come back in the order of their requests, one each, whatever the endpoint does; the same
case sent again is its next repeat.

Usage: `with Sender(target, path, workload={}, concurrency=4, clock=clock) as s: rows = s.send(requests)`.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec

from firstdiff.harness.driver import Report, ask_all, no_report
from firstdiff.harness.runs import new_run
from firstdiff.harness.sessions import Target
from firstdiff.harness.workload import workload_sha256
from firstdiff.tracing.clock import Clock
from firstdiff.tracing.records import Request, RequestRow


class Sender:
    """Sends batches of requests to one endpoint, `concurrency` at a time, into one Run.

    `workload` says in the manifest where the requests come from.
    """

    def __init__(
        self,
        target: Target,
        path: Path,
        *,
        workload: dict[str, Any],
        concurrency: int,
        clock: Clock,
        report: Report = no_report,
    ) -> None:
        if concurrency < 1:
            raise ValueError(f"expected a concurrency of 1 or more, got {concurrency}")
        self._clock = clock
        self._concurrency = concurrency
        self._report = report
        self._repeats: Counter[str] = Counter()
        self._requests: list[Request] = []
        self._loop = asyncio.Runner()
        try:
            self.endpoint = self._loop.run(target.connect(clock))
            self.run = new_run(
                path, label=target.label, endpoint=self.endpoint, workload=workload, cases=[], clock=clock
            )
        except BaseException:
            self._loop.close()
            raise

    def send(self, requests: Sequence[Request]) -> list[RequestRow]:
        """Ask all of them and wait for all rows."""
        repeats = []
        for request in requests:
            repeats.append(self._repeats[request.case_id])
            self._repeats[request.case_id] += 1
        self._requests += requests
        return self._loop.run(
            ask_all(
                self.endpoint,
                list(zip(requests, repeats, strict=True)),
                self.run,
                clock=self._clock,
                concurrency=self._concurrency,
                report=self._report,
            )
        )

    def __enter__(self) -> Sender:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.run.write_manifest(
                msgspec.structs.replace(
                    self.run.manifest,
                    workload_sha256=workload_sha256(self._requests),
                    complete=kind is None,
                )
            )
            self.run.close()
            self._loop.run(self.endpoint.close())
        finally:
            self._loop.close()
