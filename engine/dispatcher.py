"""Requests in flight: from the HTTP handlers to the core and the core's rows back to their handlers.

Owns: which request is whose, the failure of all when the core ends. Refuses to know: HTTP, text. Invariants:
a request handed in gets, in the end, exactly one of: its EngineRequestRow or a Rejected; the rows of one
message reach the ledger first and a handler's mailbox in order; a request whose handler has gone is
aborted; nothing here waits for a handler.

Usage: `mailbox = dispatcher.submit(requests); for message in await mailbox.take(): ...`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass

from firstdiff.engine.core_client import CoreClient
from firstdiff.engine.engine import EngineRequest
from firstdiff.engine.messages import Rejected, StepOutput
from firstdiff.engine.openai_fields import ApiError
from firstdiff.engine.server_ledger import ServerLedger
from firstdiff.tracing.clock import Clock
from firstdiff.tracing.records import (
    EngineRequestRow,
    FinishReason,
    LoadRow,
    PromptLogprobsRow,
    StepRow,
    TokenRow,
)

Delivery = PromptLogprobsRow | TokenRow | EngineRequestRow | Rejected


class Mailbox:
    """What came for one handler and was not taken yet."""

    __slots__ = ("_deliveries", "_waiter")

    def __init__(self) -> None:
        self._deliveries: list[Delivery] = []
        self._waiter: asyncio.Future[None] | None = None

    def put(self, delivery: Delivery) -> None:
        """Add one and wake the handler once."""
        self._deliveries.append(delivery)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def take(self) -> list[Delivery]:
        """All that came, in order; waits for the first."""
        if not self._deliveries:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        taken, self._deliveries = self._deliveries, []
        return taken


@dataclass(slots=True)
class _InFlight:
    request: EngineRequest
    mailbox: Mailbox
    submitted_ns: int


class Dispatcher:
    """The only one who talks to the core once it is up."""

    def __init__(self, core: CoreClient, ledger: ServerLedger, clock: Clock) -> None:
        self._core = core
        self._ledger = ledger
        self._clock = clock
        self._in_flight: dict[str, _InFlight] = {}
        self.failure: str | None = None
        """Why no request is taken any more; None while all is well."""

    @property
    def num_in_flight(self) -> int:
        return len(self._in_flight)

    def submit(self, requests: Sequence[EngineRequest]) -> Mailbox:
        """Hand all of `requests` to the core, their answers into one mailbox.

        ApiError 503 when the core is gone, 400 when an id is in use.
        """
        if self.failure is not None:
            raise ApiError(
                f"expected a running engine, got: {self.failure}: retry elsewhere or restart the server",
                status=503,
                code="engine_unavailable",
            )
        for request in requests:
            if request.request_id in self._in_flight:
                raise ApiError(
                    f"expected an X-Request-Id that is not in use, got {request.request_id!r}: "
                    "send a new one for each request",
                    code="duplicate_request_id",
                )
        mailbox = Mailbox()
        now_ns = self._clock.now_ns()
        for request in requests:
            self._in_flight[request.request_id] = _InFlight(request, mailbox, now_ns)
            self._core.add(request)
        return mailbox

    def abort(self, request_id: str, *, reason: FinishReason) -> None:
        """Free a request's blocks; nothing happens when it has ended. Its row still comes, to the ledger."""
        if request_id in self._in_flight:
            self._core.abort(request_id, reason=reason)

    def stop_taking(self, why: str) -> None:
        """Refuse new requests and abort those in flight."""
        self.failure = self.failure or why
        for request_id in self._in_flight:
            self._core.abort(request_id, reason="abort")

    async def run(self) -> None:
        """Deliver until the core has ended, then fail what it left behind."""
        try:
            async for message in self._core.messages():
                if isinstance(message, StepOutput):
                    self._deliver(message)
                elif isinstance(message, Rejected):
                    self._ledger.forget(message.request_id)
                    self._in_flight.pop(message.request_id).mailbox.put(message)
        except Exception:
            logging.getLogger(__name__).exception("the rows of the engine can no longer be delivered")
            raise
        finally:
            # However the loop ended: no handler may wait for rows that will never come.
            if self._core.failure is not None:
                logging.getLogger(__name__).error("%s: requests are answered 503", self._core.failure)
            self.failure = self._core.failure or self.failure or "the engine core was stopped"
            self._fail_rest(self.failure)

    def _fail_rest(self, error: str) -> None:
        for in_flight in self._in_flight.values():
            row = self._ledger.fail(
                in_flight.request,
                arrived_ns=in_flight.submitted_ns,
                finished_ns=self._clock.now_ns(),
                error=error,
            )
            in_flight.mailbox.put(row)
        self._in_flight.clear()

    def _deliver(self, message: StepOutput) -> None:
        self._ledger.feed(message.rows)
        for row in message.rows:
            if isinstance(row, StepRow | LoadRow):
                continue
            in_flight = self._in_flight.get(row.request_id)
            # Every row belongs to a request that was submitted and has not had its last row.
            assert in_flight is not None, row
            in_flight.mailbox.put(row)
            if isinstance(row, EngineRequestRow):
                del self._in_flight[row.request_id]
