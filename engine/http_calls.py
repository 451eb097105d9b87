"""HTTP requests for answers, from the first look at their head to the last byte: their place in a trace.

Owns: trace context in, the HttpRow of each request, refused and abandoned ones included. Refuses to know:
bodies, routes' meanings, spans. Invariants: each request to a traced route gives one row, after its answers
have ended; nothing here changes an answer but that it carries the trace.

Usage: `web.Application(middlewares=[calls.watch, ...])`, then `call_of(request)` in a handler.
"""

from __future__ import annotations

from collections.abc import Collection
from random import Random

from aiohttp import web

from firstdiff.engine.http_errors import CANCELLED, CLIENT_CLOSED_REQUEST, ERROR_TYPE, Handler
from firstdiff.engine.server_ledger import ServerLedger
from firstdiff.tracing.clock import Clock
from firstdiff.tracing.records import HttpRow
from firstdiff.tracing.trace_context import TraceContext, start_trace
from firstdiff.tracing.trace_sampling import Sampler


class HttpCall:
    """One request under way: its trace, and how many answers the engine took for it."""

    __slots__ = ("is_sampled", "num_answers", "request_id", "trace")

    def __init__(self, trace: TraceContext, *, is_sampled: bool) -> None:
        self.trace = trace
        self.is_sampled = is_sampled
        self.request_id: str | None = None
        self.num_answers = 0


_CALL = web.RequestKey("firstdiff_call", HttpCall)


def call_of(request: web.Request) -> HttpCall:
    """The call that `watch` began for a request to a traced route."""
    return request[_CALL]


class HttpCalls:
    """Watches the requests to `routes` of one server."""

    def __init__(
        self, routes: Collection[str], *, ledger: ServerLedger, clock: Clock, rng: Random, sampler: Sampler
    ) -> None:
        self._routes = routes
        self._ledger = ledger
        self._clock = clock
        self._rng = rng
        self._sampler = sampler

    @web.middleware
    async def watch(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """A middleware: begin the call, and write it down when its answer has ended."""
        resource = request.match_info.route.resource
        if resource is None or request.method != "POST" or resource.canonical not in self._routes:
            return await handler(request)
        received_unix_ns, received_ns = self._clock.now_unix_ns(), self._clock.now_ns()
        trace = self._start_trace(request)
        call = request[_CALL] = HttpCall(trace, is_sampled=self._is_sampled(trace))
        status: int | None = None
        error_type: str | None = CANCELLED
        try:
            response = await handler(request)
            error_type = request.get(ERROR_TYPE)
            if response.status != CLIENT_CLOSED_REQUEST:
                status = response.status
            return response
        finally:
            self._ledger.end_http(
                HttpRow(
                    request_id=call.request_id,
                    trace_id=call.trace.trace_id,
                    span_id=call.trace.span_id,
                    parent_span_id=call.trace.parent_span_id,
                    tracestate=call.trace.tracestate,
                    sampled=call.is_sampled,
                    method=request.method,
                    route=resource.canonical,
                    status=status,
                    error_type=error_type,
                    received_unix_ns=received_unix_ns,
                    received_ns=received_ns,
                    ended_ns=self._clock.now_ns(),
                    num_answers=call.num_answers,
                )
            )

    def _start_trace(self, request: web.Request) -> TraceContext:
        # More than one header of a kind is a client's mistake, and the first is taken.
        return start_trace(
            request.headers.get("traceparent"),
            request.headers.get("tracestate"),
            random_bytes=self._rng.randbytes,
        )

    def _is_sampled(self, trace: TraceContext) -> bool:
        return self._sampler.head(trace.trace_id, trace.sampled if trace.parent_span_id else None)
