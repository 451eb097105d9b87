"""Known defects, planted on purpose, to prove that the detectors find them.

Owns: what each fault does and the wrapping. Refuses to know: who looks for it. Invariants: an engine
without `--fault` contains none of this code on its step path; each fault is a wrapper round a healthy
part; importing this module needs no torch.

Usage: `prepare = wrap_prepare(prepare, faults, num_blocks=n); runner = wrap_runner(runner, faults, clock)`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

from firstdiff.engine.sequence import RunnerOutput, ScheduledBatch
from firstdiff.tracing.clock import Clock

if TYPE_CHECKING:
    from firstdiff.engine.batch import Batch

    Prepare = Callable[[ScheduledBatch], Batch]

FAULTS: dict[str, str] = {
    "kv-block-off-by-one": "decode reads the sequence's first KV block one block off",
    "decode-position-plus-one": "decode rotates queries and keys at position + 1",
    "slow-decode": "each decode-only step takes 25 % longer",
}

SLOW_DECODE_FRACTION = 0.25


class Runner(Protocol):
    """What `wrap_runner` wraps: engine.Runner, restated to keep this module below the engine."""

    def execute(self, batch: ScheduledBatch) -> RunnerOutput: ...


def check_faults(names: Iterable[str]) -> None:
    """ValueError when a name is not a fault."""
    for name in names:
        if name not in FAULTS:
            raise ValueError(f"expected a fault out of {', '.join(sorted(FAULTS))}, got {name!r}")


def wrap_prepare(prepare: Prepare, names: Iterable[str], *, num_blocks: int) -> Prepare:
    """`prepare` with the faults of `names` that change a batch's tensors."""
    wrapped = prepare
    for name in names:
        if name == "kv-block-off-by-one":
            wrapped = _reading_one_block_off(wrapped, num_blocks)
        elif name == "decode-position-plus-one":
            wrapped = _decoding_one_position_late(wrapped)
    return wrapped


def wrap_runner(runner: Runner, names: Iterable[str], clock: Clock) -> Runner:
    """`runner` with the faults of `names` that change a step's time."""
    return SlowDecode(runner, clock) if "slow-decode" in names else runner


def _reading_one_block_off(prepare: Prepare, num_blocks: int) -> Prepare:
    def prepare_one_off(scheduled: ScheduledBatch) -> Batch:
        # Only what is read moves: slot_mapping, where new KV is written, stays right.
        batch = prepare(scheduled)
        tables = [[(table[0] + 1) % num_blocks, *table[1:]] for table in batch.block_tables]
        return replace(batch, block_tables=tables)

    return prepare_one_off


def _decoding_one_position_late(prepare: Prepare) -> Prepare:
    def prepare_late(scheduled: ScheduledBatch) -> Batch:
        batch = prepare(scheduled)
        positions = batch.positions.clone()
        positions[: batch.num_decodes] += 1
        return replace(batch, positions=positions)

    return prepare_late


class SlowDecode:
    """Waits after each decode-only step for a share of the time the step took."""

    def __init__(self, runner: Runner, clock: Clock) -> None:
        self._runner = runner
        self._clock = clock

    def execute(self, batch: ScheduledBatch) -> RunnerOutput:
        started_ns = self._clock.now_ns()
        output = self._runner.execute(batch)
        if batch.num_prefill_tokens == 0:
            spent_ns = self._clock.now_ns() - started_ns
            threading.Event().wait(spent_ns * SLOW_DECODE_FRACTION / 1e9)
        return output
