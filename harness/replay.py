"""A logged request, asked again: what to send so that an endpoint gives, or is made to give, the same answer.

Owns: how a log row becomes a request, and why one cannot. Refuses to know: sending, comparing. Invariants:
the prompt is sent as the token ids that were computed; nothing of a row's sampling is left out that could
change its tokens: a row for which that would be needed is not replayed, and says why.

Usage: `replay = replay_of(row, dialect=endpoint.dialect, forced=None)`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from firstdiff.harness.dialect import FORCED, Dialect
from firstdiff.tracing.log_content import DIGEST_PREFIX
from firstdiff.tracing.records import Request, Sampling, TokenLogRow

_OWN_FIELDS = ("firstdiff", "vllm", "sglang")
"""Who takes vLLM's additions to OpenAI's fields."""
_GUIDED = {"json_schema": "guided_json", "regex": "guided_regex", "grammar": "guided_grammar"}
MAX_LOGPROBS = 20


@dataclass(frozen=True, slots=True)
class Replay:
    """A row and the request that replays it; None where `why_not` says why there is none."""

    row: TokenLogRow
    request: Request | None
    is_forced: bool = False
    why_not: str = ""


def replay_of(row: TokenLogRow, *, dialect: Dialect, forced: bool | None) -> Replay:
    """`forced` None: forced where the endpoint can be and that tells something, else free-running."""
    why_not = _unusable(row)
    if why_not:
        return Replay(row, None, why_not=why_not)
    can_force = dialect.forcing != "never" and bool(told_ids(row))
    if forced and not can_force:
        why_not = f"an endpoint of the dialect {dialect.name} cannot be made to answer given tokens"
        return Replay(row, None, why_not=why_not)
    if can_force and (forced or (forced is None and tells_when_forced(row, dialect))):
        return Replay(row, _forced_request(row, dialect), is_forced=True)
    why_not = _not_free(row, dialect)
    return Replay(row, None if why_not else _free_request(row, dialect), why_not=why_not)


def told_ids(row: TokenLogRow) -> list[int]:
    """The answer's tokens; not those computed after a stop string."""
    return row.token_ids if row.told is None else row.token_ids[: row.told.num_tokens]


def is_plainly_greedy(sampling: Sampling) -> bool:
    """Whether each token was the likeliest by the model's own distribution."""
    changes = (
        sampling.presence_penalty,
        sampling.frequency_penalty,
        sampling.repetition_penalty - 1.0,
        sampling.logit_bias,
        sampling.structure,
        sampling.min_tokens,
        sampling.forced_token_ids,
    )
    return sampling.temperature == 0 and not any(changes)


def has_same_logprobs(row: TokenLogRow, dialect: Dialect) -> bool:
    """Whether a forced answer's log-probabilities are of the distribution that the logged ones are of."""
    if not row.logprobs or row.logprobs[0] is None:
        return False
    sampling = row.sampling
    if sampling.logprobs_mode == "raw_logprobs":
        return True
    penalties = (sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty - 1.0)
    is_plain = sampling.structure is None and not sampling.min_tokens and not any(penalties)
    return dialect.name == "firstdiff" and is_plain


def tells_when_forced(row: TokenLogRow, dialect: Dialect) -> bool:
    """Whether a forced answer can be told from a wrong one."""
    return is_plainly_greedy(row.sampling) or has_same_logprobs(row, dialect)


def _unusable(row: TokenLogRow) -> str:
    if row.content == "hash":
        return "the log has only digests of its prompt (--log-content hash)"
    if any(cut.field == "prompt_token_ids" for cut in row.truncated):
        return "its prompt was cut (--log-max-row-bytes)"
    if not row.prompt_token_ids:
        return "it has no prompt"
    if row.sampling.max_tokens == 0:
        return "it asked for no tokens"
    if not told_ids(row):
        return "it has no tokens to compare with"
    return ""


