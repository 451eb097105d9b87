"""Numbers and tables as a terminal shows them.

Owns: units, digits, columns. Refuses to know: what is shown. Invariants: three significant digits; "-" where
nothing is known, never 0.

Usage: `lines = aligned([["phase", "base"], ["queue", duration(12e6)]])`.
"""

from __future__ import annotations

from collections.abc import Sequence


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines with the columns under one another, two spaces before and between them."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  " + "  ".join(f"{cell:<{widths[i]}}" for i, cell in enumerate(row)).rstrip() for row in rows]


def duration(value_ns: float | None, *, sign: bool = False) -> str:
    """Three significant digits in the unit that fits; "-" where it is not known."""
    if value_ns is None:
        return "-"
    size = abs(value_ns)
    for unit, scale in (("s", 1e9), ("ms", 1e6), ("us", 1e3)):
        if size >= scale:
            return f"{value_ns / scale:{'+' if sign else ''}.{_decimals(size / scale)}f} {unit}"
    return f"{value_ns:{'+' if sign else ''}.0f} ns"


def _decimals(value: float) -> int:
    return 2 if value < 10 else 1 if value < 100 else 0


def percent(change: float | None) -> str:
    return "-" if change is None else f"{change:+.1%}"
