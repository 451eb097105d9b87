"""The demonstration on a small model: the planted defect is found, the twin parts from base nowhere."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from firstdiff.harness.cli import main
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
    as_expected = (twin["status"], candidate["status"]) == ("pass", "fail")
    assert end.value.code == (0 if as_expected else 1)

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
