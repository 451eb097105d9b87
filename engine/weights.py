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

from firstdiff.engine.model import DecoderWeights, LayerWeights
from firstdiff.engine.model_config import ModelConfig
from firstdiff.engine.ops import Ops, Product, TorchOps


def load_weights(
    folder: Path, config: ModelConfig, *, dtype: torch.dtype, ops: Ops | None = None
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
    weights = _decoder_weights(taker, config, ops or TorchOps())
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

    def take_norm(self, name: str, size: int, offset: float) -> torch.Tensor:
        """What a norm multiplies by; in fp32 where something is added to the stored weight."""
        weight = self.take(name, size)
        return weight.float() + offset if offset else weight

    def drop(self, name: str) -> None:
        self._tensors.pop(name, None)

    def refuse_leftovers(self) -> None:
        # Old checkpoints store the rotary frequencies, which are computed here from the config.
        left = sorted(name for name in self._tensors if not name.endswith("rotary_emb.inv_freq"))
        if left:
            raise ValueError(
                f"expected a checkpoint of the config in {self._folder}, got {len(left)} tensors "
                f"that this decoder does not compute, the first {left[0]}"
            )


def _decoder_weights(taker: _Taker, config: ModelConfig, ops: Ops) -> DecoderWeights:
    hidden, vocab = config.hidden_size, config.vocab_size
    embedding = taker.take("model.embed_tokens.weight", vocab, hidden)
    layers = [_layer_weights(taker, config, index, ops) for index in range(config.num_layers)]
    final_norm = taker.take_norm("model.norm.weight", hidden, config.norm_offset)
    if config.tie_word_embeddings:
        taker.drop("lm_head.weight")
        head = embedding
    else:
        head = taker.take("lm_head.weight", vocab, hidden)
    return DecoderWeights(
        embedding=embedding, layers=layers, final_norm=final_norm, head=ops.linear(head, None, wide=True)
    )


def _layer_weights(taker: _Taker, config: ModelConfig, index: int, ops: Ops) -> LayerWeights:
    prefix, hidden, inner = f"model.layers.{index}", config.hidden_size, config.intermediate_size
    q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim

    def norm(name: str) -> torch.Tensor:
        return taker.take_norm(f"{prefix}.{name}.weight", hidden, config.norm_offset)

    def linear(parts: dict[str, int], num_inputs: int, has_bias: bool) -> Product:
        """The parts (name -> outputs), one below the other."""
        names = [(f"{prefix}.{name}", size) for name, size in parts.items()]
        weight = torch.cat([taker.take(f"{name}.weight", size, num_inputs) for name, size in names])
        bias = torch.cat([taker.take(f"{name}.bias", size) for name, size in names]) if has_bias else None
        return ops.linear(weight, bias)

    qkv = {"self_attn.q_proj": q_size, "self_attn.k_proj": kv_size, "self_attn.v_proj": kv_size}
    gate_up = {"mlp.gate_proj": inner, "mlp.up_proj": inner}
    sandwich = config.sandwich_norms
    return LayerWeights(
        input_norm=norm("input_layernorm"),
        qkv=linear(qkv, hidden, config.qkv_bias),
        qk_norm=_qk_norm(taker, config, prefix) if config.qk_norm else None,
        output=linear({"self_attn.o_proj": hidden}, q_size, config.output_bias),
        # Hugging Face gives the name of the MLP's norm in Llama to that of attention's output in Gemma.
        attended_norm=norm("post_attention_layernorm") if sandwich else None,
        mlp_norm=norm("pre_feedforward_layernorm" if sandwich else "post_attention_layernorm"),
        gate_up=linear(gate_up, hidden, config.mlp_bias),
        down=linear({"mlp.down_proj": hidden}, inner, config.mlp_bias),
        mlp_added_norm=norm("post_feedforward_layernorm") if sandwich else None,
    )


def _qk_norm(taker: _Taker, config: ModelConfig, prefix: str) -> torch.Tensor:
    """[H + Hkv, D] fp32: the q norm's weight for each query head, then the k norm's for each KV head."""
    q, k = (
        taker.take_norm(f"{prefix}.self_attn.{name}.weight", config.head_dim, config.norm_offset).float()
        for name in ("q_norm", "k_norm")
    )
    return torch.cat([q.expand(config.num_heads, -1), k.expand(config.num_kv_heads, -1)])
