"""What a log row leaves out leaves no trace, and what is cut from a large one is said in it."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parent))
from ledger_rows import SAMPLING, identity, log_row

from firstdiff.tracing.log_content import encode_log_row, ids_sha256, redacted, text_sha256, with_digests
from firstdiff.tracing.records import Asked, Identity, Structure, TokenLogRow, Told, Usage, decode_row
from firstdiff.tracing.token_log import hash_identity, unfold

WORDS = ("SECRETprompt", "SECRETtext", "SECRETstop", "SECRETspec", "SECRETuser", "SECRETkey", "SECRETvalue")
IDS = (900001, 900002, 900003, 900004, 900005, 900006, 900007)


def secret_row(**changes):
    sampling = msgspec.structs.replace(
        SAMPLING,
        stop=["SECRETstop"],
        stop_token_ids=[900004],
        logit_bias={900005: 1.0},
        forced_token_ids=[900006],
        structure=Structure(kind="regex", spec="SECRETspec"),
        logprobs=1,
    )
    row = log_row(
        sampling=sampling,
        prompt_token_ids=[900001, 900002],
        token_ids=[900003, 900003, 900003],
        top_logprobs=[[(900007, -1.0)]] * 3,
        text="SECRETtext",
        text_offsets=[0, 3, 6],
        user="SECRETuser",
        metadata={"SECRETkey": "SECRETvalue"},
        error="StructureError: SECRETprompt of 900001",
        asked=Asked(body='{"prompt":"SECRETprompt"}', prompt_text_sha256="p"),
        told=Told(num_tokens=3, finish_reason="stop", stop_match="SECRETstop"),
    )
    return msgspec.structs.replace(row, **changes)


def test_a_full_row_has_it_all():
    line = encode_log_row(secret_row()).decode()
    assert all(word in line for word in WORDS)
    assert all(str(token_id) in line for token_id in IDS)
    row = decode_row(line.encode(), TokenLogRow)
    assert row.text_sha256 == text_sha256("SECRETtext")
    assert row.asked.body_sha256 == text_sha256(row.asked.body)
    assert row.num_text_chars == 10


def test_a_log_of_ids_has_no_word_of_client_or_model():
    line = encode_log_row(secret_row(), content="ids").decode()
    assert "SECRET" not in line
    assert all(str(token_id) in line for token_id in IDS)
    row = decode_row(line.encode(), TokenLogRow)
    assert row.content == "ids"
    assert row.text_sha256 == text_sha256("SECRETtext")
    assert row.num_text_chars == 10
    assert row.sampling.stop == ["sha256:" + text_sha256("SECRETstop")] == [row.told.stop_match]
    assert row.error == "StructureError"
    assert unfold(row)[0][0].token_id == 900003


@pytest.mark.parametrize("stop_match", ["SECRETstop", 900004, None])
def test_a_log_of_hashes_has_no_id_either(stop_match):
    told = Told(num_tokens=3, finish_reason="stop", stop_match=stop_match)
    line = encode_log_row(secret_row(told=told), content="hash").decode()
    assert "SECRET" not in line
    assert re.search("9[0-9]{5}[^0-9]", line) is None
    row = decode_row(line.encode(), TokenLogRow)
    assert (row.num_prompt_tokens, row.num_output_tokens) == (2, 3)
    assert row.digests.tokens_sha256 == ids_sha256([900003] * 3)
    # Times are still there, so that spans and phases are.
    assert len(row.emitted_ns) == 3
    with pytest.raises(ValueError, match="only digests of its ids"):
        unfold(row)


@pytest.mark.parametrize("error", ["a sentence: with 900001", "SECRET", "é: x", None])
def test_an_error_keeps_only_its_own_name(error):
    row = redacted(log_row(error=error), "ids")
    assert row.error == (None if error is None else "redacted")


def test_redacting_further_only_loses_more():
    row = secret_row()
    assert redacted(row, "full") is row
    once = redacted(row, "ids")
    assert redacted(once, "ids") == once
    assert redacted(redacted(row, "ids"), "hash") == redacted(row, "hash")
    assert redacted(redacted(row, "hash"), "ids").content == "hash"


LARGE = {
    "body": {"asked": Asked(body="é" * 20_000)},
    "text": {"text": "\x00é" * 20_000},
    "prompt_token_ids": {"prompt_token_ids": list(range(20_000))},
    "structure": {
        "sampling": msgspec.structs.replace(SAMPLING, structure=Structure(kind="regex", spec="a" * 20_000))
    },
}
LONG = {
    name: [value] * 4000
    for name, value in {
        "token_ids": 40_000,
        "emitted_ns": 10**15,
        "step_index": 10**6,
        "batch_size": 8,
        "logprobs": -0.123456789,
    }.items()
}


@pytest.mark.parametrize("field", LARGE)
def test_a_large_row_is_cut_and_marked(field):
    row = log_row(**LARGE[field])
    line = encode_log_row(row, max_bytes=9000)
    assert len(line) <= 9000
    cut = decode_row(line, TokenLogRow)
    (mark,) = cut.truncated
    assert mark.field == field
    assert mark.num_kept < mark.num_all == 20_000 * (2 if field == "text" else 1)
    assert cut.num_prompt_tokens == row.num_prompt_tokens
    assert cut.text_sha256 == text_sha256(row.text), "of the whole text"
    kept = {"body": cut.asked and cut.asked.body, "text": cut.text, "prompt_token_ids": cut.prompt_token_ids}
    if field in kept:
        whole = {
            "body": row.asked and row.asked.body,
            "text": row.text,
            "prompt_token_ids": row.prompt_token_ids,
        }
        assert kept[field] == whole[field][: mark.num_kept]
        assert mark.num_kept > 200, "most of the room is used"
    assert encode_log_row(row, max_bytes=0) == encode_log_row(with_digests(row))


@pytest.mark.parametrize("content", ["full", "ids", "hash"])
def test_lists_of_tokens_are_cut_to_one_length(content):
    row = log_row(
        **LONG, text="x" * 4000, text_offsets=list(range(4000)), top_logprobs=[[(1, -1.0)] * 5] * 4000
    )
    line = encode_log_row(row, content=content, max_bytes=40_000)
    assert len(line) <= 40_000
    cut = decode_row(line, TokenLogRow)
    assert cut.num_output_tokens == 4000
    marks = {mark.field: mark for mark in cut.truncated}
    num_kept = marks["token_ids"].num_kept
    assert 0 < num_kept < 4000
    assert len(cut.emitted_ns) == len(cut.step_index) == len(cut.logprobs) == num_kept
    assert len(cut.token_ids) == (0 if content == "hash" else num_kept)
    with pytest.raises(ValueError, match="expected all token ids of request r1"):
        unfold(cut)


@settings(max_examples=60, deadline=None)
@given(
    st.text(st.characters(exclude_categories=["Cs"]), max_size=400),
    st.integers(0, 200),
    st.integers(2500, 9000),
)
def test_any_row_fits_or_is_refused(text, num_tokens, max_bytes):
    columns = {name: values[:num_tokens] for name, values in LONG.items()}
    row = log_row(text=text * 10, asked=Asked(body=text * 20), **columns)
    line = encode_log_row(row, max_bytes=max_bytes)
    assert len(line) <= max_bytes
    cut = decode_row(line, TokenLogRow)
    assert bool(cut.truncated) == (len(encode_log_row(row)) > max_bytes)


def test_what_cannot_be_cut_is_refused():
    with pytest.raises(ValueError, match="after all cuts: raise the limit"):
        encode_log_row(log_row(user="u" * 5000), max_bytes=3000)


def test_an_older_log_reads_and_its_servers_keep_their_hashes():
    old = msgspec.json.decode(msgspec.json.encode(log_row()))
    for name in TokenLogRow.__struct_fields__[TokenLogRow.__struct_fields__.index("content") :]:
        del old[name]
    old["schema"] = 1
    row = decode_row(msgspec.json.encode(old), TokenLogRow)
    assert (row.schema, row.asked, row.told, row.num_output_tokens) == (1, None, None, 3)
    line = msgspec.json.encode(identity())
    assert b"eos_token_ids" not in line
    assert hash_identity(decode_row(line, Identity)) == hash_identity(identity())
    newer = msgspec.structs.replace(identity(), eos_token_ids=[2], special_tokens={"bos_token": 1})
    assert hash_identity(decode_row(msgspec.json.encode(newer), Identity)) == hash_identity(newer)


def test_usage_of_an_answer_survives():
    usage = Usage(prompt_tokens=3, completion_tokens=3, cached_tokens=1)
    row = log_row(told=Told(num_tokens=3, finish_reason="length", usage=usage))
    assert decode_row(encode_log_row(row, content="hash"), TokenLogRow).told.usage == usage
