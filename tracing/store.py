"""The Run: one directory of append-only rows that can be judged again later, elsewhere.

Owns: the file layout (`manifest.json`, `<name>.jsonl`, `verdict.json`) and its durability. Refuses to
know: what rows mean. Invariants: a line is written by one `write` call and is never changed afterwards;
a Run killed at any moment reads back up to its last whole row and can be resumed from there;
`manifest.json` and `verdict.json` are replaced atomically; opening never writes.

Usage: `with Run.create(path, manifest) as run: run.append("requests", row)`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import msgspec

from firstdiff.tracing.lines import LineFile
from firstdiff.tracing.records import SCHEMA_VERSION, UNREADABLE, Identity, Row

R = TypeVar("R", bound=Row)


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """What a Run is of: everything that decides whether two Runs may be compared.

    `workload` is the workload's resolved parameters and `workload_sha256` the hash of its requests in
    order; `identity` is the server's own account where it gives one, else None. `client` records the
    harness side: versions, machine, commit.
    """

    schema: int = SCHEMA_VERSION
    run_id: str
    label: str
    created_unix_ns: int
    endpoint: str
    dialect: str
    model: str
    workload: dict[str, Any]
    workload_sha256: str
    identity: Identity | None
    client: dict[str, Any]
    complete: bool = False


class Run:
    """A directory of rows, open for appending (`create`, `resume`) or reading (`open`)."""

    def __init__(self, path: Path, manifest: Manifest, *, writable: bool) -> None:
        self.path = path
        self.manifest = manifest
        self._writable = writable
        self._files: dict[str, LineFile] = {}
        self.truncated: dict[str, int] = {}
        """Bytes of an unfinished last line, by row-file name, of the files read so far."""

    @classmethod
    def create(cls, path: Path, manifest: Manifest) -> Run:
        """Make a new Run; ValueError when `path` already holds one, so that no Run is overwritten."""
        if (path / "manifest.json").exists():
            raise ValueError(f"expected a new Run directory, got {path}, which holds a Run: choose another")
        path.mkdir(parents=True, exist_ok=True)
        run = cls(path, manifest, writable=True)
        run.write_manifest(manifest)
        return run

    @classmethod
    def open(cls, path: Path) -> Run:
        """Open an existing Run for reading; ValueError when it is missing or not a Run."""
        file = path / "manifest.json"
        if not file.is_file():
            raise ValueError(f"expected a Run directory with manifest.json, got {path}: see `firstdiff run`")
        try:
            manifest = msgspec.json.decode(file.read_bytes(), type=Manifest)
        except UNREADABLE as error:
            raise ValueError(f"expected a Firstdiff manifest in {file}, got: {error}") from error
        if manifest.schema > SCHEMA_VERSION:
            raise ValueError(
                f"expected schema {SCHEMA_VERSION} or older in {file}, got {manifest.schema}: "
                "read this Run with a newer Firstdiff"
            )
        return cls(path, manifest, writable=False)

    @classmethod
    def resume(cls, path: Path) -> Run:
        """Open an existing Run to append more rows, also one whose writer was killed; errors as `open`."""
        return cls(path, cls.open(path).manifest, writable=True)

    def append(self, name: str, row: msgspec.Struct) -> None:
        """Append `row` to `<name>.jsonl` as one line, in one write."""
        self.append_line(name, msgspec.json.encode(row))

    def append_line(self, name: str, line: bytes) -> None:
        """Append an already encoded line (no newline inside) to `<name>.jsonl`.

        OSError (disk full, say) names the file and leaves it as it was; ValueError when another process is
        writing it.
        """
        if not self._writable:
            raise ValueError(f"expected a Run open for appending, got {self.path} opened for reading")
        file = self._files.get(name)
        if file is None:
            file = self._files[name] = LineFile(self.path / f"{name}.jsonl")
        file.append(line)

    def rows(self, name: str, row_type: type[R]) -> Iterator[R]:
        """Rows of `<name>.jsonl` in file order; none when there is no such file.

        An unfinished last line is left out and counted in `truncated[name]`. ValueError names the line
        when a whole line is not a `row_type`.
        """
        file = self.path / f"{name}.jsonl"
        if not file.exists():
            return
        decoder = msgspec.json.Decoder(row_type)
        with file.open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                if not line.endswith(b"\n"):
                    self.truncated[name] = len(line)
                    return
                try:
                    yield decoder.decode(line)
                except UNREADABLE as error:
                    raise ValueError(
                        f"expected a {row_type.__name__} in {file} line {number}, got: {error}"
                    ) from error

    def write_manifest(self, manifest: Manifest) -> None:
        """Replace the manifest atomically."""
        self.manifest = manifest
        write_atomically(self.path / "manifest.json", msgspec.json.format(msgspec.json.encode(manifest)))

    def close(self) -> None:
        """Flush to disk and close; the Run stays readable."""
        for file in self._files.values():
            file.close()
        self._files.clear()

    def __enter__(self) -> Run:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def write_atomically(path: Path, content: bytes) -> None:
    """Write `content` to `path` so that a reader sees the old file or the new one, never a part."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        with partial.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except OSError as error:
        error.filename = str(path)
        raise
    finally:
        partial.unlink(missing_ok=True)
