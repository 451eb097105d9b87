"""What a seed decides before the first tick: a swarm, in which most lives are extreme in some way."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from random import Random
from typing import Literal

from firstdiff.engine import block_pool

HashKind = Literal["healthy", "few", "no parent", "no tokens"]
"""What block hashes depend on: all that they should, or less, so that many collide."""


@dataclass(frozen=True, slots=True)
class Swarm:
    """All that a seed decides before the first tick; fractions are per tick or per request."""

    block_size: int
    num_blocks: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_num_waiting: int
    max_model_len: int
    enable_prefix_caching: bool
    hash_kind: HashKind
    num_priorities: int
    vocab_size: int
    eos_token_ids: frozenset[int]
    num_ticks: int
    arrival_fraction: float
    burst_max: int
    abort_fraction: float
    error_fraction: float
    item_error_fraction: float
    reset_fraction: float
    shared_fraction: float
    salt_fraction: float
    uncached_fraction: float
    ignore_eos_fraction: float
    stop_fraction: float
    forced_fraction: float
    sampleless_fraction: float
    prompt_logprobs_fraction: float
    draft_fraction: float
    draft_max: int
    fresh_max: int
    output_max: int
    token_by_byte: bytes = field(repr=False)
    """For each of 256 bytes a token of the vocabulary."""

    @classmethod
    def draw(cls, rng: Random) -> Swarm:
        block_size = rng.choice([1, 2, 3, 4, 4, 5, 8, 16])
        max_model_len = rng.choice([2, block_size + 1, 3 * block_size, 6 * block_size + 24, 80, 80])
        max_num_seqs = rng.choice([1, 2, 3, 5, 8, 8])
        blocks_a_context = -(-max_model_len // block_size)
        # Short prompts with long answers: what was admitted outgrows the pool.
        grows = rng.random() < 0.4
        vocab_size = rng.choice([2, 3, 8, 50])
        return cls(
            block_size=block_size,
            num_blocks=max(1, round(blocks_a_context * rng.choice([0.7, 1, 1, 1.2, 1.5, 2, 3, 8]))),
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_seqs + rng.choice([0, 1, block_size, 2 * block_size + 1, 200]),
            max_num_waiting=rng.choice([1, 4, 1000, 1000]),
            max_model_len=max_model_len,
            enable_prefix_caching=rng.random() < 0.85,
            hash_kind=rng.choice(["healthy"] * 4 + ["few", "no parent", "no tokens"]),
            num_priorities=rng.choice([1, 1, 2, 20]),
            vocab_size=vocab_size,
            eos_token_ids=frozenset(rng.sample(range(vocab_size), rng.choice([0, 1, 1]))),
            num_ticks=rng.randint(20, 120),
            arrival_fraction=rng.choice([0.1, 0.3, 0.7]),
            burst_max=rng.choice([1, 1, 2, 8]),
            abort_fraction=rng.choice([0, 0, 0.05, 0.3]),
            error_fraction=rng.choice([0, 0, 0, 0.02, 0.2]),
            item_error_fraction=rng.choice([0, 0, 0, 0.05]),
            reset_fraction=rng.choice([0, 0, 0.02, 0.2]),
            shared_fraction=rng.choice([0, 0.6, 0.95]),
            salt_fraction=rng.choice([0, 0, 0.5]),
            uncached_fraction=rng.choice([0, 0, 0.3]),
            ignore_eos_fraction=1 if grows else rng.choice([0, 0.5, 1]),
            stop_fraction=rng.choice([0, 0, 0.3]),
            forced_fraction=rng.choice([0, 0, 0.2]),
            sampleless_fraction=rng.choice([0, 0, 0.3]),
            prompt_logprobs_fraction=rng.choice([0, 0, 0.5]),
            draft_fraction=rng.choice([0, 0, 0.3, 1]),
            draft_max=rng.choice([1, 3, 9]),
            fresh_max=3 if grows else rng.choice([1, block_size + 1, max_model_len // 2, max_model_len]),
            output_max=200 if grows else rng.choice([1, 4, 40]),
            token_by_byte=(bytes(range(vocab_size)) * 256)[:256],
        )


@contextmanager
def hashes_of(swarm: Swarm) -> Iterator[None]:
    """Block hashes are as `hash_kind` says, which must not matter for any answer."""
    healthy = block_pool.chain_hash
    if swarm.hash_kind == "few":
        block_pool.chain_hash = lambda parent, token_ids: bytes([healthy(parent, token_ids)[0] & 15])
    elif swarm.hash_kind == "no parent":
        block_pool.chain_hash = lambda parent, token_ids: healthy(b"", token_ids)
    elif swarm.hash_kind == "no tokens":
        block_pool.chain_hash = lambda parent, token_ids: healthy(parent, [])
    try:
        yield
    finally:
        block_pool.chain_hash = healthy
