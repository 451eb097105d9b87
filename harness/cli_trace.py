"""The commands that read traces: `firstdiff trace ...` and `firstdiff jaeger`.

Owns: these commands. Refuses to know: how traces are kept, compared or drawn, exit codes of other commands.
Invariants: as in cli.py; nothing that a trace holds reaches the terminal but through `printable`.

Usage: `app.add_typer(trace_app, name="trace")`.
"""

from __future__ import annotations

import asyncio
import shutil
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

import msgspec
import typer

from firstdiff.harness.jaeger_facade import serve_traces
from firstdiff.harness.options import check_output_file, with_groups
from firstdiff.harness.progress import printable
from firstdiff.harness.trace_table import SORT_KEYS, sort_rows, table_rows, table_text
from firstdiff.harness.waterfall import waterfall
from firstdiff.tracing import names
from firstdiff.tracing.jaeger_json import encode_jaeger
from firstdiff.tracing.otlp_json import encode_traces
from firstdiff.tracing.store import write_atomically
from firstdiff.tracing.trace_set import Trace, read_traces

_WIDTH_ELSEWHERE = 120
_MAX_NAMED = 5

Source = Annotated[
    Path, typer.Argument(help="A Run, a server's log folder, or a file of OTLP or Jaeger JSON.")
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


@with_groups
def jaeger(
    sources: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Runs, log folders or files.")],
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one and prints it.")] = 16686,
    ui: Annotated[Path | None, typer.Option(help="A folder with a built Jaeger UI to serve too.")] = None,
) -> None:
    """Answer as a Jaeger does about the traces of RUNs, on this machine, until a signal."""

    async def serve() -> None:
        ended = asyncio.Event()
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, ended.set)
        await serve_traces(sources, port=port, ui=ui, announce=announce, until=ended)

    def announce(url: str, num_traces: int) -> None:
        print(f"firstdiff: Jaeger's API (traces so far: {num_traces}) on {url}", flush=True)

    asyncio.run(serve())
