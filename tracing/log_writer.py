"""The log of a server on disk: rows in, whole lines out, on a thread of its own.

Owns: the three files of a log directory, what is counted when a row cannot be kept. Refuses to know: how rows
come about, who reads them. Invariants: whoever writes a row never waits and never fails; a row that is not on
disk is counted, and the log says so itself as soon as it can be written again.

Usage: `writer = TokenLogWriter(folder, identity); writer.write(row); writer.close()`.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from pathlib import Path

import msgspec

from firstdiff.tracing.log_content import encode_log_row, hash_identity
from firstdiff.tracing.log_files import HTTP_FILE, STEPS_FILE, TOKENS_FILE, LogFile
from firstdiff.tracing.log_queue import BoundedQueue
from firstdiff.tracing.records import HttpRow, Identity, LogContent, LossReason, LossRow, StepRow, TokenLogRow

LogRow = TokenLogRow | StepRow | HttpRow
_Entry = tuple[str, LogRow]

_CHUNK_BYTES = 16 << 10
"""Lines that are written at once: between two writes the interpreter is free for the others."""
_ROW_BYTES = 512
_TOKEN_BYTES = 64
"""About what a row, and a token in one, takes while it waits."""


class LogLimits(msgspec.Struct, frozen=True, kw_only=True):
    """How much a log keeps, and how large it gets.

    `max_file_bytes` begins the next file, 0 never. A row beyond `max_row_bytes` is cut. `max_queued_bytes`
    bounds the rows that wait for the disk, `close_timeout_s` how long the end waits for it.
    """

    content: LogContent = "full"
    max_file_bytes: int = 0
    max_row_bytes: int = 16 << 20
    max_queued_bytes: int = 64 << 20
    close_timeout_s: float = 5.0


class TokenLogWriter:
    """The log directory of one server: `tokens.jsonl` (Identity line, then TokenLogRows), `steps.jsonl` and
    `http.jsonl` (HttpRows), each with numbered successors where `limits` bound a file.

    A directory may be used again by a later server: it appends an Identity line of its own. ValueError
    when another process is writing there. OSErrors of the first line are raised (the log does not work at
    all); later ones lose the row and count it. Lost rows of all three files are told by LossRows among the
    TokenLogRows.
    """

    def __init__(self, directory: Path, identity: Identity, limits: LogLimits | None = None) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.identity_sha256 = hash_identity(identity)
        self._limits = limits or LogLimits()
        self._encode = msgspec.json.Encoder().encode
        self._lock = threading.Lock()
        self._num_lost_rows = 0
        self._untold: dict[tuple[str, LossReason], LossRow] = {}
        head = self._encode(identity)
        max_bytes = self._limits.max_file_bytes
        # What is written at once stands in one file.
        self._chunk_bytes = min(_CHUNK_BYTES, max_bytes // 8) if max_bytes else _CHUNK_BYTES
        self._files = {
            TOKENS_FILE: LogFile(directory, TOKENS_FILE, max_bytes=max_bytes, head=head),
            STEPS_FILE: LogFile(directory, STEPS_FILE, max_bytes=max_bytes),
            HTTP_FILE: LogFile(directory, HTTP_FILE, max_bytes=max_bytes),
        }
        self._queue: BoundedQueue[_Entry] = BoundedQueue(
            self._write_batch, max_bytes=self._limits.max_queued_bytes, name="firstdiff-log"
        )
        self._closed = False

    @property
    def num_lost_rows(self) -> int:
        """Rows that are not on disk, for whatever reason."""
        return self._num_lost_rows

    def write(self, row: TokenLogRow) -> None:
        """Append one request. Never raises or waits: a lost row counts in `num_lost_rows`, the first is
        logged."""
        num_tokens = len(row.token_ids) + len(row.prompt_token_ids) + 4 * len(row.top_logprobs)
        num_chars = len(row.text) + (len(row.asked.body) if row.asked and row.asked.body else 0)
        self._put(TOKENS_FILE, row, _ROW_BYTES + _TOKEN_BYTES * num_tokens + num_chars)

    def write_step(self, row: StepRow) -> None:
        """Append one step; as `write`."""
        self._put(STEPS_FILE, row, _ROW_BYTES)

    def write_http(self, row: HttpRow) -> None:
        """Append one HTTP request; as `write`."""
        self._put(HTTP_FILE, row, _ROW_BYTES)

    def flush(self, *, timeout_s: float = 5.0) -> bool:
        """Wait until all rows so far are written or lost; whether they were in time."""
        return self._queue.flush(timeout_s=timeout_s)

    def close(self) -> None:
        """Write what waits, within `close_timeout_s`, and flush the files to disk; later rows are lost."""
        if self._closed:
            return
        self._closed = True
        for name, row in self._queue.close(timeout_s=self._limits.close_timeout_s):
            self._lose(
                name, row, "closed", "expected the disk to take the log at the end, got one that hangs"
            )
        if self._queue.is_stuck:
            # It has the files; what becomes of the lines that it holds nobody will know.
            self._num_lost_rows += 1
            return
        self._tell_losses()
        for file in self._files.values():
            try:
                file.close()
            except OSError:
                # What the disk refused at the end cannot be told apart row by row.
                self._num_lost_rows += 1

    def _put(self, name: str, row: LogRow, num_bytes: int) -> None:
        if not self._queue.put((name, row), num_bytes=num_bytes):
            reason: LossReason = "closed" if self._closed else "queue_full"
            self._lose(name, row, reason, f"expected room for the log's rows, got none ({reason})")

    def _write_batch(self, batch: list[_Entry]) -> None:
        self._tell_losses()
        waiting: dict[str, list[tuple[LogRow, bytes]]] = {name: [] for name in self._files}
        sizes = dict.fromkeys(self._files, 0)
        for name, row in batch:
            try:
                line = self._line(row)
            except ValueError as error:
                self._lose(name, row, "unwritable", str(error))
                continue
            waiting[name].append((row, line))
            sizes[name] += len(line)
            if sizes[name] >= self._chunk_bytes:
                self._append(name, waiting[name])
                waiting[name], sizes[name] = [], 0
        for name, lines in waiting.items():
            if lines:
                self._append(name, lines)
        self._tell_losses()

    def _line(self, row: LogRow) -> bytes:
        if isinstance(row, TokenLogRow):
            return encode_log_row(row, content=self._limits.content, max_bytes=self._limits.max_row_bytes)
        return self._encode(row)

    def _append(self, name: str, lines: Sequence[tuple[LogRow, bytes]]) -> None:
        file = self._files[name]
        try:
            file.append_all([line for _, line in lines])
        except OSError:
            # Smaller ones may still fit.
            for row, line in lines:
                try:
                    file.append_all([line])
                except OSError as error:
                    self._lose(name, row, "disk", str(error))

    def _tell_losses(self) -> None:
        with self._lock:
            untold = list(self._untold.values())
        for row in untold:
            try:
                self._files[TOKENS_FILE].append_all([self._encode(row)])
            except OSError:
                # It is told when there is room again; the metrics tell it now.
                return
            with self._lock:
                now = self._untold.pop((row.file, row.reason))
                if now.num_rows > row.num_rows:
                    num_more = now.num_rows - row.num_rows
                    self._untold[row.file, row.reason] = msgspec.structs.replace(now, num_rows=num_more)

    def _lose(self, name: str, row: LogRow, reason: LossReason, why: str) -> None:
        first_ns, last_ns = _times_of(row)
        with self._lock:
            if not self._num_lost_rows:
                logging.getLogger(__name__).warning("%s: rows are lost, and counted in the metrics", why)
            self._num_lost_rows += 1
            before = self._untold.get((name, reason))
            self._untold[name, reason] = LossRow(
                file=name,
                num_rows=1 + (before.num_rows if before else 0),
                reason=reason,
                first_ns=min(first_ns, before.first_ns) if before else first_ns,
                last_ns=max(last_ns, before.last_ns) if before else last_ns,
            )


def _times_of(row: LogRow) -> tuple[int, int]:
    if isinstance(row, TokenLogRow):
        return row.received_ns, max(row.flushed_ns, row.finished_ns)
    if isinstance(row, StepRow):
        return row.started_ns, row.ended_ns
    return row.received_ns, row.ended_ns
