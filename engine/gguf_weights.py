"""From a GGUF file to Hugging Face's weights and config.

Owns: GGUF's tensor names and keys for the architectures below, its order of q and k rows, its way with
Gemma's norms, dequantisation to fp32. Refuses to know: downloads, where files are kept, tokenizers, torch.
Invariants: every tensor of the file is converted exactly once or refused; values are those of the quantised
blocks, bit for bit, with no rounding of our own (but for the 1 that GGUF adds to Gemma's norms).

Usage: `weights = read_weights(GGUFReader(path)); config = read_config(reader)`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf import GGUFReader
from gguf.quants import dequantize

Weights = dict[str, npt.NDArray[np.float32]]

TOP_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
LAYER_NAMES = {
    "attn_norm.weight": "input_layernorm.weight",
    "attn_q.weight": "self_attn.q_proj.weight",
    "attn_k.weight": "self_attn.k_proj.weight",
    "attn_v.weight": "self_attn.v_proj.weight",
    "attn_output.weight": "self_attn.o_proj.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "ffn_gate.weight": "mlp.gate_proj.weight",
    "ffn_up.weight": "mlp.up_proj.weight",
    "ffn_down.weight": "mlp.down_proj.weight",
}
HEAD_NORMS = {
    "attn_q_norm.weight": "self_attn.q_norm.weight",
    "attn_k_norm.weight": "self_attn.k_norm.weight",
}


@dataclass(frozen=True, slots=True)
class Architecture:
    """How one GGUF architecture differs from another."""

    model_type: str
    class_name: str
    settings: dict[str, Any]
    """What the GGUF file does not say because its architecture does."""
    permutes_rows: bool = False
    """Whether the rows of q and k are in llama.cpp's order of rotated pairs."""
    norm_offset: float = 0.0
    """What the file's norms have more than Hugging Face's."""
    more_names: dict[str, str] = field(default_factory=dict)


ARCHITECTURES = {
    "llama": Architecture(
        "llama",
        "LlamaForCausalLM",
        {"hidden_act": "silu", "attention_bias": False, "mlp_bias": False},
        permutes_rows=True,
    ),
    "qwen2": Architecture(
        "qwen2",
        "Qwen2ForCausalLM",
        {"hidden_act": "silu"},
        more_names={f"attn_{part}.bias": f"self_attn.{part}_proj.bias" for part in "qkv"},
    ),
    "qwen3": Architecture(
        "qwen3",
        "Qwen3ForCausalLM",
        {"hidden_act": "silu", "attention_bias": False},
        more_names=HEAD_NORMS,
    ),
    "gemma3": Architecture(
        "gemma3_text",
        "Gemma3ForCausalLM",
        {"hidden_activation": "gelu_pytorch_tanh", "attention_bias": False},
        norm_offset=1.0,
        more_names=HEAD_NORMS
        | {
            "post_attention_norm.weight": "post_attention_layernorm.weight",
            "ffn_norm.weight": "pre_feedforward_layernorm.weight",
            "post_ffw_norm.weight": "post_feedforward_layernorm.weight",
        },
    ),
}
GEMMA3_PATTERN = 6
"""Every sixth layer of Gemma 3 is a full one; llama.cpp knows that and older files do not say it."""
GEMMA3_27B_LAYERS = 62
"""The one size whose scores are scaled by hidden size a head; GGUF does not say it, llama.cpp knows it so."""


def read_field(reader: GGUFReader, key: str) -> Any:  # noqa: ANN401 - GGUF values are of any type
    """The value of a metadata field; ValueError when the file lacks it."""
    found = reader.fields.get(key)
    if found is None:
        raise ValueError(f"expected {key} in the GGUF file, got none: use a complete GGUF")
    return found.contents()


def read_optional(reader: GGUFReader, key: str, default: Any = None) -> Any:  # noqa: ANN401 - as above
    """The value of a metadata field, `default` when the file lacks it."""
    found = reader.fields.get(key)
    return default if found is None else found.contents()


def read_architecture(reader: GGUFReader) -> tuple[str, Architecture]:
    """The prefix of the file's own keys, and what it means; ValueError when it is not computed here."""
    name = read_field(reader, "general.architecture")
    if name not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise ValueError(f"expected general.architecture to be one of {known} in the GGUF file, got {name!r}")
    return name, ARCHITECTURES[name]


