"""A token-ID log for the eye: a line a request, or one request in full.

Owns: what is shown and how. Refuses to know: where the log comes from, what is wrong with it. Invariants: all
that clients and models wrote is made printable; what the log leaves out is said, never shown as nothing.

Usage: `print(log_table(log, limit=50)); print(log_detail(row))`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from firstdiff.harness.progress import printable
from firstdiff.tracing.records import TokenLogRow
from firstdiff.tracing.timeline import phase_durations_ns
from firstdiff.tracing.token_log import TokenLog

_TEXT_CHARS = 40
_COLUMNS = ("request", "prompt", "cached", "output", "finish", "ttft ms", "e2e ms", "text")


def log_table(log: TokenLog, *, limit: int) -> str:
    """One line a request, the last `limit` of them, with what was lost below."""
    rows = log.rows[-limit:]
    cells = [_COLUMNS, *(_cells(row) for row in rows)]
    lines = _aligned(cells, str.ljust)
    lines.append(f"{len(rows)} of {len(log.rows)} requests, of {len(log.identities)} servers")
    lines += [printable(f"lost: {loss.num_rows} rows of {loss.file} ({loss.reason})") for loss in log.losses]
    return "\n".join(lines)


def _cells(row: TokenLogRow) -> tuple[str, ...]:
    finish = row.finish_reason if row.told is None else row.told.finish_reason or "-"
    ttft = "-" if row.first_token_ns is None else f"{(row.first_token_ns - row.received_ns) / 1e6:.1f}"
    return (
        printable(row.request_id),
        str(row.num_prompt_tokens),
        str(row.num_cached_tokens),
        str(row.num_output_tokens),
        printable(finish),
        ttft,
        f"{(max(row.flushed_ns, row.finished_ns) - row.received_ns) / 1e6:.1f}",
        _text_of(row, _TEXT_CHARS),
    )


def _text_of(row: TokenLogRow, limit: int) -> str:
    if row.content != "full":
        return f"(left out, {row.num_text_chars} characters)"
    text = printable(row.text[:limit])
    return text + ("..." if len(row.text) > limit else "")


def log_detail(row: TokenLogRow) -> str:
    """All that a row says, its tokens one a line."""
    shown = {
        "request": row.request_id,
        "endpoint": f"{row.endpoint}, answer {row.choice_index + 1} of {row.num_choices}",
        "trace": f"{row.trace_id or '-'} span {row.span_id or '-'}",
        "server": row.identity_sha256,
        "content": row.content,
        "finish": _finish(row),
        "stamps": _stamps(row),
        "phases ms": _phases(row),
        "cached": f"{row.num_cached_tokens} of {row.num_prompt_tokens} prompt tokens",
        "sampling": _json(row.sampling),
        "asked": _json(row.asked) if row.asked is not None else "not said (schema 1)",
        "told": _json(row.told) if row.told is not None else "not said (schema 1)",
        "error": row.error or "",
        "preempted": _json(row.preemptions) if row.preemptions else "",
        "chunks": _json(row.prefill_chunks),
        "digests": _json(row.digests) if row.digests is not None else "",
        "truncated": _json(row.truncated) if row.truncated else "",
        "prompt": _ids(row, row.prompt_token_ids, row.num_prompt_tokens),
        "text": _text_of(row, len(row.text)),
    }
    width = max(map(len, shown))
    lines = [f"{name.ljust(width)}  {printable(value)}" for name, value in shown.items() if value]
    return "\n".join([*lines, "", *_token_lines(row)])


def _json(value: object) -> str:
    return msgspec.json.encode(value).decode()


def _finish(row: TokenLogRow) -> str:
    told = "" if row.told is None else f", told {row.told.finish_reason or 'nothing'}"
    match = None if row.told is None else row.told.stop_match
    return f"{row.finish_reason}{told}" + ("" if match is None else f", at {match!r}")


def _stamps(row: TokenLogRow) -> str:
    named = {
        "tokenized": row.tokenized_ns,
        "arrived": row.arrived_ns,
        "scheduled": row.first_scheduled_ns,
        "first token": row.first_token_ns,
        "finished": row.finished_ns,
        "flushed": row.flushed_ns,
    }
    since = [
        f"{name} {(stamp - row.received_ns) / 1e6:+.3f} ms"
        for name, stamp in named.items()
        if stamp is not None
    ]
    return f"received at {row.received_unix_ns} ns since 1970: {', '.join(since)}"


def _phases(row: TokenLogRow) -> str:
    return ", ".join(f"{name} {ns / 1e6:.3f}" for name, ns in phase_durations_ns(row).items())


def _ids(row: TokenLogRow, ids: Sequence[int], num_all: int) -> str:
    if row.content == "hash":
        return f"(left out, {num_all} token ids)"
    kept = f" (cut, {num_all} in all)" if len(ids) < num_all else ""
    return " ".join(map(str, ids)) + kept


def _token_lines(row: TokenLogRow) -> list[str]:
    columns = ("token", "id", "ms", "step", "batch", "logprob", "text")
    cells: list[tuple[str, ...]] = [columns]
    # A damaged row has lists of unequal length: each shows what it has.
    num_tokens = max(map(len, (row.token_ids, row.emitted_ns, row.step_index, row.batch_size)), default=0)
    for index in range(num_tokens):
        cells.append(
            (
                str(index),
                _at(row.token_ids, index),
                f"{(row.emitted_ns[index] - row.received_ns) / 1e6:.3f}"
                if index < len(row.emitted_ns)
                else "",
                _at(row.step_index, index),
                _at(row.batch_size, index),
                _at(row.logprobs, index),
                _own_text(row, index),
            )
        )
    return _aligned(cells, str.rjust)


def _aligned(cells: Sequence[Sequence[str]], adjust: Callable[[str, int], str]) -> list[str]:
    """The cells of each line under one another, the last one as it is."""
    widths = [max(len(line[column]) for line in cells) for column in range(len(cells[0]) - 1)]
    lines = []
    for line in cells:
        parts = [adjust(cell, width) for cell, width in zip(line, widths, strict=False)]
        lines.append("  ".join([*parts, line[-1]]).rstrip())
    return lines


def _at(values: Sequence[object], index: int) -> str:
    value = values[index] if index < len(values) else None
    return "" if value is None else f"{value:.6g}" if isinstance(value, float) else str(value)


def _own_text(row: TokenLogRow, index: int) -> str:
    if row.content != "full" or index >= len(row.text_offsets):
        return ""
    end = row.text_offsets[index + 1] if index + 1 < len(row.text_offsets) else len(row.text)
    return printable(row.text[row.text_offsets[index] : end])
