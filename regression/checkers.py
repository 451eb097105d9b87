"""Whether one Run can be judged at all: rows whole and in order, the client on time.

Owns: the checks that need only one Run. Refuses to know: the other side, what candidate and base are.
Invariants: a check finds or passes, never raises for what a Run holds; a late client makes the Run invalid,
a lost or impossible row makes it unknown.

Usage: `for check in CHECKERS.values(): findings += check(view, config)`.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from statistics import median

from firstdiff.regression.quoting import quoted
from firstdiff.regression.summary import RunView, e2e_ns, ttft_ns
from firstdiff.regression.verdict import CompareConfig, Example, Finding
from firstdiff.tracing.records import RequestRow

_LATE = "The client and not the server was slow: run it on a machine, or at a load, where it keeps up."

Checker = Callable[[RunView, CompareConfig], list[Finding]]


def check_rows(view: RunView, config: CompareConfig) -> list[Finding]:
    """Unknown when rows were lost, are damaged, or claim what cannot be."""
    label = quoted(view.manifest.label)
    findings = [
        Finding(status="unknown", part="rows", title=f"the Run of {label} is not whole: {problem}")
        for problem in view.problems
    ]
    impossible = [(row, what) for row in view.ok.values() if (what := _impossible(row)) is not None]
    if impossible:
        row, what = impossible[0]
        findings.append(
            Finding(
                status="unknown",
                part="rows",
                title=f"{len(impossible)} rows of {label} claim what cannot be, "
                f"the first in case {quoted(row.case_id)}: {what}",
                evidence=[
                    Example(
                        case_id=row.case_id,
                        repeat_index=row.repeat_index,
                        side=view.manifest.label,
                        text=what,
                    )
                ],
                n=len(impossible),
            )
        )
    return findings


def _impossible(row: RequestRow) -> str | None:
    stamps = [row.intended_ns, row.sent_ns]
    stamps += [] if row.headers_received_ns is None else [row.headers_received_ns]
    stamps += [*row.chunk_received_ns, row.finished_ns]
    if any(after < before for before, after in pairwise(stamps)):
        return "its stamps run backwards"
    if len(row.chunk_num_tokens) != len(row.chunk_received_ns):
        return "it has stamps for another number of chunks than it counts"
    if any(count is not None and count < 0 for count in row.chunk_num_tokens):
        return "a chunk holds fewer than 0 tokens"
    known = [count for count in row.chunk_num_tokens if count is not None]
    is_counted = bool(known) and len(known) == len(row.chunk_num_tokens)
    if is_counted and row.token_ids is not None and sum(known) != len(row.token_ids):
        return f"its chunks hold {sum(known)} tokens, its list of ids {len(row.token_ids)}"
    return None


def check_client(view: RunView, config: CompareConfig) -> list[Finding]:
    """Invalid when the client was so late that its stamps say more about it than about the server."""
    label = quoted(view.manifest.label)
    waits = [wait for row in view.ok.values() if (wait := ttft_ns(row)) is not None]
    waits = waits or [e2e_ns(row) for row in view.ok.values()]
    limit_ns = max(config.min_client_lag_ns, config.max_client_lag_fraction * median(waits or [0]))
    findings = []
    for name, share, what in (
        ("loop_lag_p50_ns", 0.1, "half of the time read"),
        ("loop_lag_p99_ns", 1.0, "1 time in 100 read"),
        ("dispatch_lag_p99_ns", 1.0, "1 time in 100 sent"),
    ):
        lag_ns = view.manifest.client.get(name)
        if not isinstance(lag_ns, int) or isinstance(lag_ns, bool):
            if view.rows and view.manifest.complete:
                title = f"the Run of {label} does not say whether its client was late: no {name}"
                findings.append(Finding(status="unknown", part="client", title=title))
        elif lag_ns > share * limit_ns:
            title = (
                f"the client of {label} {what} later than {lag_ns / 1e6:.1f} ms, "
                f"allowed are {share * limit_ns / 1e6:.1f} ms"
            )
            findings.append(Finding(status="invalid", part="client", title=title, detail=_LATE))
    return findings


CHECKERS: dict[str, Checker] = {"rows": check_rows, "client": check_client}
