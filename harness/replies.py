"""What an OpenAI-style endpoint answers, read strictly: reply bytes in, Chunks out.

Owns: the shapes of completion and chat replies, streamed or whole, with the token-id, log-probability and
usage extensions of the engines we know. Refuses to know: HTTP, SSE framing, who asked.
Invariants: shares no code with the server it judges; whatever the bytes are, the result is a Chunk or
ReplyError; numbers that come out fit into 64 bits, so that every Chunk can be written down.

Usage: `reader = ReplyReader(); chunk = reader.read(data, received_ns=stamp, headers_received_ns=first)`.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from firstdiff.tracing.records import Usage

Count = Annotated[int, msgspec.Meta(ge=0, lt=1 << 40)]


class ReplyError(ValueError):
    """A reply that is no answer: malformed, or an error that came in place of one."""


class Chunk(msgspec.Struct, frozen=True, kw_only=True):
    """One piece of an answer: a streamed chunk, or the whole of an answer that was not streamed.

    `received_ns` is when the read that completed it came off the socket. `num_tokens` is None where the
    endpoint does not say. `text` holds reasoning before content, in arrival order. `token_ids`,
    `token_texts`, `logprobs` and `top_logprobs` cover this chunk's tokens, None where not given.
    """

    received_ns: int
    headers_received_ns: int
    text: str = ""
    num_tokens: int | None = None
    token_ids: list[int] | None = None
    token_texts: list[str] | None = None
    logprobs: list[float] | None = None
    top_logprobs: list[list[tuple[str, float]]] | None = None
    prompt_token_ids: list[int] | None = None
    finish_reason: str | None = None
    usage: Usage | None = None

    @property
    def has_content(self) -> bool:
        """Whether it carries output: text, or a token that has no text (yet). A role alone is none."""
        return bool(self.text) or bool(self.num_tokens)


class _Top(msgspec.Struct, frozen=True):
    token: str
    logprob: float


class _TokenLogprob(msgspec.Struct, frozen=True):
    token: str
    logprob: float
    top_logprobs: list[_Top] | None = None
    id: Count | None = None


class _Logprobs(msgspec.Struct, frozen=True):
    """Chat fills `content`, completions the other three; llama.cpp fills `content` in both."""

    content: list[_TokenLogprob] | None = None
    tokens: list[str] | None = None
    token_logprobs: list[float | None] | None = None
    top_logprobs: list[dict[str, float] | None] | None = None


class _Message(msgspec.Struct, frozen=True):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None


class _Choice(msgspec.Struct, frozen=True):
    index: int = 0
    text: str | None = None
    delta: _Message | None = None
    message: _Message | None = None
    logprobs: _Logprobs | None = None
    finish_reason: str | None = None
    token_ids: list[Count] | None = None
    prompt_token_ids: list[Count] | None = None


class _PromptDetails(msgspec.Struct, frozen=True):
    cached_tokens: Count | None = None


class _Usage(msgspec.Struct, frozen=True):
    prompt_tokens: Count
    completion_tokens: Count = 0
    prompt_tokens_details: _PromptDetails | None = None


class _Reply(msgspec.Struct, frozen=True):
    choices: list[_Choice] | None = None
    usage: _Usage | None = None
    prompt_token_ids: list[Count] | None = None
    error: Any = None


class ReplyReader:
    """Reads the chunks of one answer; remembers only what the next chunk's token count needs."""

    def __init__(self) -> None:
        self._decoder = msgspec.json.Decoder(_Reply)
        self._num_tokens_before = 0
        self._usage_is_continuous = True
        self.finish_reason: str | None = None

    def read(self, data: bytes, *, received_ns: int, headers_received_ns: int) -> Chunk:
        """The chunk in one JSON document; ReplyError when it is none."""
        reply = self._decode(data)
        if reply.error is not None:
            raise ReplyError(f"the endpoint answered with an error: {error_text(reply.error)}")
        if reply.choices is None:
            raise ReplyError(f"expected a reply with choices, got {_start_of(data)}")
        if len(reply.choices) > 1 or any(choice.index != 0 for choice in reply.choices):
            raise ReplyError("expected one choice with index 0, got others: ask with n=1")
        choice = reply.choices[0] if reply.choices else _Choice()
        if choice.finish_reason is not None:
            self.finish_reason = choice.finish_reason
        message = choice.delta or choice.message or _Message()
        reasoning = message.reasoning_content or message.reasoning or ""
        texts, ids, logprobs, top = _tokens_of(choice.logprobs)
        ids = choice.token_ids if choice.token_ids is not None else ids
        usage = reply.usage
        text = reasoning + (choice.text or message.content or "")
        return Chunk(
            received_ns=received_ns,
            headers_received_ns=headers_received_ns,
            text=text,
            num_tokens=self._num_tokens(ids, texts, usage, has_text=bool(text)),
            token_ids=ids,
            token_texts=texts,
            logprobs=logprobs,
            top_logprobs=top,
            prompt_token_ids=choice.prompt_token_ids or reply.prompt_token_ids,
            finish_reason=choice.finish_reason,
            usage=_usage_of(reply.usage),
        )

    def _decode(self, data: bytes) -> _Reply:
        try:
            return self._decoder.decode(data)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise ReplyError(
                f"expected an OpenAI-style JSON reply, got {_start_of(data)} ({error})"
            ) from error

    def _num_tokens(
        self, ids: list[int] | None, texts: list[str] | None, usage: _Usage | None, *, has_text: bool
    ) -> int | None:
        """Ids say it exactly; else log-probabilities, one a token; else how far cumulative usage moved.

        Usage says it only where every chunk carries it: a total that comes once, at the end, belongs to
        the whole answer and not to the chunk it came with.
        """
        before = self._num_tokens_before
        named = ids if ids is not None else texts
        if usage is None and has_text:
            self._usage_is_continuous = False
        num_tokens: int | None = None
        if named is not None:
            num_tokens = len(named)
        elif usage is not None and self._usage_is_continuous:
            num_tokens = max(0, usage.completion_tokens - before)
        self._num_tokens_before = max(
            before + (num_tokens or 0), usage.completion_tokens if usage is not None else 0
        )
        return num_tokens


