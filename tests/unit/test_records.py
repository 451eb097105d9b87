"""Every row, also one added later, comes back from JSON and msgpack as it went in."""

from __future__ import annotations

import types
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from firstdiff.tracing import records
from firstdiff.tracing.records import (
    Identity,
    Request,
    RequestRow,
    Row,
    StepRow,
    TokenRow,
    decode_row,
    encode_row,
)

INTS = st.integers(-(1 << 63), (1 << 64) - 1)
FLOATS = st.floats(allow_nan=False, allow_infinity=False)
SCALARS = {
    int: INTS,
    float: FLOATS,
    bool: st.booleans(),
    str: st.text(),
    type(None): st.none(),
    Any: st.none(),
}
ROW_TYPES = sorted(Row.__subclasses__(), key=lambda row_type: row_type.__name__)


def values(hint: Any) -> st.SearchStrategy[Any]:
    """Any value that `hint` allows, built from the annotation alone."""
    if hint in SCALARS:
        return SCALARS[hint]
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Literal:
        return st.sampled_from(arguments)
    if origin in (Union, types.UnionType):
        return st.one_of([values(argument) for argument in arguments])
    if origin is list:
        return st.lists(values(arguments[0]), max_size=4)
    if origin is dict:
        return st.dictionaries(values(arguments[0]), values(arguments[1]), max_size=4)
    if origin is tuple:
        return st.tuples(*map(values, arguments))
    if hint is msgspec.UnsetType:
        return st.just(msgspec.UNSET)
    assert issubclass(hint, msgspec.Struct), hint
    return structs(hint)


def structs(struct_type: type[msgspec.Struct]) -> st.SearchStrategy[Any]:
    hints = get_type_hints(struct_type)
    return st.builds(struct_type, **{name: values(hints[name]) for name in struct_type.__struct_fields__})


@pytest.mark.parametrize("row_type", [*ROW_TYPES, Request], ids=lambda row_type: row_type.__name__)
def test_each_row_survives_json_and_msgpack(row_type):
    # Numbers of a union may come back as the other one of int and float, equal all the same.
    @settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
    @given(structs(row_type))
    def survives(row):
        line = encode_row(row)
        assert b"\n" not in line
        assert decode_row(line, row_type) == row
        assert encode_row(decode_row(line, row_type)) == line
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(row), type=row_type) == row

    survives()


@given(FLOATS)
def test_a_float_keeps_every_bit(value):
    row = token_row(logprob=value)
    back = decode_row(encode_row(row), TokenRow).logprob
    assert back is not None
    assert back.hex() == value.hex()


def test_kinds_are_one_a_row_type():
    kinds = [row_type.__struct_config__.tag for row_type in ROW_TYPES]
    assert len(set(kinds)) == len(kinds)
    assert set(ROW_TYPES) >= {Identity, StepRow, TokenRow, RequestRow}
    for row_type in ROW_TYPES:
        assert row_type.__struct_config__.tag_field == "kind"
        assert row_type.__struct_config__.frozen


def test_a_row_of_another_kind_is_refused():
    with pytest.raises(msgspec.ValidationError, match="token"):
        decode_row(encode_row(token_row()), StepRow)


@given(st.sampled_from(ROW_TYPES), st.data())
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_a_newer_row_is_read_without_its_new_fields(row_type, data):
    row = data.draw(structs(row_type))
    fields = msgspec.json.decode(encode_row(row))
    newer = msgspec.json.encode({**fields, "field_of_the_future": {"deep": [1, "two", None]}})
    assert decode_row(newer, row_type) == row


def test_a_line_from_before_a_defaulted_field_is_read():
    fields = msgspec.json.decode(encode_row(token_row()))
    del fields["logprob"], fields["top_logprobs"]
    assert decode_row(msgspec.json.encode(fields), TokenRow) == token_row()


@given(st.binary(max_size=200))
def test_garbage_is_refused_and_nothing_worse(line):
    with pytest.raises(records.UNREADABLE):
        decode_row(line, TokenRow)


def test_deep_nesting_in_an_unknown_field_is_refused_or_skipped():
    line = encode_row(token_row())[:-1] + b',"x":' + b"[" * 100_000 + b"]" * 100_000 + b"}"
    with pytest.raises(records.UNREADABLE):
        decode_row(line, TokenRow)


def test_rows_cannot_be_changed():
    with pytest.raises(AttributeError, match="immutable"):
        token_row().token_id = 5


def token_row(logprob=None):
    return TokenRow(
        request_id="r", token_index=0, token_id=1, emitted_ns=2, step_index=3, batch_size=4, logprob=logprob
    )
