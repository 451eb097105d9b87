"""Tiny seeded models of every family the decoder computes, made by transformers.

Every variant turns on something that a plain Llama has not; vectors (norms, biases) are random too, since as
they are initialised, ones and zeros, a decoder that ignored them would agree.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers import Gemma3TextConfig as Gemma3
from transformers import LlamaConfig as Llama
from transformers import Qwen2Config as Qwen2
from transformers import Qwen3Config as Qwen3

from firstdiff.engine.attention import AttentionBackend
from firstdiff.engine.model import Decoder

VOCAB_SIZE = 97
WINDOW = 7
"""Not a multiple of the block size, and far below the contexts tested."""

SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
WINDOWED = {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
GEMMA3 = {
    "num_hidden_layers": 4,
    "head_dim": 12,
    "sliding_window": WINDOW,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
    "query_pre_attn_scalar": 20,
}
GEMMA3_ROPES = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 5000.0},
}

VARIANTS: dict[str, tuple[type[Any], dict[str, Any]]] = {
    "llama-biases": (Llama, {"attention_bias": True, "mlp_bias": True, "head_dim": 12}),
    "llama-llama3-rope": (Llama, {"rope_parameters": LLAMA3_ROPE}),
    "llama-linear-rope": (Llama, {"rope_parameters": {"rope_type": "linear", "factor": 4.0}}),
    "qwen2": (Qwen2, {"tie_word_embeddings": True}),
    "qwen2-window": (Qwen2, WINDOWED),
    "qwen3": (Qwen3, {"head_dim": 12, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}),
    "qwen3-window-biases": (Qwen3, WINDOWED | {"head_dim": 8, "attention_bias": True}),
    "gemma3": (Gemma3, GEMMA3),
    "gemma3-ropes-softcap": (
        Gemma3,
        GEMMA3 | {"final_logit_softcapping": 2.0, "rope_parameters": GEMMA3_ROPES},
    ),
}


def make_family(folder: Path, variant: str, *, vocab_size: int = VOCAB_SIZE) -> PreTrainedModel:
    """A random model of `variant`, saved to `folder`."""
    torch.manual_seed(11)
    config_type, changes = VARIANTS[variant]
    config = config_type(**(SIZES | {"vocab_size": vocab_size} | changes))
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn(parameter.shape) * 0.3)
    model.save_pretrained(folder)
    return model


def make_attention(attention_type: type[Any], decoder: Decoder, **sizes: Any) -> AttentionBackend:
    """A backend on a fresh cache, with the decoder's own rules."""
    from tiny_llama import make_cache

    attention: AttentionBackend = attention_type(make_cache(decoder, **sizes), decoder.attention_rules)
    return attention
