"""One seed, one life of an engine: arrivals, aborts and failures first, then everything must finish.

The seed draws every setting (a swarm: most runs are extreme in some way). Each tick is checked against the
simulator's own books; nothing here trusts the engine's account of itself. What is checked each tick: every
read and write of KV, every row, every reference count, the number of free blocks, the order of admissions and
preemptions, the shape of the batch. What is linear in pool and queue beyond that (`check_everything`) comes
as often as its cost stays that of a tick: at every tick in a small pool, in proportion less in a larger one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from random import Random

from batch_checks import check_batch_shape, check_need_of_preemption, check_request_row
from books import Books
from clients import Client, draw_request, reuse_probes
from swarm import Swarm, hashes_of
from symbolic_runner import SymbolicRunner
from trace_lines import describe_batch, describe_request, describe_rows

from firstdiff.engine.config import EngineConfig
from firstdiff.engine.engine import EngineRequest, LLMEngine, QueueFullError
from firstdiff.engine.sequence import ScheduledBatch, Sequence
from firstdiff.tracing.clock import VirtualClock
from firstdiff.tracing.records import (
    EngineRequestRow,
    FinishReason,
    LoadRow,
    PromptLogprobsRow,
    Row,
    StepRow,
    TokenRow,
    encode_row,
)

Trace = Callable[[str], None]

NUM_CHECKED_AT_ONCE = 5
"""Blocks and requests for each of which `check_everything` may skip a tick."""


class Simulation:
    """An engine on a symbolic model, its clients and the books of both."""

    def __init__(self, seed: int, trace: Trace | None = None) -> None:
        self.rng = Random(seed)
        self.swarm = swarm = Swarm.draw(self.rng)
        self.trace = trace
        self.clock = VirtualClock(start_ns=1)
        self.rows: list[Row] = []
        self.counts: Counter[str] = Counter()
        self.clients: dict[str, Client] = {}
        self.ended: list[EngineRequestRow] = []
        self.histories: list[list[int]] = []
        self.num_ticks = 0
        self.num_steps = 0
        self.num_unchecked_ticks = 0
        self.books = Books(swarm.num_blocks)
        self.runner = SymbolicRunner(
            books=self.books,
            block_size=swarm.block_size,
            vocab_size=swarm.vocab_size,
            rng=self.rng,
            clock=self.clock,
            request_of=lambda request_id: self.clients[request_id].request,
            check=self.check_batch,
        )
        self.engine = LLMEngine(
            EngineConfig(
                model="symbolic",
                block_size=swarm.block_size,
                max_num_seqs=swarm.max_num_seqs,
                max_num_batched_tokens=swarm.max_num_batched_tokens,
                max_num_waiting=swarm.max_num_waiting,
                enable_prefix_caching=swarm.enable_prefix_caching,
                scheduling_policy="fcfs" if swarm.num_priorities == 1 else "priority",
            ),
            runner=self.runner,
            num_blocks=swarm.num_blocks,
            max_model_len=swarm.max_model_len,
            eos_token_ids=swarm.eos_token_ids,
            emit=self.rows.append,
            clock=self.clock,
        )
        self.scheduler = self.engine.scheduler

    def run(self) -> None:
        """Safety under stress, then liveness in peace, then nothing left, then reuse as it should be."""
        swarm, draw = self.swarm, self.rng.random
        self.runner.error_fraction = swarm.error_fraction
        self.runner.item_error_fraction = swarm.item_error_fraction
        for _ in range(swarm.num_ticks):
            if draw() < swarm.arrival_fraction:
                for _ in range(1 + int(draw() * swarm.burst_max)):
                    self.add(self.draw_request())
            if draw() < swarm.abort_fraction:
                self.abort()
            if draw() < swarm.reset_fraction:
                self.reset()
            self.propose()
            self.tick()
        self.runner.error_fraction = self.runner.item_error_fraction = 0.0
        for _ in range(self.num_ticks_to_finish()):
            if not self.clients:
                break
            self.propose()
            self.tick()
        assert not self.clients, f"not finished in peace: {self.pending()}"
        self.check_drained()
        self.check_reuse()

    def num_ticks_to_finish(self) -> int:
        """Ticks after which everything has finished.

        The running sequence of the best rank computes a token in every step and is not pushed out. Under fcfs
        that is the best of all, so each tick is progress for good; under priority the best of all may first
        wait until those that run have finished, and what they computed may then be lost.
        """
        total = sum(len(client.prompt) + client.num_expected for client in self.clients.values())
        return total if self.swarm.num_priorities == 1 else total * (1 + len(self.clients))

    def pending(self) -> str:
        running = [f"{s.request_id} {s.num_computed_tokens}/{s.num_tokens}" for s in self.scheduler.running]
        waiting = [f"{s.request_id} x{s.num_preemptions}" for s in self.scheduler.waiting]
        return f"running {running}, waiting {waiting}, {self.scheduler.pool.num_free_blocks} blocks free"

    def draw_request(self) -> EngineRequest:
        request_id = f"r{self.counts['requests']}"
        if self.clients and self.rng.random() < 0.02:
            request_id = self.rng.choice(list(self.clients))
        request = draw_request(self.rng, self.swarm, self.histories, request_id)
        self.histories.append(request.prompt_token_ids)
        return request

    def add(self, request: EngineRequest) -> None:
        """Hand a request in; it must be taken or refused just as the limits say."""
        swarm, num_prompt = self.swarm, len(request.prompt_token_ids)
        self.counts["requests"] += 1
        max_tokens = request.sampling.max_tokens
        fits = num_prompt + max_tokens <= swarm.max_model_len
        fits = fits and num_prompt + max(0, max_tokens - 1) <= swarm.num_blocks * swarm.block_size
        is_full = len(self.clients) >= swarm.max_num_seqs + swarm.max_num_waiting
        is_new = request.request_id not in self.clients
        assert (request.request_id in self.engine) == (not is_new)
        outcome = "added"
        try:
            self.engine.add(request)
        except QueueFullError:
            outcome = "queue full"
            assert is_full
        except ValueError:
            outcome = "refused"
            assert not is_full
            assert not (fits and is_new)
        else:
            assert fits and is_new and not is_full  # noqa: PT018
            client = Client(request, (request.priority, self.counts["requests"]), swarm)
            self.clients[request.request_id] = client
            self.books.enqueue(client.rank, request.request_id)
        self.counts[outcome] += 1
        assert not self.rows
        if self.trace is not None:
            self.trace(f"{outcome} {describe_request(request)}")

    def abort(self) -> None:
        assert not self.engine.abort("never seen")
        if not self.clients:
            return
        client = self.rng.choice(list(self.clients.values()))
        reason: FinishReason = self.rng.choice(["abort", "stop"])
        client.abort_reason = reason
        request_id = client.request.request_id
        if self.trace is not None:
            self.trace(f"abort {request_id} as {reason}")
        assert self.engine.abort(request_id, reason=reason)
        assert not self.engine.abort(request_id)
        assert request_id not in self.engine
        row, load = self.rows
        assert isinstance(row, EngineRequestRow)
        assert isinstance(load, LoadRow)
        self.check_load(load)
        self.rows.clear()
        self.end(row)
        self.counts["aborts"] += 1
        self.check_accounts()

    def reset(self) -> None:
        """Forget the prefix cache; the runner sees to it that nothing from before is found."""
        pool = self.scheduler.pool
        num_cached = pool.num_cached_blocks
        self.counts["forgotten while held"] += bool(num_cached and self.books.num_held)
        assert self.engine.reset_prefix_cache() == num_cached
        assert pool.num_cached_blocks == 0
        self.runner.epoch += 1
        self.counts["resets"] += 1
        if self.trace is not None:
            self.trace(f"reset: {num_cached} cached blocks forgotten")
        self.check_accounts()

    def propose(self) -> None:
        """Set drafts, as a drafter would between two steps."""
        swarm, draw = self.swarm, self.rng.random
        if not swarm.draft_fraction:
            return
        for sequence in self.scheduler.running:
            assert not sequence.draft_token_ids
            if draw() < swarm.draft_fraction:
                drafts = self.clients[sequence.request_id].proposal(self.rng, swarm)
                sequence.draft_token_ids = drafts
                self.counts["empty proposals"] += not drafts

    def tick(self) -> None:
        runner, had_work = self.runner, bool(self.clients)
        runner.failed = False
        self.num_ticks += 1
        assert self.engine.has_work == had_work
        returned = self.engine.step()
        if runner.violation is not None:
            raise runner.violation
        assert bool(self.rows) == had_work
        rows = self.rows[:]
        self.rows.clear()
        if rows:
            self.take_step(rows, returned)
        self.check_accounts()

    def check_load(self, row: StepRow | LoadRow) -> None:
        """What the row says is held is what is held now, so that an idle engine has said 0."""
        assert row.num_running == len(self.scheduler.running)
        assert row.num_waiting == len(self.scheduler.waiting)
        assert row.num_used_blocks == self.scheduler.pool.num_used_blocks
        assert row.num_blocks == self.swarm.num_blocks

    def take_step(self, rows: list[Row], returned: list[TokenRow]) -> None:
        batch, step = self.runner.last_batch, rows[-1]
        assert batch is not None
        assert isinstance(step, StepRow)
        assert step.step_index == batch.step_index
        assert step.batch_size == len(batch.items)
        self.check_load(step)
        assert step.started_ns < step.ended_ns <= self.clock.now_ns()
        counts = self.counts
        if step.num_preemptions:
            counts["preemptions"] += step.num_preemptions
        if step.num_prefix_queried_tokens:
            counts["queried tokens"] += step.num_prefix_queried_tokens
            counts["hit tokens"] += step.num_prefix_hit_tokens
        counts["runner errors"] += self.runner.failed
        if self.trace is not None:
            self.trace(describe_rows(rows))
        kind, clients, tokens = 0, self.clients, []
        for row in rows[:-1]:
            before = kind
            if type(row) is TokenRow:
                kind = 1
                clients[row.request_id].take_token(row, step)
                tokens.append(row)
            elif type(row) is PromptLogprobsRow:
                clients[row.request_id].take_prompt_logprobs(row)
                counts["prompt log-probabilities"] += len(row.logprobs)
            else:
                assert isinstance(row, EngineRequestRow)
                kind = 2
                self.end(row)
            assert kind >= before, "prompt rows, then tokens, then ends"
        assert tokens == returned
        assert not (tokens and self.runner.failed)

    def end(self, row: EngineRequestRow) -> None:
        """A request is over: for the reason that the books know, with the tokens that they know."""
        client = self.clients.pop(row.request_id)
        was_queued = self.books.dequeue(client.rank, row.request_id)
        request = client.request
        assert row.prompt_token_ids == request.prompt_token_ids
        assert row.sampling == request.sampling
        assert row.priority == request.priority
        assert row.num_output_tokens == client.num_tokens
        assert row.num_preemptions == client.num_preemptions
        assert row.num_cached_tokens == (client.num_cached_tokens or 0)
        has_failed = self.runner.failed or row.request_id in self.runner.failures
        if client.abort_reason is not None:
            assert (row.finish_reason, row.error) == (client.abort_reason, None)
            self.counts["aborts of preempted or waiting"] += was_queued
        elif has_failed:
            assert row.finish_reason == "error"
            assert row.error
            self.counts["failed alone"] += not self.runner.failed
        else:
            assert (row.finish_reason, row.error) == (client.expected_reason, None)
            assert client.num_tokens == client.num_expected
            client.check_prompt_logprobs_complete()
            self.histories.append(request.prompt_token_ids + client.expected_ids)
            self.counts[f"finished by {row.finish_reason}"] += 1
            self.counts["finished without a sample"] += not client.num_expected
        check_request_row(row, self.swarm, is_whole=not has_failed and client.abort_reason is None)
        self.counts["chunked prefills"] += len(row.prefill_chunks) > 1 + row.num_preemptions
        self.ended.append(row)

    def check_batch(self, batch: ScheduledBatch) -> None:
        """What the runner may rely on, before it runs, and who came and went for it."""
        running, books, clients = self.scheduler.running, self.books, self.clients
        assert batch.step_index == self.num_steps
        self.num_steps += 1
        assert len(batch.items) == len(running)
        check_batch_shape(batch, self.swarm)
        pushed_out = books.not_in(running) if batch.num_preemptions else []
        assert batch.num_preemptions == len(pushed_out)
        if self.trace is not None:
            self.trace(describe_batch(batch, pushed_out))
        if pushed_out:
            self.take_pushed_out(batch, pushed_out)
        admitted = books.before_step(running)
        assert not (admitted and pushed_out), "no room, yet admitted"
        for sequence in admitted:
            client = clients[sequence.request_id]
            assert books.queue.pop(0) == (client.rank, sequence.request_id), "overtook a better rank"
            if client.num_cached_tokens is None:
                client.num_cached_tokens = sequence.num_computed_tokens

    def take_pushed_out(self, batch: ScheduledBatch, pushed_out: list[Sequence]) -> None:
        """The worst ranks went, and there was no room for the best of them even without drafts."""
        books, clients = self.books, self.clients
        kept = max(clients[item.sequence.request_id].rank for item in batch.items)
        by_rank = sorted((clients[sequence.request_id].rank, sequence) for sequence in pushed_out)
        assert kept < by_rank[0][0], "a better rank was pushed out"
        for rank, sequence in reversed(by_rank):
            num_blocks = len(books.tables[sequence])
            num_released = books.drop(sequence)
            clients[sequence.request_id].num_preemptions += 1
            books.enqueue(rank, sequence.request_id)
        check_need_of_preemption(batch, by_rank[0][1], num_blocks, num_released, books, self.swarm)

    def check_accounts(self) -> None:
        """Each block held or free, each request in flight known to both sides."""
        scheduler, books = self.scheduler, self.books
        books.after_step(scheduler.running)
        books.check(scheduler.pool)
        num_in_flight = len(self.clients)
        num_waiting = len(scheduler.waiting)
        assert len(scheduler.running) + num_waiting == num_in_flight == self.engine.num_requests
        assert num_waiting == len(books.queue)
        self.num_unchecked_ticks += 1
        num_objects = num_in_flight + self.swarm.num_blocks
        if self.num_unchecked_ticks * NUM_CHECKED_AT_ONCE >= num_objects:
            self.num_unchecked_ticks = 0
            self.check_everything()

    def check_everything(self) -> None:
        """All blocks, all slots, the whole queue."""
        scheduler = self.scheduler
        scheduler.check_integrity()
        self.runner.check_all(scheduler.running)
        assert [s.request_id for s in scheduler.waiting] == [entry[1] for entry in self.books.queue]
        in_flight = {s.request_id for s in (*scheduler.running, *scheduler.waiting)}
        assert in_flight == self.clients.keys()

    def check_drained(self) -> None:
        """Nothing held, nothing owed, sums that agree."""
        self.check_everything()
        assert self.scheduler.pool.num_used_blocks == 0
        assert self.engine.step() == []
        assert not self.rows
        assert sum(row.num_preemptions for row in self.ended) == self.counts["preemptions"]
        assert sum(row.num_cached_tokens for row in self.ended) == self.counts["hit tokens"]
        self.counts["drafts"] = self.runner.num_drafts
        self.counts["accepted drafts"] = self.runner.num_accepted

    def check_reuse(self) -> None:
        """An idle engine finds all of a prompt that it has just computed, and again after others like it."""
        swarm, size = self.swarm, self.swarm.block_size
        if not swarm.enable_prefix_caching or swarm.hash_kind != "healthy" or swarm.vocab_size < 3:
            return
        if swarm.num_blocks < 10 or swarm.max_model_len < 2 * size + 1:
            return
        for request, is_known in reuse_probes(size):
            self.add(request)
            while self.clients:
                self.tick()
            assert not is_known or self.ended[-1].num_cached_tokens == 2 * size, "a known prefix is not found"


def simulate(seed: int, trace: Trace | None = None) -> Simulation:
    """Live through one seed; an AssertionError carries how to replay it."""
    simulation = Simulation(seed, trace)
    try:
        with hashes_of(simulation.swarm):
            simulation.run()
    except Exception as error:
        error.add_note(f"replay: make sim SEED={seed}  ({simulation.swarm})")
        raise
    return simulation


def history_of(simulation: Simulation) -> bytes:
    """Everything that ended, as bytes: equal for equal seeds."""
    return b"\n".join(encode_row(row) for row in simulation.ended)
