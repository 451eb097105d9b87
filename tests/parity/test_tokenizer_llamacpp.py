"""Token ids equal llama.cpp's for the same GGUF file, on thousands of texts of the kinds that go wrong."""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from llamacpp import KINDS, SEED, LlamaCpp, llamacpp_on, texts_of

from firstdiff.engine.model_store import resolve
from firstdiff.engine.tokenizer import Tokenizer

pytestmark = pytest.mark.model

TEXTS_A_KIND = 500


@pytest.fixture(scope="module")
def llamacpp() -> Iterator[LlamaCpp]:
    with llamacpp_on(next(resolve("smollm2-135m").path.glob("*.gguf"))) as server:
        yield server


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.load(resolve("smollm2-135m").path)


@pytest.mark.parametrize("kind", KINDS)
def test_ids_equal_llamacpp(kind: str, tokenizer: Tokenizer, llamacpp: LlamaCpp) -> None:
    texts = texts_of(kind, TEXTS_A_KIND)
    unequal = [
        (text, ours, theirs)
        for text in texts
        if (ours := tokenizer.encode(text)) != (theirs := llamacpp.tokenize(text))
    ]
    assert unequal == []
    # This vocabulary has no token for some bytes; both tokenizers drop those from a text.
    single = {tokenizer.token_bytes(token_id) for token_id in range(tokenizer.vocab_size)}
    lossless = [text for text in texts if all(bytes([byte]) in single for byte in text.encode())]
    assert len(lossless) > TEXTS_A_KIND // 10
    assert [text for text in lossless if tokenizer.decode(tokenizer.encode(text)) != text] == []


def test_the_texts_tell_the_wrong_pre_tokenizer(
    tokenizer: Tokenizer, llamacpp: LlamaCpp, tmp_path: Path
) -> None:
    """GPT-2's pattern alone, which transformers 5.24 takes for this file, splits blanks before a digit."""
    folder = resolve("smollm2-135m").path
    wrong = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    wrong["pre_tokenizer"] = wrong["pre_tokenizer"]["pretokenizers"][-1]
    (tmp_path / "tokenizer.json").write_text(json.dumps(wrong), encoding="utf-8")
    (tmp_path / "tokenizer_config.json").write_bytes((folder / "tokenizer_config.json").read_bytes())
    gpt2 = Tokenizer.load(tmp_path)

    assert llamacpp.tokenize("\n\n1.") == tokenizer.encode("\n\n1.") == [1116, 33, 30]
    assert gpt2.encode("\n\n1.") == [198, 198, 33, 30]
    rng = random.Random(SEED)
    texts = [KINDS["blanks before digits"](rng) for _ in range(100)]
    assert sum(gpt2.encode(text) != llamacpp.tokenize(text) for text in texts) > 20
