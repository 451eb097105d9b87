"""Whether Runs can be judged and compared at all, and what must be equal whatever the noise."""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec
import pytest

sys.path.insert(0, str(Path(__file__).parent))
from judging import finding_of, rows_of, verdict_of
from ledger_rows import SAMPLING, identity
from synthetic_runs import HEALTH, Defect, changed, write_run

from firstdiff.regression.diff import CompareConfig, compare
from firstdiff.regression.report import to_text
from firstdiff.regression.verdict import EXIT_CODES
from firstdiff.tracing.store import Run


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"workload_sha256": "other"}, "different requests"),
        ({"identity": identity(weights_sha256="z")}, "weights_sha256"),
        ({"identity": identity(tokenizer_sha256="z")}, "tokenizer_sha256"),
        ({"identity": identity(chat_template_sha256="z")}, "chat_template_sha256"),
        ({"identity": None, "model": "other"}, "different models"),
    ],
)
def test_incomparable_runs_are_unknown_with_the_reason(tmp_path, changes, words):
    verdict = verdict_of(tmp_path, rows_of()["candidate"][0], candidate=changes)
    assert verdict.status == "unknown"
    assert "cannot be compared" in verdict.reason
    assert words in verdict.reason
    assert all(finding.part not in ("tokens", "latency") for finding in verdict.findings)


@pytest.mark.parametrize(
    ("sampling", "words"),
    [
        (msgspec.structs.replace(SAMPLING, top_k=50), "top_k"),
        (msgspec.structs.replace(SAMPLING, temperature=1.0), "temperature"),
    ],
)
def test_sampling_as_resolved_must_be_equal(tmp_path, sampling, words):
    made = rows_of()
    logs = [msgspec.structs.replace(log, sampling=sampling) for log in made["candidate"][1]]
    base = write_run(tmp_path, "base", *made["base"])
    verdict = compare(base, write_run(tmp_path, "candidate", made["candidate"][0], logs))
    assert verdict.status == "unknown"
    assert words in verdict.reason


def test_a_late_client_makes_the_verdict_invalid(tmp_path):
    late = HEALTH | {"loop_lag_p99_ns": 900_000_000}
    verdict = verdict_of(tmp_path, rows_of()["candidate"][0], candidate={"client": late})
    assert verdict.status == "invalid"
    assert EXIT_CODES[verdict.status] == 4
    assert "later than 900.0 ms" in verdict.reason


def test_a_client_that_does_not_say_is_unknown(tmp_path):
    verdict = verdict_of(tmp_path, rows_of()["candidate"][0], candidate={"client": {}})
    assert verdict.status == "unknown"
    assert finding_of(verdict, "client", "unknown")


def test_the_limit_of_client_lateness(tmp_path):
    made = rows_of()["candidate"][0]
    # Half of the median TTFT, which is 81 ms on the quiet machine, or 10 ms if that is more.
    config = CompareConfig(min_client_lag_ns=10_000_000)
    for index, (name, limit_ns) in enumerate(
        (("loop_lag_p50_ns", 4_050_000), ("loop_lag_p99_ns", 40_500_000), ("dispatch_lag_p99_ns", 40_500_000))
    ):
        for lag_ns, status in ((limit_ns, "pass"), (limit_ns + 1, "invalid")):
            client = HEALTH | {name: lag_ns}
            folder = tmp_path / f"{index}-{status}"
            assert verdict_of(folder, made, candidate={"client": client}, config=config).status == status
    least = CompareConfig(min_client_lag_ns=0, max_client_lag_fraction=0.0)
    assert verdict_of(tmp_path / "least", made, config=least).status == "invalid"


def test_failing_requests(tmp_path):
    made = rows_of(defects={"candidate": Defect(failing_fraction=1.0)})
    broken = made["candidate"][0]
    good = rows_of()["candidate"][0]
    only_candidate = verdict_of(tmp_path / "a", [*broken[:16], *good[16:]])
    assert only_candidate.status == "fail"
    assert "16 of 32 requests to candidate were not answered" in only_candidate.reason
    few = verdict_of(tmp_path / "b", [broken[0], *good[1:]])
    assert few.status == "invalid"
    both = verdict_of(tmp_path / "c", broken, base_rows=broken)
    assert both.status == "invalid"
    assert "requests to base were not answered" in both.reason
    rare = CompareConfig(max_failed_fraction=0.04)
    assert verdict_of(tmp_path / "d", [broken[0], *good[1:]], config=rare).status == "pass"


def test_rows_that_are_missing_cut_off_or_doubled_make_it_unknown(tmp_path):
    good = rows_of()["candidate"][0]
    missing = verdict_of(tmp_path / "a", good[1:])
    assert missing.status == "unknown"
    assert "1 requests have a row of base only" in missing.reason
    doubled = verdict_of(tmp_path / "b", [*good, good[0]])
    assert "second row" in doubled.reason
    unfinished = verdict_of(tmp_path / "c", good, candidate={"complete": False})
    assert "never finished" in unfinished.reason
    base = write_run(tmp_path / "d", "base", rows_of()["base"][0])
    cut = write_run(tmp_path / "d", "candidate", good)
    file = cut.path / "requests.jsonl"
    file.write_bytes(file.read_bytes()[:-5])
    verdict = compare(base, Run.open(cut.path))
    assert verdict.status == "unknown"
    assert "cut off" in verdict.reason
    file.write_bytes(b"{}\n" + file.read_bytes())
    damaged = compare(base, Run.open(cut.path))
    assert damaged.status == "unknown"
    assert "damaged" in damaged.reason
    empty = verdict_of(tmp_path / "e", [])
    assert empty.status == "unknown"


