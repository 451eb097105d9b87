"""All simulations: failures on purpose stay quiet, and nothing is scanned for cycles while one runs."""

from __future__ import annotations

import gc
import logging
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def _failures_on_purpose_stay_quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL, logger="firstdiff.engine.engine")


@pytest.fixture(autouse=True)
def _no_collection_meanwhile() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()
    gc.collect()
