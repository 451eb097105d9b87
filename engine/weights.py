"""From a model folder's safetensors to merged, cast decoder weights.

Owns: Hugging Face's tensor names and the merging. Refuses to know: downloads, GGUF, arithmetic.
Invariants: every tensor of the checkpoint is used exactly once or refused; shapes are checked.

Usage: `weights = load_weights(folder, config, dtype=torch.bfloat16)`.
"""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from firstdiff.engine.linear import Linear
from firstdiff.engine.model import DecoderWeights, LayerWeights, ModelConfig


def load_weights(
    folder: Path, config: ModelConfig, *, dtype: torch.dtype, pack: bool = True
) -> DecoderWeights:
    """Read all `*.safetensors` of `folder`; ValueError names what is missing, unread or misshapen."""
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ValueError(f"expected *.safetensors in {folder}, got none: pull the model again")
    tensors: dict[str, torch.Tensor] = {}
    for file in files:
        try:
            tensors.update(load_file(file))
        except (SafetensorError, OSError) as error:
            raise ValueError(f"expected a safetensors file in {file}, got: {error}") from error
    taker = _Taker(tensors, folder, dtype)
    weights = _decoder_weights(taker, config, pack=pack)
    taker.refuse_leftovers()
    return weights


class _Taker:
    """Hands out each tensor once, checked and cast."""

    def __init__(self, tensors: dict[str, torch.Tensor], folder: Path, dtype: torch.dtype) -> None:
        self._tensors = tensors
        self._folder = folder
        self._dtype = dtype

    def take(self, name: str, *shape: int) -> torch.Tensor:
        tensor = self._tensors.pop(name, None)
        if tensor is None:
            raise ValueError(f"expected tensor {name} in {self._folder}, got none: pull the model again")
        if tuple(tensor.shape) != shape:
            raise ValueError(f"expected {name} of shape {shape} in {self._folder}, got {tuple(tensor.shape)}")
        return tensor.to(self._dtype)

    def drop(self, name: str) -> None:
        self._tensors.pop(name, None)

    def refuse_leftovers(self) -> None:
        # Old checkpoints store the rotary frequencies, which are computed here from the config.
        left = sorted(name for name in self._tensors if not name.endswith("rotary_emb.inv_freq"))
        if left:
            raise ValueError(
                f"expected a plain Llama checkpoint in {self._folder}, got {len(left)} tensors "
                f"that this decoder does not compute, the first {left[0]}"
            )


def _decoder_weights(taker: _Taker, config: ModelConfig, *, pack: bool) -> DecoderWeights:
    hidden, vocab = config.hidden_size, config.vocab_size
    embedding = taker.take("model.embed_tokens.weight", vocab, hidden)
    layers = [_layer_weights(taker, config, index, pack=pack) for index in range(config.num_layers)]
    final_norm = taker.take("model.norm.weight", hidden)
    if config.tie_word_embeddings:
        taker.drop("lm_head.weight")
        head = embedding
    else:
        head = taker.take("lm_head.weight", vocab, hidden)
    return DecoderWeights(
        embedding=embedding, layers=layers, final_norm=final_norm, head=Linear(head, pack=pack)
    )


def _layer_weights(taker: _Taker, config: ModelConfig, index: int, *, pack: bool) -> LayerWeights:
    prefix, hidden, inner = f"model.layers.{index}", config.hidden_size, config.intermediate_size
    q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    qkv = torch.cat(
        [
            taker.take(f"{prefix}.self_attn.q_proj.weight", q_size, hidden),
            taker.take(f"{prefix}.self_attn.k_proj.weight", kv_size, hidden),
            taker.take(f"{prefix}.self_attn.v_proj.weight", kv_size, hidden),
        ]
    )
    gate_up = torch.cat(
        [
            taker.take(f"{prefix}.mlp.gate_proj.weight", inner, hidden),
            taker.take(f"{prefix}.mlp.up_proj.weight", inner, hidden),
        ]
    )
    return LayerWeights(
        input_norm=taker.take(f"{prefix}.input_layernorm.weight", hidden),
        qkv=Linear(qkv, pack=pack),
        output=Linear(taker.take(f"{prefix}.self_attn.o_proj.weight", hidden, q_size), pack=pack),
        post_norm=taker.take(f"{prefix}.post_attention_layernorm.weight", hidden),
        gate_up=Linear(gate_up, pack=pack),
        down=Linear(taker.take(f"{prefix}.mlp.down_proj.weight", hidden, inner), pack=pack),
    )
