"""HTTP/1.1 for measuring: every network read is stamped the moment it arrives, before anything looks at it.

Owns: connections, their reuse, response framing (RFC 9112), limits, and the one place where foreign
exceptions become EndpointError. Refuses to know: OpenAI, SSE, JSON, what a stamp is used for.
Invariants: a stamp is taken in `data_received`, so a busy consumer cannot move it; a request goes out in
the same loop step in which an idle connection is taken; a connection is reused only after a reply that was
read to its end; nothing a server sends raises anything but EndpointError, or is kept beyond the limits.

Why not a client library: the stamps would be taken after its parser and its task switches, at 50 streams
4 ms late instead of 0.3.

Usage: `async with aclosing(wire.post(path, body, headers)) as reads: async for read in reads: ...`.
"""

from __future__ import annotations

import asyncio
import ssl
from collections import deque
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from firstdiff.tracing.clock import Clock
from firstdiff.tracing.records import Outcome

_PAUSE_ABOVE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class WireLimits:
    """What a reply may cost. `idle_s` stays below the keep-alive of common servers (uvicorn: 5 s)."""

    timeout_s: float = 600.0
    connect_timeout_s: float = 10.0
    max_head_bytes: int = 64 << 10
    max_reply_bytes: int = 64 << 20
    idle_s: float = 3.0


class EndpointError(Exception):
    """A request that did not end in a complete well-formed answer.

    `outcome` is "failed" when the endpoint answered wrongly or surely never got the request, "unknown" when
    the work may have been done (a time-out, a connection lost).
    """

    def __init__(
        self,
        message: str,
        *,
        outcome: Outcome = "failed",
        status: int | None = None,
        headers_received_ns: int | None = None,
    ) -> None:
        super().__init__(message)
        self.outcome: Outcome = outcome
        self.status = status
        self.headers_received_ns = headers_received_ns


@dataclass(frozen=True, slots=True)
class Head:
    """Status line and headers of a reply; header names in lower case, repeated ones joined by comma."""

    status: int
    headers: dict[str, str]
    received_ns: int


@dataclass(frozen=True, slots=True)
class Read:
    """A piece of a reply's body and when the read that held its last byte came off the socket."""

    head: Head
    received_ns: int
    body: bytes


