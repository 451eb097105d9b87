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
        self._forward = kernels_attention.forward if threads == 1 else kernels_parallel.forward
        self._layers = [
            (keys.data_ptr(), values.data_ptr(), window)
            for keys, values, window in zip(cache.keys, cache.values, self.rules.windows, strict=True)
        ]
        self._batch: Batch | None = None
        self._slots: NDArray[np.int64] = np.zeros(0, np.int64)
        self._tiles: NDArray[np.int64] = np.zeros((0, kernels_attention.TILE_FIELDS), np.int64)
        self._bounds: dict[int | None, NDArray[np.int64]] = {}
        self._bounds_at: dict[int | None, int] = {}
        self._out: torch.Tensor | None = None
        self._arguments: tuple[int, ...] = ()
        """Those of the kernel that a step's layers share."""

    def plan(self, batch: Batch) -> None:
        self._batch, self._out = batch, None
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
        self._bounds_at = {window: shares.ctypes.data for window, shares in self._bounds.items()}

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
        """As in `attention.py`; the result lies in memory that the next call overwrites."""
        if self._out is None:
            self._out, self._arguments = self._begin(q)
        keys, values, window = self._layers[layer]
        (q_stride, q_head, _), (k_stride, k_head, _) = q.stride(), k.stride()
        v_stride, v_head, _ = v.stride()
        item = q.element_size()
        assert q_head == k_head == v_head == q.shape[2]
        self._forward(
            self._threads, q.data_ptr(), q_stride * item, k.data_ptr(), k_stride * item, v.data_ptr(),
            v_stride * item, keys, values, self._bounds_at[window], window or 0, self.rules.scale,
            int(item == 2), *self._arguments,
        )  # fmt: skip
        return self._out

    def _begin(self, q: torch.Tensor) -> tuple[torch.Tensor, tuple[int, ...]]:
        """Room for the step's results, and the arguments that its layers share."""
        batch = self._batch
        assert batch is not None
        num_rows, num_heads, head_dim = q.shape
        out = torch.empty(num_rows, num_heads * head_dim, dtype=q.dtype)
        return out, (
            batch.slot_mapping.data_ptr(), self._slots.ctypes.data, self._tiles.ctypes.data, out.data_ptr(),
            num_rows, ROWS_OF_TILE, num_heads, self._cache.keys.shape[3], head_dim,
        )  # fmt: skip
