"""Stop strings in text that arrives in pieces.

Owns: finding the first stop string, and holding back text that may be the start of one. Refuses to know:
tokens, requests. Invariants: the result does not depend on how the text was cut into pieces: the match is
the one that would be seen first reading character by character (the earliest end; of those the earliest
start); nothing of a stop string (unless told to include it), and nothing after it, is ever given out; without
a match everything is.

Usage: `text, stopped_by = matcher.push(delta)`; at the end `text = matcher.finish()`.
"""

from __future__ import annotations

from collections.abc import Sequence


class StopMatcher:
    """Watches one text for any of `stops` (none of them empty)."""

    def __init__(self, stops: Sequence[str], *, include: bool = False) -> None:
        """`include`: the stop string itself is given out too."""
        assert all(stops)
        self._include = include
        self._stops = stops
        self._first_chars = frozenset(stop[0] for stop in stops)
        self._longest = max(map(len, stops), default=0)
        self._held = ""

    def push(self, delta: str) -> tuple[str, str | None]:
        """(text that is safe to give out, the stop string if the text now holds one)."""
        if not self._stops:
            return delta, None
        text = self._held + delta
        match = self._find(text)
        if match is not None:
            start, stop = match
            self._held = ""
            return text[: start + len(stop) if self._include else start], stop
        keep = self._start_of_possible_stop(text)
        self._held = text[keep:]
        return text[:keep], None

    def skip(self, delta: str) -> str:
        """Text that no stop string may touch yet; all that is given out so far."""
        return self.finish() + delta

    def finish(self) -> str:
        """What was held back: the text ended without a stop string."""
        held, self._held = self._held, ""
        return held

    def _find(self, text: str) -> tuple[int, str] | None:
        found = [(start + len(stop), start, stop) for stop in self._stops if (start := text.find(stop)) >= 0]
        if not found:
            return None
        _, start, stop = min(found)
        return start, stop

    def _start_of_possible_stop(self, text: str) -> int:
        """Where the longest tail of `text` begins that a stop string begins with; its end when none does."""
        for start in range(max(0, len(text) - self._longest + 1), len(text)):
            if text[start] in self._first_chars:
                tail = text[start:]
                if any(stop.startswith(tail) for stop in self._stops):
                    return start
        return len(text)
