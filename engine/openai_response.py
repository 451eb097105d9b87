"""OpenAI's answers, written: whole bodies and stream chunks.

Owns: the JSON shape of answers (OpenAI's, with vLLM's `token_ids`, `prompt_token_ids`, `stop_reason`,
`prompt_logprobs`). Refuses to know: sockets, the engine. Invariants: one chunk a token; what is the same in
all chunks of a stream is encoded once; an echoed prompt is in the first chunk of its choice; the chunks of a
choice, joined, are its whole answer.

Usage: `writer = AnswerWriter(ask, answer_id="cmpl-1", ...); data = writer.chunk(choice, piece)`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec
from msgspec import UNSET, UnsetType

from firstdiff.engine.choice import Choice, Piece
from firstdiff.engine.openai_api import Ask
from firstdiff.engine.openai_logprobs import (
    ChatLogprobs,
    CompletionLogprobs,
    LogprobWriter,
    PromptLogprobs,
    prompt_tokens,
    scored_token,
    show_prompt,
)
from firstdiff.engine.tokenizer import Tokenizer
from firstdiff.engine.tools import CallDelta, Said, ToolParser

DONE = b"data: [DONE]\n\n"

_encode = msgspec.json.Encoder().encode


class PromptTokensDetails(msgspec.Struct, frozen=True):
    cached_tokens: int


class AnswerUsage(msgspec.Struct, frozen=True):
    """Token counts of all choices together, a prompt counted once; cached tokens where the engine said so."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails | UnsetType = UNSET

    @property
    def cached_tokens(self) -> int | None:
        details = self.prompt_tokens_details
        return details.cached_tokens if isinstance(details, PromptTokensDetails) else None


