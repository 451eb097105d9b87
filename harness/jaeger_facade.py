"""A read facade with Jaeger's HTTP API over saved traces, for Jaeger's own UI and for whatever asks a Jaeger.

Owns: routes, the server's life, the UI's static files. Refuses to know: what is asked and answered, how
traces are kept. Invariants: it listens on this machine alone and writes nothing; every request sees the files
as they are then; an error is in the shape of its API's generation; nothing outside the UI's folder is served.
Source: Jaeger's API v3, and the API before it as far as its `/api/traces`, `/api/services`,
`/api/operations` and `/api/transform` go.

Usage: `await serve_traces([Path("runs/base")], port=16686, ui=None, announce=print, until=ended)`.
"""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

from aiohttp import web

from firstdiff.harness import jaeger_answers as answers
from firstdiff.harness.jaeger_query import QueryError, find_traces, parse_legacy, parse_v3
from firstdiff.harness.jaeger_sources import LiveTraces
from firstdiff.tracing.otlp_json import decode_traces
from firstdiff.tracing.trace_set import Trace, group_traces

HOST = "127.0.0.1"
MAX_UPLOAD_BYTES = 64 << 20
_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Facade:
    """The handlers; `application` wires them."""

    def __init__(self, live: LiveTraces, *, ui: Path | None = None) -> None:
        self._live = live
        self._ui = None if ui is None else ui.resolve()
        self._reading = asyncio.Lock()

    def application(self) -> web.Application:
        app = web.Application(middlewares=[_errors], client_max_size=MAX_UPLOAD_BYTES)
        app.add_routes(
            [
                web.get("/api/v3/services", self.services),
                web.get("/api/v3/operations", self.operations),
                web.get("/api/v3/traces", self.find),
                web.get("/api/v3/trace-summaries", self.summaries),
                web.get("/api/v3/traces/{id}", self.trace),
                web.get("/api/services", self.legacy_services),
                web.get("/api/services/{service}/operations", self.legacy_operation_names),
                web.get("/api/operations", self.legacy_operations),
                web.get("/api/traces", self.legacy_find),
                web.get("/api/traces/{id}", self.legacy_trace),
                web.post("/api/transform", self.transform),
                web.get("/{path:.*}", self.static),
            ]
        )
        return app

    async def _traces(self) -> list[Trace]:
        async with self._reading:
            return await asyncio.to_thread(self._live.refreshed)

    async def _trace(self, text: str) -> Trace | None:
        trace_id = text.lower().zfill(32)
        if len(trace_id) != 32 or not set(trace_id) <= set("0123456789abcdef"):
            raise QueryError(f"malformed parameter trace_id: {text[:40]!r} is no hex number of 32 digits")
        async with self._reading:
            await asyncio.to_thread(self._live.refreshed)
            return self._live.trace(trace_id)

    async def services(self, request: web.Request) -> web.Response:
        return _json(answers.services_answer(answers.services_of(await self._traces())))

    async def operations(self, request: web.Request) -> web.Response:
        query = request.query
        kind = query.get("spanKind") or query.get("span_kind", "")
        found = answers.operations_of(await self._traces(), query.get("service", ""), kind)
        return _json(answers.operations_answer(found))

    async def find(self, request: web.Request) -> web.Response:
        found = find_traces(await self._traces(), parse_v3(request.query))
        return _json(answers.traces_answer(found)) if found else _no_traces()

    async def summaries(self, request: web.Request) -> web.Response:
        return _json(answers.summaries_answer(find_traces(await self._traces(), parse_v3(request.query))))

    async def trace(self, request: web.Request) -> web.Response:
        trace = await self._trace(request.match_info["id"])
        return _json(answers.traces_answer([trace])) if trace else _no_traces()

    async def legacy_services(self, request: web.Request) -> web.Response:
        return _json(answers.legacy_answer(answers.services_of(await self._traces())))

    async def legacy_operation_names(self, request: web.Request) -> web.Response:
        found = answers.operations_of(await self._traces(), request.match_info["service"])
        return _json(answers.legacy_answer(sorted({name for name, _ in found})))

    async def legacy_operations(self, request: web.Request) -> web.Response:
        service = request.query.get("service", "")
        if not service:
            raise QueryError("parameter 'service' is required")
        found = answers.operations_of(await self._traces(), service, request.query.get("spanKind", ""))
        return _json(answers.legacy_answer([{"name": name, "spanKind": kind} for name, kind in found]))

    async def legacy_find(self, request: web.Request) -> web.Response:
        ids = request.query.getall("traceID", [])
        if ids:
            named = [await self._trace(text) for text in ids]
            return _json(answers.legacy_traces_answer(trace for trace in named if trace))
        found = find_traces(await self._traces(), parse_legacy(request.query))
        return _json(answers.legacy_traces_answer(found))

    async def legacy_trace(self, request: web.Request) -> web.Response:
        trace = await self._trace(request.match_info["id"])
        if trace is None:
            return _json(answers.legacy_answer(None, errors=[(404, "trace not found")]), status=404)
        return _json(answers.legacy_traces_answer([trace]))

    async def transform(self, request: web.Request) -> web.Response:
        """OTLP JSON as the UI uploads it, given back as Jaeger's own."""
        try:
            spans = decode_traces(await request.read())
        except ValueError as error:
            raise QueryError(str(error)) from error
        return _json(answers.legacy_traces_answer(group_traces(spans)))

    async def static(self, request: web.Request) -> web.StreamResponse:
        path = request.match_info["path"]
        if path.startswith("api/"):
            return _json(answers.error_answer(404, f"no such path: /{path[:200]}"), status=404)
        if self._ui is None:
            return web.Response(text="Jaeger's API for saved traces, without a UI: see --ui\n", status=404)
        return await asyncio.to_thread(_static_file, self._ui, path)


