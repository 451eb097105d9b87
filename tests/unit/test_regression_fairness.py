"""What makes a comparison of times unfair, and that it neither passes, nor fails, nor hides what is wrong."""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec
import pytest

sys.path.insert(0, str(Path(__file__).parent))
from judging import SMALL, finding_of, rows_of, verdict_of
from synthetic_runs import HEALTH, Defect, make_rows, write_run

from firstdiff.regression.diff import CompareConfig, compare
from firstdiff.regression.report import to_text
from firstdiff.regression.stats import holm

LATE = {"client": HEALTH | {"loop_lag_p99_ns": 900_000_000}}


def replaced(rows, **fields):
    return [msgspec.structs.replace(row, **fields) for row in rows]


def uncounted(rows):
    """The rows of an endpoint that sends text and nothing else."""
    return [
        msgspec.structs.replace(
            row,
            usage=None,
            token_ids=None,
            token_texts=None,
            logprobs=None,
            top_logprobs=None,
            chunk_num_tokens=[None] * len(row.chunk_received_ns),
        )
        for row in rows
    ]


def in_one_piece(rows):
    return [
        msgspec.structs.replace(row, chunk_received_ns=row.chunk_received_ns[-1:], chunk_num_tokens=[24])
        for row in rows
    ]


def made(slower=0.0, **defect):
    """Rows of base and of a candidate that is that much slower throughout."""
    wrong = Defect(slower_decode=slower, slower_prefill=slower, **defect)
    rows = rows_of(defects={"candidate": wrong})
    return rows["base"][0], rows["candidate"][0]


def latency_of(verdict, metric):
    found = [one for one in verdict.findings if one.part == "latency" and one.title.startswith(metric)]
    assert len(found) == 1
    return found[0]


@pytest.mark.parametrize("spoil", [uncounted, in_one_piece])
@pytest.mark.parametrize("side", ["base", "candidate"])
@pytest.mark.parametrize("slower", [0.0, 9.0])
def test_a_metric_that_only_one_side_gives_is_unknown_and_e2e_of_equal_answers_is_judged(
    tmp_path, spoil, side, slower
):
    base, candidate = made(slower)
    if side == "base":
        base = spoil(base)
    else:
        candidate = spoil(candidate)
    verdict = verdict_of(tmp_path, candidate, base_rows=base)
    assert verdict.status == ("fail" if slower else "unknown")
    tpot = latency_of(verdict, "tpot")
    assert tpot.status == "unknown"
    lack = "gives no token counts" if spoil is uncounted else "sends its answers in one piece"
    assert f"cannot be judged: {side} {lack}" in tpot.title
    assert "in 32 of 32 requests" in tpot.title
    assert latency_of(verdict, "e2e").status == ("fail" if slower else "pass")


def test_e2e_of_other_answers_without_counts_is_never_waved_through(tmp_path):
    base, candidate = made(9.0, diverging_fraction=1.0)
    verdict = verdict_of(tmp_path, uncounted(candidate), base_rows=uncounted(base))
    e2e = latency_of(verdict, "e2e")
    assert e2e.status == "unknown"
    assert "the answers differ, and base gives no token counts" in e2e.title
    assert verdict.status != "pass"


def test_e2e_of_equal_answers_ignores_what_the_candidate_counts(tmp_path):
    base, candidate = made(1.0)
    counts = msgspec.structs.replace(base[0].usage, completion_tokens=240)
    verdict = verdict_of(tmp_path, replaced(uncounted(candidate), usage=counts), base_rows=base)
    assert latency_of(verdict, "e2e").status == "fail"
    assert latency_of(verdict, "e2e").evidence[0].change == pytest.approx(1.0, abs=0.05)


@pytest.mark.parametrize(
    ("loads", "words"),
    [
        (({"concurrency": 4}, {"concurrency": 1}), "concurrency 4 and 1"),
        (({"rate_per_s": 2.0}, {"rate_per_s": 8.0}), "rate_per_s 2.0 and 8.0"),
        (({"concurrency": 4}, {"concurrency": 4, "rate_per_s": 2.0}), "rate_per_s none and 2.0"),
        (({"concurrency": 4}, {"concurrency": "<b>"}), "concurrency 4 and «<b>»"),
    ],
)
def test_other_loads_leave_tokens_to_judge_and_no_latency(tmp_path, loads, words):
    for slower, diverging, status in ((0.0, 0.0, "unknown"), (1.0, 0.0, "unknown"), (0.0, 1.0, "fail")):
        rows = rows_of(defects={"candidate": Defect(slower, slower, diverging)})
        base, candidate, twin = (
            write_run(tmp_path / f"{slower}-{diverging}", label, *rows[label], SMALL, load=load)
            for label, load in zip(("base", "candidate", "twin"), (*loads, loads[0]), strict=True)
        )
        verdict = compare(base, candidate, floor=twin)
        assert verdict.status == status
        assert finding_of(verdict, "tokens").status == ("fail" if diverging else "pass")
        latency = [one for one in verdict.findings if one.part == "latency"]
        assert [one.status for one in latency] == ["unknown"]
        assert f"they were asked at different loads: {words}" in latency[0].title
        assert "slower" not in verdict.reason


def test_equal_loads_are_compared(tmp_path):
    base, candidate = made()
    for index, loads in enumerate(
        (({"concurrency": 4}, {"concurrency": 4, "rate_per_s": None}), *[({"rate_per_s": 2.0},) * 2])
    ):
        one = write_run(tmp_path / str(index), "base", base, load=loads[0])
        other = write_run(tmp_path / str(index), "candidate", candidate, load=loads[1])
        assert compare(one, other).status == "pass"


