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
from firstdiff.engine.rng import gumbel_noise, uniforms
from firstdiff.engine.sequence import SampledToken

GREEDY_BELOW = 1e-5
"""Temperatures below this are greedy: dividing by them would overflow."""
LOGPROB_MIN = -9999.0
"""Reported in place of -inf, which JSON has not: the forced token was removed (vLLM reports the same)."""
NEAR_NATS = 6.0
"""Sampling first draws noise for the tokens this close to the best."""
NOISE_MAX = 23.0
"""No Gumbel noise of rng.py is larger: its largest uniform is 1 - 2^-33, so 33 ln 2 = 22.9."""


@dataclass(frozen=True, slots=True)
class Choice:
    """A token, and what it was chosen among: `kept` ids (None for all) by logits `scaled` (None as given)."""

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
        kept = kept_token_ids(scaled, top_k=sampling.top_k, top_p=sampling.top_p, min_p=sampling.min_p)
        if sampling.forced_token_ids is None:
            token_id = gumbel_argmax(scaled, kept, sampling.seed, place.position)
    if sampling.forced_token_ids is not None:
        token_id = sampling.forced_token_ids[place.num_output_tokens]
        if not 0 <= token_id < len(logits):
            raise ValueError(f"expected forced_token_ids in 0..{len(logits) - 1}, got {token_id}")
    return Choice(token_id, scaled, kept)


def gumbel_argmax(scaled: Floats, kept: Ids, seed: int, position: int) -> int:
    """One seeded sample from `scaled` [V]: argmax of logits plus Gumbel noise over the `kept` ids (rising).

    Noise is drawn where it can decide. The tokens near the best give a score to beat; of the others only
    those whose noise can be large enough are looked at, which their uniform tells without a logarithm.
    """
    values = scaled[kept]
    near = values >= values.max() - NEAR_NATS
    ids = kept[near]
    scores = values[near] + gumbel_noise(seed, position, ids)
    winner = int(scores.argmax())
    if len(ids) == len(kept):
        return int(ids[winner])
    far = kept[~near & (values >= scores[winner] - NOISE_MAX)]
    needed = scores[winner] - (values.max() - NEAR_NATS)
    # u = exp(-exp(-g)); the slack is far above rounding and far below what would cost time.
    rivals = far[uniforms(seed, position, far) >= math.exp(-math.exp(-needed)) - 1e-9] if len(far) else far
    if len(rivals):
        rival_scores = scaled[rivals] + gumbel_noise(seed, position, rivals)
        rival = int(rival_scores.argmax())
        rank = (rival_scores[rival], -rivals[rival])
        if rank > (scores[winner], -ids[winner]):
            return int(rivals[rival])
    return int(ids[winner])


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
    widest = min(max(counts), logits.shape[-1])
    top = torch.topk(logprobs, k=widest, dim=-1) if widest else None
    tokens = []
    for row, (token_id, value, count) in enumerate(zip(token_ids, own, counts, strict=True)):
        entries: list[tuple[int, float]] = []
        if top is not None and count:
            entries = _likeliest_entries(logprobs[row], top.indices[row], top.values[row], count)
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
    logprobs: torch.Tensor, ids: torch.Tensor, values: torch.Tensor, count: int
) -> list[tuple[int, float]]:
    """The `count` likeliest of `logprobs` [V], equal ones by rising id; `ids`, `values` are torch's top-k.

    Which of equal values topk takes is not specified, so ties are settled here.
    """
    entries = list(zip(ids.tolist(), values.tolist(), strict=True))[:count]
    last = entries[-1][1]
    if torch.count_nonzero(logprobs >= last) > len(entries):
        tied = (logprobs == last).nonzero()[:, 0].tolist()
        above = [entry for entry in entries if entry[1] > last]
        entries = above + [(token_id, last) for token_id in tied[: count - len(above)]]
    return sorted(entries, key=lambda entry: (-entry[1], entry[0]))


def _with_own(token_id: int, value: float, entries: list[tuple[int, float]]) -> SampledToken:
    if all(entry_id != token_id for entry_id, _ in entries):
        entries = [*entries, (token_id, value)]
    floored = [(entry_id, max(entry, LOGPROB_MIN)) for entry_id, entry in entries]
    return SampledToken(token_id, max(value, LOGPROB_MIN), floored)
