"""The HTTP routes: OpenAI's endpoints and the few beside them.

Owns: the path table, reading a request, writing its answer. Refuses to know: how the server is started, the
engine, JSON shapes. Invariants: every answer is JSON, a stream of events or the metrics text; every refusal
has OpenAI's envelope; a handler that is left by its client (`handler_cancellation`) ends its generation;
long texts are tokenised off the event loop, so that no request holds up the streams of the others.

Usage: `runner = web.AppRunner(Routes(...).app(), handler_cancellation=True, access_log=None)`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import TypeVar

from aiohttp import web

from firstdiff.engine.choice import Choice, Piece
from firstdiff.engine.dispatcher import Dispatcher
from firstdiff.engine.engine import EngineRequest
from firstdiff.engine.generation import Generation
from firstdiff.engine.http_errors import (
    REQUEST_ID_HEADER,
    Handler,
    echo_request_id,
    envelope_errors,
    json_response,
    read_body,
    read_request_id,
    refuse_expectation,
)
from firstdiff.engine.openai_api import CHAT, COMPLETIONS, Ask, Limits, parse_chat, parse_completion
from firstdiff.engine.openai_fields import ApiError, decode_object, describe
from firstdiff.engine.openai_response import DONE, AnswerWriter, error_event
from firstdiff.engine.openai_tokens import parse_detokenize, parse_tokenize
from firstdiff.engine.server_ledger import ServerLedger
from firstdiff.engine.tokenizer import IncrementalDetokenizer, Tokenizer
from firstdiff.tracing.clock import Clock
from firstdiff.tracing.token_log import ServerStamps
from firstdiff.tracing.trace_context import new_id, start_trace

R = TypeVar("R")

OPENMETRICS = "application/openmetrics-text; version=1.0.0; charset=utf-8"

INLINE_SIZE = 8192
"""Characters or ids up to which tokenising is quicker than a thread switch."""


@dataclass(frozen=True, slots=True)
class _Received:
    """An HTTP request whose body is read."""

    request_id: str
    received_unix_ns: int
    received_ns: int


class Routes:
    """The handlers and what they share."""

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
        max_body_bytes: int,
        body_timeout_s: float,
    ) -> None:
        self._dispatcher = dispatcher
        self._ledger = ledger
        self._tokenizer = tokenizer
        self._limits = limits
        self._clock = clock
        self._rng = rng
        self._sampling_rng = sampling_rng
        self._max_body_bytes = max_body_bytes
        self._body_timeout_s = body_timeout_s
        self._created_unix_s = clock.now_unix_ns() // 1_000_000_000
        self._fingerprint = f"fp_{ledger.identity_sha256[:16]}"

    def app(self) -> web.Application:
        """The application with all routes."""
        app = web.Application(middlewares=[envelope_errors], client_max_size=self._max_body_bytes)
        app.on_response_prepare.append(echo_request_id)
        gets: dict[str, Handler] = {
            "/health": self.health,
            "/version": self.version,
            "/metrics": self.metrics,
            "/v1/models": self.models,
            "/v1/models/{model:.+}": self.model,
            "/tokenizer_info": self.tokenizer_info,
            "/v1/firstdiff/identity": self.identity,
        }
        posts: dict[str, Handler] = {
            COMPLETIONS: self.completions,
            CHAT: self.chat,
            "/tokenize": self.tokenize,
            "/detokenize": self.detokenize,
        }
        for path, handler in gets.items():
            app.router.add_get(path, handler, expect_handler=refuse_expectation)
        for path, handler in posts.items():
            app.router.add_post(path, handler, expect_handler=refuse_expectation)
        return app

    async def health(self, _: web.Request) -> web.Response:
        """200 while requests are taken, 503 with the reason from then on."""
        if self._dispatcher.failure is None:
            return json_response({"status": "ok"})
        raise ApiError(self._dispatcher.failure, status=503, code="engine_unavailable")

    async def version(self, _: web.Request) -> web.Response:
        return json_response({"version": self._ledger.identity.engine_version})

    async def metrics(self, request: web.Request) -> web.Response:
        # Only the two forms, never the client's own words: the exposition library trips over odd versions.
        wants_openmetrics = "application/openmetrics-text" in request.headers.get("Accept", "")
        content_type, body = self._ledger.exposition(OPENMETRICS if wants_openmetrics else "")
        return web.Response(body=body, headers={"Content-Type": content_type})

    async def models(self, _: web.Request) -> web.Response:
        return json_response({"object": "list", "data": [self._card(name) for name in self._limits.models]})

    async def model(self, request: web.Request) -> web.Response:
        name = request.match_info["model"]
        if name not in self._limits.models:
            known = ", ".join(self._limits.models)
            raise ApiError(
                f"expected a model out of {known}, got {describe(name)}: see /v1/models",
                status=404,
                param="model",
                code="model_not_found",
            )
        return json_response(self._card(name))

    async def tokenizer_info(self, _: web.Request) -> web.Response:
        return json_response(self._tokenizer.info())

    async def identity(self, _: web.Request) -> web.Response:
        return json_response(self._ledger.identity)

    async def tokenize(self, request: web.Request) -> web.Response:
        ask = parse_tokenize(decode_object(await self._body(request)), self._limits)
        if ask.messages is not None:
            ids = await self._render(ask.messages, add_generation_prompt=ask.add_generation_prompt)
        else:
            ids = await self._encode(ask.prompt or "", add_special_tokens=ask.add_special_tokens)
        return json_response({"tokens": ids, "count": len(ids), "max_model_len": self._limits.max_model_len})

    async def detokenize(self, request: web.Request) -> web.Response:
        ids = parse_detokenize(decode_object(await self._body(request)), self._limits)
        return json_response({"prompt": await _off_loop(len(ids), lambda: self._tokenizer.decode(ids))})

    async def completions(self, request: web.Request) -> web.StreamResponse:
        received, body = await self._receive(request)
        ask = parse_completion(body, self._limits)
        assert ask.prompts is not None
        prompts = [
            prompt if isinstance(prompt, list) else await self._encode(prompt, add_special_tokens=True)
            for prompt in ask.prompts
        ]
        return await self._answer(request, received, ask, prompts)

    async def chat(self, request: web.Request) -> web.StreamResponse:
        received, body = await self._receive(request)
        ask = parse_chat(body, self._limits)
        assert ask.messages is not None
        ids = await self._render(ask.messages, add_generation_prompt=True)
        return await self._answer(request, received, ask, [ids])

    async def _answer(
        self, request: web.Request, received: _Received, ask: Ask, prompts: list[list[int]]
    ) -> web.StreamResponse:
        choices = self._choices(received.request_id, ask, prompts)
        tokenized_ns = self._clock.now_ns()
        stamps = self._stamps(request, received, ask.endpoint, choices, tokenized_ns)
        writer = AnswerWriter(
            ask,
            choices,
            answer_id=f"{'chatcmpl' if ask.is_chat else 'cmpl'}-{received.request_id}",
            created_unix_s=received.received_unix_ns // 1_000_000_000,
            fingerprint=self._fingerprint,
            token_bytes=self._tokenizer.token_bytes,
        )
        generation = Generation(
            choices, stamps, dispatcher=self._dispatcher, ledger=self._ledger, clock=self._clock
        )
        headers = {REQUEST_ID_HEADER: received.request_id}
        try:
            if ask.stream:
                return await _stream(request, generation, writer, headers, usage=ask.include_usage)
            pieces: dict[int, list[Piece]] = {choice.index: [] for choice in choices}
            async for batch in generation.batches():
                for choice, piece in batch:
                    pieces[choice.index].append(piece)
            response = json_response(writer.body(list(pieces.values())), headers=headers)
            # Written here and not after the return, so that the last stamp is taken when it is flushed.
            await response.prepare(request)
            await response.write_eof()
            return response
        finally:
            generation.close()

    def _choices(self, request_id: str, ask: Ask, prompts: Sequence[list[int]]) -> list[Choice]:
        choices: list[Choice] = []
        for index, ids in enumerate(prompts):
            engine_request = EngineRequest(
                request_id=request_id if len(prompts) == 1 else f"{request_id}-{index}",
                prompt_token_ids=ids,
                sampling=ask.sampling(len(ids), self._limits, self._sampling_rng),
            )
            choices.append(Choice(index, engine_request, IncrementalDetokenizer(self._tokenizer, ids)))
        return choices

    def _stamps(
        self,
        request: web.Request,
        received: _Received,
        endpoint: str,
        choices: Sequence[Choice],
        tokenized_ns: int,
    ) -> list[ServerStamps]:
        """One trace for the HTTP request, one server span in it for each choice."""
        random_bytes = self._rng.randbytes
        trace = start_trace(
            request.headers.get("traceparent"), request.headers.get("tracestate"), random_bytes=random_bytes
        )
        return [
            ServerStamps(
                request_id=choice.request.request_id,
                trace_id=trace.trace_id,
                span_id=trace.span_id if choice.index == 0 else new_id(8, random_bytes),
                parent_span_id=trace.parent_span_id,
                sampled=trace.sampled,
                endpoint=endpoint,
                received_unix_ns=received.received_unix_ns,
                received_ns=received.received_ns,
                tokenized_ns=tokenized_ns,
                tracestate=trace.tracestate,
            )
            for choice in choices
        ]

    async def _receive(self, request: web.Request) -> tuple[_Received, dict[str, object]]:
        request_id = read_request_id(request) or f"{self._rng.getrandbits(128):032x}"
        body = await self._body(request)
        received = _Received(request_id, self._clock.now_unix_ns(), self._clock.now_ns())
        return received, decode_object(body)

    async def _body(self, request: web.Request) -> bytes:
        return await read_body(request, limit=self._max_body_bytes, timeout_s=self._body_timeout_s)

    async def _encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        try:
            return await _off_loop(
                len(text), lambda: self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
            )
        except ValueError as error:
            raise ApiError(str(error), param="prompt") from error

    async def _render(self, messages: list[dict[str, str]], *, add_generation_prompt: bool) -> list[int]:
        size = sum(len(message["content"]) for message in messages) + 64 * len(messages)
        try:
            return await _off_loop(
                size,
                lambda: self._tokenizer.apply_chat_template(
                    messages, add_generation_prompt=add_generation_prompt
                ),
            )
        except ValueError as error:
            raise ApiError(str(error), param="messages") from error

    def _card(self, name: str) -> dict[str, object]:
        return {
            "id": name,
            "object": "model",
            "created": self._created_unix_s,
            "owned_by": "firstdiff",
            "root": self._ledger.identity.model,
            "max_model_len": self._limits.max_model_len,
        }


async def _stream(
    request: web.Request,
    generation: Generation,
    writer: AnswerWriter,
    headers: dict[str, str],
    *,
    usage: bool,
) -> web.StreamResponse:
    """Events until the end. The status line waits for the first piece, so an early refusal has its own."""
    response: web.StreamResponse | None = None
    try:
        async for batch in generation.batches():
            if response is None:
                response = web.StreamResponse(
                    headers=headers
                    | {"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache"}
                )
                await response.prepare(request)
            await response.write(b"".join([writer.chunk(choice, piece) for choice, piece in batch]))
        last = writer.usage_chunk() if usage else b""
    except ApiError as error:
        if response is None:
            raise
        last = error_event(error.body())
    assert response is not None
    await response.write(last + DONE)
    await response.write_eof()
    return response


async def _off_loop(size: int, work: Callable[[], R]) -> R:
    """`work()`, in a thread when its input is large."""
    return work() if size <= INLINE_SIZE else await asyncio.to_thread(work)
