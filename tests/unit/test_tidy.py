"""The tree stays what the README says: map, import order, sizes, docstrings, time, words.

The map in README.md ("The tree") is the one table of files. Its order inside a room is the import order:
a file may import `firstdiff.tracing` and the files listed above it in its own room.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ROOMS = ("tracing", "engine", "harness", "evals", "regression")
MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 70
UNLISTED = {"__init__.py", "py.typed"}
DOCSTRING_PARTS = ("Owns", "efuses to know", "Invariants:", "Usage:")
# Those of datetime, time and the event loop; a Clock's own are now_ns and now_unix_ns.
CLOCK_VERBS = {"now", "utcnow", "today", "time", "monotonic", "perf_counter", "time_ns", "monotonic_ns"}
# Joined here from parts, so that this file holds none of them.
FORBIDDEN_WORDS = [
    "/" + "work/", "/" + "home/", "/" + "root/", "/" + "tmp/", "pypi" + ".org", "python" + "hosted",
    "TO" + "DO", "FIX" + "ME",
]  # fmt: skip


def is_front_door(module: str) -> bool:
    """The files that wire rooms together: harness/cli*.py and harness/plugin.py."""
    room, _, name = module.partition(".")
    return room == "harness" and (name == "plugin" or name.split("_")[0] == "cli")


def files_under(*folders: str, suffixes: Sequence[str] = ()) -> list[Path]:
    found = [path for folder in folders for path in sorted((ROOT / folder).rglob("*")) if path.is_file()]
    found = [path for path in found if "__pycache__" not in path.parts]
    return [path for path in found if not suffixes or path.suffix in suffixes]


def read_map(readme: str) -> dict[str, list[str]]:
    """Files by room, in listed order; fails on a line without a comment or a file listed twice."""
    block = re.search(r"^## The tree\n.*?^```text\n(.*?)^```", readme, re.MULTILINE | re.DOTALL)
    assert block, 'expected a section "The tree" with a ```text block in README.md'
    rooms: dict[str, list[str]] = {}
    files: list[str] = []
    for line in block.group(1).splitlines():
        if not line.strip():
            continue
        name, _, comment = line.strip().partition(" ")
        assert comment.strip(), f"expected a comment after {name} in the README's tree"
        if not line.startswith(" "):
            files = rooms[name.rstrip("/")] = []
            continue
        assert name not in files, f"{name} is listed twice"
        files.append(name)
    return rooms


MAP = read_map((ROOT / "README.md").read_text(encoding="utf-8"))


@pytest.mark.parametrize("room", [*ROOMS, "tests"])
def test_map_lists_the_tree(room: str) -> None:
    if room == "tests":
        present = {f"{path.name}/" for path in (ROOT / "tests").iterdir() if any(path.glob("*.py"))}
    else:
        paths = [path.relative_to(ROOT / room) for path in files_under(room)]
        present = {str(path) for path in paths if path.name not in UNLISTED}
    listed = set(MAP[room])
    assert present - listed == set(), f"missing in the README's tree under {room}/"
    assert listed - present == set(), f"in the README's tree under {room}/, but not in the checkout"


def imported_modules(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """(line, dotted module) of all imports, also inside functions; a leading dot marks a relative one."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level:
            yield node.lineno, "." * node.level + (node.module or "")
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            is_package = module == "firstdiff" or module.removeprefix("firstdiff.") in ROOMS
            names = [f"{module}.{alias.name}" for alias in node.names] if is_package else [module]
            yield from ((node.lineno, name) for name in names)


def import_complaints(module: str, source: str, order: dict[str, list[str]]) -> list[str]:
    """What is wrong with the imports of `module` ("engine.model") under the rule."""
    room, name = module.split(".", 1)
    listed = [file.removesuffix(".py") for file in order[room]]
    found = []
    for line, target in imported_modules(ast.parse(source)):
        if target.startswith(".") or target.split(".")[0] in (*ROOMS, "tests"):
            found.append(f"line {line}: import {target!r} as firstdiff.<room>.<file>")
            continue
        if target.split(".")[0] != "firstdiff":
            continue
        target = target.removeprefix("firstdiff.")
        target_room, _, target_name = target.partition(".")
        if is_front_door(target) and not is_front_door(module):
            found.append(f"line {line}: nobody imports the front door {target}")
        elif target_room != room and target_room != "tracing" and not is_front_door(module):
            found.append(f"line {line}: {room} may not import {target}")
        elif target_room == room and target_name and name != "__init__":
            if target_name not in listed or name not in listed:
                found.append(f"line {line}: {target} or {module} is not in the README's tree")
            elif listed.index(target_name) >= listed.index(name):
                found.append(f"line {line}: {target} is listed below {module}")
    return found


