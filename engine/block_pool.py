"""The KV blocks: who holds which, and which free ones still hold a known prefix.

Owns: reference counts, the free queue, the index of cached blocks. Refuses to know: sequences, steps, the
KV itself. Invariants: a block is in the free queue exactly when nobody holds it; a block in the index is
full, was computed, and is never written again until it is taken out of the index; a block that is handed
out for writing is in no index. Free blocks are reused least recently used first, those without a known
prefix before all others.

Usage: `hits = pool.match(token_ids, hashes, num_blocks_max=n); pool.hold(hits); new = pool.allocate(2)`.
"""

from __future__ import annotations

from array import array
from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from hashlib import blake2b

ROOT_HASH = b""
"""The parent of a sequence's first block."""


def chain_hash(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """What names a full block: its tokens and all tokens before it, by the hash of the block before.

    BLAKE2b, 128 bits: stable across processes and out of reach of prompts made to collide.
    """
    return blake2b(parent + array("q", token_ids).tobytes(), digest_size=16).digest()


class BlockPool:
    """`num_blocks` blocks of `block_size` token slots each."""

    def __init__(self, num_blocks: int, block_size: int, enable_prefix_caching: bool) -> None:
        if num_blocks < 1:
            raise ValueError(f"expected at least 1 KV block, got {num_blocks}: raise --num-blocks")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self._ref_counts = [0] * num_blocks
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self._block_by_hash: dict[bytes, int] = {}
        self._hashes: list[bytes | None] = [None] * num_blocks
        self._token_ids: list[list[int]] = [[] for _ in range(num_blocks)]

    @property
    def num_free_blocks(self) -> int:
        """Blocks that nobody holds, cached ones included."""
        return len(self._free)

    @property
    def num_used_blocks(self) -> int:
        return self.num_blocks - len(self._free)

    @property
    def num_cached_blocks(self) -> int:
        """Blocks, held or free, whose prefix can be found."""
        return len(self._block_by_hash)

    def match(self, token_ids: list[int], hashes: list[bytes], *, num_blocks_max: int) -> list[int]:
        """The longest run of cached blocks that holds the beginning of `token_ids`, in order.

        At most `num_blocks_max` blocks. `hashes` is extended as far as was looked. Nothing is held yet:
        call `hold` before the next `allocate`.
        """
        blocks: list[int] = []
        if not self.enable_prefix_caching:
            return blocks
        size = self.block_size
        for index in range(num_blocks_max):
            self.extend_hashes(token_ids, hashes, index + 1)
            block = self._block_by_hash.get(hashes[index])
            # A hash is a promise, the tokens are the proof.
            if block is None or self._token_ids[block] != token_ids[index * size : (index + 1) * size]:
                break
            blocks.append(block)
        return blocks

    def num_allocatable(self, hits: list[int]) -> int:
        """How many blocks `allocate` could give once `hits` are held."""
        return len(self._free) - sum(1 for block in hits if self._ref_counts[block] == 0)

    def hold(self, blocks: list[int]) -> None:
        """Add a holder to each of `blocks`."""
        for block in blocks:
            if self._ref_counts[block] == 0:
                del self._free[block]
            self._ref_counts[block] += 1

    def allocate(self, num_blocks: int) -> list[int]:
        """At most `num_free_blocks` blocks to write, each with one holder; what they cached is forgotten."""
        assert num_blocks <= len(self._free)
        blocks: list[int] = []
        for _ in range(num_blocks):
            block, _none = self._free.popitem(last=False)
            assert self._ref_counts[block] == 0
            self._ref_counts[block] = 1
            self._forget(block)
            blocks.append(block)
        return blocks

    def release(self, blocks: list[int]) -> None:
        """Take a holder away from each block of a block table; later a prefix is reused from its end."""
        for block in reversed(blocks):
            self._ref_counts[block] -= 1
            assert self._ref_counts[block] >= 0
            if self._ref_counts[block] == 0:
                self._free[block] = None
                if self._hashes[block] is None:
                    self._free.move_to_end(block, last=False)

    def extend_hashes(self, token_ids: list[int], hashes: list[bytes], num_full_blocks: int) -> None:
        """Make `hashes` cover the first `num_full_blocks` blocks of `token_ids`, which must be full."""
        size = self.block_size
        assert num_full_blocks * size <= len(token_ids)
        while len(hashes) < num_full_blocks:
            start = len(hashes) * size
            parent = hashes[-1] if hashes else ROOT_HASH
            hashes.append(chain_hash(parent, token_ids[start : start + size]))

    def register(self, block: int, block_hash: bytes, token_ids: list[int]) -> None:
        """Let `block`, held and now completely computed, be found by later prompts.

        When another block already holds the same prefix, that one stays the one to be found.
        """
        assert self._ref_counts[block] > 0
        assert len(token_ids) == self.block_size
        if self._hashes[block] is None and block_hash not in self._block_by_hash:
            self._block_by_hash[block_hash] = block
            self._hashes[block] = block_hash
            self._token_ids[block] = token_ids

    def check_integrity(self, block_tables: Iterable[list[int]]) -> None:
        """AssertionError unless the counts are those of `block_tables`, the tables of all holders."""
        held = Counter(block for table in block_tables for block in table)
        for block, ref_count in enumerate(self._ref_counts):
            assert ref_count == held[block], f"block {block}: {ref_count} references, {held[block]} holders"
            assert (block in self._free) == (ref_count == 0), f"block {block} free and held, or neither"
            block_hash = self._hashes[block]
            assert block_hash is None or self._block_by_hash.get(block_hash) == block
        assert len(self._free) + sum(1 for count in self._ref_counts if count) == self.num_blocks
        assert len(self._block_by_hash) == sum(1 for block_hash in self._hashes if block_hash is not None)

    def _forget(self, block: int) -> None:
        block_hash = self._hashes[block]
        if block_hash is not None:
            del self._block_by_hash[block_hash]
            self._hashes[block] = None
            self._token_ids[block] = []
