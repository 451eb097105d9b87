"""A model without numbers: each KV slot holds a hash of the prefix that ends there.

Reading a slot asserts that hash, and the next token is a function of it, so an answer may not depend on
batching, chunking, prefix reuse, preemption or the fate of its neighbours.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from firstdiff.engine.sequence import RunnerOutput, SampledToken, ScheduledBatch, ScheduledSequence, Sequence
from firstdiff.tracing.clock import VirtualClock
from firstdiff.tracing.records import FinishReason, Sampling

EMPTY = -1
STEP_NS = 1_000_000
_MASK = (1 << 61) - 1


def mix(value: int, other: int) -> int:
    """A well-spread function of the pair, in 0..2**61-1, equal on every machine."""
    x = (value * 0x9E3779B97F4A7C15 + other + 1) & ((1 << 64) - 1)
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & ((1 << 64) - 1)
    return (x ^ (x >> 27)) & _MASK


def prefix_hashes(token_ids: list[int], known: list[int]) -> list[int]:
    """`known` extended to one hash for each of `token_ids`."""
    for index in range(len(known), len(token_ids)):
        known.append(mix(known[index - 1] if index else 0, token_ids[index]))
    return known


def next_token(prefix_hash: int, sampling: Sampling, vocab_size: int) -> int:
    return mix(prefix_hash, sampling.seed) % vocab_size


def expected_answer(
    prompt: list[int], sampling: Sampling, *, vocab_size: int, eos_token_ids: frozenset[int]
) -> tuple[list[int], FinishReason]:
    """What a request must get, alone or in any company: no scheduler, no blocks, one loop."""
    token_ids = list(prompt)
    hashes: list[int] = []
    while True:
        token = next_token(prefix_hashes(token_ids, hashes)[-1], sampling, vocab_size)
        token_ids.append(token)
        output = token_ids[len(prompt) :]
        if token in sampling.stop_token_ids or (token in eos_token_ids and not sampling.ignore_eos):
            return output, "stop"
        if len(output) == sampling.max_tokens:
            return output, "length"


class InjectedError(RuntimeError):
    """A failure of the model that the simulation asked for."""


class SymbolicRunner:
    """Executes batches on symbolic KV; each step takes 1 ms of virtual time.

    `check` sees each batch before it runs. The first broken invariant is kept in `violation`, because the
    engine, rightly, takes whatever a runner raises for a failed batch. With probability `error_fraction` a
    step fails half-way, or answers in the wrong shape; `failed` says that the last one did.
    """

    def __init__(
        self,
        *,
        num_blocks: int,
        block_size: int,
        vocab_size: int,
        rng: Random,
        clock: VirtualClock,
        check: Callable[[ScheduledBatch], None],
    ) -> None:
        self.error_fraction = 0.0
        self.failed = False
        self.violation: AssertionError | None = None
        self.last_batch: ScheduledBatch | None = None
        self._kv = [[EMPTY] * block_size for _ in range(num_blocks)]
        self._hashes: dict[Sequence, list[int]] = {}
        self._block_size = block_size
        self._vocab_size = vocab_size
        self._rng = rng
        self._clock = clock
        self._check = check

    def execute(self, batch: ScheduledBatch) -> RunnerOutput:
        self._clock.advance(STEP_NS)
        self.last_batch = batch
        self.failed = self._rng.random() < self.error_fraction
        try:
            self._check(batch)
            return self._run(batch)
        except AssertionError as violation:
            self.violation = violation
            raise

    def _run(self, batch: ScheduledBatch) -> RunnerOutput:
        hashes = {
            id(item): prefix_hashes(item.sequence.token_ids, self._hashes.setdefault(item.sequence, []))
            for item in batch.items
        }
        # All reads of earlier KV come first: no item may lean on what another writes in this step.
        for item in batch.items:
            self._assert_holds(item, hashes[id(item)], item.start)
        num_written = self._rng.randrange(len(batch.items)) if self.failed else len(batch.items)
        for item in batch.items[:num_written]:
            self._write(item, hashes[id(item)])
        if self.failed:
            return self._misbehave(batch)
        for item in batch.items:
            self._assert_holds(item, hashes[id(item)], item.start + item.num_scheduled_tokens)
        return RunnerOutput(
            [[self._sample(item, hashes[id(item)])] if item.samples else [] for item in batch.items]
        )

    def _misbehave(self, batch: ScheduledBatch) -> RunnerOutput:
        token = SampledToken(token_id=0)
        kind = self._rng.randrange(3)
        if kind == 0:
            return RunnerOutput([[] if item.samples else [token] for item in batch.items])
        if kind == 1:
            return RunnerOutput([[token] if item.samples else [] for item in batch.items][:-1])
        raise InjectedError("the model failed as asked")

    def _write(self, item: ScheduledSequence, hashes: list[int]) -> None:
        table, size = item.sequence.block_table, self._block_size
        for position in range(item.start, item.start + item.num_scheduled_tokens):
            self._kv[table[position // size]][position % size] = hashes[position]

    def _assert_holds(self, item: ScheduledSequence, hashes: list[int], num_tokens: int) -> None:
        table, size = item.sequence.block_table, self._block_size
        for index in range(-(-num_tokens // size)):
            expected = hashes[index * size : min((index + 1) * size, num_tokens)]
            assert self._kv[table[index]][: len(expected)] == expected, (
                f"{item.sequence.request_id} reads another prefix in block {table[index]}, its block {index}"
            )

    def _sample(self, item: ScheduledSequence, hashes: list[int]) -> SampledToken:
        position = item.start + item.num_scheduled_tokens - 1
        return SampledToken(token_id=next_token(hashes[position], item.sequence.sampling, self._vocab_size))
