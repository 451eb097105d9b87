"""Progress: a few lines without a terminal, whatever the number of pieces; foreign text is only text."""

from __future__ import annotations

import io
import unicodedata

import pytest

from firstdiff.harness.progress import printable, progress


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


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_all_that_cannot_be_seen_is_escaped() -> None:
    everything = "".join(map(chr, range(0x11000)))
    shown = printable(everything)
    assert {unicodedata.category(char)[0] for char in shown.replace(" ", "")} <= set("LMNPS")
    assert printable("\x1b[2J\r\nPASS\t\x9b\u202e\ud800\U000e0041") == (
        r"\x1b[2J\r\nPASS\t\x9b\u202e\ud800\U000e0041"
    )
    assert printable("données/Läufe 1 «ok» 漢字 👍") == "données/Läufe 1 «ok» 漢字 👍"


def test_a_title_from_outside_is_text_and_nothing_else() -> None:
    title = "running \x1b[2J\rPASS {task.nothing} [bold]x[/bold] [/nonsense]"
    escaped = r"running \x1b[2J\rPASS {task.nothing} [bold]x[/bold] [/nonsense]"
    stream = io.StringIO()
    with progress(title, stream=stream) as report:
        report(1, 1)
    assert stream.getvalue() == f"{escaped}: 1 of 1\n"
    terminal = Terminal()
    with progress(title, stream=terminal) as report:
        report(1, 2)
    assert "\x1b[2J" not in terminal.getvalue()
    assert "\rPASS" not in terminal.getvalue()
    assert "{task.nothing}" in terminal.getvalue()


def test_a_terminal_gets_a_bar_that_goes_away() -> None:
    stream = Terminal()
    with progress("asking", stream=stream) as report:
        report(1, 2)
    assert "asking" in stream.getvalue()
    assert "asking: 1 of 2" not in stream.getvalue()
