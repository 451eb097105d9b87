"""A GGUF file of a one-layer Llama, right or wrong in a chosen way."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
from tokenizers.pre_tokenizers import ByteLevel

HIDDEN, HEADS, KV_HEADS, INNER = 32, 4, 2, 64
TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *sorted(ByteLevel.alphabet()), "Ġa", "ab"]
TENSORS = {
    "token_embd.weight": (len(TOKENS), HIDDEN),
    "output_norm.weight": (HIDDEN,),
    "blk.0.attn_norm.weight": (HIDDEN,),
    "blk.0.attn_q.weight": (HIDDEN, HIDDEN),
    "blk.0.attn_k.weight": (HIDDEN // HEADS * KV_HEADS, HIDDEN),
    "blk.0.attn_v.weight": (HIDDEN // HEADS * KV_HEADS, HIDDEN),
    "blk.0.attn_output.weight": (HIDDEN, HIDDEN),
    "blk.0.ffn_norm.weight": (HIDDEN,),
    "blk.0.ffn_gate.weight": (INNER, HIDDEN),
    "blk.0.ffn_up.weight": (INNER, HIDDEN),
    "blk.0.ffn_down.weight": (HIDDEN, INNER),
}


def toy_weights() -> dict[str, np.ndarray]:
    """By GGUF's names; multiples of 1/8 from 0 to 15/8 in each block of 32, which Q4_1 keeps exactly."""
    rng = np.random.default_rng(5)
    weights = {}
    for name, shape in TENSORS.items():
        levels = rng.integers(0, 16, shape)
        levels.reshape(-1, 32)[:, :2] = [0, 15]
        weights[name] = (levels / 8).astype(np.float32)
    return weights


def write_toy(
    path: Path,
    *,
    arch: str = "llama",
    pre: str = "smollm",
    rope_dimensions: int = HIDDEN // HEADS,
    add_bos: bool = False,
    extra_tensor: str | None = None,
) -> Path:
    """Write the toy model, or one that is wrong in a chosen way."""
    writer = gguf.GGUFWriter(path, arch)
    writer.add_block_count(1)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(rope_dimensions)
    writer.add_vocab_size(len(TOKENS))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(TOKENS)
    writer.add_token_types(
        [gguf.TokenType.CONTROL if text.startswith("<|") else gguf.TokenType.NORMAL for text in TOKENS]
    )
    writer.add_token_merges(["Ġ a", "a b"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_add_bos_token(add_bos)
    writer.add_chat_template("{{ messages[0]['content'] }}")
    tensors = toy_weights()
    if extra_tensor is not None:
        tensors[extra_tensor] = np.ones(HIDDEN, dtype=np.float32)
    for name, values in tensors.items():
        if values.ndim == 2:
            kind = gguf.GGMLQuantizationType.Q4_1
            writer.add_tensor(name, gguf.quants.quantize(values, kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
