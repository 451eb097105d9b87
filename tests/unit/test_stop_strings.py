"""Stop strings are found where reading character by character would find them."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from firstdiff.engine.stop_strings import StopMatcher

LETTERS = st.text(alphabet="abc", max_size=12)


def give(matcher: StopMatcher, pieces: list[str]) -> tuple[str, str | None]:
    given_out = ""
    for piece in pieces:
        text, stop = matcher.push(piece)
        given_out += text
        if stop is not None:
            return given_out, stop
    return given_out + matcher.finish(), None


def expected(text: str, stops: list[str]) -> tuple[str, str | None]:
    """The plain definition: the first moment, reading by character, at which some stop string is there."""
    for end in range(len(text) + 1):
        for start in range(end):
            if text[start:end] in stops:
                return text[:start], text[start:end]
    return text, None


@given(
    pieces=st.lists(LETTERS, max_size=8),
    stops=st.lists(st.text(alphabet="abc", min_size=1, max_size=4), max_size=4),
)
def test_any_cut_of_the_text_stops_where_reading_by_character_would(
    pieces: list[str], stops: list[str]
) -> None:
    assert give(StopMatcher(stops), pieces) == expected("".join(pieces), stops)


@given(pieces=st.lists(LETTERS, max_size=8))
def test_nothing_is_held_back_that_no_stop_string_begins_with(pieces: list[str]) -> None:
    matcher = StopMatcher(["zz"])
    assert [matcher.push(piece)[0] for piece in pieces] == pieces


def test_a_stop_string_over_three_pieces_never_leaks() -> None:
    matcher = StopMatcher(["<end>"])
    assert matcher.push("one <") == ("one ", None)
    assert matcher.push("en") == ("", None)
    assert matcher.push("d> two") == ("", "<end>")


def test_text_held_back_in_vain_comes_with_the_next_piece() -> None:
    matcher = StopMatcher(["<end>"])
    assert matcher.push("a<en") == ("a", None)
    assert matcher.push("t") == ("<ent", None)
    assert matcher.finish() == ""
