"""Formulas of the judge: against scipy, against brute force, at their limits."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import trim_mean

from firstdiff.regression.stats import (
    block_estimate,
    discordant_p,
    excess_p,
    holm,
    quantile,
    quantile_ratio_range,
    upper_fraction,
)

VALUES = st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=60)


@given(VALUES, st.sampled_from([0.5, 0.9, 0.99]))
def test_a_quantile_is_a_value_with_enough_below_and_beyond_it(values, fraction):
    found = quantile(values, fraction)
    if len(values) * (1 - fraction) < 1 - 1e-9:
        assert found is None
        return
    assert found in values
    assert sum(value <= found for value in values) >= fraction * len(values) - 1e-6
    assert sum(value < found for value in values) < fraction * len(values) + 1e-6


def test_quantiles_need_enough_values():
    assert quantile([], 0.5) is None
    assert quantile([1.0], 0.5) is None
    assert quantile([3.0, 1.0], 0.5) == 1.0
    assert quantile(list(range(9)), 0.9) is None
    assert quantile(list(range(10)), 0.9) == 8
    assert quantile(list(range(99)), 0.99) is None
    assert quantile(list(range(100)), 0.99) == 98


@given(st.lists(st.floats(-100, 100), min_size=5, max_size=50).filter(lambda v: len(v) % 5 == 0))
def test_the_estimate_is_the_trimmed_mean(values):
    estimate = block_estimate(values, range(len(values)))
    assert estimate.value == pytest.approx(trim_mean(values, 0.2), abs=1e-9)


def test_a_value_on_the_edge_counts_in_part():
    # 4 values, a fifth cut at each end: 0.2 of the outer two stay.
    estimate = block_estimate([0.0, 1.0, 2.0, 10.0], range(4))
    assert estimate.value == pytest.approx((0.2 * 0 + 1 + 2 + 0.2 * 10) / 2.4)


def test_too_few_values_or_blocks_give_none():
    assert block_estimate([1.0], [0]) is None
    assert block_estimate([1.0] * 8, [0] * 8) is None
    assert block_estimate([1.0] * 8, range(8), min_values=9) is None
    assert block_estimate([1.0] * 8, [0, 0, 1, 1, 2, 2, 2, 2], min_blocks=4) is None
    assert block_estimate([1.0] * 8, [0, 0, 1, 1, 2, 2, 3, 3], min_values=8, min_blocks=4) is not None


def test_equal_values_leave_no_doubt():
    estimate = block_estimate([0.2] * 16, [index // 4 for index in range(16)])
    low, high = estimate.bound(0.01)
    assert low == pytest.approx(0.2)
    assert high == pytest.approx(0.2)
    assert estimate.p_above(0.1) < 1e-9
    assert estimate.p_above(0.3) > 1 - 1e-9


def test_spread_from_elsewhere_widens_the_bounds():
    values = [0.01 * (index % 3) for index in range(16)]
    narrow = block_estimate(values, range(16))
    wide = block_estimate(values, range(16), extra_sd=0.05)
    assert wide.standard_error == pytest.approx(math.hypot(narrow.standard_error, 0.05))


def test_one_disturbed_block_moves_the_estimate_little():
    rng = np.random.default_rng(1)
    values = 0.02 * rng.standard_normal(32)
    blocks = [index // 4 for index in range(32)]
    calm = block_estimate(values, blocks)
    values[:4] += math.log(2)
    disturbed = block_estimate(values, blocks)
    assert abs(disturbed.value - calm.value) < 0.01
    assert disturbed.standard_error < 0.02


@pytest.mark.parametrize("num_blocks", [6, 8, 16])
@pytest.mark.parametrize("shared", [0.0, 1.0])
def test_bounds_miss_the_truth_as_often_as_they_say(num_blocks, shared):
    rng = np.random.default_rng([num_blocks, int(shared)])
    blocks = np.repeat(np.arange(num_blocks), 4)
    missed = {0.05: 0, 0.01: 0}
    num_runs = 1500
    for _ in range(num_runs):
        values = shared * rng.standard_normal(num_blocks)[blocks] + rng.standard_normal(len(blocks))
        estimate = block_estimate(values, blocks)
        for tail in missed:
            missed[tail] += estimate.bound(tail)[0] > 0
    assert missed[0.05] / num_runs < 0.065
    assert missed[0.01] / num_runs < 0.02


def test_holm():
    assert holm({}) == {}
    assert holm({"a": 0.01, "b": 0.04, "c": 0.03}) == pytest.approx({"a": 0.03, "c": 0.06, "b": 0.06})
    assert holm({"a": 0.9, "b": 0.8}) == {"a": 1.0, "b": 1.0}


@given(st.dictionaries(st.sampled_from("abcdef"), st.floats(0, 1), max_size=6))
def test_holm_never_lowers_a_p_value_and_keeps_the_order(p_values):
    adjusted = holm(p_values)
    for name, p_value in p_values.items():
        assert p_value <= adjusted[name] <= 1
        assert all(adjusted[name] <= adjusted[other] for other in p_values if p_value < p_values[other])


def test_discordant_pairs():
    assert discordant_p(0, 0) is None
    assert discordant_p(7, 0) == pytest.approx(0.5**7)
    assert discordant_p(0, 7) == 1.0
    assert discordant_p(5, 5) > 0.5


def test_upper_fraction():
    assert upper_fraction(0, 0) is None
    assert upper_fraction(0, 32) == pytest.approx(1 - 0.05 ** (1 / 32))
    assert upper_fraction(32, 32) == 1.0
    assert 0.5 < upper_fraction(16, 32) < 0.7


def test_excess_needs_a_floor_and_something_beyond_it():
    assert excess_p([], scale=1.0, num_floor=10) == 1.0
    assert excess_p([5.0], scale=1.0, num_floor=0) == 1.0
    assert excess_p([1.0] * 10, scale=1.0, num_floor=10) == 1.0
    assert excess_p([5.0] * 10, scale=1.0, num_floor=10, min_value=6.0) == 1.0


def test_excess_grows_with_distance_number_and_floor():
    base = [0.1] * 30
    one = excess_p([10.0, *base], scale=1.0, num_floor=31)
    assert excess_p([100.0, *base], scale=1.0, num_floor=31) < one
    assert excess_p([10.0, 10.0, *base], scale=1.0, num_floor=32) < one
    assert excess_p([10.0, *base], scale=1.0, num_floor=310) < one
    assert excess_p([10.0, *base], scale=1.0, num_floor=31, num_draws=62) > one
    assert 0 < excess_p([1e300] * 1000, scale=1e-3, num_floor=100_000) < 1e-9


def test_a_quantile_ratio_has_a_seeded_range():
    rng = np.random.default_rng(5)
    base = {block: list(np.exp(0.1 * rng.standard_normal(20))) for block in range(10)}
    other = {block: [1.3 * value for value in values] for block, values in base.items()}
    found = quantile_ratio_range(base, other, 0.9, tail=0.05, seed=(1,), num_resamples=300)
    # Every value is 1.3 times as large, so is every quantile of every draw.
    assert found == pytest.approx((math.log(1.3), math.log(1.3)))
    noisy = {block: list(np.exp(0.1 * rng.standard_normal(20))) for block in range(10)}
    once = quantile_ratio_range(base, noisy, 0.5, tail=0.05, seed=(1,), num_resamples=300)
    assert once == quantile_ratio_range(base, noisy, 0.5, tail=0.05, seed=(1,), num_resamples=300)
    assert once[0] < 0 < once[1]


def test_a_quantile_ratio_needs_blocks_and_values():
    few = {0: [1.0, 2.0], 1: [3.0]}
    assert quantile_ratio_range(few, few, 0.99, tail=0.05, seed=(1,), num_resamples=200) is None
    one_block = {0: [1.0] * 20}
    assert quantile_ratio_range(one_block, one_block, 0.5, tail=0.05, seed=(1,), num_resamples=200) is None
    empty_block = {0: [1.0, 2.0, 3.0], 1: []}
    found = quantile_ratio_range(empty_block, empty_block, 0.5, tail=0.05, seed=(1,), num_resamples=200)
    assert found == (0.0, 0.0)


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 5), st.floats(0.1, 10)), min_size=4, max_size=40))
def test_estimates_do_not_depend_on_the_order_of_values(pairs):
    blocks, values = [block for block, _ in pairs], [value for _, value in pairs]
    one = block_estimate(values, blocks)
    other = block_estimate(values[::-1], blocks[::-1])
    if one is None:
        assert other is None
    else:
        assert one.value == pytest.approx(other.value)
        assert one.standard_error == pytest.approx(other.standard_error)
