"""How much sooner first tokens come when requests share a prefix, with prefix reuse and without.

Two engines of the same settings, one with reuse, take turns: each round has a fresh prefix of 512 tokens,
which one request computes first, then 32 requests at once with 16 tokens of their own each. Time to first
token runs from the moment they are submitted.

Usage: `python tests/bench/prefix_reuse.py --rounds 3 --threads 2`.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time

from firstdiff.engine.build import build_engine
from firstdiff.engine.config import EngineConfig
from firstdiff.engine.engine import EngineRequest, LLMEngine
from firstdiff.tracing.clock import SystemClock
from firstdiff.tracing.records import Sampling

PREFIX_TOKENS, OWN_TOKENS, NUM_REQUESTS = 512, 16, 32


def first_tokens_s(engine: LLMEngine, prompts: list[list[int]]) -> list[float]:
    """Seconds from submitting all `prompts` to the first token of each."""
    sampling = Sampling(temperature=0.0, top_k=0, top_p=1.0, seed=0, max_tokens=1, ignore_eos=True)
    for index, prompt in enumerate(prompts):
        engine.add(EngineRequest(request_id=str(index), prompt_token_ids=prompt, sampling=sampling))
    started, seconds = time.perf_counter(), []
    while engine.has_work:
        arrived = len(engine.step())
        seconds += [time.perf_counter() - started] * arrived
    assert len(seconds) == len(prompts)
    return seconds


def measure(model: str, dtype: str, threads: int, rounds: int) -> list[tuple[float, float]]:
    """Mean seconds to first token (with reuse, without), round by round."""
    engines: dict[bool, LLMEngine] = {}
    for reuse in (True, False):
        config = EngineConfig(
            model=model,
            dtype=dtype,  # type: ignore[arg-type]
            threads=threads,
            enable_prefix_caching=reuse,
        )
        engines[reuse], _ = build_engine(config, emit=lambda row: None, clock=SystemClock())
    rng = random.Random(0)
    seconds = []
    for round_index in range(rounds + 1):
        prefix = [rng.randrange(100, 49_000) for _ in range(PREFIX_TOKENS)]
        own = [[rng.randrange(100, 49_000) for _ in range(OWN_TOKENS)] for _ in range(NUM_REQUESTS + 1)]
        found = {}
        for reuse in (True, False) if round_index % 2 else (False, True):
            first_tokens_s(engines[reuse], [prefix + own[-1]])
            found[reuse] = statistics.mean(first_tokens_s(engines[reuse], [prefix + o for o in own[:-1]]))
        if round_index > 0:  # the first compiles and touches memory
            seconds.append((found[True], found[False]))
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--dtype", default="bf16", choices=["bf16", "fp32"])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    seconds = measure(arguments.model, arguments.dtype, arguments.threads, arguments.rounds)
    for with_reuse, without in seconds:
        print(f"mean time to first token: {with_reuse:.3f} s with reuse, {without:.3f} s without")
    sooner = statistics.median(without / with_reuse for with_reuse, without in seconds)
    print(f"{sooner:.1f} times sooner (median of {arguments.rounds} rounds)")


if __name__ == "__main__":
    main()
