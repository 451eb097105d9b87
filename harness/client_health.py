"""Whether the client kept up: a late client measures itself, and its Run is invalid.

Owns: the event-loop lag probe and the summary that goes into a Run's manifest. Refuses to know: requests,
and from which lateness on a Run is invalid (the judge says that).
Invariants: the probe costs one timer an interval; quantiles are exact, None without samples.

Usage: `async with LoopLagProbe(clock) as probe: ...; probe.lags_ns`.
"""

from __future__ import annotations

import asyncio
import os
import platform
from array import array
from collections.abc import Sequence
from types import TracebackType

from firstdiff.tracing.clock import Clock


class LoopLagProbe:
    """Wakes up every `interval_ns` and notes how late it was woken, in nanoseconds."""

    def __init__(self, clock: Clock, *, interval_ns: int = 10_000_000) -> None:
        self._clock = clock
        self._interval_ns = interval_ns
        self._task: asyncio.Task[None] | None = None
        self.lags_ns = array("q")

    async def _probe(self) -> None:
        while True:
            deadline_ns = self._clock.now_ns() + self._interval_ns
            await self._clock.sleep_until_ns(deadline_ns)
            self.lags_ns.append(self._clock.now_ns() - deadline_ns)

    async def __aenter__(self) -> LoopLagProbe:
        self._task = asyncio.create_task(self._probe())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._task is not None
        self._task.cancel()
        await asyncio.wait([self._task])


def quantile_ns(values: Sequence[int], fraction: float) -> int | None:
    """The smallest value that at least `fraction` of `values` do not exceed; None without values."""
    if not values:
        return None
    ordered = sorted(values)
    rank = -(-fraction * len(ordered) // 1)
    return ordered[max(0, min(len(ordered), int(rank)) - 1)]


def client_summary(*, loop_lags_ns: Sequence[int], dispatch_lags_ns: Sequence[int]) -> dict[str, object]:
    """What the manifest says about the client, all times in nanoseconds.

    Dispatch lag is how much later than intended a request was sent; loop lag how late the event loop ran
    a timer.
    """
    return {
        "loop_lag_p50_ns": quantile_ns(loop_lags_ns, 0.5),
        "loop_lag_p99_ns": quantile_ns(loop_lags_ns, 0.99),
        "loop_lag_max_ns": max(loop_lags_ns, default=None),
        "num_loop_lags": len(loop_lags_ns),
        "dispatch_lag_p50_ns": quantile_ns(dispatch_lags_ns, 0.5),
        "dispatch_lag_p99_ns": quantile_ns(dispatch_lags_ns, 0.99),
        "dispatch_lag_max_ns": max(dispatch_lags_ns, default=None),
        "num_dispatch_lags": len(dispatch_lags_ns),
    }


def machine_summary() -> dict[str, object]:
    """Where the client ran."""
    return {
        "python": platform.python_version(),
        "machine": platform.machine(),
        "system": f"{platform.system()} {platform.release()}",
        "num_cpus": os.cpu_count(),
    }
