"""The CPU kernels: every operation of a decoder layer, compiled by numba for this machine.

Owns: the loops around kernel_loops.py, and how work is cut into parts. Refuses to know: torch, models,
threads (a caller runs part i of n). Invariants: a row's result is the same bits whatever rows, parts and
chunks are computed beside it: no sum depends on anything but its own row and absolute positions; what lies
outside a row's context is never added.

Memory is given by address (int64), strides in bytes; `bf16` is 1 for bf16 tensors and 0 for fp32 ones;
`wide` is 1 where values of bf16 are written as fp32, for a product to read.

Usage: `product(0, 1, ...)` computes all of a product; `product(i, n, ...)` the i-th of n parts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from firstdiff.engine.kernel_compiler import compiled
from firstdiff.engine.kernel_ir import LANES, bits_at, floats_at, words_at
from firstdiff.engine.kernel_loops import (
    PANEL,
    TILE_SIZES,
    gate,
    narrow,
    product_tile_bf16,
    product_tile_fp32,
    sum_of_squares,
    widen,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray

_ROW_BLOCK = 96
"""Rows of a product that are done before the next panel: their inputs stay in the second-level cache."""


@compiled
def first_of(part: int, num_parts: int, total: int) -> int:
    """Where part `part` of `total` items begins."""
    return total * part // num_parts


@compiled
def keep(memory: NDArray[np.float32]) -> None:
    """Goes last where an array is used by address: numba frees it after the last line that names it."""


@compiled
def read_row(source: int, out: int, width: int, bf16: int) -> None:
    """`width` values as fp32."""
    if bf16 == 0:
        values, copies = floats_at(source), floats_at(out)
        for index in range(width):
            copies[index] = values[index]
        return
    whole = width // LANES
    if whole > 0:
        widen(source, out, whole)
    words, bits = words_at(source), bits_at(out)
    for index in range(whole * LANES, width):
        bits[index] = np.uint32(words[index]) << np.uint32(16)


@compiled
def write_row(source: int, out: int, width: int, bf16: int) -> None:
    """`width` values of fp32 to the tensor's dtype."""
    if bf16 == 0:
        read_row(source, out, width, 0)
        return
    whole = width // LANES
    if whole > 0:
        narrow(source, out, whole)
    bits, words = bits_at(source), words_at(out)
    for index in range(whole * LANES, width):
        odd = (bits[index] >> np.uint32(16)) & np.uint32(1)
        words[index] = np.uint16((bits[index] + np.uint32(0x7FFF) + odd) >> np.uint32(16))


@compiled
def put_row(source: int, out: int, row: int, width: int, bf16: int, wide: int) -> None:
    """`source`, fp32, as row `row` of `out` without gaps, rounded to the dtype; `wide`: still as fp32.

    May round `source` in place.
    """
    if wide:
        write_row(source, source, width, 1)
        read_row(source, out + row * width * 4, width, 1)
    else:
        write_row(source, out + row * width * (2 if bf16 else 4), width, bf16)


@compiled
def widen_rows(part: int, num_parts: int, x: int, x_stride: int, out: int, num_rows: int, width: int) -> None:
    """bf16 x [num_rows, width] to fp32 without gaps."""
    for row in range(first_of(part, num_parts, num_rows), first_of(part + 1, num_parts, num_rows)):
        read_row(x + row * x_stride, out + row * width * 4, width, 1)


@compiled
def tile_rows(left: int) -> int:
    """The largest tile that `left` rows fill."""
    rows = 1
    for size in TILE_SIZES:
        if size <= left:
            rows = size
    return rows


@compiled
def product(
    part: int,
    num_parts: int,
    x: int,
    x_stride: int,
    panels: int,
    bias: int,
    out: int,
    out_stride: int,
    num_rows: int,
    depth: int,
    num_panels: int,
    bf16: int,
    wide: int,
) -> None:
    """x [num_rows, depth] fp32 times packed `panels`, plus bias; a part is some panels of some row blocks."""
    panel_bytes = depth * PANEL * (2 if bf16 else 4)
    out_bytes = PANEL * (4 if wide or bf16 == 0 else 2)
    num_blocks = (num_rows + _ROW_BLOCK - 1) // _ROW_BLOCK
    num_units = num_blocks * num_panels
    for unit in range(first_of(part, num_parts, num_units), first_of(part + 1, num_parts, num_units)):
        panel = unit % num_panels
        row = unit // num_panels * _ROW_BLOCK
        end = min(num_rows, row + _ROW_BLOCK)
        while row < end:
            rows = tile_rows(end - row)
            inputs, outputs = x + row * x_stride, out + row * out_stride + panel * out_bytes
            weights, offsets = panels + panel * panel_bytes, bias + panel * PANEL * 4
            if bf16:
                product_tile_bf16(rows, weights, offsets, inputs, x_stride, outputs, out_stride, wide, depth)
            else:
                product_tile_fp32(rows, weights, offsets, inputs, x_stride, outputs, out_stride, 1, depth)
            row += rows


