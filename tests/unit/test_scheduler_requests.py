"""What one request may ask of the scheduler: rank, salt, no cache, no sample, prompt rows, drafts."""

from __future__ import annotations

import pytest

from firstdiff.engine.config import EngineConfig
from firstdiff.engine.scheduler import Scheduler
from firstdiff.engine.sequence import RunnerOutput, SampledToken, ScheduledBatch, Sequence
from firstdiff.tracing.records import Sampling

EOS = 2
SIZE = 4


def make_scheduler(*, num_blocks: int = 64, max_model_len: int = 128, **settings) -> Scheduler:
    config = EngineConfig(model="none", block_size=SIZE, **settings)
    return Scheduler(
        config, num_blocks=num_blocks, max_model_len=max_model_len, eos_token_ids=frozenset({EOS})
    )


def add(
    scheduler: Scheduler,
    request_id: str,
    prompt: list[int] | int,
    max_tokens: int = 8,
    *,
    priority: int = 0,
    cache_salt: str | None = None,
    use_prefix_cache: bool = True,
    **sampling,
) -> Sequence:
    sequence = Sequence(
        request_id=request_id,
        prompt_token_ids=list(range(100, 100 + prompt)) if isinstance(prompt, int) else prompt,
        sampling=Sampling(temperature=0, top_k=0, top_p=1, seed=0, max_tokens=max_tokens, **sampling),
        arrived_ns=0,
        priority=priority,
        cache_salt=cache_salt,
        use_prefix_cache=use_prefix_cache,
    )
    scheduler.add(sequence)
    return sequence


def run_step(scheduler: Scheduler, answers: dict[str, list[int]] | None = None) -> ScheduledBatch:
    """A step in which each sample is 7, or what `answers` says by request id."""
    batch = scheduler.schedule(0)
    assert batch is not None
    tokens = [(answers or {}).get(item.sequence.request_id, [7]) * item.samples for item in batch.items]
    output = RunnerOutput([[SampledToken(token_id) for token_id in ids] for ids in tokens])
    scheduler.commit(batch, output, 0)
    scheduler.check_integrity()
    return batch


def drain(scheduler: Scheduler) -> None:
    while scheduler.has_work:
        run_step(scheduler)


def names(sequences: list[Sequence]) -> list[str]:
    return [sequence.request_id for sequence in sequences]


def shape(batch: ScheduledBatch) -> list[tuple[str, int, int, bool, int]]:
    return [
        (i.sequence.request_id, i.start, i.num_scheduled_tokens, i.samples, i.num_draft_tokens)
        for i in batch.items
    ]


def test_the_most_urgent_waits_least_and_equals_keep_their_order() -> None:
    scheduler = make_scheduler(max_num_seqs=1, scheduling_policy="priority")
    for name, priority in (("a", 0), ("late", 5), ("b", 0), ("urgent", -3)):
        add(scheduler, name, 3, priority=priority)
    assert names(scheduler.waiting) == ["urgent", "a", "b", "late"]


def test_who_runs_keeps_running_when_someone_urgent_comes() -> None:
    scheduler = make_scheduler(max_num_seqs=1, scheduling_policy="priority")
    add(scheduler, "a", 3, max_tokens=5, priority=9)
    run_step(scheduler)
    add(scheduler, "urgent", 3, priority=-9)
    batch = run_step(scheduler)
    assert (names([i.sequence for i in batch.items]), batch.num_preemptions) == (["a"], 0)


def test_the_least_urgent_gives_way_wherever_it_stands() -> None:
    scheduler = make_scheduler(num_blocks=6, enable_prefix_caching=False, scheduling_policy="priority")
    # "late" was admitted first, and is the one to go.
    for name, priority in (("late", 5), ("a", 0)):
        add(scheduler, name, SIZE, max_tokens=17, priority=priority)
        run_step(scheduler)
    batch = run_step(scheduler)
    while not batch.num_preemptions:
        batch = run_step(scheduler)
    assert (names(scheduler.running), names(scheduler.waiting)) == (["a"], ["late"])
    drain(scheduler)


def test_a_priority_needs_its_policy() -> None:
    with pytest.raises(ValueError, match="got 3: start with --scheduling-policy priority"):
        add(make_scheduler(), "a", 3, priority=3)
    with pytest.raises(ValueError, match="expected --scheduling-policy fcfs or priority, got 'lifo'"):
        EngineConfig(model="none", scheduling_policy="lifo").validate()  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("first", "second", "num_cached"),
    [(None, None, 8), ("a", "a", 8), ("a", "b", 0), ("a", None, 0), (None, "a", 0), ("", None, 8)],
)
def test_prefixes_are_shared_among_equal_salts_only(first, second, num_cached: int) -> None:
    scheduler = make_scheduler()
    add(scheduler, "first", 9, cache_salt=first)
    drain(scheduler)
    again = add(scheduler, "second", 9, cache_salt=second)
    run_step(scheduler)
    assert again.num_cached_tokens == num_cached


