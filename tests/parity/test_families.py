"""Every family's decoder against transformers on tiny random weights: ragged, chunked, past the window."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

sys.path.insert(0, str(Path(__file__).parent))
from tiny_families import SIZES, VARIANTS, VOCAB_SIZE, WINDOW, make_attention, make_family
from tiny_llama import BLOCK_SIZE, HandFed, make_cache, make_decoder, reference_logits

from firstdiff.engine.attention import TorchAttention
from firstdiff.engine.attention_cpu import CpuAttention
from firstdiff.engine.model_config import ModelConfig

TOLERANCE = 1e-4
BACKENDS = [TorchAttention, CpuAttention]


@pytest.fixture(scope="module", params=VARIANTS)
def family(request, tmp_path_factory):
    """(reference, decoder) of one variant."""
    folder = tmp_path_factory.mktemp(request.param)
    reference = make_family(folder, request.param)
    return reference, make_decoder(folder)


def prompt(length: int, *, seed: int) -> list[int]:
    return torch.randint(3, VOCAB_SIZE, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.mark.parametrize("attention_type", BACKENDS)
def test_ragged_prefill_agrees(family, attention_type):
    reference, decoder = family
    fed = HandFed(decoder, make_attention(attention_type, decoder))
    prompts = [prompt(n, seed=n) for n in (1, 3, BLOCK_SIZE, WINDOW - 1, WINDOW, WINDOW + 1, 16, 41)]
    logits = fed.step([(fed.sequence(ids), len(ids)) for ids in prompts])
    for row, ids in enumerate(prompts):
        assert (logits[row] - reference_logits(reference, ids)[-1]).abs().max() < TOLERANCE


@pytest.mark.parametrize("attention_type", BACKENDS)
@pytest.mark.parametrize("chunk", [1, 3, WINDOW - 1, WINDOW, WINDOW + 2, 16])
def test_chunked_prefill_agrees_at_every_chunk_end(family, attention_type, chunk):
    reference, decoder = family
    fed = HandFed(decoder, make_attention(attention_type, decoder))
    ids = prompt(37, seed=5)
    expected = reference_logits(reference, ids)
    sequence = fed.sequence(ids)
    while sequence.num_computed_tokens < len(ids):
        n = min(chunk, len(ids) - sequence.num_computed_tokens)
        logits = fed.step([(sequence, n)])
        assert (logits[0] - expected[sequence.num_computed_tokens - 1]).abs().max() < TOLERANCE


@pytest.mark.parametrize("attention_type", BACKENDS)
def test_decode_and_prefill_agree_in_one_batch(family, attention_type):
    """Rows below, at and far beyond the window decode together while another prefills across it."""
    reference, decoder = family
    fed = HandFed(decoder, make_attention(attention_type, decoder))
    lengths = (2, WINDOW - 2, WINDOW, 33, 90)
    ids = {length: prompt(length + 6, seed=length) for length in (*lengths, 20)}
    sequences = {length: fed.sequence(tokens) for length, tokens in ids.items()}
    expected = {length: reference_logits(reference, tokens) for length, tokens in ids.items()}
    fed.step([(sequences[length], length) for length in lengths])
    for step in range(4):
        logits = fed.step([(sequences[n], 1) for n in lengths] + [(sequences[20], 5)])
        for row, length in enumerate(lengths):
            assert (logits[row] - expected[length][length + step]).abs().max() < TOLERANCE
        assert (logits[len(lengths)] - expected[20][5 * step + 4]).abs().max() < TOLERANCE


@pytest.mark.parametrize("attention_type", BACKENDS)
def test_what_the_windows_hide_never_matters(tmp_path, attention_type):
    """In sliding layers alone, the last row sees so far and no further: one token more changes it."""
    make_family(tmp_path, "gemma3")
    file = tmp_path / "config.json"
    config = json.loads(file.read_text())
    config["layer_types"] = ["sliding_attention"] * config["num_hidden_layers"]
    file.write_text(json.dumps(config))
    decoder = make_decoder(tmp_path)
    ids = prompt(45, seed=1)
    reach = len(ids) - 1 - config["num_hidden_layers"] * (WINDOW - 1)

    def last_row(token_ids: list[int]) -> torch.Tensor:
        fed = HandFed(decoder, make_attention(attention_type, decoder))
        sequence = fed.sequence(token_ids)
        fed.step([(sequence, len(ids) - 1)])
        return fed.step([(sequence, 1)])[0]

    expected = last_row(ids)
    assert torch.equal(last_row(prompt(reach, seed=2) + ids[reach:]), expected)
    assert not torch.equal(last_row([*ids[:reach], ids[reach] - 1, *ids[reach + 1 :]]), expected)


@pytest.mark.parametrize("variant", ["qwen2-window", "qwen3", "gemma3"])
def test_bf16_is_as_far_from_fp32_as_transformers_bf16_is(tmp_path, variant):
    exact_model = make_family(tmp_path, variant)
    rounded_model = AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.bfloat16, attn_implementation="eager"
    ).eval()
    decoder = make_decoder(tmp_path, dtype=torch.bfloat16)
    ours, theirs = [], []
    for seed in range(6):
        ids = prompt(40, seed=seed)
        fed = HandFed(decoder, make_attention(CpuAttention, decoder, dtype=torch.bfloat16))
        sequence = fed.sequence(ids)
        rows = torch.stack([fed.step([(sequence, 1)])[0] for _ in ids]).log_softmax(-1)
        exact = reference_logits(exact_model, ids).log_softmax(-1)
        rounded = reference_logits(rounded_model, ids).float().log_softmax(-1)
        ours.append((rows - exact).abs().mean())
        theirs.append((rounded - exact).abs().mean())
    assert 1e-3 < sum(ours) < 1.2 * sum(theirs)


def test_another_models_rules_are_refused(family):
    _, decoder = family
    cache = make_cache(decoder)
    if decoder.attention_rules == cache.plain_rules:
        return
    fed = HandFed(decoder, CpuAttention(cache))
    with pytest.raises(AssertionError, match="another model's scores"):
        fed.step([(fed.sequence(prompt(3, seed=0)), 3)])


OLD_GEMMA = {"rope_theta": 1e6, "rope_local_base_freq": 1e4, "sliding_window_pattern": 2}


@pytest.mark.parametrize("scaling", [None, {"rope_type": "linear", "factor": 8.0}])
def test_older_gemma_configs_mean_the_same(tmp_path, scaling):
    """The layout of the hub's files, read by transformers and by us."""
    make_family(tmp_path, "gemma3")
    file = tmp_path / "config.json"
    config = json.loads(file.read_text())
    del config["rope_parameters"], config["layer_types"]
    file.write_text(json.dumps(config | OLD_GEMMA | {"rope_scaling": scaling}))
    reference = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager").eval()
    decoder = make_decoder(tmp_path)
    assert [layer.window for layer in decoder.config.layers] == [WINDOW, None, WINDOW, None]
    fed = HandFed(decoder, make_attention(CpuAttention, decoder))
    ids = prompt(60, seed=3)
    logits = fed.step([(fed.sequence(ids), len(ids))])
    assert (logits[0] - reference_logits(reference, ids)[-1]).abs().max() < TOLERANCE


