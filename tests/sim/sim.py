"""Many lives of the simulated engine, or one with everything that happens in it.

`python tests/sim/sim.py --seed 7` (`make sim SEED=7`) replays one seed with a line for each event and step;
`python tests/sim/sim.py --seeds 5000` (`make sim`) lives through many and says how fast.
"""

from __future__ import annotations

import argparse
import gc
import logging
import sys
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from simulator import Simulation, simulate


def replay(seed: int) -> None:
    print(Simulation(seed).swarm)
    simulation = simulate(seed, trace=print)
    print(f"seed {seed}: {simulation.num_ticks} ticks, all right")


def live_through(first: int, num_seeds: int) -> None:
    """Stops at the first seed that fails, with how to replay it."""
    counts: Counter[str] = Counter()
    num_ticks = num_steps = 0
    started_s = time.process_time()
    # Nothing that a life allocates is in a cycle, so there is nothing to scan for every few ticks.
    gc.disable()
    for seed in range(first, first + num_seeds):
        simulation = simulate(seed)
        counts += simulation.counts
        num_ticks += simulation.num_ticks
        num_steps += simulation.num_steps
    spent_s = time.process_time() - started_s
    for name, count in sorted(counts.items()):
        print(f"{count:>10} {name}")
    print(
        f"{num_seeds} seeds from {first}, all right: {num_ticks} ticks ({num_steps} with work) "
        f"in {spent_s:.1f} s of CPU time, {num_ticks / spent_s:.0f} a second "
        f"({num_steps / spent_s:.0f} counting only those with work)"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, help="replay this one, with a trace")
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--seeds", type=int, default=5000)
    options = parser.parse_args()
    logging.disable(logging.CRITICAL)
    if options.seed is None:
        live_through(options.first, options.seeds)
    else:
        replay(options.seed)
    return 0


if __name__ == "__main__":
    sys.exit(main())
