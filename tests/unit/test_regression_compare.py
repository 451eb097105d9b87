"""Two Runs on disk, one Verdict: every status and the reason it gives."""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec
import pytest

sys.path.insert(0, str(Path(__file__).parent))
from ledger_rows import SAMPLING, identity
from synthetic_runs import HEALTH, QUIET, Defect, Workload, changed, make_rows, make_runs, write_run

from firstdiff.regression.diff import CompareConfig, compare
from firstdiff.regression.report import to_json, to_text
from firstdiff.regression.verdict import EXIT_CODES, TokenEvidence, Verdict, merge
from firstdiff.tracing.store import Run

SMALL = Workload(num_cases=32, block_size=2, noise=QUIET)


def rows_of(workload=SMALL, defects=None, labels=("base", "candidate", "twin")):
    return make_rows(workload, list(labels), defects)


def finding_of(verdict, part, status=None):
    found = [one for one in verdict.findings if one.part == part and status in (None, one.status)]
    assert found, (part, status, verdict.findings)
    return found[0]


def verdict_of(tmp_path, candidate_rows, *, base_rows=None, floor_rows=None, candidate=None, config=None):
    made = rows_of()
    base = write_run(tmp_path, "base", base_rows or made["base"][0], made["base"][1])
    other = write_run(tmp_path, "candidate", candidate_rows, (), **(candidate or {}))
    floor = None if floor_rows is None else write_run(tmp_path, "twin", floor_rows)
    return compare(base, other, floor=floor, config=config)


def test_equal_sides_pass_and_say_what_was_ruled_out(tmp_path):
    base, candidate = make_runs(tmp_path, SMALL)
    verdict = compare(base, candidate)
    assert verdict.status == "pass"
    assert EXIT_CODES[verdict.status] == 0
    assert "0 of 32 requests diverge" in verdict.reason
    assert "within the margin" in verdict.reason
    assert "fewer than 8.9%" in finding_of(verdict, "tokens").detail


def test_the_same_runs_give_the_same_bytes(tmp_path):
    workload = Workload(block_size=2, seed=4)
    base, candidate, twin = make_runs(
        tmp_path, workload, {"candidate": Defect(0.3, 0.0, 0.5)}, ["base", "candidate", "twin"]
    )
    first = to_json(compare(base, candidate, floor=twin))
    again = [Run.open(run.path) for run in (base, candidate, twin)]
    assert to_json(compare(again[0], again[1], floor=again[2])) == first
    assert msgspec.json.decode(first, type=Verdict) == compare(base, candidate, floor=twin)


def test_a_defect_fails_and_is_named(tmp_path):
    defect = Defect(slower_decode=0.3, diverging_fraction=0.5, shift=0.75)
    base, candidate, twin = make_runs(tmp_path, SMALL, {"candidate": defect}, ["base", "candidate", "twin"])
    verdict = compare(base, candidate, floor=twin)
    assert verdict.status == "fail"
    assert EXIT_CODES[verdict.status] == 1
    tokens = finding_of(verdict, "tokens", "fail")
    evidence = tokens.evidence[0]
    assert isinstance(evidence, TokenEvidence)
    first = evidence.first
    assert first.position == min(one.position for one in evidence.examples)
    assert first.base_gap == pytest.approx(1.0)
    assert first.candidate_gap == pytest.approx(0.5)
    assert first.base_token_id + 1 == first.candidate_token_id
    # The sentence names position, both ids, both texts, both gaps, the floor, and the slower phase.
    for words in (
        f"token {first.position}",
        f"(id {first.base_token_id})",
        f"(id {first.candidate_token_id})",
        f"«{first.base_text}»",
        "1 nat likelier",
        "0.5 nat likelier",
        "noise floor, twin: 0 of 32",
        "tpot 30.0% slower",
        "the decode phase is 30.",
    ):
        assert words in verdict.reason


