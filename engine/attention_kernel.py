"""Attention by the compiled CPU kernels: KV blocks are read where they lie.

Owns: the plan of a step: slots, tiles of rows, their shares among threads. Refuses to know: how a tile is
computed (kernels_attention.py), anything beyond `attention.py`. Invariants: equal to TorchAttention up to
rounding; a row's bits do not depend on batch, chunks, blocks or threads (tests/parity).

Usage: `attention = KernelAttention(cache, rules, threads=2)`.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from firstdiff.engine import kernels_attention, kernels_parallel
from firstdiff.engine.attention import AttentionRules, KVCache
from firstdiff.engine.batch import Batch

ROWS_OF_TILE = 8
"""Rows of a prefill chunk that share each reading of K and V."""


class KernelAttention:
    """One pass over each tile's context, a KV head at a time."""

    def __init__(self, cache: KVCache, rules: AttentionRules | None = None, *, threads: int = 1) -> None:
        self.rules = rules or cache.plain_rules
        self._cache = cache
        self._threads = threads
        self._batch: Batch | None = None
        self._slots: NDArray[np.int64] = np.zeros(0, np.int64)
        self._tiles: NDArray[np.int64] = np.zeros((0, kernels_attention.TILE_FIELDS), np.int64)
        self._bounds: dict[int | None, NDArray[np.int64]] = {}

    def plan(self, batch: Batch) -> None:
        self._batch = batch
        offsets = np.arange(self._cache.block_size)
        slots: list[NDArray[np.int64]] = []
        tiles: list[tuple[int, int, int, int]] = []
        begin = 0
        for row, table in enumerate(batch.block_tables):
            tiles.append((row, 1, batch.context_lens[row] - 1, begin))
            begin += self._add_slots(slots, np.array(table), offsets)
        for span in batch.prefills:
            for first in range(0, span.num_rows, ROWS_OF_TILE):
                count = min(ROWS_OF_TILE, span.num_rows - first)
                tiles.append((span.row + first, count, span.start + first, begin))
            begin += self._add_slots(slots, span.block_table.numpy(), offsets)
        self._slots = np.concatenate(slots)
        self._tiles = np.array(tiles, np.int64)
        self._bounds = {window: self._shares(window) for window in set(self.rules.windows)}

    def _add_slots(
        self, slots: list[NDArray[np.int64]], table: NDArray[np.int64], offsets: NDArray[np.int64]
    ) -> int:
        slots.append((table[:, None] * len(offsets) + offsets).ravel())
        return len(slots[-1])

    def _shares(self, window: int | None) -> NDArray[np.int64]:
        """[threads + 1]: which units (tile, KV head) each thread computes, so that all read about as much."""
        num_kv_heads = self._cache.keys.shape[3]
        reads = self._tiles[:, 2] + self._tiles[:, 1]
        if window is not None:
            reads = np.minimum(reads, window + self._tiles[:, 1])
        # Sixteen for what a unit costs however short it is.
        costs = np.repeat((reads + 16) * self._tiles[:, 1], num_kv_heads).cumsum()
        targets = costs[-1] * np.arange(1, self._threads) / self._threads
        return np.concatenate(([0], np.searchsorted(costs, targets), [len(costs)])).astype(np.int64)

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: int) -> torch.Tensor:
        batch, item = self._batch, q.element_size()
        assert batch is not None
        num_rows, num_heads, head_dim = q.shape
        num_kv_heads = k.shape[1]
        assert all(tensor.stride(2) == 1 and tensor.stride(1) == head_dim for tensor in (q, k, v))
        keys, values = self._cache.keys[layer].data_ptr(), self._cache.values[layer].data_ptr()
        out = torch.empty(num_rows, num_heads * head_dim, dtype=q.dtype)
        window = self.rules.windows[layer]
        written = (
            k.data_ptr(), k.stride(0) * item, v.data_ptr(), v.stride(0) * item,
            batch.slot_mapping.data_ptr(), keys, values, num_rows, num_kv_heads * head_dim * item,
        )  # fmt: skip
        read = (
            q.data_ptr(), q.stride(0) * item, keys, values, self._slots.ctypes.data, self._tiles.ctypes.data,
            self._bounds[window].ctypes.data, out.data_ptr(), ROWS_OF_TILE, window or 0, num_heads,
            num_kv_heads, head_dim, self.rules.scale, int(item == 2),
        )  # fmt: skip
        kernels_attention.store(0, 1, *written)
        if self._threads == 1:
            kernels_attention.attend(0, 1, *read)
        else:
            kernels_parallel.attend(self._threads, *read)
        return out
