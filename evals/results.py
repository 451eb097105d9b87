"""What an evaluation found: one row an item, one summary a task.

Owns: EvalItemRow, TaskResult, EvalResult and the interval of a score. Refuses to know: lm-eval, endpoints,
how answers are scored.
Invariants: an item whose request did not end ok has no score, never 0; a task's interval covers both what is
unknown of the model (too few items) and what is unknown of the items (requests that failed).

Usage: `result = summarise(items)`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import NormalDist

import msgspec

from firstdiff.tracing.records import Outcome, Row

CONFIDENCE = 0.95
MIN_ITEMS = 10
"""With fewer scored items a task has no accuracy and no interval."""


class EvalItemRow(Row, frozen=True, kw_only=True, tag="eval_item"):
    """One item of a task as it was scored; `case_id` joins it with its RequestRow.

    `score` is the metric's value for the item, in 0..1; None where the outcome is not ok (`error` says why).
    """

    task: str
    metric: str
    filter: str
    case_id: str
    doc_id: int
    outcome: Outcome
    error: str | None
    target: str
    answer: str
    score: float | None
    doc_sha256: str
    prompt_sha256: str


class TaskResult(msgspec.Struct, frozen=True, kw_only=True):
    """One metric of one task over all its items.

    `accuracy` is the mean score of the items that have one. `low` and `high` bound, with CONFIDENCE, the
    accuracy that endless items would give, whatever the items without a score would have scored. All three
    are None with fewer than MIN_ITEMS scored items.
    """

    task: str
    metric: str
    filter: str
    num_items: int
    num_unknown: int
    accuracy: float | None
    low: float | None
    high: float | None

    @property
    def outcome(self) -> Outcome:
        """`ok` when every item has a score, else `unknown`."""
        return "ok" if self.num_unknown == 0 and self.accuracy is not None else "unknown"


class EvalResult(msgspec.Struct, frozen=True, kw_only=True):
    """All tasks of one evaluation and the items behind them, by task and document."""

    tasks: list[TaskResult]
    items: list[EvalItemRow]

    @property
    def outcome(self) -> Outcome:
        """`ok` when every task's is."""
        return "ok" if self.tasks and all(task.outcome == "ok" for task in self.tasks) else "unknown"

    def to_text(self) -> str:
        """One line a task, and one on the first failure where there is one."""
        lines = [_line(task) for task in self.tasks]
        failed = [item for item in self.items if item.outcome != "ok"]
        if failed:
            first = failed[0]
            lines.append(f"first request without an answer: {first.case_id} {first.outcome}: {first.error}")
        return "\n".join(lines)


def _line(task: TaskResult) -> str:
    name = (
        f"{task.task} {task.metric} ({task.filter})"
        if task.filter != "none"
        else f"{task.task} {task.metric}"
    )
    counts = f"{task.num_items} items"
    if task.num_unknown:
        counts += f", {task.num_unknown} unknown"
    if task.accuracy is None:
        return f"{name}  unknown: {counts}, fewer than {MIN_ITEMS} with a score"
    return f"{name}  {task.accuracy:.3f} [{task.low:.3f}, {task.high:.3f}]  {counts}"


def summarise(items: Sequence[EvalItemRow]) -> TaskResult:
    """The summary of the items of one task, metric and filter (at least one item)."""
    first = items[0]
    scores = [item.score for item in items if item.score is not None]
    num_unknown = len(items) - len(scores)
    accuracy = low = high = None
    if len(scores) >= MIN_ITEMS:
        accuracy = math.fsum(scores) / len(scores)
        low, high = score_interval(scores, num_unknown=num_unknown)
    return TaskResult(
        task=first.task,
        metric=first.metric,
        filter=first.filter,
        num_items=len(items),
        num_unknown=num_unknown,
        accuracy=accuracy,
        low=low,
        high=high,
    )


def score_interval(scores: Sequence[float], *, num_unknown: int = 0) -> tuple[float, float]:
    """The Wilson interval of a mean of scores in 0..1, from the lower end if all unknown ones were 0 to the
    upper end if all were 1.

    For scores of 0 and 1 this is the usual interval (Wilson 1927). Scores between are
    less spread than a coin with their mean, so for them it is only wider than needed.
    """
    total = math.fsum(scores)
    num_items = len(scores) + num_unknown
    quantile = NormalDist().inv_cdf(0.5 + CONFIDENCE / 2)
    low, _ = _wilson(total / num_items, num_items, quantile)
    _, high = _wilson((total + num_unknown) / num_items, num_items, quantile)
    return low, high


def _wilson(mean: float, num_items: int, quantile: float) -> tuple[float, float]:
    spread = quantile**2 / num_items
    centre = (mean + spread / 2) / (1 + spread)
    half = quantile * math.sqrt(mean * (1 - mean) / num_items + spread / (4 * num_items)) / (1 + spread)
    return max(0.0, centre - half), min(1.0, centre + half)
