"""Defects made by hand in pool, scheduler and engine, each one edit, and how soon a seed shows it.

`python tests/sim/mutants.py` (`make sim-mutants`) prints the list with the seeds needed.
"""

from __future__ import annotations
import __future__

import inspect
import logging
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

sys.path.insert(0, str(Path(__file__).parent))
from mutant_list import EDITS
from simulator import simulate

NUM_SEEDS = 2000


@dataclass(frozen=True, slots=True)
class Mutant:
    """`owner.function` with `old`, which it holds once, replaced by `new`."""

    name: str
    owner: type | ModuleType
    function: str
    old: str
    new: str

    @contextmanager
    def planted(self) -> Iterator[None]:
        """The defect is there within the context."""
        healthy = getattr(self.owner, self.function)
        source = textwrap.dedent(inspect.getsource(healthy))
        assert source.count(self.old) == 1, f"{self.name}: {self.old!r} is not in {self.function} once"
        code = compile(
            source.replace(self.old, self.new),
            f"<{self.name}>",
            "exec",
            flags=__future__.annotations.compiler_flag,
            dont_inherit=True,
        )
        made: dict[str, object] = {}
        exec(code, healthy.__globals__, made)
        setattr(self.owner, self.function, made[self.function])
        try:
            yield
        finally:
            setattr(self.owner, self.function, healthy)


MUTANTS = {edit[0]: Mutant(*edit) for edit in EDITS}


def first_failing_seed(num_seeds: int) -> tuple[int, str] | None:
    """The first seed that fails and the end of what it says; None when none of `num_seeds` does."""
    for seed in range(num_seeds):
        try:
            simulate(seed)
        except Exception as error:  # noqa: BLE001 - a defect may show in any way
            return seed, f"{type(error).__name__}: {error}"[:70]
    return None


def main() -> int:
    """Print each defect with the number of seeds needed; 1 when one is not found."""
    logging.disable(logging.CRITICAL)
    missed = hardest = 0
    for mutant in MUTANTS.values():
        with mutant.planted():
            found = first_failing_seed(NUM_SEEDS)
        missed += found is None
        seeds, why = ("not found", "") if found is None else (f"{found[0] + 1} seeds", found[1])
        hardest = max(hardest, NUM_SEEDS if found is None else found[0] + 1)
        print(f"{mutant.name:58} {seeds:>10}  {why}", flush=True)
    print(f"{len(MUTANTS)} defects, {missed} not found within {NUM_SEEDS} seeds; the hardest took {hardest}")
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main())
