"""A replica: one server process of the bundled engine, started, awaited, collected from, and always ended.

Owns: the process and its folder of logs. Refuses to know: what the server computes, what its rows mean beyond
their request ids and step indexes.
Invariants: a started replica answered /health; the process ends with `stop`, and by itself when this one
dies, however it dies (its standard input is a pipe that only this process holds open); a start that fails
says why, in the server's own words.

Usage: `with Replica(["--model", "tiny-random"]) as replica: drive(replica.url, ...); replica.collect(run)`.
"""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from urllib.parse import urlsplit

import msgspec

from firstdiff.harness.collect_traces import collect_traces
from firstdiff.harness.progress import printable
from firstdiff.tracing.lines import read_lines
from firstdiff.tracing.log_files import STEPS_FILE, TOKENS_FILE, read_log_lines
from firstdiff.tracing.records import LossRow, RequestRow, StepRow, TokenLogRow
from firstdiff.tracing.store import Run

_LISTENING = re.compile(rb"^firstdiff: listening on (http://\S+) ", re.MULTILINE)
_POLL_S = 0.02
_COLLECT_S = 2.0
_MAX_ERROR_CHARS = 2000


class ReplicaError(RuntimeError):
    """A server that did not start, or is gone."""


class Replica:
    """One server process on a loopback port of its own choosing.

    `args` are those of `firstdiff serve` without host, port and log directory; a replica has one thread
    unless they name another number. `log_dir` is where token log
    and output go; without it a temporary folder that `stop` deletes.
    """

    def __init__(
        self,
        args: Sequence[str],
        *,
        label: str = "replica",
        log_dir: Path | None = None,
        start_timeout_s: float = 120.0,
        stop_timeout_s: float = 10.0,
    ) -> None:
        self.label = label
        self._args = list(args)
        self._is_temporary = log_dir is None
        self.log_dir = log_dir or Path()
        self._start_timeout_s = start_timeout_s
        self._stop_timeout_s = stop_timeout_s
        self._process: subprocess.Popen[bytes] | None = None
        self.url = ""

    @property
    def pid(self) -> int:
        """Process id of the running server."""
        if self._process is None:
            raise ReplicaError(f"expected {self.label} to be started, got a replica that is not")
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def start(self) -> Replica:
        """Start the server and wait until it is healthy; ReplicaError with its own words when it is not."""
        if self._process is not None:
            raise ReplicaError(f"expected {self.label} to be stopped, got one that is started: stop it first")
        if self._is_temporary:
            self.log_dir = Path(tempfile.mkdtemp(prefix="firstdiff-replica-"))
        self.log_dir.mkdir(parents=True, exist_ok=True)
        # Replicas share the machine: one thread each, unless the arguments, which come later, say otherwise.
        command = [sys.executable, "-m", "firstdiff.harness.cli", "serve", "--threads", "1", *self._args]
        command += ["--host", "127.0.0.1", "--port", "0", "--log-dir", str(self.log_dir)]
        command += ["--stop-on-stdin-end"]
        out, err = self.log_dir / "stdout.txt", self.log_dir / "stderr.txt"
        with out.open("wb") as stdout, err.open("wb") as stderr:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=stdout,
                stderr=stderr,
                # A key in the environment is for the endpoints of others; nobody else can reach this one.
                env={name: value for name, value in os.environ.items() if name != "FIRSTDIFF_API_KEY"},
                start_new_session=True,
            )
        try:
            self.url = self._await_url(self._process)
            self._check_health()
        except BaseException:
            self.stop()
            raise
        return self

    def _await_url(self, process: subprocess.Popen[bytes]) -> str:
        for _ in range(int(self._start_timeout_s / _POLL_S)):
            match = _LISTENING.search((self.log_dir / "stdout.txt").read_bytes())
            if match:
                return match.group(1).decode()
            try:
                code = process.wait(_POLL_S)
            except subprocess.TimeoutExpired:
                continue
            raise ReplicaError(f"{self.label} ended with exit code {code} at the start: {self._last_words()}")
        raise ReplicaError(
            f"expected {self.label} to listen within {self._start_timeout_s:g} s, got nothing: "
            f"{self._last_words()}"
        )

    def _check_health(self) -> None:
        connection = http.client.HTTPConnection(urlsplit(self.url).netloc, timeout=10)
        try:
            connection.request("GET", "/health")
            status = connection.getresponse().status
        except (OSError, http.client.HTTPException) as error:
            raise ReplicaError(f"{self.label} does not answer /health: {error}") from error
        finally:
            connection.close()
        if status != 200:
            raise ReplicaError(f"expected status 200 from /health of {self.label}, got {status}")

    def _last_words(self) -> str:
        words = (self.log_dir / "stderr.txt").read_bytes().decode("utf-8", "replace").strip()
        words = "\n".join(map(printable, words[-_MAX_ERROR_CHARS:].split("\n")))
        return words or "it wrote no error"

    def stop(self) -> int | None:
        """End the server, politely first, and return its exit code; None when there was none."""
        process, self._process = self._process, None
        if process is None:
            return None
        try:
            process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(self._stop_timeout_s)
        finally:
            # Whatever is left of its process group goes too: the engine core, or a server that hangs.
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            code = process.wait()
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError):
                process.stdin.close()
            if self._is_temporary:
                shutil.rmtree(self.log_dir, ignore_errors=True)
        return code

    def collect(self, run: Run) -> int:
        """Copy the server's rows of this Run's requests into it (`collect_rows`); returns how many came.

        A server writes a request's row just after its last byte, so rows may be awaited for a moment.
        """
        num_answered = sum(row.outcome == "ok" for row in run.rows("requests", RequestRow))
        num_found = collect_rows(self.log_dir, run)
        for _ in range(int(_COLLECT_S / _POLL_S)):
            if num_found >= num_answered or self._process is None or self._process.poll() is not None:
                break
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_POLL_S)
            num_found = collect_rows(self.log_dir, run)
        return num_found

    def __enter__(self) -> Replica:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    async def __aenter__(self) -> Replica:
        return await asyncio.to_thread(self.start)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await asyncio.to_thread(self.stop)


