"""The endpoints beside generation: scores, aborts, cache resets, readiness; all on the real engine."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection
from pathlib import Path
from threading import Event
from typing import Any
from urllib.parse import urlsplit

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from real_server import real_server
from scripted_server import (
    MODEL,
    TOKENIZER,
    TOKENIZER_PATH,
    Script,
    ServerUnderTest,
    scripted_server,
    spell,
)

from firstdiff.engine.build import cache_shape
from firstdiff.engine.config import EngineConfig
from firstdiff.engine.model_config import ModelConfig
from firstdiff.tracing.token_log import read_token_log

COMPLETIONS, CHAT, SCORE = "/v1/completions", "/v1/chat/completions", "/score"
PROMPT = "A prompt that fills some blocks of the cache, so that it can be found again later on. "


@pytest.fixture(scope="module")
def server() -> Iterator[ServerUnderTest]:
    with real_server() as running:
        yield running


def ids_of(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False)


def scores(server: ServerUnderTest, **body: Any) -> list[dict[str, Any]]:
    answer = server.post(SCORE, **body)
    assert answer["object"] == "score"
    assert answer["usage"]["completion_tokens"] == 0
    return answer["data"]


def test_a_score_is_what_an_echo_says(server: ServerUnderTest) -> None:
    prompt, target = ids_of(PROMPT), ids_of("the target")
    (score,) = scores(server, prompt=prompt, target=target, use_prefix_cache=False)
    body = {"prompt": [*prompt, *target], "echo": True, "logprobs": 1, "max_tokens": 1}
    (choice,) = server.post(COMPLETIONS, **body, use_prefix_cache=False)["choices"]
    assert score["token_ids"] == target
    assert score["logprobs"] == choice["logprobs"]["token_logprobs"][len(prompt) : -1]
    assert score["score"] == pytest.approx(sum(score["logprobs"]))
    assert score["is_greedy"] is False
    assert scores(server, prompt=PROMPT, target="the target", use_prefix_cache=False)[0] == score


def test_a_greedy_answer_scores_as_greedy_and_as_it_was_sampled(server: ServerUnderTest) -> None:
    body = {"prompt": PROMPT, "max_tokens": 6, "temperature": 0, "ignore_eos": True, "logprobs": 0}
    (choice,) = server.post(COMPLETIONS, **body, return_token_ids=True)["choices"]
    (score,) = scores(server, prompt=PROMPT, target=choice["token_ids"], top_logprobs=2)
    assert score["is_greedy"] is True
    assert score["logprobs"] == pytest.approx(choice["logprobs"]["token_logprobs"], abs=1e-4)
    for token_id, top in zip(choice["token_ids"], score["top_logprobs"], strict=True):
        assert top[str(token_id)]["rank"] == 1
        assert len(top) == 2
    # A replay goes the ordinary way and says the same.
    (replayed,) = server.post(
        COMPLETIONS, prompt=PROMPT, forced_token_ids=choice["token_ids"], logprobs=0, ignore_eos=True
    )["choices"]
    assert replayed["logprobs"]["token_logprobs"] == choice["logprobs"]["token_logprobs"]


def test_many_targets_share_their_prompt(server: ServerUnderTest) -> None:
    prompt = f"Shared once: {PROMPT}"
    found = scores(server, prompt=prompt, target=["a", "bb", "the ccc"])
    assert [score["index"] for score in found] == [0, 1, 2]
    assert [score["token_ids"] for score in found] == [ids_of(t) for t in ("a", "bb", "the ccc")]
    assert found[0]["num_cached_tokens"] == 0
    assert all(score["num_cached_tokens"] > 0 for score in found[1:])
    afresh = scores(server, prompt=prompt, target=["a", "bb", "the ccc"], use_prefix_cache=False)
    assert [score["num_cached_tokens"] for score in afresh] == [0, 0, 0]
    for one, other in zip(found, afresh, strict=True):
        assert one["logprobs"] == pytest.approx(other["logprobs"], abs=1e-4)
    pairs = scores(server, prompt=[prompt, "other"], target=["a", "bb"])
    assert pairs[0]["logprobs"] == pytest.approx(found[0]["logprobs"], abs=1e-4)
    assert pairs[1]["logprobs"] != pytest.approx(found[1]["logprobs"], abs=1e-4)


def test_both_names_of_score_and_what_it_refuses(server: ServerUnderTest) -> None:
    body = {"prompt": "a", "target": "b"}
    mine = server.post("/v1/firstdiff/score", **body)
    assert mine["data"][0]["logprobs"] == pytest.approx(scores(server, **body)[0]["logprobs"], abs=1e-4)
    for more, says in (
        ({"text_1": "a", "text_2": "b"}, "scores a 'target'"),
        ({"target": ""}, "1 token or more in 'target'"),
        ({"prompt": ""}, "1 token or more in 'prompt'"),
        ({"prompt": ["a", "b"]}, "one prompt, or one for each"),
        ({"target": "word " * 600}, "context"),
        ({"target": None}, "target"),
        ({"temperature": 1}, "known fields"),
        ({"top_logprobs": 21}, "from 0 to 20"),
        ({"logprobs_mode": "processed_logprobs"}, "known fields"),
    ):
        status, error = server.refusal(SCORE, body | more)
        assert status == 400
        assert says in error["message"]


def test_usage_names_cached_tokens_however_the_answer_ends(server: ServerUnderTest) -> None:
    body = {"prompt": PROMPT, "max_tokens": 8, "temperature": 0}
    text = server.post(COMPLETIONS, **body)["choices"][0]["text"]
    for more in ({}, {"stop": [text[1:3]]}, {"stop": [text[0]]}):
        whole = server.post(COMPLETIONS, **body, **more)["usage"]
        assert whole["prompt_tokens_details"]["cached_tokens"] > 0, more
        events = server.events(COMPLETIONS, **body, **more, stream_options={"include_usage": True})
        assert events[-1]["usage"] == whole, more


def test_a_context_is_no_longer_than_the_cache() -> None:
    """A chat that names no `max_tokens` gets what there is room for."""
    with real_server(num_blocks=16) as server:
        model = json.loads(server.request("GET", "/v1/models")[2])["data"][0]
        assert model["max_model_len"] == 256
        message = [{"role": "developer", "content": "hi"}]
        usage = server.post("/v1/chat/completions", messages=message, ignore_eos=True)["usage"]
        assert usage["total_tokens"] == 256
    config = ModelConfig.load(TOKENIZER_PATH)
    with pytest.raises(ValueError, match="lower --max-model-len to 256"):
        cache_shape(EngineConfig(model="m", num_blocks=16, max_model_len=300), config)


def running(script: Script, server: ServerUnderTest, count: int) -> None:
    for _ in range(1000):
        if script.is_waiting and server.running.dispatcher.num_in_flight == count:
            return
        Event().wait(0.01)
    raise AssertionError("the requests did not start")


def test_an_answer_that_has_begun_keeps_its_places_in_the_queue() -> None:
    script = Script(spell("word "))
    ask = {"model": MODEL, "max_tokens": 2}
    with (
        scripted_server(script, max_num_seqs=1, max_num_waiting=4) as server,
        ThreadPoolExecutor(4) as pool,
    ):
        script.gate.clear()
        # Two prompts with two choices each: four places, of which two are in use until the first tokens.
        many = pool.submit(server.post, COMPLETIONS, prompt=["a", "b"], n=2, max_tokens=2)
        running(script, server, 2)
        other = pool.submit(server.post, COMPLETIONS, prompt="b", max_tokens=2)
        running(script, server, 3)
        late = pool.submit(server.request, "POST", COMPLETIONS, ask | {"prompt": "c"})
        running(script, server, 4)
        script.gate.set()
        status, headers, _ = late.result(20)
        assert (status, headers["retry-after"]) == (429, "1")
        assert len(many.result(20)["choices"]) == 4
        assert other.result(20)["choices"]
        status, error = server.refusal(COMPLETIONS, ask | {"prompt": "e", "n": 6})
        assert (status, "as may be in flight" in error["message"]) == (400, True)


@pytest.mark.parametrize("leaves", [False, True])
def test_places_that_an_answer_did_not_come_to_use_are_free_again(leaves: bool) -> None:
    script = Script(spell("word "))
    with scripted_server(script, max_num_seqs=1, max_num_waiting=2) as server, ThreadPoolExecutor(1) as pool:
        script.gate.clear()
        body = {"model": MODEL, "prompt": "a", "n": 3, "max_tokens": 2}
        if leaves:
            connection = HTTPConnection(urlsplit(server.url).netloc, timeout=20)
            connection.request("POST", COMPLETIONS, json.dumps(body))
            running(script, server, 1)
            connection.close()
        else:
            first = pool.submit(server.request, "POST", COMPLETIONS, body, {"X-Request-Id": "mine"})
            running(script, server, 1)
            assert server.request("POST", "/abort", {"request_id": "mine"})[0] == 200
        script.gate.set()
        if not leaves:
            assert first.result(20)[0] == 200
        for _ in range(1000):
            if server.running.dispatcher.num_open == server.running.dispatcher.num_in_flight == 0:
                break
            Event().wait(0.01)
        # All three places are needed.
        assert len(server.post(COMPLETIONS, prompt="b", n=3, max_tokens=2)["choices"]) == 3


@pytest.mark.parametrize("counts", [(1, 2), (2, 1), (2, 3)])
def test_an_id_in_use_is_refused_however_many_choices_it_has(counts: tuple[int, int]) -> None:
    script = Script(spell("word "))
    with scripted_server(script) as server, ThreadPoolExecutor(1) as pool:
        script.gate.clear()
        body = {"model": MODEL, "prompt": "a", "max_tokens": 2}
        headers = {"X-Request-Id": "mine"}
        first = pool.submit(server.request, "POST", COMPLETIONS, body | {"n": counts[0]}, headers)
        running(script, server, 1)
        status, _, raw = server.request("POST", COMPLETIONS, body | {"n": counts[1]}, headers)
        assert (status, json.loads(raw)["error"]["code"]) == (400, "duplicate_request_id")
        script.gate.set()
        assert first.result(20)[0] == 200


def test_structures_on_a_model_without_eos_are_refused(tmp_path: Path) -> None:
    for path in TOKENIZER_PATH.iterdir():
        if path.name not in ("config.json", "generation_config.json"):
            (tmp_path / path.name).symlink_to(path)
    config = json.loads((TOKENIZER_PATH / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"eos_token_id": None}))
    with real_server(model=tmp_path) as server:
        body = {"model": MODEL, "prompt": "a", "guided_choice": ["a"]}
        status, error = server.refusal(COMPLETIONS, body)
        assert (status, "EOS" in error["message"]) == (400, True)


def test_the_server_s_mode_of_logprobs_is_of_requests_that_name_none() -> None:
    body = {"prompt": "a", "max_tokens": 1, "logprobs": 0, "logit_bias": {"300": 100}, "temperature": 1}

    def logprob(**more: Any) -> float:
        return server.post(COMPLETIONS, **body, **more)["choices"][0]["logprobs"]["token_logprobs"][0]

    with real_server(logprobs_mode="processed_logprobs") as server:
        assert logprob() == pytest.approx(0, abs=1e-3)
        assert logprob(logprobs_mode="raw_logprobs") < -1


def test_a_reset_cache_finds_nothing(server: ServerUnderTest) -> None:
    def cached() -> int:
        usage = server.post(COMPLETIONS, prompt=f"Reset: {PROMPT}", max_tokens=1)["usage"]
        return usage["prompt_tokens_details"]["cached_tokens"]

    cached()
    assert cached() > 0
    status, _, body = server.request("POST", "/reset_prefix_cache")
    assert status == 200
    assert json.loads(body)["num_blocks"] > 0
    assert cached() == 0
    assert cached() > 0
    assert json.loads(server.request("POST", "/reset_prefix_cache", {})[2])["num_blocks"] > 0
    assert server.refusal("/reset_prefix_cache", {"now": True})[0] == 400


@pytest.mark.parametrize("stream", [False, True])
def test_an_abort_ends_all_choices_with_what_they_have(tmp_path: Path, stream: bool) -> None:
    script = Script(spell("word "), step_s=0.002)
    with scripted_server(script, log_dir=tmp_path) as server, ThreadPoolExecutor(1) as pool:
        body = {"model": MODEL, "prompt": ["a", "b"], "n": 2, "max_tokens": 200, "stream": stream}
        asked = pool.submit(server.request, "POST", COMPLETIONS, body, {"X-Request-Id": "mine"})
        while server.running.dispatcher.num_in_flight < 4:
            Event().wait(0.001)
        status, _, answer = server.request("POST", "/abort", {"request_id": "cmpl-mine"})
        assert (status, json.loads(answer)) == (200, {"request_id": "cmpl-mine", "num_aborted": 4})
        status, _, raw = asked.result(20)
        assert status == 200
        if stream:
            events = [json.loads(e.removeprefix(b"data: ")) for e in raw.split(b"\n\n")[:-2]]
            choices = [e["choices"][0] for e in events if e["choices"][0]["finish_reason"]]
        else:
            choices = json.loads(raw)["choices"]
        assert sorted(choice["index"] for choice in choices) == [0, 1, 2, 3]
        assert {choice["finish_reason"] for choice in choices} == {"abort"}
        assert script.engine is not None
        assert script.engine.scheduler.pool.num_used_blocks == 0
    rows = read_token_log(tmp_path)[1]
    assert {row.finish_reason for row in rows} == {"abort"}
    assert len(rows) == 4


def test_an_abort_before_the_first_token_ends_what_still_waits_too() -> None:
    script = Script(spell("word "))
    with scripted_server(script) as server, ThreadPoolExecutor(1) as pool:
        script.gate.clear()
        body = {"model": MODEL, "prompt": "a", "n": 3, "max_tokens": 200}
        asked = pool.submit(server.request, "POST", COMPLETIONS, body, {"X-Request-Id": "mine"})
        # The first choice computes the prompt, the other two wait for it.
        running(script, server, 1)
        assert json.loads(server.request("POST", "/abort", {"request_id": "mine"})[2])["num_aborted"] == 1
        script.gate.set()
        status, _, raw = asked.result(20)
        assert status == 200
        assert [choice["finish_reason"] for choice in json.loads(raw)["choices"]] == ["abort"] * 3


def test_an_abort_of_nothing_is_no_error(server: ServerUnderTest) -> None:
    assert json.loads(server.request("POST", "/abort", {"request_id": "gone"})[2])["num_aborted"] == 0
    for body in ({}, {"request_id": ""}, {"request_id": 1}, {"request_id": "a", "why": "b"}):
        assert server.refusal("/abort", body)[0] == 400


def test_health_is_of_the_engine_and_ready_of_the_queue() -> None:
    script = Script(spell("a"))
    with scripted_server(script) as server:
        assert server.request("GET", "/ready")[0] == server.request("GET", "/health")[0] == 200
        server.running.dispatcher.draining = "the server is shutting down"
        assert server.request("GET", "/health")[0] == 200
        status, headers, body = server.request("GET", "/ready")
        assert (status, headers["retry-after"]) == (503, "1")
        assert json.loads(body)["error"]["code"] == "not_ready"
        status, headers, _ = server.request("POST", COMPLETIONS, {"model": MODEL, "prompt": "a"})
        assert (status, headers["retry-after"]) == (503, "1")


def test_a_prompt_that_can_never_fit_the_cache_is_400() -> None:
    with scripted_server(Script(spell("a")), num_blocks=4) as server:
        status, error = server.refusal(COMPLETIONS, {"model": MODEL, "prompt": [5] * 80, "max_tokens": 1})
        assert status == 400
        assert "--num-blocks" in error["message"]


def test_hostile_structures_are_answered_in_time(server: ServerUnderTest) -> None:
    deep: Any = {"type": "string"}
    for _ in range(200):
        deep = {"type": "array", "items": deep}
    for body in (
        {"structured_outputs": {"regex": "(((a{1,1000}){1,1000}){1,1000})"}},
        {"structured_outputs": {"regex": "(a|b)*" * 500 + "c{900}"}},
        {"structured_outputs": {"json": deep}},
        {"structured_outputs": {"grammar": 'start: start start | "a"'}},
        {"structured_outputs": {"json": {"$ref": "#"}}},
        {"structured_outputs": {"choice": ["x" * 60 for _ in range(1000)]}},
    ):
        status, _, answer = server.request(
            "POST", COMPLETIONS, {"model": MODEL, "prompt": "a", "max_tokens": 2} | body
        )
        assert status in (200, 400), answer