def test_divergence_without_a_floor_is_unknown(tmp_path):
    base, candidate = make_runs(tmp_path, SMALL, {"candidate": Defect(diverging_fraction=1.0)})
    verdict = compare(base, candidate)
    assert verdict.status == "unknown"
    assert EXIT_CODES[verdict.status] == 3
    assert "no noise floor" in verdict.reason
    assert "add a twin" in finding_of(verdict, "tokens").detail


def test_base_own_repeats_are_a_floor(tmp_path):
    workload = Workload(num_cases=32, block_size=2, repeats=2, noise=QUIET)
    base, candidate = make_runs(tmp_path, workload, {"candidate": Defect(diverging_fraction=0.5)})
    verdict = compare(base, candidate)
    assert verdict.status == "fail"
    assert "base's own repeats: 0 of 32" in finding_of(verdict, "tokens", "fail").title


def test_a_fault_of_the_second_repeat_only_is_found(tmp_path):
    workload = Workload(num_cases=32, block_size=2, repeats=2, noise=QUIET)
    made = make_rows(workload, ["base", "candidate"])
    broken = make_rows(workload, ["base", "candidate"], {"candidate": Defect(diverging_fraction=1.0)})
    mixed = [
        bad if bad.repeat_index == 1 else good
        for good, bad in zip(made["candidate"][0], broken["candidate"][0], strict=True)
    ]
    base = write_run(tmp_path, "base", made["base"][0], workload=workload)
    verdict = compare(base, write_run(tmp_path, "candidate", mixed, workload=workload))
    assert finding_of(verdict, "tokens", "fail").p_value < 0.01


def test_a_noisy_floor_excuses_as_much_noise(tmp_path):
    noisy = Defect(logprob_sd=0.2)
    workload = Workload(num_cases=32, block_size=2, noise=QUIET, dtype="bf16")
    made = make_rows(workload, ["base", "candidate", "twin"], {"candidate": noisy, "twin": noisy})
    diverging = make_rows(workload, ["other"], {"other": Defect(diverging_fraction=1.0, logprob_sd=0.2)})
    # Candidate and twin each part from base in ten cases, not the same ones.
    candidate = [*diverging["other"][0][:10], *made["candidate"][0][10:]]
    twin = [*made["twin"][0][:10], *diverging["other"][0][10:20], *made["twin"][0][20:]]
    runs = [
        write_run(tmp_path, label, rows, workload=workload)
        for label, rows in (("base", made["base"][0]), ("candidate", candidate), ("twin", twin))
    ]
    verdict = compare(runs[0], runs[1], floor=runs[2])
    assert finding_of(verdict, "tokens").status == "pass"
    assert "no further than noise" in finding_of(verdict, "tokens").detail
    assert finding_of(verdict, "logprobs").status == "pass"


def test_logprobs_give_away_what_changes_no_token(tmp_path):
    made = rows_of()
    moved = [
        msgspec.structs.replace(row, logprobs=[value - 0.2 for value in row.logprobs])
        for row in made["candidate"][0]
    ]
    verdict = verdict_of(tmp_path, moved, floor_rows=made["twin"][0])
    assert finding_of(verdict, "tokens").status == "pass"
    assert finding_of(verdict, "logprobs").status == "fail"
    assert verdict.status == "fail"


def test_an_immaterial_shift_passes(tmp_path):
    made = rows_of()
    moved = [
        msgspec.structs.replace(row, logprobs=[value - 0.04 for value in row.logprobs])
        for row in made["candidate"][0]
    ]
    verdict = verdict_of(tmp_path, moved, floor_rows=made["twin"][0])
    assert finding_of(verdict, "logprobs").status == "pass"