class CompletionChoice(msgspec.Struct, frozen=True):
    """A choice of a completion, whole or one chunk of it."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str | None
    stop_reason: str | int | None
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class CalledFunction(msgspec.Struct, frozen=True):
    arguments: str
    name: str | UnsetType = UNSET


class ToolCall(msgspec.Struct, frozen=True):
    """A call, whole or the part of it that a chunk brings; parts have an index, the first of them a name."""

    function: CalledFunction
    id: str | UnsetType = UNSET
    type: str | UnsetType = UNSET
    index: int | UnsetType = UNSET


class ChatText(msgspec.Struct, frozen=True):
    """A message, or the part of one that a chunk brings; only the first part names the role."""

    content: str | UnsetType | None = UNSET
    role: str | UnsetType = UNSET
    tool_calls: list[ToolCall] | UnsetType = UNSET


class ChatChoice(msgspec.Struct, frozen=True):
    index: int
    message: ChatText
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    stop_reason: str | int | None
    token_ids: list[int] | UnsetType = UNSET


class ChatChunkChoice(msgspec.Struct, frozen=True):
    index: int
    delta: ChatText
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    stop_reason: str | int | None
    token_ids: list[int] | UnsetType = UNSET


class AnswerWriter:
    """Writes one answer; whole with `body`, or in chunks with `chunk` and `usage_chunk`."""

    def __init__(
        self,
        ask: Ask,
        choices: Sequence[Choice],
        *,
        answer_id: str,
        created_unix_s: int,
        fingerprint: str,
        tokenizer: Tokenizer,
        make_call_id: Callable[[], str],
    ) -> None:
        self._ask = ask
        self._choices = choices
        self._tokenizer = tokenizer
        self._logprobs = LogprobWriter(tokenizer.token_bytes, top=ask.logprobs or 0)
        self._parsers: dict[int, ToolParser] = {}
        for choice in choices:
            parser = ask.tools.parser(make_call_id) if ask.tools is not None else None
            if parser is not None:
                self._parsers[choice.index] = parser
        self._have_called: set[int] = set()
        kind = "chat.completion" if ask.is_chat else "text_completion"
        chunk_kind = "chat.completion.chunk" if ask.is_chat else "text_completion"
        self._head = {
            "id": answer_id,
            "object": kind,
            "created": created_unix_s,
            "model": ask.model,
            "system_fingerprint": fingerprint,
        }
        self._num_streamed_tokens = 0
        self.told_usage: AnswerUsage | None = None
        """What the last `body` or `usage_chunk` said."""
        # The part of a chunk before its choice, encoded once: `{"id":...,` without the closing brace.
        self._chunk_head = b"data: " + _encode(self._head | {"object": chunk_kind})[:-1]

    def chunk(self, choice: Choice, piece: Piece) -> bytes:
        """One server-sent event for one piece."""
        is_first = piece.token.token_index == 0 if piece.token is not None else choice.num_tokens == 0
        ids_wanted = self._ask.return_token_ids
        prompt_ids = choice.request.prompt_token_ids if ids_wanted and is_first else UNSET
        token_ids = _token_ids([piece]) if ids_wanted else UNSET
        shown: CompletionChoice | ChatChunkChoice
        extra = b""
        if self._ask.is_chat:
            delta = self._delta(choice, piece, is_first=is_first)
            shown = ChatChunkChoice(
                index=choice.index,
                delta=delta,
                logprobs=self._chat_logprobs([piece]),
                finish_reason=self._finish_reason(choice, piece),
                stop_reason=piece.stop_reason,
                token_ids=token_ids,
            )
            if prompt_ids is not UNSET:
                extra = b',"prompt_token_ids":' + _encode(prompt_ids)
        else:
            echo = choice.echo.text if choice.echo is not None and is_first else ""
            shown = CompletionChoice(
                index=choice.index,
                text=echo + piece.text,
                logprobs=self._completion_logprobs(choice, [piece], with_prompt=is_first),
                finish_reason=piece.finish_reason,
                stop_reason=piece.stop_reason,
                token_ids=token_ids,
                prompt_token_ids=prompt_ids,
            )
        self._num_streamed_tokens += piece.token is not None
        if self._ask.continuous_usage:
            extra += b',"usage":' + _encode(self._usage(self._num_streamed_tokens))
        elif self._ask.include_usage:
            extra += b',"usage":null'
        return b"".join((self._chunk_head, b',"choices":[', _encode(shown), b"]", extra, b"}\n\n"))

    def usage_chunk(self) -> bytes:
        """The event without choices that closes a stream whose client asked for usage."""
        self.told_usage = self._usage(self._num_streamed_tokens)
        return b"".join((self._chunk_head, b',"choices":[],"usage":', _encode(self.told_usage), b"}\n\n"))

    def body(self, pieces: Sequence[Sequence[Piece]]) -> bytes:
        """The whole answer from all pieces of each choice."""
        choices = [
            self._whole(choice, its_pieces) for choice, its_pieces in zip(self._choices, pieces, strict=True)
        ]
        usage = self.told_usage = self._usage(sum(choice.num_tokens for choice in self._choices))
        answer: dict[str, object] = {**self._head, "choices": choices, "usage": usage}
        if self._ask.is_chat:
            first = self._choices[0]
            if self._ask.return_token_ids:
                answer["prompt_token_ids"] = first.request.prompt_token_ids
            prompt_logprobs = self._prompt_logprobs(first)
            if prompt_logprobs is not UNSET:
                answer["prompt_logprobs"] = prompt_logprobs
        return _encode(answer)

    def _whole(self, choice: Choice, pieces: Sequence[Piece]) -> CompletionChoice | ChatChoice:
        last = pieces[-1]
        token_ids = _token_ids(pieces) if self._ask.return_token_ids else UNSET
        if self._ask.is_chat:
            message = self._message(choice)
            return ChatChoice(
                index=choice.index,
                message=message,
                logprobs=self._chat_logprobs(pieces),
                finish_reason=self._finish_reason(choice, last),
                stop_reason=last.stop_reason,
                token_ids=token_ids,
            )
        return CompletionChoice(
            index=choice.index,
            text=(choice.echo.text if choice.echo is not None else "") + choice.text,
            logprobs=self._completion_logprobs(choice, pieces, with_prompt=True),
            finish_reason=last.finish_reason,
            stop_reason=last.stop_reason,
            token_ids=token_ids,
            prompt_token_ids=choice.request.prompt_token_ids if self._ask.return_token_ids else UNSET,
            prompt_logprobs=self._prompt_logprobs(choice),
        )

    def _message(self, choice: Choice) -> ChatText:
        parser = self._parsers.get(choice.index)
        if parser is None:
            return ChatText(choice.text, role="assistant")
        said = [parser.push(choice.text), parser.finish()]
        calls = [delta for one in said for delta in one.calls]
        content = "".join(one.content for one in said)
        if not calls:
            return ChatText(content, role="assistant")
        self._have_called.add(choice.index)
        return ChatText(content or None, role="assistant", tool_calls=[_call(delta) for delta in calls])

    def _delta(self, choice: Choice, piece: Piece, *, is_first: bool) -> ChatText:
        role = "assistant" if is_first else UNSET
        parser = self._parsers.get(choice.index)
        if parser is None:
            return ChatText(piece.text, role=role)
        said = parser.push(piece.text)
        if piece.finish_reason is not None:
            rest = parser.finish()
            said = Said(said.content + rest.content, said.calls + rest.calls)
        if not said.calls:
            return ChatText(said.content, role=role)
        self._have_called.add(choice.index)
        calls = [_call(delta, index=delta.index) for delta in said.calls]
        return ChatText(said.content or UNSET, role=role, tool_calls=calls)

    def _finish_reason(self, choice: Choice, piece: Piece) -> str | None:
        is_call = piece.finish_reason == "stop" and choice.index in self._have_called
        return "tool_calls" if is_call else piece.finish_reason

    def _usage(self, completion: int) -> AnswerUsage:
        firsts = [choice for choice in self._choices if choice.index % self._ask.n == 0]
        prompt = sum(len(choice.request.prompt_token_ids) for choice in firsts)
        cached = [choice.num_cached_tokens for choice in firsts]
        known = [count for count in cached if count is not None]
        details = PromptTokensDetails(sum(known)) if len(known) == len(cached) else UNSET
        return AnswerUsage(prompt, completion, prompt + completion, details)

    def _chat_logprobs(self, pieces: Sequence[Piece]) -> ChatLogprobs | None:
        if self._ask.logprobs is None:
            return None
        return self._logprobs.chat(piece.token for piece in pieces if piece.token)

    def _completion_logprobs(
        self, choice: Choice, pieces: Sequence[Piece], *, with_prompt: bool
    ) -> CompletionLogprobs | None:
        """Of the prompt too where it is echoed, its entries first."""
        if self._ask.logprobs is None:
            return None
        echo = choice.echo
        rows = [(piece.text_offset, piece.token) for piece in pieces if piece.token]
        ids = [token.token_id for _, token in rows]
        scored = [*map(scored_token, (token for _, token in rows))]
        if echo is None:
            return self._logprobs.completion(scored, ids, [offset for offset, _ in rows])
        offsets = [len(echo.text) + offset for offset, _ in rows]
        if not with_prompt:
            return self._logprobs.completion(scored, ids, offsets)
        prompt_ids = choice.request.prompt_token_ids
        prompt = prompt_tokens(prompt_ids, choice.prompt_logprobs)
        return self._logprobs.completion([*prompt, *scored], [*prompt_ids, *ids], echo.offsets + offsets)

    def _prompt_logprobs(self, choice: Choice) -> PromptLogprobs | UnsetType:
        wish = self._ask.wish
        if wish.prompt_logprobs is None:
            return UNSET
        return show_prompt(
            prompt_tokens(choice.request.prompt_token_ids, choice.prompt_logprobs),
            shown=wish.prompt_logprobs,
            computed=wish.template.prompt_logprobs or 0,
            token_text=self._tokenizer.token_text,
        )


def error_event(envelope: dict[str, dict[str, str | None]]) -> bytes:
    """An error inside a stream whose status line is out already."""
    return b"data: " + _encode(envelope) + b"\n\n"


def _token_ids(pieces: Sequence[Piece]) -> list[int]:
    return [piece.token.token_id for piece in pieces if piece.token]


def _call(delta: CallDelta, *, index: int | UnsetType = UNSET) -> ToolCall:
    function = CalledFunction(delta.arguments, name=UNSET if delta.name is None else delta.name)
    if delta.call_id is None:
        return ToolCall(function, index=index)
    return ToolCall(function, id=delta.call_id, type="function", index=index)
