"""Progress: a few lines without a terminal, whatever the number of pieces."""

from __future__ import annotations

import io

import pytest

from firstdiff.harness.progress import progress


@pytest.mark.parametrize(
    ("num_total", "shown"),
    [
        (1, [1]),
        (3, [1, 2, 3]),
        (5, [1, 2, 3, 4, 5]),
        (7, [2, 3, 5, 6, 7]),
        (1000, [200, 400, 600, 800, 1000]),
    ],
)
def test_a_few_lines(num_total: int, shown: list[int]) -> None:
    stream = io.StringIO()
    with progress("asking", stream=stream) as report:
        for num_done in range(1, num_total + 1):
            report(num_done, num_total)
    assert stream.getvalue().splitlines() == [f"asking: {done} of {num_total}" for done in shown]


def test_a_terminal_gets_a_bar_that_goes_away() -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    stream = Terminal()
    with progress("asking", stream=stream) as report:
        report(1, 2)
    assert "asking" in stream.getvalue()
    assert "asking: 1 of 2" not in stream.getvalue()
