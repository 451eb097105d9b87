"""The HTTP routes: OpenAI's endpoints and the few beside them.

Owns: the path table, reading a request, the answers that need no generation. Refuses to know: how the server
is started, the engine, JSON shapes. Invariants: every answer is JSON, a stream of events or the metrics text;
every refusal has OpenAI's envelope (but for an unknown `Expect` on a path of nobody, which is aiohttp's own
417); a handler that is left by its client (`handler_cancellation`) ends its generation.

Usage: `runner = web.AppRunner(Routes(...).app(), handler_cancellation=True)`.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from aiohttp import web

from firstdiff.engine.access import require_key
from firstdiff.engine.answering import Answerer, Received
from firstdiff.engine.connections import Connections
from firstdiff.engine.dispatcher import Dispatcher
from firstdiff.engine.http_calls import HttpCalls, call_of
from firstdiff.engine.http_errors import (
    Handler,
    echo_request_id,
    envelope_errors,
    json_response,
    read_body,
    read_request_id,
    refuse_expectation,
)
from firstdiff.engine.openai_api import CHAT, COMPLETIONS, needs_tool_template, parse_chat, parse_completion
from firstdiff.engine.openai_fields import ApiError, Fields, decode_object, describe, expected
from firstdiff.engine.openai_limits import Limits
from firstdiff.engine.openai_messages import uses_tools
from firstdiff.engine.openai_score import SCORE, parse_score
from firstdiff.engine.openai_tokens import parse_detokenize, parse_tokenize
from firstdiff.engine.prompts import PromptReader, off_loop
from firstdiff.engine.server_ledger import ServerLedger
from firstdiff.tracing.clock import Clock

OPENMETRICS = "application/openmetrics-text; version=1.0.0; charset=utf-8"
SCORE_ALIAS = "/v1/firstdiff/score"
TRACED_ROUTES = (COMPLETIONS, CHAT, SCORE, SCORE_ALIAS)
"""Where answers come from."""
_ANSWER_PREFIXES = ("chatcmpl-", "cmpl-", "score-")


class Routes:
    """The handlers and what they share."""

    def __init__(
        self,
        *,
        dispatcher: Dispatcher,
        ledger: ServerLedger,
        reader: PromptReader,
        answerer: Answerer,
        limits: Limits,
        clock: Clock,
        rng: Random,
        max_body_bytes: int,
        body_timeout_s: float,
        api_keys: Sequence[str],
        connections: Connections,
        calls: HttpCalls,
    ) -> None:
        self._dispatcher = dispatcher
        self._ledger = ledger
        self._reader = reader
        self._tokenizer = reader.tokenizer
        self._answerer = answerer
        self._limits = limits
        self._clock = clock
        self._rng = rng
        self._max_body_bytes = max_body_bytes
        self._body_timeout_s = body_timeout_s
        self._api_keys = api_keys
        self._connections = connections
        self._calls = calls
        self._created_unix_s = clock.now_unix_ns() // 1_000_000_000

    def app(self) -> web.Application:
        """The application with all routes."""
        app = web.Application(
            middlewares=[
                self._connections.note,
                self._calls.watch,
                envelope_errors,
                require_key(self._api_keys),
            ],
            client_max_size=self._max_body_bytes,
        )
        app.on_response_prepare.append(echo_request_id)
        gets: dict[str, Handler] = {
            "/health": self.health,
            "/ready": self.ready,
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
            SCORE: self.score,
            SCORE_ALIAS: self.score,
            "/abort": self.abort,
            "/reset_prefix_cache": self.reset_prefix_cache,
        }
        for path, handler in gets.items():
            app.router.add_get(path, handler, expect_handler=refuse_expectation)
        for path, handler in posts.items():
            app.router.add_post(path, handler, expect_handler=refuse_expectation)
        return app

    async def health(self, _: web.Request) -> web.Response:
        """200 while the engine lives, also while the server drains; 503 with the reason from then on."""
        if self._dispatcher.failure is None:
            return json_response({"status": "ok"})
        raise ApiError(self._dispatcher.failure, status=503, code="engine_unavailable")

    async def ready(self, _: web.Request) -> web.Response:
        """200 while new requests are taken, 503 with the reason from then on."""
        reason = self._dispatcher.failure or self._dispatcher.draining
        if reason is None:
            return json_response({"status": "ready"})
        raise ApiError(reason, status=503, code="not_ready")

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
            shown = ask.tools.shown if ask.tools is not None else None
            self._check_template(needs_tools=bool(shown) or uses_tools(ask.messages))
            _, ids = await self._reader.render(
                ask.messages, tools=shown, add_generation_prompt=ask.add_generation_prompt
            )
        else:
            ids = await self._reader.encode(ask.prompt or "", add_special_tokens=ask.add_special_tokens)
        return json_response({"tokens": ids, "count": len(ids), "max_model_len": self._limits.max_model_len})

    async def detokenize(self, request: web.Request) -> web.Response:
        ids = parse_detokenize(decode_object(await self._body(request)), self._limits)
        return json_response({"prompt": await off_loop(len(ids), lambda: self._tokenizer.decode(ids))})

    async def completions(self, request: web.Request) -> web.StreamResponse:
        received, body = await self._receive(request)
        ask = parse_completion(body, self._limits)
        assert ask.prompts is not None
        await self._reader.check(ask.structure)
        prompts = [
            await self._reader.ids_of(prompt, add_special_tokens=ask.add_special_tokens)
            for prompt in ask.prompts
        ]
        texts = [prompt if isinstance(prompt, str) else None for prompt in ask.prompts]
        return await self._answerer.answer(request, received, ask, prompts, texts)

    async def chat(self, request: web.Request) -> web.StreamResponse:
        received, body = await self._receive(request)
        ask = parse_chat(body, self._limits)
        assert ask.messages is not None
        self._check_template(needs_tools=needs_tool_template(ask))
        await self._reader.check(ask.structure)
        shown = ask.tools.shown if ask.tools is not None else None
        text, ids = await self._reader.render(ask.messages, tools=shown, add_generation_prompt=True)
        return await self._answerer.answer(request, received, ask, [ids], [text])

    async def score(self, request: web.Request) -> web.StreamResponse:
        """How likely given tokens are after a given prompt."""
        received, body = await self._receive(request)
        ask = parse_score(body, self._limits)
        prompts = [
            await self._reader.ids_of(prompt, add_special_tokens=ask.add_special_tokens)
            for prompt in ask.prompts
        ]
        targets = [
            await self._reader.ids_of(target, add_special_tokens=False, param="target")
            for target in ask.targets
        ]
        if ask.is_shared:
            prompts *= len(targets)
        return await self._answerer.score(request, received, ask, prompts, targets)

    async def abort(self, request: web.Request) -> web.Response:
        """End a running request, or all of an HTTP request: by X-Request-Id or answer id."""
        fields = Fields(decode_object(await self._body(request)))
        request_id = fields.text("request_id")
        if not request_id:
            raise expected("the id of a request", request_id, "request_id")
        fields.refuse_rest({})
        ended = self._dispatcher.abort_group(request_id)
        for prefix in _ANSWER_PREFIXES:
            if not ended and request_id.startswith(prefix):
                ended = self._dispatcher.abort_group(request_id.removeprefix(prefix))
        return json_response({"request_id": request_id, "num_aborted": ended})

    async def reset_prefix_cache(self, request: web.Request) -> web.Response:
        """Let no later request find a prefix computed before; the body may be empty."""
        body = await self._body(request)
        if body.strip():
            Fields(decode_object(body)).refuse_rest({})
        return json_response({"num_blocks": await self._dispatcher.reset_prefix_cache()})

    def _check_template(self, *, needs_tools: bool) -> None:
        if needs_tools and not self._tokenizer.takes_tools:
            raise ApiError(
                "expected a model whose chat template knows tools, got one whose template does not: "
                "leave tools out, or serve another model",
                param="tools",
                code="unsupported_parameter",
            )

    async def _receive(self, request: web.Request) -> tuple[Received, dict[str, object]]:
        request_id = read_request_id(request) or f"{self._rng.getrandbits(128):032x}"
        body = await self._body(request)
        call_of(request).request_id = request_id
        received = Received(request_id, self._clock.now_unix_ns(), self._clock.now_ns(), body)
        return received, decode_object(body)

    async def _body(self, request: web.Request) -> bytes:
        return await read_body(request, limit=self._max_body_bytes, timeout_s=self._body_timeout_s)

    def _card(self, name: str) -> dict[str, object]:
        return {
            "id": name,
            "object": "model",
            "created": self._created_unix_s,
            "owned_by": "firstdiff",
            "root": self._ledger.identity.model,
            "max_model_len": self._limits.max_model_len,
        }