def test_impossible_rows_make_it_unknown(tmp_path):
    good = rows_of()["candidate"][0]
    for index, fields in enumerate(
        (
            {"finished_ns": 0},
            {"chunk_num_tokens": [1]},
            {"chunk_num_tokens": [2] * 24},
            {"chunk_num_tokens": [-1] * 24},
        )
    ):
        verdict = verdict_of(tmp_path / str(index), changed(good, 3, **fields))
        assert verdict.status == "unknown"
        assert "claim what cannot be" in finding_of(verdict, "rows", "unknown").title


def test_other_prompt_tokens_fail(tmp_path):
    good = rows_of()["candidate"][0]
    verdict = verdict_of(tmp_path / "a", changed(good, 2, prompt_token_ids=[1, 2, 4, 2]))
    assert verdict.status == "fail"
    assert "at prompt token 2 base has 3, candidate 4" in verdict.reason
    blind = [msgspec.structs.replace(row, prompt_token_ids=None) for row in good]
    usage = msgspec.structs.replace(good[0].usage, prompt_tokens=5)
    counted = verdict_of(tmp_path / "b", changed(blind, 2, usage=usage))
    assert counted.status == "fail"
    assert "base counts 4 prompt tokens, candidate 5" in counted.reason


def test_text_finish_reason_and_usage_of_equal_tokens(tmp_path):
    made = rows_of()
    good = made["candidate"][0]
    text = verdict_of(tmp_path / "a", changed(good, 0, text="`rm -rf`"))
    assert text.status == "fail"
    assert "equal tokens, but another text" in text.reason
    ending = verdict_of(tmp_path / "b", changed(good, 0, finish_reason="stop"))
    assert ending.status == "fail"
    usage = msgspec.structs.replace(good[0].usage, completion_tokens=25)
    miscounted = verdict_of(tmp_path / "c", changed(good, 0, usage=usage))
    assert miscounted.status == "fail"
    assert "reports 25 tokens and sends 24" in miscounted.reason
    # Where the twin has it too, it is the deployment's habit and nobody's regression.
    twin = changed(made["twin"][0], 1, usage=usage)
    excused = verdict_of(tmp_path / "d", changed(good, 0, usage=usage), floor_rows=twin)
    assert finding_of(excused, "tokens", "unknown")
    # Where base has it too, neither.
    base = [msgspec.structs.replace(row, usage=usage) for row in made["base"][0]]
    habit = [msgspec.structs.replace(row, usage=usage) for row in good]
    assert verdict_of(tmp_path / "e", habit, base_rows=base).status == "pass"


def test_a_log_that_lost_rows_is_unknown(tmp_path):
    made = rows_of()
    base = write_run(tmp_path, "base", *made["base"])
    logs = made["candidate"][1]
    verdict = compare(base, write_run(tmp_path, "candidate", made["candidate"][0], logs[3:]))
    assert verdict.status == "unknown"
    assert f"the token log lacks 3 of {len(logs)} answered requests" in verdict.reason


def test_a_log_that_names_other_tokens_fails(tmp_path):
    made = rows_of()
    logs = made["candidate"][1]
    wrong = [msgspec.structs.replace(logs[0], token_ids=[9, *logs[0].token_ids[1:]]), *logs[1:]]
    base = write_run(tmp_path, "base", *made["base"])
    verdict = compare(base, write_run(tmp_path, "candidate", made["candidate"][0], wrong))
    assert verdict.status == "fail"
    assert "other tokens than its token log" in verdict.reason


def test_a_floor_that_is_none_excuses_nothing(tmp_path):
    made = rows_of()
    base = write_run(tmp_path, "base", made["base"][0])
    candidate = write_run(tmp_path, "candidate", made["candidate"][0])
    for label, changes, words in (
        ("faulty", {"identity": identity(faults=["slow-decode"])}, "faults planted"),
        ("other", {"identity": identity(engine_config_sha256="z")}, "configured differently"),
        ("else", {"workload_sha256": "z"}, "different requests"),
        ("cut", {"complete": False}, "never finished"),
        ("same", {"run_id": "base-1"}, "it is base itself"),
    ):
        floor = write_run(tmp_path, label, made["twin"][0], **changes)
        verdict = compare(base, candidate, floor=floor)
        assert verdict.status == "unknown"
        assert words in verdict.reason
        assert verdict.floor is None


def test_differences_by_the_servers_own_account_are_listed(tmp_path):
    other = identity(dtype="bf16", faults=["x"], versions={"torch": "2"}, engine_config={"threads": 2})
    verdict = verdict_of(tmp_path, rows_of()["candidate"][0], candidate={"identity": other})
    assert verdict.differences == [
        "«dtype»: base «fp32», candidate «bf16»",
        "«engine_config.threads»: base «1», candidate «2»",
        "«versions.torch»: base «None», candidate «2»",
        "«faults»: base «none», candidate «x»",
    ]
    assert "planted faults" in to_text(verdict)
