"""The CPU kernels of paged attention: KV is read in place, sixteen positions at a time.

Owns: writing K and V into slots, and softmax(q K) V over a sequence's slots. Refuses to know: torch, block
tables, scheduling. Invariants: positions are taken in groups that begin at multiples of 16, in rising order,
with a running maximum and sum in fp32: how a context was cut into chunks, or which rows are computed
together, changes no bit; a row reads no slot beyond its own group, and what it may not see weighs exactly 0.

Memory is given by address as in kernels.py. A tile is some neighbouring rows of one sequence, described by
four int64: see TILE_FIELDS. `window` is how many positions a row sees, 0 for all.

Usage: `store(...)`, then `attend(part, num_parts, ...)` for all parts; or `forward(1, ...)`.
"""

from __future__ import annotations

import numpy as np

from firstdiff.engine.kernel_compiler import compiled
from firstdiff.engine.kernel_folds import QUERIES_MAX, fold_bf16, fold_fp32
from firstdiff.engine.kernel_ir import LANES, ints_at, words_at
from firstdiff.engine.kernel_queries import PAIR, close_query, open_query, split_row
from firstdiff.engine.kernels import first_of, keep, read_row, write_row

TILE_FIELDS = 4
"""Of a tile: first row, number of rows, position of the first row, index of its sequence's first slot."""


@compiled
def store(
    part: int, num_parts: int, k: int, k_stride: int, v: int, v_stride: int, slots: int, keys: int,
    values: int, num_rows: int, row_bytes: int,
) -> None:  # fmt: skip
    """Copy rows of k and v to their slots."""
    places = ints_at(slots)
    num_words = row_bytes // 2
    for row in range(first_of(part, num_parts, num_rows), first_of(part + 1, num_parts, num_rows)):
        from_k, to_k = words_at(k + row * k_stride), words_at(keys + places[row] * row_bytes)
        for index in range(num_words):
            to_k[index] = from_k[index]
        from_v, to_v = words_at(v + row * v_stride), words_at(values + places[row] * row_bytes)
        for index in range(num_words):
            to_v[index] = from_v[index]


