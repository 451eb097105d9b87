"""Two Runs on disk, one Verdict: tokens, log-probabilities and latencies, and the reason given."""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec
import pytest

sys.path.insert(0, str(Path(__file__).parent))
from judging import SMALL, finding_of, rows_of, verdict_of
from synthetic_runs import QUIET, Defect, Workload, make_rows, make_runs, write_run

from firstdiff.regression.diff import CompareConfig, compare
from firstdiff.regression.report import to_json
from firstdiff.regression.verdict import EXIT_CODES, TokenEvidence, Verdict, merge
from firstdiff.tracing.store import Run


def test_few_divergences_with_wide_gaps_fail_and_are_named(tmp_path):
    made = rows_of()
    broken = rows_of(defects={"candidate": Defect(diverging_fraction=1.0, shift=0.5)})["candidate"][0]
    verdict = verdict_of(tmp_path, [*broken[:2], *made["candidate"][0][2:]], floor_rows=made["twin"][0])
    assert verdict.status == "fail"
    assert finding_of(verdict, "tokens").status == "unknown"
    assert verdict.reason.startswith(
        "2 of 32 requests diverge (noise floor, twin: 0 of 32), first in case «case-0000»"
    )
    assert "log-probabilities of equal tokens moved by up to 0.5 nat" in verdict.reason


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
        "the decode phase is 30.",
        "(tpot and e2e beyond the margin)",
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
    notes = [one.title for one in verdict.findings if one.part == "latency" and not one.gates]
    for metric in ("ttft", "tpot"):
        assert any(note.startswith(f"{metric} is given by neither side: base sends its") for note in notes)


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
