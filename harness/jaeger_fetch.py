"""Spans read back from a Jaeger, by its API v3 where it has one, else by the API before it.

Owns: which generation answers, the search, the bounds on what comes back. Refuses to know: files, what spans
mean. Invariants: an answer is bounded in bytes and in time, and all answers together in bytes; no redirect is
followed; whatever is no well-formed answer is an EndpointError that names the path; a trace comes once.
Source: as in jaeger_query.py; `trace-summaries` is there since Jaeger 2.19.

Usage: `async for spans in fetch_traces("http://127.0.0.1:16686", query, report=report): ...`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass
from typing import TypeVar
from urllib.parse import urlsplit

import aiohttp
import msgspec

from firstdiff.harness.jaeger_query import rfc3339
from firstdiff.harness.wire import EndpointError
from firstdiff.tracing.jaeger_json import decode_jaeger
from firstdiff.tracing.otlp_json import decode_traces
from firstdiff.tracing.records import UNREADABLE
from firstdiff.tracing.span_record import SpanRecord
from firstdiff.tracing.trace_set import group_traces

T = TypeVar("T")

MAX_ANSWER_BYTES = 64 << 20
MAX_TOTAL_BYTES = 1 << 30
MAX_TRACES = 100_000
MAX_SERVICES = 1_000
_CONCURRENCY = 4
_MAX_QUOTED_CHARS = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchQuery:
    """What to fetch: at most `num_traces` traces that began in a stretch of time, the newest first.

    Without a service, those of all; `operation` is the name of any span of them.
    """

    start_unix_ns: int
    end_unix_ns: int
    num_traces: int
    service: str = ""
    operation: str = ""

    def check(self) -> None:
        """ValueError when a value is out of bounds."""
        if not 0 < self.num_traces <= MAX_TRACES:
            raise ValueError(f"expected --limit in 1..{MAX_TRACES}, got {self.num_traces}")
        if self.start_unix_ns >= self.end_unix_ns:
            raise ValueError(
                f"expected a stretch of time, got {rfc3339(self.start_unix_ns)} to "
                f"{rfc3339(self.end_unix_ns)}: --since must lie before --until"
            )


class _Services(msgspec.Struct):
    services: list[str] = []


class _LegacyServices(msgspec.Struct):
    data: list[str] | None


class _Summary(msgspec.Struct, rename="camel"):
    trace_id: str
    min_start_time_unix_nano: str | int = 0


class _Summaries(msgspec.Struct):
    summaries: list[_Summary] = []


class _Error(msgspec.Struct, rename="camel"):
    message: str = ""


class _ErrorAnswer(msgspec.Struct):
    error: _Error


def check_url(url: str) -> str:
    """The URL without a last slash; ValueError unless it is http(s) with a host and without credentials."""
    try:
        parts = urlsplit(url)
        usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        usable = usable and parts.username is None and not parts.query and not parts.fragment
    except ValueError:
        usable = False
    if not usable:
        raise ValueError(f"expected a Jaeger's URL like http://127.0.0.1:16686, got {url!r}")
    return url.rstrip("/")


async def fetch_traces(
    url: str,
    query: FetchQuery,
    *,
    report: Callable[[int, int], None],
    timeout_s: float = 30.0,
    max_answer_bytes: int = MAX_ANSWER_BYTES,
) -> AsyncIterator[list[SpanRecord]]:
    """The spans of each trace; `report` gets (traces fetched, traces in all) as they come.

    EndpointError when there is no Jaeger, or its answers are not well-formed, too long or too late.
    """
    timeout = aiohttp.ClientTimeout(total=timeout_s)
    async with aiohttp.ClientSession(timeout=timeout) as session:
        jaeger = _Jaeger(session, check_url(url), max_answer_bytes)
        has_v3, known = await jaeger.services()
        asked = [query.service] if query.service else known
        if len(asked) > MAX_SERVICES:
            raise jaeger.wrong("/api/services", f"{len(asked)} services: name one with --service")
        found = jaeger.v3_traces(asked, query, report) if has_v3 else jaeger.legacy(asked, query, report)
        async for spans in found:
            yield spans


class _Jaeger:
    """Requests to one Jaeger."""

    def __init__(self, session: aiohttp.ClientSession, url: str, max_answer_bytes: int) -> None:
        self._session = session
        self._url = url
        self._max_answer_bytes = max_answer_bytes
        self._num_left_bytes = MAX_TOTAL_BYTES

    def wrong(self, path: str, got: str) -> EndpointError:
        return EndpointError(
            f"expected a Jaeger's answer from {self._url}{path}, got {got[:_MAX_QUOTED_CHARS]}"
        )

    async def services(self) -> tuple[bool, list[str]]:
        """Whether it has API v3, and its services."""
        status, body = await self._get("/api/v3/services", {})
        if status == 200:
            try:
                return True, msgspec.json.decode(body, type=_Services).services
            except UNREADABLE:
                # A Jaeger from before API v3 shows its UI for every path that it does not know.
                pass
        elif status != 404:
            raise self._refused("/api/v3/services", status, body)
        legacy = await self._json("/api/services", {}, _LegacyServices)
        return False, legacy.data or []

    async def v3_traces(
        self, services: Iterable[str], query: FetchQuery, report: Callable[[int, int], None]
    ) -> AsyncIterator[list[SpanRecord]]:
        """By summaries, then trace by trace; where there are no summaries, by search."""
        starts: dict[str, int] = {}
        for service in services:
            summaries = await self._summaries(service, query)
            if summaries is None:
                async for spans in self._v3_search(services, query, report):
                    yield spans
                return
            starts |= summaries
        newest = sorted(starts, key=lambda trace_id: -starts[trace_id])[: query.num_traces]
        gate = asyncio.Semaphore(_CONCURRENCY)
        tasks = [asyncio.ensure_future(self._v3_trace(trace_id, gate)) for trace_id in newest]
        try:
            for num_done, task in enumerate(tasks, start=1):
                spans = await task
                report(num_done, len(newest))
                if spans:
                    yield spans
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _summaries(self, service: str, query: FetchQuery) -> dict[str, int] | None:
        """Trace ids and their starts; None where this Jaeger has no summaries."""
        path = "/api/v3/trace-summaries"
        status, body = await self._get(path, _v3_parameters(service, query))
        if status == 404:
            return None
        if status != 200:
            raise self._refused(path, status, body)
        try:
            found = msgspec.json.decode(body, type=_Summaries).summaries
        except UNREADABLE as error:
            if body.lstrip().startswith(b"<"):
                return None
            raise self.wrong(path, str(error)) from error
        try:
            return {_trace_id(one.trace_id): int(one.min_start_time_unix_nano) for one in found}
        except ValueError as error:
            raise self.wrong(path, str(error)) from error

    async def _v3_trace(self, trace_id: str, gate: asyncio.Semaphore) -> list[SpanRecord]:
        path = f"/api/v3/traces/{trace_id}"
        async with gate:
            spans = await self._v3_spans(path, {})
        if any(span.trace_id != trace_id for span in spans):
            raise self.wrong(path, "spans of another trace")
        return spans

    async def _v3_search(
        self, services: Iterable[str], query: FetchQuery, report: Callable[[int, int], None]
    ) -> AsyncIterator[list[SpanRecord]]:
        found: list[SpanRecord] = []
        for service in services:
            found += await self._v3_spans("/api/v3/traces", _v3_parameters(service, query))
        for spans in _newest(found, query, report):
            yield spans

    async def _v3_spans(self, path: str, parameters: dict[str, str]) -> list[SpanRecord]:
        status, body = await self._get(path, parameters)
        if status == 404:
            # No traces found: the search was empty, or the trace has gone meanwhile.
            return []
        if status != 200:
            raise self._refused(path, status, body)
        try:
            return _decode_stream(body)
        except ValueError as error:
            raise self.wrong(path, str(error)) from error

    async def legacy(
        self, services: Iterable[str], query: FetchQuery, report: Callable[[int, int], None]
    ) -> AsyncIterator[list[SpanRecord]]:
        """By search, with the API before v3."""
        found: list[SpanRecord] = []
        for service in services:
            parameters = {
                "service": service,
                "start": str(query.start_unix_ns // 1000),
                "end": str(query.end_unix_ns // 1000),
                "limit": str(query.num_traces),
            }
            if query.operation:
                parameters["operation"] = query.operation
            status, body = await self._get("/api/traces", parameters)
            if status != 200:
                raise self._refused("/api/traces", status, body)
            try:
                found += decode_jaeger(body)
            except ValueError as error:
                raise self.wrong("/api/traces", str(error)) from error
        for spans in _newest(found, query, report):
            yield spans

    async def _json(self, path: str, parameters: dict[str, str], kind: type[T]) -> T:
        status, body = await self._get(path, parameters)
        if status != 200:
            raise self._refused(path, status, body)
        try:
            return msgspec.json.decode(body, type=kind)
        except UNREADABLE as error:
            raise self.wrong(path, str(error)) from error

    async def _get(self, path: str, parameters: dict[str, str]) -> tuple[int, bytes]:
        body = bytearray()
        try:
            async with self._session.get(
                self._url + path, params=parameters, allow_redirects=False
            ) as answer:
                async for piece in answer.content.iter_chunked(1 << 16):
                    body += piece
                    self._num_left_bytes -= len(piece)
                    if len(body) > self._max_answer_bytes or self._num_left_bytes < 0:
                        raise self.wrong(path, "more than is read: ask for less with --limit or --last")
                return answer.status, bytes(body)
        except (aiohttp.ClientError, OSError, ValueError) as error:
            # A TimeoutError says nothing by itself.
            raise self.wrong(path, str(error) or "nothing within the time-out") from error

    def _refused(self, path: str, status: int, body: bytes) -> EndpointError:
        try:
            message = msgspec.json.decode(body, type=_ErrorAnswer).error.message
        except UNREADABLE:
            message = body[:_MAX_QUOTED_CHARS].decode("utf-8", "replace").strip()
        return self.wrong(path, f"status {status}: {message}" if message else f"status {status}")


def _v3_parameters(service: str, query: FetchQuery) -> dict[str, str]:
    parameters = {
        "query.serviceName": service,
        "query.startTimeMin": rfc3339(query.start_unix_ns),
        "query.startTimeMax": rfc3339(query.end_unix_ns),
        "query.searchDepth": str(query.num_traces),
    }
    if query.operation:
        parameters["query.operationName"] = query.operation
    return parameters


def _decode_stream(body: bytes) -> list[SpanRecord]:
    """The spans of one answer, or of a line each, as a stream of results was sent by older Jaegers."""
    try:
        return decode_traces(body)
    except ValueError:
        lines = [line for line in body.splitlines() if line.strip()]
        if len(lines) < 2:
            raise
        return [span for line in lines for span in decode_traces(line)]


def _newest(
    spans: Iterable[SpanRecord], query: FetchQuery, report: Callable[[int, int], None]
) -> Iterable[list[SpanRecord]]:
    traces = group_traces(spans)[::-1][: query.num_traces]
    for num_done, trace in enumerate(traces, start=1):
        report(num_done, len(traces))
        yield list(trace.spans)


def _trace_id(text: str) -> str:
    """An id that can stand in a path."""
    found = text.lower()
    if len(found) != 32 or not set(found) <= set("0123456789abcdef") or not found.strip("0"):
        raise ValueError(f"a trace id that is none: {text[:40]!r}")
    return found
