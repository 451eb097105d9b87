"""Each change to the logits is what transformers, OpenAI or its definition makes of them."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from transformers import (
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from firstdiff.engine.logits import Place, adjust, kept_token_ids
from firstdiff.tracing.records import Sampling

VOCAB_SIZE = 40
EOS = frozenset({1, 2})
token_ids = st.integers(0, VOCAB_SIZE - 1)
logit_rows = hnp.arrays(np.float32, VOCAB_SIZE, elements=st.floats(-20, 20, width=32), unique=True)


def sampling(**changes) -> Sampling:
    defaults = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "seed": 0, "max_tokens": 8}
    return Sampling(**(defaults | changes))


def adjusted(logits, *, prompt=(0,), output=(), allowed=None, **changes):
    place = Place(sampling(**changes), [*prompt, *output], len(prompt))
    return adjust(np.asarray(logits, dtype=np.float32), place, allowed=allowed, end_token_ids=EOS)


def surviving(scores: torch.Tensor) -> list[int]:
    return torch.isfinite(scores[0]).nonzero()[:, 0].tolist()


@settings(deadline=None)
@given(
    logits=logit_rows,
    temperature=st.floats(0.1, 3.0),
    min_p=st.just(0.0) | st.floats(0.001, 1.0),
    top_k=st.integers(0, 45),
    top_p=st.floats(0.01, 0.999) | st.just(1.0),
)
def test_truncation_keeps_what_transformers_keeps(logits, temperature, min_p, top_k, top_p):
    """Transformers' warpers, in vLLM's order."""
    scores = TemperatureLogitsWarper(temperature)(None, torch.tensor(logits, dtype=torch.float64)[None])
    if min_p:
        scores = MinPLogitsWarper(min_p)(None, scores)
    if top_k:
        scores = TopKLogitsWarper(min(top_k, VOCAB_SIZE))(None, scores)
    if top_p < 1.0:
        scores = TopPLogitsWarper(top_p)(None, scores)
    scaled = logits.astype(np.float64) / temperature
    kept = kept_token_ids(scaled, top_k=top_k, top_p=top_p, min_p=min_p).tolist()
    # A token that sits on the bound to rounding may fall on either side.
    assert len(set(kept) ^ set(surviving(scores))) <= (top_p < 1.0) + (min_p > 0)


def kept_by_one_full_sort(scaled, *, top_k, top_p, min_p):
    """The definition, in one sort of everything."""
    order = np.argsort(-scaled, kind="stable")
    order = order[np.exp(scaled[order] - scaled[order[0]]) >= min_p][: top_k or None]
    weights = np.exp(scaled[order] - scaled[order[0]])
    mass_before = (np.cumsum(weights) - weights) / weights.sum()
    return np.sort(order[mass_before < top_p] if top_p < 1 else order)


@settings(deadline=None, max_examples=100)
@given(
    seed=st.integers(0, 2**31),
    spread=st.sampled_from([0.0, 0.05, 1.0, 4.0]),
    decimals=st.sampled_from([0, 1, 12]),
    top_k=st.sampled_from([0, 1, 50, 1024, 1500, 4999, 5000, 9000]),
    top_p=st.sampled_from([1e-9, 0.1, 0.5, 0.9, 0.999, 1.0]),
    min_p=st.sampled_from([0.0, 1e-7, 0.3, 1.0]),
)
def test_partial_sorts_keep_what_a_full_sort_keeps(seed, spread, decimals, top_k, top_p, min_p):
    """Flat and peaked distributions, with many ties, at a real vocabulary's scale."""
    scaled = np.round(np.random.default_rng(seed).normal(0, 1, 5000) * spread, decimals)
    kept = kept_token_ids(scaled, top_k=top_k, top_p=top_p, min_p=min_p)
    expected = kept_by_one_full_sort(scaled, top_k=top_k, top_p=top_p, min_p=min_p)
    # Sums in another order may move the cut by the one token that sits on it.
    assert len(np.setxor1d(kept, expected)) <= (top_p < 1)


def test_removed_tokens_are_never_kept():
    scaled = np.full(10, -np.inf)
    scaled[[3, 7]] = [1.0, 2.0]
    for truncation in ({"top_k": 0}, {"top_k": 5}, {"top_k": 0, "min_p": 1e-300}):
        assert kept_token_ids(scaled, top_p=1.0, **truncation).tolist() == [3, 7]
    assert kept_token_ids(scaled, top_p=0.99999, top_k=0).tolist() == [3, 7]
    assert kept_token_ids(scaled, top_p=0.5, top_k=9).tolist() == [7]


