"""From a GGUF file's tokenizer section to Hugging Face's tokenizer files.

Owns: which pre-tokenizer a GGUF name means, the end tokens of a chat reply, the tokenizer files' content.
Refuses to know: weights, downloads, how text is tokenised later. Invariants: token ids are the GGUF's;
a pre-tokenizer whose rules are not known is refused and never guessed, because a wrong guess is silent.

Usage: `files = read_tokenizer_files(GGUFReader(path))`.
"""

from __future__ import annotations

import json
from typing import Any

from gguf import GGUFReader, TokenType
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers, processors
from tokenizers.models import BPE

from firstdiff.engine.gguf_weights import read_field

END_TOKENS = ("<|im_end|>", "<|endoftext|>")
"""Texts of tokens that end a reply, beside the file's own eos: ChatML's turn end and the document end."""


def read_tokenizer_files(reader: GGUFReader) -> dict[str, str]:
    """File name -> JSON content: tokenizer.json, tokenizer_config.json, generation_config.json."""
    tokens: list[str] = read_field(reader, "tokenizer.ggml.tokens")
    special = _special_ids(reader)
    return {
        "tokenizer.json": _backend(reader, tokens, special).to_str(pretty=False),
        "tokenizer_config.json": _dump(_tokenizer_config(reader, tokens)),
        "generation_config.json": _dump(_generation_config(reader, tokens, special)),
    }


def byte_level_bpe(vocab: dict[str, int], merges: list[tuple[str, str]], special: list[str]) -> Tokenizer:
    """A byte-level BPE tokenizer with the `smollm` pre-tokenizer: each digit alone, then GPT-2's pattern.

    `special` are texts already in `vocab` that are matched whole and skipped on request when decoding.
    Source: LLAMA_VOCAB_PRE_TYPE_SMOLLM in llama.cpp: `\\p{N}` splits first, so that blanks before a digit
    are not joined to it.
    """
    tokenizer = Tokenizer(BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=True, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in special])
    return tokenizer


def _backend(reader: GGUFReader, tokens: list[str], special: list[int]) -> Tokenizer:
    model = read_field(reader, "tokenizer.ggml.model")
    pre = read_field(reader, "tokenizer.ggml.pre")
    if (model, pre) != ("gpt2", "smollm"):
        raise ValueError(
            f"expected tokenizer.ggml.model gpt2 and tokenizer.ggml.pre smollm in the GGUF file, "
            f"got {model!r} and {pre!r}: use the model's Hugging Face folder instead"
        )
    if read_field(reader, "tokenizer.ggml.add_bos_token"):
        raise ValueError("expected tokenizer.ggml.add_bos_token false in the GGUF file, got true")
    merges = [tuple(merge.split(" ")) for merge in read_field(reader, "tokenizer.ggml.merges")]
    vocab = {text: index for index, text in enumerate(tokens)}
    return byte_level_bpe(vocab, merges, [tokens[index] for index in special])


def _special_ids(reader: GGUFReader) -> list[int]:
    types = read_field(reader, "tokenizer.ggml.token_type")
    return [index for index, kind in enumerate(types) if kind == TokenType.CONTROL]


def _tokenizer_config(reader: GGUFReader, tokens: list[str]) -> dict[str, Any]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": tokens[read_field(reader, "tokenizer.ggml.bos_token_id")],
        "eos_token": tokens[read_field(reader, "tokenizer.ggml.eos_token_id")],
        "pad_token": tokens[read_field(reader, "tokenizer.ggml.padding_token_id")],
        "unk_token": tokens[read_field(reader, "tokenizer.ggml.unknown_token_id")],
        "model_max_length": read_field(reader, "llama.context_length"),
        "clean_up_tokenization_spaces": False,
        "chat_template": read_field(reader, "tokenizer.chat_template"),
    }


def _generation_config(reader: GGUFReader, tokens: list[str], special: list[int]) -> dict[str, Any]:
    eos = read_field(reader, "tokenizer.ggml.eos_token_id")
    ends = [index for text in END_TOKENS for index in special if tokens[index] == text]
    return {
        "bos_token_id": read_field(reader, "tokenizer.ggml.bos_token_id"),
        "eos_token_id": list(dict.fromkeys([eos, *ends])),
        "pad_token_id": read_field(reader, "tokenizer.ggml.padding_token_id"),
    }


def _dump(content: dict[str, Any]) -> str:
    return json.dumps(content, indent=2, ensure_ascii=False) + "\n"