@compiled
def norm_row(values: int, weight: int, width: int, eps: float) -> None:
    """fp32 `values` scaled to unit mean square, then by `weight`, in place; zeros follow up to a vector."""
    num_vectors = (width + LANES - 1) // LANES
    mean = sum_of_squares(values, num_vectors) / np.float32(width)
    scale = np.float32(1.0) / np.sqrt(mean + np.float32(eps))
    row, factors = floats_at(values), floats_at(weight)
    for index in range(width):
        row[index] = row[index] * scale * factors[index]


@compiled
def add_norm(
    part: int,
    num_parts: int,
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
    wide: int,
) -> None:
    """x += added where there is one (address 0: none), then out = rms_norm(x) * weight [width]."""
    scratch = np.zeros((3, width + LANES), np.float32)
    row_values, row_added, factors = scratch[0].ctypes.data, scratch[1].ctypes.data, scratch[2].ctypes.data
    read_row(weight, factors, width, weight_bf16)
    for row in range(first_of(part, num_parts, num_rows), first_of(part + 1, num_parts, num_rows)):
        place = x + row * x_stride
        read_row(place, row_values, width, bf16)
        if added != 0:
            read_row(added + row * added_stride, row_added, width, bf16)
            scratch[0, :width] += scratch[1, :width]
            write_row(row_values, place, width, bf16)
            read_row(place, row_values, width, bf16)
        norm_row(row_values, factors, width, eps)
        put_row(row_values, out, row, width, bf16, wide)
    keep(scratch)


@compiled
def gate_rows(
    part: int,
    num_parts: int,
    x: int,
    x_stride: int,
    out: int,
    num_rows: int,
    width: int,
    is_silu: int,
    bf16: int,
    wide: int,
) -> None:
    """out [num_rows, width] = activation(left half of x) * right half."""
    scratch = np.zeros((3, width + LANES), np.float32)
    gates, ups, gated = scratch[0].ctypes.data, scratch[1].ctypes.data, scratch[2].ctypes.data
    item = 2 if bf16 else 4
    num_vectors = (width + LANES - 1) // LANES
    for row in range(first_of(part, num_parts, num_rows), first_of(part + 1, num_parts, num_rows)):
        place = x + row * x_stride
        read_row(place, gates, width, bf16)
        read_row(place + width * item, ups, width, bf16)
        gate(gates, ups, gated, num_vectors, is_silu)
        put_row(gated, out, row, width, bf16, wide)
    keep(scratch)


@compiled
def turn_heads(
    part: int,
    num_parts: int,
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
    """Norm (weight [num_heads, D] fp32, address 0: none) and rotate each row's leading heads in place."""
    scratch = np.zeros((4, head_dim + LANES), np.float32)
    head, cosines, sines = scratch[0], scratch[1], scratch[2]
    turned = scratch[3]
    item, half = (2 if bf16 else 4), head_dim // 2
    for row in range(first_of(part, num_parts, num_rows), first_of(part + 1, num_parts, num_rows)):
        read_row(cos + row * head_dim * item, cosines.ctypes.data, head_dim, bf16)
        read_row(sin + row * head_dim * item, sines.ctypes.data, head_dim, bf16)
        for index in range(num_heads):
            place = x + row * x_stride + index * head_dim * item
            read_row(place, head.ctypes.data, head_dim, bf16)
            if weight != 0:
                norm_row(head.ctypes.data, weight + index * head_dim * 4, head_dim, eps)
            for d in range(half):
                turned[d] = head[d] * cosines[d] + head[d + half] * sines[d]
                turned[d + half] = head[d + half] * cosines[d + half] + head[d] * sines[d + half]
            write_row(turned.ctypes.data, place, head_dim, bf16)
    keep(scratch)
