"""Tests marked `model` need a pulled model: they are skipped where it was not, unless it is required.

`@pytest.mark.model` means SmolLM2-135M, `@pytest.mark.model("gemma3-270m")` another one. `make test` fetches
both and sets FIRSTDIFF_REQUIRE_MODEL, so that there a missing model fails.
"""

from __future__ import annotations

import os

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
