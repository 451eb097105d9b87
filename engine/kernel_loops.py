"""The innermost loops of the CPU kernels, as instructions that numba code can use.

Owns: tiles of a matrix product, squares, gates, widening and rounding. Refuses to know: models, caches,
threads. Invariants: the order of every sum is written here and depends on nothing outside its own row, so a
row's result is the same bits whatever is computed beside it.

Usage: in a numba function, `sum_of_squares(values, num_vectors)`. Arguments are int64; memory is
given by address, strides are in bytes; vectors are 16 fp32 and counts of them are at least 1.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from numba import types

from firstdiff.engine.kernel_ir import (
    FLOATS,
    INTS,
    LANES,
    Values,
    call,
    exp,
    floats,
    instruction,
    int_of,
    intrinsic,
    load,
    loop,
    offset,
    prefetch,
    reduced,
    rounded,
    scalars,
    splat,
    split,
    store,
    widened,
)

PANEL = 2 * LANES
"""Columns of a product that one tile computes: two vectors."""
TILE_SIZES = (1, 2, 3, 4, 6, 8, 12)
"""Numbers of rows a tile may have: in the largest, 24 sums, two weights and a broadcast fill most of
AVX-512's 32 registers; all twelve would take twice as long to compile."""
TILE_ROWS = TILE_SIZES[-1]
_PREFETCH_BYTES = 4096  # measured on one core: weights arrive at 13 GB/s with it, at 10 without


def _two_weights(builder: Values, panel: Values, k: Values, bf16: bool) -> tuple[Values, Values]:
    """Row k of a panel: its columns 0..16 and 16..32. In bf16 column c shares a 32-bit word with c + 16."""
    row_bytes = 4 * LANES if bf16 else 8 * LANES
    address = offset(builder, panel, k, int_of(row_bytes))
    for line in range(0, row_bytes, 64):
        prefetch(builder, builder.add(address, int_of(_PREFETCH_BYTES + line)))
    if not bf16:
        low = load(builder, address, FLOATS, 64)
        return low, load(builder, builder.add(address, int_of(4 * LANES)), FLOATS, 64)
    return split(builder, load(builder, address, INTS, 64))


def _tile_of(builder: Values, num_rows: int, arguments: Sequence[Values], *, bf16: bool) -> None:
    panel, bias, x, x_stride, out, out_stride, wide, depth = arguments
    rows = [scalars(builder, offset(builder, x, x_stride, int_of(row))) for row in range(num_rows)]
    halves = [load(builder, builder.add(bias, int_of(4 * LANES * half)), FLOATS, 4) for half in (0, 1)]

    def step(k: Values, sums: list[Values]) -> list[Values]:
        weights = _two_weights(builder, panel, k, bf16)
        updated = []
        for row, pointer in enumerate(rows):
            value = splat(builder, builder.load(builder.gep(pointer, [k])))
            updated += [call(builder, "fma", value, weights[half], sums[2 * row + half]) for half in (0, 1)]
        return updated

    sums = loop(builder, depth, halves * num_rows, step)
    with builder.if_else(builder.icmp_signed("!=", wide, int_of(0))) as (as_fp32, as_bf16):
        with as_fp32:
            _store_tile(builder, sums, out, out_stride, 4)
        with as_bf16:
            _store_tile(builder, [rounded(builder, value) for value in sums], out, out_stride, 2)


