"""The simulator finds each defect planted in scheduler, pool or engine, and flags no harmless change."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from simulator import simulate

from firstdiff.engine import block_pool, engine
from firstdiff.engine.block_pool import BlockPool
from firstdiff.engine.scheduler import Scheduler

NUM_SEEDS = 200
NUM_HARMLESS_SEEDS = 60

Plant = Callable[[pytest.MonkeyPatch], None]


@pytest.fixture(autouse=True)
def _failures_on_purpose_stay_quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL, logger="firstdiff.engine.engine")


def first_failing_seed(num_seeds: int) -> int | None:
    for seed in range(num_seeds):
        try:
            simulate(seed)
        except Exception:  # noqa: BLE001 - a defect may show in any way
            return seed
    return None


def around(owner: type | ModuleType, name: str, change: Callable[..., Any]) -> Plant:
    """A plant that puts `change(healthy, *args)` in the place of a function or method."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        healthy = getattr(owner, name)
        patch.setattr(owner, name, lambda *args, **kwargs: change(healthy, *args, **kwargs))

    return plant


def cached_prefix_kept_by_a_rewritten_block(healthy, pool, block):
    pass


def hash_without_parent(healthy, parent, token_ids):
    return healthy(b"", token_ids)


def hold_that_only_counts_the_first_holder(healthy, pool, blocks):
    healthy(pool, [block for block in blocks if pool._ref_counts[block] == 0])


def release_without_the_last_block(healthy, pool, blocks):
    healthy(pool, blocks[:-1])


def release_ignoring_other_holders(healthy, pool, blocks):
    for block in blocks:
        pool._ref_counts[block] = 1
    healthy(pool, blocks)