@settings(deadline=None)
@given(
    logits=logit_rows,
    prompt=st.lists(token_ids, min_size=1, max_size=12),
    output=st.lists(token_ids, max_size=12),
    penalty=st.floats(0.1, 2.0),
)
def test_the_repetition_penalty_is_that_of_transformers(logits, prompt, output, penalty):
    seen = torch.tensor([[*prompt, *output]])
    expected = RepetitionPenaltyLogitsProcessor(penalty)(seen, torch.tensor(logits).double()[None])[0]
    got = adjusted(logits, prompt=prompt, output=output, repetition_penalty=penalty)
    np.testing.assert_allclose(got, expected.numpy(), rtol=1e-12)


@settings(deadline=None)
@given(
    logits=logit_rows,
    output=st.lists(token_ids, max_size=30),
    presence=st.floats(-2, 2),
    frequency=st.floats(-2, 2),
)
def test_presence_and_frequency_penalties_are_openais_formula(logits, output, presence, frequency):
    """mu[j] - c[j] * alpha_frequency - float(c[j] > 0) * alpha_presence; c counts the output alone."""
    counts = Counter(output)
    expected = [
        float(value) - counts[j] * frequency - (counts[j] > 0) * presence for j, value in enumerate(logits)
    ]
    got = adjusted(
        logits, prompt=[5, 5, 6], output=output, presence_penalty=presence, frequency_penalty=frequency
    )
    np.testing.assert_allclose(got, expected, rtol=1e-12, atol=1e-12)


@settings(deadline=None)
@given(logits=logit_rows, num_output=st.integers(0, 6), min_tokens=st.integers(0, 6))
def test_min_tokens_removes_what_transformers_removes(logits, num_output, min_tokens):
    output = [7] * num_output
    got = adjusted(logits, output=output, min_tokens=min_tokens, stop_token_ids=[9, 10**6])
    processor = MinNewTokensLengthLogitsProcessor(1, min_tokens, sorted({*EOS, 9}), device="cpu")
    expected = processor(torch.tensor([[0, *output]]), torch.tensor(logits).double()[None])[0]
    np.testing.assert_array_equal(got, expected.numpy())


def test_min_tokens_leaves_eos_where_nothing_else_is_left():
    allowed = np.zeros(VOCAB_SIZE, dtype=np.bool_)
    allowed[[1, 2]] = True
    got = adjusted(np.zeros(VOCAB_SIZE), allowed=allowed, min_tokens=5)
    assert np.flatnonzero(np.isfinite(got)).tolist() == [1, 2]
    allowed[30] = True
    got = adjusted(np.zeros(VOCAB_SIZE), allowed=allowed, min_tokens=5)
    assert np.flatnonzero(np.isfinite(got)).tolist() == [30]


def test_the_order_is_mask_min_tokens_bias_repetition_frequency_presence():
    logits = np.zeros(VOCAB_SIZE, dtype=np.float32)
    logits[[4, 5, 6]] = [2.0, -2.0, 1.0]
    allowed = np.ones(VOCAB_SIZE, dtype=np.bool_)
    allowed[6] = False
    got = adjusted(
        logits,
        prompt=[4],
        output=[5, 5],
        allowed=allowed,
        min_tokens=3,
        logit_bias={4: 2.0, 5: 3.0, 6: 100.0, 1: 100.0},
        repetition_penalty=2.0,
        frequency_penalty=0.25,
        presence_penalty=0.125,
    )
    # Bias before the penalties: (2 + 2) / 2, and (-2 + 3) / 2 - 2 * 0.25 - 0.125.
    assert got[[4, 5]].tolist() == [2.0, -0.125]
    # Bias brings neither a token that the structure forbids nor a suppressed EOS back.
    assert got[[6, 1, 2]].tolist() == [-np.inf] * 3


@pytest.mark.parametrize(
    ("changes", "where"),
    [
        ({"logit_bias": {40: 1.0}}, "logit_bias"),
        ({"logit_bias": {-1: 1.0}}, "logit_bias"),
        ({"output": [99], "repetition_penalty": 1.1}, "the sequence"),
        ({"output": [99], "presence_penalty": 1.1}, "the output"),
    ],
)
def test_ids_beyond_the_vocabulary_are_refused(changes, where):
    with pytest.raises(ValueError, match=rf"token ids in 0\.\.39 in {where}, got"):
        adjusted(np.zeros(VOCAB_SIZE), **changes)


def test_the_models_logits_stay_as_they_are():
    logits = np.zeros(VOCAB_SIZE, dtype=np.float32)
    adjusted(logits, output=[3], logit_bias={4: 1.0}, presence_penalty=1.0, min_tokens=4)
    assert not logits.any()
