"""The engine's rows: complete, in order, one end a request, whatever the runner does."""

from __future__ import annotations

import logging

import pytest

from firstdiff.engine.config import EngineConfig
from firstdiff.engine.engine import EngineRequest, LLMEngine, QueueFullError, Runner
from firstdiff.engine.sequence import RunnerOutput, SampledToken, ScheduledBatch
from firstdiff.tracing.clock import VirtualClock
from firstdiff.tracing.records import (
    EngineRequestRow,
    LoadRow,
    PromptLogprobsRow,
    Row,
    Sampling,
    StepRow,
    TokenRow,
)


class CountingRunner:
    """The next token is the length of the context; a step takes 1 us; `error` is raised once if set."""

    def __init__(self, clock: VirtualClock) -> None:
        self.error: Exception | None = None
        self._clock = clock

    def execute(self, batch: ScheduledBatch) -> RunnerOutput:
        self._clock.advance(1000)
        error, self.error = self.error, None
        if error is not None:
            raise error
        tokens = [
            SampledToken(
                token_id=item.start + item.num_scheduled_tokens, logprob=-0.5, top_logprobs=[(3, -0.25)]
            )
            for item in batch.items
        ]
        return RunnerOutput(
            [[token] if item.samples else [] for item, token in zip(batch.items, tokens, strict=True)]
        )


class Bench:
    """An engine, its clock, its runner and the rows it has emitted."""

    def __init__(self, *, runner: Runner | None = None, num_blocks: int = 32, **settings) -> None:
        self.rows: list[Row] = []
        self.clock = VirtualClock(start_ns=100)
        self.runner = CountingRunner(self.clock)
        self.engine = LLMEngine(
            EngineConfig(model="none", block_size=4, **settings),
            runner=runner or self.runner,
            num_blocks=num_blocks,
            max_model_len=64,
            eos_token_ids=frozenset({2}),
            emit=self.rows.append,
            clock=self.clock,
        )

    def add(self, request_id: str, prompt: list[int] | None = None, max_tokens: int = 2) -> None:
        sampling = Sampling(temperature=0, top_k=0, top_p=1, seed=0, max_tokens=max_tokens)
        prompt = [11, 12, 13, 14, 15] if prompt is None else prompt
        self.engine.add(EngineRequest(request_id=request_id, prompt_token_ids=prompt, sampling=sampling))

    def take(self) -> list[Row]:
        rows = list(self.rows)
        self.rows.clear()
        return rows


def test_a_step_without_work_is_silent() -> None:
    bench = Bench()
    assert not bench.engine.has_work
    assert bench.engine.step() == []
    assert bench.rows == []


def test_rows_of_a_request_from_its_first_step_to_its_end() -> None:
    bench = Bench()
    bench.add("a")
    returned = bench.engine.step()
    token, step = bench.take()
    assert returned == [token]
    assert token == TokenRow(
        request_id="a",
        token_index=0,
        token_id=5,
        emitted_ns=1100,
        step_index=0,
        batch_size=1,
        logprob=-0.5,
        top_logprobs=[(3, -0.25)],
        num_cached_tokens=0,
    )
    assert step == StepRow(
        step_index=0,
        started_ns=100,
        ended_ns=1100,
        schedule_ns=0,
        execute_ns=1000,
        batch_size=1,
        num_prefill_tokens=5,
        num_decode_tokens=0,
        num_running=1,
        num_waiting=0,
        num_preemptions=0,
        num_used_blocks=2,
        num_blocks=32,
        num_prefix_queried_tokens=5,
        num_prefix_hit_tokens=0,
    )
    bench.engine.step()
    token, end, step = bench.take()
    assert isinstance(token, TokenRow)
    assert (token.token_index, token.token_id) == (1, 6)
    assert isinstance(end, EngineRequestRow)
    stamps = (end.arrived_ns, end.first_scheduled_ns, end.first_token_ns, end.finished_ns)
    assert stamps == (100, 100, 1100, 2100)
    assert (end.finish_reason, end.error, end.num_output_tokens) == ("length", None, 2)
    assert isinstance(step, StepRow)
    assert (step.num_running, step.num_decode_tokens, step.num_used_blocks) == (0, 1, 0)
    assert not bench.engine.has_work


def test_prefix_hits_are_counted_in_the_step_that_admits() -> None:
    bench = Bench()
    for name in "ab":
        bench.add(name)
        while bench.engine.has_work:
            bench.engine.step()
    steps = [row for row in bench.rows if isinstance(row, StepRow)]
    assert [row.num_prefix_hit_tokens for row in steps] == [0, 0, 4, 0]
    assert [row.num_prefix_queried_tokens for row in steps] == [5, 0, 5, 0]


