"""Jaeger's own UI on `firstdiff jaeger`, in a headless Chromium: only where a built UI is named.

FIRSTDIFF_JAEGER_UI names the folder that Jaeger UI's build made (index.html in it). That the browser is
driven and read rightly is shown without one, on a page of five lines that asks the facade itself.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))
from span_samples import FIRST, SECOND, T0, first_trace, second_trace
from test_jaeger_facade import facade, write_spans

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
UI = os.environ.get("FIRSTDIFF_JAEGER_UI")

PAGE = """<!doctype html><title>page</title><p id="out">nothing yet</p><script>
fetch("/api/v3/services").then(answer => answer.json()).then(found => {
  document.getElementById("out").textContent = location.pathname + " " + found.services.join(" ");
});
</script>
"""

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs a Chromium on the PATH")
needs_ui = pytest.mark.skipif(
    UI is None, reason="needs a built Jaeger UI: name its folder in FIRSTDIFF_JAEGER_UI"
)


def shown(url: str, profile: Path) -> str:
    """The page's elements once its scripts have been quiet for a while."""
    assert CHROMIUM is not None
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"]
    flags += [f"--user-data-dir={profile}", "--virtual-time-budget=20000", "--dump-dom"]
    done = subprocess.run([CHROMIUM, *flags, url], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def test_a_page_asks_the_facade(tmp_path):
    ui = tmp_path / "ui"
    ui.mkdir()
    (ui / "index.html").write_text(PAGE)
    with facade(write_spans(tmp_path / "run", first_trace()), ui=ui) as url:
        assert "/search firstdiff firstdiff-client</p>" in shown(f"{url}/search", tmp_path / "profile")


@needs_ui
def test_jaegers_ui_searches_shows_and_compares(tmp_path):
    assert UI is not None
    run = write_spans(tmp_path / "run", first_trace(), second_trace())
    around = f"start={T0 // 1000 - 10**9}&end={T0 // 1000 + 10**10}&limit=20&lookback=custom"
    with facade(run, ui=Path(UI)) as url:
        found = shown(f"{url}/search?service=firstdiff&{around}", tmp_path / "profile")
        assert "POST /v1/chat/completions" in found or "firstdiff-client: chat m" in found
        trace = shown(f"{url}/trace/{FIRST}", tmp_path / "profile")
        assert all(name in trace for name in ("POST /v1/chat/completions", "prefill", "queue"))
        both = shown(f"{url}/trace/{FIRST}...{SECOND}", tmp_path / "profile")
        assert FIRST[:7] in both
        assert SECOND[:7] in both
