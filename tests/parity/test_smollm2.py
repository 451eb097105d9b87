"""SmolLM2 through the whole engine against transformers, in fp32."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaForCausalLM

sys.path.insert(0, str(Path(__file__).parent))
from engine_driver import EngineUnderTest, greedy, ids_of
from tiny_llama import HandFed, make_cache, make_decoder, reference_logits

from firstdiff.engine.attention_cpu import CpuAttention
from firstdiff.engine.model_store import resolve
from firstdiff.engine.tokenizer import Tokenizer

pytestmark = pytest.mark.model

NUM_PROMPTS, NUM_TOKENS = 32, 64
SUBJECTS = ["tides", "bread", "bridges", "glaciers", "chess", "comets", "honey", "maps"]
TASKS = [
    "Explain {} to a child.",
    "Write three facts about {}, numbered 1. 2. 3.",
    "Give a Python list of 5 words about {}.",
    "What would change without {}? Answer in two sentences, then list  4  risks.",
]


@pytest.fixture(scope="module")
def reference() -> LlamaForCausalLM:
    return AutoModelForCausalLM.from_pretrained(resolve("smollm2-135m").path, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def engine() -> EngineUnderTest:
    return EngineUnderTest(model="smollm2-135m", dtype="fp32", max_num_batched_tokens=256)


@pytest.fixture(scope="module")
def chat_prompts() -> list[list[int]]:
    tokenizer = Tokenizer.load(resolve("smollm2-135m").path)
    texts = [task.format(subject) for subject in SUBJECTS for task in TASKS]
    assert len(texts) == NUM_PROMPTS
    return [tokenizer.apply_chat_template([{"role": "user", "content": text}]) for text in texts]


def reference_generate(model: LlamaForCausalLM, prompts: list[list[int]], num_tokens: int) -> list[list[int]]:
    """transformers' greedy `generate`, left-padded; outputs end with EOS where it came."""
    width = max(map(len, prompts))
    ids = torch.tensor([[2] * (width - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    out = model.generate(ids, attention_mask=mask, max_new_tokens=num_tokens, do_sample=False, pad_token_id=2)
    eos = set(model.generation_config.eos_token_id)
    results = []
    for row in out[:, width:].tolist():
        end = next((i + 1 for i, token in enumerate(row) if token in eos), len(row))
        results.append(row[:end])
    return results


def test_greedy_ids_equal_transformers_generate(reference, engine, chat_prompts):
    expected = reference_generate(reference, chat_prompts, NUM_TOKENS)
    got = ids_of(engine.generate(chat_prompts, greedy(NUM_TOKENS)))
    assert sum(map(len, expected)) > NUM_PROMPTS * NUM_TOKENS // 2
    assert got == expected


def test_alone_or_in_a_batch_of_16_gives_the_same_ids(chat_prompts):
    # Without prefix reuse: what the batch has computed must not serve the requests that run alone.
    engine = EngineUnderTest(model="smollm2-135m", dtype="fp32", enable_prefix_caching=False)
    prompts = chat_prompts[:16]
    together = ids_of(engine.generate(prompts, greedy(16)))
    assert [ids_of(engine.generate([prompt], greedy(16)))[0] for prompt in prompts] == together


def test_bf16_is_as_far_from_fp32_as_transformers_bf16_is(reference, chat_prompts):
    folder = resolve("smollm2-135m").path
    rounded = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
    decoder = make_decoder(folder, dtype=torch.bfloat16)
    cache = make_cache(decoder, num_blocks=64, block_size=16, dtype=torch.bfloat16)
    fed = HandFed(decoder, CpuAttention(cache), num_blocks=64, block_size=16)
    ids = chat_prompts[0]
    sequence = fed.sequence(ids)
    rows = [fed.step([(sequence, 1)])[0] for _ in ids]
    ours = torch.stack(rows).log_softmax(-1)
    exact = reference_logits(reference, ids).log_softmax(-1)
    theirs = reference_logits(rounded, ids).float().log_softmax(-1)
    likely = exact > -8
    distance = (ours - exact).abs()[likely].mean()
    assert 1e-3 < distance < 1.5 * (theirs - exact).abs()[likely].mean()


@pytest.mark.parametrize("chunk", [3, 16, 17, 64])
def test_logits_agree_chunked_and_decoding(reference, chat_prompts, chunk):
    decoder = make_decoder(resolve("smollm2-135m").path)
    fed = HandFed(
        decoder, CpuAttention(make_cache(decoder, num_blocks=64, block_size=16)), num_blocks=64, block_size=16
    )
    texts = [chat_prompts[0], chat_prompts[9][:30], chat_prompts[3]]
    expected = [reference_logits(reference, ids) for ids in texts]
    sequences = [fed.sequence(ids) for ids in texts]
    while any(s.num_computed_tokens < s.num_tokens for s in sequences):
        # All but the last two tokens in chunks, then decode steps of one token.
        chunks = []
        for s in sequences:
            left = s.num_tokens - s.num_computed_tokens
            if left:
                chunks.append((s, 1 if left <= 2 else min(chunk, left - 2)))
        logits = fed.step(chunks)
        ordered = sorted(chunks, key=lambda c: c[1] != 1)
        for row, (s, _) in enumerate(ordered):
            want = expected[sequences.index(s)][s.num_computed_tokens - 1]
            assert (logits[row] - want).abs().max() < 1e-4
