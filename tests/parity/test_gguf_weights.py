"""Weights and config from GGUF are those that transformers reads from the same file, bit for bit.

SmolLM2's file is a real one; the other architectures' are toys, since transformers takes a minute for Gemma's
(for which tests/parity/test_gemma3.py compares with llama.cpp).
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from gguf import GGUFReader
from safetensors.torch import load_file

sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))
from toy_gguf import HEAD_DIMS, write_toy

from firstdiff.engine.gguf_weights import read_config, read_weights
from firstdiff.engine.model_store import resolve

UNREAD = {"architectures", "dtype", "rope_theta", "rope_local_base_freq", "rms_norm_eps", "pad_token_id"}
"""What transformers keeps in another form, and what it does not take from a GGUF file."""
UNREAD |= {"head_dim", "query_pre_attn_scalar"}


@pytest.mark.parametrize("arch", HEAD_DIMS)
def test_a_toy_of_each_architecture(tmp_path: Path, arch: str) -> None:
    from transformers import AutoModelForCausalLM

    file = write_toy(tmp_path / "toy.gguf", arch=arch)
    reference = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=file.name, dtype=torch.float32)
    expected = reference.state_dict()
    reader = GGUFReader(file)
    ours = {name: torch.from_numpy(values.copy()) for name, values in read_weights(reader).items()}
    assert set(expected) - set(ours) == {"lm_head.weight"}
    assert set(ours) <= set(expected)
    assert [name for name, tensor in ours.items() if not torch.equal(tensor, expected[name])] == []
    config = read_config(reader)
    for key in config.keys() - UNREAD:
        assert config[key] == getattr(reference.config, key), key
    ropes = reference.config.rope_parameters
    if arch == "gemma3":
        assert ropes["sliding_attention"]["rope_theta"] == config["rope_local_base_freq"]
        ropes = ropes["full_attention"]
    assert ropes["rope_theta"] == config["rope_theta"]


def gguf_file() -> Path:
    (file,) = resolve("smollm2-135m").path.glob("*.gguf")
    return file


@pytest.mark.model
def test_weights_equal_transformers_own_dequantisation() -> None:
    from transformers import AutoModelForCausalLM

    file = gguf_file()
    # transformers needs accelerate for this, which the dev extra brings.
    reference = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    expected = reference.state_dict()
    ours = load_file(file.with_name("model.safetensors"))

    assert set(expected) - set(ours) == {"lm_head.weight"}
    assert set(ours) <= set(expected)
    assert expected["lm_head.weight"].data_ptr() == expected["model.embed_tokens.weight"].data_ptr()
    unequal = [
        name
        for name, tensor in ours.items()
        # As integers, so that neither a sign of zero nor a NaN is passed over.
        if not torch.equal(tensor.view(torch.int32), expected[name].view(torch.int32))
    ]
    assert unequal == []
    assert sum(tensor.numel() for tensor in ours.values()) == 134_515_008

    config = json.loads(file.with_name("config.json").read_text())
    for key in config.keys() - {"architectures", "dtype", "rope_theta", "rms_norm_eps", "pad_token_id"}:
        assert config[key] == getattr(reference.config, key), key
    assert config["rope_theta"] == reference.config.rope_parameters["rope_theta"]
    assert torch.tensor(config["rms_norm_eps"]) == torch.tensor(reference.config.rms_norm_eps)
