"""Sixteen positions of a context folded into the running softmax of some queries, for numba code.

Owns: the order of every sum of attention. Refuses to know: blocks, tiles, masks' reasons. Invariants: a
query's result is the same bits whatever number of queries is folded beside it, and whether keys are read as
bf16 where they lie or from a copy in fp32.

Each query has memory of its own, `own_bytes` apart: a vector whose first two lanes are its largest score so
far and the sum of its weights; the scaled query; the weighted sum of the values, `num_vectors` vectors each.

Usage: `fold_bf16(3, rows, states, own_bytes, num_vectors, 0, 15, weights)`.
"""

from __future__ import annotations

from collections.abc import Sequence

from llvmlite import ir
from numba import types

from firstdiff.engine.kernel_ir import (
    F32,
    FLOATS,
    I64,
    INTS,
    LANES,
    Values,
    call,
    exp,
    extract,
    floats,
    instruction,
    int_of,
    intrinsic,
    load,
    loop,
    offset,
    pairwise_sums,
    reduced,
    splat,
    store,
    widened,
)

QUERIES_MAX = 4
"""Queries in one fold: more of them do not fit into registers beside the keys."""

_VECTORS_AT_ONCE = 4
"""Of the values, where a head has a multiple: a sum waits for its last addition, so many take turns."""

_KEYS_AT_ONCE = {1: 16, 2: 8, 3: 8, 4: 4}
"""By the number of queries: so many that the sums of all pairs live in registers."""


def _scalar(builder: Values, address: Values, kind: Values) -> Values:
    return builder.load(builder.inttoptr(address, ir.PointerType(kind)))


def _row(builder: Values, rows: Values, index: int, vector: Values, bf16: bool) -> Values:
    """Vector number `vector` of the row whose address is entry `index` of `rows`."""
    start = _scalar(builder, builder.add(rows, int_of(8 * index)), I64)
    address = offset(builder, start, vector, int_of(LANES * (2 if bf16 else 4)))
    return widened(builder, address) if bf16 else load(builder, address, FLOATS, 4)


def _visible(builder: Values, lowest: Values, highest: Values) -> Values:
    """The lanes lowest .. highest."""
    lanes = ir.Constant(INTS, list(range(LANES)))
    low, high = (
        builder.bitcast(splat(builder, builder.bitcast(builder.trunc(bound, ir.IntType(32)), F32)), INTS)
        for bound in (lowest, highest)
    )
    return builder.and_(builder.icmp_signed(">=", lanes, low), builder.icmp_signed("<=", lanes, high))


def _scores(
    builder: Values, queries: list[Values], rows: Values, num_vectors: Values, bf16: bool
) -> list[Values]:
    """For each query its products with sixteen keys: over vectors in turn, then neighbour by neighbour."""
    count = len(queries)
    at_once = _KEYS_AT_ONCE[count]
    partial: list[list[Values]] = [[] for _ in queries]
    for first in range(0, LANES, at_once):

        def step(index: Values, sums: list[Values], first: int = first) -> list[Values]:
            parts = [load(builder, offset(builder, query, index, int_of(64)), FLOATS, 4) for query in queries]
            updated = []
            for key in range(at_once):
                value = _row(builder, rows, first + key, index, bf16)
                for part, total in zip(parts, sums[key * count : (key + 1) * count], strict=True):
                    updated.append(call(builder, "fma", part, value, total))
            return updated

        sums = loop(builder, num_vectors, [floats(0.0)] * (at_once * count), step)
        for query in range(count):
            partial[query].append(pairwise_sums(builder, sums[query::count]))
    return [pairwise_sums(builder, parts) for parts in partial]


def _weigh(builder: Values, scores: Values, state: Values, weights: Values) -> Values:
    """Store the weights of sixteen scores, update the query's state; returns what old sums shrink by."""
    sum_place = builder.add(state, int_of(4))
    so_far, total = _scalar(builder, state, F32), _scalar(builder, sum_place, F32)
    found = reduced(builder, scores, lambda a, b: call(builder, "maxnum", a, b))
    # A NaN is not larger, and comes back through its own weight.
    largest = builder.select(builder.fcmp_ordered(">", found, so_far), found, so_far)
    scale = exp(builder, splat(builder, builder.fsub(so_far, largest)))
    weighed = exp(builder, builder.fsub(scores, splat(builder, largest)))
    store(builder, weighed, weights, 4)
    added = reduced(builder, weighed, builder.fadd)
    shrunk = builder.fmul(total, extract(builder, scale, 0))
    store(builder, largest, state, 4)
    store(builder, builder.fadd(shrunk, added), sum_place, 4)
    return scale


