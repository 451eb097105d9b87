"""The engine core: the step loop, alone in its process or thread.

Owns: the loop (take commands, step, send rows), the life of the core process. Refuses to know: HTTP, text,
who reads the rows. Invariants: the loop waits only for commands, and only when there is no work; it never
waits for a reader (the outgoing queue has no limit of its own: what is in flight is bounded by
`max_num_seqs + max_num_waiting` requests); every row emitted is sent, in order, one message a step; the
process ends with its parent.

Usage: `python -m firstdiff.engine.core ENDPOINT CONFIG_JSON PARENT_PID` (started by ProcessCore).
"""

from __future__ import annotations

import ctypes
import gc
import logging
import os
import signal
import sys
from collections.abc import Callable
from typing import Protocol

import msgspec
import zmq

from firstdiff.engine.config import EngineConfig
from firstdiff.engine.console import log_on_console
from firstdiff.engine.engine import Emit, LLMEngine, QueueFullError
from firstdiff.engine.messages import (
    Abort,
    Add,
    CoreFailed,
    EngineRow,
    FromCore,
    PrefixCacheReset,
    Ready,
    Rejected,
    ResetPrefixCache,
    Shutdown,
    StartFailed,
    StepOutput,
    ToCore,
    decode_to_core,
    encode,
)
from firstdiff.tracing.clock import SystemClock
from firstdiff.tracing.records import (
    EngineRequestRow,
    Identity,
    LoadRow,
    PromptLogprobsRow,
    Row,
    StepRow,
    TokenRow,
)

IDLE_POLL_S = 1.0
"""How often an idle core looks whether it should still live; commands wake it at once."""

LINGER_MS = 2000
"""How long an ending process waits for its last rows to reach the socket."""

_PR_SET_PDEATHSIG = 1

Build = Callable[[Emit], tuple[LLMEngine, Identity]]


class Channel(Protocol):
    """The core's end of the pair."""

    def receive(self, timeout_s: float) -> ToCore | None:
        """The next command; None when none came in `timeout_s` (0: do not wait)."""
        ...

    def send(self, message: FromCore) -> None:
        """Hand over a message without waiting for its reader."""
        ...


class ZmqChannel:
    """The pair over a ZeroMQ socket that is connected already."""

    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        self._socket = socket

    def receive(self, timeout_s: float) -> ToCore | None:
        if not self._socket.poll(int(timeout_s * 1000)):
            return None
        return decode_to_core(self._socket.recv())

    def send(self, message: FromCore) -> None:
        self._socket.send(encode(message))


class CoreLoop:
    """Runs one engine until it is told to stop."""

    def __init__(self, channel: Channel, *, is_orphan: Callable[[], bool]) -> None:
        self._channel = channel
        self._is_orphan = is_orphan
        self._rows: list[EngineRow] = []
        self._request_ids: set[str] = set()

    def run(self, build: Build) -> int:
        """Build, serve, stop; the exit code is 0 after a Shutdown, 1 after any failure."""
        try:
            engine, identity = build(self._emit)
        except ValueError as error:
            self._channel.send(StartFailed(message=str(error), is_usage=True))
            return 1
        except Exception as error:
            logging.getLogger(__name__).exception("the engine could not be built")
            self._channel.send(StartFailed(message=repr(error), is_usage=False))
            return 1
        self._channel.send(Ready(identity=identity, pid=os.getpid()))
        try:
            self._serve(engine)
        except Exception as error:
            logging.getLogger(__name__).exception("the step loop ended")
            self._flush()
            self._channel.send(CoreFailed(message=repr(error)))
            return 1
        return 0

    def _serve(self, engine: LLMEngine) -> None:
        while not self._is_orphan():
            timeout_s = 0.0 if engine.has_work else IDLE_POLL_S
            while (command := self._channel.receive(timeout_s)) is not None:
                if isinstance(command, Shutdown):
                    for request_id in list(self._request_ids):
                        engine.abort(request_id, reason="abort")
                    self._flush()
                    return
                self._obey(engine, command)
                timeout_s = 0.0
            self._flush()
            if engine.has_work:
                engine.step()
                self._flush()

    def _obey(self, engine: LLMEngine, command: Add | Abort | ResetPrefixCache) -> None:
        if isinstance(command, Abort):
            engine.abort(command.request_id, reason=command.reason)
            return
        if isinstance(command, ResetPrefixCache):
            self._channel.send(PrefixCacheReset(num_blocks=engine.reset_prefix_cache()))
            return
        try:
            engine.add(command.request)
        except QueueFullError as error:
            self._channel.send(Rejected(command.request.request_id, "queue_full", str(error)))
        except ValueError as error:
            self._channel.send(Rejected(command.request.request_id, "invalid", str(error)))
        else:
            self._request_ids.add(command.request.request_id)

    def _emit(self, row: Row) -> None:
        assert isinstance(row, StepRow | PromptLogprobsRow | TokenRow | EngineRequestRow | LoadRow)
        if isinstance(row, EngineRequestRow):
            self._request_ids.discard(row.request_id)
        self._rows.append(row)

    def _flush(self) -> None:
        if self._rows:
            self._channel.send(StepOutput(rows=self._rows))
            self._rows = []


def build_from_config(config: EngineConfig) -> Build:
    """How to build the real engine: imports torch when called, not before."""

    def build(emit: Emit) -> tuple[LLMEngine, Identity]:
        from firstdiff.engine.build import build_engine

        return build_engine(config, emit=emit, clock=SystemClock())

    return build


def frozen(build: Build) -> Build:
    """`build`, after which the collector never scans again what model and libraries allocated."""

    def build_and_freeze(emit: Emit) -> tuple[LLMEngine, Identity]:
        built = build(emit)
        gc.collect()
        gc.freeze()
        return built

    return build_and_freeze


def die_with_parent() -> None:
    """Ask the kernel to kill this process when the thread that started it ends (Linux; else no effect)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def main(arguments: list[str]) -> int:
    """The core process: connect to `ENDPOINT`, build `CONFIG_JSON`, live as long as `PARENT_PID`."""
    endpoint, config_json, parent = arguments
    die_with_parent()
    # Ctrl-C reaches the whole process group; the server decides how the core ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent_pid = int(parent)
    context = zmq.Context()
    socket = context.socket(zmq.PAIR)
    socket.set_hwm(0)
    socket.linger = LINGER_MS
    try:
        socket.connect(endpoint)
        loop = CoreLoop(ZmqChannel(socket), is_orphan=lambda: os.getppid() != parent_pid)
        config = msgspec.json.decode(config_json, type=EngineConfig)
        with log_on_console():
            return loop.run(frozen(build_from_config(config)))
    finally:
        socket.close()
        context.term()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
