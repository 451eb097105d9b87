"""A request's log-probabilities are the same bits alone, batched, chunked, cached and preempted."""

from __future__ import annotations

import random
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from engine_driver import EngineUnderTest, greedy

from firstdiff.engine.config import EngineConfig
from firstdiff.tracing.records import Sampling

Numbers = list[list[tuple[int, float | None, list[tuple[int, float]]]]]
NUM_TOKENS = 12
SMOLLM2 = pytest.param("smollm2-135m", 1, marks=pytest.mark.model)


def prompts_of(vocab_size: int) -> list[list[int]]:
    """Eight, of unlike lengths; the last four share a beginning, at and around a block's end."""
    rng = random.Random(5)
    shared = [rng.randrange(3, vocab_size) for _ in range(33)]
    own = [[rng.randrange(3, vocab_size) for _ in range(n)] for n in (1, 15, 16, 60)]
    return own + [shared[:n] + [rng.randrange(3, vocab_size) for _ in range(9)] for n in (31, 32, 33, 33)]


class Case:
    """One model, dtype and way of computing, run under many schedules."""

    def __init__(self, model: str, dtype: str, **settings) -> None:
        self._settings = {"model": model, "dtype": dtype, "max_num_seqs": 8} | settings
        self._large = model != "tiny-random"
        self.prompts = prompts_of(2000)

    def engine(self, **changes) -> EngineUnderTest:
        plain = {"enable_prefix_caching": False, "max_num_batched_tokens": 512, "num_blocks": 256}
        return EngineUnderTest(**(self._settings | plain | changes))

    def numbers(self, engine: EngineUnderTest, prompts: list[list[int]] | None = None) -> Numbers:
        sampling: Sampling = greedy(NUM_TOKENS, logprobs=5, ignore_eos=True)
        outputs = engine.generate(self.prompts if prompts is None else prompts, sampling)
        return [[(row.token_id, row.logprob, row.top_logprobs) for row in rows] for rows in outputs]

    def alone(self) -> Numbers:
        engine = self.engine()
        return [self.numbers(engine, [prompt])[0] for prompt in self.prompts]

    def schedules(self) -> dict[str, Numbers]:
        found = {"batched": self.numbers(self.engine())}
        for budget in (13,) if self._large else (8, 13, 50):
            found[f"chunks of {budget}"] = self.numbers(self.engine(max_num_batched_tokens=budget))
        cached = self.engine(enable_prefix_caching=True)
        self.numbers(cached)
        found["cached"] = self.numbers(cached)
        assert sum(row.num_cached_tokens for row in cached.finished) > 100
        tight = self.engine(block_size=3, num_blocks=95, max_model_len=160)
        found["preempted"] = self.numbers(tight)
        assert sum(row.num_preemptions for row in tight.finished) > 0
        return found


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize(("model", "threads"), [("tiny-random", 1), ("tiny-random", 2), SMOLLM2])
def test_every_schedule_gives_the_same_bits(model, threads, dtype):
    case = Case(model, dtype, deterministic=True, threads=threads)
    expected = case.alone()
    assert len({tuple(token for token, _, _ in row) for row in expected}) == len(expected)
    for name, numbers in case.schedules().items():
        assert numbers == expected, name


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize(("model", "threads"), [("tiny-random", 1), SMOLLM2])
def test_without_it_some_schedule_differs(model, threads, dtype):
    """The inverse: torch's products and attention do not promise this, and the comparison sees it."""
    case = Case(model, dtype, deterministic=False, threads=threads)
    expected = case.alone()
    differing = [name for name, numbers in case.schedules().items() if numbers != expected]
    assert differing


def test_the_default_is_deterministic_and_the_identity_says_so():
    for asked, told in ((None, True), (True, True), (False, False)):
        engine = EngineUnderTest(model="tiny-random", deterministic=asked)
        assert engine.identity.engine_config["deterministic"] is told
        assert EngineConfig(model="tiny-random").deterministic is None
