"""Where a decode step spends its time, and how fast the weights' products are on this machine.

Profiles decode steps of the real engine with torch's profiler and times one product at several batch sizes,
in both dtypes; one thread, so that shares add up.

Usage: `python tests/bench/profile_step.py --sequences 32`.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable

import torch
from torch.profiler import ProfilerActivity, profile

from firstdiff.engine.build import build_engine
from firstdiff.engine.config import EngineConfig
from firstdiff.engine.engine import EngineRequest, LLMEngine
from firstdiff.engine.linear import Linear
from firstdiff.tracing.clock import SystemClock
from firstdiff.tracing.records import Sampling

PARTS = {
    "products": ("mkldnn::_linear_pointwise", "aten::linear", "aten::addmm", "aten::mm"),
    "attention": ("aten::scaled_dot_product_attention", "aten::index_select"),
    "norms": ("aten::rms_norm",),
}
PROMPT_TOKENS, STEPS = 192, 5


def decoding_engine(model: str, dtype: str, num_sequences: int) -> LLMEngine:
    config = EngineConfig(model=model, dtype=dtype)  # type: ignore[arg-type]
    engine, _ = build_engine(config, emit=lambda row: None, clock=SystemClock())
    rng = random.Random(0)
    sampling = Sampling(temperature=0.0, top_k=0, top_p=1.0, seed=0, max_tokens=64, ignore_eos=True)
    for index in range(num_sequences):
        prompt = [rng.randrange(100, 49_000) for _ in range(PROMPT_TOKENS)]
        engine.add(EngineRequest(request_id=str(index), prompt_token_ids=prompt, sampling=sampling))
    while len(engine.step()) < num_sequences:
        pass
    return engine


def print_shares(engine: LLMEngine) -> None:
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        for _ in range(STEPS):
            engine.step()
    events = profiler.key_averages()
    total = sum(event.self_cpu_time_total for event in events)
    print(f"step {total / STEPS / 1000:.1f} ms (profiler on)")
    for part, names in PARTS.items():
        spent = sum(event.cpu_time_total for event in events if event.key in names)
        print(f"  {part} {spent / total:.0%}")


def best_s(call: Callable[[], object]) -> float:
    times = []
    for _ in range(7):
        started = time.process_time()
        call()
        times.append(time.process_time() - started)
    return min(times)


def print_products() -> None:
    for dtype in (torch.bfloat16, torch.float32):
        weight = Linear(torch.randn(3072, 576).to(dtype))
        speeds = []
        for rows in (1, 4, 8, 16, 32, 128, 512):
            x = torch.randn(rows, 576).to(dtype)
            calls = max(1, 512 // rows)
            seconds = best_s(lambda x=x, calls=calls: [weight(x) for _ in range(calls)]) / calls  # noqa: B023
            speeds.append(f"{rows}: {2 * rows * 576 * 3072 / seconds / 1e9:.0f}")
        print(f"{dtype} products 576 -> 3072, GFLOP/s by rows  {'  '.join(speeds)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--dtype", default="bf16", choices=["bf16", "fp32"])
    parser.add_argument("--sequences", type=int, default=32)
    arguments = parser.parse_args()
    with torch.inference_mode():
        print_shares(decoding_engine(arguments.model, arguments.dtype, arguments.sequences))
        print_products()


if __name__ == "__main__":
    main()
