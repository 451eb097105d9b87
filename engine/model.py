"""The decoder: pre-norm layers over ragged rows.

Owns: the arithmetic of one forward pass. Refuses to know: model families (model_config.py makes data of
their differences), sequences, blocks, sampling, where weights came from. Invariants: rows never mix except
inside attention; hidden states and logits are made of the sampled rows only, logits in fp32.

Letters: N rows of the batch, S sampled rows, H query heads, Hkv KV heads, D head dim, E hidden, V vocab.

Usage: `decoder = Decoder(config, weights); logits = decoder.logits(decoder.forward(batch, attention))`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from firstdiff.engine.attention import AttentionBackend, AttentionRules
from firstdiff.engine.batch import Batch
from firstdiff.engine.model_config import ModelConfig, Rope
from firstdiff.engine.ops import Following, HeadShape, Ops, Product, StageParts, TorchOps


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One layer; `qkv` and `gate_up` are merged so that a step makes four products a layer, not seven.

    Norms' weights are what the normed values are multiplied by; in fp32 where that must not be rounded.
    """

    input_norm: torch.Tensor  # [E]
    qkv: Product  # E -> (H + 2 Hkv) * D
    qk_norm: torch.Tensor | None  # [H + Hkv, D] fp32, each head of q and k by itself
    output: Product  # H * D -> E
    attended_norm: torch.Tensor | None  # [E], of what attention adds
    mlp_norm: torch.Tensor  # [E], of what the MLP reads
    gate_up: Product  # E -> 2 F
    down: Product  # F -> E
    mlp_added_norm: torch.Tensor | None  # [E], of what the MLP adds


@dataclass(frozen=True, slots=True)
class DecoderWeights:
    embedding: torch.Tensor  # [V, E]
    layers: list[LayerWeights]
    final_norm: torch.Tensor  # [E]
    head: Product  # E -> V


class Decoder:
    """A stack of pre-norm layers with rotary positions and grouped-query attention."""

    def __init__(self, config: ModelConfig, weights: DecoderWeights, ops: Ops | None = None) -> None:
        self.config = config
        self._ops = ops or TorchOps()
        self._heads = HeadShape(config.num_heads, config.num_kv_heads, config.head_dim)
        self.attention_rules = AttentionRules(
            config.attention_scale, tuple(layer.window for layer in config.layers)
        )
        self._weights = weights
        self._stages = self._ops.stages([self._stage_parts(index) for index in range(len(weights.layers))])
        self.dtype = weights.embedding.dtype
        self._ropes = [rope_table(config, rope, self.dtype) for rope in config.ropes]
        self._embedding_scale = (
            None if config.embedding_scale is None else torch.tensor(config.embedding_scale, dtype=self.dtype)
        )

    def forward(self, batch: Batch, attention: AttentionBackend) -> torch.Tensor:
        """Final hidden states [S, E] of the sampled rows; writes the KV of every row through `attention`."""
        assert attention.rules == self.attention_rules, "attention that computes another model's scores"
        weights, eps, ops = self._weights, self.config.rms_norm_eps, self._ops
        turns = [(cos[batch.positions], sin[batch.positions]) for cos, sin in self._ropes]  # [N, D]
        residual = weights.embedding[batch.input_ids]  # [N, E]
        if self._embedding_scale is not None:
            residual = residual * self._embedding_scale
        attention.plan(batch)
        first, last = weights.layers[0], len(weights.layers) - 1
        qkv = first.qkv(ops.norm(residual, first.input_norm, eps))
        q, k, v = ops.turn(qkv, self._heads, *turns[self.config.layers[0].rope], first.qk_norm, eps)
        for index in range(last):
            cos, sin = turns[self.config.layers[index + 1].rope]
            attended = attention.forward(q, k, v, index)
            residual, q, k, v = self._stages[index].advance(residual, attended, cos, sin)
        residual, x = self._stages[last].finish(residual, attention.forward(q, k, v, last))
        return ops.add_norm(residual[batch.sampled_rows], x[batch.sampled_rows], weights.final_norm, eps)[1]

    def _stage_parts(self, index: int) -> StageParts:
        layers = self._weights.layers
        layer, after = layers[index], layers[index + 1] if index + 1 < len(layers) else None
        return StageParts(
            shape=self._heads,
            activation=self.config.activation,
            eps=self.config.rms_norm_eps,
            output=layer.output,
            attended_norm=layer.attended_norm,
            mlp_norm=layer.mlp_norm,
            gate_up=layer.gate_up,
            down=layer.down,
            mlp_added_norm=layer.mlp_added_norm,
            following=None if after is None else Following(after.input_norm, after.qkv, after.qk_norm),
        )

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits [S, V] fp32 of final hidden states [S, E]."""
        logits = self._weights.head(hidden).float()
        if (cap := self.config.final_softcap) is not None:
            logits = logits.div_(cap).tanh_().mul_(cap)
        return logits


def rope_table(config: ModelConfig, rope: Rope, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin [max_model_len, D], halves repeated as `ops.rotate` wants them; angles in fp32."""
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.int64).float() / config.head_dim
    frequencies = scale_frequencies(1.0 / (rope.theta**exponents), rope)
    # One row more than positions that exist: a defect that shifts positions must not crash, but mislead.
    angles = torch.arange(config.max_model_len + 1).float()[:, None] * frequencies  # [T, D / 2]
    angles = torch.cat((angles, angles), dim=-1)
    # The sign of rotate_half lives in the table: see `ops.rotate`.
    sin = angles.sin()
    sin[:, : config.head_dim // 2].neg_()
    return angles.cos().to(dtype), sin.to(dtype)


def scale_frequencies(frequencies: torch.Tensor, rope: Rope) -> torch.Tensor:
    """Frequencies [D / 2] for contexts longer than those of the first training.

    `linear` divides all by the factor. `llama3` keeps what turns often within the first training's context,
    divides what turns seldom, and blends in between (Llama 3.1's `apply_scaling`).
    """
    if rope.kind == "default":
        return frequencies
    if rope.kind == "linear":
        return frequencies / rope.factor
    turns = rope.original_max_position * frequencies / (2 * math.pi)
    span = rope.high_freq_factor - rope.low_freq_factor
    kept = ((turns - rope.low_freq_factor) / span).clamp(0, 1)
    return kept * frequencies + (1 - kept) * frequencies / rope.factor