def _store_tile(builder: Values, sums: list[Values], out: Values, stride: Values, width: int) -> None:
    for index, value in enumerate(sums):
        row = offset(builder, out, stride, int_of(index // 2))
        store(builder, value, builder.add(row, int_of(width * LANES * (index % 2))), width)


def _tile_by_rows(builder: Values, rows: Values, *arguments: Values, bf16: bool) -> None:
    """One loop for each number of rows, so that all sums of each live in registers."""
    done = builder.append_basic_block("done")
    switch = builder.switch(rows, done)
    for num_rows in TILE_SIZES:
        block = builder.append_basic_block(f"rows{num_rows}")
        switch.add_case(int_of(num_rows), block)
        builder.position_at_end(block)
        _tile_of(builder, num_rows, arguments, bf16=bf16)
        builder.branch(done)
    builder.position_at_end(done)


@intrinsic
def product_tile_bf16(
    context: Values, rows: Values, panel: Values, bias: Values, x: Values, x_stride: Values,
    out: Values, out_stride: Values, wide: Values, depth: Values,
) -> Values:  # fmt: skip
    """`rows` (one of TILE_SIZES) rows of x [rows, depth] fp32 times a bf16 panel, plus `bias` [32] fp32.

    To `out`, in fp32 if `wide`, else in bf16. Each sum starts at its bias and takes k = 0, 1, ... in turn by
    fused multiply-adds, whatever the number of rows.
    """
    return instruction(types.void, "i" * 9, lambda *a: _tile_by_rows(*a, bf16=True))


@intrinsic
def product_tile_fp32(
    context: Values, rows: Values, panel: Values, bias: Values, x: Values, x_stride: Values,
    out: Values, out_stride: Values, wide: Values, depth: Values,
) -> Values:  # fmt: skip
    """As `product_tile_bf16`, with a panel of fp32."""
    return instruction(types.void, "i" * 9, lambda *a: _tile_by_rows(*a, bf16=False))


@intrinsic
def sum_of_squares(context: Values, values: Values, num_vectors: Values) -> Values:
    """Of `num_vectors` vectors: lane by lane, then across."""
    return instruction(types.float32, "ii", _sum_of_squares)


def _sum_of_squares(builder: Values, values: Values, num_vectors: Values) -> Values:
    def step(index: Values, sums: list[Values]) -> list[Values]:
        value = load(builder, offset(builder, values, index, int_of(64)), FLOATS, 4)
        return [call(builder, "fma", value, value, sums[0])]

    return reduced(builder, loop(builder, num_vectors, [floats(0.0)], step)[0], builder.fadd)


@intrinsic
def gate(
    context: Values, gates: Values, ups: Values, out: Values, num_vectors: Values, is_silu: Values
) -> Values:
    """out = activation(gates) * ups: silu, or gelu by its tanh formula."""
    return instruction(types.void, "iiiii", _gate)


def _gate(
    builder: Values, gates: Values, ups: Values, out: Values, num_vectors: Values, is_silu: Values
) -> None:
    silu = builder.icmp_signed("!=", is_silu, int_of(0))

    def step(index: Values, _: list[Values]) -> list[Values]:
        begin = builder.mul(index, int_of(64))
        x = load(builder, builder.add(gates, begin), FLOATS, 4)
        # gelu's (1 + tanh(u)) / 2 is 1 / (1 + exp(-2u)): both activations are x times a sigmoid.
        cubed = builder.fmul(builder.fmul(x, x), x)
        twice_u = call(builder, "fma", cubed, floats(0.044715), x)
        twice_u = builder.fmul(twice_u, floats(2.0 * math.sqrt(2.0 / math.pi)))
        exponent = builder.fsub(floats(0.0), builder.select(silu, x, twice_u))
        large = builder.fcmp_ordered(">", exponent, floats(88.0))
        power = exp(builder, builder.select(large, floats(88.0), exponent))
        y = builder.fdiv(x, builder.fadd(power, floats(1.0)))
        y = builder.fmul(y, load(builder, builder.add(ups, begin), FLOATS, 4))
        store(builder, y, builder.add(out, begin), 4)
        return []

    loop(builder, num_vectors, [], step)


@intrinsic
def widen(context: Values, source: Values, out: Values, num_vectors: Values) -> Values:
    """bf16 -> fp32."""
    return instruction(types.void, "iii", _widen)


def _widen(builder: Values, source: Values, out: Values, num_vectors: Values) -> None:
    def step(index: Values, _: list[Values]) -> list[Values]:
        value = widened(builder, offset(builder, source, index, int_of(32)))
        store(builder, value, offset(builder, out, index, int_of(64)), 4)
        return []

    loop(builder, num_vectors, [], step)


@intrinsic
def narrow(context: Values, source: Values, out: Values, num_vectors: Values) -> Values:
    """fp32 -> bf16, to nearest even."""
    return instruction(types.void, "iii", _narrow)


def _narrow(builder: Values, source: Values, out: Values, num_vectors: Values) -> None:
    def step(index: Values, _: list[Values]) -> list[Values]:
        value = load(builder, offset(builder, source, index, int_of(64)), FLOATS, 4)
        store(builder, rounded(builder, value), offset(builder, out, index, int_of(32)), 2)
        return []

    loop(builder, num_vectors, [], step)
