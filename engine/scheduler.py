"""Which tokens of which sequences the next step computes.

Owns: the queue, the running set, the blocks of each sequence, preemption, the end of a sequence. Refuses to
know: torch, text, rows, the clock (stamps are arguments). There are no phases: a sequence is
`num_computed_tokens` catching up with `num_tokens`, so chunked prefill, prefix hits, decoding and recompute
after a preemption are one case. Policy: one token budget a step, running sequences first in the order of
their admission, then the queue, first come first served.

Invariants: KV blocks cover at least the computed tokens of each running sequence; waiting sequences hold no
block; only the last running sequence may be part-way through its prefill, so each decode gets its token in
each step; the first running sequence always progresses, because `add` refuses what could not run alone;
between `schedule` and `commit` (or `fail`) of a batch nothing else may be called.

Usage: `batch = scheduler.schedule(now_ns)`, run it, `finished = scheduler.commit(batch, sampled, now_ns)`.
"""

from __future__ import annotations

from collections import deque

from firstdiff.engine.block_pool import BlockPool
from firstdiff.engine.config import EngineConfig
from firstdiff.engine.sequence import RunnerOutput, ScheduledBatch, ScheduledSequence, Sequence
from firstdiff.tracing.records import FinishReason, PrefillChunk


class Scheduler:
    """Sequences waiting and running over one pool of KV blocks."""

    def __init__(
        self, config: EngineConfig, *, num_blocks: int, max_model_len: int, eos_token_ids: frozenset[int]
    ) -> None:
        self.pool = BlockPool(num_blocks, config.block_size, config.enable_prefix_caching)
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.num_prefix_queried_tokens = 0
        """Prompt tokens looked up in the prefix cache since the start, each request once."""
        self.num_prefix_hit_tokens = 0
        """Those of them that were found: the sum of all `num_cached_tokens`."""
        self._max_num_seqs = config.max_num_seqs
        self._max_num_batched_tokens = config.max_num_batched_tokens
        self._block_size = config.block_size
        self._max_model_len = max_model_len
        self._eos_token_ids = eos_token_ids
        self._by_id: dict[str, Sequence] = {}
        self._in_flight: ScheduledBatch | None = None
        self._step_index = 0

    @property
    def has_work(self) -> bool:
        return bool(self.running or self.waiting)

    @property
    def num_sequences(self) -> int:
        """Sequences waiting or running."""
        return len(self._by_id)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._by_id

    def add(self, sequence: Sequence) -> None:
        """Queue `sequence`; ValueError when it could never finish, even alone, or its id is in use."""
        if sequence.request_id in self._by_id:
            raise ValueError(
                f"expected a request id that is not in flight, got {sequence.request_id!r}: choose another"
            )
        num_prompt, max_tokens = sequence.num_prompt_tokens, sequence.sampling.max_tokens
        if max_tokens < 1:
            raise ValueError(f"expected max_tokens of at least 1, got {max_tokens}")
        if num_prompt + max_tokens > self._max_model_len:
            raise ValueError(
                f"expected prompt and max_tokens within {self._max_model_len} tokens, got {num_prompt} + "
                f"{max_tokens}: shorten the prompt or lower max_tokens"
            )
        # The last token is sampled but never computed, so it needs no slot.
        num_blocks = self._num_blocks_for(num_prompt + max_tokens - 1)
        if num_blocks > self.pool.num_blocks:
            raise ValueError(
                f"expected a request of at most {self.pool.num_blocks} KV blocks of {self._block_size} "
                f"tokens, got one of {num_blocks} ({num_prompt} prompt tokens + {max_tokens} max_tokens): "
                "shorten it or raise --num-blocks"
            )
        self._by_id[sequence.request_id] = sequence
        self.waiting.append(sequence)

    def abort(self, request_id: str) -> Sequence | None:
        """Take a sequence out and free its blocks at once; None when it has ended or never was."""
        assert self._in_flight is None
        sequence = self._by_id.get(request_id)
        if sequence is not None:
            self._remove(sequence)
        return sequence

    def schedule(self, now_ns: int) -> ScheduledBatch | None:
        """The next step's work, its blocks allocated; None when there is none."""
        assert self._in_flight is None
        if not self.has_work:
            return None
        decodes: list[ScheduledSequence] = []
        prefills: list[ScheduledSequence] = []
        num_preemptions = self._schedule_running(decodes, prefills)
        # What was just pushed out for want of blocks must not come back in the same step.
        if not num_preemptions:
            self._schedule_waiting(decodes, prefills, now_ns)
        assert decodes or prefills
        batch = ScheduledBatch(
            step_index=self._step_index,
            items=decodes + prefills,
            num_decode_tokens=len(decodes),
            num_prefill_tokens=sum(item.num_scheduled_tokens for item in prefills),
            num_preemptions=num_preemptions,
        )
        assert batch.num_decode_tokens + batch.num_prefill_tokens <= self._max_num_batched_tokens
        self._step_index += 1
        self._in_flight = batch
        return batch

    def commit(
        self, batch: ScheduledBatch, output: RunnerOutput, now_ns: int
    ) -> list[tuple[Sequence, FinishReason]]:
        """Take in what the runner computed; the sequences that ended by it, in batch order, blocks freed.

        `now_ns` stamps the tokens.
        """
        assert batch is self._in_flight
        assert len(output.tokens) == len(batch.items)
        self._in_flight = None
        finished: list[tuple[Sequence, FinishReason]] = []
        for item, tokens in zip(batch.items, output.tokens, strict=True):
            assert len(tokens) == item.samples
            sequence = item.sequence
            self._advance(item, batch.step_index)
            if not tokens:
                continue
            sequence.token_ids.append(tokens[0].token_id)
            if sequence.first_token_ns is None:
                sequence.first_token_ns = now_ns
            reason = self._finish_reason(sequence, tokens[0].token_id)
            if reason is not None:
                self._remove(sequence)
                finished.append((sequence, reason))
        return finished

    def fail(self, batch: ScheduledBatch) -> list[Sequence]:
        """Give `batch` up: its sequences, taken out, blocks freed; nothing of this step is cached."""
        assert batch is self._in_flight
        self._in_flight = None
        failed = [item.sequence for item in batch.items]
        for sequence in failed:
            self._remove(sequence)
        return failed

    def check_integrity(self) -> None:
        """AssertionError unless every block, sequence and limit is accounted for."""
        self.pool.check_integrity(sequence.block_table for sequence in self.running)
        assert {id(s) for s in self._by_id.values()} == {id(s) for s in (*self.running, *self.waiting)}
        assert len(self._by_id) == len(self.running) + len(self.waiting)
        assert len(self.running) <= self._max_num_seqs
        for sequence in self.waiting:
            assert not sequence.block_table
            assert sequence.num_computed_tokens == 0
        for sequence in self.running:
            assert sequence.num_computed_tokens < sequence.num_tokens
            assert len(set(sequence.block_table)) == len(sequence.block_table)
            if self._in_flight is None:
                assert len(sequence.block_table) == self._num_blocks_for(sequence.num_computed_tokens)
        if self._in_flight is None:
            for sequence in self.running[:-1]:
                assert sequence.num_computed_tokens == sequence.num_tokens - 1

    def _schedule_running(self, decodes: list[ScheduledSequence], prefills: list[ScheduledSequence]) -> int:
        """Schedule running sequences in order, preempting from the end; the number of preemptions."""
        budget = self._max_num_batched_tokens
        num_preemptions = 0
        index = 0
        while index < len(self.running):
            sequence = self.running[index]
            assert budget > 0
            start = sequence.num_computed_tokens
            num_tokens = min(sequence.num_tokens - start, budget)
            num_new = self._num_blocks_for(start + num_tokens) - len(sequence.block_table)
            # Victims come from the end, so none has been scheduled yet, and the last may be this one.
            while num_new > self.pool.num_free_blocks and len(self.running) > index:
                self._preempt(self.running.pop())
                num_preemptions += 1
            if len(self.running) == index:
                break
            if num_new > 0:
                sequence.block_table += self.pool.allocate(num_new)
            _place(sequence, num_tokens, decodes, prefills)
            budget -= num_tokens
            index += 1
        return num_preemptions

    def _schedule_waiting(
        self, decodes: list[ScheduledSequence], prefills: list[ScheduledSequence], now_ns: int
    ) -> None:
        """Admit from the head of the queue while budget, seats and blocks last."""
        budget = self._max_num_batched_tokens - len(decodes)
        budget -= sum(item.num_scheduled_tokens for item in prefills)
        while self.waiting and budget and len(self.running) < self._max_num_seqs:
            sequence = self.waiting[0]
            hits = self._admissible(sequence)
            if hits is None:
                break
            self.waiting.popleft()
            self.running.append(sequence)
            self.pool.hold(hits)
            sequence.block_table += hits
            sequence.num_computed_tokens = len(hits) * self._block_size
            if sequence.first_scheduled_ns is None:
                sequence.first_scheduled_ns = now_ns
                sequence.num_cached_tokens = sequence.num_computed_tokens
                if self.pool.enable_prefix_caching:
                    self.num_prefix_queried_tokens += sequence.num_prompt_tokens
                    self.num_prefix_hit_tokens += sequence.num_cached_tokens
            num_tokens = min(sequence.num_tokens - sequence.num_computed_tokens, budget)
            num_new = self._num_blocks_for(sequence.num_computed_tokens + num_tokens) - len(hits)
            sequence.block_table += self.pool.allocate(num_new)
            _place(sequence, num_tokens, decodes, prefills)
            budget -= num_tokens

    def _admissible(self, sequence: Sequence) -> list[int] | None:
        """The cached blocks that `sequence` would start with, None when there is no room for it yet.

        Room is for all its known tokens, not only its first chunk, and a block for each running sequence on
        top, so that an admission does not force a preemption at once. Alone, it always has room.
        """
        num_reserved = len(self.running)
        if self.running and self.pool.num_free_blocks <= num_reserved:
            return None
        # At least one token is always computed: its logits give the next one.
        num_blocks_max = (sequence.num_tokens - 1) // self._block_size
        hits = self.pool.match(sequence.token_ids, sequence.block_hashes, num_blocks_max=num_blocks_max)
        num_new = self._num_blocks_for(sequence.num_tokens) - len(hits)
        if num_new + num_reserved > self.pool.num_allocatable(hits):
            return None
        return hits

    def _advance(self, item: ScheduledSequence, step_index: int) -> None:
        """Count the item's tokens as computed and let the blocks they filled be found."""
        sequence, start = item.sequence, item.start
        end = start + item.num_scheduled_tokens
        sequence.num_computed_tokens = end
        num_prompt = len(sequence.prompt_token_ids)
        if start < num_prompt:
            num_tokens = min(end, num_prompt) - start
            sequence.prefill_chunks.append(
                PrefillChunk(step_index=step_index, start_token=start, num_tokens=num_tokens)
            )
        size = self._block_size
        if not self.pool.enable_prefix_caching or end // size == start // size:
            return
        self.pool.extend_hashes(sequence.token_ids, sequence.block_hashes, end // size)
        for index in range(start // size, end // size):
            token_ids = sequence.token_ids[index * size : (index + 1) * size]
            self.pool.register(sequence.block_table[index], sequence.block_hashes[index], token_ids)

    def _finish_reason(self, sequence: Sequence, token_id: int) -> FinishReason | None:
        sampling = sequence.sampling
        if token_id in sampling.stop_token_ids:
            return "stop"
        if token_id in self._eos_token_ids and not sampling.ignore_eos:
            return "stop"
        if sequence.num_output_tokens >= sampling.max_tokens:
            return "length"
        return None

    def _preempt(self, sequence: Sequence) -> None:
        """Put a sequence, already taken off `running`, back at the head of the queue to start over."""
        self._free(sequence)
        sequence.num_preemptions += 1
        self.waiting.appendleft(sequence)

    def _remove(self, sequence: Sequence) -> None:
        # A waiting sequence holds no block, a running one always does.
        if sequence.block_table:
            self.running.remove(sequence)
        else:
            self.waiting.remove(sequence)
        self._free(sequence)
        del self._by_id[sequence.request_id]

    def _free(self, sequence: Sequence) -> None:
        self.pool.release(sequence.block_table)
        sequence.block_table.clear()
        sequence.num_computed_tokens = 0

    def _num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self._block_size)


def _place(
    sequence: Sequence,
    num_tokens: int,
    decodes: list[ScheduledSequence],
    prefills: list[ScheduledSequence],
) -> None:
    """Put the next `num_tokens` of `sequence` with the decodes if they have that shape, else the prefills."""
    start = sequence.num_computed_tokens
    samples = start + num_tokens == len(sequence.token_ids)
    item = ScheduledSequence(sequence, start, num_tokens, samples)
    (decodes if samples and num_tokens == 1 and start else prefills).append(item)
