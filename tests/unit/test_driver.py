"""The driver: one row a request whatever comes, pacing that slow answers cannot bend, fair turns."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from itertools import pairwise
from pathlib import Path

import pytest

from firstdiff.harness.client_spans import trace_ids
from firstdiff.harness.driver import (
    Side,
    ask,
    ask_all,
    drive,
    drive_interleaved,
    in_turn,
)
from firstdiff.harness.replies import Chunk
from firstdiff.harness.wire import EndpointError
from firstdiff.tracing.clock import SystemClock
from firstdiff.tracing.records import Request, RequestRow, Usage
from firstdiff.tracing.store import Manifest, Run

CLOCK = SystemClock()


class Scripted:
    """Answers each request with two tokens after `delay_s`, and keeps count of what is in flight."""

    def __init__(self, delay_s: float = 0.0, log: list[str] | None = None, name: str = "x") -> None:
        self.delay_s = delay_s
        self.in_flight = 0
        self.max_in_flight = 0
        self.log = log if log is not None else []
        self.name = name

    async def stream(
        self, request: Request, *, request_id: str, traceparent: str | None = None
    ) -> AsyncGenerator[Chunk, None]:
        self.log.append(f"{self.name}:{request.case_id}")
        self.in_flight += 1
        self.max_in_flight = max(self.max_in_flight, self.in_flight)
        try:
            await asyncio.sleep(self.delay_s)
            for index in range(2):
                yield Chunk(
                    received_ns=CLOCK.now_ns(),
                    headers_received_ns=1,
                    text="ab"[index],
                    num_tokens=1,
                    token_ids=[index],
                    prompt_token_ids=[9] if index == 0 else None,
                    finish_reason="stop" if index else None,
                    usage=Usage(prompt_tokens=1, completion_tokens=index + 1),
                )
                if request.case_id.startswith("bad"):
                    raise EndpointError("went wrong", outcome="unknown", status=200, headers_received_ns=1)
        finally:
            self.in_flight -= 1


def cases_of(num_cases: int, prefix: str = "case") -> list[Request]:
    return [Request(case_id=f"{prefix}-{index}", prompt="x") for index in range(num_cases)]


def run_at(path: Path, label: str = "side") -> Run:
    return Run.create(
        path,
        Manifest(
            run_id=f"id-{label}",
            label=label,
            created_unix_ns=0,
            endpoint="http://x",
            dialect="openai",
            model="m",
            workload={},
            workload_sha256="",
            identity=None,
            client={"python": "3"},
        ),
    )


def rows_of(run: Run) -> list[RequestRow]:
    return list(run.rows("requests", RequestRow))


def test_an_answer_becomes_a_row() -> None:
    row = asyncio.run(ask(Scripted(), cases_of(1)[0], clock=CLOCK, request_id="r", intended_ns=5))
    assert (row.outcome, row.text, row.token_ids, row.chunk_num_tokens) == ("ok", "ab", [0, 1], [1, 1])
    assert (row.status, row.finish_reason, row.prompt_token_ids, row.intended_ns) == (200, "stop", [9], 5)
    assert row.usage == Usage(prompt_tokens=1, completion_tokens=2)
    assert row.logprobs is None
    assert row.sent_ns <= row.chunk_received_ns[0] <= row.chunk_received_ns[1] == row.finished_ns
    assert row.trace_id == trace_ids("r")[0] != trace_ids("s")[0]


def test_a_broken_answer_becomes_a_row_with_what_came() -> None:
    row = asyncio.run(ask(Scripted(), cases_of(1, "bad")[0], clock=CLOCK, request_id="r"))
    assert (row.outcome, row.error, row.status, row.text) == ("unknown", "went wrong", 200, "a")
    assert (row.token_ids, row.headers_received_ns, len(row.chunk_received_ns)) == ([0], 1, 1)


def test_a_closed_loop_keeps_its_concurrency(tmp_path: Path) -> None:
    endpoint = Scripted(delay_s=0.002)
    seen: list[tuple[int, int]] = []
    with run_at(tmp_path / "r") as run:
        asyncio.run(
            drive(
                endpoint,
                [*cases_of(9), *cases_of(1, "bad")],
                run,
                clock=CLOCK,
                concurrency=3,
                repeats=2,
                warmup=cases_of(2, "warm"),
                report=lambda done, total: seen.append((done, total)),
            )
        )
    rows = rows_of(run)
    assert endpoint.max_in_flight == 3
    assert seen == [(done, 20) for done in range(1, 21)]
    assert sorted((row.case_id, row.repeat_index) for row in rows) == sorted(
        (case.case_id, repeat) for case in [*cases_of(9), *cases_of(1, "bad")] for repeat in (0, 1)
    )
    assert {row.request_id for row in rows if row.case_id == "case-3"} == {
        "id-side-case-3-0",
        "id-side-case-3-1",
    }
    assert len(list(run.rows("warmup", RequestRow))) == 2
    manifest = Run.open(run.path).manifest
    assert manifest.complete
    assert manifest.client["python"] == "3"
    assert manifest.client["num_dispatch_lags"] == 20
    assert 0 <= manifest.client["dispatch_lag_p99_ns"] < 10**9


def test_slow_answers_do_not_postpone_open_loop_intentions(tmp_path: Path) -> None:
    quick, slow = [], []
    for delay_s, rows in ((0.0, quick), (0.1, slow)):
        with run_at(tmp_path / str(delay_s)) as run:
            work = drive(
                Scripted(delay_s), cases_of(10), run, clock=CLOCK, rate_per_s=200.0, seed=3, max_in_flight=2
            )
            asyncio.run(work)
        rows += sorted(rows_of(run), key=lambda row: row.intended_ns)
    gaps = [[b.intended_ns - a.intended_ns for a, b in pairwise(rows)] for rows in (quick, slow)]
    assert gaps[0] == pytest.approx(gaps[1], abs=2)
    # Two at a time and 0.1 s each: the last of ten is sent 0.4 s after the first, about 0.35 s late.
    assert max(row.sent_ns - row.intended_ns for row in slow) > 0.2e9
    assert run.manifest.client["dispatch_lag_p99_ns"] > 0.2e9


def test_a_run_that_broke_off_is_resumed_where_it_was(tmp_path: Path) -> None:
    with run_at(tmp_path / "r") as run:
        asyncio.run(drive(Scripted(), cases_of(4), run, clock=CLOCK))
    before = rows_of(run)
    endpoint = Scripted()
    with Run.resume(tmp_path / "r") as again:
        asyncio.run(drive(endpoint, cases_of(6), again, clock=CLOCK, rate_per_s=1000.0))
    assert sorted(endpoint.log) == ["x:case-4", "x:case-5"]
    assert rows_of(again)[:4] == before
    assert len(rows_of(again)) == 6


def test_a_row_that_cannot_be_written_stops_the_drive(tmp_path: Path) -> None:
    run = run_at(tmp_path / "r")
    run.close()
    read_only = Run.open(tmp_path / "r")
    with pytest.raises(ValueError, match="open for appending"):
        asyncio.run(drive(Scripted(), cases_of(4), read_only, clock=CLOCK))


@pytest.mark.parametrize(
    ("order", "repeats", "turns"),
    [
        ("abba", 1, "A0 A1 B0 B1 B2 A2"),
        ("abba", 2, "A0 A1 B0 B1 B0 B1 A0 A1 A2 B2 B2 A2"),
        ("rotate", 1, "A0 A1 B0 B1 C0 C1 B2 C2 A2"),
    ],
)
def test_sides_take_turns(tmp_path: Path, order: str, repeats: int, turns: str) -> None:
    log: list[str] = []
    names = "ABC" if order == "rotate" else "AB"
    runs = [run_at(tmp_path / name, name) for name in names]
    sides = [
        Side(name, Scripted(0.001, log=log, name=name), run) for name, run in zip(names, runs, strict=True)
    ]
    asyncio.run(
        drive_interleaved(
            sides, cases_of(3), clock=CLOCK, order=order, concurrency=2, block_size=2, repeats=repeats
        )
    )
    assert [entry.replace(":case-", "") for entry in log] == turns.split()
    for run in runs:
        run.close()
        assert run.manifest.complete
        assert {(row.case_id, row.block_index) for row in rows_of(run)} == {
            ("case-0", 0),
            ("case-1", 0),
            ("case-2", 1),
        }
        assert len(rows_of(run)) == 3 * repeats


def test_over_a_cycle_each_side_has_each_place() -> None:
    for num_sides in (2, 3, 5):
        orders = [in_turn(num_sides, turn, "rotate") for turn in range(num_sides)]
        assert all(
            sorted(order[place] for order in orders) == list(range(num_sides)) for place in range(num_sides)
        )
    assert [in_turn(2, turn, "abba") for turn in range(3)] == [[0, 1], [1, 0], [0, 1]]


def test_one_run_for_two_sides_is_refused(tmp_path: Path) -> None:
    with run_at(tmp_path / "r") as run:
        side = Side("a", Scripted(), run)
        with pytest.raises(ValueError, match="one Run for each side"):
            asyncio.run(drive_interleaved([side, side], cases_of(1), clock=CLOCK, order="abba"))


def test_rows_come_back_in_the_order_asked(tmp_path: Path) -> None:
    with run_at(tmp_path / "r") as run:
        asked = [(case, repeat) for case in cases_of(5) for repeat in (1, 0)]
        rows = asyncio.run(ask_all(Scripted(0.001), asked, run, clock=CLOCK, concurrency=4))
    assert [(row.case_id, row.repeat_index) for row in rows] == [(c.case_id, r) for c, r in asked]
