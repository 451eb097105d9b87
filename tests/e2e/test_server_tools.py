"""Tools over HTTP: the model's template shows them, what it says comes back as calls, whole and streamed."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

import openai
import pydantic
import pytest

sys.path.insert(0, str(Path(__file__).parent))
from real_server import real_server, tool_model
from scripted_server import EOS, MODEL, Script, ServerUnderTest, scripted_server, spell

from firstdiff.engine.tokenizer import Tokenizer

CHAT = "/v1/chat/completions"
SCHEMA = {
    "type": "object",
    "properties": {"day": {"type": "string", "enum": ["mon", "tue"]}},
    "required": ["day"],
    "additionalProperties": False,
}
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}
TIME = {"type": "function", "function": {"name": "time"}}
STRICT = {"type": "function", "function": WEATHER["function"] | {"strict": True}}
NAMED = {"type": "function", "function": {"name": "weather"}}
ASK = [{"role": "user", "content": "How is the weather?"}]
SAID = 'Wait. <tool_call>\n{"name": "weather", "arguments": {"day": "mon"}}\n</tool_call>'


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.load(tool_model(tmp_path_factory.mktemp("tools")))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerUnderTest]:
    with real_server(model=tool_model(tmp_path_factory.mktemp("tools"))) as running:
        yield running


def joined(chunks: list[dict[str, Any]]) -> dict[str, Any]:
    """The message that a stream's chunks make."""
    content, calls = "", []
    for chunk in chunks:
        delta = chunk["choices"][0]["delta"]
        content += delta.get("content") or ""
        for call in delta.get("tool_calls", []):
            if call["index"] == len(calls):
                calls.append({"id": call["id"], "type": call["type"], "function": dict(call["function"])})
            else:
                calls[call["index"]]["function"]["arguments"] += call["function"]["arguments"]
    message = {"role": chunks[0]["choices"][0]["delta"]["role"], "content": content or None}
    return message | ({"tool_calls": calls} if calls else {})


def both(server: ServerUnderTest, **body: Any) -> tuple[dict[str, Any], str]:
    """(message without the ids of its calls, finish reason), the same whole and streamed."""
    body = {"messages": ASK, "seed": 1} | body
    (choice,) = server.post(CHAT, **body)["choices"]
    chunks = server.events(CHAT, **body)
    messages = [choice["message"], joined(chunks)]
    for message in messages:
        ids = [call.pop("id") for call in message.get("tool_calls", [])]
        assert all(call_id.startswith("call_") for call_id in ids)
        assert len(set(ids)) == len(ids)
        message["content"] = message["content"] or None
    assert messages[0] == messages[1]
    assert chunks[-1]["choices"][0]["finish_reason"] == choice["finish_reason"]
    return messages[0], choice["finish_reason"]


def calls_of(message: dict[str, Any]) -> list[tuple[str, Any]]:
    functions = [call["function"] for call in message.get("tool_calls", [])]
    return [(function["name"], json.loads(function["arguments"])) for function in functions]


def replay(
    server: ServerUnderTest, tokenizer: Tokenizer, text: str, **body: Any
) -> tuple[dict[str, Any], str]:
    ids = tokenizer.encode(text, add_special_tokens=False)
    return both(server, tools=[WEATHER, TIME], forced_token_ids=ids, **body)


def test_what_the_model_says_comes_back_as_calls(server: ServerUnderTest, tokenizer: Tokenizer) -> None:
    message, _ = replay(server, tokenizer, SAID)
    assert message["content"] == "Wait."
    assert calls_of(message) == [("weather", {"day": "mon"})]
    two = SAID + '\n<tool_call>{"name": "time", "arguments": {}}</tool_call>'
    assert [name for name, _ in calls_of(replay(server, tokenizer, two)[0])] == ["weather", "time"]
    alone = replay(server, tokenizer, two, parallel_tool_calls=False)[0]
    assert [name for name, _ in calls_of(alone)] == ["weather"]
    for other in (SAID.replace("weather", "nuke"), SAID.replace("{", "("), SAID[:-20]):
        assert replay(server, tokenizer, other) == ({"role": "assistant", "content": other}, "length")
    assert replay(server, tokenizer, SAID, tool_choice="none")[0]["content"] == SAID


