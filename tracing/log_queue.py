"""A bounded queue with a thread behind it: whoever puts something in never waits, and never waits for a disk.

Owns: the bound, the thread, the end of both. Refuses to know: what is queued, what becomes of it. Invariants:
what was taken in is handed on once, in order, or given back by `close`; the bound counts what waits and what
is just being handed on; `put` takes microseconds whatever the other side does.

Usage: `queue = BoundedQueue(handle, max_bytes=1 << 26); taken = queue.put(item, num_bytes=100)`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")

LINGER_S = 0.02
"""How long the thread lets items gather once there is one: fewer wake-ups take the interpreter less often."""


class BoundedQueue(Generic[T]):
    """Hands what is put in to `handle`, a list at a time, on a thread of its own.

    `max_bytes` bounds the items in here by what `put` says of their size; one item alone may be larger.
    `handle` must not raise: if it does, its thread ends and nothing more is taken.
    """

    def __init__(
        self, handle: Callable[[list[T]], None], *, max_bytes: int, name: str, linger_s: float = LINGER_S
    ) -> None:
        self._handle = handle
        self._max_bytes = max_bytes
        self._linger_s = linger_s
        self._changed = threading.Condition()
        self._hurry = threading.Event()
        self._items: list[T] = []
        self._waiting_bytes = 0
        self._handled_bytes = 0
        self._closing = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def put(self, item: T, *, num_bytes: int) -> bool:
        """Take `item` in; False when there is no room, or nobody hands it on any more."""
        with self._changed:
            held_bytes = self._waiting_bytes + self._handled_bytes
            if self._closing or (held_bytes and held_bytes + num_bytes > self._max_bytes):
                return False
            if not self._thread.is_alive():
                return False
            self._items.append(item)
            self._waiting_bytes += num_bytes
            if len(self._items) == 1:
                self._changed.notify_all()
            if 2 * self._waiting_bytes > self._max_bytes:
                self._hurry.set()
            return True

    def flush(self, *, timeout_s: float) -> bool:
        """Wait until all that is in here was handed on; whether it was in time."""
        self._hurry.set()
        with self._changed:
            return self._changed.wait_for(lambda: not self._items and not self._handled_bytes, timeout_s)

    def close(self, *, timeout_s: float) -> list[T]:
        """Take nothing more, hand on what is in here, and give back what was not begun in time."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._hurry.set()
        self._thread.join(timeout_s)
        with self._changed:
            left, self._items = self._items, []
            return left

    @property
    def is_stuck(self) -> bool:
        """Whether the thread still handles something after `close`."""
        return self._thread.is_alive()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._items or self._closing)
            # A flush or an end that comes now cuts this short; the next items gather again.
            self._hurry.wait(self._linger_s)
            self._hurry.clear()
            with self._changed:
                batch, self._items = self._items, []
                self._handled_bytes, self._waiting_bytes = self._waiting_bytes, 0
                if not batch and self._closing:
                    return
            self._handle(batch)
            with self._changed:
                self._handled_bytes = 0
                self._changed.notify_all()
