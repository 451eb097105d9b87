"""Blocks are counted, found again by their prefix, and reused in the right order."""

from __future__ import annotations

import pytest

from firstdiff.engine import block_pool
from firstdiff.engine.block_pool import ROOT_HASH, BlockPool, chain_hash, root_hash

SIZE = 4


def make_pool(num_blocks: int = 6, *, caching: bool = True) -> BlockPool:
    return BlockPool(num_blocks, SIZE, caching)


def cache(pool: BlockPool, token_ids: list[int]) -> list[int]:
    """Blocks, still held, in which the full blocks of `token_ids` are registered."""
    num_blocks = len(token_ids) // SIZE
    hashes: list[bytes] = []
    pool.extend_hashes(token_ids, hashes, num_blocks)
    blocks = pool.allocate(num_blocks)
    parent: int | str = ""
    for index, block in enumerate(blocks):
        tokens = token_ids[index * SIZE : (index + 1) * SIZE]
        parent = pool.register(block, hashes[index], tokens, parent)
    return blocks


def find(pool: BlockPool, token_ids: list[int], *, num_blocks_max: int | None = None) -> list[int]:
    limit = len(token_ids) // SIZE if num_blocks_max is None else num_blocks_max
    return pool.match(token_ids, [], num_blocks_max=limit)


def test_a_pool_has_blocks() -> None:
    with pytest.raises(ValueError, match="expected at least 1 KV block, got 0"):
        make_pool(0)
    assert make_pool(1).num_free_blocks == 1


def test_blocks_are_held_or_free() -> None:
    pool = make_pool()
    first, second = pool.allocate(2), pool.allocate(4)
    assert sorted(first + second) == list(range(6))
    assert (pool.num_used_blocks, pool.num_free_blocks) == (6, 0)
    pool.release(first)
    assert (pool.num_used_blocks, pool.num_free_blocks) == (4, 2)
    pool.check_integrity([second])


def test_more_blocks_than_free_are_never_given() -> None:
    pool = make_pool(2)
    with pytest.raises(AssertionError):
        pool.allocate(3)


@pytest.mark.parametrize(
    ("num_tokens", "num_hits"), [(SIZE - 1, 0), (SIZE, 1), (SIZE + 1, 1), (2 * SIZE - 1, 1), (2 * SIZE, 2)]
)
def test_only_full_blocks_are_found(num_tokens: int, num_hits: int) -> None:
    pool = make_pool()
    blocks = cache(pool, list(range(2 * SIZE)))
    assert find(pool, list(range(num_tokens))) == blocks[:num_hits]


def test_a_match_is_a_prefix() -> None:
    pool = make_pool()
    blocks = cache(pool, [1] * SIZE + [2] * SIZE + [3] * SIZE)
    assert find(pool, [1] * SIZE + [9] * SIZE + [3] * SIZE) == blocks[:1]
    assert find(pool, [2] * SIZE) == []
    assert find(pool, [1] * SIZE + [2] * SIZE, num_blocks_max=1) == blocks[:1]


def test_equal_blocks_after_different_prefixes_are_different() -> None:
    pool = make_pool()
    cache(pool, [1] * SIZE + [7] * SIZE)
    other = cache(pool, [2] * SIZE + [7] * SIZE)
    assert find(pool, [2] * SIZE + [7] * SIZE) == other


def test_a_colliding_hash_is_no_hit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_pool, "chain_hash", lambda parent, token_ids: b"same")
    pool = make_pool()
    blocks = cache(pool, [1] * SIZE)
    assert find(pool, [1] * SIZE) == blocks
    assert find(pool, [2] * SIZE) == []


def test_hashes_are_the_same_in_every_process() -> None:
    first = chain_hash(ROOT_HASH, [1, 2, 3, 4])
    assert first.hex() == "087a24230771ee662be37e5493b333d7"
    assert chain_hash(first, [5, 6, 7, 8]).hex() == "8222aab65152a8711ac413a3333a672c"


def test_the_first_of_two_equal_blocks_stays_the_one_found() -> None:
    pool = make_pool()
    first = cache(pool, [1] * SIZE)
    second = cache(pool, [1] * SIZE)
    assert find(pool, [1] * SIZE) == first
    pool.release(second)
    assert pool.num_cached_blocks == 1
    pool.check_integrity([first])


def test_a_released_prefix_is_found_until_its_block_is_reused() -> None:
    pool = make_pool(2)
    blocks = cache(pool, [1] * SIZE + [2] * SIZE)
    pool.release(blocks)
    assert pool.num_used_blocks == 0
    assert find(pool, [1] * SIZE + [2] * SIZE) == blocks
    # The end of a prefix goes first: what is left is still a prefix.
    assert pool.allocate(1) == blocks[1:]
    assert find(pool, [1] * SIZE + [2] * SIZE) == blocks[:1]


