"""Event streams: any cut of the same bytes gives the same events, and nothing grows without bound."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from firstdiff.harness.sse import SseParser, SseTooLargeError

STREAMS = [
    (b"data: a\n\ndata: b\n\n", [b"a", b"b"]),
    (b"data: a\r\n\r\ndata: b\r\n\r\n", [b"a", b"b"]),
    (b"data: a\r\rdata: b\r\r", [b"a", b"b"]),
    (b"data: a\r\n\ndata: b\n\r\n", [b"a", b"b"]),
    (b"data: one\ndata: two\n\n", [b"one\ntwo"]),
    (b"data:a\n\ndata:  b\n\n", [b"a", b" b"]),
    (b"\xef\xbb\xbfdata: a\n\n", [b"a"]),
    (b": comment\nevent: x\nid: 1\nretry: 5\ndata: a\n\n", [b"a"]),
    (b"event: x\n\ndata\n\n", [b""]),
    (b"data: a\n\ndata: cut off", [b"a"]),
    (b"data: a\n\ndata: cut off\n", [b"a"]),
    (b"\n\n\r\r\r\n", []),
    ("data: é\u2028ü\n\n".encode(), ["é\u2028ü".encode()]),
    (b"data: \xff\xfe\x00\n\n", [b"\xff\xfe\x00"]),
]


def parse(parts: list[bytes]) -> list[bytes]:
    parser = SseParser()
    return [event for part in parts for event in parser.feed(part)]


@pytest.mark.parametrize(("stream", "events"), STREAMS)
def test_events_do_not_depend_on_the_cuts(stream: bytes, events: list[bytes]) -> None:
    assert parse([stream]) == events
    assert parse([stream[i : i + 1] for i in range(len(stream))]) == events
    for seed in range(50):
        rng = random.Random(seed)
        cuts = sorted(rng.randrange(len(stream) + 1) for _ in range(rng.randint(1, 6)))
        borders = [0, *cuts, len(stream)]
        parts = [stream[a:b] for a, b in pairwise(borders)]
        assert parse(parts) == events, parts


def test_an_event_completes_with_its_blank_line() -> None:
    parser = SseParser()
    assert parser.feed(b"data: a\n") == []
    assert parser.feed(b"\n") == [b"a"]


def test_the_limit_is_exact() -> None:
    assert SseParser(max_event_bytes=10).feed(b"data: 1234\n\n") == [b"1234"]
    with pytest.raises(SseTooLargeError, match="at most 10 bytes"):
        SseParser(max_event_bytes=10).feed(b"data: 12345\n\n")


@pytest.mark.parametrize("part", [b"x", b"data: x\n", b"data:\n", b"data\r"])
def test_a_never_ending_event_is_refused(part: bytes) -> None:
    parser = SseParser(max_event_bytes=1000)
    with pytest.raises(SseTooLargeError):
        [parser.feed(part) for _ in range(1002)]


def test_many_events_are_no_large_event() -> None:
    parser = SseParser(max_event_bytes=20)
    assert sum(len(parser.feed(b": hello\ndata: x\n\n")) for _ in range(1000)) == 1000
