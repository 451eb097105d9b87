"""`firstdiff compare` of saved Runs: an exit code a verdict, the report on stdout, nothing written."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from synthetic_runs import QUIET, Defect, Workload, make_runs

from firstdiff.harness.cli import main

LABELS = ("base", "candidate", "twin")
DIVERGING = {"candidate": Defect(diverging_fraction=1.0, shift=3.0)}
SLOW = {"candidate": Defect(slower_decode=0.6)}
BROKEN = {label: Defect(failing_fraction=0.5) for label in LABELS}


@pytest.mark.parametrize(
    ("defects", "num_cases", "code", "word"),
    [
        ({}, 32, 0, "PASS"),
        (DIVERGING, 32, 1, "FAIL"),
        (SLOW, 32, 1, "FAIL"),
        ({}, 4, 3, "UNKNOWN"),
        (BROKEN, 32, 4, "INVALID"),
    ],
)
def test_the_exit_code_is_the_verdict(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], defects, num_cases, code, word
) -> None:
    make_runs(tmp_path, Workload(num_cases=num_cases, block_size=2, noise=QUIET), defects, LABELS)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    arguments = ["compare", str(tmp_path / "base"), str(tmp_path / "candidate")]
    with pytest.raises(SystemExit) as end:
        main([*arguments, "--floor", str(tmp_path / "twin")])
    assert end.value.code == code
    printed = capsys.readouterr()
    assert printed.out.startswith(f"{word}: ")
    assert printed.err == ""
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before
