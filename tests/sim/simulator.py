"""One seed, one life of an engine: arrivals, aborts and failures first, then everything must finish.

The seed draws every setting (a swarm: most runs are extreme in some way). Each tick is checked against the
simulator's own books; nothing here trusts the engine's account of itself.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from random import Random

from swarm import Swarm
from symbolic_runner import SymbolicRunner, expected_answer

from firstdiff.engine.config import EngineConfig
from firstdiff.engine.engine import EngineRequest, LLMEngine, QueueFullError
from firstdiff.engine.sequence import ScheduledBatch
from firstdiff.tracing.clock import VirtualClock
from firstdiff.tracing.records import (
    EngineRequestRow,
    FinishReason,
    LoadRow,
    Row,
    Sampling,
    StepRow,
    TokenRow,
    encode_row,
)


@dataclass(slots=True)
class Client:
    """A request in flight and what is known of it outside the engine."""

    request: EngineRequest
    expected_ids: list[int]
    expected_reason: FinishReason
    arrival_index: int
    token_ids: list[int] = field(default_factory=list)
    abort_reason: FinishReason | None = None


class Simulation:
    """An engine on a symbolic model, its clients and the books of both."""

    def __init__(self, seed: int) -> None:
        self.rng = Random(seed)
        self.swarm = swarm = Swarm.draw(self.rng)
        self.clock = VirtualClock(start_ns=1)
        self.rows: list[Row] = []
        self.counts: Counter[str] = Counter()
        self.clients: dict[str, Client] = {}
        self.ended: list[tuple[int, EngineRequestRow]] = []
        self.histories: list[list[int]] = []
        self.next_step_index = 0
        self.ran_before: dict[str, int] = {}
        self.runner = SymbolicRunner(
            num_blocks=swarm.num_blocks,
            block_size=swarm.block_size,
            vocab_size=swarm.vocab_size,
            rng=self.rng,
            clock=self.clock,
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
        """Safety under stress, then liveness in peace, then nothing left."""
        self.runner.error_fraction = self.swarm.error_fraction
        for _ in range(self.swarm.num_ticks):
            self.arrive()
            self.abort()
            self.tick()
        self.runner.error_fraction = 0.0
        # The first running sequence computes a token in every step and is never preempted, so:
        num_ticks_max = sum(
            len(client.request.prompt_token_ids) + client.request.sampling.max_tokens
            for client in self.clients.values()
        )
        for _ in range(num_ticks_max):
            if not self.engine.has_work:
                break
            self.tick()
        assert not self.clients, f"not finished after {num_ticks_max} peaceful ticks: {self.pending()}"
        self.check_drained()

    def pending(self) -> str:
        """Why the simulation is not done."""
        running = [f"{s.request_id} {s.num_computed_tokens}/{s.num_tokens}" for s in self.scheduler.running]
        waiting = [f"{s.request_id} x{s.num_preemptions}" for s in self.scheduler.waiting]
        return f"running {running}, waiting {waiting}, {self.scheduler.pool.num_free_blocks} blocks free"

    def arrive(self) -> None:
        if self.rng.random() < self.swarm.arrival_fraction:
            for _ in range(self.rng.randint(1, self.swarm.burst_max)):
                self.add(self.draw_request())

    def draw_request(self) -> EngineRequest:
        """Often a known beginning, cut at a multiple of the block size -1, 0 or +1, and a fresh end."""
        rng, swarm = self.rng, self.swarm
        prompt: list[int] = []
        if self.histories and rng.random() < swarm.shared_fraction:
            history = rng.choice(self.histories)
            cut = swarm.block_size * rng.randint(0, len(history) // swarm.block_size + 1)
            prompt = history[: max(0, cut + rng.choice([-1, 0, 0, 1]))]
        num_fresh = rng.choice([0, 1]) if prompt and rng.random() < 0.5 else rng.randint(1, swarm.fresh_max)
        prompt = prompt + [rng.randrange(swarm.vocab_size) for _ in range(num_fresh)]
        prompt = prompt[: swarm.max_model_len + rng.choice([1, 0, -1, -8, -8])] or [0]
        room = max(1, min(swarm.output_max, swarm.max_model_len - len(prompt)))
        sampling = Sampling(
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            seed=rng.randrange(2),
            max_tokens=rng.choice([1, room, rng.randint(1, room)]),
            stop_token_ids=[rng.randrange(swarm.vocab_size)] if rng.random() < swarm.stop_fraction else [],
            ignore_eos=rng.random() < swarm.ignore_eos_fraction,
        )
        request_id = f"r{self.counts['requests']}"
        if self.clients and rng.random() < 0.02:
            request_id = rng.choice(list(self.clients))
        self.counts["requests"] += 1
        self.histories.append(prompt)
        return EngineRequest(request_id=request_id, prompt_token_ids=prompt, sampling=sampling)

    def add(self, request: EngineRequest) -> None:
        """Hand a request in; it must be taken or refused just as the limits say."""
        swarm = self.swarm
        num_tokens = len(request.prompt_token_ids) + request.sampling.max_tokens
        fits = num_tokens <= swarm.max_model_len
        fits = fits and num_tokens - 1 <= swarm.num_blocks * swarm.block_size
        is_full = len(self.clients) >= swarm.max_num_seqs + swarm.max_num_waiting
        is_new = request.request_id not in self.clients
        try:
            self.engine.add(request)
        except QueueFullError:
            self.counts["queue full"] += 1
            assert is_full
        except ValueError:
            self.counts["refused"] += 1
            assert not is_full
            assert not (fits and is_new)
        else:
            assert fits
            assert is_new
            assert not is_full
            expected = expected_answer(
                request.prompt_token_ids,
                request.sampling,
                vocab_size=swarm.vocab_size,
                eos_token_ids=swarm.eos_token_ids,
            )
            self.clients[request.request_id] = Client(request, *expected, self.counts["requests"])
        assert not self.rows

    def abort(self) -> None:
        if self.rng.random() >= self.swarm.abort_fraction:
            return
        assert not self.engine.abort("never seen")
        if not self.clients:
            return
        client = self.rng.choice(list(self.clients.values()))
        reason: FinishReason = self.rng.choice(["abort", "stop"])
        client.abort_reason = reason
        self.counts["aborts of preempted or waiting"] += any(
            s.request_id == client.request.request_id for s in self.scheduler.waiting
        )
        assert self.engine.abort(client.request.request_id, reason=reason)
        assert not self.engine.abort(client.request.request_id)
        row, load = self.rows
        assert isinstance(row, EngineRequestRow)
        assert isinstance(load, LoadRow)
        self.check_load(load)
        self.rows.clear()
        self.end(row)
        self.counts["aborts"] += 1
        self.check_accounts()

    def tick(self) -> None:
        self.runner.failed = False
        had_work = bool(self.clients)
        assert self.engine.has_work == had_work
        returned = self.engine.step()
        if self.runner.violation is not None:
            raise self.runner.violation
        rows = list(self.rows)
        self.rows.clear()
        assert bool(rows) == had_work
        assert [row for row in rows if isinstance(row, TokenRow)] == returned
        if rows:
            self.take_step(rows)
        self.check_accounts()

    def check_load(self, row: StepRow | LoadRow) -> None:
        """What the row says is held is what is held now, so that an idle engine has said 0."""
        running, waiting = self.scheduler.running, self.scheduler.waiting
        assert (row.num_running, row.num_waiting) == (len(running), len(waiting))
        assert row.num_used_blocks == self.scheduler.pool.num_used_blocks <= row.num_blocks
        assert row.num_blocks == self.swarm.num_blocks

    def take_step(self, rows: list[Row]) -> None:
        batch, step = self.runner.last_batch, rows[-1]
        assert batch is not None
        assert isinstance(step, StepRow)
        assert step.step_index == batch.step_index
        assert step.batch_size == len(batch.items)
        self.check_load(step)
        assert step.started_ns < step.ended_ns <= self.clock.now_ns()
        self.counts["preemptions"] += step.num_preemptions
        self.counts["queried tokens"] += step.num_prefix_queried_tokens
        self.counts["hit tokens"] += step.num_prefix_hit_tokens
        self.counts["runner errors"] += self.runner.failed
        is_ending = False
        for row in rows[:-1]:
            if isinstance(row, TokenRow):
                assert not is_ending, "a token after the end of a request of the same step"
                self.take_token(row, step)
            else:
                assert isinstance(row, EngineRequestRow)
                is_ending = True
                self.end(row)
        for client in self.clients.values():
            assert len(client.token_ids) < len(client.expected_ids), "a request outlives its last token"

    def take_token(self, row: TokenRow, step: StepRow) -> None:
        assert not self.runner.failed
        client = self.clients[row.request_id]
        assert row.token_index == len(client.token_ids)
        assert row.token_id == client.expected_ids[row.token_index]
        assert (row.step_index, row.batch_size) == (step.step_index, step.batch_size)
        assert step.started_ns < row.emitted_ns <= step.ended_ns
        client.token_ids.append(row.token_id)

    def end(self, row: EngineRequestRow) -> None:
        """A request is over: for the reason that the books know, with the tokens that they know."""
        client = self.clients.pop(row.request_id)
        prompt = client.request.prompt_token_ids
        assert row.prompt_token_ids == prompt
        assert row.sampling == client.request.sampling
        assert row.num_output_tokens == len(client.token_ids)
        if client.abort_reason is not None:
            assert (row.finish_reason, row.error) == (client.abort_reason, None)
        elif self.runner.failed:
            assert row.finish_reason == "error"
            assert row.error
        else:
            assert (row.finish_reason, row.error) == (client.expected_reason, None)
            assert client.token_ids == client.expected_ids
            self.histories.append(prompt + client.token_ids)
            self.counts[f"finished by {row.finish_reason}"] += 1
        self.check_request_row(row)
        self.ended.append((client.arrival_index, row))

    def check_request_row(self, row: EngineRequestRow) -> None:
        """Stamps in order; prefill chunks join up, except where a preemption made them start over."""
        stamps = [row.arrived_ns, row.first_scheduled_ns, row.first_token_ns, row.finished_ns]
        reached = [stamp for stamp in stamps if stamp is not None]
        assert reached == sorted(reached)
        assert (row.first_token_ns is None) == (row.num_output_tokens == 0)
        assert row.num_cached_tokens % self.swarm.block_size == 0
        assert row.num_cached_tokens < len(row.prompt_token_ids)
        assert self.swarm.enable_prefix_caching or row.num_cached_tokens == 0
        position, num_restarts, last_step = row.num_cached_tokens, 0, -1
        for chunk in row.prefill_chunks:
            assert chunk.num_tokens > 0
            assert chunk.step_index > last_step
            num_restarts += chunk.start_token != position
            position, last_step = chunk.start_token + chunk.num_tokens, chunk.step_index
        assert num_restarts <= row.num_preemptions
        assert row.num_output_tokens == 0 or position == len(row.prompt_token_ids)
        self.counts["chunked prefills"] += len(row.prefill_chunks) > 1 + row.num_preemptions

    def check_batch(self, batch: ScheduledBatch) -> None:
        """What the runner may rely on, before it runs."""
        swarm, items = self.swarm, batch.items
        assert batch.step_index == self.next_step_index
        self.next_step_index += 1
        assert 1 <= len(items) <= swarm.max_num_seqs
        assert sum(item.num_scheduled_tokens for item in items) <= swarm.max_num_batched_tokens
        assert {id(item.sequence) for item in items} == {id(s) for s in self.scheduler.running}
        assert len({id(item.sequence) for item in items}) == len(items)
        now_running = {item.sequence.request_id: item.sequence.num_preemptions for item in items}
        assert not batch.num_preemptions or now_running.items() <= self.ran_before.items(), (
            "no room, yet admitted"
        )
        self.ran_before = now_running
        shapes = []
        for item in items:
            sequence, end = item.sequence, item.start + item.num_scheduled_tokens
            assert item.start == sequence.num_computed_tokens
            assert item.num_scheduled_tokens > 0
            assert item.samples == (end == sequence.num_tokens)
            assert end <= sequence.num_tokens
            assert len(sequence.block_table) == -(-end // swarm.block_size)
            shapes.append(item.num_scheduled_tokens == 1 and item.samples and item.start > 0)
        assert shapes == sorted(shapes, reverse=True), "decodes come before prefills"
        assert batch.num_decode_tokens == sum(shapes)
        assert batch.num_prefill_tokens == sum(
            item.num_scheduled_tokens for item, is_decode in zip(items, shapes, strict=True) if not is_decode
        )
        written = [
            (item.sequence.block_table[position // swarm.block_size], position % swarm.block_size)
            for item in items
            for position in range(item.start, item.start + item.num_scheduled_tokens)
        ]
        assert len(set(written)) == len(written), "two tokens in one slot"

    def check_accounts(self) -> None:
        """Each block held or free, each request in flight known to both sides."""
        scheduler, pool = self.scheduler, self.scheduler.pool
        scheduler.check_integrity()
        held = {block for sequence in scheduler.running for block in sequence.block_table}
        assert pool.num_used_blocks == len(held)
        assert pool.num_used_blocks + pool.num_free_blocks == self.swarm.num_blocks
        in_flight = [sequence.request_id for sequence in (*scheduler.running, *scheduler.waiting)]
        assert sorted(in_flight) == sorted(self.clients)

    def check_drained(self) -> None:
        """Nothing held, nothing owed, sums that agree, first come first served."""
        assert self.scheduler.pool.num_used_blocks == 0
        assert self.engine.step() == []
        assert not self.rows
        rows = [row for _, row in sorted(self.ended, key=lambda pair: pair[0])]
        assert sum(row.num_preemptions for row in rows) == self.counts["preemptions"]
        assert sum(row.num_cached_tokens for row in rows) == self.counts["hit tokens"]
        first_scheduled = [row.first_scheduled_ns for row in rows if row.first_scheduled_ns is not None]
        assert first_scheduled == sorted(first_scheduled), "a later request overtook an earlier one"


def simulate(seed: int) -> Simulation:
    """Live through one seed; an AssertionError carries how to replay it."""
    simulation = Simulation(seed)
    try:
        simulation.run()
    except Exception as error:
        error.add_note(f"replay: FIRSTDIFF_SIM_SEED={seed} pytest tests/sim  ({simulation.swarm})")
        raise
    return simulation


def history_of(simulation: Simulation) -> bytes:
    """Everything that ended, as bytes: equal for equal seeds."""
    return b"\n".join(encode_row(row) for _, row in simulation.ended)
