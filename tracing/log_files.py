"""The files of a server's log: each kind of row in a file, and in further numbered ones when it grows.

Owns: the files' names, when the next one begins, their order for readers. Refuses to know: what lines mean.
Invariants: a file is never renamed, and never written again once a later one of its name exists, so that a
reader beside the writer sees a beginning of the log without a hole; each file begins with the head line.

Usage: `for line in read_log_lines(folder, TOKENS_FILE): ...`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from firstdiff.tracing.lines import LineFile, read_lines

TOKENS_FILE = "tokens.jsonl"
STEPS_FILE = "steps.jsonl"
HTTP_FILE = "http.jsonl"


def log_files(folder: Path, name: str) -> list[Path]:
    """`tokens.jsonl`, `tokens.1.jsonl`, ...: those that are there, in the order of writing."""
    return [path for _, path in _numbered(folder, name)]


def read_log_lines(folder: Path, name: str) -> Iterator[bytes]:
    """The whole lines of all these files; also while they are being written and new ones begun."""
    for _, _, line in enumerate_log_lines(folder, name):
        yield line


def enumerate_log_lines(folder: Path, name: str) -> Iterator[tuple[Path, int, bytes]]:
    """(file, line number from 1, line) of all these files."""
    last_index = -1
    while True:
        left = [item for item in _numbered(folder, name) if item[0] > last_index]
        if not left:
            return
        last_index, path = left[0]
        for number, line in enumerate(read_lines(path), start=1):
            yield path, number, line
        if len(left) == 1:
            # It was the newest before it was read: what a next one holds came after what was read here.
            return


def _numbered(folder: Path, name: str) -> list[tuple[int, Path]]:
    stem, _, suffix = name.partition(".")
    found = [(0, folder / name)] if (folder / name).is_file() else []
    for path in folder.glob(f"{stem}.*.{suffix}"):
        number = path.name.removeprefix(f"{stem}.").removesuffix(f".{suffix}")
        if number.isascii() and number.isdigit() and number == str(int(number)) and path.is_file():
            found.append((int(number), path))
    return sorted(found)


class LogFile:
    """Lines of one kind, open for appending, after what earlier writers left.

    A file that would pass `max_bytes` (0: never) by a further line is followed by the next; one line alone
    may be longer. OSError when the first file cannot be used; ValueError when another process writes it.
    """

    def __init__(self, folder: Path, name: str, *, max_bytes: int = 0, head: bytes | None = None) -> None:
        self._folder = folder
        self._name = name
        self._max_bytes = max_bytes
        self._head = head
        numbered = _numbered(folder, name)
        self._index = numbered[-1][0] if numbered else 0
        self._file = LineFile(numbered[-1][1] if numbered else folder / name)
        self._needs_head = head is not None
        if head is not None:
            self.append_all([])

    def append_all(self, lines: Sequence[bytes]) -> None:
        """Append all lines or none, in one file; OSError leaves the log as it was."""
        num_bytes = sum(map(len, lines)) + len(lines)
        if self._max_bytes and self._has_lines and self._file.num_bytes + num_bytes > self._max_bytes:
            self._begin_next()
        if self._needs_head:
            assert self._head is not None
            self._file.append_all([self._head, *lines])
            self._needs_head = False
        else:
            self._file.append_all(lines)

    @property
    def _has_lines(self) -> bool:
        head_bytes = len(self._head) + 1 if self._head is not None else 0
        return self._file.num_bytes > head_bytes

    def _begin_next(self) -> None:
        stem, _, suffix = self._name.partition(".")
        file = LineFile(self._folder / f"{stem}.{self._index + 1}.{suffix}")
        before, self._file = self._file, file
        self._index += 1
        self._needs_head = self._head is not None
        before.close()

    def close(self) -> None:
        """Flush to disk and close; closing twice is the same as once."""
        self._file.close()
