"""The sampling noise is exactly what its specification says."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from firstdiff.engine.rng import gumbel_noise, philox_4x32, uniforms

# Known answers of Random123 1.14 (kat_vectors, philox4x32 10 rounds): counter, key, output.
KNOWN_ANSWERS = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "output"), KNOWN_ANSWERS)
def test_philox_gives_the_known_answers(counter, key, output):
    words = philox_4x32(tuple(np.array([word], dtype=np.uint64) for word in counter), key)
    assert tuple(int(word[0]) for word in words) == output


def plain_philox(counter: list[int], key: list[int]) -> list[int]:
    """The specification once more, in plain integers."""
    c, k = list(counter), list(key)
    for _ in range(10):
        p0, p1 = c[0] * 0xD2511F53, c[2] * 0xCD9E8D57
        c = [(p1 >> 32) ^ c[1] ^ k[0], p1 & 0xFFFFFFFF, (p0 >> 32) ^ c[3] ^ k[1], p0 & 0xFFFFFFFF]
        k = [(k[0] + 0x9E3779B9) & 0xFFFFFFFF, (k[1] + 0xBB67AE85) & 0xFFFFFFFF]
    return c


@given(
    seed=st.integers(0, 2**64 - 1),
    position=st.integers(0, 2**32 - 1),
    ids=st.lists(st.integers(0, 2**20), min_size=1, max_size=6),
)
def test_noise_is_a_function_of_seed_position_and_token_id(seed, position, ids):
    got = gumbel_noise(seed, position, np.array(ids))
    for token_id, noise in zip(ids, got, strict=True):
        words = plain_philox([token_id >> 2, position, 0, 0], [seed & 0xFFFFFFFF, seed >> 32])
        uniform = (words[token_id & 3] + 0.5) / 2**32
        assert noise == pytest.approx(-math.log(-math.log(uniform)), rel=1e-12)


def test_uniforms_are_uniform_and_independent_across_seeds_positions_and_ids():
    ids = np.arange(4000)
    draws = np.stack([uniforms(seed, pos, ids) for seed in (1, 2) for pos in (5, 6)])
    assert stats.kstest(draws.ravel(), "uniform").pvalue > 1e-3
    correlation = np.corrcoef(draws) - np.eye(4)
    assert np.abs(correlation).max() < 0.08
    assert abs(np.corrcoef(draws[0, :-1], draws[0, 1:])[0, 1]) < 0.08
