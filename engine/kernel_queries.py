"""What attention keeps of a query while it goes through a context, for numba code.

Owns: that memory, and the order of values in rows of fp32. Refuses to know: keys, scores. Invariants: what is
opened with rows as bf16 is closed so: their values change places in between.

A row is pairs of vectors: of fp32, 32 values in order; of bf16, the 16 even ones, then the 16 odd ones, which
a shift and a mask take from the same words. A query has a vector full of the score that its weights are
relative to, a vector whose lanes add up to the sum of its weights, the scaled query, and the weighted sum of
the values, `num_pairs` pairs each.

Usage: `open_query(source, state, num_pairs, scale, 1)`, folds, `close_query(state, out, num_pairs, 1)`.
"""

from __future__ import annotations

from collections.abc import Callable

from numba import types

from firstdiff.engine.kernel_ir import (
    F32,
    FLOATS,
    INTS,
    LANES,
    Values,
    floats,
    instruction,
    int_of,
    intrinsic,
    joined,
    load,
    loop,
    offset,
    reduced,
    splat,
    split,
    store,
)

PAIR = 2 * LANES
"""Values of a row that are taken at once."""
VECTOR_BYTES = 4 * LANES
WEIGHTS_SUM, QUERY = VECTOR_BYTES, 2 * VECTOR_BYTES
"""Where a query's memory has them; the score that weights are relative to comes first."""


def pair_at(builder: Values, row: Values, pair: Values, bf16: bool) -> tuple[Values, Values]:
    """Pair number `pair` of the row at address `row`, in fp32."""
    address = offset(builder, row, pair, int_of(PAIR * (2 if bf16 else 4)))
    if bf16:
        return split(builder, load(builder, address, INTS, 2))
    second = builder.add(address, int_of(VECTOR_BYTES))
    return load(builder, address, FLOATS, 4), load(builder, second, FLOATS, 4)


def sums_of(builder: Values, state: Values, num_pairs: Values) -> Values:
    """Where a query's memory has the weighted sum of the values."""
    return offset(builder, builder.add(state, int_of(QUERY)), num_pairs, int_of(2 * VECTOR_BYTES))


@intrinsic
def split_row(context: Values, source: Values, out: Values, num_pairs: Values) -> Values:
    """A row of bf16 to fp32, in the order of its pairs."""
    return instruction(types.void, "iii", _split_row)


def _split_row(builder: Values, source: Values, out: Values, num_pairs: Values) -> None:
    _each_pair(builder, source, out, num_pairs, True, lambda half: half)


def _each_pair(
    builder: Values,
    source: Values,
    out: Values,
    num_pairs: Values,
    bf16: bool,
    change: Callable[[Values], Values],
) -> None:
    """out = change(source), pair by pair, in fp32."""

    def step(index: Values, _: list[Values]) -> list[Values]:
        to = offset(builder, out, index, int_of(2 * VECTOR_BYTES))
        for number, half in enumerate(pair_at(builder, source, index, bf16)):
            store(builder, change(half), builder.add(to, int_of(VECTOR_BYTES * number)), 4)
        return []

    loop(builder, num_pairs, [], step)


@intrinsic
def open_query(
    context: Values, source: Values, state: Values, num_pairs: Values, scale: Values, bf16: Values
) -> Values:
    """Scale a query's row and let its memory know of no position."""
    return instruction(types.void, "iiifi", _open_query)


def _open_query(
    builder: Values, source: Values, state: Values, num_pairs: Values, scale: Values, bf16: Values
) -> None:
    factor = splat(builder, scale)

    def scaled(half: Values) -> Values:
        return builder.fmul(half, factor)

    query, sums = builder.add(state, int_of(QUERY)), sums_of(builder, state, num_pairs)
    with builder.if_else(builder.icmp_signed("!=", bf16, int_of(0))) as blocks:
        for block, narrow in zip(blocks, (True, False), strict=True):
            with block:
                _each_pair(builder, source, query, num_pairs, narrow, scaled)
    _each_pair(builder, query, sums, num_pairs, False, lambda half: floats(0.0))
    store(builder, floats(float("-inf")), state, 4)
    store(builder, floats(0.0), builder.add(state, int_of(WEIGHTS_SUM)), 4)


@intrinsic
def close_query(context: Values, state: Values, out: Values, num_pairs: Values, bf16: Values) -> Values:
    """The weighted mean of the values as a row."""
    return instruction(types.void, "iiii", _close_query)


def _close_query(builder: Values, state: Values, out: Values, num_pairs: Values, bf16: Values) -> None:
    total = reduced(builder, load(builder, builder.add(state, int_of(WEIGHTS_SUM)), FLOATS, 4), builder.fadd)
    factor = splat(builder, builder.fdiv(F32(1.0), total))
    sums = sums_of(builder, state, num_pairs)

    def narrowed(index: Values, _: list[Values]) -> list[Values]:
        halves = (builder.fmul(half, factor) for half in pair_at(builder, sums, index, False))
        store(builder, joined(builder, *halves), offset(builder, out, index, int_of(2 * PAIR)), 2)
        return []

    with builder.if_else(builder.icmp_signed("!=", bf16, int_of(0))) as (as_bf16, as_fp32):
        with as_bf16:
            loop(builder, num_pairs, [], narrowed)
        with as_fp32:
            _each_pair(builder, sums, out, num_pairs, False, lambda half: builder.fmul(half, factor))
