"""Spans of one made-up side of a comparison: a client's and a server's for each request, seeded."""

from __future__ import annotations

import numpy as np

from firstdiff.tracing import names
from firstdiff.tracing.span_record import SpanRecord

START_NS = 10**18
BLOCK = 8


def side(
    seed,
    num_requests=200,
    *,
    factors=None,
    noise=0.05,
    workload=7,
    output_factor=1.0,
    has_cases=True,
    start_ns=START_NS,
    batch_of=None,
    session=1.0,
    attributes=None,
):
    """Requests 100 ms apart. `factors` by phase; `batch_of(index)` is the batch size at the first token.

    The same `workload` asks the same; `noise` is the standard deviation of log-durations.
    """
    rng, work = np.random.default_rng(seed), np.random.default_rng(workload)
    spans = []
    for index in range(num_requests):
        num_prompt, num_output = int(work.integers(10, 400)), int(work.integers(2, 60) * output_factor)
        batch = int(work.integers(1, 9)) if batch_of is None else batch_of(index)
        typical = {
            "tokenize": 1e5,
            "queue": 2e6 * work.random(),
            "prefill": 1e5 * num_prompt,
            "decode": 8e6 * num_output,
            "preempted": 0,
            "stream": 2e5,
        }
        phases = {}
        for phase, duration_ns in typical.items():
            factor = (factors or {}).get(phase, 1.0)
            factor = factor(index) if callable(factor) else factor
            phases[phase] = int(duration_ns * factor * session * np.exp(rng.normal(0, noise)))
        trace_id = f"{seed + 1:08x}{index + 1:024x}"
        start = start_ns + index * 10**8
        ids = {"trace_id": trace_id, "start_unix_ns": start, "end_unix_ns": start + sum(phases.values())}
        if has_cases:
            client = {names.CASE_ID: f"c{index}", names.JAEGER_ITERATION_INDEX: 0}
            client[names.BLOCK_INDEX] = index // BLOCK
            spans.append(
                SpanRecord(
                    name="chat m",
                    kind="client",
                    span_id="1" * 16,
                    parent_span_id=None,
                    attributes=client,
                    **ids,
                )
            )
        own = {
            names.GEN_AI_INPUT_TOKENS: num_prompt,
            names.GEN_AI_OUTPUT_TOKENS: num_output,
            names.GEN_AI_CACHED_TOKENS: 0,
            names.FIRST_BATCH_SIZE: batch,
            **(attributes(index) if attributes else {}),
        }
        own |= {names.PHASE_TOTAL_NS[phase]: duration for phase, duration in phases.items()}
        parent = "1" * 16 if has_cases else None
        more = {"span_id": "2" * 16, "parent_span_id": parent, "attributes": own}
        spans.append(SpanRecord(name="chat m", kind="internal", **more, **ids))
    return spans
