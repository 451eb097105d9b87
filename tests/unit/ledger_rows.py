"""Rows of one small request and its server, for the tests of the folds."""

from __future__ import annotations

import msgspec

from firstdiff.tracing.records import (
    EngineRequestRow,
    HttpRow,
    Identity,
    PrefillChunk,
    Sampling,
    StepRow,
    TokenRow,
)
from firstdiff.tracing.token_log import ServerStamps, TokenLogFold

SAMPLING = Sampling(temperature=0.0, top_k=0, top_p=1.0, seed=7, max_tokens=16)
STAMPS = ServerStamps(
    request_id="r1",
    trace_id="1" * 32,
    span_id="2" * 16,
    endpoint="/v1/completions",
    received_unix_ns=10**18,
    received_ns=1_000,
    tokenized_ns=2_000,
)


def identity(**changes):
    fields = {
        "model": "m",
        "engine": "firstdiff",
        "engine_version": "0.1",
        "instance_id": "i1",
        "weights_sha256": "a",
        "config_sha256": "b",
        "tokenizer_sha256": "c",
        "chat_template_sha256": None,
        "engine_config_sha256": "d",
        "engine_config": {"threads": 1},
        "dtype": "fp32",
        "device": "cpu",
        "vocab_size": 100,
        "max_model_len": 64,
        "versions": {},
    }
    return Identity(**(fields | changes))


def token_rows(num_tokens, request_id="r1"):
    return [
        TokenRow(
            request_id=request_id,
            token_index=index,
            token_id=100 + index,
            emitted_ns=5_000 + 1_000 * index,
            step_index=10 + index,
            batch_size=1 + index,
            logprob=None if index % 2 else -0.25 * index,
        )
        for index in range(num_tokens)
    ]


def engine_row(num_tokens, request_id="r1", **changes):
    fields = {
        "request_id": request_id,
        "prompt_token_ids": [1, 2, 3],
        "sampling": SAMPLING,
        "arrived_ns": 2_500,
        "first_scheduled_ns": 3_000,
        "first_token_ns": 5_000 if num_tokens else None,
        "finished_ns": 5_000 + 1_000 * num_tokens,
        "finish_reason": "length",
        "error": None,
        "num_cached_tokens": 1,
        "num_output_tokens": num_tokens,
        "prefill_chunks": [PrefillChunk(step_index=10, start_token=1, num_tokens=2)],
        "num_preemptions": 2,
    }
    return EngineRequestRow(**(fields | changes))


def log_row(**changes):
    fold = TokenLogFold()
    for row in (*token_rows(3), engine_row(3)):
        fold.feed(row)
    row = fold.end(STAMPS, text="abc", flushed_ns=9_000, identity_sha256="s")
    return msgspec.structs.replace(row, **changes)


def http_row(**changes):
    """The HTTP request that `log_row` answers: its head came 100 ns before its body was read."""
    fields = {
        "request_id": "r1",
        "trace_id": STAMPS.trace_id,
        "span_id": STAMPS.span_id,
        "parent_span_id": None,
        "sampled": True,
        "method": "POST",
        "route": STAMPS.endpoint,
        "status": 200,
        "error_type": None,
        "received_unix_ns": STAMPS.received_unix_ns - 100,
        "received_ns": STAMPS.received_ns - 100,
        "ended_ns": 9_500,
        "num_answers": 1,
    }
    return HttpRow(**(fields | changes))


def step_row(index):
    return StepRow(
        step_index=index,
        started_ns=index,
        ended_ns=index + 1,
        schedule_ns=0,
        execute_ns=1,
        batch_size=1,
        num_prefill_tokens=0,
        num_decode_tokens=1,
        num_running=1,
        num_waiting=0,
        num_preemptions=0,
        num_used_blocks=1,
        num_blocks=8,
    )
