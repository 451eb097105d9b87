"""Sixteen positions of a context folded into the running softmax of some queries, for numba code.

Owns: the order of every sum of attention. Refuses to know: blocks, tiles, masks' reasons, how a query's
memory is opened and closed (kernel_queries.py). Invariants: a query's result is the same bits whatever number
of queries is folded beside it, and whether keys are read as bf16 where they lie or from a copy in fp32.

Usage: `fold_bf16(3, places, keys, values, states, own_bytes, num_pairs, 0, 15, weights)`.
"""

from __future__ import annotations

from collections.abc import Sequence

from llvmlite import ir
from numba import types

from firstdiff.engine.kernel_ir import (
    F32,
    FLOATS,
    I16,
    I32,
    I64,
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
    pairwise_sums,
    prefetch,
    reduced,
    scalars,
    splat,
    store,
)
from firstdiff.engine.kernel_queries import PAIR, QUERY, WEIGHTS_SUM, pair_at, sums_of

QUERIES_MAX = 4
"""Queries in one fold: more of them do not fit into registers beside the keys."""

_KEYS_AT_ONCE = {1: 8, 2: 8, 3: 4, 4: 4}
"""By the number of queries: so many that the sums of all pairs live in registers."""

_HEADROOM = 8.0
"""How far scores may exceed what weights are relative to before the sums are scaled down: weights up to
e^8 cost no precision, and a new maximum seldom costs a pass over the sums."""


def _place(builder: Values, places: Values, index: int) -> Values:
    return builder.load(builder.inttoptr(builder.add(places, int_of(8 * index)), ir.PointerType(I64)))


def _ask(builder: Values, base: Values, places: Values, index: int, pair: Values) -> None:
    """For the same pair of the next sixteen: a whole line, as values are bf16.

    Line by line between sums: measured, asking for all lines at once halves the gain, and the first-level
    cache, where this sixteen is in use, is no better place.
    """
    row = builder.add(base, _place(builder, places, LANES + index))
    prefetch(builder, offset(builder, row, pair, int_of(2 * PAIR)), level=2)


def _visible(builder: Values, lowest: Values, highest: Values) -> Values:
    """The lanes lowest .. highest."""
    lanes = ir.Constant(INTS, list(range(LANES)))
    low, high = (
        builder.bitcast(splat(builder, builder.bitcast(builder.trunc(bound, I32), F32)), INTS)
        for bound in (lowest, highest)
    )
    return builder.and_(builder.icmp_signed(">=", lanes, low), builder.icmp_signed("<=", lanes, high))


def _scores(
    builder: Values, queries: list[Values], places: Values, keys: Values, num_pairs: Values, bf16: bool
) -> list[Values]:
    """For each query its products with sixteen keys: over vectors in turn, then neighbour by neighbour."""
    count = len(queries)
    at_once = _KEYS_AT_ONCE[count]
    partial: list[list[Values]] = [[] for _ in queries]
    for first in range(0, LANES, at_once):

        def step(index: Values, sums: list[Values], first: int = first) -> list[Values]:
            parts = [pair_at(builder, query, index, False) for query in queries]
            updated = []
            for key in range(at_once):
                row = builder.add(keys, _place(builder, places, first + key))
                halves = pair_at(builder, row, index, bf16)
                if bf16:
                    _ask(builder, keys, places, first + key, index)
                for part, total in zip(parts, sums[key * count : (key + 1) * count], strict=True):
                    for factor, half in zip(part, halves, strict=True):
                        total = call(builder, "fma", factor, half, total)
                    updated.append(total)
            return updated

        sums = loop(builder, num_pairs, [floats(0.0)] * (at_once * count), step)
        for query in range(count):
            partial[query].append(pairwise_sums(builder, sums[query::count]))
    return [pairwise_sums(builder, vectors, at_once) for vectors in partial]


def _make_room(builder: Values, scores: list[Values], states: list[Values], num_pairs: Values) -> None:
    """Make the weights of queries whose scores rise too far relative to their largest one."""
    references = [load(builder, state, FLOATS, 4) for state in states]
    beyond = [
        builder.fcmp_ordered(">", score, builder.fadd(reference, floats(_HEADROOM)))
        for score, reference in zip(scores, references, strict=True)
    ]
    either = beyond[0]
    for more in beyond[1:]:
        either = builder.or_(either, more)
    with builder.if_then(builder.icmp_unsigned("!=", builder.bitcast(either, I16), I16(0)), likely=False):
        for score, reference, high, state in zip(scores, references, beyond, states, strict=True):
            found = splat(builder, reduced(builder, score, lambda a, b: call(builder, "maxnum", a, b)))
            # A query that is not beyond is scaled by e^0, which is exactly 1.
            needed = builder.icmp_unsigned("!=", builder.bitcast(high, I16), I16(0))
            largest = builder.select(needed, found, reference)
            scale = exp(builder, builder.fsub(reference, largest))
            scale = builder.select(needed, scale, floats(1.0))
            store(builder, largest, state, 4)
            _scale_sums(builder, state, num_pairs, scale)


