"""Attention on several threads: each of n threads computes one part.

Owns: nothing but the parallel loop. Refuses to know: torch, what a part is. Invariants: the parts are the
same function that one thread runs, so the number of threads changes no bit.

Usage: `forward(num_threads, ...)` with the arguments of `kernels_attention.forward`.
"""

from __future__ import annotations

from numba import prange

from firstdiff.engine.kernel_compiler import compiled_parallel
from firstdiff.engine.kernels_attention import attend, store


@compiled_parallel
def forward(
    num_threads: int, q: int, q_stride: int, k: int, k_stride: int, v: int, v_stride: int, keys: int,
    values: int, bounds: int, window: int, scale: float, bf16: int, written: int, places: int, tiles: int,
    out: int, num_rows: int, max_rows: int, num_heads: int, num_kv_heads: int, head_dim: int,
) -> None:  # fmt: skip
    """`store`, then `attend` in as many parts as threads."""
    row_bytes = num_kv_heads * head_dim * (2 if bf16 else 4)
    # A few rows of memory to copy: not worth waking threads for.
    store(0, 1, k, k_stride, v, v_stride, written, keys, values, num_rows, row_bytes)
    for part in prange(num_threads):
        attend(
            part, num_threads, q, q_stride, keys, values, places, tiles, bounds, out, max_rows, window,
            num_heads, num_kv_heads, head_dim, scale, bf16,
        )  # fmt: skip
