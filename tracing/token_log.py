"""The token-ID log: one row a finished request, folded from the engine's rows and the server's stamps.

Owns: joining the rows of one request, taking a row apart again, reading a log. Refuses to know: HTTP, text
processing, how rows get to the disk. Invariants: a row is made only of complete engine rows (every token, in
order); what a log leaves out is never made up: it is a ValueError that says so.

Usage: `row = fold.end(stamps, text=text, flushed_ns=clock.now_ns(), identity_sha256=sha)`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Sized
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from firstdiff.tracing.lines import read_lines
from firstdiff.tracing.log_content import hash_identity as hash_identity
from firstdiff.tracing.log_files import HTTP_FILE as HTTP_FILE
from firstdiff.tracing.log_files import STEPS_FILE as STEPS_FILE
from firstdiff.tracing.log_files import TOKENS_FILE as TOKENS_FILE
from firstdiff.tracing.log_files import enumerate_log_lines
from firstdiff.tracing.log_writer import LogLimits as LogLimits
from firstdiff.tracing.log_writer import TokenLogWriter as TokenLogWriter
from firstdiff.tracing.records import (
    UNREADABLE,
    Asked,
    EngineRequestRow,
    Identity,
    LossRow,
    Row,
    Sampling,
    TokenLogRow,
    TokenRow,
    Told,
)
from firstdiff.tracing.timeline import phase_durations_ns as phase_durations_ns


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
    choice_index: int = 0
    num_choices: int = 1
    prompt_index: int = 0
    asked: Asked | None = None


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

    def end(
        self,
        stamps: ServerStamps,
        *,
        text: str,
        flushed_ns: int,
        identity_sha256: str,
        told: Told | None = None,
        text_offsets: Sequence[int] = (),
    ) -> TokenLogRow:
        """The log row of a request whose answer is flushed; the request is forgotten, also on an error.

        `text` as given out, without an echoed prompt; `text_offsets` as in TokenLogRow.
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
        _check_order(engine, [row.token_index for row in tokens])
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
            choice_index=stamps.choice_index,
            num_choices=stamps.num_choices,
            prompt_index=stamps.prompt_index,
            asked=stamps.asked,
            told=told,
            top_logprobs=[row.top_logprobs for row in tokens] if engine.sampling.logprobs is not None else [],
            text_offsets=list(text_offsets),
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

    Exact but for `top_logprobs` in logs from before schema 2. ValueError when the per-token lists differ in
    length, or the log left ids out.
    """
    if row.content == "hash" or row.truncated:
        what = "only digests of its ids" if row.content == "hash" else "a row that was cut"
        raise ValueError(
            f"expected all token ids of request {row.request_id}, got {what}: "
            "serve with --log-content full or ids, and a larger --log-max-row-bytes"
        )
    columns: list[Sized] = [row.token_ids, row.emitted_ns, row.step_index, row.batch_size, row.logprobs]
    columns += [row.top_logprobs] if row.top_logprobs else []
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
            top_logprobs=row.top_logprobs[index] if row.top_logprobs else [],
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


@dataclass(slots=True)
class TokenLog:
    """What a log holds, each kind in file order; `damaged` says which whole lines are no rows."""

    identities: list[Identity] = field(default_factory=list)
    rows: list[TokenLogRow] = field(default_factory=list)
    losses: list[LossRow] = field(default_factory=list)
    damaged: list[str] = field(default_factory=list)


def read_log(path: Path, *, keep_damage: bool = False) -> TokenLog:
    """The log in a file, or in all files of a log directory or Run; an unfinished last line is left out.

    ValueError when there is no log, or a whole line is no row of one; with `keep_damage` such lines are named
    in `damaged` instead.
    """
    log = TokenLog()
    decoder = msgspec.json.Decoder(Identity | TokenLogRow | LossRow)
    for file, number, line in _lines(path):
        try:
            row = decoder.decode(line)
        except UNREADABLE as error:
            sentence = f"expected an identity or token_log row in {file} line {number}, got: {error}"
            if not keep_damage:
                raise ValueError(sentence) from error
            log.damaged.append(sentence)
            continue
        if isinstance(row, TokenLogRow):
            log.rows.append(row)
        elif isinstance(row, LossRow):
            log.losses.append(row)
        elif row not in log.identities:
            # Each file of one server begins with the same line.
            log.identities.append(row)
    return log


def read_token_log(path: Path) -> tuple[list[Identity], list[TokenLogRow]]:
    """The servers and the requests of a log, as `read_log`."""
    log = read_log(path)
    return log.identities, log.rows


def _lines(path: Path) -> Iterator[tuple[Path, int, bytes]]:
    is_empty = True
    for found in enumerate_log_lines(path, TOKENS_FILE):
        is_empty = False
        yield found
    if not is_empty:
        return
    file = path / TOKENS_FILE if path.is_dir() else path
    if not file.is_file():
        raise ValueError(
            f"expected a token log, got {file}, which does not exist: see `firstdiff serve --log-dir`"
        )
    for number, line in enumerate(read_lines(file), start=1):
        yield file, number, line


def _check_order(engine: EngineRequestRow, indexes: list[int]) -> None:
    if indexes != list(range(engine.num_output_tokens)):
        raise ValueError(
            f"expected tokens 0..{engine.num_output_tokens - 1} of request {engine.request_id} in order, "
            f"got {_abbreviated(indexes)}: rows were lost between engine and log"
        )


def _abbreviated(indexes: list[int], limit: int = 8) -> str:
    shown = ", ".join(map(str, indexes[:limit]))
    return f"[{shown}{', ...' if len(indexes) > limit else ''}] ({len(indexes)} rows)"