def _scale_sums(builder: Values, state: Values, num_pairs: Values, scale: Values) -> None:
    place = builder.add(state, int_of(WEIGHTS_SUM))
    store(builder, builder.fmul(load(builder, place, FLOATS, 4), scale), place, 4)
    sums = sums_of(builder, state, num_pairs)

    def step(index: Values, _: list[Values]) -> list[Values]:
        place = offset(builder, sums, index, int_of(4 * LANES))
        store(builder, builder.fmul(load(builder, place, FLOATS, 4), scale), place, 4)
        return []

    loop(builder, builder.mul(num_pairs, int_of(2)), [], step)


def _weigh(builder: Values, scores: Values, state: Values, weights: Values) -> None:
    """Store the weights of sixteen scores and add them to their sum."""
    weighed = exp(builder, builder.fsub(scores, load(builder, state, FLOATS, 4)))
    store(builder, weighed, weights, 4)
    place = builder.add(state, int_of(WEIGHTS_SUM))
    store(builder, builder.fadd(load(builder, place, FLOATS, 4), weighed), place, 4)


def _fold(builder: Values, count: int, arguments: Sequence[Values], *, bf16: bool) -> None:
    places, keys, values, states, own_bytes, num_pairs, lowest, highest, weights = arguments
    states_of = [offset(builder, states, own_bytes, int_of(query)) for query in range(count)]
    queries = [builder.add(state, int_of(QUERY)) for state in states_of]
    sums_of_all = [sums_of(builder, state, num_pairs) for state in states_of]
    weights_of = [builder.add(weights, int_of(64 * query)) for query in range(count)]
    visible = _visible(builder, lowest, highest)
    scores = [
        builder.select(visible, score, floats(float("-inf")))
        for score in _scores(builder, queries, places, keys, num_pairs, bf16)
    ]
    _make_room(builder, scores, states_of, num_pairs)
    for score, state, place in zip(scores, states_of, weights_of, strict=True):
        _weigh(builder, score, state, place)
    even = builder.icmp_signed("==", builder.and_(num_pairs, int_of(1)), int_of(0))
    with builder.if_else(even) as (by_two, one_by_one):
        for block, together in ((by_two, 2), (one_by_one, 1)):
            with block:
                _add_values(builder, places, values, num_pairs, sums_of_all, weights_of, together, bf16)


def _add_values(
    builder: Values,
    places: Values,
    values: Values,
    num_pairs: Values,
    sums_of_all: list[Values],
    weights_of: list[Values],
    together: int,
    bf16: bool,
) -> None:
    """sums += weights @ values, `together` pairs at once, position after position."""

    def step(index: Values, _: list[Values]) -> list[Values]:
        pairs = [offset(builder, int_of(i), index, int_of(together)) for i in range(together)]
        halves = [
            builder.add(builder.mul(pair, int_of(2)), int_of(half)) for pair in pairs for half in (0, 1)
        ]
        homes = [[offset(builder, sums, half, int_of(4 * LANES)) for half in halves] for sums in sums_of_all]
        totals = [[load(builder, home, FLOATS, 4) for home in row] for row in homes]
        for position in range(LANES):
            row = builder.add(values, _place(builder, places, position))
            parts = [half for pair in pairs for half in pair_at(builder, row, pair, bf16)]
            if bf16:
                for pair in pairs:
                    _ask(builder, values, places, position, pair)
            for query, weights in enumerate(weights_of):
                weight = builder.load(builder.gep(scalars(builder, weights), [int_of(position)]))
                totals[query] = [
                    call(builder, "fma", splat(builder, weight), part, total)
                    for part, total in zip(parts, totals[query], strict=True)
                ]
        for row, homes_of_row in zip(totals, homes, strict=True):
            for total, home in zip(row, homes_of_row, strict=True):
                store(builder, total, home, 4)
        return []

    loop(builder, builder.sdiv(num_pairs, int_of(together)), [], step)


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
    context: Values, count: Values, places: Values, keys: Values, values: Values, states: Values,
    own_bytes: Values, num_pairs: Values, lowest: Values, highest: Values, weights: Values,
) -> Values:  # fmt: skip
    """Fold positions lowest .. highest, of sixteen, into `count` (1 .. QUERIES_MAX) queries.

    `places` holds how far from `keys` and from `values` the sixteen rows lie, in bytes; all are read,
    visible or not. Sixteen more are asked for, to be read next. `weights` is room for a vector a query.
    """
    return instruction(types.void, "i" * 10, lambda *a: _fold_by_count(*a, bf16=True))


@intrinsic
def fold_fp32(
    context: Values, count: Values, places: Values, keys: Values, values: Values, states: Values,
    own_bytes: Values, num_pairs: Values, lowest: Values, highest: Values, weights: Values,
) -> Values:  # fmt: skip
    """As `fold_bf16`, with rows in fp32, and none asked for."""
    return instruction(types.void, "i" * 10, lambda *a: _fold_by_count(*a, bf16=False))
