"""Which tokens of which sequences the next step computes.

Owns: the queue, the running set, the blocks of each sequence, preemption, the end of a sequence. Refuses to
know: torch, text, rows, the clock (stamps are arguments). There are no phases: a sequence is
`num_computed_tokens` catching up with `num_tokens` and its drafts, so chunked prefill, prefix hits, decoding,
speculation and recompute after a preemption are one case. Policy: one token budget a step, running sequences
first in the order of their admission, then the queue in order of rank: priority, then arrival; under `fcfs`
all priorities are 0. The head of the queue is never overtaken. Who runs gives way only when blocks run out,
the worst rank first; an urgent request waits for a seat like any other.

Invariants: KV blocks cover at least the computed tokens of each running sequence; waiting sequences hold no
block; only the last running sequence may be part-way through its prefill, so each decode gets its token in
each step; the running sequence of the best rank always progresses, because `add` refuses what could not run
alone; drafts take only what nobody else needs in the step; between `schedule` and `commit` (or `fail`) of a
batch nothing else may be called.

Usage: `batch = scheduler.schedule(now_ns)`, run it, `finished = scheduler.commit(batch, sampled, now_ns)`.
"""

from __future__ import annotations

from bisect import insort
from operator import attrgetter

from firstdiff.engine.block_pool import BlockPool
from firstdiff.engine.config import EngineConfig
from firstdiff.engine.sequence import RunnerOutput, SampledToken, ScheduledBatch, ScheduledSequence, Sequence
from firstdiff.engine.step_budget import Step, running_shares
from firstdiff.tracing.records import FinishReason

_rank = attrgetter("rank")

Finished = list[tuple[Sequence, FinishReason]]


