"""What rows are made of: the records inside records, which are no lines of their own.

Owns: the shape and the units of each part. Refuses to know: which rows hold it, where they are stored.
Invariants: as of rows (records.py): immutable, units in the names, unknown fields ignored when decoding.

Usage: `Sampling(temperature=0.0, top_k=0, top_p=1.0, seed=1, max_tokens=16)`.
"""

from __future__ import annotations

from typing import Literal

import msgspec

LogprobsMode = Literal["raw_logprobs", "processed_logprobs"]
StructureKind = Literal["json_object", "json_schema", "regex", "choice", "grammar", "tool_calls"]
LogContent = Literal["full", "ids", "hash"]


class Structure(msgspec.Struct, frozen=True, kw_only=True):
    """What an answer must match.

    `spec` is the JSON schema, the regular expression, the JSON array of choices or the Lark grammar as text;
    empty for `json_object`. For `tool_calls`, which is any text with calls in it, it is JSON: the tags `open`
    and `close`, the JSON schema `call` of what stands between them, and `most`, how many calls (null: any).
    """

    kind: StructureKind
    spec: str = ""


class Sampling(msgspec.Struct, frozen=True, kw_only=True):
    """Sampling as resolved, after all defaults; `seed` is always set, so the noise can be made again.

    `logprobs` and `prompt_logprobs` count the alternatives wanted at each output and prompt position, None
    for no log-probabilities; of the prompt those from index `prompt_logprobs_start` on. `max_tokens` 0
    computes the prompt and samples nothing. `forced_token_ids` are emitted in place of samples.
    """

    temperature: float
    top_k: int
    top_p: float
    seed: int
    max_tokens: int
    stop: list[str] = []
    stop_token_ids: list[int] = []
    ignore_eos: bool = False
    logprobs: int | None = None
    min_p: float = 0.0
    min_tokens: int = 0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = {}
    prompt_logprobs: int | None = None
    prompt_logprobs_start: int = 1
    logprobs_mode: LogprobsMode = "raw_logprobs"
    structure: Structure | None = None
    forced_token_ids: list[int] | None = None


class PrefillChunk(msgspec.Struct, frozen=True, kw_only=True):
    """Prompt tokens `start_token .. start_token + num_tokens` were computed in step `step_index`.

    `finished_ns` is when that step's results were taken in; None in logs from before it was written down.
    """

    step_index: int
    start_token: int
    num_tokens: int
    finished_ns: int | None = None


class Preemption(msgspec.Struct, frozen=True, kw_only=True):
    """A request lost its KV blocks to others with `num_lost_tokens` of its tokens computed.

    `preempted_ns` is the moment, `scheduled_ns` when it was admitted again, `recovered_ns` when it had as
    many tokens computed as before (those found in the prefix cache count). None where it did not come to
    that, or was pushed out once more before.
    """

    preempted_ns: int
    num_lost_tokens: int
    scheduled_ns: int | None = None
    recovered_ns: int | None = None


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """Token counts as the endpoint reported them."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int | None = None


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    """What a client asked beside its sampling, as far as it decides the prompt and the text.

    `body` is the HTTP body, on the first answer to it only, as is its SHA-256. `prompt_text_sha256` is of the
    text that became the prompt's tokens (a chat as its template wrote it), None where ids were sent.
    `add_special_tokens` is None for those too. `num_truncated_tokens` were cut off the prompt's beginning on
    request. Whether a cache salt came is told, the salt is not.
    """

    body: str | None = None
    body_sha256: str | None = None
    prompt_text_sha256: str | None = None
    add_special_tokens: bool | None = None
    num_truncated_tokens: int = 0
    skip_special_tokens: bool = True
    include_stop: bool = False
    has_cache_salt: bool = False
    use_prefix_cache: bool = True


class Told(msgspec.Struct, frozen=True, kw_only=True):
    """What the client was told of its answer.

    `num_tokens` went into it, the first of `token_ids`: after a stop string the engine may have gone on.
    `finish_reason` is None when the answer had no end; one that calls tools ends with "stop". `stop_match` is
    the stop string or the stop token that ended it. `usage` counts all answers to the HTTP request, None
    where the answer had none.
    """

    num_tokens: int
    finish_reason: str | None
    stop_match: str | int | None = None
    usage: Usage | None = None
    utf8_incomplete_tail: bool = False


class Digests(msgspec.Struct, frozen=True, kw_only=True):
    """What a log of hashes keeps in place of ids and text: SHA-256 hex digests and counts.

    Those of ids are of their JSON array without blanks, that of the sampling is of what of it decides the
    tokens, as a log of ids has it (log_content.py). A digest of something short can be guessed by trying.
    """

    num_prompt_tokens: int
    prompt_sha256: str
    num_tokens: int
    tokens_sha256: str
    sampling_sha256: str


class Cut(msgspec.Struct, frozen=True, kw_only=True):
    """Of `field`, the first `num_kept` of `num_all` characters or entries are there."""

    field: str
    num_kept: int
    num_all: int
