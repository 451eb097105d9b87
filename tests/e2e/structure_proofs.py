"""What shows that an answer is held to the structure that its request names, on the real engine.

Usage: `prove_structure("guided_regex", "[0-9]{2}", "[0-9]{2}")(Api(server, COMPLETIONS, log_dir))`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import regex

sys.path.insert(0, str(Path(__file__).parent))
from endpoint_api import Api


def prove_structure(name: str, value: Any, pattern: str) -> Callable[[Api], None]:
    """Every answer ends and fits; one that `may_be_cut` begins as one that fits."""

    def prove(api: Api) -> None:
        for seed in range(2):
            choice = api.choice(**{name: value}, temperature=1, seed=seed, ignore_eos=False, max_tokens=90)
            is_cut = choice["finish_reason"] != "stop"
            assert regex.fullmatch(pattern, api.text_of(choice), regex.DOTALL, partial=is_cut)
        assert api.refusal(**{name: {"json": 1, "regex": 2, "type": 3}})[0] == 400

    return prove


OBJECT = {
    "type": "object",
    "properties": {"a": {"type": "boolean"}},
    "required": ["a"],
    "additionalProperties": False,
}
JSON_A = r'\s*\{\s*"a"\s*:\s*(true|false)\s*\}\s*'


def prove_response_format(api: Api) -> None:
    schema = {"type": "json_schema", "json_schema": {"name": "a", "schema": OBJECT, "strict": True}}
    prove_structure("response_format", schema, JSON_A)(api)
    prove_structure("response_format", {"type": "json_object"}, r"\s*\{.*\}\s*")(api)
    assert api.ids(response_format={"type": "text"}) == api.ids()
    bad = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "nonsense"}}}
    assert api.refusal(response_format=bad)[0] == 400


def prove_structured_outputs(api: Api) -> None:
    for value, pattern in (
        ({"json": OBJECT}, JSON_A),
        ({"regex": "[a-c]{3}"}, "[a-c]{3}"),
        ({"choice": ["north", "south"]}, "north|south"),
        ({"grammar": 'start: "x" | "yy"'}, "x|yy"),
        ({"json_object": True}, r"\s*\{.*\}\s*"),
    ):
        prove_structure("structured_outputs", value, pattern)(api)
    assert "regular expression" in api.refusal(structured_outputs={"regex": 1})[1]["message"]
    assert api.refusal(structured_outputs={"regex": "("})[0] == 400
