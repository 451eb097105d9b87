"""The commands that read token-ID logs: `firstdiff log show | validate | agree | replay | diff`.

Owns: these commands and their exit codes. Refuses to know: how a log is read, checked, compared or asked
again. Invariants: as in cli.py; nothing that a log holds reaches the terminal but made harmless; the
tokenizer that checks texts is Hugging Face's library, not the bundled engine whose texts they may be.

Usage: `app.add_typer(log_app, name="log")`.
"""

from __future__ import annotations

import http.client
import sys
import urllib.request
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from firstdiff.harness.log_table import log_detail, log_table
from firstdiff.harness.options import TargetOptions, check_output_folder, needing, with_groups
from firstdiff.harness.progress import printable, progress
from firstdiff.harness.replay import Replay, has_same_logprobs, is_plainly_greedy, replay_of
from firstdiff.harness.runs import new_run_id
from firstdiff.harness.sending import Sender
from firstdiff.harness.token_texts import FileTokenizer
from firstdiff.harness.wire import EndpointError
from firstdiff.tracing.clock import SystemClock
from firstdiff.tracing.records import Identity, RequestRow, TokenLogRow
from firstdiff.tracing.token_log import read_log

if TYPE_CHECKING:
    from firstdiff.regression.log_diff import AnswerDiff

EXIT_FOUND, EXIT_UNKNOWN, EXIT_INVALID = 1, 3, 4
_MAX_SHOWN = 5
_SCRAPE_TIMEOUT_S, _MAX_SCRAPE_BYTES = 30.0, 64 << 20

Source = Annotated[Path, typer.Argument(help="A server's log folder, a Run, or a file of a token log.")]

log_app = typer.Typer(
    help="Show, check, replay and compare token-ID logs.", no_args_is_help=True, rich_markup_mode=None
)


@log_app.command("show")
@with_groups
def show(
    source: Source,
    request_id: Annotated[str | None, typer.Argument(help="Show this request in full.")] = None,
    limit: Annotated[int, typer.Option(min=1, help="Lines, at most: those of the last requests.")] = 50,
) -> None:
    """List the requests of SOURCE, or show one with its tokens and times."""
    log = read_log(source)
    if request_id is None:
        print(log_table(log, limit=limit))
        return
    print("\n\n".join(map(log_detail, _chosen(log.rows, request_id, source))))


@log_app.command("validate")
@with_groups
def validate(
    source: Source,
    tokenizer: Annotated[
        str | None, typer.Option(metavar="MODEL", help="Check texts too, by the tokenizer of this model.")
    ] = None,
    limit: Annotated[int, typer.Option(min=1, help="Lines for each kind of remark.")] = _MAX_SHOWN,
) -> None:
    """Check that SOURCE can be the log of a sound server.

    Exit codes: 0 nothing found; 1 defects; 2 wrong usage; 3 something could not be checked (contents left out
    or cut, no --tokenizer) and nothing was found.
    """
    from firstdiff.regression.log_checks import Remark, check_log
    from firstdiff.regression.log_text_checks import check_texts
    from firstdiff.regression.quoting import for_text

    log = read_log(source, keep_damage=True)
    remarks = check_log(log)
    if tokenizer is None:
        text = "texts were not checked against their tokens: give --tokenizer"
        remarks.append(Remark("unknown", "tokenizer", None, text))
    else:
        with needing("engine"):
            remarks += check_texts(log, FileTokenizer(_model_folder(tokenizer)))
    shown: Counter[tuple[str, str]] = Counter()
    for severity in ("defect", "unknown", "note"):
        for remark in remarks:
            if remark.severity != severity:
                continue
            shown[severity, remark.check] += 1
            if shown[severity, remark.check] <= limit:
                where = f" {remark.request_id}:" if remark.request_id is not None else ""
                print(printable(for_text(f"{severity} ({remark.check}):{where} {remark.text}")))
    for (severity, check), count in shown.items():
        if count > limit:
            print(f"{severity} ({check}): {count - limit} more")
    counts = Counter(remark.severity for remark in remarks)
    print(
        f"{len(log.rows)} requests: {counts['defect']} defects, {counts['unknown']} unknown, "
        f"{counts['note']} notes"
    )
    if counts["defect"]:
        raise typer.Exit(EXIT_FOUND)
    if counts["unknown"]:
        raise typer.Exit(EXIT_UNKNOWN)


