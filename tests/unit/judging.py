"""Short ways to a Verdict over made-up Runs, for the tests of the judge."""

from __future__ import annotations

from synthetic_runs import QUIET, Workload, make_rows, write_run

from firstdiff.regression.diff import compare

SMALL = Workload(num_cases=32, block_size=2, noise=QUIET)


def rows_of(workload=SMALL, defects=None, labels=("base", "candidate", "twin")):
    return make_rows(workload, list(labels), defects)


def finding_of(verdict, part, status=None):
    found = [one for one in verdict.findings if one.part == part and status in (None, one.status)]
    assert found, (part, status, verdict.findings)
    return found[0]


def verdict_of(tmp_path, candidate_rows, *, base_rows=None, floor_rows=None, candidate=None, config=None):
    made = rows_of()
    base = write_run(tmp_path, "base", base_rows or made["base"][0], made["base"][1])
    other = write_run(tmp_path, "candidate", candidate_rows, (), **(candidate or {}))
    floor = None if floor_rows is None else write_run(tmp_path, "twin", floor_rows)
    return compare(base, other, floor=floor, config=config)
