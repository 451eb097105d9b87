"""How much of a request its log row keeps: all, ids, digests; and what is cut from a row that is too large.

Owns: the modes of redaction, digests, the order in which a large row is cut. Refuses to know: files.
Invariants: a row of mode "ids" holds no text of client or model, one of "hash" no token id either; what was
left out or cut is said in the row itself.

Usage: `line = encode_log_row(row, content="ids", max_bytes=1 << 24)`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import msgspec
from msgspec.structs import replace

from firstdiff.tracing.records import (
    Cut,
    Digests,
    Identity,
    LogContent,
    Sampling,
    TokenLogRow,
)

DIGEST_PREFIX = "sha256:"
PER_TOKEN = ("token_ids", "emitted_ns", "step_index", "batch_size", "logprobs", "top_logprobs")
"""The lists with an entry a token."""

_encode = msgspec.json.Encoder().encode


def hash_identity(identity: Identity) -> str:
    """SHA-256 of the Identity's JSON line: the `identity_sha256` of its server's log rows."""
    return hashlib.sha256(_encode(identity)).hexdigest()


def text_sha256(text: str) -> str:
    """SHA-256 of its UTF-8; a lone surrogate, which has none, counts as U+FFFD's three bytes would."""
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def ids_sha256(ids: Sequence[int]) -> str:
    """SHA-256 of token ids as a JSON array without blanks."""
    return hashlib.sha256(_encode(ids)).hexdigest()


def sampling_sha256(sampling: Sampling) -> str:
    """SHA-256 of the JSON of what decides its tokens: what log-probabilities were wanted does not, nor does
    the seed of a greedy one."""
    sampling = replace(
        sampling,
        seed=sampling.seed if sampling.temperature else 0,
        logprobs=None,
        prompt_logprobs=None,
        prompt_logprobs_start=1,
        logprobs_mode="raw_logprobs",
    )
    return hashlib.sha256(_encode(sampling)).hexdigest()


def with_digests(row: TokenLogRow) -> TokenLogRow:
    """`row` with the digests of its texts, which nobody needs before it is written."""
    asked = row.asked
    if asked is not None and asked.body is not None and asked.body_sha256 is None:
        asked = replace(asked, body_sha256=text_sha256(asked.body))
    if row.text_sha256:
        return row if asked is row.asked else replace(row, asked=asked)
    return replace(row, asked=asked, text_sha256=text_sha256(row.text), num_text_chars=len(row.text))


def redacted(row: TokenLogRow, content: LogContent) -> TokenLogRow:
    """`row` with what `content` leaves out taken away; a row that is redacted further only loses more."""
    if content == "full" or row.content == "hash":
        return row
    row = with_digests(row)
    if row.content == "full":
        row = _without_texts(row)
    return row if content == "ids" else _without_ids(row)


def encode_log_row(row: TokenLogRow, *, content: LogContent = "full", max_bytes: int = 0) -> bytes:
    """The line of `row`, redacted, and cut to `max_bytes` (0: whole).

    Cut are, in this order, the body, the alternatives of tokens, the text, the words of a structure, then the
    ids of prompt and output with all that is told of each; what is too short to help is left. ValueError when
    what is left is still too large, or has no UTF-8.
    """
    row = with_digests(redacted(row, content))
    line = _encode(row)
    if not max_bytes:
        return line
    for cut in (_cut_body, _cut_alternatives, _cut_text, _cut_structure, _cut_prompt, _cut_output):
        if len(line) <= max_bytes:
            return line
        row = cut(row, len(line) - max_bytes)
        line = _encode(row)
    if len(line) > max_bytes:
        raise ValueError(
            f"expected a row of at most {max_bytes} bytes, got {len(line)} after all cuts: raise the limit"
        )
    return line


def _digest(text: str) -> str:
    return DIGEST_PREFIX + text_sha256(text)


def _without_texts(row: TokenLogRow) -> TokenLogRow:
    sampling, told = row.sampling, row.told
    if sampling.stop:
        sampling = replace(sampling, stop=[_digest(stop) for stop in sampling.stop])
    if sampling.structure is not None and sampling.structure.spec:
        structure = replace(sampling.structure, spec=_digest(sampling.structure.spec))
        sampling = replace(sampling, structure=structure)
    if told is not None and isinstance(told.stop_match, str):
        told = replace(told, stop_match=_digest(told.stop_match))
    return replace(
        row,
        content="ids",
        asked=replace(row.asked, body=None) if row.asked is not None else None,
        told=told,
        sampling=sampling,
        text="",
        error=_kind_of_error(row.error),
        user=_digest(row.user) if row.user is not None else None,
        metadata={_digest(key): _digest(value) for key, value in row.metadata.items()},
    )


