"""Which bytes a vocabulary entry stands for.

Owns: the byte alphabets of GPT-2's and SentencePiece's tokenizers. Refuses to know: ids, whole texts.
Invariants: joining the bytes of a text's tokens gives the text; a tokenizer that decodes in another way is
refused, because its tokens have no bytes of their own.

Usage: `TokenBytes.of_decoder(tokenizer.decoder).read("Ġworld") == b" world"`.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

PIECE_BLANK = "\u2581"
"""SentencePiece's mark for a blank."""

_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_PIECE_DECODERS = {"Metaspace", "Replace", "ByteFallback", "Fuse", "Strip"}


@dataclass(frozen=True, slots=True)
class TokenBytes:
    """How one family of tokenizers writes bytes as text in its vocabulary."""

    is_byte_level: bool
    has_byte_pieces: bool
    """Whether `<0x0A>` is the byte 10 (SentencePiece with byte fallback)."""
    drops_first_blank: bool
    """Whether decoding a whole text leaves out one blank at its beginning."""

    @classmethod
    def of_decoder(cls, decoder: Any) -> TokenBytes:  # noqa: ANN401 - the library has many decoder classes
        """Read a `tokenizers` decoder; ValueError when it is neither byte-level nor SentencePiece's."""
        # A decoder's pickled state is its JSON.
        content: dict[str, Any] = {"type": "none"} if decoder is None else json.loads(decoder.__getstate__())
        parts: list[dict[str, Any]] = content["decoders"] if content["type"] == "Sequence" else [content]
        kinds: set[str] = {part["type"] for part in parts}
        if kinds == {"ByteLevel"}:
            return cls(is_byte_level=True, has_byte_pieces=False, drops_first_blank=False)
        if kinds <= _PIECE_DECODERS and any(map(_reads_blank, parts)):
            return cls(
                is_byte_level=False,
                has_byte_pieces="ByteFallback" in kinds,
                drops_first_blank=any(map(_drops_blank, parts)),
            )
        raise ValueError(
            "expected a byte-level or SentencePiece decoder in tokenizer.json, "
            f"got {', '.join(sorted(kinds))}: use a Llama-family model"
        )

    def read(self, token: str) -> bytes:
        """The bytes of one vocabulary entry in the middle of a text."""
        if self.is_byte_level:
            try:
                return bytes(_BYTE_VALUES[character] for character in token)
            except KeyError:
                # An added token with a character outside the alphabet stands for its own text.
                return token.encode()
        if self.has_byte_pieces and (match := _BYTE_PIECE.fullmatch(token)):
            return bytes.fromhex(match[1])
        return token.replace(PIECE_BLANK, " ").encode()


def _reads_blank(part: dict[str, Any]) -> bool:
    if part["type"] == "Metaspace":
        return bool(part["replacement"] == PIECE_BLANK)
    return bool(
        part["type"] == "Replace" and part["pattern"] == {"String": PIECE_BLANK} and part["content"] == " "
    )


def _drops_blank(part: dict[str, Any]) -> bool:
    if part["type"] == "Metaspace":
        return bool(part.get("prepend_scheme", "always") != "never")
    return bool(part["type"] == "Strip" and part["content"] == " " and part["start"] > 0)


def _byte_values() -> dict[str, int]:
    """GPT-2's printable character for each byte, inverted (`bytes_to_unicode` in its encoder.py)."""
    kept = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    moved = [byte for byte in range(256) if byte not in kept]
    return {chr(byte): byte for byte in kept} | {chr(256 + i): byte for i, byte in enumerate(moved)}


_BYTE_VALUES = _byte_values()
