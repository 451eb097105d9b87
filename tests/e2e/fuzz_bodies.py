"""Bodies for the routes that compute: what each field may hold and must refuse, whole bodies that are right.

`valid` draws a value that must be served in a body that `body_of` makes; `bad` are values that must be
refused. All randomness comes from the given Random.

Usage: `body = body_of("/v1/completions", Random(3)); field, spoiled = spoiled_body(path, body, rng)`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from scripted_server import MODEL, TOKENIZER

from firstdiff.engine.openai_unsupported import UNSUPPORTED_CHAT, UNSUPPORTED_COMPLETION

VOCAB_SIZE = TOKENIZER.vocab_size
COMPLETIONS, CHAT, SCORE = "/v1/completions", "/v1/chat/completions", "/score"

Body = dict[str, Any]
Draw = Callable[[Random], Any]

TEXTS = ["a", "one two", " é", "日本", "🙂", "a🙂b", "\0", "<|im_end|>x", "<tool_call>", "\u202e\ufeff",
         "x" * 90, "one two " * 12]  # fmt: skip
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
SCHEMAS: list[Any] = [
    SCHEMA,
    {"type": "boolean"},
    {"enum": ["x", 1, None]},
    {"type": "array", "items": {"type": "number"}, "maxItems": 3},
    {"$ref": "#/$defs/n", "$defs": {"n": {"type": "string", "maxLength": 4}}},
]
REGEXES = ["[ab]{1,3}", "\\d+", "(yes|no)!", "[^x]{2}"]
GRAMMAR = 'start: "(" start? ")" | /[xy]{1,3}/'


@dataclass(frozen=True)
class Field:
    valid: Draw
    bad: tuple[Any, ...]


def one_of(*values: Any) -> Draw:
    return lambda rng: rng.choice(values)


def integer(low: int, high: int, *values: int) -> Field:
    bad = (low - 1, high + 1, True, 1.5, 1.0, "1", [], {}, [1], 10**30, -(10**30), 2**64, -(2**63) - 1)
    return Field(one_of(*values), bad)


def number(low: float, high: float, *values: float) -> Field:
    return Field(one_of(*values), (low - 0.001, high + 0.001, True, "1", [], {}, 1e308, -1e308, 10**30))


FLAG = Field(one_of(True, False), (0, 1, "true", [], {}, 0.0))
NOT_TEXT = (1, 0, True, 1.5, [], {}, ["a"])


def text_of(*values: str, bad: tuple[Any, ...] = ()) -> Field:
    return Field(one_of(*values), NOT_TEXT + bad)


def ids(rng: Random) -> list[int]:
    some = (0, 1, 2, 3, VOCAB_SIZE - 1, *(rng.randrange(VOCAB_SIZE) for _ in range(4)))
    return rng.choices(some, k=rng.randint(1, 7))


BAD_IDS = ([-1], [VOCAB_SIZE], [2**63], [10**30], ["a"], [True], [1.5], [None], [[1]], "1", 1, {}, True)


def texts(rng: Random) -> list[str]:
    return [rng.choice(TEXTS) for _ in range(rng.randint(1, 3))]


def prompts(rng: Random) -> Any:
    form = rng.randrange(4)
    if form < 2:
        return rng.choice(TEXTS) if form else ids(rng)
    return texts(rng) if form == 2 else [ids(rng) for _ in range(rng.randint(1, 3))]


BAD_PROMPTS = ("", [], [[]], ["a", 1], [[1], "a"], [[1], [VOCAB_SIZE]], 1, True, {}, [None], ["a"] * 129,
               "\ud800")  # fmt: skip


def content(rng: Random) -> Any:
    if rng.random() < 0.7:
        return rng.choice(TEXTS)
    return [{"type": "text", "text": text} for text in texts(rng)]


def messages(rng: Random) -> list[Body]:
    said: list[Body] = [{"role": rng.choice(("system", "user")), "content": content(rng)}]
    if rng.random() < 0.2:
        function = {"name": "get", "arguments": rng.choice(("", "{}", '{"a":1}'))}
        call = {"id": "c1", "type": "function", "function": function, "index": 0}
        said += [
            {"role": "assistant", "content": rng.choice((None, "x")), "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c1", "name": "get", "content": content(rng)},
        ]
    return [*said, {"role": "user", "content": content(rng)}]


BAD_MESSAGES: tuple[Any, ...] = (
    [], "a", {}, 1, [1], [[]], [{}], [{"role": "user"}], [{"role": "root", "content": "a"}],
    [{"role": "user", "content": 1}], [{"role": "user", "content": [{"type": "image_url", "text": "a"}]}],
    [{"role": "user", "content": "a", "color": "red"}], [{"role": "tool", "content": "a"}],
    [{"role": "user", "content": "\ud800"}], [{"role": "assistant", "tool_calls": [{}]}],
    [{"role": "assistant", "tool_calls": [{"id": "a", "type": "function", "function": {"name": "f"}}]}],
)  # fmt: skip


def tools(rng: Random) -> list[Body]:
    names = rng.sample(("get", "put", "a.b-c"), rng.randint(1, 3))
    return [
        {
            "type": "function",
            "function": {"name": name, "parameters": rng.choice((SCHEMA, {}, None)),
                         "strict": False},
        }
        for name in names
    ]  # fmt: skip


def _tool(**function: Any) -> list[Body]:
    return [{"type": "function", "function": function}]


def response_format(rng: Random) -> Body:
    kind = rng.choice(("text", "json_object", "json_schema"))
    if kind != "json_schema":
        return {"type": kind}
    schema = {"name": "n", "description": "d", "strict": True, "schema": rng.choice(SCHEMAS)}
    return {"type": kind, "json_schema": schema}


BAD_SPECS = (1, True, [], ["a"], "")
STRUCTURES: dict[str, Field] = {
    "response_format": Field(
        response_format,
        (1, "json_object", [], {}, {"type": 1}, {"type": "xml"}, {"type": "json_schema"},
         {"type": "json_schema", "json_schema": {}}, {"type": "json_object", "extra": 1},
         {"type": "json_schema", "json_schema": {"schema": {"type": "nonsense"}}},
         {"type": "json_schema", "json_schema": {"schema": {"$ref": "http://localhost/x"}}}),
    ),
    "structured_outputs": Field(
        lambda rng: rng.choice(({"json": rng.choice(SCHEMAS)}, {"regex": rng.choice(REGEXES)},
                                {"choice": texts(rng)}, {"grammar": GRAMMAR}, {"json_object": True})),
        ({}, 1, [], "a", {"json": 1}, {"regex": "["}, {"choice": []}, {"grammar": "start: nowhere"},
         {"regex": "a", "choice": ["a"]}, {"structural_tag": "a"}, {"color": 1}),
    ),
    "guided_json": Field(one_of(*SCHEMAS, '{"type":"boolean"}'), (1, [], "{", "[]", "a", {"type": 1})),
    "guided_regex": Field(one_of(*REGEXES), (*BAD_SPECS, {}, "[", "(", "x" * 70_000)),
    "guided_choice": Field(texts, ("a", 1, {}, [], [""], [1], ["a"] * 1025, [None])),
    "guided_grammar": Field(one_of(GRAMMAR), (*BAD_SPECS, {}, "start: nowhere", "\0", "start: start")),
}  # fmt: skip

QUEUEING: dict[str, Field] = {
    "priority": integer(-(1 << 31), (1 << 31) - 1, 0, 1, -1),
    "cache_salt": text_of("a", "é" * 9, bad=("", "x" * 257)),
    "user": text_of("", "u", "🙂" * 9, bad=("x" * 513,)),
    "metadata": Field(
        one_of({}, {"a": "b"}, {"é": ""}),
        ({"a": 1}, {"a": None}, [], "a", 1, {str(i): "" for i in range(17)}, {"a": "x" * 513}),
    ),
    "use_prefix_cache": FLAG,
}
SAMPLING: dict[str, Field] = {
    "temperature": number(0, 2, 0, 0.0, 1e-6, 0.7, 1, 2),
    "top_p": number(0, 1, 5e-324, 0.1, 0.9, 1),
    "top_k": integer(-1, 1 << 31, -1, 0, 1, 20, VOCAB_SIZE, 1 << 31),
    "min_p": number(0, 1, 0, 0.1, 1),
    "seed": integer(-(2**63), 2**63 - 1, 0, 1, -(2**63), 2**63 - 1, 7),
    "prompt_logprobs": integer(0, 20, 0, 1, 5, 20),
    "min_tokens": integer(0, 1 << 62, 0, 1, 2),
    "stop": Field(
        lambda rng: rng.choice((*rng.choices("aeinorst ", k=2), ["er", "t", "in"], texts(rng), [])),
        (1, True, "", [""], [1], {}, ["a"] * 17, "x" * 257, [None], [["a"]]),
    ),
    "stop_token_ids": Field(lambda rng: rng.choice(([], ids(rng))), (*BAD_IDS, [1] * 129)),
    "ignore_eos": FLAG,
    "presence_penalty": number(-2, 2, -2, 0, 0.5, 2),
    "frequency_penalty": number(-2, 2, -2, 0, 0.5, 2),
    "repetition_penalty": number(0, 100, 0.01, 1, 1.5, 100),
    "logit_bias": Field(
        lambda rng: {str(token): rng.choice((-100, -1.5, 0, 100)) for token in ids(rng)[:3]},
        ({"-1": 1}, {"2048": 1}, {"a": 1}, {"": 1}, {"1": 101}, {"1": "a"}, {"1": True}, {"1": None},
         {"9" * 30: 1}, {"\u0661": 1}, {" 1": 1}, {"1_0": 1}, [], "a", 1),
    ),
    "logprobs_mode": text_of("raw_logprobs", "processed_logprobs", bad=("", "raw", "x" * 500)),
    "forced_token_ids": Field(ids, (*BAD_IDS, [], [1] * 9999)),
    **STRUCTURES,
}  # fmt: skip
ANSWER: dict[str, Field] = {
    "n": integer(1, 128, 1, 2, 3),
    "stream": FLAG,
    "stream_options": Field(
        lambda rng: {"include_usage": True, "continuous_usage_stats": rng.random() < 0.5,
                     "include_obfuscation": False},
        (1, [], "a", True, {"include_usage": 1}, {"continuous_usage_stats": True}, {"color": 1}),
    ),
    "truncate_prompt_tokens": integer(1, 1 << 62, 1, 2, 100),
    "skip_special_tokens": FLAG,
    "include_stop_str_in_output": FLAG,
    "return_token_ids": Field(one_of(True, True, True, True, False), FLAG.bad),
}  # fmt: skip
MODEL_FIELD = text_of(MODEL, bad=("", "gpt-4", "x" * 5000, "\ud800"))
_MAX_TOKENS = integer(0, 1 << 62, 1, 2, 3, 9, 30, 60)
_PROMPT, _TARGET = Field(prompts, BAD_PROMPTS), Field(prompts, BAD_PROMPTS)
_SCORE_FIELDS: dict[str, Field] = {
    "model": MODEL_FIELD,
    "prompt": _PROMPT,
    "target": _TARGET,
    "top_logprobs": integer(0, 20, 0, 1, 20),
    "add_special_tokens": FLAG,
    **QUEUEING,
}
_TOOL_FIELDS: dict[str, Field] = {
    "tools": Field(
        tools,
        ("a", 1, {}, [1], [{}], _tool(), _tool(name=""), _tool(name="a b"), _tool(name="x" * 65),
         _tool(name="a", parameters=1), _tool(name="a", strict=1), _tool(name="a", color=1),
         _tool(name="a") * 2, _tool(name="a") * 129, [{"type": "web"}]),
    ),
    "tool_choice": Field(
        one_of("auto", "none", "required", "named"),
        ("any", "", 1, True, [], {}, {"type": "function"}, {"type": "function", "function": {"name": "no"}}),
    ),
    "parallel_tool_calls": FLAG,
}  # fmt: skip

FIELDS: dict[str, dict[str, Field]] = {
    COMPLETIONS: {
        "model": MODEL_FIELD,
        "prompt": _PROMPT,
        "max_tokens": _MAX_TOKENS,
        "logprobs": integer(0, 20, 0, 1, 5, 20),
        "echo": FLAG,
        "best_of": integer(1, 128, 1, 2),
        "add_special_tokens": FLAG,
        **SAMPLING, **ANSWER, **QUEUEING,
    },
    CHAT: {
        "model": MODEL_FIELD,
        "messages": Field(messages, BAD_MESSAGES),
        "max_tokens": _MAX_TOKENS,
        "max_completion_tokens": _MAX_TOKENS,
        "logprobs": FLAG,
        "top_logprobs": integer(0, 20, 0, 1, 5, 20),
        **_TOOL_FIELDS, **SAMPLING, **ANSWER, **QUEUEING,
    },
    SCORE: _SCORE_FIELDS,
}  # fmt: skip
NEUTRAL: dict[str, Mapping[str, tuple[object, ...]]] = {
    COMPLETIONS: UNSUPPORTED_COMPLETION,
    CHAT: UNSUPPORTED_CHAT,
}
"""Fields that are refused but for these values."""

_NEEDED = {"prompt", "messages", "target"}
_OFTEN = {"model": 0.9, "max_tokens": 0.97, "stream": 0.5, "stream_options": 0.5, "return_token_ids": 0.9,
          "logprobs": 0.4, "top_logprobs": 0.3, "echo": 0.3, "n": 0.3, "seed": 0.7, "stop": 0.4}  # fmt: skip
_STEERING = ("stop", "stop_token_ids", "presence_penalty", "frequency_penalty", "repetition_penalty",
             "min_tokens", "n", "best_of", "max_tokens", "max_completion_tokens")  # fmt: skip


def body_of(path: str, rng: Random) -> Body:
    """A body that must be served."""
    body = {
        name: field.valid(rng)
        for name, field in FIELDS[path].items()
        if name in _NEEDED or rng.random() < _OFTEN.get(name, 0.1)
    }
    if path == SCORE:
        # One prompt for all targets, or one for each.
        num_targets = len(body["target"]) if is_many(body["target"]) else 1
        body["prompt"] = [rng.choice(TEXTS) for _ in range(num_targets)]
        if rng.random() < 0.7:
            body["prompt"] = rng.choice((rng.choice(TEXTS), ids(rng)))
        return body
    if rng.random() < 0.1:
        neutral = {name: values for name, values in NEUTRAL[path].items() if values}
        name = rng.choice(sorted(neutral))
        body[name] = rng.choice(neutral[name])
    _reconcile(body, rng)
    return body


def is_many(texts_or_ids: Any) -> bool:
    """Whether it is an array of texts or of arrays of ids."""
    return isinstance(texts_or_ids, list) and not isinstance(texts_or_ids[0], int)


def spoiled_body(path: str, body: Body, rng: Random) -> tuple[str, Body]:
    """(the field that must be refused, the body with it)."""
    name = rng.choice(sorted(FIELDS[path]))
    return name, body | {name: rng.choice(FIELDS[path][name].bad)}


def _reconcile(body: Body, rng: Random) -> None:
    """Drop what excludes what."""
    for name in [name for name in STRUCTURES if name in body][1:]:
        del body[name]
    if "tools" in body or "tool_choice" in body:
        _reconcile_tools(body, rng)
    if "forced_token_ids" in body:
        for name in (*_STEERING, *STRUCTURES, "tools", "tool_choice"):
            body.pop(name, None)
    if body.get("stream"):
        body.pop("prompt_logprobs", None)
    else:
        body.pop("stream_options", None)
    if body.get("top_logprobs"):
        body["logprobs"] = True
    if "max_tokens" in body and "max_completion_tokens" in body:
        body["max_completion_tokens"] = body["max_tokens"]
    may_be_none = "prompt_logprobs" in body or body.get("echo")
    if may_be_none and rng.random() < 0.2 and "forced_token_ids" not in body:
        body["max_tokens"] = 0
        for name in ("n", "max_completion_tokens"):
            body.pop(name, None)
    if "best_of" in body:
        body["best_of"] = body.get("n", 1)
    most = body.get("max_tokens", body.get("max_completion_tokens", 9))
    body["min_tokens"] = min(body.get("min_tokens", 0), most)


def _reconcile_tools(body: Body, rng: Random) -> None:
    body.setdefault("tools", tools(rng))
    choice = body.get("tool_choice")
    if choice == "named":
        name = rng.choice(body["tools"])["function"]["name"]
        body["tool_choice"] = {"type": "function", "function": {"name": name}}
    if choice != "none":
        for name in STRUCTURES:
            body.pop(name, None)
