"""A request's log-probabilities are the same bits alone, batched, chunked, cached and preempted."""

from __future__ import annotations

import random
import sys
from pathlib import Path

import msgspec
import pytest

sys.path.insert(0, str(Path(__file__).parent))
from engine_driver import EngineUnderTest, greedy
from tiny_families import make_family

from firstdiff.engine.config import EngineConfig
from firstdiff.engine.model_store import resolve
from firstdiff.tracing.records import PromptLogprobsRow, Sampling

Numbers = list[list[object]]
"""For each prompt its tokens and what was said of them, the prompt's own first."""
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

    def __init__(
        self, model: str, dtype: str, *, asked: dict[str, object] | None = None, n: int = 1, **settings
    ) -> None:
        self._sampling: Sampling = greedy(NUM_TOKENS, logprobs=5, ignore_eos=True, **(asked or {}))
        self._n = n
        self._settings = {"model": model, "dtype": dtype, "max_num_seqs": 8} | settings
        self._large = model != "tiny-random"
        self.prompts = prompts_of(2000)

    def engine(self, **changes) -> EngineUnderTest:
        plain = {"enable_prefix_caching": False, "max_num_batched_tokens": 512, "num_blocks": 256}
        return EngineUnderTest(**(self._settings | plain | changes))

    def numbers(self, engine: EngineUnderTest) -> Numbers:
        """Of each prompt's `n` answers in turn, whose seeds follow one another, all at once."""
        first = self._sampling.seed
        return self._run(
            engine,
            [
                (prompt, msgspec.structs.replace(self._sampling, seed=first + index))
                for prompt in self.prompts
                for index in range(self._n)
            ],
        )

    def _run(self, engine: EngineUnderTest, asked: list[tuple[list[int], Sampling]]) -> Numbers:
        outputs = engine.generate([prompt for prompt, _ in asked], [sampling for _, sampling in asked])
        found: Numbers = [[] for _ in outputs]
        for row in engine.rows:
            if isinstance(row, PromptLogprobsRow):
                found[int(row.request_id[1:])] += zip(row.logprobs, row.top_logprobs, strict=True)
        for numbers, rows in zip(found, outputs, strict=True):
            numbers += [(row.token_id, row.logprob, row.top_logprobs) for row in rows]
        return found

    def alone(self) -> Numbers:
        """Each answer from a request of its own, with the seed that is its own."""
        engine = self.engine()
        first = self._sampling.seed
        found: Numbers = []
        for prompt in self.prompts:
            for index in range(self._n):
                own = msgspec.structs.replace(self._sampling, seed=first + index)
                found += self._run(engine, [(prompt, own)])
        return found

    def schedules(self) -> dict[str, Numbers]:
        found = {"batched": self.numbers(self.engine())}
        for budget in (13,) if self._large else (8, 13, 50):
            found[f"chunks of {budget}"] = self.numbers(self.engine(max_num_batched_tokens=budget))
        cached = self.engine(enable_prefix_caching=True)
        self.numbers(cached)
        found["cached"] = self.numbers(cached)
        # A request that asks for its whole prompt's numbers takes nothing from the cache.
        takes_any = self._sampling.prompt_logprobs is None or self._sampling.prompt_logprobs_start > 1
        num_cached = sum(row.num_cached_tokens for row in cached.finished)
        assert num_cached > 100 if takes_any else num_cached == 0
        tight = self.engine(block_size=3, num_blocks=95, max_model_len=160)
        found["preempted"] = self.numbers(tight)
        assert sum(row.num_preemptions for row in tight.finished) > 0
        return found


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize(("model", "threads"), [("tiny-random", 1), ("tiny-random", 2), SMOLLM2])
def test_every_schedule_gives_the_same_bits(model, threads, dtype):
    case = Case(model, dtype, deterministic=True, threads=threads)
    expected = case.alone()
    assert len({str(row) for row in expected}) == len(expected)
    for name, numbers in case.schedules().items():
        assert numbers == expected, name


SAMPLED = {"temperature": 0.8, "top_p": 0.9, "seed": 7}


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("start", [None, 1, 34])
def test_prompts_and_sampled_answers_too(start, n):
    """With the numbers of no prompt token, of all (an echo), and of those from the third block on."""
    asked = SAMPLED | ({} if start is None else {"prompt_logprobs": 3, "prompt_logprobs_start": start})
    case = Case("tiny-random", "bf16", asked=asked, n=n, deterministic=True, threads=1)
    expected = case.alone()
    num_scored = [0 if start is None else max(0, len(prompt) - start) for prompt in case.prompts]
    assert [len(row) for row in expected] == [NUM_TOKENS + scored for scored in num_scored for _ in range(n)]
    assert len({str(row) for row in expected}) == n * len(case.prompts)
    for name, numbers in case.schedules().items():
        assert numbers == expected, name


@pytest.mark.parametrize("start", [1, 34])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("variant", ["gemma3-ropes-softcap", "qwen3", "qwen3-window-biases"])
def test_families_with_windows_and_norms_of_heads_too(tmp_path, variant, dtype, start):
    """Windows that end inside blocks and chunks, two ropes, heads that fill no vector."""
    make_family(tmp_path, variant, vocab_size=2000)
    for path in resolve("tiny-random").path.glob("tokenizer*"):
        (tmp_path / path.name).symlink_to(path)
    asked = {"prompt_logprobs": 3, "prompt_logprobs_start": start}
    case = Case(str(tmp_path), dtype, asked=asked, deterministic=True, threads=1)
    expected = case.alone()
    assert len({str(row) for row in expected}) == len(expected)
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
