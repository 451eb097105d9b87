"""OpenAI's answers, written: whole bodies and stream chunks.

Owns: the JSON shape of answers (OpenAI's, with vLLM's `token_ids`, `prompt_token_ids`, `stop_reason`).
Refuses to know: sockets, the engine. Invariants: one chunk a token; what is the same in all chunks of a
stream is encoded once; a log-probability is never null (-9999 stands for minus infinity, as in vLLM) and
the same number is written the same way everywhere.

Usage: `writer = AnswerWriter(ask, answer_id="cmpl-1", ...); data = writer.chunk(choice, piece)`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec
from msgspec import UNSET, UnsetType

from firstdiff.engine.choice import Choice, Piece
from firstdiff.engine.openai_api import Ask
from firstdiff.tracing.records import TokenRow

DONE = b"data: [DONE]\n\n"
LOWEST_LOGPROB = -9999.0

TokenBytes = Callable[[int], bytes]

_encode = msgspec.json.Encoder().encode


class PromptTokensDetails(msgspec.Struct, frozen=True):
    cached_tokens: int


class AnswerUsage(msgspec.Struct, frozen=True):
    """Token counts of all choices together; cached tokens only where the engine has said so."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails | UnsetType = UNSET


class TopLogprob(msgspec.Struct, frozen=True):
    token: str
    logprob: float
    bytes: list[int]


class ChatLogprob(msgspec.Struct, frozen=True):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct, frozen=True):
    content: list[ChatLogprob]
    refusal: None = None


class CompletionLogprobs(msgspec.Struct, frozen=True):
    text_offset: list[int]
    token_logprobs: list[float]
    tokens: list[str]
    top_logprobs: list[dict[str, float]]


