"""What a server remembers of its requests: the folds over the engine's rows, joined with its own stamps.

Owns: the folds (token-ID log, metrics, spans) of one server and the moment at which a request is complete
for them. Refuses to know: HTTP, text, the engine. Invariants: every request that the engine took and whose
answer ended is written once, whichever of the two came last; nothing here waits, and nothing here fails a
request: what a log or a collector did not take is counted and shows in the metrics.

Usage: `ledger.feed(rows); ledger.end(stamps, text=text, flushed_ns=clock.now_ns())`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from prometheus_client import CollectorRegistry

from firstdiff.engine.engine import EngineRequest
from firstdiff.tracing.log_content import redacted
from firstdiff.tracing.metrics import MetricFold, MetricsDialect
from firstdiff.tracing.otlp_export import OtlpOutput, OtlpTarget, resource_attributes
from firstdiff.tracing.records import EngineRequestRow, HttpRow, Identity, Row, StepRow, Told
from firstdiff.tracing.span_file import SpanFile
from firstdiff.tracing.span_fold import SpanFold, SpanOutput
from firstdiff.tracing.token_log import LogLimits, ServerStamps, TokenLogFold, TokenLogWriter, hash_identity
from firstdiff.tracing.trace_sampling import Sampler


@dataclass(frozen=True, slots=True)
class _Ended:
    stamps: ServerStamps
    text: str
    flushed_ns: int
    told: Told | None
    text_offsets: Sequence[int]


class ServerLedger:
    """The folds of one server; `log_dir` None means no files, `otlp` None no collector.

    ValueError or OSError when the log directory cannot be used.
    """

    def __init__(
        self,
        identity: Identity,
        *,
        model_name: str,
        log_dir: Path | None,
        otlp: OtlpTarget | None,
        sampler: Sampler,
        log_limits: LogLimits | None = None,
        metrics_dialect: MetricsDialect = "firstdiff",
    ) -> None:
        self.identity = identity
        self.identity_sha256 = hash_identity(identity)
        self._requests = TokenLogFold()
        self._metrics = MetricFold(CollectorRegistry(), model_name=model_name, dialect=metrics_dialect)
        self._metrics.feed(identity)
        self._log_limits = log_limits or LogLimits()
        self._log = TokenLogWriter(log_dir, identity, self._log_limits) if log_dir is not None else None
        outputs: list[SpanOutput] = []
        if log_dir is not None:
            resource = resource_attributes(identity)
            outputs.append(SpanFile(log_dir, resource, version=identity.engine_version))
        if otlp is not None:
            outputs.append(OtlpOutput(otlp, identity))
        self._spans = SpanFold(outputs, sampler, model=model_name) if outputs else None
        self._finished_by_engine: set[str] = set()
        self._ended: dict[str, _Ended] = {}

    def begin(self, request: EngineRequest, *, trace_id: str | None) -> None:
        """The engine was handed a request, whose rows will follow; `trace_id` None: its trace is not kept."""
        self._metrics.begin(
            request.request_id,
            num_prompt_tokens=len(request.prompt_token_ids),
            trace_id=trace_id if self._spans is not None else None,
        )

    def feed(self, rows: Iterable[Row]) -> None:
        """Take in the rows of one step, in order."""
        for row in rows:
            self._metrics.feed(row)
            self._requests.feed(row)
            if isinstance(row, StepRow):
                if self._log is not None:
                    self._log.write_step(row)
            elif isinstance(row, EngineRequestRow):
                self._engine_finished(row.request_id)

    def end(
        self,
        stamps: ServerStamps,
        *,
        text: str,
        flushed_ns: int,
        told: Told | None = None,
        text_offsets: Sequence[int] = (),
    ) -> None:
        """The answer of a request ended: flushed, failed or left by its client."""
        self._ended[stamps.request_id] = _Ended(stamps, text, flushed_ns, told, text_offsets)
        if stamps.request_id in self._finished_by_engine:
            self._complete(stamps.request_id)

    def end_http(self, row: HttpRow) -> None:
        """An HTTP request has ended, after `end` of each of its answers; late rows of those may follow."""
        self._metrics.feed(row)
        if self._log is not None:
            self._log.write_http(row)
        if self._spans is not None:
            self._spans.http(row)

    def forget(self, request_id: str) -> None:
        """The engine refused this request: nothing will be written of it."""
        self._ended.pop(request_id, None)
        self._metrics.forget(request_id)

    def fail(
        self, request: EngineRequest, *, arrived_ns: int, finished_ns: int, error: str
    ) -> EngineRequestRow:
        """The engine died with this request in it: the row it could not send, fed to all folds."""
        row = self._requests.fail(
            request.request_id,
            prompt_token_ids=request.prompt_token_ids,
            sampling=request.sampling,
            arrived_ns=arrived_ns,
            finished_ns=finished_ns,
            error=error,
        )
        self._metrics.feed(row)
        self._engine_finished(row.request_id)
        return row

    def exposition(self, accept: str) -> tuple[str, bytes]:
        """(content type, body) for a metrics scrape."""
        self._metrics.observe_losses(
            num_lost_rows=self.num_lost_rows,
            num_dropped_spans=self._spans.num_dropped_spans if self._spans is not None else 0,
        )
        return self._metrics.exposition(accept)

    @property
    def keeps_log(self) -> bool:
        """Whether what clients asked is written down."""
        return self._log is not None

    @property
    def num_kept(self) -> int:
        """How much is kept for what is still to come of requests; 0 when all have ended."""
        folds = self._metrics.num_open_requests + self._requests.num_open_requests
        return folds + len(self._ended) + len(self._finished_by_engine)

    @property
    def num_lost_rows(self) -> int:
        """Rows that the log could not take."""
        return self._log.num_lost_rows if self._log is not None else 0

    @property
    def num_dropped_spans(self) -> int:
        """Spans that a file or a collector could not take."""
        return self._spans.num_dropped_spans if self._spans is not None else 0

    def close(self) -> None:
        """Flush the log to disk and the spans to their collector (2 s at most)."""
        if self._log is not None:
            self._log.close()
        if self._spans is not None:
            self._spans.close()

    def _engine_finished(self, request_id: str) -> None:
        self._finished_by_engine.add(request_id)
        if request_id in self._ended:
            self._complete(request_id)

    def _complete(self, request_id: str) -> None:
        self._finished_by_engine.remove(request_id)
        ended = self._ended.pop(request_id)
        row = self._requests.end(
            ended.stamps,
            text=ended.text,
            flushed_ns=ended.flushed_ns,
            identity_sha256=self.identity_sha256,
            told=ended.told,
            text_offsets=ended.text_offsets,
        )
        self._metrics.observe_end(row)
        if self._log is not None:
            self._log.write(row)
        if self._spans is not None:
            # Spans hold stop strings, which a redacted log may not; token ids they never hold.
            is_full = self._log_limits.content == "full"
            self._spans.answer(row if is_full else redacted(row, "ids"))
