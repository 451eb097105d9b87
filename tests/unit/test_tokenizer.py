"""Text survives the tokenizer, streamed text equals decoded text, and nothing odd makes it raise."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from subprocess import run

import pytest
import tokenizers
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers

from firstdiff.engine.model_store import resolve
from firstdiff.engine.tiny_model import SPECIAL_TOKENS, VOCAB_SIZE, python_topics, train_tiny_tokenizer
from firstdiff.engine.tokenizer import IncrementalDetokenizer, Tokenizer

TINY = Tokenizer.load(resolve("tiny-random").path)
END_OF_TEXT, START, END = range(3)
BYTE_IDS = {TINY.token_bytes(token_id): token_id for token_id in range(3, 3 + 256)}

any_token_id = st.integers(-2, VOCAB_SIZE + 2)
token_ids = st.lists(any_token_id, max_size=40)
byte_ids = st.binary(max_size=40).map(lambda data: [BYTE_IDS[bytes([byte])] for byte in data])
text = st.text(st.characters(exclude_categories=["Cs"]), max_size=60)


def stream(tokenizer: Tokenizer, prompt: list[int], output: list[int], *, skip: bool = True) -> list[str]:
    detokenizer = IncrementalDetokenizer(tokenizer, prompt, skip_special_tokens=skip)
    return [detokenizer.push(token_id) for token_id in output] + [detokenizer.finish()]


def save(folder: Path, backend: tokenizers.Tokenizer, **config: object) -> Tokenizer:
    backend.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast"} | config
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return Tokenizer.load(folder)


@given(text)
def test_text_survives(text: str) -> None:
    assert TINY.decode(TINY.encode(text)) == text


@given(prompt=token_ids, output=token_ids | byte_ids, skip=st.booleans())
@example(prompt=[], output=[BYTE_IDS[b"\xf0"], START, BYTE_IDS[b"\x9f"]], skip=True)
def test_streamed_text_is_the_decoded_text(prompt: list[int], output: list[int], skip: bool) -> None:
    deltas = stream(TINY, prompt, output, skip=skip)
    assert "".join(deltas) == TINY.decode(output, skip_special_tokens=skip)


@given(st.binary(max_size=60))
def test_broken_utf8_is_replaced_as_the_decoder_replaces_it(data: bytes) -> None:
    ids = [BYTE_IDS[bytes([byte])] for byte in data]
    assert "".join(stream(TINY, [], ids)) == TINY.decode(ids) == data.decode("utf-8", "replace")


@given(text.filter(lambda text: "\ufffd" not in text))
def test_no_delta_holds_part_of_a_character(text: str) -> None:
    ids = [BYTE_IDS[bytes([byte])] for byte in text.encode()]
    deltas = stream(TINY, [], ids)
    assert not any("\ufffd" in delta for delta in deltas)
    # A character comes with its last byte, not later.
    assert [delta for delta in deltas if delta] == list(text)


def test_a_prompt_that_ends_in_a_character_does_not_leak() -> None:
    euro = [BYTE_IDS[bytes([byte])] for byte in "€".encode()]
    for cut in range(1, 3):
        prompt, output = [*TINY.encode("cost: "), *euro[:cut]], [*euro[cut:], *TINY.encode("5")]
        deltas = stream(TINY, prompt, output)
        assert "€" not in "".join(deltas)
        assert "".join(deltas) == TINY.decode(output) == "\ufffd" * (3 - cut) + "5"


@given(st.integers() | st.sampled_from([-1, VOCAB_SIZE, 2**31, 2**32, 2**64, -(2**63)]))
def test_any_integer_has_a_text_and_bytes(token_id: int) -> None:
    known = 0 <= token_id < VOCAB_SIZE
    assert (TINY.token_bytes(token_id) != b"") == known
    assert TINY.token_text(token_id) == TINY.decode([token_id])
    assert known or TINY.token_text(token_id) == ""


@given(text)
def test_bytes_of_tokens_make_the_text(text: str) -> None:
    assert b"".join(map(TINY.token_bytes, TINY.encode(text))) == text.encode()


def test_lone_surrogates_are_refused() -> None:
    with pytest.raises(ValueError, match="lone surrogate at index 2"):
        TINY.encode("ab\ud800")
    with pytest.raises(ValueError, match="lone surrogate"):
        TINY.apply_chat_template([{"role": "user", "content": "\udfff"}])


def test_special_tokens() -> None:
    ids = TINY.encode("<|im_start|>a<|im_end|>")
    assert (ids[0], ids[-1]) == (START, END)
    assert TINY.decode(ids) == "<|im_start|>a<|im_end|>"
    assert TINY.decode(ids, skip_special_tokens=True) == "a"
    assert TINY.token_text(END) == "<|im_end|>"
    assert (TINY.vocab_size, TINY.bos_token_id, TINY.eos_token_id) == (VOCAB_SIZE, START, END)
    assert TINY.info().keys() == {"bos_token", "eos_token", "pad_token", "unk_token", "chat_template"}


def test_chat_template() -> None:
    messages = [{"role": "user", "content": "Hi"}]
    ids = TINY.apply_chat_template(messages)
    assert TINY.decode(ids) == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert ids.count(START) == 2
    closed = TINY.apply_chat_template(messages, add_generation_prompt=False)
    assert closed == TINY.encode("<|im_start|>user\nHi<|im_end|>\n")


@pytest.mark.parametrize(
    "messages", [[], [{"role": "user"}], [{"role": "user", "content": 5}], [["user", "Hi"]], [{}]]
)
def test_messages_that_a_template_refuses(messages: list[dict[str, str]]) -> None:
    with pytest.raises(ValueError, match="expected messages that the chat template takes"):
        TINY.apply_chat_template(messages)


def test_a_template_may_raise(tmp_path: Path) -> None:
    backend = tokenizers.Tokenizer.from_str(TINY_JSON)
    template = "{{ raise_exception('Only user messages') }}"
    with pytest.raises(ValueError, match="Only user messages"):
        save(tmp_path, backend, chat_template=template).apply_chat_template([{"role": "x", "content": "y"}])
    with pytest.raises(ValueError, match="got none: use /v1/completions"):
        save(tmp_path, backend).apply_chat_template([{"role": "user", "content": "y"}])


TINY_JSON = (resolve("tiny-random").path / "tokenizer.json").read_text(encoding="utf-8")


def test_truncation_and_padding_of_the_file_are_off(tmp_path: Path) -> None:
    backend = tokenizers.Tokenizer.from_str(TINY_JSON)
    backend.enable_truncation(4)
    backend.enable_padding(length=64)
    tokenizer = save(tmp_path, backend)
    assert tokenizer.encode("one two three four five six") == TINY.encode("one two three four five six")
    assert tokenizer.encode("a") == TINY.encode("a")


def test_text_is_never_cleaned_up(tmp_path: Path) -> None:
    tokenizer = save(tmp_path, tokenizers.Tokenizer.from_str(TINY_JSON), clean_up_tokenization_spaces=True)
    assert tokenizer.decode(tokenizer.encode("Hello , do n't !")) == "Hello , do n't !"


def test_added_tokens_stand_for_what_the_decoder_makes_of_them(tmp_path: Path) -> None:
    backend = tokenizers.Tokenizer.from_str(TINY_JSON)
    contents = ["<think>", "naïve", "東京", " x", "Ġ", "£"]
    backend.add_tokens([AddedToken(content, special=False) for content in contents])
    tokenizer = save(tmp_path, backend)
    for content in contents:
        (token_id,) = tokenizer.encode(content)
        assert tokenizer.token_text(token_id) == tokenizer.decode([token_id])


@pytest.mark.parametrize("content", [None, "", "{", "[]", '{"model": 3}', "\x00"])
def test_unreadable_files_are_refused(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(ValueError, match=r"expected (a readable tokenizer|tokenizer\.json) in"):
        Tokenizer.load(tmp_path)


def sentencepiece(folder: Path, decoder: decoders.Decoder) -> Tokenizer:
    """A Llama-2-like tokenizer of single characters, with byte fallback and a bos token."""
    pieces = ["<unk>", "<s>", "</s>"] + [f"<0x{byte:02X}>" for byte in range(256)]
    pieces += ["\u2581", *"abcdefghij", "é", "\u2581a", "\u2581b"]
    merges = [("\u2581", "a"), ("\u2581", "b")]
    vocab = {piece: index for index, piece in enumerate(pieces)}
    backend = tokenizers.Tokenizer(
        models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    backend.decoder = decoder
    backend.add_special_tokens([AddedToken(piece, special=True, normalized=False) for piece in pieces[:3]])
    return save(folder, backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


LLAMA2_DECODER = [
    decoders.Replace("\u2581", " "),
    decoders.ByteFallback(),
    decoders.Fuse(),
    decoders.Strip(content=" ", left=1, right=0),
]
piece_text = st.text(st.sampled_from("abcj é東👩\n"), max_size=20)


@pytest.fixture(scope="module")
def llama2(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return sentencepiece(tmp_path_factory.mktemp("llama2"), decoders.Sequence(LLAMA2_DECODER))


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(prompt=piece_text, output=piece_text)
def test_sentencepiece_streams(llama2: Tokenizer, prompt: str, output: str) -> None:
    prompt_ids, ids = llama2.encode(prompt), llama2.encode(output)
    assert llama2.decode(ids) == output
    # At the beginning of a text its blank goes; inside a text, after the prompt's, it stays.
    assert "".join(stream(llama2, [1], ids)) == output
    whole = llama2.decode([*prompt_ids, *ids], skip_special_tokens=True)
    if prompt_ids:
        assert "".join(stream(llama2, prompt_ids, ids)) == whole.removeprefix(prompt)


def test_sentencepiece_bytes(llama2: Tokenizer, tmp_path: Path) -> None:
    assert [llama2.token_bytes(token_id) for token_id in llama2.encode("a\xff")] == [b" a", b"\xc3", b"\xbf"]
    assert stream(llama2, [1], llama2.encode("é東")) == ["", "é", "", "", "東", ""]
    assert stream(llama2, [1], [3 + 0xE6, 3 + 0x9D]) == ["", "", "\ufffd"]

    metaspace = sentencepiece(tmp_path, decoders.Metaspace())
    ids = metaspace.encode("a b")
    assert "".join(stream(metaspace, [], ids)) == metaspace.decode(ids) == "a b"
    # Without byte fallback `<0x41>` is six characters.
    assert metaspace.token_text(3 + 0x41) == "<0x41>"


def test_other_decoders_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"SentencePiece decoder in tokenizer\.json, got WordPiece"):
        sentencepiece(tmp_path, decoders.WordPiece())


def test_loading_imports_no_torch() -> None:
    code = (
        "import sys; from firstdiff.engine.model_store import resolve; "
        "from firstdiff.engine.tokenizer import Tokenizer; assert 'transformers' not in sys.modules; "
        "Tokenizer.load(resolve('tiny-random').path); assert 'torch' not in sys.modules"
    )
    run([sys.executable, "-c", code], check=True, timeout=60)


def test_the_tiny_tokenizer_can_be_trained_again() -> None:
    trained = tokenizers.Tokenizer.from_str(train_tiny_tokenizer(python_topics()))
    assert trained.get_vocab_size() == VOCAB_SIZE
    assert [trained.token_to_id(special) for special in SPECIAL_TOKENS] == [END_OF_TEXT, START, END]
    # Each Python has its own help texts, so the vocabularies agree only mostly.
    shared = trained.get_vocab().keys() & tokenizers.Tokenizer.from_str(TINY_JSON).get_vocab().keys()
    assert len(shared) > VOCAB_SIZE * 0.9
    assert trained.encode("x  12").tokens == ["x", "ĠĠ", "1", "2"]