def test_the_template_shows_tools_and_earlier_calls(server: ServerUnderTest, tokenizer: Tokenizer) -> None:
    def prompt(**body: Any) -> str:
        body = {"messages": ASK, "max_tokens": 1, "return_token_ids": True} | body
        ids = server.post(CHAT, **body)["prompt_token_ids"]
        told = {name: body[name] for name in ("messages", "tools", "tool_choice") if name in body}
        assert server.post("/tokenize", **told)["tokens"] == ids
        return tokenizer.decode(ids)

    assert prompt(tools=[TIME]).startswith(
        '<tools>[{"type": "function", "function": {"name": "time"}}]</tools>'
    )
    assert "tools" not in prompt()
    assert "tools" not in prompt(tools=[TIME], tool_choice="none")
    call = {"id": "c", "type": "function", "function": {"name": "time", "arguments": '{"zone": "x"}'}}
    turns = [
        *ASK,
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "9"},
    ]
    text = prompt(messages=turns)
    assert '<tool_call>{"name": "time", "arguments": {"zone": "x"}}</tool_call>' in text
    assert "tool: 9" in text


def test_a_named_tool_is_called_with_arguments_of_its_schema(server: ServerUnderTest) -> None:
    reasons = []
    for seed in range(4):
        message, reason = both(server, tools=[WEATHER, TIME], tool_choice=NAMED, seed=seed, max_tokens=200)
        reasons.append(reason)
        if reason == "length":
            continue
        ((name, arguments),) = calls_of(message)
        assert (name, reason, message["content"]) == ("weather", "tool_calls", None)
        assert arguments in ({"day": "mon"}, {"day": "tue"})
    assert "tool_calls" in reasons


def test_required_calls_one_of_the_tools(server: ServerUnderTest) -> None:
    reasons = set()
    for seed in range(3):
        message, reason = both(
            server,
            tools=[WEATHER, TIME],
            tool_choice="required",
            parallel_tool_calls=False,
            seed=seed,
            max_tokens=200,
        )
        reasons.add(reason)
        if reason == "tool_calls":
            ((name, arguments),) = calls_of(message)
            assert arguments in ([{}] if name == "time" else [{"day": "mon"}, {"day": "tue"}])
    assert "tool_calls" in reasons


def test_a_strict_tool_s_arguments_are_exactly_its_own(server: ServerUnderTest, tokenizer: Tokenizer) -> None:
    """The model is made to begin calls; what it says in them is left to it, at temperature 1."""
    (tag,) = tokenizer.encode("<tool_call>", add_special_tokens=False)
    begin = {"logit_bias": {str(tag): 100}, "temperature": 1, "max_tokens": 200}
    reasons = set()
    for seed in range(4):
        loose, _ = both(server, tools=[WEATHER], seed=seed, **begin)
        assert "tool_calls" not in loose
        message, reason = both(server, tools=[STRICT], parallel_tool_calls=False, seed=seed, **begin)
        reasons.add(reason)
        if reason == "tool_calls":
            ((name, arguments),) = calls_of(message)
            assert name == "weather"
            assert arguments in ({"day": "mon"}, {"day": "tue"})
            assert message["content"] is None
        many, _ = both(server, tools=[STRICT, TIME], seed=seed, **begin)
        for name, arguments in calls_of(many):
            assert name == "time" or arguments in ({"day": "mon"}, {"day": "tue"})
    assert "tool_calls" in reasons
    # Where no call begins, text is as free as without.
    free = {"seed": 1, "temperature": 1, "max_tokens": 20, "logit_bias": {str(tag): -100}}
    assert both(server, tools=[STRICT], **free)[0]["content"]


