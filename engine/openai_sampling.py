"""How a request wants its tokens chosen: the fields that both generation endpoints share.

Owns: each sampling field's type, bounds and default, and which of them exclude each other. Refuses to know:
prompts, messages, streams. Invariants: what comes out is complete but for the seed and what depends on the
prompt's length; a field that could not have an effect beside another is refused.

Usage: `wish = parse_sampling(fields, limits, logprobs=None, max_tokens=16)`.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

import msgspec

from firstdiff.engine.openai_fields import ApiError, Fields, describe, expected
from firstdiff.engine.openai_limits import Limits, parse_token_ids
from firstdiff.engine.openai_structure import parse_structure
from firstdiff.tracing.records import LogprobsMode, Sampling

MAX_TEMPERATURE = 2.0
GREEDY_BELOW = 1e-5
"""Temperatures below this are greedy, as in vLLM: dividing logits by less overflows."""
MAX_LOGPROBS = 20
MAX_SEED = 2**63 - 1
MAX_PENALTY = 2.0
MAX_REPETITION_PENALTY = 100.0
MAX_LOGIT_BIAS = 100.0
_MODES: dict[str, LogprobsMode] = {
    "raw_logprobs": "raw_logprobs",
    "processed_logprobs": "processed_logprobs",
}


@dataclass(frozen=True, slots=True)
class SamplingWish:
    """Sampling before the prompt is known: `template` has everything but the seed and `max_tokens`.

    `max_tokens` None means the rest of the context; `seed` None draws one. `prompt_logprobs` is what the
    answer shows by that name; the template's may be more, for an echo.
    """

    template: Sampling
    seed: int | None
    max_tokens: int | None
    prompt_logprobs: int | None

    def resolve(
        self, num_prompt_tokens: int, limits: Limits, rng: Random, *, param: str, choice_index: int = 0
    ) -> Sampling:
        """All values for one choice of a prompt; a missing seed is drawn from `rng`.

        Choice i of a request with a seed uses seed + i, as in vLLM. ApiError, naming `param`, when the
        prompt is empty or prompt and output do not fit the context.
        """
        if num_prompt_tokens == 0:
            raise ApiError(
                f"expected a prompt of 1 token or more in {param!r}, got none: send some text", param=param
            )
        room = limits.max_model_len - num_prompt_tokens
        wanted = room if self.max_tokens is None else self.max_tokens
        least = 1 if self.max_tokens is None else self.max_tokens
        if wanted > room or room < least:
            raise ApiError(
                f"expected prompt and max_tokens within the context of {limits.max_model_len} tokens, got "
                f"{num_prompt_tokens} prompt tokens and {max(wanted, least)} to generate: shorten the prompt "
                "or lower max_tokens",
                param=param if room < 1 else "max_tokens",
                code="context_length_exceeded",
            )
        if self.template.min_tokens > wanted:
            raise _too_many_min_tokens(self.template.min_tokens, wanted)
        seed = rng.getrandbits(63) if self.seed is None else _wrapped(self.seed + choice_index)
        return msgspec.structs.replace(self.template, seed=seed, max_tokens=wanted)


def parse_sampling(
    fields: Fields,
    limits: Limits,
    *,
    logprobs: int | None,
    max_tokens: int | None,
    default_max_tokens: int | None,
    echo_logprobs: bool = False,
    may_sample_nothing: bool = False,
) -> SamplingWish:
    """Take all sampling fields; `max_tokens` None counts as not given.

    `echo_logprobs`: the prompt's log-probabilities are wanted as many as the output's. `max_tokens` 0 is
    for `may_sample_nothing` or a body that asks for the prompt's log-probabilities.
    """
    temperature = fields.number("temperature", 0.0, MAX_TEMPERATURE)
    top_p = fields.number("top_p", 0.0, 1.0, above_low=True)
    top_k = fields.integer("top_k", -1, 1 << 31, "0 or -1 keeps all tokens") or 0
    min_p = fields.number("min_p", 0.0, 1.0)
    seed = fields.integer("seed", -MAX_SEED - 1, MAX_SEED)
    prompt_logprobs = fields.integer("prompt_logprobs", 0, MAX_LOGPROBS)
    computed = prompt_logprobs
    if echo_logprobs and logprobs is not None:
        computed = max(logprobs, prompt_logprobs or 0)
    template = Sampling(
        temperature=_resolved_temperature(temperature),
        top_k=top_k if 0 < top_k < limits.vocab_size else 0,
        top_p=1.0 if top_p is None else top_p,
        min_p=min_p or 0.0,
        seed=0,
        max_tokens=0,
        min_tokens=fields.integer("min_tokens", 0, limits.max_model_len) or 0,
        stop=_stops(fields, limits),
        stop_token_ids=_stop_token_ids(fields, limits),
        ignore_eos=fields.flag("ignore_eos"),
        logprobs=logprobs,
        presence_penalty=fields.number("presence_penalty", -MAX_PENALTY, MAX_PENALTY) or 0.0,
        frequency_penalty=fields.number("frequency_penalty", -MAX_PENALTY, MAX_PENALTY) or 0.0,
        repetition_penalty=_or_one(
            fields.number("repetition_penalty", 0.0, MAX_REPETITION_PENALTY, above_low=True)
        ),
        logit_bias=_logit_bias(fields, limits),
        prompt_logprobs=computed,
        logprobs_mode=parse_logprobs_mode(fields, limits),
        structure=parse_structure(fields, limits),
        forced_token_ids=_forced(fields, limits),
    )
    if template.forced_token_ids is not None:
        max_tokens = _forced_length(template, max_tokens)
    if max_tokens == 0 and not may_sample_nothing and prompt_logprobs is None:
        raise expected("an integer of 1 or more", 0, "max_tokens", "0 is for echo and prompt_logprobs")
    if max_tokens is None:
        max_tokens = default_max_tokens
    if max_tokens is not None and template.min_tokens > max_tokens:
        raise _too_many_min_tokens(template.min_tokens, max_tokens)
    return SamplingWish(template, seed, max_tokens, prompt_logprobs)


def parse_logprobs_mode(fields: Fields, limits: Limits) -> LogprobsMode:
    """Of which distribution log-probabilities are; the server's setting when not given."""
    mode = fields.text("logprobs_mode")
    if mode is None:
        return limits.logprobs_mode
    if mode not in _MODES:
        raise expected(f"one of {', '.join(_MODES)}", mode, "logprobs_mode")
    return _MODES[mode]


