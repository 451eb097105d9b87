"""The KV blocks: who holds which, and which free ones still hold a known prefix.

Owns: reference counts, the free queue, the index of cached blocks. Refuses to know: sequences, steps, the
KV itself. Invariants: a block is in the free queue exactly when nobody holds it; a block in the index is
full, was computed, and is never written again until it is taken out of the index; a block that is handed
out for writing is in no index; a found block has the asked tokens, after the asked tokens, whatever the
hashes say. Free blocks are reused least recently used first, those without a known prefix before all others.

Usage: `hits = pool.match(token_ids, hashes, num_blocks_max=n); pool.hold(hits); new = pool.allocate(2)`.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from hashlib import blake2b

import msgspec

ROOT_HASH = b""
"""The parent of a sequence's first block, where no salt sets it apart."""

Parent = int | str
"""What comes before a block: the number of the cached prefix that ends there; before the first, the salt."""


def root_hash(salt: str) -> bytes:
    """The parent of a first block under `salt`; ROOT_HASH for the empty one. No chain hash equals it."""
    if not salt:
        return ROOT_HASH
    return blake2b(salt.encode("utf-8", "surrogatepass"), digest_size=16, person=b"cache salt").digest()


def chain_hash(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """What names a full block: its tokens and all tokens before it, by the hash of the block before.

    BLAKE2b, 128 bits: stable across processes and out of reach of prompts made to collide.
    """
    return blake2b(parent + array("q", token_ids), digest_size=16).digest()


class CachedBlock(msgspec.Struct, frozen=True):
    """What a block in the index holds: `token_ids`, after `parent`.

    `prefix_id` numbers the prefix that ends here. No number is given twice, so that a block never passes for
    the continuation of a prefix that it was not computed after, even when two prefixes share a hash.
    """

    block_hash: bytes
    token_ids: list[int]
    parent: Parent
    prefix_id: int


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
        self._cached: list[CachedBlock | None] = [None] * num_blocks
        self._num_prefixes = 0

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

    def match(
        self, token_ids: list[int], hashes: list[bytes], *, num_blocks_max: int, salt: str = ""
    ) -> list[int]:
        """The longest run of cached blocks that holds the beginning of `token_ids` under `salt`, in order.

        At most `num_blocks_max` blocks. `hashes` is extended as far as was looked. Nothing is held yet:
        call `hold` before the next `allocate`.
        """
        blocks: list[int] = []
        if not self.enable_prefix_caching:
            return blocks
        size = self.block_size
        parent: Parent = salt
        for index in range(num_blocks_max):
            if index == len(hashes):
                self.extend_hashes(token_ids, hashes, index + 1, salt=salt)
            block = self._block_by_hash.get(hashes[index])
            if block is None:
                break
            cached = self._cached[block]
            assert cached is not None
            # A hash is a promise; the tokens, and the prefix that they were computed after, are the proof.
            if cached.parent != parent or cached.token_ids != token_ids[index * size : (index + 1) * size]:
                break
            blocks.append(block)
            parent = cached.prefix_id
        return blocks

    def prefix_id(self, block: int) -> int:
        """The number of the prefix that ends with `block`, which `match` has just found."""
        cached = self._cached[block]
        assert cached is not None
        return cached.prefix_id

    def num_allocatable(self, hits: list[int]) -> int:
        """How many blocks `allocate` could give once `hits` are held."""
        num_free = len(self._free)
        for block in hits:
            if self._ref_counts[block] == 0:
                num_free -= 1
        return num_free

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
                if self._cached[block] is None:
                    self._free.move_to_end(block, last=False)

    def extend_hashes(
        self, token_ids: list[int], hashes: list[bytes], num_full_blocks: int, *, salt: str = ""
    ) -> None:
        """Make `hashes` cover the first `num_full_blocks` blocks of `token_ids`, which must be full."""
        size = self.block_size
        assert num_full_blocks * size <= len(token_ids)
        while len(hashes) < num_full_blocks:
            start = len(hashes) * size
            parent = hashes[-1] if hashes else root_hash(salt)
            hashes.append(chain_hash(parent, token_ids[start : start + size]))

    def register(self, block: int, block_hash: bytes, token_ids: list[int], parent: Parent) -> int:
        """Let `block`, held and now completely computed, be found by later prompts; its prefix's number.

        When another block already holds the same prefix, that one stays the one to be found, and the number
        is its. When the one under this hash holds anything else (a colliding prefix, or the continuation of
        a prefix that is gone and so cannot be found any more), this one takes its place.
        """
        assert self._ref_counts[block] > 0
        assert len(token_ids) == self.block_size
        assert self._cached[block] is None
        other = self._block_by_hash.get(block_hash)
        if other is not None:
            cached = self._cached[other]
            assert cached is not None
            if cached.parent == parent and cached.token_ids == token_ids:
                return cached.prefix_id
            self._forget(other)
            if self._ref_counts[other] == 0:
                self._free.move_to_end(other, last=False)
        self._num_prefixes += 1
        self._block_by_hash[block_hash] = block
        self._cached[block] = CachedBlock(block_hash, token_ids, parent, self._num_prefixes)
        return self._num_prefixes

    def reset(self) -> int:
        """Forget all prefixes, those of held blocks too; how many blocks could be found until now.

        Blocks stay with their holders. What is registered later after a parent forgotten here is not found.
        """
        num_forgotten = len(self._block_by_hash)
        for block in list(self._block_by_hash.values()):
            self._forget(block)
        return num_forgotten

    def check_integrity(self, block_tables: Iterable[list[int]]) -> None:
        """AssertionError unless the counts are those of `block_tables`, the tables of all holders."""
        held = [0] * self.num_blocks
        for table in block_tables:
            for block in table:
                held[block] += 1
        assert self._ref_counts == held, f"references {self._ref_counts}, holders {held}"
        free = {block for block, num_holders in enumerate(held) if not num_holders}
        assert self._free.keys() == free, f"free {sorted(self._free)}, held by nobody {sorted(free)}"
        cached = {entry.block_hash: block for block, entry in enumerate(self._cached) if entry is not None}
        assert self._block_by_hash == cached
        assert len(cached) == self.num_blocks - self._cached.count(None)

    def _forget(self, block: int) -> None:
        cached = self._cached[block]
        if cached is not None:
            del self._block_by_hash[cached.block_hash]
            self._cached[block] = None
