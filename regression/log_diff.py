"""Two token-ID logs, or a log and what came when it was asked again: where their answers part.

Owns: pairing rows, the first divergence of two answers with the text around it, how far log-probabilities lie
apart before it. Refuses to know: files, endpoints, noise. Invariants: times are not judged; what one side
leaves out is compared by what both have (text, digests), and the diff says when that is not enough.

Usage: `for pair in pair_rows(base.rows, candidate.rows): diff = diff_answers(*map(answer_of, pair))`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from firstdiff.regression.quoting import quoted, quoted_end
from firstdiff.tracing.log_content import ids_sha256, redacted, sampling_sha256
from firstdiff.tracing.records import LogContent, RequestRow, TokenLogRow

Outcome = Literal["equal", "different", "unknown"]
_ORDER: tuple[LogContent, ...] = ("full", "ids", "hash")
_AROUND_CHARS = 40


@dataclass(frozen=True, slots=True)
class Answer:
    """One side. `ids` None where there are none, `texts` of each token where known; what was cut off behind
    them is `is_cut`; `tops` are (text or id, log-probability)."""

    ids: Sequence[int] | None
    texts: Sequence[str] | None
    text: str | None
    logprobs: Sequence[float | None] | None
    finish_reason: str | None
    is_cut: bool = False
    digest: str | None = None


@dataclass(frozen=True, slots=True)
class AnswerDiff:
    """What comparing two answers gave; `position` counts tokens, or characters where no ids are.

    `shift` is the largest difference (nats) of the log-probabilities of a token after equal tokens.
    """

    outcome: Outcome
    position: int | None
    num_compared: int
    shift: float | None
    shift_position: int | None
    text: str


def pair_rows(
    base: Sequence[TokenLogRow], candidate: Sequence[TokenLogRow]
) -> tuple[list[tuple[TokenLogRow, TokenLogRow]], str]:
    """Rows that belong together, and by what: the request id where any is on both sides, else prompt and
    sampling (but for the seed of greedy ones), the first with the first."""
    ours = {row.request_id: row for row in reversed(base)}
    theirs = {row.request_id: row for row in reversed(candidate)}
    shared = [row for row in base if row.request_id in theirs and ours[row.request_id] is row]
    if shared:
        return [(row, theirs[row.request_id]) for row in shared], "request id"
    content = coarser(*(row.content for row in [*base, *candidate]))
    waiting: dict[str, list[TokenLogRow]] = {}
    for row in candidate:
        waiting.setdefault(_asked_key(row, content), []).append(row)
    pairs = []
    for row in base:
        same = waiting.get(_asked_key(row, content))
        if same:
            pairs.append((row, same.pop(0)))
    return pairs, "prompt and sampling"


def coarser(*contents: LogContent) -> LogContent:
    """What all of them have."""
    return _ORDER[max((_ORDER.index(content) for content in contents), default=0)]


def asked_alike(base: TokenLogRow, candidate: TokenLogRow) -> bool:
    """Whether both were asked with the same prompt and sampling, as far as both say; a cut one is another."""
    content = coarser(base.content, candidate.content)
    return _asked_key(base, content) == _asked_key(candidate, content)


def _asked_key(row: TokenLogRow, content: LogContent) -> str:
    row = redacted(row, content)
    if row.digests is not None:
        return f"{row.digests.prompt_sha256} {row.digests.sampling_sha256}"
    return f"{ids_sha256(row.prompt_token_ids)} {sampling_sha256(row.sampling)}"


def answer_of(row: TokenLogRow, content: LogContent | None = None) -> Answer:
    """A logged answer as its client got it, and no more of it than `content` has."""
    row = redacted(row, content or row.content)
    told = row.told
    num_told = len(row.token_ids) if told is None else min(told.num_tokens, len(row.token_ids))
    cut = {one.field for one in row.truncated}
    texts = None
    if row.content == "full" and "text" not in cut and len(row.text_offsets) >= num_told:
        ends = [*row.text_offsets[1:num_told], len(row.text)]
        texts = [row.text[start:end] for start, end in zip(row.text_offsets, ends, strict=False)]
    return Answer(
        ids=row.token_ids[:num_told] if row.digests is None else None,
        texts=texts,
        text=row.text if row.content == "full" and "text" not in cut else None,
        logprobs=row.logprobs[:num_told] if row.digests is None else None,
        finish_reason=told.finish_reason if told is not None else row.finish_reason,
        is_cut="token_ids" in cut,
        digest=None if row.digests is None else row.digests.tokens_sha256 + row.text_sha256,
    )


def answer_of_reply(row: RequestRow) -> Answer:
    """An answer as our client got it."""
    return Answer(
        ids=row.token_ids,
        texts=row.token_texts,
        text=row.text,
        logprobs=row.logprobs,
        finish_reason=row.finish_reason,
    )


def diff_answers(base: Answer, candidate: Answer) -> AnswerDiff:
    """Where they part: in tokens where both have ids, else in their text, else by digest."""
    if base.ids is not None and candidate.ids is not None:
        return _diff_tokens(base, candidate, base.ids, candidate.ids)
    if base.digest is not None and candidate.digest is not None:
        if base.digest == candidate.digest:
            return AnswerDiff("equal", None, 0, None, None, "")
        text = "their digests differ; where they part, a log of hashes does not say"
        return AnswerDiff("different", None, 0, None, None, text)
    if base.text is None or candidate.text is None:
        return AnswerDiff("unknown", None, 0, None, None, "the sides have neither ids nor texts in common")
    position = _first_difference(base.text, candidate.text)
    if position is None:
        return AnswerDiff("equal", None, len(base.text), None, None, "")
    text = f"their texts part at character {position}, {_around_text(base.text, candidate.text, position)}"
    return AnswerDiff("different", position, position, None, None, text)


def _diff_tokens(base: Answer, candidate: Answer, ours: Sequence[int], theirs: Sequence[int]) -> AnswerDiff:
    position = _first_difference(ours, theirs)
    is_cut = base.is_cut or candidate.is_cut
    shortest = min(len(ours), len(theirs))
    if position == shortest and is_cut:
        # Only what was cut off is missing.
        position = None
    num_equal = shortest if position is None else position
    shift, shift_position = _shift(base, candidate, num_equal)
    if position is not None:
        text = f"they part at token {position}: {_token(base, position)} and {_token(candidate, position)}"
        text += f", after {quoted_end(_before(base, candidate, position), _AROUND_CHARS)}"
        return AnswerDiff("different", position, num_equal, shift, shift_position, text)
    if is_cut:
        text = f"equal in the {num_equal} tokens that were kept; the rest was cut"
        return AnswerDiff("unknown", None, num_equal, shift, shift_position, text)
    text = ""
    if base.text is not None and candidate.text is not None and base.text != candidate.text:
        place = _first_difference(base.text, candidate.text) or 0
        around = _around_text(base.text, candidate.text, place)
        text = f"the same tokens have other texts from character {place}, {around}"
    elif base.finish_reason != candidate.finish_reason:
        text = f"they end for other reasons: {base.finish_reason} and {candidate.finish_reason}"
    return AnswerDiff("different" if text else "equal", None, num_equal, shift, shift_position, text)


def _first_difference(one: Sequence[object], other: Sequence[object]) -> int | None:
    length = min(len(one), len(other))
    position = next((i for i in range(length) if one[i] != other[i]), length)
    return None if position == max(len(one), len(other)) else position


def _shift(base: Answer, candidate: Answer, num_equal: int) -> tuple[float | None, int | None]:
    shifts = list(_shifts(base, candidate, num_equal))
    if not shifts:
        return None, None
    largest, position = max(shifts, key=lambda item: item[0])
    return largest, position


def _shifts(base: Answer, candidate: Answer, num_equal: int) -> Iterator[tuple[float, int]]:
    pairs = zip(base.logprobs or (), candidate.logprobs or (), strict=False)
    for position, (one, other) in enumerate(pairs):
        if position >= num_equal:
            return
        if one is not None and other is not None and math.isfinite(one - other):
            yield abs(one - other), position


def _token(answer: Answer, position: int) -> str:
    assert answer.ids is not None
    if position >= len(answer.ids):
        return f"the end ({answer.finish_reason})"
    text = ""
    if answer.texts is not None and position < len(answer.texts):
        text = f" {quoted(answer.texts[position])}"
    logprob = answer.logprobs[position] if answer.logprobs and position < len(answer.logprobs) else None
    likely = f" ({logprob:.3f})" if logprob is not None else ""
    return f"{answer.ids[position]}{text}{likely}"


def _before(base: Answer, candidate: Answer, position: int) -> str:
    texts = base.texts if base.texts is not None else candidate.texts
    if texts is not None:
        return "".join(texts[:position])
    ids = base.ids or ()
    return " ".join(map(str, ids[max(0, position - 8) : position]))


def _around_text(one: str, other: str, position: int) -> str:
    before = quoted_end(one[:position], _AROUND_CHARS)
    return f"{quoted(one[position:])} and {quoted(other[position:])}, after {before}"
