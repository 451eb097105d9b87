"""The commands that read traces: `firstdiff trace ...` and `firstdiff jaeger`.

Owns: these commands. Refuses to know: how traces are kept, compared or drawn, exit codes of other commands.
Invariants: as in cli.py; what needs a web library is imported inside the commands; nothing that a trace holds
reaches the terminal but through `printable` or `quoted`.

Usage: `app.add_typer(trace_app, name="trace")`.
"""

from __future__ import annotations

import asyncio
import shutil
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import msgspec
import typer

from firstdiff.harness.jaeger_query import duration_ns, unix_ns
from firstdiff.harness.options import check_output_file, check_output_folder, with_groups
from firstdiff.harness.progress import printable, progress
from firstdiff.harness.trace_table import SORT_KEYS, sort_rows, table_rows, table_text
from firstdiff.harness.waterfall import waterfall
from firstdiff.harness.wire import EndpointError
from firstdiff.tracing import names
from firstdiff.tracing.clock import SystemClock
from firstdiff.tracing.jaeger_json import encode_jaeger
from firstdiff.tracing.otlp_json import decode_traces, encode_traces
from firstdiff.tracing.span_file import SPANS_FILE
from firstdiff.tracing.span_record import SpanRecord
from firstdiff.tracing.store import write_atomically
from firstdiff.tracing.trace_set import Trace, group_traces, read_traces

if TYPE_CHECKING:
    from firstdiff.harness.jaeger_fetch import FetchQuery

_WIDTH_ELSEWHERE = 120
_MAX_NAMED = 5

Source = Annotated[
    Path,
    typer.Argument(metavar="SOURCE", help="A Run, a server's log folder, or a file of OTLP or Jaeger JSON."),
]

trace_app = typer.Typer(
    help="List, show, export and fetch traces.", no_args_is_help=True, rich_markup_mode=None
)


@trace_app.command("list")
@with_groups
def list_(
    source: Source,
    sort: Annotated[str, typer.Option(metavar=f"<{'|'.join(SORT_KEYS)}>")] = "start",
    limit: Annotated[int, typer.Option(min=1, help="Lines, at most.")] = 50,
    format_: Annotated[Literal["text", "json"], typer.Option("--format")] = "text",
) -> None:
    """List the requests in SOURCE with their phases, the longest first where they are sorted by one."""
    if sort not in SORT_KEYS:
        raise ValueError(f"expected --sort out of {', '.join(SORT_KEYS)}, got {sort!r}")
    rows = table_rows(_traces(source))
    shown = sort_rows(rows, sort)[:limit]
    if format_ == "json":
        print(msgspec.json.format(msgspec.json.encode(shown)).decode())
    else:
        print(table_text(shown, num_total=len(rows)))


@trace_app.command("show")
@with_groups
def show(
    source: Source,
    id_: Annotated[str, typer.Argument(metavar="ID", help="The start of a trace id, or a request id.")],
    attributes: Annotated[bool, typer.Option("--attributes", help="What each span says, too.")] = False,
    width: Annotated[int, typer.Option(min=0, help="Columns; 0: as wide as the terminal.")] = 0,
) -> None:
    """Draw a trace as a waterfall."""
    (trace,) = _chosen(_traces(source), [id_])
    columns = width or shutil.get_terminal_size((_WIDTH_ELSEWHERE, 24)).columns
    print(waterfall(trace, width=columns, attributes=attributes))


@trace_app.command("export")
@with_groups
def export(
    source: Source,
    ids: Annotated[
        list[str] | None, typer.Argument(metavar="[ID...]", help="As for show; default: all.")
    ] = None,
    *,
    out: Annotated[Path, typer.Option(help="The file to write.")],
    format_: Annotated[Literal["jaeger", "otlp"], typer.Option("--format")] = "jaeger",
) -> None:
    """Write traces as a file that Jaeger's upload takes."""
    check_output_file(out, "--out")
    traces = _traces(source)
    chosen = _chosen(traces, ids) if ids else traces
    if format_ == "jaeger":
        content = encode_jaeger([trace.spans for trace in chosen])
    else:
        # A line a trace: that is how spans are kept, and Jaeger takes lines as well as one document.
        content = b"\n".join(encode_traces(trace.spans) for trace in chosen)
    write_atomically(out, content + b"\n")
    print(printable(f"{out}: {len(chosen)} traces"), file=sys.stderr)


