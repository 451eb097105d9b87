"""The logits of one place in a sequence, changed as its request asks, before a token is chosen there.

Owns: penalties, bias, suppression, temperature, truncation. Refuses to know: noise, the model, grammars.
Invariants: each function is pure and looks at one place only, so neighbours in a batch cannot change it; all
arithmetic is in float64 on the model's fp32 logits; a removed token is -inf and stays so.

The order is that of vLLM's engine (the docstring of `Sampler` in vllm/v1/sample/sampler.py), where a row of
raw log-probabilities is taken before anything else:

1. what the answer's structure allows (a mask: everything else is removed);
2. min_tokens: EOS and stop tokens are removed until then, unless nothing else is left;
3. logit_bias, added;
4. repetition penalty over prompt and output, then frequency and presence penalty over the output;
   a greedy request takes the best token of these;
5. temperature;
6. min_p;
7. top_k, then top_p of what is left.

Usage: `adjusted = adjust(logits, place, allowed=None, end_token_ids=eos)`, then `kept = kept_token_ids(...)`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from firstdiff.tracing.records import Sampling

NEAR_NATS = 10.0
"""Truncation by mass first sorts the tokens this close to the best: e^-10 of its probability."""

Floats = NDArray[np.float64]
Ids = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Place:
    """Where a token is to be chosen: right after `token_ids`, the prompt, the output and drafts before it."""

    sampling: Sampling
    token_ids: list[int]
    num_prompt_tokens: int

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def position(self) -> int:
        """Index in the sequence, from 0, that the token will have."""
        return len(self.token_ids)


def is_adjusted(place: Place) -> bool:
    """Whether anything but a structure changes the logits before temperature."""
    sampling = place.sampling
    return bool(
        sampling.logit_bias
        or sampling.min_tokens > place.num_output_tokens
        or sampling.repetition_penalty != 1.0
        or sampling.frequency_penalty
        or sampling.presence_penalty
    )


def adjust(
    logits: NDArray[np.float32],
    place: Place,
    *,
    allowed: NDArray[np.bool_] | None,
    end_token_ids: frozenset[int],
) -> Floats:
    """`logits` [V] after steps 1 to 4, a copy; `allowed` [V] is None where the answer has no structure.

    ValueError when a token id of the request is not in the vocabulary.
    """
    adjusted = logits.astype(np.float64)
    sampling = place.sampling
    if allowed is not None:
        adjusted[~allowed] = -np.inf
    if sampling.min_tokens > place.num_output_tokens:
        suppress(adjusted, end_token_ids.union(sampling.stop_token_ids))
    if sampling.logit_bias:
        add_bias(adjusted, sampling.logit_bias)
    if sampling.repetition_penalty != 1.0:
        penalise_repetition(adjusted, place.token_ids, sampling.repetition_penalty)
    if sampling.frequency_penalty or sampling.presence_penalty:
        penalise_output(
            adjusted,
            place.token_ids[place.num_prompt_tokens :],
            presence=sampling.presence_penalty,
            frequency=sampling.frequency_penalty,
        )
    return adjusted


def suppress(logits: Floats, token_ids: frozenset[int]) -> None:
    """Remove `token_ids` in place, unless nothing would be left: a finished structure may end early."""
    ids = [token_id for token_id in token_ids if 0 <= token_id < len(logits)]
    kept = logits[ids].copy()
    logits[ids] = -np.inf
    if ids and not np.isfinite(logits.max()):
        logits[ids] = kept


def add_bias(logits: Floats, bias: dict[int, float]) -> None:
    """Add to the logits of the named tokens, in place."""
    ids = _in_vocabulary(list(bias), len(logits), "logit_bias")
    logits[ids] += np.fromiter(bias.values(), np.float64, len(bias))


def penalise_repetition(logits: Floats, token_ids: list[int], penalty: float) -> None:
    """Make every token of `token_ids` less likely, in place: l / penalty where l > 0, else l * penalty.

    CTRL (arXiv 1909.05858, section 4.1) as Hugging Face and vLLM have it; prompt tokens count too.
    """
    seen = np.zeros(len(logits), dtype=np.bool_)
    seen[_in_vocabulary(token_ids, len(logits), "the sequence")] = True
    values = logits[seen]
    logits[seen] = np.where(values > 0, values / penalty, values * penalty)


def penalise_output(logits: Floats, output: list[int], *, presence: float, frequency: float) -> None:
    """Subtract count * frequency + presence from each token of `output`, in place (OpenAI's definition)."""
    if not output:
        return
    counts = np.bincount(_in_vocabulary(output, len(logits), "the output"), minlength=len(logits))
    logits -= counts * frequency + (counts > 0) * presence


def kept_token_ids(scaled: Floats, *, top_k: int, top_p: float, min_p: float = 0.0) -> Ids:
    """Ids in rising order that survive truncation of `scaled` [V]: min-p, then top-k, then top-p of the rest.

    min_p keeps what has at least that share of the best token's probability; top_k <= 0 keeps all; top_p
    keeps the shortest prefix, by falling probability, whose mass among what is left reaches `top_p`, so at
    least one token. Equal logits are ordered by id. Removed tokens (-inf) are never kept.
    """
    best = scaled.max()
    floor = best + math.log(min_p) if min_p > 0 else np.finfo(np.float64).min
    is_left = scaled >= floor
    num_left = int(np.count_nonzero(is_left))
    # Both rules keep a prefix of the order by falling probability: the shorter one counts.
    candidates = _likeliest(scaled, top_k) if 0 < top_k < num_left else np.flatnonzero(is_left)
    if top_p >= 1.0:
        return candidates
    values = scaled[candidates]
    total = np.exp(values - best).sum()
    # Nearly all mass usually sits near the best token: sort that, and more only when it does not reach top_p.
    for near in (values >= best - NEAR_NATS, values >= floor):
        falling = np.sort(values[near])[::-1]
        weights = np.exp(falling - best)
        mass_before = (np.cumsum(weights) - weights) / total
        reached = np.flatnonzero(mass_before >= top_p)
        if len(reached):
            count = max(int(reached[0]), 1)
            return _first(candidates, values, count, falling[count - 1])
    return candidates


def _first(ids: Ids, values: Floats, count: int, last: float) -> Ids:
    """The `count` of `ids` (rising) of largest `values`, the least of which is `last`; equal ones by id."""
    above = values > last
    num_tied = count - int(np.count_nonzero(above))
    above[np.flatnonzero(values == last)[:num_tied]] = True
    return ids[above]


def _likeliest(scaled: Floats, count: int) -> Ids:
    """The `count` ids of largest `scaled`, rising; equal ones by id."""
    last = np.partition(scaled, -count)[-count]
    ids = np.flatnonzero(scaled >= last)
    return _first(ids, scaled[ids], count, last)


def _in_vocabulary(token_ids: list[int], vocab_size: int, where: str) -> Ids:
    ids = np.array(token_ids, dtype=np.int64)
    if len(ids) and not 0 <= ids.min() <= ids.max() < vocab_size:
        raise ValueError(
            f"expected token ids in 0..{vocab_size - 1} in {where}, got {ids.min()}..{ids.max()}"
        )
    return ids
