"""What a batch and a request's row must look like, by the rules alone."""

from __future__ import annotations

from books import Books
from swarm import Swarm

from firstdiff.engine.sequence import ScheduledBatch, Sequence
from firstdiff.tracing.records import EngineRequestRow


def check_batch_shape(batch: ScheduledBatch, swarm: Swarm) -> None:
    """Sizes, order and limits of the items; the blocks that they need and no more."""
    size = swarm.block_size
    assert 1 <= len(batch.items) <= swarm.max_num_seqs
    num_decode_tokens = num_prefill_tokens = last_kind = 0
    for item in batch.items:
        sequence, start, num_tokens = item.sequence, item.start, item.num_scheduled_tokens
        num_drafts = item.num_draft_tokens
        end, num_known = start + num_tokens, len(sequence.token_ids)
        num_prompt, max_tokens = len(sequence.prompt_token_ids), sequence.sampling.max_tokens
        assert start == sequence.num_computed_tokens
        assert num_tokens > num_drafts >= 0
        assert end - num_drafts <= num_known
        is_last = end - num_drafts == num_known
        assert item.samples == (is_last and max_tokens > 0)
        assert len(sequence.block_table) == -(-end // size), "blocks for other tokens than scheduled"
        if num_drafts:
            assert is_last and num_tokens == num_drafts + 1  # noqa: PT018
            assert num_drafts == len(sequence.draft_token_ids)
            assert num_known - num_prompt + num_drafts + 1 <= max_tokens, "more drafts than could be kept"
            kind = 1
        else:
            kind = 0 if num_tokens == 1 and item.samples and start else 2
        assert kind >= last_kind, "decodes, then drafts, then prefills"
        last_kind = kind
        if kind == 2:
            num_prefill_tokens += num_tokens
        else:
            num_decode_tokens += num_tokens
    assert num_decode_tokens == batch.num_decode_tokens
    assert num_prefill_tokens == batch.num_prefill_tokens
    assert num_decode_tokens + num_prefill_tokens <= swarm.max_num_batched_tokens


def check_need_of_preemption(
    batch: ScheduledBatch, best: Sequence, num_blocks: int, num_released: int, books: Books, swarm: Swarm
) -> None:
    """Without drafts too there was no room for `best`, the last to be pushed out.

    It held `num_blocks`, of which `num_released` came free by that; the books are as before the step else.
    """
    size = swarm.block_size
    num_free = len(books.held) - books.num_held - num_released
    num_tokens = min(best.num_tokens, num_blocks * size + swarm.max_num_batched_tokens)
    num_needed = -(-num_tokens // size) - num_blocks
    for item in batch.items:
        end = item.start + item.num_scheduled_tokens - item.num_draft_tokens
        num_needed += -(-end // size) - len(books.tables[item.sequence])
    assert num_needed > num_free, "pushed out although there was room"


def check_request_row(row: EngineRequestRow, swarm: Swarm, *, is_whole: bool) -> None:
    """Stamps in order; prefill chunks join up, except where a preemption made them start over.

    They cover the prompt when the request came to its own end (`is_whole`), or to a token and no preemption.
    """
    stamps = [row.arrived_ns, row.first_scheduled_ns, row.first_token_ns, row.finished_ns]
    reached = [stamp for stamp in stamps if stamp is not None]
    assert reached == sorted(reached)
    assert (row.first_token_ns is None) == (row.num_output_tokens == 0)
    assert row.num_cached_tokens % swarm.block_size == 0
    assert row.num_cached_tokens < len(row.prompt_token_ids)
    assert swarm.enable_prefix_caching or row.num_cached_tokens == 0
    position, num_restarts, last_step = row.num_cached_tokens, 0, -1
    for chunk in row.prefill_chunks:
        assert chunk.num_tokens > 0
        assert chunk.step_index > last_step
        num_restarts += chunk.start_token != position
        position, last_step = chunk.start_token + chunk.num_tokens, chunk.step_index
    assert num_restarts <= row.num_preemptions
    if is_whole or (row.num_output_tokens and not row.num_preemptions):
        assert position == len(row.prompt_token_ids), "part of the prompt was never computed"
