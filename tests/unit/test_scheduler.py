"""Who runs when, with which blocks, and for how long: one rule a test, the limits at the limit."""

from __future__ import annotations

import pytest

from firstdiff.engine.config import EngineConfig
from firstdiff.engine.scheduler import Scheduler
from firstdiff.engine.sequence import RunnerOutput, SampledToken, ScheduledBatch, Sequence
from firstdiff.tracing.records import FinishReason, Sampling

EOS = 2
SIZE = 4


def make_scheduler(*, num_blocks: int = 64, max_model_len: int = 128, **settings) -> Scheduler:
    config = EngineConfig(model="none", block_size=SIZE, **settings)
    return Scheduler(
        config, num_blocks=num_blocks, max_model_len=max_model_len, eos_token_ids=frozenset({EOS})
    )


def make_sequence(request_id: str, prompt: list[int] | int, max_tokens: int = 8, **changes) -> Sequence:
    token_ids = list(range(100, 100 + prompt)) if isinstance(prompt, int) else prompt
    sampling = Sampling(temperature=0, top_k=0, top_p=1, seed=0, max_tokens=max_tokens, **changes)
    return Sequence(request_id=request_id, prompt_token_ids=token_ids, sampling=sampling, arrived_ns=0)


def run_step(
    scheduler: Scheduler, token_id: int = 7
) -> tuple[ScheduledBatch, list[tuple[Sequence, FinishReason]]]:
    batch = scheduler.schedule(0)
    assert batch is not None
    output = RunnerOutput([[SampledToken(token_id=token_id)] if item.samples else [] for item in batch.items])
    finished = scheduler.commit(batch, output, 0)
    scheduler.check_integrity()
    return batch, finished


def drain(scheduler: Scheduler) -> None:
    while scheduler.has_work:
        run_step(scheduler)


def shape(batch: ScheduledBatch) -> list[tuple[str, int, int, bool]]:
    return [(i.sequence.request_id, i.start, i.num_scheduled_tokens, i.samples) for i in batch.items]


def test_no_work_is_no_batch() -> None:
    assert make_scheduler().schedule(0) is None


def test_a_prompt_is_computed_then_decoded_token_by_token() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_sequence("a", 5, max_tokens=3))
    assert shape(run_step(scheduler)[0]) == [("a", 0, 5, True)]
    assert shape(run_step(scheduler)[0]) == [("a", 5, 1, True)]
    batch, finished = run_step(scheduler)
    assert shape(batch) == [("a", 6, 1, True)]
    assert [(s.output_token_ids, reason) for s, reason in finished] == [([7, 7, 7], "length")]
    assert scheduler.pool.num_used_blocks == 0


def test_a_long_prompt_is_cut_to_the_budget() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=8, max_num_seqs=4)
    scheduler.add(make_sequence("a", 20))
    chunks = [run_step(scheduler)[0] for _ in range(3)]
    assert [shape(chunk) for chunk in chunks] == [
        [("a", 0, 8, False)],
        [("a", 8, 8, False)],
        [("a", 16, 4, True)],
    ]
    recorded = [(c.step_index, c.start_token, c.num_tokens) for c in scheduler.running[0].prefill_chunks]
    assert recorded == [(0, 0, 8), (1, 8, 8), (2, 16, 4)]


def test_decodes_come_first_and_prefills_share_what_is_left() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=8, max_num_seqs=4)
    scheduler.add(make_sequence("a", 3))
    run_step(scheduler)
    scheduler.add(make_sequence("b", [1] * 5))
    scheduler.add(make_sequence("c", [3] * 6))
    batch, _ = run_step(scheduler)
    assert shape(batch) == [("a", 3, 1, True), ("b", 0, 5, True), ("c", 0, 2, False)]
    assert (batch.num_decode_tokens, batch.num_prefill_tokens) == (1, 7)
    # A last chunk of one token has the shape of a decode, and goes with them.
    batch, _ = run_step(scheduler)
    assert shape(batch) == [("a", 4, 1, True), ("b", 5, 1, True), ("c", 2, 4, True)]


