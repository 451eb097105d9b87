"""The rows: every fact that engine and harness write down, one frozen record each.

Owns: the shape and the units of each row. Refuses to know: where rows are stored, who makes or reads them.
Invariants: a row is immutable; each carries its kind in the `kind` field; unknown fields are ignored when
decoding, so an older Firstdiff reads a newer Run; times ending in `_ns` are monotonic and comparable only
within one machine, `_unix_ns` joins with the outside world.

Usage: `decode_row(line, RequestRow)`.
"""

from __future__ import annotations

from typing import Literal, TypeVar

import msgspec
from msgspec import UNSET, UnsetType

from firstdiff.tracing.row_parts import Asked as Asked
from firstdiff.tracing.row_parts import Cut as Cut
from firstdiff.tracing.row_parts import Digests as Digests
from firstdiff.tracing.row_parts import LogContent as LogContent
from firstdiff.tracing.row_parts import LogprobsMode as LogprobsMode
from firstdiff.tracing.row_parts import Preemption as Preemption
from firstdiff.tracing.row_parts import PrefillChunk as PrefillChunk
from firstdiff.tracing.row_parts import Sampling as Sampling
from firstdiff.tracing.row_parts import Structure as Structure
from firstdiff.tracing.row_parts import StructureKind as StructureKind
from firstdiff.tracing.row_parts import Told as Told
from firstdiff.tracing.row_parts import Usage as Usage

T = TypeVar("T", bound=msgspec.Struct)

SCHEMA_VERSION = 1

TOKEN_LOG_SCHEMA = 2
"""Of TokenLogRow. 2 added what was asked and told, contents left out or cut, LossRow; 1 is still read."""

UNREADABLE = (msgspec.DecodeError, RecursionError)
"""What decoding a damaged or hostile line raises (RecursionError: thousands of nested brackets)."""

Outcome = Literal["ok", "failed", "unknown"]
FinishReason = Literal["stop", "length", "abort", "error"]
LossReason = Literal["queue_full", "disk", "unwritable", "closed"]


