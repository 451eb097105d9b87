"""A GGUF becomes Hugging Face files with the same values; what is not computed here is refused."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest
from gguf import GGUFReader

sys.path.insert(0, str(Path(__file__).parent))
from toy_gguf import (
    HEAD_DIMS,
    HEADS,
    HIDDEN,
    KV_HEADS,
    SPM_TOKENS,
    TOKENS,
    toy_tensors,
    toy_weights,
    write_toy,
)
from transformers import Qwen2Tokenizer

from firstdiff.engine.gguf_tokenizer import byte_level_bpe, merges_of_scores, read_tokenizer_files
from firstdiff.engine.gguf_weights import read_config, read_weights, unpermute
from firstdiff.engine.model_config import ModelConfig
from firstdiff.engine.tokenizer import IncrementalDetokenizer, Tokenizer


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


LAYER_NAMES = {
    "input_layernorm.weight": "attn_norm.weight",
    "self_attn.q_proj.weight": "attn_q.weight",
    "self_attn.k_proj.weight": "attn_k.weight",
    "self_attn.v_proj.weight": "attn_v.weight",
    "self_attn.o_proj.weight": "attn_output.weight",
    "post_attention_layernorm.weight": "ffn_norm.weight",
    "mlp.gate_proj.weight": "ffn_gate.weight",
    "mlp.up_proj.weight": "ffn_up.weight",
    "mlp.down_proj.weight": "ffn_down.weight",
}
HEAD_NORMS = {f"self_attn.{part}_norm.weight": f"attn_{part}_norm.weight" for part in "qk"}
MORE_NAMES = {
    "llama": {},
    "qwen2": {f"self_attn.{part}_proj.bias": f"attn_{part}.bias" for part in "qkv"},
    "qwen3": HEAD_NORMS,
    "gemma3": {
        **HEAD_NORMS,
        "post_attention_layernorm.weight": "post_attention_norm.weight",
        "pre_feedforward_layernorm.weight": "ffn_norm.weight",
        "post_feedforward_layernorm.weight": "post_ffw_norm.weight",
    },
}


@pytest.mark.parametrize("arch", MORE_NAMES)
def test_every_tensor_arrives_with_its_values(tmp_path: Path, arch: str) -> None:
    weights = read_weights(GGUFReader(write_toy(tmp_path / "toy.gguf", arch=arch)))
    given = toy_weights(arch)
    assert len(weights) == len(toy_tensors(arch))
    assert {values.dtype for values in weights.values()} == {np.dtype(np.float32)}
    names = {
        f"model.layers.0.{ours}": f"blk.0.{its}" for ours, its in (LAYER_NAMES | MORE_NAMES[arch]).items()
    }
    names |= {
        "model.embed_tokens.weight": "token_embd.weight",
        "model.norm.weight": "output_norm.weight",
    }
    assert weights.keys() == names.keys()
    for name, source in names.items():
        values = weights[name]
        if arch == "llama" and source.endswith(("attn_q.weight", "attn_k.weight")):
            values = permute(values, HEADS if "attn_q" in source else KV_HEADS)
        if arch == "gemma3" and name.endswith("norm.weight"):
            values = values + 1
        assert np.array_equal(values, given[source]), name


@pytest.mark.parametrize("arch", MORE_NAMES)
def test_the_config_is_one_that_is_computed(tmp_path: Path, arch: str) -> None:
    raw = read_config(GGUFReader(write_toy(tmp_path / "toy.gguf", arch=arch)))
    (tmp_path / "config.json").write_text(json.dumps(raw))
    config = ModelConfig.load(tmp_path)
    assert (config.head_dim, config.num_heads, config.num_kv_heads) == (HEAD_DIMS[arch], HEADS, KV_HEADS)
    assert (config.qkv_bias, config.qk_norm, config.sandwich_norms) == {
        "llama": (False, False, False),
        "qwen2": (True, False, False),
        "qwen3": (False, True, False),
        "gemma3": (False, True, True),
    }[arch]
    assert config.ropes[0].theta == 1e4
    assert config.layers[0].window == (8 if arch == "gemma3" else None)


def test_linear_scaling_arrives(tmp_path: Path) -> None:
    keys = {"gemma3.rope.scaling.type": "linear", "gemma3.rope.scaling.factor": 8.0}
    raw = read_config(GGUFReader(write_toy(tmp_path / "toy.gguf", arch="gemma3", extra_keys=keys)))
    (tmp_path / "config.json").write_text(json.dumps(raw | {"layer_types": ["full_attention"]}))
    (rope,) = ModelConfig.load(tmp_path).ropes
    assert (rope.kind, rope.factor, rope.theta) == ("linear", 8.0, 1e6)
    yarn = {"qwen2.rope.scaling.type": "yarn"}
    with pytest.raises(ValueError, match=r"expected qwen2.rope.scaling.type linear .* got 'yarn'"):
        read_config(GGUFReader(write_toy(tmp_path / "b.gguf", arch="qwen2", extra_keys=yarn)))


def sentencepiece_toy(folder: Path) -> Tokenizer:
    reader = GGUFReader(write_toy(folder / "toy.gguf", arch="gemma3"))
    for name, content in read_tokenizer_files(reader).items():
        (folder / name).write_text(content, encoding="utf-8")
    return Tokenizer.load(folder)


def test_sentencepiece_merges_the_best_pieces(tmp_path: Path) -> None:
    tokenizer = sentencepiece_toy(tmp_path)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (2, 1)
    ids = tokenizer.encode("hello abc\n  <b>a<eos>é東")
    assert [SPM_TOKENS[i] for i in ids] == [
        "<bos>",
        "hello",
        "\u2581a",  # better than "ab" and so than "abc"
        "bc",
        "\n",
        "  ",
        "<b>",
        "a",
        "<eos>",
        "é",
        *(f"<0x{byte:02X}>" for byte in "東".encode()),
    ]
    assert tokenizer.decode(ids[1:]) == "hello abc\n  <b>a<eos>é東"
    assert tokenizer.decode(ids, skip_special_tokens=True) == "hello abc\n  <b>aé東"
    assert [tokenizer.token_bytes(i) for i in ids[2:5]] == [b" a", b"bc", b"\n"]
    assert b"".join(tokenizer.token_bytes(i) for i in ids[-3:]) == "東".encode()
    detokenizer = IncrementalDetokenizer(tokenizer, [2])
    pieces = [detokenizer.push(i) for i in ids[1:]] + [detokenizer.finish()]
    assert "".join(pieces) == tokenizer.decode(ids, skip_special_tokens=True)
    assert pieces[-4:] == ["", "", "東", ""]


def test_a_piece_of_several_halves_is_merged_from_any_of_them() -> None:
    pieces = {"a": 0.0, "b": 0.0, "ab": -2.0, "aa": -1.0, "aab": -3.0}
    assert merges_of_scores(pieces) == [("a", "a"), ("a", "b"), ("a", "ab"), ("aa", "b")]


def test_qwen2_splits_as_transformers_own_class_does() -> None:
    letters = TOKENS[3:]
    vocab = {text: index for index, text in enumerate(letters)}
    merges = [("Ġ", "a"), ("a", "b")]
    ours = byte_level_bpe(vocab, merges, "qwen2")
    theirs = Qwen2Tokenizer(vocab=vocab, merges=merges).backend_tokenizer
    for text in ("ab  ab\n\n ab's 12 3", "e\u0301ab \u00e9", "x_ab--\r\n\tab  ", "I'LL ab٣٤"):
        assert ours.pre_tokenizer.pre_tokenize_str(text) == theirs.pre_tokenizer.pre_tokenize_str(text)
        assert ours.encode(text).ids == theirs.encode(text).ids
        assert ours.decode(ours.encode(text).ids) == theirs.decode(theirs.encode(text).ids)


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


def test_what_is_not_computed_is_refused(tmp_path: Path) -> None:
    file = write_toy(tmp_path / "a.gguf", extra_keys={"general.architecture": "gemma2"})
    with pytest.raises(
        ValueError, match=r"expected general.architecture to be one of llama, qwen2, .* 'gemma2'"
    ):
        read_config(GGUFReader(file))
    with pytest.raises(
        ValueError, match=r"expected llama.rope.dimension_count to be the head size 8 .* got 4"
    ):
        read_config(GGUFReader(write_toy(tmp_path / "b.gguf", rope_dimensions=4)))
    for name in ("blk.0.attn_q.bias", "rope_freqs.weight", "blk.x.attn_q.weight", "blk.0.attn_q_norm.weight"):
        with pytest.raises(ValueError, match=f"expected the tensors of a plain llama model .* got '{name}'"):
            read_weights(GGUFReader(write_toy(tmp_path / f"{name}.gguf", extra_tensor=name)))


def test_an_unknown_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="got 'llama-bpe': use the model's Hugging Face folder"):
        read_tokenizer_files(GGUFReader(write_toy(tmp_path / "a.gguf", pre="llama-bpe")))
    with pytest.raises(ValueError, match=r"expected tokenizer.ggml.add_bos_token false"):
        read_tokenizer_files(GGUFReader(write_toy(tmp_path / "b.gguf", add_bos=True)))
    for key, word in (
        ("add_space_prefix", "add_space_prefix False"),
        ("add_eos_token", "add_eos_token False"),
    ):
        file = write_toy(tmp_path / f"{key}.gguf", arch="gemma3", extra_keys={f"tokenizer.ggml.{key}": True})
        with pytest.raises(ValueError, match=word):
            read_tokenizer_files(GGUFReader(file))
