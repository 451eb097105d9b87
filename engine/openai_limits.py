"""What a body may ask at most, and the checks that every body shares: the model's name, token ids.

Owns: Limits, the bounds of lists and texts. Refuses to know: which endpoint has which field. Invariants: a
limit is one number here, and a body beyond it is a 400 that names it.

Usage: `limits = Limits(models=("m",), vocab_size=100, max_model_len=64)`.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from firstdiff.engine.openai_fields import ApiError, Fields, describe, expected
from firstdiff.tracing.records import LogprobsMode


@dataclass(frozen=True, slots=True)
class Limits:
    """What a body may ask at most, and what this server has: settings of the server, all of them."""

    models: tuple[str, ...]
    vocab_size: int
    max_model_len: int
    logprobs_mode: LogprobsMode = "raw_logprobs"
    """Of requests that name none."""
    takes_priorities: bool = False
    """Whether the scheduler orders by priority; else any but 0 is refused."""
    max_prompts: int = 128
    max_choices: int = 128
    max_messages: int = 1024
    max_tools: int = 128
    max_stops: int = 16
    max_stop_chars: int = 256
    max_stop_token_ids: int = 128
    max_logit_biases: int = 1024
    max_structure_chars: int = 64 << 10
    max_structure_choices: int = 1024
    max_labels: int = 16
    max_label_chars: int = 512


def check_model(fields: Fields, limits: Limits) -> str:
    """The model asked for, the first one where none is named; ApiError 404 when this server has others."""
    model = fields.text("model")
    if model is None:
        return limits.models[0]
    if model not in limits.models:
        raise ApiError(
            f"expected a model out of {', '.join(limits.models)}, got {describe(model)}: see /v1/models",
            status=404,
            param="model",
            code="model_not_found",
        )
    return model


def parse_token_ids(value: object, param: str, limits: Limits) -> list[int]:
    """A non-empty array of ids within the vocabulary, short enough for the context."""
    try:
        ids = msgspec.convert(value, list[int])
    except msgspec.ValidationError as error:
        raise expected(f"an array of token ids ({str(error)[:100]})", value, param) from error
    if not ids:
        raise expected("at least one token id", value, param)
    if min(ids) < 0 or max(ids) >= limits.vocab_size:
        bad = next(i for i in ids if not 0 <= i < limits.vocab_size)
        raise expected(f"token ids from 0 to {limits.vocab_size - 1}", bad, param)
    return ids


def parse_texts_or_ids(value: object, param: str, limits: Limits) -> list[str | list[int]]:
    """The four forms: text, array of texts, token ids, array of token ids."""
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list) or not value:
        raise expected("text, token ids, or an array of either", value, param, f'send "{param}": "some text"')
    if not isinstance(value[0], str | list):
        return [parse_token_ids(value, param, limits)]
    if len(value) > limits.max_prompts:
        raise expected(f"at most {limits.max_prompts} prompts", value, param, "send several requests")
    found: list[str | list[int]] = []
    for index, item in enumerate(value):
        where = f"{param}.{index}"
        if isinstance(value[0], str) != isinstance(item, str):
            raise expected("texts only or token ids only", item, where)
        found.append(item if isinstance(item, str) else parse_token_ids(item, where, limits))
    return found
