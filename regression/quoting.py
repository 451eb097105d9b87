"""Text from outside made harmless: model output, labels, error messages inside our sentences.

Owns: the one form in which foreign text enters a finding, and its rendering per medium. Refuses to know:
what the text means. Invariants: quoted text is printable, on one line, bounded in length, holds no
backtick, pipe or guillemet, so it can break out of no terminal, table cell or code span; it stands between
« and » and nowhere else do these occur.

Usage: `f"first token {quoted(text)}"`, later `for_text(sentence)` or `for_markdown(sentence)`.
"""

from __future__ import annotations

import re
import unicodedata

MAX_QUOTED_CHARS = 48

_QUOTED = re.compile("«([^»]*)»")
_NAMED = {"\n": r"\n", "\t": r"\t", "\r": r"\r", "\\": r"\\"}
_ESCAPED = "`|«»\N{LINE SEPARATOR}\N{PARAGRAPH SEPARATOR}"
_MARKDOWN = re.compile(r"[\\`*_{}\[\]<>#!|~&$@:]")


def quoted(text: str, limit: int = MAX_QUOTED_CHARS) -> str:
    """`text` between « and »: at most `limit` of its characters, what cannot be shown as escapes."""
    shown = "".join(_shown(char) for char in text[:limit])
    more = f"… ({len(text)} characters)" if len(text) > limit else ""
    return f"«{shown}{more}»"


def quoted_end(text: str, limit: int = MAX_QUOTED_CHARS) -> str:
    """As `quoted`, but the last characters."""
    shown = "".join(_shown(char) for char in text[-limit:])
    return f"«{'…' if len(text) > limit else ''}{shown}»"


def _shown(char: str) -> str:
    if char in _NAMED:
        return _NAMED[char]
    category = unicodedata.category(char)
    # Other (control, format, surrogate, unassigned), separators but the space, marks that stack on others.
    is_hidden = category[0] in "CZ" and char != " "
    if is_hidden or category in ("Mn", "Me") or char in _ESCAPED:
        code = ord(char)
        return f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}" if code < 65536 else f"\\U{code:08x}"
    return char


def for_text(sentence: str) -> str:
    """The sentence for a terminal or a log: foreign text in double quotes."""
    return _QUOTED.sub(lambda match: '"' + match.group(1).replace('"', '\\"') + '"', sentence)


def for_markdown(sentence: str) -> str:
    """The sentence for Markdown, table cells included: foreign text in code spans, the rest escaped."""
    parts = []
    end = 0
    for match in _QUOTED.finditer(sentence):
        parts.append(_escape_markdown(sentence[end : match.start()]))
        # A code span needs something in it, and a space on both sides is taken off again when shown.
        inside = match.group(1)
        parts.append(f"` {inside} `" if inside.strip() else f"`{inside or '(empty)'}`")
        end = match.end()
    return "".join(parts) + _escape_markdown(sentence[end:])


def _escape_markdown(text: str) -> str:
    # Entities and not backslashes: they hold in every dialect, and inside tables too.
    return _MARKDOWN.sub(lambda match: f"&#{ord(match.group())};", text)
