"""The sampler keeps and samples what it should, and reports true log-probabilities."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from scipy import stats
from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from firstdiff.engine.sampler import kept_token_ids, sample
from firstdiff.tracing.records import Sampling


def sampling(**changes) -> Sampling:
    defaults = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "seed": 0, "max_tokens": 8}
    return Sampling(**(defaults | changes))


@settings(deadline=None)
@given(
    logits=hnp.arrays(np.float32, 40, elements=st.floats(-20, 20, width=32), unique=True),
    temperature=st.floats(0.1, 3.0),
    top_k=st.integers(0, 45),
    top_p=st.floats(0.01, 0.999) | st.just(1.0),
)
def test_truncation_keeps_what_transformers_keeps(logits, temperature, top_k, top_p):
    scores = TemperatureLogitsWarper(temperature)(None, torch.tensor(logits, dtype=torch.float64)[None])
    if top_k:
        scores = TopKLogitsWarper(min(top_k, 40))(None, scores)
    if top_p < 1.0:
        scores = TopPLogitsWarper(top_p)(None, scores)
    expected = torch.isfinite(scores[0]).nonzero()[:, 0].tolist()
    kept = kept_token_ids(logits.astype(np.float64) / temperature, top_k=top_k, top_p=top_p).tolist()
    # A token whose mass before it equals top_p to rounding may fall on either side.
    assert len(set(kept) ^ set(expected)) <= 1
    if top_p == 1.0:
        assert kept == expected


def kept_by_one_full_sort(scaled, *, top_k, top_p):
    """The definition, in one sort of everything."""
    order = np.argsort(-scaled, kind="stable")[: top_k or None]
    weights = np.exp(scaled[order] - scaled[order[0]])
    mass_before = (np.cumsum(weights) - weights) / weights.sum()
    return np.sort(order[mass_before < top_p] if top_p < 1 else order)


@settings(deadline=None, max_examples=60)
@given(
    seed=st.integers(0, 2**31),
    spread=st.sampled_from([0.0, 0.05, 1.0, 4.0]),
    decimals=st.sampled_from([0, 1, 12]),
    top_k=st.sampled_from([0, 1, 50, 1024, 1500, 4999, 5000, 9000]),
    top_p=st.sampled_from([1e-9, 0.1, 0.5, 0.9, 0.999, 1.0]),
)
def test_partial_sorts_keep_what_a_full_sort_keeps(seed, spread, decimals, top_k, top_p):
    """Flat and peaked distributions, with many ties, at a real vocabulary's scale."""
    scaled = np.round(np.random.default_rng(seed).normal(0, 1, 5000) * spread, decimals)
    kept = kept_token_ids(scaled, top_k=top_k, top_p=top_p)
    expected = kept_by_one_full_sort(scaled, top_k=top_k, top_p=top_p)
    # Sums in another order may move the cut by the one token that sits on it.
    assert len(np.setxor1d(kept, expected)) <= (top_p < 1)


@pytest.mark.parametrize(("temperature", "top_k", "top_p"), [(1.0, 0, 1.0), (0.7, 8, 1.0), (1.5, 0, 0.8)])
def test_samples_follow_the_claimed_distribution(temperature, top_k, top_p):
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(16, generator=generator) * 1.5
    claimed = torch.softmax(logits.double() / temperature, -1).numpy()
    kept = kept_token_ids(logits.numpy().astype(np.float64) / temperature, top_k=top_k, top_p=top_p)
    expected = claimed[kept] / claimed[kept].sum()
    trials = 20_000
    rows = [
        (sampling(temperature=temperature, top_k=top_k, top_p=top_p, seed=i // 100), i % 100)
        for i in range(trials)
    ]
    tokens = sample(logits.expand(trials, -1).contiguous(), rows)
    counts = np.bincount([token.token_id for token in tokens], minlength=16)
    assert counts.sum() == counts[kept].sum()
    assert stats.chisquare(counts[kept], expected * trials).pvalue > 1e-4


def test_greedy_ignores_the_seed_and_rows_do_not_mix():
    logits = torch.randn(5, 50, generator=torch.Generator().manual_seed(2))
    rows = [(sampling(temperature=1.0, seed=9), 3 + i) for i in range(5)]
    together = [token.token_id for token in sample(logits, rows)]
    alone = [sample(logits[i : i + 1], rows[i : i + 1])[0].token_id for i in range(5)]
    assert together == alone
    for seed in (0, 1):
        greedy = sample(logits, [(sampling(temperature=0.0, seed=seed), 0)] * 5)
        assert [token.token_id for token in greedy] == logits.argmax(-1).tolist()


def test_logprobs_are_the_models_own_sorted_and_hold_the_sampled_token():
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(2)) * 3
    rows = [
        (sampling(temperature=2.0, top_k=50, seed=4, logprobs=5), 7),
        (sampling(temperature=0.0), 7),
        (sampling(temperature=5.0, seed=1, logprobs=0), 7),
    ]
    tokens = sample(logits, rows)
    assert tokens[1].logprob is None
    assert tokens[1].top_logprobs == []
    expected = torch.log_softmax(logits, -1)
    for i in (0, 2):
        token = tokens[i]
        assert token.logprob == pytest.approx(float(expected[i, token.token_id]), abs=1e-6)
        values = [value for _, value in token.top_logprobs[: rows[i][0].logprobs]]
        assert values == sorted(values, reverse=True)
        ids = [token_id for token_id, _ in token.top_logprobs]
        assert len(set(ids)) == len(ids)
        assert token.token_id in ids
        assert sum(np.exp(value) for _, value in token.top_logprobs) <= 1 + 1e-6


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_logits_that_are_not_finite_are_an_error_not_a_token(value):
    logits = torch.zeros(2, 8)
    logits[1, 3] = value
    with pytest.raises(FloatingPointError, match=r"rows \[1\]"):
        sample(logits, [(sampling(temperature=0.0), 0)] * 2)
