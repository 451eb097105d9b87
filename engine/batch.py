"""The tensors of one step: ragged rows, no padding between sequences.

Owns: turning scheduled sequences into ids, positions, slots and block tables. Refuses to know: layers,
sampling, why these sequences were chosen. Invariants: rows are in schedule order, decodes first, then the
prefill chunks one after another; `slot = block * block_size + offset` is where a row's KV is written;
every block table covers the whole context of its sequence, the new tokens included; the rows whose logits
are wanted come in two runs, each in schedule order: those that tokens are chosen by, then those that score
prompt tokens.

Usage: `batch = build_batch(scheduled, block_size=16)`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from firstdiff.engine.sequence import ScheduledBatch, ScheduledSequence


@dataclass(frozen=True, slots=True)
class PrefillSpan:
    """Rows `row .. row + num_rows` of the batch continue a context of `start` computed tokens."""

    row: int
    num_rows: int
    start: int
    block_table: torch.Tensor  # [ceil((start + num_rows) / block_size)] int64


@dataclass(frozen=True, slots=True)
class Batch:
    """N rows: B decode rows, then the rows of the spans, prefills or drafts; S rows have their logits taken.

    `sampled_rows` has `num_sampled_rows` rows for each item, then a row for each of its `prompt_targets`.
    """

    input_ids: torch.Tensor  # [N] int64
    positions: torch.Tensor  # [N] int64
    slot_mapping: torch.Tensor  # [N] int64
    sampled_rows: torch.Tensor  # [S] int64
    context_lens: list[int]  # [B] tokens each decode row attends to, itself included
    block_tables: list[list[int]]  # [B] blocks of each decode row
    prefills: list[PrefillSpan]

    @property
    def num_decodes(self) -> int:
        return len(self.context_lens)


def build_batch(scheduled: ScheduledBatch, *, block_size: int) -> Batch:
    """Lay out one step; decodes are the leading items that compute one token and sample."""
    input_ids: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    sampled_rows: list[int] = []
    scoring_rows: list[int] = []
    context_lens: list[int] = []
    block_tables: list[list[int]] = []
    prefills: list[PrefillSpan] = []
    for item in scheduled.items:
        table, start, row = item.sequence.block_table, item.start, len(input_ids)
        end = start + item.num_scheduled_tokens
        num_blocks = -(-end // block_size)
        input_ids.extend(item.sequence.token_ids[start:end])
        if item.num_draft_tokens:
            input_ids.extend(item.sequence.draft_token_ids[: item.num_draft_tokens])
        positions.extend(range(start, end))
        slots.extend(table[p // block_size] * block_size + p % block_size for p in range(start, end))
        if is_decode(item) and not prefills:
            context_lens.append(end)
            block_tables.append(table[:num_blocks])
        else:
            prefills.append(PrefillSpan(row, end - start, start, torch.tensor(table[:num_blocks])))
        assert len(input_ids) == row + end - start
        sampled_rows.extend(range(len(input_ids) - num_sampled_rows(item), len(input_ids)))
        scoring_rows.extend(row + target - 1 - start for target in prompt_targets(item))
    return Batch(
        input_ids=torch.tensor(input_ids),
        positions=torch.tensor(positions),
        slot_mapping=torch.tensor(slots),
        sampled_rows=torch.tensor(sampled_rows + scoring_rows, dtype=torch.int64),
        context_lens=context_lens,
        block_tables=block_tables,
        prefills=prefills,
    )


def is_decode(item: ScheduledSequence) -> bool:
    """One token that continues a context and is sampled from."""
    return item.num_scheduled_tokens == 1 and item.samples and item.start > 0


def num_sampled_rows(item: ScheduledSequence) -> int:
    """How many places of the item a token may be chosen at: one, and one more after each draft."""
    return item.num_draft_tokens + 1 if item.samples else 0


def prompt_targets(item: ScheduledSequence) -> range:
    """Indexes of the prompt tokens whose log-probabilities this item brings.

    The logits after token p - 1 score token p. What has been given out before is left out.
    """
    sequence = item.sequence
    if sequence.sampling.prompt_logprobs is None:
        return range(0)
    end = min(item.start + item.num_scheduled_tokens + 1, sequence.num_prompt_tokens)
    targets = range(sequence.num_prompt_logprobs, end)
    # A gap here would shift every later entry by as much.
    assert not targets or item.start < targets.start
    return targets
