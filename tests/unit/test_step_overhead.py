"""What a step costs beside the model: CPU time, the best of several tries, as machines are busy."""

from __future__ import annotations

import time

from firstdiff.engine.config import EngineConfig
from firstdiff.engine.engine import EngineRequest, LLMEngine
from firstdiff.engine.sequence import RunnerOutput, SampledToken, ScheduledBatch
from firstdiff.tracing.clock import SystemClock
from firstdiff.tracing.records import Sampling

NUM_SEQUENCES = 32
MAX_STEP_NS = 300_000
MAX_SCHEDULE_NS = 150_000
"""3 % of a step of 5 ms, which is what 6,400 tokens a second would be."""
NUM_TRIES, NUM_STEPS = 8, 25


class InstantRunner:
    """Answers at once; the time it takes is kept apart."""

    def __init__(self) -> None:
        self.spent_ns = 0

    def execute(self, batch: ScheduledBatch) -> RunnerOutput:
        started_ns = time.process_time_ns()
        output = RunnerOutput([[SampledToken(7)] if item.samples else [] for item in batch.items])
        self.spent_ns += time.process_time_ns() - started_ns
        return output


def decoding_engine(runner: InstantRunner) -> LLMEngine:
    """All of NUM_SEQUENCES are past their prompts."""
    engine = LLMEngine(
        EngineConfig(model="none", max_num_seqs=NUM_SEQUENCES),
        runner=runner,
        num_blocks=2000,
        max_model_len=4096,
        eos_token_ids=frozenset({2}),
        emit=lambda row: None,
        clock=SystemClock(),
    )
    sampling = Sampling(temperature=0, top_k=0, top_p=1, seed=0, max_tokens=1000)
    for index in range(NUM_SEQUENCES):
        prompt = list(range(100 + index, 228 + index))
        engine.add(EngineRequest(request_id=str(index), prompt_token_ids=prompt, sampling=sampling))
    while len(engine.step()) < NUM_SEQUENCES:
        pass
    return engine


def test_a_step_of_32_sequences_costs_little_beside_the_model() -> None:
    runner = InstantRunner()
    engine = decoding_engine(runner)
    tries = []
    for _ in range(NUM_TRIES):
        runner.spent_ns = 0
        started_ns = time.process_time_ns()
        for _ in range(NUM_STEPS):
            engine.step()
        tries.append((time.process_time_ns() - started_ns - runner.spent_ns) / NUM_STEPS)
    print(f"{min(tries) / 1000:.0f} us a step beside the model")
    assert min(tries) < MAX_STEP_NS


def test_scheduling_32_sequences_costs_a_fraction_of_that() -> None:
    scheduler = decoding_engine(InstantRunner()).scheduler
    tries = []
    for _ in range(NUM_TRIES):
        spent_ns = 0
        for _ in range(NUM_STEPS):
            started_ns = time.process_time_ns()
            batch = scheduler.schedule(0)
            spent_ns += time.process_time_ns() - started_ns
            assert batch is not None
            scheduler.commit(batch, RunnerOutput([[SampledToken(7)]] * len(batch.items)), 0)
        tries.append(spent_ns / NUM_STEPS)
    print(f"{min(tries) / 1000:.0f} us to schedule")
    assert min(tries) < MAX_SCHEDULE_NS
