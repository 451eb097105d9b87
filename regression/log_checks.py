"""Whether a token-ID log can be what a sound server wrote: its rows against themselves and one another.

Owns: the checks that need the log alone. Refuses to know: files, tokenizers, whether the tokens are the right
ones. Invariants: pure; never raises for what a log holds; a defect is what no sound server writes, a note is
worth a look, unknown is what the log leaves out.

Usage: `for remark in check_log(log): ...`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from msgspec import UNSET

from firstdiff.regression.quoting import quoted
from firstdiff.tracing.log_content import text_sha256
from firstdiff.tracing.records import TOKEN_LOG_SCHEMA, Identity, TokenLogRow
from firstdiff.tracing.token_log import TokenLog, hash_identity

Severity = Literal["defect", "note", "unknown"]


@dataclass(frozen=True, slots=True)
class Remark:
    """One thing that a check has to say; `request_id` None where it is about the log."""

    severity: Severity
    check: str
    request_id: str | None
    text: str


RowCheck = Callable[[TokenLogRow, Identity | None], Iterator[tuple[Severity, str]]]


def check_log(log: TokenLog) -> list[Remark]:
    """All remarks of the checks of this file, on the log and then row by row."""
    servers = {hash_identity(identity): identity for identity in log.identities}
    remarks = [*_log_remarks(log), *_usage_remarks(log.rows)]
    for row in log.rows:
        server = servers.get(row.identity_sha256)
        if server is None:
            text = "no identity line says what server wrote it"
            remarks.append(Remark("unknown", "identity", row.request_id, text))
        for name, check in ROW_CHECKS.items():
            remarks += [Remark(severity, name, row.request_id, text) for severity, text in check(row, server)]
    return remarks


def _log_remarks(log: TokenLog) -> Iterator[Remark]:
    for sentence in log.damaged:
        yield Remark("defect", "damaged", None, sentence)
    for loss in log.losses:
        text = f"the server could not keep {loss.num_rows} rows of its {quoted(loss.file)} ({loss.reason})"
        yield Remark("defect", "lost", None, text)
    if not log.rows:
        yield Remark("unknown", "rows", None, "the log holds no request")
    seen: set[tuple[str, str]] = set()
    for row in log.rows:
        key = row.identity_sha256, row.request_id
        if key in seen:
            yield Remark("note", "repeated", row.request_id, "another row has this request id")
        seen.add(key)


def _usage_remarks(rows: Sequence[TokenLogRow]) -> Iterator[Remark]:
    """Token counts as clients were told them, against the rows of all answers to the same HTTP request."""
    groups: dict[tuple[str, str | None], list[TokenLogRow]] = {}
    for row in rows:
        groups.setdefault((row.identity_sha256, row.span_id or row.request_id), []).append(row)
    num_untold = 0
    for group in groups.values():
        first = group[0]
        told = [row.told for row in group if row.told is not None]
        usage = next((one.usage for one in told if one.usage is not None), None)
        if len(told) < len(group) or usage is None:
            num_untold += 1
            continue
        if len({row.choice_index for row in group}) < first.num_choices:
            text = f"{first.num_choices} answers belong together, the log has {len(group)} of them"
            yield Remark("unknown", "usage", first.request_id, text)
            continue
        num_output = sum(one.num_tokens for one in told)
        if usage.completion_tokens != num_output:
            text = f"usage tells {usage.completion_tokens} completion tokens, the answer has {num_output}"
            yield Remark("defect", "usage", first.request_id, text)
        num_prompt = sum({row.prompt_index: row.num_prompt_tokens for row in group}.values())
        if usage.prompt_tokens != num_prompt:
            text = f"usage tells {usage.prompt_tokens} prompt tokens, the log has {num_prompt}"
            yield Remark("defect", "usage", first.request_id, text)
    if num_untold:
        text = (
            f"{num_untold} of {len(groups)} HTTP requests were told no usage, or too little is known of them"
        )
        yield Remark("note", "usage", None, text)


def _check_content(row: TokenLogRow, server: Identity | None) -> Iterator[tuple[Severity, str]]:
    if row.schema > TOKEN_LOG_SCHEMA:
        yield "note", f"it is of schema {row.schema}, newer than the {TOKEN_LOG_SCHEMA} known here"
    if row.content == "ids":
        yield "unknown", "its texts were left out (--log-content ids)"
    elif row.content == "hash":
        yield "unknown", "its texts and token ids were left out (--log-content hash)"
    for cut in row.truncated:
        yield "unknown", f"{quoted(cut.field)} was cut to {cut.num_kept} of {cut.num_all}"


def _check_lists(row: TokenLogRow, server: Identity | None) -> Iterator[tuple[Severity, str]]:
    lengths = {
        "emitted_ns": len(row.emitted_ns),
        "step_index": len(row.step_index),
        "batch_size": len(row.batch_size),
        "logprobs": len(row.logprobs),
    }
    kept = next((cut.num_kept for cut in row.truncated if cut.field == "token_ids"), row.num_output_tokens)
    if row.content != "hash":
        lengths["token_ids"] = len(row.token_ids)
        if row.top_logprobs:
            lengths["top_logprobs"] = len(row.top_logprobs)
        if row.told is not None:
            shown = len(row.text_offsets) + max(0, kept - row.told.num_tokens)
            lengths["text_offsets"] = shown
    wrong = {name: length for name, length in lengths.items() if length != kept}
    if wrong:
        named = ", ".join(f"{name} has {length}" for name, length in wrong.items())
        yield "defect", f"its lists should have {kept} entries, but {named}"
    if row.told is not None and row.told.num_tokens > row.num_output_tokens:
        yield "defect", f"{row.told.num_tokens} tokens were told, {row.num_output_tokens} made"
    if any(after < before for before, after in pairwise(row.text_offsets)):
        yield "defect", "its text offsets run backwards"


def _check_stamps(row: TokenLogRow, server: Identity | None) -> Iterator[tuple[Severity, str]]:
    named = [("received", row.received_ns), ("tokenized", row.tokenized_ns), ("arrived", row.arrived_ns)]
    optional = [("first scheduled", row.first_scheduled_ns), ("first token", row.first_token_ns)]
    named += [(name, stamp) for name, stamp in optional if stamp is not None]
    named.append(("finished", row.finished_ns))
    for (before, earlier), (after, later) in pairwise(named):
        if later < earlier:
            yield "defect", f"{after} lies {earlier - later} ns before {before}"
    if row.flushed_ns < row.received_ns:
        yield "defect", f"flushed lies {row.received_ns - row.flushed_ns} ns before received"
    if any(later < earlier for earlier, later in pairwise(row.emitted_ns)):
        yield "defect", "its tokens' stamps run backwards"
    if row.emitted_ns and row.first_token_ns != row.emitted_ns[0]:
        yield "defect", "the first token's stamp is not that of the request"
    if row.emitted_ns and row.emitted_ns[-1] > row.finished_ns:
        yield "defect", "its last token's stamp lies after its end"


def _check_ids(row: TokenLogRow, server: Identity | None) -> Iterator[tuple[Severity, str]]:
    if server is None or row.content == "hash":
        return
    for what, ids in (("prompt", row.prompt_token_ids), ("answer", row.token_ids)):
        wrong = [token_id for token_id in ids if not 0 <= token_id < server.vocab_size]
        if wrong:
            yield (
                "defect",
                f"{len(wrong)} ids of its {what} are not in 0..{server.vocab_size - 1}: {wrong[0]}",
            )


def _check_bos(row: TokenLogRow, server: Identity | None) -> Iterator[tuple[Severity, str]]:
    if row.content == "hash" or server is None:
        return
    if server.special_tokens is UNSET:
        yield "unknown", "the log does not say what token begins a text"
        return
    bos = server.special_tokens.get("bos_token")
    if bos is not None and row.prompt_token_ids[:2] == [bos, bos]:
        yield "defect", f"its prompt begins with token {bos} twice, which begins a text"


def _check_end(row: TokenLogRow, server: Identity | None) -> Iterator[tuple[Severity, str]]:
    sampling, told = row.sampling, row.told
    if told is not None and isinstance(told.stop_match, str):
        if told.stop_match not in sampling.stop:
            yield "defect", f"it ended at {quoted(told.stop_match)}, which is no stop string of it"
        return
    if row.finish_reason == "length":
        room = None if server is None else server.max_model_len - row.num_prompt_tokens
        num = row.num_output_tokens
        if num < sampling.max_tokens and (room is None or num < room):
            yield "defect", f"it ended by its length after {num} of {sampling.max_tokens} tokens"
    if row.content == "hash" or row.truncated or sampling.forced_token_ids is not None:
        return
    ends = set(sampling.stop_token_ids)
    if not sampling.ignore_eos:
        if server is None or server.eos_token_ids is UNSET:
            yield "unknown", "the log does not say what token ends an answer"
            return
        ends.update(server.eos_token_ids)
    ids = row.token_ids
    if (
        row.finish_reason == "stop"
        and (not ids or ids[-1] not in ends)
        and not (sampling.stop and told is None)
    ):
        last = f"token {ids[-1]}" if ids else "nothing"
        yield "defect", f"it ended by a stop, but with {last}: no token or string that stops it"
    middle = [index for index, token_id in enumerate(ids[:-1]) if token_id in ends]
    if middle and middle[-1] >= sampling.min_tokens:
        yield "defect", f"it went on after token {ids[middle[-1]]} at {middle[-1]}, which ends an answer"


def _check_digests(row: TokenLogRow, server: Identity | None) -> Iterator[tuple[Severity, str]]:
    cut = {one.field for one in row.truncated}
    if row.content != "full":
        return
    if row.text_sha256 and "text" not in cut and row.text_sha256 != text_sha256(row.text):
        yield "defect", "its text has another digest than the row says"
    asked = row.asked
    if asked is None or not asked.body or asked.body_sha256 is None or "body" in cut:
        return
    if asked.body_sha256 != text_sha256(asked.body):
        yield "defect", "its body has another digest than the row says"


def _check_tail(row: TokenLogRow, server: Identity | None) -> Iterator[tuple[Severity, str]]:
    told = row.told
    if told is None or row.content != "full" or any(cut.field == "text" for cut in row.truncated):
        return
    if (
        told.utf8_incomplete_tail
        and "\N{REPLACEMENT CHARACTER}" not in row.text[-1:]
        and not row.sampling.stop
    ):
        yield "defect", "it is said to end within a character, but its text does not"


ROW_CHECKS: dict[str, RowCheck] = {
    "content": _check_content,
    "lists": _check_lists,
    "stamps": _check_stamps,
    "ids": _check_ids,
    "bos": _check_bos,
    "end": _check_end,
    "digest": _check_digests,
    "utf8": _check_tail,
}
