"""Replicas of the bundled engine, served, driven and judged, through the pytest plugin as users have it."""

from __future__ import annotations

from pathlib import Path

import pytest

from firstdiff.engine.faults import FAULTS
from firstdiff.harness.workload import WorkloadSpec
from firstdiff.regression.verdict import CompareConfig, SideSummary, TokenEvidence
from firstdiff.tracing.records import Identity, RequestRow, StepRow
from firstdiff.tracing.store import Run

SERVE = ("--model", "tiny-random")
WORKLOAD = WorkloadSpec(num_cases=40, max_tokens=24, concurrency=4, logprobs=5, ignore_eos=True, repeats=2)
SAMPLED = WorkloadSpec(num_cases=6, max_tokens=16, concurrency=1, temperature=1.0, ignore_eos=True)


# What is tested here is tokens: a client that a busy machine made late spoils only times.
PATIENT = CompareConfig(min_client_lag_ns=10**10)


def run_of(side: SideSummary, folder: Path) -> Run:
    (run,) = (
        run
        for file in folder.rglob("manifest.json")
        if (run := Run.open(file.parent)).manifest.run_id == side.run_id
    )
    return run


def ids_by_case(run) -> dict[str, list[int] | None]:
    return {row.case_id: row.token_ids for row in run.rows("requests", RequestRow)}


def test_a_twin_answers_like_its_base(firstdiff_replica, firstdiff_compare):
    base = firstdiff_replica(*SERVE, label="base")
    twin = firstdiff_replica(*SERVE, label="twin")
    verdict = firstdiff_compare(base, twin, workload=WORKLOAD, config=PATIENT, expect=None)
    # Steps of a millisecond on a shared machine may leave the latency unknown, never the tokens.
    failed = [finding for finding in verdict.findings if finding.status == "fail"]
    assert not failed
    tokens = [finding for finding in verdict.findings if finding.part == "tokens"]
    assert [finding.status for finding in tokens] == ["pass"]


@pytest.mark.parametrize("fault", sorted(set(FAULTS) - {"slow-decode"}))
def test_a_decode_fault_is_found_and_the_first_wrong_token_named(
    firstdiff_replica, firstdiff_compare, tmp_path, fault
):
    base = firstdiff_replica(*SERVE, label="base")
    candidate = firstdiff_replica(*SERVE, "--fault", fault, label="candidate")
    verdict = firstdiff_compare(base, candidate, workload=WORKLOAD, config=PATIENT, expect="fail")
    (finding,) = (finding for finding in verdict.findings if finding.part == "tokens")
    assert finding.status == "fail"
    (evidence,) = (one for one in finding.evidence if isinstance(one, TokenEvidence))
    first = evidence.first
    assert first is not None
    answers = [
        {(row.case_id, row.repeat_index): row for row in run.rows("requests", RequestRow)}
        for run in (run_of(verdict.base, tmp_path), run_of(verdict.candidate, tmp_path))
    ]
    one, other = (side[first.case_id, first.repeat_index] for side in answers)
    assert one.token_ids[: first.position] == other.token_ids[: first.position]
    assert (one.token_ids[first.position], other.token_ids[first.position]) == (
        first.base_token_id,
        first.candidate_token_id,
    )
    assert first.base_token_id != first.candidate_token_id
    assert (first.base_text, first.candidate_text) == (
        one.token_texts[first.position],
        other.token_texts[first.position],
    )
    # Greedy: base likes its own token better, by the difference of the log-probabilities it listed.
    listed = dict(one.top_logprobs[first.position])
    if not first.base_gap_at_least:
        expected = one.logprobs[first.position] - listed[first.candidate_text]
        assert first.base_gap == pytest.approx(expected)
    assert first.base_gap >= 0


def test_a_seeded_server_draws_the_same_seeds_again(firstdiff_replica, firstdiff_run):
    def answers(*args: str, label: str) -> dict[str, list[int] | None]:
        return ids_by_case(firstdiff_run(firstdiff_replica(*SERVE, *args, label=label), workload=SAMPLED))

    first = answers("--seed", "5", label="seed-5")
    assert first == answers("--seed", "5", label="seed-5-again")
    assert first != answers("--seed", "6", label="seed-6")
    unseeded = answers(label="unseeded")
    assert unseeded != answers(label="unseeded-again")


def test_every_flag_of_serve_reaches_the_engine(firstdiff_replica, firstdiff_run):
    """One server with every engine flag off its default: by its own account, and by what it does."""
    settings = {
        "threads": 2,
        "dtype": "bf16",
        "block_size": 8,
        "num_blocks": 50,
        "max_num_seqs": 3,
        "max_num_batched_tokens": 24,
        "max_num_waiting": 5,
        "max_model_len": 200,
        "scheduling_policy": "priority",
        "logprobs_mode": "processed_logprobs",
    }
    flags = [part for name, value in settings.items() for part in (f"--{name.replace('_', '-')}", str(value))]
    flags += ["--no-enable-prefix-caching", "--no-deterministic"]
    replica = firstdiff_replica(*SERVE, *flags, label="flags")
    workload = WorkloadSpec(
        kind="tokens", prompt_tokens=60, num_cases=8, max_tokens=12, concurrency=6, ignore_eos=True, repeats=2
    )
    run = firstdiff_run(replica, workload=workload)

    identity = run.manifest.identity
    assert isinstance(identity, Identity)
    assert (
        identity.engine_config.items()
        >= (settings | {"enable_prefix_caching": False, "deterministic": False}).items()
    )
    assert (identity.dtype, identity.max_model_len) == ("bf16", 200)
    default = firstdiff_run(firstdiff_replica(*SERVE, label="default"), workload=workload).manifest.identity
    same = {
        name
        for name, value in identity.engine_config.items()
        if default is not None and default.engine_config[name] == value
    }
    # The backend follows from --no-deterministic.
    assert same == {"model"}

    steps = list(run.rows("steps", StepRow))
    assert max(step.batch_size for step in steps) == 3
    assert max(step.num_prefill_tokens + step.num_decode_tokens for step in steps) == 24
    assert {step.num_blocks for step in steps} == {50}
    # Every case is asked twice, so a prefix cache would have had hits.
    assert sum(step.num_prefix_hit_tokens for step in steps) == 0
    assert {row.error for row in run.rows("requests", RequestRow)} == {None}