class _Connection(asyncio.Protocol):
    """A socket as a queue of stamped reads."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._reads: deque[tuple[int, bytes]] = deque()
        self._num_buffered_bytes = 0
        self._waiter: asyncio.Future[None] | None = None
        self._paused = False
        self._timed_out = False
        self._error: Exception | None = None
        self._closed = False
        self.transport: asyncio.Transport | None = None
        self.idle_since_ns = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self._reads.append((self._clock.now_ns(), data))
        self._num_buffered_bytes += len(data)
        if self._num_buffered_bytes > _PAUSE_ABOVE_BYTES and not self._paused:
            assert self.transport is not None
            self.transport.pause_reading()
            self._paused = True
        self._wake()

    def connection_lost(self, exc: Exception | None) -> None:
        self._closed = True
        self._error = exc
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def time_out(self) -> None:
        self._timed_out = True
        self._wake()

    @property
    def is_reusable(self) -> bool:
        return not (self._closed or self._reads or self._timed_out)

    def write(self, data: bytes) -> None:
        assert self.transport is not None
        self.transport.write(data)

    async def read(self) -> tuple[int, bytes]:
        """The next read and its stamp; b"" at the end of the stream. TimeoutError, OSError."""
        while True:
            if self._timed_out:
                raise TimeoutError
            if self._reads:
                stamp_ns, data = self._reads.popleft()
                self._num_buffered_bytes -= len(data)
                if self._paused and self._num_buffered_bytes <= _PAUSE_ABOVE_BYTES // 2:
                    assert self.transport is not None
                    self.transport.resume_reading()
                    self._paused = False
                return stamp_ns, data
            if self._closed:
                if self._error is not None:
                    raise self._error
                return self._clock.now_ns(), b""
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter

    def close(self) -> None:
        if self.transport is not None:
            self.transport.abort()


@dataclass(slots=True)
class _Reply:
    """Reads of one connection as one reply: head, then body pieces with the framing taken off."""

    connection: _Connection
    limits: WireLimits
    buffer: bytearray = field(default_factory=bytearray)
    stamp_ns: int = 0
    num_body_bytes: int = 0
    keeps_alive: bool = False

    async def _more(self) -> bool:
        self.stamp_ns, data = await self.connection.read()
        self.buffer += data
        return bool(data)

    async def _line(self) -> bytes:
        """The next line without its end; EndpointError when it is too long, ConnectionError when cut."""
        searched = 0
        while (end := self.buffer.find(b"\n", searched)) < 0:
            searched = len(self.buffer)
            if searched > self.limits.max_head_bytes:
                raise EndpointError(
                    f"expected reply headers of at most {self.limits.max_head_bytes} bytes, got {searched}"
                )
            if not await self._more():
                raise ConnectionResetError("the server closed the connection before a whole reply came")
        line = bytes(self.buffer[:end])
        del self.buffer[: end + 1]
        return line.removesuffix(b"\r")

    async def head(self) -> Head:
        """Status line and headers, past any 1xx replies (at most 8)."""
        for _ in range(8):
            head = await self._one_head()
            if head.status >= 200 or head.status == 101:
                return head
        raise EndpointError("expected a final reply, got more than 8 informational ones")

    async def _one_head(self) -> Head:
        first = (await self._line()).decode("latin-1")
        version, _, rest = first.partition(" ")
        code = rest[:3]
        if not version.startswith("HTTP/1.") or not (code.isascii() and code.isdigit() and len(code) == 3):
            raise EndpointError(f"expected an HTTP/1.1 status line, got {first[:80]!r}")
        received_ns = self.stamp_ns
        headers: dict[str, str] = {}
        num_bytes = 0
        while line := await self._line():
            num_bytes += len(line) + 2
            if num_bytes > self.limits.max_head_bytes:
                raise EndpointError(
                    f"expected reply headers of at most {self.limits.max_head_bytes} bytes, got more"
                )
            name, colon, value = line.decode("latin-1").partition(":")
            if not colon:
                raise EndpointError(f"expected a reply header 'name: value', got {name[:80]!r}")
            name, value = name.strip().lower(), value.strip()
            headers[name] = f"{headers[name]}, {value}" if name in headers else value
        connection = headers.get("connection", "").lower()
        self.keeps_alive = version == "HTTP/1.1" and "close" not in connection
        return Head(int(code), headers, received_ns)

    def body(self, head: Head) -> AsyncGenerator[Read, None]:
        """Body pieces as they come; ConnectionError when the framing says that more should have come."""
        if head.headers.get("content-encoding", "identity").lower() != "identity":
            raise EndpointError(f"expected an uncompressed reply, got {head.headers['content-encoding']!r}")
        if "chunked" in head.headers.get("transfer-encoding", "").lower():
            return self._chunked(head)
        length = "0" if head.status in (204, 304) else head.headers.get("content-length")
        if length is None:
            self.keeps_alive = False
            return self._until_close(head)
        if not (length.isascii() and length.isdigit() and len(length) < 19):
            raise EndpointError(f"expected a number as content-length, got {length[:40]!r}")
        return self._sized(head, int(length))

    async def _chunked(self, head: Head) -> AsyncGenerator[Read, None]:
        while num_bytes := _chunk_size(await self._line()):
            while num_bytes:
                read = await self._some(head, num_bytes)
                num_bytes -= len(read.body)
                yield read
            if await self._line():
                raise EndpointError("expected a line end after a chunk, got more bytes than its size says")
        num_trailer_bytes = 0
        while line := await self._line():
            num_trailer_bytes += len(line) + 2
            if num_trailer_bytes > self.limits.max_head_bytes:
                raise EndpointError(f"expected trailers of at most {self.limits.max_head_bytes} bytes")

    async def _sized(self, head: Head, num_bytes: int) -> AsyncGenerator[Read, None]:
        while num_bytes:
            read = await self._some(head, num_bytes)
            num_bytes -= len(read.body)
            yield read

    async def _until_close(self, head: Head) -> AsyncGenerator[Read, None]:
        while self.buffer or await self._more():
            yield self._take(head, len(self.buffer))

    async def _some(self, head: Head, num_left_bytes: int) -> Read:
        """What is there of the next `num_left_bytes`, at least one byte."""
        if not self.buffer and not await self._more():
            raise ConnectionResetError(f"the server closed the connection {num_left_bytes} bytes too early")
        return self._take(head, min(num_left_bytes, len(self.buffer)))

    def _take(self, head: Head, num_bytes: int) -> Read:
        self.num_body_bytes += num_bytes
        if self.num_body_bytes > self.limits.max_reply_bytes:
            raise EndpointError(
                f"expected a reply of at most {self.limits.max_reply_bytes} bytes, got more: "
                "raise the limit if such replies are right"
            )
        body = bytes(self.buffer[:num_bytes])
        del self.buffer[:num_bytes]
        return Read(head, self.stamp_ns, body)


def _chunk_size(line: bytes) -> int:
    digits = line.partition(b";")[0].strip()
    if not 0 < len(digits) <= 16 or digits.strip(b"0123456789abcdefABCDEF"):
        raise EndpointError(f"expected a chunk size in hex, got {digits[:40]!r}")
    return int(digits, 16)


class Wire:
    """Connections to one origin; use it inside one event loop.

    The number of connections is the number of requests in flight: bounding that is the driver's business.
    """

    def __init__(self, url: str, *, clock: Clock, limits: WireLimits | None = None) -> None:
        # Refused before any message could repeat them, and because a Run's manifest holds its URL.
        if "@" in url.partition("://")[2].partition("/")[0]:
            raise ValueError(
                "expected a URL without user name and password, got one with: take them out, and give a key "
                "with --api-key or FIRSTDIFF_API_KEY"
            )
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError as error:
            raise ValueError(f"expected a URL like http://127.0.0.1:8000, got {url!r} ({error})") from error
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
            raise ValueError(f"expected a URL like http://127.0.0.1:8000, got {url!r}")
        self._host = parts.hostname
        self._port = port or (443 if parts.scheme == "https" else 80)
        self._ssl = ssl.create_default_context() if parts.scheme == "https" else None
        self._authority = parts.netloc
        self._clock = clock
        self._limits = limits or WireLimits()
        self._idle: list[_Connection] = []

    async def request(
        self, method: str, path: str, *, headers: dict[str, str], body: bytes | None = None
    ) -> AsyncGenerator[Read, None]:
        """Send one request and yield its body in stamped pieces, the first with an empty body (the head).

        Closing the iterator early closes the connection, which tells the server that the client is gone.
        Raises EndpointError.
        """
        loop = asyncio.get_running_loop()
        connection = self._take_idle() or await self._connect()
        timer = loop.call_later(self._limits.timeout_s, connection.time_out)
        reply = _Reply(connection, self._limits)
        head: Head | None = None
        finished = False
        try:
            connection.write(self._encode(method, path, headers, body))
            head = await reply.head()
            yield Read(head, head.received_ns, b"")
            async for read in reply.body(head):
                yield read
            finished = True
        except EndpointError as error:
            if head is not None:
                error.status, error.headers_received_ns = head.status, head.received_ns
            raise
        except (OSError, TimeoutError) as error:
            raise EndpointError(
                f"no whole reply within {self._limits.timeout_s:g} s"
                if isinstance(error, TimeoutError)
                else f"connection lost: {error}",
                outcome="unknown",
                status=head.status if head else None,
                headers_received_ns=head.received_ns if head else None,
            ) from error
        finally:
            timer.cancel()
            if finished and reply.keeps_alive and not reply.buffer and connection.is_reusable:
                connection.idle_since_ns = self._clock.now_ns()
                self._idle.append(connection)
            else:
                connection.close()

    def _take_idle(self) -> _Connection | None:
        oldest_ns = self._clock.now_ns() - int(self._limits.idle_s * 1e9)
        while self._idle:
            connection = self._idle.pop()
            if connection.is_reusable and connection.idle_since_ns >= oldest_ns:
                return connection
            connection.close()
        return None

    async def _connect(self) -> _Connection:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self._limits.connect_timeout_s):
                _, connection = await loop.create_connection(
                    lambda: _Connection(self._clock), self._host, self._port, ssl=self._ssl
                )
        except (OSError, TimeoutError) as error:
            reason = str(error) or f"no connection within {self._limits.connect_timeout_s:g} s"
            raise EndpointError(f"cannot connect to {self._authority}: {reason}") from error
        return connection

    def _encode(self, method: str, path: str, headers: dict[str, str], body: bytes | None) -> bytes:
        lines = [f"{method} {path} HTTP/1.1", f"Host: {self._authority}", "Accept-Encoding: identity"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        if body is not None:
            lines += ["Content-Type: application/json", f"Content-Length: {len(body)}"]
        head = "\r\n".join([*lines, "", ""])
        assert head.count("\r\n") == len(lines) + 1, "a header value holds a line end"
        return head.encode("latin-1") + (body or b"")

    async def close(self) -> None:
        """Close the idle connections."""
        for connection in self._idle:
            connection.close()
        self._idle.clear()
        # Transports close on the next loop step; without it Python warns of unclosed sockets.
        await asyncio.sleep(0)