def _not_free(row: TokenLogRow, dialect: Dialect) -> str:
    sampling = row.sampling
    if sampling.forced_token_ids is not None:
        return "its tokens were forced, which a free-running answer does not repeat"
    if sampling.temperature > 0 and dialect.name != "firstdiff":
        return "it was sampled, and the endpoint's noise is its own"
    hidden = [*sampling.stop, *([sampling.structure.spec] if sampling.structure else [])]
    if any(text.startswith(DIGEST_PREFIX) for text in hidden):
        return "its stop strings or its structure were left out of the log (--log-content ids)"
    if sampling.structure is not None:
        if any(cut.field == "structure" for cut in row.truncated):
            return "its structure was cut (--log-max-row-bytes)"
        if dialect.name != "firstdiff" or sampling.structure.kind not in _GUIDED:
            return f"its structure ({sampling.structure.kind}) cannot be asked for"
    if dialect.name not in _OWN_FIELDS:
        names = [name for name in _vllm_fields(row) if name not in ("skip_special_tokens",)]
        if names:
            return f"an endpoint of the dialect {dialect.name} cannot be asked for {', '.join(names)}"
    return ""


def _vllm_fields(row: TokenLogRow) -> dict[str, Any]:
    """Fields beyond OpenAI's that differ from what is taken without them."""
    sampling, asked = row.sampling, row.asked
    fields: dict[str, Any] = {}
    if sampling.top_k:
        fields["top_k"] = sampling.top_k
    if sampling.min_p:
        fields["min_p"] = sampling.min_p
    if sampling.repetition_penalty != 1.0:
        fields["repetition_penalty"] = sampling.repetition_penalty
    if sampling.stop_token_ids:
        fields["stop_token_ids"] = sampling.stop_token_ids
    if sampling.ignore_eos:
        fields["ignore_eos"] = True
    if sampling.min_tokens:
        fields["min_tokens"] = sampling.min_tokens
    if asked is not None and asked.include_stop:
        fields["include_stop_str_in_output"] = True
    if asked is not None and not asked.skip_special_tokens:
        fields["skip_special_tokens"] = False
    return fields


def _free_request(row: TokenLogRow, dialect: Dialect) -> Request:
    sampling = row.sampling
    extra = _vllm_fields(row) if dialect.name in _OWN_FIELDS else {}
    if sampling.stop:
        extra["stop"] = sampling.stop
    if sampling.presence_penalty:
        extra["presence_penalty"] = sampling.presence_penalty
    if sampling.frequency_penalty:
        extra["frequency_penalty"] = sampling.frequency_penalty
    if sampling.structure is not None:
        extra[_GUIDED[sampling.structure.kind]] = sampling.structure.spec
    return _request(row, dialect, extra, max_tokens=sampling.max_tokens)


def _forced_request(row: TokenLogRow, dialect: Dialect) -> Request:
    ids = told_ids(row)
    extra: dict[str, Any] = {FORCED: ids}
    if row.sampling.logprobs_mode == "processed_logprobs" and dialect.name == "firstdiff":
        extra |= {name: value for name, value in _vllm_fields(row).items() if name in ("top_k", "min_p")}
    if row.asked is not None and not row.asked.skip_special_tokens and dialect.name == "firstdiff":
        extra["skip_special_tokens"] = False
    return _request(row, dialect, extra, max_tokens=len(ids))


def _request(row: TokenLogRow, dialect: Dialect, extra: dict[str, Any], *, max_tokens: int) -> Request:
    sampling = row.sampling
    if sampling.logit_bias:
        extra["logit_bias"] = {str(token_id): bias for token_id, bias in sampling.logit_bias.items()}
    if sampling.logprobs_mode == "processed_logprobs" and dialect.name == "firstdiff":
        extra["logprobs_mode"] = sampling.logprobs_mode
    return Request(
        case_id=row.request_id,
        prompt=row.prompt_token_ids,
        max_tokens=max_tokens,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        seed=sampling.seed,
        # One alternative at least: the likeliest is how a forced answer shows what it would have said.
        logprobs=min(MAX_LOGPROBS, max(1, sampling.logprobs or 0)),
        stream=False,
        extra=extra,
    )
