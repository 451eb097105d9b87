"""The token-ID log: one row a finished request, folded from the engine's rows and the server's stamps.

Owns: joining the rows of one request, the log files (`tokens.jsonl`, `steps.jsonl`, `http.jsonl`) of a
server. Refuses to know: HTTP, text processing, who reads the log. Invariants: a row is made only of complete
engine rows (every token, in order); a log that cannot be written loses rows and counts them, and never fails
a request.

Usage: `log.write(fold.end(stamps, text=text, flushed_ns=clock.now_ns(), identity_sha256=sha))`.
"""

from __future__ import annotations

import hashlib
import logging
from pathlib import Path

import msgspec

from firstdiff.tracing.lines import LineFile, read_lines
from firstdiff.tracing.records import (
    UNREADABLE,
    EngineRequestRow,
    HttpRow,
    Identity,
    Row,
    Sampling,
    StepRow,
    TokenLogRow,
    TokenRow,
)
from firstdiff.tracing.timeline import phase_durations_ns as phase_durations_ns

TOKENS_FILE = "tokens.jsonl"
STEPS_FILE = "steps.jsonl"
HTTP_FILE = "http.jsonl"


class ServerStamps(msgspec.Struct, frozen=True, kw_only=True):
    """What the server knows of one engine request: its trace, its route and its own three moments.

    `span_id` is the HTTP request's, which several engine requests may share. Stamps as in TokenLogRow.
    """

    request_id: str
    trace_id: str
    span_id: str
    endpoint: str
    received_unix_ns: int
    received_ns: int
    tokenized_ns: int
    tracestate: str = ""
    user: str | None = None
    metadata: dict[str, str] = {}


class TokenLogFold:
    """Gathers the rows of the requests in flight until each is ended or discarded."""

    def __init__(self) -> None:
        self._tokens: dict[str, list[TokenRow]] = {}
        self._ended: dict[str, EngineRequestRow] = {}
        self._discarded: set[str] = set()

    def feed(self, row: Row) -> None:
        """Take in a TokenRow or an EngineRequestRow; other rows are none of this fold's business."""
        if isinstance(row, TokenRow):
            if row.request_id not in self._discarded:
                self._tokens.setdefault(row.request_id, []).append(row)
        elif isinstance(row, EngineRequestRow):
            if row.request_id in self._discarded:
                self._discarded.remove(row.request_id)
            else:
                self._ended[row.request_id] = row

    @property
    def num_open_requests(self) -> int:
        """Requests with rows here that were neither ended nor discarded."""
        return len(self._tokens.keys() | self._ended.keys())

    def end(self, stamps: ServerStamps, *, text: str, flushed_ns: int, identity_sha256: str) -> TokenLogRow:
        """The log row of a request whose answer is flushed; the request is forgotten, also on an error.

        ValueError when the engine's rows of it are incomplete: no EngineRequestRow, or other tokens than
        0 .. num_output_tokens - 1 in order.
        """
        engine = self._ended.pop(stamps.request_id, None)
        tokens = self._tokens.pop(stamps.request_id, [])
        if engine is None:
            raise ValueError(
                f"expected the engine's row of request {stamps.request_id}, got {len(tokens)} token rows: "
                "end a request after its EngineRequestRow was fed"
            )
        indexes = [row.token_index for row in tokens]
        if indexes != list(range(engine.num_output_tokens)):
            raise ValueError(
                f"expected tokens 0..{engine.num_output_tokens - 1} of request {stamps.request_id} in order, "
                f"got {_abbreviated(indexes)}: rows were lost between engine and log"
            )
        return TokenLogRow(
            request_id=stamps.request_id,
            trace_id=stamps.trace_id,
            span_id=stamps.span_id,
            tracestate=stamps.tracestate,
            endpoint=stamps.endpoint,
            identity_sha256=identity_sha256,
            received_unix_ns=stamps.received_unix_ns,
            received_ns=stamps.received_ns,
            tokenized_ns=stamps.tokenized_ns,
            arrived_ns=engine.arrived_ns,
            first_scheduled_ns=engine.first_scheduled_ns,
            first_token_ns=engine.first_token_ns,
            finished_ns=engine.finished_ns,
            flushed_ns=flushed_ns,
            prompt_token_ids=engine.prompt_token_ids,
            sampling=engine.sampling,
            token_ids=[row.token_id for row in tokens],
            emitted_ns=[row.emitted_ns for row in tokens],
            step_index=[row.step_index for row in tokens],
            batch_size=[row.batch_size for row in tokens],
            logprobs=[row.logprob for row in tokens],
            text=text,
            finish_reason=engine.finish_reason,
            error=engine.error,
            num_cached_tokens=engine.num_cached_tokens,
            prefill_chunks=engine.prefill_chunks,
            num_preemptions=engine.num_preemptions,
            preemptions=engine.preemptions,
            priority=engine.priority,
            user=stamps.user,
            metadata=stamps.metadata,
        )

    def discard(self, request_id: str) -> None:
        """Forget a request; rows of it that are still to come, up to its EngineRequestRow, are ignored."""
        self._tokens.pop(request_id, None)
        if self._ended.pop(request_id, None) is None:
            self._discarded.add(request_id)

    def fail(
        self,
        request_id: str,
        *,
        prompt_token_ids: list[int],
        sampling: Sampling,
        arrived_ns: int,
        finished_ns: int,
        error: str,
    ) -> EngineRequestRow:
        """The row that a dead engine can no longer send, from the tokens that did arrive; fed here already.

        `arrived_ns` is when the request was handed to the engine. When it was first scheduled is not
        known, so the time to the first token counts as queue. Returned for the other folds.
        """
        tokens = self._tokens.get(request_id, [])
        row = EngineRequestRow(
            request_id=request_id,
            prompt_token_ids=prompt_token_ids,
            sampling=sampling,
            arrived_ns=arrived_ns,
            first_scheduled_ns=None,
            first_token_ns=tokens[0].emitted_ns if tokens else None,
            finished_ns=finished_ns,
            finish_reason="error",
            error=error,
            num_cached_tokens=0,
            num_output_tokens=len(tokens),
        )
        self.feed(row)
        return row


