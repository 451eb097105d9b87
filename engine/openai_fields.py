"""Reading a JSON object from outside, strictly: every field once, with its type and its bounds.

Owns: the error that a client gets (ApiError), the description of what came. Refuses to know: which
fields an endpoint has. Invariants: a value is taken only with exactly its JSON type (`true` is no number,
`1.0` no integer); null is the same as absent; a field that nobody took is refused, never ignored; messages
say what was expected, what came and what to do, and never repeat more than a few characters of the input.

Usage: `fields = Fields(decode_object(body)); n = fields.integer("n", 1, 9); fields.refuse_rest({})`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec

_KINDS = {401: "authentication_error", 429: "rate_limit_error"}
_SHOWN_CHARS = 40


class ApiError(ValueError):
    """A refusal in OpenAI's shape: `{"error": {"message", "type", "param", "code"}}`."""

    def __init__(
        self, message: str, *, status: int = 400, param: str | None = None, code: str | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code

    def body(self) -> dict[str, dict[str, str | None]]:
        """The envelope, ready for JSON."""
        fallback = "server_error" if self.status >= 500 else "invalid_request_error"
        kind = _KINDS.get(self.status, fallback)
        return {
            "error": {"message": str(self), "type": kind, "param": self.param, "code": self.code},
        }


def expected(what: str, value: object, param: str | None, todo: str = "") -> ApiError:
    """The 400 for a field that holds something else than `what`."""
    advice = f": {todo}" if todo else ""
    place = f" in {param!r}" if param else ""
    return ApiError(f"expected {what}{place}, got {describe(value)}{advice}", param=param)


def describe(value: object) -> str:
    """What came, in a few words; containers by size only, however deep they are."""
    match value:
        case None:
            return "nothing"
        case bool():
            return "true" if value else "false"
        case int() | float():
            text = repr(value)
            return text if len(text) <= _SHOWN_CHARS else f"a number of {len(text)} digits"
        case str():
            return repr(value) if len(value) <= _SHOWN_CHARS else f"a string of {len(value)} characters"
        case list():
            return f"an array of {len(value)} items"
        case _:
            return "an object"


def decode_object(body: bytes) -> dict[str, object]:
    """The JSON object in `body`; ApiError when it is not exactly one."""
    try:
        value: object = msgspec.json.decode(body)
    except RecursionError as error:
        raise ApiError("expected a JSON object, got one nested too deeply: send a flatter body") from error
    except msgspec.DecodeError as error:
        reason = str(error)[:200]
        raise ApiError(f"expected a JSON object, got a body that is not JSON ({reason}): mend it") from error
    if not isinstance(value, dict):
        raise expected("a JSON object as the body", value, None)
    return value


class Fields:
    """The fields of one object, taken one by one."""

    def __init__(self, fields: Mapping[str, object], *, path: str = "") -> None:
        """`path` is where the object is in the body, as a prefix for `param`."""
        self._fields = {name: value for name, value in fields.items() if value is not None}
        self._path = path

    def take(self, name: str) -> object:
        """The raw value, None when absent or null; the field counts as read."""
        return self._fields.pop(name, None)

    def param(self, name: str) -> str:
        """How the field is called in error messages."""
        return f"{self._path}{name}"

    def text(self, name: str) -> str | None:
        value = self.take(name)
        if value is None or isinstance(value, str):
            return value
        raise expected("a string", value, self.param(name))

    def flag(self, name: str, *, default: bool = False) -> bool:
        value = self.take(name)
        if value is None:
            return default
        if isinstance(value, bool):
            return value
        raise expected("true or false", value, self.param(name))

    def integer(self, name: str, low: int, high: int, todo: str = "") -> int | None:
        """An integer in `low .. high`, both included."""
        value = self.take(name)
        if value is None:
            return None
        if isinstance(value, int) and not isinstance(value, bool) and low <= value <= high:
            return value
        raise expected(f"an integer from {low} to {high}", value, self.param(name), todo)

    def number(self, name: str, low: float, high: float, *, above_low: bool = False) -> float | None:
        """A number in `low .. high`; `low` itself is out when `above_low`."""
        value = self.take(name)
        if value is None:
            return None
        # JSON has no NaN or infinity, and the decoder refuses numbers that would become one.
        if (
            isinstance(value, int | float)
            and not isinstance(value, bool)
            and low <= value <= high
            and not (above_low and value == low)
        ):
            return float(value)
        bound = f"above {low:g} and up to {high:g}" if above_low else f"from {low:g} to {high:g}"
        raise expected(f"a number {bound}", value, self.param(name))

    def items(self, name: str, most: int) -> list[object] | None:
        """An array of at most `most` items."""
        value = self.take(name)
        if value is None:
            return None
        if isinstance(value, list) and len(value) <= most:
            return value
        raise expected(f"an array of at most {most} items", value, self.param(name))

    def nested(self, name: str) -> Fields | None:
        """A nested object, to be read and finished like this one."""
        value = self.take(name)
        if value is None:
            return None
        if isinstance(value, dict):
            return Fields(value, path=f"{self.param(name)}.")
        raise expected("an object", value, self.param(name))

    def refuse_rest(self, unsupported: Mapping[str, Iterable[object]]) -> None:
        """Refuse whatever was not taken, except known fields with a value that changes nothing.

        `unsupported` maps each field that others support to its values that ask for nothing.
        """
        for name, value in self._fields.items():
            if name not in unsupported:
                raise ApiError(
                    f"expected only known fields, got {describe(self.param(name))}: leave it out",
                    param=self.param(name)[:_SHOWN_CHARS],
                    code="unknown_parameter",
                )
            if not any(_same(value, neutral) for neutral in unsupported[name]):
                raise ApiError(
                    f"expected no {self.param(name)!r}, got {describe(value)}: it is not supported yet, "
                    "leave it out",
                    param=self.param(name),
                    code="unsupported_parameter",
                )

    def refuse_any(self, names: Iterable[str], why: str) -> None:
        """Refuse fields that mean another thing elsewhere."""
        for name in names:
            if name in self._fields:
                raise ApiError(
                    f"expected no {self.param(name)!r}, got {describe(self._fields[name])}: {why}",
                    param=self.param(name),
                    code="unsupported_parameter",
                )


def _same(value: object, neutral: object) -> bool:
    if isinstance(value, bool) or isinstance(neutral, bool):
        return value is neutral
    return value == neutral
