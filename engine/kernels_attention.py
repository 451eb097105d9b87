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
from firstdiff.engine.kernel_ir import LANES, floats_at, ints_at, words_at
from firstdiff.engine.kernel_loops import fetch
from firstdiff.engine.kernels import first_of, keep, read_row, write_row

ROWS_BYTES = 2 * LANES * 8
"""Of the addresses of a group's K and V."""

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
def address_group(
    keys: int, values: int, slots: int, group: int, last: int, rows: int, slot_bytes: int, num_bytes: int
) -> None:
    """Where a group's K, then V, lie; ask for `num_bytes` of each; positions beyond `last` repeat it."""
    places, addresses = ints_at(slots), ints_at(rows)
    for index in range(LANES):
        place = places[min(group * LANES + index, last)] * slot_bytes
        key, value = keys + place, values + place
        addresses[index] = key
        addresses[LANES + index] = value
        for line in range(0, num_bytes, 64):
            fetch(key + line)
            fetch(value + line)


@compiled
def address_head(rows: int, own: int, begin: int) -> None:
    """The group's addresses for the head that begins `begin` bytes into each slot."""
    addresses, owned = ints_at(rows), ints_at(own)
    for index in range(2 * LANES):
        owned[index] = addresses[index] + begin


@compiled
def widen_group(rows: int, copies: int, head_dim: int, padded: int, bf16: int) -> None:
    """Copy the rows to fp32 [32, padded], and let `rows` point there."""
    addresses = ints_at(rows)
    for index in range(2 * LANES):
        copy = copies + index * padded * 4
        read_row(addresses[index], copy, head_dim, bf16)
        addresses[index] = copy


@compiled
def begin_row(source: int, query: int, state: int, sums: int, width: int, scale: float, bf16: int) -> None:
    """A row's scaled query, and the state of no position seen."""
    read_row(source, query, width, bf16)
    values, totals, so_far = floats_at(query), floats_at(sums), floats_at(state)
    for d in range(width):
        values[d] *= np.float32(scale)
        totals[d] = np.float32(0.0)
    so_far[0], so_far[1] = np.float32(-np.inf), np.float32(0.0)


@compiled
def end_row(sums: int, state: int, out: int, width: int, bf16: int) -> None:
    """The weighted mean of the values."""
    totals, total = floats_at(sums), floats_at(state)[1]
    for d in range(width):
        totals[d] /= total
    write_row(sums, out, width, bf16)


@compiled
def fold_group(
    rows: int, states: int, own_bytes: int, row_states: int, num_vectors: int, begin: int, num_rows: int,
    position: int, window: int, sharing: int, weights: int, in_place: bool,
) -> None:  # fmt: skip
    """Fold the positions from `begin` on into the rows' queries of one KV head, `row_states` a row apart."""
    for row in range(num_rows):
        highest = position + row
        lowest = max(0, highest - window + 1) if window > 0 else 0
        if begin > highest or begin + LANES <= lowest:
            continue
        low, high = lowest - begin, min(highest - begin, LANES)
        head = 0
        while head < sharing:
            together = min(QUERIES_MAX, sharing - head)
            state = states + (row * row_states + head) * own_bytes
            if in_place:
                fold_bf16(together, rows, state, own_bytes, num_vectors, low, high, weights)
            else:
                fold_fp32(together, rows, state, own_bytes, num_vectors, low, high, weights)
            head += together


