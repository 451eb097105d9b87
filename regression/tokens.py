"""Two replies to one request: where they part, and how far their log-probabilities lie apart before that.

Owns: the alignment of two RequestRows. Refuses to know: noise floors, statistics, whole Runs.
Invariants: only tokens after equal tokens are compared, up to and including the first that differs: what
follows it answers another prompt; hostile rows (lists of unequal length, absurd numbers) give fewer facts,
never an exception; everything is symmetric up to swapping the sides.

Usage: `diff = diff_replies(base_row, candidate_row); diff.divergence`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from firstdiff.regression.verdict import Divergence
from firstdiff.tracing.records import RequestRow

Unit = Literal["token", "token text", "character"]
_BEFORE_CHARS = 32
_MAX_TEXT_CHARS = 200


@dataclass(frozen=True, slots=True)
class ReplyDiff:
    """What comparing two replies gave.

    `shift` is the largest difference (nats) between the log-probabilities that the two sides gave to one
    token after the same tokens, over `num_shift_tokens` tokens; None when log-probabilities are missing.
    `other`: replies of equal tokens whose text or finish reason differ, in words.
    """

    case_id: str
    repeat_index: int
    num_tokens: int
    divergence: Divergence | None
    shift: float | None
    num_shift_tokens: int
    other: str | None


@dataclass(frozen=True, slots=True)
class _Reply:
    """One side in the unit of comparison; `logprobs` None unless there is one for each."""

    items: Sequence[int | str]
    texts: Sequence[str] | None
    logprobs: Sequence[float] | None
    tops: Sequence[Sequence[tuple[str, float]]] | None

    def text(self, position: int) -> str | None:
        if position >= len(self.items):
            return None
        if self.texts is not None:
            return self.texts[position][:_MAX_TEXT_CHARS]
        item = self.items[position]
        return item if isinstance(item, str) else ""

    def logprob_of(self, position: int, text: str | None) -> tuple[float | None, bool]:
        """What this side gave to a token's text at `position`, and whether that is only an upper bound."""
        if self.tops is None or text is None or position >= len(self.tops) or not self.tops[position]:
            return None, False
        for candidate, logprob in self.tops[position]:
            if candidate == text:
                return logprob, False
        return min(logprob for _, logprob in self.tops[position]), True


def unit_of(base: RequestRow, candidate: RequestRow) -> Unit:
    """The finest unit that both replies give."""
    if base.token_ids is not None and candidate.token_ids is not None:
        return "token"
    if base.token_texts is not None and candidate.token_texts is not None:
        return "token text"
    return "character"


def diff_replies(base: RequestRow, candidate: RequestRow) -> ReplyDiff:
    """Compare two replies to one case, both of outcome ok."""
    unit = unit_of(base, candidate)
    one, other = _reply(base, unit), _reply(candidate, unit)
    length = min(len(one.items), len(other.items))
    position = next((i for i in range(length) if one.items[i] != other.items[i]), length)
    parts = position < max(len(one.items), len(other.items))
    shifts = _shifts(one, other, position, parts=parts)
    shift = max(shifts, default=None)
    divergence = None
    if parts:
        divergence = _divergence(base, candidate, unit, one, other, position, shift)
    return ReplyDiff(
        case_id=base.case_id,
        repeat_index=base.repeat_index,
        num_tokens=position,
        divergence=divergence,
        shift=shift,
        num_shift_tokens=len(shifts),
        other=None if parts else _other(base, candidate),
    )


def _reply(row: RequestRow, unit: Unit) -> _Reply:
    if unit == "character":
        return _Reply(row.text, row.text, None, None)
    items = row.token_ids if unit == "token" else row.token_texts
    assert items is not None
    return _Reply(
        items,
        row.token_texts if row.token_texts is not None and len(row.token_texts) == len(items) else None,
        row.logprobs if row.logprobs is not None and len(row.logprobs) == len(items) else None,
        row.top_logprobs if row.top_logprobs is not None and len(row.top_logprobs) == len(items) else None,
    )


def _shifts(one: _Reply, other: _Reply, position: int, *, parts: bool) -> list[float]:
    if one.logprobs is None or other.logprobs is None:
        return []
    shifts = [abs(one.logprobs[i] - other.logprobs[i]) for i in range(position)]
    # Where they part, each side's own token, as far as the other side said what it thought of it.
    if parts and one.text(position) != other.text(position):
        for mine, theirs in ((one, other), (other, one)):
            text = mine.text(position)
            if text is None or mine.logprobs is None:
                continue
            logprob, is_bound = theirs.logprob_of(position, text)
            if logprob is not None:
                moved = mine.logprobs[position] - logprob
                shifts.append(max(0.0, moved) if is_bound else abs(moved))
    return [shift for shift in shifts if math.isfinite(shift)]


def _gap(mine: _Reply, other: _Reply, position: int) -> tuple[float | None, bool]:
    """How much likelier a side thought its own token than the other side's, and whether it is a bound."""
    mine_text, text = mine.text(position), other.text(position)
    if mine.logprobs is None or mine_text is None or text is None or mine_text == text:
        return None, False
    logprob, is_bound = mine.logprob_of(position, text)
    if logprob is None:
        return None, False
    gap = mine.logprobs[position] - logprob
    if not math.isfinite(gap) or (is_bound and gap < 0):
        return None, False
    return gap, is_bound


def _divergence(
    base: RequestRow,
    candidate: RequestRow,
    unit: Unit,
    one: _Reply,
    other: _Reply,
    position: int,
    shift: float | None,
) -> Divergence:
    base_gap, base_is_bound = _gap(one, other, position)
    candidate_gap, candidate_is_bound = _gap(other, one, position)
    texts = one.texts if one.texts is not None else [] if unit == "token" else one.items
    before = "".join(str(text) for text in texts[max(0, position - _BEFORE_CHARS) : position])
    return Divergence(
        case_id=base.case_id,
        repeat_index=base.repeat_index,
        position=position,
        unit=unit,
        base_token_id=_id_at(base, unit, position),
        candidate_token_id=_id_at(candidate, unit, position),
        base_text=one.text(position),
        candidate_text=other.text(position),
        base_gap=_tidy(base_gap),
        candidate_gap=_tidy(candidate_gap),
        base_gap_at_least=base_is_bound,
        candidate_gap_at_least=candidate_is_bound,
        before=before[-_BEFORE_CHARS:],
        shift=_tidy(shift),
    )


def _id_at(row: RequestRow, unit: Unit, position: int) -> int | None:
    if unit != "token" or row.token_ids is None or position >= len(row.token_ids):
        return None
    return row.token_ids[position]


def _other(base: RequestRow, candidate: RequestRow) -> str | None:
    if base.text != candidate.text:
        return "text"
    if base.finish_reason != candidate.finish_reason:
        return "finish reason"
    return None


def _tidy(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.6g}")
