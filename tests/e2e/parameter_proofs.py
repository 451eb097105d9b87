"""What shows that a field of a request has its effect: one function a field, on the real engine.

Usage: `BOTH["top_k"](Api(server, COMPLETIONS, log_dir))`.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from endpoint_api import LONG, Api, X, Y
from scripted_server import EOS, MODEL, TOKENIZER, Script, scripted_server, spell
from structure_proofs import JSON_A, OBJECT, prove_response_format, prove_structure, prove_structured_outputs

from firstdiff.tracing.token_log import read_token_log

Proof = Callable[[Api], None]


def seeds_differ(api: Api, **fields: Any) -> bool:
    return len({tuple(api.ids(temperature=1, seed=seed, **fields)) for seed in range(3)}) > 1


def prove_model(api: Api) -> None:
    assert api.answer()["model"] == MODEL
    assert api.refusal(model="other")[0] == 404


def prove_prompt(api: Api) -> None:
    assert api.prompt_ids(text="a b") != api.prompt_ids(text="c d")


def told(api: Api, count: int, **fields: Any) -> dict[str, float]:
    """The likeliest first tokens in the distribution that is sampled from."""
    return api.logprobs(count, max_tokens=1, logprobs_mode="processed_logprobs", **fields)[0]


def prove_temperature(api: Api) -> None:
    assert len({tuple(api.ids(temperature=0, seed=seed)) for seed in range(3)}) == 1
    assert seeds_differ(api)
    (first, raw), *others = list(api.logprobs(4, max_tokens=1)[0].items())[:4]
    for temperature in (0.5, 2):
        got = told(api, 4, temperature=temperature)
        for text, logprob in others:
            assert got[text] - got[first] == pytest.approx((logprob - raw) / temperature, abs=1e-3)


def prove_truncation(strictest: float, name: str, keeps_three: Callable[[list[float]], float]) -> Proof:
    """The strictest value leaves the likeliest token; another, made of probabilities, leaves three."""

    def prove(api: Api) -> None:
        assert seeds_differ(api)
        for seed in range(3):
            assert api.ids(temperature=1, seed=seed, **{name: strictest}) == api.ids()
        plain = list(api.logprobs(4, max_tokens=1)[0].items())[:4]
        value = keeps_three([math.exp(logprob) for _, logprob in plain])
        got = told(api, 3, temperature=1, **{name: value})
        total = math.log(sum(math.exp(logprob) for _, logprob in plain[:3]))
        for text, logprob in plain[:3]:
            assert got[text] == pytest.approx(logprob - total, abs=1e-3)

    return prove


def prove_seed(api: Api) -> None:
    assert api.ids(temperature=1, seed=5) == api.ids(temperature=1, seed=5)
    assert seeds_differ(api)


def prove_n(api: Api) -> None:
    answer = api.answer(n=3, temperature=1, seed=5, text=LONG)
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
    alone = [api.ids(temperature=1, seed=5 + index, text=LONG) for index in range(3)]
    assert [choice["token_ids"] for choice in answer["choices"]] == alone
    assert answer["usage"]["completion_tokens"] == 24
    assert answer["usage"]["prompt_tokens"] == len(api.prompt_ids(text=LONG))
    text = f"Never asked before: {api.path} {LONG}"
    cached = {row.request_id[-1]: row.num_cached_tokens for row in api.logged(n=3, text=text)}
    # The first choice computes the prompt for all.
    assert cached["1"] == cached["2"] > cached["0"]


def prove_best_of(api: Api) -> None:
    assert len(api.answer(n=2, best_of=2)["choices"]) == 2
    assert "equal to n" in api.refusal(n=1, best_of=2)[1]["message"]


def prove_stop(api: Api) -> None:
    text = api.text()
    stop = text[3:5]
    choice = api.choice(stop=[stop, "never said"])
    assert api.text_of(choice) == text[: text.find(stop)]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", stop)


def prove_include_stop(api: Api) -> None:
    stop = api.text()[3:5]
    assert api.text(stop=stop, include_stop_str_in_output=True) == api.text(stop=stop) + stop
    ids = api.ids()
    with_it = api.text(stop_token_ids=[ids[2]], include_stop_str_in_output=True)
    assert with_it == api.text(stop_token_ids=[ids[2]]) + TOKENIZER.token_text(ids[2])


def prove_stop_token_ids(api: Api) -> None:
    ids = api.ids()
    choice = api.choice(stop_token_ids=[ids[2]])
    assert choice["token_ids"] == ids[: ids.index(ids[2]) + 1]
    assert choice["stop_reason"] == ids[2]


def prove_min_tokens(api: Api) -> None:
    ids, bias = api.ids(), {str(EOS): 100}
    assert len(api.ids(ignore_eos=False, logit_bias=bias)) == 1
    assert len(api.ids(ignore_eos=False, logit_bias=bias, min_tokens=4)) == 5
    assert ids[1] not in api.ids(stop_token_ids=[ids[1]], min_tokens=5)[:5]
    text = api.text()
    assert api.text(stop=text[:2], min_tokens=8) == text
    assert api.refusal(min_tokens=9)[1]["param"] == "min_tokens"


def prove_max_tokens(name: str) -> Proof:
    def prove(api: Api) -> None:
        rest = {} if name == "max_tokens" else {"max_tokens": "absent"}
        assert api.ids(**{name: 3}, **rest) == api.ids()[:3]
        assert api.choice(**{name: 3}, **rest)["finish_reason"] == "length"
        assert api.refusal(**{name: 0}, **rest)[0] == 400
        choice = api.answer(**{name: 0}, prompt_logprobs=0, **rest)["choices"][0]
        assert (choice["token_ids"], choice["finish_reason"]) == ([], "length")

    return prove


def prove_ignore_eos(api: Api) -> None:
    bias = {str(EOS): 100}
    assert api.ids(ignore_eos=False, logit_bias=bias) == [EOS]
    assert api.ids(ignore_eos=True, logit_bias=bias) == [EOS] * 8


def prove_presence(api: Api) -> None:
    for step, change in ((0, 0), (1, -1.5), (2, -1.5)):
        assert api.gap(step, presence_penalty=1.5) - api.gap(step) == pytest.approx(change, abs=1e-2)


def prove_frequency(api: Api) -> None:
    for step, change in ((0, 0), (1, -0.5), (2, -1.0)):
        assert api.gap(step, frequency_penalty=0.5) - api.gap(step) == pytest.approx(change, abs=1e-2)


def prove_repetition(api: Api) -> None:
    assert api.gap(0, repetition_penalty=1.2) == pytest.approx(api.gap(0), abs=1e-2)
    assert api.gap(1, repetition_penalty=1.2) < api.gap(1) - 5


def prove_logit_bias(api: Api) -> None:
    assert api.ids(logit_bias={str(X): 100}) == [X] * 8
    first = api.ids()[0]
    assert api.ids(logit_bias={str(first): -100})[0] != first


def prove_logprobs(api: Api) -> None:
    for count in (1, 5):
        tops = api.logprobs(count)
        for token_id, top in zip(api.ids(), tops, strict=True):
            assert len(top) == count
            assert list(top.values()) == sorted(top.values(), reverse=True)
            assert sum(map(math.exp, top.values())) <= 1 + 1e-6
            # Greedy, so the token itself is the first.
            assert next(iter(top)) == TOKENIZER.token_text(token_id) or "bytes:" in next(iter(top))
    assert api.choice()["logprobs"] is None


def prove_logprobs_mode(api: Api) -> None:
    raw, processed = (
        api.logprobs(1, logit_bias={str(X): 100}, temperature=1, logprobs_mode=mode)[0]
        for mode in ("raw_logprobs", "processed_logprobs")
    )
    name = TOKENIZER.token_text(X)
    assert processed[name] == pytest.approx(0, abs=1e-3)
    assert raw.get(name, -99) < -1
    assert api.logprobs(1, logit_bias={str(X): 100}, temperature=1)[0] == raw


def prove_prompt_logprobs(api: Api) -> None:
    answer = api.answer(prompt_logprobs=2, text=LONG)
    entries = (answer if api.is_chat else answer["choices"][0])["prompt_logprobs"]
    prompt = api.prompt_ids(text=LONG)
    assert entries[0] is None
    assert len(entries) == len(prompt)
    for token_id, entry in zip(prompt[1:], entries[1:], strict=True):
        own = entry[str(token_id)]
        assert own["decoded_token"] == TOKENIZER.token_text(token_id)
        assert len(entry) == 2 + ("rank" not in own)
        ranked = [one["logprob"] for one in sorted(entry.values(), key=lambda one: one.get("rank", 99))]
        assert ranked == sorted(ranked, reverse=True)
    assert api.refusal(prompt_logprobs=1, stream=True)[1]["param"] == "prompt_logprobs"


def prove_echo(api: Api) -> None:
    choice = api.choice(echo=True, logprobs=1, max_tokens=1, text=LONG)
    logprobs, prompt = choice["logprobs"], api.prompt_ids(text=LONG)
    assert choice["text"] == LONG + api.text(max_tokens=1, text=LONG)
    assert {len(values) for values in logprobs.values()} == {len(prompt) + 1}
    assert (logprobs["token_logprobs"][0], logprobs["top_logprobs"][0]) == (None, None)
    for offset, token in zip(logprobs["text_offset"], logprobs["tokens"], strict=True):
        assert choice["text"][offset:].startswith(token) or "bytes:" in token
    for token, logprob, top in list(
        zip(*(logprobs[n] for n in ("tokens", "token_logprobs", "top_logprobs")), strict=True)
    )[1:]:
        assert top[token] == logprob
    # The last is greedy, and lm-eval sees that by equal floats.
    assert logprobs["token_logprobs"][-1] == max(logprobs["top_logprobs"][-1].values())
    alone = api.choice(echo=True, max_tokens=0, text=LONG)
    assert (alone["text"], alone["token_ids"], alone["logprobs"]) == (LONG, [], None)
    chunks = [
        e["choices"][0]
        for e in api.server.events(api.path, **api.body(echo=True, logprobs=1, max_tokens=2, text=LONG))
    ]
    assert "".join(chunk["text"] for chunk in chunks) == api.text(echo=True, max_tokens=2, text=LONG)
    assert [len(chunk["logprobs"]["tokens"]) for chunk in chunks] == [len(prompt) + 1, 1]


def prove_stream(api: Api) -> None:
    events = api.server.events(api.path, **api.body())
    assert [e["choices"][0]["token_ids"] for e in events] == [[token_id] for token_id in api.ids()]


def prove_stream_options(api: Api) -> None:
    body = api.body(stream_options={"include_usage": True})
    assert api.server.events(api.path, **body)[-1]["usage"]["completion_tokens"] == 8
    assert api.refusal(stream_options={"include_usage": True})[1]["param"] == "stream_options"


def prove_return_token_ids(api: Api) -> None:
    assert "token_ids" not in api.choice(return_token_ids=False)
    assert len(api.ids()) == 8


def prove_user(api: Api) -> None:
    assert api.logged(user="somebody")[0].user == "somebody"


def prove_metadata(api: Api) -> None:
    assert api.logged(metadata={"team": "blue"})[0].metadata == {"team": "blue"}


def prove_priority(api: Api) -> None:
    assert "first come, first served" in api.refusal(priority=1)[1]["message"]
    log_dir = api.log_dir / f"priority-{api.is_chat}"
    script = Script(spell("a"))
    with (
        scripted_server(script, log_dir=log_dir, scheduling_policy="priority", max_num_seqs=1) as server,
        ThreadPoolExecutor(3) as pool,
    ):
        script.gate.clear()
        asked = []
        for number, priority in enumerate((0, 3, -2), 1):
            body = {"model": MODEL} | api.body(priority=priority)
            asked.append(
                pool.submit(server.request, "POST", api.path, body, {"X-Request-Id": f"p{priority}"})
            )
            # The first must run, and the others wait in the order of their priority and not of their arrival.
            while server.running.dispatcher.num_in_flight < number or not script.is_waiting:
                Event().wait(0.01)
        script.gate.set()
        assert [answer.result(20)[0] for answer in asked] == [200] * 3
    rows = sorted(read_token_log(log_dir)[1], key=lambda row: row.first_scheduled_ns or 0)
    assert [(row.request_id, row.priority) for row in rows] == [("p0", 0), ("p-2", -2), ("p3", 3)]


def prove_cache_salt(api: Api) -> None:
    text = f"{LONG}{api.path}"
    api.answer(text=text, cache_salt="mine")
    assert api.cached(text=text, cache_salt="yours") == 0
    assert api.cached(text=text, cache_salt="mine") > 0


def prove_use_prefix_cache(api: Api) -> None:
    api.answer(text=LONG)
    assert api.cached(text=LONG) > 0
    assert api.cached(text=LONG, use_prefix_cache=False) == 0


def prove_forced(api: Api) -> None:
    forced = [X, EOS, Y]
    choice = api.choice(forced_token_ids=forced, max_tokens="absent", ignore_eos=False)
    assert (choice["token_ids"], choice["finish_reason"]) == (forced, "length")
    greedy = api.ids()
    assert api.logprobs(1, forced_token_ids=greedy) == api.logprobs(1)
    for beside in (
        {"stop": "a"},
        {"n": 2},
        {"min_tokens": 1},
        {"presence_penalty": 1},
        {"guided_regex": "a"},
    ):
        assert api.refusal(forced_token_ids=forced, max_tokens=3, **beside)[0] == 400
    assert api.refusal(forced_token_ids=forced, max_tokens=2)[1]["param"] == "max_tokens"


def prove_skip_special(api: Api) -> None:
    fields = {"forced_token_ids": [X, EOS, Y], "max_tokens": 3}
    assert api.text(**fields, skip_special_tokens=False) == TOKENIZER.decode([X, EOS, Y])
    assert api.text(**fields) == TOKENIZER.decode([X, Y])


def prove_truncate_prompt(api: Api) -> None:
    assert api.prompt_ids(text=LONG, truncate_prompt_tokens=5) == api.prompt_ids(text=LONG)[-5:]


BOTH: dict[str, Proof] = {
    "model": prove_model,
    "temperature": prove_temperature,
    "top_p": prove_truncation(1e-9, "top_p", lambda p: p[0] + p[1] + p[2] / 2),
    "top_k": prove_truncation(1, "top_k", lambda p: 3),
    "min_p": prove_truncation(1, "min_p", lambda p: (p[2] + p[3]) / 2 / p[0]),
    "seed": prove_seed,
    "n": prove_n,
    "stop": prove_stop,
    "include_stop_str_in_output": prove_include_stop,
    "stop_token_ids": prove_stop_token_ids,
    "min_tokens": prove_min_tokens,
    "max_tokens": prove_max_tokens("max_tokens"),
    "ignore_eos": prove_ignore_eos,
    "presence_penalty": prove_presence,
    "frequency_penalty": prove_frequency,
    "repetition_penalty": prove_repetition,
    "logit_bias": prove_logit_bias,
    "logprobs": prove_logprobs,
    "logprobs_mode": prove_logprobs_mode,
    "prompt_logprobs": prove_prompt_logprobs,
    "stream": prove_stream,
    "stream_options": prove_stream_options,
    "return_token_ids": prove_return_token_ids,
    "response_format": prove_response_format,
    "structured_outputs": prove_structured_outputs,
    "guided_json": prove_structure("guided_json", OBJECT, JSON_A),
    "guided_regex": prove_structure("guided_regex", "[0-9]{2}", "[0-9]{2}"),
    "guided_choice": prove_structure("guided_choice", ["up", "down"], "up|down"),
    "guided_grammar": prove_structure("guided_grammar", 'start: "z"', "z"),
    "user": prove_user,
    "metadata": prove_metadata,
    "priority": prove_priority,
    "cache_salt": prove_cache_salt,
    "use_prefix_cache": prove_use_prefix_cache,
    "forced_token_ids": prove_forced,
    "skip_special_tokens": prove_skip_special,
    "truncate_prompt_tokens": prove_truncate_prompt,
}