def test_without_logprobs_few_divergences_stay_unknown_and_many_fail(tmp_path):
    def without(rows):
        return [msgspec.structs.replace(row, logprobs=None, top_logprobs=None) for row in rows]

    made = rows_of()
    broken = rows_of(defects={"candidate": Defect(diverging_fraction=1.0)})["candidate"][0]
    for count, status in ((2, "unknown"), (16, "fail")):
        folder = tmp_path / str(count)
        candidate = [*broken[:count], *made["candidate"][0][count:]]
        verdict = verdict_of(
            folder,
            without(candidate),
            base_rows=without(made["base"][0]),
            floor_rows=without(made["twin"][0]),
        )
        assert finding_of(verdict, "tokens").status == status
        assert all(finding.part != "logprobs" for finding in verdict.findings)


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
    config = CompareConfig(min_client_lag_ns=0, max_client_lag_fraction=0.0)
    made = rows_of()["candidate"][0]
    assert verdict_of(tmp_path / "a", made, config=config).status == "invalid"
    on_time = HEALTH | {"loop_lag_p99_ns": 40_500_000}
    # Half of the median TTFT, which is 81 ms on the quiet machine.
    assert verdict_of(tmp_path / "b", made, candidate={"client": on_time}).status == "pass"
    late = HEALTH | {"loop_lag_p99_ns": 40_500_001}
    assert verdict_of(tmp_path / "c", made, candidate={"client": late}).status == "invalid"


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


def test_too_few_pairs_are_unknown(tmp_path):
    workload = Workload(num_cases=15, block_size=1, noise=QUIET)
    base, candidate = make_runs(tmp_path / "a", workload)
    verdict = compare(base, candidate)
    assert verdict.status == "unknown"
    assert "too few pairs" in finding_of(verdict, "latency", "unknown").title
    assert "At least 16 cases" in finding_of(verdict, "tokens", "unknown").detail
    base, candidate = make_runs(tmp_path / "b", Workload(num_cases=16, block_size=4, noise=QUIET))
    assert compare(base, candidate).status == "pass"


def test_sides_that_took_no_turns_get_wider_intervals(tmp_path):
    made = rows_of(Workload(noise=QUIET))
    candidate = [
        msgspec.structs.replace(row, sent_unix_ns=row.sent_unix_ns + 10**12, block_index=0)
        for row in made["candidate"][0]
    ]
    base = [msgspec.structs.replace(row, block_index=0) for row in made["base"][0]]
    verdict = verdict_of(tmp_path, candidate, base_rows=base)
    latency = finding_of(verdict, "latency")
    assert "did not take turns" in latency.detail
    assert latency.interval.high > 0.05
    assert verdict.status == "pass"


def test_answers_of_other_lengths_are_compared_at_one_length(tmp_path):
    made = rows_of()
    longer = make_rows(Workload(num_cases=32, num_tokens=48, block_size=2, noise=QUIET), ["candidate"])
    verdict = verdict_of(tmp_path, longer["candidate"][0], floor_rows=made["twin"][0])
    e2e = next(one for one in verdict.findings if one.title.startswith("e2e"))
    assert e2e.status == "pass"
    assert abs(e2e.evidence[0].change) < 0.01


def test_answers_in_one_piece_have_only_e2e(tmp_path):
    def whole(rows):
        return [
            msgspec.structs.replace(row, chunk_received_ns=row.chunk_received_ns[-1:], chunk_num_tokens=[24])
            for row in rows
        ]

    made = rows_of()
    verdict = verdict_of(tmp_path, whole(made["candidate"][0]), base_rows=whole(made["base"][0]))
    assert verdict.status == "pass"
    gating = [one.title for one in verdict.findings if one.part == "latency" and one.gates]
    assert len(gating) == 1
    assert gating[0].startswith("e2e")


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


def test_settings_out_of_bounds_are_refused(tmp_path):
    base, candidate = make_runs(tmp_path, SMALL)
    for name, value in (("alpha", 0.0), ("latency_margin", -1.0), ("min_pairs", 1), ("num_resamples", 1)):
        with pytest.raises(ValueError, match=f"expected {name} in"):
            compare(base, candidate, config=msgspec.structs.replace(CompareConfig(), **{name: value}))


def test_statuses_merge_by_severity():
    assert merge([]) == "pass"
    assert merge(["pass", "unknown"]) == "unknown"
    assert merge(["unknown", "fail", "pass"]) == "fail"
    assert merge(["fail", "invalid"]) == "invalid"
