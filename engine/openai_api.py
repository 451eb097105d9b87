"""What a client may ask: OpenAI's request bodies, with vLLM's additions, checked in full.

Owns: every field's type, bounds and default. Refuses to know: sockets, tokenisation, the engine's state.
Invariants: a body becomes a request or one ApiError; no field is accepted and ignored: one that is not
supported is refused unless its value changes nothing (`n` 1, penalties 0, ...); defaults are OpenAI's
(temperature 1, top_p 1, 16 tokens for completions, the rest of the context for chat), never the model's
generation_config.

Usage: `ask = parse_completion(decode_object(body), limits); sampling = ask.sampling(9, limits, rng)`.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import Final, Literal

import msgspec

from firstdiff.engine.openai_fields import ApiError, Fields, describe, expected
from firstdiff.engine.openai_unsupported import UNSUPPORTED_CHAT, UNSUPPORTED_COMPLETION, UNSUPPORTED_MESSAGE
from firstdiff.tracing.records import Sampling

COMPLETIONS: Final = "/v1/completions"
CHAT: Final = "/v1/chat/completions"
Endpoint = Literal["/v1/completions", "/v1/chat/completions"]

COMPLETION_MAX_TOKENS = 16
MAX_TEMPERATURE = 2.0
GREEDY_BELOW = 1e-5
"""Temperatures below this are greedy, as in vLLM: dividing logits by less overflows."""
MAX_LOGPROBS = 20
MAX_SEED = 2**63 - 1

_ROLES = ("system", "user", "assistant")


@dataclass(frozen=True, slots=True)
class Limits:
    """What a body may ask at most; the last five are settings of the server."""

    models: tuple[str, ...]
    vocab_size: int
    max_model_len: int
    max_prompts: int = 128
    max_messages: int = 1024
    max_stops: int = 16
    max_stop_chars: int = 256
    max_stop_token_ids: int = 128


@dataclass(frozen=True, slots=True)
class Ask:
    """A checked request for one or more generations, before tokenisation.

    Exactly one of `prompts` (text or token ids each) and `messages` is set. `logprobs` is the number of
    alternatives to return, None for no log-probabilities. `max_tokens` None means the rest of the context.
    """

    endpoint: Endpoint
    model: str
    prompts: list[str | list[int]] | None
    messages: list[dict[str, str]] | None
    max_tokens: int | None
    temperature: float
    top_k: int
    top_p: float
    seed: int | None
    stop: list[str]
    stop_token_ids: list[int]
    ignore_eos: bool
    logprobs: int | None
    stream: bool
    include_usage: bool
    continuous_usage: bool
    return_token_ids: bool

    @property
    def is_chat(self) -> bool:
        return self.messages is not None

    def sampling(self, num_prompt_tokens: int, limits: Limits, rng: Random) -> Sampling:
        """All values resolved for one prompt; a missing seed is drawn from `rng`.

        ApiError when the prompt is empty or prompt and output do not fit the context.
        """
        param = "messages" if self.is_chat else "prompt"
        if num_prompt_tokens == 0:
            raise ApiError(
                f"expected a prompt of 1 token or more in {param!r}, got none: send some text", param=param
            )
        room = limits.max_model_len - num_prompt_tokens
        wanted = room if self.max_tokens is None else self.max_tokens
        if wanted > room or room < 1:
            raise ApiError(
                f"expected prompt and max_tokens within the context of {limits.max_model_len} tokens, got "
                f"{num_prompt_tokens} prompt tokens and {max(wanted, 1)} to generate: shorten the prompt or "
                "lower max_tokens",
                param=param if room < 1 else "max_tokens",
                code="context_length_exceeded",
            )
        return Sampling(
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            seed=rng.getrandbits(63) if self.seed is None else self.seed,
            max_tokens=wanted,
            stop=self.stop,
            stop_token_ids=self.stop_token_ids,
            ignore_eos=self.ignore_eos,
            logprobs=self.logprobs,
        )


def parse_completion(body: dict[str, object], limits: Limits) -> Ask:
    """A /v1/completions body."""
    fields = Fields(body)
    model = check_model(fields, limits)
    prompts = _prompts(fields, limits)
    logprobs = fields.integer("logprobs", 0, MAX_LOGPROBS)
    max_tokens = _max_tokens(fields, "max_tokens", limits)
    return _ask(
        fields,
        limits,
        UNSUPPORTED_COMPLETION,
        endpoint=COMPLETIONS,
        model=model,
        prompts=prompts,
        messages=None,
        logprobs=logprobs,
        max_tokens=COMPLETION_MAX_TOKENS if max_tokens is None else max_tokens,
    )


def parse_chat(body: dict[str, object], limits: Limits) -> Ask:
    """A /v1/chat/completions body; `max_completion_tokens` is the newer name of `max_tokens`."""
    fields = Fields(body)
    model = check_model(fields, limits)
    messages = parse_messages(fields, limits)
    wants_logprobs = fields.flag("logprobs")
    top_logprobs = fields.integer("top_logprobs", 0, MAX_LOGPROBS)
    if top_logprobs and not wants_logprobs:
        raise ApiError(
            "expected logprobs true beside top_logprobs, got it false or missing: send both",
            param="top_logprobs",
        )
    old_name = _max_tokens(fields, "max_tokens", limits)
    new_name = _max_tokens(fields, "max_completion_tokens", limits)
    if None not in (old_name, new_name) and old_name != new_name:
        raise ApiError(
            f"expected one limit, got max_tokens {old_name} and max_completion_tokens {new_name}: send one",
            param="max_completion_tokens",
        )
    return _ask(
        fields,
        limits,
        UNSUPPORTED_CHAT,
        endpoint=CHAT,
        model=model,
        prompts=None,
        messages=messages,
        logprobs=(top_logprobs or 0) if wants_logprobs else None,
        max_tokens=new_name if old_name is None else old_name,
    )


def check_model(fields: Fields, limits: Limits, *, required: bool = True) -> str:
    """The model asked for; ApiError 404 when this server has another one."""
    model = fields.text("model")
    known = ", ".join(limits.models)
    if model is None and required:
        raise ApiError(f"expected 'model' as a string, got nothing: send one of {known}", param="model")
    if model is not None and model not in limits.models:
        raise ApiError(
            f"expected a model out of {known}, got {describe(model)}: see /v1/models",
            status=404,
            param="model",
            code="model_not_found",
        )
    return model or limits.models[0]


def parse_messages(fields: Fields, limits: Limits) -> list[dict[str, str]]:
    """Chat messages as role and text; an array of text parts is joined by newlines, as vLLM does."""
    raw = fields.items("messages", limits.max_messages)
    if not raw:
        raise ApiError(
            "expected 'messages' with at least one message, got none: "
            'send [{"role": "user", "content": "..."}]',
            param="messages",
        )
    return [_message(item, f"messages.{index}") for index, item in enumerate(raw)]


def parse_token_ids(value: object, param: str, limits: Limits) -> list[int]:
    """A non-empty array of ids within the vocabulary, short enough for the context."""
    try:
        ids = msgspec.convert(value, list[int])
    except msgspec.ValidationError as error:
        raise expected(f"an array of token ids ({str(error)[:100]})", value, param) from error
    if not ids:
        raise expected("at least one token id", value, param)
    if min(ids) < 0 or max(ids) >= limits.vocab_size:
        bad = next(i for i in ids if not 0 <= i < limits.vocab_size)
        raise expected(f"token ids from 0 to {limits.vocab_size - 1}", bad, param)
    return ids


def _ask(
    fields: Fields,
    limits: Limits,
    unsupported: dict[str, tuple[object, ...]],
    *,
    endpoint: Endpoint,
    model: str,
    prompts: list[str | list[int]] | None,
    messages: list[dict[str, str]] | None,
    logprobs: int | None,
    max_tokens: int | None,
) -> Ask:
    """The fields that both endpoints share; refuses what is left."""
    temperature = fields.number("temperature", 0.0, MAX_TEMPERATURE)
    top_p = fields.number("top_p", 0.0, 1.0, above_low=True)
    top_k = fields.integer("top_k", -1, 1 << 31, "0 or -1 keeps all tokens") or 0
    seed = fields.integer("seed", -MAX_SEED - 1, MAX_SEED)
    stream = fields.flag("stream")
    include_usage, continuous_usage = _stream_options(fields, stream)
    ask = Ask(
        endpoint=endpoint,
        model=model,
        prompts=prompts,
        messages=messages,
        max_tokens=max_tokens,
        temperature=_resolved_temperature(temperature),
        top_k=top_k if 0 < top_k < limits.vocab_size else 0,
        top_p=1.0 if top_p is None else top_p,
        seed=seed,
        stop=_stops(fields, limits),
        stop_token_ids=_stop_token_ids(fields, limits),
        ignore_eos=fields.flag("ignore_eos"),
        logprobs=logprobs,
        stream=stream,
        include_usage=include_usage,
        continuous_usage=continuous_usage,
        return_token_ids=fields.flag("return_token_ids"),
    )
    # A label for the caller's own accounting: OpenAI's servers do not let it change an answer either.
    fields.text("user")
    fields.refuse_rest(unsupported)
    return ask


def _resolved_temperature(temperature: float | None) -> float:
    if temperature is None:
        return 1.0
    return 0.0 if temperature < GREEDY_BELOW else temperature


def _prompts(fields: Fields, limits: Limits) -> list[str | list[int]]:
    """The four forms: text, array of texts, token ids, array of token ids."""
    value = fields.take("prompt")
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list) or not value:
        raise expected(
            "text, token ids, or an array of either", value, "prompt", 'send "prompt": "some text"'
        )
    if not isinstance(value[0], str | list):
        return [parse_token_ids(value, "prompt", limits)]
    if len(value) > limits.max_prompts:
        raise expected(f"at most {limits.max_prompts} prompts", value, "prompt", "send several requests")
    prompts: list[str | list[int]] = []
    for index, item in enumerate(value):
        param = f"prompt.{index}"
        if isinstance(value[0], str) != isinstance(item, str):
            raise expected("texts only or token ids only", item, param)
        prompts.append(item if isinstance(item, str) else parse_token_ids(item, param, limits))
    return prompts


def _message(item: object, path: str) -> dict[str, str]:
    if not isinstance(item, dict):
        raise expected('an object like {"role": "user", "content": "..."}', item, path)
    fields = Fields(item, path=f"{path}.")
    role = fields.text("role")
    if role not in _ROLES:
        raise expected(f"a role out of {', '.join(_ROLES)}", role, fields.param("role"))
    content = fields.take("content")
    if isinstance(content, list):
        content = _joined_parts(content, fields.param("content"))
    if not isinstance(content, str):
        raise expected("text or an array of text parts", content, fields.param("content"))
    fields.refuse_rest(UNSUPPORTED_MESSAGE)
    return {"role": role, "content": content}


def _joined_parts(parts: list[object], path: str) -> str:
    texts: list[str] = []
    for index, part in enumerate(parts):
        where = f"{path}.{index}"
        if not isinstance(part, dict):
            raise expected("a text part", part, where)
        fields = Fields(part, path=f"{where}.")
        kind = fields.text("type")
        text = fields.text("text")
        if kind != "text" or text is None:
            raise expected('a part {"type": "text", "text": "..."}', kind, where, "only text is supported")
        fields.refuse_rest({})
        texts.append(text)
    return "\n".join(texts)


def _max_tokens(fields: Fields, name: str, limits: Limits) -> int | None:
    return fields.integer(
        name, 1, limits.max_model_len, f"prompt and output share {limits.max_model_len} tokens"
    )


def _stops(fields: Fields, limits: Limits) -> list[str]:
    value = fields.take("stop")
    if value is None:
        return []
    stops = value if isinstance(value, list) else [value]
    if len(stops) > limits.max_stops:
        raise expected(f"at most {limits.max_stops} stop strings", value, "stop")
    checked: list[str] = []
    for stop in stops:
        if not isinstance(stop, str) or not 0 < len(stop) <= limits.max_stop_chars:
            raise expected(f"stop strings of 1 to {limits.max_stop_chars} characters", stop, "stop")
        checked.append(stop)
    return checked


def _stop_token_ids(fields: Fields, limits: Limits) -> list[int]:
    ids = fields.items("stop_token_ids", limits.max_stop_token_ids)
    return parse_token_ids(ids, "stop_token_ids", limits) if ids else []


def _stream_options(fields: Fields, stream: bool) -> tuple[bool, bool]:
    options = fields.nested("stream_options")
    if options is None:
        return False, False
    if not stream:
        raise ApiError(
            "expected stream true beside stream_options, got it false or missing: leave one out",
            param="stream_options",
        )
    include_usage = options.flag("include_usage")
    continuous = options.flag("continuous_usage_stats")
    options.refuse_rest({"include_obfuscation": (False,)})
    if continuous and not include_usage:
        raise ApiError(
            "expected include_usage true beside continuous_usage_stats, got it false: send both",
            param="stream_options.continuous_usage_stats",
        )
    return include_usage, continuous