def _resolved_temperature(temperature: float | None) -> float:
    if temperature is None:
        return 1.0
    return 0.0 if temperature < GREEDY_BELOW else temperature


def _or_one(value: float | None) -> float:
    return 1.0 if value is None else value


def _wrapped(seed: int) -> int:
    """`seed` as the 64-bit integer that a request can carry."""
    return (seed + (1 << 63)) % (1 << 64) - (1 << 63)


def _too_many_min_tokens(min_tokens: int, max_tokens: int) -> ApiError:
    return ApiError(
        f"expected min_tokens of at most max_tokens ({max_tokens}), got {min_tokens}: lower it",
        param="min_tokens",
    )


def _stops(fields: Fields, limits: Limits) -> list[str]:
    value = fields.take("stop")
    if value is None:
        return []
    stops = value if isinstance(value, list) else [value]
    if len(stops) > limits.max_stops:
        raise expected(f"at most {limits.max_stops} stop strings", value, "stop")
    checked: list[str] = []
    for stop in stops:
        if not isinstance(stop, str) or not 0 < len(stop) <= limits.max_stop_chars:
            raise expected(f"stop strings of 1 to {limits.max_stop_chars} characters", stop, "stop")
        checked.append(stop)
    return checked


def _stop_token_ids(fields: Fields, limits: Limits) -> list[int]:
    ids = fields.items("stop_token_ids", limits.max_stop_token_ids)
    return parse_token_ids(ids, "stop_token_ids", limits) if ids else []


def _logit_bias(fields: Fields, limits: Limits) -> dict[int, float]:
    value = fields.take("logit_bias")
    if value is None:
        return {}
    if not isinstance(value, dict) or len(value) > limits.max_logit_biases:
        raise expected(
            f"an object of at most {limits.max_logit_biases} token ids and their biases", value, "logit_bias"
        )
    biases: dict[int, float] = {}
    for key, bias in value.items():
        # int() takes more than a token id looks like: blanks, signs, underscores, other digits.
        if not (key.isascii() and key.isdigit()) or len(key) > 10 or int(key) >= limits.vocab_size:
            raise expected(f"token ids from 0 to {limits.vocab_size - 1} as keys", key, "logit_bias")
        if not isinstance(bias, int | float) or isinstance(bias, bool) or abs(bias) > MAX_LOGIT_BIAS:
            raise expected(f"biases from -{MAX_LOGIT_BIAS:g} to {MAX_LOGIT_BIAS:g}", bias, "logit_bias")
        biases[int(key)] = float(bias)
    return biases


def _forced(fields: Fields, limits: Limits) -> list[int] | None:
    value = fields.take("forced_token_ids")
    return None if value is None else parse_token_ids(value, "forced_token_ids", limits)


def _forced_length(template: Sampling, max_tokens: int | None) -> int:
    """`max_tokens` of a replay; ApiError beside what could not have an effect on it."""
    forced = template.forced_token_ids
    assert forced is not None
    beside = {
        "stop": template.stop,
        "stop_token_ids": template.stop_token_ids,
        "a structure for the answer": template.structure is not None,
        "presence_penalty": template.presence_penalty,
        "frequency_penalty": template.frequency_penalty,
        "repetition_penalty": template.repetition_penalty != 1.0,
        "min_tokens": template.min_tokens,
    }
    given = [name for name, value in beside.items() if value]
    if given:
        raise ApiError(
            f"expected forced_token_ids alone, got {describe(given[0])} beside it: a replay has no choice to "
            "steer, leave it out",
            param="forced_token_ids",
        )
    if max_tokens not in (None, len(forced)):
        raise ApiError(
            f"expected max_tokens {len(forced)}, as many as forced_token_ids, got {max_tokens}: leave it out",
            param="max_tokens",
        )
    return len(forced)
