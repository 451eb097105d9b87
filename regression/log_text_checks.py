"""Whether the texts of a token-ID log are those of its tokens, by a tokenizer that is not the server's.

Owns: the checks that need a tokenizer. Refuses to know: where the tokenizer comes from, files. Invariants:
pure; never raises for what a log holds; what the log leaves out or another tokenizer could not know is
unknown, never a defect; that a text has another tokenisation than the model chose is only noted.

Usage: `remarks += check_texts(log, tokenizer)`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

from firstdiff.regression.log_checks import Remark, Severity
from firstdiff.regression.quoting import quoted
from firstdiff.tracing.records import Identity, TokenLogRow
from firstdiff.tracing.token_log import TokenLog, hash_identity

_BROKEN = "\N{REPLACEMENT CHARACTER}"
_AROUND_CHARS = 16


class TextTokenizer(Protocol):
    """What a tokenizer must do here; `sha256` is of its tokenizer.json."""

    @property
    def sha256(self) -> str: ...

    def encode(self, text: str) -> list[int]:
        """Ids of `text`, nothing put before or after."""
        ...

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool) -> str: ...

    def knows(self, token_id: int) -> bool: ...


def check_texts(log: TokenLog, tokenizer: TextTokenizer) -> list[Remark]:
    """All remarks of the checks of this file."""
    servers = {hash_identity(identity): identity for identity in log.identities}
    remarks: list[Remark] = []
    num_checked = num_other = 0
    for row in log.rows:
        server = servers.get(row.identity_sha256)
        if server is not None and server.tokenizer_sha256 != tokenizer.sha256:
            text = "its server had another tokenizer than the one given"
            remarks.append(Remark("unknown", "tokenizer", row.request_id, text))
            continue
        for check in (_check_known, _check_text):
            remarks += [
                Remark(severity, name, row.request_id, text) for severity, name, text in check(row, tokenizer)
            ]
        if row.content == "full" and not row.truncated and row.text:
            num_checked += 1
            told = told_ids(row, server)
            num_other += tokenizer.encode(row.text) != told
    if num_other:
        text = f"{num_other} of {num_checked} texts have another tokenisation than their tokens"
        remarks.append(Remark("note", "retokenise", None, text))
    return remarks


def told_ids(row: TokenLogRow, server: Identity | None) -> list[int]:
    """The tokens whose text an answer has: without those after a stop string, and without the one that ended
    it unless that was to be shown."""
    ids = row.token_ids
    if row.told is not None:
        ids = ids[: row.told.num_tokens]
    asked = row.asked
    shows_end = asked is not None and asked.include_stop
    by_string = row.told is not None and isinstance(row.told.stop_match, str)
    if row.finish_reason == "stop" and not by_string and not shows_end:
        return ids[:-1]
    return ids


def _check_known(row: TokenLogRow, tokenizer: TextTokenizer) -> Iterator[tuple[Severity, str, str]]:
    for what, ids in (("prompt", row.prompt_token_ids), ("answer", row.token_ids)):
        wrong = [token_id for token_id in ids if not tokenizer.knows(token_id)]
        if wrong:
            yield "defect", "ids", f"{len(wrong)} ids of its {what} are none of the tokenizer's: {wrong[0]}"


def _check_text(row: TokenLogRow, tokenizer: TextTokenizer) -> Iterator[tuple[Severity, str, str]]:
    if row.content != "full" or row.truncated:
        # What is left out or cut is remarked on already.
        return
    if row.told is None and (row.sampling.stop or row.finish_reason in ("abort", "error")):
        yield "unknown", "text", "the log does not say how much of it the client was told"
        return
    skip = row.asked is None or row.asked.skip_special_tokens
    expected = tokenizer.decode(told_ids(row, None), skip_special_tokens=skip)
    stop = row.told.stop_match if row.told is not None else None
    shows_stop = row.asked is not None and row.asked.include_stop
    wrong = _first_difference(
        row.text, expected, stop if isinstance(stop, str) else None, shows_stop=shows_stop
    )
    # Where the client left, or the engine failed, what a stop string could have begun with was held back.
    is_unfinished = row.told is not None and row.told.finish_reason is None
    if wrong is None or (is_unfinished and expected.startswith(row.text)):
        return
    if _BROKEN in row.text and _BROKEN not in expected:
        yield (
            "defect",
            "utf8",
            f"its text has a broken character at {row.text.index(_BROKEN)}, its tokens do not",
        )
    elif _BROKEN in row.text and _BROKEN in expected:
        yield "note", "utf8", "its tokens are broken UTF-8, and its text shows that in another way"
    else:
        here, there = (quoted(text[wrong : wrong + _AROUND_CHARS]) for text in (row.text, expected))
        yield "defect", "text", f"its text and its tokens part at character {wrong}: {here} and {there}"


def _first_difference(text: str, expected: str, stop: str | None, *, shows_stop: bool) -> int | None:
    """Where `text` is not what tokens that decode to `expected` should give; None when it is.

    A tokenizer that writes blanks before words may drop the first, depending on what came before.
    """
    for candidate in {expected, expected.removeprefix(" "), " " + expected}:
        if stop is None:
            is_same = text == candidate
        elif shows_stop:
            is_same = text.endswith(stop) and candidate.startswith(text)
        else:
            is_same = candidate.startswith(text + stop)
        if is_same:
            return None
    same = (index for index, (one, other) in enumerate(zip(text, expected, strict=False)) if one != other)
    return next(same, min(len(text), len(expected)))
