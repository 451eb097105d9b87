"""The simulator's own account of who holds which block and who waits, kept from what it sees.

Each tick it takes over the block tables of the running sequences, as far as they changed, and asserts that
pool and scheduler say the same of every block and every request. All of it is compared, list by list; worked
out anew is only what changed. Nothing is taken from the pool; what it keeps twice, the cached blocks and the
index that finds them, is held against each other.
"""

from __future__ import annotations

from bisect import bisect_left
from operator import attrgetter

from firstdiff.engine.block_pool import CachedBlock
from firstdiff.engine.scheduler import Scheduler
from firstdiff.engine.sequence import Sequence

Rank = tuple[int, int]

_block_hash = attrgetter("block_hash")


class Books:
    """Holders by block, tables by running sequence, the queue as it must be, and who is in flight."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.held = [0] * num_blocks
        self.free = dict.fromkeys(range(num_blocks))
        """The blocks that nobody holds; a dict without values, to be compared with another at once."""
        self.tables: dict[Sequence, list[int]] = {}
        self.queue: list[Sequence] = []
        self.in_flight: dict[str, Sequence] = {}
        self._block_size = block_size
        self._ranks: list[Rank] = []
        self._cached: list[CachedBlock | None] = [None] * num_blocks
        self._index: dict[bytes, int] = {}

    def add(self, rank: Rank, request_id: str, waiting: list[Sequence]) -> None:
        """A request was taken: it is where its rank belongs in the queue, and there for the first time."""
        place = bisect_left(self._ranks, rank)
        assert len(waiting) == len(self.queue) + 1
        sequence = waiting[place]
        assert sequence.request_id == request_id, "queued where its rank does not belong"
        self.in_flight[request_id] = sequence
        self._enqueue_at(place, rank, sequence)

    def end(self, rank: Rank, request_id: str) -> bool:
        """A request is over; whether it was in the queue."""
        sequence = self.in_flight.pop(request_id)
        place = bisect_left(self._ranks, rank)
        if place == len(self.queue) or self.queue[place] is not sequence:
            return False
        del self.queue[place], self._ranks[place]
        return True

    def enqueue(self, rank: Rank, sequence: Sequence) -> None:
        """Who was pushed out waits in its place by rank."""
        self._enqueue_at(bisect_left(self._ranks, rank), rank, sequence)

    def _enqueue_at(self, place: int, rank: Rank, sequence: Sequence) -> None:
        """Who waits starts, or starts over, with nothing."""
        assert not sequence.block_table
        assert sequence.num_computed_tokens == 0
        self._ranks.insert(place, rank)
        self.queue.insert(place, sequence)

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
                assert self.queue, "admitted from nowhere"
                assert self.queue.pop(0) is sequence, "overtook a better rank"
                del self._ranks[0]
                admitted.append(sequence)
                old = []
            assert new[: len(old)] == old, f"{sequence.request_id}: its table changed under it"
            assert len(set(new)) == len(new), f"{sequence.request_id}: a block twice"
            self._hold(new[len(old) :])
            tables[sequence] = new[:]
        assert len(tables) == len(running)
        return admitted

    def after_step(self, running: list[Sequence]) -> None:
        """Take over the tables as committed, which may only have lost blocks at their end, or all of them.

        They cover what is computed and no more, which is all known tokens but the last; of the last admitted
        it may be less.
        """
        tables, size = self.tables, self._block_size
        for sequence in running:
            old, new = tables[sequence], sequence.block_table
            if old != new:
                assert old[: len(new)] == new, f"{sequence.request_id}: its table changed under it"
                self._release(old[len(new) :])
                tables[sequence] = new[:]
            num_computed, num_known = sequence.num_computed_tokens, len(sequence.token_ids)
            assert len(new) == -(-num_computed // size)
            if num_computed + 1 != num_known:
                assert num_computed < num_known
                assert sequence is running[-1], "part-way through its prefill, and not the last"
        if len(tables) != len(running):
            for sequence in self.not_in(running):
                self.drop(sequence)
        assert len(tables) == len(running)

    def check(self, scheduler: Scheduler) -> None:
        """Scheduler and pool count what the books count, block by block and request by request."""
        pool = scheduler.pool
        assert pool._ref_counts == self.held, "the pool's references are not those of the tables"
        assert pool._free == self.free, "free is not what nobody holds"
        if pool._cached != self._cached or pool._block_by_hash != self._index:
            self._cached, self._index = pool._cached[:], pool._block_by_hash.copy()
            self._check_index()
        assert scheduler.waiting == self.queue, "the queue is not in the order of its ranks"
        assert len(scheduler._by_id) == len(self.in_flight) == len(self.tables) + len(self.queue)

    def _check_index(self) -> None:
        """What can be found is what blocks hold, each under its own hash."""
        cached, index = self._cached, self._index
        assert len(index) == len(cached) - cached.count(None), "cached, and not found"
        entries = map(cached.__getitem__, index.values())
        assert [*map(_block_hash, entries)] == [*index], "found under another hash"

    def not_in(self, running: list[Sequence]) -> list[Sequence]:
        """Who ran and is not in `running`."""
        return [sequence for sequence in self.tables if sequence not in running]

    def drop(self, sequence: Sequence) -> int:
        """Take a table out; how many blocks nobody else held."""
        num_free = len(self.free)
        self._release(self.tables.pop(sequence))
        return len(self.free) - num_free

    def _hold(self, blocks: list[int]) -> None:
        held = self.held
        for block in blocks:
            if not held[block]:
                del self.free[block]
            held[block] += 1

    def _release(self, blocks: list[int]) -> None:
        held = self.held
        for block in blocks:
            held[block] -= 1
            if not held[block]:
                self.free[block] = None
