"""Families other than Llama through the whole engine, built from a folder as `serve` builds it."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
from engine_driver import EngineUnderTest, greedy, ids_of
from tiny_families import WINDOW, make_family
from tiny_llama import BLOCK_SIZE

from firstdiff.engine.tiny_model import TOKENIZER_FILE, VOCAB_SIZE
from firstdiff.engine.tokenizer import Tokenizer


@pytest.mark.parametrize("variant", ["qwen2-window", "qwen3", "gemma3"])
def test_greedy_ids_equal_generate_through_the_whole_engine(tmp_path, variant):
    """A tokenizer's prompts, batched and chunked, past the window."""
    reference = make_family(tmp_path, variant, vocab_size=VOCAB_SIZE)
    shutil.copy(TOKENIZER_FILE, tmp_path / "tokenizer.json")
    tokenizer = Tokenizer.load(tmp_path)
    texts = ["def", "Assignment binds names to objects.", "for x in range(10): print(x)\n" * 3]
    prompts = [tokenizer.encode(text) for text in texts]
    assert len(prompts[0]) < WINDOW < len(prompts[2])
    expected = [
        reference.generate(torch.tensor([ids]), max_new_tokens=40, do_sample=False)[0, len(ids) :].tolist()
        for ids in prompts
    ]
    engine = EngineUnderTest(
        model=str(tmp_path),
        dtype="fp32",
        block_size=BLOCK_SIZE,
        max_num_seqs=4,
        max_num_batched_tokens=16,
        num_blocks=256,
    )
    assert ids_of(engine.generate(prompts, greedy(40))) == expected
    assert len({tuple(ids) for ids in expected}) == len(texts)
