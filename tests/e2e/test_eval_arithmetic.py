"""The arithmetic task against real servers, by our client and by lm-eval's own."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from firstdiff.evals.results import EvalItemRow
from firstdiff.evals.suite import TASKS_DIR
from firstdiff.harness.plugin import StartReplica
from firstdiff.tracing.records import RequestRow
from firstdiff.tracing.store import Run

LM_EVAL = """
import json, sys
from lm_eval import simple_evaluate
from lm_eval.tasks import TaskManager
url, tasks_dir, limit = sys.argv[1:]
results = simple_evaluate(
    model="local-completions",
    model_args={"model": "smollm2-135m", "base_url": url + "/v1/completions", "num_concurrent": 4,
                "tokenized_requests": False, "tokenizer_backend": None},
    tasks=["arithmetic"],
    task_manager=TaskManager(include_path=tasks_dir, include_defaults=False),
    limit=int(limit), bootstrap_iters=0, log_samples=True,
)
samples = sorted(results["samples"]["arithmetic"], key=lambda sample: sample["doc_id"])
print(json.dumps([[sample["resps"][0][0], sample["exact_match"]] for sample in samples]))
"""


def evaluate(url: str, out: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "firstdiff.harness.cli", "eval", url, "--out", str(out), *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=240)


def test_every_item_of_the_task_is_a_row(firstdiff_replica: StartReplica, tmp_path: Path) -> None:
    replica = firstdiff_replica("--model", "tiny-random")
    done = evaluate(replica.url, tmp_path / "run", "--tasks", "arithmetic")
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(
        r"arithmetic exact_match \(first-number\)  0\.0\d\d \[0\.0\d\d, 0\.\d{3}\]  200 items\n", done.stdout
    )
    run = Run.open(tmp_path / "run")
    rows = list(run.rows("requests", RequestRow))
    items = list(run.rows("eval_items", EvalItemRow))
    assert run.manifest.complete
    assert {row.case_id for row in rows} == {f"arithmetic-{index:05d}" for index in range(200)}
    answers = {row.case_id: row.text for row in rows}
    assert all(item.answer == answers[item.case_id] and item.outcome == "ok" for item in items)
    assert len(items) == len(rows) == 200


def test_an_unknown_task_is_a_usage_error_and_leaves_no_run(tmp_path: Path) -> None:
    done = evaluate("http://127.0.0.1:9", tmp_path / "run", "--tasks", "no-such-task")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("firstdiff: expected a task out of arithmetic or ")
    assert not (tmp_path / "run").exists()


@pytest.mark.model
def test_two_clients_get_the_same_answers(firstdiff_replica: StartReplica, tmp_path: Path) -> None:
    replica = firstdiff_replica("--model", "smollm2-135m")
    num_items = 60
    done = evaluate(replica.url, tmp_path / "run", "--limit", str(num_items))
    assert done.returncode == 0, done.stderr
    items = list(Run.open(tmp_path / "run").rows("eval_items", EvalItemRow))
    command = [sys.executable, "-c", LM_EVAL, replica.url, str(TASKS_DIR), str(num_items)]
    theirs = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert theirs.returncode == 0, theirs.stderr
    samples = json.loads(theirs.stdout.splitlines()[-1])
    assert [[item.answer, item.score] for item in items] == samples
    # Half right, so that a change in either direction shows; 85 of all 200 were right when this was written.
    assert 15 <= sum(item.score or 0 for item in items) <= 40
