"""Thousands of lives of an engine on a symbolic model: always right, always accounted for, always done.

A failure says how to replay its seed (`make sim SEED=n`). `FIRSTDIFF_SIM_SEEDS=n` makes more of them.
"""

from __future__ import annotations

import os
import sys
import time
from collections import Counter
from pathlib import Path
from random import SystemRandom

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from simulator import Simulation, history_of, simulate

NUM_SEEDS = int(os.environ.get("FIRSTDIFF_SIM_SEEDS", "2000"))
NUM_AT_ONCE = 50
NUM_FRESH_SEEDS = 200
MIN_TICKS_A_SECOND = 4000
"""A sixth of what a quiet core does: this is to notice a check that got slow, not a busy machine."""


@pytest.mark.parametrize("first", range(0, NUM_SEEDS, NUM_AT_ONCE))
def test_every_answer_is_right_and_every_block_accounted_for(first: int) -> None:
    for seed in range(first, min(first + NUM_AT_ONCE, NUM_SEEDS)):
        simulate(seed)


def test_fresh_seeds_are_right_too() -> None:
    first = SystemRandom().randrange(10**6, 10**9)
    print(f"seeds {first}..{first + NUM_FRESH_SEEDS - 1}: make sim SEED=n replays one")
    for seed in range(first, first + NUM_FRESH_SEEDS):
        simulate(seed)


def test_the_simulation_is_quick_and_not_vacuous() -> None:
    """What the seeds are meant to provoke does happen, many times over, thousands of ticks a second."""
    counts: Counter[str] = Counter()
    num_ticks = num_steps = 0
    started_s = time.process_time()
    for seed in range(200):
        simulation = simulate(seed)
        counts += simulation.counts
        num_ticks += simulation.num_ticks
        num_steps += simulation.num_steps
    spent_s = time.process_time() - started_s
    floors = {
        "added": 5000,
        "hit tokens": 1500,
        "preemptions": 80,
        "chunked prefills": 800,
        "aborts": 500,
        "aborts of preempted or waiting": 350,
        "runner errors": 150,
        "resets": 500,
        "forgotten while held": 60,
        "drafts": 3000,
        "accepted drafts": 2000,
        "empty proposals": 400,
        "prompt log-probabilities": 1200,
        "finished by stop": 200,
        "finished by length": 4000,
        "finished without a sample": 600,
        "refused": 500,
        "queue full": 1500,
    }
    missed = {name: counts[name] for name, floor in floors.items() if counts[name] < floor}
    assert missed == {}
    assert counts["drafts"] - counts["accepted drafts"] > 500
    assert num_steps > num_ticks / 2
    assert num_ticks / spent_s > MIN_TICKS_A_SECOND


def test_a_seed_replays_exactly_traced_or_not() -> None:
    for seed in range(20):
        lines: list[str] = []
        assert history_of(simulate(seed)) == history_of(simulate(seed, trace=lines.append))
        num_steps = sum(line.startswith("step ") for line in lines)
        assert num_steps == simulate(seed).num_steps


def test_a_failure_says_how_to_replay_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Simulation, "reset", lambda self: 1 / 0)
    seed = next(seed for seed in range(100) if Simulation(seed).swarm.reset_fraction > 0.1)
    with pytest.raises(ZeroDivisionError) as caught:
        simulate(seed)
    assert caught.value.__notes__[0].startswith(f"replay: make sim SEED={seed} ")
