"""One step on the model: lay out, run, choose tokens, check drafts, score the prompt.

Owns: the order of these, and which item gets what. Refuses to know: why these sequences, what happens to the
tokens. Invariants: one list of tokens an item, in order; what goes wrong with one item's logits or structure
fails that item alone.

Drafts: at each place the target's own token is chosen, by its own seeded noise, and the next place counts
only while that token equals the draft. So drafts cannot change an answer, whoever proposed them.

Usage: `runner = ModelRunner(decoder, attention, prepare, eos_token_ids=eos, structures=s)`, then `execute`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from firstdiff.engine.attention import AttentionBackend
from firstdiff.engine.batch import Batch, num_sampled_rows, prompt_targets
from firstdiff.engine.logits import Place
from firstdiff.engine.model import Decoder
from firstdiff.engine.sampler import Choice, choose, raw_logprobs, report
from firstdiff.engine.sequence import (
    RunnerOutput,
    SampledToken,
    ScheduledBatch,
    ScheduledSequence,
    Sequence,
)

Prepare = Callable[[ScheduledBatch], Batch]

PROMPT_ROWS = 32
"""Prompt positions scored at a time: 6 MB of logits for a vocabulary of 49,152, 33 MB for 262,144."""

ITEM_FAULTS = (ValueError, FloatingPointError)
"""What choosing a token raises when it is about that item, not about the engine."""


class Structures(Protocol):
    """Which tokens [V] may follow `output` in a sequence; None where any may. ValueError when none."""

    def allowed(self, sequence: Sequence, output: list[int]) -> NDArray[np.bool_] | None: ...


class ModelRunner:
    """Runs scheduled batches through a decoder."""

    def __init__(
        self,
        decoder: Decoder,
        attention: AttentionBackend,
        prepare: Prepare,
        *,
        eos_token_ids: frozenset[int],
        structures: Structures,
    ) -> None:
        self._decoder = decoder
        self._attention = attention
        self._prepare = prepare
        self._eos_token_ids = eos_token_ids
        self._structures = structures

    def execute(self, batch: ScheduledBatch) -> RunnerOutput:
        """Tokens and prompt log-probabilities by item; what cannot go on is in `failures`."""
        failures: dict[int, str] = {}
        with torch.inference_mode():
            hidden = self._decoder.forward(self._prepare(batch), self._attention)
            num_rows = sum(map(num_sampled_rows, batch.items))
            tokens = self._sample(batch.items, self._decoder.logits(hidden[:num_rows]), failures)
            scores = self._score_prompts(batch.items, hidden[num_rows:], failures)
        whole = [[] if index in failures else chosen for index, chosen in enumerate(tokens)]
        return RunnerOutput(whole, scores, failures)

    def _sample(
        self, items: list[ScheduledSequence], logits: torch.Tensor, failures: dict[int, str]
    ) -> list[list[SampledToken]]:
        """The tokens of each item by `logits` [S, V], whose rows follow one another as `num_sampled_rows`."""
        values: NDArray[np.float32] = logits.numpy()
        best_ids: list[int] = values.argmax(-1).tolist() if len(values) else []
        rows: list[int] = []
        places: list[Place] = []
        choices: list[Choice] = []
        num_tokens: list[int] = []
        row = 0
        for index, item in enumerate(items):
            chain: list[tuple[Place, Choice]] = []
            try:
                chain += self._chain(item, values, best_ids, row) if item.samples else ()
            except ITEM_FAULTS as error:
                failures[index] = _reason(error)
                chain.clear()
            for offset, (place, choice) in enumerate(chain):
                rows.append(row + offset)
                places.append(place)
                choices.append(choice)
            num_tokens.append(len(chain))
            row += num_sampled_rows(item)
        reported = iter(report(logits, places, choices, rows))
        return [[next(reported) for _ in range(count)] for count in num_tokens]

    def _chain(
        self, item: ScheduledSequence, values: NDArray[np.float32], best_ids: list[int], row: int
    ) -> Iterator[tuple[Place, Choice]]:
        """The item's next token, and one more for each draft that the one before it equals."""
        sequence, token_ids = item.sequence, item.sequence.token_ids
        drafts = sequence.draft_token_ids[: item.num_draft_tokens]
        for offset in range(len(drafts) + 1):
            place = Place(sequence.sampling, token_ids, sequence.num_prompt_tokens)
            allowed = None
            if sequence.sampling.structure is not None:
                allowed = self._structures.allowed(sequence, token_ids[sequence.num_prompt_tokens :])
            choice = choose(
                values[row + offset],
                place,
                best_ids[row + offset],
                allowed=allowed,
                end_token_ids=self._eos_token_ids,
            )
            yield place, choice
            if offset == len(drafts) or choice.token_id != drafts[offset]:
                return
            token_ids = [*token_ids, choice.token_id]

    def _score_prompts(
        self, items: list[ScheduledSequence], hidden: torch.Tensor, failures: dict[int, str]
    ) -> dict[int, list[SampledToken]]:
        """Prompt log-probabilities by item; `hidden` [R, E] has a row for each of all their targets."""
        scores: dict[int, list[SampledToken]] = {}
        row = 0
        for index, item in enumerate(items):
            targets = prompt_targets(item)
            first_row, row = row, row + len(targets)
            if not targets or index in failures:
                continue
            try:
                scores[index] = self._score(item.sequence, targets, hidden[first_row:row])
            except ITEM_FAULTS as error:
                failures[index] = _reason(error)
        return scores

    def _score(self, sequence: Sequence, targets: range, hidden: torch.Tensor) -> list[SampledToken]:
        count = sequence.sampling.prompt_logprobs
        assert count is not None
        scored: list[SampledToken] = []
        for first in range(0, len(targets), PROMPT_ROWS):
            part = targets[first : first + PROMPT_ROWS]
            logits = self._decoder.logits(hidden[first : first + PROMPT_ROWS])
            ids = sequence.prompt_token_ids[part.start : part.stop]
            scored += raw_logprobs(logits, ids, [count] * len(ids))
        return scored


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
