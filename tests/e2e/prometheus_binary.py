"""Prometheus and promtool: those on the PATH, or Debian's package laid out in the cache, or neither.

Usage: `programs = find_prometheus(); run([programs.promtool, "check", "config", path])`.
"""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import NamedTuple

from firstdiff.engine.model_cache import cache_dir, make_once

PACKAGE = "prometheus"
NAMES = ("prometheus", "promtool")
PATIENCE = ["-o", "Acquire::http::Timeout=10", "-o", "Acquire::https::Timeout=10", "-o", "Acquire::Retries=0"]


class Programs(NamedTuple):
    prometheus: Path
    promtool: Path


class NotToBeHadError(Exception):
    """Why there is no Prometheus here."""


def find_prometheus() -> Programs:
    """Both programs; NotToBeHadError where they are not installed and cannot be fetched either."""
    found = [shutil.which(name) for name in NAMES]
    if all(found):
        return Programs(*(Path(name) for name in found if name))
    missing = [name for name in ("apt-get", "dpkg") if shutil.which(name) is None]
    if missing:
        raise NotToBeHadError(f"no {' or '.join(NAMES)} on the PATH, and no {missing[0]} to fetch them with")
    try:
        folder = make_once(cache_dir() / PACKAGE / "debian", lambda partial, _: fetch(partial))
    except ValueError as error:
        raise NotToBeHadError(str(error)) from error
    return Programs(*(folder / name for name in NAMES))


def fetch(folder: Path) -> None:
    """Debian's package, whose sum apt checks, unpacked without being installed: needs no privileges."""
    with tempfile.TemporaryDirectory(prefix="firstdiff-prometheus-") as name:
        work = Path(name)
        run(["apt-get", "download", *PATIENCE, PACKAGE], work)
        (package,) = work.glob(f"{PACKAGE}_*.deb")
        run(["dpkg", "-x", package.name, "unpacked"], work)
        for program in NAMES:
            shutil.move(work / "unpacked" / "usr" / "bin" / program, folder / program)


def run(command: list[str], folder: Path) -> None:
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120)
    except subprocess.TimeoutExpired as error:
        raise NotToBeHadError(f"{command[0]} took longer than 120 s") from error
    if done.returncode:
        raise NotToBeHadError(f"{' '.join(command)} failed: {done.stderr.strip()[-300:]}")
