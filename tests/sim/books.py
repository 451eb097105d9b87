"""The simulator's own account of who holds which block and who waits, kept from what it sees.

Each tick it takes over the block tables of the running sequences, as far as they changed, and asserts that
the pool's counts are the same. Nothing is taken from the pool.
"""

from __future__ import annotations

from bisect import bisect_left, insort

from firstdiff.engine.block_pool import BlockPool
from firstdiff.engine.sequence import Sequence

Rank = tuple[int, int]


class Books:
    """Holders by block, tables by running sequence, and the queue as it must be."""

    def __init__(self, num_blocks: int) -> None:
        self.held = [0] * num_blocks
        self.num_held = 0
        self.tables: dict[Sequence, list[int]] = {}
        self.queue: list[tuple[Rank, str]] = []

    def before_step(self, running: list[Sequence]) -> list[Sequence]:
        """Take over the tables as scheduled, which may only have grown; who was admitted.

        Who was pushed out must have been dropped before.
        """
        tables = self.tables
        admitted: list[Sequence] = []
        for sequence in running:
            old, new = tables.get(sequence), sequence.block_table
            if old == new:
                continue
            if old is None:
                admitted.append(sequence)
                old = []
            assert new[: len(old)] == old, f"{sequence.request_id}: its table changed under it"
            assert len(set(new)) == len(new), f"{sequence.request_id}: a block twice"
            self._count(new[len(old) :], 1)
            tables[sequence] = new[:]
        assert len(tables) == len(running)
        return admitted

    def after_step(self, running: list[Sequence]) -> None:
        """Take over the tables as committed, which may only have lost blocks at their end, or all of them."""
        tables = self.tables
        for sequence in running:
            old, new = tables[sequence], sequence.block_table
            if old == new:
                continue
            assert old[: len(new)] == new, f"{sequence.request_id}: its table changed under it"
            self._count(old[len(new) :], -1)
            tables[sequence] = new[:]
        if len(tables) != len(running):
            for sequence in self.not_in(running):
                self.drop(sequence)
        assert len(tables) == len(running)

    def check(self, pool: BlockPool) -> None:
        """The pool counts what the books count, block by block."""
        assert pool._ref_counts == self.held, "the pool's references are not those of the tables"
        assert pool.num_free_blocks == len(self.held) - self.num_held
        assert pool.num_used_blocks == self.num_held

    def enqueue(self, rank: Rank, request_id: str) -> None:
        insort(self.queue, (rank, request_id))

    def dequeue(self, rank: Rank, request_id: str) -> bool:
        """Take an entry out; whether it was there."""
        index = bisect_left(self.queue, (rank, request_id))
        if index == len(self.queue) or self.queue[index] != (rank, request_id):
            return False
        del self.queue[index]
        return True

    def not_in(self, running: list[Sequence]) -> list[Sequence]:
        """Who ran and is not in `running`."""
        return [sequence for sequence in self.tables if sequence not in running]

    def drop(self, sequence: Sequence) -> int:
        """Take a table out; how many blocks nobody else held."""
        num_held = self.num_held
        self._count(self.tables.pop(sequence), -1)
        return num_held - self.num_held

    def _count(self, blocks: list[int], change: int) -> None:
        held = self.held
        for block in blocks:
            before = held[block]
            held[block] = before + change
            if not before:
                self.num_held += 1
            elif not held[block]:
                self.num_held -= 1
