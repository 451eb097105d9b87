"""The command `firstdiff`: parse, wire the rooms together, print, exit.

Owns: commands, exit codes, the one line that a mistake gets. Refuses to know: how anything is done. With
plugin.py the only module that imports other rooms, and only inside the commands that need them, so that
the base install, without torch, has all the commands that need none.
Invariants: results go to standard output, everything else to standard error; exit 0 pass, 1 fail, 2 usage,
3 unknown, 4 invalid (the client was late, an endpoint or a replica failed).

Usage: `firstdiff compare http://127.0.0.1:8001 http://127.0.0.1:8002`.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import msgspec
import typer

from firstdiff.harness.options import ServeOptions, TargetOptions, WorkloadOptions, with_groups
from firstdiff.harness.parent import end_with_standard_input
from firstdiff.harness.progress import progress
from firstdiff.harness.replica import ReplicaError
from firstdiff.harness.runs import new_run_id
from firstdiff.harness.sending import Sender
from firstdiff.harness.sessions import fill_run, fill_runs_from_replicas, fill_runs_in_turn
from firstdiff.harness.wire import EndpointError
from firstdiff.harness.workload import WorkloadSpec
from firstdiff.tracing.clock import SystemClock
from firstdiff.tracing.records import RequestRow
from firstdiff.tracing.store import Run, write_atomically

if TYPE_CHECKING:
    from firstdiff.regression.verdict import Verdict

EXIT_FAIL, EXIT_USAGE, EXIT_UNKNOWN, EXIT_INVALID = 1, 2, 3, 4

app = typer.Typer(
    name="firstdiff",
    help="Tells whether an inference engine still computes the right thing, at the right speed.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
    # Plain help shows long flags whole, and plain errors are one line.
    rich_markup_mode=None,
)
model_app = typer.Typer(help="Fetch and list models.", no_args_is_help=True, rich_markup_mode=None)
app.add_typer(model_app, name="model")


@contextmanager
def _needing(extra: str) -> Iterator[None]:
    """Say which extra to install when a library of that extra is missing."""
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("firstdiff"):
            raise
        raise ValueError(
            f"expected the module {error.name}, which is not installed: pip install 'firstdiff[{extra}]'"
        ) from error


@app.command()
@with_groups
def serve(
    options: ServeOptions,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="0 takes a free one and prints it.")] = 8000,
    served_model_name: Annotated[str | None, typer.Option(help="Default: --model.")] = None,
    log_dir: Annotated[Path | None, typer.Option(help="Write token log and steps here.")] = None,
    otlp_endpoint: Annotated[str | None, typer.Option(help="Send spans to this OTLP/HTTP URL.")] = None,
    in_process: Annotated[bool, typer.Option("--in-process", help="Server and core in one.")] = False,
    stop_on_stdin_end: Annotated[bool, typer.Option("--stop-on-stdin-end", hidden=True)] = False,
) -> None:
    """Serve a model over the OpenAI HTTP API."""
    with _needing("engine"):
        from firstdiff.engine.config import EngineConfig
        from firstdiff.engine.server import ServeSettings, serve_main

        if stop_on_stdin_end:
            end_with_standard_input()
        config = EngineConfig(
            model=options.model,
            dtype=options.dtype,
            threads=options.threads,
            block_size=options.block_size,
            num_blocks=options.num_blocks,
            max_num_seqs=options.max_num_seqs,
            max_num_batched_tokens=options.max_num_batched_tokens,
            max_model_len=options.max_model_len,
            max_num_waiting=options.max_num_waiting,
            enable_prefix_caching=options.enable_prefix_caching,
            seed=options.seed,
            faults=tuple(options.fault or ()),
        )
        settings = ServeSettings(
            engine=config,
            host=host,
            port=port,
            log_dir=log_dir,
            in_process=in_process,
            served_model_name=served_model_name,
            otlp_endpoint=otlp_endpoint,
        )
        raise typer.Exit(serve_main(settings))


@model_app.command("pull")
def model_pull(name: str) -> None:
    """Fetch a model once into the user's cache and print its folder."""
    with _needing("engine"):
        from firstdiff.engine.model_store import pull

        folder = pull(name, report=lambda line: print(line, file=sys.stderr, flush=True))
        print(folder.path)


@model_app.command("list")
def model_list() -> None:
    """Name the models that `pull` knows."""
    with _needing("engine"):
        from firstdiff.engine.model_store import KNOWN_MODELS

        print("\n".join(sorted(KNOWN_MODELS)))


