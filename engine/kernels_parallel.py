"""The CPU kernels on several threads: each of n threads computes one part.

Owns: nothing but the parallel loops. Refuses to know: torch, what a part is. Invariants: the parts are the
same functions that one thread runs, so the number of threads changes no bit.

Usage: `product(num_threads, ...)` with the arguments of `kernels.product` after (part, num_parts).
"""

from __future__ import annotations

from numba import prange

from firstdiff.engine import kernels, kernels_attention
from firstdiff.engine.kernel_compiler import compiled_parallel

SERIAL_ROWS = 8
"""Fewer rows than this are not worth waking threads for, outside products."""

_widen_rows = kernels.widen_rows

_product = kernels.product

_add_norm = kernels.add_norm

_gate_rows = kernels.gate_rows

_turn_heads = kernels.turn_heads

_store = kernels_attention.store

_attend = kernels_attention.attend


@compiled_parallel
def linear(
    num_threads: int, x: int, x_stride: int, widened: int, panels: int, bias: int, out: int,
    out_stride: int, num_rows: int, depth: int, num_panels: int, bf16: int, wide: int,
) -> None:  # fmt: skip
    if bf16:
        if num_rows < SERIAL_ROWS:
            _widen_rows(0, 1, x, x_stride, widened, num_rows, depth)
        else:
            for part in prange(num_threads):
                _widen_rows(part, num_threads, x, x_stride, widened, num_rows, depth)
    source, stride = (widened, depth * 4) if bf16 else (x, x_stride)
    for part in prange(num_threads):
        _product(
            part, num_threads, source, stride, panels, bias, out, out_stride, num_rows, depth, num_panels,
            bf16, wide,
        )  # fmt: skip


@compiled_parallel
def add_norm(
    num_threads: int,
    x: int,
    x_stride: int,
    added: int,
    added_stride: int,
    weight: int,
    weight_bf16: int,
    out: int,
    num_rows: int,
    width: int,
    eps: float,
    bf16: int,
) -> None:
    for part in prange(num_threads):
        _add_norm(
            part,
            num_threads,
            x,
            x_stride,
            added,
            added_stride,
            weight,
            weight_bf16,
            out,
            num_rows,
            width,
            eps,
            bf16,
        )


@compiled_parallel
def gate_rows(
    num_threads: int, x: int, x_stride: int, out: int, num_rows: int, width: int, is_silu: int, bf16: int
) -> None:
    for part in prange(num_threads):
        _gate_rows(part, num_threads, x, x_stride, out, num_rows, width, is_silu, bf16)


@compiled_parallel
def turn_heads(
    num_threads: int,
    x: int,
    x_stride: int,
    cos: int,
    sin: int,
    weight: int,
    num_rows: int,
    num_heads: int,
    head_dim: int,
    eps: float,
    bf16: int,
) -> None:
    for part in prange(num_threads):
        _turn_heads(
            part, num_threads, x, x_stride, cos, sin, weight, num_rows, num_heads, head_dim, eps, bf16
        )


@compiled_parallel
def store(
    num_threads: int,
    k: int,
    k_stride: int,
    v: int,
    v_stride: int,
    slots: int,
    keys: int,
    values: int,
    num_rows: int,
    row_bytes: int,
) -> None:
    for part in prange(num_threads):
        _store(part, num_threads, k, k_stride, v, v_stride, slots, keys, values, num_rows, row_bytes)


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
