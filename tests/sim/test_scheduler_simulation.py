"""Hundreds of lives of an engine on a symbolic model: always right, always accounted for, always done.

`FIRSTDIFF_SIM_SEED=n pytest tests/sim` replays one seed, `FIRSTDIFF_SIM_SEEDS=n` lives through more of them.
"""

from __future__ import annotations

import logging
import os
import sys
from collections import Counter
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from simulator import history_of, simulate

NUM_SEEDS = int(os.environ.get("FIRSTDIFF_SIM_SEEDS", "300"))
ONE_SEED = os.environ.get("FIRSTDIFF_SIM_SEED")
SEEDS = range(NUM_SEEDS) if ONE_SEED is None else [int(ONE_SEED)]


@pytest.fixture(autouse=True)
def _failures_on_purpose_stay_quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL, logger="firstdiff.engine.engine")


@pytest.mark.parametrize("seed", SEEDS)
def test_every_answer_is_right_and_every_block_accounted_for(seed: int) -> None:
    simulate(seed)


def test_the_simulation_is_not_vacuous() -> None:
    """What the seeds are meant to provoke does happen, many times over."""
    counts: Counter[str] = Counter()
    for seed in range(100):
        counts += simulate(seed).counts
    floors = {
        "requests": 3000,
        "hit tokens": 2000,
        "preemptions": 150,
        "chunked prefills": 200,
        "aborts": 200,
        "aborts of preempted or waiting": 100,
        "runner errors": 80,
        "finished by stop": 200,
        "finished by length": 1000,
        "refused": 200,
        "queue full": 300,
    }
    missed = {name: counts[name] for name, floor in floors.items() if counts[name] < floor}
    assert missed == {}


def test_a_seed_replays_exactly() -> None:
    for seed in range(20):
        assert history_of(simulate(seed)) == history_of(simulate(seed))
