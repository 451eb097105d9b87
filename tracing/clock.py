"""The only place that may read time.

Owns: the two clocks that every stamp comes from. Refuses to know: what is being timed.
Invariants: `now_ns` never goes backwards within a process and, on Linux, is shared by all processes of
one machine (CLOCK_MONOTONIC), so client and server stamps of one host may be subtracted;
`now_unix_ns` is only for joining with the outside world (traces, file names).

Usage: `clock = SystemClock(); started_ns = clock.now_ns()`.
"""

from __future__ import annotations

import asyncio
import time
from typing import Protocol


class Clock(Protocol):
    """Where time comes from; pass it as an argument, never reach for a global."""

    def now_ns(self) -> int:
        """Monotonic nanoseconds."""
        ...

    def now_unix_ns(self) -> int:
        """Nanoseconds since the Unix epoch."""
        ...

    async def sleep_until_ns(self, deadline_ns: int) -> None:
        """Return once `now_ns() >= deadline_ns`; at once if that has passed."""
        ...


class SystemClock:
    """The machine's clock."""

    def now_ns(self) -> int:
        return time.monotonic_ns()

    def now_unix_ns(self) -> int:
        return time.time_ns()

    async def sleep_until_ns(self, deadline_ns: int) -> None:
        remaining_ns = deadline_ns - self.now_ns()
        while remaining_ns > 0:
            await asyncio.sleep(remaining_ns / 1e9)
            remaining_ns = deadline_ns - self.now_ns()


class VirtualClock:
    """A clock that moves only when told to: `sleep_until_ns` jumps to the deadline and yields once."""

    def __init__(self, *, start_ns: int = 0, unix_offset_ns: int = 0) -> None:
        self._now_ns = start_ns
        self._unix_offset_ns = unix_offset_ns

    def now_ns(self) -> int:
        return self._now_ns

    def now_unix_ns(self) -> int:
        return self._now_ns + self._unix_offset_ns

    def advance(self, delta_ns: int) -> None:
        """Move forward by `delta_ns` >= 0."""
        if delta_ns < 0:
            raise ValueError(f"expected a step of 0 ns or more, got {delta_ns}: a clock never goes backwards")
        self._now_ns += delta_ns

    async def sleep_until_ns(self, deadline_ns: int) -> None:
        self._now_ns = max(self._now_ns, deadline_ns)
        await asyncio.sleep(0)
