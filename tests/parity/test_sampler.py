"""The sampler chooses among what it should, by its own noise, and reports true log-probabilities."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from firstdiff.engine.logits import Place, kept_token_ids
from firstdiff.engine.rng import gumbel_noise
from firstdiff.engine.sampler import LOGPROB_MIN, Choice, choose, gumbel_argmax, raw_logprobs, report
from firstdiff.engine.sequence import SampledToken
from firstdiff.tracing.records import Sampling


def sampling(**changes) -> Sampling:
    defaults = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "seed": 0, "max_tokens": 8}
    return Sampling(**(defaults | changes))


def place(position: int = 1, **changes) -> Place:
    """A place after a prompt of one token and `position - 1` tokens of output."""
    return Place(sampling(**changes), [0] * position, 1)


def sample(logits: torch.Tensor, places: list[Place]) -> list[SampledToken]:
    """The token of each row, by the steps a runner takes."""
    best = logits.numpy().argmax(-1)
    choices = [
        choose(logits[i].numpy(), each, int(best[i]), allowed=None, end_token_ids=frozenset())
        for i, each in enumerate(places)
    ]
    return report(logits, places, choices, list(range(len(places))))


@settings(deadline=None, max_examples=200)
@given(
    seed=st.integers(0, 2**64 - 1),
    spread=st.sampled_from([0.0, 0.5, 3.0, 30.0]),
    decimals=st.sampled_from([0, 12]),
    num_kept=st.sampled_from([1, 2, 50, 2999, 3000]),
    position=st.integers(0, 2**20),
)
def test_the_sample_is_the_argmax_over_all_noise(seed, spread, decimals, num_kept, position):
    """Noise is drawn only where it can decide; by rng.py's specification it is drawn everywhere."""
    rng = np.random.default_rng(seed)
    scaled = np.round(rng.normal(0, 1, 3000) * spread, decimals)
    kept = np.sort(rng.choice(3000, num_kept, replace=False))
    scores = scaled + gumbel_noise(seed, position, np.arange(3000))
    assert gumbel_argmax(scaled, kept, seed, position) == kept[np.argmax(scores[kept])]
    assert gumbel_argmax(scaled, None, seed, position) == np.argmax(scores)


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p", "min_p"),
    [(1.0, 0, 1.0, 0.0), (0.7, 8, 1.0, 0.0), (1.5, 0, 0.8, 0.0), (1.2, 0, 1.0, 0.2)],
)
def test_samples_follow_the_claimed_distribution(temperature, top_k, top_p, min_p):
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(16, generator=generator) * 1.5
    claimed = torch.softmax(logits.double() / temperature, -1).numpy()
    truncation = {"top_k": top_k, "top_p": top_p, "min_p": min_p}
    kept = kept_token_ids(logits.numpy().astype(np.float64) / temperature, **truncation)
    expected = claimed[kept] / claimed[kept].sum()
    trials = 20_000
    places = [place(i % 100 + 1, temperature=temperature, seed=i // 100, **truncation) for i in range(trials)]
    tokens = sample(logits.expand(trials, -1).contiguous(), places)
    counts = np.bincount([token.token_id for token in tokens], minlength=16)
    assert counts.sum() == counts[kept].sum()
    assert stats.chisquare(counts[kept], expected * trials).pvalue > 1e-4


def test_greedy_ignores_the_seed_and_rows_do_not_mix():
    logits = torch.randn(5, 50, generator=torch.Generator().manual_seed(2))
    places = [place(3 + i, seed=9) for i in range(5)]
    together = [token.token_id for token in sample(logits, places)]
    alone = [sample(logits[i : i + 1], places[i : i + 1])[0].token_id for i in range(5)]
    assert together == alone
    for seed in (0, 1):
        for temperature in (0.0, 1e-320, 9e-6):
            greedy = sample(logits, [place(seed=seed, temperature=temperature)] * 5)
            assert [token.token_id for token in greedy] == logits.argmax(-1).tolist()


def check_entries(token: SampledToken, count: int) -> None:
    """What holds of every reported distribution."""
    assert token.logprob is not None
    values = [value for _, value in token.top_logprobs]
    ids = [token_id for token_id, _ in token.top_logprobs]
    assert values == sorted(values, reverse=True)
    assert len(set(ids)) == len(ids) <= count + 1
    assert dict(token.top_logprobs)[token.token_id] == token.logprob
    assert sum(np.exp(value) for value in values) <= 1 + 1e-6
    assert all(np.isfinite(values))


@pytest.mark.parametrize("mode", ["raw_logprobs", "processed_logprobs"])
@pytest.mark.parametrize("decimals", [0, 6])
def test_logprobs_are_sorted_distinct_and_hold_the_chosen_token(mode, decimals):
    logits = torch.randn(4, 50, generator=torch.Generator().manual_seed(2)) * 3
    logits = torch.round(logits, decimals=decimals)
    places = [
        place(7, temperature=2.0, top_k=40, seed=4, logprobs=5, logprobs_mode=mode),
        place(7, temperature=0.0),
        place(7, temperature=5.0, seed=1, logprobs=0, logprobs_mode=mode),
        place(7, temperature=0.0, logprobs=50, logprobs_mode=mode, frequency_penalty=2.0),
    ]
    tokens = sample(logits, places)
    assert tokens[1] == SampledToken(int(logits[1].argmax()))
    for i in (0, 2, 3):
        check_entries(tokens[i], places[i].sampling.logprobs)
    assert len(tokens[3].top_logprobs) == 50
    assert sum(np.exp(value) for _, value in tokens[3].top_logprobs) == pytest.approx(1, abs=1e-5)


def test_raw_logprobs_are_the_models_own():
    logits = torch.randn(2, 50, generator=torch.Generator().manual_seed(3)) * 3
    changes = {"temperature": 3.0, "top_k": 2, "logit_bias": {5: -50.0}, "frequency_penalty": 1.0}
    tokens = sample(logits, [place(4, logprobs=3, **changes), place(4, temperature=0.0, logprobs=3)])
    expected = torch.log_softmax(logits, -1)
    for i, token in enumerate(tokens):
        top = torch.topk(expected[i], 3)
        assert token.top_logprobs[:3] == list(zip(top.indices.tolist(), top.values.tolist(), strict=True))
        assert token.logprob == float(expected[i, token.token_id])


def test_processed_logprobs_are_of_what_the_token_was_chosen_among():
    logits = torch.randn(1, 50, generator=torch.Generator().manual_seed(3)) * 3
    each = place(
        3, temperature=1.7, top_k=4, logit_bias={5: 9.0}, logprobs=50, logprobs_mode="processed_logprobs"
    )
    token = sample(logits, [each])[0]
    scaled = logits[0].double()
    scaled[5] += 9.0
    top = torch.topk(scaled / 1.7, 4)
    assert [token_id for token_id, _ in token.top_logprobs] == top.indices.tolist()
    expected = torch.log_softmax(top.values, -1).tolist()
    assert [value for _, value in token.top_logprobs] == pytest.approx(expected)
    assert token.token_id in top.indices.tolist()


def test_which_of_tied_tokens_are_the_likeliest_is_by_id():
    logits = torch.zeros(1, 3000)
    logits[0, [40, 7]] = 1.0
    token = raw_logprobs(logits, [2999], [5])[0]
    assert [token_id for token_id, _ in token.top_logprobs] == [7, 40, 0, 1, 2, 2999]


def test_a_token_has_the_same_logprob_alone_and_among_others():
    logits = torch.randn(40, 49152, generator=torch.Generator().manual_seed(5)) * 4
    together = raw_logprobs(logits, list(range(40)), [20] * 40)
    for i in (0, 17, 39):
        assert raw_logprobs(logits[i : i + 1].clone(), [i], [20]) == [together[i]]


def test_forced_tokens_are_emitted_with_their_real_logprobs():
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(6))
    forced = {"forced_token_ids": [3, 3, 49], "logprobs": 2, "temperature": 0.5}
    tokens = sample(logits, [place(1 + i, **forced) for i in range(3)])
    assert [token.token_id for token in tokens] == [3, 3, 49]
    expected = torch.log_softmax(logits, -1)
    assert [token.logprob for token in tokens] == [float(expected[i, t]) for i, t in enumerate([3, 3, 49])]
    removed = place(1, forced_token_ids=[int(logits[0].argmin())], top_k=3, logprobs=3)
    processed = Place(
        sampling(**forced | {"forced_token_ids": [int(logits[0].argmin())], "top_k": 3}
                 | {"logprobs_mode": "processed_logprobs"}),
        removed.token_ids, 1,
    )  # fmt: skip
    token = sample(logits[:1], [processed])[0]
    assert token.logprob == LOGPROB_MIN
    assert token.top_logprobs[-1] == (token.token_id, LOGPROB_MIN)
    with pytest.raises(ValueError, match=r"forced_token_ids in 0\.\.49, got 50"):
        sample(logits[:1], [place(1, forced_token_ids=[50])])


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("changes", [{}, {"temperature": 0.0}, {"forced_token_ids": [1]}])
def test_logits_that_are_not_finite_are_an_error_not_a_token(value, changes):
    logits = torch.zeros(1, 8)
    logits[0, 3] = value
    with pytest.raises(FloatingPointError, match=r"finite logits, got (nan|inf) at token 3"):
        sample(logits, [place(**changes)])
    with pytest.raises(FloatingPointError, match="finite logits"):
        raw_logprobs(logits, [0], [1])


def test_nothing_left_to_choose_is_an_error_not_a_token():
    logits = np.zeros(8, dtype=np.float32)
    allowed = np.zeros(8, dtype=np.bool_)
    with pytest.raises(ValueError, match="a token to choose at position 1, got none"):
        choose(logits, place(), 0, allowed=allowed, end_token_ids=frozenset())
    allowed[6] = True
    choice = choose(logits, place(), 0, allowed=allowed, end_token_ids=frozenset())
    assert isinstance(choice, Choice)
    assert choice.token_id == 6
