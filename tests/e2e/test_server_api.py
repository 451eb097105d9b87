"""What the server answers: prompt forms, streams, stops, token ids, log-probabilities, usage."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from scripted_server import EOS, MODEL, TOKENIZER, Script, ServerUnderTest, scripted_server, spell

from firstdiff.engine.openai_logprobs import shown_token

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
HELLO = [{"role": "user", "content": "hello"}]
SAID = "one two é three <end> four "
IDS = TOKENIZER.encode(SAID, add_special_tokens=False)


@pytest.fixture(scope="module")
def server() -> Iterator[ServerUnderTest]:
    with scripted_server(Script(spell(SAID))) as running:
        yield running


def ids_of(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False)


@pytest.mark.parametrize("prompt", ["hello", ["hello"], ids_of("hello"), [ids_of("hello")]])
def test_all_prompt_forms_of_one_prompt_give_one_choice(server: ServerUnderTest, prompt: object) -> None:
    answer = server.post(COMPLETIONS, prompt=prompt, max_tokens=3, return_token_ids=True)
    (choice,) = answer["choices"]
    assert choice["token_ids"] == IDS[:3]
    assert choice["prompt_token_ids"] == TOKENIZER.encode("hello")
    assert choice["text"] == TOKENIZER.decode(IDS[:3])
    assert choice["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens"] == 3
    assert answer["usage"]["total_tokens"] == 3 + len(choice["prompt_token_ids"])
    assert answer["object"] == "text_completion"


def test_many_prompts_give_choices_with_indexes(server: ServerUnderTest) -> None:
    prompts = ["a", "bb", "ccc"]
    answer = server.post(COMPLETIONS, prompt=prompts, max_tokens=2, return_token_ids=True)
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
    assert [c["prompt_token_ids"] for c in answer["choices"]] == [TOKENIZER.encode(p) for p in prompts]
    assert answer["usage"]["completion_tokens"] == 6
    events = server.events(COMPLETIONS, prompt=prompts, max_tokens=2)
    assert sorted(event["choices"][0]["index"] for event in events) == [0, 0, 1, 1, 2, 2]


@pytest.mark.parametrize(("path", "what"), [(COMPLETIONS, {"prompt": "hi"}), (CHAT, {"messages": HELLO})])
def test_a_stream_has_one_chunk_a_token_and_the_text_of_the_whole_answer(
    server: ServerUnderTest, path: str, what: dict[str, object]
) -> None:
    body = {**what, "max_tokens": len(IDS), "return_token_ids": True}
    whole = server.post(path, **body)
    events = server.events(path, **body, stream_options={"include_usage": True})
    *chunks, last = events
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"] == len(IDS)
    assert all(chunk["usage"] is None for chunk in chunks)
    choices = [chunk["choices"][0] for chunk in chunks]
    assert [choice["token_ids"] for choice in choices] == [[token_id] for token_id in IDS]
    assert [choice["finish_reason"] for choice in choices] == [None] * (len(IDS) - 1) + ["length"]
    if path == CHAT:
        texts = [choice["delta"]["content"] for choice in choices]
        assert choices[0]["delta"]["role"] == "assistant"
        assert all("role" not in choice["delta"] for choice in choices[1:])
        message = whole["choices"][0]["message"]
        assert message == {"role": "assistant", "content": "".join(texts)}
        assert chunks[0]["prompt_token_ids"] == whole["prompt_token_ids"]
        assert {chunk["object"] for chunk in events} == {"chat.completion.chunk"}
    else:
        texts = [choice["text"] for choice in choices]
        assert whole["choices"][0]["text"] == "".join(texts)
        assert choices[0]["prompt_token_ids"] == whole["choices"][0]["prompt_token_ids"]
    assert "".join(texts) == SAID
    assert len({chunk["id"] for chunk in events}) == 1


def test_continuous_usage_counts_up(server: ServerUnderTest) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    events = server.events(COMPLETIONS, prompt="hi", max_tokens=4, stream_options=options)
    assert [event["usage"]["completion_tokens"] for event in events] == [1, 2, 3, 4, 4]
    plain = server.events(COMPLETIONS, prompt="hi", max_tokens=4)
    assert all("usage" not in event for event in plain)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("stop", "text"),
    [
        ("<end>", "one two é three "),
        (["three", "two"], "one "),
        ("é", "one two "),
        ("o", ""),
        ("never", SAID),
    ],
)
def test_stop_strings_end_the_text_and_the_engine_s_work(
    server: ServerUnderTest, stop: object, text: str, stream: bool
) -> None:
    body = {"prompt": "hi", "max_tokens": len(IDS), "stop": stop, "return_token_ids": True}
    if stream:
        choices = [event["choices"][0] for event in server.events(COMPLETIONS, **body)]
        got = "".join(choice["text"] for choice in choices)
        ids = [token_id for choice in choices for token_id in choice["token_ids"]]
    else:
        (choice,) = choices = server.post(COMPLETIONS, **body)["choices"]
        got, ids = choice["text"], choice["token_ids"]
    assert got == text
    assert ids == IDS[: len(ids)]
    if stop == "never":
        assert (choices[-1]["finish_reason"], choices[-1]["stop_reason"]) == ("length", None)
    else:
        assert choices[-1]["finish_reason"] == "stop"
        assert choices[-1]["stop_reason"] in stop
        # The tokens reach to the one that completed the stop string, and no further.
        assert TOKENIZER.decode(ids).find(choices[-1]["stop_reason"]) >= 0
        assert TOKENIZER.decode(ids[:-1]).find(choices[-1]["stop_reason"]) < 0


def test_eos_and_stop_tokens_count_but_have_no_text() -> None:
    ids = [*ids_of("ab"), EOS, *ids_of("cd")]
    with scripted_server(Script(lambda sequence: ids[sequence.num_output_tokens % len(ids)])) as server:
        body = {"prompt": "hi", "max_tokens": len(ids), "return_token_ids": True}
        (choice,) = server.post(COMPLETIONS, **body)["choices"]
        assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("ab", "stop", None)
        assert choice["token_ids"] == ids[: ids.index(EOS) + 1]
        (choice,) = server.post(COMPLETIONS, **body, ignore_eos=True)["choices"]
        assert (choice["text"], choice["finish_reason"]) == ("abcd", "length")
        (choice,) = server.post(COMPLETIONS, **body, stop_token_ids=[ids[1]])["choices"]
        assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", ids[1])
        assert choice["text"] == TOKENIZER.decode(ids[:1])
        (last,) = server.events(CHAT, messages=HELLO, stop_token_ids=[ids[0]])
        assert last["choices"][0]["delta"] == {"role": "assistant", "content": ""}


@pytest.mark.parametrize("stream", [False, True])
def test_completion_logprobs(server: ServerUnderTest, stream: bool) -> None:
    body = {"prompt": "hi", "max_tokens": 8, "logprobs": 2}
    if stream:
        shown = [event["choices"][0]["logprobs"] for event in server.events(COMPLETIONS, **body)]
        logprobs = {name: [x for one in shown for x in one[name]] for name in shown[0]}
    else:
        logprobs = server.post(COMPLETIONS, **body)["choices"][0]["logprobs"]
    assert logprobs["tokens"] == [shown_token(TOKENIZER.token_bytes(token_id)) for token_id in IDS[:8]]
    # "é" is two tokens, each a part of the character: they are told apart.
    assert [token for token in logprobs["tokens"] if "\\x" in token] == ["bytes:\\xc3", "bytes:\\xa9"]
    assert logprobs["token_logprobs"] == [-0.5] * 8
    for token, top in zip(logprobs["tokens"], logprobs["top_logprobs"], strict=True):
        assert top[token] == max(top.values()) == -0.5
        assert len(top) == 2
    assert logprobs["text_offset"][0] == 0
    assert logprobs["text_offset"] == sorted(logprobs["text_offset"])
    text = server.post(COMPLETIONS, **body)["choices"][0]["text"]
    for offset, token in zip(logprobs["text_offset"], logprobs["tokens"], strict=True):
        assert text[offset:].startswith(token) or token.startswith("bytes:")


def test_chat_logprobs(server: ServerUnderTest) -> None:
    body = {"messages": HELLO, "max_tokens": 8, "logprobs": True, "top_logprobs": 3}
    content = server.post(CHAT, **body)["choices"][0]["logprobs"]["content"]
    streamed = [e["choices"][0]["logprobs"]["content"] for e in server.events(CHAT, **body)]
    assert [one for (one,) in streamed] == content
    assert bytes(b for entry in content for b in entry["bytes"]) == b"".join(
        map(TOKENIZER.token_bytes, IDS[:8])
    )
    for entry in content:
        assert [top["logprob"] for top in entry["top_logprobs"]] == [-0.5, -1.5, -2.5]
        assert entry["top_logprobs"][0]["token"] == entry["token"]
    none = server.post(CHAT, messages=HELLO, max_tokens=1, logprobs=True)
    assert none["choices"][0]["logprobs"]["content"][0]["top_logprobs"] == []


def test_minus_infinity_is_a_number_in_the_answer() -> None:
    class Certain(Script):
        def _sample(self, sequence):
            from firstdiff.engine.sequence import SampledToken

            token_id = self.next_token(sequence)
            return SampledToken(
                token_id=token_id, logprob=0.0, top_logprobs=[(token_id, 0.0), (9, float("-inf"))]
            )

    with scripted_server(Certain(spell("a"))) as server:
        body = {"messages": HELLO, "max_tokens": 1, "logprobs": True, "top_logprobs": 2}
        (entry,) = server.post(CHAT, **body)["choices"][0]["logprobs"]["content"]
        assert [top["logprob"] for top in entry["top_logprobs"]] == [0.0, -9999.0]


def test_a_split_character_is_never_sent_in_halves() -> None:
    with scripted_server(Script(spell("日本語é🙂"))) as server:
        num_tokens = len(ids_of("日本語é🙂"))
        events = server.events(COMPLETIONS, prompt="hi", max_tokens=num_tokens)
        assert len(events) == num_tokens
        assert "".join(e["choices"][0]["text"] for e in events) == "日本語é🙂"
        cut = server.post(COMPLETIONS, prompt="hi", max_tokens=num_tokens - 1)["choices"][0]["text"]
        assert cut.rstrip("\ufffd") == "日本語é"


def test_a_body_without_model_is_answered_by_the_served_one(server: ServerUnderTest) -> None:
    for path, asked in ((COMPLETIONS, {"prompt": "hi"}), (CHAT, {"messages": HELLO})):
        for model in ({}, {"model": None}):
            status, _, answer = server.request("POST", path, asked | model)
            assert (status, json.loads(answer)["model"]) == (200, MODEL)


def test_request_ids_are_echoed_and_name_the_answer(server: ServerUnderTest) -> None:
    body = {"model": MODEL, "prompt": "hi", "max_tokens": 1}
    for path_body in (body, body | {"stream": True}, body | {"n": 2}):
        headers = server.request("POST", COMPLETIONS, path_body, {"X-Request-Id": "mine-1"})[1]
        assert headers["x-request-id"] == "mine-1"
    answer = server.request("POST", COMPLETIONS, body, {"X-Request-Id": "mine-1"})[2]
    assert json.loads(answer)["id"] == "cmpl-mine-1"
    made_up = {server.request("POST", COMPLETIONS, body)[1]["x-request-id"] for _ in range(3)}
    assert len(made_up) == 3


def test_the_small_endpoints(server: ServerUnderTest) -> None:
    def get(path: str) -> object:
        status, headers, body = server.request("GET", path)
        assert status == 200, body
        assert headers["content-type"].startswith("application/json")
        return json.loads(body)

    (card,) = get("/v1/models")["data"]
    assert (card["id"], card["object"], card["max_model_len"]) == (MODEL, "model", 256)
    assert get(f"/v1/models/{MODEL}") == card
    assert get("/health") == {"status": "ok"}
    assert get("/version") == {"version": "0"}
    assert get("/tokenizer_info").keys() >= {"eos_token", "bos_token", "chat_template"}
    assert get("/v1/firstdiff/identity")["instance_id"] == "scripted"
    server.post(COMPLETIONS, prompt="hi", max_tokens=2)
    status, headers, body = server.request("GET", "/metrics")
    assert status == 200
    assert headers["content-type"].startswith("text/plain")
    assert b"firstdiff_generation_tokens_total{" in body


def test_tokenize_and_detokenize_are_inverse(server: ServerUnderTest) -> None:
    def post(path: str, body: object) -> dict[str, object]:
        status, _, answer = server.request("POST", path, body)
        assert status == 200, answer
        return json.loads(answer)

    tokens = post("/tokenize", {"prompt": SAID, "add_special_tokens": False})
    assert tokens == {"tokens": IDS, "count": len(IDS), "max_model_len": 256}
    assert post("/detokenize", {"tokens": IDS}) == {"prompt": SAID}
    assert post("/detokenize", {"tokens": []}) == {"prompt": ""}
    chat = post("/tokenize", {"messages": HELLO})
    assert chat["tokens"] == TOKENIZER.apply_chat_template(HELLO)
    bare = post("/tokenize", {"messages": HELLO, "add_generation_prompt": False})
    assert bare["tokens"] == TOKENIZER.apply_chat_template(HELLO, add_generation_prompt=False)
    long = "word " * 20_000
    assert post("/tokenize", {"prompt": long})["count"] == len(TOKENIZER.encode(long))
