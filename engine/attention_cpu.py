"""Attention for a CPU: decode rows together, prefill chunks one call each.

Owns: the layout that suits torch's CPU kernels. Refuses to know: anything beyond `attention.py`.
Invariants: equal to TorchAttention up to rounding (tests/parity); decode rows are grouped by context
length so that padding at most doubles a row's work; with a window, only the blocks that it touches are read.

Usage: `attention = CpuAttention(cache, rules)`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from firstdiff.engine.attention import AttentionRules, KVCache, visible
from firstdiff.engine.batch import Batch, PrefillSpan


@dataclass(frozen=True, slots=True)
class _DecodeGroup:
    """Decode rows of like context length; `rows` is None when the group is all of them, in order."""

    rows: torch.Tensor | None  # [G] int64
    blocks: torch.Tensor  # [G * P] int64, P blocks a row, padded with block 0
    bias: torch.Tensor  # [G, 1, 1, P * block_size], 0 within the context, -inf beyond


@dataclass(frozen=True, slots=True)
class _Chunk:
    """One prefill span as one call; `bias` is None for a plain causal square."""

    rows: slice
    blocks: torch.Tensor  # [P] int64
    num_tokens: int  # of those blocks, up to the last row's position
    bias: torch.Tensor | None  # [M, num_tokens], 0 or -inf


@dataclass(frozen=True, slots=True)
class _Plan:
    """What the layers of one window share in a step."""

    groups: list[_DecodeGroup]
    chunks: list[_Chunk]


class CpuAttention:
    """Gathers each group's blocks once a layer, then one fused call for the group."""

    def __init__(self, cache: KVCache, rules: AttentionRules | None = None) -> None:
        self.rules = rules or cache.plain_rules
        self._cache = cache
        self._batch: Batch | None = None
        self._plans: dict[int | None, _Plan] = {}

    def plan(self, batch: Batch) -> None:
        self._batch = batch
        self._plans = {window: self._plan(batch, window) for window in set(self.rules.windows)}

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: int) -> torch.Tensor:
        batch = self._batch
        assert batch is not None
        self._cache.write(k, v, batch.slot_mapping, layer)
        keys, values = self._cache.keys[layer], self._cache.values[layer]
        plan = self._plans[self.rules.windows[layer]]
        out = torch.empty_like(q)
        num_kv_heads = k.shape[1]
        for group in plan.groups:
            rows = q[: batch.num_decodes] if group.rows is None else q[group.rows]
            attended = self._decode(rows, keys, values, group, num_kv_heads)
            if group.rows is None:
                out[: batch.num_decodes] = attended
            else:
                out[group.rows] = attended
        for chunk in plan.chunks:
            out[chunk.rows] = self._prefill(q[chunk.rows], keys, values, chunk)
        return out.flatten(1)

    def _decode(
        self,
        q: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        group: _DecodeGroup,
        num_kv_heads: int,
    ) -> torch.Tensor:
        """q [G, H, D] over its gathered blocks -> [G, H, D].

        The heads that share a KV head become the query rows of one call: [G, Hkv, H / Hkv, D]. No copy
        of K or V a head, and the kernel sees a small matrix instead of a vector.
        """
        num_rows, num_heads, head_dim = q.shape
        shape = (num_rows, -1, num_kv_heads, head_dim)
        gathered_keys = keys.index_select(0, group.blocks).view(shape).transpose(1, 2)  # [G, Hkv, T, D]
        gathered_values = values.index_select(0, group.blocks).view(shape).transpose(1, 2)
        grouped = q.view(num_rows, num_kv_heads, num_heads // num_kv_heads, head_dim)
        attended = F.scaled_dot_product_attention(
            grouped, gathered_keys, gathered_values, attn_mask=group.bias, scale=self.rules.scale
        )
        return attended.reshape(num_rows, num_heads, head_dim)

    def _prefill(
        self, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, chunk: _Chunk
    ) -> torch.Tensor:
        """q [M, H, D] of one span over its blocks -> [M, H, D]."""
        context_keys = keys.index_select(0, chunk.blocks).flatten(0, 1)[: chunk.num_tokens]  # [T, Hkv, D]
        context_values = values.index_select(0, chunk.blocks).flatten(0, 1)[: chunk.num_tokens]
        attended = F.scaled_dot_product_attention(
            q.transpose(0, 1)[None],
            context_keys.transpose(0, 1)[None],
            context_values.transpose(0, 1)[None],
            attn_mask=chunk.bias,
            is_causal=chunk.bias is None,
            enable_gqa=True,
            scale=self.rules.scale,
        )
        return attended[0].transpose(0, 1)

    def _plan(self, batch: Batch, window: int | None) -> _Plan:
        firsts = [self._first_block(end - 1, window) for end in batch.context_lens]
        members: dict[int, list[int]] = {}
        for row, (table, first) in enumerate(zip(batch.block_tables, firsts, strict=True)):
            members.setdefault((len(table) - first).bit_length(), []).append(row)
        return _Plan(
            groups=[self._decode_group(batch, rows, firsts, window) for rows in members.values()],
            chunks=[self._chunk(span, window) for span in batch.prefills],
        )

    def _first_block(self, position: int, window: int | None) -> int:
        """The first block that a row at `position` reads."""
        return 0 if window is None else max(0, position + 1 - window) // self._cache.block_size

    def _decode_group(
        self, batch: Batch, rows: list[int], firsts: list[int], window: int | None
    ) -> _DecodeGroup:
        tables = [batch.block_tables[row][firsts[row] :] for row in rows]
        width = max(map(len, tables))
        blocks = torch.tensor([table + [0] * (width - len(table)) for table in tables])
        # Where each row's context ends, counted from the first block that it reads.
        block_size = self._cache.block_size
        ends = torch.tensor([batch.context_lens[row] - firsts[row] * block_size for row in rows])[:, None]
        slots = torch.arange(width * block_size)
        hidden = slots >= ends  # [G, T]
        if window is not None:
            hidden |= slots < ends - window
        bias = torch.zeros(hidden.shape, dtype=self._cache.keys.dtype).masked_fill_(hidden, float("-inf"))
        everyone = len(rows) == batch.num_decodes
        return _DecodeGroup(
            rows=None if everyone else torch.tensor(rows),
            blocks=blocks.flatten(),
            bias=bias[:, None, None, :],
        )

    def _chunk(self, span: PrefillSpan, window: int | None) -> _Chunk:
        first, end = self._first_block(span.start, window), span.start + span.num_rows
        begin = first * self._cache.block_size
        bias = None
        if span.start > 0 or (window is not None and end > window):
            seen = visible(span.start, span.num_rows, torch.arange(begin, end), window)
            bias = torch.zeros(seen.shape, dtype=self._cache.keys.dtype).masked_fill_(~seen, float("-inf"))
        return _Chunk(
            rows=slice(span.row, span.row + span.num_rows),
            blocks=span.block_table[first:],
            num_tokens=end - begin,
            bias=bias,
        )
