"""Text to token ids and back.

Owns: encoding, decoding, the chat template, text that streams. Refuses to know: models, requests, HTTP.
Invariants: the tokenizer is what tokenizer.json says, never rebuilt from its parts; decoding never cleans
up or otherwise alters text; the deltas of a stream, joined, are the decoded output.

Usage: `tokenizer = Tokenizer.load(folder.path); ids = tokenizer.encode("Hello")`.
"""

from __future__ import annotations

import codecs
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from firstdiff.engine.token_bytes import TokenBytes

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


class Tokenizer:
    """A transformers fast tokenizer, narrowed to what a server needs. Thread-safe: nothing changes."""

    def __init__(self, backend: PreTrainedTokenizerFast) -> None:
        self._transformers = backend
        self._backend = backend.backend_tokenizer
        # tokenizer.json may ask for both; a server must see all of a prompt and nothing more.
        self._backend.no_truncation()
        self._backend.no_padding()
        self.token_bytes_of = TokenBytes.of_decoder(self._backend.decoder)
        self.vocab_size: int = self._backend.get_vocab_size(with_added_tokens=True)
        self.eos_token_id: int | None = backend.eos_token_id
        self.bos_token_id: int | None = backend.bos_token_id
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
            backend = PreTrainedTokenizerFast.from_pretrained(path, local_files_only=True)
        except Exception as error:  # the Rust reader raises bare Exception
            raise ValueError(f"expected a readable tokenizer in {path}, got: {error}") from error
        return cls(backend)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`; ValueError when it is not encodable (a lone surrogate).

        A special token's text inside `text` becomes that token, as with transformers and llama.cpp.
        """
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

    @property
    def special_tokens(self) -> dict[str, int]:
        """Ids of the special tokens that have a name, `bos_token` and the like."""
        names = ("bos_token", "eos_token", "pad_token", "unk_token")
        ids = {name: getattr(self._transformers, f"{name}_id") for name in names}
        return {name: token_id for name, token_id in ids.items() if token_id is not None}

    @property
    def takes_tools(self) -> bool:
        """Whether the chat template has a place for tools."""
        template = self._transformers.chat_template
        return template is not None and "tools" in str(template)

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, object]],
        *,
        tools: Sequence[Mapping[str, object]] | None = None,
        add_generation_prompt: bool = True,
    ) -> list[int]:
        """Token ids of a conversation; errors as `render_chat`."""
        text = self.render_chat(messages, tools=tools, add_generation_prompt=add_generation_prompt)
        # The template writes the special tokens itself.
        return self.encode(text, add_special_tokens=False)

    def render_chat(
        self,
        messages: Sequence[Mapping[str, object]],
        *,
        tools: Sequence[Mapping[str, object]] | None = None,
        add_generation_prompt: bool = True,
    ) -> str:
        """A conversation as its template writes it; ValueError where there is none or it refuses them."""
        if self._transformers.chat_template is None:
            raise ValueError("expected a model with a chat template, got none: use /v1/completions")
        try:
            # Their type wants less than what templates take.
            apply: Any = self._transformers.apply_chat_template
            text = apply(
                list(messages),
                tools=list(tools) if tools else None,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
            )
        except Exception as error:  # a template is a program and raises what it likes
            raise ValueError(f"expected messages that the chat template takes, got: {error}") from error
        return str(text)

    def token_text(self, token_id: int) -> str:
        """Text of one token by itself; "" for an id out of vocabulary."""
        return self.token_bytes(token_id).decode("utf-8", "replace")

    def token_bytes(self, token_id: int) -> bytes:
        """Bytes that one token adds in the middle of a text; b"" for an id out of vocabulary."""
        token = self._token(token_id)
        return b"" if token is None else self.token_bytes_of.read(token)

    def is_special(self, token_id: int) -> bool:
        """Whether the token is one that `skip_special_tokens` leaves out."""
        return self._token(token_id) in self._special_texts

    def info(self) -> dict[str, object]:
        """The special tokens' texts and the chat template, as clients that tokenise themselves need them."""
        names: dict[str, Any] = {
            name: getattr(self._transformers, name)
            for name in ("bos_token", "eos_token", "pad_token", "unk_token")
        }
        return names | {"chat_template": self._transformers.chat_template}

    def _token(self, token_id: int) -> str | None:
        # The Rust side takes 32-bit ids only.
        if not 0 <= token_id < self.vocab_size:
            return None
        token: str | None = self._backend.id_to_token(token_id)
        return token


class IncrementalDetokenizer:
    """Turns output ids into text as they come: never half a character, never text of the prompt.

    With a byte-level tokenizer the deltas joined are `decode(output ids)`, whatever the prompt: a character
    that the prompt left unfinished shows as U+FFFD. SentencePiece decoders drop the blank that begins a
    text, so there it stays when the prompt has text; and they replace a whole run of bytes that has an
    error, of which this keeps the whole characters.
    """

    def __init__(
        self, tokenizer: Tokenizer, prompt_token_ids: Sequence[int], *, skip_special_tokens: bool = True
    ) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._drop_blank = tokenizer.token_bytes_of.drops_first_blank and all(
            tokenizer.is_special(token_id) for token_id in prompt_token_ids
        )
        # Replaces broken UTF-8 as the Rust decoder does: U+FFFD for each maximal beginning of a character.
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_id: int) -> str:
        """The text that `token_id` completes, often "" in the middle of a character."""
        if self._skip and self._tokenizer.is_special(token_id):
            return ""
        return self._deliver(self._decoder.decode(self._tokenizer.token_bytes(token_id)))

    def finish(self) -> str:
        """What is left: U+FFFD for a character that was never completed. Nothing may be pushed after."""
        return self._deliver(self._decoder.decode(b"", final=True))

    def _deliver(self, text: str) -> str:
        if self._drop_blank and text:
            self._drop_blank = False
            return text.removeprefix(" ")
        return text