@app.command()
@with_groups
def run(
    url: str,
    workload: WorkloadOptions,
    target: TargetOptions,
    out: Annotated[Path | None, typer.Option(help="The Run's directory; default runs/<run id>.")] = None,
    label: Annotated[str, typer.Option(help="What to call this side.")] = "run",
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the Run in --out.")] = False,
    repeats: Annotated[int, typer.Option(help="Ask each case this often.")] = 1,
    rate: Annotated[float | None, typer.Option(help="Poisson arrivals a second, open loop.")] = None,
    warmup: Annotated[int, typer.Option(min=0, help="Requests before, in a file of their own.")] = 1,
    log_dir: Annotated[Path | None, typer.Option(help="The server's --log-dir, for its rows.")] = None,
) -> None:
    """Run a workload against URL and keep what comes back as a Run."""
    clock = SystemClock()
    if resume and out is None:
        raise ValueError("expected --out with --resume, got none: name the Run to go on with")
    path = out or Path("runs") / new_run_id(label, unix_ns=clock.now_unix_ns())
    spec = workload.spec(repeats=repeats, rate_per_s=rate)
    with progress(f"running {label}", stream=sys.stderr) as report:
        filled = asyncio.run(
            fill_run(
                target.target(url, label, log_dir=log_dir),
                path,
                spec=spec,
                clock=clock,
                report=report,
                num_warmup=warmup,
                resume=resume,
            )
        )
    _print_outcomes(filled)


@app.command()
@with_groups
def compare(
    base: Annotated[str, typer.Argument(help="A Run directory or a URL.")],
    candidate: Annotated[str, typer.Argument(help="The same kind as BASE.")],
    workload: WorkloadOptions,
    target: TargetOptions,
    repeats: Annotated[int, typer.Option(help="URLs: ask each case this often; 2 gives a floor.")] = 2,
    out: Annotated[Path | None, typer.Option(help="URLs: where the two Runs go.")] = None,
    floor: Annotated[Path | None, typer.Option(help="A Run of a twin of BASE: the noise floor.")] = None,
    alpha: Annotated[float | None, typer.Option(help="False alarms allowed.")] = None,
    latency_margin: Annotated[float | None, typer.Option(help="Slower by this share is fine.")] = None,
    format_: Annotated[Literal["text", "markdown", "json"], typer.Option("--format")] = "text",
    report: Annotated[Path | None, typer.Option(help="Write the verdict to this file too.")] = None,
) -> None:
    """Compare two Runs, or two endpoints by running one workload on both in turns."""
    are_urls = [side.startswith(("http://", "https://")) for side in (base, candidate)]
    if are_urls[0] != are_urls[1]:
        raise ValueError(f"expected two Run directories or two URLs, got one of each: {base} {candidate}")
    if are_urls[0]:
        clock = SystemClock()
        with progress("running base and candidate", stream=sys.stderr) as on_progress:
            runs = asyncio.run(
                fill_runs_in_turn(
                    [target.target(base, "base"), target.target(candidate, "candidate")],
                    out or Path("runs") / new_run_id("compare", unix_ns=clock.now_unix_ns()),
                    spec=workload.spec(repeats=repeats),
                    order="abba",
                    block_size=workload.concurrency,
                    clock=clock,
                    report=on_progress,
                )
            )
        print(f"Runs: {runs[0].path} {runs[1].path}", file=sys.stderr)
    else:
        runs = [Run.open(Path(base)), Run.open(Path(candidate))]
    verdict = _judge(runs, Run.open(floor) if floor else None, alpha=alpha, latency_margin=latency_margin)
    if are_urls[0]:
        _save(verdict, runs[1])
    text = _rendered(verdict, format_)
    print(text)
    if report is not None:
        write_atomically(report, (text + "\n").encode())
    raise typer.Exit(_exit_code(verdict))


