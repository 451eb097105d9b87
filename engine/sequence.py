"""The engine's state for one request, and what passes between scheduler and runner.

Owns: Sequence, ScheduledBatch, SampledToken, RunnerOutput. Refuses to know: torch, text, HTTP, the clock.
Invariants: `token_ids` is prompt then output and only grows; KV exists for exactly the first
`num_computed_tokens` tokens; `block_table[i]` holds tokens `i*block_size .. (i+1)*block_size`.

Usage: `sequence = Sequence(request_id="r1", prompt_token_ids=[1, 2], sampling=params, arrived_ns=0)`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from firstdiff.tracing.records import PrefillChunk, Sampling


@dataclass(slots=True, eq=False)
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
    """Proposed next tokens, to be checked by the next step; they are no part of `token_ids`."""
    num_prompt_logprobs: int = 0
    """Prompt tokens whose log-probabilities have been given out, or were not wanted."""
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


@dataclass(frozen=True, slots=True)
class ScheduledSequence:
    """Compute tokens `start .. start + num_scheduled_tokens` of `sequence` in this step.

    Blocks for all of them are already in `sequence.block_table`. `samples` is true when they reach the last
    known token, so its logits give the next one. The last `num_draft_tokens` of them are the sequence's
    drafts, beyond its known tokens; each has logits to check the next by.
    """

    sequence: Sequence
    start: int
    num_scheduled_tokens: int
    samples: bool
    num_draft_tokens: int = 0


@dataclass(frozen=True, slots=True)
class ScheduledBatch:
    """The work of one step, decodes (one token, samples, start > 0) before prefills."""

    step_index: int
    items: list[ScheduledSequence]
    num_decode_tokens: int
    num_prefill_tokens: int
    num_preemptions: int


@dataclass(frozen=True, slots=True)
class SampledToken:
    """The next token of one sequence. Log-probabilities (natural log) only where the request asked.

    They are of the distribution that the request's `logprobs_mode` names. `top_logprobs` is sorted by falling
    log-probability and holds the token itself as an extra last entry only when it is not among the top.
    """

    token_id: int
    logprob: float | None = None
    top_logprobs: list[tuple[int, float]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class RunnerOutput:
    """What a step computed: `tokens` has one list an item, in order.

    The list is empty where the item does not sample; else it holds one token, and one more for each draft
    that was accepted before it. `prompt_logprobs` has, by index of the item, the entries of the prompt tokens
    from the sequence's `num_prompt_logprobs` on that this step brought, none missing.
    """

    tokens: list[list[SampledToken]]
    prompt_logprobs: dict[int, list[SampledToken]] = field(default_factory=dict)
