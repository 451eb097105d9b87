"""The command as a fixture, and what tests need a pulled model.

Tests marked `model` need a pulled model: they are skipped where it was not, unless it is required.

`@pytest.mark.model` means SmolLM2-135M, `@pytest.mark.model("gemma3-270m")` another one. `make test` fetches
both and sets FIRSTDIFF_REQUIRE_MODEL, so that there a missing model fails.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest

MODEL = "smollm2-135m"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    marked = [(item, mark) for item in items for mark in item.iter_markers("model")]
    if not marked or os.environ.get("FIRSTDIFF_REQUIRE_MODEL"):
        return
    reasons = {name: _reason(name) for name in {_name(mark) for _, mark in marked}}
    for item, mark in marked:
        if (reason := reasons[_name(mark)]) is not None:
            item.add_marker(pytest.mark.skip(reason=reason))


def _name(mark: pytest.Mark) -> str:
    return mark.args[0] if mark.args else MODEL


def _reason(name: str) -> str | None:
    from firstdiff.engine.model_store import resolve

    try:
        resolve(name)
    except ValueError as error:
        return str(error)
    return None


@pytest.fixture
def firstdiff(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Run the command in this process: (exit code, standard output, standard error)."""
    from firstdiff.harness.cli import main

    def command(*arguments: object) -> tuple[int, str, str]:
        code = 0
        try:
            main([str(argument) for argument in arguments])
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 0
        printed = capsys.readouterr()
        return code, printed.out, printed.err

    return command
