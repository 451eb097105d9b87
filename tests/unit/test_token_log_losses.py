"""Rows that the log cannot keep: nobody waits, all are counted, the log says so, and no verdict passes."""

from __future__ import annotations

import sys
import threading
from pathlib import Path

import msgspec
import pytest

sys.path.insert(0, str(Path(__file__).parent))
from ledger_rows import http_row, identity, log_row, step_row
from synthetic_runs import Defect, Workload, make_rows, write_run

from firstdiff.harness.replica import collect_rows
from firstdiff.regression.diff import compare
from firstdiff.tracing.log_content import redacted
from firstdiff.tracing.log_queue import BoundedQueue
from firstdiff.tracing.records import Cut, LossRow
from firstdiff.tracing.store import Run
from firstdiff.tracing.token_log import LogLimits, TokenLogWriter, read_log

FAST = {"linger_s": 0.0}


class Hanging:
    """A handler that waits to be let go on, and keeps what it got."""

    def __init__(self):
        self.go_on = threading.Event()
        self.has_begun = threading.Event()
        self.got = []

    def __call__(self, batch):
        self.has_begun.set()
        assert self.go_on.wait(20)
        self.got += batch


class HangingDisk(TokenLogWriter):
    """A log whose disk hangs until it is let go on."""

    def __init__(self, *args):
        self.go_on, self.has_begun = threading.Event(), threading.Event()
        super().__init__(*args)

    def _append(self, name, lines):
        self.has_begun.set()
        assert self.go_on.wait(20)
        super()._append(name, lines)


def test_a_queue_hands_on_everything_in_order():
    got = []
    queue = BoundedQueue(got.extend, max_bytes=1 << 20, name="test")
    for item in range(1000):
        assert queue.put(item, num_bytes=10)
    assert queue.flush(timeout_s=20)
    assert got == list(range(1000))
    assert queue.put(1000, num_bytes=10)
    assert queue.close(timeout_s=20) == []
    assert got == list(range(1001))
    assert not queue.is_stuck
    assert not queue.put(1001, num_bytes=1)
    assert queue.close(timeout_s=20) == []


def test_a_queue_is_full_at_its_bound_and_free_again_when_handed_on():
    hanging = Hanging()
    queue = BoundedQueue(hanging, max_bytes=100, name="test", **FAST)
    assert queue.put("first", num_bytes=40)
    assert hanging.has_begun.wait(20)
    # What is being handed on counts until it is done.
    assert queue.put("second", num_bytes=60)
    assert not queue.put("third", num_bytes=1)
    assert not queue.flush(timeout_s=0.01)
    hanging.go_on.set()
    assert queue.flush(timeout_s=20)
    assert queue.put("large", num_bytes=1000), "one item alone may be larger"
    assert queue.close(timeout_s=20) == []
    assert hanging.got == ["first", "second", "large"]


def test_a_queue_that_hangs_gives_back_what_it_did_not_begin():
    hanging = Hanging()
    queue = BoundedQueue(hanging, max_bytes=100, name="test", **FAST)
    queue.put("begun", num_bytes=1)
    assert hanging.has_begun.wait(20)
    queue.put("waiting", num_bytes=1)
    assert queue.close(timeout_s=0.05) == ["waiting"]
    assert queue.is_stuck
    hanging.go_on.set()


def test_a_full_queue_drops_rows_counts_them_and_the_log_says_so(tmp_path, caplog):
    limits = LogLimits(max_queued_bytes=4000)
    writer = HangingDisk(tmp_path, identity(), limits)
    writer.write(log_row(request_id="r0"))
    assert writer.has_begun.wait(20)
    for index in range(1, 50):
        writer.write(log_row(request_id=f"r{index}", received_ns=1_000 + index, flushed_ns=9_000 + index))
    writer.write_step(step_row(7))
    writer.write_http(http_row())
    num_lost = writer.num_lost_rows
    assert 40 < num_lost <= 51
    writer.go_on.set()
    assert writer.flush(timeout_s=20)
    writer.write(log_row(request_id="after"))
    writer.close()
    assert writer.num_lost_rows == num_lost
    log = read_log(tmp_path)
    assert len(log.rows) + sum(loss.num_rows for loss in log.losses if loss.file == "tokens.jsonl") == 51
    assert sum(loss.num_rows for loss in log.losses) == num_lost
    assert {loss.reason for loss in log.losses} == {"queue_full"}
    tokens = next(loss for loss in log.losses if loss.file == "tokens.jsonl")
    assert (tokens.last_ns, log.rows[-1].request_id) == (9_049, "after")
    assert len(caplog.records) == 1
    assert "rows are lost" in caplog.text


def test_a_disk_that_hangs_ends_the_close_and_counts_what_is_left(tmp_path):
    writer = HangingDisk(tmp_path, identity(), LogLimits(close_timeout_s=0.05))
    writer.write(log_row())
    assert writer.has_begun.wait(20)
    writer.write(log_row())
    writer.close()
    # One given back, and one that nobody will know of.
    assert writer.num_lost_rows == 2
    writer.go_on.set()


