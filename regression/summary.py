"""A Run read for judging: its answered requests by case, and their latencies.

Owns: reading rows into a RunView, the client-side latency definitions. Refuses to know: the other side,
statistics. Invariants: a damaged or unfinished file becomes a line in `problems`, and what
could be read is kept; a latency that a row cannot give is None, never 0; times are measured from when the
workload wanted the request sent, so a client or queue that was late is not left out.

Usage: `view = read_run(run); view.ok["case-1", 0]`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise

from firstdiff.regression.quoting import quoted
from firstdiff.regression.verdict import SideSummary
from firstdiff.tracing.records import RequestRow, TokenLogRow
from firstdiff.tracing.store import Manifest, Run
from firstdiff.tracing.token_log import TOKENS_FILE, read_log

Key = tuple[str, int]
"""(case_id, repeat_index): what pairs the rows of two Runs."""

METRICS = ("ttft", "tpot", "e2e")


@dataclass(frozen=True, slots=True)
class RunView:
    """One Run in memory. `rows` in file order, first row of each key; `logs` by request id."""

    manifest: Manifest
    rows: dict[Key, RequestRow]
    logs: dict[str, TokenLogRow] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    @property
    def ok(self) -> dict[Key, RequestRow]:
        """The answered requests."""
        return {key: row for key, row in self.rows.items() if row.outcome == "ok"}

    @property
    def dtype(self) -> str | None:
        return self.manifest.identity.dtype if self.manifest.identity is not None else None

    def summary(self) -> SideSummary:
        identity = self.manifest.identity
        return SideSummary(
            label=self.manifest.label,
            run_id=self.manifest.run_id,
            endpoint=self.manifest.endpoint,
            dialect=self.manifest.dialect,
            model=self.manifest.model,
            dtype=self.dtype,
            faults=list(identity.faults) if identity is not None else [],
            num_requests=len(self.rows),
            num_ok=len(self.ok),
        )


def read_run(run: Run) -> RunView:
    """Everything the judge needs of `run`; never raises for what its files hold."""
    problems: list[str] = []
    rows: dict[Key, RequestRow] = {}
    num_repeated = 0
    try:
        for row in run.rows("requests", RequestRow):
            if (row.case_id, row.repeat_index) in rows:
                num_repeated += 1
            rows.setdefault((row.case_id, row.repeat_index), row)
    except (ValueError, OSError) as error:
        problems.append(f"requests are damaged: {quoted(str(error), 200)}")
    if num_repeated:
        problems.append(f"{num_repeated} requests have a second row")
    if run.truncated.get("requests"):
        problems.append("the last row of requests was cut off")
    if not run.manifest.complete:
        problems.append("the Run was never finished")
    if not rows:
        problems.append("no requests")
    logs: dict[str, TokenLogRow] = {}
    file = run.path / TOKENS_FILE
    if file.exists():
        try:
            log = read_log(file)
        except (ValueError, OSError) as error:
            problems.append(f"the token log is damaged: {quoted(str(error), 200)}")
        else:
            logs = {row.request_id: row for row in log.rows}
            problems += [
                f"the server could not keep {loss.num_rows} rows of its {quoted(loss.file)} ({loss.reason})"
                for loss in log.losses
            ]
            answered = [row for row in rows.values() if row.outcome == "ok"]
            num_missing = sum(row.request_id not in logs for row in answered)
            if num_missing:
                problems.append(f"the token log lacks {num_missing} of {len(answered)} answered requests")
    return RunView(run.manifest, rows, logs, problems)


def num_output_tokens(row: RequestRow) -> int | None:
    """Output tokens by the best account there is: ids, usage, then what the chunks said."""
    if row.token_ids is not None:
        return len(row.token_ids)
    if row.usage is not None:
        return row.usage.completion_tokens
    counts = [count for count in row.chunk_num_tokens if count is not None]
    return sum(counts) if counts and len(counts) == len(row.chunk_num_tokens) else None


def ttft_ns(row: RequestRow) -> int | None:
    """Intended sending to first content; None when the answer came in one piece."""
    if len(row.chunk_received_ns) < 2:
        return None
    return row.chunk_received_ns[0] - row.intended_ns


def tpot_ns(row: RequestRow) -> float | None:
    """Time per output token after the first chunk's; None without two chunks and their token counts."""
    num_tokens = num_output_tokens(row)
    if num_tokens is None or len(row.chunk_received_ns) < 2:
        return None
    num_first = row.chunk_num_tokens[0] if row.chunk_num_tokens else None
    num_later = num_tokens - (1 if num_first is None else num_first)
    if num_later < 1:
        return None
    return (row.chunk_received_ns[-1] - row.chunk_received_ns[0]) / num_later


def e2e_ns(row: RequestRow) -> int:
    """Intended sending to the end of the answer."""
    return row.finished_ns - row.intended_ns


def gaps_ns(row: RequestRow) -> list[int]:
    """Gaps between chunks with content."""
    return [after - before for before, after in pairwise(row.chunk_received_ns)]


def e2e_at_ns(row: RequestRow, num_tokens: int | None) -> float | None:
    """E2E as it would be for an answer of `num_tokens` tokens, at the pace of this one.

    Answers that differ take differently long; only the pace can be compared. None without both counts.
    """
    own = num_output_tokens(row)
    if own is None or num_tokens is None:
        return None
    if own == num_tokens:
        return float(e2e_ns(row))
    pace = tpot_ns(row)
    if pace is not None:
        return e2e_ns(row) + pace * (num_tokens - own)
    return e2e_ns(row) * num_tokens / own if own and num_tokens else None


def lack_of(row: RequestRow, metric: str) -> str | None:
    """What a row lacks for one of METRICS, as the end of a sentence; None when it lacks nothing."""
    if metric != "e2e" and len(row.chunk_received_ns) < 2:
        return "sends its answers in one piece"
    if metric != "ttft" and num_output_tokens(row) is None:
        return "gives no token counts (no usage, no token ids)"
    if metric == "tpot" and tpot_ns(row) is None:
        return "counts no tokens after the first chunk"
    return None


def metric_ns(row: RequestRow, metric: str) -> float | None:
    """One of METRICS of one row."""
    if metric == "ttft":
        return ttft_ns(row)
    return tpot_ns(row) if metric == "tpot" else e2e_ns(row)
