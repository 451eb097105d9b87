"""Where a decode step spends its time, and how fast the weights' products are on this machine.

Profiles decode steps of the real engine and times one product at several batch sizes,
in both dtypes; one thread, so that shares add up.

Usage: `python tests/bench/profile_step.py --sequences 32`.
"""

from __future__ import annotations

import argparse
import ctypes
import itertools
import random
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch

from firstdiff.engine import build, kernels_attention, kernels_tape
from firstdiff.engine.attention_kernel import KernelAttention
from firstdiff.engine.build import build_engine
from firstdiff.engine.config import EngineConfig
from firstdiff.engine.engine import EngineRequest, LLMEngine
from firstdiff.engine.linear import Linear
from firstdiff.engine.linear_kernel import KernelLinear
from firstdiff.engine.runner import ModelRunner
from firstdiff.engine.scheduler import Scheduler
from firstdiff.tracing.clock import SystemClock
from firstdiff.tracing.records import Sampling

KERNELS = {
    kernels_tape.WIDEN: "products",
    kernels_tape.PRODUCT: "products",
    kernels_tape.ADD_NORM: "norms, rotations, gates",
    kernels_tape.GATE: "norms, rotations, gates",
    kernels_tape.TURN: "norms, rotations, gates",
}
"""The instructions of a tape by what they are for."""
CALLS: tuple[tuple[object, str, str], ...] = (
    (kernels_attention, "forward", "attention"),
    (ModelRunner, "_sample", "sampling"),
    (build, "build_batch", "batch building"),
    (KernelAttention, "plan", "batch building"),
    (Scheduler, "schedule", "scheduling"),
    (Scheduler, "commit", "scheduling"),
)
"""Where further parts of a step are: owner, name, part."""
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


@contextmanager
def timed_parts() -> Iterator[dict[str, float]]:
    """The seconds spent in each part by an engine of one thread that is built and run in here."""
    spent = dict.fromkeys([*KERNELS.values(), *(part for _, _, part in CALLS)], 0.0)

    def timed(part: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(*arguments: Any, **named: Any) -> Any:
            started = time.perf_counter()
            result = call(*arguments, **named)
            spent[part] += time.perf_counter() - started
            return result

        return wrapper

    run = kernels_tape.run

    def run_one_by_one(threads: int, tape: int, num_instructions: int, num_rows: int, eps: float) -> None:
        words = (ctypes.c_int64 * (num_instructions * kernels_tape.WORDS)).from_address(tape)
        for index in range(num_instructions):
            address = tape + index * kernels_tape.WORDS * kernels_tape.WORD_BYTES
            part = KERNELS[words[index * kernels_tape.WORDS]]
            started = time.perf_counter()
            run(threads, address, 1, num_rows, eps)
            spent[part] += time.perf_counter() - started

    with ExitStack() as patches:
        patches.enter_context(patch.object(kernels_tape, "run", run_one_by_one))
        for owner, name, part in CALLS:
            patches.enter_context(patch.object(owner, name, timed(part, getattr(owner, name))))
        yield spent


def shares(model: str, dtype: str, num_sequences: int) -> tuple[float, dict[str, float]]:
    """Milliseconds of a decode step of one thread, and each part's share of it.

    Kernels are timed one by one, as a step does not run them; what no part has is Python between them.
    """
    with timed_parts() as spent:
        engine = decoding_engine(model, dtype, num_sequences)
        for part in spent:
            spent[part] = 0.0
        started = time.perf_counter()
        for _ in range(STEPS):
            engine.step()
        total = time.perf_counter() - started
        parts = {part: seconds / total for part, seconds in spent.items()}
    plain = decoding_engine(model, dtype, num_sequences)
    started = time.perf_counter()
    for _ in range(STEPS):
        plain.step()
    step_ms = (time.perf_counter() - started) / STEPS * 1000
    return step_ms, parts | {"Python between them": 1 - sum(parts.values())}


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
        print(f"step {step_ms:.1f} ms")
        for part, share in parts.items():
            print(f"  {part} {share:.1%}")
        print_products()


if __name__ == "__main__":
    main()
