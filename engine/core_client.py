"""The server's side of the engine core: start it, talk to it, notice its end.

Owns: the core's process (or thread), the pair's socket, the temporary folder it is bound in. Refuses to
know: HTTP, what rows mean. Invariants: nothing here blocks the event loop; messages arrive in the order
in which they were sent; when the core ends, what it had sent is delivered first and the stream of messages
then ends; `failure` is set exactly when it ended without being told to; no process, thread or file is left
after `stop`.

Usage: `core = ProcessCore(config); identity = await core.start(); core.add(request)`.
"""

from __future__ import annotations

import asyncio
import os
import queue
import shutil
import signal
import sys
import tempfile
import threading
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Protocol

import msgspec
import zmq
import zmq.asyncio

from firstdiff.engine.config import EngineConfig
from firstdiff.engine.core import Build, CoreLoop
from firstdiff.engine.engine import EngineRequest
from firstdiff.engine.messages import (
    Abort,
    Add,
    CoreFailed,
    FromCore,
    Ready,
    ResetPrefixCache,
    Shutdown,
    StartFailed,
    ToCore,
    decode_from_core,
    encode,
)
from firstdiff.tracing.records import FinishReason, Identity

STOP_TIMEOUT_S = 5.0
"""How long a core may take to end after a Shutdown before it is killed."""

DRAIN_MS = 250
"""How long messages of a dead core may take from the kernel's buffers to us."""


class CoreStartError(Exception):
    """The core did not come up; `is_usage` when the user's settings are the cause."""

    def __init__(self, message: str, *, is_usage: bool) -> None:
        super().__init__(message)
        self.is_usage = is_usage


class CoreClient(Protocol):
    """A running engine core as the server sees it."""

    failure: str | None
    """Why the core ended by itself, None while it runs and after an ordered stop."""

    async def start(self) -> Identity:
        """Start and wait until ready; CoreStartError when it does not come up."""
        ...

    def add(self, request: EngineRequest) -> None:
        """Hand over a request; answered by rows or a Rejected."""
        ...

    def abort(self, request_id: str, *, reason: FinishReason) -> None:
        """Ask for the end of a request."""
        ...

    def reset_prefix_cache(self) -> None:
        """Ask for an empty prefix cache; answered by a PrefixCacheReset."""
        ...

    def messages(self) -> AsyncIterator[FromCore]:
        """Everything after Ready, in order; ends when the core has ended."""
        ...

    async def stop(self) -> None:
        """End the core and wait for it; `messages` delivers its last rows, then ends."""
        ...


class ProcessCore:
    """The core in a process of its own: a crash or a busy step cannot take the server with it."""

    def __init__(self, config: EngineConfig, *, command: Sequence[str] | None = None) -> None:
        """`command` starts the core and gets endpoint, config and parent pid appended (tests replace it)."""
        self.failure: str | None = None
        self._config = config
        self._command = list(command or (sys.executable, "-m", "firstdiff.engine.core"))
        self._process: asyncio.subprocess.Process | None = None
        self._exited: asyncio.Task[int] | None = None
        self._stopping = False
        self._all_read = asyncio.Event()
        self._all_read.set()
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.PAIR)
        self._socket.set_hwm(0)
        self._socket.linger = 0

    async def start(self) -> Identity:
        """Start the process and wait for its Ready."""
        # The folder is private and gone as soon as both ends are connected: nothing to clean up after a kill.
        folder = Path(tempfile.mkdtemp(prefix="firstdiff-"))
        try:
            endpoint = f"ipc://{folder}/core"
            self._socket.bind(endpoint)
            self._process = await asyncio.create_subprocess_exec(
                *self._command,
                endpoint,
                msgspec.json.encode(self._config).decode(),
                str(os.getpid()),
                stdin=asyncio.subprocess.DEVNULL,
                env=os.environ | _thread_limit(self._config.threads),
            )
            self._exited = asyncio.create_task(self._process.wait())
            message = await self._receive()
        except BaseException:
            await self._close()
            raise
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        if isinstance(message, Ready):
            return message.identity
        text = message.message if isinstance(message, StartFailed) else self._describe_exit()
        await self._close()
        raise CoreStartError(text, is_usage=isinstance(message, StartFailed) and message.is_usage)

    def add(self, request: EngineRequest) -> None:
        self._send(Add(request=request))

    def abort(self, request_id: str, *, reason: FinishReason) -> None:
        self._send(Abort(request_id=request_id, reason=reason))

    def reset_prefix_cache(self) -> None:
        self._send(ResetPrefixCache())

    async def messages(self) -> AsyncIterator[FromCore]:
        self._all_read.clear()
        try:
            while (message := await self._receive()) is not None:
                if isinstance(message, CoreFailed):
                    self.failure = message.message
                yield message
        finally:
            self._all_read.set()
        if not self._stopping and self.failure is None:
            self.failure = self._describe_exit()

    async def stop(self) -> None:
        self._stopping = True
        if self._exited is not None and not self._exited.done():
            self._send(Shutdown())
            await asyncio.wait({self._exited}, timeout=STOP_TIMEOUT_S)
            if not self._exited.done() and self._process is not None:
                self._process.kill()
        await self._all_read.wait()
        await self._close()

    def _send(self, message: ToCore) -> None:
        # Without a limit on the queue a send completes at once; a dead core's messages go nowhere, and its
        # requests are failed by whoever reads `messages`.
        if not self._socket.closed:
            self._socket.send(encode(message))

    async def _receive(self) -> FromCore | None:
        """The next message; None when the process has ended and all that it sent was read."""
        assert self._exited is not None
        if self._socket.closed:
            return None
        received = asyncio.ensure_future(self._socket.recv())
        try:
            await asyncio.wait({received, self._exited}, return_when=asyncio.FIRST_COMPLETED)
            if not received.done():
                await asyncio.wait({received}, timeout=DRAIN_MS / 1000)
            return decode_from_core(received.result()) if received.done() else None
        finally:
            received.cancel()

    def _describe_exit(self) -> str:
        code = self._process.returncode if self._process is not None else None
        if code is not None and code < 0:
            return f"the engine core was killed by {signal.Signals(-code).name}"
        return f"the engine core ended with exit code {code}"

    async def _close(self) -> None:
        if self._exited is not None and self._process is not None:
            if not self._exited.done():
                self._process.kill()
            await self._exited
        if not self._socket.closed:
            self._socket.close()
            self._context.term()


