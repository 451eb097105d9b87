"""Tools: what a client offers, what the model must then say, and the calls found in what it said.

Owns: the fields `tools`, `tool_choice` and `parallel_tool_calls`; the Hermes form
`<tool_call>{...}</tool_call>` that Qwen's and SmolLM2's templates teach; the structures behind `required`,
a named tool and strict ones. Refuses to know: the chat template, token ids, JSON answers. Invariants: a call
is given out once and whole (a named tool's arguments as they come); text that is no well-formed call of an
offered tool stays content, character by character, but for the blanks next to calls and, with `required`,
what is cut off after a whole call; the result does not depend on how the text was cut into pieces.

Usage: `parser = tools.parser(make_id); said = parser.push(text); said = parser.finish()`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, Literal, Protocol

import msgspec

from firstdiff.engine.openai_fields import ApiError, Fields, expected
from firstdiff.engine.openai_limits import Limits
from firstdiff.engine.openai_structure import schema_text
from firstdiff.tracing.records import Structure

OPEN: Final = "<tool_call>"
CLOSE: Final = "</tool_call>"
_NAME = re.compile(r"[a-zA-Z0-9_.-]{1,64}")
_MAX_SCHEMA_DEPTH: Final = 128
_VALUES: Final = frozenset({"const", "enum", "default", "examples"})
"""Keywords that hold values, in which nothing is a reference."""
_BY_NAME: Final = frozenset({"properties", "patternProperties", "dependentSchemas", "$defs", "definitions"})
"""Keywords that hold schemas by name, of which none is a keyword."""
_NO_PARAMETERS: Final[dict[str, object]] = {"type": "object", "properties": {}, "additionalProperties": False}

Choice = Literal["auto", "none", "required", "named"]
MakeId = Callable[[], str]


@dataclass(frozen=True, slots=True)
class CallDelta:
    """Part of call `index`: the first one has `call_id` and `name`; the `arguments` joined are JSON text."""

    index: int
    call_id: str | None
    name: str | None
    arguments: str


@dataclass(frozen=True, slots=True)
class Said:
    """What a piece of text brought."""

    content: str = ""
    calls: list[CallDelta] = field(default_factory=list)


class ToolParser(Protocol):
    """Finds calls in text that comes in pieces."""

    def push(self, text: str) -> Said: ...

    def finish(self) -> Said:
        """What was held back; nothing may be pushed after."""
        ...


@dataclass(frozen=True, slots=True)
class Tools:
    """The tools of one request: `definitions` as the template gets them, in the client's order."""

    definitions: list[dict[str, object]]
    choice: Choice
    name: str | None
    """The tool that must be called, with `choice` "named"."""
    parallel: bool

    @property
    def shown(self) -> list[dict[str, object]] | None:
        """What the prompt says of tools: nothing when none may be called."""
        return None if self.choice == "none" else self.definitions

    def structure(self, limits: Limits) -> Structure | None:
        """What the answer must match so that its calls are right; None when any text will do.

        A named tool: its arguments. Required: an array of `{"name", "arguments"}`. Auto with a strict tool:
        any text, in which whatever an opening tag begins is a call, one of a strict tool by its schema.
        """
        if self.choice == "named":
            (schema,) = [_parameters(tool) for tool in self.definitions if _name(tool) == self.name]
            return Structure(kind="json_schema", spec=schema_text(schema, "tools", limits))
        most = None if self.parallel else 1
        if self.choice == "required":
            call, defs = self._any_call(only_strict=False)
            array = {"type": "array", "minItems": 1, "items": call, "$defs": defs}
            array |= {} if most is None else {"maxItems": most}
            return Structure(kind="json_schema", spec=schema_text(array, "tools", limits))
        if self.choice == "auto" and any(_is_strict(tool) for tool in self.definitions):
            call, defs = self._any_call(only_strict=True)
            spec = {"open": OPEN, "close": CLOSE, "call": call | {"$defs": defs}, "most": most}
            return Structure(kind="tool_calls", spec=schema_text(spec, "tools", limits))
        return None

    def parser(self, make_id: MakeId) -> ToolParser | None:
        """A fresh parser for one answer; None when nothing is to be found."""
        names = frozenset(map(_name, self.definitions))
        if self.choice == "named":
            assert self.name is not None
            return _NamedParser(self.name, make_id)
        if self.choice == "required":
            return _ArrayParser(names, make_id)
        if self.choice == "auto":
            return HermesParser(names, make_id, most=None if self.parallel else 1)
        return None

    def _any_call(self, *, only_strict: bool) -> tuple[dict[str, object], dict[str, object]]:
        """(schema of a call of one of the tools, its `$defs`); arguments of other tools are any object."""
        defs: dict[str, object] = {}
        calls: list[dict[str, object]] = []
        for index, tool in enumerate(self.definitions):
            arguments: dict[str, object] = {"type": "object"}
            if _is_strict(tool) or not only_strict:
                # References inside a schema count from its root, which is now here.
                root = f"#/$defs/tool{index}"
                defs[f"tool{index}"] = _moved(_parameters(tool), root)
                arguments = {"$ref": root}
            calls.append(
                {
                    "type": "object",
                    "properties": {"name": {"type": "string", "enum": [_name(tool)]}, "arguments": arguments},
                    "required": ["name", "arguments"],
                    "additionalProperties": False,
                }
            )
        return {"anyOf": calls}, defs


