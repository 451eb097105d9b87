"""One generation as its client sees it: engine rows in, pieces of text out.

Owns: detokenising, stop strings, what a finish means for the client. Refuses to know: JSON, sockets,
other choices. Invariants: one piece a token, in order, and exactly one of them (or one more without a
token) carries the finish; the texts joined are the answer's text; the token that ended a request at EOS or
a stop token counts as a token and has no text; after the finish nothing more comes.

Usage: `piece = choice.push(token_row, engine_row_or_none)`.
"""

from __future__ import annotations

from dataclasses import dataclass

from firstdiff.engine.engine import EngineRequest
from firstdiff.engine.stop_strings import StopMatcher
from firstdiff.engine.tokenizer import IncrementalDetokenizer
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


class Choice:
    """The state of one generation."""

    def __init__(self, index: int, request: EngineRequest, detokenizer: IncrementalDetokenizer) -> None:
        self.index = index
        self.request = request
        self.num_tokens = 0
        self.num_cached_tokens: int | None = None
        """Prompt tokens that the engine took from its cache; None until it said so."""
        self.prompt_logprobs: list[PromptLogprobsRow] = []
        self.is_finished = False
        self._detokenizer = detokenizer
        self._stops = StopMatcher(request.sampling.stop)
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
        sampling = self.request.sampling
        if end is not None and end.finish_reason == "stop":
            stop_reason = token.token_id if token.token_id in sampling.stop_token_ids else None
            return self._finish(token, offset, "stop", stop_reason)
        delta = self._detokenizer.push(token.token_id)
        self._num_chars += len(delta)
        text, stop = self._stops.push(delta)
        if stop is None and end is not None:
            return self._finish(token, offset, end.finish_reason, None, text)
        if stop is not None:
            self.is_finished = True
        self._texts.append(text)
        return Piece(text, token, offset, None if stop is None else "stop", stop)

    def end(self, end: EngineRequestRow) -> Piece:
        """Finish without a token: the engine ended the request between tokens."""
        assert not self.is_finished
        return self._finish(None, self._num_chars, end.finish_reason, None)

    def _finish(
        self,
        token: TokenRow | None,
        offset: int,
        finish_reason: str,
        stop_reason: str | int | None,
        text: str = "",
    ) -> Piece:
        rest = self._detokenizer.finish()
        self._num_chars += len(rest)
        more, stop = self._stops.push(rest)
        if stop is None:
            more += self._stops.finish()
        else:
            finish_reason, stop_reason = "stop", stop
        self.is_finished = True
        self._texts.append(text + more)
        return Piece(text + more, token, offset, finish_reason, stop_reason)
