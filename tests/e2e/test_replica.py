"""Replicas: started, collected from, and gone afterwards, whatever happens to their owner."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

import msgspec
import pytest

from firstdiff.harness.replica import Replica, ReplicaError, collect_rows
from firstdiff.harness.sessions import Target, fill_run
from firstdiff.harness.workload import WorkloadSpec
from firstdiff.tracing.clock import SystemClock
from firstdiff.tracing.records import RequestRow, StepRow
from firstdiff.tracing.store import Run
from firstdiff.tracing.token_log import hash_identity, read_token_log

TINY = ["--model", "tiny-random"]
SPEC = WorkloadSpec(kind="text", num_cases=4, max_tokens=6)


def members(group: int) -> list[int]:
    """Living processes of a process group."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            state = (entry / "stat").read_text().rpartition(")")[2].split() if entry.name.isdigit() else []
        except OSError:
            continue
        if state and int(state[2]) == group and state[0] != "Z":
            found.append(int(entry.name))
    return found


def wait_until_gone(group: int, *, seconds: float) -> list[int]:
    for _ in range(int(seconds / 0.1)):
        if not members(group):
            break
        threading.Event().wait(0.1)
    return members(group)


def fill(replica: Replica, path: Path, spec: WorkloadSpec = SPEC) -> Run:
    target = Target(url=replica.url, label="tiny")
    return asyncio.run(fill_run(target, path, spec=spec, clock=SystemClock(), report=lambda *_: None))


def test_a_replica_from_start_to_end(tmp_path: Path) -> None:
    replica = Replica(TINY, log_dir=tmp_path / "log")
    with replica:
        group = replica.pid
        assert replica.is_alive
        assert len(members(group)) >= 2, "server and engine core"
        run = fill(replica, tmp_path / "run")
        with Run.resume(run.path) as writable:
            assert replica.collect(writable) == 4
            before = {path.name: path.read_bytes() for path in run.path.iterdir()}
            assert replica.collect(writable) == 4
        assert before == {path.name: path.read_bytes() for path in run.path.iterdir()}
        with pytest.raises(ReplicaError, match="expected replica to be stopped"):
            replica.start()
    assert not replica.is_alive
    assert members(group) == []
    assert replica.stop() is None

    requests = {row.request_id: row for row in run.rows("requests", RequestRow)}
    [identity], rows = read_token_log(run.path)
    assert {row.request_id for row in rows} == set(requests)
    for row in rows:
        asked = requests[row.request_id]
        assert (row.token_ids, row.prompt_token_ids) == (asked.token_ids, asked.prompt_token_ids)
        assert row.trace_id == asked.trace_id
        assert row.identity_sha256 == hash_identity(identity)
        # One machine, one clock: the server's stamps lie inside the client's.
        assert asked.sent_ns < row.received_ns <= row.flushed_ns
        assert row.emitted_ns[0] < asked.chunk_received_ns[0]
    steps = {row.step_index for row in run.rows("steps", StepRow)}
    wanted = {index for row in rows for index in row.step_index}
    assert wanted <= steps
    assert (tmp_path / "log" / "tokens.jsonl").exists()


def test_a_restarted_server_goes_on_with_a_run(tmp_path: Path) -> None:
    with Replica([*TINY, "--in-process"], log_dir=tmp_path / "log") as replica:
        fill(replica, tmp_path / "run", msgspec.structs.replace(SPEC, num_cases=2))
    manifest = tmp_path / "run" / "manifest.json"
    with Replica([*TINY, "--in-process"], log_dir=tmp_path / "log") as replica:
        target = Target(url=replica.url, label="tiny", log_dir=tmp_path / "log")

        def resume(spec: WorkloadSpec) -> Run:
            work = fill_run(
                target, tmp_path / "run", spec=spec, clock=SystemClock(), report=lambda *_: None, resume=True
            )
            return asyncio.run(work)

        before = manifest.read_bytes()
        with pytest.raises(ValueError, match="expected the model, workload and server"):
            resume(SPEC)
        assert manifest.read_bytes() == before
        run = resume(msgspec.structs.replace(SPEC, num_cases=2, repeats=2))
    assert sorted((row.case_id, row.repeat_index) for row in run.rows("requests", RequestRow)) == [
        ("text-00000", 0),
        ("text-00000", 1),
        ("text-00001", 0),
        ("text-00001", 1),
    ]
    identities, rows = read_token_log(run.path)
    assert (len(identities), len(rows)) == (2, 4)
    by_hash = {hash_identity(identity) for identity in identities}
    assert {row.identity_sha256 for row in rows} == by_hash
    steps = list(run.rows("steps", StepRow))
    for row in rows:
        assert any(
            step.step_index == row.step_index[0]
            and step.started_ns <= row.emitted_ns[0] <= step.ended_ns + 10**9
            for step in steps
        )


def test_a_start_that_fails_says_why() -> None:
    with pytest.raises(ReplicaError, match=r"exit code 2 .*expected a fault out of .*got 'no-such-fault'"):
        Replica([*TINY, "--fault", "no-such-fault"]).start()
    with pytest.raises(ReplicaError, match=r"exit code 2 .*expected --dtype|'--dtype'"):
        Replica([*TINY, "--dtype", "int1"]).start()


def test_a_start_that_takes_too_long_is_ended() -> None:
    replica = Replica(TINY, start_timeout_s=0.2)
    with pytest.raises(ReplicaError, match=r"expected replica to listen within 0.2 s"):
        replica.start()
    with pytest.raises(ReplicaError, match="not"):
        _ = replica.pid


def test_a_server_that_will_not_end_is_killed() -> None:
    replica = Replica([*TINY, "--in-process"], stop_timeout_s=0.2)
    with replica:
        group = replica.pid
        os.killpg(group, signal.SIGSTOP)
    assert members(group) == []


def test_no_orphan_is_left_when_the_owner_is_killed(tmp_path: Path) -> None:
    code = (
        "from pathlib import Path; import threading\n"
        "from firstdiff.harness.replica import Replica\n"
        f"replica = Replica({TINY!r}, log_dir=Path({str(tmp_path)!r})).start()\n"
        "print(replica.pid, flush=True); threading.Event().wait()"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        group = int(owner.stdout.readline())
        assert len(members(group)) >= 2
        owner.kill()
    assert wait_until_gone(group, seconds=15) == []


def test_collecting_from_a_log_without_rows(tmp_path: Path) -> None:
    with Replica([*TINY, "--in-process"]) as replica:
        run = fill(replica, tmp_path / "run")
        log_dir = replica.log_dir
    assert not log_dir.exists(), "a temporary log goes with its replica"
    with Run.resume(run.path) as writable:
        assert collect_rows(log_dir, writable) == 0
    assert re.fullmatch(r"tiny-\d{8}-\d{6}-[0-9a-f]{5}", run.manifest.run_id)