@pytest.mark.parametrize("reason", ["abort", "stop"])
def test_an_abort_ends_a_request_with_its_row(reason) -> None:
    bench = Bench()
    bench.add("a", max_tokens=9)
    bench.engine.step()
    bench.take()
    assert bench.engine.abort("a", reason=reason)
    end, load = bench.take()
    assert isinstance(end, EngineRequestRow)
    assert load == LoadRow(num_running=0, num_waiting=0, num_used_blocks=0, num_blocks=32)
    assert (end.finish_reason, end.num_output_tokens, end.finished_ns) == (reason, 1, 1100)
    assert not bench.engine.abort("a")
    assert not bench.engine.has_work
    assert bench.rows == []


def test_an_abort_in_the_queue_has_no_later_stamps() -> None:
    bench = Bench()
    bench.add("a")
    bench.engine.abort("a")
    end, load = bench.take()
    assert isinstance(end, EngineRequestRow)
    assert load == LoadRow(num_running=0, num_waiting=0, num_used_blocks=0, num_blocks=32)
    assert (end.first_scheduled_ns, end.first_token_ns, end.num_output_tokens) == (None, None, 0)


def test_a_failing_runner_fails_its_batch_and_no_other(caplog: pytest.LogCaptureFixture) -> None:
    bench = Bench(max_num_seqs=2)
    for name in "abc":
        bench.add(name)
    bench.runner.error = FloatingPointError("NaN in the logits")
    assert bench.engine.step() == []
    first, second, step = bench.take()
    for row, name in ((first, "a"), (second, "b")):
        assert isinstance(row, EngineRequestRow)
        assert (row.request_id, row.finish_reason) == (name, "error")
        assert row.error == "FloatingPointError: NaN in the logits"
    assert isinstance(step, StepRow)
    assert bench.engine.scheduler.pool.num_used_blocks == 0
    assert [record.levelno for record in caplog.records] == [logging.ERROR]
    while bench.engine.has_work:
        bench.engine.step()
    ends = [row for row in bench.rows if isinstance(row, EngineRequestRow)]
    assert [(row.request_id, row.finish_reason) for row in ends] == [("c", "length")]


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ([], "expected answers to 1 items, got 0"),
        ([[]], "expected a token at item 0 of 1, got 0"),
        ([[SampledToken(token_id=1)]] * 2, "expected answers to 1 items, got 2"),
    ],
)
def test_an_answer_of_the_wrong_shape_fails_the_batch(
    answer, message, caplog: pytest.LogCaptureFixture
) -> None:
    class WrongRunner:
        def execute(self, batch: ScheduledBatch) -> RunnerOutput:
            return RunnerOutput(answer)

    bench = Bench(runner=WrongRunner())
    bench.add("a")
    assert bench.engine.step() == []
    end = bench.rows[0]
    assert isinstance(end, EngineRequestRow)
    assert end.finish_reason == "error"
    assert message in str(end.error)
    assert caplog.records


def test_an_interrupt_is_not_a_failed_batch() -> None:
    class InterruptedRunner:
        def execute(self, batch: ScheduledBatch) -> RunnerOutput:
            raise KeyboardInterrupt

    bench = Bench(runner=InterruptedRunner())
    bench.add("a")
    with pytest.raises(KeyboardInterrupt):
        bench.engine.step()


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "message"),
    [
        ([], 1, "expected a prompt of at least 1 token, got none"),
        ([5, -1], 1, r"expected prompt token ids in 0\.\.2147483647, got -1\.\.5"),
        ([1 << 70], 1, "expected prompt token ids in"),
        ([5], -1, "expected max_tokens of 0 or more, got -1"),
        ([5], 64, "expected prompt and max_tokens within 64 tokens"),
        ([5] * 41, 1, "expected a request of at most 10 KV blocks"),
    ],
)
def test_what_cannot_run_is_refused_at_the_door(prompt: list[int], max_tokens: int, message: str) -> None:
    bench = Bench(num_blocks=10)
    with pytest.raises(ValueError, match=message) as caught:
        bench.add("a", prompt, max_tokens)
    assert not isinstance(caught.value, QueueFullError)
    assert not bench.engine.has_work
    assert bench.rows == []


def test_the_queue_is_full_at_its_limit_and_open_again_below_it() -> None:
    bench = Bench(max_num_seqs=2, max_num_waiting=3)
    for index in range(5):
        bench.add(f"r{index}")
    with pytest.raises(QueueFullError, match="expected room for 1 more of 5 requests in flight"):
        bench.add("r5")
    bench.engine.abort("r1")
    bench.add("r5")
    while bench.engine.has_work:
        bench.engine.step()
    assert sum(isinstance(row, EngineRequestRow) for row in bench.rows) == 6


class ScriptedRunner:
    """Answers what it is told, step by step."""

    def __init__(self, *outputs: RunnerOutput) -> None:
        self._outputs = list(outputs)

    def execute(self, batch: ScheduledBatch) -> RunnerOutput:
        return self._outputs.pop(0)