@compiled
def copy_rows(
    places: int, source: int, copies: int, head_dim: int, padded: int, is_split: int, bf16: int
) -> None:
    """Copy sixteen rows to fp32 without gaps."""
    distances = ints_at(places)
    for index in range(LANES):
        row, copy = source + distances[index], copies + index * padded * 4
        if is_split:
            split_row(row, copy, padded // PAIR)
        else:
            read_row(row, copy, head_dim, bf16)


@compiled
def fold_rows(
    places: int, keys: int, values: int, states: int, own_bytes: int, num_pairs: int, begin: int,
    num_rows: int, position: int, window: int, num_heads: int, weights: int, bf16: int,
) -> None:  # fmt: skip
    """Fold the positions begin .. begin + 16 into the queries of rows at position, position + 1, ..."""
    for row in range(num_rows):
        highest = position + row
        lowest = max(0, highest - window + 1) if window > 0 else 0
        if begin > highest or begin + LANES <= lowest:
            continue
        low, high = lowest - begin, min(highest - begin, LANES)
        for head in range(0, num_heads, QUERIES_MAX):
            together = min(QUERIES_MAX, num_heads - head)
            state = states + (row * num_heads + head) * own_bytes
            if bf16:
                fold_bf16(together, places, keys, values, state, own_bytes, num_pairs, low, high, weights)
            else:
                fold_fp32(together, places, keys, values, state, own_bytes, num_pairs, low, high, weights)


@compiled
def attend_tile(
    q: int, q_stride: int, keys: int, values: int, places: int, out: int, out_stride: int, num_rows: int,
    position: int, window: int, num_kv_heads: int, num_heads: int, head_dim: int, scale: float, bf16: int,
    scratch: int,
) -> None:  # fmt: skip
    """Rows at position, position + 1, ... for neighbouring KV heads, each with `num_heads` query heads.

    `scratch` is zeroed, and has room for what `attend` says.
    """
    padded = (head_dim + PAIR - 1) // PAIR * PAIR
    num_pairs = padded // PAIR
    head_bytes = head_dim * (2 if bf16 else 4)
    own_bytes = (2 * padded + 2 * LANES) * 4
    whole = head_dim == padded
    # Rows that fill whole pairs are read where they lie; a copy in fp32 pays when many queries share it.
    copied = not whole or (bf16 != 0 and num_rows > 1)
    weights, steps = scratch, scratch + QUERIES_MAX * LANES * 4
    copies = steps + 8 * LANES
    states = copies + 2 * LANES * padded * 4
    offsets = ints_at(steps)
    for index in range(LANES):
        offsets[index] = index * padded * 4
    state = states
    for kv_head in range(num_kv_heads):
        for row in range(num_rows):
            source = q + row * q_stride + kv_head * num_heads * head_bytes
            for _ in range(num_heads):
                if whole:
                    open_query(source, state, num_pairs, np.float32(scale), bf16)
                else:
                    read_row(source, copies, head_dim, bf16)
                    open_query(copies, state, num_pairs, np.float32(scale), 0)
                source += head_bytes
                state += own_bytes
    first = max(0, position - window + 1) if window > 0 else 0
    for group in range(first // LANES, (position + num_rows - 1) // LANES + 1):
        for kv_head in range(num_kv_heads):
            rows = places + group * LANES * 8
            from_keys, from_values = keys + kv_head * head_bytes, values + kv_head * head_bytes
            if copied:
                copied_values = copies + LANES * padded * 4
                copy_rows(rows, from_keys, copies, head_dim, padded, whole and bf16, bf16)
                copy_rows(rows, from_values, copied_values, head_dim, padded, whole and bf16, bf16)
                rows, from_keys, from_values = steps, copies, copied_values
            fold_rows(
                rows, from_keys, from_values, states + kv_head * num_rows * num_heads * own_bytes, own_bytes,
                num_pairs, group * LANES, num_rows, position, window, num_heads, weights, bf16 and not copied,
            )  # fmt: skip
    state = states
    for kv_head in range(num_kv_heads):
        for row in range(num_rows):
            place = out + row * out_stride + kv_head * num_heads * head_bytes
            for _ in range(num_heads):
                if whole:
                    close_query(state, place, num_pairs, bf16)
                else:
                    sums = state + (2 * LANES + padded) * 4
                    close_query(state, sums, num_pairs, 0)
                    write_row(sums, place, head_dim, bf16)
                place += head_bytes
                state += own_bytes


@compiled
def attend(
    part: int, num_parts: int, q: int, q_stride: int, keys: int, values: int, places: int, tiles: int,
    bounds: int, out: int, max_rows: int, window: int, num_heads: int, num_kv_heads: int, head_dim: int,
    scale: float, bf16: int,
) -> None:  # fmt: skip
    """Attention of the tiles' rows; a part is the units `bounds[part] .. bounds[part + 1]`.

    Unit u is KV head u % num_kv_heads of tile u // num_kv_heads.
    """
    group = num_heads // num_kv_heads
    padded = (head_dim + PAIR - 1) // PAIR * PAIR
    # Weights, distances of copied rows, copies, then what each query has.
    shared = QUERIES_MAX * LANES + 2 * LANES + 2 * LANES * padded
    queries = max(max_rows * group, num_heads)
    room = np.zeros(shared + queries * (2 * padded + 2 * LANES) + LANES, np.float32)
    # Vectors that lie across two cache lines would cost twice as much to read.
    scratch = (room.ctypes.data + 63) // 64 * 64
    fields, limits = ints_at(tiles), ints_at(bounds)
    head_bytes = head_dim * (2 if bf16 else 4)
    row_bytes = num_heads * head_bytes
    unit = limits[part]
    while unit < limits[part + 1]:
        tile, kv_head = unit // num_kv_heads * TILE_FIELDS, unit % num_kv_heads
        row, num_rows = fields[tile], fields[tile + 1]
        # One row reads its context once, so all heads of a position are read together, as they lie.
        together = min(num_kv_heads - kv_head, limits[part + 1] - unit) if num_rows == 1 else 1
        own = kv_head * group * head_bytes
        attend_tile(
            q + row * q_stride + own, q_stride, keys + kv_head * head_bytes, values + kv_head * head_bytes,
            places + fields[tile + 3] * 8, out + row * row_bytes + own, row_bytes, num_rows,
            fields[tile + 2], window, together, group, head_dim, scale, bf16, scratch,
        )  # fmt: skip
        unit += together
    keep(room)


@compiled
def forward(
    num_threads: int, q: int, q_stride: int, k: int, k_stride: int, v: int, v_stride: int, keys: int,
    values: int, bounds: int, window: int, scale: float, bf16: int, written: int, places: int, tiles: int,
    out: int, num_rows: int, max_rows: int, num_heads: int, num_kv_heads: int, head_dim: int,
) -> None:  # fmt: skip
    """`store` to the slots `written`, then all of `attend`, by the calling thread; `num_threads` is 1."""
    row_bytes = num_kv_heads * head_dim * (2 if bf16 else 4)
    store(0, num_threads, k, k_stride, v, v_stride, written, keys, values, num_rows, row_bytes)
    attend(
        0, num_threads, q, q_stride, keys, values, places, tiles, bounds, out, max_rows, window, num_heads,
        num_kv_heads, head_dim, scale, bf16,
    )  # fmt: skip