async def serve_traces(
    sources: Sequence[Path],
    *,
    port: int,
    ui: Path | None,
    announce: Callable[[str, int], None],
    until: asyncio.Event,
) -> None:
    """Serve until the event; `announce` gets the URL and how many traces there are.

    ValueError when a source cannot be read, the port is taken or `ui` holds no index.html.
    """
    if ui is not None and not (ui / "index.html").is_file():
        raise ValueError(f"expected a built Jaeger UI with index.html for --ui, got {ui}: see `vite build`")
    live = LiveTraces(sources)
    num_traces = len(live.refreshed())
    runner = web.AppRunner(Facade(live, ui=ui).application(), access_log=None, shutdown_timeout=2)
    await runner.setup()
    try:
        await _listen(runner, port)
        announce(f"http://{HOST}:{runner.addresses[0][1]}", num_traces)
        await until.wait()
    finally:
        await runner.cleanup()


async def _listen(runner: web.AppRunner, port: int) -> None:
    try:
        await web.TCPSite(runner, HOST, port).start()
    except (OSError, OverflowError) as error:
        number = error.errno if isinstance(error, OSError) else errno.EINVAL
        raise ValueError(
            f"expected a free --port, got {port} on {HOST}: {os.strerror(number or 0)}: "
            "stop what uses it, choose another, or 0 for any"
        ) from error


@web.middleware
async def _errors(request: web.Request, handler: _Handler) -> web.StreamResponse:
    """Errors in the shape that this path's generation of the API has."""
    try:
        return await handler(request)
    except QueryError as error:
        status, message = 400, str(error)
    except (ValueError, OSError) as error:
        # A source that cannot be read now, which its owner should see; the next request tries again.
        status, message = 500, str(error)
    except web.HTTPException as error:
        if not request.path.startswith("/api/"):
            raise
        status, message = error.status, error.reason
    if request.path.startswith("/api/v3/"):
        return _json(answers.error_answer(status, message), status=status)
    return _json(answers.legacy_answer(None, errors=[(status, message)]), status=status)


def _static_file(ui: Path, path: str) -> web.StreamResponse:
    """A file of the UI; whatever is none of them is a page that the UI itself finds by its path."""
    try:
        file = (ui / path).resolve()
        is_ours = file.is_relative_to(ui) and file.is_file()
    except (OSError, ValueError):
        is_ours = False
    if is_ours:
        return web.FileResponse(file)
    if path.startswith("static/"):
        return web.Response(text="no such file\n", status=404)
    return web.FileResponse(ui / "index.html")


def _no_traces() -> web.Response:
    return _json(answers.error_answer(404, "No traces found"), status=404)


def _json(body: bytes, *, status: int = 200) -> web.Response:
    return web.Response(body=body, status=status, content_type="application/json")
