"""From a GGUF file's tokenizer section to Hugging Face's tokenizer files.

Owns: which pre-tokenizer a GGUF name means, how SentencePiece's scores become merges, the end tokens of a
chat reply, the tokenizer files' content. Refuses to know: weights, downloads, how text is tokenised later.
Invariants: token ids are the GGUF's; a tokenizer whose rules are not known is refused and never guessed,
because a wrong guess is silent.

Usage: `files = read_tokenizer_files(GGUFReader(path))`.
"""

from __future__ import annotations

import json
from typing import Any

from gguf import GGUFReader, TokenType
from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE

from firstdiff.engine.gguf_weights import read_architecture, read_field, read_optional
from firstdiff.engine.token_bytes import PIECE_BLANK

END_TOKENS = ("<|im_end|>", "<|endoftext|>", "<end_of_turn>")
"""Texts of tokens that end a reply, beside the file's own eos: ChatML's and Gemma's turn ends among them."""

QWEN2_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""How Qwen2 and Qwen3 split a text; Source: their tokenizer.json, LLAMA_VOCAB_PRE_TYPE_QWEN2 in llama.cpp."""


def read_tokenizer_files(reader: GGUFReader) -> dict[str, str]:
    """File name -> JSON content: tokenizer.json, tokenizer_config.json, generation_config.json."""
    tokens: list[str] = read_field(reader, "tokenizer.ggml.tokens")
    types: list[int] = read_field(reader, "tokenizer.ggml.token_type")
    tokenizer = _backend(reader, tokens, types)
    for kind, special in ((TokenType.CONTROL, True), (TokenType.USER_DEFINED, False)):
        texts = [text for text, own in zip(tokens, types, strict=True) if own == kind]
        added = [AddedToken(text, special=special, normalized=False) for text in texts]
        (tokenizer.add_special_tokens if special else tokenizer.add_tokens)(added)
    special_ids = [index for index, kind in enumerate(types) if kind == TokenType.CONTROL]
    return {
        "tokenizer.json": tokenizer.to_str(pretty=False),
        "tokenizer_config.json": _dump(_tokenizer_config(reader, tokens)),
        "generation_config.json": _dump(_generation_config(reader, tokens, special_ids)),
    }


def byte_level_bpe(vocab: dict[str, int], merges: list[tuple[str, str]], pre: str = "smollm") -> Tokenizer:
    """A byte-level BPE tokenizer with the pre-tokenizer that llama.cpp calls `pre`; ValueError otherwise.

    `smollm`: each digit alone, then GPT-2's pattern (Source: LLAMA_VOCAB_PRE_TYPE_SMOLLM in llama.cpp:
    `\\p{N}` splits first, so that blanks before a digit are not joined to it). `qwen2`: QWEN2_PATTERN on
    composed characters (NFC), as the models' own tokenizer.json has it; llama.cpp leaves the latter out.
    """
    tokenizer = Tokenizer(BPE(vocab=vocab, merges=merges))
    if pre == "smollm":
        split: Any = pre_tokenizers.Digits(individual_digits=True)
    elif pre == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
        split = pre_tokenizers.Split(Regex(QWEN2_PATTERN), behavior="isolated", invert=False)
    else:
        raise ValueError(
            f"expected tokenizer.ggml.pre smollm or qwen2 in the GGUF file, got {pre!r}: "
            "use the model's Hugging Face folder instead"
        )
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=True, use_regex=pre == "smollm")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, to_bytes])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    return tokenizer


def sentencepiece_bpe(vocab: dict[str, int], merges: list[tuple[str, str]], unknown: str) -> Tokenizer:
    """SentencePiece's BPE without a blank put before the text: blanks as U+2581, bytes for what is left."""
    tokenizer = Tokenizer(
        BPE(vocab=vocab, merges=merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    )
    tokenizer.normalizer = normalizers.Replace(" ", PIECE_BLANK)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(PIECE_BLANK, " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return tokenizer


def merges_of_scores(pieces: dict[str, float]) -> list[tuple[str, str]]:
    """Every pair of pieces that makes a piece, the best score first, the shorter left half first.

    SentencePiece joins whatever neighbours make the best piece; a BPE's list of merges says the same.
    """
    merges = []
    for text, score in pieces.items():
        for cut in range(1, len(text)):
            if text[:cut] in pieces and text[cut:] in pieces:
                merges.append((-score, cut, text))
    merges.sort()
    return [(text[:cut], text[cut:]) for _, cut, text in merges]


def _backend(reader: GGUFReader, tokens: list[str], types: list[int]) -> Tokenizer:
    model = read_field(reader, "tokenizer.ggml.model")
    vocab = {text: index for index, text in enumerate(tokens)}
    adds_bos = read_optional(reader, "tokenizer.ggml.add_bos_token")
    if model == "gpt2":
        if adds_bos:
            raise ValueError("expected tokenizer.ggml.add_bos_token false in the GGUF file, got true")
        merges = [tuple(merge.split(" ")) for merge in read_field(reader, "tokenizer.ggml.merges")]
        return byte_level_bpe(vocab, merges, read_field(reader, "tokenizer.ggml.pre"))
    if model != "llama":
        raise ValueError(
            f"expected tokenizer.ggml.model gpt2 or llama in the GGUF file, got {model!r}: "
            "use the model's Hugging Face folder instead"
        )
    for key, wanted in (("add_space_prefix", False), ("add_eos_token", False)):
        if (got := read_optional(reader, f"tokenizer.ggml.{key}", key == "add_space_prefix")) != wanted:
            raise ValueError(f"expected tokenizer.ggml.{key} {wanted} in the GGUF file, got {got}")
    scores = read_field(reader, "tokenizer.ggml.scores")
    # Control and user-defined tokens are found in a text before anything is merged.
    whole = (TokenType.CONTROL, TokenType.USER_DEFINED)
    pieces = {
        text: score for text, score, kind in zip(tokens, scores, types, strict=True) if kind not in whole
    }
    unknown = tokens[read_field(reader, "tokenizer.ggml.unknown_token_id")]
    tokenizer = sentencepiece_bpe(vocab, merges_of_scores(pieces), unknown)
    # llama.cpp puts it there where the file is silent.
    if adds_bos is not False:
        bos = read_field(reader, "tokenizer.ggml.bos_token_id")
        tokenizer.post_processor = processors.TemplateProcessing(
            single=[tokens[bos], "$A"],
            pair=[tokens[bos], "$A", tokens[bos], "$B"],
            special_tokens=[(tokens[bos], bos)],
        )
    return tokenizer


def _tokenizer_config(reader: GGUFReader, tokens: list[str]) -> dict[str, Any]:
    names = {"bos": "bos", "eos": "eos", "pad": "padding", "unk": "unknown"}
    ids = {name: read_optional(reader, f"tokenizer.ggml.{key}_token_id") for name, key in names.items()}
    prefix, _ = read_architecture(reader)
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **{f"{name}_token": None if index is None else tokens[index] for name, index in ids.items()},
        "model_max_length": read_field(reader, f"{prefix}.context_length"),
        "clean_up_tokenization_spaces": False,
        "chat_template": read_optional(reader, "tokenizer.chat_template"),
    }


def _generation_config(reader: GGUFReader, tokens: list[str], special: list[int]) -> dict[str, Any]:
    eos = read_field(reader, "tokenizer.ggml.eos_token_id")
    ends = [index for text in END_TOKENS for index in special if tokens[index] == text]
    return {
        "bos_token_id": read_optional(reader, "tokenizer.ggml.bos_token_id"),
        "eos_token_id": list(dict.fromkeys([eos, *ends])),
        "pad_token_id": read_optional(reader, "tokenizer.ggml.padding_token_id"),
    }


def _dump(content: dict[str, Any]) -> str:
    return json.dumps(content, indent=2, ensure_ascii=False) + "\n"
