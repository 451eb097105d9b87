"""From logits to the next token, and its log-probability.

Owns: temperature, top-k, top-p, the argmax and the log-probabilities. Refuses to know: batching, KV, text.
Invariants: greedy (temperature 0) takes no noise; a sampled token depends only on its own logits, its
sampling and (seed, position), so neighbours in a batch cannot change it; log-probabilities are of the
model's own distribution, before temperature and truncation.

Usage: `tokens = sample(logits, [(sampling, position), ...])`.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from firstdiff.engine.rng import gumbel_noise
from firstdiff.engine.sequence import SampledToken
from firstdiff.tracing.records import Sampling

NUM_SORTED_FIRST = 1024


def sample(logits: torch.Tensor, rows: list[tuple[Sampling, int]]) -> list[SampledToken]:
    """The next token of each row of `logits` [S, V] fp32; `rows[i]` is (sampling, position of the new token).

    Raises FloatingPointError when a row has no finite maximum: a NaN would otherwise become a plausible
    token.
    """
    assert logits.shape[0] == len(rows)
    best = torch.max(logits, dim=-1)
    if not bool(torch.isfinite(best.values).all()):
        bad = [i for i, value in enumerate(best.values.tolist()) if not np.isfinite(value)]
        raise FloatingPointError(f"expected finite logits, got NaN or infinity in rows {bad}")
    token_ids: list[int] = best.indices.tolist()
    for i, (sampling, position) in enumerate(rows):
        if sampling.temperature > 0:
            token_ids[i] = sample_row(logits[i].numpy(), sampling, position)
    return with_logprobs(logits, token_ids, [sampling.logprobs for sampling, _ in rows])


def sample_row(logits: NDArray[np.float32], sampling: Sampling, position: int) -> int:
    """One seeded sample from `logits` [V]: argmax of scaled logits plus Gumbel noise over the kept tokens."""
    scaled = logits.astype(np.float64) / sampling.temperature
    kept = kept_token_ids(scaled, top_k=sampling.top_k, top_p=sampling.top_p)
    scores = scaled[kept] + gumbel_noise(sampling.seed, position, kept)
    return int(kept[np.argmax(scores)])


def kept_token_ids(scaled: NDArray[np.float64], *, top_k: int, top_p: float) -> NDArray[np.int64]:
    """Ids in rising order that survive truncation of `scaled` [V]: top-k first, then top-p of the rest.

    top_k <= 0 keeps all. top_p keeps the shortest prefix, by falling probability, whose mass reaches
    `top_p`, so at least one token. Equal logits are ordered by id.
    """
    vocab_size = scaled.shape[0]
    num_kept = top_k if 0 < top_k < vocab_size else vocab_size
    if top_p >= 1.0:
        if num_kept == vocab_size:
            return np.arange(vocab_size, dtype=np.int64)
        return np.sort(_likeliest(scaled, num_kept))
    # Nearly all mass usually sits in few tokens: sort those, and more only when they do not reach top_p.
    num_sorted = min(NUM_SORTED_FIRST, num_kept)
    while True:
        order = _likeliest(scaled, num_sorted)
        weights = np.exp(scaled[order] - scaled[order[0]])
        if num_sorted == num_kept:
            total = weights.sum()
        else:
            everyone = scaled if num_kept == vocab_size else scaled[_likeliest(scaled, num_kept)]
            total = np.exp(everyone - scaled[order[0]]).sum()
        mass_before = (np.cumsum(weights) - weights) / total
        reached = np.flatnonzero(mass_before >= top_p)
        if len(reached) or num_sorted == num_kept:
            return np.sort(order[: reached[0]] if len(reached) else order)
        num_sorted = num_kept


def _likeliest(scaled: NDArray[np.float64], count: int) -> NDArray[np.int64]:
    """The `count` ids of largest `scaled`, by falling value, equal values by rising id."""
    if count < scaled.shape[0]:
        threshold = np.partition(scaled, -count)[-count]
        candidates = np.flatnonzero(scaled >= threshold)
    else:
        candidates = np.arange(scaled.shape[0])
    order = np.argsort(-scaled[candidates], kind="stable")[:count]
    return candidates[order].astype(np.int64)


def with_logprobs(logits: torch.Tensor, token_ids: list[int], counts: list[int | None]) -> list[SampledToken]:
    """Attach log-probabilities to rows that ask for them (`counts[i]` top entries, None for none)."""
    wanted = [i for i, count in enumerate(counts) if count is not None]
    tokens = [SampledToken(token_id=token_id) for token_id in token_ids]
    if not wanted:
        return tokens
    logprobs = torch.log_softmax(logits[wanted] if len(wanted) < len(tokens) else logits, dim=-1)
    widest = max(counts[i] or 0 for i in wanted)
    top = torch.topk(logprobs, k=min(widest, logits.shape[-1]), dim=-1)
    top_values, top_ids = top.values.tolist(), top.indices.tolist()
    for row, i in enumerate(wanted):
        token_id = token_ids[i]
        own = float(logprobs[row, token_id])
        entries = list(zip(top_ids[row], top_values[row], strict=True))[: counts[i]]
        if all(entry_id != token_id for entry_id, _ in entries):
            entries.append((token_id, own))
        tokens[i] = SampledToken(token_id=token_id, logprob=own, top_logprobs=entries)
    return tokens
