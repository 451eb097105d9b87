"""The user's cache folder: things made once, whole or not at all, and remembered hashes.

Owns: where the cache is, the lock under which a folder is made, the sidecars that remember SHA-256 sums.
Refuses to know: what a model is, where it comes from. Invariants: a folder under its final name is
complete; what a killed maker left is removed before the next try; two makers of one folder take turns.

Usage: `folder = make_once(cache_dir() / "models" / "tiny", lambda partial, lock: fill(partial))`.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec

from firstdiff.tracing.records import UNREADABLE
from firstdiff.tracing.store import write_atomically

_UNWRITABLE = {
    errno.EACCES,
    errno.EDQUOT,
    errno.EEXIST,
    errno.ENOSPC,
    errno.ENOTDIR,
    errno.EPERM,
    errno.EROFS,
}


class _Remembered(msgspec.Struct, frozen=True):
    """A sum, and the stamps (size, mtime in ns, inode) of the files it was taken of."""

    stamps: list[tuple[int, int, int]]
    sha256: str


def cache_dir() -> Path:
    """$FIRSTDIFF_CACHE, else $XDG_CACHE_HOME/firstdiff, else ~/.cache/firstdiff; not created here."""
    if chosen := os.environ.get("FIRSTDIFF_CACHE"):
        return Path(chosen).absolute()
    shared = os.environ.get("XDG_CACHE_HOME", "")
    # The XDG specification says that a relative path is to be ignored.
    base = Path(shared) if os.path.isabs(shared) else Path.home() / ".cache"
    return base / "firstdiff"


def make_once(
    target: Path, fill: Callable[[Path, int], None], *, report: Callable[[str], None] = lambda line: None
) -> Path:
    """`target`, made by `fill(empty folder, lock)` unless it is there already.

    `lock` is a file descriptor: a process that inherits it holds off other makers until it ends. Errors
    of `fill` pass through and leave nothing behind; ValueError when the cache cannot be written.
    """
    if target.is_dir():
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with _locked(target.with_name(f".{target.name}.lock"), report) as lock:
            if not target.is_dir():
                _make(target, fill, lock)
    except OSError as error:
        if error.errno not in _UNWRITABLE:
            raise
        raise ValueError(
            f"expected a writable cache with room in {target.parent}, got: {error}: "
            "free some space or set FIRSTDIFF_CACHE to another folder"
        ) from error
    return target


def _make(target: Path, fill: Callable[[Path, int], None], lock: int) -> None:
    # Whoever made these was killed: a living maker would hold the lock.
    for stale in target.parent.glob(f".{target.name}.*.partial"):
        shutil.rmtree(stale)
    partial = Path(tempfile.mkdtemp(prefix=f".{target.name}.", suffix=".partial", dir=target.parent))
    try:
        fill(partial, lock)
        for file in partial.iterdir():
            with file.open("rb") as opened:
                os.fsync(opened.fileno())
        partial.rename(target)
    finally:
        if partial.exists():
            shutil.rmtree(partial)


@contextmanager
def _locked(path: Path, report: Callable[[str], None]) -> Iterator[int]:
    """Hold `path` locked; the system frees it when the last process that has it open ends."""
    lock = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            report(f"waiting for another process that is making {path.parent}")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield lock
    finally:
        os.close(lock)


def sha256_of(files: Sequence[Path]) -> str:
    """Hex SHA-256 of the contents of `files`, one after the other, remembered until a file changes.

    A changed file is known by its size, modification time or inode.
    """
    stamps = [_stamp(file) for file in files]
    key = hashlib.sha256("\n".join(str(file.absolute()) for file in files).encode()).hexdigest()
    sidecar = cache_dir() / "sha256" / f"{key}.json"
    remembered = _read_sidecar(sidecar)
    if remembered is not None and remembered.stamps == stamps:
        return remembered.sha256
    digest = hashlib.sha256()
    for file in files:
        with file.open("rb") as opened:
            while chunk := opened.read(1 << 20):
                digest.update(chunk)
    # A file that changed while it was read must not be remembered under either stamp.
    if stamps == [_stamp(file) for file in files]:
        _write_sidecar(sidecar, _Remembered(stamps, digest.hexdigest()))
    return digest.hexdigest()


def _stamp(file: Path) -> tuple[int, int, int]:
    status = file.stat()
    return status.st_size, status.st_mtime_ns, status.st_ino


def _read_sidecar(sidecar: Path) -> _Remembered | None:
    try:
        return msgspec.json.decode(sidecar.read_bytes(), type=_Remembered)
    except (OSError, *UNREADABLE):
        # A sidecar only saves time: without a readable one the sum is taken again.
        return None


def _write_sidecar(sidecar: Path, remembered: _Remembered) -> None:
    try:
        sidecar.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(sidecar, msgspec.json.encode(remembered))
    except OSError:
        # A read-only or full cache costs the next start a second and nothing else.
        return
