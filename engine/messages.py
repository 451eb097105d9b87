"""What server and engine core say to each other: a closed set of small messages.

Owns: the messages and their encoding. Refuses to know: sockets, threads, HTTP. Invariants: one message a
step carries all rows of that step in emission order, so a request's last token and its end arrive
together; every message decodes to exactly one type.

Usage: `wire = encode(StepOutput(rows=rows)); message = decode_from_core(wire)`.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from firstdiff.engine.engine import EngineRequest
from firstdiff.tracing.records import (
    EngineRequestRow,
    FinishReason,
    Identity,
    LoadRow,
    PromptLogprobsRow,
    StepRow,
    TokenRow,
)

EngineRow = StepRow | PromptLogprobsRow | TokenRow | EngineRequestRow | LoadRow


class Add(msgspec.Struct, frozen=True, tag="add"):
    """Take this request; answered by its rows or by one Rejected."""

    request: EngineRequest


class Abort(msgspec.Struct, frozen=True, tag="abort"):
    """End this request now and free its blocks, or the place kept for it; nothing when it has ended."""

    request_id: str
    reason: FinishReason


class ResetPrefixCache(msgspec.Struct, frozen=True, tag="reset_prefix_cache"):
    """Let no later request find a prefix computed before; answered by a PrefixCacheReset."""


class Shutdown(msgspec.Struct, frozen=True, tag="shutdown"):
    """Abort everything, send the last rows, then exit."""


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """The engine is built and takes requests; `pid` is the process that runs it."""

    identity: Identity
    pid: int


class StartFailed(msgspec.Struct, frozen=True, tag="start_failed"):
    """The engine could not be built; `is_usage` when the user can mend it (a ValueError)."""

    message: str
    is_usage: bool


class StepOutput(msgspec.Struct, frozen=True, tag="step"):
    """All rows since the last message, in emission order."""

    rows: list[EngineRow]


class Rejected(msgspec.Struct, frozen=True, tag="rejected"):
    """The engine refused a request before it became a sequence."""

    request_id: str
    cause: Literal["queue_full", "invalid"]
    message: str


class PrefixCacheReset(msgspec.Struct, frozen=True, tag="prefix_cache_reset"):
    """The cache was reset; `num_blocks` could be found until then."""

    num_blocks: int


class CoreFailed(msgspec.Struct, frozen=True, tag="core_failed"):
    """The step loop met an error that it cannot go on from; the last message of a core."""

    message: str


ToCore = Add | Abort | ResetPrefixCache | Shutdown
FromCore = Ready | StartFailed | StepOutput | Rejected | PrefixCacheReset | CoreFailed

_ENCODER = msgspec.msgpack.Encoder()
_TO_CORE: msgspec.msgpack.Decoder[ToCore] = msgspec.msgpack.Decoder(ToCore)
_FROM_CORE: msgspec.msgpack.Decoder[FromCore] = msgspec.msgpack.Decoder(FromCore)


def encode(message: ToCore | FromCore) -> bytes:
    """One message as msgpack."""
    return _ENCODER.encode(message)


def decode_to_core(wire: bytes) -> ToCore:
    """The message that `wire` holds; msgspec.DecodeError when it is none."""
    return _TO_CORE.decode(wire)


def decode_from_core(wire: bytes) -> FromCore:
    """The message that `wire` holds; msgspec.DecodeError when it is none."""
    return _FROM_CORE.decode(wire)