def _kind_of_error(error: str | None) -> str | None:
    """An error's own name, when it begins with one: what follows may quote anything."""
    if error is None:
        return None
    name, colon, _ = error.partition(":")
    return name if colon and name.isidentifier() and name.isascii() else "redacted"


def _without_ids(row: TokenLogRow) -> TokenLogRow:
    sampling, told = row.sampling, row.told
    digests = Digests(
        num_prompt_tokens=row.num_prompt_tokens,
        prompt_sha256=ids_sha256(row.prompt_token_ids),
        num_tokens=row.num_output_tokens,
        tokens_sha256=ids_sha256(row.token_ids),
        sampling_sha256=sampling_sha256(sampling),
    )
    if told is not None and isinstance(told.stop_match, int):
        told = replace(told, stop_match=None)
    return replace(
        row,
        content="hash",
        digests=digests,
        told=told,
        sampling=replace(sampling, stop_token_ids=[], logit_bias={}, forced_token_ids=None),
        prompt_token_ids=[],
        token_ids=[],
        top_logprobs=[],
        text_offsets=[],
    )


def _cut_body(row: TokenLogRow, excess_bytes: int) -> TokenLogRow:
    if row.asked is None or row.asked.body is None or len(row.asked.body) < _MARK_BYTES:
        return row
    body = row.asked.body
    kept = _fitting(body, excess_bytes)
    return _marked(replace(row, asked=replace(row.asked, body=kept)), "body", len(kept), len(body))


def _cut_alternatives(row: TokenLogRow, _: int) -> TokenLogRow:
    if not row.top_logprobs:
        return row
    return _marked(replace(row, top_logprobs=[]), "top_logprobs", 0, len(row.top_logprobs))


def _cut_text(row: TokenLogRow, excess_bytes: int) -> TokenLogRow:
    if len(row.text) < _MARK_BYTES:
        return row
    kept = _fitting(row.text, excess_bytes)
    return _marked(replace(row, text=kept), "text", len(kept), len(row.text))


def _cut_structure(row: TokenLogRow, _: int) -> TokenLogRow:
    structure = row.sampling.structure
    if structure is None or len(structure.spec) < _MARK_BYTES:
        return row
    sampling = replace(row.sampling, structure=replace(structure, spec=""))
    return _marked(replace(row, sampling=sampling), "structure", 0, len(structure.spec))


def _cut_prompt(row: TokenLogRow, excess_bytes: int) -> TokenLogRow:
    if len(row.prompt_token_ids) < _MARK_BYTES:
        return row
    num_kept = _num_fitting(len(row.prompt_token_ids), len(_encode(row.prompt_token_ids)), excess_bytes)
    ids = row.prompt_token_ids[:num_kept]
    return _marked(replace(row, prompt_token_ids=ids), "prompt_token_ids", num_kept, row.num_prompt_tokens)


def _cut_output(row: TokenLogRow, excess_bytes: int) -> TokenLogRow:
    """All lists of tokens to one length; a log of hashes has no ids, and its other lists are cut alike."""
    columns = {name: getattr(row, name) for name in (*PER_TOKEN, "text_offsets")}
    num_tokens = max(map(len, columns.values()))
    num_kept = _num_fitting(
        num_tokens, sum(len(_encode(column)) for column in columns.values()), excess_bytes
    )
    num_all = row.num_output_tokens
    forced = row.sampling.forced_token_ids
    if forced is not None and len(forced) > num_kept:
        row = _marked(
            replace(row, sampling=replace(row.sampling, forced_token_ids=forced[:num_kept])),
            "forced_token_ids",
            num_kept,
            len(forced),
        )
    row = replace(row, **{name: column[:num_kept] for name, column in columns.items()})
    return _marked(row, "token_ids", num_kept, num_all)


_MARK_BYTES = 128
"""What a Cut takes in a row, and a little."""


def _fitting(text: str, excess_bytes: int) -> str:
    """As much of the beginning of `text` as may stay when the row is to lose `excess_bytes`."""
    room = len(_encode(text)) - excess_bytes - _MARK_BYTES
    kept = text[: max(0, room)]
    while kept and len(_encode(kept)) > room:
        kept = kept[: len(kept) * 3 // 4]
    return kept


def _num_fitting(num: int, num_bytes: int, excess_bytes: int) -> int:
    """How many of `num` entries of `num_bytes` together may stay; entries at the end may be longer."""
    room = num_bytes - excess_bytes - _MARK_BYTES
    return max(0, min(num - 1, num * room // num_bytes * 3 // 4)) if num else 0


def _marked(row: TokenLogRow, field: str, num_kept: int, num_all: int) -> TokenLogRow:
    cuts = [cut for cut in row.truncated if cut.field != field]
    return replace(row, truncated=[*cuts, Cut(field=field, num_kept=num_kept, num_all=num_all)])
