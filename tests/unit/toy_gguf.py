"""GGUF files of one-layer models, one of each architecture, right or wrong in a chosen way."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Quant
from gguf import TokenType
from tokenizers.pre_tokenizers import ByteLevel

HIDDEN, HEADS, KV_HEADS, INNER = 32, 4, 2, 64
HEAD_DIMS = {"llama": 8, "qwen2": 8, "qwen3": 128, "gemma3": 16}
QUANTS = {"llama": Quant.Q4_1, "qwen2": Quant.F16, "qwen3": Quant.BF16, "gemma3": Quant.Q4_1}
"""All keep the toy's values exactly."""
TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *sorted(ByteLevel.alphabet()), "Ġa", "ab"]
PIECES = [
    "\u2581",
    *"abcdehlnoé",
    "\u2581a",
    "ab",
    "aa",
    "aaa",
    "bc",
    "abc",
    "ll",
    "llo",
    "he",
    "\u2581hello",
    "hello",
]
SPM_SPECIAL = ["<pad>", "<eos>", "<bos>", "<unk>", "<end_of_turn>"]
SPM_TOKENS = [*SPM_SPECIAL, "\n", "  ", "<b>", *(f"<0x{byte:02X}>" for byte in range(256)), *PIECES]
CHAT_TEMPLATE = "{{ messages[0]['content'] }}"


def toy_tensors(arch: str) -> dict[str, tuple[int, ...]]:
    """GGUF name -> shape of the architecture's tensors."""
    head_dim, tokens = HEAD_DIMS[arch], toy_tokens(arch)
    q_size, kv_size = HEADS * head_dim, KV_HEADS * head_dim
    layer: dict[str, tuple[int, ...]] = {
        "attn_norm.weight": (HIDDEN,),
        "attn_q.weight": (q_size, HIDDEN),
        "attn_k.weight": (kv_size, HIDDEN),
        "attn_v.weight": (kv_size, HIDDEN),
        "attn_output.weight": (HIDDEN, q_size),
        "ffn_norm.weight": (HIDDEN,),
        "ffn_gate.weight": (INNER, HIDDEN),
        "ffn_up.weight": (INNER, HIDDEN),
        "ffn_down.weight": (HIDDEN, INNER),
    }
    if arch == "qwen2":
        layer |= {"attn_q.bias": (q_size,), "attn_k.bias": (kv_size,), "attn_v.bias": (kv_size,)}
    if arch in ("qwen3", "gemma3"):
        layer |= {"attn_q_norm.weight": (head_dim,), "attn_k_norm.weight": (head_dim,)}
    if arch == "gemma3":
        layer |= {"post_attention_norm.weight": (HIDDEN,), "post_ffw_norm.weight": (HIDDEN,)}
    top: dict[str, tuple[int, ...]] = {
        "token_embd.weight": (len(tokens), HIDDEN),
        "output_norm.weight": (HIDDEN,),
    }
    return top | {f"blk.0.{name}": shape for name, shape in layer.items()}


def toy_tokens(arch: str) -> list[str]:
    return SPM_TOKENS if arch == "gemma3" else TOKENS


def toy_weights(arch: str = "llama") -> dict[str, np.ndarray]:
    """By GGUF's names; multiples of 1/8 from 0 to 15/8 in each block of 16, which Q4_1 keeps exactly."""
    rng = np.random.default_rng(5)
    weights = {}
    for name, shape in toy_tensors(arch).items():
        levels = rng.integers(0, 16, shape)
        levels.reshape(-1, 16)[:, :2] = [0, 15]
        weights[name] = (levels / 8).astype(np.float32)
    return weights


def _adders(writer: gguf.GGUFWriter) -> dict[type, Any]:
    return {
        bool: writer.add_bool,
        int: writer.add_uint32,
        str: writer.add_string,
        float: writer.add_float32,
    }


def write_toy(
    path: Path,
    *,
    arch: str = "llama",
    pre: str | None = None,
    rope_dimensions: int | None = None,
    add_bos: bool | None = None,
    extra_tensor: str | None = None,
    extra_keys: dict[str, Any] | None = None,
) -> Path:
    """Write the toy model of `arch`, or one that is wrong in a chosen way."""
    writer = gguf.GGUFWriter(path, arch)
    writer.add_name("toy")
    writer.add_block_count(1)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(1e6 if arch == "gemma3" else 10000.0)
    writer.add_rope_dimension_count(rope_dimensions or HEAD_DIMS[arch])
    writer.add_vocab_size(len(toy_tokens(arch)))
    if HEAD_DIMS[arch] != HIDDEN // HEADS:
        writer.add_key_length(HEAD_DIMS[arch])
        writer.add_value_length(HEAD_DIMS[arch])
    if arch == "gemma3":
        writer.add_sliding_window(8)
        _add_sentencepiece(writer, add_bos=add_bos is not False)
    else:
        _add_byte_level(writer, pre or ("smollm" if arch == "llama" else "qwen2"), add_bos=bool(add_bos))
    for key, value in (extra_keys or {}).items():
        add = _adders(writer)[type(value)]
        add(key, value)
    _add_tensors(writer, arch, extra_tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_byte_level(writer: gguf.GGUFWriter, pre: str, *, add_bos: bool) -> None:
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(TOKENS)
    writer.add_token_types(
        [TokenType.CONTROL if text.startswith("<|") else TokenType.NORMAL for text in TOKENS]
    )
    writer.add_token_merges(["Ġ a", "a b"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_add_bos_token(add_bos)
    writer.add_chat_template(CHAT_TEMPLATE)


def _add_sentencepiece(writer: gguf.GGUFWriter, *, add_bos: bool) -> None:
    """Pieces in their order of merit; no chat template, as with the base models."""
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(SPM_TOKENS)
    first_piece = len(SPM_TOKENS) - len(PIECES)
    writer.add_token_scores([-1000.0] * 8 + [0.0] * 256 + [-float(i) for i in range(len(PIECES))])
    writer.add_token_types(
        [TokenType.CONTROL] * len(SPM_SPECIAL)
        + [TokenType.USER_DEFINED] * 3
        + [TokenType.BYTE] * 256
        + [TokenType.NORMAL] * (len(SPM_TOKENS) - first_piece)
    )
    writer.add_bos_token_id(2)
    writer.add_eos_token_id(1)
    writer.add_unk_token_id(3)
    writer.add_pad_token_id(0)
    writer.add_add_bos_token(add_bos)
    writer.add_add_space_prefix(False)


def _add_tensors(writer: gguf.GGUFWriter, arch: str, extra_tensor: str | None) -> None:
    tensors = toy_weights(arch)
    if extra_tensor is not None:
        tensors[extra_tensor] = np.ones(HIDDEN, dtype=np.float32)
    for name, values in tensors.items():
        if values.ndim == 2:
            kind = QUANTS[arch]
            writer.add_tensor(name, gguf.quants.quantize(values, kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, values)
