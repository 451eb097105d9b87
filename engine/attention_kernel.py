"""Attention by the compiled CPU kernels: KV blocks are read where they lie.

Owns: the plan of a step: places, tiles of rows, their shares among threads. Refuses to know: how a tile is
computed (kernels_attention.py), anything beyond `attention.py`. Invariants: equal to TorchAttention up to
rounding; a row's bits do not depend on batch, chunks, blocks or threads (tests/parity).

Usage: `attention = KernelAttention(cache, rules, threads=2)`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from firstdiff.engine import kernels_attention, kernels_parallel
from firstdiff.engine.attention import AttentionRules, KVCache
from firstdiff.engine.batch import Batch
from firstdiff.engine.kernel_ir import LANES

ROWS_OF_TILE = 8
"""Rows of a prefill chunk that share each reading of K and V."""


class KernelAttention:
    """One pass over each tile's context: all heads of a decoding row, one KV head of a chunk."""

    def __init__(self, cache: KVCache, rules: AttentionRules | None = None, *, threads: int = 1) -> None:
        self.rules = rules or cache.plain_rules
        self._cache = cache
        self._threads = threads
        self._forward = kernels_attention.forward if threads == 1 else kernels_parallel.forward
        self._layers = [
            (keys.data_ptr(), values.data_ptr(), window)
            for keys, values, window in zip(cache.keys, cache.values, self.rules.windows, strict=True)
        ]
        self._slot_bytes = cache.keys.stride(2) * cache.keys.element_size()
        # Tensors, as those tell their addresses ten times as fast as numpy's arrays.
        self._slots = self._places = self._tiles = torch.zeros(0, dtype=torch.int64)
        self._bounds: dict[int | None, torch.Tensor] = {}
        self._out: torch.Tensor | None = None
        self._arguments: tuple[int, ...] = ()
        """Those of the kernel that a step's layers share."""

    def plan(self, batch: Batch) -> None:
        self._out = None
        self._slots = batch.slot_mapping
        tables: list[Sequence[int] | NDArray[np.int64]] = [*batch.block_tables]
        tables += [span.block_table.numpy() for span in batch.prefills]
        ends = [*batch.context_lens, *(span.start + span.num_rows for span in batch.prefills)]
        places, begins = self._find(tables, np.array(ends))
        tiles = [(row, 1, end - 1, begins[row]) for row, end in enumerate(batch.context_lens)]
        for index, span in enumerate(batch.prefills, start=batch.num_decodes):
            for first in range(0, span.num_rows, ROWS_OF_TILE):
                count = min(ROWS_OF_TILE, span.num_rows - first)
                tiles.append((span.row + first, count, span.start + first, begins[index]))
        self._places, self._tiles = torch.from_numpy(places), torch.from_numpy(np.array(tiles))
        self._bounds = {
            window: torch.from_numpy(self._shares(self._tiles.numpy(), window))
            for window in set(self.rules.windows)
        }

    def _find(
        self, tables: Sequence[Sequence[int] | NDArray[np.int64]], ends: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], list[int]]:
        """Where the slots of all positions of all sequences lie, in bytes, and where in that each begins.

        Sequences are filled up to groups of sixteen with their last slot; one group more follows.
        """
        sizes, lengths = -(-ends // LANES) * LANES, np.array([len(table) for table in tables])
        begins = sizes.cumsum() - sizes
        positions = np.arange(sizes.sum()) - begins.repeat(sizes)
        positions = np.minimum(positions, (ends - 1).repeat(sizes))
        in_table, in_block = np.divmod(positions, self._cache.block_size)
        in_table += (lengths.cumsum() - lengths).repeat(sizes)
        slots = np.concatenate(tables)[in_table] * self._cache.block_size + in_block
        return np.append(slots * self._slot_bytes, np.zeros(LANES, np.int64)), begins.tolist()

    def _shares(self, tiles: NDArray[np.int64], window: int | None) -> NDArray[np.int64]:
        """[threads + 1]: which units (tile, KV head) each thread computes, so that all read about as much."""
        num_kv_heads = self._cache.keys.shape[3]
        reads = tiles[:, 2] + tiles[:, 1]
        if window is not None:
            reads = np.minimum(reads, window + tiles[:, 1])
        # Sixteen for what a unit costs however short it is.
        costs = np.repeat((reads + 16) * tiles[:, 1], num_kv_heads).cumsum()
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
            v_stride * item, keys, values, self._bounds[window].data_ptr(), window or 0, self.rules.scale,
            int(item == 2), *self._arguments,
        )  # fmt: skip
        return self._out

    def _begin(self, q: torch.Tensor) -> tuple[torch.Tensor, tuple[int, ...]]:
        """Room for the step's results, and the arguments that its layers share."""
        num_rows, num_heads, head_dim = q.shape
        out = torch.empty(num_rows, num_heads * head_dim, dtype=q.dtype)
        return out, (
            self._slots.data_ptr(), self._places.data_ptr(), self._tiles.data_ptr(), out.data_ptr(), num_rows,
            ROWS_OF_TILE, num_heads, self._cache.keys.shape[3], head_dim,
        )  # fmt: skip
