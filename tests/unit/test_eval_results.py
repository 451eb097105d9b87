"""Scores of an evaluation: items without an answer, intervals, text."""

from __future__ import annotations

import pytest
from scipy.stats import binomtest

from firstdiff.evals.results import MIN_ITEMS, EvalItemRow, EvalResult, score_interval, summarise


def item(index: int, score: float | None) -> EvalItemRow:
    return EvalItemRow(
        task="sums",
        metric="exact_match",
        filter="none",
        case_id=f"sums-{index:05d}",
        doc_id=index,
        outcome="ok" if score is not None else "failed",
        error=None if score is not None else "status 500",
        target="7",
        answer="7",
        score=score,
        doc_sha256="d",
        prompt_sha256="p",
    )


@pytest.mark.parametrize(("num_right", "num_items"), [(0, 10), (10, 10), (37, 100), (1, 200), (199, 200)])
def test_interval_is_wilsons(num_right: int, num_items: int) -> None:
    expected = binomtest(num_right, num_items).proportion_ci(0.95, "wilson")
    low, high = score_interval([1.0] * num_right + [0.0] * (num_items - num_right))
    assert low == pytest.approx(expected.low, abs=1e-12)
    assert high == pytest.approx(expected.high, abs=1e-12)


def test_items_without_an_answer_widen_the_interval_both_ways() -> None:
    scores = [1.0] * 40 + [0.0] * 60
    assert score_interval(scores, num_unknown=20)[0] == score_interval(scores + [0.0] * 20)[0]
    assert score_interval(scores, num_unknown=20)[1] == score_interval(scores + [1.0] * 20)[1]


def test_an_unanswered_item_is_unknown_and_never_wrong() -> None:
    result = summarise([item(index, 1.0) for index in range(MIN_ITEMS)] + [item(MIN_ITEMS, None)])
    assert result.accuracy == 1.0
    assert (result.num_items, result.num_unknown, result.outcome) == (MIN_ITEMS + 1, 1, "unknown")


def test_too_few_items_have_no_accuracy() -> None:
    result = summarise([item(index, 1.0) for index in range(MIN_ITEMS - 1)])
    assert (result.accuracy, result.low, result.high, result.outcome) == (None, None, None, "unknown")


def test_the_text_names_the_first_failure() -> None:
    items = [item(0, None), *(item(index, index % 2) for index in range(1, 101))]
    text = EvalResult(tasks=[summarise(items)], items=items).to_text()
    assert text.splitlines() == [
        "sums exact_match  0.500 [0.400, 0.600]  101 items, 1 unknown",
        "first request without an answer: sums-00000 failed: status 500",
    ]


def test_an_evaluation_without_tasks_is_not_ok() -> None:
    assert EvalResult(tasks=[], items=[]).outcome == "unknown"
