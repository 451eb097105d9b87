"""OpenAI bodies: every field with its type and bounds, everything else refused in the envelope."""

from __future__ import annotations

from random import Random
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from firstdiff.engine.openai_api import Queueing, parse_chat, parse_completion
from firstdiff.engine.openai_fields import ApiError, decode_object
from firstdiff.engine.openai_limits import Limits
from firstdiff.engine.openai_tokens import parse_detokenize, parse_tokenize
from firstdiff.tracing.records import Sampling

LIMITS = Limits(models=("m",), vocab_size=100, max_model_len=64, max_prompts=4, max_messages=3)


def completion(**fields: Any) -> Any:
    return parse_completion({"model": "m", "prompt": "hi", **fields}, LIMITS)


def chat(**fields: Any) -> Any:
    return parse_chat({"model": "m", "messages": [{"role": "user", "content": "hi"}], **fields}, LIMITS)


def refusal(parse: Any, **fields: Any) -> ApiError:
    with pytest.raises(ApiError) as caught:
        parse(**fields)
    message = str(caught.value)
    assert message.startswith("expected "), message
    assert ", got " in message
    assert len(message) < 400
    return caught.value


def test_defaults_are_openai_s() -> None:
    ask = completion()
    assert (ask.wish.max_tokens, ask.wish.seed, ask.wish.prompt_logprobs, ask.n) == (16, None, None, 1)
    # Those of the record are the ones that change nothing; the rest is OpenAI's.
    assert ask.wish.template == Sampling(temperature=1.0, top_p=1.0, top_k=0, seed=0, max_tokens=0)
    assert (ask.stream, ask.include_usage, ask.return_token_ids, ask.echo) == (False, False, False, False)
    assert ask.queueing == Queueing()
    assert chat().wish.max_tokens is None


def test_null_is_the_same_as_absent() -> None:
    names = [
        "temperature",
        "top_p",
        "seed",
        "stop",
        "stream",
        "stream_options",
        "logprobs",
        "user",
        "n",
        "tools",
    ]
    assert completion(**dict.fromkeys(names[:-1])) == completion()
    assert chat(**dict.fromkeys(names)) == chat()


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("text", ["text"]),
        (["a", "b"], ["a", "b"]),
        ([1, 2], [[1, 2]]),
        ([[1], [2, 3]], [[1], [2, 3]]),
    ],
)
def test_all_four_prompt_forms(prompt: Any, prompts: Any) -> None:
    assert completion(prompt=prompt).prompts == prompts


@pytest.mark.parametrize(
    "prompt",
    [None, [], {}, 1, True, [[]], [1, "a"], ["a", 1], ["a", [1]], [[1], "a"], [[1], [True]], [[[1]]],
     [1.0], [-1], [100], [2**70], [None], ["a"] * 5, [[1], None]],
)  # fmt: skip
def test_other_prompts_are_refused(prompt: Any) -> None:
    assert refusal(completion, prompt=prompt).status == 400