def tokens_of(*token_ids: int) -> list[SampledToken]:
    return [SampledToken(token_id, logprob=-token_id / 8) for token_id in token_ids]


def test_each_accepted_draft_has_its_row_and_none_comes_after_the_end() -> None:
    runner = ScriptedRunner(RunnerOutput([tokens_of(9)]), RunnerOutput([tokens_of(5, 6, 2, 8)]))
    bench = Bench(runner=runner)
    bench.add("a", max_tokens=9)
    bench.engine.step()
    bench.take()
    bench.engine.scheduler.running[0].draft_token_ids = [5, 6, 2, 50]
    rows = bench.engine.step()
    assert [(row.token_index, row.token_id, row.logprob) for row in rows] == [
        (1, 5, -5 / 8),
        (2, 6, -6 / 8),
        (3, 2, -2 / 8),
    ]
    end, step = bench.take()[3:]
    assert isinstance(end, EngineRequestRow)
    assert (end.finish_reason, end.num_output_tokens) == ("stop", 4)
    assert isinstance(step, StepRow)
    assert (step.num_decode_tokens, step.num_prefill_tokens) == (5, 0)


@pytest.mark.parametrize("answer", [(5, 6, 7, 8), (5, 50, 7), (50, 6)])
def test_a_token_that_was_no_draft_cannot_be_accepted(answer, caplog: pytest.LogCaptureFixture) -> None:
    bench = Bench(runner=ScriptedRunner(RunnerOutput([tokens_of(9)]), RunnerOutput([tokens_of(*answer)])))
    bench.add("a", max_tokens=9)
    bench.engine.step()
    bench.engine.scheduler.running[0].draft_token_ids = [5, 6]
    assert bench.engine.step() == []
    assert "expected accepted drafts of [5, 6] at item 0" in str(bench.take()[-2])
    assert caplog.records


def ask_for_prompt(bench: Bench, start: int, max_tokens: int = 0) -> None:
    sampling = Sampling(
        temperature=0,
        top_k=0,
        top_p=1,
        seed=0,
        max_tokens=max_tokens,
        prompt_logprobs=0,
        prompt_logprobs_start=start,
    )
    bench.engine.add(
        EngineRequest(request_id="a", prompt_token_ids=[11, 12, 13, 14, 15, 16], sampling=sampling)
    )


def test_prompt_rows_come_in_chunks_and_no_token_without_max_tokens() -> None:
    runner = ScriptedRunner(
        RunnerOutput([[]], {0: tokens_of(13, 14, 15)}), RunnerOutput([[]], {0: tokens_of(16)})
    )
    bench = Bench(runner=runner, max_num_batched_tokens=4, max_num_seqs=2)
    ask_for_prompt(bench, start=2)
    assert bench.engine.step() == []
    first, _ = bench.take()
    assert bench.engine.step() == []
    second, end, step = bench.take()
    for row, start, num in ((first, 2, 3), (second, 5, 1)):
        assert isinstance(row, PromptLogprobsRow)
        assert (row.request_id, row.start, len(row.logprobs)) == ("a", start, num)
    assert isinstance(end, EngineRequestRow)
    assert (end.finish_reason, end.num_output_tokens, end.first_token_ns) == ("length", 0, None)
    assert isinstance(step, StepRow)
    assert (step.num_used_blocks, step.num_prefill_tokens) == (0, 2)


@pytest.mark.parametrize(
    "entries", [{}, {0: tokens_of(12)}, {0: [SampledToken(12)] * 5}, {0: tokens_of(12) * 6}]
)
def test_prompt_rows_must_be_complete(entries, caplog: pytest.LogCaptureFixture) -> None:
    bench = Bench(runner=ScriptedRunner(RunnerOutput([[]], entries)))
    ask_for_prompt(bench, start=1)
    bench.engine.step()
    end = bench.rows[0]
    assert isinstance(end, EngineRequestRow)
    assert "expected 5 prompt log-probabilities at item 0" in str(end.error)
    assert caplog.records


def test_prompt_rows_nobody_asked_for_fail_the_batch(caplog: pytest.LogCaptureFixture) -> None:
    bench = Bench(runner=ScriptedRunner(RunnerOutput([tokens_of(1)], {0: tokens_of(12)})))
    bench.add("a")
    bench.engine.step()
    assert "expected no prompt log-probabilities at item 0" in str(bench.rows[0])
    assert caplog.records


def test_the_owner_sees_what_is_in_flight_and_resets_the_cache() -> None:
    bench = Bench()
    bench.add("a")
    assert "a" in bench.engine
    assert "b" not in bench.engine
    assert bench.engine.num_requests == 1
    while bench.engine.has_work:
        bench.engine.step()
    assert bench.engine.num_requests == 0
    assert bench.engine.reset_prefix_cache() == 1
    assert bench.engine.reset_prefix_cache() == 0