class CompletionChoice(msgspec.Struct, frozen=True):
    """A choice of a completion, whole or one chunk of it."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str | None
    stop_reason: str | int | None
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


class ChatText(msgspec.Struct, frozen=True):
    """A message, or the part of one that a chunk brings; only the first part names the role."""

    content: str
    role: str | UnsetType = UNSET


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
        token_bytes: TokenBytes,
    ) -> None:
        self._ask = ask
        self._choices = choices
        self._token_bytes = token_bytes
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
        # The part of a chunk before its choice, encoded once: `{"id":...,` without the closing brace.
        self._chunk_head = b"data: " + _encode(self._head | {"object": chunk_kind})[:-1]

    def chunk(self, choice: Choice, piece: Piece) -> bytes:
        """One server-sent event for one piece."""
        is_first = piece.token.token_index == 0 if piece.token is not None else choice.num_tokens == 0
        ids_wanted = self._ask.return_token_ids
        prompt_ids = choice.request.prompt_token_ids if ids_wanted and is_first else UNSET
        tokens = [piece] if piece.token is not None else []
        token_ids = [piece.token.token_id for piece in tokens if piece.token] if ids_wanted else UNSET
        shown: CompletionChoice | ChatChunkChoice
        extra = b""
        if self._ask.is_chat:
            shown = ChatChunkChoice(
                index=choice.index,
                delta=ChatText(piece.text, role="assistant" if is_first else UNSET),
                logprobs=self._chat_logprobs(tokens),
                finish_reason=piece.finish_reason,
                stop_reason=piece.stop_reason,
                token_ids=token_ids,
            )
            if prompt_ids is not UNSET:
                extra = b',"prompt_token_ids":' + _encode(prompt_ids)
        else:
            shown = CompletionChoice(
                index=choice.index,
                text=piece.text,
                logprobs=self._completion_logprobs(tokens),
                finish_reason=piece.finish_reason,
                stop_reason=piece.stop_reason,
                token_ids=token_ids,
                prompt_token_ids=prompt_ids,
            )
        self._num_streamed_tokens += len(tokens)
        if self._ask.continuous_usage:
            extra += b',"usage":' + _encode(self._usage(self._num_streamed_tokens))
        elif self._ask.include_usage:
            extra += b',"usage":null'
        return b"".join((self._chunk_head, b',"choices":[', _encode(shown), b"]", extra, b"}\n\n"))

    def usage_chunk(self) -> bytes:
        """The event without choices that closes a stream whose client asked for usage."""
        return b"".join(
            (
                self._chunk_head,
                b',"choices":[],"usage":',
                _encode(self._usage(self._num_streamed_tokens)),
                b"}\n\n",
            )
        )

    def body(self, pieces: Sequence[Sequence[Piece]]) -> bytes:
        """The whole answer from all pieces of each choice."""
        choices = [
            self._whole(choice, its_pieces) for choice, its_pieces in zip(self._choices, pieces, strict=True)
        ]
        usage = self._usage(sum(choice.num_tokens for choice in self._choices))
        answer: dict[str, object] = {**self._head, "choices": choices, "usage": usage}
        if self._ask.is_chat and self._ask.return_token_ids:
            answer["prompt_token_ids"] = self._choices[0].request.prompt_token_ids
        return _encode(answer)

    def _whole(self, choice: Choice, pieces: Sequence[Piece]) -> CompletionChoice | ChatChoice:
        last = pieces[-1]
        tokens = [piece for piece in pieces if piece.token is not None]
        ids_wanted = self._ask.return_token_ids
        token_ids = [piece.token.token_id for piece in tokens if piece.token] if ids_wanted else UNSET
        if self._ask.is_chat:
            return ChatChoice(
                index=choice.index,
                message=ChatText(choice.text, role="assistant"),
                logprobs=self._chat_logprobs(tokens),
                finish_reason=last.finish_reason,
                stop_reason=last.stop_reason,
                token_ids=token_ids,
            )
        return CompletionChoice(
            index=choice.index,
            text=choice.text,
            logprobs=self._completion_logprobs(tokens),
            finish_reason=last.finish_reason,
            stop_reason=last.stop_reason,
            token_ids=token_ids,
            prompt_token_ids=choice.request.prompt_token_ids if ids_wanted else UNSET,
        )

    def _usage(self, completion: int) -> AnswerUsage:
        prompt = sum(len(choice.request.prompt_token_ids) for choice in self._choices)
        cached = [choice.num_cached_tokens for choice in self._choices]
        known = [count for count in cached if count is not None]
        details = PromptTokensDetails(sum(known)) if len(known) == len(cached) else UNSET
        return AnswerUsage(prompt, completion, prompt + completion, details)

    def _chat_logprobs(self, pieces: Sequence[Piece]) -> ChatLogprobs | None:
        if self._ask.logprobs is None:
            return None
        return ChatLogprobs([self._chat_logprob(piece.token) for piece in pieces if piece.token])

    def _chat_logprob(self, token: TokenRow) -> ChatLogprob:
        top = [
            TopLogprob(self._shown(token_id), _finite(logprob), list(self._token_bytes(token_id)))
            for token_id, logprob in token.top_logprobs[: self._ask.logprobs]
        ]
        return ChatLogprob(
            self._shown(token.token_id),
            _finite(token.logprob),
            list(self._token_bytes(token.token_id)),
            top,
        )

    def _completion_logprobs(self, pieces: Sequence[Piece]) -> CompletionLogprobs | None:
        if self._ask.logprobs is None:
            return None
        tokens = [(piece.text_offset, piece.token) for piece in pieces if piece.token]
        return CompletionLogprobs(
            text_offset=[offset for offset, _ in tokens],
            token_logprobs=[_finite(token.logprob) for _, token in tokens],
            tokens=[self._shown(token.token_id) for _, token in tokens],
            top_logprobs=[self._top_by_text(token) for _, token in tokens],
        )

    def _shown(self, token_id: int) -> str:
        return shown_token(self._token_bytes(token_id))

    def _top_by_text(self, token: TokenRow) -> dict[str, float]:
        """The alternatives and the token itself; of ids with one text the likeliest counts."""
        top: dict[str, float] = {}
        for token_id, logprob in token.top_logprobs:
            top.setdefault(self._shown(token_id), _finite(logprob))
        top.setdefault(self._shown(token.token_id), _finite(token.logprob))
        return top


def error_event(envelope: dict[str, dict[str, str | None]]) -> bytes:
    """An error inside a stream whose status line is out already."""
    return b"data: " + _encode(envelope) + b"\n\n"


def shown_token(token: bytes) -> str:
    """A token's text; for part of a character its bytes in OpenAI's notation, so that parts stay distinct."""
    try:
        return token.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token)


def _finite(logprob: float | None) -> float:
    assert logprob is not None
    return max(logprob, LOWEST_LOGPROB)
