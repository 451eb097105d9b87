"""What the commands do with endpoints: fill one Run, fill two in turns, fill three from replicas.

Owns: the order of connecting, making cases, creating Runs, driving and collecting. Refuses to know: flags,
printing, verdicts. Invariants: no Run directory is made before its endpoint answered; all sides of a session
are asked the same cases; a session that breaks off leaves its Runs readable and marked incomplete.

Usage: `run = await fill_run(target, path, spec=spec, clock=clock, report=report)`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

import msgspec

from firstdiff.harness.driver import Order, Report, Side, drive, drive_interleaved
from firstdiff.harness.endpoint import HttpEndpoint
from firstdiff.harness.replica import Replica, collect_rows
from firstdiff.harness.runs import new_run
from firstdiff.harness.workload import WorkloadSpec, make_cases, warmup_cases, workload_sha256
from firstdiff.tracing.clock import Clock
from firstdiff.tracing.records import Identity, Request, RequestRow
from firstdiff.tracing.store import Run

_COLLECT_TRIES = 40

Warn = Callable[[str], None]


def no_warning(sentence: str) -> None:
    """Say nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """An endpoint as a user names it. `log_dir` is its server's log directory, where it is at hand."""

    url: str
    label: str
    model: str | None = None
    dialect: str | None = None
    api_key: str | None = None
    timeout_s: float = 600.0
    log_dir: Path | None = None

    async def connect(self, clock: Clock) -> HttpEndpoint:
        """Ask the endpoint what it is; EndpointError, ValueError."""
        return await HttpEndpoint.connect(
            self.url,
            model=self.model,
            dialect=self.dialect,
            api_key=self.api_key,
            timeout_s=self.timeout_s,
            clock=clock,
        )


def _cases_of(spec: WorkloadSpec, endpoints: Sequence[HttpEndpoint]) -> tuple[WorkloadSpec, list[Request]]:
    """The cases, and the spec that says in the manifest how many they are, also where a file decides it."""
    spec = resolve_spec(spec, endpoints)
    cases = make_cases(spec)
    return msgspec.structs.replace(spec, num_cases=len(cases)), cases


def resolve_spec(spec: WorkloadSpec, endpoints: Sequence[HttpEndpoint]) -> WorkloadSpec:
    """`spec` with the vocabulary size that the endpoints tell, where random tokens need one."""
    sizes = [endpoint.identity.vocab_size for endpoint in endpoints if endpoint.identity is not None]
    if spec.kind != "tokens" or spec.vocab_size or not sizes:
        return spec
    return msgspec.structs.replace(spec, vocab_size=min(sizes))


async def fill_run(
    target: Target,
    path: Path,
    *,
    spec: WorkloadSpec,
    clock: Clock,
    report: Report,
    num_warmup: int = 1,
    resume: bool = False,
    warn: Warn = no_warning,
) -> Run:
    """Run the workload against one endpoint into `path`; with `resume`, what is left of an earlier Run.

    `warn` gets a sentence when the target's log lacks rows of requests that were answered.
    """
    async with AsyncExitStack() as stack:
        endpoint = await target.connect(clock)
        stack.push_async_callback(endpoint.close)
        spec, cases = _cases_of(spec, [endpoint])
        run = (
            _resumed(path, endpoint, cases)
            if resume
            else new_run(
                path,
                label=target.label,
                endpoint=endpoint,
                workload=msgspec.to_builtins(spec),
                cases=cases,
                clock=clock,
            )
        )
        stack.enter_context(run)
        await drive(
            endpoint,
            cases,
            run,
            clock=clock,
            concurrency=spec.concurrency,
            rate_per_s=spec.rate_per_s,
            seed=spec.seed,
            repeats=spec.repeats,
            warmup=warmup_cases(cases, num_warmup),
            report=report,
        )
        num_answered, num_found = await _collect(target, run)
    if num_found < num_answered:
        warn(
            f"expected the rows of {num_answered} answered requests in {target.log_dir}, got {num_found}: "
            "name the --log-dir of the server that was asked; this Run lacks the engine's times"
        )
    return Run.open(path)


