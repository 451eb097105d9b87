"""Runs prompts through a whole engine, in this process, and gives back what it emitted."""

from __future__ import annotations

from collections import defaultdict

import msgspec

from firstdiff.engine.build import build_engine
from firstdiff.engine.config import EngineConfig
from firstdiff.engine.engine import EngineRequest, LLMEngine
from firstdiff.tracing.clock import SystemClock
from firstdiff.tracing.records import EngineRequestRow, Row, Sampling, TokenRow

STEPS_MAX = 20_000


class EngineUnderTest:
    """An engine and the rows it has emitted."""

    def __init__(self, **settings) -> None:
        self.rows: list[Row] = []
        self.config = EngineConfig(**settings)
        self.engine: LLMEngine
        self.engine, self.identity = build_engine(self.config, emit=self.rows.append, clock=SystemClock())

    def generate(self, prompts: list[list[int]], sampling: Sampling | list[Sampling]) -> list[list[TokenRow]]:
        """The token rows of each prompt, all submitted at once."""
        self.rows.clear()
        each = sampling if isinstance(sampling, list) else [sampling] * len(prompts)
        for index, (prompt, own) in enumerate(zip(prompts, each, strict=True)):
            self.engine.add(EngineRequest(request_id=f"r{index}", prompt_token_ids=prompt, sampling=own))
        for _ in range(STEPS_MAX):
            if not self.engine.has_work:
                break
            self.engine.step()
        assert not self.engine.has_work
        by_request: dict[str, list[TokenRow]] = defaultdict(list)
        for row in self.rows:
            if isinstance(row, TokenRow):
                by_request[row.request_id].append(row)
        return [by_request[f"r{index}"] for index in range(len(prompts))]

    @property
    def finished(self) -> list[EngineRequestRow]:
        rows = [row for row in self.rows if isinstance(row, EngineRequestRow)]
        return sorted(rows, key=lambda row: int(row.request_id[1:]))


def ids_of(outputs: list[list[TokenRow]]) -> list[list[int]]:
    return [[row.token_id for row in rows] for rows in outputs]


def greedy(max_tokens: int, **changes) -> Sampling:
    return msgspec.structs.replace(
        Sampling(temperature=0.0, top_k=0, top_p=1.0, seed=0, max_tokens=max_tokens), **changes
    )
