"""The CPU kernels of paged attention: KV is read in place, sixteen positions at a time.

Owns: writing K and V into slots, and softmax(q K) V over a sequence's slots. Refuses to know: torch, block
tables, scheduling. Invariants: positions are taken in groups that begin at multiples of 16, in rising order,
with a running maximum and sum in fp32: how a context was cut into chunks, or which rows are computed
together, changes no bit; a row reads no slot beyond its own group, and what it may not see weighs exactly 0.

Memory is given by address as in kernels.py. A tile is some neighbouring rows of one sequence, described by
four int64: see TILE_FIELDS. `window` is how many positions a row sees, 0 for all.

Usage: `store(...)`, then `attend(part, num_parts, ...)` for all parts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from firstdiff.engine.kernel_compiler import compiled
from firstdiff.engine.kernel_ir import LANES, ints_at, words_at
from firstdiff.engine.kernel_loops import add_weighted, dots, exp_minus, largest_of
from firstdiff.engine.kernels import first_of, read_row, write_row

if TYPE_CHECKING:
    from numpy.typing import NDArray

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
def hide(scores: NDArray[np.float32], group: int, lowest: int, highest: int) -> None:
    """-inf for the positions of a group that are outside lowest .. highest."""
    for index in range(LANES):
        position = group * LANES + index
        if position < lowest or position > highest:
            scores[index] = -np.inf


@compiled
def load_group(
    source: int, slots: int, group: int, last: int, out: int, slot_bytes: int, width: int, padded: int,
    bf16: int,
) -> None:  # fmt: skip
    """One group's K or V of one head as fp32 [16, padded]; positions beyond `last` repeat it."""
    places = ints_at(slots)
    for index in range(LANES):
        slot = places[min(group * LANES + index, last)]
        read_row(source + slot * slot_bytes, out + index * padded * 4, width, bf16)


@compiled
def add_group(
    scores: NDArray[np.float32], values: int, state: NDArray[np.float32], sums: int, num_vectors: int
) -> None:
    """Fold one group into a row: `state` holds its largest score so far and the sum of its weights."""
    largest = largest_of(scores.ctypes.data)
    scale = np.float32(1.0)
    # A NaN must not be skipped by the comparison: it comes back through `exp_minus`.
    if largest > state[0]:
        scale = np.float32(np.exp(state[0] - largest))
        state[0] = largest
    total = exp_minus(scores.ctypes.data, state[0])
    state[1] = state[1] * scale + total
    add_weighted(scores.ctypes.data, values, sums, scale, num_vectors)


@compiled
def attend_tile(
    q: int, q_stride: int, keys: int, values: int, slots: int, out: int, out_stride: int, num_rows: int,
    position: int, window: int, num_heads: int, head_dim: int, slot_bytes: int, scale: float, bf16: int,
    scratch: NDArray[np.float32],
) -> None:  # fmt: skip
    """Rows at position, position + 1, ... for the `num_heads` query heads that share one KV head."""
    padded = (head_dim + LANES - 1) // LANES * LANES
    num_vectors = padded // LANES
    item = 2 if bf16 else 4
    count = num_rows * num_heads
    queries = scratch[: count * padded].reshape((count, padded))
    sums = scratch[count * padded : 2 * count * padded].reshape((count, padded))
    rest = scratch[2 * count * padded :]
    states = rest[: 2 * count].reshape((count, 2))
    group_keys = rest[2 * count :]
    group_values = rest[2 * count + LANES * padded :]
    scores = rest[2 * count + 2 * LANES * padded :][:LANES]
    queries[:] = np.float32(0.0)
    sums[:] = np.float32(0.0)
    for index in range(count):
        states[index, 0], states[index, 1] = -np.inf, 0.0
        source = q + index // num_heads * q_stride + index % num_heads * head_dim * item
        read_row(source, queries[index].ctypes.data, head_dim, bf16)
        for d in range(head_dim):
            queries[index, d] *= np.float32(scale)
    last = position + num_rows - 1
    first = max(0, position - window + 1) if window > 0 else 0
    for group in range(first // LANES, last // LANES + 1):
        load_group(keys, slots, group, last, group_keys.ctypes.data, slot_bytes, head_dim, padded, bf16)
        load_group(values, slots, group, last, group_values.ctypes.data, slot_bytes, head_dim, padded, bf16)
        for index in range(count):
            highest = position + index // num_heads
            lowest = max(0, highest - window + 1) if window > 0 else 0
            if group * LANES > highest or group * LANES + LANES <= lowest:
                continue
            dots(
                queries[index].ctypes.data,
                group_keys.ctypes.data,
                padded * 4,
                scores.ctypes.data,
                num_vectors,
            )
            if group * LANES < lowest or group * LANES + LANES - 1 > highest:
                hide(scores, group, lowest, highest)
            add_group(scores, group_values.ctypes.data, states[index], sums[index].ctypes.data, num_vectors)
    for index in range(count):
        for d in range(head_dim):
            sums[index, d] /= states[index, 1]
        place = out + index // num_heads * out_stride + index % num_heads * head_dim * item
        write_row(sums[index].ctypes.data, place, head_dim, bf16)


@compiled
def attend(
    part: int, num_parts: int, q: int, q_stride: int, keys: int, values: int, slots: int, tiles: int,
    bounds: int, out: int, max_rows: int, window: int, num_heads: int, num_kv_heads: int, head_dim: int,
    scale: float, bf16: int,
) -> None:  # fmt: skip
    """Attention of the tiles' rows; a part is the units `bounds[part] .. bounds[part + 1]`.

    Unit u is KV head u % num_kv_heads of tile u // num_kv_heads.
    """
    item = 2 if bf16 else 4
    group = num_heads // num_kv_heads
    padded = (head_dim + LANES - 1) // LANES * LANES
    count = max_rows * group
    scratch = np.zeros(2 * count * (padded + 1) + 2 * LANES * padded + LANES, np.float32)
    fields, limits = ints_at(tiles), ints_at(bounds)
    slot_bytes, head_bytes = num_kv_heads * head_dim * item, head_dim * item
    out_stride = num_heads * head_bytes
    for unit in range(limits[part], limits[part + 1]):
        tile, kv_head = unit // num_kv_heads * TILE_FIELDS, unit % num_kv_heads
        row = fields[tile]
        attend_tile(
            q + row * q_stride + kv_head * group * head_bytes, q_stride, keys + kv_head * head_bytes,
            values + kv_head * head_bytes, slots + fields[tile + 3] * 8,
            out + row * out_stride + kv_head * group * head_bytes, out_stride, fields[tile + 1],
            fields[tile + 2], window, group, head_dim, slot_bytes, scale, bf16, scratch,
        )  # fmt: skip
