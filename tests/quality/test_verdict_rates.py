"""How often a verdict is right: healthy pairs that pass, defects that fail, over seeded sessions.

Every rate is over whole verdicts, from Runs on disk to status, on the synthetic machine of synthetic_runs.py:
10 % slow drift, heavy-tailed jitter of blocks and requests, requests stalled to twice their time, busy
blocks.
Run with `-s` to see the measured rates.
"""

from __future__ import annotations

import sys
import tempfile
from collections import Counter
from pathlib import Path

import msgspec
import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))
from synthetic_runs import Defect, Noise, Workload, make_rows, make_runs, write_run

from firstdiff.regression.diff import CompareConfig, compare
from firstdiff.regression.stats import excess_p

LOUD = Noise(block_sd=0.04, request_sd=0.04, prefill_sd=0.15, busy_fraction=0.08)
SHAPES = {"16 blocks of 2": (32, 2), "8 blocks of 4": (32, 4), "32 blocks of 4": (128, 4)}
QUICK = CompareConfig(num_resamples=100)
"""The resamples make only the printed ranges of quantiles."""


def rates(num_runs, *, shape, defects=None, floor=False, config=QUICK, part=None, **fields):
    """Share of each status over sessions 0 .. num_runs - 1, of the verdict or of one part of it."""
    num_cases, block_size = SHAPES.get(shape, shape)
    labels = ("base", "candidate", "twin") if floor else ("base", "candidate")
    counts = Counter()
    for seed in range(num_runs):
        workload = Workload(num_cases=num_cases, block_size=block_size, seed=seed, **fields)
        with tempfile.TemporaryDirectory() as folder:
            base, candidate, *twin = make_runs(Path(folder), workload, defects, labels, with_logs=False)
            verdict = compare(base, candidate, floor=twin[0] if twin else None, config=config)
        status = verdict.status
        if part is not None:
            found = {finding.status for finding in verdict.findings if finding.part == part and finding.gates}
            status = "fail" if "fail" in found else "unknown" if "unknown" in found else "pass"
        counts[status] += 1
    return {status: counts[status] / num_runs for status in ("pass", "unknown", "fail", "invalid")}


def show(what, found):
    print(f"\n{what}: " + ", ".join(f"{name} {share:.1%}" for name, share in found.items() if share))


@pytest.mark.parametrize("floor", [False, True])
def test_a_healthy_twin_passes(floor):
    found = rates(200, shape="16 blocks of 2", floor=floor)
    show(f"healthy pair, 32 pairs in 16 blocks, {'with' if floor else 'without'} a floor", found)
    assert found["pass"] >= 0.98
    assert found["fail"] <= 0.005


@pytest.mark.parametrize(("shape", "noise"), [("8 blocks of 4", Noise()), ("16 blocks of 2", LOUD)])
def test_fewer_blocks_or_more_noise_make_unknown_and_not_fail(shape, noise):
    found = rates(120, shape=shape, noise=noise)
    show(f"healthy pair, {shape}, {'twice the noise' if noise is LOUD else 'usual noise'}", found)
    assert found["fail"] <= 0.005
    assert found["pass"] >= 0.85


@pytest.mark.parametrize(("fraction", "dtype"), [(0.03, "bf16"), (0.2, "bf16"), (0.6, "bf16"), (0.2, "fp32")])
def test_a_noisy_pair_fails_no_more_often_than_stated(fraction, dtype):
    """Base, twin and candidate compute alike, but rounding makes each part from base now and then."""
    noisy = {
        label: Defect(diverging_fraction=fraction, shift=0.1, heavy_shift=True, salt=salt, logprob_sd=0.02)
        for salt, label in enumerate(("candidate", "twin"))
    }
    found = rates(120, shape="16 blocks of 2", defects=noisy, floor=True, dtype=dtype)
    show(f"healthy {dtype} pair, {fraction:.0%} of requests diverge by rounding", found)
    assert found["fail"] <= 0.02  # 0.01 as stated, and what 120 sessions cannot tell from it


@pytest.mark.parametrize(("num_cases", "least"), [(32, 0.8), (64, 0.95), (128, 0.99)])
def test_one_request_in_sixteen_diverging_is_found(num_cases, least):
    """With a floor of zero; at 32 requests none is touched in 13 % of the sessions."""
    defects = {"candidate": Defect(diverging_fraction=1 / 16, shift=1.5)}
    found = rates(80, shape=(num_cases, 2), defects=defects, floor=True)
    show(f"1 request in 16 diverges by 1.5 nat, {num_cases} pairs", found)
    assert found["fail"] >= least


@pytest.mark.parametrize(("num_cases", "least"), [(32, 0.5), (64, 0.85)])
def test_divergences_with_a_narrower_gap_need_two_touched_requests(num_cases, least):
    defects = {"candidate": Defect(diverging_fraction=1 / 16, shift=0.3)}
    found = rates(80, shape=(num_cases, 2), defects=defects, floor=True)
    show(f"1 request in 16 diverges by 0.3 nat, {num_cases} pairs", found)
    assert found["fail"] >= least
    # What is seen and cannot be settled is never waved through.
    assert found["pass"] <= (15 / 16) ** num_cases + 0.1


