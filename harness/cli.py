"""The command `firstdiff`: parse, wire the rooms together, print, exit.

Owns: commands, exit codes, the one line that a mistake gets. Refuses to know: how anything is done. With
cli_serve.py and plugin.py the only module that imports other rooms, and only inside the commands that need
them, so that the base install, without torch, has all the commands that need none.
Invariants: results go to standard output, everything else to standard error; exit 0 pass, 1 fail, 2 usage,
3 unknown, 4 invalid (the client was late, an endpoint or a replica failed, the disk was full).

Usage: `firstdiff compare http://127.0.0.1:8001 http://127.0.0.1:8002`.
"""

from __future__ import annotations

import asyncio
import errno
import importlib.metadata
import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
import typer

from firstdiff.harness.cli_deploy import deploy
from firstdiff.harness.cli_log import log_app
from firstdiff.harness.cli_serve import model_app, serve
from firstdiff.harness.cli_trace import jaeger, trace_app
from firstdiff.harness.options import (
    DemoOptions,
    JudgeOptions,
    RunOptions,
    TargetOptions,
    WorkloadOptions,
    check_output_file,
    check_output_folder,
    names_of,
    needing,
    refuse_given,
    with_groups,
)
from firstdiff.harness.progress import printable, progress
from firstdiff.harness.replica import ReplicaError
from firstdiff.harness.runs import new_run_id
from firstdiff.harness.sending import Sender
from firstdiff.harness.sessions import fill_run, fill_runs_from_replicas, fill_runs_in_turn
from firstdiff.harness.wire import EndpointError
from firstdiff.tracing.clock import SystemClock
from firstdiff.tracing.records import RequestRow
from firstdiff.tracing.store import Run, write_atomically

if TYPE_CHECKING:
    from firstdiff.regression.verdict import Status, Verdict

_MISUSE: type[BaseException] = typer.BadParameter.__bases__[0]
"""Whatever the parser finds wrong with a command line."""

_NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}

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
app.command()(serve)
app.add_typer(model_app, name="model")
app.add_typer(log_app, name="log")
app.add_typer(trace_app, name="trace")
app.command()(jaeger)
app.command()(deploy)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"firstdiff {importlib.metadata.version('firstdiff')}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None: ...


def _warn(sentence: str) -> None:
    print(f"firstdiff: {printable(sentence)}", file=sys.stderr)


@app.command()
@with_groups
def run(
    context: typer.Context,
    url: str,
    workload: WorkloadOptions,
    target: TargetOptions,
    options: RunOptions,
) -> None:
    """Run a workload against URL and keep what comes back as a Run."""
    clock = SystemClock()
    spec = workload.spec(repeats=options.repeats, rate_per_s=options.rate)
    refuse_given(context, workload.idle(rate_per_s=options.rate))
    options.check()
    path = options.out or Path("runs") / new_run_id(options.label, unix_ns=clock.now_unix_ns())
    check_output_folder(path, "--out")
    with progress(f"running {options.label}", stream=sys.stderr) as report:
        filled = asyncio.run(
            fill_run(
                target.target(url, options.label, log_dir=options.log_dir),
                path,
                spec=spec,
                clock=clock,
                report=report,
                num_warmup=options.warmup,
                resume=options.resume,
                warn=_warn,
            )
        )
    _print_outcomes(filled)


