"""What people install: the wheel holds the tree, the base install is small and works without torch."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import venv
import zipfile
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ROOMS = ("tracing", "engine", "harness", "evals", "regression")
# What a CI job downloads, and what lies on its disk then; scipy and numpy are four fifths of either.
MAX_DOWNLOAD_BYTES, MAX_INSTALLED_BYTES = 100_000_000, 300_000_000
WITHOUT_CACHES = shutil.ignore_patterns("__pycache__", "*.pyc")


def run(*command: str | Path, cwd: Path, expect: int = 0) -> str:
    """Output of a command that must end with exit code `expect`, without this process's Python settings."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "PYTEST"))}
    done = subprocess.run(
        [str(part) for part in command], cwd=cwd, env=clean, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == expect, f"{command}: exit {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout + done.stderr


def copy_tree(target: Path) -> Path:
    """The checkout's files in a new folder, since a build leaves its own beside them."""
    for room in ROOMS:
        shutil.copytree(ROOT / room, target / room, ignore=WITHOUT_CACHES)
    for name in ("pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, target)
    return target


@dataclass(frozen=True)
class Environment:
    """An empty virtual environment without pip: the one that runs the tests installs into it."""

    path: Path

    @property
    def python(self) -> Path:
        return self.path / "bin" / "python"

    @property
    def firstdiff(self) -> Path:
        return self.path / "bin" / "firstdiff"

    def install(self, *arguments: str | Path) -> None:
        pip = (sys.executable, "-m", "pip", "--python", self.python, "--disable-pip-version-check")
        run(*pip, "install", "--quiet", *arguments, cwd=self.path)


def new_environment(path: Path) -> Environment:
    venv.create(path, symlinks=True)
    return Environment(path)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    source = copy_tree(tmp_path_factory.mktemp("source"))
    run(sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "-w", folder, source, cwd=folder)
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def downloads(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheels of the base install: ours and what it depends on, no extras."""
    folder = tmp_path_factory.mktemp("downloads")
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--quiet")
    run(*pip, "--only-binary", ":all:", "-c", ROOT / "constraints.txt", "-d", folder, wheel, cwd=folder)
    return folder


@pytest.fixture(scope="module")
def base(downloads: Path, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """An environment with the base install and nothing else."""
    environment = new_environment(tmp_path_factory.mktemp("base"))
    environment.install("--no-index", "--find-links", downloads, "firstdiff")
    return environment


def size_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def test_the_wheel_holds_the_tree_and_nothing_else(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    packed = {name for name in names if ".dist-info/" not in name}
    files = [path for room in ROOMS for path in (ROOT / room).rglob("*") if path.is_file()]
    tree = {f"firstdiff/{path.relative_to(ROOT)}" for path in files if "__pycache__" not in path.parts}
    assert packed == tree
    assert {f"firstdiff/{room}/py.typed" for room in ROOMS} <= packed


def test_the_base_install_is_small_and_has_no_torch(base: Environment, downloads: Path) -> None:
    run(base.python, "-c", "import torch", cwd=base.path, expect=1)
    wheels = sorted(((path.stat().st_size, path.name) for path in downloads.iterdir()), reverse=True)
    assert size_bytes(downloads) < MAX_DOWNLOAD_BYTES, wheels
    assert size_bytes(base.path / "lib") < MAX_INSTALLED_BYTES, wheels


def test_the_command_works_without_torch(base: Environment) -> None:
    text = run(base.firstdiff, "--help", cwd=base.path)
    assert all(command in text for command in ("serve", "run", "compare", "eval", "demo", "model"))
    for command, extra in (
        (("serve", "--model", "tiny-random"), "engine"),
        (("eval", "http://localhost:1"), "evals"),
    ):
        text = run(base.firstdiff, *command, cwd=base.path, expect=2)
        assert f"pip install 'firstdiff[{extra}]'" in text
        assert "Traceback" not in text
    text = run(base.firstdiff, "compare", "missing", "missing", cwd=base.path, expect=2)
    assert text.startswith("firstdiff: expected a Run directory")


def test_the_base_install_lacks_nothing_that_it_imports(base: Environment) -> None:
    rooms = {"tracing": "*.py", "harness": "*.py", "regression": "*.py", "evals": "[rs]*.py"}
    modules = [
        f"firstdiff.{room}.{path.stem}"
        for room, pattern in rooms.items()
        for path in sorted((ROOT / room).glob(pattern))
        if path.stem not in ("__init__", "plugin")
    ]
    assert len(modules) > 20
    run(base.python, "-W", "error", "-c", f"import {', '.join(modules)}", cwd=base.path)


def test_entry_points_are_declared(base: Environment) -> None:
    code = (
        "from importlib.metadata import entry_points\n"
        "for group in ('console_scripts', 'pytest11'):\n"
        "    print(group, entry_points(group=group)['firstdiff'].value)"
    )
    assert run(base.python, "-c", code, cwd=base.path).splitlines() == [
        "console_scripts firstdiff.harness.cli:main",
        "pytest11 firstdiff.harness.plugin",
    ]


@pytest.mark.parametrize(("argument", "expect"), [("Path('r')", 0), ("7", 1)])
def test_a_type_checker_sees_the_types(base: Environment, tmp_path: Path, argument: str, expect: int) -> None:
    snippet = tmp_path / "snippet.py"
    snippet.write_text(
        "from pathlib import Path\n"
        "from firstdiff.tracing.store import Run\n"
        f"label: str = Run.open({argument}).manifest.label\n"
    )
    mypy = (sys.executable, "-m", "mypy", "--strict", "--cache-dir", tmp_path / "cache")
    text = run(*mypy, "--python-executable", base.python, snippet, cwd=tmp_path, expect=expect)
    assert ("incompatible type" in text) == (expect == 1)


def test_an_editable_install_shows_new_modules_at_once(tmp_path: Path) -> None:
    source = copy_tree(tmp_path / "source")
    environment = new_environment(tmp_path / "editable")
    environment.install("--no-deps", "-e", source)
    (source / "tracing" / "newcomer.py").write_text("WORD = 'here'\n")
    code = "import firstdiff.tracing.clock, firstdiff.tracing.newcomer as new; print(new.WORD)"
    for cwd in (tmp_path, source):
        assert run(environment.python, "-c", code, cwd=cwd) == "here\n"
    run(environment.python, "-c", "import engine", cwd=tmp_path, expect=1)