class Row(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind"):
    """One immutable line of a Run."""


class Identity(Row, frozen=True, kw_only=True, tag="identity"):
    """What a server is made of: two servers with equal hashes should compute the same thing.

    Hashes are SHA-256 hex digests of file contents (weights: of the tensor files in name order;
    config: of the model's config.json; engine_config: of the resolved engine flags as JSON).
    `special_tokens` are the tokenizer's ids by name (`bos_token`), `eos_token_ids` what ends an answer,
    `rng_scheme` how sampling makes noise of a request's seed and a token's position (engine/rng.py). These
    three are left out where they are not known, so that the line of an older server keeps its hash.
    """

    schema: int = SCHEMA_VERSION
    model: str
    engine: str
    engine_version: str
    instance_id: str
    weights_sha256: str
    config_sha256: str
    tokenizer_sha256: str
    chat_template_sha256: str | None
    engine_config_sha256: str
    engine_config: dict[str, str | int | float | bool | None]
    dtype: str
    device: str
    vocab_size: int
    max_model_len: int
    versions: dict[str, str]
    faults: list[str] = []
    special_tokens: dict[str, int] | UnsetType = UNSET
    eos_token_ids: list[int] | UnsetType = UNSET
    rng_scheme: str | UnsetType = UNSET


class StepRow(Row, frozen=True, kw_only=True, tag="step"):
    """One engine step; `num_running`, `num_waiting` and the blocks are as the step left them."""

    step_index: int
    started_ns: int
    ended_ns: int
    schedule_ns: int
    execute_ns: int
    batch_size: int
    num_prefill_tokens: int
    num_decode_tokens: int
    num_running: int
    num_waiting: int
    num_preemptions: int
    num_used_blocks: int
    num_blocks: int
    num_prefix_queried_tokens: int = 0
    num_prefix_hit_tokens: int = 0


class LoadRow(Row, frozen=True, kw_only=True, tag="load"):
    """What the engine holds, written when that changes outside a step: a request was aborted."""

    num_running: int
    num_waiting: int
    num_used_blocks: int
    num_blocks: int


class TokenRow(Row, frozen=True, kw_only=True, tag="token"):
    """One output token as it left the model; log-probabilities as the request's `logprobs_mode` says.

    A request's first row also says how many of its prompt's tokens came from the cache.
    """

    request_id: str
    token_index: int
    token_id: int
    emitted_ns: int
    step_index: int
    batch_size: int
    logprob: float | None = None
    top_logprobs: list[tuple[int, float]] = []
    num_cached_tokens: int | None = None


class PromptLogprobsRow(Row, frozen=True, kw_only=True, tag="prompt_logprobs"):
    """Log-probabilities of prompt tokens `start .. start + len(logprobs)`, each given all before it.

    The rows of a request follow one another without gap, before its first TokenRow. `top_logprobs` has an
    entry a token, sorted by falling log-probability.
    """

    request_id: str
    start: int
    logprobs: list[float]
    top_logprobs: list[list[tuple[int, float]]]


class EngineRequestRow(Row, frozen=True, kw_only=True, tag="engine_request"):
    """A request as the engine core saw it, written when it ends; token rows carry its output.

    Order of the stamps: arrived <= first_scheduled <= first_token <= finished. Stamps that were never
    reached are None (a request aborted in the queue has no first_scheduled_ns).
    """

    request_id: str
    prompt_token_ids: list[int]
    sampling: Sampling
    arrived_ns: int
    first_scheduled_ns: int | None
    first_token_ns: int | None
    finished_ns: int
    finish_reason: FinishReason
    error: str | None
    num_cached_tokens: int
    num_output_tokens: int
    prefill_chunks: list[PrefillChunk] = []
    num_preemptions: int = 0
    preemptions: list[Preemption] = []
    priority: int = 0


class TokenLogRow(Row, frozen=True, kw_only=True, tag="token_log"):
    """The token-ID log: one line a finished request, enough to replay it and to explain each token.

    The per-token lists `emitted_ns`, `step_index`, `batch_size`, `logprobs` and, where alternatives were
    wanted, `top_logprobs` have one entry for each of `token_ids`, in output order. `text_offsets` has one for
    each token told to the client: where in `text` its own text begins, in characters. `token_ids`
    includes the EOS or stop token when one ended the request; `text` does not. `span_id` is that of the HTTP
    request (HttpRow), which answers may share: it is `choice_index` of `num_choices`, and answers its prompt
    `prompt_index`. `identity_sha256`
    points at the Identity line of the same log (SHA-256 of its JSON). `user` and `metadata` are what the
    client called the request. `received_ns`, `tokenized_ns` and
    `flushed_ns` are the server's: HTTP body read, prompt ids ready, last byte written.

    With `content` "ids" texts and bodies are left out, and other words of the client are replaced by
    `sha256:` and their digest; with "hash" ids are left out too, and `digests` say what was there.
    `text_sha256` and `num_text_chars`, filled in as a row is written, are of the whole text. `truncated` says
    what was cut because the row was too large. `asked` and `told` are None in logs from before schema 2.
    """

    schema: int = TOKEN_LOG_SCHEMA
    request_id: str
    trace_id: str | None
    span_id: str | None
    tracestate: str = ""
    endpoint: str
    identity_sha256: str
    received_unix_ns: int
    received_ns: int
    tokenized_ns: int
    arrived_ns: int
    first_scheduled_ns: int | None
    first_token_ns: int | None
    finished_ns: int
    flushed_ns: int
    prompt_token_ids: list[int]
    sampling: Sampling
    token_ids: list[int]
    emitted_ns: list[int]
    step_index: list[int]
    batch_size: list[int]
    logprobs: list[float | None]
    text: str
    finish_reason: FinishReason
    error: str | None
    num_cached_tokens: int
    prefill_chunks: list[PrefillChunk]
    num_preemptions: int
    preemptions: list[Preemption] = []
    priority: int = 0
    user: str | None = None
    metadata: dict[str, str] = {}
    content: LogContent = "full"
    choice_index: int = 0
    num_choices: int = 1
    prompt_index: int = 0
    asked: Asked | None = None
    told: Told | None = None
    top_logprobs: list[list[tuple[int, float]]] = []
    text_offsets: list[int] = []
    text_sha256: str = ""
    num_text_chars: int = 0
    digests: Digests | None = None
    truncated: list[Cut] = []

    @property
    def num_prompt_tokens(self) -> int:
        """Also where the ids themselves were left out or cut."""
        if self.digests is not None:
            return self.digests.num_prompt_tokens
        return self.num_all("prompt_token_ids", len(self.prompt_token_ids))

    @property
    def num_output_tokens(self) -> int:
        """Also where the ids themselves were left out or cut."""
        if self.digests is not None:
            return self.digests.num_tokens
        return self.num_all("token_ids", len(self.token_ids))

    def num_all(self, field: str, num_kept: int) -> int:
        """How many entries `field` had before any cut."""
        return next((cut.num_all for cut in self.truncated if cut.field == field), num_kept)


class LossRow(Row, frozen=True, kw_only=True, tag="loss"):
    """`num_rows` rows that belong into `file` at about this place in the log could not be kept.

    `first_ns` and `last_ns` bound the times that the lost rows told of.
    """

    file: str
    num_rows: int
    reason: LossReason
    first_ns: int
    last_ns: int


class HttpRow(Row, frozen=True, kw_only=True, tag="http"):
    """One HTTP request for an answer as the server saw it, refused ones included.

    `received_ns` is when its head was read, `ended_ns` when nothing more was written to it. `status` is None
    when the client was gone before there was one. `error_type` says in a word why there was no whole answer:
    the error's code, `cancelled` for a client that left, `stream_error` after a stream had begun; None when
    all is well. `num_answers` counts the requests that the engine took for it, each a TokenLogRow with this
    row's `span_id`. `sampled` is what was decided when it came.
    """

    request_id: str | None
    trace_id: str
    span_id: str
    parent_span_id: str | None
    tracestate: str = ""
    sampled: bool
    method: str
    route: str
    status: int | None
    error_type: str | None
    received_unix_ns: int
    received_ns: int
    ended_ns: int
    num_answers: int


class RequestRow(Row, frozen=True, kw_only=True, tag="request"):
    """A request as the client saw it: what was asked, when each read came, what came back.

    `case_id` names the workload case, equal on all sides; `repeat_index` counts its repetitions on this
    side, `block_index` the interleaving block it ran in. `intended_ns` is when the workload wanted it
    sent, `sent_ns` just before the request was written, `chunk_received_ns[i]` when the i-th content
    chunk was read off the socket (before parsing), `chunk_num_tokens[i]` how many tokens it held (None
    where the endpoint does not say). `token_ids`, `logprobs`, `top_logprobs` are None where the endpoint
    gives none. Outcome: `ok` a complete well-formed answer; `failed` an error reply or a malformed
    answer; `unknown` a time-out or a connection lost (the work may have happened).
    """

    schema: int = SCHEMA_VERSION
    request_id: str
    case_id: str
    repeat_index: int = 0
    block_index: int = 0
    trace_id: str | None = None
    intended_ns: int
    sent_ns: int
    headers_received_ns: int | None
    chunk_received_ns: list[int]
    chunk_num_tokens: list[int | None]
    finished_ns: int
    sent_unix_ns: int
    outcome: Outcome
    status: int | None
    error: str | None
    prompt_token_ids: list[int] | None
    text: str
    token_ids: list[int] | None
    token_texts: list[str] | None = None
    logprobs: list[float] | None
    top_logprobs: list[list[tuple[str, float]]] | None
    finish_reason: str | None
    usage: Usage | None


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """What a client asks, immutable. Exactly one of `prompt` and `messages` is set.

    `prompt` is text or token ids and goes to /v1/completions; `messages` to /v1/chat/completions.
    `extra` holds further body fields, passed through as they are.
    """

    case_id: str
    prompt: str | list[int] | None = None
    messages: list[dict[str, str]] | None = None
    max_tokens: int = 64
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int | None = None
    logprobs: int | None = None
    stream: bool = True
    extra: dict[str, bool | int | float | str | list[str | int] | dict[str, float] | None] = {}


def encode_row(row: msgspec.Struct) -> bytes:
    """One JSON line without the newline; floats keep their shortest exact form."""
    return msgspec.json.encode(row)


def decode_row(line: bytes, row_type: type[T]) -> T:
    """The row in `line`; raises one of UNREADABLE when it is not one of `row_type`."""
    return msgspec.json.decode(line, type=row_type)
