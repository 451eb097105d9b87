"""The decoder: pre-norm layers over ragged rows.

Owns: the arithmetic of one forward pass. Refuses to know: model families (model_config.py makes data of
their differences), sequences, blocks, sampling, where weights came from. Invariants: rows never mix except
inside attention; hidden states and logits are made of the sampled rows only, logits in fp32.

Letters: N rows of the batch, S sampled rows, H query heads, Hkv KV heads, D head dim, E hidden, V vocab.

Usage: `decoder = Decoder(config, weights); logits = decoder.logits(decoder.forward(batch, attention))`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F

from firstdiff.engine.attention import AttentionBackend, AttentionRules
from firstdiff.engine.batch import Batch
from firstdiff.engine.linear import Linear
from firstdiff.engine.model_config import ModelConfig, Rope

ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": F.silu,
    "gelu_pytorch_tanh": partial(F.gelu, approximate="tanh"),
}


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One layer; `qkv` and `gate_up` are merged so that a step makes four products a layer, not seven.

    Norms' weights are what the normed values are multiplied by; in fp32 where that must not be rounded.
    """

    input_norm: torch.Tensor  # [E]
    qkv: Linear  # E -> (H + 2 Hkv) * D
    qk_norm: torch.Tensor | None  # [H + Hkv, D] fp32, each head of q and k by itself
    output: Linear  # H * D -> E
    attended_norm: torch.Tensor | None  # [E], of what attention adds
    mlp_norm: torch.Tensor  # [E], of what the MLP reads
    gate_up: Linear  # E -> 2 F
    down: Linear  # F -> E
    mlp_added_norm: torch.Tensor | None  # [E], of what the MLP adds


@dataclass(frozen=True, slots=True)
class DecoderWeights:
    embedding: torch.Tensor  # [V, E]
    layers: list[LayerWeights]
    final_norm: torch.Tensor  # [E]
    head: Linear  # E -> V


class Decoder:
    """A stack of pre-norm layers with rotary positions and grouped-query attention."""

    def __init__(self, config: ModelConfig, weights: DecoderWeights) -> None:
        self.config = config
        self.attention_rules = AttentionRules(
            config.attention_scale, tuple(layer.window for layer in config.layers)
        )
        self._weights = weights
        self.dtype = weights.embedding.dtype
        self._activation = ACTIVATIONS[config.activation]
        self._ropes = [rope_table(config, rope, self.dtype) for rope in config.ropes]
        self._embedding_scale = (
            None if config.embedding_scale is None else torch.tensor(config.embedding_scale, dtype=self.dtype)
        )

    def forward(self, batch: Batch, attention: AttentionBackend) -> torch.Tensor:
        """Final hidden states [S, E] of the sampled rows; writes the KV of every row through `attention`."""
        assert attention.rules == self.attention_rules, "attention that computes another model's scores"
        weights, eps = self._weights, self.config.rms_norm_eps
        turns = [(cos[batch.positions][:, None], sin[batch.positions][:, None]) for cos, sin in self._ropes]
        residual = weights.embedding[batch.input_ids]  # [N, E]
        if self._embedding_scale is not None:
            residual = residual * self._embedding_scale
        attention.plan(batch)
        for index, layer in enumerate(weights.layers):
            cos, sin = turns[self.config.layers[index].rope]  # [N, 1, D]
            x = layer.qkv(rms_norm(residual, layer.input_norm, eps))
            x = layer.output(self._attend(x, layer.qk_norm, cos, sin, attention, index))
            if layer.attended_norm is not None:
                x = rms_norm(x, layer.attended_norm, eps)
            residual = residual + x
            gate, up = layer.gate_up(rms_norm(residual, layer.mlp_norm, eps)).chunk(2, dim=-1)
            x = layer.down(self._activation(gate) * up)
            if layer.mlp_added_norm is not None:
                x = rms_norm(x, layer.mlp_added_norm, eps)
            residual = residual + x
        return rms_norm(residual[batch.sampled_rows], weights.final_norm, eps)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits [S, V] fp32 of final hidden states [S, E]."""
        logits = self._weights.head(hidden).float()
        if (cap := self.config.final_softcap) is not None:
            logits = logits.div_(cap).tanh_().mul_(cap)
        return logits

    def _attend(
        self,
        qkv: torch.Tensor,
        qk_norm: torch.Tensor | None,
        cos: torch.Tensor,
        sin: torch.Tensor,
        attention: AttentionBackend,
        index: int,
    ) -> torch.Tensor:
        """Norm, rotate and attend: qkv [N, (H + 2 Hkv) * D] -> [N, H * D]."""
        config = self.config
        heads = qkv.view(-1, config.num_heads + 2 * config.num_kv_heads, config.head_dim)
        num_rotated = config.num_heads + config.num_kv_heads
        rotated = heads[:, :num_rotated]
        if qk_norm is not None:
            rotated = rms_norm(rotated, qk_norm, config.rms_norm_eps)
        rotated = rotate(rotated, cos, sin)
        q, k = rotated[:, : config.num_heads], rotated[:, config.num_heads :]
        return attention.forward(q, k, heads[:, num_rotated:], index)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x [..., D] scaled to unit mean square, computed in fp32, then `weight` (arXiv 1910.07467, eq. 4).

    A weight in fp32 is applied before the one rounding to x's dtype. `weight` is [D], or [heads, D].
    """
    if weight.dtype == x.dtype and weight.dim() == 1:
        return F.rms_norm(x, x.shape[-1:], weight, eps)
    return (F.rms_norm(x.float(), x.shape[-1:], None, eps) * weight).to(x.dtype)


def rope_table(config: ModelConfig, rope: Rope, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin [max_model_len, D], halves repeated as `rotate` wants them; angles in fp32."""
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.int64).float() / config.head_dim
    frequencies = scale_frequencies(1.0 / (rope.theta**exponents), rope)
    # One row more than positions that exist: a defect that shifts positions must not crash, but mislead.
    angles = torch.arange(config.max_model_len + 1).float()[:, None] * frequencies  # [T, D / 2]
    angles = torch.cat((angles, angles), dim=-1)
    # The sign of rotate_half lives in the table: see `rotate`.
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


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary positions on x [N, heads, D]: x * cos + rotate_half(x) * sin, halves as in Hugging Face.

    rotate_half(x) = (-x2, x1); here the halves are swapped and the minus sits in `sin`.
    """
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, dims=-1), sin)
