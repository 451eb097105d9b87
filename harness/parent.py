"""Ending together with the process that started this one.

Owns: the watch on standard input. Refuses to know: what the process does. Invariants: when every writer of
the pipe on standard input is gone, however they went, this process gets SIGTERM, and if that does not end it
within the grace, SIGKILL.

Usage: `end_with_standard_input()`, early, in a process whose standard input is its owner's pipe.
"""

from __future__ import annotations

import os
import signal
import sys
import threading

_GRACE_S = 10.0


def end_with_standard_input() -> None:
    """Start watching, in a thread that keeps nothing alive."""
    threading.Thread(target=_watch, args=(sys.stdin.fileno(),), daemon=True).start()


def _watch(fd: int) -> None:
    # Bytes that come are nobody's business; only the end counts.
    while os.read(fd, 4096):
        pass
    os.kill(os.getpid(), signal.SIGTERM)
    threading.Event().wait(_GRACE_S)
    os.kill(os.getpid(), signal.SIGKILL)
