"""Do the candidate's tokens part from base's more, or further, than those of a twin do?

Owns: the noise floor (a twin's Run, or base's own repeats), the test on how many cases diverge, the test on
how far log-probabilities lie apart, and what their outcomes mean. Refuses to know: latencies, report text
beyond its own findings. Invariants: the count test is distribution-free; the shift test assumes no more of
the noise than a tail that falls like 1/x (stats.excess_p); without a floor a divergence is "unknown".

Usage: `tokens = compare_tokens(base, candidate, floor, config); tokens.count_p`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from statistics import median
from typing import Literal

from firstdiff.regression.pairing import both_ok
from firstdiff.regression.quoting import quoted
from firstdiff.regression.stats import discordant_p, excess_p, upper_fraction
from firstdiff.regression.summary import RunView
from firstdiff.regression.tokens import ReplyDiff, diff_replies
from firstdiff.regression.verdict import (
    CompareConfig,
    Divergence,
    Finding,
    ShiftEvidence,
    Status,
    TokenEvidence,
    noise_of,
)

_MAX_EXAMPLES = 5
_TOO_FEW = "More than the floor shows, but too few to tell from chance: ask more cases."
_LOUD_FLOOR = 0.5
"""From this share of diverging floor cases on, counting divergences says hardly anything."""


@dataclass(frozen=True, slots=True)
class TokenComparison:
    """The measured facts; `count_p` and `shift_p` are None where there is no floor, or nothing to test."""

    evidence: TokenEvidence
    shift: ShiftEvidence | None
    count_p: float | None
    shift_p: float | None
    num_unexplained: int
    """Diverging requests whose log-probabilities moved further than noise does, or are not known."""


@dataclass(slots=True)
class _Floor:
    """Floor comparisons, and how to test against them: `rounds` of (candidate, floor) diffs by case."""

    kind: Literal["twin", "repeats", "none"] = "none"
    diffs: list[ReplyDiff] = field(default_factory=list)
    rounds: list[tuple[dict[str, bool], dict[str, bool]]] = field(default_factory=list)


def compare_tokens(
    base: RunView, candidate: RunView, floor: RunView | None, config: CompareConfig
) -> TokenComparison | None:
    """Compare all requests that both sides answered; None when there are none."""
    diffs = [diff_replies(one, other) for _, one, other in both_ok(base, candidate)]
    if not diffs:
        return None
    noise = noise_of([base.dtype, candidate.dtype])
    measured = _twin_floor(base, floor, diffs) if floor is not None else _repeat_floor(base, diffs)
    tests = [_discordant(*cases) for cases in measured.rounds]
    tested = [(p_value, counts) for counts in tests if (p_value := discordant_p(*counts)) is not None]
    smallest, num_only = min(tested, default=(None, tests[0] if tests else (None, None)))
    # Rounds share their base replies, so each is allowed its share of the error rate.
    count_p = None if smallest is None else min(1.0, len(tested) * smallest)
    floor_shifts = _largest_shifts(measured.diffs)
    scale = max([noise, *floor_shifts.values()])
    shifts = _largest_shifts(diffs)
    shift_p = None
    if shifts and floor_shifts:
        repeats = 1 if measured.kind == "twin" else max(1, len(measured.rounds))
        shift_p = excess_p(
            list(shifts.values()),
            num_draws=len(shifts) * repeats,
            scale=scale,
            num_floor=len(floor_shifts),
            min_value=config.logprob_tolerance,
        )
    diverging = [diff for diff in diffs if diff.divergence is not None]
    return TokenComparison(
        evidence=_token_evidence(diffs, measured, num_only),
        shift=_shift_evidence(diffs, shifts, floor_shifts, scale) if shifts else None,
        count_p=count_p,
        shift_p=shift_p,
        num_unexplained=sum(diff.shift is None or diff.shift > scale for diff in diverging),
    )


def _twin_floor(base: RunView, twin: RunView, diffs: list[ReplyDiff]) -> _Floor:
    twin_diffs = [diff_replies(one, other) for _, one, other in both_ok(base, twin)]
    cases = _diverging_cases(diffs), _diverging_cases(twin_diffs)
    return _Floor("twin", twin_diffs, [cases] if twin_diffs else [])


def _repeat_floor(base: RunView, diffs: list[ReplyDiff]) -> _Floor:
    """Base against itself: each of its repeats against its next one, the last against the first."""
    by_repeat: dict[int, dict[str, ReplyDiff]] = {}
    for diff in diffs:
        by_repeat.setdefault(diff.repeat_index, {})[diff.case_id] = diff
    replies = base.ok
    repeats = sorted({repeat for _, repeat in replies})
    if len(repeats) < 2:
        return _Floor()
    floor = _Floor("repeats")
    for index, repeat in enumerate(repeats):
        following = repeats[(index + 1) % len(repeats)]
        within = [
            diff_replies(row, replies[case_id, following])
            for (case_id, own), row in replies.items()
            if own == repeat and (case_id, following) in replies
        ]
        floor.rounds.append((_diverging_cases(by_repeat.get(repeat, {}).values()), _diverging_cases(within)))
        # With two repeats the second round compares the same two replies again.
        if index + 1 < len(repeats) or len(repeats) > 2:
            floor.diffs += within
    return floor if floor.diffs else _Floor()


def _diverging_cases(diffs: Iterable[ReplyDiff]) -> dict[str, bool]:
    cases: dict[str, bool] = {}
    for diff in diffs:
        cases[diff.case_id] = cases.get(diff.case_id, False) or diff.divergence is not None
    return cases


def _discordant(mine: dict[str, bool], floor: dict[str, bool]) -> tuple[int, int]:
    shared = mine.keys() & floor.keys()
    return (
        sum(mine[case_id] and not floor[case_id] for case_id in shared),
        sum(floor[case_id] and not mine[case_id] for case_id in shared),
    )


def _largest_shifts(diffs: Iterable[ReplyDiff]) -> dict[str, float]:
    """The largest shift of each case."""
    largest: dict[str, float] = {}
    for diff in diffs:
        if diff.shift is not None:
            largest[diff.case_id] = max(largest.get(diff.case_id, 0.0), diff.shift)
    return largest


def _token_evidence(
    diffs: list[ReplyDiff], floor: _Floor, num_only: tuple[int | None, int | None]
) -> TokenEvidence:
    found = [diff.divergence for diff in diffs if diff.divergence is not None]
    ordered = sorted(found, key=lambda one: (one.position, one.case_id, one.repeat_index))
    cases, floor_cases = _diverging_cases(diffs), _diverging_cases(floor.diffs)
    num_diverging = sum(cases.values())
    upper = upper_fraction(num_diverging, len(cases))
    return TokenEvidence(
        num_requests=len(diffs),
        num_diverging_requests=len(found),
        num_cases=len(cases),
        num_diverging_cases=num_diverging,
        floor=floor.kind,
        num_floor_cases=len(floor_cases),
        num_diverging_floor_cases=sum(floor_cases.values()),
        num_floor_requests=len(floor.diffs),
        num_diverging_floor_requests=sum(diff.divergence is not None for diff in floor.diffs),
        num_only_candidate=num_only[0],
        num_only_floor=num_only[1],
        upper_fraction=None if upper is None else _tidy(upper),
        median_position=int(median(one.position for one in found)) if found else None,
        first=ordered[0] if ordered else None,
        examples=_examples(ordered),
    )


def _examples(ordered: list[Divergence]) -> list[Divergence]:
    """The earliest divergences, and the one with the widest gap in the last place."""
    examples = ordered[:_MAX_EXAMPLES]
    widest = max(ordered, key=lambda one: (one.base_gap or 0.0, -one.position), default=None)
    if widest is not None and widest not in examples:
        examples = [*examples[: _MAX_EXAMPLES - 1], widest]
    return examples


def _shift_evidence(
    diffs: list[ReplyDiff], shifts: dict[str, float], floor_shifts: dict[str, float], scale: float
) -> ShiftEvidence:
    return ShiftEvidence(
        num_cases=len(shifts),
        num_tokens=sum(diff.num_shift_tokens for diff in diffs),
        largest=_tidy(max(shifts.values())),
        median=_tidy(median(shifts.values())),
        floor_largest=_tidy(max(floor_shifts.values())) if floor_shifts else None,
        num_floor_cases=len(floor_shifts),
        noise=_tidy(scale),
        num_beyond_noise=sum(shift > scale for shift in shifts.values()),
    )


def judge_tokens(comparison: TokenComparison, adjusted: dict[str, float], config: CompareConfig) -> Finding:
    """The finding on how many requests diverge."""
    evidence = comparison.evidence
    p_value = adjusted.get("tokens")
    status: Status = "pass"
    detail = ""
    num_found = evidence.num_diverging_requests
    if p_value is not None and p_value < config.alpha:
        status = "fail"
        detail = (
            f"{evidence.num_only_candidate} cases part from base only on the candidate, "
            f"{evidence.num_only_floor} only in the floor."
        )
    elif evidence.num_cases < config.min_pairs:
        status = "unknown"
        detail = f"At least {config.min_pairs} cases are needed, {evidence.num_cases} were answered by both."
    elif num_found == 0:
        assert evidence.upper_fraction is not None
        detail = f"At 95 % confidence fewer than {evidence.upper_fraction:.1%} of such requests diverge."
    elif evidence.floor == "none":
        status = "unknown"
        detail = "There is no noise floor to tell a defect from chance: add a twin's Run, or repeats."
    elif _or_one(comparison.count_p) < 2 * config.alpha:
        status = "unknown"
        detail = _TOO_FEW
    elif comparison.num_unexplained == 0:
        detail = "In all of them log-probabilities moved no further than noise moves them."
    elif evidence.num_diverging_floor_cases == 0:
        status = "unknown"
        detail = _TOO_FEW
    elif comparison.shift is None and (
        evidence.num_diverging_floor_cases >= _LOUD_FLOOR * evidence.num_floor_cases
    ):
        status = "unknown"
        detail = (
            "The floor itself diverges so often that counting shows nothing: ask for log-probabilities, "
            "temperature 0 or a seed."
        )
    else:
        detail = "No more than the floor."
    return Finding(
        status=status,
        part="tokens",
        title=f"{num_found} of {evidence.num_requests} requests diverge ({floor_words(evidence)})",
        detail=detail,
        evidence=[evidence],
        p_value=None if p_value is None else _tidy(p_value),
        n=evidence.num_cases,
    )


def floor_words(evidence: TokenEvidence) -> str:
    """The noise floor in words."""
    if evidence.floor == "none":
        return "no noise floor"
    counts = f"{evidence.num_diverging_floor_requests} of {evidence.num_floor_requests}"
    whose = "twin" if evidence.floor == "twin" else "base's own repeats"
    return f"noise floor, {whose}: {counts}"


def judge_shift(
    comparison: TokenComparison, adjusted: dict[str, float], config: CompareConfig
) -> Finding | None:
    """The finding on how far log-probabilities moved; None where an endpoint gives none."""
    shift = comparison.shift
    if shift is None or shift.largest is None:
        return None
    p_value = adjusted.get("logprobs")
    status: Status = "pass"
    detail = ""
    is_material = shift.largest >= config.logprob_tolerance and shift.largest > shift.noise
    if p_value is not None and p_value < config.alpha:
        status = "fail"
        detail = (
            f"In {shift.num_beyond_noise} of {shift.num_cases} cases by more than {shift.noise:.3g} nat, "
            "which is what noise moves them by."
        )
    elif shift.num_cases < config.min_pairs:
        status = "unknown"
        detail = f"At least {config.min_pairs} cases are needed, {shift.num_cases} have log-probabilities."
    elif is_material and p_value is None:
        status = "unknown"
        detail = "There is no noise floor to tell a defect from chance: add a twin's Run, or repeats."
    elif is_material and _or_one(comparison.shift_p) < 2 * config.alpha:
        status = "unknown"
        detail = _TOO_FEW
    floor = "none" if shift.floor_largest is None else f"{shift.floor_largest:.3g} nat"
    return Finding(
        status=status,
        part="logprobs",
        title=f"log-probabilities of equal tokens moved by up to {shift.largest:.3g} nat "
        f"(noise floor: {floor})",
        detail=detail,
        evidence=[shift],
        p_value=None if p_value is None else _tidy(p_value),
        n=shift.num_cases,
    )


def first_words(first: Divergence) -> str:
    """Where and how two replies part, in words."""
    sides = []
    for side, token_id, text, gap, at_least in (
        ("base", first.base_token_id, first.base_text, first.base_gap, first.base_gap_at_least),
        (
            "candidate",
            first.candidate_token_id,
            first.candidate_text,
            first.candidate_gap,
            first.candidate_gap_at_least,
        ),
    ):
        if text is None:
            sides.append(f"{side} ends")
            continue
        token = f"{side} {quoted(text)}" + (f" (id {token_id})" if token_id is not None else "")
        more = f", {'at least ' if at_least else ''}{gap:.3g} nat likelier there" if gap is not None else ""
        sides.append(token + more)
    where = f"case {quoted(first.case_id)}" + (f" repeat {first.repeat_index}" if first.repeat_index else "")
    return f"{where}, {first.unit} {first.position}: {'; '.join(sides)}"


def _or_one(p_value: float | None) -> float:
    return 1.0 if p_value is None else p_value


def _tidy(value: float) -> float:
    return float(f"{value:.6g}")