@app.command("eval")
@with_groups
def eval_(
    url: str,
    target: TargetOptions,
    tasks: Annotated[str, typer.Option(help="Task names or YAML files, separated by commas.")] = "arithmetic",
    limit: Annotated[int | None, typer.Option(min=1, help="Items a task, at most.")] = None,
    concurrency: Annotated[int, typer.Option(help="Requests in flight.")] = 8,
    out: Annotated[Path | None, typer.Option(help="The Run's directory; default runs/<run id>.")] = None,
) -> None:
    """Run evaluation tasks against URL, each request a row of a Run."""
    clock = SystemClock()
    names = [name for name in tasks.split(",") if name]
    with _needing("evals"):
        from firstdiff.evals.suite import check_tasks, run_tasks

        check_tasks(names)
    path = out or Path("runs") / new_run_id("eval", unix_ns=clock.now_unix_ns())
    with (
        progress("asking", stream=sys.stderr) as report,
        Sender(
            target.target(url, "eval"),
            path,
            workload={"kind": "eval", "tasks": names, "limit": limit},
            concurrency=concurrency,
            clock=clock,
            report=report,
        ) as sender,
        _needing("evals"),
    ):
        result = run_tasks(names, send=sender.send, limit=limit)
        for item in result.items:
            sender.run.append("eval_items", item)
    print(result.to_text())
    if result.outcome != "ok":
        raise typer.Exit(EXIT_UNKNOWN)


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="Where Runs and report go.")] = Path("demo-runs"),
    model: Annotated[str, typer.Option(help="The model to serve three times.")] = "smollm2-135m",
    cases: Annotated[int, typer.Option(help="How many different requests.")] = 64,
    max_tokens: Annotated[int, typer.Option(help="Output tokens a request, at most.")] = 20,
    concurrency: Annotated[int, typer.Option(help="Requests in flight.")] = 4,
    seed: Annotated[int, typer.Option(help="Seed of the workload.")] = 0,
    fault: Annotated[
        list[str] | None,
        typer.Option(help="The candidate's defects; default decode-position-plus-one and slow-decode."),
    ] = None,
) -> None:
    """Serve a model, a twin and a defective candidate, and show that the twin passes and the other fails."""
    faults = ["decode-position-plus-one", "slow-decode"] if fault is None else fault
    healthy = ["--model", model]
    planted = [part for name in faults for part in ("--fault", name)]
    clock = SystemClock()
    started = new_run_id("demo", unix_ns=clock.now_unix_ns())
    print(f"starting three replicas of {model}: base, twin, candidate ({', '.join(faults)})", file=sys.stderr)
    with progress("running base, twin and candidate in turns", stream=sys.stderr) as report:
        base, twin, candidate = asyncio.run(
            fill_runs_from_replicas(
                {"base": healthy, "twin": healthy, "candidate": [*healthy, *planted]},
                out / started,
                spec=WorkloadSpec(num_cases=cases, max_tokens=max_tokens, concurrency=concurrency, seed=seed),
                block_size=concurrency,
                clock=clock,
                report=report,
            )
        )
    control = _judge([base, twin], None)
    verdict = _judge([base, candidate], twin)
    parts = []
    for title, one, judged in (
        ("Base against its twin: expected to pass", control, twin),
        ("Base against the candidate: expected to fail", verdict, candidate),
    ):
        _save(one, judged)
        parts.append(f"# {title}\n\n{_rendered(one, 'markdown')}")
        print(f"== {title}\n{_rendered(one, 'text')}\n")
    write_atomically(out / started / "report.md", "\n\n".join(parts).encode())
    print(f"report: {out / started / 'report.md'}; Runs: {base.path} {twin.path} {candidate.path}")
    if (control.status, verdict.status) != ("pass", "fail"):
        print(f"expected pass and fail, got {control.status} and {verdict.status}", file=sys.stderr)
        raise typer.Exit(EXIT_FAIL)


def _judge(
    runs: Sequence[Run],
    floor: Run | None,
    *,
    alpha: float | None = None,
    latency_margin: float | None = None,
) -> Verdict:
    from firstdiff.regression.diff import CompareConfig, compare

    changes = {"alpha": alpha, "latency_margin": latency_margin}
    config = msgspec.structs.replace(
        CompareConfig(), **{name: value for name, value in changes.items() if value is not None}
    )
    return compare(runs[0], runs[1], floor=floor, config=config)


def _rendered(verdict: Verdict, kind: str) -> str:
    from firstdiff.regression.report import to_json, to_markdown, to_text

    if kind == "json":
        return to_json(verdict).decode()
    return (to_markdown(verdict) if kind == "markdown" else to_text(verdict)).rstrip()


def _save(verdict: Verdict, run: Run) -> None:
    from firstdiff.regression.report import to_json

    write_atomically(run.path / "verdict.json", to_json(verdict))


def _exit_code(verdict: Verdict) -> int:
    from firstdiff.regression.verdict import EXIT_CODES

    return EXIT_CODES[verdict.status]


def _print_outcomes(run: Run) -> None:
    rows = list(run.rows("requests", RequestRow))
    failed = [row for row in rows if row.outcome != "ok"]
    print(f"{run.path}: {len(rows) - len(failed)} of {len(rows)} requests ok")
    if failed:
        row = failed[0]
        print(f"first failure: case {row.case_id}, {row.outcome}: {row.error}", file=sys.stderr)
        raise typer.Exit(EXIT_INVALID)


def main(arguments: Sequence[str] | None = None) -> None:
    """The entry point: a mistake is one line and exit code 2, an endpoint that fails exit code 4."""
    try:
        app(args=arguments, prog_name="firstdiff")
    except (ValueError, OSError) as error:
        print(f"firstdiff: {error}", file=sys.stderr)
        raise SystemExit(EXIT_USAGE) from None
    except (EndpointError, ReplicaError) as error:
        print(f"firstdiff: {error}", file=sys.stderr)
        raise SystemExit(EXIT_INVALID) from None


if __name__ == "__main__":
    main()
