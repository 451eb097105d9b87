"""Connections that cost without bringing anything: clients that never ask, and clients that never read.

Owns: how long a connection may live without a request, how long a write may wait for its reader. Refuses to
know: routes, what is written. Invariants: a connection whose first request has no complete head within
`head_timeout_s` is closed, as is one that is idle between two requests; a write that its client
does not take within `write_timeout_s` ends the connection, and so, through the handler's exit, its
generation.

Usage: `server = await loop.create_server(connections.factory(runner.server), sock=listener)`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, cast

from aiohttp import web

from firstdiff.engine.http_errors import HttpConnection

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

KEEPALIVE_TIMEOUT_S = 75.0
"""How long a connection may stay idle after an answer."""


class Connections:
    """Watches the connections of one server."""

    def __init__(self, *, head_timeout_s: float) -> None:
        self._head_timeout_s = head_timeout_s
        self._unproven: set[web.RequestHandler] = set()
        """Connections without a request so far."""

    @property
    def num_unproven(self) -> int:
        return len(self._unproven)

    def factory(self, server: web.Server) -> Callable[[], asyncio.Protocol]:
        """What the event loop calls for each new connection."""
        loop = asyncio.get_running_loop()

        def connect() -> asyncio.Protocol:
            # None means no access log; aiohttp's annotation of the class alone denies it.
            protocol = HttpConnection(
                server, loop=loop, access_log=cast(Any, None), keepalive_timeout=KEEPALIVE_TIMEOUT_S
            )
            self._unproven.add(protocol)
            loop.call_later(self._head_timeout_s, self._expire, protocol)
            return protocol

        return connect

    @web.middleware
    async def note(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """A middleware: the connection has brought a request."""
        self._unproven.discard(request.protocol)
        return await handler(request)

    def _expire(self, protocol: web.RequestHandler) -> None:
        if protocol in self._unproven:
            self._unproven.discard(protocol)
            if protocol.transport is not None:
                protocol.transport.abort()


async def written(request: web.Request, write: Awaitable[None], *, timeout_s: float) -> None:
    """Wait for a write; ConnectionError, the connection cut, when its client takes too long to read."""
    try:
        async with asyncio.timeout(timeout_s):
            await write
    except TimeoutError as error:
        if request.transport is not None:
            request.transport.abort()
        raise ConnectionError(f"the client read nothing for {timeout_s:g} s") from error
