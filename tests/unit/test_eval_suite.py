"""lm-eval tasks over a scripted endpoint: what is asked, what a failure costs, what is refused."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from firstdiff.evals.suite import TASKS_DIR, check_tasks, list_tasks, run_tasks
from firstdiff.tracing.records import Outcome, Request, RequestRow

pytest.importorskip("lm_eval")
# Libraries under lm-eval warn about each other when they are imported.
pytestmark = pytest.mark.filterwarnings("default")

Answer = Callable[[Request], tuple[Outcome, str]]


def sender(answer: Answer, asked: list[Request]) -> Callable[[Sequence[Request]], list[RequestRow]]:
    """An endpoint that answers as told and keeps what it was asked."""

    def send(requests: Sequence[Request]) -> list[RequestRow]:
        asked.extend(requests)
        rows = []
        for request in requests:
            outcome, text = answer(request)
            row = RequestRow(
                request_id=f"run-{request.case_id}",
                case_id=request.case_id,
                intended_ns=0,
                sent_ns=0,
                headers_received_ns=None,
                chunk_received_ns=[],
                chunk_num_tokens=[],
                finished_ns=1,
                sent_unix_ns=0,
                outcome=outcome,
                status=200 if outcome == "ok" else 500,
                error=None if outcome == "ok" else "status 500: it broke",
                prompt_token_ids=None,
                text=text,
                token_ids=None,
                logprobs=None,
                top_logprobs=None,
                finish_reason="stop",
                usage=None,
            )
            rows.append(row)
        return rows

    return send


def right_answer(request: Request) -> tuple[Outcome, str]:
    assert isinstance(request.prompt, str)
    left, sign, right = re.findall(r"(\d+) ([+-]) (\d+) =$", request.prompt)[0]
    return "ok", f" {int(left) + int(right) if sign == '+' else int(left) - int(right)}"


def test_arithmetic_asks_200_different_items_and_scores_them() -> None:
    asked: list[Request] = []
    result = run_tasks(["arithmetic"], send=sender(right_answer, asked))
    assert len(asked) == len({request.prompt for request in asked}) == 200
    assert {request.case_id for request in asked} == {f"arithmetic-{index:05d}" for index in range(200)}
    (task,) = result.tasks
    assert (task.accuracy, task.num_items, task.outcome) == (1.0, 200, "ok")
    assert task.low is not None
    assert 0.98 < task.low < 1.0
    first = asked[0]
    assert (first.max_tokens, first.temperature, first.seed, first.extra) == (8, 0.0, 1234, {"stop": ["\n"]})
    assert first.prompt == "4 + 3 = 7\n23 + 5 = 28\n9 - 2 = 7\n31 + 42 = 73\n" + first.prompt.splitlines()[-1]


@pytest.mark.parametrize(
    ("text", "is_right"),
    [
        (" {}", True),
        ("{}\n1 + 1 = 2", True),
        (" {}.", True),
        (" 1{}", False),
        ("", False),
        (" the answer is {}", False),
        ("\x00\ud7ff", False),
    ],
)
def test_an_answer_is_the_number_it_begins_with(text: str, is_right: bool) -> None:
    def answer(request: Request) -> tuple[Outcome, str]:
        return "ok", text.format(right_answer(request)[1].strip())

    (task,) = run_tasks(["arithmetic"], send=sender(answer, []), limit=10).tasks
    assert task.accuracy == (1.0 if is_right else 0.0)


def test_a_failed_request_costs_its_own_item_only() -> None:
    def answer(request: Request) -> tuple[Outcome, str]:
        index = int(request.case_id.split("-")[1])
        return ("failed" if index == 3 else "unknown", "") if index in (3, 5) else right_answer(request)

    result = run_tasks(["arithmetic"], send=sender(answer, []), limit=20)
    (task,) = result.tasks
    assert (task.accuracy, task.num_items, task.num_unknown, task.outcome) == (1.0, 20, 2, "unknown")
    scores = {item.case_id: (item.outcome, item.score, item.error) for item in result.items}
    assert scores["arithmetic-00003"] == ("failed", None, "status 500: it broke")
    assert scores["arithmetic-00005"] == ("unknown", None, "status 500: it broke")
    assert scores["arithmetic-00004"] == ("ok", 1.0, None)


def test_nothing_answered_gives_no_accuracy() -> None:
    (task,) = run_tasks(["arithmetic"], send=sender(lambda _: ("failed", ""), []), limit=20).tasks
    assert (task.accuracy, task.num_unknown) == (None, 20)


def test_rows_must_come_back_in_order() -> None:
    send = sender(right_answer, [])
    with pytest.raises(ValueError, match="in the order of their requests"):
        run_tasks(["arithmetic"], send=lambda requests: send(requests)[::-1], limit=5)


def test_requests_carry_seed_and_logprobs() -> None:
    asked: list[Request] = []
    run_tasks(["arithmetic"], send=sender(right_answer, asked), limit=2, seed=7, logprobs=3)
    assert [(request.seed, request.logprobs) for request in asked] == [(7, 3)] * 2


TASK = """
task: {name}
custom_dataset: !function {arithmetic}.load
dataset_kwargs: {{num_items: 12, seed: 1}}
test_split: test
output_type: {output_type}
doc_to_text: "{{{{question}}}}"
doc_to_target: "{target}"
{more}
generation_kwargs: {{until: ";", max_gen_toks: 5, do_sample: true, temperature: 0.5, top_p: 0.9, top_k: 4}}
repeats: {repeats}
metric_list: [{{metric: {metric}}}]
"""


def own_task(folder: Path, **fields: object) -> Path:
    (folder / "arithmetic.py").write_bytes((TASKS_DIR / "arithmetic.py").read_bytes())
    defaults = {"name": "own", "output_type": "generate_until", "metric": "exact_match", "repeats": 1}
    defaults |= {"target": "{{answer}}", "more": ""}
    path = folder / "own.yaml"
    path.write_text(TASK.format(**{"arithmetic": "arithmetic", **defaults, **fields}))
    return path


def test_a_users_own_task_runs_by_name_or_path(tmp_path: Path) -> None:
    path = own_task(tmp_path)
    asked: list[Request] = []
    by_path = run_tasks([str(path)], send=sender(right_answer, asked))
    by_name = run_tasks(["own"], send=sender(right_answer, []), include=[tmp_path])
    assert by_path == by_name
    assert list_tasks([tmp_path]) == ["arithmetic", "own"]
    first = asked[0]
    assert (first.max_tokens, first.temperature, first.top_p) == (5, 0.5, 0.9)
    assert first.extra == {"stop": [";"], "top_k": 4}


def test_repeated_requests_of_an_item_are_all_rows_and_one_score(tmp_path: Path) -> None:
    asked: list[Request] = []
    result = run_tasks([str(own_task(tmp_path, repeats=2))], send=sender(right_answer, asked))
    assert len(asked) == 24
    assert len(result.items) == 12


def test_a_task_that_needs_log_likelihoods_is_refused_before_any_request(tmp_path: Path) -> None:
    asked: list[Request] = []
    choices = {"target": "{{0}}", "more": 'doc_to_choice: ["a", "b"]'}
    path = own_task(tmp_path, output_type="multiple_choice", metric="acc", **choices)
    with pytest.raises(ValueError, match="expected a task with output_type generate_until, got multiple"):
        run_tasks([str(path)], send=sender(right_answer, asked))
    assert asked == []


def test_a_metric_over_the_whole_corpus_is_refused(tmp_path: Path) -> None:
    path = own_task(tmp_path, metric="bleu")
    with pytest.raises(ValueError, match="expected one number an item, got list for bleu of own"):
        run_tasks([str(path)], send=sender(right_answer, []))


def test_a_broken_task_file_is_named(tmp_path: Path) -> None:
    path = own_task(tmp_path, target="{{no_such_column}}", more="no_such_key: 1")
    with pytest.raises(ValueError, match=r"expected a task that lm-eval can load, got .*own\.yaml"):
        run_tasks([str(path)], send=sender(right_answer, []))


@pytest.mark.parametrize(
    ("tasks", "limit", "message"),
    [
        (["gsm8k"], None, "expected a task out of arithmetic or an lm-eval YAML's path, got 'gsm8k'"),
        ([], None, "expected at least one task"),
        (["arithmetic"], 0, "expected a limit of 1 item or more, got 0"),
    ],
)
def test_usage_errors_say_what_to_do(tasks: list[str], limit: int | None, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        run_tasks(tasks, send=sender(right_answer, []), limit=limit)


def test_tasks_can_be_checked_before_anything_is_asked() -> None:
    check_tasks(["arithmetic"])
    with pytest.raises(ValueError, match="expected a task out of arithmetic"):
        check_tasks(["arithmetic", "gsm8k"])
