"""Chat messages from outside, as a model's chat template takes them.

Owns: the fields of each role. Refuses to know: templates, tokens. Invariants: content is text (an array of
text parts is joined by newlines, as vLLM does); a call's arguments, JSON text in OpenAI's form, reach the
template as the object that templates expect.

Usage: `messages = parse_messages(fields, limits)`.
"""

from __future__ import annotations

from typing import Final

import msgspec

from firstdiff.engine.openai_fields import ApiError, Fields, expected
from firstdiff.engine.openai_limits import Limits
from firstdiff.engine.openai_unsupported import UNSUPPORTED_MESSAGE

Message = dict[str, object]

_ROLES: Final = ("system", "developer", "user", "assistant", "tool")


def parse_messages(fields: Fields, limits: Limits) -> list[Message]:
    """The messages of a body, in order; at least one."""
    raw = fields.items("messages", limits.max_messages)
    if not raw:
        raise ApiError(
            "expected 'messages' with at least one message, got none: "
            'send [{"role": "user", "content": "..."}]',
            param="messages",
        )
    return [_message(item, f"messages.{index}", limits) for index, item in enumerate(raw)]


def uses_tools(messages: list[Message]) -> bool:
    """Whether a message calls a tool or answers a call: only templates that know tools can show it."""
    return any(message["role"] == "tool" or "tool_calls" in message for message in messages)


def num_chars(messages: list[Message]) -> int:
    """About how much text there is."""
    return sum(64 + len(str(message["content"])) for message in messages)


def _message(item: object, path: str, limits: Limits) -> Message:
    if not isinstance(item, dict):
        raise expected('an object like {"role": "user", "content": "..."}', item, path)
    fields = Fields(item, path=f"{path}.")
    role = fields.text("role")
    if role not in _ROLES:
        raise expected(f"a role out of {', '.join(_ROLES)}", role, fields.param("role"))
    # What newer clients call the system's message; templates know it by its old name.
    message: Message = {"role": "system" if role == "developer" else role}
    calls = fields.items("tool_calls", limits.max_tools) if role == "assistant" else None
    if role == "tool":
        call_id = fields.text("tool_call_id")
        if call_id is None:
            raise expected("the id of the call that it answers", None, fields.param("tool_call_id"))
        message["tool_call_id"] = call_id
        name = fields.text("name")
        if name is not None:
            message["name"] = name
    content = fields.take("content")
    if isinstance(content, list):
        content = _joined_parts(content, fields.param("content"))
    if content is None and calls:
        content = ""
    if not isinstance(content, str):
        raise expected("text or an array of text parts", content, fields.param("content"))
    message["content"] = content
    if calls:
        message["tool_calls"] = [
            _call(call, f"{path}.tool_calls.{index}") for index, call in enumerate(calls)
        ]
    fields.refuse_rest(UNSUPPORTED_MESSAGE)
    return message


def _call(item: object, path: str) -> dict[str, object]:
    if not isinstance(item, dict):
        raise expected("a call of a function", item, path)
    fields = Fields(item, path=f"{path}.")
    call_id, kind = fields.text("id"), fields.text("type")
    function = fields.nested("function")
    if call_id is None or kind != "function" or function is None:
        raise expected('{"id": ..., "type": "function", "function": {...}}', item, path)
    name, text = function.text("name"), function.text("arguments")
    if name is None or text is None:
        raise expected("a function's name and arguments", None, f"{path}.function")
    try:
        arguments: object = msgspec.json.decode(text or "{}")
    except (msgspec.DecodeError, RecursionError) as error:
        raise expected("arguments as the text of a JSON object", text, function.param("arguments")) from error
    if not isinstance(arguments, dict):
        raise expected("arguments as the text of a JSON object", text, function.param("arguments"))
    function.refuse_rest({})
    # A call's place among its siblings, which some clients send back.
    fields.integer("index", 0, 1 << 31)
    fields.refuse_rest({})
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def _joined_parts(parts: list[object], path: str) -> str:
    texts: list[str] = []
    for index, part in enumerate(parts):
        where = f"{path}.{index}"
        if not isinstance(part, dict):
            raise expected("a text part", part, where)
        fields = Fields(part, path=f"{where}.")
        kind = fields.text("type")
        text = fields.text("text")
        if kind != "text" or text is None:
            raise expected('a part {"type": "text", "text": "..."}', kind, where, "only text is supported")
        fields.refuse_rest({})
        texts.append(text)
    return "\n".join(texts)
