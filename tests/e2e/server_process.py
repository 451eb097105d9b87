"""The server as users start it, in two processes of its own on a loopback port of its choosing.

Usage: `with serving(log_dir=tmp_path) as served: status, answer = served.ask({"prompt": "a"})`.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPConnection
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec

from firstdiff.engine.config import EngineConfig
from firstdiff.engine.server import ServeSettings

PROGRAM = """
import sys, msgspec
from firstdiff.engine.server import ServeSettings, serve_main
sys.exit(serve_main(msgspec.json.decode(sys.argv[1], type=ServeSettings)))
"""
READY = re.compile(
    r"firstdiff: listening on (http://127\.0\.0\.1:\d+) \(model (\S+), dtype fp32, pid (\d+)\)\n"
)
PROGRESS = re.compile(
    r"firstdiff serve: (?:(?:loading|reading the weights of) \S+|looking for \S+ on the Hugging Face hub"
    r"|compiling the CPU kernels .*"
    r"|a trial of threads found \d+ fastest)\n"
)
MODEL = "tiny-random"


def beside_progress(stderr: str) -> str:
    """What a server said on standard error, without how far its start was."""
    return PROGRESS.sub("", stderr)


def start(*, model: str = MODEL, faults: tuple[str, ...] = (), **serve: Any) -> subprocess.Popen[str]:
    engine = EngineConfig(model=model, faults=faults, num_blocks=64)
    serve_settings = ServeSettings(engine=engine, **({"port": 0} | serve))
    # Path is no JSON type of msgspec's own.
    argument = msgspec.json.encode(serve_settings, enc_hook=str).decode()
    program = PROGRAM.replace("type=ServeSettings", "type=ServeSettings, dec_hook=lambda t, v: t(v)")
    return subprocess.Popen(
        [sys.executable, "-c", program, argument],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


class Served:
    """A server process that is ready."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        assert process.stdout is not None
        line = process.stdout.readline()
        match = READY.fullmatch(line)
        assert match, (line, process.communicate()[1])
        self.netloc = urlsplit(match[1]).netloc
        assert match[2] == MODEL
        assert int(match[3]) == process.pid

    @property
    def core_pid(self) -> int:
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        (pid,) = [
            int(c) for c in children if b"firstdiff.engine.core" in Path(f"/proc/{c}/cmdline").read_bytes()
        ]
        return pid

    def send(self, body: dict[str, Any] | None = None, path: str = "/v1/completions") -> HTTPConnection:
        connection = HTTPConnection(self.netloc, timeout=30)
        if body is None:
            connection.request("GET", path)
        else:
            connection.request("POST", path, json.dumps({"model": MODEL} | body))
        return connection

    def ask(self, body: dict[str, Any] | None = None, path: str = "/v1/completions") -> tuple[int, Any]:
        connection = self.send(body, path)
        response = connection.getresponse()
        answer = response.read()
        connection.close()
        return response.status, json.loads(answer)


@contextmanager
def serving(**serve: Any) -> Iterator[Served]:
    process = start(**serve)
    try:
        yield Served(process)
    finally:
        process.kill()
        process.communicate(timeout=20)