@pytest.mark.parametrize(
    ("variant", "change", "word"),
    [
        (
            "llama-biases",
            {"model_type": "mistral"},
            "model_type to be one of llama, qwen2, qwen3, gemma3_text",
        ),
        ("qwen2", {"hidden_act": "relu"}, "hidden_act"),
        ("qwen2", {"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}, "rope type"),
        ("qwen2", {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ("qwen2", {"attention_bias": True}, "no attention_bias"),
        ("qwen3", {"mlp_bias": True}, "no mlp_bias"),
        ("qwen3", {"quantization_config": {"quant_method": "gptq"}}, "no quantization_config"),
        ("qwen3", {"num_hidden_layers": None}, "an integer num_hidden_layers"),
        ("qwen2-window", {"layer_types": ["full_attention"]}, "3 layer_types"),
        ("qwen2-window", {"sliding_window": None}, "positive sliding_window"),
        ("gemma3", {"layer_types": ["chunked_attention"] * 4}, "4 layer_types"),
        ("gemma3", {"attn_logit_softcapping": 50.0}, "no attn_logit_softcapping"),
        ("gemma3", {"use_bidirectional_attention": True}, "no use_bidirectional_attention"),
        ("gemma3", {"rope_parameters": {"rope_theta": 1e6}}, "rope_parameters by layer type"),
    ],
)
def test_what_is_not_computed_is_refused(tmp_path, variant, change, word):
    config_type, changes = VARIANTS[variant]
    config = config_type(**(SIZES | {"vocab_size": VOCAB_SIZE} | changes)).to_dict()
    (tmp_path / "config.json").write_text(json.dumps(config))
    ModelConfig.load(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(ValueError, match=word):
        ModelConfig.load(tmp_path)
