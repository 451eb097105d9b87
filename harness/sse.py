"""Server-sent events from raw bytes, split anywhere.

Owns: the event-stream framing (WHATWG HTML, section 9.2). Refuses to know: JSON, OpenAI, sockets, time.
Invariants: the events do not depend on how the bytes were cut into reads; memory is bounded by
`max_event_bytes`; work is linear in the bytes fed; no input makes it raise anything but SseTooLargeError.

Usage: `parser = SseParser(); for data in parser.feed(read): ...`.
"""

from __future__ import annotations

import re

_LINE_END = re.compile(rb"\r\n|\n|\r")
_BOM = b"\xef\xbb\xbf"


class SseTooLargeError(ValueError):
    """An event grew beyond the limit."""


class SseParser:
    """Turns reads into the `data` payloads of complete events.

    Other fields (`event`, `id`, `retry`) and comments are skipped: the OpenAI protocol uses none. An event
    without data is no event; one that the stream's end cuts off is dropped, as the standard says.
    """

    def __init__(self, *, max_event_bytes: int = 4 << 20) -> None:
        self._max_event_bytes = max_event_bytes
        self._line_parts: list[bytes] = []
        self._line_bytes = 0
        self._data_lines: list[bytes] = []
        self._data_bytes = 0
        self._skip_line_feed = False
        self._at_start = True

    def feed(self, read: bytes) -> list[bytes]:
        """Data payloads completed by `read`, in order; SseTooLargeError when one exceeds the limit."""
        if self._skip_line_feed and read:
            # The previous read ended in CR, which already ended its line; an LF here belongs to it.
            read = read[1:] if read[0] == 0x0A else read
            self._skip_line_feed = False
        lines = _LINE_END.split(read)
        rest = lines.pop()
        events: list[bytes] = []
        for line in lines:
            self._check_size(len(line))
            if self._line_parts:
                line = b"".join([*self._line_parts, line])
                self._line_parts.clear()
                self._line_bytes = 0
            self._end_line(line, events)
        if rest:
            self._check_size(len(rest))
            self._line_parts.append(rest)
            self._line_bytes += len(rest)
        elif read.endswith(b"\r"):
            self._skip_line_feed = True
        return events

    def _check_size(self, num_new_bytes: int) -> None:
        num_bytes = self._line_bytes + self._data_bytes + num_new_bytes
        if num_bytes > self._max_event_bytes:
            raise SseTooLargeError(
                f"expected events of at most {self._max_event_bytes} bytes, got {num_bytes} and counting"
            )

    def _end_line(self, line: bytes, events: list[bytes]) -> None:
        if self._at_start:
            self._at_start = False
            line = line.removeprefix(_BOM)
        if not line:
            if self._data_lines:
                events.append(b"\n".join(self._data_lines))
                self._data_lines = []
                self._data_bytes = 0
            return
        field, _, value = line.partition(b":")
        if field == b"data":
            value = value[1:] if value.startswith(b" ") else value
            self._data_lines.append(value)
            # One more than its bytes: endless empty `data:` lines must hit the limit too.
            self._data_bytes += len(value) + 1
