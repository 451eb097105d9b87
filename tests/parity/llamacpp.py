"""llama.cpp on the same GGUF file, and texts of the kinds that tokenizers go wrong on."""

from __future__ import annotations

import json
import random
import unicodedata
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from http.client import HTTPConnection
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from firstdiff.engine.tiny_model import python_topics

SEED = 11

BLANKS = [" ", "  ", "   ", "\t", "\n", "\n\n", "\r\n", "\u00a0", "\u2003", "\u3000", "\v", "\x85"]
DIGITS = ["0", "1", "23", "456", "7890", "1,000.5", "٣٤", "²", "½", "Ⅷ", "一二", "৪"]
WORDS = [
    "a",
    "Hello",
    "it's",
    "I'LL",
    "we've",
    "don't",
    "x_1",
    "naïve",
    "ß",
    "東京",
    "и",
    "مرحبا",
    "'",
    "''s",
]
MARKS = [
    ".",
    "...",
    "-",
    "--",
    "(",
    ")]",
    "#",
    "$",
    "\\n",
    "<|",
    "|>",
    "👩‍👩‍👧",
    "🏳️‍🌈",
    "é",
    "\u200b",
    "\ufeff",
]
SPECIALS = ["<|im_start|>", "<|im_end|>", "<|endoftext|>", "<repo_name>", "<empty_output>", "<|im_start|"]


def mixture(*parts: list[str]) -> Callable[[random.Random], str]:
    pool = [part for group in parts for part in group]
    return lambda rng: "".join(rng.choice(pool) for _ in range(rng.randint(1, 24)))


def random_unicode(rng: random.Random) -> str:
    """Any assigned code points: the regular expressions differ in what they call a letter or a number."""
    planes = [(0, 0x7F), (0x80, 0x7FF), (0x800, 0xFFFF), (0x10000, 0x1FAFF), (0x20000, 0x3134A)]
    text = ""
    length = rng.randint(1, 24)
    while len(text) < length:
        character = chr(rng.randint(*rng.choice(planes)))
        # Unassigned ones may be assigned in one library's Unicode and not yet in the other's.
        if unicodedata.category(character) not in ("Cn", "Cs"):
            text += character
    return text


def prose(rng: random.Random) -> str:
    topic = rng.choice(TOPICS)
    start = rng.randrange(len(topic))
    return topic[start : start + rng.randint(1, 2000)]


TOPICS = list(python_topics())
KINDS: dict[str, Callable[[random.Random], str]] = {
    "prose": prose,
    "blanks before digits": mixture(BLANKS, DIGITS),
    "words and blanks": mixture(BLANKS, WORDS),
    "everything": mixture(BLANKS, DIGITS, WORDS, MARKS),
    "special tokens": mixture(SPECIALS, BLANKS, WORDS),
    "random unicode": random_unicode,
    "bytes": lambda rng: rng.randbytes(rng.randint(1, 40)).decode("utf-8", "replace"),
    "latin-1": lambda rng: rng.randbytes(rng.randint(1, 40)).decode("latin-1"),
}


def texts_of(kind: str, count: int, kinds: dict[str, Callable[[random.Random], str]] = KINDS) -> list[str]:
    """The same texts every time."""
    rng = random.Random(f"{SEED} {kind}")
    return [kinds[kind](rng) for _ in range(count)]


class LlamaCpp:
    """Its server's answers to JSON bodies; a connection each, as it closes those that idle."""

    def __init__(self, address: str) -> None:
        self._address = address

    def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        with closing(HTTPConnection(self._address, timeout=60)) as connection:
            connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
            answer: dict[str, Any] = json.loads(connection.getresponse().read())
        return answer

    def tokenize(self, text: str) -> list[int]:
        body = {"content": text, "add_special": True, "parse_special": True}
        ids: list[int] = self.post("/tokenize", body)["tokens"]
        return ids


@contextmanager
def llamacpp_on(gguf: Path, *, context: int = 256) -> Iterator[LlamaCpp]:
    """llama.cpp's server on the file, on loopback, until the block ends."""
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = str(gguf)
    params.n_ctx = context
    params.n_parallel = 1
    params.n_threads_http = 1
    params.cpuparams.n_threads = 1
    params.warmup = False
    params.verbosity = 0
    params.cache_ram_mib = 0
    params.port = 0
    server = xllamacpp.Server(params)
    try:
        yield LlamaCpp(urlsplit(server.listening_address).netloc)
    finally:
        # Its destructor ends the server's threads.
        del server
