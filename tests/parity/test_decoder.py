"""The decoder against transformers on tiny random Llamas: ragged, chunked, decoding."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
from tiny_llama import HandFed, make_cache, make_decoder, make_reference, reference_logits

from firstdiff.engine.attention import TorchAttention
from firstdiff.engine.attention_cpu import CpuAttention
from firstdiff.engine.linear import Linear, can_pack
from firstdiff.engine.model_config import ModelConfig
from firstdiff.engine.weights import load_weights

TOLERANCE = 1e-4


def prompt(length: int, *, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, 97, (length,), generator=generator).tolist()


@pytest.mark.parametrize("attention_type", [TorchAttention, CpuAttention])
@pytest.mark.parametrize(("num_kv_heads", "tied"), [(1, True), (2, True), (4, False)])
def test_ragged_prefill_agrees(tmp_path, attention_type, num_kv_heads, tied):
    reference = make_reference(tmp_path, num_kv_heads=num_kv_heads, tied=tied)
    decoder = make_decoder(tmp_path)
    fed = HandFed(decoder, attention_type(make_cache(decoder)))
    prompts = [prompt(length, seed=length) for length in (1, 3, 4, 5, 16, 31)]
    logits = fed.step([(fed.sequence(ids), len(ids)) for ids in prompts])
    for row, ids in enumerate(prompts):
        expected = reference_logits(reference, ids)[-1]
        assert (logits[row] - expected).abs().max() < TOLERANCE


@pytest.mark.parametrize("attention_type", [TorchAttention, CpuAttention])
@pytest.mark.parametrize("chunk", [1, 2, 3, 4, 5, 7, 16, 40])
def test_chunked_prefill_agrees_at_every_chunk_end(tmp_path, attention_type, chunk):
    reference = make_reference(tmp_path)
    decoder = make_decoder(tmp_path)
    fed = HandFed(decoder, attention_type(make_cache(decoder)))
    ids = prompt(37, seed=5)
    expected = reference_logits(reference, ids)
    sequence = fed.sequence(ids)
    while sequence.num_computed_tokens < len(ids):
        n = min(chunk, len(ids) - sequence.num_computed_tokens)
        logits = fed.step([(sequence, n)])
        assert (logits[0] - expected[sequence.num_computed_tokens - 1]).abs().max() < TOLERANCE


@pytest.mark.parametrize("attention_type", [TorchAttention, CpuAttention])
def test_mixed_decode_and_prefill_agree(tmp_path, attention_type):
    """Rows of very unlike lengths decode together while others prefill in chunks."""
    reference = make_reference(tmp_path)
    decoder = make_decoder(tmp_path)
    fed = HandFed(decoder, attention_type(make_cache(decoder)))
    lengths = (2, 9, 33, 70)
    ids = {length: prompt(length + 6, seed=length) for length in (*lengths, 20)}
    sequences = {length: fed.sequence(tokens) for length, tokens in ids.items()}
    fed.step([(sequences[length], length) for length in lengths])
    for step in range(3):
        logits = fed.step([(sequences[n], 1) for n in lengths] + [(sequences[20], 5)])
        for row, length in enumerate(lengths):
            expected = reference_logits(reference, ids[length])[length + step]
            assert (logits[row] - expected).abs().max() < TOLERANCE
        expected = reference_logits(reference, ids[20])[5 * (step + 1) - 1]
        assert (logits[len(lengths)] - expected).abs().max() < TOLERANCE


def test_slots_outside_the_context_never_matter(tmp_path):
    """The same step over a cache full of large numbers gives the same logits."""
    make_reference(tmp_path)
    decoder = make_decoder(tmp_path)
    ids = prompt(21, seed=1)
    results = []
    for filler in (0.0, 1e4):
        cache = make_cache(decoder)
        cache.keys.fill_(filler)
        cache.values.fill_(filler)
        fed = HandFed(decoder, CpuAttention(cache))
        sequence, other = fed.sequence(ids), fed.sequence(prompt(70, seed=2))
        fed.step([(sequence, 20), (other, 69)])
        results.append(fed.step([(sequence, 1), (other, 1)]))
    assert torch.equal(*results)


def test_packed_weights_equal_plain():
    if not can_pack(torch.bfloat16):
        pytest.skip("this build of torch or this CPU cannot pack bf16 weights: plain products are used")
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(96, 64, generator=generator).bfloat16()
    packed, plain = Linear(weight), Linear(weight, pack=False)
    assert packed.packed
    assert not plain.packed
    with torch.inference_mode():
        for rows in (1, 2, 8, 33):
            x = torch.randn(rows, 64, generator=generator).bfloat16()
            exact = x.double() @ weight.double().T
            # Both round the same fp32 sum to bf16 once: half a unit in the last place, 2^-8 of the value.
            for form in (packed, plain):
                assert ((form(x).double() - exact).abs() <= exact.abs() * 2**-8 + 1e-3).all()


def test_fp32_weights_are_never_packed():
    assert not Linear(torch.zeros(4, 4)).packed


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"model_type": "gpt2"}, "model_type"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, "rope type"),
    ],
)
def test_a_model_that_is_not_computed_here_is_refused(tmp_path, change, word):
    make_reference(tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(ValueError, match=word):
        ModelConfig.load(tmp_path)


def test_missing_extra_and_misshapen_tensors_are_refused(tmp_path):
    from safetensors.torch import load_file, save_file

    make_reference(tmp_path)
    config = ModelConfig.load(tmp_path)
    file = tmp_path / "model.safetensors"
    whole = load_file(file)
    name = "model.layers.1.mlp.down_proj.weight"
    for change, word in (
        ({k: v for k, v in whole.items() if k != name}, "expected tensor"),
        (whole | {"model.layers.1.mlp.extra": torch.zeros(1)}, "does not compute"),
        (whole | {name: torch.zeros(2, 2)}, "of shape"),
    ):
        save_file(change, file)
        with pytest.raises(ValueError, match=word):
            load_weights(tmp_path, config, dtype=torch.float32)
    file.write_bytes(b"not a safetensors file")
    with pytest.raises(ValueError, match="expected a safetensors file"):
        load_weights(tmp_path, config, dtype=torch.float32)
