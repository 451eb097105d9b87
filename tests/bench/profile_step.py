"""Where a decode step spends its time, and how fast the weights' products are on this machine.

Profiles decode steps of the real engine and times one product at several batch sizes,
in both dtypes; one thread, so that shares add up.

Usage: `python tests/bench/profile_step.py --sequences 32`.
"""

from __future__ import annotations

import argparse
import cProfile
import itertools
import random
import time
from collections.abc import Callable

import torch

from firstdiff.engine.build import build_engine
from firstdiff.engine.config import EngineConfig
from firstdiff.engine.engine import EngineRequest, LLMEngine
from firstdiff.engine.linear import Linear
from firstdiff.engine.linear_kernel import KernelLinear
from firstdiff.tracing.clock import SystemClock
from firstdiff.tracing.records import Sampling

PARTS = {
    "products": ("linear",),
    "attention": ("attend", "store"),
    "norms, rotations, gates": ("add_norm", "turn_heads", "gate_rows"),
    "sampling": ("_sample",),
    "batch building": ("build_batch", "plan"),
    "scheduling": ("schedule", "commit"),
}
"""Functions of the engine by what they are for; the kernels' names count where their module is a kernel's."""
PROMPT_TOKENS, STEPS, STEPS_MAX = 192, 10, 1000


def decoding_engine(model: str, dtype: str, num_sequences: int) -> LLMEngine:
    config = EngineConfig(model=model, dtype=dtype)  # type: ignore[arg-type]
    engine, _ = build_engine(config, emit=lambda row: None, clock=SystemClock())
    rng = random.Random(0)
    sampling = Sampling(temperature=0.0, top_k=0, top_p=1.0, seed=0, max_tokens=64, ignore_eos=True)
    for index in range(num_sequences):
        prompt = [rng.randrange(100, 49_000) for _ in range(PROMPT_TOKENS)]
        engine.add(EngineRequest(request_id=str(index), prompt_token_ids=prompt, sampling=sampling))
    for _ in range(STEPS_MAX):
        if len(engine.step()) == num_sequences:
            return engine
    raise RuntimeError(
        f"expected {num_sequences} decoding rows within {STEPS_MAX} steps: see the engine's log"
    )


def shares(model: str, dtype: str, num_sequences: int) -> tuple[float, dict[str, float]]:
    """Milliseconds of a decode step of one thread under the profiler, and each part's share of it.

    Children are included; what no part has is Python between them.
    """
    engine = decoding_engine(model, dtype, num_sequences)
    profiler = cProfile.Profile()
    profiler.enable()
    for _ in range(STEPS):
        engine.step()
    profiler.disable()
    entries = profiler.getstats()
    names = {id(entry): getattr(entry.code, "co_name", "") for entry in entries}
    total = next(e.totaltime for e in entries if names[id(e)] == "step" and e.callcount == STEPS)
    parts = {
        part: sum(entry.totaltime for entry in entries if names[id(entry)] in wanted) / total
        for part, wanted in PARTS.items()
    }
    return total / STEPS * 1000, parts | {"Python between them": 1 - sum(parts.values())}


def best_s(call: Callable[[], object]) -> float:
    times = []
    for _ in range(7):
        started = time.process_time()
        call()
        times.append(time.process_time() - started)
    return min(times)


def print_products() -> None:
    for dtype, form in itertools.product((torch.bfloat16, torch.float32), (KernelLinear, Linear)):
        weight = form(torch.randn(3072, 576).to(dtype))
        speeds = []
        for rows in (1, 4, 8, 16, 32, 128, 512):
            x = torch.randn(rows, 576).to(dtype)
            calls = max(1, 512 // rows)
            seconds = best_s(lambda x=x, calls=calls: [weight(x) for _ in range(calls)]) / calls  # noqa: B023
            speeds.append(f"{rows}: {2 * rows * 576 * 3072 / seconds / 1e9:.0f}")
        print(f"{dtype} {form.__name__} 576 -> 3072, GFLOP/s by rows  {'  '.join(speeds)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--dtype", default="bf16", choices=["bf16", "fp32"])
    parser.add_argument("--sequences", type=int, default=32)
    arguments = parser.parse_args()
    with torch.inference_mode():
        step_ms, parts = shares(arguments.model, arguments.dtype, arguments.sequences)
        print(f"step {step_ms:.1f} ms (profiler on)")
        for part, share in parts.items():
            print(f"  {part} {share:.1%}")
        print_products()


if __name__ == "__main__":
    main()