@pytest.mark.parametrize("floor", [False, True])
def test_a_decode_25_percent_slower_is_found(floor):
    defects = {"candidate": Defect(slower_decode=0.25)}
    found = rates(100, shape="16 blocks of 2", defects=defects, floor=floor, part="latency")
    show(f"decode 25 % slower, 32 pairs in 16 blocks, {'with' if floor else 'without'} a floor", found)
    assert found["fail"] >= 0.9
    assert found["pass"] == 0
    if not floor:
        fewer = rates(100, shape="8 blocks of 4", defects=defects, part="latency")
        show("decode 25 % slower, 32 pairs in 8 blocks", fewer)
        assert fewer["fail"] >= 0.6
        assert fewer["pass"] <= 0.01


def test_a_decode_10_percent_slower_is_found_with_more_pairs_and_a_narrower_margin():
    config = CompareConfig(latency_margin=0.05, num_resamples=100)
    defects = {"candidate": Defect(slower_decode=0.10)}
    found = rates(50, shape="32 blocks of 4", defects=defects, config=config, part="latency")
    show("decode 10 % slower, margin 5 %, 128 pairs in 32 blocks", found)
    assert found["fail"] >= 0.9
    healthy = rates(50, shape="32 blocks of 4", config=config)
    show("healthy pair, margin 5 %, 128 pairs in 32 blocks", healthy)
    assert healthy["pass"] >= 0.95
    assert healthy["fail"] == 0


def test_equal_servers_one_after_the_other_never_fail():
    """The machine's speed in the second session is another, by 20 % (sd); only what is gross may fail."""
    rng = np.random.default_rng(5)
    for what, factor in (("equal", 1.0), ("four times slower", 4.0)):
        counts = Counter()
        for seed in range(60):
            drift = float(np.exp(0.2 * rng.standard_normal())) * factor - 1
            workload = Workload(num_cases=32, block_size=4, seed=seed)
            later = Workload(num_cases=32, block_size=4, seed=seed + 1000)
            slow = {"candidate": Defect(slower_decode=drift, slower_prefill=drift)}
            base = make_rows(workload, ["base"])["base"][0]
            moved = [
                msgspec.structs.replace(row, sent_unix_ns=row.sent_unix_ns + 10**13)
                for row in make_rows(later, ["candidate"], slow)["candidate"][0]
            ]
            with tempfile.TemporaryDirectory() as folder:
                runs = [
                    write_run(Path(folder), label, rows, (), workload)
                    for label, rows in (("base", base), ("candidate", moved))
                ]
                counts[compare(*runs, config=QUICK).status] += 1
        show(f"{what}, one after the other", {status: count / 60 for status, count in counts.items()})
        if factor == 1.0:
            assert counts["fail"] == 0
        else:
            assert counts["fail"] >= 54
            assert counts["pass"] == 0


def test_a_slower_prefill_is_found():
    found = rates(
        60, shape="16 blocks of 2", defects={"candidate": Defect(slower_prefill=0.6)}, part="latency"
    )
    show("prefill 60 % slower, 32 pairs in 16 blocks", found)
    assert found["fail"] >= 0.9


def test_what_the_margin_promises():
    """Slower by the margin passes hardly ever; slower by half the margin fails hardly ever."""
    at_margin = {"candidate": Defect(slower_decode=0.15, slower_prefill=0.15)}
    found = rates(100, shape="16 blocks of 2", defects=at_margin, part="latency")
    show("slower by exactly the margin of 15 %", found)
    assert found["pass"] <= 0.05 + 0.03
    half = {"candidate": Defect(slower_decode=0.07, slower_prefill=0.07)}
    found = rates(100, shape="16 blocks of 2", defects=half, part="latency")
    show("slower by half the margin", found)
    assert found["fail"] <= 0.01 + 0.01


@pytest.mark.parametrize("tail", ["cauchy", "t3", "normal", "mixture"])
def test_the_shift_test_keeps_its_error_rate_under_heavy_tails(tail):
    """Up to tails of 1/x, which is what the test assumes at most."""
    rng = np.random.default_rng(3)

    def draw(size):
        if tail == "cauchy":
            return np.abs(rng.standard_cauchy(size))
        if tail == "normal":
            return np.abs(rng.standard_normal(size))
        values = np.abs(rng.standard_t(3, size))
        return values * np.where(rng.random(size) < 0.1, 10, 1) if tail == "mixture" else values

    num_runs = 500
    for num_values, num_floor in ((32, 32), (64, 32), (32, 128)):
        p_values = []
        for _ in range(num_runs):
            values, floor = draw(num_values), draw(num_floor)
            p_values.append(excess_p(list(values), scale=floor.max(), num_floor=num_floor))
        for level in (0.01, 0.05):
            rate = np.mean(np.array(p_values) < level)
            print(f"\nshift test, {tail}, {num_values} against {num_floor}, level {level}: {rate:.3f}")
            assert rate <= level + 3 * (level * (1 - level) / num_runs) ** 0.5