def parse_tools(fields: Fields, limits: Limits) -> Tools | None:
    """The tools of a body; None when it offers none."""
    offered = fields.items("tools", limits.max_tools)
    raw_choice = fields.take("tool_choice")
    parallel = fields.flag("parallel_tool_calls", default=True)
    if not offered:
        if raw_choice not in (None, "none", "auto"):
            raise expected("no tool_choice without tools", raw_choice, "tool_choice", "send tools too")
        return None
    definitions = [_definition(item, f"tools.{index}", limits) for index, item in enumerate(offered)]
    names = [_name(tool) for tool in definitions]
    if len(set(names)) < len(names):
        raise ApiError("expected tools of different names, got one twice: rename it", param="tools")
    choice, name = _choice(raw_choice, names)
    return Tools(definitions, choice, name, parallel)


class HermesParser:
    """Calls between `<tool_call>` and `</tool_call>`, each a JSON object with `name` and `arguments`."""

    def __init__(self, names: frozenset[str], make_id: MakeId, *, most: int | None) -> None:
        """At most `most` calls are given out; the ones after are dropped."""
        self._names = names
        self._make_id = make_id
        self._most = most
        self._held = ""
        self._blanks = ""
        self._is_inside = False
        self._after_call = False
        self._num_calls = 0

    def push(self, text: str) -> Said:
        self._held += text
        content: list[str] = []
        calls: list[CallDelta] = []
        while self._advance(content, calls):
            pass
        return Said("".join(content), calls)

    def finish(self) -> Said:
        held, self._held = self._held, ""
        if not self._is_inside:
            return Said("" if self._after_call and not held.strip() else held)
        # The end of the answer closes a call too: some models leave the tag out.
        calls: list[CallDelta] = []
        return Said(calls=calls) if self._call(held, calls) else Said(self._blanks + OPEN + held)

    def _advance(self, content: list[str], calls: list[CallDelta]) -> bool:
        """Take one step through what is held; False when more text is needed."""
        if self._is_inside:
            body, close, rest = self._held.partition(CLOSE)
            if not close:
                return False
            if self._call(body, calls):
                self._after_call = True
            else:
                self._after_call = False
                content.append(self._blanks + OPEN + body + CLOSE)
            self._held, self._is_inside = rest, False
            return True
        before, tag, rest = self._held.partition(OPEN)
        if tag:
            self._held, self._is_inside = rest, True
            said = before.rstrip()
            content.append(said)
            self._blanks = before[len(said) :]
            return True
        keep = self._num_to_keep()
        given = self._held[: len(self._held) - keep]
        if given:
            content.append(given)
            self._after_call = False
            self._held = self._held[len(given) :]
        return False

    def _num_to_keep(self) -> int:
        """Characters at the end of what is held that may belong to a call: blanks, the start of a tag."""
        for size in range(min(len(OPEN) - 1, len(self._held)), 0, -1):
            if OPEN.startswith(self._held[-size:]):
                break
        else:
            size = 0
        before = self._held[: len(self._held) - size]
        return size + len(before) - len(before.rstrip())

    def _call(self, body: str, calls: list[CallDelta]) -> bool:
        parsed = _parsed_call(body, self._names)
        if parsed is None:
            return False
        if self._most is None or self._num_calls < self._most:
            name, arguments = parsed
            calls.append(CallDelta(self._num_calls, self._make_id(), name, arguments))
            self._num_calls += 1
        return True


class _ArrayParser:
    """A JSON array of calls, as the structure of `required` gives it; each is given out when it is whole."""

    def __init__(self, names: frozenset[str], make_id: MakeId) -> None:
        self._names = names
        self._make_id = make_id
        self._held = ""
        self._num_calls = 0
        self._decoder = json.JSONDecoder()

    def push(self, text: str) -> Said:
        self._held += text
        calls: list[CallDelta] = []
        # Only a closing brace can complete a call: without it, nothing is scanned again.
        while "}" in text and (start := self._held.find("{")) >= 0:
            try:
                _, end = self._decoder.raw_decode(self._held, start)
            except (ValueError, RecursionError):
                break
            parsed = _parsed_call(self._held[start:end], self._names)
            if parsed is None:
                break
            self._held = self._held[end:]
            name, arguments = parsed
            calls.append(CallDelta(self._num_calls, self._make_id(), name, arguments))
            self._num_calls += 1
        return Said(calls=calls)

    def finish(self) -> Said:
        # What was cut off after a whole call is no text that a reader could use.
        return Said("" if self._num_calls else self._held)