def test_openai_s_client_makes_strict_tools_and_reads_their_calls(
    server: ServerUnderTest, tokenizer: Tokenizer
) -> None:
    class Forecast(pydantic.BaseModel):
        day: Literal["mon", "tue"]

    tool: Any = openai.pydantic_function_tool(Forecast)
    assert tool["function"]["strict"]
    (tag,) = tokenizer.encode("<tool_call>", add_special_tokens=False)
    ask: Any = {"model": MODEL, "messages": ASK, "tools": [tool], "max_tokens": 200}
    ask |= {"logit_bias": {str(tag): 100}, "parallel_tool_calls": False}
    parsed: list[object] = []
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        for seed in range(4):
            with suppress(openai.LengthFinishReasonError):
                message = client.chat.completions.parse(**ask, seed=seed).choices[0].message
                parsed += [call.function.parsed_arguments for call in message.tool_calls or []]
    assert parsed
    assert all(isinstance(arguments, Forecast) for arguments in parsed)


def test_what_excludes_each_other(server: ServerUnderTest) -> None:
    base = {"model": MODEL, "messages": ASK, "tools": [WEATHER]}
    for more in (
        {"response_format": {"type": "json_object"}},
        {"tool_choice": "required", "forced_token_ids": [5]},
        {"tool_choice": {"type": "function", "function": {"name": "other"}}},
        {"tools": [STRICT], "forced_token_ids": [5]},
        {"tools": [STRICT], "response_format": {"type": "json_object"}},
        {"tools": [{"type": "function", "function": {"name": "a", "parameters": {"type": "nonsense"}}}],
         "tool_choice": "required"},
    ):  # fmt: skip
        assert server.refusal(CHAT, base | more)[0] == 400
    assert server.post(
        CHAT, **base, tool_choice="none", response_format={"type": "json_object"}, max_tokens=4
    )


def test_a_model_whose_template_knows_no_tools_says_so() -> None:
    with scripted_server(Script(spell("a"))) as server:
        base = {"model": MODEL, "messages": ASK, "max_tokens": 1}
        answered = [*ASK, {"role": "tool", "tool_call_id": "c", "content": "9"}]
        for more in ({"tools": [TIME]}, {"messages": answered}):
            status, error = server.refusal(CHAT, base | more)
            assert (status, error["param"]) == (400, "tools")
            assert "chat template knows tools" in error["message"]
            assert server.refusal("/tokenize", {"messages": ASK} | more)[0] == 400
        assert server.post(CHAT, **base, tools=[TIME], tool_choice="none")["choices"]


def test_special_tokens_are_added_to_a_prompt_unless_unwanted(server: ServerUnderTest) -> None:
    body = {"prompt": "hi", "max_tokens": 1, "return_token_ids": True, "echo": True, "logprobs": 0}
    with_bos = server.post("/v1/completions", **body)["choices"][0]
    without = server.post("/v1/completions", **body, add_special_tokens=False)["choices"][0]
    assert with_bos["prompt_token_ids"] == [1, *without["prompt_token_ids"]]
    # The BOS is a token of the prompt, with an entry of its own, but no part of its text.
    assert with_bos["text"].startswith("hi")
    assert with_bos["logprobs"]["text_offset"][:2] == [0, 0]


def test_openai_s_client_reads_the_calls(tokenizer: Tokenizer) -> None:
    ids = [*tokenizer.encode(SAID, add_special_tokens=False), EOS]
    script = Script(lambda sequence: ids[sequence.num_output_tokens % len(ids)])
    with (
        scripted_server(script, tokenizer=tokenizer) as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client,
    ):
        ask: Any = {"model": MODEL, "messages": ASK, "tools": [WEATHER]}
        whole = client.chat.completions.create(**ask).choices[0]
        assert whole.finish_reason == "tool_calls"
        assert whole.message.tool_calls is not None
        assert whole.message.tool_calls[0].function.arguments == '{"day":"mon"}'
        with client.chat.completions.stream(**ask) as stream:
            streamed = stream.get_final_completion().choices[0]
        assert streamed.finish_reason == "tool_calls"
        assert streamed.message.content == whole.message.content == "Wait."
        assert streamed.message.tool_calls is not None
        assert streamed.message.tool_calls[0].function.name == "weather"
