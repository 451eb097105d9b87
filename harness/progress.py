"""Progress of long work, on standard error only.

Owns: how progress looks: a bar on a terminal, a plain line now and then elsewhere. Refuses to know: what is
being done. Invariants: nothing goes to standard output; without a terminal at most `_MAX_LINES` lines a task.

Usage: `with progress("running", stream=sys.stderr) as report: report(num_done, num_total)`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

_MAX_LINES = 5


@contextmanager
def progress(title: str, *, stream: TextIO) -> Iterator[Callable[[int, int], None]]:
    """A function to call with (done, in all) after each piece of work."""
    if not stream.isatty():
        yield _lines(title, stream)
        return
    bar = Progress(
        TextColumn(title),
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
