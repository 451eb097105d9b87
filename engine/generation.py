"""One HTTP request's generations: submit, follow piece by piece, end.

Owns: the choices of one request from submission to the ledger's last stamp. Refuses to know: JSON, sockets.
Invariants: the choices of a prompt after its first are submitted when the first has its first token, so that
they find the prompt computed; when the engine has taken the first choice, it has room for all others; what
came before a failure is given out before the failure is raised; a choice that met its stop string is ended
in the engine; after `close`, however the handler left, nothing of the request runs in the engine or has a
place there, and every choice the engine took is in the ledger.

Usage: `async for batch in generation.batches(): ...`, and in a finally `generation.close()`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence

import msgspec

from firstdiff.engine.choice import Choice, Piece
from firstdiff.engine.dispatcher import Delivery, Dispatcher
from firstdiff.engine.messages import Rejected
from firstdiff.engine.openai_fields import ApiError
from firstdiff.engine.server_ledger import ServerLedger
from firstdiff.engine.structure import StructureError
from firstdiff.tracing.clock import Clock
from firstdiff.tracing.records import EngineRequestRow, PromptLogprobsRow, TokenRow, Told, Usage
from firstdiff.tracing.token_log import ServerStamps

Batch = list[tuple[Choice, Piece]]


class Generation:
    """Choices that are answered together; making one submits the first of each prompt."""

    def __init__(
        self,
        group_id: str,
        choices: Sequence[Choice],
        stamps: Sequence[ServerStamps],
        *,
        is_sampled: bool,
        per_prompt: int,
        dispatcher: Dispatcher,
        ledger: ServerLedger,
        clock: Clock,
    ) -> None:
        """`per_prompt` choices after one another share a prompt. ApiError as in Dispatcher.open."""
        self._choices = choices
        self._stamps = {stamp.request_id: stamp for stamp in stamps}
        self._is_sampled = is_sampled
        self._dispatcher = dispatcher
        self._ledger = ledger
        self._clock = clock
        self._open = {choice.request.request_id: choice for choice in choices}
        firsts = choices[::per_prompt]
        self._followers = {
            first.request.request_id: choices[first.index + 1 : first.index + per_prompt] for first in firsts
        }
        self.usage: Usage | None = None
        """What the client was told of all choices together, once it was."""
        self._submitted: set[str] = set()
        self._mailbox = dispatcher.open(group_id, self._open)
        try:
            self._submit(firsts)
        except ApiError:
            dispatcher.close(self._mailbox)
            raise

    async def batches(self) -> AsyncIterator[Batch]:
        """The pieces as they come, all that came at once together, until every choice has finished.

        ApiError when the engine refused (429, 400), failed (500; 400 by the request's own structure) or is
        gone (503).
        """
        while self._open:
            batch, failure = self._follow(await self._mailbox.take())
            if batch:
                yield batch
            if failure is not None:
                raise failure

    def close(self) -> int:
        """The answer has ended: flushed, failed, or its client is gone. How many choices the ledger got."""
        self._dispatcher.close(self._mailbox)
        flushed_ns = self._clock.now_ns()
        num_ended = 0
        for choice in self._choices:
            stamps = self._stamps.get(choice.request.request_id)
            if stamps is not None and stamps.request_id in self._submitted:
                self._ledger.end(
                    stamps,
                    text=choice.text,
                    flushed_ns=flushed_ns,
                    told=Told(
                        num_tokens=choice.num_tokens,
                        finish_reason=choice.finish_reason,
                        stop_match=choice.stop_reason,
                        usage=self.usage,
                        utf8_incomplete_tail=choice.has_incomplete_tail,
                    ),
                    text_offsets=choice.text_offsets,
                )
                num_ended += 1
        return num_ended

    def _submit(self, choices: Sequence[Choice]) -> None:
        requests = [choice.request for choice in choices]
        if not self._submitted:
            # The first keeps places for all others: none can be refused once one has begun.
            others = [choice.request.request_id for choice in self._choices[1:]]
            requests[0] = msgspec.structs.replace(requests[0], follower_ids=tuple(others))
        self._dispatcher.submit(self._mailbox, requests)
        self._submitted.update(choice.request.request_id for choice in choices)
        for request in requests:
            trace_id = self._stamps[request.request_id].trace_id if self._is_sampled else None
            self._ledger.begin(request, trace_id=trace_id)

    def _follow(self, deliveries: list[Delivery]) -> tuple[Batch, ApiError | None]:
        ends = {row.request_id: row for row in deliveries if isinstance(row, EngineRequestRow)}
        batch: Batch = []
        for delivery in deliveries:
            choice = self._open.get(delivery.request_id)
            if choice is None:
                # Tokens computed while the engine had not yet heard of the stop string.
                continue
            failure: ApiError | None = None
            if isinstance(delivery, PromptLogprobsRow):
                choice.prompt_logprobs.append(delivery)
                continue
            if isinstance(delivery, Rejected):
                # The engine never took it, so there is nothing to log.
                del self._open[delivery.request_id], self._stamps[delivery.request_id]
                return batch, _refusal(delivery)
            if isinstance(delivery, TokenRow):
                batch.append((choice, self._push(choice, delivery, ends.get(delivery.request_id))))
            else:
                failure = self._end(choice, delivery, batch)
            failure = failure or self._release(choice, batch)
            if failure is not None:
                return batch, failure
        return batch, None

    def _push(self, choice: Choice, token: TokenRow, end: EngineRequestRow | None) -> Piece:
        if token.num_cached_tokens is not None:
            choice.num_cached_tokens = token.num_cached_tokens
        is_last = end is not None and token.token_index == end.num_output_tokens - 1
        if end is not None and (not is_last or end.finish_reason in ("abort", "error")):
            end = None
        piece = choice.push(token, end)
        if choice.is_finished:
            del self._open[token.request_id]
            if end is None:
                self._dispatcher.abort(token.request_id, reason="stop")
        return piece

    def _end(self, choice: Choice, row: EngineRequestRow, batch: Batch) -> ApiError | None:
        """The engine ended the choice without a further token."""
        del self._open[row.request_id]
        choice.num_cached_tokens = row.num_cached_tokens
        is_cut = self._dispatcher.failure is not None or self._mailbox.is_overflowing
        if row.finish_reason == "error" or (row.finish_reason == "abort" and is_cut):
            return self._failure(row)
        batch.append((choice, choice.end(row.finish_reason)))
        return None

    def _release(self, first: Choice, batch: Batch) -> ApiError | None:
        """The prompt of `first` is computed: submit what was waiting for that."""
        followers = self._followers.pop(first.request.request_id, ())
        if not followers:
            return None
        for choice in followers:
            if choice.request.sampling.prompt_logprobs is None:
                choice.prompt_logprobs = first.prompt_logprobs
        if self._mailbox.is_aborted:
            for choice in followers:
                del self._open[choice.request.request_id]
                batch.append((choice, choice.end("abort")))
            return None
        try:
            self._submit(followers)
        except ApiError as error:
            return error
        return None

    def _failure(self, row: EngineRequestRow) -> ApiError:
        reason = self._dispatcher.failure
        if reason is not None:
            return ApiError(
                f"expected the engine to finish the answer, got: {reason}: send the request again",
                status=503,
                code="engine_unavailable",
            )
        if self._mailbox.is_overflowing:
            return ApiError(
                "expected a client that reads its stream, got one that left it unread: read faster",
                status=408,
                code="client_too_slow",
            )
        if row.error is not None and row.error.startswith(StructureError.__name__):
            return ApiError(
                f"expected a structure that the answer can be held to, got {row.error}: send another",
                code="structure_failed",
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