@pytest.mark.parametrize(
    ("field", "good", "bad"),
    [
        ("temperature", [0, 0.5, 2, 1e-300], [-0.1, 2.1, "1", True, [], 10**400]),
        ("top_p", [1, 1.0, 1e-9], [0, 0.0, 1.5, -1, False, {}]),
        ("top_k", [-1, 0, 1, 1 << 31], [-2, 1.5, "3", True, (1 << 31) + 1]),
        ("seed", [0, -(2**63), 2**63 - 1], [2**63, -(2**63) - 1, 1.0, "1", True]),
        ("max_tokens", [1, 64, None], [0, -1, 65, 1.0, True, 10**40, "9"]),
        ("stream", [True, False], [1, 0, "true", []]),
        ("ignore_eos", [True], [1, "no"]),
        ("return_token_ids", [True], [1]),
        ("stop", ["a", ["a", "b"], [], "x" * 256], ["", [""], ["a"] * 17, "x" * 257, 1, [1], [["a"]], {}]),
        ("stop_token_ids", [[1, 99], []], [[100], [-1], 1, ["a"], [True], [1] * 129]),
        ("user", ["me"], [1, {}]),
        ("n", [1, 2, 128], [129, 0, 1.0, True, "1"]),
        ("min_p", [0, 0.5, 1], [-0.1, 1.1, "0", True]),
        ("presence_penalty", [0, -2, 2], [2.1, -2.1, False, "1"]),
        ("frequency_penalty", [0.5, -2, 2], [2.1, -2.1, False, "1"]),
        ("repetition_penalty", [1, 0.1, 100], [0, -1, 101, True]),
        (
            "logit_bias",
            [{}, {"1": 5, "99": -100.0}],
            [
                [],
                {"a": 1},
                {"100": 1},
                {"-1": 1},
                {" 1": 1},
                {"\u0661": 1},
                {"1": 101},
                {"1": True},
                {"1": "1"},
            ],
        ),
        (
            "response_format",
            [
                {"type": "text"},
                {"type": "json_object"},
                {
                    "type": "json_schema",
                    "json_schema": {"name": "n", "schema": {"type": "object"}, "strict": True},
                },
            ],
            [
                "text",
                {},
                {"type": "xml"},
                {"type": "json_schema"},
                {"type": "json_schema", "json_schema": {}},
                {"type": "json_schema", "json_schema": {"schema": "{"}},
                {"type": "text", "x": 1},
                {"type": "json_schema", "json_schema": {"schema": {}, "x": 1}},
            ],
        ),
        (
            "structured_outputs",
            [
                {"json": {}},
                {"json": "{}"},
                {"regex": "a"},
                {"choice": ["a"]},
                {"grammar": "g"},
                {"json_object": True},
            ],
            [
                {},
                {"regex": "a", "json": {}},
                {"regex": ""},
                {"choice": []},
                {"choice": [1]},
                {"x": 1},
                {"json": []},
                {"json_object": False},
                {"regex": "a", "whitespace_pattern": " "},
            ],
        ),
        ("guided_regex", ["a"], ["", 1]),
        ("min_tokens", [0, 1], [-1, 65, True]),
        ("prompt_logprobs", [0, 20], [-1, 21, True]),
        ("logprobs_mode", ["raw_logprobs", "processed_logprobs"], ["raw_logits", 1]),
        ("priority", [0], [1, True]),
        ("cache_salt", ["s"], ["", 1, "x" * 257]),
        ("use_prefix_cache", [True, False], [1]),
        ("metadata", [{}, {"a": "b"}], [[], {"a": 1}, {"a": "x" * 513}, {str(i): "" for i in range(17)}]),
        ("truncate_prompt_tokens", [1, 64], [0, 65, -1]),
        ("skip_special_tokens", [True, False], [1]),
        ("include_stop_str_in_output", [True, False], [1]),
        ("forced_token_ids", [[1, 2]], [[], [100], 1, [True]]),
        ("allowed_token_ids", [], [[1]]),
        ("bad_words", [[]], [["a"]]),
        ("no_such_field", [], [0, False, "", []]),
        ("", [], [1]),
    ],
)
def test_every_field_has_its_type_and_bounds(field: str, good: list[Any], bad: list[Any]) -> None:
    for parse in (completion, chat):
        for value in good:
            parse(**{field: value})
        for value in bad:
            assert refusal(parse, **{field: value}).status == 400


def test_fields_of_one_endpoint_only() -> None:
    completion(best_of=2, n=2, echo=True, suffix="")
    assert refusal(completion, suffix="x").param == "suffix"
    assert refusal(completion, best_of=2).param == "best_of"
    assert refusal(completion, tools=[]).code == "unknown_parameter"
    chat(tools=[], tool_choice="none", parallel_tool_calls=True)
    assert refusal(chat, echo=True).param == "echo"
    assert refusal(chat, best_of=1).code == "unknown_parameter"


def test_logprobs_of_both_endpoints() -> None:
    assert [completion(logprobs=n).logprobs for n in (0, 20)] == [0, 20]
    for bad in (True, 21, -1, 1.0):
        refusal(completion, logprobs=bad)
    assert chat(logprobs=True).logprobs == 0
    assert chat(logprobs=True, top_logprobs=20).logprobs == 20
    assert chat(logprobs=False, top_logprobs=0).logprobs is None
    refusal(chat, logprobs=1)
    refusal(chat, top_logprobs=2)
    refusal(chat, logprobs=True, top_logprobs=21)


def test_stream_options_need_a_stream() -> None:
    ask = completion(stream=True, stream_options={"include_usage": True, "continuous_usage_stats": True})
    assert (ask.include_usage, ask.continuous_usage) == (True, True)
    refusal(completion, stream_options={"include_usage": True})
    refusal(completion, stream=True, stream_options={"continuous_usage_stats": True})
    assert refusal(completion, stream=True, stream_options={"x": 1}).param == "stream_options.x"
    refusal(completion, stream=True, stream_options=[])


def test_both_names_of_the_token_limit() -> None:
    assert chat(max_completion_tokens=5).wish.max_tokens == 5
    assert chat(max_completion_tokens=5, max_tokens=5).wish.max_tokens == 5
    refusal(chat, max_completion_tokens=5, max_tokens=6)
    refusal(completion, max_completion_tokens=5)


def test_messages_are_roles_and_texts() -> None:
    ask = chat(
        messages=[
            {"role": "developer", "content": ""},
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
            {"role": "assistant", "content": "c", "refusal": None, "tool_calls": []},
        ]
    )
    assert [m["content"] for m in ask.messages] == ["", "a\nb", "c"]


@pytest.mark.parametrize(
    "messages",
    [None, [], {}, "hi", [1], [{}], [{"role": "user"}], [{"content": "a"}],
     [{"role": "tool", "content": "a"}], [{"role": "user", "content": None}],
     [{"role": "user", "content": 1}], [{"role": "user", "content": [1]}],
     [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}],
     [{"role": "user", "content": [{"type": "text"}]}], [{"role": "user", "content": "a", "name": "n"}],
     [{"role": 1, "content": "a"}], [{"role": "user", "content": "a"}] * 4],
)  # fmt: skip
def test_other_messages_are_refused(messages: Any) -> None:
    refusal(chat, messages=messages)


