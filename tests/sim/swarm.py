"""What a seed decides before the first tick: a swarm, in which most lives are extreme in some way."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random


@dataclass(frozen=True, slots=True)
class Swarm:
    """All that a seed decides before the first tick; fractions are per tick."""

    block_size: int
    num_blocks: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_num_waiting: int
    max_model_len: int
    enable_prefix_caching: bool
    vocab_size: int
    eos_token_ids: frozenset[int]
    num_ticks: int
    arrival_fraction: float
    burst_max: int
    abort_fraction: float
    error_fraction: float
    shared_fraction: float
    ignore_eos_fraction: float
    stop_fraction: float
    fresh_max: int
    output_max: int

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
            max_num_waiting=rng.choice([1, 3, 1000]),
            max_model_len=max_model_len,
            enable_prefix_caching=rng.random() < 0.85,
            vocab_size=vocab_size,
            eos_token_ids=frozenset(rng.sample(range(vocab_size), rng.choice([0, 1, 1]))),
            num_ticks=rng.randint(20, 120),
            arrival_fraction=rng.choice([0.1, 0.3, 0.7]),
            burst_max=rng.choice([1, 1, 4, 12]),
            abort_fraction=rng.choice([0, 0, 0.05, 0.3]),
            error_fraction=rng.choice([0, 0, 0, 0.02, 0.2]),
            shared_fraction=rng.choice([0, 0.5, 0.9]),
            ignore_eos_fraction=1 if grows else rng.choice([0, 0.5, 1]),
            stop_fraction=rng.choice([0, 0, 0.3]),
            fresh_max=3 if grows else rng.choice([1, block_size + 1, max_model_len // 2, max_model_len]),
            output_max=200 if grows else rng.choice([1, 4, 40]),
        )
