"""The pytest plugin: fixtures that start replicas, fill Runs and compare them. A front door, like cli.py.

Owns: fixtures, two options, how a verdict becomes a test's outcome. Refuses to know: how anything is done.
Invariants: loading it imports nothing but pytest, since every pytest session of the environment loads it;
each replica is stopped at the session's end, whatever tests did; a Run is never overwritten.

Usage:
    def test_upgrade(firstdiff_replica, firstdiff_compare):
        base = firstdiff_replica("--model", "smollm2-135m", label="base")
        candidate = firstdiff_replica("--model", "smollm2-135m", "--dtype", "bf16", label="candidate")
        firstdiff_compare(base, candidate)
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import pytest

if TYPE_CHECKING:
    from firstdiff.harness.replica import Replica
    from firstdiff.harness.sessions import Target
    from firstdiff.harness.workload import WorkloadSpec
    from firstdiff.regression.diff import CompareConfig
    from firstdiff.regression.verdict import Status, Verdict
    from firstdiff.tracing.store import Run


def pytest_addoption(parser: pytest.Parser) -> None:
    """Two options: where Runs go, and what a verdict that could not be reached means."""
    group = parser.getgroup("firstdiff")
    group.addoption(
        "--firstdiff-runs",
        type=Path,
        metavar="DIR",
        help="keep the Runs of firstdiff fixtures in DIR, a folder a test (default: the test's tmp_path)",
    )
    group.addoption(
        "--firstdiff-unknown",
        choices=("fail", "skip", "pass"),
        default="fail",
        help="what a test becomes whose verdict is unknown instead of pass (default: fail)",
    )


class StartReplica(Protocol):
    """What the fixture `firstdiff_replica` gives."""

    def __call__(self, *args: str, label: str = "replica") -> Replica:
        """A running server with `args` of `firstdiff serve`; asking again the same gives it again."""
        ...


class FillRun(Protocol):
    """What the fixture `firstdiff_run` gives."""

    def __call__(
        self, target: Replica | str, *, workload: WorkloadSpec | None = None, label: str | None = None
    ) -> Run:
        """The Run of a workload (default: WorkloadSpec()) against a replica or URL."""
        ...


class Compare(Protocol):
    """What the fixture `firstdiff_compare` gives."""

    def __call__(
        self,
        base: Run | Replica | str,
        candidate: Run | Replica | str,
        *,
        floor: Run | Replica | str | None = None,
        workload: WorkloadSpec | None = None,
        config: CompareConfig | None = None,
        expect: Status | None = "pass",
    ) -> Verdict:
        """The verdict on two Runs, or on two endpoints (replicas or URLs), which run `workload` in turns.

        Without a floor, two endpoints are asked everything twice, and the base's own repeats are the floor.
        The test fails unless the status is the one expected; None expects nothing.
        """
        ...


@pytest.fixture(scope="session")
def firstdiff_replica() -> Iterator[StartReplica]:
    """Start servers of the bundled engine on loopback; they end with the session."""
    from firstdiff.harness.replica import Replica

    running: dict[tuple[str, ...], Replica] = {}
    with ExitStack() as stack:

        def start(*args: str, label: str = "replica") -> Replica:
            replica = running.get((label, *args))
            if replica is None or not replica.is_alive:
                replica = running[label, *args] = Replica(args, label=label)
                stack.callback(replica.stop)
                replica.start()
            return replica

        yield start


@pytest.fixture
def _firstdiff_folder(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[str], Path]:
    """A new folder for each name asked for."""
    kept: Path | None = request.config.getoption("--firstdiff-runs")
    parent = kept / re.sub(r"[^A-Za-z0-9_.-]+", "-", request.node.name) if kept else tmp_path

    def folder(name: str) -> Path:
        number = 1
        while (path := parent / (name if number == 1 else f"{name}-{number}")).exists():
            number += 1
        path.mkdir(parents=True)
        return path

    return folder


@pytest.fixture
def firstdiff_run(_firstdiff_folder: Callable[[str], Path]) -> FillRun:
    """Run a workload against an endpoint and keep every request as a row."""
    from firstdiff.harness.driver import no_report
    from firstdiff.harness.sessions import fill_run
    from firstdiff.harness.workload import WorkloadSpec
    from firstdiff.tracing.clock import SystemClock

    def fill(target: Replica | str, *, workload: WorkloadSpec | None = None, label: str | None = None) -> Run:
        named = _target(target, label or (target if isinstance(target, str) else target.label))
        folder = _firstdiff_folder("run")
        spec = workload or WorkloadSpec()
        return asyncio.run(fill_run(named, folder, spec=spec, clock=SystemClock(), report=no_report))

    return fill


@pytest.fixture
def firstdiff_compare(request: pytest.FixtureRequest, _firstdiff_folder: Callable[[str], Path]) -> Compare:
    """Compare Runs or endpoints; the test fails, with the report, unless the verdict is the one expected."""
    from firstdiff.regression.diff import CompareConfig
    from firstdiff.regression.diff import compare as judge
    from firstdiff.tracing.store import Run

    def compare(
        base: Run | Replica | str,
        candidate: Run | Replica | str,
        *,
        floor: Run | Replica | str | None = None,
        workload: WorkloadSpec | None = None,
        config: CompareConfig | None = None,
        expect: Status | None = "pass",
    ) -> Verdict:
        sides = {"base": base, "candidate": candidate} | ({} if floor is None else {"floor": floor})
        runs = {label: side for label, side in sides.items() if isinstance(side, Run)}
        targets = [_target(side, label) for label, side in sides.items() if not isinstance(side, Run)]
        if isinstance(base, Run) != isinstance(candidate, Run):
            raise ValueError("expected two Runs or two endpoints to compare, got one of each")
        if targets:
            runs |= _run_in_turn(targets, _firstdiff_folder("compare"), workload)
        elif workload is not None:
            raise ValueError("expected endpoints to run a workload on, got Runs, which have theirs")
        verdict = judge(
            runs["base"], runs["candidate"], floor=runs.get("floor"), config=config or CompareConfig()
        )
        request.node.user_properties.append(("firstdiff_verdict", verdict.status))
        _check(verdict, expect, on_unknown=request.config.getoption("--firstdiff-unknown"))
        return verdict

    return compare


def _target(side: Replica | str, label: str) -> Target:
    from firstdiff.harness.sessions import Target

    if isinstance(side, str):
        return Target(url=side, label=re.sub(r"[^A-Za-z0-9_.-]+", "-", label))
    return Target(url=side.url, label=label, log_dir=side.log_dir)


def _run_in_turn(targets: list[Target], out: Path, workload: WorkloadSpec | None) -> dict[str, Run]:
    """The Runs by label; two sides are asked everything twice, so that there is a noise floor."""
    from firstdiff.harness.driver import no_report
    from firstdiff.harness.sessions import fill_runs_in_turn
    from firstdiff.harness.workload import WorkloadSpec
    from firstdiff.tracing.clock import SystemClock

    spec = workload or WorkloadSpec(repeats=2 if len(targets) == 2 else 1)
    filled = fill_runs_in_turn(
        targets,
        out,
        spec=spec,
        order="abba" if len(targets) == 2 else "rotate",
        block_size=spec.concurrency,
        clock=SystemClock(),
        report=no_report,
    )
    runs: list[Run] = asyncio.run(filled)
    return {target.label: run for target, run in zip(targets, runs, strict=True)}


def _check(verdict: Verdict, expect: Status | None, *, on_unknown: str) -> None:
    """End the test as the verdict and the option say."""
    from firstdiff.regression.report import to_text

    if expect is None or verdict.status == expect:
        return
    report = f"expected the verdict {expect}, got {verdict.status}\n\n{to_text(verdict)}"
    if expect == "pass" and verdict.status == "unknown" and on_unknown != "fail":
        if on_unknown == "skip":
            pytest.skip(report)
        return
    pytest.fail(report, pytrace=False)