def test_a_prompt_of_one_token_is_a_prefill() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_sequence("a", 1))
    batch, _ = run_step(scheduler)
    assert (batch.num_decode_tokens, batch.num_prefill_tokens) == (0, 1)


def test_no_more_than_max_num_seqs_run() -> None:
    scheduler = make_scheduler(max_num_seqs=2)
    for name in "abc":
        scheduler.add(make_sequence(name, 3))
    assert [row[0] for row in shape(run_step(scheduler)[0])] == ["a", "b"]
    assert [s.request_id for s in scheduler.waiting] == ["c"]


@pytest.mark.parametrize("num_tokens", [1, SIZE - 1, SIZE, SIZE + 1, 3 * SIZE - 1, 3 * SIZE, 3 * SIZE + 1])
@pytest.mark.parametrize("caching", [True, False])
def test_a_repeated_prompt_computes_only_its_end(num_tokens: int, caching: bool) -> None:
    scheduler = make_scheduler(enable_prefix_caching=caching)
    scheduler.add(make_sequence("a", num_tokens, max_tokens=1))
    drain(scheduler)
    again = make_sequence("b", num_tokens, max_tokens=1)
    scheduler.add(again)
    num_cached = (num_tokens - 1) // SIZE * SIZE if caching else 0
    assert shape(run_step(scheduler)[0]) == [("b", num_cached, num_tokens - num_cached, True)]
    assert again.num_cached_tokens == num_cached
    assert scheduler.num_prefix_hit_tokens == num_cached
    assert scheduler.num_prefix_queried_tokens == (2 * num_tokens if caching else 0)


def test_what_was_generated_is_found_too() -> None:
    scheduler = make_scheduler()
    first = make_sequence("a", 6, max_tokens=4)
    scheduler.add(first)
    drain(scheduler)
    # 9 of 10 tokens were computed: the last was sampled and never fed back.
    scheduler.add(make_sequence("b", [*first.token_ids, 50]))
    assert shape(run_step(scheduler)[0]) == [("b", 8, 3, True)]


def test_a_shared_block_is_held_until_the_last_holder_ends() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_sequence("a", 2 * SIZE + 1, max_tokens=20))
    run_step(scheduler)
    scheduler.add(make_sequence("b", 2 * SIZE + 1, max_tokens=20))
    run_step(scheduler)
    a, b = scheduler.running
    assert a.block_table[:2] == b.block_table[:2]
    assert a.block_table[2] != b.block_table[2]
    assert scheduler.pool.num_used_blocks == 4
    scheduler.abort("a")
    scheduler.check_integrity()
    assert scheduler.pool.num_used_blocks == 3


def test_the_last_running_sequence_is_preempted_and_comes_back_first() -> None:
    scheduler = make_scheduler(num_blocks=6, enable_prefix_caching=False)
    for name in "ab":
        scheduler.add(make_sequence(name, SIZE, max_tokens=17))
    run_step(scheduler)
    scheduler.add(make_sequence("c", 20, max_tokens=4))
    preempted = None
    while preempted is None:
        batch, _ = run_step(scheduler)
        preempted = batch if batch.num_preemptions else None
    assert [row[0] for row in shape(preempted)] == ["a"]
    assert [s.request_id for s in scheduler.waiting] == ["b", "c"]
    b = scheduler.waiting[0]
    assert (b.block_table, b.num_computed_tokens, b.num_preemptions) == ([], 0, 1)
    num_tokens = b.num_tokens
    while b not in scheduler.running:
        batch, _ = run_step(scheduler)
    # What it had generated is recomputed, not generated again.
    assert shape(batch)[-1] == ("b", 0, num_tokens, True)
    drain(scheduler)
    assert b.num_output_tokens == 17


