"""Bytes to a server under fuzz and back: one request a connection, every wait bounded, every answer checked.

Usage: `reply = ask(address_of(server), sent, timeout_s=20); check_reply(sent, reply)`.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import sys
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, field
from http.client import HTTPException, HTTPResponse
from pathlib import Path
from threading import Event
from urllib.parse import unquote, urlsplit

sys.path.insert(0, str(Path(__file__).parent))
from scripted_server import ServerUnderTest

from firstdiff.engine.engine import LLMEngine

KEY = "the-key-of-the-server-under-fuzz"
OPEN_PATHS = {"/health", "/ready", "/metrics", "/version"}
"""What a server with keys answers to anybody."""
METHODS = ["GET", "POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "HEAD", "PROPFIND"]
MAX_ANSWER_BYTES = 4 << 20
MAX_TARGET_BYTES = 8190
"""aiohttp's own limit of a line."""
Address = tuple[str, int]


@dataclass(frozen=True)
class Sent:
    """A request, and what may come of it: any 2xx or 4xx, or one of `statuses` when that is not empty.

    Without the right `key` it is 401, but for the paths that need none.
    What `spoil` makes of the bytes may not even get an answer.
    """

    method: str
    target: str
    headers: tuple[tuple[str, str], ...] = ()
    body: bytes | None = None
    key: str | None = KEY
    statuses: frozenset[int] = field(default_factory=frozenset)
    spoil: Callable[[bytes], bytes] | None = None
    has_route: bool = True

    @property
    def is_readable(self) -> bool:
        """Whether HTTP's own parser must take it; else it may refuse it in its own words."""
        is_known = self.method in METHODS and self.target != "*" and len(self.target) <= MAX_TARGET_BYTES
        # A deflated body that ends too early stops the parser; a gzipped one only its reader.
        is_cut = "deflate" in dict(self.headers).get("Content-Encoding", "")
        return is_known and self.target.isascii() and self.spoil is None and not is_cut

    def raw(self) -> bytes:
        lines = [f"{self.method} {self.target} HTTP/1.1"]
        headers = list(self.headers)
        names = {name.lower() for name, _ in headers}
        if "host" not in names:
            headers.append(("Host", "fuzz"))
        if "connection" not in names:
            headers.append(("Connection", "close"))
        if self.key is not None:
            headers.append(("Authorization", f"Bearer {self.key}"))
        if self.body is not None:
            headers.append(("Content-Length", str(len(self.body))))
        lines += [f"{name}: {value}" for name, value in headers]
        raw = "\r\n".join([*lines, "", ""]).encode("utf-8", "surrogatepass") + (self.body or b"")
        return raw if self.spoil is None else self.spoil(raw)


@dataclass(frozen=True)
class Reply:
    status: int
    headers: dict[str, str]
    body: bytes


def address_of(server: ServerUnderTest) -> Address:
    parts = urlsplit(server.url)
    assert parts.hostname is not None
    assert parts.port is not None
    return parts.hostname, parts.port


def ask(address: Address, sent: Sent, *, timeout_s: float) -> Reply | None:
    """The answer; None where the server closed the connection without one. AssertionError when it hangs."""
    with socket.create_connection(address, timeout=timeout_s) as connection:
        try:
            connection.sendall(sent.raw())
            if sent.spoil is not None:
                connection.shutdown(socket.SHUT_WR)
            with closing(HTTPResponse(connection, method=sent.method)) as response:
                response.begin()
                headers = {name.lower(): value for name, value in response.getheaders()}
                body = response.read(MAX_ANSWER_BYTES)
        except TimeoutError as error:
            raise AssertionError(f"no answer within {timeout_s:g} s: {sent}") from error
        except (HTTPException, ConnectionError):
            if sent.spoil is None:
                raise
            return None
        assert len(body) < MAX_ANSWER_BYTES, sent
        return Reply(response.status, headers, body)


def check_reply(sent: Sent, reply: Reply | None) -> None:
    """AssertionError unless `reply` is one that this server may give to `sent`."""
    if reply is None:
        assert sent.spoil is not None, sent
        return
    status, said = reply.status, (sent, reply)
    assert 200 <= status < 300 or 400 <= status < 500, said
    assert b"Traceback" not in reply.body, said
    if reply.headers["content-type"].startswith("text/plain; charset=utf-8"):
        # aiohttp's own refusal: an expectation of no route never reaches our code.
        assert (status, sent.has_route) == (417, False), said
        assert "Expect" in dict(sent.headers), said
        return
    if sent.method == "HEAD":
        assert reply.body == b"", said
    else:
        check_answer(status, reply.headers, reply.body)
    if status == 400 and not sent.is_readable:
        return
    if status == 405:
        assert reply.headers["allow"], said
    if sent.key != KEY and not is_open(sent):
        assert status == 401, said
    else:
        assert not sent.statuses or status in sent.statuses, said


def is_open(sent: Sent) -> bool:
    """Whether the request needs no key, or is refused before anybody asks for one."""
    return unquote(urlsplit(sent.target).path) in OPEN_PATHS or "Expect" in dict(sent.headers)


def check_answer(status: int, headers: dict[str, str], body: bytes) -> None:
    """AssertionError unless the answer has the form that its status demands."""
    assert 200 <= status < 300 or 400 <= status < 500, (status, body)
    if status >= 400:
        envelope = json.loads(body)
        assert list(envelope) == ["error"], envelope
        error = envelope["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert error["message"].startswith("expected "), error
        assert ", got" in error["message"], error
    elif headers["content-type"].startswith("text/event-stream"):
        *events, done, rest = body.split(b"\n\n")
        assert (done, rest) == (b"data: [DONE]", b"")
        for event in events:
            assert "error" not in json.loads(event.removeprefix(b"data: "))
    elif headers["content-type"].startswith("application/json"):
        json.loads(body)
    else:
        assert headers["content-type"].startswith(("text/plain; version=", "application/openmetrics-text"))


def resident_bytes() -> int:
    """Memory of this process, server included; 0 where that is not told."""
    statm = Path("/proc/self/statm")
    return int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") if statm.exists() else 0


@dataclass(frozen=True)
class Held:
    """What a server holds that an answered request must give back."""

    num_tasks: int
    num_files: int

    @classmethod
    def by(cls, server: ServerUnderTest) -> Held:
        async def num_tasks() -> int:
            return len(asyncio.all_tasks())

        files = Path("/proc/self/fd")
        return cls(
            asyncio.run_coroutine_threadsafe(num_tasks(), server.loop).result(20),
            len(list(files.iterdir())) if files.exists() else 0,
        )


def check_nothing_left(
    server: ServerUnderTest, engine: LLMEngine, before: Held, *, patience_s: float = 20
) -> None:
    """AssertionError unless requests, blocks, tasks and sockets are soon what they were before the first."""
    dispatcher = server.running.dispatcher
    for _ in range(round(patience_s * 100)):
        held = Held.by(server)
        is_idle = dispatcher.num_in_flight == 0 and dispatcher.num_open == 0 and not engine.has_work
        if is_idle and held.num_tasks <= before.num_tasks and held.num_files <= before.num_files:
            break
        Event().wait(0.01)
    assert (dispatcher.num_open, dispatcher.num_in_flight, engine.num_requests) == (0, 0, 0)
    assert held.num_tasks <= before.num_tasks, (held, before)
    assert held.num_files <= before.num_files, (held, before)
    engine.scheduler.check_integrity()
    assert engine.scheduler.pool.num_used_blocks == 0
