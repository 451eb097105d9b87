"""The demonstration on a small model: the planted defect is found, the twin parts from base nowhere."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

from firstdiff.harness.cli import demo_outcome, main
from firstdiff.tracing.records import RequestRow
from firstdiff.tracing.store import Run
from firstdiff.tracing.token_log import read_token_log


def test_the_demo_finds_the_planted_defect(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["demo", "--out", str(tmp_path), "--model", "tiny-random"]
    with pytest.raises(SystemExit) as end:
        main([*arguments, "--cases", "24", "--max-tokens", "16"])
    [folder] = tmp_path.iterdir()
    printed = capsys.readouterr()
    assert "Base against its twin" in printed.out
    assert "starting three replicas of tiny-random" in printed.err

    twin, candidate = (
        json.loads((folder / label / "verdict.json").read_bytes()) for label in ("twin", "candidate")
    )
    parts = [
        {finding["part"]: finding["status"] for finding in verdict["findings"]}
        for verdict in (twin, candidate)
    ]
    assert [part["tokens"] for part in parts] == ["pass", "fail"]
    # Speed is the machine's business: a busy one may leave it unsettled, or this client late.
    assert candidate["status"] in ("fail", "invalid")
    code, line = demo_outcome(twin["status"], candidate["status"])
    assert end.value.code == code
    assert printed.out.splitlines()[-1] == line

    report = (folder / "report.md").read_text()
    assert report.index("twin: expected to pass") < report.index("candidate: expected to fail")
    identities = []
    for label in ("base", "twin", "candidate"):
        run = Run.open(folder / label)
        assert run.manifest.complete
        assert run.manifest.identity is not None
        identities.append(run.manifest.identity)
        rows = list(run.rows("requests", RequestRow))
        assert len(rows) == len(read_token_log(run.path)[1]) == 24
        assert {row.outcome for row in rows} == {"ok"}
    assert [identity.faults for identity in identities] == [
        [],
        [],
        ["decode-position-plus-one", "slow-decode"],
    ]
    assert len({identity.instance_id for identity in identities}) == 3


@pytest.mark.parametrize(
    ("twin", "candidate", "code", "line"),
    [
        ("pass", "fail", 0, "demo: as expected: the twin passes, the candidate fails"),
        ("fail", "fail", 1, "demo: not as expected: the twin's verdict is fail "),
        ("pass", "pass", 1, "demo: not as expected: the candidate's verdict is pass "),
        ("invalid", "pass", 1, "demo: not as expected: the twin's verdict is invalid, the candidate's"),
        ("fail", "invalid", 1, "demo: not as expected: the twin's verdict is fail, the candidate's"),
        ("unknown", "fail", 3, "demo: not as expected: the twin's verdict is unknown "),
        ("pass", "unknown", 3, "demo: not as expected: the candidate's verdict is unknown "),
        ("unknown", "invalid", 4, "demo: not as expected: the twin's verdict is unknown, the candidate's"),
        ("invalid", "fail", 4, "demo: not as expected: the twin's verdict is invalid "),
    ],
)
def test_the_outcome_follows_from_both_verdicts(twin: str, candidate: str, code: int, line: str) -> None:
    found_code, found_line = demo_outcome(twin, candidate)
    assert (found_code, found_line[: len(line)]) == (code, line)


def test_without_the_engine_nothing_is_started(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "torch" else find_spec(name)
    )
    with pytest.raises(SystemExit) as end:
        main(["demo", "--out", str(tmp_path / "d"), "--model", "tiny-random"])
    assert end.value.code == 2
    printed = capsys.readouterr()
    assert printed.err == (
        "firstdiff: expected the module torch, which is not installed: pip install 'firstdiff[engine]'\n"
    )
    assert not (tmp_path / "d").exists()
