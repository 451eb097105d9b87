"""A raw loopback server for client tests: each path answers with the bytes a test scripted, and no more.

Usage: `with FakeServer({"/v1/chat/completions": [b"HTTP/1.1 200 OK...", 0.1, b"..."]}) as url: ...`.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterable, Sequence

Script = Sequence[bytes | float]
"""Bytes to write, seconds to wait; `HANG_UP` closes the connection, the end keeps it open."""
HANG_UP = b""


def http(body: bytes, *, status: int = 200, kind: str = "application/json", extra: str = "") -> bytes:
    """A whole reply with its length."""
    head = f"HTTP/1.1 {status} X\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n{extra}\r\n"
    return head.encode() + body


def chunked(parts: Iterable[bytes], *, kind: str = "text/event-stream") -> list[bytes]:
    """A chunked reply, one write a part."""
    head = f"HTTP/1.1 200 OK\r\nContent-Type: {kind}\r\nTransfer-Encoding: chunked\r\n\r\n".encode()
    return [head, *(b"%x\r\n%s\r\n" % (len(part), part) for part in parts), b"0\r\n\r\n"]


def event(body: object) -> bytes:
    return b"data: " + json.dumps(body).encode() + b"\n\n"


def chat_events(words: Sequence[str], *, finish: str = "stop", ids: bool = True) -> list[bytes]:
    """What a good server streams for `words`, one token each with id 100 + index."""
    parts = [event({"choices": [{"index": 0, "delta": {"role": "assistant"}}]})]
    for index, word in enumerate(words):
        choice: dict[str, object] = {"index": 0, "delta": {"content": word}, "finish_reason": None}
        if ids:
            choice["token_ids"] = [100 + index]
        parts.append(event({"choices": [choice], "usage": usage(index + 1)}))
    parts.append(event({"choices": [{"index": 0, "delta": {}, "finish_reason": finish}]}))
    parts.append(event({"choices": [], "usage": usage(len(words))}))
    return [*parts, b"data: [DONE]\n\n"]


def usage(num_output_tokens: int) -> dict[str, int]:
    return {"prompt_tokens": 3, "completion_tokens": num_output_tokens, "total_tokens": 3}


class FakeServer:
    """Serves scripts by path from a thread of its own; `requests` keeps what came."""

    def __init__(self, scripts: dict[str, Script]) -> None:
        self._scripts = scripts
        self.requests: list[bytes] = []
        self.num_connections = 0
        self.num_lost = 0
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                length = head.lower().partition(b"content-length:")[2].partition(b"\r\n")[0]
                self.requests.append(head + await reader.readexactly(int(length or 0)))
                path = head.split(b" ")[1].decode()
                for part in self._scripts.get(path, [http(b'{"error": "no such path"}', status=404)]):
                    if isinstance(part, float):
                        await asyncio.sleep(part)
                    elif part == HANG_UP:
                        return
                    else:
                        writer.write(part)
                        await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            self.num_lost += 1
        finally:
            writer.close()

    async def _start(self) -> str:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        return f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def _stop(self) -> None:
        self._server.close()
        tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def __enter__(self) -> FakeServer:
        self._thread.start()
        self.url = asyncio.run_coroutine_threadsafe(self._start(), self._loop).result(10)
        return self

    def __exit__(self, *_: object) -> None:
        asyncio.run_coroutine_threadsafe(self._stop(), self._loop).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()
