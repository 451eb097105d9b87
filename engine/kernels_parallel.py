"""Attention on several threads: each of n threads computes one part.

Owns: nothing but the parallel loops. Refuses to know: torch, what a part is. Invariants: the parts are the
same functions that one thread runs, so the number of threads changes no bit.

Usage: `attend(num_threads, ...)` with the arguments of `kernels_attention.attend` after (part, num_parts).
"""

from __future__ import annotations

from numba import prange

from firstdiff.engine import kernels_attention
from firstdiff.engine.kernel_compiler import compiled_parallel

_attend = kernels_attention.attend


@compiled_parallel
def attend(
    num_threads: int,
    q: int,
    q_stride: int,
    keys: int,
    values: int,
    slots: int,
    tiles: int,
    bounds: int,
    out: int,
    max_rows: int,
    window: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    scale: float,
    bf16: int,
) -> None:
    for part in prange(num_threads):
        _attend(
            part,
            num_threads,
            q,
            q_stride,
            keys,
            values,
            slots,
            tiles,
            bounds,
            out,
            max_rows,
            window,
            num_heads,
            num_kv_heads,
            head_dim,
            scale,
            bf16,
        )
