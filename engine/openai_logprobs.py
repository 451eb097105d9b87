"""Log-probabilities as answers show them: OpenAI's two shapes, and vLLM's of a prompt.

Owns: those shapes and the text of a token in them. Refuses to know: whose answer it is, streams. Invariants:
a log-probability is never null where there is one (-9999 stands for minus infinity, as in vLLM), and the
number beside a token is bit by bit the one among its alternatives; a rank is given only where it was seen.

Usage: `writer = LogprobWriter(tokenizer.token_bytes, top=5); shown = writer.completion(rows, offsets)`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import msgspec

from firstdiff.tracing.records import PromptLogprobsRow, TokenRow

LOWEST_LOGPROB = -9999.0

TokenBytes = Callable[[int], bytes]
Alternatives = Sequence[tuple[int, float]]


class Scored(NamedTuple):
    """A token with its log-probability and the alternatives, likeliest first."""

    token_id: int
    logprob: float
    top: Alternatives


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
    """Lists of equal length; None only at the first token of an echoed prompt."""

    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class PromptLogprob(msgspec.Struct, frozen=True, omit_defaults=True):
    """One alternative at a prompt's position; `rank` 1 is the likeliest, absent where it is not known."""

    logprob: float
    decoded_token: str
    rank: int | None = None


PromptLogprobs = list[dict[str, PromptLogprob] | None]


class LogprobWriter:
    """Shows at most `top` alternatives a token."""

    def __init__(self, token_bytes: TokenBytes, *, top: int) -> None:
        self._token_bytes = token_bytes
        self._top = top

    def chat(self, tokens: Iterable[TokenRow]) -> ChatLogprobs:
        return ChatLogprobs([self._chat_token(scored_token(token)) for token in tokens])

    def completion(
        self, tokens: Sequence[Scored | None], ids: Sequence[int], offsets: list[int]
    ) -> CompletionLogprobs:
        """One entry a token; None in `tokens` where it has no log-probability, whose id `ids` has."""
        return CompletionLogprobs(
            text_offset=offsets,
            token_logprobs=[finite(token.logprob) if token else None for token in tokens],
            tokens=[self._shown(token_id) for token_id in ids],
            top_logprobs=[self._by_text(token) if token else None for token in tokens],
        )

    def _chat_token(self, token: Scored) -> ChatLogprob:
        alternatives = _alternatives(token, self._top)
        top = [
            TopLogprob(self._shown(token_id), logprob, list(self._token_bytes(token_id)))
            for token_id, logprob in alternatives
        ]
        return ChatLogprob(
            self._shown(token.token_id), finite(token.logprob), list(self._token_bytes(token.token_id)), top
        )

    def _by_text(self, token: Scored) -> dict[str, float]:
        """The alternatives and the token itself; of ids with one text the likeliest counts."""
        top: dict[str, float] = {}
        for token_id, logprob in _alternatives(token, self._top):
            top.setdefault(self._shown(token_id), logprob)
        top.setdefault(self._shown(token.token_id), finite(token.logprob))
        return top

    def _shown(self, token_id: int) -> str:
        return shown_token(self._token_bytes(token_id))


def prompt_tokens(prompt_token_ids: Sequence[int], rows: Iterable[PromptLogprobsRow]) -> list[Scored | None]:
    """One entry a prompt token: None where no log-probability was computed."""
    entries: list[Scored | None] = []
    for row in rows:
        if not entries:
            entries = [None] * row.start
        assert len(entries) == row.start
        for offset, (logprob, top) in enumerate(zip(row.logprobs, row.top_logprobs, strict=True)):
            entries.append(Scored(prompt_token_ids[row.start + offset], logprob, top))
    # A prompt of one token has none to show, and one that was aborted before its end only the first ones.
    return entries + [None] * (len(prompt_token_ids) - len(entries))


def show_prompt(
    tokens: Sequence[Scored | None], *, shown: int, computed: int, token_text: Callable[[int], str]
) -> PromptLogprobs:
    """vLLM's `prompt_logprobs`: by token id, the token itself and `shown` alternatives of `computed`."""
    return [
        None if token is None else _prompt_entry(token, shown=shown, computed=computed, token_text=token_text)
        for token in tokens
    ]


def scored_token(token: TokenRow) -> Scored:
    assert token.logprob is not None
    return Scored(token.token_id, token.logprob, token.top_logprobs)


def _alternatives(token: Scored, count: int) -> list[tuple[int, float]]:
    """The first `count` alternatives as finite numbers; the token's own is the very number beside it."""
    return [
        (token_id, finite(token.logprob if token_id == token.token_id else logprob))
        for token_id, logprob in token.top[:count]
    ]


def shown_token(token: bytes) -> str:
    """A token's text; for part of a character its bytes in OpenAI's notation, so that parts stay distinct."""
    try:
        return token.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token)


def finite(logprob: float) -> float:
    return max(logprob, LOWEST_LOGPROB)


def _prompt_entry(
    token: Scored, *, shown: int, computed: int, token_text: Callable[[int], str]
) -> dict[str, PromptLogprob]:
    ranks = {token_id: index + 1 for index, (token_id, _) in enumerate(token.top[:computed])}
    own = (token.token_id, finite(token.logprob))
    return {
        str(token_id): PromptLogprob(logprob, token_text(token_id), ranks.get(token_id))
        for token_id, logprob in dict([own, *_alternatives(token, shown)]).items()
    }