class Scheduler:
    """Sequences waiting and running over one pool of KV blocks."""

    def __init__(
        self, config: EngineConfig, *, num_blocks: int, max_model_len: int, eos_token_ids: frozenset[int]
    ) -> None:
        self.pool = BlockPool(num_blocks, config.block_size, config.enable_prefix_caching)
        self.waiting: list[Sequence] = []
        """In the order of their rank."""
        self.running: list[Sequence] = []
        """In the order of their admission."""
        self.num_prefix_queried_tokens = 0
        """Prompt tokens looked up in the prefix cache since the start, each request once."""
        self.num_prefix_hit_tokens = 0
        """Those of them that were found: the sum of all `num_cached_tokens`."""
        self._policy = config.scheduling_policy
        self._max_num_seqs = config.max_num_seqs
        self._max_num_batched_tokens = config.max_num_batched_tokens
        self._block_size = config.block_size
        self._max_model_len = max_model_len
        self._eos_token_ids = eos_token_ids
        self._by_id: dict[str, Sequence] = {}
        self._in_flight: ScheduledBatch | None = None
        self._step_index = 0
        self._num_arrivals = 0

    @property
    def has_work(self) -> bool:
        return bool(self._by_id)

    @property
    def num_sequences(self) -> int:
        """Sequences waiting or running."""
        return len(self._by_id)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._by_id

    def add(self, sequence: Sequence) -> None:
        """Queue `sequence`; ValueError when it could never finish, even alone, or its id is in use."""
        self._check(sequence)
        self._num_arrivals += 1
        sequence.rank = (sequence.priority, self._num_arrivals)
        if sequence.sampling.prompt_logprobs is not None:
            sequence.num_prompt_logprobs = sequence.sampling.prompt_logprobs_start
        self._by_id[sequence.request_id] = sequence
        insort(self.waiting, sequence, key=_rank)

    def abort(self, request_id: str) -> Sequence | None:
        """Take a sequence out and free its blocks at once; None when it has ended or never was."""
        assert self._in_flight is None
        sequence = self._by_id.get(request_id)
        if sequence is not None:
            self._remove(sequence)
        return sequence

    def reset_prefix_cache(self) -> int:
        """Forget all cached prefixes; how many blocks could be found until now.

        Running sequences keep their blocks and go on, but nobody else finds what they computed before or
        compute after: not even a block half-full now. (vLLM refuses to reset while any block is held.)
        """
        assert self._in_flight is None
        for sequence in self.running:
            sequence.prefix_parent = None
        return self.pool.reset()

    def schedule(self, now_ns: int) -> ScheduledBatch | None:
        """The next step's work, its blocks allocated; None when there is none."""
        assert self._in_flight is None
        if not self._by_id:
            return None
        step = Step(self._max_num_batched_tokens)
        num_preemptions = self._schedule_running(step, now_ns)
        # What was just pushed out for want of blocks must not come back in the same step.
        if not num_preemptions and self.waiting:
            self._schedule_waiting(step, now_ns)
        items = step.decodes + step.verifications + step.prefills
        assert items
        assert step.budget >= 0
        num_decode_tokens = len(step.decodes)
        for item in step.verifications:
            num_decode_tokens += item.num_scheduled_tokens
        batch = ScheduledBatch(
            self._step_index,
            items,
            num_decode_tokens,
            self._max_num_batched_tokens - step.budget - num_decode_tokens,
            num_preemptions,
        )
        self._step_index += 1
        self._in_flight = batch
        return batch

    def commit(self, batch: ScheduledBatch, output: RunnerOutput, now_ns: int) -> Finished:
        """Take in what the runner computed; the sequences that ended by it, in batch order, blocks freed.

        Of the tokens of an item those after the one that ends its sequence are dropped. `now_ns` stamps them.
        An item that failed ends with "error", and nothing of it is cached.
        """
        assert batch is self._in_flight
        assert len(output.tokens) == len(batch.items)
        self._in_flight = None
        finished: Finished = []
        for index, item in enumerate(batch.items):
            reason: FinishReason | None = "error"
            if index not in output.failures:
                reason = self._commit_item(item, output.tokens[index], batch.step_index, now_ns)
            if reason is not None:
                self._remove(item.sequence)
                finished.append((item.sequence, reason))
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
        assert {*self._by_id.values()} == {*self.running, *self.waiting}
        assert len(self._by_id) == len(self.running) + len(self.waiting)
        assert len(self.running) <= self._max_num_seqs
        ranks = [sequence.rank for sequence in self.waiting]
        assert ranks == sorted(ranks)
        for sequence in self.waiting:
            assert not sequence.block_table
            assert sequence.num_computed_tokens == 0
        is_settled = self._in_flight is None
        for sequence in self.running:
            num_computed, table = sequence.num_computed_tokens, sequence.block_table
            assert num_computed < len(sequence.token_ids)
            assert len(set(table)) == len(table)
            assert not is_settled or len(table) == self._num_blocks_for(num_computed)
            is_last = sequence is self.running[-1]
            assert not is_settled or is_last or num_computed == len(sequence.token_ids) - 1

    def _check(self, sequence: Sequence) -> None:
        """ValueError unless `sequence` can finish when it is alone."""
        if sequence.request_id in self._by_id:
            raise ValueError(
                f"expected a request id that is not in flight, got {sequence.request_id!r}: choose another"
            )
        if sequence.priority and self._policy != "priority":
            raise ValueError(
                f"expected priority 0 under the policy {self._policy}, got {sequence.priority}: start with "
                "--scheduling-policy priority"
            )
        sampling = sequence.sampling
        num_prompt, max_tokens = sequence.num_prompt_tokens, sampling.max_tokens
        if max_tokens < 0:
            raise ValueError(f"expected max_tokens of 0 or more, got {max_tokens}")
        if sampling.prompt_logprobs is not None and sampling.prompt_logprobs_start < 1:
            raise ValueError(
                f"expected prompt_logprobs_start of at least 1, got {sampling.prompt_logprobs_start}: "
                "nothing comes before the first token"
            )
        if num_prompt + max_tokens > self._max_model_len:
            raise ValueError(
                f"expected prompt and max_tokens within {self._max_model_len} tokens, got {num_prompt} + "
                f"{max_tokens}: shorten the prompt or lower max_tokens"
            )
        # The last token is sampled but never computed, so it needs no slot.
        num_blocks = self._num_blocks_for(num_prompt + max(max_tokens - 1, 0))
        if num_blocks > self.pool.num_blocks:
            raise ValueError(
                f"expected a request of at most {self.pool.num_blocks} KV blocks of {self._block_size} "
                f"tokens, got one of {num_blocks} ({num_prompt} prompt tokens + {max_tokens} max_tokens): "
                "shorten it or raise --num-blocks"
            )

    def _schedule_running(self, step: Step, now_ns: int) -> int:
        """Schedule all running sequences that the blocks allow, the worst ranks pushed out first.

        The number of preemptions.
        """
        num_preemptions = 0
        while self.running:
            shares = running_shares(self.running, step.budget, self._block_size)
            num_new = 0
            for share in shares:
                num_new += share.num_new_blocks
            num_spare = self.pool.num_free_blocks - num_new
            if num_spare >= 0:
                break
            self._preempt(max(self.running, key=_rank), now_ns)
            num_preemptions += 1
        else:
            return num_preemptions
        for share in shares:
            sequence, num_drafts, num_new = share.sequence, share.num_drafts, share.num_new_blocks
            if num_drafts:
                num_slots = (len(sequence.block_table) + num_new + num_spare) * self._block_size
                end = sequence.num_computed_tokens + share.num_tokens
                num_drafts = min(num_drafts, num_slots - end)
                num_extra = self._num_blocks_for(end + num_drafts) - len(sequence.block_table) - num_new
                num_spare -= num_extra
                num_new += num_extra
            if num_new:
                sequence.block_table += self.pool.allocate(num_new)
            step.place(sequence, share.num_tokens, num_drafts)
        return num_preemptions

    def _schedule_waiting(self, step: Step, now_ns: int) -> None:
        """Admit from the head of the queue while budget, seats and blocks last."""
        while self.waiting and step.budget and len(self.running) < self._max_num_seqs:
            sequence = self.waiting[0]
            hits = self._admissible(sequence)
            if hits is None:
                break
            del self.waiting[0]
            self.running.append(sequence)
            self.pool.hold(hits)
            sequence.block_table += hits
            sequence.prefix_parent = self.pool.prefix_id(hits[-1]) if hits else sequence.cache_salt or ""
            sequence.num_computed_tokens = len(hits) * self._block_size
            if sequence.first_scheduled_ns is None:
                sequence.first_scheduled_ns = now_ns
                sequence.num_cached_tokens = sequence.num_computed_tokens
                if self.pool.enable_prefix_caching and sequence.use_prefix_cache:
                    self.num_prefix_queried_tokens += sequence.num_prompt_tokens
                    self.num_prefix_hit_tokens += sequence.num_cached_tokens
            else:
                sequence.note_scheduled_again(now_ns)
            num_tokens = min(sequence.num_tokens - sequence.num_computed_tokens, step.budget)
            num_new = self._num_blocks_for(sequence.num_computed_tokens + num_tokens) - len(hits)
            sequence.block_table += self.pool.allocate(num_new)
            step.place(sequence, num_tokens, 0)

    def _admissible(self, sequence: Sequence) -> list[int] | None:
        """The cached blocks that `sequence` would start with, None when there is no room for it yet.

        Room is for all its known tokens, not only its first chunk, and a block for each running sequence on
        top, so that an admission does not force a preemption at once. Alone, it always has room.
        """
        num_reserved = len(self.running)
        if self.running and self.pool.num_free_blocks <= num_reserved:
            return None
        hits: list[int] = []
        if sequence.use_prefix_cache:
            hits = self.pool.match(
                sequence.token_ids,
                sequence.block_hashes,
                num_blocks_max=self._num_cacheable_tokens(sequence) // self._block_size,
                salt=sequence.cache_salt or "",
            )
        num_new = self._num_blocks_for(sequence.num_tokens) - len(hits)
        if num_new + num_reserved > self.pool.num_allocatable(hits):
            return None
        return hits

    def _num_cacheable_tokens(self, sequence: Sequence) -> int:
        """How many tokens may come from the cache; those after them must be computed, for their logits.

        The last known token's give the next one. Those of the token before a prompt token give the
        log-probability of that one, where it is still wanted.
        """
        num_wanted_from = sequence.num_prompt_logprobs
        if sequence.sampling.prompt_logprobs is None or num_wanted_from >= sequence.num_prompt_tokens:
            return sequence.num_tokens - 1
        return num_wanted_from - 1

    def _commit_item(
        self, item: ScheduledSequence, tokens: list[SampledToken], step_index: int, now_ns: int
    ) -> FinishReason | None:
        """Take in one item's tokens; why the sequence ends by it, if it does."""
        sequence, num_drafts = item.sequence, item.num_draft_tokens
        assert bool(tokens) == item.samples
        assert len(tokens) <= 1 + num_drafts
        reason: FinishReason | None = None
        num_kept = 0
        for token in tokens:
            sequence.token_ids.append(token.token_id)
            num_kept += 1
            reason = self._finish_reason(sequence, token.token_id)
            if reason is not None:
                break
        end = item.start + item.num_scheduled_tokens
        if num_drafts:
            # Each token but the last kept is an accepted draft, whose KV is good; the others' is not.
            end += num_kept - 1 - num_drafts
            num_blocks = self._num_blocks_for(end)
            self.pool.release(sequence.block_table[num_blocks:])
            del sequence.block_table[num_blocks:]
            sequence.draft_token_ids = []
        if tokens and sequence.first_token_ns is None:
            sequence.first_token_ns = now_ns
        self._advance(sequence, item.start, end, step_index, now_ns)
        if sequence.sampling.max_tokens == 0 and end == len(sequence.token_ids):
            return "length"
        return reason

    def _advance(self, sequence: Sequence, start: int, end: int, step_index: int, now_ns: int) -> None:
        """Count tokens `start .. end` as computed and let the blocks they filled be found."""
        sequence.note_computed(start, end, step_index, now_ns)
        size = self._block_size
        if end // size == start // size or not self.pool.enable_prefix_caching:
            return
        if sequence.prefix_parent is None:
            return
        salt = sequence.cache_salt or ""
        self.pool.extend_hashes(sequence.token_ids, sequence.block_hashes, end // size, salt=salt)
        for index in range(start // size, end // size):
            sequence.prefix_parent = self.pool.register(
                sequence.block_table[index],
                sequence.block_hashes[index],
                sequence.token_ids[index * size : (index + 1) * size],
                sequence.prefix_parent,
            )

    def _finish_reason(self, sequence: Sequence, token_id: int) -> FinishReason | None:
        """Why the token just appended ends `sequence`; forced tokens end only with the last."""
        sampling = sequence.sampling
        num_output = len(sequence.token_ids) - len(sequence.prompt_token_ids)
        if sampling.forced_token_ids is None and num_output >= sampling.min_tokens:
            if token_id in sampling.stop_token_ids:
                return "stop"
            if token_id in self._eos_token_ids and not sampling.ignore_eos:
                return "stop"
        if num_output >= sampling.max_tokens:
            return "length"
        return None

    def _preempt(self, sequence: Sequence, now_ns: int) -> None:
        """Put a running sequence back in the queue, before all of worse rank, to start over."""
        sequence.note_preempted(now_ns)
        self.running.remove(sequence)
        self._free(sequence)
        insort(self.waiting, sequence, key=_rank)

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
        sequence.prefix_parent = None
        sequence.draft_token_ids = []

    def _num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self._block_size)
