"""A GGUF becomes Hugging Face files with the same values; what is not a plain Llama is refused."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest
from gguf import GGUFReader

sys.path.insert(0, str(Path(__file__).parent))
from toy_gguf import HEADS, HIDDEN, KV_HEADS, TENSORS, TOKENS, toy_weights, write_toy

from firstdiff.engine.gguf_tokenizer import read_tokenizer_files
from firstdiff.engine.gguf_weights import read_config, read_weights, unpermute


def permute(rows: np.ndarray, num_heads: int) -> np.ndarray:
    """As llama.cpp's converter does it, quoted."""
    return (
        rows.reshape(num_heads, 2, rows.shape[0] // num_heads // 2, *rows.shape[1:])
        .swapaxes(1, 2)
        .reshape(rows.shape)
    )


@pytest.mark.parametrize(("num_rows", "num_heads"), [(64, 1), (64, 4), (24, 3), (6, 3)])
def test_unpermute_undoes_llamacpps_permute(num_rows: int, num_heads: int) -> None:
    rows = np.arange(num_rows * 5, dtype=np.float32).reshape(num_rows, 5)
    assert np.array_equal(unpermute(permute(rows, num_heads), num_heads), rows)
    head = unpermute(rows, num_heads)[: num_rows // num_heads]
    half = len(head) // 2
    assert [head[1 % half, 0], head[half, 0]] == [rows[2 % (2 * half), 0], rows[1, 0]]


def test_every_tensor_arrives_with_its_values(tmp_path: Path) -> None:
    weights = read_weights(GGUFReader(write_toy(tmp_path / "toy.gguf")))
    given = toy_weights()
    assert len(weights) == len(TENSORS)
    assert {values.dtype for values in weights.values()} == {np.dtype(np.float32)}
    layer = "model.layers.0"
    same = {
        "model.embed_tokens.weight": "token_embd.weight",
        "model.norm.weight": "output_norm.weight",
        f"{layer}.input_layernorm.weight": "blk.0.attn_norm.weight",
        f"{layer}.self_attn.v_proj.weight": "blk.0.attn_v.weight",
        f"{layer}.self_attn.o_proj.weight": "blk.0.attn_output.weight",
        f"{layer}.post_attention_layernorm.weight": "blk.0.ffn_norm.weight",
        f"{layer}.mlp.gate_proj.weight": "blk.0.ffn_gate.weight",
        f"{layer}.mlp.up_proj.weight": "blk.0.ffn_up.weight",
        f"{layer}.mlp.down_proj.weight": "blk.0.ffn_down.weight",
    }
    for name, source in same.items():
        assert np.array_equal(weights[name], given[source]), name
    query, key = weights[f"{layer}.self_attn.q_proj.weight"], weights[f"{layer}.self_attn.k_proj.weight"]
    assert np.array_equal(permute(query, HEADS), given["blk.0.attn_q.weight"])
    assert np.array_equal(permute(key, KV_HEADS), given["blk.0.attn_k.weight"])


def test_config_and_tokenizer_files(tmp_path: Path) -> None:
    reader = GGUFReader(write_toy(tmp_path / "toy.gguf"))
    config = read_config(reader)
    assert (config["hidden_size"], config["num_key_value_heads"], config["head_dim"]) == (HIDDEN, KV_HEADS, 8)
    assert (config["rms_norm_eps"], config["rope_theta"]) == (1e-05, 10000.0)
    assert config["tie_word_embeddings"] is True
    files = {name: json.loads(content) for name, content in read_tokenizer_files(reader).items()}
    assert files["generation_config.json"]["eos_token_id"] == [2, 0]
    assert files["tokenizer_config.json"]["eos_token"] == "<|im_end|>"
    assert files["tokenizer_config.json"]["chat_template"] == "{{ messages[0]['content'] }}"
    assert files["tokenizer.json"]["model"]["vocab"] == {text: index for index, text in enumerate(TOKENS)}
    assert [token["content"] for token in files["tokenizer.json"]["added_tokens"]] == TOKENS[:3]


def test_an_untied_head(tmp_path: Path) -> None:
    reader = GGUFReader(write_toy(tmp_path / "toy.gguf", extra_tensor="output.weight"))
    assert read_config(reader)["tie_word_embeddings"] is False
    assert "lm_head.weight" in read_weights(reader)


def test_what_is_not_a_plain_llama_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=r"expected general.architecture llama in the GGUF file, got 'qwen2'"
    ):
        read_config(GGUFReader(write_toy(tmp_path / "a.gguf", arch="qwen2")))
    with pytest.raises(ValueError, match="got 4 x 4: partial rotation"):
        read_config(GGUFReader(write_toy(tmp_path / "b.gguf", rope_dimensions=4)))
    for name in ("blk.0.attn_q.bias", "rope_freqs.weight", "blk.x.attn_q.weight"):
        with pytest.raises(ValueError, match=f"expected the tensors of a plain Llama .* got '{name}'"):
            read_weights(GGUFReader(write_toy(tmp_path / f"{name}.gguf", extra_tensor=name)))


def test_an_unknown_pre_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="got 'gpt2' and 'llama-bpe': use the model's Hugging Face folder"):
        read_tokenizer_files(GGUFReader(write_toy(tmp_path / "a.gguf", pre="llama-bpe")))
    with pytest.raises(ValueError, match=r"expected tokenizer.ggml.add_bos_token false"):
        read_tokenizer_files(GGUFReader(write_toy(tmp_path / "b.gguf", add_bos=True)))
