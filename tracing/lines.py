"""Append-only files of whole lines.

Owns: that a line is there whole or not at all. Refuses to know: what a line holds. Invariants: a line, or
several that belong together, is appended by one write; what a killed writer or a full disk left unfinished is
cut off before the next line is appended, so the only unfinished line of a file is its last; one process at a
time may write a file.

Usage: `file = LineFile(path); file.append(b'{"a":1}'); file.close()`.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

_BACKWARD_BYTES = 1 << 16


class LineFile:
    """A file open for appending lines; ValueError when another process has it open.

    The parent directory must exist. An unfinished last line of an earlier writer is cut off.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(self._fd)
            raise ValueError(
                f"expected {path} free to write, got a file that is being written: choose another directory"
            ) from error
        self._num_bytes = _end_of_last_line(self._fd)
        os.ftruncate(self._fd, self._num_bytes)

    @property
    def closed(self) -> bool:
        return self._fd < 0

    @property
    def num_bytes(self) -> int:
        """Length of its whole lines."""
        return self._num_bytes

    def append(self, line: bytes) -> None:
        """Append `line` (no newline inside) and its newline; errors as `append_all`."""
        self.append_all((line,))

    def append_all(self, lines: Sequence[bytes]) -> None:
        """Append all `lines` (no newline inside), each with its newline, or none of them.

        OSError (disk full, say) names the file and leaves it as it was; ValueError when closed.
        """
        assert not any(b"\n" in line for line in lines)
        if self.closed:
            raise ValueError(f"expected an open file, got {self.path}, which is closed")
        content = b"".join([line + b"\n" for line in lines])
        try:
            view = memoryview(content)
            while view:
                view = view[os.write(self._fd, view) :]
        except OSError as error:
            os.ftruncate(self._fd, self._num_bytes)
            error.filename = str(self.path)
            raise
        self._num_bytes += len(content)

    def close(self) -> None:
        """Flush to disk and close; closing twice is the same as once."""
        if self.closed:
            return
        fd, self._fd = self._fd, -1
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def read_lines(path: Path) -> Iterator[bytes]:
    """The whole lines of a file without their newlines; an unfinished last line is left out."""
    with path.open("rb") as lines:
        for line in lines:
            if line.endswith(b"\n"):
                yield line[:-1]


def _end_of_last_line(fd: int) -> int:
    """Bytes up to and with the last newline; 0 when there is none."""
    end = os.fstat(fd).st_size
    while end > 0:
        start = max(0, end - _BACKWARD_BYTES)
        newline = os.pread(fd, end - start, start).rfind(b"\n")
        if newline >= 0:
            return start + newline + 1
        end = start
    return 0
