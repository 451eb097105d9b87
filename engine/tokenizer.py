"""Text to token ids and back.

Owns: encoding, decoding, the chat template, text that streams. Refuses to know: models, requests, HTTP.
Invariants: the tokenizer is what tokenizer.json says, never rebuilt from its parts; decoding never cleans
up or otherwise alters text; the deltas of a stream, joined, are the decoded output.

Usage: `tokenizer = Tokenizer.load(folder.path); ids = tokenizer.encode("Hello")`.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

CONTEXT_TOKENS = 8
"""Prompt tokens that a stream looks back at, for tokenizers whose first token is decoded differently."""

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class Tokenizer:
    """A transformers fast tokenizer, narrowed to what a server needs. Thread-safe: nothing changes."""

    def __init__(self, backend: PreTrainedTokenizerFast) -> None:
        self._transformers = backend
        self._backend = backend.backend_tokenizer
        # tokenizer.json may ask for both; a server must see all of a prompt and nothing more.
        self._backend.no_truncation()
        self._backend.no_padding()
        self.vocab_size: int = self._backend.get_vocab_size(with_added_tokens=True)
        self.eos_token_id: int | None = backend.eos_token_id
        self.bos_token_id: int | None = backend.bos_token_id
        self.is_byte_level = _is_byte_level(self._backend.decoder)
        """Whether decoding is joining the tokens' bytes and reading them as UTF-8."""
        added = self._backend.get_added_tokens_decoder()
        self._special_texts = {token.content for token in added.values() if token.special}

    @classmethod
    def load(cls, path: Path) -> Tokenizer:
        """Read tokenizer.json and tokenizer_config.json of a folder; ValueError when they cannot be read."""
        # Imported here: it takes most of a second, and not every process that imports this needs it.
        from transformers import PreTrainedTokenizerFast

        if not (path / "tokenizer.json").is_file():
            raise ValueError(f"expected tokenizer.json in {path}, got none: use a complete model folder")
        try:
            return cls(PreTrainedTokenizerFast.from_pretrained(path, local_files_only=True))
        except Exception as error:  # the Rust reader raises bare Exception
            raise ValueError(f"expected a readable tokenizer in {path}, got: {error}") from error

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`; ValueError when it is not encodable (a lone surrogate)."""
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ValueError(
                f"expected Unicode text, got a lone surrogate at index {error.start}: send valid UTF-8"
            ) from error
        ids: list[int] = self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """Text of `token_ids`; bytes that are not UTF-8 become U+FFFD, ids out of vocabulary nothing."""
        known = [token_id for token_id in token_ids if 0 <= token_id < self.vocab_size]
        text: str = self._backend.decode(known, skip_special_tokens=skip_special_tokens)
        return text

    def apply_chat_template(
        self, messages: list[dict[str, str]], *, add_generation_prompt: bool = True
    ) -> list[int]:
        """Token ids of a conversation; ValueError where there is no template or it refuses them."""
        if self._transformers.chat_template is None:
            raise ValueError("expected a model with a chat template, got none: use /v1/completions")
        try:
            text = self._transformers.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=add_generation_prompt
            )
        except Exception as error:  # a template is a program and raises what it likes
            raise ValueError(f"expected messages that the chat template takes, got: {error}") from error
        # The template writes the special tokens itself.
        return self.encode(str(text), add_special_tokens=False)

    def token_text(self, token_id: int) -> str:
        """Text of one token by itself; "" for an id out of vocabulary."""
        return self.token_bytes(token_id).decode("utf-8", "replace")

    def token_bytes(self, token_id: int) -> bytes:
        """Bytes that one token adds to the text; b"" for an id out of vocabulary."""
        token = self._backend.id_to_token(token_id) if 0 <= token_id < self.vocab_size else None
        if token is None:
            return b""
        if self.is_byte_level:
            return _byte_level_bytes(token)
        if match := _BYTE_TOKEN.fullmatch(token):
            return bytes.fromhex(match[1])
        return token.replace("\u2581", " ").encode("utf-8", "replace")

    def is_special(self, token_id: int) -> bool:
        """Whether the token is one that `skip_special_tokens` leaves out."""
        token = self._backend.id_to_token(token_id) if 0 <= token_id < self.vocab_size else None
        return token in self._special_texts

    def info(self) -> dict[str, object]:
        """The special tokens' texts and the chat template, as clients that tokenise themselves need them."""
        backend = self._transformers
        return {
            "bos_token": backend.bos_token,
            "eos_token": backend.eos_token,
            "pad_token": backend.pad_token,
            "unk_token": backend.unk_token,
            "chat_template": backend.chat_template,
        }


class IncrementalDetokenizer:
    """Turns output ids into text as they come: never half a character, never text of the prompt.

    With a byte-level tokenizer the deltas joined are `decode(output ids)`, whatever the prompt. Others
    decode a first token differently (they drop its blank), so there the deltas joined are what the output
    adds after the last whole characters of the prompt.
    """

    def __init__(
        self, tokenizer: Tokenizer, prompt_token_ids: Sequence[int], *, skip_special_tokens: bool = True
    ) -> None:
        self._stream: _ByteStream | _TextStream
        if tokenizer.is_byte_level:
            self._stream = _ByteStream(tokenizer, skip_special_tokens)
        else:
            self._stream = _TextStream(tokenizer, prompt_token_ids, skip_special_tokens)

    def push(self, token_id: int) -> str:
        """The text that `token_id` completes, often "" in the middle of a character."""
        return self._stream.push(token_id)

    def finish(self) -> str:
        """What is left: U+FFFD for a character that was never completed. Nothing may be pushed after."""
        return self._stream.finish()


class _ByteStream:
    """Joins token bytes; Python replaces broken UTF-8 exactly as the tokenizer's own decoder does."""

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_id: int) -> str:
        if self._skip and self._tokenizer.is_special(token_id):
            return ""
        return self._decoder.decode(self._tokenizer.token_bytes(token_id))

    def finish(self) -> str:
        return self._decoder.decode(b"", final=True)


class _TextStream:
    """Decodes a short window twice, with and without the new tokens, and sends the difference."""

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int], skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._window = list(prompt[-CONTEXT_TOKENS:])
        # The rest of a character that the prompt began belongs to the prompt.
        while self._window and self._decode(self._window).endswith("\ufffd"):
            self._window.pop()
        self._num_sent_tokens = len(self._window)

    def push(self, token_id: int) -> str:
        self._window.append(token_id)
        return self._take(final=False)

    def finish(self) -> str:
        return self._take(final=True)

    def _take(self, *, final: bool) -> str:
        sent = self._decode(self._window[: self._num_sent_tokens])
        text = self._decode(self._window)
        if not final and (len(text) <= len(sent) or text.endswith("\ufffd")):
            return ""
        # The tokens sent last are the context of the next ones.
        self._window = self._window[self._num_sent_tokens :]
        self._num_sent_tokens = len(self._window)
        return text[len(sent) :]

    def _decode(self, token_ids: Sequence[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=self._skip)


def _is_byte_level(decoder: Any) -> bool:  # noqa: ANN401 - tokenizers gives decoders of many classes
    # A decoder's pickled state is its JSON.
    return decoder is not None and json.loads(decoder.__getstate__())["type"] == "ByteLevel"


def _byte_values() -> dict[str, int]:
    """GPT-2's printable character for each byte, inverted (`bytes_to_unicode` in its encoder.py)."""
    kept = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    moved = [byte for byte in range(256) if byte not in kept]
    return {chr(byte): byte for byte in kept} | {chr(256 + i): byte for i, byte in enumerate(moved)}


_BYTE_VALUES = _byte_values()


def _byte_level_bytes(token: str) -> bytes:
    try:
        return bytes(_BYTE_VALUES[character] for character in token)
    except KeyError:
        # An added token with a character outside the alphabet stands for its own text.
        return token.encode("utf-8", "replace")
