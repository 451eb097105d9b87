"""One step on the model: lay out, run, sample.

Owns: the order of the three. Refuses to know: why these sequences, what happens to the tokens.
Invariants: one list of tokens an item, in order, empty where the item does not sample.

Usage: `runner = ModelRunner(decoder, attention, prepare); output = runner.execute(batch)`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from firstdiff.engine.attention import AttentionBackend
from firstdiff.engine.batch import Batch
from firstdiff.engine.model import Decoder
from firstdiff.engine.sampler import sample
from firstdiff.engine.sequence import RunnerOutput, ScheduledBatch

Prepare = Callable[[ScheduledBatch], Batch]


class ModelRunner:
    """Runs scheduled batches through a decoder."""

    def __init__(self, decoder: Decoder, attention: AttentionBackend, prepare: Prepare) -> None:
        self._decoder = decoder
        self._attention = attention
        self._prepare = prepare

    def execute(self, batch: ScheduledBatch) -> RunnerOutput:
        """Sampled tokens by item; FloatingPointError when the model gave NaN."""
        with torch.inference_mode():
            hidden = self._decoder.forward(self._prepare(batch), self._attention)
            logits = self._decoder.logits(hidden)
            sampled = iter(
                sample(
                    logits,
                    [
                        (item.sequence.sampling, item.start + item.num_scheduled_tokens)
                        for item in batch.items
                        if item.samples
                    ],
                )
            )
        return RunnerOutput([[next(sampled)] if item.samples else [] for item in batch.items])
