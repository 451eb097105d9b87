"""Progress of long work, on standard error only, and the one form in which foreign text is printed.

Owns: how progress looks: a bar on a terminal, a plain line now and then elsewhere; what becomes of text that
others wrote before it is printed. Refuses to know: what is being done. Invariants: progress never goes to
standard output; without a terminal at most `_MAX_LINES` lines a task; no title moves a cursor.

Usage: `with progress("running", stream=sys.stderr) as report: report(num_done, num_total)`.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

_MAX_LINES = 5
_NAMED = {"\n": r"\n", "\r": r"\r", "\t": r"\t"}


def printable(text: str) -> str:
    """`text` on one line, with escapes for what would steer a terminal or not show.

    Those are controls, formats (direction marks), surrogates, unassigned characters, and separators but the
    space. All else stays as it is, so that a path or a sentence of our own can be copied from the screen.
    """
    return "".join(_shown(char) for char in text)


def _shown(char: str) -> str:
    if char == " " or unicodedata.category(char)[0] not in "CZ":
        return char
    code = ord(char)
    escape = f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
    return _NAMED.get(char, escape)


@contextmanager
def progress(title: str, *, stream: TextIO) -> Iterator[Callable[[int, int], None]]:
    """A function to call with (done, in all) after each piece of work."""
    title = printable(title)
    if not stream.isatty():
        yield _lines(title, stream)
        return
    bar = Progress(
        # A title may hold braces and brackets, which are no format and no markup.
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=Console(file=stream),
        transient=True,
    )
    with bar:
        task = bar.add_task(title, total=None)
        yield lambda num_done, num_total: bar.update(task, completed=num_done, total=num_total)


def _lines(title: str, stream: TextIO) -> Callable[[int, int], None]:
    def report(num_done: int, num_total: int) -> None:
        # One line each time another of `_MAX_LINES` equal parts is done.
        if num_done * _MAX_LINES // num_total > (num_done - 1) * _MAX_LINES // num_total:
            print(f"{title}: {num_done} of {num_total}", file=stream, flush=True)

    return report
