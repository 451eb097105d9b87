"""One HTTP request's generations: submit, follow piece by piece, end.

Owns: the choices of one request from submission to the ledger's last stamp. Refuses to know: JSON, sockets.
Invariants: what came before a failure is given out before the failure is raised; a choice that met its stop
string is ended in the engine; after `close`, however the handler left, nothing of the request runs in the
engine and every choice the engine took is in the ledger.

Usage: `async for batch in generation.batches(): ...`, and in a finally `generation.close()`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence

from firstdiff.engine.choice import Choice, Piece
from firstdiff.engine.dispatcher import Delivery, Dispatcher
from firstdiff.engine.messages import Rejected
from firstdiff.engine.openai_fields import ApiError
from firstdiff.engine.server_ledger import ServerLedger
from firstdiff.tracing.clock import Clock
from firstdiff.tracing.records import EngineRequestRow, PromptLogprobsRow, TokenRow
from firstdiff.tracing.token_log import ServerStamps

Batch = list[tuple[Choice, Piece]]


class Generation:
    """Choices that are answered together; making one submits them all."""

    def __init__(
        self,
        choices: Sequence[Choice],
        stamps: Sequence[ServerStamps],
        *,
        dispatcher: Dispatcher,
        ledger: ServerLedger,
        clock: Clock,
    ) -> None:
        """ApiError (see Dispatcher.submit) when none of them is taken."""
        self._choices = choices
        self._stamps = {stamp.request_id: stamp for stamp in stamps}
        self._dispatcher = dispatcher
        self._ledger = ledger
        self._clock = clock
        self._open = {choice.request.request_id: choice for choice in choices}
        self._mailbox = dispatcher.submit([choice.request for choice in choices])

    async def batches(self) -> AsyncIterator[Batch]:
        """The pieces as they come, all that came at once together, until every choice has finished.

        ApiError when the engine refused (429, 400), failed (500) or is gone (503).
        """
        while self._open:
            batch, failure = self._follow(await self._mailbox.take())
            if batch:
                yield batch
            if failure is not None:
                raise failure

    def close(self) -> None:
        """The answer has ended: flushed, failed, or its client is gone."""
        for request_id in self._open:
            self._dispatcher.abort(request_id, reason="abort")
        flushed_ns = self._clock.now_ns()
        for choice in self._choices:
            stamps = self._stamps.get(choice.request.request_id)
            if stamps is not None:
                self._ledger.end(stamps, text=choice.text, flushed_ns=flushed_ns)

    def _follow(self, deliveries: list[Delivery]) -> tuple[Batch, ApiError | None]:
        ends = {row.request_id: row for row in deliveries if isinstance(row, EngineRequestRow)}
        batch: Batch = []
        for delivery in deliveries:
            choice = self._open.get(delivery.request_id)
            if choice is None:
                # Tokens computed while the engine had not yet heard of the stop string.
                continue
            if isinstance(delivery, PromptLogprobsRow):
                choice.prompt_logprobs.append(delivery)
            elif isinstance(delivery, TokenRow):
                batch.append((choice, self._push(choice, delivery, ends.get(delivery.request_id))))
            elif isinstance(delivery, Rejected):
                # The engine never took it, so there is nothing to log.
                del self._open[delivery.request_id], self._stamps[delivery.request_id]
                return batch, _refusal(delivery)
            elif delivery.finish_reason in ("abort", "error"):
                del self._open[delivery.request_id]
                return batch, self._failure(delivery)
            else:
                batch.append((choice, choice.end(delivery)))
                del self._open[delivery.request_id]
        return batch, None

    def _push(self, choice: Choice, token: TokenRow, end: EngineRequestRow | None) -> Piece:
        if end is not None:
            choice.num_cached_tokens = end.num_cached_tokens
            if token.token_index != end.num_output_tokens - 1 or end.finish_reason in ("abort", "error"):
                end = None
        piece = choice.push(token, end)
        if choice.is_finished:
            del self._open[token.request_id]
            if end is None:
                self._dispatcher.abort(token.request_id, reason="stop")
        return piece

    def _failure(self, row: EngineRequestRow) -> ApiError:
        reason = self._dispatcher.failure
        if reason is not None:
            return ApiError(
                f"expected the engine to finish the answer, got: {reason}: send the request again",
                status=503,
                code="engine_unavailable",
            )
        return ApiError(
            f"expected the engine to finish the answer, got an error in its step: {row.error}: "
            "see the server's log",
            status=500,
            code="engine_error",
        )


def _refusal(rejected: Rejected) -> ApiError:
    if rejected.cause == "queue_full":
        return ApiError(rejected.message, status=429, code="queue_full")
    return ApiError(rejected.message)
