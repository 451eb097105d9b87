"""A model folder's tokenizer, read by Hugging Face's library: the second opinion on a log's texts.

Owns: reading tokenizer.json. Refuses to know: logs, and the bundled engine, whose texts it is to check.
Invariants: what the file asks for in truncation and padding is left out; any id is taken, unknown ones are
no text.

Usage: `tokenizer = FileTokenizer(folder); tokenizer.decode([1, 2], skip_special_tokens=True)`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any


class FileTokenizer:
    """Of `folder`/tokenizer.json; ValueError when it cannot be read. Needs the package `tokenizers`."""

    def __init__(self, folder: Path) -> None:
        from tokenizers import Tokenizer

        file = folder / "tokenizer.json"
        if not file.is_file():
            raise ValueError(f"expected tokenizer.json in {folder}, got none: name a complete model folder")
        self.sha256 = hashlib.sha256(file.read_bytes()).hexdigest()
        try:
            self._tokenizer: Any = Tokenizer.from_file(str(file))
        except Exception as error:  # the Rust reader raises bare Exception
            raise ValueError(f"expected a readable tokenizer in {file}, got: {error}") from error
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._num_ids: int = self._tokenizer.get_vocab_size(with_added_tokens=True)

    def encode(self, text: str) -> list[int]:
        """Ids of `text`, nothing put before or after."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """Text of `ids`; bytes that are not UTF-8 become U+FFFD."""
        known = [token_id for token_id in ids if self.knows(token_id)]
        text: str = self._tokenizer.decode(known, skip_special_tokens=skip_special_tokens)
        return text

    def knows(self, token_id: int) -> bool:
        """Whether it is one of the tokenizer's ids."""
        # The Rust side takes 32-bit ids only.
        return 0 <= token_id < 1 << 32 and self._tokenizer.id_to_token(token_id) is not None