@app.command()
@with_groups
def compare(
    context: typer.Context,
    base: Annotated[str, typer.Argument(help="A Run directory or a URL.")],
    candidate: Annotated[str, typer.Argument(help="The same kind as BASE.")],
    workload: WorkloadOptions,
    target: TargetOptions,
    judging: JudgeOptions,
    repeats: Annotated[int, typer.Option(help="URLs: ask each case this often; 2 gives a floor.")] = 2,
    out: Annotated[Path | None, typer.Option(help="URLs: where the two Runs go.")] = None,
    format_: Annotated[Literal["text", "markdown", "json"], typer.Option("--format")] = "text",
    report: Annotated[Path | None, typer.Option(help="Write the verdict to this file too.")] = None,
) -> None:
    """Compare two Runs, or two endpoints by running one workload on both in turns.

    The options of the workload, of the endpoints and --out are for URLs.
    """
    are_urls = [side.startswith(("http://", "https://")) for side in (base, candidate)]
    if are_urls[0] != are_urls[1]:
        raise ValueError(f"expected two Run directories or two URLs, got one of each: {base} {candidate}")
    check_output_file(report, "--report")
    floor = Run.open(judging.floor) if judging.floor else None
    if are_urls[0]:
        clock = SystemClock()
        refuse_given(context, workload.idle())
        path = out or Path("runs") / new_run_id("compare", unix_ns=clock.now_unix_ns())
        check_output_folder(path, "--out")
        with progress("running base and candidate", stream=sys.stderr) as on_progress:
            runs = asyncio.run(
                fill_runs_in_turn(
                    [target.target(base, "base"), target.target(candidate, "candidate")],
                    path,
                    spec=workload.spec(repeats=repeats),
                    order="abba",
                    block_size=workload.concurrency,
                    clock=clock,
                    report=on_progress,
                )
            )
        print(printable(f"Runs: {runs[0].path} {runs[1].path}"), file=sys.stderr)
    else:
        asking = [*names_of(WorkloadOptions, TargetOptions), "repeats", "out"]
        refuse_given(context, dict.fromkeys(asking, "it is for URLs, and Runs are judged as they stand"))
        runs = [Run.open(Path(base)), Run.open(Path(candidate))]
    verdict = _judge(runs, floor, judging.changes())
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
    tasks: Annotated[str, typer.Option(help="arithmetic, or YAML files; commas between.")] = "arithmetic",
    limit: Annotated[int | None, typer.Option(min=1, help="Items a task, at most.")] = None,
    concurrency: Annotated[int, typer.Option(help="Requests in flight.")] = 8,
    out: Annotated[Path | None, typer.Option(help="The Run's directory; default runs/<run id>.")] = None,
) -> None:
    """Run evaluation tasks against URL, each request a row of a Run."""
    clock = SystemClock()
    names = [name for name in tasks.split(",") if name]
    with needing("evals"):
        from firstdiff.evals.suite import check_tasks, run_tasks

        check_tasks(names)
    path = out or Path("runs") / new_run_id("eval", unix_ns=clock.now_unix_ns())
    check_output_folder(path, "--out")
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
        needing("evals"),
    ):
        result = run_tasks(names, send=sender.send, limit=limit)
        for item in result.items:
            sender.run.append("eval_items", item)
    # Errors first, whole: a line break in one of them is no line of ours.
    items = [
        msgspec.structs.replace(item, error=item.error and printable(item.error)) for item in result.items
    ]
    text = msgspec.structs.replace(result, items=items).to_text()
    print("\n".join(map(printable, text.split("\n"))))
    if not any(row.outcome == "ok" for row in Run.open(path).rows("requests", RequestRow)):
        raise typer.Exit(EXIT_INVALID)
    if result.outcome != "ok":
        raise typer.Exit(EXIT_UNKNOWN)


@app.command()
@with_groups
def demo(
    options: DemoOptions,
    out: Annotated[Path, typer.Option(help="Where Runs and report go.")] = Path("demo-runs"),
) -> None:
    """Serve a model, a twin and a defective candidate, and show that the twin passes and the other fails.

    The last line begins "demo: as expected" or says what was not. Exit codes: 0 as expected; 1 the twin
    failed or the candidate passed; 2 a mistake in the options, before anything is started; 3 a verdict is
    unknown; 4 one is invalid (this machine was too busy to measure), or a replica did not start.
    """
    spec = options.spec()
    check_output_folder(out, "--out")
    _check_servable(options.model, options.faults)
    clock = SystemClock()
    started = new_run_id("demo", unix_ns=clock.now_unix_ns())
    title = f"{options.model}: base, twin, candidate ({', '.join(options.faults)})"
    print(printable(f"starting three replicas of {title}"), file=sys.stderr)
    with progress("running base, twin and candidate in turns", stream=sys.stderr) as report:
        base, twin, candidate = asyncio.run(
            fill_runs_from_replicas(
                options.serve_args(),
                out / started,
                spec=spec,
                block_size=spec.concurrency,
                clock=clock,
                report=report,
            )
        )
    control = _judge([base, twin], None, {})
    verdict = _judge([base, candidate], twin, {})
    parts = []
    for title, one, judged in (
        ("Base against its twin: expected to pass", control, twin),
        ("Base against the candidate: expected to fail", verdict, candidate),
    ):
        _save(one, judged)
        parts.append(f"# {title}\n\n{_rendered(one, 'markdown')}")
        print(f"== {title}\n{_rendered(one, 'text')}\n")
    write_atomically(out / started / "report.md", "\n\n".join(parts).encode())
    report_path = out / started / "report.md"
    print(printable(f"report: {report_path}; Runs: {base.path} {twin.path} {candidate.path}"))
    code, line = demo_outcome(control.status, verdict.status)
    print(line)
    raise typer.Exit(code)


