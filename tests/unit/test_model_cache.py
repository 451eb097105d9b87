"""A folder in the cache is made whole, by one maker at a time, and what a killed one left is swept away."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import pytest

from firstdiff.engine.model_cache import make_once

# Begins to make the folder, starts a helper that keeps the lock until its input ends, and is killed.
KILLED_MAKER = """
import os, signal, subprocess, sys
from pathlib import Path
from firstdiff.engine.model_cache import make_once
def fill(folder, lock):
    (folder / "half").write_text("x")
    subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], pass_fds=[lock])
    os.kill(os.getpid(), signal.SIGKILL)
make_once(Path(sys.argv[1]), fill)
"""


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if not path.name.endswith(".lock"))


def test_made_once(tmp_path: Path) -> None:
    target = tmp_path / "new" / "thing"
    assert make_once(target, lambda folder, lock: _write(folder, "first")) == target
    assert make_once(target, lambda folder, lock: _write(folder, "second")) == target
    assert (target / "file").read_text() == "first"
    assert names(target.parent) == ["thing"]


def _write(folder: Path, content: str) -> None:
    (folder / "file").write_text(content)


@pytest.mark.parametrize("error", [ValueError("no"), KeyboardInterrupt(), FileNotFoundError(2, "gone")])
def test_a_failed_maker_leaves_nothing(tmp_path: Path, error: BaseException) -> None:
    def fail(folder: Path, lock: int) -> None:
        _write(folder, "half")
        raise error

    with pytest.raises(type(error)) as caught:
        make_once(tmp_path / "thing", fail)
    assert caught.value is error
    assert names(tmp_path) == []


def test_a_full_disk_says_what_to_do(tmp_path: Path) -> None:
    def fail(folder: Path, lock: int) -> None:
        _write(folder, "half")
        raise OSError(28, "No space left on device")

    with pytest.raises(ValueError, match="No space left on device: free some space or set FIRSTDIFF_CACHE"):
        make_once(tmp_path / "thing", fail)
    assert names(tmp_path) == []


def test_what_an_orphan_still_writes_is_waited_for_and_then_swept(tmp_path: Path) -> None:
    target = tmp_path / "thing"
    with subprocess.Popen([sys.executable, "-c", KILLED_MAKER, str(target)], stdin=subprocess.PIPE) as killed:
        killed.wait(60)
        (left,) = names(tmp_path)
        assert left.endswith(".partial")

        waiting = threading.Event()
        second = threading.Thread(
            target=make_once,
            args=(target, lambda folder, lock: _write(folder, "whole")),
            kwargs={"report": lambda line: waiting.set()},
        )
        second.start()
        assert waiting.wait(60)
        assert names(tmp_path) == [left]
        assert killed.stdin is not None
        killed.stdin.close()
        second.join(60)
    assert names(tmp_path) == ["thing"]
    assert names(target) == ["file"]


def test_makers_of_one_folder_take_turns(tmp_path: Path) -> None:
    made: list[str] = []
    makers = [
        threading.Thread(
            target=make_once,
            args=(tmp_path / "thing", lambda folder, lock: (made.append(folder.name), _write(folder, "x"))),
        )
        for _ in range(8)
    ]
    for maker in makers:
        maker.start()
    for maker in makers:
        maker.join(60)
    assert len(made) == 1
    assert names(tmp_path) == ["thing"]