def test_who_wants_no_cache_takes_nothing_but_leaves_its_blocks() -> None:
    scheduler = make_scheduler()
    add(scheduler, "a", 9)
    drain(scheduler)
    uncached = add(scheduler, "b", 13, use_prefix_cache=False)
    assert shape(run_step(scheduler)) == [("b", 0, 13, True, 0)]
    assert uncached.num_cached_tokens == 0
    assert (scheduler.num_prefix_queried_tokens, scheduler.num_prefix_hit_tokens) == (9, 0)
    drain(scheduler)
    third = add(scheduler, "c", 13)
    run_step(scheduler)
    assert third.num_cached_tokens == 12


@pytest.mark.parametrize("num_steps_before", [1, 2])
def test_a_reset_forgets_what_is_held_and_what_is_half_done(num_steps_before: int) -> None:
    scheduler = make_scheduler(max_num_batched_tokens=6, max_num_seqs=2)
    running = add(scheduler, "a", 10, max_tokens=20)
    for _ in range(num_steps_before):
        run_step(scheduler)
    num_cached = scheduler.pool.num_cached_blocks
    assert num_cached > 0
    assert scheduler.reset_prefix_cache() == num_cached
    scheduler.check_integrity()
    assert scheduler.reset_prefix_cache() == 0
    for _ in range(4):
        run_step(scheduler)
    late = add(scheduler, "b", 10, max_tokens=2)
    run_step(scheduler)
    assert late.num_cached_tokens == 0
    drain(scheduler)
    assert running.num_output_tokens == 20
    # What was computed after the reset by those who came after it is found.
    third = add(scheduler, "c", 10, max_tokens=2)
    run_step(scheduler)
    assert third.num_cached_tokens == 8


def test_a_reset_waits_for_the_step() -> None:
    scheduler = make_scheduler()
    add(scheduler, "a", 3)
    scheduler.schedule(0)
    with pytest.raises(AssertionError):
        scheduler.reset_prefix_cache()


@pytest.mark.parametrize(("num_prompt", "num_chunks"), [(1, 1), (6, 1), (7, 2), (8, 2), (13, 3)])
def test_without_max_tokens_the_prompt_is_computed_and_that_is_all(num_prompt: int, num_chunks: int) -> None:
    scheduler = make_scheduler(max_num_batched_tokens=6, max_num_seqs=2)
    sequence = add(scheduler, "a", num_prompt, max_tokens=0)
    for index in range(num_chunks):
        batch = scheduler.schedule(0)
        assert batch is not None
        assert [item.samples for item in batch.items] == [False]
        assert (batch.num_decode_tokens, batch.num_prefill_tokens > 0) == (0, True)
        finished = scheduler.commit(batch, RunnerOutput([[]]), 0)
        assert finished == ([(sequence, "length")] if index == num_chunks - 1 else [])
    assert not scheduler.has_work
    assert sequence.first_token_ns is None
    # It fills the pool to the last slot, and its prefix stays.
    assert scheduler.pool.num_cached_blocks == num_prompt // SIZE


def test_without_max_tokens_a_prompt_may_fill_everything() -> None:
    scheduler = make_scheduler(num_blocks=2, max_model_len=2 * SIZE)
    add(scheduler, "a", 2 * SIZE, max_tokens=0)
    drain(scheduler)
    with pytest.raises(ValueError, match="expected prompt and max_tokens within 8 tokens"):
        add(scheduler, "b", 2 * SIZE + 1, max_tokens=0)
    with pytest.raises(ValueError, match="expected max_tokens of 0 or more, got -1"):
        add(scheduler, "c", 1, max_tokens=-1)


@pytest.mark.parametrize(
    ("start", "num_cached"), [(1, 0), (4, 0), (5, 4), (8, 4), (9, 8), (12, 8), (13, 12), (14, 12), (99, 12)]
)
def test_a_wanted_prompt_row_is_computed(start: int, num_cached: int) -> None:
    scheduler = make_scheduler()
    add(scheduler, "a", 14)
    drain(scheduler)
    asks = add(scheduler, "b", 14, prompt_logprobs=0, prompt_logprobs_start=start)
    assert asks.num_prompt_logprobs == start
    assert shape(run_step(scheduler))[0][1] == num_cached
    # Token p needs the row before it.
    assert num_cached < start


def test_after_a_preemption_only_rows_not_yet_given_out_count() -> None:
    scheduler = make_scheduler()
    sequence = add(scheduler, "a", 14, max_tokens=9, prompt_logprobs=0)
    run_step(scheduler)
    sequence.num_prompt_logprobs = 14
    scheduler._preempt(sequence, 7)
    assert shape(run_step(scheduler)) == [("a", 12, 3, True, 0)]


def test_prompt_rows_begin_after_the_first_token() -> None:
    with pytest.raises(ValueError, match="expected prompt_logprobs_start of at least 1, got 0"):
        add(make_scheduler(), "a", 3, prompt_logprobs=0, prompt_logprobs_start=0)


