"""Many lives of the simulated engine, or one with everything that happens in it.

`python tests/sim/sim.py --seed 7` (`make sim SEED=7`) replays one seed with a line for each event and step;
`python tests/sim/sim.py --seeds 5000` (`make sim`) lives through many and says how fast.
"""

from __future__ import annotations

import argparse
import gc
import logging
import multiprocessing
import os
import sys
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from simulator import Simulation, simulate

AT_ONCE = 100
TICKS, STEPS = "ticks", "ticks with work"


def replay(seed: int) -> None:
    print(Simulation(seed).swarm)
    simulation = simulate(seed, trace=print)
    print(f"seed {seed}: {simulation.num_ticks} ticks, all right")


def live(part: tuple[int, int]) -> tuple[Counter[str], float]:
    """What happened in the lives of these seeds (the first, how many), and the CPU seconds they took."""
    first, num_seeds = part
    counts: Counter[str] = Counter()
    started_s = time.process_time()
    # Nothing that a life allocates is in a cycle, so there is nothing to scan for every few ticks.
    gc.disable()
    for seed in range(first, first + num_seeds):
        simulation = simulate(seed)
        counts += simulation.counts
        counts[TICKS] += simulation.num_ticks
        counts[STEPS] += simulation.num_steps
    return counts, time.process_time() - started_s


def live_through(first: int, num_seeds: int, num_jobs: int) -> None:
    """Stops at the first failure seen, with how to replay its seed."""
    counts: Counter[str] = Counter()
    cpu_s = 0.0
    parts = [
        (seed, min(AT_ONCE, first + num_seeds - seed)) for seed in range(first, first + num_seeds, AT_ONCE)
    ]
    started_s = time.perf_counter()
    with multiprocessing.get_context("spawn").Pool(min(num_jobs, len(parts)), initializer=_be_quiet) as pool:
        for part_counts, part_s in pool.imap_unordered(live, parts):
            counts += part_counts
            cpu_s += part_s
    spent_s = time.perf_counter() - started_s
    num_ticks = counts.pop(TICKS)
    for name, count in sorted(counts.items()):
        print(f"{count:>10} {name}")
    print(
        f"{num_seeds} seeds from {first}, all right: {num_ticks} ticks in {spent_s:.1f} s, "
        f"{num_ticks / spent_s:.0f} a second; {num_ticks / cpu_s:.0f} a CPU second"
    )


def _be_quiet() -> None:
    logging.disable(logging.CRITICAL)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, help="replay this one, with a trace")
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--seeds", type=int, default=5000)
    parser.add_argument(
        "--jobs", type=int, default=len(os.sched_getaffinity(0)), help="processes; one a core"
    )
    options = parser.parse_args()
    _be_quiet()
    if options.seed is None:
        live_through(options.first, options.seeds, options.jobs)
    else:
        replay(options.seed)
    return 0


if __name__ == "__main__":
    sys.exit(main())
