"""How the token budget of one step is shared out.

Owns: what each running sequence may compute in a step, and the step's items as they are placed. Refuses to
know: blocks other than how many are missing, the queue, who is pushed out. Invariants: each running sequence
gets at least one token; drafts ride only on decodes, get what is over after that, and never more than could
still be kept; a step's items never exceed its budget.

Usage: `step = Step(budget); for share in running_shares(running, budget, size): step.place(...)`.
"""

from __future__ import annotations

import msgspec

from firstdiff.engine.sequence import ScheduledSequence, Sequence


class Share(msgspec.Struct, frozen=True):
    """`num_tokens` known tokens of `sequence` and up to `num_drafts` drafts after them.

    `num_new_blocks` are missing for the known tokens, drafts not counted.
    """

    sequence: Sequence
    num_tokens: int
    num_drafts: int
    num_new_blocks: int


class Step:
    """The items of a step under construction, and the budget that is left."""

    __slots__ = ("budget", "decodes", "prefills", "verifications")

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.decodes: list[ScheduledSequence] = []
        self.verifications: list[ScheduledSequence] = []
        self.prefills: list[ScheduledSequence] = []

    def place(self, sequence: Sequence, num_tokens: int, num_drafts: int) -> None:
        """Schedule the next `num_tokens` known tokens of `sequence` and `num_drafts` of its drafts.

        The other drafts are dropped.
        """
        start = sequence.num_computed_tokens
        samples = start + num_tokens == len(sequence.token_ids) and sequence.sampling.max_tokens > 0
        if sequence.draft_token_ids:
            del sequence.draft_token_ids[num_drafts:]
        item = ScheduledSequence(sequence, start, num_tokens + num_drafts, samples, num_drafts)
        if num_drafts:
            self.verifications.append(item)
        elif samples and num_tokens == 1 and start:
            self.decodes.append(item)
        else:
            self.prefills.append(item)
        self.budget -= num_tokens + num_drafts


def running_shares(running: list[Sequence], budget: int, block_size: int) -> list[Share]:
    """What each of `running`, in order, gets of `budget`, which is at least one token each.

    Only the last may have more than one known token to compute.
    """
    shares: list[Share] = []
    num_after = len(running)
    for sequence in running:
        num_after -= 1
        start = sequence.num_computed_tokens
        num_tokens = len(sequence.token_ids) - start
        if num_tokens > budget - num_after:
            num_tokens = budget - num_after
        assert num_tokens > 0
        num_drafts = 0
        if sequence.draft_token_ids:
            num_drafts = _num_drafts(sequence, num_tokens, budget - num_after - num_tokens)
        budget -= num_tokens + num_drafts
        num_new = -(-(start + num_tokens) // block_size) - len(sequence.block_table)
        shares.append(Share(sequence, num_tokens, num_drafts, num_new))
    return shares


def _num_drafts(sequence: Sequence, num_tokens: int, budget: int) -> int:
    """How many drafts may ride on a decode; none on anything else.

    Each may be accepted, and one token follows the last, so `max_tokens`, and with it the context's length,
    holds even then.
    """
    if num_tokens != 1 or sequence.num_computed_tokens + 1 != sequence.num_tokens:
        return 0
    num_open = sequence.sampling.max_tokens - sequence.num_output_tokens - 1
    return max(0, min(len(sequence.draft_token_ids), num_open, budget))
