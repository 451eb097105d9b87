"""An endpoint: a URL that answers OpenAI-style requests, as a stream of stamped Chunks.

Owns: asking (path, headers, body) and turning the reply into Chunks or an EndpointError; finding out what
kind of endpoint it is. Refuses to know: workloads, Runs, verdicts.
Invariants: whatever the server sends, `stream` yields Chunks and either returns after a complete answer or
raises EndpointError, within the time limit; closing it early closes the connection.

Usage: `endpoint = await HttpEndpoint.connect(url); async for chunk in endpoint.stream(request, ...): ...`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Protocol
from urllib.parse import urlsplit

import msgspec

from firstdiff.harness.dialect import DIALECTS, Dialect, dialect_of, identity_of, models_of
from firstdiff.harness.replies import Chunk, ReplyError, ReplyReader, error_body_text
from firstdiff.harness.sse import SseParser, SseTooLargeError
from firstdiff.harness.wire import EndpointError, Head, Read, Wire, WireLimits
from firstdiff.tracing.clock import Clock, SystemClock
from firstdiff.tracing.records import Identity, Request

_MAX_ERROR_BODY_BYTES = 64 << 10
_DRAIN_S = 1.0
"""How long an answer that is complete may keep its connection before that is given up."""


class Endpoint(Protocol):
    """Where requests go."""

    def stream(
        self, request: Request, *, request_id: str, traceparent: str | None = None
    ) -> AsyncGenerator[Chunk, None]:
        """The answer's chunks as they come; EndpointError when it is not a complete answer."""
        ...


class HttpEndpoint:
    """An endpoint over HTTP.

    `url` may end in /v1 or not. `timeout_s` bounds a whole request after its connection. `identity` is the
    server's own account where it gives one (the bundled engine), else None.
    """

    def __init__(
        self,
        url: str,
        *,
        model: str,
        dialect: Dialect = DIALECTS["openai"],
        identity: Identity | None = None,
        api_key: str | None = None,
        timeout_s: float = 600.0,
        limits: WireLimits | None = None,
        clock: Clock | None = None,
    ) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        if not (timeout_s > 0):
            raise ValueError(f"expected a timeout above 0 s, got {timeout_s}")
        self._wire = Wire(
            self.url, clock=clock or SystemClock(), limits=limits or WireLimits(timeout_s=timeout_s)
        )
        self.model = model
        self.dialect = dialect
        self.identity = identity
        self._prefix = urlsplit(self.url).path
        self._headers = _auth_headers(api_key)
        if not self._prefix.isascii() or any(char <= " " for char in self._prefix):
            raise ValueError(f"expected a path of printable ASCII in the URL, got {url!r}: percent-encode it")

    @classmethod
    async def connect(
        cls,
        url: str,
        *,
        model: str | None = None,
        dialect: str | None = None,
        api_key: str | None = None,
        timeout_s: float = 600.0,
        clock: Clock | None = None,
    ) -> HttpEndpoint:
        """Find out model and dialect where they are not given; EndpointError when nothing answers.

        The first model listed is taken. ValueError when the endpoint lists none, or not the one asked for.
        """
        if dialect is not None and dialect not in DIALECTS:
            raise ValueError(f"expected a dialect out of {', '.join(DIALECTS)}, got {dialect!r}")
        probe = cls(url, model=model or "", api_key=api_key, timeout_s=min(timeout_s, 30.0), clock=clock)
        try:
            status, body = await probe.get("/v1/models")
            if status != 200:
                # A server in trouble is no mistake of the user's; a path that it does not know is.
                raise (EndpointError if status >= 500 else ValueError)(
                    f"expected a list of models from {probe.url}/v1/models, got status {status}: "
                    f"{error_body_text(body)[:200]}"
                )
            models = models_of(body)
            if model is None and not models:
                raise ValueError(f"expected a model at {probe.url}, got an empty list: name one with --model")
            name = model or models[0][0]
            owners = [owner for listed, owner in models if listed == name]
            if models and not owners:
                listed = ", ".join(listed for listed, _ in models[:5])
                raise ValueError(f"expected a model that {probe.url} lists ({listed}), got {name!r}")
            kind = DIALECTS[dialect] if dialect else dialect_of(owners[0] if owners else None)
            identity = None
            if kind.name in ("firstdiff", "openai"):
                status, body = await probe.get("/v1/firstdiff/identity")
                identity = identity_of(body) if status == 200 else None
                if identity is not None and dialect is None:
                    kind = DIALECTS["firstdiff"]
        finally:
            await probe.close()
        return cls(
            url,
            model=name,
            dialect=kind,
            identity=identity,
            api_key=api_key,
            timeout_s=timeout_s,
            clock=clock,
        )

    async def get(self, path: str) -> tuple[int, bytes]:
        """Status and body of GET `path`; EndpointError."""
        status, body = 0, bytearray()
        async with aclosing(self._wire.request("GET", self._prefix + path, headers=self._headers)) as reads:
            async for read in reads:
                status = read.head.status
                body += read.body
        return status, bytes(body)

    async def stream(
        self, request: Request, *, request_id: str, traceparent: str | None = None
    ) -> AsyncGenerator[Chunk, None]:
        """Send `request` and yield its Chunks, one only when `request.stream` is false."""
        path, body = self.dialect.body(request, model=self.model)
        headers = self._headers | {"X-Request-Id": request_id}
        if traceparent is not None:
            headers["traceparent"] = traceparent
        head: Head | None = None
        reader = ReplyReader()
        try:
            encoded = msgspec.json.encode(body)
            async with aclosing(
                self._wire.request("POST", self._prefix + path, headers=headers, body=encoded)
            ) as reads:
                head = (await anext(reads)).head
                is_events = head.headers.get("content-type", "").partition(";")[0].strip().lower() == (
                    "text/event-stream"
                )
                if head.status == 200 and request.stream and is_events:
                    async for chunk in _streamed(reads, reader):
                        yield chunk
                else:
                    yield await _whole(reads, reader, head, expect_events=request.stream)
        except (ReplyError, SseTooLargeError) as error:
            raise EndpointError(
                str(error),
                status=head.status if head else None,
                headers_received_ns=head.received_ns if head else None,
            ) from error

    async def close(self) -> None:
        """Close idle connections."""
        await self._wire.close()


