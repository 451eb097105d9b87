"""A logged answer against what came when it was asked again: forced to the same tokens, or free-running.

Owns: when such an answer counts as another. Refuses to know: endpoints, how it was asked. Invariants: pure;
below the tolerance a difference of log-probabilities is numerical noise, and tokens that part there are a
tie: unknown, not different.

Usage: `diff = judge_forced(row, reply, tolerance=0.05, is_greedy=True, has_logprobs=True)`.
"""

from __future__ import annotations

from dataclasses import replace

from firstdiff.regression.log_diff import Answer, AnswerDiff, answer_of, answer_of_reply, diff_answers
from firstdiff.regression.quoting import quoted, quoted_end
from firstdiff.tracing.records import RequestRow, TokenLogRow

_AROUND_CHARS = 40


def judge_forced(
    row: TokenLogRow, reply: RequestRow, *, tolerance: float, is_greedy: bool, has_logprobs: bool
) -> AnswerDiff:
    """A reply that was made to say the logged tokens: the first whose log-probability moved by more than
    `tolerance` nats, or, where the log was greedy, that the endpoint would not have chosen.

    `has_logprobs`: the logged ones are of the same distribution as the reply's.
    """
    logged, replied = answer_of(row), answer_of_reply(reply)
    ids = list(logged.ids or ())
    if replied.ids is not None and list(replied.ids) != ids:
        diff = diff_answers(replace(logged, text=None), replace(replied, text=None))
        text = f"the endpoint did not say the tokens it was given: {diff.text}"
        return replace(diff, outcome="different", text=text)
    if replied.logprobs is None or len(replied.logprobs) != len(ids):
        return AnswerDiff("unknown", None, 0, None, None, "the reply has no log-probability for each token")
    shift, shift_position = None, None
    first: tuple[int, str] | None = None
    for position, own in enumerate(replied.logprobs):
        assert own is not None
        before = logged.logprobs[position] if has_logprobs and logged.logprobs else None
        if before is not None:
            moved = abs(before - own)
            if shift is None or moved > shift:
                shift, shift_position = moved, position
            if moved > tolerance and first is None:
                first = position, f"its log-probability is {own:.4f}, in the log {before:.4f}"
        preferred = _preferred(reply, position) if is_greedy else None
        if preferred is not None and preferred[1] - own > tolerance and first is None:
            gap = preferred[1] - own
            first = position, f"the endpoint would have said {quoted(preferred[0])}, by {gap:.4f} nats"
    if first is not None:
        position, why = first
        text = f"at token {position} ({_token(logged, replied, position)}) {why}"
        text += f", after {quoted_end(_before(logged, replied, position), _AROUND_CHARS)}"
        return AnswerDiff("different", position, position, shift, shift_position, text)
    if not has_logprobs and not is_greedy:
        text = "it was sampled and logged without log-probabilities: a forced answer tells nothing"
        return AnswerDiff("unknown", None, len(ids), None, None, text)
    if logged.is_cut:
        text = f"equal in the {len(ids)} tokens that were kept; the rest was cut"
        return AnswerDiff("unknown", None, len(ids), shift, shift_position, text)
    other = _other_text(row, reply)
    return AnswerDiff("different" if other else "equal", None, len(ids), shift, shift_position, other)


def judge_free(row: TokenLogRow, reply: RequestRow, *, tolerance: float) -> AnswerDiff:
    """A reply that was free to say what it likes; parting where two tokens were as likely is unknown."""
    diff = diff_answers(answer_of(row), answer_of_reply(reply))
    if diff.shift is not None and diff.shift > tolerance and diff.outcome == "equal":
        text = f"the log-probability of token {diff.shift_position} moved by {diff.shift:.4f} nats"
        return replace(diff, outcome="different", position=diff.shift_position, text=text)
    if diff.outcome != "different" or diff.position is None or reply.token_ids is None:
        return diff
    gap = _gap_in_log(row, reply.token_ids, diff.position)
    is_shifted = diff.shift is not None and diff.shift > tolerance
    if gap is not None and gap <= tolerance and row.sampling.temperature == 0 and not is_shifted:
        text = f"{diff.text}: a tie, {gap:.4f} nats apart in the log"
        return replace(diff, outcome="unknown", text=text)
    return diff


def _gap_in_log(row: TokenLogRow, replied: list[int], position: int) -> float | None:
    """How much likelier the log thought its own token than the reply's; None where it does not say."""
    if position >= len(row.top_logprobs) or position >= len(replied):
        return None
    own = row.logprobs[position]
    other = dict(row.top_logprobs[position]).get(replied[position])
    return None if own is None or other is None else own - other


def _preferred(reply: RequestRow, position: int) -> tuple[str, float] | None:
    tops = reply.top_logprobs
    if tops is None or position >= len(tops) or not tops[position]:
        return None
    return max(tops[position], key=lambda item: item[1])


def _other_text(row: TokenLogRow, reply: RequestRow) -> str:
    """What the same tokens' text shows of another detokeniser; "" when it is the same, or cannot be told.

    An answer that a stop ended lacks the text of what ended it, which the forced one has.
    """
    told = row.told
    is_whole = row.content == "full" and not row.truncated and told is not None
    if not is_whole or told is None or told.finish_reason != "length" or reply.text == row.text:
        return ""
    if told.utf8_incomplete_tail:
        return ""
    return f"the same tokens have another text: {quoted(row.text)} in the log, {quoted(reply.text)} now"


def _token(logged: Answer, replied: Answer, position: int) -> str:
    texts = logged.texts if logged.texts is not None else replied.texts
    assert logged.ids is not None
    text = f" {quoted(texts[position])}" if texts is not None and position < len(texts) else ""
    return f"{logged.ids[position]}{text}"


def _before(logged: Answer, replied: Answer, position: int) -> str:
    texts = logged.texts if logged.texts is not None else replied.texts
    return "".join(texts[:position]) if texts is not None else ""