def _fold(builder: Values, count: int, arguments: Sequence[Values], *, bf16: bool) -> None:
    rows, states, own_bytes, num_vectors, lowest, highest, weights = arguments
    states_of = [offset(builder, states, own_bytes, int_of(query)) for query in range(count)]
    queries = [builder.add(state, int_of(64)) for state in states_of]
    sums_of = [offset(builder, query, num_vectors, int_of(64)) for query in queries]
    weights_of = [builder.add(weights, int_of(64 * query)) for query in range(count)]
    visible = _visible(builder, lowest, highest)
    scales = [
        _weigh(builder, builder.select(visible, scores, floats(float("-inf"))), state, place)
        for scores, state, place in zip(
            _scores(builder, queries, rows, num_vectors, bf16), states_of, weights_of, strict=True
        )
    ]
    values = builder.add(rows, int_of(8 * LANES))
    fours = builder.icmp_signed("==", builder.and_(num_vectors, int_of(_VECTORS_AT_ONCE - 1)), int_of(0))
    with builder.if_else(fours) as (in_fours, one_by_one):
        for block, together in ((in_fours, _VECTORS_AT_ONCE), (one_by_one, 1)):
            with block:
                _add_values(builder, values, num_vectors, sums_of, scales, weights_of, together, bf16)


def _add_values(
    builder: Values,
    values: Values,
    num_vectors: Values,
    sums_of: list[Values],
    scales: list[Values],
    weights_of: list[Values],
    together: int,
    bf16: bool,
) -> None:
    """sums = sums * scale + weights @ values, `together` vectors at once, position after position."""

    def step(index: Values, _: list[Values]) -> list[Values]:
        vectors = [offset(builder, int_of(i), index, int_of(together)) for i in range(together)]
        places = [[offset(builder, sums, v, int_of(64)) for v in vectors] for sums in sums_of]
        totals = [
            [builder.fmul(load(builder, place, FLOATS, 4), scale) for place in row]
            for row, scale in zip(places, scales, strict=True)
        ]
        for position in range(LANES):
            parts = [_row(builder, values, position, vector, bf16) for vector in vectors]
            for query, weights in enumerate(weights_of):
                weight = splat(builder, _scalar(builder, builder.add(weights, int_of(4 * position)), F32))
                totals[query] = [
                    call(builder, "fma", weight, part, total)
                    for part, total in zip(parts, totals[query], strict=True)
                ]
        for row, row_places in zip(totals, places, strict=True):
            for total, place in zip(row, row_places, strict=True):
                store(builder, total, place, 4)
        return []

    loop(builder, builder.sdiv(num_vectors, int_of(together)), [], step)


def _fold_by_count(builder: Values, count: Values, *arguments: Values, bf16: bool) -> None:
    done = builder.append_basic_block("done")
    switch = builder.switch(count, done)
    for number in range(1, QUERIES_MAX + 1):
        block = builder.append_basic_block(f"queries{number}")
        switch.add_case(int_of(number), block)
        builder.position_at_end(block)
        _fold(builder, number, arguments, bf16=bf16)
        builder.branch(done)
    builder.position_at_end(done)


@intrinsic
def fold_bf16(
    context: Values, count: Values, rows: Values, states: Values, own_bytes: Values, num_vectors: Values,
    lowest: Values, highest: Values, weights: Values,
) -> Values:  # fmt: skip
    """Fold positions lowest .. highest, of sixteen, into `count` (1 .. QUERIES_MAX) queries.

    `rows` holds the addresses of sixteen rows of K, then of V, in bf16; all are read, visible or not.
    `weights` is room for a vector a query.
    """
    return instruction(types.void, "i" * 8, lambda *a: _fold_by_count(*a, bf16=True))


@intrinsic
def fold_fp32(
    context: Values, count: Values, rows: Values, states: Values, own_bytes: Values, num_vectors: Values,
    lowest: Values, highest: Values, weights: Values,
) -> Values:  # fmt: skip
    """As `fold_bf16`, with rows in fp32."""
    return instruction(types.void, "i" * 8, lambda *a: _fold_by_count(*a, bf16=False))
