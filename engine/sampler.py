"""From logits to the next token, and its log-probability.

Owns: the argmax, the seeded sample, what is reported of both. Refuses to know: batching, KV, text, grammars.
Invariants: greedy (temperature below 1e-5, as in vLLM) takes no noise; a chosen token depends only on its own
logits, its Place and (seed, position), so neighbours in a batch cannot change it; reported log-probabilities
are finite, sorted, of distinct tokens, the chosen one among them.

Usage: `choice = choose(logits, place, best_id, allowed=None, end_token_ids=eos)`, then `report(...)`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from firstdiff.engine.logits import Floats, Ids, Place, adjust, is_adjusted, kept_token_ids
from firstdiff.engine.rng import all_uniforms, gumbel_noise
from firstdiff.engine.sequence import SampledToken

GREEDY_BELOW = 1e-5
"""Temperatures below this are greedy: dividing by them would overflow."""
LOGPROB_MIN = -9999.0
"""Reported in place of -inf, which JSON has not: the forced token was removed (vLLM reports the same)."""
NUM_DRAWN_DIRECTLY = 2048
NEAR_NATS = 6.0
"""Sampling from more tokens first draws noise for those this close to the best."""
NOISE_MAX = 23.0
"""No Gumbel noise of rng.py is larger: its largest uniform is 1 - 2^-33, so 33 ln 2 = 22.9."""


@dataclass(frozen=True, slots=True)
class Choice:
    """A token, and what it was chosen among: `kept` ids (None for all) of logits `scaled` (None as given)."""

    token_id: int
    scaled: Floats | None = None
    kept: Ids | None = None


def choose(
    logits: NDArray[np.float32],
    place: Place,
    best_id: int,
    *,
    allowed: NDArray[np.bool_] | None,
    end_token_ids: frozenset[int],
) -> Choice:
    """The token after `place` by its logits [V], of which `best_id` is the argmax.

    Forced ids come first, else greedy or seeded choice. FloatingPointError when the logits have no finite
    maximum: a NaN would otherwise become a plausible token. ValueError when no token is left to choose, or
    one that the request names is not in the vocabulary.
    """
    if not math.isfinite(logits[best_id]):
        raise FloatingPointError(f"expected finite logits, got {logits[best_id]} at token {best_id}")
    sampling = place.sampling
    scaled: Floats | None = None
    if allowed is not None or is_adjusted(place):
        scaled = adjust(logits, place, allowed=allowed, end_token_ids=end_token_ids)
        best_id = int(scaled.argmax())
        if not math.isfinite(scaled[best_id]):
            raise ValueError(
                f"expected a token to choose at position {place.position}, got none: structure, bias and "
                "penalties together leave nothing"
            )
    kept: Ids | None = None
    token_id = best_id
    if sampling.temperature >= GREEDY_BELOW:
        scaled = (logits.astype(np.float64) if scaled is None else scaled) / sampling.temperature
        if sampling.top_k > 0 or sampling.top_p < 1 or sampling.min_p > 0:
            kept = kept_token_ids(scaled, top_k=sampling.top_k, top_p=sampling.top_p, min_p=sampling.min_p)
        if sampling.forced_token_ids is None:
            token_id = gumbel_argmax(scaled, kept, sampling.seed, place.position)
    if sampling.forced_token_ids is not None:
        token_id = sampling.forced_token_ids[place.num_output_tokens]
        if not 0 <= token_id < len(logits):
            raise ValueError(f"expected forced_token_ids in 0..{len(logits) - 1}, got {token_id}")
    return Choice(token_id, scaled, kept)


def gumbel_argmax(scaled: Floats, kept: Ids | None, seed: int, position: int) -> int:
    """One seeded sample from `scaled` [V]: argmax of logits plus Gumbel noise over the `kept` ids (rising).

    Noise is drawn where it can decide. The tokens near the best give a score to beat; the others need noise
    so large for it that their uniforms, without a logarithm, rule nearly all of them out.
    """
    if kept is not None:
        if len(kept) <= NUM_DRAWN_DIRECTLY:
            return int(kept[np.argmax(scaled[kept] + gumbel_noise(seed, position, kept))])
        values, scaled = scaled[kept], np.full_like(scaled, -np.inf)
        scaled[kept] = values
    floor = scaled.max() - NEAR_NATS
    near = np.flatnonzero(scaled >= floor)
    if 8 * len(near) > len(scaled):
        return _best_with_noise(scaled, np.arange(len(scaled)), seed, position)[0]
    near_id, score = _best_with_noise(scaled, near, seed, position)
    if np.count_nonzero(scaled >= score - NOISE_MAX) <= len(near):
        return near_id
    # u = exp(-exp(-g)); the slack is far above rounding and far below what would cost time.
    needed = math.exp(-math.exp(floor - score)) - 1e-9
    rivals = np.flatnonzero(all_uniforms(seed, position, len(scaled)) >= needed)
    if not len(rivals):
        return near_id
    rival_id, rival_score = _best_with_noise(scaled, rivals, seed, position)
    return rival_id if (rival_score, -rival_id) > (score, -near_id) else near_id


def _best_with_noise(scaled: Floats, ids: Ids, seed: int, position: int) -> tuple[int, float]:
    scores = scaled[ids] + gumbel_noise(seed, position, ids)
    best = int(scores.argmax())
    return int(ids[best]), float(scores[best])


def report(
    logits: torch.Tensor, places: list[Place], choices: list[Choice], rows: list[int]
) -> list[SampledToken]:
    """The chosen tokens with the log-probabilities that their requests ask for; `rows[i]` of `logits` [S, V]
    is the row of `choices[i]`.
    """
    tokens = [SampledToken(choice.token_id) for choice in choices]
    raw = [i for i, place in enumerate(places) if _wants(place, "raw_logprobs")]
    if raw:
        chosen = logits[[rows[i] for i in raw]] if len(raw) < len(logits) else logits
        counts = [places[i].sampling.logprobs or 0 for i in raw]
        ids = [choices[i].token_id for i in raw]
        for i, token in zip(raw, raw_logprobs(chosen, ids, counts), strict=True):
            tokens[i] = token
    for i, place in enumerate(places):
        if _wants(place, "processed_logprobs"):
            count = place.sampling.logprobs or 0
            tokens[i] = processed_logprobs(logits[rows[i]].numpy(), choices[i], count)
    return tokens


def _wants(place: Place, mode: str) -> bool:
    return place.sampling.logprobs is not None and place.sampling.logprobs_mode == mode


def raw_logprobs(logits: torch.Tensor, token_ids: list[int], counts: list[int]) -> list[SampledToken]:
    """`token_ids[i]` with its log-probability by row i of `logits` [R, V], and the `counts[i]` likeliest.

    Computed in fp32; a token has the same float as itself and as one of the likeliest. FloatingPointError
    when a row holds NaN or positive infinity.
    """
    logprobs = torch.log_softmax(logits, dim=-1)
    own = logprobs.gather(1, torch.tensor(token_ids)[:, None])[:, 0].tolist()
    if any(map(math.isnan, own)):
        raise FloatingPointError("expected finite logits, got NaN or infinity")
    # One more than wanted shows whether the last one wanted is tied.
    top = torch.topk(logprobs, k=min(max(counts) + 1, logits.shape[-1]), dim=-1) if any(counts) else None
    ids, values = (top.indices.tolist(), top.values.tolist()) if top is not None else ([], [])
    tokens = []
    for row, (token_id, value, count) in enumerate(zip(token_ids, own, counts, strict=True)):
        entries = _likeliest_entries(logprobs[row], ids[row], values[row], count) if count else []
        tokens.append(_with_own(token_id, value, entries))
    return tokens


def processed_logprobs(logits: NDArray[np.float32], choice: Choice, count: int) -> SampledToken:
    """The choice with log-probabilities of what it was chosen among, in float64, without removed tokens.

    A greedy choice is reported at temperature 1, after penalties and bias.
    """
    scaled = logits.astype(np.float64) if choice.scaled is None else choice.scaled
    kept = np.flatnonzero(scaled > -np.inf) if choice.kept is None else choice.kept
    values = scaled[kept]
    best = values.max()
    values = values - (best + math.log(np.exp(values - best).sum()))
    order = np.argsort(-values, kind="stable")[:count]
    entries = list(zip(kept[order].tolist(), values[order].tolist(), strict=True))
    at = int(np.searchsorted(kept, choice.token_id))
    is_kept = at < len(kept) and kept[at] == choice.token_id
    return _with_own(choice.token_id, float(values[at]) if is_kept else LOGPROB_MIN, entries)


def _likeliest_entries(
    logprobs: torch.Tensor, ids: list[int], values: list[float], count: int
) -> list[tuple[int, float]]:
    """The `count` likeliest of `logprobs` [V], equal ones by rising id; `ids`, `values` are torch's top-k.

    Which of equal values topk takes is not specified, so ties are settled here.
    """
    entries = list(zip(ids, values, strict=True))
    if count < len(entries) and values[count] == values[count - 1]:
        last = values[count - 1]
        tied = (logprobs == last).nonzero()[:, 0].tolist()
        entries = [entry for entry in entries if entry[1] > last] + [(token_id, last) for token_id in tied]
    return sorted(entries, key=lambda entry: (-entry[1], entry[0]))[:count]


def _with_own(token_id: int, value: float, entries: list[tuple[int, float]]) -> SampledToken:
    if all(entry_id != token_id for entry_id, _ in entries):
        entries = [*entries, (token_id, value)]
    floored = [(entry_id, max(entry, LOGPROB_MIN)) for entry_id, entry in entries]
    return SampledToken(token_id, max(value, LOGPROB_MIN), floored)
