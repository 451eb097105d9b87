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

from firstdiff.tracing.records import PrefillChunk, Sampling


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
    num_preemptions: int = 0
    first_scheduled_ns: int | None = None
    first_token_ns: int | None = None
    prefill_chunks: list[PrefillChunk] = field(default_factory=list)

    def __post_init__(self) -> None:
        assert self.prompt_token_ids
        if not self.token_ids:
            self.token_ids = list(self.prompt_token_ids)

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)

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
