"""How each kind of endpoint wants to be asked: one record a dialect, found out by asking the endpoint.

Owns: which body fields bring token ids, log-probabilities and per-chunk usage, and what gives an engine away.
Refuses to know: sockets, replies to completions, what the answers are used for.
Invariants: asking never changes the tokens an endpoint computes; a plain OpenAI endpoint gets no field that
OpenAI does not document; the body depends on nothing but its arguments.

Usage: `path, body = DIALECTS["vllm"].body(request, model="m")`.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from firstdiff.tracing.records import Identity, Request

FORCED = "forced_token_ids"
GENERATE = "/inference/v1/generate"

IdentityDecoder = msgspec.json.Decoder(Identity)


class Dialect(msgspec.Struct, frozen=True, kw_only=True):
    """One endpoint kind.

    `token_ids`: whether `return_token_ids` works ("unstreamed_chat": in chat only without streaming).
    `continuous_usage`: whether each chunk can carry usage so far. `owned_by`: what /v1/models says.
    `forcing`: how it can be made to answer given tokens, with its own log-probabilities of them: by the field
    `forced_token_ids`, by vLLM's token-in-token-out route (--enable-scale-out --enable-trace-replay), or not.
    """

    name: str
    token_ids: Literal["never", "unstreamed_chat", "always"] = "never"
    continuous_usage: bool = False
    owned_by: str | None = None
    forcing: Literal["never", "field", "generate"] = "never"

    def body(self, request: Request, *, model: str) -> tuple[str, dict[str, Any]]:
        """The path and the JSON body that ask for `request`; ValueError when it is no valid request.

        `forced_token_ids` in its `extra` are what it is to answer, in whatever way the endpoint knows.
        """
        if (request.prompt is None) == (request.messages is None):
            raise ValueError(
                f"expected exactly one of prompt and messages in case {request.case_id!r}, got "
                + ("neither" if request.prompt is None else "both")
            )
        forced = request.extra.get(FORCED)
        if forced is not None and self.forcing != "field":
            return self._generate_body(request, forced, model=model)
        is_chat = request.messages is not None
        body: dict[str, Any] = {"model": model}
        body |= {"messages": request.messages} if is_chat else {"prompt": request.prompt}
        body |= {
            "max_tokens": request.max_tokens,
            "temperature": request.temperature,
            "top_p": request.top_p,
            "stream": request.stream,
        }
        if request.stream:
            body["stream_options"] = {"include_usage": True}
            if self.continuous_usage:
                body["stream_options"]["continuous_usage_stats"] = True
        if request.seed is not None:
            body["seed"] = request.seed
        if request.logprobs is not None:
            body |= (
                {"logprobs": True, "top_logprobs": request.logprobs}
                if is_chat
                else {"logprobs": request.logprobs}
            )
        streamed_chat = is_chat and request.stream
        if self.token_ids == "always" or (self.token_ids == "unstreamed_chat" and not streamed_chat):
            body["return_token_ids"] = True
        return ("/v1/chat/completions" if is_chat else "/v1/completions"), body | request.extra

    def _generate_body(self, request: Request, forced: object, *, model: str) -> tuple[str, dict[str, Any]]:
        if self.forcing == "never" or not isinstance(request.prompt, list):
            raise ValueError(
                f"expected an endpoint that can be made to answer given tokens of a prompt of ids, got the "
                f"dialect {self.name}: ask without {FORCED}"
            )
        sampling = {
            "max_tokens": request.max_tokens,
            "temperature": request.temperature,
            "top_p": request.top_p,
            "seed": request.seed,
            "logprobs": request.logprobs,
            "trace_decode_token_ids": forced,
        }
        rest = {name: value for name, value in request.extra.items() if name != FORCED}
        return GENERATE, {
            "model": model,
            "token_ids": request.prompt,
            "sampling_params": sampling | rest,
            # With texts, log-probabilities come as chat has them.
            "output_mode": "text",
            "stream": False,
        }


DIALECTS: dict[str, Dialect] = {
    dialect.name: dialect
    for dialect in (
        Dialect(
            name="firstdiff",
            token_ids="always",
            continuous_usage=True,
            owned_by="firstdiff",
            forcing="field",
        ),
        Dialect(name="vllm", token_ids="always", continuous_usage=True, owned_by="vllm", forcing="generate"),
        Dialect(name="sglang", token_ids="unstreamed_chat", continuous_usage=True, owned_by="sglang"),
        # Its ids come inside the log-probability entries.
        Dialect(name="llama.cpp", owned_by="llamacpp"),
        Dialect(name="openai"),
    )
}


class _Model(msgspec.Struct, frozen=True):
    id: str
    owned_by: str | None = None


class _Models(msgspec.Struct, frozen=True):
    data: list[_Model]


def models_of(body: bytes) -> list[tuple[str, str | None]]:
    """(model id, owned_by) of a /v1/models reply; ValueError when it is none."""
    try:
        return [(model.id, model.owned_by) for model in msgspec.json.decode(body, type=_Models).data]
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"expected a list of models from /v1/models, got {body[:80]!r}") from error


def identity_of(body: bytes) -> Identity | None:
    """The identity in a /v1/firstdiff/identity reply, None when it is none of ours."""
    try:
        return IdentityDecoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def dialect_of(owned_by: str | None) -> Dialect:
    """The dialect that an `owned_by` gives away, else plain OpenAI."""
    for dialect in DIALECTS.values():
        if owned_by is not None and owned_by == dialect.owned_by:
            return dialect
    return DIALECTS["openai"]
