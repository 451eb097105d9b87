"""Tests marked `model` need SmolLM2-135M: they are skipped where it was not fetched, unless it is required.

`make test` fetches it and sets FIRSTDIFF_REQUIRE_MODEL, so that there a missing model fails.
"""

from __future__ import annotations

import os

import pytest

MODEL = "smollm2-135m"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    marked = [item for item in items if item.get_closest_marker("model")]
    if not marked or os.environ.get("FIRSTDIFF_REQUIRE_MODEL"):
        return
    from firstdiff.engine.model_store import resolve

    try:
        resolve(MODEL)
    except ValueError as error:
        for item in marked:
            item.add_marker(pytest.mark.skip(reason=str(error)))
