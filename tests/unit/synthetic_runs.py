"""Runs made up from a seed, for the tests of the judge: interleaved sides on a machine that is not quiet.

Each side gives the same tokens unless told otherwise; times come from a Machine whose speed drifts, jitters
from block to block and from request to request with heavy tails, and stalls now and then.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import msgspec
import numpy as np
from ledger_rows import SAMPLING, identity

from firstdiff.tracing.records import PrefillChunk, RequestRow, TokenLogRow, Usage
from firstdiff.tracing.store import Manifest, Run

VOCABULARY = 500
HEALTH = {
    "loop_lag_p50_ns": 100_000,
    "loop_lag_p99_ns": 2_000_000,
    "dispatch_lag_p50_ns": 10_000,
    "dispatch_lag_p99_ns": 50_000,
}


@dataclass(frozen=True)
class Noise:
    """How unquiet the machine is; all spreads are of log-times. The default is a shared two-core machine."""

    drift: float = 0.10
    block_sd: float = 0.02
    busy_fraction: float = 0.04
    busy_factor: float = 1.4
    request_sd: float = 0.02
    prefill_sd: float = 0.08
    stall_fraction: float = 0.05
    stall_factor: float = 2.0


QUIET = Noise(0.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0, 1.0)


@dataclass
class Workload:
    """What is asked of every side; `block_size` requests at a time, sides in turns."""

    num_cases: int = 32
    num_tokens: int = 24
    block_size: int = 4
    repeats: int = 1
    seed: int = 0
    noise: Noise = field(default_factory=Noise)
    dtype: str = "fp32"
    sha256: str = "w"


@dataclass
class Defect:
    """What is wrong with one side: slower phases, and cases whose tokens part from the common ones."""

    slower_decode: float = 0.0
    slower_prefill: float = 0.0
    diverging_fraction: float = 0.0
    shift: float = 0.5
    """Nats by which a diverging case's log-probabilities move at the divergence."""
    heavy_shift: bool = False
    """Whether that shift is only the scale of a heavy-tailed one."""
    salt: int = 0
    """Sides with equal salt have their diverging cases in common."""
    logprob_sd: float = 0.0
    """Spread of the noise on every log-probability, Student t with three degrees of freedom."""
    failing_fraction: float = 0.0


def heavy(rng, size=None):
    """Student t with three degrees of freedom, scaled to a standard deviation of one."""
    return rng.standard_t(3, size=size) / math.sqrt(3)


def reply_tokens(case_index, num_tokens):
    rng = np.random.default_rng([7, case_index])
    return [int(token) for token in rng.integers(0, VOCABULARY, num_tokens)]


def token_text(token_id):
    return f" t{token_id}"


