"""Ids, text and chat prompts are those of transformers' AutoTokenizer on the same folder."""

from __future__ import annotations

import random

import pytest
from transformers import AutoTokenizer

from firstdiff.engine.model_store import resolve
from firstdiff.engine.tiny_model import python_topics
from firstdiff.engine.tokenizer import Tokenizer


@pytest.mark.parametrize("model", ["tiny-random", pytest.param("smollm2-135m", marks=pytest.mark.model)])
def test_same_ids_and_text(model: str) -> None:
    folder = resolve(model).path
    ours, theirs = Tokenizer.load(folder), AutoTokenizer.from_pretrained(folder)
    assert (ours.vocab_size, ours.eos_token_id) == (len(theirs), theirs.eos_token_id)
    rng = random.Random(3)
    for topic in python_topics():
        text = topic[: rng.randint(1, 500)]
        ids = ours.encode(text)
        assert ids == theirs.encode(text)
        cut = ids[rng.randrange(len(ids)) :]
        assert ours.decode(cut) == theirs.decode(cut, clean_up_tokenization_spaces=False)
        for messages in (
            [{"role": "user", "content": text}],
            [{"role": "system", "content": "Be brief."}, {"role": "user", "content": text + "<|im_end|>"}],
        ):
            expected = theirs.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
            assert ours.apply_chat_template(messages) == expected
    ids = [rng.randrange(ours.vocab_size) for _ in range(2000)]
    for skip in (False, True):
        assert ours.decode(ids, skip_special_tokens=skip) == theirs.decode(ids, skip_special_tokens=skip)
