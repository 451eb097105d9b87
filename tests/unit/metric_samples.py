"""Metric folds, what feeds them, and what their scrapes hold, for the tests of the metrics."""

from __future__ import annotations

import random
import sys
from pathlib import Path

from prometheus_client import CollectorRegistry
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text

sys.path.insert(0, str(Path(__file__).parent))
from ledger_rows import log_row

from firstdiff.tracing.metrics import MetricFold
from firstdiff.tracing.records import Preemption
from firstdiff.tracing.token_log import unfold

LABELS = {"model_name": "m", "engine": "0"}
GEN_AI_LABELS = {
    "gen_ai_provider_name": "firstdiff",
    "gen_ai_request_model": "m",
    "gen_ai_response_model": "m",
}
OPENMETRICS = "application/openmetrics-text; version=1.0.0"


def new_fold(**options):
    return MetricFold(CollectorRegistry(), model_name="m", **options)


def samples(fold):
    """Every sample of a scrape as {(name, sorted extra labels): value}, times of creation left out."""
    found = {}
    for family in parse_text(fold.exposition()[1].decode()):
        for sample in family.samples:
            if sample.name.endswith("_created"):
                continue
            common = GEN_AI_LABELS if sample.name.startswith("gen_ai_") else LABELS
            assert common.items() <= sample.labels.items(), sample
            extra = tuple(sorted(sample.labels.items() - common.items()))
            assert (sample.name, extra) not in found
            found[sample.name, extra] = sample.value
    return found


def random_preemptions(rng, stamps):
    """None, or one that lies anywhere in the request; a part of it may be before the first token."""
    if rng.random() < 0.7:
        return {"num_preemptions": 0}
    lost_ns, back_ns = sorted(rng.sample(stamps, 2))
    preemption = Preemption(preempted_ns=lost_ns, num_lost_tokens=1, recovered_ns=back_ns)
    return {"num_preemptions": 1, "preemptions": [preemption]}


def random_requests(seed, num_requests):
    """Log rows of whole, aborted and failed requests, in the shapes that an engine makes."""
    rng = random.Random(seed)
    rows = []
    for index in range(num_requests):
        reason = rng.choice(["stop", "length", "abort", "error"])
        num_tokens = rng.choice([0, 1, 2, 9]) if reason in ("abort", "error") else rng.randint(1, 30)
        stamps = sorted(rng.randrange(1_000, 10_000_000_000) for _ in range(6 + num_tokens))
        received, tokenized, scheduled, *emitted, finished, flushed = stamps
        was_scheduled = bool(num_tokens) or rng.random() < 0.5
        emitted = emitted[:num_tokens]
        rows.append(
            log_row(
                request_id=f"r{index}",
                received_ns=received,
                tokenized_ns=tokenized,
                arrived_ns=tokenized,
                first_scheduled_ns=scheduled if was_scheduled else None,
                first_token_ns=emitted[0] if emitted else None,
                finished_ns=finished,
                flushed_ns=flushed,
                prompt_token_ids=list(range(rng.randint(2, 300))),
                token_ids=[rng.randrange(1 << 17) for _ in emitted],
                emitted_ns=emitted,
                step_index=list(range(num_tokens)),
                batch_size=[1] * num_tokens,
                logprobs=[None] * num_tokens,
                finish_reason=reason,
                num_cached_tokens=rng.randint(0, 2),
                **random_preemptions(rng, stamps),
            )
        )
    return rows


def feed_as_the_server_does(fold, rows, rng):
    """Token rows of all requests interleaved, each request ended when its engine row came."""
    streams = {row.request_id: [*unfold(row)[0], unfold(row)[1]] for row in rows}
    by_id = {row.request_id: row for row in rows}
    while streams:
        request_id = rng.choice(sorted(streams))
        fold.feed(streams[request_id].pop(0))
        if not streams[request_id]:
            del streams[request_id]
            fold.observe_end(by_id[request_id])


def exemplars(fold):
    """The trace ids by sample name, and that each is a well-formed exemplar."""
    found = {}
    for family in parse_openmetrics(fold.exposition(OPENMETRICS)[1].decode()):
        for sample in family.samples:
            if sample.exemplar:
                assert set(sample.exemplar.labels) == {"trace_id"}
                found.setdefault(sample.name, set()).add(sample.exemplar.labels["trace_id"])
    return found