def read_config(reader: GGUFReader) -> dict[str, Any]:
    """The model's shape as the keys of Hugging Face's config.json; ValueError when it is not computed here.

    Special token ids are those of the GGUF's tokenizer section.
    """
    prefix, architecture = read_architecture(reader)
    num_heads = read_field(reader, f"{prefix}.attention.head_count")
    hidden_size = read_field(reader, f"{prefix}.embedding_length")
    head_dim = read_optional(reader, f"{prefix}.attention.key_length", hidden_size // num_heads)
    for key in ("rope.dimension_count", "attention.value_length"):
        if (size := read_optional(reader, f"{prefix}.{key}", head_dim)) != head_dim:
            raise ValueError(
                f"expected {prefix}.{key} to be the head size {head_dim} in the GGUF file, got {size}: "
                "that is not computed here"
            )
    tokens = read_field(reader, "tokenizer.ggml.tokens")
    return {
        "architectures": [architecture.class_name],
        "model_type": architecture.model_type,
        "vocab_size": read_optional(reader, f"{prefix}.vocab_size", len(tokens)),
        "hidden_size": hidden_size,
        "intermediate_size": read_field(reader, f"{prefix}.feed_forward_length"),
        "num_hidden_layers": read_field(reader, f"{prefix}.block_count"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": read_optional(reader, f"{prefix}.attention.head_count_kv", num_heads),
        "head_dim": head_dim,
        **architecture.settings,
        "max_position_embeddings": read_field(reader, f"{prefix}.context_length"),
        "rms_norm_eps": _shortest(read_field(reader, f"{prefix}.attention.layer_norm_rms_epsilon")),
        **(_gemma3_settings(reader, prefix, head_dim) if prefix == "gemma3" else _rope(reader, prefix, 1e4)),
        "tie_word_embeddings": all(tensor.name != "output.weight" for tensor in reader.tensors),
        "bos_token_id": read_optional(reader, "tokenizer.ggml.bos_token_id"),
        "eos_token_id": read_field(reader, "tokenizer.ggml.eos_token_id"),
        "pad_token_id": read_optional(reader, "tokenizer.ggml.padding_token_id"),
        "dtype": "float32",
    }


def _gemma3_settings(reader: GGUFReader, prefix: str, head_dim: int) -> dict[str, Any]:
    num_layers = read_field(reader, f"{prefix}.block_count")
    pattern = read_optional(reader, f"{prefix}.attention.sliding_window_pattern", GEMMA3_PATTERN)
    slides = pattern if isinstance(pattern, list) else [(i + 1) % pattern != 0 for i in range(num_layers)]
    scalar = head_dim
    if num_layers == GEMMA3_27B_LAYERS:
        hidden = read_field(reader, f"{prefix}.embedding_length")
        scalar = hidden // read_field(reader, f"{prefix}.attention.head_count")
    return {
        **_rope(reader, prefix, 1e6),
        "rope_local_base_freq": _shortest(read_optional(reader, f"{prefix}.rope.freq_base_swa", 1e4)),
        "sliding_window": read_field(reader, f"{prefix}.attention.sliding_window"),
        "layer_types": ["sliding_attention" if slide else "full_attention" for slide in slides],
        "query_pre_attn_scalar": scalar,
        "final_logit_softcapping": read_optional(reader, f"{prefix}.final_logit_softcapping"),
    }


def _rope(reader: GGUFReader, prefix: str, default_base: float) -> dict[str, Any]:
    base = _shortest(read_optional(reader, f"{prefix}.rope.freq_base", default_base))
    kind = read_optional(reader, f"{prefix}.rope.scaling.type", "none")
    if kind == "none":
        return {"rope_theta": base}
    if kind != "linear":
        raise ValueError(f"expected {prefix}.rope.scaling.type linear in the GGUF file, got {kind!r}")
    factor = _shortest(read_field(reader, f"{prefix}.rope.scaling.factor"))
    return {"rope_theta": base, "rope_scaling": {"rope_type": "linear", "factor": factor}}


def read_weights(reader: GGUFReader) -> Weights:
    """All tensors in fp32 by Hugging Face's names, [rows, columns] as torch keeps them.

    q and k rows are put back into the half-split order that Hugging Face's rotary embedding expects, and
    Gemma's norms lose the 1 that GGUF has added. ValueError on a tensor that the architecture does not have.
    """
    prefix, architecture = read_architecture(reader)
    num_heads = read_field(reader, f"{prefix}.attention.head_count")
    num_kv_heads = read_optional(reader, f"{prefix}.attention.head_count_kv", num_heads)
    weights: Weights = {}
    for tensor in reader.tensors:
        name = _hf_name(tensor.name, prefix, architecture)
        values = np.asarray(dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)
        # GGUF names the fastest dimension first.
        values = values.reshape([int(size) for size in reversed(tensor.shape)])
        if architecture.permutes_rows and name.endswith("q_proj.weight"):
            values = unpermute(values, num_heads)
        elif architecture.permutes_rows and name.endswith("k_proj.weight"):
            values = unpermute(values, num_kv_heads)
        elif architecture.norm_offset and name.endswith("norm.weight"):
            values = values - np.float32(architecture.norm_offset)
        weights[name] = np.ascontiguousarray(values)
    return weights


def unpermute(rows: npt.NDArray[np.float32], num_heads: int) -> npt.NDArray[np.float32]:
    """Undo the row order of llama.cpp's conversion, in which each head's rotated pairs are neighbours.

    Within a head of D rows, GGUF row 2i is Hugging Face's row i and GGUF row 2i+1 its row D/2+i.
    Source: `permute` in llama.cpp's convert_hf_to_gguf.py, of which this is the inverse.
    """
    num_rows, num_columns = rows.shape
    head_dim = num_rows // num_heads
    pairs = rows.reshape(num_heads, head_dim // 2, 2, num_columns)
    return pairs.swapaxes(1, 2).reshape(num_rows, num_columns)


def _hf_name(name: str, prefix: str, architecture: Architecture) -> str:
    if name in TOP_NAMES:
        return TOP_NAMES[name]
    block, _, rest = name.partition(".")
    index, _, part = rest.partition(".")
    names = LAYER_NAMES | architecture.more_names
    if block == "blk" and index.isdecimal() and part in names:
        return f"model.layers.{index}.{names[part]}"
    raise ValueError(f"expected the tensors of a plain {prefix} model in the GGUF file, got {name!r}")


def _shortest(value: float) -> float:
    # GGUF keeps fp32: 9.999999747378752e-06 is the 1e-05 of the original config.
    return float(str(np.float32(value)))
