"""Do log, spans and metrics of one server say the same? The log is folded again and compared.

Owns: that comparison. Refuses to know: how a scrape is fetched. Invariants: nothing is taken from the spans
or the metrics but what they are compared with; counts must be equal, sums to a part in a billion (floats are
added in another order); what the log cannot tell (gauges, losses, lines that were dropped) is not compared,
and is said.

Usage: `found = check_agreement(log_dir, exposition=text)`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

from firstdiff.tracing.log_files import read_log_lines
from firstdiff.tracing.metric_table import METRIC_PREFIX
from firstdiff.tracing.metrics import MetricFold
from firstdiff.tracing.records import HttpRow, StepRow, TokenLogRow, decode_row
from firstdiff.tracing.request_spans import answer_spans, http_span
from firstdiff.tracing.span_file import SPANS_FILE, read_spans
from firstdiff.tracing.span_record import SpanRecord
from firstdiff.tracing.token_log import HTTP_FILE, STEPS_FILE, TokenLog, read_log, unfold

Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]
_LOSSES = {f"{METRIC_PREFIX}lost_log_rows", f"{METRIC_PREFIX}dropped_spans"}


class Agreement(msgspec.Struct, frozen=True, kw_only=True):
    """What was compared, each disagreement in a sentence, and what could not be compared."""

    num_answers: int
    num_http: int
    num_steps: int
    num_spans: int
    num_samples: int
    disagreements: list[str]
    unknown: list[str]


def check_agreement(log_dir: Path, *, exposition: str | None = None) -> Agreement:
    """Compare a log folder with its spans, and with the server's metrics where a scrape is given.

    The scrape is Prometheus text from when the server was idle, after the last row was written. ValueError
    when there is no log or something in it cannot be read.
    """
    log = read_log(log_dir)
    https = [decode_row(line, HttpRow) for line in read_log_lines(log_dir, HTTP_FILE)]
    steps = [decode_row(line, StepRow) for line in read_log_lines(log_dir, STEPS_FILE)]
    spans = read_spans(log_dir) if (log_dir / SPANS_FILE).is_file() else []
    unknown = []
    if log.losses:
        unknown.append("rows of the log were lost: what is missing here may be there")
    if any(row.content != "full" or row.truncated for row in log.rows):
        unknown.append("texts or ids were left out of the log: spans and counts that need them may differ")
    disagreements: list[str] = []
    if spans:
        disagreements += _compare_spans(log.rows, https, spans)
    else:
        unknown.append("there are no spans: the server kept none, or sampled none of these requests")
    num_samples = 0
    if exposition is None:
        unknown.append("metrics were not compared: give a scrape")
    elif len(log.identities) != 1:
        unknown.append(f"the log is of {len(log.identities)} servers, and metrics begin anew with each")
    else:
        found = _samples(exposition)
        num_samples = len(found)
        if not found:
            raise ValueError("expected a scrape of this server's metrics, got none of their names in it")
        disagreements += _compare_metrics(log, https, steps, found)
    return Agreement(
        num_answers=len(log.rows),
        num_http=len(https),
        num_steps=len(steps),
        num_spans=len(spans),
        num_samples=num_samples,
        disagreements=disagreements,
        unknown=unknown,
    )


def _compare_spans(
    rows: Sequence[TokenLogRow], https: Sequence[HttpRow], spans: Sequence[SpanRecord]
) -> Iterator[str]:
    kept = {span.trace_id for span in spans}
    # The name that clients ask for is in no row; any answer's span has it.
    model = next(
        (span.name.partition(" ")[2] for span in spans if span.kind == "internal" and " " in span.name), ""
    )
    folded: dict[tuple[str, str], SpanRecord] = {}
    for http in https:
        # What was slow may be kept as well, and by what measure no row says.
        if http.sampled or (http.parent_span_id is None and http.error_type is not None):
            kept.add(http.trace_id)
        if http.trace_id in kept:
            folded[http.trace_id, http.span_id] = http_span(http)
    for row in rows:
        if row.trace_id in kept:
            folded |= {(span.trace_id, span.span_id): span for span in answer_spans(row, model=model)}
    found = {(span.trace_id, span.span_id): span for span in spans}
    if len(found) != len(spans):
        yield f"{len(spans) - len(found)} spans are there twice"
    for key, span in folded.items():
        other = found.pop(key, None)
        if other is None:
            yield f"span {span.name!r} of trace {span.trace_id} is in the log, and not among the spans"
            continue
        for what in ("name", "kind", "parent_span_id", "start_unix_ns", "end_unix_ns", "error", "tracestate"):
            mine, theirs = getattr(span, what), getattr(other, what)
            if mine != theirs:
                about = f"span {span.name!r} of trace {span.trace_id}: {what}"
                yield f"{about} is {theirs!r}, by the log {mine!r}"
        wanted = {name: list(v) if isinstance(v, tuple) else v for name, v in span.attributes.items()}
        for name in sorted(wanted.keys() | other.attributes.keys()):
            if wanted.get(name) != other.attributes.get(name):
                yield (
                    f"span {span.name!r} of trace {span.trace_id}: {name} is "
                    f"{other.attributes.get(name)!r}, by the log {wanted.get(name)!r}"
                )
    for span in found.values():
        yield f"span {span.name!r} of trace {span.trace_id} is not in the log"


def _compare_metrics(
    log: TokenLog, https: Sequence[HttpRow], steps: Sequence[StepRow], found: Samples
) -> Iterator[str]:
    model = next((dict(labels)["model_name"] for _, labels in found if "model_name" in dict(labels)), "")
    fold = MetricFold(CollectorRegistry(), model_name=model)
    fold.feed(log.identities[0])
    for row in log.rows:
        tokens, engine = unfold(row)
        fold.begin(row.request_id, num_prompt_tokens=len(row.prompt_token_ids), trace_id=None)
        for token in tokens:
            fold.feed(token)
        fold.feed(engine)
        fold.observe_end(row)
    for step in steps:
        fold.feed(step)
    for http in https:
        fold.feed(http)
    folded = _samples(fold.exposition()[1].decode())
    for key in sorted(folded.keys() | found.keys()):
        mine, theirs = folded.get(key), found.get(key)
        # A child that was never touched may not have been made.
        if mine == theirs or not (mine or theirs):
            continue
        is_sum = key[0].endswith("_sum")
        if is_sum and mine is not None and theirs is not None and math.isclose(mine, theirs, rel_tol=1e-9):
            continue
        labels = ", ".join(f"{name}={value}" for name, value in key[1] if name != "model_name")
        yield f"{key[0]}{{{labels}}} is {theirs}, by the log {mine}"


def _samples(exposition: str) -> Samples:
    """Counters and histograms of ours; vLLM's spellings repeat them, and gauges are of a moment."""
    found: Samples = {}
    try:
        families = list(text_string_to_metric_families(exposition))
    except (ValueError, IndexError, KeyError) as error:
        raise ValueError(f"expected metrics as Prometheus text, got: {error}") from error
    for family in families:
        is_ours = family.name.startswith((METRIC_PREFIX, "gen_ai_server_"))
        if not is_ours or family.type not in ("counter", "histogram") or family.name in _LOSSES:
            continue
        for sample in family.samples:
            if not sample.name.endswith("_created"):
                found[sample.name, tuple(sorted(sample.labels.items()))] = sample.value
    return found
