"""Attention for a CPU: decode rows together, prefill chunks one call each.

Owns: the layout that suits torch's CPU kernels. Refuses to know: anything beyond `attention.py`.
Invariants: equal to TorchAttention up to rounding (tests/parity); decode rows are grouped by context
length so that padding at most doubles a row's work.

Usage: `attention = CpuAttention(cache)`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from firstdiff.engine.attention import KVCache
from firstdiff.engine.batch import Batch, PrefillSpan


@dataclass(frozen=True, slots=True)
class _DecodeGroup:
    """Decode rows of like context length; `rows` is None when the group is all of them, in order."""

    rows: torch.Tensor | None  # [G] int64
    blocks: torch.Tensor  # [G * P] int64, P blocks a row, padded with block 0
    bias: torch.Tensor  # [G, 1, 1, P * block_size], 0 within the context, -inf beyond


class CpuAttention:
    """Gathers each group's blocks once a layer, then one fused call for the group."""

    def __init__(self, cache: KVCache) -> None:
        self._cache = cache
        self._batch: Batch | None = None
        self._groups: list[_DecodeGroup] = []
        self._prefill_biases: list[torch.Tensor | None] = []

    def plan(self, batch: Batch) -> None:
        self._batch = batch
        self._groups = self._group_decodes(batch)
        self._prefill_biases = [self._prefill_bias(span) for span in batch.prefills]

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: int) -> torch.Tensor:
        batch = self._batch
        assert batch is not None
        self._cache.write(k, v, batch.slot_mapping, layer)
        keys, values = self._cache.keys[layer], self._cache.values[layer]
        out = torch.empty_like(q)
        num_kv_heads = k.shape[1]
        for group in self._groups:
            rows = q[: batch.num_decodes] if group.rows is None else q[group.rows]
            attended = self._decode(rows, keys, values, group, num_kv_heads)
            if group.rows is None:
                out[: batch.num_decodes] = attended
            else:
                out[group.rows] = attended
        for span, bias in zip(batch.prefills, self._prefill_biases, strict=True):
            chunk = slice(span.row, span.row + span.num_rows)
            out[chunk] = self._prefill(q[chunk], keys, values, span, bias)
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
            grouped, gathered_keys, gathered_values, attn_mask=group.bias
        )
        return attended.reshape(num_rows, num_heads, head_dim)

    def _prefill(
        self,
        q: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        span: PrefillSpan,
        bias: torch.Tensor | None,
    ) -> torch.Tensor:
        """q [M, H, D] at positions start .. start + M over its sequence -> [M, H, D]."""
        end = span.start + span.num_rows
        context_keys = keys.index_select(0, span.block_table).flatten(0, 1)[:end]  # [T, Hkv, D]
        context_values = values.index_select(0, span.block_table).flatten(0, 1)[:end]
        attended = F.scaled_dot_product_attention(
            q.transpose(0, 1)[None],
            context_keys.transpose(0, 1)[None],
            context_values.transpose(0, 1)[None],
            attn_mask=bias,
            is_causal=bias is None,
            enable_gqa=True,
        )
        return attended[0].transpose(0, 1)

    def _group_decodes(self, batch: Batch) -> list[_DecodeGroup]:
        members: dict[int, list[int]] = {}
        for row, table in enumerate(batch.block_tables):
            members.setdefault(len(table).bit_length(), []).append(row)
        return [self._decode_group(batch, rows) for rows in members.values()]

    def _decode_group(self, batch: Batch, rows: list[int]) -> _DecodeGroup:
        width = max(len(batch.block_tables[row]) for row in rows)
        blocks = torch.tensor(
            [batch.block_tables[row] + [0] * (width - len(batch.block_tables[row])) for row in rows]
        )
        lens = torch.tensor([batch.context_lens[row] for row in rows])
        beyond = torch.arange(width * self._cache.block_size) >= lens[:, None]  # [G, T]
        bias = torch.zeros(beyond.shape, dtype=self._cache.keys.dtype).masked_fill_(beyond, float("-inf"))
        everyone = len(rows) == batch.num_decodes
        return _DecodeGroup(
            rows=None if everyone else torch.tensor(rows),
            blocks=blocks.flatten(),
            bias=bias[:, None, None, :],
        )

    def _prefill_bias(self, span: PrefillSpan) -> torch.Tensor | None:
        """None for a plain causal square (a whole prompt), else 0 / -inf [M, T] with the chunk's offset."""
        if span.start == 0:
            return None
        end = span.start + span.num_rows
        ahead = torch.arange(end) > torch.arange(span.start, end)[:, None]
        return torch.zeros(ahead.shape, dtype=self._cache.keys.dtype).masked_fill_(ahead, float("-inf"))