def size_complaints(source: str) -> list[str]:
    found = []
    num_lines = source.count("\n")
    if num_lines >= MAX_FILE_LINES:
        found.append(f"{num_lines} lines, expected fewer than {MAX_FILE_LINES}: split it")
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno is not None
            num_lines = node.end_lineno - node.lineno + 1
            if num_lines >= MAX_FUNCTION_LINES:
                found.append(f"{node.name}: {num_lines} lines, expected fewer than {MAX_FUNCTION_LINES}")
    return found


def docstring_complaints(source: str) -> list[str]:
    docstring = " ".join((ast.get_docstring(ast.parse(source)) or "").split())
    return [f"module docstring lacks {part!r}" for part in DOCSTRING_PARTS if part not in docstring]


def time_complaints(source: str) -> list[str]:
    """Reads of a clock that do not go through a Clock."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import) and any(alias.name == "time" for alias in node.names):
            found.append(f"line {node.lineno}: import time")
        elif isinstance(node, ast.ImportFrom) and node.module == "time":
            found.append(f"line {node.lineno}: from time import")
        elif isinstance(node, ast.Attribute) and node.attr in CLOCK_VERBS:
            found.append(f"line {node.lineno}: .{node.attr}")
    return found


def word_complaints(text: str) -> list[str]:
    return [word for word in FORBIDDEN_WORDS if word in text]


def all_complaints(paths: Sequence[Path], check: Callable[[str], list[str]]) -> list[str]:
    texts = ((path, path.read_text(encoding="utf-8")) for path in paths)
    return [f"{path.relative_to(ROOT)}: {complaint}" for path, text in texts for complaint in check(text)]


def test_rooms_import_only_what_they_may() -> None:
    found = []
    for path in files_under(*ROOMS, suffixes=[".py"]):
        module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        complaints = import_complaints(module, path.read_text(encoding="utf-8"), MAP)
        found += [f"{path.relative_to(ROOT)}: {complaint}" for complaint in complaints]
    assert found == []


def test_files_and_functions_are_short() -> None:
    assert all_complaints(files_under(*ROOMS, "tests", suffixes=[".py"]), size_complaints) == []


def test_every_module_says_what_it_is() -> None:
    modules = [path for path in files_under(*ROOMS, suffixes=[".py"]) if path.name != "__init__.py"]
    assert all_complaints(modules, docstring_complaints) == []
    for path in files_under(*ROOMS, "tests", suffixes=[".py"]):
        assert ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))), f"no docstring in {path}"


def test_only_the_clock_reads_time() -> None:
    modules = [path for path in files_under(*ROOMS, suffixes=[".py"]) if path != ROOT / "tracing/clock.py"]
    assert all_complaints(modules, time_complaints) == []


def test_no_machine_is_named() -> None:
    texts = files_under(*ROOMS, "tests", ".ci", suffixes=[".py", ".yaml", ".yml", ".jsonl", ".md", ""])
    texts += [ROOT / name for name in ("README.md", "Makefile", "pyproject.toml", "constraints.txt")]
    assert all_complaints(texts, word_complaints) == []


ORDER = {"engine": ["config.py", "model.py"], "harness": ["driver.py", "cli.py", "plugin.py"], "tracing": []}


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("engine.config", "from firstdiff.engine.model import Model"),
        ("engine.config", "def f():\n    from firstdiff.engine.model import Model"),
        ("engine.model", "import firstdiff.harness.driver"),
        ("engine.model", "from firstdiff import harness"),
        ("engine.model", "from firstdiff.harness.cli import main"),
        ("engine.model", "from .config import EngineConfig"),
        ("engine.model", "from engine.config import EngineConfig"),
        ("engine.model", "from firstdiff.engine.unlisted import x"),
        ("harness.driver", "from firstdiff.harness.cli import main"),
        ("tracing.store", "from firstdiff.engine.config import EngineConfig"),
    ],
)
def test_import_rule_finds(module: str, source: str) -> None:
    assert import_complaints(module, source, ORDER)


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("engine.model", "from firstdiff.engine.config import EngineConfig"),
        ("engine.model", "from firstdiff.tracing import names"),
        ("engine.model", "import torch"),
        ("harness.cli", "from firstdiff.engine.model import Model"),
        ("harness.plugin", "from firstdiff.harness.cli import main"),
    ],
)
def test_import_rule_allows(module: str, source: str) -> None:
    assert import_complaints(module, source, ORDER) == []


def test_the_other_rules_find() -> None:
    body = "    x = 1\n" * MAX_FUNCTION_LINES
    assert size_complaints(f"def long():\n{body}") != []
    assert size_complaints("x = 1\n" * MAX_FILE_LINES) != []
    assert size_complaints("x = 1\n") == []
    assert len(docstring_complaints('"""Owns: x."""')) == len(DOCSTRING_PARTS) - 1
    for source in ("import time", "from time import sleep", "datetime.now()", "loop.time()"):
        assert time_complaints(source) != []
    assert time_complaints("clock.now_ns()") == []
    assert word_complaints("see /" + "home/somebody") != []
