"""Requests in flight: from the HTTP handlers to the core and the core's rows back to their handlers.

Owns: which request is whose, what is taken and what not, the failure of all when the core ends. Refuses to
know: HTTP, text. Invariants: a request handed in gets, in the end, exactly one of: its EngineRequestRow or a
Rejected; the rows of one message reach the ledger first and a handler's mailbox in order; a request whose
handler has gone, or does not take what comes for it, is aborted; nothing here waits for a handler.

Usage: `mailbox = dispatcher.open("r1", ids); dispatcher.submit(mailbox, requests); await mailbox.take()`.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from firstdiff.engine.core_client import CoreClient
from firstdiff.engine.engine import EngineRequest
from firstdiff.engine.messages import PrefixCacheReset, Rejected, StepOutput
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

MAX_UNREAD_ROWS = 16384
"""Rows that may wait for one handler; one that its client holds up for longer loses its requests."""

Delivery = PromptLogprobsRow | TokenRow | EngineRequestRow | Rejected


class Mailbox:
    """What came for one HTTP request and was not taken yet."""

    __slots__ = (
        "_deliveries",
        "_waiter",
        "group_id",
        "is_aborted",
        "is_overflowing",
        "request_ids",
        "unsubmitted_ids",
    )

    def __init__(self, group_id: str, request_ids: frozenset[str]) -> None:
        self.group_id = group_id
        self.request_ids = request_ids
        self.unsubmitted_ids = set(request_ids)
        """Those for which the core may keep a place."""
        self.is_aborted = False
        """Whether somebody asked for the end of all its requests."""
        self.is_overflowing = False
        """Whether they were ended because too much lay here unread."""
        self._deliveries: list[Delivery] = []
        self._waiter: asyncio.Future[None] | None = None

    def __len__(self) -> int:
        return len(self._deliveries)

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
        self._mailboxes: dict[str, Mailbox] = {}
        """By request id, from `open` to `close`."""
        self._group_ids: set[str] = set()
        self._idle = asyncio.Event()
        self._idle.set()
        self._resets: deque[asyncio.Future[int]] = deque()
        self.failure: str | None = None
        """Why nothing is answered any more; None while all is well."""
        self.draining: str | None = None
        """Why nothing new is taken, while what was taken is still answered."""

    @property
    def num_in_flight(self) -> int:
        return len(self._in_flight)

    @property
    def num_open(self) -> int:
        """HTTP requests whose answers have not ended."""
        return len(self._group_ids)

    def open(self, group_id: str, request_ids: Iterable[str]) -> Mailbox:
        """A mailbox for one HTTP request, to be closed; `request_ids` are all that it will submit.

        ApiError 503 when nothing is taken, 400 when an id is in use.
        """
        why = self.failure or self.draining
        if why is not None:
            raise ApiError(
                f"expected a server that takes requests, got: {why}: retry elsewhere or later",
                status=503,
                code="engine_unavailable",
            )
        mailbox = Mailbox(group_id, frozenset(request_ids))
        in_use = (self._in_flight, self._mailboxes, self._group_ids)
        for request_id in (group_id, *mailbox.request_ids):
            if any(request_id in ids for ids in in_use):
                raise ApiError(
                    f"expected an X-Request-Id that is not in use, got {request_id!r}: "
                    "send a new one for each request",
                    code="duplicate_request_id",
                )
        self._mailboxes |= dict.fromkeys(mailbox.request_ids, mailbox)
        self._group_ids.add(group_id)
        self._idle.clear()
        return mailbox

    def submit(self, mailbox: Mailbox, requests: Sequence[EngineRequest]) -> None:
        """Hand `requests` to the core, their answers into `mailbox`; ApiError 503 when the core is gone."""
        if self.failure is not None:
            raise ApiError(
                f"expected a running engine, got: {self.failure}: retry elsewhere or restart the server",
                status=503,
                code="engine_unavailable",
            )
        now_ns = self._clock.now_ns()
        for request in requests:
            assert request.request_id in mailbox.request_ids
            mailbox.unsubmitted_ids.discard(request.request_id)
            self._in_flight[request.request_id] = _InFlight(request, mailbox, now_ns)
            self._core.add(request)

    def close(self, mailbox: Mailbox) -> None:
        """The answer has ended; what of it still runs is aborted, what it kept free is given up."""
        for request_id in mailbox.request_ids:
            self.abort(request_id, reason="abort")
            if request_id in mailbox.unsubmitted_ids and self.failure is None:
                self._core.abort(request_id, reason="abort")
            del self._mailboxes[request_id]
        self._group_ids.remove(mailbox.group_id)
        if not self._group_ids:
            self._idle.set()

    def abort(self, request_id: str, *, reason: FinishReason) -> None:
        """Free a request's blocks; nothing happens when it has ended. Its row still comes, to the ledger."""
        if request_id in self._in_flight:
            self._core.abort(request_id, reason=reason)

    def abort_group(self, group_id: str) -> int:
        """End one request, or all of an HTTP request, at the wish of a client; how many were running."""
        ended = [
            request_id
            for request_id, in_flight in self._in_flight.items()
            if group_id in (request_id, in_flight.mailbox.group_id)
        ]
        for mailbox in self._mailboxes.values():
            mailbox.is_aborted |= mailbox.group_id == group_id
        for request_id in ended:
            self._core.abort(request_id, reason="abort")
        return len(ended)

    async def reset_prefix_cache(self) -> int:
        """Empty the core's prefix cache; how many blocks it had. ApiError 503 when the core is gone."""
        if self.failure is None:
            done: asyncio.Future[int] = asyncio.get_running_loop().create_future()
            self._resets.append(done)
            self._core.reset_prefix_cache()
            num_blocks = await done
            if num_blocks >= 0:
                return num_blocks
        raise ApiError(
            f"expected a running engine, got: {self.failure}: restart the server",
            status=503,
            code="engine_unavailable",
        )

    async def drain(self, why: str, *, timeout_s: float) -> None:
        """Take nothing new, and wait until all that was taken is answered, or `timeout_s`."""
        self.draining = self.draining or why
        try:
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
        except TimeoutError:
            if not timeout_s:
                return
            logging.getLogger(__name__).warning(
                "%d requests were not finished within %g s: they fail", self.num_open, timeout_s
            )

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
                elif isinstance(message, PrefixCacheReset):
                    _settle(self._resets.popleft(), message.num_blocks)
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
        while self._resets:
            _settle(self._resets.popleft(), -1)

    def _deliver(self, message: StepOutput) -> None:
        self._ledger.feed(message.rows)
        for row in message.rows:
            if isinstance(row, StepRow | LoadRow):
                continue
            in_flight = self._in_flight.get(row.request_id)
            # Every row belongs to a request that was submitted and has not had its last row.
            assert in_flight is not None, row
            mailbox = in_flight.mailbox
            mailbox.put(row)
            if isinstance(row, EngineRequestRow):
                del self._in_flight[row.request_id]
            elif len(mailbox) > MAX_UNREAD_ROWS and not mailbox.is_overflowing:
                mailbox.is_overflowing = True
                for request_id in mailbox.request_ids:
                    self.abort(request_id, reason="abort")


def _settle(done: asyncio.Future[int], value: int) -> None:
    # Whoever waited may be gone.
    if not done.done():
        done.set_result(value)