def _resumed(path: Path, endpoint: HttpEndpoint, cases: Sequence[Request]) -> Run:
    run = Run.resume(path)
    manifest = run.manifest
    asked = (endpoint.model, workload_sha256(cases), _same_server(endpoint.identity))
    if asked != (manifest.model, manifest.workload_sha256, _same_server(manifest.identity)):
        run.close()
        raise ValueError(
            f"expected the model, workload and server of {path} to resume it, got others: "
            "repeat its flags, or choose another directory"
        )
    return run


def _same_server(identity: Identity | None) -> Identity | None:
    """An identity without its process: the same server started again may go on with a Run."""
    return identity and msgspec.structs.replace(identity, instance_id="")


async def fill_runs_in_turn(
    targets: Sequence[Target],
    out: Path,
    *,
    spec: WorkloadSpec,
    order: Order,
    block_size: int,
    clock: Clock,
    report: Report,
    num_warmup: int = 2,
) -> list[Run]:
    """Run one workload on all targets interleaved, each into `out/<label>`."""
    if spec.rate_per_s is not None:
        raise ValueError("expected a closed loop where sides take turns, got a rate: use --concurrency")
    async with AsyncExitStack() as stack:
        endpoints = [await target.connect(clock) for target in targets]
        for endpoint in endpoints:
            stack.push_async_callback(endpoint.close)
        spec, cases = _cases_of(spec, endpoints)
        sides = []
        for target, endpoint in zip(targets, endpoints, strict=True):
            run = new_run(
                out / target.label,
                label=target.label,
                endpoint=endpoint,
                workload=msgspec.to_builtins(spec),
                cases=cases,
                clock=clock,
            )
            sides.append(Side(target.label, endpoint, stack.enter_context(run)))
        await drive_interleaved(
            sides,
            cases,
            clock=clock,
            order=order,
            concurrency=spec.concurrency,
            block_size=block_size,
            repeats=spec.repeats,
            warmup=warmup_cases(cases, num_warmup),
            report=report,
        )
        for target, side in zip(targets, sides, strict=True):
            await _collect(target, side.run)
    return [Run.open(out / target.label) for target in targets]


async def fill_runs_from_replicas(
    serve_args: Mapping[str, Sequence[str]],
    out: Path,
    *,
    spec: WorkloadSpec,
    block_size: int,
    clock: Clock,
    report: Report,
) -> list[Run]:
    """Start one replica for each label, run the workload on them in rotating turns, stop them.

    The server logs stay in `out/<label>-server`.
    """
    async with AsyncExitStack() as stack:
        replicas = [
            Replica(args, label=label, log_dir=out / f"{label}-server") for label, args in serve_args.items()
        ]
        for replica in replicas:
            stack.push_async_callback(asyncio.to_thread, replica.stop)
        # All are awaited even when one fails, so that none is still starting when they are stopped.
        starts = await asyncio.gather(
            *(asyncio.to_thread(replica.start) for replica in replicas), return_exceptions=True
        )
        for result in starts:
            if isinstance(result, BaseException):
                raise result
        targets = [
            Target(url=replica.url, label=replica.label, log_dir=replica.log_dir) for replica in replicas
        ]
        return await fill_runs_in_turn(
            targets,
            out,
            spec=spec,
            order="rotate",
            block_size=block_size,
            clock=clock,
            report=report,
        )


async def _collect(target: Target, run: Run) -> tuple[int, int]:
    """Bring the server's rows where its log is at hand; they are written just after each last byte.

    Returns how many requests were answered and how many of them the log has; (0, 0) without a log.
    """
    if target.log_dir is None:
        return 0, 0
    num_answered = sum(row.outcome == "ok" for row in run.rows("requests", RequestRow))
    num_found = collect_rows(target.log_dir, run)
    for _ in range(_COLLECT_TRIES):
        if num_found >= num_answered:
            break
        await asyncio.sleep(0.05)
        num_found = collect_rows(target.log_dir, run)
    return num_answered, num_found
