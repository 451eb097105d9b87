"""The unmodified `lm_eval --model local-completions` scores as lm-eval's own `hf` model does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from firstdiff.engine.model_store import resolve
from firstdiff.harness.plugin import StartReplica

TASKS_DIR = Path(__file__).parent / "lm_eval_tasks"
TASKS = ("local_choice", "local_pair", "local_page", "local_story")
MODEL = "smollm2-135m"
LOGPROB_TOLERANCE = 5e-4
"""Nats over a whole continuation: hundreds of fp32 log-probabilities are summed in another order."""

Samples = dict[str, list[dict[str, Any]]]


def lm_eval(out: Path, model: str, model_args: dict[str, object]) -> Samples:
    """Run the command; the samples of each task by document."""
    command = [
        *(sys.executable, "-m", "lm_eval", "run", "--model", model),
        *("--model_args", ",".join(f"{key}={value}" for key, value in model_args.items())),
        *("--include_path", str(TASKS_DIR), "--tasks", ",".join(TASKS)),
        *("--log_samples", "--output_path", str(out), "--device", "cpu"),
    ]
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, env=environment)
    assert done.returncode == 0, done.stderr[-4000:]
    samples: Samples = {}
    for task in TASKS:
        (file,) = out.glob(f"*/samples_{task}_*.jsonl")
        rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
        samples[task] = sorted(rows, key=lambda row: row["doc_id"])
    return samples


def scored(row: dict[str, Any]) -> list[tuple[float, str]]:
    """(log-likelihood, is greedy) of each request of one document."""
    return [(float(resp[0][0]), resp[0][1]) for resp in row["resps"]]


@pytest.fixture(scope="module")
def truth(tmp_path_factory: pytest.TempPathFactory) -> Samples:
    folder = resolve(MODEL).path
    return lm_eval(tmp_path_factory.mktemp("hf"), "hf", {"pretrained": folder, "dtype": "float32"})


@pytest.mark.model
@pytest.mark.parametrize("backend", ["huggingface", "remote"])
def test_every_item_scores_as_in_transformers(
    backend: str, truth: Samples, firstdiff_replica: StartReplica, tmp_path: Path
) -> None:
    replica = firstdiff_replica("--model", MODEL, label="scored")
    arguments: dict[str, object] = {
        "model": MODEL,
        "base_url": f"{replica.url}/v1/completions",
        "tokenizer_backend": backend,
    }
    if backend == "huggingface":
        arguments |= {"tokenizer": resolve(MODEL).path, "num_concurrent": 4}
    ours = lm_eval(tmp_path / "out", "local-completions", arguments)
    for task in ("local_choice", "local_pair"):
        for mine, theirs in zip(ours[task], truth[task], strict=True):
            for (ours_sum, ours_greedy), (their_sum, their_greedy) in zip(
                scored(mine), scored(theirs), strict=True
            ):
                assert ours_sum == pytest.approx(their_sum, abs=LOGPROB_TOLERANCE), mine["doc"]
                assert ours_greedy == their_greedy
            assert mine["acc"] == theirs["acc"]
    for mine, theirs in zip(ours["local_page"], truth["local_page"], strict=True):
        assert float(mine["resps"][0][0]) == pytest.approx(
            float(theirs["resps"][0][0]), abs=LOGPROB_TOLERANCE
        )
    for mine, theirs in zip(ours["local_story"], truth["local_story"], strict=True):
        assert mine["resps"] == theirs["resps"]
    # Guards: the items tell right from wrong, and greedy continuations of both kinds occur.
    flags = {flag for row in truth["local_choice"] for _, flag in scored(row)}
    assert flags == {"True", "False"}
    assert sum(row["acc"] for row in truth["local_choice"]) >= 4