def test_least_recently_used_goes_first_and_uncached_before_all() -> None:
    pool = make_pool(3)
    old, new = cache(pool, [1] * SIZE), cache(pool, [2] * SIZE)
    plain = pool.allocate(1)
    pool.release(old)
    pool.release(new)
    pool.release(plain)
    pool.hold(old)
    pool.release(old)
    assert [pool.allocate(1) for _ in range(3)] == [plain, new, old]


def test_a_held_hit_is_not_given_out() -> None:
    pool = make_pool(2)
    blocks = cache(pool, [1] * SIZE)
    pool.release(blocks)
    assert pool.num_allocatable(blocks) == 1
    pool.hold(blocks)
    pool.hold(blocks)
    assert pool.num_allocatable(blocks) == 1
    assert pool.allocate(1) != blocks
    pool.release(blocks)
    assert pool.num_free_blocks == 0
    pool.check_integrity([blocks, [1 - blocks[0]]])


def test_without_caching_nothing_is_found_or_hashed() -> None:
    pool = make_pool(caching=False)
    hashes: list[bytes] = []
    cache(pool, [1] * SIZE)
    assert pool.match([1] * SIZE, hashes, num_blocks_max=1) == []
    assert hashes == []


@pytest.mark.parametrize("tables", [[], [[0]], [[0, 1, 2]], [[0, 1], [1]]])
def test_wrong_books_are_noticed(tables: list[list[int]]) -> None:
    pool = make_pool()
    assert pool.allocate(2) == [0, 1]
    pool.check_integrity([[0, 1]])
    with pytest.raises(AssertionError):
        pool.check_integrity(tables)


def test_a_block_released_twice_is_noticed() -> None:
    pool = make_pool()
    blocks = pool.allocate(1)
    pool.release(blocks)
    with pytest.raises(AssertionError):
        pool.release(blocks)


def test_equal_tokens_after_a_colliding_prefix_are_no_hit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two prefixes of one hash, one continuation: only who was computed after the right one is found."""
    monkeypatch.setattr(block_pool, "chain_hash", lambda parent, token_ids: bytes([token_ids[0] // 10]))
    pool = make_pool(8)
    first = cache(pool, [1] * SIZE + [30] * SIZE)
    assert find(pool, [1] * SIZE + [30] * SIZE) == first
    other = cache(pool, [2] * SIZE + [30] * SIZE)
    assert find(pool, [1] * SIZE + [30] * SIZE) == []
    assert find(pool, [2] * SIZE + [30] * SIZE) == other
    # Back with the first prefix alone: its continuation in the index is still the other's.
    again = cache(pool, [1] * SIZE)
    assert find(pool, [1] * SIZE + [30] * SIZE) == again
    pool.check_integrity([first, other, again])


def test_a_salt_sets_a_prefix_apart_even_if_hashes_collide(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = make_pool()
    cache(pool, [1] * SIZE)
    assert pool.match([1] * SIZE, [], num_blocks_max=1, salt="a") == []
    monkeypatch.setattr(block_pool, "root_hash", lambda salt: ROOT_HASH)
    assert pool.match([1] * SIZE, [], num_blocks_max=1, salt="a") == []
    assert pool.match([1] * SIZE, [], num_blocks_max=1) != []


def test_no_salt_is_the_hash_of_a_block() -> None:
    tokens = [1, 2, 3, 4]
    salt = b"".join(token.to_bytes(8, "little") for token in tokens).decode()
    assert root_hash(salt) != chain_hash(ROOT_HASH, tokens)
    assert root_hash("") == ROOT_HASH
    assert len({root_hash("a"), root_hash("b"), root_hash("\ud800")}) == 3


def test_a_reset_forgets_held_and_free_blocks() -> None:
    pool = make_pool()
    held, free = cache(pool, [1] * SIZE), cache(pool, [2] * SIZE + [3] * SIZE)
    pool.release(free)
    assert pool.reset() == 3
    assert (pool.num_cached_blocks, pool.num_used_blocks) == (0, 1)
    assert find(pool, [1] * SIZE) == find(pool, [2] * SIZE) == []
    pool.check_integrity([held])
    assert pool.reset() == 0


def test_a_continuation_of_a_forgotten_prefix_makes_room_for_a_new_one() -> None:
    pool = make_pool(8)
    token_ids = [1] * SIZE + [2] * SIZE
    stale = cache(pool, token_ids)
    pool._forget(stale[0])
    assert find(pool, token_ids) == []
    new = cache(pool, token_ids)
    assert find(pool, token_ids) == new
    pool.release(stale)
    # The stale ones are known no more, so they are reused before all others.
    assert pool.allocate(2) == stale
