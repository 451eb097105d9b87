"""The pytest plugin as its users meet it: each test here runs pytest on a small test file of theirs."""

from __future__ import annotations

import os
import sys
import xml.etree.ElementTree as ElementTree

import pytest

from firstdiff.harness.plugin import Compare, FillRun, StartReplica
from firstdiff.harness.workload import WorkloadSpec
from firstdiff.regression.verdict import CompareConfig
from firstdiff.tracing.records import RequestRow
from firstdiff.tracing.token_log import read_token_log

pytest_plugins = ["pytester"]

SMALL = WorkloadSpec(kind="tokens", prompt_tokens=16, num_cases=6, max_tokens=6)


def run_pytest(pytester: pytest.Pytester, *options: str) -> pytest.RunResult:
    """A pytest process of its own, without the plugins that only this suite needs."""
    return pytester.runpytest_subprocess("-p", "no:cacheprovider", "-p", "no:timeout", "-q", *options)


def test_a_run_against_a_replica_has_the_servers_rows_too(
    firstdiff_replica: StartReplica, firstdiff_run: FillRun
) -> None:
    replica = firstdiff_replica("--model", "tiny-random")
    run = firstdiff_run(replica, workload=SMALL)
    rows = {row.request_id: row for row in run.rows("requests", RequestRow)}
    identities, token_log = read_token_log(run.path / "tokens.jsonl")
    logged = {row.request_id: row for row in token_log}
    assert run.manifest.identity in identities
    assert len(rows) == len(logged) == 6
    assert all(logged[name].token_ids == row.token_ids for name, row in rows.items())
    again = firstdiff_run(replica.url, workload=SMALL, label="again")
    assert again.path != run.path
    assert again.manifest.label == "again"


def test_the_same_arguments_give_the_same_replica(firstdiff_replica: StartReplica) -> None:
    first = firstdiff_replica("--model", "tiny-random")
    assert firstdiff_replica("--model", "tiny-random") is first
    twin = firstdiff_replica("--model", "tiny-random", label="twin")
    assert twin.pid != first.pid
    twin.stop()
    assert firstdiff_replica("--model", "tiny-random", label="twin").is_alive


def test_endpoints_are_compared_in_turns_and_a_fault_fails(
    firstdiff_replica: StartReplica, firstdiff_compare: Compare
) -> None:
    base = firstdiff_replica("--model", "tiny-random", label="base")
    twin = firstdiff_replica("--model", "tiny-random", label="twin")
    shifted = firstdiff_replica(
        "--model", "tiny-random", "--fault", "decode-position-plus-one", label="shifted"
    )
    workload = WorkloadSpec(kind="tokens", prompt_tokens=16, num_cases=24, max_tokens=12)
    # Tokens are judged here: on a busy machine a late client would make the verdict invalid.
    config = CompareConfig(min_client_lag_ns=60 * 10**9)
    verdict = firstdiff_compare(base, shifted, floor=twin, workload=workload, config=config, expect="fail")
    assert any(finding.part == "tokens" and finding.status == "fail" for finding in verdict.findings)


def test_replicas_stop_with_the_session(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
        def test_start(firstdiff_replica):
            for label in ("one", "two"):
                replica = firstdiff_replica("--model", "tiny-random", label=label)
                with open("pids", "a") as file:
                    file.write(f"{replica.pid}\\n")
            assert False, "stopped all the same"
        """
    )
    run_pytest(pytester).assert_outcomes(failed=1)
    pids = [int(line) for line in (pytester.path / "pids").read_text().split()]
    assert len(pids) == 2
    assert [pid for pid in pids if _exists(pid)] == []


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_a_replica_that_does_not_start_fails_with_its_own_words(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
        def test_start(firstdiff_replica):
            firstdiff_replica("--model", "tiny-random", "--fault", "no-such-fault")
        """
    )
    result = run_pytest(pytester)
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        ["*ReplicaError: replica ended with exit code 2 at the start: *no-such-fault*"]
    )


JUDGE = """
    import os
    from firstdiff.harness.workload import WorkloadSpec
    from firstdiff.regression.verdict import CompareConfig

    def test_runs(firstdiff_run, firstdiff_compare):
        spec = WorkloadSpec(kind="tokens", prompt_tokens=16, num_cases=2, max_tokens=4)
        runs = [firstdiff_run(os.environ["URL"], workload=spec, label=label) for label in ("one", "two")]
        # However late a busy machine makes this client: too few requests is what is to be judged.
        firstdiff_compare(*runs, config=CompareConfig(min_client_lag_ns=10**10))
"""


@pytest.mark.parametrize(
    ("option", "outcome"), [("fail", "failed"), ("skip", "skipped"), ("pass", "passed"), (None, "failed")]
)
def test_an_unknown_verdict_is_what_the_option_says(
    firstdiff_replica: StartReplica,
    pytester: pytest.Pytester,
    monkeypatch: pytest.MonkeyPatch,
    option: str | None,
    outcome: str,
) -> None:
    monkeypatch.setenv("URL", firstdiff_replica("--model", "tiny-random").url)
    pytester.makepyfile(JUDGE)
    options = [] if option is None else [f"--firstdiff-unknown={option}"]
    result = run_pytest(pytester, "--firstdiff-runs=kept", "--junit-xml=report.xml", "-rs", *options)
    result.assert_outcomes(**{outcome: 1})
    if outcome != "passed":
        result.stdout.fnmatch_lines(["*expected the verdict pass, got unknown*"])
    assert sorted(path.parent.name for path in pytester.path.glob("kept/test_runs/*/manifest.json")) == [
        "run",
        "run-2",
    ]
    properties = ElementTree.parse(pytester.path / "report.xml").iter("property")
    assert [(item.get("name"), item.get("value")) for item in properties] == [
        ("firstdiff_verdict", "unknown")
    ]


def test_one_run_and_one_endpoint_cannot_be_compared(
    firstdiff_replica: StartReplica, firstdiff_run: FillRun, firstdiff_compare: Compare
) -> None:
    replica = firstdiff_replica("--model", "tiny-random")
    run = firstdiff_run(replica, workload=SMALL)
    with pytest.raises(ValueError, match="expected two Runs or two endpoints"):
        firstdiff_compare(run, replica)
    with pytest.raises(ValueError, match="expected endpoints to run a workload on"):
        firstdiff_compare(run, run, workload=SMALL)


def test_loading_the_plugin_imports_no_room(pytester: pytest.Pytester) -> None:
    code = "import sys, firstdiff.harness.plugin; print(*(m for m in sys.modules if m in {modules!r}))"
    modules = ["firstdiff.engine", "firstdiff.regression", "firstdiff.tracing", "numpy", "aiohttp", "torch"]
    result = pytester.run(sys.executable, "-c", code.replace("{modules!r}", repr(modules)))
    assert result.outlines == [""]
