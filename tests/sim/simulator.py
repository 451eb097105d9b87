"""One seed, one life of an engine: arrivals, aborts and failures first, then everything must finish.

The seed draws every setting (a swarm: most runs are extreme in some way). Each tick is checked against the
simulator's own books; nothing here trusts the engine's account of itself. What is checked each tick: every
read and write of KV, every row, every block (its holders, free or not, found or not), every table, the whole
queue, the order of admissions and preemptions, the shape of the batch. Beside that `check_everything` reads
all KV again and lets the engine check itself, once in twice as many ticks as there are blocks and requests,
which keeps its share of the time the same in all pools; and at the end.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from random import Random

from batch_checks import BatchCheck, check_request_row
from books import Books
from clients import Client, draw_request, reuse_probes
from swarm import Swarm, hashes_of
from symbolic_runner import SymbolicRunner
from trace_lines import describe_request, describe_rows

from firstdiff.engine.config import EngineConfig
from firstdiff.engine.engine import EngineRequest, LLMEngine, QueueFullError
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
        self.num_unchecked_ticks = 0
        self.books = Books(swarm.num_blocks, swarm.block_size)
        self.batch_check = BatchCheck(self.books, self.clients, swarm, trace)
        self.runner = SymbolicRunner(
            books=self.books,
            block_size=swarm.block_size,
            vocab_size=swarm.vocab_size,
            rng=self.rng,
            clock=self.clock,
            clients=self.clients,
            check=self.batch_check.see,
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
        self.batch_check.running = self.scheduler.running

    @property
    def num_steps(self) -> int:
        """Ticks with work."""
        return self.batch_check.num_steps

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
            if swarm.draft_fraction:
                self.propose()
            self.tick()
        self.runner.error_fraction = self.runner.item_error_fraction = 0.0
        for _ in range(self.num_ticks_to_finish()):
            if not self.clients:
                break
            if swarm.draft_fraction:
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
        num_computed = num_prompt + max_tokens - (max_tokens > 0)
        fits = num_prompt + max_tokens <= swarm.max_model_len
        fits = fits and num_computed <= swarm.num_blocks * swarm.block_size
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
            self.books.add(client.rank, request.request_id, self.scheduler.waiting)
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
        self.rows.clear()
        self.end(row)
        self.counts["aborts"] += 1
        self.check_accounts()
        self.check_load(load)

    def reset(self) -> None:
        """Forget the prefix cache; the runner sees to it that nothing from before is found."""
        pool = self.scheduler.pool
        num_cached = pool.num_cached_blocks
        self.counts["forgotten while held"] += bool(num_cached and self.books.tables)
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
        for sequence in self.scheduler.running:
            assert not sequence.draft_token_ids
            if draw() < swarm.draft_fraction:
                drafts = self.clients[sequence.request_id].proposal(self.rng, swarm)
                sequence.draft_token_ids = drafts
                if not drafts:
                    self.counts["empty proposals"] += 1

    def tick(self) -> None:
        runner, had_work = self.runner, bool(self.clients)
        runner.failed = False
        self.num_ticks += 1
        assert self.engine.has_work == had_work
        returned = self.engine.step()
        if runner.violation is not None:
            raise runner.violation
        assert bool(self.rows) == had_work
        if not had_work:
            self.check_accounts()
            return
        step = self.rows.pop()
        assert isinstance(step, StepRow)
        self.take_step(step, self.rows, returned)
        self.rows.clear()
        self.check_accounts()
        self.check_load(step)

    def check_load(self, row: StepRow | LoadRow) -> None:
        """What the row says is held is what the books say by now, so that an idle engine has said 0."""
        books = self.books
        assert row.num_running == len(books.tables)
        assert row.num_waiting == len(books.queue)
        assert row.num_used_blocks == len(books.held) - len(books.free)
        assert row.num_blocks == len(books.held)

    def take_step(self, step: StepRow, rows: list[Row], returned: list[TokenRow]) -> None:
        batch = self.runner.last_batch
        assert batch is not None
        assert step.step_index == batch.step_index
        assert step.batch_size == len(batch.items)
        assert step.started_ns < step.ended_ns <= self.clock.now_ns()
        counts = self.counts
        if step.num_preemptions:
            counts["preemptions"] += step.num_preemptions
        if step.num_prefix_queried_tokens:
            counts["queried tokens"] += step.num_prefix_queried_tokens
            counts["hit tokens"] += step.num_prefix_hit_tokens
        if self.runner.failed:
            counts["runner errors"] += 1
        if self.trace is not None:
            self.trace(describe_rows(rows))
        clients, tokens, has_ended = self.clients, [], False
        for row in rows:
            if type(row) is TokenRow:
                assert not has_ended, "a token after an end"
                clients[row.request_id].take_token(row, step)
                tokens.append(row)
            elif type(row) is PromptLogprobsRow:
                assert not tokens, "a prompt row after a token"
                assert not has_ended, "a prompt row after an end"
                clients[row.request_id].take_prompt_logprobs(row)
                counts["prompt log-probabilities"] += len(row.logprobs)
            else:
                assert isinstance(row, EngineRequestRow)
                has_ended = True
                self.end(row)
        assert tokens == returned
        assert not (tokens and self.runner.failed)

    def end(self, row: EngineRequestRow) -> None:
        """A request is over: for the reason that the books know, with the tokens that they know."""
        client = self.clients.pop(row.request_id)
        was_queued = self.books.end(client.rank, row.request_id)
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

    def check_accounts(self) -> None:
        """Each block held, free or cached, each request in flight, as the books say."""
        scheduler, books = self.scheduler, self.books
        books.after_step(scheduler.running)
        books.check(scheduler)
        self.num_unchecked_ticks += 1
        if self.num_unchecked_ticks > 2 * (len(books.held) + len(books.in_flight)):
            self.num_unchecked_ticks = 0
            self.check_everything()

    def check_everything(self) -> None:
        """All slots, and all that the engine knows of itself."""
        scheduler = self.scheduler
        scheduler.check_integrity()
        self.runner.check_all(scheduler.running)
        assert self.clients.keys() == self.books.in_flight.keys()
        assert scheduler.pool.num_free_blocks == len(self.books.free)
        assert self.engine.num_requests == len(self.clients)

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
