"""How this process computes: compiled kernels or torch, and with how many threads.

Owns: that choice. Refuses to know: models, weights, requests. Invariants: the choice depends on what is
installed and asked for, never on a race between the two, so replicas of one configuration compute alike;
the number of threads changes no bit of what the kernels compute.

Usage: `compute = choose_compute(config, clock=SystemClock())`.
"""

from __future__ import annotations

import importlib.util
import logging
import os
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass

import torch

from firstdiff.engine.attention import AttentionBackend, AttentionRules, KVCache
from firstdiff.engine.attention_cpu import CpuAttention
from firstdiff.engine.batch import Batch, PrefillSpan
from firstdiff.engine.config import EngineConfig
from firstdiff.engine.ops import HeadShape, Ops, TorchOps
from firstdiff.tracing.clock import Clock

_TRIALS = 12
_WARM_UP_ROWS = 16  # enough for the forms that use several threads
_PROBE_ROWS, _PROBE_WIDTH = 8, 2048
"""A product like those of a decode step: 8 MB of weights, which a second-level cache does not hold."""


@dataclass(frozen=True, slots=True)
class Compute:
    """What a decoder is built with; `deterministic`: a row's bits do not depend on what is beside it."""

    ops: Ops
    make_attention: Callable[[KVCache, AttentionRules], AttentionBackend]
    threads: int
    deterministic: bool


def lack_of_kernels(threads: int) -> str | None:
    """What keeps this process from running the kernels, and what to do about it; None when it can."""
    if importlib.util.find_spec("numba") is None:
        return "numba is not installed: install firstdiff[engine]"
    if importlib.import_module("numba").config.DISABLE_JIT:
        return "numba is told not to compile: unset NUMBA_DISABLE_JIT"
    if threads == 1:
        return None
    try:
        importlib.import_module("numba.np.ufunc.omppool")
    except ImportError:
        return "numba finds no OpenMP library: install one, or take --threads 1"
    return None


def choose_compute(config: EngineConfig, *, clock: Clock) -> Compute:
    """Kernels where they can run, unless `deterministic` is False; ValueError if it is True and they cannot.

    Sets the thread counts of torch, for the process, and of numba, for the calling thread.
    """
    if config.deterministic is not False:
        lack = lack_of_kernels(config.threads)
        if lack is None:
            return _kernels(config.threads, clock)
        if config.deterministic:
            raise ValueError(
                f"expected numba's kernels for --deterministic with --threads {config.threads}, "
                f"got none: {lack}, or leave --deterministic out"
            )
        logging.getLogger(__name__).warning(
            "computing with torch, slower and without the promise of equal bits: %s", lack
        )
    threads = config.threads or _fastest(_torch_trial, _counts(), clock)
    torch.set_num_threads(threads)
    return Compute(TorchOps(), CpuAttention, threads, deterministic=False)


def _kernels(threads: int, clock: Clock) -> Compute:
    from functools import partial

    from firstdiff.engine.kernel_compiler import compiled_mark

    mark = compiled_mark(parallel=threads != 1)
    if not mark.exists():
        logging.getLogger(__name__).warning(
            "compiling the CPU kernels for this machine, once: half a minute, more on a busy one"
        )
    from firstdiff.engine.attention_kernel import KernelAttention
    from firstdiff.engine.ops_kernel import KernelOps, set_threads

    if threads == 0:
        threads = _fastest(_kernel_trial, _counts(), clock)
    set_threads(threads)
    # Torch is left with what is not a kernel: small, and two pools of threads would fight over the cores.
    torch.set_num_threads(1)
    compute = Compute(
        KernelOps(threads=threads), partial(KernelAttention, threads=threads), threads, deterministic=True
    )
    for num_rows in (1, _WARM_UP_ROWS):
        _warm_up(compute, num_rows)
    # Where nothing can be written, nothing was kept.
    with suppress(OSError):
        mark.parent.mkdir(parents=True, exist_ok=True)
        mark.touch()
    return compute


def _warm_up(compute: Compute, num_rows: int) -> None:
    """One layer over zeros: what a first request must not wait for is compiled, or read from the cache."""
    ops, shape = compute.ops, HeadShape(num_heads=1, num_kv_heads=1, head_dim=16)
    cache = KVCache.allocate(
        num_layers=1, num_blocks=1, block_size=num_rows, num_kv_heads=1, head_dim=16, dtype=torch.float32
    )
    attention = compute.make_attention(cache, cache.plain_rules)
    rows = torch.arange(num_rows)
    span = PrefillSpan(row=0, num_rows=num_rows, start=0, block_table=torch.zeros(1, dtype=torch.int64))
    attention.plan(Batch(rows, rows, rows, rows, [], [], [span]))
    x, angles = torch.zeros(num_rows, 16), torch.zeros(num_rows, 16)
    x = ops.linear(torch.zeros(3 * 16, 16), None)(ops.norm(x, torch.zeros(16), 1e-5))
    x = attention.forward(*ops.turn(x, shape, angles, angles, None, 1e-5), 0)
    ops.gate(torch.cat(ops.add_norm(x, x, torch.zeros(16), 1e-5), dim=-1), "silu")


def _counts() -> list[int]:
    """1, 2, 4, ... and all CPUs of this process."""
    most = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return sorted({most, *(1 << power for power in range(most.bit_length()) if 1 << power <= most)})


def _kernel_trial(threads: int) -> Callable[[], object]:
    from firstdiff.engine.linear_kernel import KernelLinear
    from firstdiff.engine.ops_kernel import set_threads

    set_threads(threads)
    weight = torch.zeros(_PROBE_WIDTH, _PROBE_WIDTH, dtype=torch.bfloat16)
    linear, x = KernelLinear(weight, threads=threads), weight[:_PROBE_ROWS]
    return lambda: linear(x)


def _torch_trial(threads: int) -> Callable[[], object]:
    torch.set_num_threads(threads)
    weight = torch.zeros(_PROBE_WIDTH, _PROBE_WIDTH, dtype=torch.bfloat16)
    linear, x = TorchOps().linear(weight, None), weight[:_PROBE_ROWS]
    return lambda: linear(x)


def _fastest(trial: Callable[[int], Callable[[], object]], counts: Iterable[int], clock: Clock) -> int:
    """The thread count whose best time is least; the smaller of two within a twentieth."""
    best_count, best_ns = 1, None
    for count in counts:
        call = trial(count)
        call()
        times = []
        for _ in range(_TRIALS):
            start_ns = clock.now_ns()
            call()
            times.append(clock.now_ns() - start_ns)
        if best_ns is None or min(times) < 0.95 * best_ns:
            best_count, best_ns = count, min(times)
    logging.getLogger(__name__).info("a trial of threads found %d fastest", best_count)
    return best_count