def match_of_the_whole_context(healthy, pool, token_ids, hashes, *, num_blocks_max):
    return healthy(pool, token_ids, hashes, num_blocks_max=len(token_ids) // pool.block_size)


def match_that_skips_a_missing_block(healthy, pool, token_ids, hashes, *, num_blocks_max):
    pool.extend_hashes(token_ids, hashes, num_blocks_max)
    found = [pool._block_by_hash.get(block_hash) for block_hash in hashes[:num_blocks_max]]
    return [block for block in found if block is not None]


def room_that_counts_cached_blocks_twice(healthy, pool, hits):
    return pool.num_free_blocks


def allocate_most_recently_used_held_or_not(healthy, pool, num_blocks):
    blocks = healthy(pool, num_blocks)
    for block in blocks:
        pool._free.setdefault(block)
    return blocks


def registered_before_it_is_computed(healthy, self, now_ns):
    batch = healthy(self, now_ns)
    for item in batch.items if batch and self.pool.enable_prefix_caching else ():
        sequence, num_full = item.sequence, (item.start + item.num_scheduled_tokens) // self._block_size
        self.pool.extend_hashes(sequence.token_ids, sequence.block_hashes, num_full)
        for index in range(num_full):
            token_ids = sequence.token_ids[index * self._block_size : (index + 1) * self._block_size]
            self.pool.register(sequence.block_table[index], sequence.block_hashes[index], token_ids)
    return batch


def registered_one_block_off(healthy, pool, block, block_hash, token_ids):
    others = [other for other, count in enumerate(pool._ref_counts) if count]
    healthy(pool, others[(others.index(block) + 1) % len(others)], block_hash, token_ids)


def failed_step_is_kept(healthy, self, batch):
    for item in batch.items:
        self._advance(item, batch.step_index)
    return healthy(self, batch)


def failed_sequences_keep_their_blocks(healthy, self, batch):
    kept = [list(item.sequence.block_table) for item in batch.items]
    failed = healthy(self, batch)
    for blocks in kept:
        self.pool.hold(blocks)
    return failed


def preempted_but_still_computed(healthy, self, sequence):
    num_computed_tokens = sequence.num_computed_tokens
    healthy(self, sequence)
    sequence.num_computed_tokens = num_computed_tokens


def preempted_to_nowhere(healthy, self, sequence):
    healthy(self, sequence)
    self.waiting.popleft()


def preempted_uncounted(healthy, self, sequence):
    healthy(self, sequence)
    sequence.num_preemptions -= 1


def aborted_but_still_running(healthy, self, request_id):
    was_running = [s for s in self.running if s.request_id == request_id]
    sequence = healthy(self, request_id)
    self.running += was_running
    return sequence


def end_of_text_ignored(healthy, self, sequence, token_id):
    return "length" if sequence.num_output_tokens >= sequence.sampling.max_tokens else None


def one_token_too_many(healthy, self, sequence, token_id):
    reason = healthy(self, sequence, token_id)
    too_few = sequence.num_output_tokens <= sequence.sampling.max_tokens
    return None if reason == "length" and too_few else reason


def admission_without_budget(healthy, self, decodes, prefills, now_ns):
    self._max_num_batched_tokens += 3
    healthy(self, decodes, prefills, now_ns)
    self._max_num_batched_tokens -= 3


def admission_without_seats(healthy, self, decodes, prefills, now_ns):
    self._max_num_seqs += 1
    healthy(self, decodes, prefills, now_ns)
    self._max_num_seqs -= 1


def admission_from_the_back(healthy, self, decodes, prefills, now_ns):
    self.waiting.reverse()
    healthy(self, decodes, prefills, now_ns)
    self.waiting.reverse()


def admission_needs_more_than_everything(healthy, self, sequence):
    hits = healthy(self, sequence)
    return None if self._num_blocks_for(sequence.num_tokens) == self.pool.num_blocks else hits


def token_rows_one_late(healthy, batch, sampled, emitted_ns):
    return healthy(batch, sampled, emitted_ns)[1:]


def refusal_of_the_last_fit(healthy, self, num_tokens):
    return healthy(self, num_tokens + 1)


PLANTS: dict[str, Plant] = {
    change.__name__: around(owner, name, change)
    for owner, name, change in [
        (BlockPool, "_forget", cached_prefix_kept_by_a_rewritten_block),
        (block_pool, "chain_hash", hash_without_parent),
        (BlockPool, "hold", hold_that_only_counts_the_first_holder),
        (BlockPool, "release", release_without_the_last_block),
        (BlockPool, "release", release_ignoring_other_holders),
        (BlockPool, "match", match_of_the_whole_context),
        (BlockPool, "match", match_that_skips_a_missing_block),
        (BlockPool, "num_allocatable", room_that_counts_cached_blocks_twice),
        (BlockPool, "allocate", allocate_most_recently_used_held_or_not),
        (BlockPool, "register", registered_one_block_off),
        (Scheduler, "schedule", registered_before_it_is_computed),
        (Scheduler, "fail", failed_step_is_kept),
        (Scheduler, "fail", failed_sequences_keep_their_blocks),
        (Scheduler, "_preempt", preempted_but_still_computed),
        (Scheduler, "_preempt", preempted_to_nowhere),
        (Scheduler, "_preempt", preempted_uncounted),
        (Scheduler, "abort", aborted_but_still_running),
        (Scheduler, "_finish_reason", end_of_text_ignored),
        (Scheduler, "_finish_reason", one_token_too_many),
        (Scheduler, "_schedule_waiting", admission_without_budget),
        (Scheduler, "_schedule_waiting", admission_without_seats),
        (Scheduler, "_schedule_waiting", admission_from_the_back),
        (Scheduler, "_admissible", admission_needs_more_than_everything),
        (Scheduler, "_num_blocks_for", refusal_of_the_last_fit),
        (engine, "_token_rows", token_rows_one_late),
    ]
}


@pytest.mark.parametrize("name", PLANTS)
def test_a_planted_defect_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    PLANTS[name](monkeypatch)
    assert first_failing_seed(NUM_SEEDS) is not None


def test_a_harmless_change_is_not_flagged(monkeypatch: pytest.MonkeyPatch) -> None:
    """Free blocks in another order of reuse: fewer hits perhaps, never a wrong answer."""

    def fresh_blocks_last(healthy, pool, blocks):
        healthy(pool, list(reversed(blocks)))

    around(BlockPool, "release", fresh_blocks_last)(monkeypatch)
    assert first_failing_seed(NUM_HARMLESS_SEEDS) is None
