"""Two replies: where they part, which gaps are known there, how far log-probabilities moved before."""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec
from hypothesis import given
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parent))
from synthetic_runs import Workload, make_rows

from firstdiff.regression.tokens import diff_replies
from firstdiff.tracing.records import RequestRow

ROW = make_rows(Workload(num_cases=1), ["base"])["base"][0][0]


def reply(tokens, logprobs=None, tops=None, **changes):
    texts = [f" t{token}" for token in tokens]
    fields = {
        "token_ids": list(tokens),
        "token_texts": texts,
        "logprobs": logprobs,
        "top_logprobs": tops,
        "text": "".join(texts),
    }
    return msgspec.structs.replace(ROW, **(fields | changes))


def test_equal_replies():
    diff = diff_replies(reply([1, 2]), reply([1, 2]))
    assert (diff.divergence, diff.shift, diff.other, diff.num_tokens) == (None, None, None, 2)


def test_the_first_difference_with_gaps_from_both_sides():
    base = reply([1, 2, 3], [-0.1, -0.5, -1.0], [[(" t1", -0.1)], [(" t2", -0.5), (" t9", -1.25)], []])
    candidate = reply([1, 9, 3], [-0.3, -0.25, -1.0], [[(" t1", -0.3)], [(" t9", -0.25), (" t2", -1.0)], []])
    diff = diff_replies(base, candidate)
    first = diff.divergence
    assert (first.position, first.unit, first.before) == (1, "token", " t1")
    assert (first.base_token_id, first.candidate_token_id) == (2, 9)
    assert (first.base_text, first.candidate_text) == (" t2", " t9")
    assert (first.base_gap, first.candidate_gap) == (0.75, 0.75)
    assert not first.base_gap_at_least
    # Moved: 0.2 at token 0; at the divergence |-0.5 + 1.0| and |-0.25 + 1.25|.
    assert diff.shift == 1.0
    assert diff.num_shift_tokens == 3


def test_a_token_outside_the_listed_ones_gives_a_bound():
    base = reply([2], [-0.1], [[(" t2", -0.1), (" t3", -3.0)]])
    candidate = reply([9], [-0.2], [[(" t9", -0.2), (" t2", -2.0)]])
    first = diff_replies(base, candidate).divergence
    assert (first.base_gap, first.base_gap_at_least) == (2.9, True)
    assert (first.candidate_gap, first.candidate_gap_at_least) == (1.8, False)
    # Base gave the candidate's token at most -3.0, so it moved by at least 2.8.
    assert diff_replies(base, candidate).shift == 2.8


def test_one_side_ends_earlier():
    first = diff_replies(reply([1]), reply([1, 2])).divergence
    assert (first.position, first.base_token_id, first.base_text) == (1, None, None)
    assert (first.candidate_token_id, first.base_gap) == (2, None)


def test_without_ids_texts_are_compared_and_without_texts_characters():
    by_text = diff_replies(reply([1, 2], token_ids=None), reply([1, 3], token_ids=None)).divergence
    assert (by_text.unit, by_text.position, by_text.base_token_id) == ("token text", 1, None)
    by_char = diff_replies(
        reply([1], token_ids=None, token_texts=None, text="abcd"), reply([1], text="abxd", token_texts=None)
    ).divergence
    assert (by_char.unit, by_char.position) == ("character", 2)
    assert (by_char.base_text, by_char.candidate_text, by_char.before) == ("c", "x", "ab")


def test_other_text_or_ending_of_equal_tokens():
    assert diff_replies(reply([1]), reply([1], text="x")).other == "text"
    assert diff_replies(reply([1]), reply([1], finish_reason="stop")).other == "finish reason"
    assert diff_replies(reply([1]), reply([2], finish_reason="stop")).other is None


def test_two_tokens_of_one_text_have_no_gap():
    same = {"token_texts": ["�"]}
    base = reply([1], [-0.1], [[("�", -0.1)]], **same)
    candidate = reply([2], [-0.2], [[("�", -0.2)]], **same)
    diff = diff_replies(base, candidate)
    assert (diff.divergence.base_gap, diff.shift) == (None, None)


IDS = st.lists(st.integers(0, 3), max_size=6)
LOGPROBS = st.none() | st.lists(st.floats(-1e308, 0), max_size=7)
TOPS = st.none() | st.lists(
    st.lists(st.tuples(st.sampled_from([" t0", " t1", "", "x" * 500]), st.floats(-1e308, 0)), max_size=3),
    max_size=7,
)


@st.composite
def hostile_replies(draw):
    ids = draw(st.none() | IDS)
    return msgspec.structs.replace(
        ROW,
        token_ids=ids,
        token_texts=draw(st.none() | st.lists(st.text(max_size=3), max_size=6)),
        logprobs=draw(LOGPROBS),
        top_logprobs=draw(TOPS),
        text=draw(st.text(max_size=10)),
    )


@given(hostile_replies(), hostile_replies())
def test_hostile_replies_give_fewer_facts_and_no_error(base: RequestRow, candidate: RequestRow):
    diff = diff_replies(base, candidate)
    mirrored = diff_replies(candidate, base)
    assert (diff.divergence is None) == (mirrored.divergence is None)
    assert diff.shift == mirrored.shift
    if diff.divergence is not None:
        assert diff.divergence.position == mirrored.divergence.position
        assert diff.divergence.base_gap == mirrored.divergence.candidate_gap
        assert msgspec.json.decode(msgspec.json.encode(diff.divergence))["position"] >= 0
