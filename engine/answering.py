"""One checked request, answered: choices made, generated, written whole or as a stream.

Owns: request ids and seeds of choices, the server's stamps, the order of events of an answer. Refuses to
know: how bodies are read, paths, the engine. Invariants: the status line of a stream waits for its first
piece, so that an early refusal has its own status; however the client leaves, its generation is closed; a
write waits for its reader no longer than it may.

Usage: `response = await answerer.answer(request, received, ask, prompts)`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

import msgspec
from aiohttp import web

from firstdiff.engine.choice import Choice, Piece, echo_of
from firstdiff.engine.connections import written
from firstdiff.engine.dispatcher import Dispatcher
from firstdiff.engine.engine import EngineRequest
from firstdiff.engine.generation import Generation
from firstdiff.engine.http_calls import call_of
from firstdiff.engine.http_errors import ERROR_TYPE, REQUEST_ID_HEADER, json_response
from firstdiff.engine.openai_api import Ask, Queueing
from firstdiff.engine.openai_fields import ApiError
from firstdiff.engine.openai_limits import Limits
from firstdiff.engine.openai_response import DONE, AnswerUsage, AnswerWriter, error_event
from firstdiff.engine.openai_score import SCORE, ScoreAsk, score_of
from firstdiff.engine.server_ledger import ServerLedger
from firstdiff.engine.tokenizer import IncrementalDetokenizer, Tokenizer
from firstdiff.engine.tools import OPEN
from firstdiff.tracing.clock import Clock
from firstdiff.tracing.log_content import text_sha256
from firstdiff.tracing.records import Asked, Sampling, Usage
from firstdiff.tracing.token_log import ServerStamps


@dataclass(frozen=True, slots=True)
class Received:
    """An HTTP request whose body is read."""

    request_id: str
    received_unix_ns: int
    received_ns: int
    body: bytes


class Answerer:
    """Answers requests whose prompts are token ids."""

    def __init__(
        self,
        *,
        dispatcher: Dispatcher,
        ledger: ServerLedger,
        tokenizer: Tokenizer,
        limits: Limits,
        clock: Clock,
        rng: Random,
        sampling_rng: Random,
        write_timeout_s: float,
    ) -> None:
        self._dispatcher = dispatcher
        self._ledger = ledger
        self._tokenizer = tokenizer
        self._limits = limits
        self._clock = clock
        self._rng = rng
        self._sampling_rng = sampling_rng
        self._write_timeout_s = write_timeout_s
        self._fingerprint = f"fp_{ledger.identity_sha256[:16]}"
        self._tags_are_special = any(
            tokenizer.is_special(token_id) for token_id in tokenizer.encode(OPEN, add_special_tokens=False)
        )

    async def answer(
        self,
        request: web.Request,
        received: Received,
        ask: Ask,
        prompts: list[list[int]],
        texts: Sequence[str | None],
    ) -> web.StreamResponse:
        """Generate all choices of all prompts; `texts` are what became the prompts, None where ids came."""
        asked = [self._asked(ask, ids, text) for ids, text in zip(prompts, texts, strict=True)]
        if ask.truncate_prompt_tokens is not None:
            prompts = [ids[-ask.truncate_prompt_tokens :] for ids in prompts]
        choices = self._choices(received.request_id, ask, prompts)
        writer = AnswerWriter(
            ask,
            choices,
            answer_id=f"{'chatcmpl' if ask.is_chat else 'cmpl'}-{received.request_id}",
            created_unix_s=received.received_unix_ns // 1_000_000_000,
            fingerprint=self._fingerprint,
            tokenizer=self._tokenizer,
            make_call_id=lambda: f"call_{self._rng.getrandbits(96):024x}",
        )
        generation = self._generation(
            request, received, ask.endpoint, choices, ask.queueing, asked, per_prompt=ask.n
        )
        headers = {REQUEST_ID_HEADER: received.request_id}
        try:
            if ask.stream:
                response = await self._stream(request, generation, writer, headers, usage=ask.include_usage)
                generation.usage = _told(writer.told_usage)
                return response
            pieces: dict[int, list[Piece]] = {choice.index: [] for choice in choices}
            async for batch in generation.batches():
                for choice, piece in batch:
                    pieces[choice.index].append(piece)
            response = await self._send(request, writer.body(list(pieces.values())), headers)
            generation.usage = _told(writer.told_usage)
            return response
        finally:
            call_of(request).num_answers = generation.close()

    async def score(
        self,
        request: web.Request,
        received: Received,
        ask: ScoreAsk,
        prompts: list[list[int]],
        targets: list[list[int]],
    ) -> web.StreamResponse:
        """The log-probabilities of all targets; prompts and targets are as many."""
        pairs = list(zip(prompts, targets, strict=True))
        choices = [
            Choice(
                index,
                _engine_request(
                    _choice_id(received.request_id, index, len(pairs)),
                    [*prompt, *target],
                    ask.sampling(len(prompt), len(target), self._limits),
                    ask.queueing,
                ),
                IncrementalDetokenizer(self._tokenizer, prompt),
            )
            for index, (prompt, target) in enumerate(pairs)
        ]
        asked = Asked(
            add_special_tokens=ask.add_special_tokens,
            has_cache_salt=ask.queueing.cache_salt is not None,
            use_prefix_cache=ask.queueing.use_prefix_cache,
        )
        generation = self._generation(
            request,
            received,
            SCORE,
            choices,
            ask.queueing,
            [asked] * (len(choices) // ask.per_prompt),
            per_prompt=ask.per_prompt,
        )
        try:
            async for batch in generation.batches():
                if any(piece.finish_reason == "abort" for _, piece in batch):
                    raise ApiError(
                        "expected to score all targets, got the request ended by /abort: send it again",
                        status=409,
                        code="aborted",
                    )
            num_prompt = sum(map(len, prompts))
            num_target = sum(map(len, targets))
            body = {
                "id": f"score-{received.request_id}",
                "object": "score",
                "created": received.received_unix_ns // 1_000_000_000,
                "model": ask.model,
                "data": [score_of(choice, ask, self._tokenizer) for choice in choices],
                "usage": {
                    "prompt_tokens": num_prompt + num_target,
                    "completion_tokens": 0,
                    "total_tokens": num_prompt + num_target,
                },
            }
            response = await self._send(
                request, msgspec.json.encode(body), {REQUEST_ID_HEADER: received.request_id}
            )
            generation.usage = Usage(prompt_tokens=num_prompt + num_target, completion_tokens=0)
            return response
        finally:
            call_of(request).num_answers = generation.close()

    def _choices(self, request_id: str, ask: Ask, prompts: Sequence[list[int]]) -> list[Choice]:
        """Those of the first prompt first."""
        choices: list[Choice] = []
        skip_special = self._skips_special(ask)
        for prompt_index, ids in enumerate(prompts):
            echo = None
            if ask.echo:
                assert ask.prompts is not None
                sent = ask.prompts[prompt_index]
                as_sent = sent if isinstance(sent, str) and ask.truncate_prompt_tokens is None else None
                echo = echo_of(self._tokenizer, ids, as_sent)
            for choice_index in range(ask.n):
                sampling = ask.sampling(len(ids), self._limits, self._sampling_rng, choice_index=choice_index)
                if choice_index:
                    # The first choice brings those of the prompt for all.
                    sampling = msgspec.structs.replace(sampling, prompt_logprobs=None)
                index = len(choices)
                choices.append(
                    Choice(
                        index,
                        _engine_request(
                            _choice_id(request_id, index, len(prompts) * ask.n),
                            ids,
                            sampling,
                            ask.queueing,
                        ),
                        IncrementalDetokenizer(self._tokenizer, ids, skip_special_tokens=skip_special),
                        echo=echo,
                        include_stop=ask.include_stop,
                    )
                )
        return choices

    def _generation(
        self,
        request: web.Request,
        received: Received,
        endpoint: str,
        choices: Sequence[Choice],
        queueing: Queueing,
        asked: Sequence[Asked],
        *,
        per_prompt: int,
    ) -> Generation:
        """Submit; all choices share the HTTP request's span, `asked` has an entry a prompt."""
        tokenized_ns = self._clock.now_ns()
        body: str | None = None
        if self._ledger.keeps_log:
            body = received.body.decode("utf-8", "replace")
        call = call_of(request)
        trace = call.trace
        stamps = [
            ServerStamps(
                request_id=choice.request.request_id,
                trace_id=trace.trace_id,
                span_id=trace.span_id,
                endpoint=endpoint,
                received_unix_ns=received.received_unix_ns,
                received_ns=received.received_ns,
                tokenized_ns=tokenized_ns,
                tracestate=trace.tracestate,
                user=queueing.user,
                metadata=queueing.metadata or {},
                choice_index=choice.index,
                num_choices=len(choices),
                prompt_index=choice.index // per_prompt,
                # The body once, with the first answer to it.
                asked=msgspec.structs.replace(
                    asked[choice.index // per_prompt], body=None if choice.index else body
                ),
            )
            for choice in choices
        ]
        return Generation(
            received.request_id,
            choices,
            stamps,
            is_sampled=call.is_sampled,
            per_prompt=per_prompt,
            dispatcher=self._dispatcher,
            ledger=self._ledger,
            clock=self._clock,
        )

    def _skips_special(self, ask: Ask) -> bool:
        return ask.skip_special_tokens and not (ask.tools is not None and self._tags_are_special)

    def _asked(self, ask: Ask, ids: Sequence[int], text: str | None) -> Asked:
        """What the log says of one prompt; nobody needs the digest of a text that is not logged."""
        kept = ask.truncate_prompt_tokens
        is_hashed = text is not None and self._ledger.keeps_log
        return Asked(
            prompt_text_sha256=text_sha256(text) if text is not None and is_hashed else None,
            add_special_tokens=ask.add_special_tokens if text is not None else None,
            num_truncated_tokens=0 if kept is None else max(0, len(ids) - kept),
            skip_special_tokens=self._skips_special(ask),
            include_stop=ask.include_stop,
            has_cache_salt=ask.queueing.cache_salt is not None,
            use_prefix_cache=ask.queueing.use_prefix_cache,
        )

    async def _send(self, request: web.Request, body: bytes, headers: dict[str, str]) -> web.StreamResponse:
        """A whole answer; written here and not after the return, so that the last stamp is its flush."""
        response = json_response(body, headers=headers)
        await response.prepare(request)
        await written(request, response.write_eof(), timeout_s=self._write_timeout_s)
        return response

    async def _stream(
        self,
        request: web.Request,
        generation: Generation,
        writer: AnswerWriter,
        headers: dict[str, str],
        *,
        usage: bool,
    ) -> web.StreamResponse:
        response: web.StreamResponse | None = None
        try:
            async for batch in generation.batches():
                if response is None:
                    response = web.StreamResponse(
                        headers=headers
                        | {"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache"}
                    )
                    await response.prepare(request)
                chunks = b"".join([writer.chunk(choice, piece) for choice, piece in batch])
                await written(request, response.write(chunks), timeout_s=self._write_timeout_s)
            last = writer.usage_chunk() if usage else b""
        except ApiError as error:
            if response is None:
                raise
            request[ERROR_TYPE] = error.code or "stream_error"
            last = error_event(error.body())
        assert response is not None
        await written(request, response.write(last + DONE), timeout_s=self._write_timeout_s)
        await written(request, response.write_eof(), timeout_s=self._write_timeout_s)
        return response


def _told(usage: AnswerUsage | None) -> Usage | None:
    if usage is None:
        return None
    return Usage(
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        cached_tokens=usage.cached_tokens,
    )


def _choice_id(request_id: str, index: int, num_choices: int) -> str:
    return request_id if num_choices == 1 else f"{request_id}-{index}"


def _engine_request(request_id: str, ids: list[int], sampling: Sampling, queueing: Queueing) -> EngineRequest:
    return EngineRequest(
        request_id=request_id,
        prompt_token_ids=ids,
        sampling=sampling,
        priority=queueing.priority,
        cache_salt=queueing.cache_salt,
        use_prefix_cache=queueing.use_prefix_cache,
    )
