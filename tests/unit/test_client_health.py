"""Client health: a blocked event loop shows, exact quantiles, nothing invented without samples."""

from __future__ import annotations

import asyncio
import threading

import pytest

from firstdiff.harness.client_health import LoopLagProbe, client_summary, quantile_ns
from firstdiff.tracing.clock import SystemClock


def test_a_blocked_loop_shows() -> None:
    async def block() -> list[int]:
        async with LoopLagProbe(SystemClock(), interval_ns=1_000_000) as probe:
            await asyncio.sleep(0.01)
            threading.Event().wait(0.1)
            await asyncio.sleep(0.01)
        return list(probe.lags_ns)

    lags_ns = asyncio.run(block())
    assert min(lags_ns) >= 0
    assert max(lags_ns) > 80_000_000


@pytest.mark.parametrize(
    ("fraction", "expected"), [(0.0, 1), (0.25, 1), (0.26, 2), (0.5, 2), (0.99, 4), (1.0, 4)]
)
def test_quantiles_are_values_that_occurred(fraction: float, expected: int) -> None:
    assert quantile_ns([3, 1, 4, 2], fraction) == expected


def test_without_samples_there_is_no_number() -> None:
    summary = client_summary(loop_lags_ns=[], dispatch_lags_ns=[5])
    assert summary["loop_lag_p99_ns"] is None
    assert summary["loop_lag_max_ns"] is None
    assert (summary["dispatch_lag_p99_ns"], summary["num_loop_lags"]) == (5, 0)
