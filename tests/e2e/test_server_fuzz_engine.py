"""The real engine under random requests, many at a time: what answers must be, and that nothing is left.

A failure names its volley's seed, and `FIRSTDIFF_FUZZ_SEED` asks for that one volley.
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from random import SystemRandom
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from fuzz_bodies import CHAT, COMPLETIONS, SCORE
from fuzz_volleys import Range, shooting_range, volley
from fuzz_wire import Held, check_nothing_left, resident_bytes
from scripted_server import MODEL

from firstdiff.engine import sampler
from firstdiff.engine.block_pool import BlockPool
from firstdiff.engine.scheduler import Scheduler
from firstdiff.engine.sequence import SampledToken, Sequence
from firstdiff.engine.stop_strings import StopMatcher
from firstdiff.engine.structure import Structures
from firstdiff.engine.tokenizer import IncrementalDetokenizer

NUM_FIXED = 16
NUM_FRESH = max(5, int(os.environ.get("FIRSTDIFF_FUZZ_REQUESTS", "0")) // 500)
"""Volleys of seeds that are always the same, and of new ones: more where more fuzzing is asked for."""
MEMORY_GROWTH_MAX_BYTES = 8 << 20


def fuzz(place: Range, seeds: Iterable[int], *, patience_s: float = 20) -> None:
    before = Held.by(place.server)
    for seed in seeds:
        volley(place, seed)
    check_nothing_left(place.server, place.engine, before, patience_s=patience_s)


def summary(seen: Counter[tuple[str, str]]) -> str:
    columns = sorted({what for _, what in seen})
    lines = [" " * 28 + "".join(f"{what:>11}" for what in columns)]
    for row in sorted({row for row, _ in seen}):
        lines.append(f"{row:28}" + "".join(f"{seen[row, what]:11}" for what in columns))
    return "\n".join(lines)


def test_answers_of_the_real_engine(tmp_path: Path) -> None:
    wanted = os.environ.get("FIRSTDIFF_FUZZ_SEED")
    fresh = [SystemRandom().getrandbits(32) for _ in range(NUM_FRESH)]
    with shooting_range(tmp_path) as place:
        fuzz(place, [int(wanted)] if wanted else [*range(NUM_FIXED), *fresh])
        sizes = []
        for _ in range(3):
            fuzz(place, range(2))
            sizes.append(resident_bytes())
        assert sizes[-1] - sizes[0] < MEMORY_GROWTH_MAX_BYTES, f"memory grew: {sizes}"
        exposed = place.server.request("GET", "/metrics")[2].decode().splitlines()
    counted = {
        name: float(value) for name, value in (line.rsplit(" ", 1) for line in exposed if line[0] != "#")
    }
    label = f'{{engine="0",model_name="{MODEL}"}}'
    num_hits = counted[f"firstdiff_prefix_cache_hits_total{label}"]
    print(f"\n{summary(place.seen)}")
    print(
        f"preemptions {counted[f'firstdiff_num_preemptions_total{label}']:.0f}, cached tokens {num_hits:.0f}"
    )
    # The volleys are worth something only when they get to the engine.
    for path in (COMPLETIONS, CHAT, SCORE):
        assert place.seen[f"{path} read", "200"] > NUM_FIXED, summary(place.seen)
        assert place.seen[f"{path} bad", "400"] > 0, summary(place.seen)
    for path in (COMPLETIONS, CHAT):
        assert min(place.seen[f"{path} read", reason] for reason in ("length", "stop")) > NUM_FIXED
    assert place.seen["what was said", "scored"] > NUM_FIXED
    assert num_hits > 0


def test_a_structure_that_only_the_model_can_refuse_is_the_client_s_fault(tmp_path: Path) -> None:
    body = {"model": MODEL, "prompt": "a", "guided_grammar": 'start: <|system|> "x"'}
    with shooting_range(tmp_path) as place:
        status, error = place.server.refusal(COMPLETIONS, body)
        assert (status, error["code"]) == (400, "structure_failed")
        assert "unknown special token" in (error["message"] or "")


def _lists_the_least_likely_first(
    token_id: int, value: float, entries: list[tuple[int, float]]
) -> SampledToken:
    return SampledToken(token_id, value, [*entries, (token_id, value)][::-1])


def _never_stops(_: Scheduler, sequence: Sequence, token_id: int) -> str | None:
    return "length" if sequence.num_output_tokens >= sequence.sampling.max_tokens else None


def _leaks_a_block(pool: BlockPool, blocks: list[int]) -> None:
    # One, once, when all are given back: more of them would stop the engine before anybody counts.
    RELEASE(pool, blocks[1:] if pool.num_used_blocks == len(blocks) else blocks)


RELEASE = BlockPool.release


@pytest.mark.parametrize(
    ("owner", "name", "defect", "found_by"),
    [
        (None, "kv-block-off-by-one", None, "again"),
        (None, "decode-position-plus-one", None, "again"),
        (StopMatcher, "push", lambda _, delta: (delta, None), "check_text"),
        (IncrementalDetokenizer, "finish", lambda _: "", "check_text"),
        (Structures, "allowed", lambda *_: None, "check_structure"),
        (sampler, "_with_own", _lists_the_least_likely_first, "check_logprobs"),
        (Scheduler, "_finish_reason", _never_stops, "check_tokens"),
        (BlockPool, "release", _leaks_a_block, "check_nothing_left"),
    ],
)
def test_the_volleys_find(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, owner: Any, name: str, defect: Any, found_by: str
) -> None:
    if owner is not None:
        monkeypatch.setattr(owner, name, defect)
    with shooting_range(tmp_path, faults=() if owner else (name,)) as place:
        with pytest.raises((AssertionError, ValueError)) as caught:
            fuzz(place, range(NUM_FIXED), patience_s=1)
        assert found_by in {entry.name for entry in caught.traceback}