class _NamedParser:
    """All text is the arguments of one call."""

    def __init__(self, name: str, make_id: MakeId) -> None:
        self._name: str | None = name
        self._make_id = make_id

    def push(self, text: str) -> Said:
        if not text:
            return Said()
        name, self._name = self._name, None
        return Said(calls=[CallDelta(0, self._make_id() if name else None, name, text)])

    def finish(self) -> Said:
        return Said()


def _parsed_call(body: str, names: frozenset[str]) -> tuple[str, str] | None:
    """(name, arguments as JSON text) of a well-formed call of a known tool."""
    try:
        call = msgspec.json.decode(body)
    except (msgspec.DecodeError, RecursionError, UnicodeEncodeError):
        return None
    if not isinstance(call, dict) or call.get("name") not in names:
        return None
    arguments = call.get("arguments", call.get("parameters", {}))
    if not isinstance(arguments, dict):
        return None
    return str(call["name"]), msgspec.json.encode(arguments).decode()


def _choice(value: object, names: list[str]) -> tuple[Choice, str | None]:
    match value:
        case None | "auto":
            return "auto", None
        case "none":
            return "none", None
        case "required":
            return "required", None
        case dict():
            fields = Fields(value, path="tool_choice.")
            kind = fields.text("type")
            function = fields.nested("function")
            if kind != "function" or function is None:
                raise expected('{"type": "function", "function": {"name": ...}}', value, "tool_choice")
            name = function.text("name")
            if name not in names:
                raise expected("the name of one of the tools", name, "tool_choice.function.name")
            function.refuse_rest({})
            fields.refuse_rest({})
            return "named", name
    raise expected("auto, none, required or a function's name", value, "tool_choice")


def _definition(item: object, path: str, limits: Limits) -> dict[str, object]:
    if not isinstance(item, dict):
        raise expected('a tool {"type": "function", "function": {...}}', item, path)
    fields = Fields(item, path=f"{path}.")
    kind = fields.text("type")
    function = fields.nested("function")
    if kind != "function" or function is None:
        raise expected('a tool {"type": "function", "function": {...}}', kind, path)
    fields.refuse_rest({})
    name = function.text("name")
    if name is None or _NAME.fullmatch(name) is None:
        raise expected("a name of 1 to 64 letters, digits, _ . and -", name, function.param("name"))
    function.text("description")
    parameters = function.take("parameters")
    if parameters is not None and not isinstance(parameters, dict):
        raise expected("a JSON schema as an object", parameters, function.param("parameters"))
    schema_text(parameters or {}, function.param("parameters"), limits)
    function.flag("strict")
    function.refuse_rest({})
    return item


def _function(tool: dict[str, object]) -> dict[str, object]:
    function = tool["function"]
    assert isinstance(function, dict)
    return function


def _name(tool: dict[str, object]) -> str:
    return str(_function(tool)["name"])


def _parameters(tool: dict[str, object]) -> dict[str, object]:
    parameters = _function(tool).get("parameters")
    return parameters if isinstance(parameters, dict) and parameters else _NO_PARAMETERS


def _is_strict(tool: dict[str, object]) -> bool:
    return _function(tool).get("strict") is True


def _moved(schema: object, root: str, *, depth: int = 0, is_named: bool = False) -> object:
    """The schema, or a part of one, with its references counted from `root`; `is_named`: schemas by name."""
    if depth > _MAX_SCHEMA_DEPTH:
        raise ApiError(
            f"expected parameters of at most {_MAX_SCHEMA_DEPTH} levels, got deeper ones: send flatter ones",
            param="tools",
        )
    if isinstance(schema, list):
        return [_moved(item, root, depth=depth + 1) for item in schema]
    if not isinstance(schema, dict):
        return schema
    moved: dict[str, object] = {}
    for key, value in schema.items():
        if is_named or key not in _VALUES:
            moved[key] = _moved(value, root, depth=depth + 1, is_named=not is_named and key in _BY_NAME)
        else:
            moved[key] = value
    if is_named:
        return moved
    reference = schema.get("$ref")
    if isinstance(reference, str) and (reference == "#" or reference.startswith("#/")):
        moved["$ref"] = root + reference[1:]
    if not depth:
        moved.pop("$id", None)
    return moved
