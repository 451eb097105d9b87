"""One generation as its client sees it: engine rows in, pieces of text out.

Owns: detokenising, stop strings, the prompt as an echo shows it, what a finish means for the client. Refuses
to know: JSON, sockets, other choices. Invariants: one piece a token, in order, and exactly one of them (or
one more without a token) carries the finish; the texts joined are the answer's text; the token that ended a
request at EOS or a stop token counts as a token and has no text (unless told to include it); no stop string
ends the text of the first `min_tokens` tokens or begins in it; after the finish nothing more comes.

Usage: `piece = choice.push(token_row, engine_row_or_none)`.
"""

from __future__ import annotations

from dataclasses import dataclass

from firstdiff.engine.engine import EngineRequest
from firstdiff.engine.stop_strings import StopMatcher
from firstdiff.engine.tokenizer import IncrementalDetokenizer, Tokenizer
from firstdiff.tracing.records import EngineRequestRow, PromptLogprobsRow, TokenRow


@dataclass(frozen=True, slots=True)
class Piece:
    """One token of an answer; `token` is None only in a last piece that a token did not bring.

    `text_offset` counts characters of the answer before this token's own text, held-back ones included.
    `stop_reason` is the stop string or the stop token that ended the answer, None for EOS and length.
    """

    text: str
    token: TokenRow | None
    text_offset: int
    finish_reason: str | None = None
    stop_reason: str | int | None = None


@dataclass(frozen=True, slots=True)
class Echo:
    """The prompt as the answer repeats it; `offsets` are where each of its tokens begins, in characters."""

    text: str
    offsets: list[int]


def echo_of(tokenizer: Tokenizer, prompt_token_ids: list[int], text: str | None) -> Echo:
    """`text` is what the client sent, None where it sent ids: their text then, special tokens and all.

    A token that the tokenizer put before the client's text begins where that text does.
    """
    detokenizer = IncrementalDetokenizer(tokenizer, [], skip_special_tokens=False)
    starts: list[int] = []
    parts: list[str] = []
    num_chars = 0
    for token_id in prompt_token_ids:
        starts.append(num_chars)
        parts.append(detokenizer.push(token_id))
        num_chars += len(parts[-1])
    parts.append(detokenizer.finish())
    if text is None:
        text = "".join(parts)
    num_added = num_chars + len(parts[-1]) - len(text)
    return Echo(text, [max(0, start - num_added) for start in starts])


class Choice:
    """The state of one generation."""

    def __init__(
        self,
        index: int,
        request: EngineRequest,
        detokenizer: IncrementalDetokenizer,
        *,
        echo: Echo | None = None,
        include_stop: bool = False,
    ) -> None:
        self.index = index
        self.request = request
        self.echo = echo
        self.num_tokens = 0
        self.num_cached_tokens: int | None = None
        """Prompt tokens that the engine took from its cache; None until it said so."""
        self.prompt_logprobs: list[PromptLogprobsRow] = []
        self.is_finished = False
        self.finish_reason: str | None = None
        self.stop_reason: str | int | None = None
        self.text_offsets: list[int] = []
        """Of each token, as a Piece says."""
        self.has_incomplete_tail = False
        """Whether the text ends within a character, which shows as U+FFFD."""
        self._detokenizer = detokenizer
        self._include_stop = include_stop
        self._stops = StopMatcher(request.sampling.stop, include=include_stop)
        self._texts: list[str] = []
        self._num_chars = 0

    @property
    def text(self) -> str:
        """The answer so far, as given out."""
        return "".join(self._texts)

    def push(self, token: TokenRow, end: EngineRequestRow | None) -> Piece:
        """Take the next token; `end` is the engine's row of the request when this token is its last."""
        assert not self.is_finished
        self.num_tokens += 1
        offset = self._num_chars
        self.text_offsets.append(offset)
        sampling = self.request.sampling
        if end is not None and end.finish_reason == "stop":
            stop_reason = token.token_id if token.token_id in sampling.stop_token_ids else None
            text = self._detokenizer.push(token.token_id) if self._include_stop else ""
            self._num_chars += len(text)
            return self._finish(token, offset, "stop", stop_reason, self._stops.skip(text))
        delta = self._detokenizer.push(token.token_id)
        self._num_chars += len(delta)
        text, stop = self._watch(delta)
        if stop is None and end is not None:
            return self._finish(token, offset, end.finish_reason, None, text)
        if stop is not None:
            self.is_finished = True
            self.finish_reason, self.stop_reason = "stop", stop
        self._texts.append(text)
        return Piece(text, token, offset, None if stop is None else "stop", stop)

    def end(self, finish_reason: str) -> Piece:
        """Finish without a token: the request ended between tokens, or before the first."""
        assert not self.is_finished
        return self._finish(None, self._num_chars, finish_reason, None)

    def _finish(
        self,
        token: TokenRow | None,
        offset: int,
        finish_reason: str,
        stop_reason: str | int | None,
        text: str = "",
    ) -> Piece:
        rest = self._detokenizer.finish()
        self.has_incomplete_tail = bool(rest)
        self._num_chars += len(rest)
        more, stop = self._watch(rest)
        if stop is None:
            more += self._stops.finish()
        else:
            finish_reason, stop_reason = "stop", stop
        self.is_finished = True
        self.finish_reason, self.stop_reason = finish_reason, stop_reason
        self._texts.append(text + more)
        return Piece(text + more, token, offset, finish_reason, stop_reason)

    def _watch(self, delta: str) -> tuple[str, str | None]:
        if self.num_tokens <= self.request.sampling.min_tokens:
            return self._stops.skip(delta), None
        return self._stops.push(delta)
