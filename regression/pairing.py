"""Which rows of two Runs belong together: by case and repeat, and by the moment they ran.

Owns: pairs of answered requests, the blocks of pairs that one disturbance hits together. Refuses to know:
what is compared. Invariants: pairs are in base's order; blocks come from the turns the driver took where it
took turns, else from neighbourhood in time.

Usage: `pairs = both_ok(base, candidate); blocks = blocks_of(pairs, by_turns=True, config=config)`.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from firstdiff.regression.summary import Key, RunView
from firstdiff.regression.verdict import CompareConfig
from firstdiff.tracing.records import RequestRow

Pair = tuple[Key, RequestRow, RequestRow]

_MAX_BLOCKS = 16
_PAIRS_A_BLOCK = 4


def both_ok(base: RunView, candidate: RunView) -> list[Pair]:
    """The requests that both sides answered, in base's order."""
    theirs = candidate.ok
    return [(key, row, theirs[key]) for key, row in base.ok.items() if key in theirs]


def took_turns(base: RunView, candidate: RunView, config: CompareConfig) -> bool:
    """Whether the sides ran at the same time or by turns, so that what changes with time hit both."""
    sends = sorted(
        (row.sent_unix_ns, side) for side, view in enumerate((base, candidate)) for row in view.rows.values()
    )
    turns = sum(before[1] != after[1] for before, after in pairwise(sends))
    # In ABBA order a side's two turns in a row count as one; one after the other is a single change.
    return turns >= config.min_blocks


def blocks_of(pairs: Sequence[Pair], *, by_turns: bool, config: CompareConfig) -> dict[Key, object]:
    """The block of each pair: the turn it was asked in, else its neighbours in time."""
    turns: dict[Key, object] = {key: (one.block_index, key[1]) for key, one, _ in pairs}
    if by_turns and len(set(turns.values())) >= config.min_blocks:
        return turns
    ordered = sorted(pairs, key=lambda pair: (pair[1].sent_unix_ns, pair[0]))
    num_blocks = max(1, min(_MAX_BLOCKS, len(ordered) // _PAIRS_A_BLOCK))
    return {key: index * num_blocks // len(ordered) for index, (key, _, _) in enumerate(ordered)}
