"""What a server's processes say on standard error while they start and run.

Owns: how the log's lines look there. Refuses to know: what is logged, when. Invariants: a line begins as the
server's other lines do; each is written at once; what was changed is as before afterwards.

Usage: `with log_on_console(): start()`.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def log_on_console() -> Iterator[None]:
    """Log lines of this package, progress too, go to standard error for as long as the context is open."""
    logger = logging.getLogger("firstdiff")
    level = logger.level
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("firstdiff serve: %(message)s"))
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.setLevel(level)
        logger.removeHandler(handler)
