"""The engine's state for one request, and what passes between scheduler and runner.

Owns: Sequence, ScheduledBatch, SampledToken, RunnerOutput. Refuses to know: torch, text, HTTP, the clock.
Invariants: `token_ids` is prompt then output and only grows; KV exists for exactly the first
`num_computed_tokens` tokens; `block_table[i]` holds tokens `i*block_size .. (i+1)*block_size`;
`draft_token_ids` may be set by the owner of the engine between two steps, of running sequences.

Usage: `sequence = Sequence(request_id="r1", prompt_token_ids=[1, 2], sampling=params, arrived_ns=0)`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec
from msgspec.structs import replace

from firstdiff.tracing.records import Preemption, PrefillChunk, Sampling


@dataclass(slots=True, weakref_slot=True, eq=False)
class Sequence:
    """One request inside the engine. Identity equality: two equal prompts are two sequences."""

    request_id: str
    prompt_token_ids: list[int]
    sampling: Sampling
    arrived_ns: int
    priority: int = 0
    """Under the policy `priority`, lower runs earlier; equal ones in the order of their arrival."""
    cache_salt: str | None = None
    """Prefixes are shared only among requests of equal salt."""
    use_prefix_cache: bool = True
    """Whether cached prefixes of others may be taken; its own blocks can be found by others either way."""
    token_ids: list[int] = field(default_factory=list)
    draft_token_ids: list[int] = field(default_factory=list)
    """Proposed next tokens, to be checked by the next step; they are no part of `token_ids`.

    A step cuts them to what it schedules and leaves none, so each proposal is tried once or dropped.
    """
    num_prompt_logprobs: int = 0
    """Prompt tokens whose log-probabilities have been given out, or were not wanted."""
    rank: tuple[int, int] = (0, 0)
    """Priority, then order of arrival: the lowest is admitted first and preempted last."""
    prefix_parent: int | str | None = None
    """While running: what the pool calls the prefix before its next full block, None when its blocks must
    not be found."""
    block_table: list[int] = field(default_factory=list)
    block_hashes: list[bytes] = field(default_factory=list)
    """Chained hashes of the first full blocks of `token_ids`; they outlive a preemption."""
    num_computed_tokens: int = 0
    num_cached_tokens: int = 0
    """Prompt tokens whose KV was taken from the prefix cache at the first admission."""
    preemptions: list[Preemption] = field(default_factory=list)
    first_scheduled_ns: int | None = None
    first_token_ns: int | None = None
    prefill_chunks: list[PrefillChunk] = field(default_factory=list)

    def __post_init__(self) -> None:
        assert self.prompt_token_ids
        if not self.token_ids:
            self.token_ids = list(self.prompt_token_ids)

    def note_computed(self, start: int, end: int, step_index: int, now_ns: int) -> None:
        """Tokens `start .. end` have their KV since `now_ns`."""
        self.num_computed_tokens = end
        num_prompt = len(self.prompt_token_ids)
        if start < num_prompt:
            num_tokens = min(end, num_prompt) - start
            self.prefill_chunks.append(
                PrefillChunk(
                    step_index=step_index, start_token=start, num_tokens=num_tokens, finished_ns=now_ns
                )
            )
        if self.preemptions:
            last = self.preemptions[-1]
            if last.recovered_ns is None and end >= last.num_lost_tokens:
                self.preemptions[-1] = replace(last, recovered_ns=now_ns)

    def note_preempted(self, now_ns: int) -> None:
        """It is about to lose its blocks; who is pushed out again has still to come back to where it was."""
        num_lost = self.num_computed_tokens
        if self.preemptions and self.preemptions[-1].recovered_ns is None:
            num_lost = max(num_lost, self.preemptions[-1].num_lost_tokens)
        self.preemptions.append(Preemption(preempted_ns=now_ns, num_lost_tokens=num_lost))

    def note_scheduled_again(self, now_ns: int) -> None:
        """Admitted after its last preemption; what the cache gave back may be all that it had."""
        last = self.preemptions[-1]
        recovered_ns = now_ns if self.num_computed_tokens >= last.num_lost_tokens else None
        self.preemptions[-1] = replace(last, scheduled_ns=now_ns, recovered_ns=recovered_ns)

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)

    @property
    def num_preemptions(self) -> int:
        return len(self.preemptions)

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - len(self.prompt_token_ids)

    @property
    def output_token_ids(self) -> list[int]:
        return self.token_ids[len(self.prompt_token_ids) :]


class ScheduledSequence(msgspec.Struct, frozen=True):
    """Compute tokens `start .. start + num_scheduled_tokens` of `sequence` in this step.

    Blocks for all of them are already in `sequence.block_table`. `samples` is true when they reach the last
    known token and its logits are wanted, to give the next one. The last `num_draft_tokens` of them are
    `sequence.draft_token_ids`, all of them, beyond its known tokens; each has logits to check the next by.
    """

    sequence: Sequence
    start: int
    num_scheduled_tokens: int
    samples: bool
    num_draft_tokens: int = 0


class ScheduledBatch(msgspec.Struct, frozen=True):
    """The work of one step: decodes, then decodes with drafts, then prefills.

    A decode is one token that continues a context and samples; with drafts it is `1 + num_draft_tokens`
    tokens, and all of them count as decode tokens. Everything else is prefill.
    """

    step_index: int
    items: list[ScheduledSequence]
    num_decode_tokens: int
    num_prefill_tokens: int
    num_preemptions: int


class SampledToken(msgspec.Struct, frozen=True):
    """The next token of one sequence. Log-probabilities (natural log) only where the request asked.

    They are of the distribution that the request's `logprobs_mode` names. `top_logprobs` is sorted by falling
    log-probability and holds the token itself as an extra last entry only when it is not among the top.
    """

    token_id: int
    logprob: float | None = None
    top_logprobs: list[tuple[int, float]] = []


class RunnerOutput(msgspec.Struct, frozen=True):
    """What a step computed: `tokens` has one list an item, in order.

    The list is empty where the item does not sample; else it holds one token, and one more for each draft
    that was accepted before it. `prompt_logprobs` has, by index of the item, the entries of the prompt tokens
    from the sequence's `num_prompt_logprobs` on that this step brought, none missing. `failures` says, by
    index of the item, why a sequence cannot go on: it has no tokens and no prompt log-probabilities, while
    the rest of the step is whole.
    """

    tokens: list[list[SampledToken]]
    prompt_logprobs: dict[int, list[SampledToken]] = {}
    failures: dict[int, str] = {}