def test_a_preempted_sequence_finds_what_it_had_generated() -> None:
    scheduler = make_scheduler(num_blocks=8)
    for name, token in (("a", 1), ("b", 3)):
        scheduler.add(make_sequence(name, [token] * SIZE, max_tokens=25))
    b = scheduler.waiting[1]
    while not b.num_preemptions:
        run_step(scheduler)
    scheduler.abort("a")
    batch, _ = run_step(scheduler)
    # It had filled 4 blocks, prompt included; the last of them, free by then, went to "a".
    assert shape(batch) == [("b", 3 * SIZE, 5, True)]
    assert b.num_cached_tokens == 0


@pytest.mark.parametrize(("num_prompt", "num_blocks_needed"), [(SIZE, 1), (2 * SIZE, 2), (2 * SIZE + 1, 3)])
@pytest.mark.parametrize("num_missing", [0, 1])
def test_an_admission_leaves_a_block_to_each_running_sequence(
    num_prompt: int, num_blocks_needed: int, num_missing: int
) -> None:
    num_running = 2
    num_blocks = num_running + num_blocks_needed + num_running - num_missing
    scheduler = make_scheduler(num_blocks=num_blocks)
    for index in range(num_running):
        scheduler.add(make_sequence(f"r{index}", [index], max_tokens=3))
    run_step(scheduler)
    scheduler.add(make_sequence("new", num_prompt, max_tokens=1))
    run_step(scheduler)
    assert len(scheduler.waiting) == num_missing


def test_nothing_is_admitted_in_a_step_that_preempted() -> None:
    scheduler = make_scheduler(num_blocks=5)
    for name, token in (("a", 1), ("b", 3)):
        scheduler.add(make_sequence(name, [token] * SIZE, max_tokens=12))
    scheduler.add(make_sequence("c", [5] * 15, max_tokens=1))
    num_preemptions = 0
    while scheduler.has_work:
        waiting = list(scheduler.waiting)
        batch, _ = run_step(scheduler)
        num_preemptions += batch.num_preemptions
        if batch.num_preemptions:
            assert set(waiting) <= set(scheduler.waiting)
    assert num_preemptions == 1


def test_the_queue_is_first_come_first_served() -> None:
    scheduler = make_scheduler(num_blocks=8)
    scheduler.add(make_sequence("a", [1] * 20, max_tokens=4))
    run_step(scheduler)
    scheduler.add(make_sequence("large", [3] * 24, max_tokens=4))
    scheduler.add(make_sequence("small", [5], max_tokens=4))
    run_step(scheduler)
    assert [s.request_id for s in scheduler.waiting] == ["large", "small"]


def test_a_request_that_fills_everything_runs_and_a_token_more_does_not() -> None:
    scheduler = make_scheduler(num_blocks=4, max_model_len=100)
    # 17 tokens need 16 slots: the last is never computed.
    scheduler.add(make_sequence("a", 10, max_tokens=7))
    drain(scheduler)
    with pytest.raises(
        ValueError, match="expected a request of at most 4 KV blocks of 4 tokens, got one of 5"
    ):
        scheduler.add(make_sequence("b", 10, max_tokens=8))
    scheduler = make_scheduler(max_model_len=17)
    scheduler.add(make_sequence("a", 10, max_tokens=7))
    drain(scheduler)
    with pytest.raises(ValueError, match=r"expected prompt and max_tokens within 17 tokens, got 10 \+ 8"):
        scheduler.add(make_sequence("b", 10, max_tokens=8))


def test_an_id_in_flight_is_refused_and_is_free_again_afterwards() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_sequence("a", 3))
    with pytest.raises(ValueError, match="expected a request id that is not in flight, got 'a'"):
        scheduler.add(make_sequence("a", 3))
    drain(scheduler)
    scheduler.add(make_sequence("a", 3))
    assert scheduler.num_sequences == 1


@pytest.mark.parametrize("num_steps", [0, 1, 3])
def test_an_abort_frees_at_once(num_steps: int) -> None:
    scheduler = make_scheduler(max_num_batched_tokens=8, max_num_seqs=4)
    sequence = make_sequence("a", 20)
    scheduler.add(sequence)
    for _ in range(num_steps):
        run_step(scheduler)
    assert scheduler.abort("a") is sequence
    assert scheduler.abort("a") is None
    scheduler.check_integrity()
    assert not scheduler.has_work
    assert scheduler.pool.num_used_blocks == 0


