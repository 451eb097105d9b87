"""The sampling noise: a counter-based generator that anyone can run again.

Owns: Philox-4x32-10 and the Gumbel noise made from it. Refuses to know: torch, logits, requests.
Invariants: noise is a pure function of (seed, position, token id): batching, caching, preemption and
speculation cannot change it, and a verifier in any language can regenerate it from the token-ID log.

The specification, in full:
- key words    k0 = seed mod 2^32, k1 = (seed >> 32) mod 2^32;
- counter      c0 = token_id >> 2, c1 = position mod 2^32, c2 = stream, c3 = 0,
  where `position` is the index of the sampled token in its sequence (prompt included, from 0) and
  `stream` tells independent uses apart (0: the target's own sample);
- ten rounds of Philox-4x32 (Salmon et al., SC 2011, multipliers D2511F53 and CD9E8D57, Weyl increments
  9E3779B9 and BB67AE85); the word used is number `token_id mod 4`;
- uniform      u = (word + 0.5) / 2^32, never 0 or 1; Gumbel g = -ln(-ln u), in float64;
- the sample   argmax over the kept tokens of logit / temperature + g, ties to the lowest token id.

Usage: `noise = gumbel_noise(seed, position, token_ids)`.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

UInt64s = NDArray[np.uint64]

RNG_SCHEME = "philox4x32-10-gumbel"
"""The name of the specification above, as an Identity bears it."""
TARGET_STREAM = 0
_MULTIPLIER_0 = np.uint64(0xD2511F53)
_MULTIPLIER_1 = np.uint64(0xCD9E8D57)
_WEYL_0 = 0x9E3779B9
_WEYL_1 = 0xBB67AE85
_LOW = np.uint64(0xFFFFFFFF)
_SHIFT = np.uint64(32)


def philox_4x32(
    counter: tuple[UInt64s, UInt64s, UInt64s, UInt64s], key: tuple[int, int]
) -> tuple[UInt64s, UInt64s, UInt64s, UInt64s]:
    """Ten rounds of Philox-4x32 over arrays of 32-bit counter words (held in uint64), elementwise."""
    # In place throughout: allocating each intermediate took more than half of the time.
    c0, c1, c2, c3 = (word.copy() for word in counter)
    product_0, product_1 = np.empty_like(c0), np.empty_like(c0)
    k0, k1 = key
    for _ in range(10):
        np.multiply(c0, _MULTIPLIER_0, out=product_0)
        np.multiply(c2, _MULTIPLIER_1, out=product_1)
        np.right_shift(product_1, _SHIFT, out=c0)
        c0 ^= c1
        c0 ^= np.uint64(k0)
        np.right_shift(product_0, _SHIFT, out=c2)
        c2 ^= c3
        c2 ^= np.uint64(k1)
        np.bitwise_and(product_1, _LOW, out=c1)
        np.bitwise_and(product_0, _LOW, out=c3)
        k0 = (k0 + _WEYL_0) & 0xFFFFFFFF
        k1 = (k1 + _WEYL_1) & 0xFFFFFFFF
    return c0, c1, c2, c3


def uniforms(
    seed: int, position: int, token_ids: NDArray[np.int64], *, stream: int = TARGET_STREAM
) -> NDArray[np.float64]:
    """One uniform in (0, 1) for each of `token_ids` [n], by the specification above."""
    blocks = token_ids >> 2
    num_blocks = int(blocks.max()) + 1
    # Four neighbouring ids share one counter. Where most ids are asked for, each counter is computed once.
    if 2 * len(blocks) > num_blocks:
        return all_uniforms(seed, position, 4 * num_blocks, stream=stream)[token_ids]
    drawn = _uniforms(seed, position, blocks.astype(np.uint64), stream)
    picked: NDArray[np.float64] = drawn[np.arange(len(blocks)), token_ids & 3]
    return picked


def all_uniforms(
    seed: int, position: int, vocab_size: int, *, stream: int = TARGET_STREAM
) -> NDArray[np.float64]:
    """`uniforms` of the ids 0 .. vocab_size - 1, for a quarter of the work."""
    counters = np.arange(-(-vocab_size // 4), dtype=np.uint64)
    return _uniforms(seed, position, counters, stream).ravel()[:vocab_size]


def _uniforms(seed: int, position: int, counters: UInt64s, stream: int) -> NDArray[np.float64]:
    """The four uniforms [n, 4] of each of `counters` [n]."""
    fixed = np.zeros_like(counters)
    words = philox_4x32(
        (counters, fixed + np.uint64(position & 0xFFFFFFFF), fixed + np.uint64(stream & 0xFFFFFFFF), fixed),
        (seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF),
    )
    drawn = np.empty((len(counters), 4))
    for column, word in enumerate(words):
        drawn[:, column] = word
    drawn += 0.5
    drawn *= 2.0**-32
    return drawn


def gumbel_noise(
    seed: int, position: int, token_ids: NDArray[np.int64], *, stream: int = TARGET_STREAM
) -> NDArray[np.float64]:
    """Standard Gumbel noise for each of `token_ids` [n]; adding it to log-weights samples by argmax."""
    return -np.log(-np.log(uniforms(seed, position, token_ids, stream=stream)))
