"""Runs lm-eval tasks over an endpoint that somebody else drives.

Owns: finding tasks, refusing those that cannot be asked, joining lm-eval's scores with the rows of their
requests. Refuses to know: HTTP, concurrency, Runs, verdicts: `send` is handed in. lm_eval is imported when
tasks run, not before.
Invariants: nothing is downloaded; one failed request costs one item; tasks are refused before any request.

Usage: `result = run_tasks(["arithmetic"], send=sender.send)`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from firstdiff.evals.results import EvalItemRow, EvalResult, summarise
from firstdiff.tracing.records import Request, RequestRow

if TYPE_CHECKING:
    from firstdiff.evals.lm_eval_model import EndpointLM

Send = Callable[[Sequence[Request]], Sequence[RequestRow]]
TASKS_DIR = Path(__file__).parent / "tasks"


def run_tasks(
    tasks: Sequence[str],
    *,
    send: Send,
    limit: int | None = None,
    include: Sequence[Path] = (),
    seed: int = 1234,
    logprobs: int | None = None,
) -> EvalResult:
    """Ask the tasks' items through `send` and score the answers.

    A task is a name out of `evals/tasks` or of a folder in `include`, or the path of an lm-eval YAML. `limit`
    takes only the first items of each; `seed` and `logprobs` go into every request. ValueError for an unknown
    task, one that needs log-likelihoods, or one whose metric is no number in 0..1 an item.
    """
    if limit is not None and limit < 1:
        raise ValueError(f"expected a limit of 1 item or more, got {limit}")
    from lm_eval.evaluator import evaluate

    from firstdiff.evals.lm_eval_model import EndpointLM

    with _quiet("lm_eval"):
        loaded = _load(tasks, include)
        model = EndpointLM(send, seed=seed, logprobs=logprobs)
        results = evaluate(model, loaded, limit=limit, bootstrap_iters=0, log_samples=True)
    items = [
        item
        for task, samples in results["samples"].items()
        for sample in samples
        for item in _items_of(task, sample, model)
    ]
    groups: dict[tuple[str, str, str], list[EvalItemRow]] = {}
    for item in items:
        groups.setdefault((item.task, item.metric, item.filter), []).append(item)
    return EvalResult(tasks=[summarise(group) for group in groups.values()], items=items)


def check_tasks(tasks: Sequence[str], *, include: Sequence[Path] = ()) -> None:
    """Raise the ValueError that `run_tasks` would raise for these tasks, before anything is asked."""
    with _quiet("lm_eval"):
        _load(tasks, include)


def list_tasks(include: Sequence[Path] = ()) -> list[str]:
    """Names that `run_tasks` takes, sorted."""
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=[TASKS_DIR, *include], include_defaults=False)
    return sorted(str(name) for name in manager.all_tasks)


def _load(tasks: Sequence[str], include: Sequence[Path]) -> dict[str, Any]:
    """lm-eval's task objects by name, checked."""
    from lm_eval.tasks import TaskManager

    if not tasks:
        raise ValueError("expected at least one task, got none")
    manager = TaskManager(include_path=[TASKS_DIR, *include], include_defaults=False)
    known = [str(name) for name in manager.all_tasks]
    for name in tasks:
        if name not in known and not Path(name).is_file():
            raise ValueError(
                f"expected a task out of {', '.join(sorted(known))} or an lm-eval YAML's path, got {name!r}"
            )
    try:
        loaded = cast(dict[str, Any], manager.load(list(tasks)))
    except Exception as error:
        # A task file is its author's YAML, templates and code: loading it can raise anything.
        raise ValueError(
            f"expected a task that lm-eval can load, got {', '.join(tasks)}: {error!r}"
        ) from error
    for name, task in loaded["tasks"].items():
        if task.OUTPUT_TYPE != "generate_until":
            raise ValueError(
                f"expected a task with output_type generate_until, got {task.OUTPUT_TYPE} in {name}: "
                "scoring given answers needs prompt log-probabilities, which is not supported yet"
            )
        if task.get_config("num_fewshot") is None:
            task.set_config(key="num_fewshot", value=0)
    return loaded


def _items_of(task: str, sample: dict[str, Any], model: EndpointLM) -> Iterator[EvalItemRow]:
    """The rows of one scored document, one for each of its metrics."""
    from firstdiff.evals.lm_eval_model import case_id_of

    doc_id = int(sample["doc_id"])
    case_ids = [case_id_of(task, doc_id, index) for index in range(len(sample["arguments"]))]
    rows = [row for case_id in case_ids for row in model.rows[case_id]]
    # Worst first: one failed request leaves the whole document without a score.
    worst = min(rows, key=lambda row: ("failed", "unknown", "ok").index(row.outcome))
    for metric in sample["metrics"]:
        yield EvalItemRow(
            task=task,
            metric=metric,
            filter=str(sample["filter"]),
            case_id=case_ids[0],
            doc_id=doc_id,
            outcome=worst.outcome,
            error=worst.error,
            target=str(sample["target"]),
            answer=rows[0].text,
            score=_score(task, metric, sample[metric]) if worst.outcome == "ok" else None,
            doc_sha256=str(sample["doc_hash"]),
            prompt_sha256=str(sample["prompt_hash"]),
        )


def _score(task: str, metric: str, value: object) -> float:
    try:
        score = float(cast(float, value))
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"expected one number an item, got {type(value).__name__} for {metric} of {task}"
        ) from error
    if not 0.0 <= score <= 1.0:
        raise ValueError(f"expected a score in 0..1 an item, got {score} for {metric} of {task}")
    return score


@contextmanager
def _quiet(name: str) -> Iterator[None]:
    """Keep a library's log at errors for a while: its warnings here are about its own command line."""
    logger = logging.getLogger(name)
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
