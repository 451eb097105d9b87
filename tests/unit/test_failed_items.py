"""What goes wrong with one sequence of a step ends that one, and the others do not notice."""

from __future__ import annotations

from firstdiff.engine.config import EngineConfig
from firstdiff.engine.engine import EngineRequest, LLMEngine
from firstdiff.engine.sequence import RunnerOutput, SampledToken, ScheduledBatch
from firstdiff.tracing.clock import VirtualClock
from firstdiff.tracing.records import EngineRequestRow, Row, Sampling, TokenRow


class FailingRunner:
    """Samples 7 for everyone; from the second step on, sequence "bad" fails where it would sample."""

    def __init__(self) -> None:
        self.num_steps = 0

    def execute(self, batch: ScheduledBatch) -> RunnerOutput:
        self.num_steps += 1
        failures = {
            index: "FloatingPointError: NaN"
            for index, item in enumerate(batch.items)
            if item.sequence.request_id == "bad" and self.num_steps > 1
        }
        tokens = [
            [SampledToken(7)] if item.samples and index not in failures else []
            for index, item in enumerate(batch.items)
        ]
        return RunnerOutput(tokens, {}, failures)


def run(names: list[str]) -> tuple[list[Row], LLMEngine]:
    rows: list[Row] = []
    engine = LLMEngine(
        EngineConfig(model="none", block_size=4),
        runner=FailingRunner(),
        num_blocks=32,
        max_model_len=64,
        eos_token_ids=frozenset({2}),
        emit=rows.append,
        clock=VirtualClock(start_ns=100),
    )
    sampling = Sampling(temperature=0, top_k=0, top_p=1, seed=0, max_tokens=5)
    for name in names:
        engine.add(EngineRequest(request_id=name, prompt_token_ids=[1, 3, 4], sampling=sampling))
    for _ in range(100):
        if engine.has_work:
            engine.step()
        engine.scheduler.check_integrity()
    assert not engine.has_work
    return rows, engine


def test_a_failed_item_ends_alone_with_its_reason() -> None:
    rows, engine = run(["a", "bad", "b"])
    ended = {row.request_id: row for row in rows if isinstance(row, EngineRequestRow)}
    assert ended["bad"].finish_reason == "error"
    assert ended["bad"].error == "FloatingPointError: NaN"
    assert ended["bad"].num_output_tokens == 1
    for name in ("a", "b"):
        assert (ended[name].finish_reason, ended[name].error) == ("length", None)
        assert sum(isinstance(row, TokenRow) and row.request_id == name for row in rows) == 5
    assert engine.scheduler.pool.num_used_blocks == 0


def test_a_step_in_which_every_item_failed_is_a_step() -> None:
    rows, _ = run(["bad"])
    assert [type(row).__name__ for row in rows[-2:]] == ["EngineRequestRow", "StepRow"]