@compiled
def attend_tile(
    q: int, q_stride: int, keys: int, values: int, slots: int, out: int, out_stride: int, num_rows: int,
    position: int, window: int, num_kv_heads: int, sharing: int, head_dim: int, slot_bytes: int,
    scale: float, bf16: int, scratch: int,
) -> None:  # fmt: skip
    """Rows at position, position + 1, ... for `num_kv_heads` KV heads with `sharing` query heads each.

    `scratch` is zeroed: addresses of this and the next group's rows and of one head's, weights, copies of the
    rows, then what each query has.
    """
    num_vectors = (head_dim + LANES - 1) // LANES
    padded = num_vectors * LANES
    head_bytes = head_dim * (2 if bf16 else 4)
    own_rows = scratch + 2 * ROWS_BYTES
    weights = own_rows + ROWS_BYTES
    copies = weights + QUERIES_MAX * LANES * 4
    states = copies + 2 * LANES * padded * 4
    own_bytes = (2 * padded + LANES) * 4
    num_heads = num_kv_heads * sharing
    for index in range(num_rows * num_heads):
        state = states + index * own_bytes
        query, sums = state + LANES * 4, state + (LANES + padded) * 4
        source = q + index // num_heads * q_stride + index % num_heads * head_bytes
        begin_row(source, query, state, sums, head_dim, scale, bf16)
    # Rows that fill whole vectors are read where they lie; a copy in fp32 pays when many queries share it.
    copied = head_dim != padded or (bf16 != 0 and num_rows > 1)
    last = position + num_rows - 1
    first = max(0, position - window + 1) if window > 0 else 0
    rows, following, num_bytes = scratch, scratch + ROWS_BYTES, num_kv_heads * head_bytes
    address_group(keys, values, slots, first // LANES, last, following, slot_bytes, num_bytes)
    for group in range(first // LANES, last // LANES + 1):
        rows, following = following, rows
        # The next group comes from memory while this one is computed.
        if group < last // LANES:
            address_group(keys, values, slots, group + 1, last, following, slot_bytes, num_bytes)
        for kv_head in range(num_kv_heads):
            address_head(rows, own_rows, kv_head * head_bytes)
            if copied:
                widen_group(own_rows, copies, head_dim, padded, bf16)
            fold_group(
                own_rows, states + kv_head * sharing * own_bytes, own_bytes, num_heads, num_vectors,
                group * LANES, num_rows, position, window, sharing, weights, bf16 != 0 and not copied,
            )  # fmt: skip
    for index in range(num_rows * num_heads):
        state = states + index * own_bytes
        place = out + index // num_heads * out_stride + index % num_heads * head_bytes
        end_row(state + (LANES + padded) * 4, state, place, head_dim, bf16)


@compiled
def attend(
    part: int, num_parts: int, q: int, q_stride: int, keys: int, values: int, slots: int, tiles: int,
    bounds: int, out: int, max_rows: int, window: int, num_heads: int, num_kv_heads: int, head_dim: int,
    scale: float, bf16: int,
) -> None:  # fmt: skip
    """Attention of the tiles' rows; a part is the units `bounds[part] .. bounds[part + 1]`.

    Unit u is KV head u % num_kv_heads of tile u // num_kv_heads. A decoding row takes its heads together, so
    that its slots are read from end to end; rows of a chunk share the copies of one head.
    """
    sharing = num_heads // num_kv_heads
    padded = (head_dim + LANES - 1) // LANES * LANES
    own = 2 * padded + LANES
    shared = 3 * ROWS_BYTES // 4 + QUERIES_MAX * LANES + 2 * LANES * padded
    room = np.zeros(shared + max(max_rows * sharing, num_heads) * own + LANES, np.float32)
    # Vectors that lie across two cache lines would cost twice as much to read.
    scratch = (room.ctypes.data + 63) // 64 * 64
    fields, limits = ints_at(tiles), ints_at(bounds)
    head_bytes = head_dim * (2 if bf16 else 4)
    unit = limits[part]
    while unit < limits[part + 1]:
        tile, kv_head = unit // num_kv_heads * TILE_FIELDS, unit % num_kv_heads
        row, num_rows = fields[tile], fields[tile + 1]
        together = min(num_kv_heads - kv_head, limits[part + 1] - unit) if num_rows == 1 else 1
        offset, own_offset = kv_head * head_bytes, kv_head * sharing * head_bytes
        attend_tile(
            q + row * q_stride + own_offset, q_stride, keys + offset, values + offset,
            slots + fields[tile + 3] * 8, out + row * num_heads * head_bytes + own_offset,
            num_heads * head_bytes, num_rows, fields[tile + 2], window, together, sharing, head_dim,
            num_kv_heads * head_bytes, scale, bf16, scratch,
        )  # fmt: skip
        unit += together
    keep(room)


@compiled
def forward(
    num_threads: int, q: int, q_stride: int, k: int, k_stride: int, v: int, v_stride: int, keys: int,
    values: int, bounds: int, window: int, scale: float, bf16: int, written: int, slots: int, tiles: int,
    out: int, num_rows: int, max_rows: int, num_heads: int, num_kv_heads: int, head_dim: int,
) -> None:  # fmt: skip
    """`store` to the slots `written`, then all of `attend`, by the calling thread; `num_threads` is 1."""
    row_bytes = num_kv_heads * head_dim * (2 if bf16 else 4)
    store(0, num_threads, k, k_stride, v, v_stride, written, keys, values, num_rows, row_bytes)
    attend(
        0, num_threads, q, q_stride, keys, values, slots, tiles, bounds, out, max_rows, window, num_heads,
        num_kv_heads, head_dim, scale, bf16,
    )  # fmt: skip