def _traces(source: Path) -> list[Trace]:
    traces = read_traces([source])
    if not traces:
        raise ValueError(f"expected traces in {source}, got none: was it filled while traces were sampled?")
    return traces


def _chosen(traces: Sequence[Trace], ids: Sequence[str]) -> list[Trace]:
    """The trace that each id names; ValueError when it names none, or several."""
    chosen = []
    for text in ids:
        found = [trace for trace in traces if trace.trace_id == text.lower()]
        found = found or [trace for trace in traces if text in _request_ids(trace)]
        found = found or [trace for trace in traces if text and trace.trace_id.startswith(text.lower())]
        if len(found) != 1:
            named = ", ".join(trace.trace_id for trace in found[:_MAX_NAMED])
            got = f"one that {len(found)} traces have ({named}, ...)" if found else "none like it"
            raise ValueError(
                f"expected the start of a trace id or a request id, got {text!r}, {got}: "
                "see `firstdiff trace list`"
            )
        chosen += found
    return list(dict.fromkeys(chosen))


def _request_ids(trace: Trace) -> set[str]:
    keys = (names.REQUEST_ID, names.GEN_AI_RESPONSE_ID)
    return {str(span.attributes[key]) for span in trace.spans for key in keys if key in span.attributes}


@trace_app.command("fetch")
@with_groups
def fetch(
    url: Annotated[str, typer.Argument(metavar="JAEGER_URL", help="Like http://127.0.0.1:16686.")],
    *,
    out: Annotated[Path, typer.Option(help="A new folder, for the other commands to read.")],
    service: Annotated[str, typer.Option(help="Default: all that there are.")] = "",
    operation: Annotated[str, typer.Option(help="The name of one of a trace's spans.")] = "",
    since: Annotated[str | None, typer.Option(help="Like 2026-12-01T12:00:00Z, with --until.")] = None,
    until: Annotated[str | None, typer.Option(help="Default: now.")] = None,
    last: Annotated[str | None, typer.Option(help="Like 90m or 24h, instead; default: 1h.")] = None,
    limit: Annotated[int, typer.Option(help="Traces, at most; the newest.")] = 1000,
    timeout: Annotated[float, typer.Option(min=0.001, help="Seconds an answer may take.")] = 30.0,
) -> None:
    """Read spans back from a Jaeger into a folder."""
    from firstdiff.harness.jaeger_fetch import FetchQuery, check_url

    clock = SystemClock()
    start_ns, end_ns = _time_range(since, until, last, now_ns=clock.now_unix_ns())
    query = FetchQuery(
        start_unix_ns=start_ns, end_unix_ns=end_ns, num_traces=limit, service=service, operation=operation
    )
    query.check()
    check_url(url)
    check_output_folder(out, "--out")
    file = out / SPANS_FILE
    if file.exists():
        raise ValueError(f"expected a new folder for --out, got {out}, which holds spans: choose another")
    with progress("fetching", stream=sys.stderr) as report:
        lines = asyncio.run(_fetched(url, query, report, timeout))
    if not lines:
        raise EndpointError(
            f"expected traces from {url}, got none: try another --service, or a longer --last"
        )
    out.mkdir(parents=True, exist_ok=True)
    write_atomically(file, b"".join(line + b"\n" for line in lines))
    print(printable(f"{out}: {len(lines)} traces"))
    if len(lines) >= limit:
        print(f"firstdiff: only the newest {limit} were asked for: see --limit", file=sys.stderr)


async def _fetched(
    url: str, query: FetchQuery, report: Callable[[int, int], None], timeout_s: float
) -> list[bytes]:
    from firstdiff.harness.jaeger_fetch import fetch_traces

    found = fetch_traces(url, query, report=report, timeout_s=timeout_s)
    return [encode_traces(spans) async for spans in found]


def _time_range(since: str | None, until: str | None, last: str | None, *, now_ns: int) -> tuple[int, int]:
    """(from, to) in Unix nanoseconds; ValueError when they cannot be read or contradict one another."""
    if last is not None and since is not None:
        raise ValueError("expected --since or --last, got both: leave one out")
    end_ns = now_ns if until is None else unix_ns(until)
    if since is not None:
        return max(0, unix_ns(since)), end_ns
    return max(0, end_ns - duration_ns(last or "1h")), end_ns