def unfold(row: TokenLogRow) -> tuple[list[TokenRow], EngineRequestRow]:
    """The engine rows that `row` was folded from, so that a checker can fold a saved log again.

    Exact but for `top_logprobs`, which the log does not keep. ValueError when the per-token lists differ
    in length.
    """
    columns = (row.token_ids, row.emitted_ns, row.step_index, row.batch_size, row.logprobs)
    if len({len(column) for column in columns}) > 1:
        raise ValueError(
            f"expected lists of {len(row.token_ids)} tokens in request {row.request_id}, "
            f"got lengths {[len(column) for column in columns]}: the log row is damaged"
        )
    tokens = [
        TokenRow(
            request_id=row.request_id,
            token_index=index,
            token_id=token_id,
            emitted_ns=row.emitted_ns[index],
            step_index=row.step_index[index],
            batch_size=row.batch_size[index],
            logprob=row.logprobs[index],
        )
        for index, token_id in enumerate(row.token_ids)
    ]
    engine = EngineRequestRow(
        request_id=row.request_id,
        prompt_token_ids=row.prompt_token_ids,
        sampling=row.sampling,
        arrived_ns=row.arrived_ns,
        first_scheduled_ns=row.first_scheduled_ns,
        first_token_ns=row.first_token_ns,
        finished_ns=row.finished_ns,
        finish_reason=row.finish_reason,
        error=row.error,
        num_cached_tokens=row.num_cached_tokens,
        num_output_tokens=len(tokens),
        prefill_chunks=row.prefill_chunks,
        num_preemptions=row.num_preemptions,
        preemptions=row.preemptions,
        priority=row.priority,
    )
    return tokens, engine


def hash_identity(identity: Identity) -> str:
    """SHA-256 of the Identity's JSON line: the `identity_sha256` of its server's log rows."""
    return hashlib.sha256(msgspec.json.encode(identity)).hexdigest()


class TokenLogWriter:
    """The log directory of one server: `tokens.jsonl` (Identity line, then TokenLogRows), `steps.jsonl` and
    `http.jsonl` (HttpRows).

    A directory may be used again by a later server: it appends an Identity line of its own. ValueError
    when another process is writing there. OSErrors of the first line are raised (the log does not work at
    all); later ones lose the row and count it.
    """

    def __init__(self, directory: Path, identity: Identity) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.identity_sha256 = hash_identity(identity)
        self.num_lost_rows = 0
        self._tokens = LineFile(directory / TOKENS_FILE)
        self._steps = LineFile(directory / STEPS_FILE)
        self._http = LineFile(directory / HTTP_FILE)
        self._tokens.append(msgspec.json.encode(identity))

    def write(self, row: TokenLogRow) -> None:
        """Append one request. Never raises: a lost row counts in `num_lost_rows`, the first is logged."""
        self._append(self._tokens, row)

    def write_step(self, row: StepRow) -> None:
        """Append one step; as `write`."""
        self._append(self._steps, row)

    def write_http(self, row: HttpRow) -> None:
        """Append one HTTP request; as `write`."""
        self._append(self._http, row)

    def close(self) -> None:
        """Flush the files to disk and close them; rows written later are lost and counted."""
        for file in (self._tokens, self._steps, self._http):
            try:
                file.close()
            except OSError:
                # What the disk refused at the end cannot be told apart row by row.
                self.num_lost_rows += 1

    def _append(self, file: LineFile, row: Row) -> None:
        try:
            file.append(msgspec.json.encode(row))
        except (OSError, ValueError) as error:
            if not self.num_lost_rows:
                logging.getLogger(__name__).warning("%s: rows are lost, and counted in the metrics", error)
            self.num_lost_rows += 1


def read_token_log(path: Path) -> tuple[list[Identity], list[TokenLogRow]]:
    """The servers and the requests of a log file, or of the log directory that holds one, in file order.

    An unfinished last line is left out. ValueError when there is no log or a whole line is neither kind.
    """
    file = path / TOKENS_FILE if path.is_dir() else path
    if not file.is_file():
        raise ValueError(
            f"expected a token log, got {file}, which does not exist: see `firstdiff serve --log-dir`"
        )
    identities: list[Identity] = []
    rows: list[TokenLogRow] = []
    decoder = msgspec.json.Decoder(Identity | TokenLogRow)
    for number, line in enumerate(read_lines(file), start=1):
        try:
            row = decoder.decode(line)
        except UNREADABLE as error:
            raise ValueError(
                f"expected an identity or token_log row in {file} line {number}, got: {error}"
            ) from error
        if isinstance(row, Identity):
            identities.append(row)
        else:
            rows.append(row)
    return identities, rows


def _abbreviated(indexes: list[int], limit: int = 8) -> str:
    shown = ", ".join(map(str, indexes[:limit]))
    return f"[{shown}{', ...' if len(indexes) > limit else ''}] ({len(indexes)} rows)"