@log_app.command("agree")
@with_groups
def agree(
    source: Annotated[Path, typer.Argument(help="A server's log folder, the server idle or ended.")],
    metrics: Annotated[
        str | None, typer.Option(metavar="FILE|URL", help="A saved scrape, or the server's /metrics.")
    ] = None,
    limit: Annotated[int, typer.Option(min=1, help="Disagreements to show.")] = 4 * _MAX_SHOWN,
) -> None:
    """Fold the log of SOURCE again, and prove that its spans and the server's metrics equal it.

    Exit codes: 0 they do; 1 they do not; 2 wrong usage; 3 not all could be compared, and the rest agrees.
    """
    from firstdiff.tracing.agreement import check_agreement

    found = check_agreement(source, exposition=None if metrics is None else _scrape(metrics))
    for sentence in found.disagreements[:limit]:
        print(printable(sentence))
    if len(found.disagreements) > limit:
        print(f"... and {len(found.disagreements) - limit} more")
    for sentence in found.unknown:
        print(printable(sentence), file=sys.stderr)
    print(
        f"{found.num_answers} answers, {found.num_http} HTTP requests, {found.num_steps} steps: "
        f"{found.num_spans} spans and {found.num_samples} samples compared, "
        f"{len(found.disagreements)} disagreements"
    )
    if found.disagreements:
        raise typer.Exit(EXIT_FOUND)
    if found.unknown:
        raise typer.Exit(EXIT_UNKNOWN)


def _scrape(metrics: str) -> str:
    if not metrics.startswith(("http://", "https://")):
        return Path(metrics).read_bytes().decode("utf-8", "replace")
    try:
        with urllib.request.urlopen(metrics, timeout=_SCRAPE_TIMEOUT_S) as response:
            body: bytes = response.read(_MAX_SCRAPE_BYTES)
    except (OSError, http.client.HTTPException) as error:
        raise EndpointError(f"expected metrics from {metrics}, got: {error}") from error
    return body.decode("utf-8", "replace")


@log_app.command("replay")
@with_groups
def replay(
    source: Source,
    url: str,
    target: TargetOptions,
    request: Annotated[list[str] | None, typer.Option(help="This request; repeat for more.")] = None,
    limit: Annotated[int, typer.Option(min=1, help="Requests, at most.")] = 100,
    concurrency: Annotated[int, typer.Option(min=1, help="Requests in flight.")] = 1,
    forced: Annotated[
        bool | None,
        typer.Option(
            "--forced/--free",
            help="Make it say the logged tokens, or not; default: forced where that tells something.",
        ),
    ] = None,
    tolerance: Annotated[
        float, typer.Option(min=0.0, help="Nats that log-probabilities may move by.")
    ] = 0.05,
    out: Annotated[Path | None, typer.Option(help="The Run's directory; default runs/<run id>.")] = None,
) -> None:
    """Ask URL what the log's server was asked, and compare tokens and log-probabilities.

    Exit codes: 0 the same; 1 different; 2 wrong usage; 3 nothing that could be compared, or ties only; 4 the
    endpoint did not answer.
    """
    log = read_log(source)
    rows = [row for one in request for row in _chosen(log.rows, one, source)] if request else log.rows
    clock = SystemClock()
    path = out or Path("runs") / new_run_id("replay", unix_ns=clock.now_unix_ns())
    check_output_folder(path, "--out")
    with (
        progress("replaying", stream=sys.stderr) as report,
        Sender(
            target.target(url, "replay"),
            path,
            workload={"kind": "replay", "source": str(source), "limit": limit},
            concurrency=concurrency,
            clock=clock,
            report=report,
        ) as sender,
    ):
        dialect = sender.endpoint.dialect
        replays = [replay_of(row, dialect=dialect, forced=forced) for row in rows[:limit]]
        asked = [one for one in replays if one.request is not None]
        replies = sender.send([one.request for one in asked if one.request is not None])
        _print_unlike(log.identities, sender.endpoint.identity)
        judged = [
            (one, _judged(one, reply, dialect_name=dialect.name, tolerance=tolerance))
            for one, reply in zip(asked, replies, strict=True)
        ]
    left_out = [one for one in replays if one.request is None]
    for one in left_out[:_MAX_SHOWN]:
        print(printable(f"not replayed: {one.row.request_id}: {one.why_not}"))
    if len(left_out) > _MAX_SHOWN:
        print(f"not replayed: {len(left_out) - _MAX_SHOWN} more")
    raise typer.Exit(_print_replays(judged, num_rows=len(replays)))