@pytest.mark.parametrize(
    ("answer", "num_computed", "num_blocks"),
    [([7], 4, 1), ([50, 7], 5, 2), ([50, 51, 52, 53, 7], 8, 2), ([50, 51, 52, 53, 54, 7], 9, 3)],
)
def test_drafts_are_kept_as_far_as_they_were_accepted(
    answer: list[int], num_computed: int, num_blocks: int
) -> None:
    scheduler = make_scheduler(num_blocks=8)
    sequence = add(scheduler, "a", 3, max_tokens=20)
    run_step(scheduler)
    sequence.draft_token_ids = [50, 51, 52, 53, 54]
    batch = run_step(scheduler, {"a": answer})
    assert shape(batch) == [("a", 3, 6, True, 5)]
    assert (batch.num_decode_tokens, batch.num_prefill_tokens) == (6, 0)
    assert sequence.output_token_ids == [7, *answer]
    assert (sequence.num_computed_tokens, len(sequence.block_table)) == (num_computed, num_blocks)
    assert sequence.draft_token_ids == []
    # No block with a rejected draft in it was hashed or can be found.
    assert len(sequence.block_hashes) == scheduler.pool.num_cached_blocks == num_computed // SIZE
    assert shape(run_step(scheduler)) == [("a", num_computed, 1, True, 0)]


@pytest.mark.parametrize(
    ("answer", "changes", "kept"),
    [
        ([50, EOS, 52, 7], {}, [50, EOS]),
        ([50, 9, 52, 7], {"stop_token_ids": [9]}, [50, 9]),
        ([50, EOS, 52, 7], {"ignore_eos": True}, [50, EOS, 52, 7]),
        ([50, EOS, 52, 7], {"min_tokens": 4}, [50, EOS, 52, 7]),
        ([50, 51, 52, 7], {"max_tokens": 5}, [50, 51, 52, 7]),
    ],
)
def test_an_end_among_accepted_drafts_cuts_the_rest(answer: list[int], changes: dict, kept) -> None:
    scheduler = make_scheduler()
    sequence = add(scheduler, "a", 3, **changes)
    run_step(scheduler)
    sequence.draft_token_ids = answer[:-1]
    run_step(scheduler, {"a": answer})
    assert sequence.output_token_ids == [7, *kept]
    assert scheduler.has_work == (kept == answer and changes.get("max_tokens") != 5)
    assert scheduler.pool.num_used_blocks == len(sequence.block_table)


def test_drafts_are_cut_to_max_tokens_budget_and_blocks() -> None:
    scheduler = make_scheduler(num_blocks=4, max_num_batched_tokens=6, max_num_seqs=2)
    a = add(scheduler, "a", 3, max_tokens=5)
    run_step(scheduler)
    b = add(scheduler, "b", [1, 1, 1], max_tokens=9)
    run_step(scheduler, {"a": [8]})
    a.draft_token_ids = [50] * 9
    b.draft_token_ids = [60] * 9
    # "a" has 3 tokens left, the last not from a draft; "b" gets what the budget has left.
    assert shape(run_step(scheduler)) == [("a", 4, 3, True, 2), ("b", 3, 3, True, 2)]
    # The budget has room for 4, the last two blocks for 3.
    b.draft_token_ids = [60] * 9
    assert shape(run_step(scheduler)) == [("a", 5, 1, True, 0), ("b", 4, 4, True, 3)]
    # One token is missing, and a draft would have to be followed by another.
    a.draft_token_ids = [50]
    assert shape(run_step(scheduler)) == [("a", 6, 1, True, 0), ("b", 5, 1, True, 0)]
    assert a.draft_token_ids == []


def test_drafts_of_the_first_leave_each_decode_its_token() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=4, max_num_seqs=4)
    sequences = [add(scheduler, name, [index], max_tokens=9) for index, name in enumerate("abcd")]
    run_step(scheduler)
    for sequence in sequences:
        sequence.draft_token_ids = [50, 51]
    assert [row[2:] for row in shape(run_step(scheduler))] == [(1, True, 0)] * 4


def test_drafts_ride_on_decodes_only() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=6, max_num_seqs=2)
    sequence = add(scheduler, "a", 10)
    run_step(scheduler)
    sequence.draft_token_ids = [50]
    assert shape(run_step(scheduler)) == [("a", 6, 4, True, 0)]
    assert sequence.draft_token_ids == []


def test_forced_tokens_end_with_the_last_only() -> None:
    scheduler = make_scheduler()
    sequence = add(scheduler, "a", 3, max_tokens=3, forced_token_ids=[EOS, 9, EOS], stop_token_ids=[9])
    for token_id in (EOS, 9, EOS):
        assert scheduler.has_work
        run_step(scheduler, {"a": [token_id]})
    assert not scheduler.has_work
    assert sequence.output_token_ids == [EOS, 9, EOS]
