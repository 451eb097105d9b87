"""Replicas of the bundled engine, served, driven and judged, through the pytest plugin as users have it."""

from __future__ import annotations

import pytest

from firstdiff.engine.faults import FAULTS
from firstdiff.harness.workload import WorkloadSpec
from firstdiff.tracing.records import RequestRow

SERVE = ("--model", "tiny-random")
WORKLOAD = WorkloadSpec(num_cases=40, max_tokens=24, concurrency=4, logprobs=5, ignore_eos=True, repeats=2)
SAMPLED = WorkloadSpec(num_cases=6, max_tokens=16, concurrency=1, temperature=1.0, ignore_eos=True)


def ids_by_case(run) -> dict[str, list[int] | None]:
    return {row.case_id: row.token_ids for row in run.rows("requests", RequestRow)}


def test_a_twin_answers_like_its_base(firstdiff_replica, firstdiff_compare):
    base = firstdiff_replica(*SERVE, label="base")
    twin = firstdiff_replica(*SERVE, label="twin")
    verdict = firstdiff_compare(base, twin, workload=WORKLOAD, expect=None)
    # Steps of a millisecond on a shared machine may leave the latency unknown, never the tokens.
    failed = [finding for finding in verdict.findings if finding.status == "fail"]
    assert not failed
    tokens = [finding for finding in verdict.findings if finding.part == "tokens"]
    assert [finding.status for finding in tokens] == ["pass"]


@pytest.mark.parametrize("fault", sorted(set(FAULTS) - {"slow-decode"}))
def test_a_decode_fault_is_found_and_the_first_wrong_token_named(firstdiff_replica, firstdiff_compare, fault):
    base = firstdiff_replica(*SERVE, label="base")
    candidate = firstdiff_replica(*SERVE, "--fault", fault, label="candidate")
    verdict = firstdiff_compare(base, candidate, workload=WORKLOAD, expect="fail")
    (finding,) = (finding for finding in verdict.findings if finding.part == "tokens")
    assert finding.status == "fail"


def test_a_seeded_server_draws_the_same_seeds_again(firstdiff_replica, firstdiff_run):
    def answers(*args: str, label: str) -> dict[str, list[int] | None]:
        return ids_by_case(firstdiff_run(firstdiff_replica(*SERVE, *args, label=label), workload=SAMPLED))

    first = answers("--seed", "5", label="seed-5")
    assert first == answers("--seed", "5", label="seed-5-again")
    assert first != answers("--seed", "6", label="seed-6")
    unseeded = answers(label="unseeded")
    assert unseeded != answers(label="unseeded-again")