@pytest.mark.parametrize("read", [completion, chat])
def test_without_a_model_the_served_one_is_asked_and_an_unknown_one_is_404(read: Any) -> None:
    assert read(model=None).model == "m"
    for name in ("other", ""):
        error = refusal(read, model=name)
        assert (error.status, error.code) == (404, "model_not_found")
    assert refusal(read, model=["m"]).status == 400


def test_a_body_without_model_is_one_of_the_served_model() -> None:
    assert parse_completion({"prompt": "hi"}, LIMITS).model == "m"
    assert parse_chat({"messages": [{"role": "user", "content": "hi"}]}, LIMITS).model == "m"


def test_sampling_resolves_what_depends_on_the_prompt() -> None:
    rng = Random(1)
    sampling = completion(temperature=1e-6, top_k=1000, stop="x").sampling(48, LIMITS, rng)
    assert (sampling.temperature, sampling.top_k, sampling.max_tokens, sampling.stop) == (0.0, 0, 16, ["x"])
    assert chat().sampling(10, LIMITS, rng).max_tokens == 54
    assert completion(seed=7).sampling(1, LIMITS, rng).seed == 7
    assert completion().sampling(1, LIMITS, Random(2)) == completion().sampling(1, LIMITS, Random(2))
    assert completion().sampling(1, LIMITS, rng).seed != completion().sampling(1, LIMITS, rng).seed


def test_prompt_and_output_fit_the_context_to_the_token() -> None:
    rng = Random(1)
    assert completion(max_tokens=4).sampling(60, LIMITS, rng).max_tokens == 4
    assert chat().sampling(63, LIMITS, rng).max_tokens == 1
    for ask, size in ((completion(max_tokens=5), 60), (chat(), 64), (chat(), 65), (completion(), 10**9)):
        with pytest.raises(ApiError, match="within the context of 64 tokens") as caught:
            ask.sampling(size, LIMITS, rng)
        assert caught.value.code == "context_length_exceeded"
    with pytest.raises(ApiError, match="1 token or more"):
        completion().sampling(0, LIMITS, rng)


def test_tokenize_and_detokenize_bodies() -> None:
    assert parse_tokenize({"prompt": "a", "add_special_tokens": False}, LIMITS).add_special_tokens is False
    assert parse_tokenize({"prompt": "a"}, LIMITS).add_special_tokens is True
    assert (
        parse_tokenize({"messages": [{"role": "user", "content": "a"}]}, LIMITS).add_special_tokens is False
    )
    assert parse_detokenize({"tokens": []}, LIMITS) == []
    assert parse_detokenize({"tokens": [1, 2], "model": "m"}, LIMITS) == [1, 2]
    both = {"prompt": "a", "messages": [{"role": "user", "content": "a"}]}
    for body in ({}, {"prompt": 1}, both, {"prompt": "a", "x": 1}, {"prompt": "a", "model": "q"}):
        with pytest.raises(ApiError):
            parse_tokenize(body, LIMITS)
    for body in ({}, {"tokens": "a"}, {"tokens": [100]}, {"tokens": [1], "x": 1}, {"tokens": {}}):
        with pytest.raises(ApiError):
            parse_detokenize(body, LIMITS)


@pytest.mark.parametrize(
    "body",
    [b"", b"[]", b"1", b"null", b'"a"', b"{", b'{"a":NaN}', b'{"a":1e999}', b'{"a":"\\ud800"}',
     b'{"a":"\xff"}',
     b"[" * 100_000, b'{"a":' * 50_000 + b"1" + b"}" * 50_000, b'{"a":' + b"9" * 10_000 + b"}", b'{"a":1}{}'],
)  # fmt: skip
def test_bodies_that_are_no_object_are_refused(body: bytes) -> None:
    assert refusal(decode_object, body=body).status == 400


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
NAMES = st.sampled_from(
    ["model", "prompt", "messages", "stream", "stream_options", "logprobs", "top_logprobs", "stop", "seed",
     "n", "stop_token_ids", "temperature", "top_p", "top_k", "max_tokens", "max_completion_tokens", "user"]
)  # fmt: skip


@settings(max_examples=500)
@given(body=st.dictionaries(NAMES | st.text(max_size=8), JSON, max_size=6), right_model=st.booleans())
def test_any_object_is_parsed_or_refused_in_the_envelope(body: dict[str, Any], right_model: bool) -> None:
    if right_model:
        body = body | {"model": "m"}
    for parse in (parse_completion, parse_chat, parse_tokenize, parse_detokenize):
        try:
            parse(body, LIMITS)  # type: ignore[operator]
        except ApiError as caught:
            error = caught
        else:
            continue
        envelope = msgspec.json.decode(msgspec.json.encode(error.body()))
        assert set(envelope["error"]) == {"message", "type", "param", "code"}
        assert error.status in (400, 404)
