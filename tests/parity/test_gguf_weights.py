"""The converted weights and config are those that transformers reads from the same GGUF, bit for bit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from firstdiff.engine.model_store import resolve

pytestmark = pytest.mark.model


def gguf_file() -> Path:
    (file,) = resolve("smollm2-135m").path.glob("*.gguf")
    return file


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
