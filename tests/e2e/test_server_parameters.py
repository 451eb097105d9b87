"""Every field that a request may have: what is honoured has its effect, everything else is refused."""

from __future__ import annotations

import json
import sys
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from openai.types import completion_create_params
from openai.types.chat import completion_create_params as chat_create_params

sys.path.insert(0, str(Path(__file__).parent))
from endpoint_api import CHAT, COMPLETIONS, Api
from parameter_proofs import (
    BOTH,
    Proof,
    prove_best_of,
    prove_echo,
    prove_logprobs,
    prove_max_tokens,
    prove_prompt,
)
from real_server import real_server
from scripted_server import MODEL, ServerUnderTest

from firstdiff.engine.openai_unsupported import UNSUPPORTED_CHAT, UNSUPPORTED_COMPLETION

# Proved in test_server_tools.py, on a model whose template and tokenizer take them.
ELSEWHERE = {CHAT: {"tools", "tool_choice", "parallel_tool_calls"}, COMPLETIONS: {"add_special_tokens"}}
HONOURED: dict[str, dict[str, Proof]] = {
    COMPLETIONS: BOTH | {"prompt": prove_prompt, "echo": prove_echo, "best_of": prove_best_of},
    CHAT: BOTH
    | {
        "messages": prove_prompt,
        "top_logprobs": prove_logprobs,
        "max_completion_tokens": prove_max_tokens("max_completion_tokens"),
    },
}
REFUSED = {COMPLETIONS: UNSUPPORTED_COMPLETION, CHAT: UNSUPPORTED_CHAT}
OPENAI = {
    COMPLETIONS: completion_create_params.CompletionCreateParamsStreaming,
    CHAT: chat_create_params.CompletionCreateParamsStreaming,
}


@pytest.fixture(scope="module")
def log_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("log")


@pytest.fixture(scope="module")
def server(log_dir: Path) -> Iterator[ServerUnderTest]:
    with real_server(serve={"log_dir": log_dir}) as running:
        yield running


@pytest.mark.parametrize(
    ("path", "field"), [(path, field) for path, proofs in HONOURED.items() for field in proofs]
)
def test_the_effect_of(server: ServerUnderTest, log_dir: Path, path: str, field: str) -> None:
    HONOURED[path][field](Api(server, path, log_dir))


@pytest.mark.parametrize(
    ("path", "field"), [(path, field) for path, names in REFUSED.items() for field in names]
)
def test_refused_with_a_reason(server: ServerUnderTest, log_dir: Path, path: str, field: str) -> None:
    api = Api(server, path, log_dir)
    for value in ({"some": "object"}, "some text", 7, [7]):
        status, error = api.refusal(**{field: value})
        assert (status, error["code"], error["param"]) == (400, "unsupported_parameter", field)
    for neutral in (*REFUSED[path][field], None):
        assert api.ids(**{field: neutral}) == api.ids()


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_every_field_of_openai_s_client_is_honoured_or_refused(path: str) -> None:
    honoured = HONOURED[path].keys() | ELSEWHERE[path]
    assert not honoured & REFUSED[path].keys()
    assert set(typing.get_type_hints(OPENAI[path])) <= honoured | REFUSED[path].keys()


def test_a_field_that_nobody_knows_is_refused(server: ServerUnderTest, log_dir: Path) -> None:
    for path in (COMPLETIONS, CHAT):
        status, error = Api(server, path, log_dir).refusal(no_such_field=0)
        assert (status, error["code"]) == (400, "unknown_parameter")


@pytest.mark.parametrize("prompts", [["a", "bb"], [[5, 6], [7]]])
def test_choices_of_many_prompts_are_ordered_by_prompt(server: ServerUnderTest, prompts: Any) -> None:
    fields = {"max_tokens": 4, "seed": 3, "return_token_ids": True, "ignore_eos": True}
    choices = server.post(COMPLETIONS, prompt=prompts, n=2, **fields)["choices"]
    alone = [server.post(COMPLETIONS, prompt=prompt, n=2, **fields)["choices"] for prompt in prompts]
    got = [(choice["prompt_token_ids"], choice["token_ids"]) for choice in choices]
    assert got == [(c["prompt_token_ids"], c["token_ids"]) for pair in alone for c in pair]
    assert [choice["index"] for choice in choices] == [0, 1, 2, 3]
    status, error = server.refusal(COMPLETIONS, {"model": MODEL, "prompt": prompts, "n": 100})
    assert (status, error["param"]) == (400, "n")


def test_what_was_resolved_is_in_the_token_log(server: ServerUnderTest, log_dir: Path) -> None:
    api = Api(server, COMPLETIONS, log_dir)
    (row,) = api.logged(min_p=0.25, logit_bias={"7": 1}, guided_choice=["a"], seed=9, stop="x")
    sampling = row.sampling
    assert (sampling.min_p, sampling.logit_bias, sampling.seed) == (0.25, {7: 1.0}, 9)
    assert (sampling.structure.kind, json.loads(sampling.structure.spec)) == ("choice", ["a"])
