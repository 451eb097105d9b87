"""Replies: what good endpoints send is read fully, anything else is a ReplyError and never a crash."""

from __future__ import annotations

import json
import random

import msgspec
import pytest

from firstdiff.harness.replies import Chunk, ReplyError, ReplyReader, error_body_text


def read(body: object, reader: ReplyReader | None = None) -> Chunk:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    return (reader or ReplyReader()).read(data, received_ns=7, headers_received_ns=5)


def choice(**fields: object) -> dict[str, object]:
    return {"choices": [{"index": 0, **fields}]}


def test_a_chat_chunk_with_everything() -> None:
    entry = {"token": "Hi", "logprob": -0.5, "bytes": [72, 105]}
    chunk = read(
        choice(
            delta={"content": "Hi"},
            logprobs={"content": [entry | {"top_logprobs": [entry, {"token": "Ho", "logprob": -1.5}]}]},
            token_ids=[42],
        )
        | {
            "prompt_token_ids": [1, 2],
            "usage": {
                "prompt_tokens": 2,
                "completion_tokens": 1,
                "prompt_tokens_details": {"cached_tokens": 1},
            },
        }
    )
    assert (chunk.text, chunk.token_ids, chunk.token_texts, chunk.num_tokens) == ("Hi", [42], ["Hi"], 1)
    assert (chunk.logprobs, chunk.top_logprobs) == ([-0.5], [[("Hi", -0.5), ("Ho", -1.5)]])
    assert chunk.usage is not None
    assert (chunk.prompt_token_ids, chunk.usage.cached_tokens, chunk.received_ns) == ([1, 2], 1, 7)


def test_a_completion_chunk_with_everything() -> None:
    logprobs = {
        "tokens": ["a", "b"],
        "token_logprobs": [-1, -2.0],
        "top_logprobs": [{"x": -3.0, "a": -1.0}, {"b": -2.0}],
        "text_offset": [0, 1],
    }
    chunk = read(choice(text="ab", logprobs=logprobs, finish_reason="length", prompt_token_ids=[9]))
    assert (chunk.text, chunk.logprobs, chunk.finish_reason) == ("ab", [-1.0, -2.0], "length")
    assert chunk.top_logprobs == [[("a", -1.0), ("x", -3.0)], [("b", -2.0)]]
    assert (chunk.num_tokens, chunk.prompt_token_ids) == (2, [9])


def test_llama_cpp_names_ids_in_its_log_probabilities() -> None:
    entry = {"id": 5, "token": "a", "logprob": -1.0, "top_logprobs": []}
    assert read(choice(delta={"content": "a"}, logprobs={"content": [entry]})).token_ids == [5]


def test_reasoning_is_text_and_a_role_is_no_content() -> None:
    assert read(choice(delta={"reasoning_content": "hm"})).text == "hm"
    assert read(choice(delta={"reasoning": "hm", "content": "so"})).text == "hmso"
    assert not read(choice(delta={"role": "assistant", "content": ""})).has_content


def test_tokens_a_chunk_from_cumulative_usage() -> None:
    reader = ReplyReader()
    counts = [
        read(choice(delta={"content": "x"}) | {"usage": {"prompt_tokens": 1, "completion_tokens": n}}, reader)
        for n in (1, 4, 4)
    ]
    assert [chunk.num_tokens for chunk in counts] == [1, 3, 0]
    last = read({"choices": [], "usage": {"prompt_tokens": 1, "completion_tokens": 4}}, reader)
    assert not last.has_content


def test_a_total_at_the_end_says_nothing_about_its_chunk() -> None:
    reader = ReplyReader()
    assert read(choice(delta={"content": "x"}), reader).num_tokens is None
    last = read(choice(delta={}) | {"usage": {"prompt_tokens": 1, "completion_tokens": 9}}, reader)
    assert last.num_tokens is None
    assert not last.has_content


def test_a_token_without_text_is_content() -> None:
    assert read(choice(delta={"content": ""}, token_ids=[3])).has_content


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"", "expected an OpenAI-style JSON reply"),
        (b"<html>", "<html>"),
        (b"[]", "expected an OpenAI-style JSON reply"),
        (b"null", "expected an OpenAI-style JSON reply"),
        (b"{}", "expected a reply with choices"),
        (b'{"x":' + b"[" * 100_000, "expected an OpenAI-style JSON reply"),
        (b'{"choices": [{"text": "\xff"}]}', "expected an OpenAI-style JSON reply"),
        (b'{"choices": [{"text": "\\ud800"}]}', "expected an OpenAI-style JSON reply"),
        (b'{"choices": [{"token_ids": [1e400]}]}', "expected an OpenAI-style JSON reply"),
        (choice(text=1), "text"),
        (choice(token_ids=["a"]), "token_ids"),
        (choice(token_ids=[-1]), "token_ids"),
        (choice(token_ids=[2**70]), "token_ids"),
        (choice(token_ids=[True]), "token_ids"),
        ({"choices": [{"index": 1, "text": "x"}]}, "expected one choice"),
        ({"choices": [{"text": "x"}, {"text": "y"}]}, "expected one choice"),
        ({"error": {"message": "out of memory"}}, "out of memory"),
        ({"error": "boom", "choices": []}, "boom"),
        ({"choices": [], "usage": {"prompt_tokens": -1}}, "prompt_tokens"),
    ],
)
def test_a_malformed_reply_is_named(body: object, message: str) -> None:
    with pytest.raises(ReplyError, match=message):
        read(body)


def test_any_mutation_is_a_chunk_that_can_be_written_or_an_error() -> None:
    entry = {"token": "a", "logprob": -1.0, "top_logprobs": [{"token": "b", "logprob": -2}]}
    good = json.dumps(
        choice(delta={"content": "a"}, token_ids=[1], logprobs={"content": [entry]}, finish_reason=None)
        | {"usage": {"prompt_tokens": 1, "completion_tokens": 1}}
    ).encode()
    spices = [b'"', b"}", b"]", b"null", b"-", b"1e9", b"99999999999999999999", b"\xff", b"true", b"{"]
    num_errors = 0
    for seed in range(3000):
        rng = random.Random(seed)
        body = bytearray(good)
        for _ in range(rng.randint(1, 3)):
            start = rng.randrange(len(body))
            body[start : start + rng.randint(0, 3)] = rng.choice(spices)
        try:
            msgspec.json.encode(read(bytes(body)))
        except ReplyError:
            num_errors += 1
    assert num_errors > 1000


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (b'{"error": {"message": "no", "code": 400}}', "no"),
        (b'{"message": "flat"}', "flat"),
        (b'{"detail": "fastapi"}', "{'detail': 'fastapi'}"),
        (b'"text"', "text"),
        (b"<h1>502</h1>", "<h1>502</h1>"),
        (b"\xff", "\ufffd"),
    ],
)
def test_error_texts(body: bytes, text: str) -> None:
    assert error_body_text(body) == text
