"""A choice gives out its text piece by piece: joined it is the answer, whatever its tokens and stops."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from firstdiff.engine.choice import Choice, Piece, echo_of
from firstdiff.engine.engine import EngineRequest
from firstdiff.engine.model_store import resolve
from firstdiff.engine.tokenizer import IncrementalDetokenizer, Tokenizer
from firstdiff.tracing.records import EngineRequestRow, Sampling, TokenRow

TINY = Tokenizer.load(resolve("tiny-random").path)
BYTE_IDS = {TINY.token_bytes(token_id): token_id for token_id in range(3, 3 + 256)}
EOS = 2

byte_ids = st.binary(max_size=30).map(lambda data: [BYTE_IDS[bytes([byte])] for byte in data])
any_ids = st.lists(st.integers(0, TINY.vocab_size - 1), max_size=30) | byte_ids
some_text = st.text(st.sampled_from("ab é東🙂\n"), min_size=1, max_size=12)


def choice(prompt: list[int], *, skip: bool = True, include: bool = False, **sampling: object) -> Choice:
    resolved = Sampling(temperature=0, top_k=0, top_p=1, seed=0, max_tokens=99, **sampling)  # type: ignore[arg-type]
    request = EngineRequest(request_id="r", prompt_token_ids=prompt, sampling=resolved)
    detokenizer = IncrementalDetokenizer(TINY, prompt, skip_special_tokens=skip)
    return Choice(0, request, detokenizer, include_stop=include)


def ended(one: Choice, num_tokens: int, reason: str) -> EngineRequestRow:
    return EngineRequestRow(
        request_id="r", prompt_token_ids=one.request.prompt_token_ids, sampling=one.request.sampling,
        arrived_ns=0, first_scheduled_ns=0, first_token_ns=0, finished_ns=1, finish_reason=reason,  # type: ignore[arg-type]
        error=None, num_cached_tokens=0, num_output_tokens=num_tokens,
    )  # fmt: skip


def follow(one: Choice, ids: list[int], reason: str = "length") -> list[Piece]:
    """All pieces, to the one that carries the finish."""
    pieces: list[Piece] = []
    for index, token_id in enumerate(ids):
        row = TokenRow(
            request_id="r", token_index=index, token_id=token_id, emitted_ns=0, step_index=0, batch_size=1
        )
        end = ended(one, len(ids), reason) if index == len(ids) - 1 else None
        pieces.append(one.push(row, end))
        if one.is_finished:
            break
    if not one.is_finished:
        pieces.append(one.end(reason))
    assert [piece.finish_reason is not None for piece in pieces] == [False] * (len(pieces) - 1) + [True]
    return pieces


@settings(max_examples=150)
@given(prompt=any_ids, ids=any_ids, skip=st.booleans())
def test_pieces_joined_are_the_decoded_answer(prompt: list[int], ids: list[int], skip: bool) -> None:
    one = choice(prompt or [5], skip=skip)
    pieces = follow(one, ids)
    decoded = TINY.decode(ids, skip_special_tokens=skip)
    assert "".join(piece.text for piece in pieces) == one.text == decoded
    # No half of a character is ever given out: a replacement stands for bytes that really are none.
    assert sum(piece.text.count("\ufffd") for piece in pieces) == decoded.count("\ufffd")
    offset = 0
    for piece in pieces:
        assert piece.text_offset == offset
        offset += len(piece.text)


@settings(max_examples=150)
@given(text=some_text, stop=some_text.filter(lambda stop: len(stop) < 4), include=st.booleans())
def test_a_stop_string_cuts_the_text(text: str, stop: str, include: bool) -> None:
    ids = [BYTE_IDS[bytes([byte])] for byte in text.encode()]
    one = choice([5], stop=[stop], include=include)
    pieces = follow(one, ids)
    place = text.find(stop)
    expected = text if place < 0 else text[: place + (len(stop) if include else 0)]
    assert "".join(piece.text for piece in pieces) == one.text == expected
    assert pieces[-1].stop_reason == (stop if place >= 0 else None)


@given(text=some_text, stop=some_text.filter(lambda stop: len(stop) < 3), min_tokens=st.integers(0, 12))
def test_the_text_of_the_first_tokens_is_never_a_stop_string(text: str, stop: str, min_tokens: int) -> None:
    ids = TINY.encode(text)
    one = choice([5], stop=[stop], min_tokens=min_tokens)
    follow(one, ids)
    assert one.num_tokens >= min(min_tokens, len(ids))
    free = "".join(follow(choice([5]), ids[:min_tokens])[i].text for i in range(min(min_tokens, len(ids))))
    rest = text[len(free) :] if "\ufffd" not in free else None
    if rest is not None:
        place = rest.find(stop)
        assert one.text == (text if place < 0 else free + rest[:place])


def test_a_stop_token_has_text_only_when_it_is_to_be_included() -> None:
    ids = [*TINY.encode("ab"), 300]
    for include, text in ((False, "ab"), (True, "ab" + TINY.token_text(300))):
        one = choice([5], include=include, stop_token_ids=[300])
        last = follow(one, ids, "stop")[-1]
        assert (one.text, last.finish_reason, last.stop_reason) == (text, "stop", 300)
    for skip, text in ((True, "ab"), (False, "ab<|im_end|>")):
        one = choice([5], include=True, skip=skip)
        assert follow(one, [*ids[:-1], EOS], "stop")[-1].stop_reason is None
        assert one.text == text


@given(text=some_text, before=st.lists(st.sampled_from([0, 1, 2]), max_size=2))
def test_an_echo_is_the_client_s_text_and_says_where_its_tokens_begin(text: str, before: list[int]) -> None:
    ids = [*before, *TINY.encode(text)]
    echo = echo_of(TINY, ids, text)
    assert echo.text == text
    assert len(echo.offsets) == len(ids)
    assert echo.offsets[: len(before)] == [0] * len(before)
    assert echo.offsets == sorted(echo.offsets)
    for offset, token_id in zip(echo.offsets[len(before) :], ids[len(before) :], strict=True):
        token = TINY.token_bytes(token_id)
        if token == TINY.token_text(token_id).encode():
            assert text[offset:].startswith(token.decode())
    of_ids = echo_of(TINY, ids, None)
    assert of_ids.text == TINY.decode(ids)
