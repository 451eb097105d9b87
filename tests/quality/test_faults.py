"""Each planted fault does what its name says, and nothing else; a healthy engine holds none of it."""

from __future__ import annotations

import statistics
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "parity"))
from engine_driver import EngineUnderTest, greedy, ids_of

from firstdiff.engine.faults import FAULTS, SLOW_DECODE_FRACTION, check_faults
from firstdiff.tracing.records import StepRow

PROMPTS = [[(7 * i + 3 * j) % 1500 + 20 for j in range(24 + 5 * i)] for i in range(8)]
WRONG_RESULT_FAULTS = ["kv-block-off-by-one", "decode-position-plus-one"]


def outputs(*faults: str) -> list[list[int]]:
    engine = EngineUnderTest(model="tiny-random", faults=faults, enable_prefix_caching=False)
    return ids_of(engine.generate(PROMPTS, greedy(24, ignore_eos=True)))


def test_a_healthy_engine_repeats_itself():
    assert outputs() == outputs()


@pytest.mark.parametrize("fault", WRONG_RESULT_FAULTS)
def test_a_decode_fault_spares_the_first_token_and_changes_later_ones(fault):
    healthy, faulty = outputs(), outputs(fault)
    # Prefill is untouched: the first token comes from it.
    assert [ids[0] for ids in faulty] == [ids[0] for ids in healthy]
    assert sum(a != b for a, b in zip(healthy, faulty, strict=True)) >= len(PROMPTS) // 2


def test_slow_decode_changes_the_time_of_decode_steps_alone():
    engines = [
        EngineUnderTest(model="tiny-random", faults=faults, enable_prefix_caching=False)
        for faults in ((), ("slow-decode",))
    ]
    medians: tuple[list[float], list[float]] = ([], [])
    # In turns, and the best of three: a busy moment must not count against one side.
    for _ in range(3):
        ids = []
        for engine, found in zip(engines, medians, strict=True):
            ids.append(ids_of(engine.generate(PROMPTS[:1], greedy(200, ignore_eos=True))))
            steps = [row for row in engine.rows if isinstance(row, StepRow) and row.num_prefill_tokens == 0]
            found.append(statistics.median(step.execute_ns for step in steps))
        assert ids[0] == ids[1]
    # The step is under a millisecond here, so a timer's slack shows: only the lower side is exact.
    assert min(medians[1]) > (1 + SLOW_DECODE_FRACTION * 0.6) * min(medians[0])


def test_slow_decode_waits_for_the_stated_share_of_the_step():
    from firstdiff.engine.faults import SlowDecode
    from firstdiff.engine.sequence import ScheduledBatch
    from firstdiff.tracing.clock import SystemClock

    clock = SystemClock()

    class TwentyMilliseconds:
        def execute(self, batch):
            end_ns = clock.now_ns() + 20_000_000
            while clock.now_ns() < end_ns:
                pass
            return []

    def spent_ns(*, prefill: int) -> int:
        started_ns = clock.now_ns()
        SlowDecode(TwentyMilliseconds(), clock).execute(ScheduledBatch(0, [], 1, prefill, 0))
        return clock.now_ns() - started_ns

    assert min(spent_ns(prefill=0) for _ in range(5)) == pytest.approx(25e6, rel=0.1)
    assert min(spent_ns(prefill=1) for _ in range(5)) == pytest.approx(20e6, rel=0.1)


def test_an_unknown_fault_is_refused_by_name():
    check_faults(FAULTS)
    with pytest.raises(ValueError, match="slow-decode, got 'slow-decoder'"):
        check_faults(["slow-decoder"])
    with pytest.raises(ValueError, match="kv-block-off-by-one"):
        EngineUnderTest(model="tiny-random", faults=("no-such-fault",))
