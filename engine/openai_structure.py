"""What an answer must match, in the spellings that clients use.

Owns: OpenAI's `response_format`, vLLM's `structured_outputs` and its older `guided_*`, as one Structure.
Refuses to know: how a structure is enforced, whether a schema or a grammar can be compiled. Invariants: a
body names at most one structure; its text is bounded.

Usage: `structure = parse_structure(fields, limits)`.
"""

from __future__ import annotations

from typing import Final

import msgspec

from firstdiff.engine.openai_fields import ApiError, Fields, describe, expected
from firstdiff.engine.openai_limits import Limits
from firstdiff.tracing.records import Structure, StructureKind

_GUIDED: Final[dict[str, StructureKind]] = {
    "guided_json": "json_schema",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
}
_STRUCTURED: Final[dict[str, StructureKind]] = {
    "json": "json_schema",
    "regex": "regex",
    "choice": "choice",
    "grammar": "grammar",
}
_UNSUPPORTED_STRUCTURED: Final[dict[str, tuple[object, ...]]] = {
    "disable_fallback": (False,),
    "disable_any_whitespace": (False,),
    "disable_additional_properties": (False,),
    "whitespace_pattern": (),
    "structural_tag": (),
}


def parse_structure(fields: Fields, limits: Limits) -> Structure | None:
    """The one structure that the body asks for; None when any text will do."""
    found: list[tuple[str, Structure]] = []
    for name, kind in _GUIDED.items():
        value = fields.take(name)
        if value is not None:
            found.append((name, _structure(kind, value, fields.param(name), limits)))
    nested = fields.nested("structured_outputs")
    if nested is not None:
        found += [("structured_outputs", one) for one in _structured_outputs(nested, limits)]
    response_format = fields.nested("response_format")
    if response_format is not None:
        structure = _response_format(response_format, limits)
        if structure is not None:
            found.append(("response_format", structure))
    if len(found) > 1:
        names = ", ".join(name for name, _ in found)
        raise ApiError(
            f"expected one structure for the answer, got {len(found)} ({names}): send one of them",
            param=found[1][0],
        )
    return found[0][1] if found else None


def schema_text(schema: object, param: str, limits: Limits) -> str:
    """A JSON schema, given as an object or as its text, as JSON text within the limit."""
    if isinstance(schema, str):
        try:
            schema = msgspec.json.decode(schema)
        except (msgspec.DecodeError, RecursionError) as error:
            raise expected("a JSON schema", schema, param) from error
    if schema is True:
        schema = {}  # as JSON Schema has it: anything fits
    if not isinstance(schema, dict):
        raise expected("a JSON schema as an object", schema, param)
    return _bounded(msgspec.json.encode(schema).decode(), param, limits)


def _structured_outputs(fields: Fields, limits: Limits) -> list[Structure]:
    found = [
        _structure(kind, value, fields.param(name), limits)
        for name, kind in _STRUCTURED.items()
        if (value := fields.take(name)) is not None
    ]
    if fields.flag("json_object"):
        found.append(Structure(kind="json_object"))
    fields.refuse_rest(_UNSUPPORTED_STRUCTURED)
    if not found:
        raise ApiError(
            "expected one of json, regex, choice, grammar or json_object in 'structured_outputs', got none: "
            "leave it out",
            param="structured_outputs",
        )
    return found


def _response_format(fields: Fields, limits: Limits) -> Structure | None:
    kind = fields.text("type")
    structure: Structure | None = None
    if kind == "json_object":
        structure = Structure(kind="json_object")
    elif kind == "json_schema":
        nested = fields.nested("json_schema")
        if nested is None:
            raise ApiError(
                "expected 'response_format.json_schema' beside its type, got nothing: send the schema",
                param="response_format.json_schema",
            )
        # A name and a description are for the reader; the schema is enforced whether strict or not.
        for name in ("name", "description"):
            nested.text(name)
        nested.flag("strict")
        schema = nested.take("schema")
        if schema is None:
            raise expected("a JSON schema as an object", None, nested.param("schema"))
        structure = _structure("json_schema", schema, nested.param("schema"), limits)
        nested.refuse_rest({})
    elif kind != "text":
        raise ApiError(
            f"expected a type out of text, json_object, json_schema, got {describe(kind)}: send one of them",
            param="response_format.type",
        )
    fields.refuse_rest({})
    return structure


def _structure(kind: StructureKind, value: object, param: str, limits: Limits) -> Structure:
    if kind == "json_schema":
        return Structure(kind=kind, spec=schema_text(value, param, limits))
    if kind == "choice":
        return Structure(kind=kind, spec=_choices(value, param, limits))
    if not isinstance(value, str) or not value:
        what = "a regular expression" if kind == "regex" else "a grammar"
        raise expected(f"{what} as text", value, param)
    return Structure(kind=kind, spec=_bounded(value, param, limits))


def _choices(value: object, param: str, limits: Limits) -> str:
    if not isinstance(value, list) or not 1 <= len(value) <= limits.max_structure_choices:
        raise expected(f"an array of 1 to {limits.max_structure_choices} texts", value, param)
    for choice in value:
        if not isinstance(choice, str) or not choice:
            raise expected("texts of a character or more", choice, param)
    return _bounded(msgspec.json.encode(value).decode(), param, limits)


def _bounded(spec: str, param: str, limits: Limits) -> str:
    if len(spec) > limits.max_structure_chars:
        raise ApiError(
            f"expected at most {limits.max_structure_chars} characters in {param!r}, got {len(spec)}: "
            "send a smaller one",
            param=param,
        )
    return spec