async def _streamed(reads: AsyncGenerator[Read, None], reader: ReplyReader) -> AsyncGenerator[Chunk, None]:
    """Chunks of an event stream up to its `[DONE]` or its end."""
    parser = SseParser()
    async for read in reads:
        for data in parser.feed(read.body):
            if data.strip() == b"[DONE]":
                _check_finished(reader)
                await _drain(reads)
                return
            yield reader.read(data, received_ns=read.received_ns, headers_received_ns=read.head.received_ns)
    _check_finished(reader)


def _check_finished(reader: ReplyReader) -> None:
    if reader.finish_reason is None:
        raise ReplyError("expected a finish_reason before the end of the answer, got none")


async def _drain(reads: AsyncGenerator[Read, None]) -> None:
    """Read the framing's end so that the connection can be used again; give that up when more comes."""
    try:
        async with asyncio.timeout(_DRAIN_S):
            async for read in reads:
                if read.body:
                    return
    except (TimeoutError, EndpointError):
        # The answer is complete: what becomes of its connection is no fact about the request. The wire
        # has closed it.
        return


async def _whole(
    reads: AsyncGenerator[Read, None], reader: ReplyReader, head: Head, *, expect_events: bool
) -> Chunk:
    """The one Chunk of an answer that is not streamed; ReplyError for an error reply."""
    body = bytearray()
    received_ns = head.received_ns
    async for read in reads:
        body += read.body
        received_ns = read.received_ns
        if head.status != 200 and len(body) > _MAX_ERROR_BODY_BYTES:
            break
    if head.status != 200:
        raise ReplyError(f"status {head.status}: {error_body_text(bytes(body))}")
    chunk = reader.read(bytes(body), received_ns=received_ns, headers_received_ns=head.received_ns)
    if expect_events:
        kind = head.headers.get("content-type", "none")
        raise ReplyError(f"expected a text/event-stream reply, got content-type {kind[:80]!r}")
    _check_finished(reader)
    return chunk


def _auth_headers(api_key: str | None) -> dict[str, str]:
    if api_key is None:
        return {}
    if not api_key.isascii() or not api_key.isprintable():
        raise ValueError("expected an API key of printable ASCII characters, got others in it")
    return {"Authorization": f"Bearer {api_key}"}