@pytest.mark.parametrize(
    ("token_id", "changes", "reason"),
    [
        (EOS, {}, "stop"),
        (EOS, {"ignore_eos": True}, None),
        (EOS, {"ignore_eos": True, "stop_token_ids": [EOS]}, "stop"),
        (9, {"stop_token_ids": [8, 9]}, "stop"),
        (9, {}, None),
        (9, {"max_tokens": 1}, "length"),
        (EOS, {"max_tokens": 1}, "stop"),
        (EOS, {"max_tokens": 1, "ignore_eos": True}, "length"),
    ],
)
def test_a_sequence_ends_for_the_right_reason(token_id: int, changes: dict, reason: str | None) -> None:
    scheduler = make_scheduler()
    scheduler.add(make_sequence("a", 3, **changes))
    _, finished = run_step(scheduler, token_id)
    assert [why for _, why in finished] == ([reason] if reason else [])


def test_a_failed_batch_leaves_nothing_behind() -> None:
    scheduler = make_scheduler(max_num_seqs=1)
    failing, next_one = make_sequence("a", 9), make_sequence("b", 9)
    scheduler.add(failing)
    scheduler.add(next_one)
    batch = scheduler.schedule(0)
    assert batch is not None
    assert scheduler.fail(batch) == [failing]
    scheduler.check_integrity()
    assert scheduler.pool.num_used_blocks == 0
    assert shape(run_step(scheduler)[0]) == [("b", 0, 9, True)]
    assert next_one.num_cached_tokens == 0


def test_a_batch_in_flight_must_be_answered_first() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_sequence("a", 3))
    batch = scheduler.schedule(0)
    assert batch is not None
    with pytest.raises(AssertionError):
        scheduler.schedule(0)
    with pytest.raises(AssertionError):
        scheduler.abort("a")
    with pytest.raises(AssertionError):
        scheduler.commit(batch, RunnerOutput([]), 0)


def test_the_stamps_are_of_the_first_time() -> None:
    scheduler = make_scheduler()
    sequence = make_sequence("a", 3)
    scheduler.add(sequence)
    for now_ns in (10, 20):
        batch = scheduler.schedule(now_ns)
        assert batch is not None
        scheduler.commit(batch, RunnerOutput([[SampledToken(token_id=7)]]), now_ns + 5)
    assert (sequence.first_scheduled_ns, sequence.first_token_ns) == (10, 15)


def test_each_chunk_and_each_preemption_is_stamped() -> None:
    """Steps are scheduled at 10, 20, ... and taken in 5 later; "b" is pushed out by hand, twice."""
    scheduler = make_scheduler(enable_prefix_caching=False, max_num_batched_tokens=4)
    sequence = make_sequence("b", 6, max_tokens=9)
    scheduler.add(sequence)
    now_ns = 0

    def step() -> None:
        nonlocal now_ns
        now_ns += 10
        batch = scheduler.schedule(now_ns)
        assert batch is not None
        tokens = [[SampledToken(7)] if item.samples else [] for item in batch.items]
        scheduler.commit(batch, RunnerOutput(tokens), now_ns + 5)

    for _ in range(4):
        step()
    assert [chunk.finished_ns for chunk in sequence.prefill_chunks] == [15, 25]
    assert (sequence.first_scheduled_ns, sequence.first_token_ns) == (10, 25)
    scheduler._preempt(sequence, 48)
    step()
    scheduler._preempt(sequence, 58)
    for _ in range(2):
        step()
    assert [
        (p.preempted_ns, p.num_lost_tokens, p.scheduled_ns, p.recovered_ns) for p in sequence.preemptions
    ] == [
        (48, 8, 50, None),
        (58, 8, 60, 75),
    ]
    assert [chunk.finished_ns for chunk in sequence.prefill_chunks] == [15, 25, 55, 65, 75]