class _Kind(msgspec.Struct, frozen=True):
    """Just enough of a logged line to sort it."""

    kind: str = ""
    request_id: str = ""


def collect_rows(log_dir: Path, run: Run) -> int:
    """Copy from a server's log what belongs to the requests of `run`; returns how many of them it has.

    `tokens.jsonl` gets its TokenLogRows and before them the identity line that they point at, as they stand,
    and the LossRows that may be of this Run; `steps.jsonl` the StepRows of the steps that they took part in.
    What the Run holds is not copied again.
    """
    wanted = {row.request_id for row in run.rows("requests", RequestRow)}
    held = set(_lines(run.path / TOKENS_FILE))
    held_ids = {_kind_of(line).request_id for line in held}
    identity = b""
    rows: list[TokenLogRow] = []
    losses: list[bytes] = []
    for line in read_log_lines(log_dir, TOKENS_FILE):
        kind = _kind_of(line)
        if kind.kind == "identity":
            identity = line
        elif kind.kind == "loss":
            losses.append(line)
        elif kind.request_id in wanted:
            rows.append(msgspec.json.decode(line, type=TokenLogRow))
            if kind.request_id not in held_ids:
                new = [line] if not identity or identity in held else [identity, line]
                for part in new:
                    run.append_line("tokens", part)
                held.update(new)
    _collect_losses(run, losses, rows, is_whole=len(rows) >= len(wanted))
    _collect_steps(log_dir, run, rows)
    collect_traces(log_dir, run, {row.trace_id for row in run.rows("requests", RequestRow)})
    return len(rows)


def _collect_losses(
    run: Run, losses: Sequence[bytes], rows: Sequence[TokenLogRow], *, is_whole: bool
) -> None:
    """Copy the losses that may have hit this Run: all, unless all its rows are there and tell when."""
    first_ns = min((row.received_ns for row in rows), default=0)
    last_ns = max((max(row.flushed_ns, row.finished_ns) for row in rows), default=0)
    held = set(_lines(run.path / TOKENS_FILE))
    for line in losses:
        loss = msgspec.json.decode(line, type=LossRow)
        is_elsewhere = is_whole and (loss.last_ns < first_ns or loss.first_ns > last_ns)
        if line not in held and not is_elsewhere:
            run.append_line("tokens", line)


def _collect_steps(log_dir: Path, run: Run, rows: Sequence[TokenLogRow]) -> None:
    """Copy the steps that `rows` took part in."""
    # Times tell steps with the same index apart where a later server logged into the same folder.
    spans_ns: dict[int, list[tuple[int, int]]] = {}
    for row in rows:
        for index in {*row.step_index, *(chunk.step_index for chunk in row.prefill_chunks)}:
            spans_ns.setdefault(index, []).append((row.arrived_ns, row.finished_ns))
    held = {row.started_ns for row in run.rows("steps", StepRow)}
    for line in read_log_lines(log_dir, STEPS_FILE):
        step = msgspec.json.decode(line, type=StepRow)
        took_part = any(
            step.started_ns <= last_ns and step.ended_ns >= first_ns
            for first_ns, last_ns in spans_ns.get(step.step_index, ())
        )
        if took_part and step.started_ns not in held:
            run.append_line("steps", line)


def _kind_of(line: bytes) -> _Kind:
    return msgspec.json.decode(line, type=_Kind)


def _lines(path: Path) -> Iterator[bytes]:
    return read_lines(path) if path.exists() else iter(())
