"""Who has a place in the engine: the limit of requests in flight, and those that come after their first."""

from __future__ import annotations

import pytest

from firstdiff.engine.config import EngineConfig
from firstdiff.engine.engine import EngineRequest, LLMEngine, QueueFullError
from firstdiff.engine.sequence import RunnerOutput, SampledToken, ScheduledBatch
from firstdiff.tracing.clock import VirtualClock
from firstdiff.tracing.records import EngineRequestRow, Row, Sampling


class OneToken:
    """A model that says the same token for ever."""

    def execute(self, batch: ScheduledBatch) -> RunnerOutput:
        return RunnerOutput([[SampledToken(token_id=3)] if item.samples else [] for item in batch.items], {})


def engine_of(rows: list[Row], **settings: int) -> LLMEngine:
    return LLMEngine(
        EngineConfig(model="none", block_size=4, **settings),
        runner=OneToken(),
        num_blocks=32,
        max_model_len=64,
        eos_token_ids=frozenset({2}),
        emit=rows.append,
        clock=VirtualClock(start_ns=100),
    )


def request(request_id: str, *follower_ids: str) -> EngineRequest:
    sampling = Sampling(temperature=0, top_k=0, top_p=1, seed=0, max_tokens=2)
    return EngineRequest(
        request_id=request_id, prompt_token_ids=[5], sampling=sampling, follower_ids=follower_ids
    )


def test_followers_have_their_places_from_the_first_on() -> None:
    rows: list[Row] = []
    engine = engine_of(rows, max_num_seqs=2, max_num_waiting=2)
    first = request("a", "b", "c")
    engine.add(request("early"))
    engine.add(request("other"))
    with pytest.raises(QueueFullError, match="expected room for 3 more of 4 requests in flight, got 2"):
        engine.add(first)
    engine.abort("other")
    engine.add(first)
    with pytest.raises(QueueFullError, match="got 0"):
        engine.add(request("late"))
    engine.add(request("b"))
    with pytest.raises(QueueFullError, match="got 0"):
        engine.add(request("late"))
    assert not engine.abort("c")
    engine.add(request("late"))
    with pytest.raises(QueueFullError, match="got 0"):
        engine.add(request("later"))
    while engine.has_work:
        engine.step()
    assert sum(isinstance(row, EngineRequestRow) for row in rows) == 5
    with pytest.raises(ValueError, match="expected at most 4 answers to a request"):
        engine.add(request("d", *"efgh"))


def test_no_more_are_in_flight_than_may_be_however_many_followers_come() -> None:
    engine = engine_of([], max_num_seqs=2, max_num_waiting=8)
    firsts = [request(f"r{index}", f"r{index}-1", f"r{index}-2") for index in range(4)]
    for first in firsts[:3]:
        engine.add(first)
    with pytest.raises(QueueFullError, match="expected room for 3 more of 10 requests in flight, got 1"):
        engine.add(firsts[3])
    for first in firsts[:3]:
        for request_id in first.follower_ids:
            engine.add(request(request_id))
    assert engine.num_requests == 9
