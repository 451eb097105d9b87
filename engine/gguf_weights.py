"""From a GGUF file to Hugging Face's weights and config.

Owns: GGUF's tensor names, its order of q and k rows, dequantisation to fp32. Refuses to know: downloads,
where files are kept, tokenizers, torch. Invariants: every tensor of the file is converted exactly once or
refused; values are those of the quantised blocks, bit for bit, with no rounding of our own.

Usage: `weights = read_weights(GGUFReader(path)); config = read_config(reader)`.
"""

from __future__ import annotations

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


def read_field(reader: GGUFReader, key: str) -> Any:  # noqa: ANN401 - GGUF values are of any type
    """The value of a metadata field; ValueError when the file lacks it."""
    field = reader.fields.get(key)
    if field is None:
        raise ValueError(f"expected {key} in the GGUF file, got none: use a complete Llama GGUF")
    return field.contents()


def read_config(reader: GGUFReader) -> dict[str, Any]:
    """The model's shape as Hugging Face's LlamaConfig keys; ValueError when it is not a Llama.

    Special token ids are those of the GGUF's tokenizer section.
    """
    architecture = read_field(reader, "general.architecture")
    if architecture != "llama":
        raise ValueError(f"expected general.architecture llama in the GGUF file, got {architecture!r}")
    num_heads = read_field(reader, "llama.attention.head_count")
    head_dim = read_field(reader, "llama.rope.dimension_count")
    hidden_size = read_field(reader, "llama.embedding_length")
    if num_heads * head_dim != hidden_size:
        raise ValueError(
            f"expected heads x rope dimensions to make the hidden size {hidden_size} in the GGUF file, "
            f"got {num_heads} x {head_dim}: partial rotation is not computed here"
        )
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": read_field(reader, "llama.vocab_size"),
        "hidden_size": hidden_size,
        "intermediate_size": read_field(reader, "llama.feed_forward_length"),
        "num_hidden_layers": read_field(reader, "llama.block_count"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": read_field(reader, "llama.attention.head_count_kv"),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "max_position_embeddings": read_field(reader, "llama.context_length"),
        "rms_norm_eps": _shortest(read_field(reader, "llama.attention.layer_norm_rms_epsilon")),
        "rope_theta": _shortest(read_field(reader, "llama.rope.freq_base")),
        "tie_word_embeddings": all(tensor.name != "output.weight" for tensor in reader.tensors),
        "bos_token_id": read_field(reader, "tokenizer.ggml.bos_token_id"),
        "eos_token_id": read_field(reader, "tokenizer.ggml.eos_token_id"),
        "pad_token_id": read_field(reader, "tokenizer.ggml.padding_token_id"),
        "dtype": "float32",
    }


def read_weights(reader: GGUFReader) -> Weights:
    """All tensors in fp32 by Hugging Face's names, [rows, columns] as torch keeps them.

    q and k rows are put back into the half-split order that Hugging Face's rotary embedding expects.
    ValueError on a tensor that a plain Llama does not have.
    """
    num_heads = read_field(reader, "llama.attention.head_count")
    num_kv_heads = read_field(reader, "llama.attention.head_count_kv")
    weights: Weights = {}
    for tensor in reader.tensors:
        name = _hf_name(tensor.name)
        values = np.asarray(dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)
        # GGUF names the fastest dimension first.
        values = values.reshape([int(size) for size in reversed(tensor.shape)])
        if name.endswith("q_proj.weight"):
            values = unpermute(values, num_heads)
        elif name.endswith("k_proj.weight"):
            values = unpermute(values, num_kv_heads)
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


def _hf_name(name: str) -> str:
    if name in TOP_NAMES:
        return TOP_NAMES[name]
    block, _, rest = name.partition(".")
    index, _, part = rest.partition(".")
    if block == "blk" and index.isdecimal() and part in LAYER_NAMES:
        return f"model.layers.{index}.{LAYER_NAMES[part]}"
    raise ValueError(f"expected the tensors of a plain Llama in the GGUF file, got {name!r}")


def _shortest(value: float) -> float:
    # GGUF keeps fp32: 9.999999747378752e-06 is the 1e-05 of the original config.
    return float(str(np.float32(value)))
