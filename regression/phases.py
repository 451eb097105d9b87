"""Where in the request the time went: the server's phases, paired, and which of them got slower.

Owns: joining token-log rows to pairs and the choice of the phase to blame. Refuses to know: client
latencies, whether the Verdict fails. Invariants: phases come from `phase_durations_ns`, the one definition;
decode is compared per output token, so answers of different length compare; without both logs there is
nothing to say, and nothing is said.

Usage: `evidence = compare_phases(base, candidate, keys, blocks, config)`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import median

from firstdiff.regression.stats import block_estimate
from firstdiff.regression.summary import Key, RunView
from firstdiff.regression.verdict import CompareConfig, Interval, PhaseEvidence
from firstdiff.tracing.names import PHASES
from firstdiff.tracing.records import TokenLogRow
from firstdiff.tracing.token_log import phase_durations_ns

_RANGE_TAIL = 0.05
_MIN_SHARE = 0.02
"""A phase that adds less than this share of the request is no explanation."""


def compare_phases(
    base: RunView,
    candidate: RunView,
    keys: Sequence[Key],
    blocks: Mapping[Key, object],
    config: CompareConfig,
) -> list[PhaseEvidence]:
    """Evidence for each phase, in the order of PHASES; empty when no pair is in both token logs."""
    pairs: list[tuple[Key, TokenLogRow, TokenLogRow]] = []
    for key in keys:
        one = base.logs.get(base.rows[key].request_id)
        other = candidate.logs.get(candidate.rows[key].request_id)
        if one is not None and other is not None and _is_sound(one) and _is_sound(other):
            pairs.append((key, one, other))
    if not pairs:
        return []
    durations = [(phase_durations_ns(one), phase_durations_ns(other)) for _, one, other in pairs]
    evidence = []
    for name in PHASES:
        ratios, of_block = [], []
        for (key, one, other), (mine, theirs) in zip(pairs, durations, strict=True):
            units = (max(1, one.num_output_tokens - 1), max(1, other.num_output_tokens - 1))
            first, second = float(mine[name]), float(theirs[name])
            if name == "decode":
                first, second = first / units[0], second / units[1]
            if first > 0 and second > 0:
                ratios.append(math.log(second / first))
                of_block.append(str(blocks[key]))
        estimate = block_estimate(
            ratios,
            of_block,
            min_values=config.min_pairs,
            min_blocks=config.min_blocks,
        )
        low, high = estimate.bound(_RANGE_TAIL) if estimate is not None else (0.0, 0.0)
        evidence.append(
            PhaseEvidence(
                name=name,
                base_ns=_tidy(median(mine[name] for mine, _ in durations)),
                candidate_ns=_tidy(median(theirs[name] for _, theirs in durations)),
                added_ns=_tidy(_added_ns(name, pairs, durations)),
                change=None if estimate is None else _tidy(math.expm1(estimate.value)),
                interval=None
                if estimate is None
                else Interval(_tidy(math.expm1(low)), _tidy(math.expm1(high))),
                num_pairs=len(pairs),
            )
        )
    return evidence


def _is_sound(log: TokenLogRow) -> bool:
    # Two clocks mixed up in one log: no durations can be had from it.
    return log.flushed_ns >= log.received_ns


def _added_ns(
    name: str,
    pairs: Sequence[tuple[Key, TokenLogRow, TokenLogRow]],
    durations: Sequence[tuple[dict[str, int], dict[str, int]]],
) -> float:
    """Median of what the phase adds to a request, decode at base's length."""
    added = []
    for (_, one, other), (mine, theirs) in zip(pairs, durations, strict=True):
        scale = 1.0
        if name == "decode":
            scale = max(1, one.num_output_tokens - 1) / max(1, other.num_output_tokens - 1)
        added.append(theirs[name] * scale - mine[name])
    return median(added)


def slower_phase(phases: Sequence[PhaseEvidence]) -> PhaseEvidence | None:
    """The phase that adds most among those that are certainly slower; None when none is."""
    total_ns = sum(phase.base_ns for phase in phases)
    slower = [
        phase
        for phase in phases
        if phase.interval is not None and phase.interval.low > 0 and phase.added_ns > _MIN_SHARE * total_ns
    ]
    return max(slower, key=lambda phase: phase.added_ns, default=None)


def _tidy(value: float) -> float:
    return float(f"{value:.6g}")