def _thread_limit(threads: int) -> dict[str, str]:
    """What bounds the core's threads from its start; nothing when the engine chooses for itself."""
    return {"OMP_NUM_THREADS": str(threads)} if threads else {}


class _QueueChannel:
    """The pair inside one process: a queue towards the core, the event loop's own queue back."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.commands: queue.SimpleQueue[ToCore] = queue.SimpleQueue()
        self.outputs: asyncio.Queue[FromCore | None] = asyncio.Queue()
        self._loop = loop

    def receive(self, timeout_s: float) -> ToCore | None:
        try:
            return self.commands.get(timeout=timeout_s) if timeout_s else self.commands.get_nowait()
        except queue.Empty:
            return None

    def send(self, message: FromCore | None) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self.outputs.put_nowait, message)


class InProcessCore:
    """The core in a thread of the server's process: for tests and debuggers."""

    def __init__(self, build: Build) -> None:
        self.failure: str | None = None
        self._build = build
        self._thread: threading.Thread | None = None
        self._channel: _QueueChannel | None = None
        self._stopping = False

    async def start(self) -> Identity:
        """Start the thread and wait for its Ready."""
        channel = self._channel = _QueueChannel(asyncio.get_running_loop())

        def run() -> None:
            try:
                CoreLoop(channel, is_orphan=lambda: False).run(self._build)
            finally:
                channel.send(None)

        self._thread = threading.Thread(target=run, name="firstdiff-core", daemon=True)
        self._thread.start()
        message = await channel.outputs.get()
        if isinstance(message, Ready):
            return message.identity
        await self.stop()
        if isinstance(message, StartFailed):
            raise CoreStartError(message.message, is_usage=message.is_usage)
        raise CoreStartError("the engine core's thread ended before it was ready", is_usage=False)

    def add(self, request: EngineRequest) -> None:
        self._send(Add(request=request))

    def abort(self, request_id: str, *, reason: FinishReason) -> None:
        self._send(Abort(request_id=request_id, reason=reason))

    def reset_prefix_cache(self) -> None:
        self._send(ResetPrefixCache())

    async def messages(self) -> AsyncIterator[FromCore]:
        assert self._channel is not None
        while (message := await self._channel.outputs.get()) is not None:
            if isinstance(message, CoreFailed):
                self.failure = message.message
            yield message
        if not self._stopping and self.failure is None:
            self.failure = "the engine core's thread ended"

    async def stop(self) -> None:
        self._stopping = True
        if self._thread is not None:
            self._send(Shutdown())
            await asyncio.to_thread(self._thread.join, STOP_TIMEOUT_S)

    def _send(self, message: ToCore) -> None:
        assert self._channel is not None
        self._channel.commands.put(message)