@log_app.command("diff")
@with_groups
def diff(
    base: Annotated[Path, typer.Argument(help="As SOURCE of the other commands.")],
    candidate: Annotated[Path, typer.Argument(help="As SOURCE of the other commands.")],
    limit: Annotated[int, typer.Option(min=1, help="Answers that differ to show.")] = _MAX_SHOWN,
) -> None:
    """Compare the answers of two logs, paired by request id, else by prompt and sampling.

    Exit codes: 0 equal; 1 different; 2 wrong usage; 3 nothing to compare, or not all of it.
    """
    from firstdiff.regression.log_diff import answer_of, asked_alike, coarser, diff_answers, pair_rows
    from firstdiff.regression.quoting import for_text

    ours, theirs = read_log(base), read_log(candidate)
    pairs, by = pair_rows(ours.rows, theirs.rows)
    counts: Counter[str] = Counter()
    shifts: list[float] = []
    for one, other in pairs:
        content = coarser(one.content, other.content)
        if not asked_alike(one, other):
            outcome, text = "unknown", "the two were asked with another prompt, sampling or seed"
        else:
            found = diff_answers(answer_of(one, content), answer_of(other, content))
            outcome, text = found.outcome, found.text
            shifts += [found.shift] if found.shift is not None else []
        counts[outcome] += 1
        if outcome != "equal" and counts[outcome] <= limit:
            print(printable(for_text(f"{outcome}: {one.request_id}: {text}")))
    num_alone = len(ours.rows) + len(theirs.rows) - 2 * len(pairs)
    print(
        f"{len(pairs)} pairs by {by}: {counts['equal']} equal, {counts['different']} different, "
        f"{counts['unknown']} unknown; {num_alone} requests on one side only{_largest(shifts)}"
    )
    if counts["different"]:
        raise typer.Exit(EXIT_FOUND)
    if counts["unknown"] or not pairs:
        raise typer.Exit(EXIT_UNKNOWN)


def _chosen(rows: Sequence[TokenLogRow], request_id: str, source: Path) -> list[TokenLogRow]:
    """All rows of an id, or those of the answers to the HTTP request that has it."""
    found = [row for row in rows if row.request_id == request_id]
    found = found or [row for row in rows if row.request_id.rpartition("-")[0] == request_id]
    if not found:
        raise ValueError(f"expected a request of {source}, got {request_id!r}: see `firstdiff log show`")
    return found


def _model_folder(model: str) -> Path:
    if (Path(model) / "tokenizer.json").is_file():
        return Path(model)
    from firstdiff.engine.model_store import resolve

    return resolve(model).path


def _judged(one: Replay, reply: RequestRow, *, dialect_name: str, tolerance: float) -> AnswerDiff | str:
    """What became of a replay; a sentence when the endpoint gave no answer."""
    from firstdiff.harness.dialect import DIALECTS
    from firstdiff.regression.log_replays import judge_forced, judge_free

    if reply.outcome != "ok":
        return f"{reply.outcome}: {reply.error}"
    if not one.is_forced:
        return judge_free(one.row, reply, tolerance=tolerance)
    return judge_forced(
        one.row,
        reply,
        tolerance=tolerance,
        is_greedy=is_plainly_greedy(one.row.sampling),
        has_logprobs=has_same_logprobs(one.row, DIALECTS[dialect_name]),
    )


def _print_replays(judged: Sequence[tuple[Replay, AnswerDiff | str]], *, num_rows: int) -> int:
    """The lines of all that is not equal, and the last one; the exit code."""
    from firstdiff.regression.quoting import for_text

    counts: Counter[str] = Counter()
    shifts: list[float] = []
    for one, found in judged:
        outcome, text = ("failed", found) if isinstance(found, str) else (found.outcome, found.text)
        counts[outcome] += 1
        if not isinstance(found, str) and found.shift is not None:
            shifts.append(found.shift)
        if outcome != "equal" and counts[outcome] <= _MAX_SHOWN:
            print(printable(for_text(f"{outcome}: {one.row.request_id}: {text}")))
    num_forced = sum(one.is_forced for one, _ in judged)
    print(
        f"{len(judged)} of {num_rows} requests replayed, {num_forced} of them forced: "
        f"{counts['equal']} equal, {counts['different']} different, {counts['unknown']} unknown, "
        f"{counts['failed']} failed{_largest(shifts)}"
    )
    if counts["different"]:
        return EXIT_FOUND
    if counts["failed"]:
        return EXIT_INVALID
    return EXIT_UNKNOWN if counts["unknown"] or not counts["equal"] else 0


def _largest(shifts: Sequence[float]) -> str:
    return f"; log-probabilities moved by {max(shifts):.4g} nats at most" if shifts else ""


def _print_unlike(logged: Sequence[Identity], asked: Identity | None) -> None:
    """What the endpoint is made of that the log's servers were not."""
    if asked is None or not logged:
        return
    for name in ("weights_sha256", "tokenizer_sha256", "dtype", "faults"):
        if all(getattr(one, name) != getattr(asked, name) for one in logged):
            print(f"note: the endpoint has other {name.removesuffix('_sha256')} than the log's server")
