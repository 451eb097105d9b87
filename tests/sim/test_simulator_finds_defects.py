"""The simulator finds each defect planted in scheduler, pool or engine, and flags no harmless change."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from mutants import MUTANTS, NUM_SEEDS, Mutant, first_failing_seed
from simulator import Simulation

from firstdiff.engine.block_pool import BlockPool
from firstdiff.engine.scheduler import Scheduler

NUM_HARMLESS_SEEDS = 60

HARMLESS = [
    Mutant("uncached blocks are reused last", BlockPool, "release", "last=False", "last=True"),
    Mutant("the end of a prefix is reused last", BlockPool, "release", "reversed(blocks)", "blocks"),
    Mutant("no block is kept back", Scheduler, "_admissible", "num_new + num_reserved", "num_new"),
]


def test_there_are_many_defects_all_different() -> None:
    assert len(MUTANTS) >= 60
    assert len({(m.owner, m.function, m.old, m.new) for m in MUTANTS.values()}) == len(MUTANTS)


@pytest.mark.parametrize("name", MUTANTS)
def test_a_planted_defect_is_found(name: str) -> None:
    with MUTANTS[name].planted():
        assert first_failing_seed(NUM_SEEDS) is not None


@pytest.mark.parametrize("mutant", HARMLESS, ids=lambda mutant: mutant.name)
def test_a_harmless_change_is_not_flagged(mutant: Mutant) -> None:
    """Fewer hits or more preemptions perhaps, never a wrong answer."""
    with mutant.planted():
        assert first_failing_seed(NUM_HARMLESS_SEEDS) is None


@pytest.mark.parametrize(
    "spoil",
    [
        lambda pool: pool._ref_counts.__setitem__(0, 7),
        lambda pool: pool._free.popitem(),
        # As many are free as before, but not the same.
        lambda pool: pool._free.update({pool._ref_counts.index(1): pool._free.popitem()[1]}),
        lambda pool: pool._block_by_hash.__setitem__(b"nothing", 0),
        lambda pool: pool._cached.__setitem__(0, None) if pool._cached[0] else pool._free.popitem(),
    ],
)
def test_spoilt_books_are_noticed_at_once(spoil) -> None:
    """By what each tick ends with, and by the full check."""
    simulation = Simulation(4)
    for _ in range(10):
        simulation.add(simulation.draw_request())
        simulation.tick()
    while not simulation.books.tables:
        simulation.add(simulation.draw_request())
        simulation.tick()
    simulation.check_everything()
    simulation.num_unchecked_ticks = -1000
    simulation.check_accounts()
    spoil(simulation.scheduler.pool)
    with pytest.raises(AssertionError):
        simulation.check_accounts()
    with pytest.raises(AssertionError):
        simulation.check_everything()
