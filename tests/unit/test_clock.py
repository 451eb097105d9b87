"""The clocks: never backwards, shared by the processes of one machine, virtual where a test wants it."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from firstdiff.tracing.clock import SystemClock, VirtualClock


def test_the_system_clock_never_goes_backwards():
    clock = SystemClock()
    stamps = [clock.now_ns() for _ in range(10_000)]
    assert stamps == sorted(stamps)
    assert all(isinstance(stamp, int) for stamp in stamps[:1])


def test_unix_time_is_the_machines():
    before = time.time_ns()
    now = SystemClock().now_unix_ns()
    assert before <= now <= time.time_ns()


def test_stamps_of_two_processes_compare():
    code = "from firstdiff.tracing.clock import SystemClock; print(SystemClock().now_ns())"
    before_ns = SystemClock().now_ns()
    result = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=60
    )
    assert before_ns < int(result.stdout) < SystemClock().now_ns()


@pytest.mark.parametrize("delay_ns", [0, -5_000_000, 1, 3_000_000])
def test_sleeping_never_ends_early(delay_ns):
    clock = SystemClock()
    deadline_ns = clock.now_ns() + delay_ns
    asyncio.run(clock.sleep_until_ns(deadline_ns))
    assert clock.now_ns() >= deadline_ns


def test_the_virtual_clock_moves_only_when_told():
    clock = VirtualClock(start_ns=5, unix_offset_ns=1_000)
    assert clock.now_ns() == clock.now_ns() == 5
    clock.advance(7)
    assert (clock.now_ns(), clock.now_unix_ns()) == (12, 1_012)
    with pytest.raises(ValueError, match="never goes backwards"):
        clock.advance(-1)
    assert clock.now_ns() == 12


@given(st.lists(st.integers(0, 1_000), max_size=20))
def test_virtual_sleep_jumps_to_the_deadline_and_never_back(deadlines_ns):
    clock = VirtualClock()

    async def sleep_all():
        for deadline_ns in deadlines_ns:
            await clock.sleep_until_ns(deadline_ns)

    asyncio.run(sleep_all())
    assert clock.now_ns() == max(deadlines_ns, default=0)


def test_virtual_sleep_lets_others_run():
    clock = VirtualClock()
    order: list[str] = []

    async def work(name):
        for tick in range(3):
            await clock.sleep_until_ns(tick)
            order.append(name)

    async def both():
        await asyncio.gather(work("a"), work("b"))

    asyncio.run(both())
    assert order == ["a", "b"] * 3
