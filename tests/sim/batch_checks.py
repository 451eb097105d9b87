"""What a batch and a request's row must look like, by the rules alone."""

from __future__ import annotations

from collections.abc import Callable

from books import Books
from clients import Client
from swarm import Swarm
from trace_lines import describe_batch

from firstdiff.engine.sequence import ScheduledBatch, Sequence
from firstdiff.tracing.records import EngineRequestRow


class BatchCheck:
    """Sees each batch before it runs: what the runner may rely on, and who came and went for it.

    `running` is the scheduler's own list, known once there is a scheduler.
    """

    def __init__(
        self, books: Books, clients: dict[str, Client], swarm: Swarm, trace: Callable[[str], None] | None
    ) -> None:
        self.num_steps = 0
        self.running: list[Sequence] = []
        self._books = books
        self._clients = clients
        self._swarm = swarm
        self._trace = trace

    def see(self, batch: ScheduledBatch) -> None:
        running, books = self.running, self._books
        assert batch.step_index == self.num_steps
        self.num_steps += 1
        assert len(batch.items) == len(running)
        check_batch_shape(batch, self._swarm)
        pushed_out: list[Sequence] = []
        if batch.num_preemptions:
            pushed_out = books.not_in(running)
            assert batch.num_preemptions == len(pushed_out)
        if self._trace is not None:
            self._trace(describe_batch(batch, pushed_out))
        if pushed_out:
            self._take_pushed_out(batch, pushed_out)
        for sequence in books.before_step(running):
            assert not pushed_out, "no room, yet admitted"
            client = self._clients[sequence.request_id]
            if client.num_cached_tokens is None:
                client.num_cached_tokens = sequence.num_computed_tokens

    def _take_pushed_out(self, batch: ScheduledBatch, pushed_out: list[Sequence]) -> None:
        """The worst ranks went, and there was no room for the best of them even without drafts."""
        books, clients = self._books, self._clients
        kept = max(clients[item.sequence.request_id].rank for item in batch.items)
        by_rank = sorted((clients[sequence.request_id].rank, sequence) for sequence in pushed_out)
        assert kept < by_rank[0][0], "a better rank was pushed out"
        for rank, sequence in reversed(by_rank):
            num_blocks = len(books.tables[sequence])
            num_released = books.drop(sequence)
            clients[sequence.request_id].num_preemptions += 1
            books.enqueue(rank, sequence)
        check_need_of_preemption(batch, by_rank[0][1], num_blocks, num_released, books, self._swarm)


def check_batch_shape(batch: ScheduledBatch, swarm: Swarm) -> None:
    """Sizes, order and limits of the items; the blocks that they need and no more."""
    size = swarm.block_size
    assert 1 <= len(batch.items) <= swarm.max_num_seqs
    num_tokens_by_kind = [0, 0, 0]
    last_kind = 0
    for item in batch.items:
        sequence, start, num_tokens = item.sequence, item.start, item.num_scheduled_tokens
        num_drafts = item.num_draft_tokens
        end = start + num_tokens
        if sequence.preemptions:
            last = sequence.preemptions[-1]
            assert (last.recovered_ns is not None) == (start >= last.num_lost_tokens), "recovered or not"
        num_left = len(sequence.token_ids) - end + num_drafts
        assert start == sequence.num_computed_tokens
        assert num_tokens > num_drafts >= 0
        assert num_left >= 0
        assert item.samples == (num_left == 0 and sequence.sampling.max_tokens > 0)
        assert len(sequence.block_table) == -(-end // size), "blocks for other tokens than scheduled"
        if num_drafts:
            assert num_left == 0
            assert num_tokens == num_drafts + 1
            assert num_drafts == len(sequence.draft_token_ids)
            num_most = sequence.num_output_tokens + num_drafts + 1
            assert num_most <= sequence.sampling.max_tokens, "more drafts than could be kept"
            kind = 1
        else:
            kind = 0 if num_tokens == 1 and item.samples and start else 2
        assert kind >= last_kind, "decodes, then drafts, then prefills"
        last_kind = kind
        num_tokens_by_kind[kind] += num_tokens
    num_decode_tokens, num_draft_tokens, num_prefill_tokens = num_tokens_by_kind
    assert batch.num_decode_tokens == num_decode_tokens + num_draft_tokens
    assert batch.num_prefill_tokens == num_prefill_tokens
    assert batch.num_decode_tokens + num_prefill_tokens <= swarm.max_num_batched_tokens


def check_need_of_preemption(
    batch: ScheduledBatch, best: Sequence, num_blocks: int, num_released: int, books: Books, swarm: Swarm
) -> None:
    """Without drafts too there was no room for `best`, the last to be pushed out.

    It held `num_blocks`, of which `num_released` came free by that; the books are as before the step else.
    """
    size = swarm.block_size
    num_free = len(books.free) - num_released
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
    latest = row.arrived_ns
    for stamp in (row.first_scheduled_ns, row.first_token_ns, row.finished_ns):
        if stamp is not None:
            assert stamp >= latest
            latest = stamp
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
    check_preemptions(row, is_whole=is_whole)
    if is_whole or (row.num_output_tokens and not row.num_preemptions):
        assert position == len(row.prompt_token_ids), "part of the prompt was never computed"


def check_preemptions(row: EngineRequestRow, *, is_whole: bool) -> None:
    """One after another; each admitted again before the next, the last recovered in a whole answer."""
    latest = row.first_scheduled_ns or 0
    assert len(row.preemptions) == row.num_preemptions
    for index, preemption in enumerate(row.preemptions):
        is_last = index == len(row.preemptions) - 1
        assert latest <= preemption.preempted_ns <= row.finished_ns
        assert preemption.num_lost_tokens > 0
        latest = preemption.preempted_ns
        if preemption.scheduled_ns is None:
            assert is_last, "pushed out while it waited"
            assert preemption.recovered_ns is None
            assert not is_whole
            continue
        assert latest <= preemption.scheduled_ns
        latest = preemption.scheduled_ns
        if preemption.recovered_ns is not None:
            assert latest <= preemption.recovered_ns <= row.finished_ns
            latest = preemption.recovered_ns
        elif is_last:
            assert not is_whole
        else:
            assert row.preemptions[index + 1].num_lost_tokens >= preemption.num_lost_tokens
