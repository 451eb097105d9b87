"""Attention over a paged KV cache: the boundary, and the readable truth.

Owns: the AttentionBackend protocol, the KV cache tensors, TorchAttention. Refuses to know: layers' other
parts, scheduling, sampling. Invariants: K and V of the new rows are written before they are read; the row at
position p attends to exactly the positions <= p, and > p - window where its layer has a window, of its own
sequence; slots outside that never matter. What has left every window stays in its block until the sequence
ends: a block holds all layers, and the full ones read it.

Usage: `attention.plan(batch)` once a step, then `attention.forward(q, k, v, layer)` for each layer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from firstdiff.engine.batch import Batch


@dataclass(frozen=True, slots=True)
class AttentionRules:
    """What the model asks of attention: the scores' scale, and each layer's window (None: no window)."""

    scale: float
    windows: tuple[int | None, ...]


class AttentionBackend(Protocol):
    """How a step's rows attend to the cache."""

    @property
    def rules(self) -> AttentionRules:
        """What it computes; a decoder refuses a backend with rules that are not its own."""
        ...

    def plan(self, batch: Batch) -> None:
        """Prepare everything that the layers share; valid until the next `plan`."""
        ...

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: int) -> torch.Tensor:
        """Store k, v [N, Hkv, D] in the cache of `layer`, attend with q [N, H, D], return [N, H * D]."""
        ...


@dataclass(frozen=True, slots=True)
class KVCache:
    """K and V of all layers, each [layers, num_blocks, block_size, Hkv, D]."""

    keys: torch.Tensor
    values: torch.Tensor

    @classmethod
    def allocate(
        cls,
        *,
        num_layers: int,
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
    ) -> KVCache:
        """Zeroed, so that masked slots are finite."""
        shape = (num_layers, num_blocks, block_size, num_kv_heads, head_dim)
        return cls(_lazy_zeros(shape, dtype), _lazy_zeros(shape, dtype))

    @property
    def block_size(self) -> int:
        return self.keys.shape[2]

    @property
    def plain_rules(self) -> AttentionRules:
        """No windows, and scores scaled by the root of the head dim."""
        return AttentionRules(self.keys.shape[-1] ** -0.5, (None,) * self.keys.shape[0])

    def write(self, k: torch.Tensor, v: torch.Tensor, slot_mapping: torch.Tensor, layer: int) -> None:
        """Put k, v [N, Hkv, D] into slots [N] of `layer`."""
        self.keys[layer].flatten(0, 1).index_copy_(0, slot_mapping, k)
        self.values[layer].flatten(0, 1).index_copy_(0, slot_mapping, v)


def _lazy_zeros(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Zeros whose pages the system commits only once they are written: a large cache costs what it holds.

    torch.zeros writes every page; numpy asks the system for zeroed memory. bf16 zeros are 16-bit zeros.
    """
    words = np.zeros(shape, dtype={4: np.int32, 2: np.int16}[dtype.itemsize])
    return torch.from_numpy(words).view(dtype)


def visible(start: int, num_rows: int, positions: torch.Tensor, window: int | None) -> torch.Tensor:
    """Whether each of the rows at start .. start + num_rows sees each of `positions` [T]: bool [M, T]."""
    rows = torch.arange(start, start + num_rows)[:, None]
    seen = positions <= rows
    return seen if window is None else seen & (positions > rows - window)


class TorchAttention:
    """Attention as the textbook has it, one sequence at a time, softmax in fp32: what others must equal."""

    def __init__(self, cache: KVCache, rules: AttentionRules | None = None) -> None:
        self.rules = rules or cache.plain_rules
        self._cache = cache
        self._batch: Batch | None = None

    def plan(self, batch: Batch) -> None:
        self._batch = batch

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: int) -> torch.Tensor:
        assert self._batch is not None
        batch, out = self._batch, torch.empty_like(q)
        self._cache.write(k, v, batch.slot_mapping, layer)
        for row, (end, table) in enumerate(zip(batch.context_lens, batch.block_tables, strict=True)):
            rows = slice(row, row + 1)
            out[rows] = self._attend(q[rows], torch.tensor(table), end - 1, layer)
        for span in batch.prefills:
            rows = slice(span.row, span.row + span.num_rows)
            out[rows] = self._attend(q[rows], span.block_table, span.start, layer)
        return out.flatten(1)

    def _attend(self, q: torch.Tensor, block_table: torch.Tensor, start: int, layer: int) -> torch.Tensor:
        """Attention of q [M, H, D] at positions start .. start + M over the blocks of its sequence."""
        num_rows, num_heads, _ = q.shape
        end = start + num_rows
        keys = self._cache.keys[layer][block_table].flatten(0, 1)[:end].float()  # [T, Hkv, D]
        values = self._cache.values[layer][block_table].flatten(0, 1)[:end].float()
        group = num_heads // keys.shape[1]
        keys, values = keys.repeat_interleave(group, 1), values.repeat_interleave(group, 1)  # [T, H, D]
        scores = torch.einsum("mhd,thd->hmt", q.float(), keys) * self.rules.scale
        hidden = ~visible(start, num_rows, torch.arange(end), self.rules.windows[layer])  # [M, T]
        weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
        return torch.einsum("hmt,thd->mhd", weights, values).to(q.dtype)