def make_rows(workload, labels, defects=None, *, run_ids=None):
    """{label: (request rows, token log rows)} of one interleaved session."""
    defects = defects or {}
    rng = np.random.default_rng([11, workload.seed])
    noise = workload.noise
    rows = {label: ([], []) for label in labels}
    now_ns, turn = 10**9, 0
    phase_of_drift = rng.uniform(0, 2 * math.pi)
    num_blocks = -(-workload.num_cases // workload.block_size)
    num_turns = num_blocks * workload.repeats * len(labels)
    for block in range(num_blocks):
        cases = range(block * workload.block_size, min(workload.num_cases, (block + 1) * workload.block_size))
        for repeat in range(workload.repeats):
            shift = (block * workload.repeats + repeat) % len(labels)
            for label in [*labels[shift:], *labels[:shift]]:
                angle = phase_of_drift + 3 * math.pi * turn / num_turns
                speed = noise.drift * math.sin(angle) + noise.block_sd * heavy(rng)
                if rng.random() < noise.busy_fraction:
                    speed += math.log(noise.busy_factor)
                made = [
                    one_request(
                        workload,
                        rng,
                        now_ns,
                        defects.get(label, Defect()),
                        speed,
                        request_id=f"{(run_ids or {}).get(label, label)}-{case}-{repeat}",
                        case=case,
                        repeat=repeat,
                        block=block,
                    )
                    for case in cases
                ]
                for row, log in made:
                    rows[label][0].append(row)
                    rows[label][1].append(log)
                now_ns = max(row.finished_ns for row, _ in made) + 1_000_000
                turn += 1
    return rows


def one_request(workload, rng, sent_ns, defect, speed, *, request_id, case, repeat, block):
    noise = workload.noise
    slow = speed + noise.request_sd * heavy(rng)
    stall = noise.stall_factor if rng.random() < noise.stall_fraction else 1.0
    prefill_ns = 80e6 * math.exp(slow + noise.prefill_sd * heavy(rng)) * (1 + defect.slower_prefill)
    step_ns = 20e6 * math.exp(slow) * (1 + defect.slower_decode) * stall
    token_ids, logprobs, tops = reply_of(workload, rng, defect, case, repeat)
    ok = rng.random() >= defect.failing_fraction
    first_ns = int(sent_ns + 1e6 + prefill_ns)
    stamps = [first_ns + int(step_ns * i) for i in range(len(token_ids))] if ok else []
    finished_ns = (stamps[-1] if stamps else first_ns) + 200_000
    texts = [token_text(token) for token in token_ids]
    row = RequestRow(
        request_id=request_id,
        case_id=f"case-{case:04d}",
        repeat_index=repeat,
        block_index=block,
        trace_id=None,
        intended_ns=sent_ns,
        sent_ns=sent_ns,
        headers_received_ns=sent_ns + 500_000,
        chunk_received_ns=stamps,
        chunk_num_tokens=[1] * len(stamps),
        finished_ns=finished_ns,
        sent_unix_ns=sent_ns,
        outcome="ok" if ok else "failed",
        status=200 if ok else 500,
        error=None if ok else "boom",
        prompt_token_ids=[1, 2, 3, case],
        text="".join(texts) if ok else "",
        token_ids=token_ids if ok else None,
        token_texts=texts if ok else None,
        logprobs=logprobs if ok else None,
        top_logprobs=tops if ok else None,
        finish_reason="length" if ok else None,
        usage=Usage(prompt_tokens=4, completion_tokens=len(token_ids)) if ok else None,
    )
    return row, log_of(row, first_ns, finished_ns)


def reply_of(workload, rng, defect, case, repeat):
    """Token ids, log-probabilities and alternatives; from a divergence on the tokens are others."""
    token_ids = reply_tokens(case, workload.num_tokens)
    logprobs = [-0.1 - 0.01 * (token % 50) for token in token_ids]
    if defect.logprob_sd:
        # Noise of a reply, not of a case: a second repeat has its own.
        logprobs = [value + defect.logprob_sd * float(heavy(rng)) for value in logprobs]
    others = [(token + 1) % VOCABULARY for token in token_ids]
    tops = [
        [(token_text(token), value), (token_text(other), value - 1.0)]
        for token, other, value in zip(token_ids, others, logprobs, strict=True)
    ]
    # Whether a case is touched is a fact of the case, so that repeats agree.
    case_rng = np.random.default_rng([13, workload.seed, defect.salt, case])
    if case_rng.random() < defect.diverging_fraction:
        at = case % (workload.num_tokens - 1)
        shift = defect.shift * (abs(heavy(case_rng)) if defect.heavy_shift else 1.0)
        value = logprobs[at]
        tops[at] = [
            (token_text(others[at]), value + shift - 1.0),
            (token_text(token_ids[at]), value - shift),
        ]
        logprobs[at] = value + shift - 1.0
        token_ids = [*token_ids[:at], *others[at:]]
    return token_ids, logprobs, tops


def log_of(row, first_ns, finished_ns):
    token_ids = row.token_ids or []
    return TokenLogRow(
        request_id=row.request_id,
        trace_id=None,
        span_id=None,
        endpoint="/v1/chat/completions",
        identity_sha256="i",
        received_unix_ns=row.sent_unix_ns,
        received_ns=row.sent_ns + 300_000,
        tokenized_ns=row.sent_ns + 600_000,
        arrived_ns=row.sent_ns + 700_000,
        first_scheduled_ns=row.sent_ns + 900_000,
        first_token_ns=max(first_ns - 50_000, row.sent_ns + 900_000),
        finished_ns=finished_ns - 150_000,
        flushed_ns=finished_ns - 100_000,
        prompt_token_ids=row.prompt_token_ids,
        sampling=SAMPLING,
        token_ids=token_ids,
        emitted_ns=row.chunk_received_ns,
        step_index=list(range(len(token_ids))),
        batch_size=[4] * len(token_ids),
        logprobs=row.logprobs or [],
        text=row.text,
        finish_reason="length",
        error=None,
        num_cached_tokens=0,
        prefill_chunks=[PrefillChunk(step_index=0, start_token=0, num_tokens=4)],
        num_preemptions=0,
    )


def write_run(path, label, rows, logs=(), workload=None, load=None, **changes):
    """A Run on disk of these rows, asked at `load`; `changes` go to its manifest."""
    workload = workload or Workload()
    fields = {
        "run_id": f"{label}-1",
        "label": label,
        "created_unix_ns": 1,
        "endpoint": "http://127.0.0.1:1",
        "dialect": "firstdiff",
        "model": "m",
        "workload": load or {},
        "workload_sha256": workload.sha256,
        "identity": identity(dtype=workload.dtype),
        "client": HEALTH,
        "complete": True,
    } | changes
    with Run.create(path / label, Manifest(**fields)) as run:
        for row in rows:
            run.append("requests", row)
        for log in logs:
            run.append("tokens", log)
    return Run.open(path / label)


def make_runs(path, workload, defects=None, labels=("base", "candidate"), *, with_logs=True):
    """One interleaved session on disk, a Run for each label."""
    made = make_rows(workload, list(labels), defects)
    return [
        write_run(path, label, rows, logs if with_logs else (), workload)
        for label, (rows, logs) in made.items()
    ]


def changed(rows, index, **fields):
    """`rows` with fields of one of them changed."""
    return [*rows[:index], msgspec.structs.replace(rows[index], **fields), *rows[index + 1 :]]