def test_a_twin_asked_at_another_load_excuses_no_slow_down(tmp_path):
    slow = Defect(slower_decode=0.5)
    rows = rows_of(defects={"candidate": slow, "twin": slow})
    base, candidate, twin = (
        write_run(tmp_path, label, *rows[label], load={"concurrency": count})
        for label, count in (("base", 1), ("candidate", 1), ("twin", 8))
    )
    assert compare(base, candidate, floor=twin).status == "fail"


@pytest.mark.parametrize(
    ("slower", "status"),
    [(-0.3, "pass"), (0.0, "pass"), (0.12, "unknown"), (0.3, "unknown"), (0.9, "unknown"), (1.6, "fail")],
)
def test_one_after_the_other_only_a_gross_slow_down_fails(tmp_path, slower, status):
    base, candidate = made(slower)
    base = replaced(base, block_index=0)
    later = [msgspec.structs.replace(row, sent_unix_ns=row.sent_unix_ns + 10**12) for row in candidate]
    verdict = verdict_of(tmp_path, replaced(later, block_index=0), base_rows=base)
    assert verdict.status == status
    assert verdict.took_turns is False
    text = to_text(verdict)
    assert "not more than 2 times slower in one session than in another" in text
    assert ("firstdiff compare URL URL" in text) == (status == "unknown")
    assert verdict_of(tmp_path / "turns", candidate, base_rows=base).took_turns is True


def test_the_session_factor_is_the_limit(tmp_path):
    base, candidate = made(1.6)
    later = [msgspec.structs.replace(row, sent_unix_ns=row.sent_unix_ns + 10**12) for row in candidate]
    for factor, status in ((1.0, "fail"), (2.0, "fail"), (2.6, "unknown"), (4.0, "unknown")):
        config = CompareConfig(session_factor=factor)
        verdict = verdict_of(tmp_path / str(factor), later, base_rows=base, config=config)
        assert verdict.status == status
    with pytest.raises(ValueError, match="expected session_factor in"):
        CompareConfig(session_factor=0.9).validate()


def test_a_run_is_not_compared_with_itself(tmp_path):
    rows = rows_of()
    base = write_run(tmp_path, "base", rows["base"][0])
    copy = write_run(tmp_path, "copy", rows["base"][0], run_id="base-1")
    for other in (base, copy):
        verdict = compare(base, other)
        assert verdict.status == "unknown"
        assert "they are one Run, «base-1», given twice" in verdict.reason
        assert [one.part for one in verdict.findings] == ["comparability"]
    candidate = write_run(tmp_path, "candidate", rows["candidate"][0])
    verdict = compare(base, candidate, floor=candidate)
    assert verdict.status == "unknown"
    assert "it is the candidate itself" in verdict.reason
    assert verdict.floor is None


@pytest.mark.parametrize("late", ["base", "candidate"])
def test_a_late_client_spoils_times_and_hides_nothing_else(tmp_path, late):
    for name, defect, status in (
        ("slow", Defect(slower_decode=3.0), "invalid"),
        ("tokens", Defect(slower_decode=3.0, diverging_fraction=1.0), "fail"),
        ("outcomes", Defect(failing_fraction=0.7), "fail"),
    ):
        rows = rows_of(defects={"candidate": defect})
        base, candidate, twin = (
            write_run(tmp_path / name, label, *rows[label], **(LATE if label == late else {}))
            for label in ("base", "candidate", "twin")
        )
        verdict = compare(base, candidate, floor=twin)
        assert verdict.status == status
        assert finding_of(verdict, "client").status == "invalid"
        latency = {one.status for one in verdict.findings if one.part == "latency" and one.gates}
        assert latency == {"invalid"}
        assert "slower" not in verdict.reason


def test_a_late_client_does_not_hide_that_runs_cannot_be_compared(tmp_path):
    base, candidate = made()
    verdict = verdict_of(tmp_path, candidate, base_rows=base, candidate=LATE | {"workload_sha256": "z"})
    assert verdict.status == "unknown"
    assert "different requests" in verdict.reason


@pytest.mark.parametrize(("count", "status"), [(0, "pass"), (4, "invalid"), (7, "invalid"), (8, "fail")])
def test_when_failed_requests_fail_and_when_they_are_invalid(tmp_path, count, status):
    base, candidate = made()
    broken = make_rows(SMALL, ["candidate"], {"candidate": Defect(failing_fraction=1.0)})["candidate"][0]
    assert verdict_of(tmp_path / "a", [*broken[:count], *candidate[count:]]).status == status
    if count:
        mirrored = verdict_of(tmp_path / "b", candidate, base_rows=[*broken[:count], *base[count:]])
        assert mirrored.status == "invalid"
        both = verdict_of(
            tmp_path / "c",
            [*broken[:count], *candidate[count:]],
            base_rows=[*base[:-count], *broken[-count:]],
        )
        assert both.status == "invalid"


def test_weights_share_out_the_error_rate():
    assert holm({"a": 0.004, "b": 0.5, "c": 0.5}, {"a": 2.0}) == {"a": 0.008, "b": 1.0, "c": 1.0}
    # What is left after the first is for the others, as without weights.
    assert holm({"a": 0.001, "b": 0.01, "c": 0.5}, {"a": 2.0})["b"] == pytest.approx(0.02)
    assert holm({"a": 0.01, "b": 0.02}) == {"a": 0.02, "b": 0.02}