def _usage_of(usage: _Usage | None) -> Usage | None:
    if usage is None:
        return None
    details = usage.prompt_tokens_details
    return Usage(
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        cached_tokens=details.cached_tokens if details is not None else None,
    )


def error_text(error: object) -> str:
    """The message inside an error envelope, however it is wrapped, at most 500 characters."""
    if isinstance(error, dict):
        inner = error.get("error", error)
        message = inner.get("message", inner) if isinstance(inner, dict) else inner
        return str(message)[:500]
    return str(error)[:500]


def error_body_text(body: bytes) -> str:
    """The message in an error reply's body: an OpenAI envelope, or the start of whatever came."""
    try:
        return error_text(msgspec.json.decode(body))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return body[:500].decode("utf-8", "replace")


def _tokens_of(
    logprobs: _Logprobs | None,
) -> tuple[list[str] | None, list[int] | None, list[float] | None, list[list[tuple[str, float]]] | None]:
    """Token texts, ids, log-probabilities and alternatives; each None where absent or with holes."""
    if logprobs is None:
        return None, None, None, None
    if logprobs.content is not None:
        entries = logprobs.content
        ids = [entry.id for entry in entries if entry.id is not None]
        return (
            [entry.token for entry in entries],
            ids if entries and len(ids) == len(entries) else None,
            [entry.logprob for entry in entries],
            [[(top.token, top.logprob) for top in entry.top_logprobs or []] for entry in entries],
        )
    if logprobs.tokens is None:
        return None, None, None, None
    values = [value for value in logprobs.token_logprobs or [] if value is not None]
    top = [sorted((tops or {}).items(), key=lambda item: -item[1]) for tops in logprobs.top_logprobs or []]
    num_tokens = len(logprobs.tokens)
    return (
        logprobs.tokens,
        None,
        values if len(values) == num_tokens else None,
        top if len(top) == num_tokens else None,
    )


def _start_of(data: bytes) -> str:
    return repr(data[:80].decode("utf-8", "replace"))
