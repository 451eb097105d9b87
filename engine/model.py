"""The decoder: Llama-family layers over ragged rows.

Owns: the arithmetic of one forward pass and the model's shape. Refuses to know: sequences, blocks,
sampling, where weights came from. Invariants: rows never mix except inside attention; hidden states and
logits are made of the sampled rows only, logits in fp32.

Letters: N rows of the batch, S sampled rows, H query heads, Hkv KV heads, D head dim, E hidden, V vocab.

Usage: `decoder = Decoder(config, weights); logits = decoder.logits(decoder.forward(batch, attention))`.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from firstdiff.engine.attention import AttentionBackend
from firstdiff.engine.batch import Batch
from firstdiff.engine.linear import Linear


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The shape of a Llama-family decoder, in Hugging Face's terms."""

    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    rms_norm_eps: float
    rope_theta: float
    max_model_len: int
    tie_word_embeddings: bool
    eos_token_ids: frozenset[int]

    @classmethod
    def load(cls, folder: Path) -> ModelConfig:
        """Read config.json and generation_config.json; ValueError on anything that is not computed here."""
        raw = json.loads((folder / "config.json").read_text())
        _refuse_unlike_llama(raw, folder)
        generation_file = folder / "generation_config.json"
        generation = json.loads(generation_file.read_text()) if generation_file.is_file() else {}
        eos = generation.get("eos_token_id", raw.get("eos_token_id"))
        rope = raw.get("rope_parameters") or {}
        return cls(
            vocab_size=raw["vocab_size"],
            hidden_size=raw["hidden_size"],
            num_layers=raw["num_hidden_layers"],
            num_heads=raw["num_attention_heads"],
            num_kv_heads=raw.get("num_key_value_heads") or raw["num_attention_heads"],
            head_dim=raw.get("head_dim") or raw["hidden_size"] // raw["num_attention_heads"],
            intermediate_size=raw["intermediate_size"],
            rms_norm_eps=raw["rms_norm_eps"],
            rope_theta=float(rope.get("rope_theta", raw.get("rope_theta", 10000.0))),
            max_model_len=raw["max_position_embeddings"],
            tie_word_embeddings=bool(raw.get("tie_word_embeddings", False)),
            eos_token_ids=frozenset([] if eos is None else eos if isinstance(eos, list) else [eos]),
        )


def _refuse_unlike_llama(raw: dict[str, Any], folder: Path) -> None:
    rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    rope_type = rope.get("rope_type", rope.get("type", "default"))
    expected: dict[str, tuple[object, object]] = {
        "model_type": (raw.get("model_type"), "llama"),
        "hidden_act": (raw.get("hidden_act", "silu"), "silu"),
        "attention_bias": (bool(raw.get("attention_bias", False)), False),
        "mlp_bias": (bool(raw.get("mlp_bias", False)), False),
        "rope type": (rope_type, "default"),
        "partial_rotary_factor": (rope.get("partial_rotary_factor", 1.0), 1.0),
    }
    for name, (got, want) in expected.items():
        if got != want:
            raise ValueError(f"expected {name} {want!r} in {folder / 'config.json'}, got {got!r}")


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One layer; `qkv` and `gate_up` are merged so that a step makes four products a layer, not seven."""

    input_norm: torch.Tensor  # [E]
    qkv: Linear  # E -> (H + 2 Hkv) * D
    output: Linear  # H * D -> E
    post_norm: torch.Tensor  # [E]
    gate_up: Linear  # E -> 2 F
    down: Linear  # F -> E


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
        self._weights = weights
        self.dtype = weights.embedding.dtype
        self._cos, self._sin = rope_table(config, self.dtype)

    def forward(self, batch: Batch, attention: AttentionBackend) -> torch.Tensor:
        """Final hidden states [S, E] of the sampled rows; writes the KV of every row through `attention`."""
        weights, eps = self._weights, self.config.rms_norm_eps
        cos, sin = self._cos[batch.positions][:, None], self._sin[batch.positions][:, None]  # [N, 1, D]
        residual = weights.embedding[batch.input_ids]  # [N, E]
        attention.plan(batch)
        for index, layer in enumerate(weights.layers):
            x = rms_norm(residual, layer.input_norm, eps)
            residual = residual + layer.output(self._attend(layer.qkv(x), cos, sin, attention, index))
            x = rms_norm(residual, layer.post_norm, eps)
            gate, up = layer.gate_up(x).chunk(2, dim=-1)
            residual = residual + layer.down(F.silu(gate) * up)
        return rms_norm(residual[batch.sampled_rows], weights.final_norm, eps)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits [S, V] fp32 of final hidden states [S, E]."""
        return self._weights.head(hidden).float()

    def _attend(
        self,
        qkv: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        attention: AttentionBackend,
        index: int,
    ) -> torch.Tensor:
        """Rotate and attend: qkv [N, (H + 2 Hkv) * D] -> [N, H * D]."""
        config = self.config
        heads = qkv.view(-1, config.num_heads + 2 * config.num_kv_heads, config.head_dim)
        num_rotated = config.num_heads + config.num_kv_heads
        rotated = rotate(heads[:, :num_rotated], cos, sin)
        q, k = rotated[:, : config.num_heads], rotated[:, config.num_heads :]
        return attention.forward(q, k, heads[:, num_rotated:], index)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x [N, E] scaled to unit mean square, computed in fp32, then `weight` (arXiv 1910.07467, eq. 4)."""
    return F.rms_norm(x, (x.shape[-1],), weight, eps)


def rope_table(config: ModelConfig, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin [max_model_len, D], halves repeated as `rotate` wants them; angles in fp32."""
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.int64).float() / config.head_dim
    frequencies = 1.0 / (config.rope_theta**exponents)
    # One row more than positions that exist: a defect that shifts positions must not crash, but mislead.
    angles = torch.arange(config.max_model_len + 1).float()[:, None] * frequencies  # [T, D / 2]
    angles = torch.cat((angles, angles), dim=-1)
    # The sign of rotate_half lives in the table: see `rotate`.
    sin = angles.sin()
    sin[:, : config.head_dim // 2].neg_()
    return angles.cos().to(dtype), sin.to(dtype)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary positions on x [N, heads, D]: x * cos + rotate_half(x) * sin, halves as in Hugging Face.

    rotate_half(x) = (-x2, x1); here the halves are swapped and the minus sits in `sin`.
    """
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, dims=-1), sin)