def demo_outcome(twin: Status, candidate: Status) -> tuple[int, str]:
    """Exit code and last line for the verdicts on base against its twin and against the candidate."""
    if (twin, candidate) == ("pass", "fail"):
        return 0, "demo: as expected: the twin passes, the candidate fails"
    found = [f"the twin's verdict is {twin}"] * (twin != "pass")
    found += [f"the candidate's verdict is {candidate}"] * (candidate != "fail")
    line = f"demo: not as expected: {', '.join(found)} (expected pass for the twin, fail for the candidate)"
    if twin == "fail" or candidate == "pass":
        return EXIT_FAIL, line
    return EXIT_INVALID if "invalid" in (twin, candidate) else EXIT_UNKNOWN, line


def _check_servable(model: str, faults: Sequence[str]) -> None:
    """ValueError when the bundled engine is not installed, or has no such model or fault."""
    with needing("engine"):
        for name in ("torch", "transformers", "tokenizers", "safetensors", "gguf", "zmq"):
            if importlib.util.find_spec(name) is None:
                raise ModuleNotFoundError(name=name)
        from firstdiff.engine.faults import check_faults
        from firstdiff.engine.model_store import resolve

        check_faults(faults)
        resolve(model)


def _judge(runs: Sequence[Run], floor: Run | None, changes: dict[str, float]) -> Verdict:
    from firstdiff.regression.diff import CompareConfig, compare

    config = msgspec.structs.replace(CompareConfig(), **changes)
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
    print(printable(f"{run.path}: {len(rows) - len(failed)} of {len(rows)} requests ok"))
    if failed:
        row = failed[0]
        first = f"first failure: case {row.case_id}, {row.outcome}: {row.error}"
        print(printable(first), file=sys.stderr)
        raise typer.Exit(EXIT_INVALID)


def _warn_of_misuse(error: Any) -> None:  # noqa: ANN401 - of a class that typer does not export
    message, context = error.format_message(), error.ctx
    if context is not None and message == context.get_help():
        # Nothing was asked for.
        print(message, file=sys.stderr)
        return
    command = context.command_path if context is not None else app.info.name
    _warn(f"{message.rstrip('.')}: see `{command} --help`")


def main(arguments: Sequence[str] | None = None) -> None:
    """The entry point: a mistake is one line and exit code 2, an endpoint that fails exit code 4."""
    try:
        raise SystemExit(app(args=arguments, prog_name="firstdiff", standalone_mode=False))
    except _MISUSE as error:
        _warn_of_misuse(error)
        raise SystemExit(EXIT_USAGE) from None
    except OSError as error:
        if error.errno not in _NO_ROOM:
            _warn(str(error))
            raise SystemExit(EXIT_USAGE) from None
        where = f" for {error.filename}" if error.filename else ""
        _warn(
            f"expected room{where}, got: {error.strerror}: free some and repeat; a Run goes on with --resume"
        )
        raise SystemExit(EXIT_INVALID) from None
    except ValueError as error:
        _warn(str(error))
        raise SystemExit(EXIT_USAGE) from None
    except EndpointError as error:
        _warn(str(error))
        raise SystemExit(EXIT_INVALID) from None
    except ReplicaError as error:
        # A server's last words are lines, each made printable where they are read.
        print(f"firstdiff: {error}", file=sys.stderr)
        raise SystemExit(EXIT_INVALID) from None


if __name__ == "__main__":
    main()