@trace_app.command("diff")
@with_groups
def diff(
    base: Annotated[str, typer.Argument(help="A Run, a log folder, a file, or a Jaeger's URL.")],
    candidate: Annotated[str, typer.Argument(help="As BASE; it may be the same with --candidate-where.")],
    *,
    base_where: Annotated[
        str | None, typer.Option(metavar="KEY=VALUE", help="Only traces with a span that says so.")
    ] = None,
    candidate_where: Annotated[str | None, typer.Option(metavar="KEY=VALUE", help="As --base-where.")] = None,
    last: Annotated[str, typer.Option(help="Of a Jaeger: like 90m or 24h.")] = "1h",
    limit: Annotated[int, typer.Option(help="Of a Jaeger: traces a side, at most; the newest.")] = 1000,
    jaeger_url: Annotated[str | None, typer.Option(help="Link the examples to this Jaeger.")] = None,
    margin: Annotated[float, typer.Option(min=0, help="A slow-down that matters, as a fraction.")] = 0.15,
    format_: Annotated[Literal["text", "json"], typer.Option("--format")] = "text",
    report: Annotated[Path | None, typer.Option(help="Write the answer to this file too.")] = None,
) -> None:
    """Say which phase a change of latency is in: exit code 0 pass, 1 fail, 3 unknown.

    Requests are paired by case where the same ones ran on both sides, else compared by length.
    """
    check_output_file(report, "--report")
    sides = [
        _side(source, where, last=last, limit=limit)
        for source, where in ((base, base_where), (candidate, candidate_where))
    ]
    from firstdiff.regression.phase_report import to_json, to_text
    from firstdiff.regression.trace_diff import DiffConfig, diff_traces
    from firstdiff.regression.verdict import EXIT_CODES

    found = diff_traces(sides[0], sides[1], DiffConfig(latency_margin=margin))
    links = jaeger_url or next((side for side in (base, candidate) if _is_url(side)), None)
    text = (
        to_json(found).decode().rstrip() if format_ == "json" else to_text(found, jaeger_url=links).rstrip()
    )
    print(text)
    if report is not None:
        write_atomically(report, (text + "\n").encode())
    raise typer.Exit(EXIT_CODES[found.status])


def _is_url(source: str) -> bool:
    return source.startswith(("http://", "https://"))


def _side(source: str, where: str | None, *, last: str, limit: int) -> list[SpanRecord]:
    """The spans of one side of a comparison; ValueError when there are none, or `where` cannot be read."""
    if _is_url(source):
        from firstdiff.harness.jaeger_fetch import FetchQuery, check_url

        end_ns = SystemClock().now_unix_ns()
        query = FetchQuery(
            start_unix_ns=max(0, end_ns - duration_ns(last)),
            end_unix_ns=end_ns,
            num_traces=limit,
            service="",
            operation="",
        )
        query.check()
        check_url(source)
        with progress("fetching", stream=sys.stderr) as report:
            lines = asyncio.run(_fetched(source, query, report, 30.0))
        traces = group_traces(span for line in lines for span in decode_traces(line))
    else:
        traces = _traces(Path(source))
    if where is not None:
        key, equals, value = where.partition("=")
        if not (key and equals):
            raise ValueError(f"expected KEY=VALUE to choose traces by, got {where!r}")
        traces = [trace for trace in traces if any(_says(span, key, value) for span in trace.spans)]
        if not traces:
            raise ValueError(f"expected traces in {source} with {where}, got none")
    return [span for trace in traces for span in trace.spans]


def _says(span: SpanRecord, key: str, value: str) -> bool:
    said = span.attributes.get(key, span.resource.get(key))
    return said is not None and str(said) == value


@with_groups
def jaeger(
    sources: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Runs, log folders or files.")],
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one and prints it.")] = 16686,
    ui: Annotated[Path | None, typer.Option(help="A folder with a built Jaeger UI to serve too.")] = None,
) -> None:
    """Answer as a Jaeger does about the traces of RUNs, on this machine, until a signal."""
    from firstdiff.harness.jaeger_facade import serve_traces

    async def serve() -> None:
        ended = asyncio.Event()
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, ended.set)
        await serve_traces(sources, port=port, ui=ui, announce=announce, until=ended)

    def announce(url: str, num_traces: int) -> None:
        print(f"firstdiff: Jaeger's API (traces so far: {num_traces}) on {url}", flush=True)

    asyncio.run(serve())
