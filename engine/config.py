"""Engine settings: one frozen record, validated where it is made.

Owns: the limits of the engine and their bounds. Refuses to know: HTTP, torch, how a limit is enforced.
Invariants: a constructed EngineConfig is consistent (`validate` ran); nothing mutates it afterwards.

Usage: `config = EngineConfig(model="smollm2-135m", dtype="bf16").validated(max_model_len=8192)`.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from firstdiff.tracing.records import LogprobsMode

Dtype = Literal["fp32", "bf16"]
SchedulingPolicy = Literal["fcfs", "priority"]


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that shapes one engine process.

    `num_blocks` 0 means: enough for `max_num_seqs` sequences of `max_model_len` tokens, up to 2 GiB
    or one whole context, whichever is more.
    `max_model_len` 0 means: what the model's config says. `max_num_waiting` requests may wait
    beyond the running ones (429 then). `scheduling_policy` fcfs takes requests as they arrive,
    priority those of the lowest `priority` first. `logprobs_mode` is of requests that name none.
    `threads` 0 means: as many as a measurement at the start finds fastest. `deterministic` True asks for
    log-probabilities that are the same bits alone, batched, chunked, cached and preempted, False for torch's
    products and attention; None takes the first where it can run, as it is also the faster (compute.py).
    `seed` makes the seeds drawn for requests that name none repeat from start to start, in the order the
    requests come; None draws them from the system. `faults` are names from `engine/faults.py`, empty in
    every healthy engine.
    """

    model: str
    dtype: Dtype = "fp32"
    threads: int = 1
    block_size: int = 16
    num_blocks: int = 0
    max_num_seqs: int = 32
    max_num_batched_tokens: int = 512
    max_model_len: int = 0
    max_num_waiting: int = 1024
    enable_prefix_caching: bool = True
    scheduling_policy: SchedulingPolicy = "fcfs"
    logprobs_mode: LogprobsMode = "raw_logprobs"
    deterministic: bool | None = None
    seed: int | None = None
    faults: tuple[str, ...] = ()

    def validate(self) -> None:
        """Raise ValueError (expected, got, what to do) on the first setting out of bounds."""
        bounds = {
            "threads": (self.threads, 0, 1024),
            "block_size": (self.block_size, 1, 1024),
            "num_blocks": (self.num_blocks, 0, 1 << 30),
            "max_num_seqs": (self.max_num_seqs, 1, 4096),
            "max_num_batched_tokens": (self.max_num_batched_tokens, 1, 1 << 20),
            "max_model_len": (self.max_model_len, 0, 1 << 24),
            "max_num_waiting": (self.max_num_waiting, 1, 1 << 20),
        }
        if self.seed is not None and not 0 <= self.seed < 1 << 64:
            raise ValueError(f"expected --seed in 0..2^64-1, got {self.seed}")
        for name, (value, low, high) in bounds.items():
            if not low <= value <= high:
                flag = name.replace("_", "-")
                raise ValueError(f"expected --{flag} in {low}..{high}, got {value}")
        if self.dtype not in ("fp32", "bf16"):
            raise ValueError(f"expected --dtype fp32 or bf16, got {self.dtype!r}")
        if self.scheduling_policy not in ("fcfs", "priority"):
            raise ValueError(f"expected --scheduling-policy fcfs or priority, got {self.scheduling_policy!r}")
        if self.logprobs_mode not in ("raw_logprobs", "processed_logprobs"):
            raise ValueError(
                f"expected --logprobs-mode raw_logprobs or processed_logprobs, got {self.logprobs_mode!r}"
            )
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"expected --max-num-batched-tokens >= --max-num-seqs ({self.max_num_seqs}), "
                f"got {self.max_num_batched_tokens}: each running sequence needs a token a step"
            )
