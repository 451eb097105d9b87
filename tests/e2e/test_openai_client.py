"""The official Python client against the server: what users write works as they wrote it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

sys.path.insert(0, str(Path(__file__).parent))
from scripted_server import MODEL, TOKENIZER, Script, scripted_server, spell

SAID = "The answer is forty-two. "
IDS = TOKENIZER.encode(SAID, add_special_tokens=False)


@pytest.fixture(scope="module")
def client() -> Iterator[openai.OpenAI]:
    with (
        scripted_server(Script(spell(SAID))) as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=20) as client,
    ):
        yield client


def test_chat_whole(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": "?"}], max_completion_tokens=len(IDS), user="me"
    )
    assert answer.choices[0].message.content == SAID
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == len(IDS)
    assert answer.usage.prompt_tokens_details is not None
    assert answer._request_id == answer.id.removeprefix("chatcmpl-")


def test_chat_stream_with_usage(client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(
        model=MODEL,
        messages=[
            {"role": "system", "content": "s"},
            {"role": "user", "content": [{"type": "text", "text": "?"}]},
        ],
        max_tokens=len(IDS),
        stream=True,
        stream_options={"include_usage": True},
        logprobs=True,
        top_logprobs=2,
        extra_body={"return_token_ids": True},
    )
    *chunks, last = list(stream)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == SAID
    assert [chunk.choices[0].token_ids for chunk in chunks] == [[token_id] for token_id in IDS]
    assert all(len(chunk.choices[0].logprobs.content[0].top_logprobs) == 2 for chunk in chunks)
    assert last.choices == []
    assert last.usage is not None
    assert last.usage.completion_tokens == len(IDS)


def test_chat_stream_helper(client: openai.OpenAI) -> None:
    with client.chat.completions.stream(
        model=MODEL, messages=[{"role": "user", "content": "?"}], stop="forty"
    ) as stream:
        final = stream.get_final_completion()
    assert final.choices[0].message.content == "The answer is "
    assert final.choices[0].finish_reason == "stop"


@pytest.mark.parametrize("prompt", ["?", ["?"], [5, 6], [[5, 6]]])
def test_completions_whole_and_streamed(client: openai.OpenAI, prompt: str | list[str] | list[int]) -> None:
    whole = client.completions.create(
        model=MODEL, prompt=prompt, max_tokens=len(IDS), logprobs=1, temperature=0
    )
    assert whole.choices[0].text == SAID
    assert whole.choices[0].logprobs is not None
    assert whole.choices[0].logprobs.token_logprobs == [-0.5] * len(IDS)
    chunks = client.completions.create(model=MODEL, prompt=prompt, max_tokens=len(IDS), stream=True)
    assert "".join(chunk.choices[0].text for chunk in chunks) == SAID


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).id == MODEL
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")


def test_errors_are_the_client_s_own(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        client.completions.create(model="gpt-4", prompt="?")
    assert missing.value.code == "model_not_found"
    assert missing.value.param == "model"
    with pytest.raises(openai.BadRequestError, match="not supported"):
        client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "?"}], verbosity="low"
        )


def test_an_error_in_a_stream_is_raised_by_the_client() -> None:
    def next_token(sequence: object) -> int:
        if sequence.num_output_tokens == 1:  # type: ignore[attr-defined]
            raise FloatingPointError("NaN")
        return IDS[0]

    with (
        scripted_server(Script(next_token)) as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client,
    ):
        stream = client.completions.create(model=MODEL, prompt="?", max_tokens=3, stream=True)
        with pytest.raises(openai.APIError, match="NaN"):
            list(stream)
        with pytest.raises(openai.InternalServerError, match="NaN"):
            client.completions.create(model=MODEL, prompt="?", max_tokens=3)