def test_a_row_too_large_to_cut_is_lost_and_said(tmp_path):
    writer = TokenLogWriter(tmp_path, identity(), LogLimits(max_row_bytes=1000))
    writer.write(log_row(request_id="r1", metadata={"k": "v" * 2000}))
    writer.write(log_row(request_id="r2", metadata={}))
    writer.close()
    (loss,) = read_log(tmp_path).losses
    assert (loss.num_rows, loss.reason) == (2, "unwritable")


def collected(tmp_path, *, losses=(), num_kept=None, name="candidate"):
    """Two Runs, `name`'s filled from a server's log with these losses and only `num_kept` of its rows."""
    made = make_rows(Workload(num_cases=32, repeats=2), ["base", "candidate"])
    runs = {}
    for label, (rows, logs) in made.items():
        write_run(tmp_path, label, rows)
        folder = tmp_path / f"log-{label}"
        writer = TokenLogWriter(folder, identity())
        for row in logs[: num_kept if label == name else None]:
            writer.write(row)
        writer.close()
        if label == name:
            with Run.create(tmp_path / "losses", Run.open(tmp_path / label).manifest) as other:
                for loss in losses:
                    other.append("tokens", loss)
            with (folder / "tokens.jsonl").open("ab") as file:
                file.write(b"".join(path.read_bytes() for path in (tmp_path / "losses").glob("tokens.jsonl")))
        with Run.resume(tmp_path / label) as run:
            collect_rows(folder, run)
        runs[label] = Run.open(tmp_path / label)
    return runs, made[name][1]


def loss(first_ns, last_ns, file="tokens.jsonl"):
    return LossRow(file=file, num_rows=3, reason="disk", first_ns=first_ns, last_ns=last_ns)


def test_two_whole_runs_pass(tmp_path):
    runs, _ = collected(tmp_path)
    assert compare(runs["base"], runs["candidate"]).status == "pass"


@pytest.mark.parametrize("file", ["tokens.jsonl", "steps.jsonl", "http.jsonl"])
@pytest.mark.parametrize("name", ["base", "candidate"])
def test_lost_rows_of_either_side_make_the_verdict_unknown(tmp_path, file, name):
    runs, _ = collected(tmp_path, losses=[loss(0, 1 << 60, file)], name=name)
    verdict = compare(runs["base"], runs["candidate"])
    assert verdict.status == "unknown"
    assert any(f"could not keep 3 rows of its «{file}» (disk)" in one.title for one in verdict.findings)


def test_losses_long_before_a_run_are_none_of_it(tmp_path):
    runs, _ = collected(tmp_path, losses=[loss(0, 10)])
    assert compare(runs["base"], runs["candidate"]).status == "pass"


@pytest.mark.parametrize("num_kept", [0, 5])
def test_a_run_whose_rows_are_missing_takes_all_losses(tmp_path, num_kept):
    runs, _ = collected(tmp_path, losses=[loss(0, 10)], num_kept=num_kept)
    verdict = compare(runs["base"], runs["candidate"])
    assert verdict.status == "unknown"
    titles = " ".join(one.title for one in verdict.findings)
    assert "could not keep 3 rows" in titles
    assert f"lacks {64 - num_kept} of 64" in titles


@pytest.mark.parametrize("content", ["ids", "hash"])
def test_runs_of_redacted_logs_pass_and_a_slower_phase_is_still_seen(tmp_path, content):
    statuses = {}
    for name, defect in (("sound", Defect()), ("slow", Defect(slower_decode=0.6))):
        made = make_rows(Workload(num_cases=32, repeats=2), ["base", "candidate"], {"candidate": defect})
        runs = [
            write_run(tmp_path / name, label, rows, [redacted(log, content) for log in logs])
            for label, (rows, logs) in made.items()
        ]
        statuses[name] = compare(*runs)
    assert statuses["sound"].status == "pass"
    assert statuses["slow"].status == "fail"
    assert "decode" in str(statuses["slow"].findings)


def test_a_cut_log_is_no_other_answer(tmp_path):
    made = make_rows(Workload(num_cases=32, repeats=2), ["base", "candidate"])
    cut = [Cut(field="token_ids", num_kept=5, num_all=24)]
    runs = [
        write_run(
            tmp_path,
            label,
            rows,
            [msgspec.structs.replace(log, token_ids=log.token_ids[:5], truncated=cut) for log in logs],
        )
        for label, (rows, logs) in made.items()
    ]
    assert compare(*runs).status == "pass"
    wrong = [msgspec.structs.replace(log, token_ids=[9] * 5, truncated=cut) for log in made["candidate"][1]]
    other = write_run(tmp_path / "wrong", "candidate", made["candidate"][0], wrong)
    assert compare(runs[0], other).status == "fail"
