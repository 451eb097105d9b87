"""A model without numbers: each KV slot holds a hash of the prefix that ends there.

Reading a slot asserts that hash, and the next token is a function of it, so an answer may not depend on
batching, chunking, prefix reuse, drafts, preemption or the fate of its neighbours.

A sequence reads all slots of its context in each step. To assert that cheaply, a slot is compared when a
sequence first reads it, and from then on cannot change: `write` asserts that nobody else holds the block, by
the simulator's own books, and the books assert that a table only grows. `check_all` compares everything.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from random import Random
from typing import Protocol

from books import Books

from firstdiff.engine.engine import EngineRequest
from firstdiff.engine.sequence import RunnerOutput, SampledToken, ScheduledBatch, ScheduledSequence, Sequence
from firstdiff.tracing.clock import VirtualClock
from firstdiff.tracing.records import FinishReason, Sampling

STEP_NS = 1_000_000
NUM_BEYOND = 3
"""How many tokens after its end an expected answer goes on: what drafts could bring, were they not cut."""


def chain(token_ids: Iterable[int], hashes: list[int]) -> list[int]:
    """`hashes` extended by the hash of each prefix that ends with one of `token_ids`."""
    last = hashes[-1] if hashes else 0
    # Tuples of integers hash to the same 64 bits in every process.
    hashes += [last := hash((last, token_id)) for token_id in token_ids]
    return hashes


def next_token(prefix_hash: int, sampling: Sampling, token_index: int, vocab_size: int) -> int:
    """Output token `token_index`, after a prefix of that hash."""
    if sampling.forced_token_ids is not None:
        # One past the last is only ever asked of a draft that will be cut.
        return (sampling.forced_token_ids + [0] * NUM_BEYOND)[token_index]
    return hash((sampling.seed, prefix_hash)) % vocab_size


def prompt_logprob(prefix_hash: int) -> float:
    """The log-probability of the prompt token after a prefix of that hash."""
    return -(prefix_hash % 1009) / 8


def expected_answer(
    hashes: list[int],
    sampling: Sampling,
    *,
    vocab_size: int,
    eos_token_ids: frozenset[int],
    num_beyond: int,
) -> tuple[list[int], int, FinishReason]:
    """What a request must get, alone or in any company, after a prompt of these prefix hashes.

    Tokens up to `num_beyond` beyond the end, how many of them count, and the reason of the end.
    """
    last, seed, forced = hashes[-1], sampling.seed, sampling.forced_token_ids
    token_ids: list[int] = []
    num_kept = sampling.max_tokens
    ends = (
        set(sampling.stop_token_ids) if sampling.ignore_eos else eos_token_ids.union(sampling.stop_token_ids)
    )
    if forced is not None:
        return forced + [0] * num_beyond, num_kept, "length"
    reason: FinishReason = "length"
    for index in range(1, num_kept + 1):
        token = hash((seed, last)) % vocab_size
        last = hash((last, token))
        token_ids.append(token)
        if token in ends and index >= sampling.min_tokens:
            num_kept, reason = index, "stop"
            break
    for _ in range(num_beyond if num_kept else 0):
        token_ids.append(hash((seed, last)) % vocab_size)
        last = hash((last, token_ids[-1]))
    return token_ids, num_kept, reason


class Asker(Protocol):
    """Whoever stands behind a request in flight."""

    request: EngineRequest


class InjectedError(RuntimeError):
    """A failure of the model that the simulation asked for."""


class Context:
    """What one sequence has read and written since it was admitted; `hashes` also before that."""

    __slots__ = ("hashes", "num_verified", "step_index", "tag")

    def __init__(self) -> None:
        self.hashes: list[int] = []
        self.num_verified = 0
        self.step_index = -2
        self.tag: tuple[int, str | None] = (0, None)


class SymbolicRunner:
    """Executes batches on symbolic KV; each step takes 1 ms of virtual time.

    `check` sees each batch before it runs. The first broken invariant is kept in `violation`, because the
    engine, rightly, takes whatever a runner raises for a failed batch. With probability `error_fraction` a
    step fails half-way, or answers in the wrong shape; `failed` says that the last one did. With
    `item_error_fraction` an item fails alone; `failures` are the requests of the last step that did. `epoch`
    counts the resets of the prefix cache.
    """

    def __init__(
        self,
        *,
        books: Books,
        block_size: int,
        vocab_size: int,
        rng: Random,
        clock: VirtualClock,
        clients: Mapping[str, Asker],
        check: Callable[[ScheduledBatch], None],
    ) -> None:
        num_blocks = len(books.held)
        self.error_fraction = 0.0
        self.item_error_fraction = 0.0
        self.failed = False
        self.failures: set[str] = set()
        self.violation: AssertionError | None = None
        self.last_batch: ScheduledBatch | None = None
        self.epoch = 0
        self.num_drafts = 0
        self.num_accepted = 0
        self._kv: list[list[int | None]] = [[None] * block_size for _ in range(num_blocks)]
        self._tags: list[tuple[int, str | None] | None] = [None] * num_blocks
        self._contexts: dict[Sequence, Context] = {}
        self._books = books
        self._block_size = block_size
        self._vocab_size = vocab_size
        self._rng = rng
        self._clock = clock
        self._clients = clients
        self._check = check

    def execute(self, batch: ScheduledBatch) -> RunnerOutput:
        self._clock.advance(STEP_NS)
        self.last_batch = batch
        self.failed = self._rng.random() < self.error_fraction
        self.failures.clear()
        try:
            self._check(batch)
            return self._run(batch)
        except AssertionError as violation:
            self.violation = violation
            raise

    def check_all(self, running: list[Sequence]) -> None:
        """Compare every computed slot of every running sequence."""
        for sequence in running:
            self._compare(sequence, self._contexts[sequence].hashes, 0, sequence.num_computed_tokens)

    def _run(self, batch: ScheduledBatch) -> RunnerOutput:
        items, step_index = batch.items, batch.step_index
        # All reads of earlier KV come first: no item may lean on what another writes in this step.
        contexts = []
        for item in items:
            contexts.append(self._read(item, step_index))
        if self.failed:
            for index in range(self._rng.randrange(len(items))):
                self._write(items[index], contexts[index])
            return self._misbehave(batch)
        tokens: list[list[SampledToken]] = []
        prompt_logprobs: dict[int, list[SampledToken]] = {}
        failures: dict[int, str] = {}
        for index, item in enumerate(items):
            context = contexts[index]
            self._write(item, context)
            if self.item_error_fraction and self._rng.random() < self.item_error_fraction:
                failures[index] = "NaN as asked"
                self.failures.add(item.sequence.request_id)
                tokens.append([])
                continue
            if item.sequence.sampling.prompt_logprobs is not None:
                prompt_logprobs[index] = _prompt_entries(item, context)
            tokens.append(self._sample(item, context) if item.samples else [])
        return RunnerOutput(tokens, prompt_logprobs, failures)

    def _read(self, item: ScheduledSequence, step_index: int) -> Context:
        """Assert the item's context and know the hashes of its new tokens."""
        sequence, start = item.sequence, item.start
        context = self._contexts.get(sequence)
        if context is None:
            context = self._contexts[sequence] = Context()
        # Who was not in the last step has been admitted since.
        if context.step_index != step_index - 1:
            assert context.step_index != step_index, "twice in one batch"
            self._admit(sequence, context, start)
        context.step_index = step_index
        assert context.num_verified == start, "reads what it never computed"
        hashes = context.hashes
        if len(hashes) > start:
            del hashes[start:]
        num_drafts = item.num_draft_tokens
        num_known = start + item.num_scheduled_tokens - num_drafts
        if start and num_known == start + 1:
            hashes.append(hash((hashes[-1], sequence.token_ids[start])))
        else:
            chain(sequence.token_ids[len(hashes) : num_known], hashes)
        if num_drafts:
            chain(sequence.draft_token_ids[:num_drafts], hashes)
        assert len(hashes) == num_known + num_drafts
        return context

    def _admit(self, sequence: Sequence, context: Context, start: int) -> None:
        """Compare all that the cache gave, by content and by who may share it."""
        request = self._clients[sequence.request_id].request
        context.tag = (self.epoch, request.cache_salt)
        context.num_verified = start
        if not start:
            return
        assert request.use_prefix_cache, "cached blocks for one that wants none"
        assert start % self._block_size == 0
        chain(sequence.token_ids[len(context.hashes) : start], context.hashes)
        self._compare(sequence, context.hashes, 0, start)
        for block in sequence.block_table[: start // self._block_size]:
            assert self._tags[block] == context.tag, f"{context.tag} finds a block of {self._tags[block]}"
        if sequence.sampling.prompt_logprobs is not None:
            is_open = sequence.num_prompt_logprobs < sequence.num_prompt_tokens
            assert not is_open or start < sequence.num_prompt_logprobs, "a wanted row is not computed"

    def _compare(self, sequence: Sequence, hashes: list[int], start: int, end: int) -> None:
        table, size = sequence.block_table, self._block_size
        for index in range(start // size, -(-end // size)):
            expected = hashes[index * size : min((index + 1) * size, end)]
            assert self._kv[table[index]][: len(expected)] == expected, (
                f"{sequence.request_id} reads another prefix in block {table[index]}, its block {index}"
            )

    def _write(self, item: ScheduledSequence, context: Context) -> None:
        table, size, hashes = item.sequence.block_table, self._block_size, context.hashes
        held, kv, position = self._books.held, self._kv, item.start
        end = position + item.num_scheduled_tokens
        while position < end:
            block, offset = table[position // size], position % size
            assert held[block] == 1, f"writes to block {block}, held by {held[block]}"
            if offset:
                assert self._tags[block] == context.tag
            else:
                self._tags[block] = context.tag
            num_slots = end - position
            if num_slots == 1:
                kv[block][offset] = hashes[position]
                break
            if num_slots > size - offset:
                num_slots = size - offset
            kv[block][offset : offset + num_slots] = hashes[position : position + num_slots]
            position += num_slots
        context.num_verified = end

    def _sample(self, item: ScheduledSequence, context: Context) -> list[SampledToken]:
        """The next token, and one more for each draft that it confirms."""
        sequence, hashes = item.sequence, context.hashes
        num_drafts, vocab_size = item.num_draft_tokens, self._vocab_size
        position = item.start + item.num_scheduled_tokens - num_drafts - 1
        token_index = position + 1 - len(sequence.prompt_token_ids)
        sampling = sequence.sampling
        token_id = next_token(hashes[position], sampling, token_index, vocab_size)
        tokens = [SampledToken(token_id)]
        if num_drafts:
            for draft in sequence.draft_token_ids[:num_drafts]:
                if draft != token_id:
                    break
                token_id = next_token(
                    hashes[position + len(tokens)], sampling, token_index + len(tokens), vocab_size
                )
                tokens.append(SampledToken(token_id))
            self.num_drafts += num_drafts
            self.num_accepted += len(tokens) - 1
            # What was rejected counts as never written.
            context.num_verified = position + len(tokens)
            del hashes[context.num_verified :]
        return tokens

    def _misbehave(self, batch: ScheduledBatch) -> RunnerOutput:
        """Raise, or answer in a shape that the engine must refuse."""
        token = SampledToken(0)
        kind = self._rng.randrange(6)
        healthy = [[token] if item.samples else [] for item in batch.items]
        if kind == 0:
            return RunnerOutput([[] if item.samples else [token] for item in batch.items])
        if kind == 1:
            return RunnerOutput(healthy[:-1])
        if kind == 2:
            return RunnerOutput(healthy, {len(healthy) - 1: [token] * 1000})
        if kind == 4:
            return RunnerOutput(healthy, {}, {len(healthy): "of nobody"})
        if kind == 3 and any(healthy):
            too_many = [[token] * (item.num_draft_tokens + 2) if item.samples else [] for item in batch.items]
            return RunnerOutput(too_many)
        raise InjectedError("the model failed as asked")


def _prompt_entries(item: ScheduledSequence, context: Context) -> list[SampledToken]:
    """An entry for each prompt token still wanted that follows one computed in this step."""
    prompt = item.sequence.prompt_token_ids
    end = min(item.start + item.num_scheduled_tokens + 1, len(prompt))
    positions = range(item.sequence.num_prompt_logprobs, end)
    assert not positions or positions[0] > item.start, "the row before a wanted token was skipped"
    return [SampledToken(prompt[p], prompt_logprob(context.hashes[p - 1])) for p in positions]
